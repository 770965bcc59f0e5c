"""Commands that use a run's model. RUN is the run's directory, or its name under runs/."""

import json
from pathlib import Path

import click

from ddp_tutorial.commands import a_run, runs_dir

_best = click.option(
    "--best", is_flag=True, help="Use the best weights, saved by best_model=true, instead of the final weights."
)


@click.command()
@runs_dir
@a_run
@_best
@click.option(
    "--samples", type=click.IntRange(min=1), help="Number of validation samples.  [default: the run's eval_samples]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate(run: str, best: bool, samples: int | None, as_json: bool) -> None:
    """Compute the loss of RUN's model on the validation samples."""
    from ddp_tutorial.files import without_nan
    from ddp_tutorial.runs.summaries import find_run
    from ddp_tutorial.training.export import evaluate as evaluate_run

    found = evaluate_run(find_run(run), samples=samples, best=best)
    text = (
        f"validation loss {found['eval_loss']:.4f} nats per token, perplexity {found['perplexity']:.2f}, "
        f"{found['bits_per_token']:.3f} bits per token, over {found['tokens']:,} tokens"
    )
    click.echo(json.dumps({"run": str(run), **without_nan(found)}) if as_json else text)


@click.command()
@runs_dir
@a_run
@_best
@click.option("--prompt", default="def ", show_default=True, help="Text to continue.")
@click.option(
    "--length", type=click.IntRange(min=1), default=200, show_default=True, help="Number of tokens to generate."
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.8,
    show_default=True,
    help="Sampling temperature; 0 always selects the most likely token.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the random numbers.")
def sample(run: str, best: bool, prompt: str, length: int, temperature: float, seed: int) -> None:
    """Generate text with RUN's model."""
    from ddp_tutorial.runs.summaries import find_run
    from ddp_tutorial.training.export import sample as write

    click.echo(write(find_run(run), prompt, length=length, temperature=temperature, seed=seed, best=best))


@click.command()
@runs_dir
@a_run
@click.argument("folder", type=click.Path(path_type=Path))
@_best
def export(run: str, folder: Path, best: bool) -> None:
    """Write RUN's model to a new FOLDER, as safetensors and JSON.

    GPT.from_pretrained(FOLDER) loads the model.
    """
    from ddp_tutorial.runs.summaries import find_run
    from ddp_tutorial.training.export import export as write

    write(find_run(run), folder, best=best)
    click.echo(f"{folder}: GPT.from_pretrained({str(folder)!r})")
