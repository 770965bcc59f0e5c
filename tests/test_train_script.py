"""The check of `train_script`: its verdicts on a script's runs, and torchrun leaves no process behind.

Most runs are simulated: a fake run prints the lines and writes the checkpoint of a mistake. `test_exercises` runs the
solution under torchrun, and the wrong answers on forked ranks.
"""

import ast
import json
import multiprocessing
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import types
from datetime import timedelta
from functools import partial
from itertools import chain, count, product
from pathlib import Path
from unittest import mock

import nbformat
import psutil
import pyarrow.parquet
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import slurm
from ddp_tutorial import launch
from ddp_tutorial.exercises import WrongAnswerError, plain_torch, torchrun, words
from ddp_tutorial.exercises.plain_torch import train_script
from ddp_tutorial.exercises.torchrun import Torchrun
from ddp_tutorial.exercises.words import Line
from ddp_tutorial.experiments.notebooks import NOTEBOOKS
from ddp_tutorial.lessons import restarts
from ddp_tutorial.lessons import train_script as course
from ranks import wait_until

SAVED, STOP = 17, 37  # steps, of the checkpoint that the kill leaves and of the end


class Played:
    """A replacement of `Torchrun` for a simulated run, which printed `lines` and exited with `code`."""

    def __init__(self, lines, code, checkpoint):
        self.lines, self.code, self.checkpoint, self.killed = lines, code, checkpoint, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait(self, enough=lambda printed: False):
        return None if enough(self.printed()) else self.code

    def printed(self):
        return "".join(f"step {step}: loss {loss:.4f} over {letters} letters\n" for step, loss, letters in self.lines)

    def kill(self, rank):
        self.killed.append(rank)

    def error(self):
        return "ValueError: as it was said."


def state(steps, **more):
    return {
        "step": steps,
        "model": {name: weight.clone() for name, weight in words.course(steps).weights.items()},
    } | more


def play(monkeypatch, lines=lambda lines, run: lines, code=lambda run: 0, state=lambda saved, run: saved, **options):
    """Run the check on four simulated runs: "first", "resumed", "two" and "one".

    The arguments change lines, exit codes and checkpoints. Return the verdict.
    """
    numbers = count()

    def played(script, nprocs, folder, name, steps):
        run = name if name != "killed" else ("first", "resumed")[next(numbers)]
        begin, end = {"first": (0, 21), "resumed": (SAVED, STOP)}.get(run, (0, STOP))
        assert (steps, nprocs) == (plain_torch._FOREVER if run == "first" else STOP, 1 if run == "one" else 2)
        saved = SAVED if run == "first" else STOP
        content = state(globals()["state"](saved), run)
        path = folder / f"{name}.pt"
        if content is not None:
            torch.save(content, path if options.get("in_place") else folder / "part")
            if not options.get("in_place"):
                (folder / "part").replace(path)
        return Played(lines(words.course(end).lines[begin:], run), code(run), path)

    monkeypatch.setattr(plain_torch, "_torchrun", played)
    return train_script.verdict(train_script.solution)


def only(of, change):
    """Return a function that applies `change` in the run of that name."""
    return lambda value, run: change(value) if run == of else value


def renumbered(lines, begin):
    return [line._replace(step=step) for step, line in enumerate(lines, start=begin)]


def order_of(epoch, taken):
    """Return the lines of a resumed run in this order. Losses do not matter if the letters are wrong."""
    made = words.course((epoch + 3) * words.STEPS_AN_EPOCH).lines[epoch * words.STEPS_AN_EPOCH + taken :]
    return renumbered(made[: STOP - SAVED], SAVED + 1)


def moved(saved):
    return saved | {"model": {name: weight + 1e-6 for name, weight in saved["model"].items()}}


