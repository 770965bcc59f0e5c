"""Define the settings of a run, with their defaults, ranges and descriptions.

`TrainConfig` works with any model, data and loss. `TaskConfig` adds the settings that specify the model, the data and
the loss by name, for the command-line interface and for config files.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from pydantic import Field, create_model, field_validator, model_validator
from pydantic_core import PydanticCustomError

from ddp_tutorial.accumulation.config import FORWARDED_OPTIONS, PrecisionConfig
from ddp_tutorial.checkpoint.config import CheckpointConfig
from ddp_tutorial.config import Config
from ddp_tutorial.ddp.config import CompileConfig, DDPConfig
from ddp_tutorial.intervals import Interval, check_interval
from ddp_tutorial.local_sgd.config import OPTIONS as LOCAL
from ddp_tutorial.local_sgd.config import LocalConfig, require_rounds
from ddp_tutorial.mesh import MeshConfig
from ddp_tutorial.pipeline.config import StagesConfig
from ddp_tutorial.sharding.config import SourceConfig
from ddp_tutorial.slurm.config import SlurmConfig

Kind = Literal[  # see strategies.make_strategy
    "ddp",
    "invariant",
    "zero1",
    "zero2",
    "zero3",
    "fsdp",
    "pipeline",
    "local_sgd",
    "post_local_sgd",
    "diloco",
    "accelerate",
]
Mode = Literal["min", "max"]
OptimizerName = Literal["adamw", "sgd"]
ClassSetting = dict[str, Any]  # {"class": "torch.optim.SGD", "args": {"momentum": 0.9}}


def is_import_path(value: Any) -> bool:
    """Return whether `value` is an import path, such as "torch.optim.SGD"."""
    return isinstance(value, str) and re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", value) is not None


def check_class(value: Any, names: tuple[str, ...] = ()) -> Any:
    """Return `value`, which must be one of `names` or a class's import path and arguments. The class is not imported.

    Raises:
        PydanticCustomError: If `value` is invalid.
    """
    if value in names:
        return value
    try:
        path, args = value["class"], value.get("args", {})
        json.dumps(args, allow_nan=False)  # the arguments are stored in config.json
        if is_import_path(path) and isinstance(args, Mapping) and value.keys() <= {"class", "args"}:
            return {"class": path, "args": dict(args)}
    except (TypeError, KeyError, ValueError, AttributeError):
        pass
    named = "".join(f"{name!r}, " for name in names)
    raise PydanticCustomError(
        "class_setting",
        "Input should be {named}the import path of a class and its arguments, such as {example}",
        {"named": named and f"{named}or ", "example": "{class: PATH, args: {NAME: VALUE}}"},
    )


def check_function(value: Any) -> Any:
    """Return `value`, which must be None, a function's import path, or a class's import path and arguments."""
    return value if value is None or is_import_path(value) else check_class(value)


class BestConfig(Config):
    """The criterion that selects the best evaluation, for early stopping and for the best model."""

    metric: str = Field("loss", description="`loss`, or a metric that the loss function returns.")
    mode: Mode = Field("min", description="Whether lower or higher values are better.")


class EarlyStoppingConfig(Config):
    """Settings for stopping a run when its metric stops improving; see `stopping.without_progress`."""

    patience: int = Field(
        0, ge=0, description="Consecutive evaluations without improvement after which the run stops; 0 means no limit."
    )
    minimum_delta: float = Field(0.0, ge=0, description="Smallest change that counts as an improvement.")
    grace_steps: int = Field(0, ge=0, description="Number of initial steps whose evaluations do not count.")
    rule: str | ClassSetting | None = Field(
        None,
        examples=["mymodule.is_flat"],
        description="Import path of a function, or import path and arguments of a class with callable instances. The "
        "function receives the metric by step, and the run stops when the function returns true.",
    )

    @property
    def is_enabled(self) -> bool:
        """Whether a run may stop early."""
        return self.patience > 0 or self.rule is not None

    @field_validator("rule", mode="before")
    @classmethod
    def _rule_is_a_function_or_a_class(cls, value: Any) -> Any:
        return check_function(value)


class ProfileConfig(Config):
    """The steps that PyTorch's profiler records on every rank; see profiling.py."""

    steps: int = Field(0, ge=0, description="Number of steps to profile; 0 disables profiling.")
    first_step: int = Field(10, ge=1, description="First step to profile; earlier steps are a warm-up.")
    record_shapes: bool = Field(False, description="Record the shapes of the operators' inputs.")
    profile_memory: bool = Field(False, description="Record allocations.")
    with_stack: bool = Field(False, description="Record the source lines of operators.")

    @property
    def recorded(self) -> dict[str, bool]:
        """The options to pass to `torch.profiler.profile`."""
        return {name: getattr(self, name) for name in ("record_shapes", "profile_memory", "with_stack")}


