"""Every observer sees the end of every phase that it saw start, whatever happens inside."""

import json
import threading
import time

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ddp_tutorial import phases
from ddp_tutorial.phases import PhaseEvent, Stopwatch, observe, phase


class Recorder:
    def __init__(self):
        self.edges = []

    def __call__(self, edge):
        self.edges.append(edge)

    @property
    def story(self):
        return [("+" if edge.entered else "-") + edge.name for edge in self.edges]


@pytest.fixture(autouse=True)
def _no_observer_stays():
    yield
    assert phases._observers == ()


def test_phases_nest_and_their_times_are_monotonic():
    with observe(Recorder()) as seen, phase("step"):
        with phase("data"):
            pass
        with phase("grads"), phase("sync"):
            pass
    assert seen.story == ["+step", "+data", "-data", "+grads", "+sync", "-sync", "-grads", "-step"]
    times = [edge.time for edge in seen.edges]
    assert times == sorted(times)


def test_an_exception_propagates_and_observers_see_the_end():
    with observe(Recorder()) as seen, pytest.raises(KeyError, match="inside"), phase("step"), phase("data"):
        raise KeyError("inside")
    assert seen.story == ["+step", "+data", "-data", "-step"]


def test_an_observer_sees_nothing_outside_its_block():
    recorder = Recorder()
    with phase("before"):
        pass
    with observe(recorder) as same, phase("inside"):
        assert same is recorder
    with phase("after"):
        pass
    with pytest.raises(ValueError, match="on purpose"), observe(recorder), phase("again"):
        raise ValueError("on purpose")
    with phase("after"):
        pass
    assert recorder.story == ["+inside", "-inside", "+again", "-again"]


def test_several_observers_see_the_same_events_independently():
    first, second = Recorder(), Recorder()
    with observe(first), phase("a"):
        with observe(second), phase("b"):
            pass
        with phase("c"):
            pass
    assert first.story == ["+a", "+b", "-b", "+c", "-c", "-a"]
    assert second.edges == first.edges[1:3]


def test_an_observer_that_raises_on_entry_prevents_the_phase():
    """Faults are injected in this way."""

    def fault(edge):
        if edge.entered and edge.name == "update":
            raise RuntimeError("injected")

    ran = []
    with observe(Recorder()) as before, observe(fault), observe(Recorder()) as after:
        with phase("data"):
            ran.append("data")
        with pytest.raises(RuntimeError, match="injected"), phase("update"):
            ran.append("update")
        with phase("data"):  # phases still work
            ran.append("data")
    assert ran == ["data", "data"]
    assert before.story == ["+data", "-data", "+update", "+data", "-data"]
    assert after.story == ["+data", "-data", "+data", "-data"]


def test_an_observer_may_be_added_or_removed_during_a_phase():
    stop = threading.Event()
    failures = []

    def work():
        try:
            while not stop.is_set():
                with phase("other thread"):
                    pass
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(200):
        with observe(Recorder()):
            pass
    stop.set()
    thread.join()
    assert failures == []


def edge(text, time):
    return PhaseEvent(text[1:], text[0] == "+", time)


def test_a_stopwatch_sums_the_seconds_of_each_phase_and_restarts():
    watch = Stopwatch()
    for each in [
        edge("-data", 1.0),  # started before the observer was added
        edge("+step", 10.0),
        edge("+data", 10.0),
        edge("-data", 10.5),
        edge("+data", 11.0),
        edge("-data", 13.25),
    ]:
        watch(each)
    assert watch.take() == {"data": 2.75}
    assert watch.take() == {}
    watch(edge("-step", 14.0))  # was open across the two calls; an inner phase counts in both
    assert watch.take() == {"step": 4.0}


def test_a_stopwatch_sums_a_phase_that_overlaps_in_several_threads():
    """Thread n is in the phase from n to n + 10 + n, so all threads overlap."""
    watch, everyone_is_in, count = Stopwatch(), threading.Barrier(5), 5

    def work(number):
        watch(edge("+sync", float(number)))
        everyone_is_in.wait(30)
        watch(edge("-sync", 10.0 + 2 * number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert watch.take() == {"sync": sum(10.0 + number for number in range(count))}


def test_a_stopwatch_measures_the_real_clock():
    with observe(Stopwatch()) as watch:
        before = time.monotonic()
        with phase("wait"):
            began = time.monotonic()
            time.sleep(0.05)
            slept = time.monotonic() - began
        whole = time.monotonic() - before
    seconds = watch.take()
    assert list(seconds) == ["wait"]
    assert 0.05 <= slept <= seconds["wait"] <= whole


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")  # about the profiler's own state; not about the trace
@pytest.mark.filterwarnings("ignore::FutureWarning:torch.*")
def test_a_phase_appears_in_a_profiler_trace_only_while_recording(tmp_path):
    with phase("before"):
        pass
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with phase("grads"):
            torch.ones(4) + 1
        with pytest.raises(KeyError), phase("fails"):
            raise KeyError
        begun = phase("cut")
        begun.__enter__()
    begun.__exit__(None, None, None)  # the recording ended inside the phase, without an error
    trace = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(trace))
    marks = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if "dur" in event]
    assert marks.count("grads") == 1
    assert marks.count("fails") == 1
    assert "before" not in marks


class FakeEvent:
    """A CUDA event whose time is its position, in milliseconds."""

    turn = 0.0

    def __init__(self, device: torch.device) -> None:
        assert device == torch.device("cuda", 1)
        FakeEvent.turn += 250.0
        self.at, self.awaited = FakeEvent.turn, False

    def synchronize(self) -> None:
        self.awaited = True

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert end.awaited, "its time is not known yet"
        return end.at - self.at


def test_gpu_phases_are_measured_by_events_in_the_queue(monkeypatch):
    monkeypatch.setattr(phases, "_gpu_event", FakeEvent)
    with observe(Stopwatch(torch.device("cuda", 1))) as watch:
        with phase("grads"), phase("sync"):
            pass
        with phase("grads"):
            pass
        assert watch.take() == {"sync": 0.25, "grads": 0.75 + 0.25}
        assert watch.take() == {}
