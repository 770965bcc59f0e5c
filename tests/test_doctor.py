"""The doctor performs actual checks and gives advice; the shell completes commands and settings."""

import json
import os
import socket
import subprocess
import sys

import pytest

from ddp_tutorial.processes import doctor
from ddp_tutorial.processes.doctor import Finding, examine, verdict

pytestmark = pytest.mark.usefixtures("workdir")
COMMAND = [sys.executable, "-m", "ddp_tutorial"]


def test_a_machine_that_runs_these_tests_passes() -> None:
    findings = {finding.name: finding for finding in examine()}
    for name in ("backends", "loopback", "ranks", "memory", "disk"):
        assert findings[name].ok is True, findings[name]
    assert findings["ranks"].text == "two ranks all-reduced 1 and 2 over gloo to 3"
    assert verdict(list(findings.values())).startswith("several ranks will work on ")


def test_an_exception_in_a_check_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no sockets here")

    monkeypatch.setattr(socket, "create_server", refuse)
    monkeypatch.setattr(doctor, "launch", refuse)
    findings = examine()
    broken = {finding.name: finding.text for finding in findings if finding.ok is False}
    assert broken == {"loopback": "OSError: no sockets here", "ranks": "OSError: no sockets here"}
    assert verdict(findings) == "failed checks: loopback, ranks"


def test_a_port_in_use_is_reported_with_a_workaround(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(address: tuple[str, int]) -> None:
        raise OSError(f"{address} in use")

    monkeypatch.setattr(socket, "create_server", taken)
    ok, text, advice = doctor._port()
    assert ok is None
    assert text == "29500, torchrun's default, is in use"
    assert "--standalone" in advice


def test_optional_findings_do_not_affect_the_verdict() -> None:
    assert verdict([Finding("GPUs", None, "none")]).startswith("several ranks will work")


def test_the_command_prints_a_line_for_each_finding_and_a_verdict() -> None:
    done = subprocess.run([*COMMAND, "doctor", "--json"], capture_output=True, text=True, timeout=300, check=False)
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert [each["name"] for each in found["findings"]][-1] == "ranks"
    assert found["verdict"].startswith("several ranks will work")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ddp-tutorial tr", "train"),
        ("ddp-tutorial train shard", "sharded_iterable_dataset"),
        ("ddp-tutorial train 2proc model.la", "model.layers="),
        ("ddp-tutorial checkpoint ver", "verify"),
    ],
)
def test_the_shell_completes_commands_configs_and_settings(words: str, expected: str) -> None:
    program = "import sys; sys.argv[0] = 'ddp-tutorial'; from ddp_tutorial.__main__ import main; main()"
    asked = {"_DDP_TUTORIAL_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | asked,
        check=False,
    )
    assert expected in [line.partition(",")[2] for line in done.stdout.splitlines()]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_of_each_shell_is_printed(shell: str) -> None:
    done = subprocess.run([*COMMAND, "completion", shell], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0
    assert "_DDP_TUTORIAL_COMPLETE" in done.stdout