class TrainConfig(Config):
    """The settings of a training run, for any model.

    On CPUs, runs with the same config, data and world size on the same machine are bitwise identical. On GPUs, such
    runs may differ, because some kernels sum in a nondeterministic order. For deterministic kernels, call
    `torch.use_deterministic_algorithms(True)` and set the environment variable CUBLAS_WORKSPACE_CONFIG=:4096:8.
    """

    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (("steps", "num_epochs"),)

    name: str = Field(
        "",
        examples=["first-run"],
        description="Name of the run directory under runs/; by default, the start time and a suffix.",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of the weights, the sample order and dropout.")
    strategy: Kind = Field("ddp", description="The strategy with which the ranks train one model.")
    ddp: DDPConfig = Field(
        DDPConfig(),
        description="The DDP implementation and its options; PyTorch's options keep their names.",
    )
    micro_batches: int = Field(
        4, ge=1, description="Number of micro-batches per step over all ranks, for strategy invariant."
    )
    accumulation: int = Field(
        1,
        ge=1,
        description="Micro-batches per step on each rank; strategy pipeline multiplies `pipeline.micro_batches` by "
        "this number.",
    )
    local: LocalConfig = Field(
        LocalConfig(),
        description="Length of a round, and the outer optimizer, for strategies local_sgd, post_local_sgd and diloco.",
    )
    mesh: MeshConfig = Field(
        MeshConfig(), description="Number of replicas and ranks per replica; by default, all ranks share one replica."
    )
    pipeline: StagesConfig = Field(StagesConfig(), description="Stages and their schedule, for strategy pipeline.")
    precision: PrecisionConfig = Field(
        PrecisionConfig(), description="Data type of matrix products, and loss scaling for float16."
    )

    compile: CompileConfig | None = Field(
        None,
        examples=[{"backend": "inductor"}],
        description="Compile the model with `torch.compile`: `false`, `true`, or its options.",
    )

    steps: int = Field(200, ge=1, description="Number of optimizer steps.")
    num_epochs: float | None = Field(
        None, gt=0, examples=[3], description="Number of passes over the training data, instead of `steps`."
    )
    optimizer: OptimizerName | ClassSetting = Field(
        "adamw",
        description="`adamw` (betas 0.9 and 0.95), `sgd` (momentum 0.9), or the import path and arguments of a "
        "subclass of `torch.optim.Optimizer`, such as `{class: torch.optim.SGD, args: {momentum: 0.9}}`.",
    )
    learning_rate: float = Field(
        3e-3, gt=0, description="Peak learning rate of the schedule, unless `optimizer.args` contains `lr`."
    )
    scheduler: ClassSetting | None = Field(
        None,
        examples=[{"class": "torch.optim.lr_scheduler.CosineAnnealingLR", "args": {"T_max": 100}}],
        description="Import path and arguments of a subclass of `torch.optim.lr_scheduler.LRScheduler`. This class "
        "replaces `warmup_steps`, `schedule`, `schedule_steps` and `final_lr_fraction`.",
    )
    warmup_steps: int = Field(20, ge=0, description="Steps in which the learning rate rises linearly from zero.")
    schedule: Literal["cosine", "linear", "constant", "none"] = Field(
        "cosine",
        description="Shape of the decay after the warm-up; `none` keeps the learning rate constant, without a warm-up.",
    )
    schedule_steps: int | None = Field(
        None, ge=1, examples=[200], description="Length of the schedule in steps; by default, `steps`."
    )
    final_lr_fraction: float = Field(0.1, ge=0, le=1, description="Final learning rate as a fraction of the peak.")
    weight_decay: float = Field(
        0.1,
        ge=0,
        description="Weight decay of matrices for `adamw` and `sgd`; biases and norms are not decayed.",
    )
    clip: float | None = Field(1.0, gt=0, description="Maximum norm of the gradient; `null` disables clipping.")
    oom_skips: int = Field(
        0,
        ge=0,
        description="Maximum number of consecutive batches to skip if a rank runs out of memory in the forward pass.",
    )

    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="Settings for saving and keeping checkpoints.")
    resume: str = Field(
        "never",
        description="`never`, `auto` (newest checkpoint of the same name), or the path of a checkpoint or a run.",
    )
    resume_allow: tuple[str, ...] = Field(
        (),
        strict=False,
        examples=[["learning_rate"]],
        description="Settings that may differ from the settings in the checkpoint.",
    )
    resume_without: tuple[str, ...] = Field(
        (),
        strict=False,
        examples=[["optimizer"]],
        description="Checkpoint components that are not restored, such as `optimizer`.",
    )

    log_every: int = Field(10, ge=1, description="Steps between writes to the log; the log contains every step.")
    eval_every: Interval = Field(50, description="Steps between evaluations, `epoch`, or `N epochs`.")
    eval_samples: int | None = Field(
        256, ge=1, description="Validation samples in one evaluation, over all ranks; `null` evaluates all samples."
    )
    per_device_eval_batch_size: int | None = Field(
        None,
        ge=1,
        examples=[32],
        description="Samples in one forward pass of an evaluation on one rank; by default, as in training.",
    )
    run_test: bool | None = Field(
        None,
        examples=[False],
        description="Evaluate the `test_data` of `Trainer` after the last step; by default, only if `test_data` is "
        "passed.",
    )
    target_loss: float | None = Field(
        None, examples=[2.0], description="Stop as soon as the validation loss is at most this value."
    )
    best: BestConfig = Field(
        BestConfig(),
        description="The metric that selects the best evaluation, for `early_stopping` and `best_model`.",
    )
    early_stopping: EarlyStoppingConfig = Field(
        EarlyStoppingConfig(), description="Settings for stopping a run when the metric no longer improves."
    )
    best_model: bool = Field(False, description="Keep the weights of the best evaluation in the directory `best`.")
    tensorboard: bool = Field(True, description="Write TensorBoard events next to `metrics.jsonl`.")
    private: bool = Field(
        True, description="Whether only you can read the run directory; if false, its permissions follow the umask."
    )
    memory_limit_mb: float = Field(
        0, ge=0, description="Memory in MB above which a rank logs a warning; 0 disables the warning."
    )
    gpu_memory_limit_mb: float = Field(
        0, ge=0, description="Reserved GPU memory in MB above which a rank logs a warning; 0 disables the warning."
    )
    empty_cache_every: int = Field(
        0, ge=0, description="Steps between calls to `torch.cuda.empty_cache`; 0 keeps unused GPU memory reserved."
    )
    profile: ProfileConfig = Field(ProfileConfig(), description="Steps that PyTorch's profiler records on every rank.")

    @property
    def peak_learning_rate(self) -> float:
        """The highest learning rate of the schedule."""
        return self.learning_rate

    @property
    def names_classes(self) -> bool:
        """Whether the optimizer, the scheduler or the early-stopping rule is specified by an import path."""
        imported = self.scheduler, self.early_stopping.rule
        return not isinstance(self.optimizer, str) or any(each is not None for each in imported)

    @property
    def label(self) -> str:
        """The suffix of the default run name, after the timestamp."""
        return "train"

    @property
    def remarks(self) -> list[str]:
        """Messages to log when the run starts, for example about an effective value that differs from the config."""
        return []

    @model_validator(mode="after")
    def _options_belong_to_the_strategy(self) -> "TrainConfig":
        if self.strategy == "invariant" and self.accumulation != 1:
            raise ValueError(
                f"'accumulation' must be 1 for strategy=invariant, got {self.accumulation}; set 'micro_batches' (the "
                "number of micro-batches over all ranks) instead"
            )
        default = StagesConfig()
        of_pipeline = [
            name for name in StagesConfig.model_fields if getattr(self.pipeline, name) != getattr(default, name)
        ]
        if of_pipeline and self.strategy != "pipeline":
            raise ValueError(f"'pipeline.{of_pipeline[0]}' requires strategy=pipeline, got strategy={self.strategy}")
        changed = [name for name in DDPConfig.model_fields if getattr(self.ddp, name) != getattr(DDPConfig(), name)]
        if self.strategy == "accelerate" and (unknown := [name for name in changed if name not in FORWARDED_OPTIONS]):
            raise ValueError(
                f"'ddp.{unknown[0]}' requires strategy=ddp or strategy=zero1, got strategy=accelerate, which supports "
                f"only these options of 'ddp': {', '.join(FORWARDED_OPTIONS)}"
            )
        refused = [name for name in changed if self.strategy not in LOCAL or name != "simulated_link"]
        if refused and self.strategy in {"invariant", "zero2", "zero3", "fsdp", "pipeline", *LOCAL}:
            raise ValueError(
                f"'ddp.{refused[0]}' requires strategy=ddp or strategy=zero1, got strategy={self.strategy}"
            )
        if self.ddp.hook == "powersgd" and self.precision.dtype == "fp16":
            raise ValueError(
                "'ddp.hook' must not be powersgd with precision.dtype=fp16. PowerSGD adds the error of each step to "
                "the next gradient, so all gradients after an overflow would be NaN. Use precision.dtype=bf16, or a "
                "different hook"
            )
        require_rounds(self.strategy, self.local, self.steps if self.num_epochs is None else None)
        if self.strategy != "ddp" and self.oom_skips:
            raise ValueError(f"'oom_skips' requires strategy=ddp, got strategy={self.strategy}")
        return self

    @field_validator("compile", mode="before")
    @classmethod
    def _compiles_with_defaults(cls, value: Any) -> Any:
        return {True: {}, False: None}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _model_can_be_compiled(self) -> "TrainConfig":
        if self.compile and self.strategy not in {"ddp", "zero1"}:
            raise ValueError(f"'compile' requires strategy=ddp or strategy=zero1, got strategy={self.strategy}")
        if self.compile:
            self.ddp.require_compilable()
        return self

    @model_validator(mode="after")
    def _mesh_belongs_to_the_strategy(self) -> "TrainConfig":
        along = {"pipeline": "pipeline"} | dict.fromkeys(("zero1", "zero2", "zero3", "fsdp"), "shard")
        known = {"replicate", along[self.strategy]} if self.strategy in along else set()
        of = {"shard": "strategy=zero1, zero2, zero3 or fsdp", "pipeline": "strategy=pipeline"}
        for name in MeshConfig.model_fields:
            if getattr(self.mesh, name) is not None and name not in known:
                whose = of.get(name, "strategy=zero1, zero2, zero3, fsdp or pipeline")
                raise ValueError(f"'mesh.{name}' requires {whose}, got strategy={self.strategy}")
        if self.strategy == "pipeline" and self.mesh.pipeline:
            self.pipeline.check_on(self.mesh.pipeline)
        return self

    @model_validator(mode="after")
    def _can_be_resumed(self) -> "TrainConfig":
        if self.resume == "auto" and not self.name:
            raise ValueError("'resume' must not be auto for a run without a name; set name=NAME")
        return self

    @field_validator("eval_every", mode="before")
    @classmethod
    def _eval_every_is_an_interval(cls, value: Any) -> Any:
        return check_interval(value, least=1)

    @field_validator("optimizer", mode="before")
    @classmethod
    def _optimizer_is_a_name_or_a_class(cls, value: Any) -> Any:
        return check_class(value, get_args(OptimizerName))

    @field_validator("scheduler", mode="before")
    @classmethod
    def _scheduler_is_a_class(cls, value: Any) -> Any:
        return None if value is None else check_class(value)

    @field_validator("name")
    @classmethod
    def _stays_below_runs(cls, name: str) -> str:
        if not re.fullmatch(r"([\w][\w.-]*(/[\w][\w.-]*)*)?", name):
            raise ValueError(
                f"'name' must be a path under runs/ with only letters, digits, '-', '_', '.' and '/', got {name!r}"
            )
        return name


