"""AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019), quick also for small tensors.

torch's own, with `fused=True`, updates many tensors in one call. But at each step it lists them anew, and counts the
steps of each by itself: for a dozen small ones, that takes several times as long as their update.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch


class _Tensors(NamedTuple):
    """Of one group, those on one device and of one dtype: what a call of the update takes."""

    parameters: list[torch.Tensor]
    averages: list[torch.Tensor]
    squares: list[torch.Tensor]
    counts: torch.Tensor  # [parameters], of the steps of each
    count_of_each: list[torch.Tensor]  # views of it


class _Listed(NamedTuple):
    """The parameters of a group that had a gradient, with the state that each had then."""

    parameters: list[torch.Tensor]
    states: list[dict[str, torch.Tensor]]
    tensors: list[_Tensors]


class AdamW(torch.optim.AdamW):
    """torch's with `fused=True`, bit for bit, and its state dict; the tensors are listed once.

    They are listed anew where other parameters have a gradient than at the step before, and where a state was loaded.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, fused=True)
        self._listed: dict[int, _Listed] = {}  # by the number of the group

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._listed = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of all parameters that have a gradient. Returns what `closure` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Where torch's GradScaler is used, it leaves these here for a fused optimizer.
        scale, overflow = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for number, group in enumerate(self.param_groups):
            for tensors in self._tensors(number, group):
                tensors.counts.add_(1)
                torch._fused_adamw_(  # what torch's own step calls in the end
                    tensors.parameters,
                    [p.grad for p in tensors.parameters if p.grad is not None],  # all have one
                    tensors.averages,
                    tensors.squares,
                    [],
                    tensors.count_of_each,
                    amsgrad=False,
                    lr=group["lr"],
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=group["maximize"],
                    grad_scale=scale,
                    found_inf=overflow,
                )
                if overflow is not None:
                    tensors.counts.sub_(overflow)
        return loss

    def _tensors(self, number: int, group: dict[str, Any]) -> list[_Tensors]:
        """Those that the update of a group takes."""
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self.state[parameter] for parameter in parameters]
        listed = self._listed.get(number)
        if listed is None or not (_same(parameters, listed.parameters) and _same(states, listed.states)):
            self._init_group(group, [], [], [], [], [], [])  # makes the state of those that have none yet
            listed = self._listed[number] = _Listed(parameters, states, list(self._by_kind(parameters)))
        return listed.tensors

    def _by_kind(self, parameters: Sequence[torch.Tensor]) -> Iterable[_Tensors]:
        kinds: defaultdict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        for parameter in parameters:
            kinds[parameter.device, parameter.dtype].append(parameter)
        for alike in kinds.values():
            states = [self.state[parameter] for parameter in alike]
            counts = torch.stack([state["step"] for state in states])
            count_of_each = list(counts.unbind())
            for state, count in zip(states, count_of_each, strict=True):
                state["step"] = count
            averages, squares = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
            yield _Tensors(alike, averages, squares, counts, count_of_each)


def _same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Are they the same objects, one by one? Tensors that are equal may be others."""
    return len(some) == len(others) and all(map(is_, some, others))
