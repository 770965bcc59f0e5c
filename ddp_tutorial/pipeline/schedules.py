"""Define pipeline schedules as ordered lists of actions, one list per rank.

A schedule can be plotted and validated before it runs.

    table = one_f_one_b(stages=4, micro_batches=8)
    check(table, 4, 8)                              # complete, in a valid order, no deadlock
    plan = simulate(table, forward=1, backward=2)   # the time of each action
    plan.makespan, plan.bubble, peaks(table)

Rank s % ranks runs stage s. A forward pass needs the activation of the previous stage, and a backward pass needs the
gradient of the next stage. A schedule does not specify how these tensors are sent.

GPipe: Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", 2019. 1F1B:
Narayanan et al., "Memory-efficient pipeline-parallel DNN training" (PipeDream-Flush), 2021. Interleaved: Narayanan et
al., "Efficient large-scale language model training on GPU clusters using Megatron-LM", 2021.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from ddp_tutorial.pipeline.config import PipelineConfig

Kind = Literal["F", "B"]
FORWARD: Kind = "F"
BACKWARD: Kind = "B"


class Action(NamedTuple):
    """The forward or backward pass of one micro-batch on one stage."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        """Return a description such as "F0 of stage 1"."""
        return f"{self.kind}{self.micro_batch} of stage {self.stage}"


Table = Sequence[Sequence[Action]]  # the actions of each rank, in order


class ScheduleError(ValueError):
    """Raised if a schedule's action is missing, duplicated, or out of order, or if ranks deadlock."""


# ----------------------------------------------------------------------------------------------- schedules


def gpipe(stages: int, micro_batches: int) -> Table:
    """Return a schedule that runs all forward passes, and then all backward passes.

    Every rank stores the activations of all micro-batches.
    """
    numbers = range(micro_batches)
    return [
        [Action(FORWARD, stage, m) for m in numbers] + [Action(BACKWARD, stage, m) for m in numbers]
        for stage in range(stages)
    ]


def one_f_one_b(stages: int, micro_batches: int) -> Table:
    """Return a schedule that alternates forward and backward passes after a warm-up.

    On each stage, the warm-up consists of one forward pass for each later stage. The rank of stage s stores the
    activations of at most `stages` - s micro-batches, regardless of the total number of micro-batches.
    """
    return [
        _in_turns(
            [Action(FORWARD, stage, m) for m in range(micro_batches)],
            [Action(BACKWARD, stage, m) for m in range(micro_batches)],
            warm_up=stages - 1 - stage,
        )
        for stage in range(stages)
    ]


