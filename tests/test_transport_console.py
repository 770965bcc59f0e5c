"""Bytes split anywhere give the same messages and lines; output is grouped and prefixed by rank."""

import io
import os
import pickle
import struct
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ddp_tutorial.processes import console
from ddp_tutorial.processes.console import (
    KEPT_LINES,
    LONGEST_LINE,
    Console,
    NotebookConsole,
    RankLog,
    TerminalConsole,
    describe,
    in_notebook,
    make_console,
)
from ddp_tutorial.processes.transport import Sender, dump_call, dump_result, name_of, take_messages


def split(data, cuts):
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


cuts = st.lists(st.integers(min_value=0, max_value=10_000), max_size=20)
contents = st.tuples(st.text(max_size=5)) | st.tuples(st.just("result"), st.binary(max_size=300), st.integers())


# --- messages ---------------------------------------------------------------------------------------------------


def framed(messages):
    bodies = [pickle.dumps(message) for message in messages]
    return b"".join(struct.pack("!Q", len(body)) + body for body in bodies)


@given(st.lists(contents, max_size=6), cuts)
@example([("a",), ("b",)], list(range(60)))  # byte by byte
def test_a_stream_split_anywhere_gives_the_same_messages(messages, cuts):
    inbox, taken = bytearray(), []
    for piece in split(framed(messages), cuts):
        inbox += piece
        taken += take_messages(inbox)
    assert taken == messages
    assert inbox == b""


@given(contents, st.integers(min_value=1, max_value=10_000))
def test_an_incomplete_message_is_kept(message, missing):
    data = framed([message])
    inbox = bytearray(data[: -min(missing, len(data))])
    before = bytes(inbox)
    assert list(take_messages(inbox)) == []
    assert inbox == before


def test_messages_of_several_threads_arrive_complete():
    """This includes messages that are larger than the pipe, which are written in many pieces."""
    reading, writing = os.pipe()
    send = Sender(writing)
    bodies = {number: bytes([number]) * 300_000 for number in range(4)}
    threads = [threading.Thread(target=send, args=(number, body)) for number, body in bodies.items()]
    for thread in threads:
        thread.start()
    inbox, taken = bytearray(), []
    while len(taken) < len(bodies):
        inbox += os.read(reading, 1 << 16)
        taken += take_messages(inbox)
    for thread in threads:
        thread.join()
    os.close(reading)
    os.close(writing)
    assert dict(taken) == bodies


def test_calls_and_results_are_pickled_by_value():
    offset = 3

    def add(world, number):
        return world + number + offset

    fn, args = pickle.loads(dump_call(add, (4,)))
    assert fn is not add
    assert fn(10, *args) == 17
    assert pickle.loads(dump_result({"a": [1, 2]})) == {"a": [1, 2]}


def test_an_unpicklable_object_is_named_as_in_the_source():
    lock = threading.Lock()

    def train(world, first, *rest):
        pass

    with pytest.raises(TypeError, match=r"^argument 'first' of .*train\(\)\['x'\]\[0\] \(lock\) cannot be sent"):
        dump_call(train, ({"x": (lock, 1)},))
    with pytest.raises(TypeError, match=r"^argument 3 of .*train\(\) \(lock\)"):
        dump_call(train, (1, 2, lock))
    with pytest.raises(TypeError, match=r"^result\[1\]\['k'\] \(lock\) cannot be sent back .*Return plain data"):
        dump_result([0, {"k": lock}])
    with pytest.raises(TypeError, match=r"^result \(generator\) cannot be sent back"):
        dump_result(n for n in range(3))


def test_an_argument_is_never_given_the_name_of_a_keyword():
    def train(world, *things, scale=1):
        pass

    with pytest.raises(TypeError, match=r"^argument ('things'|2) of .*train\(\) \(lock\)"):
        dump_call(train, (1, threading.Lock()))


