"""Define the command-line interface `python -m ddp_tutorial COMMAND`, which is also installed as `ddp-tutorial`.

The exit codes are:

    0     success
    1     runtime error
    2     invalid command or config
    75    run stopped before its last step (0 under torchrun, which would otherwise restart the run)
    130   interrupted
"""

import errno
import os
import sys
from pathlib import Path

import click

from ddp_tutorial.commands import checkpoint, cluster, logs, machine, model, planning, project, slurm, sweep, training
from ddp_tutorial.config import ConfigError, FailedError
from ddp_tutorial.processes.errors import RankError
from ddp_tutorial.processes.signals import StoppedError, exit_code

# Operating system errors that are not bugs: missing permissions, a full or broken disk, or an unsuitable path.
_NOT_BUGS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO}
_NOT_BUGS |= {errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ddp-tutorial")
def cli() -> None:
    """Learn and practice PyTorch distributed data-parallel training with several processes, on any machine.

    \b
    Exit codes: 0 success; 1 runtime error; 2 invalid command or config;
    75 run stopped before its last step (0 under torchrun, which would otherwise restart the run);
    130 interrupted.
    """


for command in (
    training.train,
    training.stop,
    slurm.slurm,
    sweep.sweep,
    model.evaluate,
    model.sample,
    model.export,
    checkpoint.checkpoint,
    logs.logs,
    project.run,
    project.notebooks,
    project.copy_notebooks,
    project.stories,
    project.bench,
    project.reproduce,
    planning.plan,
    cluster.cluster,
    machine.doctor,
    machine.completion,
):
    cli.add_command(command)


def main() -> None:
    """Run a command, and report expected errors without a traceback."""
    if not sys.flags.safe_path and str(Path.cwd()) not in sys.path:  # as `python -m` does, for classes in a config
        sys.path.insert(0, str(Path.cwd()))
    # Set this variable before this process or a child process imports torch; see `rank_environment`.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except ConfigError as error:
        sys.exit(_report(str(error), 2))
    except (click.Abort, KeyboardInterrupt):
        sys.exit(_report("interrupted; all ranks have been terminated", 130))
    except RankError as error:
        if error.is_a(ConfigError):  # a config error that only a rank could detect
            sys.exit(_report(error.message, 2))
        # a FailedError's message is complete; for other errors, print the rank's traceback
        sys.exit(_report(error.message if error.is_a(FailedError) else str(error), 1))
    except StoppedError as error:
        click.echo(str(error), err=True)
        sys.exit(exit_code())
    except FailedError as error:
        sys.exit(_report(str(error), 1))
    except OSError as error:
        if error.errno not in _NOT_BUGS:
            raise
        sys.exit(_report(str(error), 1))


def _report(message: str, code: int) -> int:
    click.echo(f"error: {message}", err=True)
    return code


if __name__ == "__main__":
    main()