_CLASS: Any = Field(
    None,
    examples=["mymodule.MyModel"],
    description="Import path of a subclass of `torch.nn.Module` to train instead of the GPT, on samples of `context` "
    "tokens. The other settings of `model`, except `args`, apply only to the GPT.",
)
# Created by a function, because `class` is a keyword and cannot be written as the name of a field.
_FIELDS: Any = {"class": (str | None, _CLASS)}
_Imported: Any = create_model("_Imported", __base__=Config, **_FIELDS)


class ModelConfig(_Imported, Config):
    """The size of the GPT model that the `gpt` task trains, or the class of a different model."""

    args: dict[str, Any] = Field({}, examples=[{"width": 64}], description="Keyword arguments of `class`.")
    layers: int = Field(4, ge=1, description="Number of transformer blocks.")
    heads: int = Field(4, ge=1, description="Attention heads; must divide `width`.")
    width: int = Field(128, ge=1, description="Size of the embeddings.")
    context: int = Field(128, ge=1, description="Tokens in a sample.")
    vocab: int = Field(256, ge=2, description="Size of the vocabulary; tokenizer bytes has 256 tokens.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout probability.")
    recompute: bool = Field(
        False, description="Recompute the activations of a block in the backward pass instead of storing them."
    )

    @property
    def imported(self) -> ClassSetting | None:
        """The model's class and arguments, or None for the GPT."""
        path = getattr(self, "class")
        return None if path is None else {"class": path, "args": self.args}

    @property
    def size(self) -> dict[str, Any]:
        """The constructor arguments of the GPT."""
        return self.model_dump(exclude={"class", "args"})

    @model_validator(mode="after")
    def _class_is_an_import_path(self) -> "ModelConfig":
        path = getattr(self, "class")
        if path is None and self.args:
            raise ValueError(
                "'model.args' requires 'model.class', which is not set: set model.class or remove model.args"
            )
        if path is not None:
            check_class({"class": path, "args": self.args})
        return self

    @model_validator(mode="after")
    def _heads_divide_width(self) -> "ModelConfig":
        if self.width % self.heads:
            raise ValueError(f"'model.width' must be a multiple of 'model.heads' ({self.heads}), got {self.width}")
        return self


