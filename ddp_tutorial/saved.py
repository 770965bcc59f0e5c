"""What to do with a run's model once it is there: judge it, let it write, hand it on."""

import io
import json
import math
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from ddp_tutorial.checkpoint import latest_valid, stored
from ddp_tutorial.config import ConfigError, check
from ddp_tutorial.corpus import decode, encode, load_corpus
from ddp_tutorial.data import Windows
from ddp_tutorial.evaluation import held_out_loss
from ddp_tutorial.files import directory_written_atomically, write_json
from ddp_tutorial.manifest import CHECKPOINTS
from ddp_tutorial.model import GPT
from ddp_tutorial.runs import BEST, folder_of
from ddp_tutorial.train_config import TrainConfig
from ddp_tutorial.world import World, choose_device


def config_of(run: str | Path) -> TrainConfig:
    """The settings that a run was made with. Raises `ConfigError` if it is none."""
    path = folder_of(run) / "config.json"
    return check(TrainConfig, json.loads(path.read_text()), origin=str(path))


def load_model(run: str | Path, *, best: bool = False) -> GPT:
    """The model that a run has ended with; of one that has not ended, that of its newest valid checkpoint.

    With `best`, the one that `best_model` has kept. Raises `ConfigError` where there is none.
    """
    folder = folder_of(run)
    if best:
        kept = sorted((folder / BEST).glob("step_*"))
        if not kept:
            raise ConfigError(f"{folder} has kept no best model: train with best_model=true")
        return _quietly_loaded(kept[-1])
    if (folder / "model").is_dir():
        return _quietly_loaded(folder / "model")
    found, _ = latest_valid(World(), folder / CHECKPOINTS)
    if found is None:
        raise ConfigError(f"{folder} has no model yet, and no valid checkpoint: let it finish, or save on the way")
    model = GPT(**config_of(folder).model.model_dump())
    model.load_state_dict(stored(found, "model"))
    return model.eval()


def _quietly_loaded(folder: Path) -> GPT:
    """huggingface_hub prints that it loads; who wants JSON on stdout has no use for that."""
    with redirect_stdout(io.StringIO()):
        return GPT.from_pretrained(folder)


def evaluate(run: str | Path, *, samples: int | None = None, best: bool = False) -> dict[str, Any]:
    """The loss on held-out text: the same samples as in training, or the first `samples`. One process, which is enough.

    Besides nats per token, as perplexity, and as bits per byte (a token is a byte): what it would take to write the
    text down.
    """
    config, model = config_of(run), load_model(run, best=best)
    device = choose_device(config.device if config.device == "cpu" else "auto")
    held_out = Windows(load_corpus(config.corpus).valid, config.model.context)
    count = min(samples or config.eval_samples, len(held_out))
    loss = held_out_loss(World(device=device), model.to(device), held_out, count, config.batch_size)
    return {
        "eval_loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": loss / math.log(2),
        "samples": count,
        "tokens": count * config.model.context,
    }


def sample(
    run: str | Path, prompt: str, *, length: int = 200, temperature: float = 0.8, seed: int = 0, best: bool = False
) -> str:
    """`prompt`, and what the model writes after it."""
    if not prompt:
        raise ConfigError("an empty prompt: give the model at least one character to go on from")
    tokens = encode(prompt)
    return decode(load_model(run, best=best).generate(tokens, length, temperature=temperature, seed=seed))


def export(run: str | Path, folder: Path, *, best: bool = False) -> None:
    """Write the model to a new `folder`, as safetensors and JSON: `GPT.from_pretrained(folder)` has it back.

    `training.json` beside it says how it was made. Raises `ConfigError` if `folder` is there already.
    """
    config, model = config_of(run), load_model(run, best=best)
    try:
        with directory_written_atomically(folder) as aside:
            model.save_pretrained(aside)
            write_json(aside / "training.json", config.model_dump(mode="json"))
    except FileExistsError as error:
        raise ConfigError(f"{error}: name a new folder") from None