MISTAKES = {
    "begins anew": (
        {"lines": only("resumed", lambda _: words.course(STOP).lines)},
        "saved after step 17, and the resumed run continues with step 1: it starts over",
    ),
    "takes a step again": ({"lines": only("resumed", lambda lines: renumbered(lines, SAVED))}, "The next step is 18"),
    "leaves a step out": ({"lines": only("resumed", lambda lines: lines[1:])}, "with step 19. The next step is 18"),
    "begins the epoch anew": ({"lines": only("resumed", lambda _: order_of(1, 0))}, "the first words of epoch 1"),
    "goes on in epoch 0": ({"lines": only("resumed", lambda _: order_of(0, 4))}, "continues with the order of epoch 0"),
    "begins epoch 0 again": ({"lines": only("resumed", lambda _: order_of(0, 0))}, "the first words of epoch 0"),
    "does not load the weights": (
        {"lines": only("resumed", lambda lines: [line._replace(loss=line.loss + 0.5) for line in lines])},
        "continues with different weights. The loss of step 18 must be",
    ),
    "does not load the momentum": (
        {"lines": only("resumed", lambda lines: [lines[0], *(line._replace(loss=2) for line in lines[1:])])},
        "SGD's momentum is state, too",
    ),
    "ends too early": ({"lines": only("two", lambda lines: lines[:-1])}, "must end after step 37, got 36 steps"),
    "goes too far": (
        {"lines": only("two", lambda lines: [*lines, words.course(STOP + 1).lines[-1]])},
        "must end after step 37, got 38 steps",
    ),
    "fails after its last step": (
        {"code": lambda run: int(run != "first")},
        "took all 37 steps, and then torchrun exited with code 1. ValueError: as it was said.",
    ),
    "fails at its beginning": (
        {"code": lambda run: int(run != "first"), "lines": only("resumed", lambda _: [])},
        "The run that resumed after the kill must end after step 37, got 17 steps. ValueError",
    ),
    "ends before anybody kills it": (
        {"lines": only("first", lambda lines: lines[:9])},
        "but exited after 9. ValueError",
    ),
    "prints on both ranks": (
        {"lines": only("first", lambda lines: [line for line in lines for _ in range(2)])},
        "steps are [1, 1, 2, 2, 3, 3]. Print on rank 0 only.",
    ),
    "writes over its checkpoint": ({"in_place": True}, "overwrites the previous checkpoint in place"),
    "saves nothing": ({"state": lambda saved, run: None}, "killed after step 21, and there is no checkpoint"),
    "does not save after the last step": (
        {"state": only("two", lambda saved: state(34))},
        "its last checkpoint is from step 34",
    ),
    "saves DDP itself": (
        {"state": lambda saved, run: {"step": 17, "model": {f"module.{n}": w for n, w in saved["model"].items()}}},
        "Save the state dict of the model inside DDP",
    ),
    "saves what executes code": ({"state": lambda saved, run: Line}, "torch.load cannot read the checkpoint"),
    "saves the weights alone": (
        {"state": lambda saved, run: saved["model"]},
        "must be a dict with an integer 'step'",
    ),
    "comes out a little apart": ({"state": only("resumed", moved)}, "They must be bitwise identical"),
    "saves the weights before the step": (
        {"state": lambda saved, run: saved | {"model": words.course(saved["step"] - 1).weights}},
        "Did you save the weights of a different step?",
    ),
    "goes wrong on one rank": (
        {"lines": only("one", lambda lines: [line._replace(letters=line.letters // 2) for line in lines])},
        "The run on one rank: The words of step 1 must contain 83 letters",
    ),
}


def test_a_correct_run_passes(monkeypatch):
    right, said = play(monkeypatch)
    assert right, said


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_names_a_mistake_by_its_effect(mistake, monkeypatch):
    changes, expected = MISTAKES[mistake]
    right, said = play(monkeypatch, **changes)
    assert not right
    assert said.count(expected) == 1, said


@pytest.mark.parametrize("mistake", [name for name in words._GRADIENTS if name])
def test_a_wrong_gradient_is_identified_by_its_losses(mistake):
    assert words.wrong_from_the_start(words.course(21, mistake).lines) == words._GRADIENTS[mistake]


@pytest.mark.parametrize(
    ("order", "share", "drop", "report"),
    [each for each in product(words._ORDERS, words._SHARES, words._DROPS, words._REPORTS) if any(each)],
)
def test_wrong_words_are_identified_by_their_letters(order, share, drop, report):
    letters = words._letters(words._read(order, share, drop), 30, slice(1 if report else 2))
    said = words.wrong_from_the_start([Line(step, 3.0, many) for step, many in enumerate(letters, start=1)])
    parts = (words._ORDERS[order], words._SHARES[share], words._DROPS[drop], words._REPORTS[report])
    if drop and share == "half":  # 200 words are 25 times 8, so no step is smaller
        parts = (words._ORDERS[order], words._SHARES[share], words._REPORTS[report])
    if share == "same" and report:  # 16 words, as if they were the words of all ranks
        parts = (words._ORDERS[order], words._DROPS[drop]) if order or drop else ("The loss of step 1 must be",)
    assert all(part in said for part in parts), said


def test_other_wrong_words_are_reported_with_step_and_numbers():
    lines = list(words.course(21).lines)
    lines[15] = lines[15]._replace(letters=99)
    said = words.wrong_from_the_start(lines)
    assert f"The words of step 16 must contain {words.course(21).lines[15].letters} letters" in said
    assert "got 99" in said


@pytest.mark.parametrize("said", [said for said in words._LOSSES if said])
def test_a_loss_that_is_not_over_all_letters_is_identified(said):
    assert words.wrong_from_the_start(words.course(21).reports[said]) == said
    both = words.wrong_from_the_start(words.course(21, "means").reports[said])
    assert both == f"{said} {words._GRADIENTS['means']}"


def test_a_different_start_and_a_different_course_are_distinguished():
    lines = words.course(21).lines
    above = [line._replace(loss=line.loss + 0.1) for line in lines]
    assert "Call torch.manual_seed(0) before creating the model" in words.wrong_from_the_start(above)
    assert words.wrong_from_the_start([*lines[:9], *above[9:]]).startswith("The loss of step 10 must be")


def test_a_non_finite_loss_is_reported():
    lines = words.lines_of("step 1: loss nan over 83 letters\n")
    assert "got nan" in words.wrong_from_the_start(lines)
    assert words.lines_of("step 1: loss tensor(3.4) over 83 letters\nstep 2: loss 3 over 1\nSTEP\n")[0].step == 1


# ------------------------------------------------------------------------------------------- before anything is started


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "There is no file"),
        ("def main(:\n", "is not valid Python: invalid syntax on line 1"),
        ("import torch\nfrom ddp_tutorial import launch\n", "must not import ddp_tutorial"),
    ],
)
def test_an_invalid_script_is_rejected_before_anything_starts(text, said, tmp_path, monkeypatch):
    monkeypatch.setattr(plain_torch, "Torchrun", None)
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    right, told = train_script.verdict(tmp_path / "mine.py")
    assert not right
    assert said in told


# ------------------------------------------------------------------------------------- the script of the notebooks

DATA = NOTEBOOKS.parent / "data" / "digits"
STAGES = [name[:2] for name in course.stages()]
LAST = STAGES[-1]
BASE_FOLDER = course.FOLDER
FORKED = {"device": "cpu", "threads": 1, "echo": False, "timeout": 300}


def code_of(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def imported(number):
    script = types.ModuleType("train")
    exec(compile(course.script(number), "train.py", "exec"), vars(script))
    return script


# torchrun chooses the port of rank 0's store seconds before rank 0 opens it. No other process gets these ports.
TORCHRUN = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
from ranks import free_port
from torch.distributed import run
from torch.distributed.elastic.rendezvous import api
api.get_free_port = free_port
run.main()
"""


def train(folder, nprocs, name, *options, script="train.py", restarts=0):
    """Run a script under torchrun."""
    command = [sys.executable, "-c", TORCHRUN, "--standalone", f"--nproc-per-node={nprocs}"]
    command += [f"--max-restarts={restarts}", script, name, f"--data={DATA}", "--steps=32", "--every=8"]
    command += ["--dropout=0.2", "--workers=0", "--cpu", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_notebook_06_writes_the_base_script_cell_by_cell():
    cells = [cell.source.partition("\n") for cell in code_of(NOTEBOOKS / "06_plain_torch.ipynb")]
    parts = [body for first, _, body in cells if first.startswith("%%writefile") and first.endswith("06/train.py")]
    assert "\n".join(parts) + "\n" == course.script("06")


def test_each_stage_is_named_after_a_notebook_and_changes_the_script():
    assert len(set(map(course.script, STAGES))) == len(STAGES)
    for name in course.stages():
        assert (NOTEBOOKS / f"{name}.ipynb").is_file()
    for number in STAGES:
        tree = ast.parse(course.script(number))
        imported = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not [each for each in imported if "ddp_tutorial" in each]


def test_the_lines_that_a_notebook_shows_are_those_of_the_stage(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calls = []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        for cell in code_of(path):
            if found := re.search(r"^write_stage\(\"(\d\d)\"\)$", cell.source, re.MULTILINE):
                diff = course.write_stage(found[1])
                assert Path("runs", found[1], "train.py").read_text() == course.script(found[1])
                [data] = [output.data for output in cell.outputs if "data" in output]
                assert (data["text/plain"], data["text/html"]) == (repr(diff), diff._repr_html_())
                calls.append(found[1])
    assert "07" in calls


def test_a_stored_stage_is_the_edited_script(tmp_path, monkeypatch):
    monkeypatch.setattr(course, "FOLDER", shutil.copytree(BASE_FOLDER, tmp_path / "stages"))
    edited = course.script(LAST).replace("F.cross_entropy", "F.nll_loss", 1) + "# <end>\n"
    (tmp_path / "train.py").write_text(edited)
    course.store_stage("99_test", tmp_path / "train.py")
    assert course.script("99") == edited
    diff = course.Diff(course.script(LAST), edited)
    assert "+# &lt;end&gt;" in diff._repr_html_()
    assert re.search(r"^- +loss = F.cross_entropy", repr(diff), re.MULTILINE)


def test_stand_ins_for_slurm_and_torchrun_work_in_paths_with_spaces(tmp_path, monkeypatch):
    (tmp_path / "my python").symlink_to("/bin/echo")
    monkeypatch.setattr(restarts, "TORCHRUN", [str(tmp_path / "my python"), "-m"])
    path = restarts.write_stand_ins(tmp_path / "my commands")
    assert subprocess.check_output(["srun", "torchrun", "a  b"], env={"PATH": path}, text=True) == "-m a  b\n"


def test_a_patch_that_does_not_fit_names_the_stage_and_the_lines():
    patch = "@@\n a\n-b\n+c\n"
    assert course.apply("a\nb\n", patch, "07") == "a\nc\n"
    for text, times in ("a\nc\n", 0), ("a\nb\na\nb\n", 2), ("aa\nb\n", 0):
        with pytest.raises(
            ValueError, match=f"07: these lines must occur exactly once, but occur {times} times:\na\nb"
        ):
            course.apply(text, patch, "07")
    with pytest.raises(ValueError, match=r"'number' must be one of 06, 07.*got '05'"):
        course.script("05")


HANGS = """
import os, sys, time, train
sys.stderr = open(f"stderr_{os.environ['RANK']}.txt", "w", buffering=1)  # the stacks of two ranks would mix
take_step = train.train_step
def train_step(*arguments):
    if train.torch.initial_seed() // 2**20 == 3 and os.environ["RANK"] == "1":
        for _ in range(2000): os.path.exists("hung/collectives_rank_0.json") or time.sleep(0.1)
    return take_step(*arguments)
train.train_step = train_step
os._exit(train.run(train.parse_args()))
"""

KILLED = """
import os, signal, sys, train
rename = train.Path.rename
def killed(path, target):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and path.name == "step_00000016.part":
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(path, target)
train.Path.rename = killed
os._exit(train.run(train.parse_args()))
"""


def saved_by(path):
    """Return the weights and the losses in the latest checkpoint, which is a folder from stage 10."""
    if path.is_file():
        saved = torch.load(path)
        return saved["model"], saved["losses"]
    latest = max(path.glob("step_????????"))
    weights = {}
    for file in latest.glob("*.safetensors"):
        weights |= safetensors.torch.load_file(file)
    return weights, torch.load(latest / "values.pt")["losses"]


def assert_bitwise_identical(path, other):
    (weights, losses), (other_weights, other_losses) = saved_by(path), saved_by(other)
    assert losses == other_losses
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(other_weights[name], weight) for name, weight in weights.items())


def train_once(world, folder, number, name, stop, *options):
    """Train a stage on the ranks of `launch`. Send SIGTERM to the last rank and its workers before step `stop`."""
    script = imported(number)
    multiprocessing.set_start_method("fork", force=True)  # other workers would import the script as a module
    take_step = script.train_step

    def train_step(*arguments):
        if torch.initial_seed() == (stop - 1) * 2**20 + world.size - 1:
            for process in *psutil.Process().children(), psutil.Process():
                process.send_signal(signal.SIGTERM)
        return take_step(*arguments)

    script.train_step = train_step
    if world.size == 1:  # launch initializes no group
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with mock.patch.object(dist, "init_process_group"):
        script.main(script.parse_args([str(folder / name), f"--data={DATA}", "--workers=0", "--cpu", *options]))


def test_07_trains_on_the_same_samples_in_the_same_order_as_06(tmp_path):
    for number in "06", "07":
        launch(train_once, 2, tmp_path, number, number, 0, "--steps=32", "--every=8", "--dropout=0.2", **FORKED)
    assert_bitwise_identical(tmp_path / "06", tmp_path / "07")


def test_a_run_that_torchrun_restarts_is_bitwise_identical(tmp_path):
    """With DDP, the parts are tested without torchrun: saving again after a failed save, and resuming."""
    (tmp_path / "train.py").write_text(course.script(LAST))
    (tmp_path / "killed.py").write_text(KILLED)
    options = ["--steps=32", "--every=8", "--dropout=0.2", "--strategy=fsdp"]
    launch(train_once, 2, tmp_path, LAST, "whole", 0, *options, **FORKED)
    run = train(tmp_path, 2, "restarted", "--strategy=fsdp", script="killed.py", restarts=1)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert [line[:7] for line in lines] == ["step 8:", "step 16", "step 24", "step 16", "step 24", "step 32", "validat"]
    assert lines[-1].endswith("over 360 samples")
    assert_bitwise_identical(tmp_path / "whole", tmp_path / "restarted")
    assert sorted(path.name for path in (tmp_path / "restarted").glob("step*")) == ["step_00000024", "step_00000032"]


def test_a_hang_prints_the_stacks_and_the_collectives_of_all_ranks(tmp_path):
    (tmp_path / "train.py").write_text(course.script(LAST))
    (tmp_path / "hangs.py").write_text(HANGS)
    run = train(tmp_path, 2, "hung", "--timeout=20", script="hangs.py")
    assert run.returncode == 1
    waiting, sleeping = ((tmp_path / f"stderr_{rank}.txt").read_text() for rank in (0, 1))
    assert "Timeout (0:00:10)!" in waiting
    assert re.search(
        r"distributed_c10d.py., line \d+ in all_reduce(.*\n)*?.*train.py., line \d+ in train_step", waiting
    )
    assert "Timed out waiting" in waiting
    assert re.search(r"hangs.py., line 7 in train_step", sleeping)
    assert (tmp_path / "hung" / "collectives_rank_0.json").exists(), run.stderr
    entries = json.loads((tmp_path / "hung" / "collectives_rank_0.json").read_text())["entries"]
    assert "all_reduce" in entries[-1]["profiling_name"]
    assert entries[-1]["input_sizes"] == [[]]  # the number of samples, which rank 1 has not sent


def test_setup_refuses_the_store_of_an_earlier_attempt(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(RuntimeError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        imported(LAST).setup(True, 600)


def test_a_signal_saves_and_another_number_of_ranks_may_resume(tmp_path):
    def run(ranks, name, dropout, stop=0):
        options = ["--steps=12", "--every=4", "--batch=50", f"--dropout={dropout}", f"--workers={int(stop > 0)}"]
        launch(train_once, ranks, tmp_path, LAST, name, stop, *options, **FORKED)
        return max(path.name for path in (tmp_path / name).iterdir())

    run(2, "whole", 0.2)
    assert run(2, "stopped", 0.2, stop=5) == "step_00000005"
    assert run(2, "stopped", 0.2) == "step_00000012"
    assert_bitwise_identical(tmp_path / "whole", tmp_path / "stopped")
    run(2, "same ranks", 0)
    assert run(2, "changed", 0, stop=3) == "step_00000003"
    assert run(1, "changed", 0, stop=6) == "step_00000006"
    assert run(2, "changed", 0) == "step_00000012"
    (weights, losses), (changed_weights, changed_losses) = (
        saved_by(tmp_path / "same ranks"),
        saved_by(tmp_path / "changed"),
    )
    torch.testing.assert_close(changed_losses, losses, rtol=0, atol=1e-5)
    torch.testing.assert_close(changed_weights, weights, rtol=0, atol=1e-6)


def test_fsdp_trains_like_ddp_and_a_run_may_change_its_strategy(tmp_path):
    def run(ranks, name, strategy, *options, stop=0):
        options = ["--steps=12", "--every=4", "--batch=49", "--accumulate=2", f"--strategy={strategy}", *options]
        launch(train_once, ranks, tmp_path, LAST, name, stop, *options, **FORKED)
        return max(path.name for path in (tmp_path / name).iterdir())

    clip = "--clip=0.3"
    run(2, "ddp", "ddp", clip)
    run(3, "fsdp", "fsdp", clip)
    assert run(2, "changed", "ddp", clip, stop=3) == "step_00000003"
    assert run(3, "changed", "fsdp", clip, stop=6) == "step_00000006"
    assert run(1, "changed", "fsdp", clip, stop=9) == "step_00000009"
    assert run(2, "changed", "ddp", clip) == "step_00000012"
    weights, losses = saved_by(tmp_path / "ddp")
    for name in "fsdp", "changed":
        torch.testing.assert_close(saved_by(tmp_path / name)[1], losses, rtol=0, atol=1e-5)
    torch.testing.assert_close(saved_by(tmp_path / "changed")[0], weights, rtol=0, atol=1e-6)
    files = (tmp_path / "fsdp" / "step_00000012").glob("*.safetensors")
    sizes = [sum(map(torch.numel, safetensors.torch.load_file(file).values())) for file in files]
    assert len(sizes) == 3
    assert max(sizes) < 0.4 * sum(sizes), "each rank saves its shard"
    for strategy in "ddp", "fsdp":
        run(2, f"{strategy}, bf16", strategy, "--bf16", "--batch-norm")
    rounded = [saved_by(tmp_path / f"{strategy}, bf16")[1] for strategy in ("ddp", "fsdp")]
    torch.testing.assert_close(*rounded, rtol=0, atol=0.02)


def sharded_parts(world):
    script = imported(LAST)
    args = script.parse_args(["model", f"--data={DATA}", "--strategy=fsdp", "--bf16", "--batch=48", "--batch-norm"])
    model = script.make_state(args, torch.device("cpu"))["model"]
    rows = [parameter.to_local().shape[0] for parameter in model.parameters()]
    policies = [layer._get_fsdp_state()._mp_policy for layer in model if isinstance(layer, script.FSDPModule)]
    validation = script.Digits(DATA / "validation.parquet")
    validation.digits = validation.digits[:49]  # on two ranks, rank 1 has no sample in the last batch
    samples = script.evaluate(model, validation, args, torch.device("cpu"))[2]
    return rows, [(policy.param_dtype, policy.reduce_dtype) for policy in policies], samples


def test_fsdp_shards_rows_gathers_bfloat16_and_evaluates_uneven_batches():
    for rows, policies, samples in launch(sharded_parts, 2, **FORKED):
        assert rows == [32, 32, 32, 32, 5, 5]
        assert policies == [(torch.bfloat16, torch.float32)] * 2
        assert samples == 49


def train_in_parts(world, folder, number):
    """Run 6 steps, and a run that resumes after step 3 while only rank 0 sees the checkpoint."""
    script = imported(number)

    def options(name, every):
        args = [str(folder / name), f"--data={DATA}", "--steps=6", f"--every={every}", "--workers=0", "--cpu"]
        return script.parse_args([*args, "--dropout=0.2", "--bf16", "--clip=0.3", "--batch-norm"])

    with mock.patch.object(dist, "init_process_group"):  # launch has initialized it
        script.main(options("whole.pt", 6))
        last = "save" if number < "10" else "commit"  # the function that makes a checkpoint valid
        real = getattr(script, last)
        stop = mock.Mock(side_effect=lambda *arguments: real(*arguments) or (_ for _ in ()).throw(KeyError))
        with mock.patch.object(script, last, stop), pytest.raises(KeyError):  # stopped after its first checkpoint
            script.main(options("resumed.pt", 3))
        dist.barrier()
        script.main(options("resumed.pt" if world.is_main or number >= "10" else "not there.pt", 3))
    model, data = script.make_state(options("", 1), torch.device("cpu"))["model"], script.Digits(DATA / "train.parquet")
    model[1].running_mean += world.rank  # evaluation must use rank 0's running statistics
    evaluated = script.evaluate(model, data, options("", 1), torch.device("cpu"))
    model[1].running_mean.zero_()
    logits = model.eval()(data.pixels)
    right = torch.nn.functional.cross_entropy(logits, data.digits).item(), int((logits.argmax(1) == data.digits).sum())
    return sorted(path.name for path in folder.glob("*.pt")), evaluated, right


@pytest.mark.parametrize("number", ["09", LAST])
def test_all_ranks_resume_from_the_checkpoint_that_rank_0_sees(number, tmp_path):
    for files, (loss, accuracy, samples), right in launch(train_in_parts, 2, tmp_path, number, **FORKED):
        assert files == ["resumed.pt", "whole.pt"]
        assert (loss, accuracy, samples) == (pytest.approx(right[0], abs=1e-5), right[1] / 1437, 1437)  # 719 and 718
    assert len(saved_by(tmp_path / "whole.pt")[1]) == 6
    assert_bitwise_identical(tmp_path / "whole.pt", tmp_path / "resumed.pt")


class Malicious:
    def __reduce__(self):
        return Path("executed").touch, ()


def save_with_errors(world, folder):
    """Save on a full disk, and load a checkpoint that would execute code."""
    os.chdir(folder)
    script, device = imported(LAST), torch.device("cpu")
    args = script.parse_args(["model", "--steps=4"])
    state, group = script.make_state(args, device), dist.new_group(backend="gloo")
    write = script.dcp.HuggingFaceStorageWriter.write_data
    full = mock.Mock(side_effect=OSError("No space left on device")) if world.rank == 1 else write
    arguments = [args.checkpoint, state, [1.0], group]
    with mock.patch.object(script.dcp.HuggingFaceStorageWriter, "write_data", full):
        saving = script.save(*arguments)
        with pytest.raises(CheckpointException, match="No space left on device"):
            script.commit(*saving, 1)
    assert script.checkpoints(args.checkpoint) == []
    dist.barrier()
    assert script.resume(args.checkpoint, state, device) == []
    for losses in [2.0], [2.0, 1.0]:
        arguments[2] = losses
        script.commit(*script.save(*arguments), 1)
    dist.barrier()
    assert [path.name for path in args.checkpoint.iterdir()] == ["step_00000002"]
    dist.barrier()
    if not world.is_main:
        arguments[0] = folder / "another disk"
        with pytest.raises(FileNotFoundError, match=r"a folder that all ranks share: step_00000002\.part is missing"):
            script.save(*arguments)
    else:
        with mock.patch.object(script.dcp, "async_save"):
            script.save(*arguments)
        torch.save(Malicious(), args.checkpoint / "step_00000002" / "values.pt")
    dist.barrier()
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        script.resume(args.checkpoint, state, device)


def test_a_failed_save_fails_on_all_ranks_and_loading_executes_nothing(tmp_path):
    launch(save_with_errors, 2, tmp_path, **FORKED)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("number", ["06", LAST])
def test_on_gpus_a_rank_uses_the_gpu_of_its_local_rank_and_nccl(number, monkeypatch):
    script = imported(number)
    monkeypatch.setenv("RANK", "9")
    monkeypatch.setenv("LOCAL_RANK", "1")
    accelerator = mock.Mock(**{"current_accelerator.return_value": torch.device("cuda")})
    with mock.patch.object(torch, "accelerator", accelerator), mock.patch.object(dist, "init_process_group") as joined:
        limits = {"timeout": timedelta(seconds=60)} if number >= "11" else {}
        setup = partial(script.setup, timeout=60) if limits else script.setup
        assert setup(cpu=False) == torch.device("cuda", 1)
        joined.assert_called_once_with("nccl", device_id=torch.device("cuda", 1), **limits)
        accelerator.set_device_index.assert_called_once_with(torch.device("cuda", 1))
        assert setup(cpu=True) == torch.device("cpu")
        joined.assert_called_with("gloo", device_id=None, **limits)


@pytest.mark.parametrize("number", ["06", "07"])
def test_the_batch_must_be_a_multiple_of_the_world_size_until_08(number):
    script = imported(number)
    data, args = script.Digits(DATA / "validation.parquet"), script.parse_args(["model.pt", "--workers=0"])
    with pytest.raises(ValueError, match="--batch must be a multiple of the world size, got 48 on 5 ranks"):
        script.make_loader(data, args, 0, 5)
    loaders = [script.make_loader(data, args, rank, 3) for rank in range(3)]
    whole = script.make_loader(data, args, 0, 1)
    for parts, (pixels, digits) in zip(zip(*loaders, strict=True), whole, strict=True):
        assert torch.equal(torch.stack([each[0] for each in parts], 1).flatten(0, 1), pixels)
        assert torch.equal(torch.stack([each[1] for each in parts], 1).flatten(0, 1), digits)


@pytest.mark.parametrize(("batch", "ranks"), [(48, 5), (50, 3), (359, 2), (357, 4)])
def test_from_08_any_number_of_ranks_splits_each_batch_without_padding(batch, ranks):
    script = imported(LAST)
    data, args = script.Digits(DATA / "validation.parquet"), script.parse_args(["model", f"--batch={batch}"])
    samplers = [script.ResumableSampler(len(data), args.batch, rank, ranks) for rank in range(ranks)]
    batches = list(script.ResumableSampler(len(data), args.batch, 0, 1))
    assert sorted(chain(*batches)) == list(range(360))
    assert [len(each) for each in batches] == [batch] * (360 // batch) + [360 % batch] * (360 % batch > 0)
    for parts, samples in zip(zip(*samplers, strict=True), batches, strict=True):
        assert sorted(chain(*parts)) == sorted(samples)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for sampler in samplers:
        sampler.seek(len(batches) + 1)  # epoch 1, after its first batch
        rest = list(sampler)
        sampler.seek(len(batches))
        assert [*sampler][1:] == rest


def train_all_stages(world, folder):
    """Train with each stage from 08. The third of five batches is the last one of an epoch, and has one sample."""
    weights = {}
    if world.size == 1:  # launch initializes no group
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for number in [each for each in STAGES if each >= "08"]:
        script = imported(number)
        made = []
        script.make_state = lambda *args, make=script.make_state, made=made: made.append(make(*args)) or made[0]
        args = [str(folder / f"{number}-{world.size}"), f"--data={DATA}", "--steps=5", "--every=3", "--cpu"]
        args += ["--batch=718", f"--accumulate={4 - world.size}", "--workers=0"]
        args += ["--clip=0.3"] if number >= "09" else []  # less than the norm in most steps
        with mock.patch.object(dist, "init_process_group"):  # launch has initialized it
            script.main(script.parse_args(args))
        weights[number] = made[0]["model"].state_dict()
    return weights


def test_each_stage_from_08_trains_like_one_process_on_ragged_batches(tmp_path):
    [alone] = launch(train_all_stages, 1, tmp_path, **FORKED)
    for ranks in 2, 3:
        for trained, (number, expected) in product(launch(train_all_stages, ranks, tmp_path, **FORKED), alone.items()):
            for name, weight in expected.items():
                torch.testing.assert_close(trained[number][name], weight, rtol=0, atol=1e-6)


def train_and_measure(world, folder, name, *options):
    """Train on a clock that advances by a second per reading. Return the printed lines."""
    script, lines = imported(LAST), []
    script.log = lines.append
    script.time = types.SimpleNamespace(perf_counter=map(float, count()).__next__)
    args = [str(folder / name), f"--data={DATA}", "--workers=0", "--cpu", "--steps=32", "--every=8", "--batch=50"]
    with mock.patch.object(dist, "init_process_group"):  # launch has initialized it
        script.main(script.parse_args([*args, "--dropout=0.2", *options]))
    return lines


def test_measuring_counts_the_samples_and_does_not_change_the_training(tmp_path):
    launch(train_and_measure, 2, tmp_path, "plain", **FORKED)
    options = "--mfu", "--peak-flops=1e6", "--profile=3:5"
    lines, _ = launch(train_and_measure, 2, tmp_path, "measured", *options, **FORKED)
    assert_bitwise_identical(tmp_path / "plain", tmp_path / "measured")
    samples = [350, 400, 400, 387]  # without the first step; 37 are in the last batch of the first epoch, step 29
    flops = 2 * (64 * 64 + 64 * 10) * 2 + 2 * 64 * 10  # no gradient of the images
    expected = [f"{each} samples/s, MFU {each * flops / 2e6:.2%}" for each in samples]
    assert [line.partition("norm ")[2].partition(", ")[2] for line in lines[:-1]] == expected
    assert not list((tmp_path / "plain").glob("trace*"))
    for rank in range(2):
        events = json.loads((tmp_path / "measured" / f"trace_rank_{rank}.json").read_text())["traceEvents"]
        names = [event["name"] for event in events if event["ph"] == "X"]
        assert [name for name in names if name.startswith("ProfilerStep")] == [f"ProfilerStep#{n}" for n in (2, 3, 4)]
        assert names.count("DistributedDataParallel.forward") == names.count("Optimizer.step#SGD.step") == 3
        assert names.count("gloo:all_reduce") >= 9  # in each step of the counts, the gradients, and the stop flags


def peaks_of(world):
    script = imported(LAST)
    measured = script.peak_flops(script.parse_args(["model"]), torch.device("cpu"))
    return measured, script.peak_flops(script.parse_args(["model", "--peak-flops=3e12"]), torch.device("cpu"))


def test_the_peak_is_that_of_all_devices():
    for measured, given in launch(peaks_of, 2, **FORKED):
        assert measured > 1e8
        assert given == 6e12


def test_a_language_model_reports_tokens_per_second():
    script = imported(LAST)
    meter = script.Meter(torch.device("cpu"), tokens=1024, flops=0, peak=0.0)
    meter.counts, meter.begin = [torch.tensor(4), torch.tensor(2)], -2.0
    script.time = types.SimpleNamespace(perf_counter=lambda: 0.0)
    assert meter.report() == "3 samples/s, 3,072 tokens/s"
    with mock.patch.object(torch.accelerator, "synchronize") as synchronize:
        script.synchronize(torch.device("cuda", 1))
    synchronize.assert_called_once_with(torch.device("cuda", 1))


def test_profiled_steps_start_after_a_warm_up_step(capsys):
    script = imported(LAST)
    for steps in "3", "5:4", "1:2", "a:b":
        with pytest.raises(SystemExit):
            script.parse_args(["model", f"--profile={steps}"])
        assert f"must be FIRST:LAST with 2 <= FIRST <= LAST, got '{steps}'" in capsys.readouterr().err
    assert script.make_profiler(script.parse_args(["model"]), 0) is None
    assert script.make_profiler(script.parse_args(["model", "--profile=10:13"]), 9) is None  # resumed too late


def slurm_job():
    """The sbatch file in the text of notebook 06."""
    cells = nbformat.read(NOTEBOOKS / "06_plain_torch.ipynb", as_version=4).cells
    [job] = re.findall(r"^```bash\n(.*?)^```$", "\n".join(cell.source for cell in cells), re.MULTILINE | re.DOTALL)
    return job


def test_the_slurm_job_of_notebook_06_passes_valid_options():
    script = imported("06")
    args = script.parse_args(shlex.split(slurm_job().partition("train.py")[2]))
    assert (args.batch, args.cpu) == (512, False)


@pytest.mark.slurm
def test_the_slurm_job_of_notebook_06_trains_on_two_nodes(workdir):
    if why := slurm.missing():
        pytest.skip(why)
    job = re.sub(r"#SBATCH --gpus-per-node=.*\n", "", slurm_job())
    job = job.replace("--cpus-per-task=64", "--cpus-per-task=1")  # a node here has one core
    job = job.replace("srun torchrun", f"srun {sys.executable} -m torch.distributed.run")
    job = job.replace("--nproc-per-node=8", "--nproc-per-node=1")
    job = re.sub("--data=digits --batch=512", f"--data={DATA} --steps=20 --cpu", job)
    Path("train.py").write_text(course.script("06"))
    Path("job.sh").write_text(job)
    with slurm.Slurm() as cluster:
        submitted = cluster("sbatch", "--parsable", "--output=printed.txt", "job.sh")
        cluster.until_state(int(submitted.stdout), "COMPLETED")
    assert re.search("step 20: mean loss .*\nvalidation: .* over 360 samples", Path("printed.txt").read_text())
    assert len(torch.load("model.pt")["rng"]) == 2


def test_running_notebook_06_again_keeps_the_readers_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cells = [cell.source for cell in code_of(NOTEBOOKS / "06_plain_torch.ipynb")]
    [clears] = [cell for cell in cells if "rmtree" in cell]
    [writes_stub] = [cell for cell in cells if "NotImplementedError" in cell and "MINE" in cell]
    names = {"Path": Path, "shutil": shutil, "pyarrow": pyarrow, "NOTEBOOKS": NOTEBOOKS}
    exec(clears, names)
    exec(writes_stub, names)
    stub = names["MINE"].read_text()
    assert "NotImplementedError" in stub
    names["MINE"].write_text("mine")
    exec(clears, names)
    exec(writes_stub, names)
    assert names["MINE"].read_text() == "mine"


# ------------------------------------------------------------------------------------------------------ under torchrun

SLEEPS = """
import os, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"])
print("step 1", flush=True)
if sys.argv[1] == "raise" and os.environ["RANK"] == "1":
    raise ValueError("on purpose")
time.sleep(300)
"""


def marked(mark):
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("DDP_TUTORIAL_TORCHRUN") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            pass
    return found


def test_waiting_ranks_are_reported_and_terminated(tmp_path, monkeypatch):
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    with Torchrun(tmp_path / "sleeps.py", 2, "on", folder=tmp_path) as run:
        assert run.wait(lambda printed: printed.count("\n") == 2) is None
        assert [int(rank.environ()["RANK"]) for rank in run.ranks()] == [0, 1]
        # torchrun, two ranks, and a process of each, which may still be about to execute its program
        assert wait_until(lambda: len(marked(run.mark)) == 5)
        monkeypatch.setattr(torchrun, "STUCK_SECONDS", 0.5)
        # both may have printed at the same time: "step 1step 1\n\n"
        last = r"Your script last printed '(step 1)+'. The ranks then made no progress for 0.5 s"
        with pytest.raises(WrongAnswerError, match=last):
            run.wait()
    assert marked(run.mark) == []


def test_an_error_is_shown_with_its_line_and_an_endless_run_is_aborted(tmp_path, monkeypatch):
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    with Torchrun(tmp_path / "sleeps.py", 2, "raise", folder=tmp_path) as run:
        assert run.wait() == 1
        assert run.error() == "ValueError: on purpose (line 6 of your script)"
    assert marked(run.mark) == []  # including the processes of the rank
    monkeypatch.setattr(torchrun, "LIMIT_SECONDS", 0.1)
    (tmp_path / "silent.py").write_text("import time; time.sleep(300)")
    run = Torchrun(tmp_path / "silent.py", 1, folder=tmp_path)
    with run, pytest.raises(WrongAnswerError, match="printed nothing, and did not exit within"):
        run.wait()
    assert marked(run.mark) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: PR_SET_PDEATHSIG")
def test_ranks_exit_if_the_checking_process_is_killed(tmp_path):
    (tmp_path / "sleeps.py").write_text(SLEEPS.replace("worker =", "0 and"))
    command = "import sys; from pathlib import Path; from ddp_tutorial.exercises.torchrun import Torchrun\n"
    command += "run = Torchrun(Path(sys.argv[1]), 2, 'on', folder=Path(sys.argv[1]).parent)\n"
    command += "run.wait(lambda printed: printed.count('\\n') == 2); print(run.mark, flush=True); run.wait()"
    process = subprocess.Popen(
        [sys.executable, "-c", command, tmp_path / "sleeps.py"], stdout=subprocess.PIPE, text=True
    )
    try:
        mark = process.stdout.readline().strip()
        ranks = marked(mark)
        assert len(ranks) == 3
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    wait_until(lambda: not marked(mark), 120)
    assert marked(mark) == []
