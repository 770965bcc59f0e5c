"""Checks of a training program while it runs, on all ranks alike: of any loop over an optimizer, ours or yours.

    with checking(world, model, optimizer) as checks:
        for batch in loader:
            loss(model(batch)).backward()
            optimizer.step()                  # raises CheckError, on all ranks, where something is wrong
            optimizer.zero_grad()
    checks.findings                           # the warnings

Nothing has to be called in the loop. Before each optimizer step every rank notes a few numbers about the step. In each
of the first three steps, and then once in `every` steps, 20 by default, these go to all ranks in one all-gather, and
all judge them alike, step by step: so all raise, or none does. After the first three steps nobody waits for that
all-gather: what it brings is looked at in the next step. What was wrong in step 14 is sent in step 20 and told in step
21, then, with its own step and the one in which it was seen: "step 14: ... (seen in step 21)". `every=1` tells it in
step 14, and costs more. One thing does not wait: no rank updates its weights with a gradient that is not finite. Where
all ranks have one, as they do once it is averaged, all raise before that update. Where only some have, these keep their
weights as they are until the numbers are exchanged. Steps that are left are judged before a `Trainer` writes its
result, and where the block ends.

The ranks talk in a process group of their own. A rank that does not come to that all-gather makes the others wait for
it in the next step, as it would in backward: put `watching` around it, which says where everybody is. Of a rank that
has left the block the others hear in the next step.

What takes longer is done now and then, or after an alarm: `NonFinite` and `ReplicaDrift` say what is found later for
that. Outside of the block no hook is attached, and there is no cost. Inside there is: the default set made a step of
45 to 52 ms 1.2 to 2.1 % longer in five runs, in the median 1.6 %, and took 1.3 to 2.5 % more processor time; a step of
5 to 7 ms became 9 % longer (two ranks on two cores, 0.8 million parameters in the first). Compared with themselves,
steps without checks came out up to 0.8 % apart by the clock; single repeats were off by 2 to 3 %. `python -m
ddp_tutorial bench debug` measures what each detector costs, and all together.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ddp_tutorial.compat import default_store
from ddp_tutorial.ddp.wrappers import DataParallel
from ddp_tutorial.debug.detector import CheckError, Detector, Finding, Program
from ddp_tutorial.debug.instrumentation import Instrumentation, Observable
from ddp_tutorial.debug.memory import MemoryGrowth
from ddp_tutorial.debug.nonfinite import NonFinite
from ddp_tutorial.debug.overlap import DataOverlap, SameRandomNumbers
from ddp_tutorial.debug.pace import DataStarvation, Straggler
from ddp_tutorial.debug.replicas import ReplicaDrift
from ddp_tutorial.debug.spikes import GradientSpike, LossDivergence
from ddp_tutorial.debug.unused import UnusedParameters
from ddp_tutorial.phases import PhaseEvent, observe
from ddp_tutorial.processes.errors import lost_connection
from ddp_tutorial.world import World, require_group

LOG = logging.getLogger(__name__)

_FIRST = 3  # steps of a block after each of which the ranks exchange their numbers: most bugs show there
_PATIENCE = 1.0  # seconds that ranks wait for the others to come to a place where not all may come
_PATIENCE_AT_THE_END = 5.0


class _Sent(NamedTuple):
    """Numbers on their way: the rows of this rank, who has brought what beside them, and where all ranks' arrive."""

    rows: list[list[float]]
    on_exchanged: list[Detector]
    sizes: list[int]
    of_ranks: torch.Tensor  # [ranks, numbers], once the work is done
    work: dist.Work | None  # None where there is one rank