def test_names_of_functions_read_as_in_the_source():
    def inner():
        pass

    assert name_of(inner) == "test_names_of_functions_read_as_in_the_source.inner()"
    assert name_of(print) == "print()"


# --- lines ------------------------------------------------------------------------------------------------------


def fed(pieces):
    shown = []
    log = RankLog(3, lambda rank, line: shown.append((rank, line)))
    for piece in pieces:
        log.feed(piece)
    log.feed(b"", final=True)
    assert shown == [(3, line) for line in log.lines]  # the kept lines are the displayed lines
    return list(log.lines)


@given(st.text(alphabet=st.sampled_from("ab\n\r é☃😀")), cuts)
@example("é\r\n☃\r😀\n", list(range(20)))  # byte by byte
def test_text_split_anywhere_gives_the_same_lines(text, cuts):
    data = text.encode()
    expected = text.split("\n")
    if expected[-1] == "":
        expected.pop()  # the end of the last line, not an empty one after it
    # a redrawn line shows its last state
    expected = [line.removesuffix("\r").split("\r")[-1] for line in expected]
    assert fed(split(data, cuts)) == fed([data]) == expected


@given(st.text(alphabet=st.sampled_from("abcd\n\r é")), cuts)
def test_text_split_anywhere_gives_the_same_pieces_of_long_lines(text, cuts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "LONGEST_LINE", 3)
        data = text.encode()
        assert fed(split(data, cuts)) == fed([data])
        assert max(map(len, fed([data])), default=0) <= 3


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"one\n\nthree\n", ["one", "", "three"]),
        (b"one\nno end", ["one", "no end"]),
        (b"windows\r\n", ["windows"]),
        (b"\r 10%\r 20%\r100%\nnext", ["100%", "next"]),
        (b"\r 10%\r 20%", [" 20%"]),
        (b"broken \xff\xc3", ["broken ��"]),
    ],
)
def test_lines_of_special_bytes(data, lines):
    assert fed([data]) == fed(split(data, range(len(data)))) == lines


def test_an_unfinished_line_is_shown_when_it_or_the_rank_ends():
    log = RankLog(0, lambda rank, line: None)
    log.feed(b"half")
    assert list(log.lines) == []
    log.feed(b" and half\nrest")
    assert list(log.lines) == ["half and half"]
    log.feed(b"", final=True)
    log.feed(b"", final=True)
    assert list(log.lines) == ["half and half", "rest"]


def test_endless_output_keeps_the_last_lines_and_counts_the_rest():
    log = RankLog(0, lambda rank, line: None)
    log.feed(b"".join(b"%d\n" % number for number in range(KEPT_LINES)))
    assert (len(log.lines), log.dropped) == (KEPT_LINES, 0)
    log.feed(b"x\ny\nz\n")
    assert (len(log.lines), log.dropped) == (KEPT_LINES, 3)
    assert list(log.lines)[0] == "3"
    assert log.tail(3) == "x\ny\nz"
    assert len(log.tail().split("\n")) == 20


# Were all its states since the last newline kept, and copied at each update, this would take ten seconds.
def test_redrawing_a_bar_for_a_long_time_is_cheap():
    log = RankLog(0, lambda rank, line: None)
    start = time.process_time()  # CPU time of the process, because the machine may be busy
    for step in range(20_000):
        log.feed(f"\r{step:6} {'=' * 80}".encode())
    log.feed(b"", final=True)
    assert time.process_time() - start < 4.0
    assert list(log.lines) == [f" 19999 {'=' * 80}"]


def test_output_without_newlines_is_shown_in_pieces_at_linear_cost():
    """Keeping and copying all pieces would take ten seconds and much memory for 32 MB."""
    pieces = []
    log = RankLog(0, lambda rank, line: pieces.append(line))
    start = time.process_time()
    for _ in range(512):
        log.feed(b"x" * (1 << 16))
    assert time.process_time() - start < 4.0
    assert sum(map(len, pieces)) > 31 << 20, "shown as it comes"
    log.feed(b"the end", final=True)
    assert {len(piece) for piece in pieces[:-1]} == {LONGEST_LINE}
    assert "".join(pieces) == "x" * (32 << 20) + "the end"