class TaskConfig(TrainConfig):
    """The settings of a run, including the number of ranks. The model, data and loss are specified by name."""

    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (
        *TrainConfig.alternatives,
        ("batch_size", "per_device_train_batch_size"),
    )

    task: str = Field(
        "gpt",
        description="`gpt`, or the import path of a `Task`, which builds the model, the data and the loss.",
    )
    corpus: str = Field(
        "python",
        description="Data to train on: python, stories, text:, json:, parquet: or bin:PATH, or hub:OWNER/NAME.",
    )
    tokenizer: str = Field(
        "bytes", description="`bytes`, or the path of a Hugging Face tokenizer.json; set `model.vocab` to its size."
    )
    model: ModelConfig = Field(ModelConfig(), description="Size of the GPT that task gpt trains.")
    loss: str | ClassSetting | None = Field(
        None,
        examples=["mymodule.my_loss"],
        description="Import path of a loss function, or import path and arguments of a class with callable instances, "
        "`{class: mymodule.MyLoss, args: {...}}`; by default, the loss of the task.",
    )
    source: SourceConfig = Field(SourceConfig(), description="Settings for reading and distributing samples.")
    batch_size: int = Field(16, ge=1, description="Samples in one optimizer step, over all ranks.")
    per_device_train_batch_size: int | None = Field(
        None,
        ge=1,
        examples=[8],
        description="Samples in one forward pass on one rank, instead of `batch_size`. A step contains this number "
        "of samples, times the micro-batches per rank, times the number of ranks.",
    )
    learning_rate_rule: Literal["fixed", "linear", "sqrt"] = Field(
        "fixed", description="The rule for scaling the learning rate with `batch_size`."
    )
    learning_rate_batch: int = Field(16, ge=1, description="The `batch_size` for which `learning_rate` was chosen.")
    nprocs: int = Field(2, ge=1, description="Number of ranks to start; ignored if torchrun or srun started the ranks.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Device of the ranks; `auto` uses GPUs if there is a GPU for each rank."
    )
    backend: Literal["auto", "gloo", "nccl"] = Field(
        "auto", description="Backend of the process group; `auto` uses NCCL between GPUs, otherwise gloo."
    )
    collective_timeout: float = Field(
        600, gt=0, description="Seconds that a rank waits for the other ranks in a collective."
    )
    # Excluded from the records of runs and checkpoints, because it does not change the result.
    slurm: SlurmConfig = Field(
        SlurmConfig(), exclude=True, description="Settings of a Slurm job. `nprocs` is the number of ranks."
    )

    @property
    def peak_learning_rate(self) -> float:
        """`learning_rate`, scaled to `batch_size` by `learning_rate_rule`.

        The rules are heuristics for a batch that is k times `learning_rate_batch`. With the linear rule and a warm-up,
        one step should match k steps with the smaller batch (Goyal et al., "Accurate, large minibatch SGD", 2017). The
        square-root rule is for Adam, which divides by the gradient's magnitude. If noise dominates, the magnitude falls
        by a factor of sqrt(k) (Malladi et al., "On the SDEs and scaling rules for adaptive gradient algorithms", 2022).
        """
        times = self.batch_size / self.learning_rate_batch
        return self.learning_rate * {"fixed": 1.0, "linear": times, "sqrt": times**0.5}[self.learning_rate_rule]

    @property
    def names_classes(self) -> bool:
        """Whether the task, the model, the loss or a setting of `TrainConfig` is specified by an import path."""
        if is_import_path(self.task):
            return True
        return super().names_classes or self.model.imported is not None or self.loss is not None

    @property
    def has_tokens(self) -> bool:
        """Whether the corpus contains tokens and therefore does not require a tokenizer."""
        return self.corpus.startswith("bin:")

    @property
    def group_options(self) -> dict[str, Any]:
        """The arguments of `launch` and `run` that set up the process group."""
        return {"device": self.device, "backend": self.backend, "collective_timeout": self.collective_timeout}

    @property
    def label(self) -> str:
        """The corpus kind, which follows the timestamp in the default run name."""
        return self.corpus.partition(":")[0]

    @property
    def remarks(self) -> list[str]:
        """A message about the learning rate if `learning_rate_rule` is not "fixed"."""
        if self.learning_rate_rule == "fixed":
            return []
        return [
            f"learning rate {self.peak_learning_rate:g}: {self.learning_rate:g}, scaled from batch_size "
            f"{self.learning_rate_batch} to {self.batch_size} by the rule {self.learning_rate_rule!r}"
        ]

    @field_validator("backend", mode="before")
    @classmethod
    def _backend_is_in_pytorchs_packages(cls, value: Any) -> Any:
        if value == "mpi":
            raise ValueError(
                "'backend' must be 'auto', 'gloo' or 'nccl', got 'mpi', which PyTorch's prebuilt packages do not "
                "support. Use backend=auto, which selects nccl or gloo"
            )
        return value

    @field_validator("loss", mode="before")
    @classmethod
    def _loss_is_a_function_or_a_class(cls, value: Any) -> Any:
        return check_function(value)

    @model_validator(mode="after")
    def _rule_has_a_learning_rate(self) -> "TaskConfig":
        if (
            self.learning_rate_rule != "fixed"
            and not isinstance(self.optimizer, str)
            and "lr" in self.optimizer["args"]
        ):
            raise ValueError(
                f"'optimizer.args.lr' overrides 'learning_rate', so 'learning_rate_rule' ({self.learning_rate_rule}) "
                "has no effect: remove 'optimizer.args.lr', or set learning_rate_rule=fixed"
            )
        return self

    @model_validator(mode="after")
    def _samples_have_numbers(self) -> "TaskConfig":
        if self.strategy == "invariant" and self.source.kind == "streamed":
            raise ValueError(
                "strategy=invariant requires random access to the samples, which source.kind=streamed does not "
                "support. Use a different source or strategy"
            )
        return self