def interleaved(ranks: int, micro_batches: int, per_rank: int = 2) -> Table:
    """Return a 1F1B schedule with `per_rank` stages on each rank. The bubble is smaller, but more messages are sent.

    The indices of a rank's stages differ by multiples of `ranks`. The micro-batches are processed in groups of `ranks`.
    A group passes through the first stage of a rank, and then through the rank's next stage. If `micro_batches` is not
    a multiple of `ranks`, the groups are larger, and their sizes differ by at most 1.
    """
    count = max(1, micro_batches // ranks)  # the number of groups
    ends = list(accumulate(micro_batches // count + (g < micro_batches % count) for g in range(count)))
    groups = [range(a, b) for a, b in zip([0, *ends], ends, strict=False)]
    table = []
    for rank in range(ranks):
        own = range(rank, ranks * per_rank, ranks)
        forwards = [Action(FORWARD, stage, m) for group in groups for stage in own for m in group]
        backwards = [Action(BACKWARD, stage, m) for group in groups for stage in reversed(own) for m in group]
        # The first group passes through all stages of this rank except the last, and then reaches the last rank.
        warm_up = (per_rank - 1) * len(groups[0]) + (2 if per_rank > 1 else 1) * (ranks - 1 - rank)
        table.append(_in_turns(forwards, backwards, warm_up))
    return table


def _in_turns(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """Return `warm_up` forward passes, then alternating forward and backward passes, then the last backward passes."""
    first = min(warm_up, len(forwards))
    turns = zip(forwards[first:], backwards, strict=False)
    middle = [action for pair in turns for action in pair]
    return [*forwards[:first], *middle, *backwards[len(forwards) - first :]]


def table_of(config: PipelineConfig) -> Table:
    """Return the schedule for a pipeline config."""
    match config.schedule:
        case "gpipe":
            return gpipe(config.ranks, config.micro_batches)
        case "1f1b":
            return one_f_one_b(config.ranks, config.micro_batches)
        case "interleaved":
            return interleaved(config.ranks, config.micro_batches, config.per_rank)


# ----------------------------------------------------------------------------------------------- validation


def dependencies(action: Action, stages: int) -> Action | None:
    """Return the action that must be completed before `action`, or None for a forward pass on the first stage.

    The backward pass of the last stage depends on the same stage's forward pass. All other dependencies are on a
    different stage.
    """
    kind, stage, m = action
    if kind == FORWARD:
        return Action(FORWARD, stage - 1, m) if stage else None
    return Action(FORWARD, stage, m) if stage == stages - 1 else Action(BACKWARD, stage + 1, m)


def check(table: Table, stages: int, micro_batches: int) -> None:
    """Raise an error if the schedule is invalid.

    In a valid schedule, every micro-batch has one forward pass and one later backward pass on every stage, and no rank
    waits forever.

    Raises:
        ScheduleError: If the schedule is invalid. The message describes the problem.
    """
    for rank, actions in enumerate(table):
        expected = {
            Action(kind, stage, m)
            for kind in (FORWARD, BACKWARD)
            for stage in range(rank, stages, len(table))
            for m in range(micro_batches)
        }
        seen: set[Action] = set()
        for action in actions:
            if action in seen:
                raise ScheduleError(f"rank {rank} runs {action} twice")
            if action not in expected:
                raise ScheduleError(f"rank {rank} runs {action}, which belongs to a different rank")
            if action.kind == BACKWARD and action._replace(kind=FORWARD) not in seen:
                raise ScheduleError(f"rank {rank} runs {action} before the corresponding forward pass")
            seen.add(action)
        if missing := sorted(expected - seen, reverse=True):
            others = f" and {len(missing) - 1} other actions" if missing[1:] else ""
            raise ScheduleError(f"rank {rank} never runs {missing[0]}{others}")
    simulate(table)


def peaks(table: Table) -> list[int]:
    """Return each rank's peak number of stored activations, counting one per micro-batch and stage."""
    return [max(accumulate((1 if a.kind == FORWARD else -1 for a in actions), initial=0)) for actions in table]


# ----------------------------------------------------------------------------------------------- simulation


class Timed(NamedTuple):
    """An action with its start and end times, in seconds from the beginning of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Plan:
    """The start and end times of a schedule's actions. `ranks[r]` lists the actions of rank r, in order."""

    ranks: list[list[Timed]]

    @property
    def makespan(self) -> float:
        """The time in seconds from the start of the first action to the end of the last action."""
        return max(timed.end for rank in self.ranks for timed in rank)

    @property
    def bubble(self) -> float:
        """The fraction of the makespan during which a rank is idle, averaged over the ranks."""
        busy = sum(timed.end - timed.start for rank in self.ranks for timed in rank)
        return 1 - busy / (len(self.ranks) * self.makespan)


def simulate(
    table: Table,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    send: float = 0.0,
) -> Plan:
    """Compute the start and end times of each action.

    Sending takes no time on the sending rank. The receiving rank waits until the input of its next action has arrived.

    Args:
        table: The schedule.
        forward: The duration of a forward pass in seconds, as one value per stage or one value for all stages.
        backward: The duration of a backward pass in seconds, as one value per stage or one value for all stages.
        send: The time in seconds between the end of an action and the arrival of its message at a different rank.

    Raises:
        ScheduleError: If the ranks deadlock.
    """
    ranks = len(table)
    stages = 1 + max(action.stage for actions in table for action in actions)
    seconds = {FORWARD: _each(forward, stages), BACKWARD: _each(backward, stages)}
    done: dict[Action, float] = {}
    plan: list[list[Timed]] = [[] for _ in table]
    while any(len(ran) < len(actions) for ran, actions in zip(plan, table, strict=True)):
        before = len(done)
        for ran, actions in zip(plan, table, strict=True):
            for action in actions[len(ran) :]:
                need = dependencies(action, stages)
                if need is not None and need not in done:
                    break  # a rank executes its actions in order
                is_sent = need is not None and need.stage % ranks != action.stage % ranks
                arrives = 0.0 if need is None else done[need] + (send if is_sent else 0.0)
                start = max(arrives, ran[-1].end if ran else 0.0)
                done[action] = start + seconds[action.kind][action.stage]
                ran.append(Timed(action, start, done[action]))
        if len(done) == before:
            raise ScheduleError(f"deadlock: {_describe_deadlock(plan, table, stages)}")
    return Plan(plan)


def _each(cost: float | Sequence[float], stages: int) -> Sequence[float]:
    return cost if isinstance(cost, Sequence) else [cost] * stages


def _describe_deadlock(plan: Sequence[Sequence[Timed]], table: Table, stages: int) -> str:
    stuck = [(rank, table[rank][len(ran)]) for rank, ran in enumerate(plan) if len(ran) < len(table[rank])]
    return "; ".join(f"rank {rank} waits for {dependencies(action, stages)} before {action}" for rank, action in stuck)


# ----------------------------------------------------------------------------------------------- blocking sends

Message = tuple[Action, int]  # the action that produces the message, and the receiving rank
Semantics = Literal["buffered", "batched", "blocking"]


def deadlocks(table: Table, sends: Semantics) -> str:
    """Return a description of a schedule's deadlock under the given send semantics, or "" if there is none.

    - "buffered": A send does not block, as with gloo's `isend` if the handle is kept. A schedule that passes `check`
      does not deadlock.
    - "blocking": A rank receives, computes, and then sends. A send blocks until the matching receive starts
      (`dist.send` of large tensors).
    - "batched": After an action, its send and the receive for the next action are posted together, and the rank waits
      for both (`batch_isend_irecv`; Megatron's `send_forward_recv_backward`).
    """
    stages = 1 + max(action.stage for actions in table for action in actions)
    programs = [_exchanges(rank, table, stages, sends) for rank in range(len(table))]
    at = [0] * len(table)  # the current exchange of each rank
    is_buffered = sends == "buffered"
    sent: set[Message] = set()
    received: set[Message] = set()
    moved = True
    while moved:
        moved = False
        now = [program[i] if i < len(program) else ((), ()) for program, i in zip(programs, at, strict=True)]
        offered = {message for out, _ in now for message in out} | sent
        wanted = {message for _, into in now for message in into}
        received |= offered & wanted
        for rank, (out, into) in enumerate(now):
            if at[rank] == len(programs[rank]):
                continue
            sent |= set(out) if is_buffered else set()
            if received.issuperset(into) and (is_buffered or received.issuperset(out)):
                at[rank], moved = at[rank] + 1, True
    stuck = [(rank, programs[rank][i]) for rank, i in enumerate(at) if i < len(programs[rank])]
    return "; ".join(
        f"rank {rank} waits to {' and to '.join(_pending_exchanges(out, into, received))}"
        for rank, (out, into) in stuck
    )


Exchange = tuple[tuple[Message, ...], tuple[Message, ...]]  # the messages sent and received together


def _exchanges(rank: int, table: Table, stages: int, sends: Semantics) -> list[Exchange]:
    """Return the messages that a rank sends and receives, in the order in which the rank waits for them."""
    program: list[Exchange] = []
    sending: tuple[Message, ...] = ()
    for action in table[rank]:
        need = dependencies(action, stages)
        is_remote = need is not None and need.stage % len(table) != rank
        receiving = ((need, rank),) if need is not None and is_remote else ()
        program += [(sending, receiving)] if sends == "batched" else [(sending, ()), ((), receiving)]
        follower = _follower(action, stages)
        to = follower % len(table) if follower is not None else rank
        sending = ((action, to),) if to != rank else ()
    return [*program, (sending, ())]


def _follower(action: Action, stages: int) -> int | None:
    """Return the stage that needs the output of `action`, or None if no stage needs it."""
    if action.kind == FORWARD:
        return action.stage + 1 if action.stage + 1 < stages else None
    return action.stage - 1 if action.stage else None


def _pending_exchanges(out: Iterable[Message], into: Iterable[Message], received: set[Message]) -> list[str]:
    sends = [f"send {action} to rank {to}" for action, to in out if (action, to) not in received]
    return sends + [f"receive {message[0]}" for message in into if message not in received]
