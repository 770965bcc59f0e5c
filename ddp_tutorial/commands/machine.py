"""Commands that check the machine and set up shell completion."""

import json
import sys
from dataclasses import asdict

import click
from click.shell_completion import get_completion_class


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Check which features work on this machine. The exit code is 1 if a check fails."""
    from ddp_tutorial.processes.doctor import examine, verdict

    findings = examine()
    if as_json:
        click.echo(json.dumps({"verdict": verdict(findings), "findings": [asdict(each) for each in findings]}))
    else:
        for each in findings:
            mark = {True: "ok", False: "no", None: "--"}[each.ok]
            click.echo(f"{mark}  {each.name:14} {each.text}" + (f"\n{'':18} {each.advice}" if each.advice else ""))
        click.echo(verdict(findings))
    if any(each.ok is False for each in findings):
        sys.exit(1)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script for SHELL that completes the commands, configs and settings of `ddp-tutorial`.

    \b
    ddp-tutorial completion bash >> ~/.bashrc
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click supports these shells"
    context = click.get_current_context().find_root()
    click.echo(kind(context.command, {}, "ddp-tutorial", "_DDP_TUTORIAL_COMPLETE").source())
