"""The batches of sends and receives of a pipeline cannot deadlock on NCCL."""

from collections import defaultdict
from itertools import chain, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_tutorial.pipeline.exchanges import Transfer, slots_of
from ddp_tutorial.pipeline.schedules import FORWARD, Action, Table, dependencies, gpipe, interleaved, one_f_one_b

Batch = tuple[Transfer, ...]
Program = list[Batch | Action]  # the batches that a rank issues and the actions that it runs, in order


class Rank:
    """The streams of one rank in a simulation of NCCL: one of batches and one of actions, each of which is in order."""

    def __init__(self, program: Program, stages: int) -> None:
        self.actions = [item for item in program if isinstance(item, Action)]
        self.batches = [item for item in program if not isinstance(item, Action)]
        before = [program[: program.index(batch)] for batch in self.batches]
        self.actions_before = [sum(isinstance(item, Action) for item in items) for items in before]
        brought = {transfer.action: n for n, batch in enumerate(self.batches) for transfer in batch}
        needs = [dependencies(action, stages) for action in self.actions]
        self.batches_before = [1 + brought.get(need, -1) for need in needs]
        if any(transfer.part == "shape" for transfer in chain(*self.batches)):  # the host waits to read the shapes
            before = [program[: program.index(action)] for action in self.actions]
            self.batches_before = [sum(not isinstance(item, Action) for item in items) for items in before]
        self.finished_actions = self.finished_batches = self.started_batches = 0

    def can_start_batch(self) -> bool:
        """The previous batch has finished, and so have the actions that were issued before this one."""
        n = self.started_batches
        return n == self.finished_batches < len(self.batches) and self.finished_actions >= self.actions_before[n]

    def can_run_action(self) -> bool:
        """The batch with the input of the next action has finished."""
        n = self.finished_actions
        return n < len(self.actions) and self.finished_batches >= self.batches_before[n]

    def is_done(self) -> bool:
        return self.finished_actions == len(self.actions) and self.finished_batches == len(self.batches)


def outcome_on_nccl(programs: list[Program], stages: int) -> str:
    """Return "finished", "deadlock", or "mismatch" if a receive gets a message that is meant for a different receive.

    The operations of a batch start together. Sends and receives between two ranks match in the order in which they
    start. A batch finishes when all its operations have matched.
    """
    ranks = [Rank(program, stages) for program in programs]
    # By source, target, and whether it is a send.
    started: dict[tuple[int, int, bool], list[Transfer]] = defaultdict(list)
    moved = True
    while moved:
        moved = False
        for number, rank in enumerate(ranks):
            while rank.can_run_action():
                rank.finished_actions, moved = rank.finished_actions + 1, True
            if rank.can_start_batch():
                for transfer in rank.batches[rank.started_batches]:
                    started[transfer.source, transfer.target, number == transfer.source].append(transfer)
                rank.started_batches, moved = rank.started_batches + 1, True
            elif rank.finished_batches < rank.started_batches:
                for transfer in rank.batches[rank.finished_batches]:
                    here = started[transfer.source, transfer.target, number == transfer.source]
                    there = started[transfer.source, transfer.target, number != transfer.source]
                    at = here.index(transfer)
                    if len(there) <= at:
                        break
                    if there[at] != transfer:
                        return "mismatch"
                else:
                    rank.finished_batches, moved = rank.finished_batches + 1, True
    return "finished" if all(rank.is_done() for rank in ranks) else "deadlock"


def in_slots(table: Table, *, with_shapes: bool = False) -> list[Program]:
    """The programs of the runner: it skips empty batches."""
    items = [
        [item for slot in row for item in (tuple(slot.transfers), slot.action)]
        for row in slots_of(table, with_shapes=with_shapes)
    ]
    return [[item for item in row if item] for row in items]


def one_by_one(table: Table) -> list[Program]:
    """The programs of a runner for gloo: it receives the next input ahead of time, and sends each output at once."""
    stages = 1 + max(action.stage for row in table for action in row)
    programs: list[Program] = []
    for number, row in enumerate(table):
        program: Program = []
        for action, following in zip(row, [*row[1:], None], strict=True):
            for receiver in (action, following):
                need = dependencies(receiver, stages) if receiver else None
                if need is None or need.stage % len(table) == number:
                    continue
                if (receive := (Transfer(need, need.stage % len(table), number),)) not in program:
                    program.append(receive)
            program.append(action)
            to = action.stage + (1 if action.kind == FORWARD else -1)
            if 0 <= to < stages and to % len(table) != number:
                program.append((Transfer(action, number, to % len(table)),))
        programs.append(program)
    return programs


def tables(ranks: int, per_rank: int, micro_batches: int) -> list[Table]:
    if per_rank > 1:
        return [interleaved(ranks, micro_batches, per_rank)]
    return [gpipe(ranks, micro_batches), one_f_one_b(ranks, micro_batches)]


@given(st.integers(2, 4), st.integers(1, 4), st.integers(1, 12), st.booleans())
def test_batches_in_slots_never_deadlock_on_nccl(ranks: int, per_rank: int, count: int, with_shapes: bool) -> None:
    for table in tables(ranks, per_rank, count):
        programs = in_slots(table, with_shapes=with_shapes)
        assert outcome_on_nccl(programs, ranks * per_rank) == "finished"
        for row, program in zip(table, programs, strict=True):
            assert [item for item in program if isinstance(item, Action)] == list(row)
        batches = [item for item in chain(*programs) if not isinstance(item, Action)]
        messages = [transfer for batch in batches for transfer in batch]
        assert all(messages.count(transfer) == 2 for transfer in messages)  # source and target
        cuts = ranks * per_rank - 1  # a forward and a backward message, and perhaps a shape, for each cut
        assert len(messages) == 2 * cuts * count * (3 if with_shapes else 2)


@pytest.mark.parametrize(("ranks", "per_rank", "count"), list(product((2, 3, 4), (1, 2, 3, 4), (4, 8))))
def test_the_simulation_finds_the_deadlock_of_single_sends(ranks: int, per_rank: int, count: int) -> None:
    table = tables(ranks, per_rank, count)[-1]
    assert outcome_on_nccl(one_by_one(table), ranks * per_rank) != "finished"


def test_the_simulation_finds_messages_in_a_different_order() -> None:
    table = gpipe(2, 2)
    sender, receiver = in_slots(table, with_shapes=True)
    swapped = [tuple(reversed(item)) if not isinstance(item, Action) else item for item in receiver]
    assert outcome_on_nccl([sender, receiver], 2) == "finished"
    assert outcome_on_nccl([sender, swapped], 2) == "mismatch"


@given(st.integers(2, 4), st.integers(1, 4), st.integers(1, 12))
def test_a_message_arrives_at_least_one_slot_before_it_is_needed(ranks: int, per_rank: int, count: int) -> None:
    for table in tables(ranks, per_rank, count):
        for number, row in enumerate(slots_of(table)):
            received = {t.action: n for n, slot in enumerate(row) for t in slot.transfers if t.target == number}
            for n, slot in enumerate(row):
                need = dependencies(slot.action, ranks * per_rank) if slot.action else None
                assert need is None or need not in received or received[need] < n