# --- consoles ---------------------------------------------------------------------------------------------------


def test_a_terminal_prefixes_lines_with_their_rank_immediately():
    out = io.StringIO()
    terminal = TerminalConsole(out)
    terminal.message("2 ranks on cpu, gloo")
    terminal.line(1, "one")
    assert out.getvalue() == "2 ranks on cpu, gloo\n[rank 1] one\n"
    terminal.line(0, "zero")
    terminal.close([])
    assert out.getvalue() == "2 ranks on cpu, gloo\n[rank 1] one\n[rank 0] zero\n"


def test_characters_that_the_output_cannot_encode_do_not_stop_a_launch():
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="\n")
    TerminalConsole(out).line(0, "Zürich")
    assert out.buffer.getvalue() == b"[rank 0] Z?rich\n"


@pytest.mark.usefixtures("clock")
def test_a_redirected_terminal_gets_all_lines_without_a_bar(capsys):
    terminal = TerminalConsole()
    terminal.progress(1, 10, {"loss": 2.0})
    terminal.line(0, "beside the bar")
    terminal.progress(10, 10, {"loss": 1.0})
    terminal.close([])
    assert capsys.readouterr() == ("[rank 0] beside the bar\n", "")


@pytest.fixture
def clock(monkeypatch):
    """The clock of the consoles, which the test sets: a real one advances while this process is suspended."""
    set_by_test = SimpleNamespace(now=100.0)
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: set_by_test.now))
    return set_by_test


def test_a_redirected_terminal_gets_lines_of_progress_at_intervals(capsys, clock):
    terminal = TerminalConsole()
    clock.now += 0.9 * console.PROGRESS_SECONDS
    terminal.progress(1, 10, {"loss": 2.0})
    clock.now += 0.2 * console.PROGRESS_SECONDS
    terminal.progress(2, 10, {"loss": 1.5, "tokens_per_second": 1234.5})
    terminal.progress(3, 10, {"loss": 1.0})
    terminal.close([])
    assert capsys.readouterr() == ("", "step 2/10: loss 1.5, 1,234 tokens/s\n")


def test_a_notebook_shows_lines_at_the_end_grouped_by_rank(capsys):
    notebook = NotebookConsole()
    notebook.message("2 ranks on cpu, gloo")
    logs = [RankLog(rank, notebook.line) for rank in range(2)]
    logs[1].feed(b"b1\n")
    logs[0].feed(b"a1\n")
    logs[1].feed(b"b2\n")
    logs[0].feed(b"a2\n")
    assert capsys.readouterr().out == ""
    notebook.close(logs)
    assert capsys.readouterr().out.splitlines() == [
        "2 ranks on cpu, gloo",
        "[rank 0] a1",
        "[rank 0] a2",
        "[rank 1] b1",
        "[rank 1] b2",
    ]


class Area:
    """A display that records its updates as (text, HTML)."""

    def __init__(self):
        self.updates = []

    def update(self, bundle, *, raw, metadata):
        assert raw
        assert metadata == console.PROGRESS
        self.updates.append((bundle["text/plain"], bundle["text/html"]))


@pytest.fixture
def area(monkeypatch, clock):
    shown = Area()
    monkeypatch.setattr("IPython.display.display", lambda bundle, **options: shown)
    monkeypatch.setattr(console, "LIVE_SECONDS", 0.0)
    monkeypatch.setattr(console, "REFRESH_SECONDS", 0.0)
    return shown


