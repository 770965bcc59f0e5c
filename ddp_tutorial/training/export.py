"""What to do with a run's model once it is there: judge it, let it write, hand it on."""

import io
import json
import math
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from torch import nn

from ddp_tutorial.checkpoint.resuming import latest_valid
from ddp_tutorial.checkpoint.storage import stored
from ddp_tutorial.config import ConfigError, check
from ddp_tutorial.files import directory_written_atomically, write_json
from ddp_tutorial.runs.folder import folder_of
from ddp_tutorial.sharding.tokenizer import BYTES, load_tokenizer
from ddp_tutorial.training.config import TaskConfig
from ddp_tutorial.training.evaluation import evaluate as evaluate_here
from ddp_tutorial.training.gpt import GPT
from ddp_tutorial.training.tasks import samples_of, task_of
from ddp_tutorial.training.weights import load_state, load_weights, write_model
from ddp_tutorial.world import World, choose_device


def config_of(run: str | Path) -> TaskConfig:
    """The settings that a run of a task was made with. Raises `ConfigError` for other runs, and if it is none."""
    path = folder_of(run).config
    content = json.loads(path.read_text())
    if "corpus" not in content:
        raise ConfigError(
            f"{run} was made by a script, not from a config: its script knows the model. See ddp_tutorial.load"
        )
    return check(TaskConfig, content, origin=str(path))


def load(run: str | Path, model: nn.Module | None = None, *, best: bool = False) -> nn.Module:
    """The model that a run has ended with, in evaluation mode; of one that has not ended, that of its newest valid
    checkpoint. With `best`, the one that `best_model` has kept.

    `model` is one of the same architecture, which is given the weights; a run of a task knows its own. Raises
    `ConfigError` where there is none.
    """
    folder = folder_of(run)
    kept = sorted(folder.best.glob("step_*"))
    if best and not kept:
        raise ConfigError(f"{folder.path} has kept no best model: train with best_model=true")
    if best or folder.model.is_dir():
        where = kept[-1] if best else folder.model
        if model is None:
            # huggingface_hub prints that it loads, which would spoil JSON on stdout
            with redirect_stdout(io.StringIO()):
                return task_of(config_of(run)).load(where)
        load_weights(model, where)
        return model.eval()
    found, _ = latest_valid(World(), folder.checkpoints)
    if found is None:
        raise ConfigError(f"{folder.path} has no model yet, and no valid checkpoint: let it finish, or save on the way")
    model = model or task_of(config := config_of(run)).model(config)
    load_state(model, stored(found, "model"))
    return model.eval()


def evaluate(run: str | Path, *, samples: int | None = None, best: bool = False) -> dict[str, Any]:
    """The loss on held-out text: the same samples as in training, or the first `samples`. One process, which is enough.

    Besides nats per token, as perplexity, and as bits per token: what it would take to write the text down. A token of
    text is a byte.
    """
    config, model = config_of(run), load(run, best=best)
    world, task = World(device=choose_device(config.device if config.device == "cpu" else "auto")), task_of(config)
    _, held_out = samples_of(config, world)
    count = min(samples or config.eval_samples, len(held_out))
    means = evaluate_here(world, model.to(world.device), task.loss, held_out, count, config.batch_size)
    return {
        "eval_loss": means["loss"],
        "perplexity": math.exp(means["loss"]),
        "bits_per_token": means["loss"] / math.log(2),
        "samples": count,
        task.unit: count * task.units_per_sample(config),
    }


def sample(
    run: str | Path, prompt: str, *, length: int = 200, temperature: float = 0.8, seed: int = 0, best: bool = False
) -> str:
    """`prompt` and the `length` bytes that the run's model writes after it. Raises `ConfigError` for an empty
    prompt, and where the run has no model, or none of task gpt."""
    if not prompt:
        raise ConfigError("an empty prompt: give the model at least one character to go on from")
    model = load(run, best=best)
    if not isinstance(model, GPT):
        raise ConfigError(f"{run} has trained no language model: only one of task gpt can write")
    config = config_of(run)
    if config.has_tokens and config.tokenizer == BYTES:
        raise ConfigError(
            f"{run} was trained on {config.corpus!r} without a tokenizer, so its tokens are not text; train with "
            "tokenizer=PATH of the tokenizer.json that made the tokens"
        )
    tokenizer = load_tokenizer(config.tokenizer)
    generated = model.generate(tokenizer.encode(prompt), length, temperature=temperature, seed=seed)
    return tokenizer.decode(generated)


def export(run: str | Path, folder: Path, *, best: bool = False) -> None:
    """Write the model to a new `folder`, as safetensors and JSON: `GPT.from_pretrained(folder)` has it back.

    `training.json` beside it says how it was made. Raises `ConfigError` if `folder` is there already.
    """
    config, model = config_of(run), load(run, best=best)
    try:
        with directory_written_atomically(folder) as aside:
            write_model(model, aside)
            write_json(aside / "training.json", config.model_dump(mode="json"))
    except FileExistsError as error:
        raise ConfigError(f"{error}: name a new folder") from None
