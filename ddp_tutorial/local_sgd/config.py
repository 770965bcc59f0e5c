"""Define the settings of the strategies that average weights after several local steps."""

from pydantic import Field

from ddp_tutorial.config import Config

# The strategies in this package, and the options in `LocalConfig` that each strategy accepts.
OPTIONS: dict[str, frozenset[str]] = {
    "local_sgd": frozenset({"round"}),
    "post_local_sgd": frozenset({"round", "begin"}),
    "diloco": frozenset({"round", "outer_learning_rate", "outer_momentum"}),
}


class LocalConfig(Config):
    """The length of a round, and the settings of the outer optimizer."""

    round: int = Field(
        8, ge=1, description="Number of steps that each rank takes on its own before the weights are averaged."
    )
    begin: int = Field(
        0, ge=0, description="Strategy post_local_sgd only: steps with averaged gradients before the first round."
    )
    outer_learning_rate: float = Field(
        0.7, gt=0, description="Strategy diloco only: learning rate of the outer optimizer; 1 moves to the mean."
    )
    outer_momentum: float = Field(
        0.9, ge=0, lt=1, description="Strategy diloco only: Nesterov momentum of the outer optimizer."
    )


def require_rounds(strategy: str, config: LocalConfig, steps: int | None) -> None:
    """Validate the options of a strategy.

    Raises:
        ValueError: If an option does not belong to `strategy`, or if the first round would not end within `steps`
            steps. `steps=None` skips the second check, because `num_epochs` has not been converted to steps yet.
    """
    default = LocalConfig()
    for name in LocalConfig.model_fields:
        if getattr(config, name) != getattr(default, name) and name not in OPTIONS.get(strategy, frozenset()):
            *others, last = [each for each, options in OPTIONS.items() if name in options]
            whose = f"strategy={', '.join(others)} or {last}" if others else f"strategy={last}"
            raise ValueError(f"'local.{name}' requires {whose}, got strategy={strategy}")
    if strategy not in OPTIONS:
        return
    if strategy == "post_local_sgd" and not config.begin:
        raise ValueError(
            "'local.begin' must be at least 1 for strategy=post_local_sgd, got 0. This strategy averages gradients in "
            "the first 'local.begin' steps. To use local SGD from the first step, use strategy=local_sgd"
        )
    if steps is not None and config.begin + config.round > steps:
        end = "'local.begin' + 'local.round'" if config.begin else "'local.round'"
        got = f"{config.begin} + {config.round}" if config.begin else f"{config.round}"
        raise ValueError(
            f"{end} must be at most 'steps' ({steps}), got {got}. Otherwise, the ranks never average their weights"
        )