def test_a_person_sees_a_live_area_until_the_ranks_have_exited(area, monkeypatch, capsys):
    monkeypatch.setattr(console, "a_person_is_there", lambda: True)
    notebook = NotebookConsole()
    notebook.status("starting 2 ranks")
    assert area.updates[-1][0] == "starting 2 ranks, 0 s"
    notebook.status("running")
    log = RankLog(1, notebook.line)
    log.feed(b"1\n2\n3\n<4>\n")
    assert area.updates[-1][0] == "running, 0 s\n[rank 1] 2\n[rank 1] 3\n[rank 1] <4>"
    assert "[rank 1] &lt;4&gt;" in area.updates[-1][1]
    notebook.progress(1, 10, {"loss": 2.0})
    assert area.updates[-1][0].startswith("1/10  loss 2\nrunning, 0 s\n")
    assert capsys.readouterr().out == ""
    notebook.close([log])
    assert area.updates[-1][0] == "1/10  loss 2"
    assert capsys.readouterr().out.splitlines()[-1] == "[rank 1] <4>"
    drawn = len(area.updates)
    notebook.tick()
    assert len(area.updates) == drawn


def test_a_program_sees_no_live_area_but_the_progress_bar(area):
    notebook = NotebookConsole()
    notebook.status("starting 2 ranks")
    notebook.line(0, "a line")
    notebook.tick()
    assert area.updates == []
    notebook.progress(1, 10, {"loss": 2.0})
    notebook.close([])
    assert [text for text, _ in area.updates] == ["1/10  loss 2"]


def test_a_notebook_reports_the_number_of_dropped_lines(capsys, monkeypatch):
    monkeypatch.setattr(console, "KEPT_LINES", 2)
    log = RankLog(1, lambda rank, line: None)
    log.feed(b"1\n2\n3\n4\n5\n")
    NotebookConsole().close([log])
    assert capsys.readouterr().out.splitlines() == [
        "[rank 1] (3 earlier lines dropped)",
        "[rank 1] 4",
        "[rank 1] 5",
    ]


def test_a_notebook_of_silent_ranks_shows_nothing(capsys):
    NotebookConsole().close([RankLog(0, lambda rank, line: None)])
    assert capsys.readouterr() == ("", "")


def test_without_echo_the_console_is_silent(capsys):
    silent = make_console(echo=False)
    assert type(silent) is Console
    silent.message("a")
    silent.line(0, "b")
    silent.progress(1, 2, {})
    silent.close([])
    assert capsys.readouterr() == ("", "")


def test_outside_a_kernel_the_console_is_the_terminal_console():
    assert not in_notebook()
    assert type(make_console(echo=True)) is TerminalConsole


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ({}, ""),
        ({"loss": 2.1234}, "loss 2.123"),
        ({"loss": 2.1234, "tokens_per_second": 31234.5}, "loss 2.123, 31,234 tokens/s"),
        ({"tokens_per_second": 999.6, "grad_norm": 0.000012345}, "grad norm 1.234e-05, 1,000 tokens/s"),
        ({"step": 7, "loss": None, "lr": 0.5}, "step 7, lr 0.5"),
        ({"loss": float("nan")}, "loss nan"),
        ({"loss": 0.0}, "loss 0"),
    ],
)
def test_numbers_are_formatted_beside_the_bar(numbers, text):
    before = dict(numbers)
    assert describe(numbers) == text
    assert list(numbers) == list(before)  # the caller's object is unchanged


def test_only_the_elements_of_a_view_are_sent() -> None:
    sent = dump_result(torch.arange(1_000_000)[3:5])
    assert len(sent) < 10_000
    assert torch.equal(pickle.loads(sent), torch.tensor([3, 4]))


def test_sparse_tensors_and_tensors_without_data_are_sent() -> None:
    sent = pickle.loads(dump_result(torch.eye(3).to_sparse()))
    assert sent.is_sparse
    assert torch.equal(sent.to_dense(), torch.eye(3))
    empty = pickle.loads(dump_result(torch.empty(2, 3, device="meta")))
    assert (empty.device.type, empty.shape) == ("meta", (2, 3))