class Checks:
    """The detectors of one block on one rank, and what they have found so far, in `findings`."""

    def __init__(
        self,
        world: World,
        model: nn.Module | DataParallel,
        optimizer: torch.optim.Optimizer,
        detectors: Sequence[Detector],
        *,
        strict: bool,
        after: int | Callable[[], int],
        every: int,
    ) -> None:
        if every < 1:
            raise ValueError(f"every={every}: should be 1 step or more")
        self.program = Program(world, model, optimizer, after)
        self.detectors, self.strict, self.every = list(detectors), strict, every
        self.findings: list[Finding] = []
        self._store: dist.Store | None = None
        self._rows: list[list[float]] = []  # of each step since the last exchange: its number, and what was said
        self._sent: _Sent | None = None
        self._listening = ExitStack()
        self._first = self.program.step
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters, and gradients kept from the update
        self._says = [each for each in detectors if type(each).local_report is not Detector.local_report]
        self._length = 1 + sum(each.size for each in self._says)
        self._ends, self._is_over = 0, False
        self._updates = [each for each in detectors if type(each).after_update is not Detector.after_update]
        begins = [each for each in detectors if type(each).before_forward is not Detector.before_forward]
        ends = [each for each in detectors if type(each).after_forward is not Detector.after_forward]
        self._taps = Instrumentation(
            self.program.module,
            frozenset[Observable]().union(*(each.observes for each in detectors)),
            [each.before_forward for each in begins],
            [each.after_forward for each in ends],
            world.device,
        )

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, the detectors are at work. Collective to enter."""
        world = self.program.world
        require_group(world)
        with ExitStack() as stack:
            if world.size > 1:
                self.program.group = group = dist.new_group(
                    timeout=world.timeout, backend="gloo"
                )  # on GPUs too: small things
                self._store = dist.PrefixStore(f"checking {group.group_name}", default_store())
                stack.push(self._leave)
                names = self.program.gather([each.name for each in self.detectors])
                if any(each != names[0] for each in names):
                    raise ValueError(f"the ranks have different detectors: {names}")
            for each in self.detectors:
                each.attach(self.program)
            self._listen()
            stack.callback(lambda: self._listening.close())  # noqa: PLW0108  # that of then
            try:
                yield
                self._judge_the_rest()
            except Exception as error:
                if self._sent and self._have_all_come(f"failure {self.program.taken}", _PATIENCE):
                    self._judge()  # all ranks have failed in one step: what they were about to be told may be why
                if isinstance(error, RuntimeError):
                    self._account_for(error)
                raise

    def _listen(self) -> None:
        """Attach all that is on the program itself."""
        optimizer = self.program.optimizer
        with ExitStack() as stack:
            stack.enter_context(self._taps)
            stack.enter_context(observe(self._before_result))
            stack.callback(optimizer.register_step_pre_hook(self._before_update).remove)
            stack.callback(optimizer.register_step_post_hook(self._after_update).remove)
            self._listening = stack.pop_all()

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Inside, nothing is attached to the program: its steps are neither looked at nor counted. On all ranks, or on
        none. So a benchmark can take a step with checks and the next one without."""
        self._listening.close()
        try:
            yield
        finally:
            self._listen()

    def _leave(self, kind: type[BaseException] | None, *_: object) -> None:
        """Tell the other ranks that the block is over for this one, unless an error ends it, which says more."""
        if kind is None and self._store is not None:
            with suppress(RuntimeError):  # the store is gone, and with it all the others
                self._store.set(str(self.program.world.rank), str(self.program.step - 1))
        group, self.program.group = self.program.group, None
        with suppress(RuntimeError, ValueError):
            # Ending the group would wait for it, for as long as collectives may take.
            if self._sent and self._sent.work:
                self._sent.work.wait(timedelta(seconds=_PATIENCE))
            dist.destroy_process_group(group)

    def _before_update(self, *_: Any) -> None:
        """Where numbers are due, they are sent here, and nobody waits for them: they are judged in the next step. At
        once in the first steps only, and where no rank has a gradient that is finite."""
        if self._sent:
            self._judge()
        step, seen = self.program.step, self._taps.take()
        row = [float(step)]
        for each in self._says:
            row += each.local_report(seen)
        if len(row) != self._length:
            raise ValueError(f"a detector does not say as many numbers as its size: {len(row) - 1} in all")
        self._rows.append(row)
        is_first = step < self._first + _FIRST or self.every == 1
        if is_first or step % self.every == 0 or len(self._rows) >= self.every:
            self._send()
        if is_first:
            self._judge()
        elif any(each.is_urgent() for each in self._says):
            if self._have_all_come(f"update {self.program.taken}", _PATIENCE):
                self._judge()
            else:
                self._hide_gradients()

    def _after_update(self, *_: Any) -> None:
        while self._hidden:
            parameter, gradient = self._hidden.pop()
            parameter.grad = gradient
        step = self.program.step
        for each in self._updates:
            self._report(each.after_update(step))
        self.program.taken += 1

    def _judge(self) -> None:
        """What all ranks have noted since the last time; they tell one another here where they have not. Collective."""
        if not self._sent:
            self._send()
        of_ranks, on_exchanged = self._received()
        last = 0
        for rows in zip(*of_ranks, strict=True):  # of one step, a row of each rank
            steps = [row[0] for row in rows]
            if len(set(steps)) > 1:
                self._blame(steps)
            place = 1
            for each in self._says:
                part = slice(place, place + each.size)
                self._report(each.check(int(steps[0]), [row[part] for row in rows]))
                place += each.size
            last = int(steps[0])
        for each, numbers in on_exchanged:
            self._report(each.on_exchanged(last, numbers))

    def _blame(self, steps: Sequence[float]) -> None:
        """Raise the alarm for ranks that update in different steps: `steps` are those of each rank's next update."""
        told = ", ".join(f"rank {rank} in step {step:.0f}" for rank, step in enumerate(steps) if step)
        message = f"the ranks do not update their weights in the same steps: {told}"
        finding = Finding("steps", int(min(filter(None, steps))), tuple(range(len(steps))), message, "error")
        self.findings.append(finding)
        raise CheckError(finding)

    def _send(self) -> None:
        """The rows since the last exchange, on their way to all ranks, and what detectors bring beside them. As many
        numbers are sent each time, so that a rank that has noted fewer is told and not waited for. Collective."""
        rows, self._rows = self._rows, []
        if self.program.world.size == 1:
            self._sent = _Sent(rows, [], [], torch.empty(0), None)
            return
        on_exchanged = [(each, mine) for each in self.detectors if (mine := each.values_to_exchange()) is not None]
        short = [0.0] * (self._length * (self.every - len(rows)))
        numbers = torch.tensor([*chain.from_iterable(rows), *short], dtype=torch.float64)
        all_of_it = torch.cat([numbers.view(torch.int64), *(mine for _, mine in on_exchanged)])  # 64 bits each
        sizes = [numbers.numel(), *(len(mine) for _, mine in on_exchanged)]
        self._sent = _Sent(rows, [each for each, _ in on_exchanged], sizes, *self.program.start_gather(all_of_it))

    def _received(self) -> tuple[list[list[list[float]]], list[tuple[Detector, torch.Tensor]]]:
        """Of each rank the rows that it has sent, as many of all ranks: a row of zeros where a rank has none. And what
        detectors have brought, [ranks, n] of each that has."""
        assert self._sent, "_send has been called"
        sent, self._sent = self._sent, None
        if sent.work is None:
            return [sent.rows], []
        sent.work.wait()
        said, *others = np.split(sent.of_ranks.numpy(), list(accumulate(sent.sizes[:-1])), axis=1)
        of_ranks = said.view(np.float64).reshape(-1, self.every, self._length).tolist()
        most = max(sum(row[0] > 0 for row in rows) for rows in of_ranks)
        found = [rows[:most] for rows in of_ranks]
        return found, [
            (each, torch.from_numpy(numbers)) for each, numbers in zip(sent.on_exchanged, others, strict=True)
        ]

    def _before_result(self, edge: PhaseEvent) -> None:
        """A `Trainer` is about to write what a run has come to: an alarm of its last steps belongs there instead."""
        if edge.name == "result" and edge.entered:
            self._judge_the_rest()

    def _judge_the_rest(self) -> None:
        """No step comes after: of those since the last exchange nobody has heard yet."""
        if not (self._rows or self._sent):
            return
        self._ends += 1
        self._is_over = True
        try:
            if self._have_all_come(f"end {self._ends}", _PATIENCE_AT_THE_END):
                while self._sent or self._rows:
                    self._judge()
            elif self.program.world.is_main:
                rows = [*(self._sent.rows if self._sent else ()), *self._rows]
                steps = f"{rows[0][0]:.0f} to {rows[-1][0]:.0f}"
                LOG.warning("steps %s were not checked: not all ranks have come to the end", steps)
        finally:
            self._is_over = False

    def _have_all_come(self, place: str, seconds: float) -> bool:
        """Have all ranks come to `place` within `seconds`? Those that come get the same answer; of those that do not,
        nothing is asked. For where a collective might wait for ever."""
        size, store = self.program.world.size, self._store
        if store is None:
            return True
        with suppress(RuntimeError):  # the store is gone, with a rank that has not waited
            if store.add(f"at {place}", 1) == size:
                store.compare_set(f"all at {place}", "", "yes")
            until = time.monotonic() + seconds
            while not store.check([f"all at {place}"]) and time.monotonic() < until:
                time.sleep(0.002)
            return bool(store.compare_set(f"all at {place}", "", "no") == b"yes")  # the first answer stays
        return False

    def _hide_gradients(self) -> None:
        """An optimizer leaves a parameter without a gradient as it is."""
        for group in self.program.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def _account_for(self, error: RuntimeError) -> None:
        """Where a connection is lost because a rank has left the block, having taken fewer steps, say so."""
        if not lost_connection(error):
            return
        gone: dict[int, int] = {}  # rank -> after which step it has left
        with suppress(RuntimeError):
            for rank in range(self.program.world.size):
                if self._store is not None and self._store.check([str(rank)]):
                    gone[rank] = int(self._store.get(str(rank)))
        if gone:
            told = ", ".join(f"rank {rank} after step {step}" for rank, step in gone.items())
            message = f"the ranks take different numbers of steps: {told} has left the block that is checked"
            finding = Finding("steps", self.program.step, tuple(gone), message, "error")
            self.findings.append(finding)
            raise CheckError(finding) from error

    def _report(self, findings: Sequence[Finding]) -> None:
        """Keep them; warn; raise where one is an error, the first of them."""
        now = self.program.step - self._is_over
        for found in findings:
            finding = found if found.step == now else replace(found, seen=now)
            self.findings.append(finding)
            if finding.severity == "error" or self.strict:
                self._rows = []  # it is over
                raise CheckError(finding)
            if self.program.world.is_main:
                LOG.warning("%s", finding)


