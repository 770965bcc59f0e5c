"""Define tasks, which build a model, samples and a loss from a `TaskConfig`.

    config = TaskConfig(steps=100)
    results = launch(train, 2, config)      # two processes; launch(train, 1, config) does the same work in one process

`batch_size` is the number of samples in a step over all ranks, so one process and N ranks do the same work. To train
your own model on your own data from config files and the command line, define a `Task` in a module. Then set `task` to
the import path of your `Task`, such as `mymodule.DIGITS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ddp_tutorial.accumulation.accelerate_strategy import require_accelerate
from ddp_tutorial.accumulation.loss import Loss
from ddp_tutorial.checkpoint.resuming import find_resume_point
from ddp_tutorial.collectives import rank_zero_first
from ddp_tutorial.config import ConfigError, did_you_mean
from ddp_tutorial.files import RUNS
from ddp_tutorial.intervals import steps_between
from ddp_tutorial.pipeline.parallel import check_pipeline
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.processes.signals import SIGNALS
from ddp_tutorial.sharding.corpus import is_cached, load_corpus
from ddp_tutorial.sharding.permutation import GlobalBatchSampler, Permutation
from ddp_tutorial.sharding.samples import Data, TokenBlocks
from ddp_tutorial.sharding.source import Source
from ddp_tutorial.sharding.sources import check_source, make_source
from ddp_tutorial.sharding.token_files import largest_token
from ddp_tutorial.sharding.tokenizer import BYTES, load_tokenizer, tokenize
from ddp_tutorial.training.compilation import require_backend, require_compiler
from ddp_tutorial.training.config import TaskConfig, is_import_path
from ddp_tutorial.training.cuts import with_recorded_cuts
from ddp_tutorial.training.gpt import GPT, next_token_loss
from ddp_tutorial.training.imported import check_arguments, construct, import_callable, import_object
from ddp_tutorial.training.optimization import check_update
from ddp_tutorial.training.stopping import stopping_rule
from ddp_tutorial.training.strategies import mesh_of, micro_batches_per_rank, pipeline_of
from ddp_tutorial.training.trainer import Trainer, TrainResult, with_steps
from ddp_tutorial.world import World, choose_device


@dataclass(frozen=True)
class Task:
    """Functions that build a model, samples and a loss. All ranks call the functions; rank 0 calls `samples` first."""

    model: Callable[[TaskConfig], nn.Module]
    samples: Callable[[TaskConfig], tuple[Data, Data]]  # training samples, validation samples
    loss: Loss
    unit: str  # the unit of the loss's count
    units_per_sample: Callable[[TaskConfig], int]
    batch_like: Callable[[TaskConfig, int], Any]  # returns a batch with the given number of samples, to estimate memory


def _gpt(config: TaskConfig) -> nn.Module:
    if config.model.imported is not None:
        return construct("model", config.model.imported, nn.Module)
    return GPT(**config.model.size)


def _token_blocks(config: TaskConfig) -> tuple[Data, Data]:
    corpus = load_corpus(config.corpus)
    if config.has_tokens:
        vocab = 1 + max(map(largest_token, (corpus.train, corpus.valid)))
    else:
        vocab = load_tokenizer(config.tokenizer).vocab
        corpus = tokenize(corpus, config.tokenizer)
    if config.model.imported is None and vocab > config.model.vocab:
        raise ConfigError(
            f"'model.vocab' must be at least {vocab} for the tokens of corpus {config.corpus!r} with tokenizer "
            f"{config.tokenizer!r}, got {config.model.vocab}; set model.vocab={vocab}"
        )
    return TokenBlocks(corpus.train, config.model.context), TokenBlocks(corpus.valid, config.model.context)


TASKS: dict[str, Task] = {
    "gpt": Task(
        model=_gpt,
        samples=_token_blocks,
        loss=next_token_loss,
        unit="tokens",
        units_per_sample=lambda config: config.model.context,
        batch_like=lambda config, samples: {
            "tokens": torch.zeros(samples, config.model.context + 1, dtype=torch.int64)
        },
    ),
}


def with_batch_size(config: TaskConfig, ranks: int) -> TaskConfig:
    """Return `config` with `per_device_train_batch_size` converted to `batch_size`.

    Raises:
        ConfigError: If `batch_size` contradicts `per_device_train_batch_size`.
    """
    per_device = config.per_device_train_batch_size
    if per_device is None:
        return config
    micro_batches = micro_batches_per_rank(config, ranks)
    total = per_device * micro_batches * ranks
    if "batch_size" in config.model_fields_set and config.batch_size != total:
        raise ConfigError(
            f"'per_device_train_batch_size' {per_device} x {micro_batches} micro-batches x {ranks} ranks = {total} "
            f"samples per step, but 'batch_size' is {config.batch_size}. Remove one of the two settings"
        )
    return config.model_copy(update={"batch_size": total, "per_device_train_batch_size": None})


def task_of(config: TaskConfig) -> Task:
    """Return the task that `config` specifies by name or import path. Raise `ConfigError` if the task is unknown."""
    if config.task in TASKS:
        return TASKS[config.task]
    if not is_import_path(config.task):
        raise ConfigError(f"unknown 'task' {config.task!r}.{did_you_mean(config.task, sorted(TASKS))}")
    found = import_object("task", config.task, lambda value: isinstance(value, Task))
    if not isinstance(found, Task):
        raise ConfigError(
            f"'task' must be the import path of a Task, got {config.task!r}, which is of type {type(found).__name__}"
        )
    return found


def loss_of(config: TaskConfig) -> Loss:
    """Return the loss function that `config` specifies. The default is the task's loss.

    Raises:
        ConfigError: If the function or the class cannot be imported, or if the class does not accept its arguments.
    """
    return task_of(config).loss if config.loss is None else import_callable("loss", config.loss)


def samples_of(config: TaskConfig, world: World) -> tuple[Data, Data]:
    """Return the training and validation samples. Raise `ConfigError` if there are too few samples. Collective."""
    with rank_zero_first(world):
        train, validation = task_of(config).samples(config)
    if len(train) < config.batch_size or not len(validation):
        origin, size = f"corpus {config.corpus!r}", f" of {config.model.context} tokens"
        fix = "Use more text, a smaller batch_size or a smaller model.context."
        if config.task not in TASKS:
            origin, size, fix = f"task {config.task!r}", "", "Use more samples or a smaller batch_size."
        raise ConfigError(
            f"{origin} contains {len(train)} training samples{size} and {len(validation)} validation samples, too few "
            f"for one batch of {config.batch_size} and one evaluation. {fix}"
        )
    return train, validation


def source_of(config: TaskConfig, world: World) -> Source:
    """Return the source of training batches that `config` describes. Collective."""
    config = with_batch_size(config, world.size)
    train, _ = samples_of(config, world)
    return make_source(train, config.batch_size, world, seed=config.seed, config=config.source)


def check_start(config: TaskConfig, ranks: int) -> tuple[TaskConfig, float | None]:
    """Validate `config` for training on `ranks` ranks, without starting ranks or writing files.

    If the corpus must first be downloaded or converted, the samples and the checkpoint to resume from are not checked.

    Returns:
        The config with the `steps` and `batch_size` that training would use, and the number of steps per epoch (None if
        unknown).

    Raises:
        ConfigError: If training would raise a `ConfigError`, or if a setting is specified in epochs but the corpus is
            not readable yet.
    """
    load_tokenizer(config.tokenizer)
    check_world(config, ranks)
    config = with_batch_size(config, ranks)
    # Otherwise, reading the samples would write a cache of the corpus or of its tokens.
    is_readable = is_cached(config.corpus) and (config.has_tokens or config.tokenizer == BYTES)
    if not is_readable:
        require_no_epochs(config)
        return config, None
    train, _ = samples_of(config, World())
    if isinstance(train, TokenBlocks):
        check_source(train, config.batch_size, World(0, ranks, 0, ranks), config.source)
    batches = GlobalBatchSampler(Permutation(len(train), config.seed), config.batch_size, config.source.remainder)
    steps_per_epoch = None if config.source.kind == "streamed" else batches.steps_per_epoch
    config = with_steps(config, steps_per_epoch)
    steps_between("eval_every", config.eval_every, steps_per_epoch)
    steps_between("checkpoint.every", config.checkpoint.every, steps_per_epoch)
    settings = with_recorded_cuts(config, World(), ranks).model_dump(mode="json")
    find_resume_point(World(), RUNS / config.name, config.resume, settings, config.resume_allow)
    return config, steps_per_epoch


def require_no_epochs(config: TaskConfig) -> None:
    """Raise `ConfigError` if a setting is specified in epochs, whose length is unknown before the corpus is read."""
    every = {"eval_every": config.eval_every, "checkpoint.every": config.checkpoint.every}
    counted = [name for name, interval in every.items() if isinstance(interval, str)]
    for name in ["num_epochs"] * (config.num_epochs is not None) + counted:
        raise ConfigError(
            f"{name!r} cannot be converted to steps, because corpus {config.corpus!r} has not been tokenized "
            "yet. Set a number of steps instead, or start a run first to tokenize the corpus"
        )


def check_world(config: TaskConfig, ranks: int) -> None:
    """Raise `ConfigError` if the mesh or the stages do not fit `ranks` ranks, or if a package or a compiler is missing.

    The check also imports the classes and the loss that `config` specifies by import path. It does not read data.
    """
    if config.compile:
        require_backend(config.compile)
        require_compiler(config.compile, choose_device(config.device, local_size=ranks, backend=config.backend))
    if config.strategy == "accelerate":
        require_accelerate()
    task_of(config)
    if config.names_classes:
        check_update(config)
        loss_of(config)
        stopping_rule(config)
    if config.model.imported is not None:
        check_arguments("model", config.model.imported, nn.Module)
    micro_batches_per_rank(config, ranks)
    mesh_of(config, ranks)
    if config.strategy == "pipeline":
        with torch.device("meta"):
            model = task_of(config).model(config)
        check_pipeline(model, pipeline_of(config, ranks), ranks)


def model_of(config: TaskConfig) -> nn.Module:
    """Return the model with initial weights that depend only on `config.seed`."""
    torch.manual_seed(config.seed)
    return task_of(config).model(config)


def make_trainer(config: TaskConfig, world: World) -> Trainer:
    """Return a Trainer for the task that `config` specifies. Collective."""
    config, task = with_batch_size(config, world.size), task_of(config)
    train, validation = samples_of(config, world)
    source = make_source(train, config.batch_size, world, seed=config.seed, config=config.source)
    return Trainer(model_of(config), source, loss_of(config), world, config, validation_data=validation, unit=task.unit)


def train(world: World, config: TaskConfig) -> TrainResult:
    """Train the configured task on this rank. `launch(train, config.nprocs, config)` starts the ranks. Collective.

    Raises:
        ConfigError: If `make_trainer` or `Trainer` rejects the config.
    """
    return make_trainer(config, world).train()


def launch_training(config: TaskConfig, **options: Any) -> TrainResult:
    """Train on `config.nprocs` ranks on this machine, and return rank 0's result.

    `options` are passed to `launch`.
    """
    check_world(config, config.nprocs)
    defaults = {"forward_signals": SIGNALS, **config.group_options}
    results = launch(train, config.nprocs, config, **(defaults | options))
    return results[0]
