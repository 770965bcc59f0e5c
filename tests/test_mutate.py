"""Mutation testing: operators, verdicts, and that every process of a test imports the mutated copy."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mutate.__main__ import ROOMS, _explained
from mutate.operators import Mutant, mutants

CHANGES = {  # source: every change of it
    "x = a < b": ["x = (a <= b)"],
    "x = a - 1": ["x = (a + 1)", "x = a - 2"],
    "x = 'a' + b": [],
    "x += 2": ["x -= 2", "x += 3"],
    "x = not a or b": ["x = (not a and b)", "x = (a) or b"],
    "x = f'{a + 1}'": [],
    "x: Literal[1] = True": ["x: Literal[1] = False"],
    "f(a, b=c)": ["pass", "f(a)"],
    "f(description='one', examples=[1])": ["pass"],
    "x.y = z": ["pass"],
    "x = max(a, b)": ["x = min(a, b)"],
    "x = [a for a in b if c]": ["x = [a for a in b if True]"],
    "if a: raise E(1)": ["if True: raise E(1)", "if False: raise E(1)"],
    "def f(a: A = 1) -> B:\n    '''Add 1.'''\n    return a": ["def f(a: A = 2) -> B:", "return None"],
    "def __repr__(self): return 1": [],
    "for x in y: break": ["for x in y: continue"],
    "try: a\nexcept E: b": ["except (): b"],
    "é = ['é', a == b]": ["é = ['é', (a != b)]"],
}

PACKAGE = """
import time

def add(a, b):
    print(b, end="")
    return a + b

def wait(done=True):
    while not done:
        time.sleep(0.1)
"""
TESTS = """
import subprocess
import sys
from toy import add, wait

def test_add():
    assert add(1, 2) == 3

def test_wait():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "TOY"], start_new_session=True)
    wait()
"""
EXPLAINED = """
[[mutant]]
file = "toy/__init__.py"
before = "print(b, end=\\"\\")"
after = "print(b)"
reason = "Nothing reads the output."
"""
RUN = """
from pathlib import Path
from mutate import __main__ as driver
driver.Recording.limit = lambda self, test: 8 if test else 100
for result in driver.run_room(driver.Room("*.py", "toy", "toy", Path.cwd()), 100, 0, 2):
    print(result.after, result.result, result.detail.split()[0], sep="|")
"""
VERDICTS = """
print(b)|explained|Nothing
pass|survived|2
return (a - b)|killed|failed
return None|killed|failed
def wait(done=False):|killed|timeout
while (done):|killed|timeout
while False:|survived|2
time.sleep(1.1)|survived|no
pass|survived|no
"""

# The first module is among those whose ranks are spawned; the ranks of the second one are forked.
RANKS = """
from ddp_tutorial import launch

def planted(world):
    from ddp_tutorial.environment import PLANTED
    return PLANTED

def test_rank():
    assert launch(planted, 1, device="cpu", threads=1, echo=False) == ["yes"]
"""
PLANT = """
import sys
from pathlib import Path
from mutate.running import Copy, preload

preload()
root, folder, ranks = sys.argv[1:]
copy, changed = Copy(Path(root), "ddp_tutorial", Path(folder)), "ddp_tutorial/environment.py"
tests = ["tests/test_starting.py", "tests/test_forked.py"]
for test in tests:
    (copy.folder / test).write_text(ranks)
with copy.changed({changed: (copy.folder / changed).read_text() + "PLANTED = 'yes'"}):
    print([outcome.result for outcome in copy.run(tests, lambda test: 100, go_on=True)])
"""


@pytest.mark.parametrize("name", ROOMS)
def test_the_tests_and_explained_mutants_of_a_subpackage_exist(name: str, root: Path) -> None:
    assert all((root / test).exists() for test in ROOMS[name].tests())
    _explained(ROOMS[name])  # exits if a mutant does not exist


@pytest.mark.parametrize("source", CHANGES)
def test_each_operator_makes_exactly_these_changes(source: str) -> None:
    assert sorted(mutant.after for mutant in mutants("x.py", source)) == sorted(CHANGES[source])


def test_a_mutant_differs_from_its_file_in_one_place() -> None:
    source = "# é\nx = f(\n    a,  # why\n    b < 1,\n)\ny = 2\n"
    mutated = source.replace("b < 1", "(b <= 1)")
    assert mutants("x.py", source)[0] == Mutant("x.py", 2, "b < 1,", "(b <= 1),", mutated)


def run(code: str, cwd: Path, root: Path, *arguments: str | Path) -> str:
    """Run Python code in a new process, because the driver kills what its tests have started."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    path = {"PYTHONPATH": str(root / "tests")}
    done = subprocess.run(command, cwd=cwd, env=os.environ | path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    files = {
        "toy/__init__.py": PACKAGE,
        "tests/test_toy.py": TESTS.replace("TOY", str(tmp_path)),
        "tests/mutate/explained.toml": EXPLAINED,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_killed_surviving_and_hanging_mutants_are_distinguished(toy: Path, root: Path) -> None:
    output = run(RUN, toy, root)
    assert VERDICTS in output
    assert "- while not done:\n+ while False:\n" in output
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in commands if str(toy) in command]


def test_an_explanation_of_a_nonexistent_mutant_is_rejected(toy: Path, root: Path) -> None:
    (toy / "toy/__init__.py").write_text(PACKAGE.replace("print(b", "print(a"))
    with pytest.raises(AssertionError, match="explains mutants that do not exist"):
        run(RUN, toy, root)


def test_spawned_and_forked_ranks_import_the_mutated_copy(tmp_path: Path, root: Path) -> None:
    assert run(PLANT, tmp_path, root, root, tmp_path, RANKS) == "['passed', 'passed']\n"