def default_detectors() -> list[Detector]:
    """The set that `checking` uses where none is named."""
    return [
        NonFinite(),
        UnusedParameters(),
        GradientSpike(),
        LossDivergence(),
        SameRandomNumbers(),
        Straggler(),
        DataStarvation(),
        MemoryGrowth(),
        ReplicaDrift(),
        DataOverlap(),
    ]


@contextmanager
def checking(
    world: World,
    model: nn.Module | DataParallel,
    optimizer: torch.optim.Optimizer,
    detectors: Sequence[Detector] | None = None,
    *,
    strict: bool = False,
    after: int | Callable[[], int] = 0,
    every: int = 20,
) -> Iterator[Checks]:
    """Inside, each step of `optimizer` is checked by `detectors`, by default `default_detectors()`. Collective.

    All steps are looked at. What was seen is exchanged and judged in each of the first three steps, then sent once in
    `every` steps and judged in the step after that, and where the block ends. So it is told up to `every` steps later,
    with the step in which it was so.

    Raises `CheckError` from `optimizer.step()`, on all ranks, for what makes it pointless to go on; with `strict`, for
    all findings. Others are warnings in the log, of rank 0. `after` is how many steps have been taken before, or a
    function that says how many have been so far. Raises `ValueError` where the ranks have different detectors, and for
    `every` below 1.
    """
    checks = Checks(
        world,
        model,
        optimizer,
        default_detectors() if detectors is None else detectors,
        strict=strict,
        after=after,
        every=every,
    )
    with checks.attached():
        yield checks
