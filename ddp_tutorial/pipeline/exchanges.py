"""Derive each rank's batches of sends and receives from a schedule, in an order that cannot deadlock.

With NCCL, the operations of a batch (`batch_isend_irecv`) start together, and the rank's next batch starts only after
all of these operations have finished. Messages between two ranks do not have tags, but are matched in the order in
which they are issued. If ranks send as soon as possible and receive only on demand, they can deadlock.

Therefore, every message is assigned to a slot with the same number on the sender and the receiver. The slots are time
steps of a simulation in which each action and each message takes one step. A rank issues the messages of slot t as one
batch, and then runs the action that starts in slot t. This order has three properties:

- The sender's action has finished by slot t, so the message exists.
- The receiver needs the message in slot t + 1 or later, so the message can arrive during the action of slot t.
- There is no deadlock. If all earlier batches finish, the sender and receiver of each message in slot t reach slot t.

Slots only define an order. A rank waits only for the message that its next action needs, never for a slot.
"""

from typing import Literal, NamedTuple

from ddp_tutorial.pipeline.schedules import FORWARD, Action, Table, dependencies, simulate


class Transfer(NamedTuple):
    """A message that sends an action's output, or the output's shape, from one rank of a pipeline to another."""

    action: Action
    source: int
    target: int
    part: Literal["data", "shape"] = "data"


class Slot(NamedTuple):
    """The messages that a rank sends and receives in one batch, and the action that the rank runs next."""

    transfers: list[Transfer]
    action: Action | None


def slots_of(table: Table, *, with_shapes: bool = False) -> list[list[Slot]]:
    """Return the slots of each rank, in order.

    If `with_shapes` is true, the shape of each activation is sent one slot before the activation. A gradient has the
    same shape as its activation, so the receiver already knows the shape.
    """
    ranks, stages = len(table), 1 + max(action.stage for row in table for action in row)
    plan = simulate(table, forward=1, backward=1, send=1)
    ends = {timed.action: int(timed.end) for row in plan.ranks for timed in row}
    actions = [{int(timed.start): timed.action for timed in row} for row in plan.ranks]
    transfers: list[list[list[Transfer]]] = [[[] for _ in range(int(plan.makespan))] for _ in table]
    for target, row in enumerate(table):
        for need in (dependencies(action, stages) for action in row):
            if need is None or need.stage % ranks == target:
                continue
            messages = [Transfer(need, need.stage % ranks, target)]
            if with_shapes and need.kind == FORWARD:
                messages.insert(0, messages[0]._replace(part="shape"))
            for slot, message in enumerate(messages, ends[need]):
                transfers[message.source][slot].append(message)
                transfers[target][slot].append(message)
    # Messages between two ranks are matched in the order in which they are issued, so both ranks sort their messages.
    return [
        [Slot(sorted(batch), own.get(number)) for number, batch in enumerate(batches)]
        for batches, own in zip(transfers, actions, strict=True)
    ]
