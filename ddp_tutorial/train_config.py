"""What a run is told: every setting of `train`, with its default, its range, and what it is for."""

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from ddp_tutorial.checkpoint import Check
from ddp_tutorial.config import Config
from ddp_tutorial.ddp import DDPConfig
from ddp_tutorial.precision import PrecisionConfig
from ddp_tutorial.sources import SourceConfig


class ModelConfig(Config):
    layers: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    width: int = Field(128, ge=1)
    context: int = Field(128, ge=1, description="tokens that the model sees at once")
    dropout: float = Field(0.0, ge=0, lt=1)
    recompute: bool = Field(False, description="activations of a block in backward, instead of keeping them")

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "ModelConfig":
        if self.width % self.heads:
            raise ValueError(f"'model.width' {self.width} should be a multiple of 'model.heads' {self.heads}")
        return self


class CheckpointConfig(Config):
    """When the state of a run is saved, and what is kept."""

    every: int = Field(0, ge=0, description="steps between saves, with one at the end; 0 for none")
    keep_last: int = Field(2, ge=1)
    keep_best: int = Field(0, ge=0, description="by the metric `best`, besides the last ones")
    best: str = "eval_loss"
    best_is: Literal["min", "max"] = "min"
    check: Check = Field("tensor", description="that ranks are equal before it is written; none, quick, tensor, full")
    background: bool = Field(False, description="training waits for a copy in memory only, not for the disk")


class EarlyStoppingConfig(Config):
    """When a run ends before its last step, because it gets no better; see `stopping.without_progress`."""

    patience: int = Field(0, ge=0, description="evaluations in a row without a better held-out loss; 0 for never")
    minimum_delta: float = Field(0.0, ge=0, description="lower by this much is better")
    grace_steps: int = Field(0, ge=0, description="steps before evaluations begin to count")


class ProfileConfig(Config):
    """Steps that torch's profiler watches, on every rank; see profiling.py."""

    steps: int = Field(0, ge=0, description="how many; 0 for none")
    first_step: int = Field(10, ge=1, description="the first of them; those before warm up")


class TrainConfig(Config):
    """Everything that decides what a run does. Same config, same world size, same machine: same bits."""

    name: str = Field("", description="folder below runs/; by default made from corpus and time")
    corpus: str = "python"
    model: ModelConfig = ModelConfig()
    seed: int = Field(0, ge=0, lt=2**31)

    nprocs: int = Field(2, ge=1, description="ranks to start on this machine; torchrun and Slurm have their own say")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    strategy: Literal["ddp", "invariant"] = "ddp"
    ddp: DDPConfig = DDPConfig()
    micro_batches: int = Field(4, ge=1, description="strategy invariant only: of a step, over all ranks")
    accumulation: int = Field(1, ge=1, description="strategy ddp only: micro-batches of a step, on each rank")
    source: SourceConfig = SourceConfig()
    precision: PrecisionConfig = PrecisionConfig()

    steps: int = Field(200, ge=1)
    batch_size: int = Field(16, ge=1, description="samples in one optimiser step, over all ranks")
    optimizer: Literal["adamw", "sgd"] = Field("adamw", description="see trainer.OPTIMIZERS")
    learning_rate: float = Field(3e-3, gt=0, description="the highest; of a batch of `learning_rate_batch`, if scaled")
    learning_rate_rule: Literal["fixed", "linear", "sqrt"] = Field("fixed", description="how it grows with batch_size")
    learning_rate_batch: int = Field(16, ge=1, description="batch_size that learning_rate was chosen for")
    warmup_steps: int = Field(20, ge=0, description="steps in which the learning rate rises from zero")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="how it falls after that")
    schedule_steps: int | None = Field(None, ge=1, description="in which it goes up and down; by default, `steps`")
    final_lr_fraction: float = Field(0.1, ge=0, le=1, description="in the end, as a part of the highest")
    weight_decay: float = Field(0.1, ge=0)
    clip: float = Field(1.0, gt=0, description="largest norm of the gradient")

    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: str = Field("never", description="never; auto: from the run's own last checkpoint; or the path of one")
    resume_allow: tuple[str, ...] = Field(
        (), strict=False, description="settings that may differ from the checkpoint's"
    )
    resume_without: tuple[str, ...] = Field((), strict=False, description="components to begin anew, such as optimizer")

    log_every: int = Field(10, ge=1, description="steps between writes to the log, which holds every step")
    eval_every: int = Field(50, ge=1)
    eval_samples: int = Field(256, ge=1, description="held-out samples in one evaluation, over all ranks")
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    best_model: bool = Field(False, description="keep the weights with the lowest held-out loss so far, in best/")
    tensorboard: bool = Field(True, description="events for TensorBoard, beside metrics.jsonl")
    memory_limit_mb: float = Field(0, ge=0, description="of one rank; warns above it; 0 for no limit")
    profile: ProfileConfig = ProfileConfig()

    @model_validator(mode="after")
    def _options_belong_to_the_strategy(self) -> "TrainConfig":
        if self.strategy == "invariant" and self.source.kind == "streamed":
            raise ValueError("'strategy' invariant needs samples by number: use another 'source.kind' than streamed")
        if self.strategy == "invariant" and self.accumulation != 1:
            raise ValueError("'accumulation' is of strategy ddp; invariant has 'micro_batches', over all ranks")
        return self

    @model_validator(mode="after")
    def _can_be_resumed(self) -> "TrainConfig":
        if self.resume == "auto" and not self.name:
            raise ValueError("'resume' auto goes on with the run of the same 'name': give it one")
        if self.checkpoint.every and self.ddp.hook == "powersgd":
            raise ValueError("'ddp.hook' powersgd keeps what it has left out in memory, and no checkpoint has it")
        return self

    @field_validator("name")
    @classmethod
    def _stays_below_runs(cls, name: str) -> str:
        if not re.fullmatch(r"([\w][\w.-]*(/[\w][\w.-]*)*)?", name):
            raise ValueError(
                f"'name' {name!r} should be a folder below runs/, of letters, digits, '-', '_', '.' and '/'"
            )
        return name
