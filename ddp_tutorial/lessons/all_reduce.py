"""Implement ring and tree all-reduce from scratch, using only send and receive."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_tutorial.world import World, require_group


class Message(NamedTuple):
    """A chunk of the tensor that rank `sender` sent to rank `receiver`."""

    round: int
    sender: int
    receiver: int
    chunk: int
    nbytes: int


def ring_all_reduce(world: World, tensor: torch.Tensor) -> list[Message]:
    """Sum `tensor` over all ranks, in place, around a ring. Collective.

    The tensor is split into one chunk per rank. In the first N - 1 rounds (the reduce-scatter), each rank sends a chunk
    to the next rank, which adds its own values. Afterward, each rank holds one fully reduced chunk. In the last N - 1
    rounds (the all-gather), the ranks pass the reduced chunks around the ring.

    In 2 (N - 1) rounds, each rank sends 2 (N - 1) / N times the tensor's size, always less than twice the size.
    Each chunk is summed once and then copied, so the result is bitwise identical on all ranks. A different number of
    ranks may change the rounding.

    See Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

    Args:
        world: The ranks.
        tensor: A CPU tensor of any shape.

    Returns:
        The messages that this rank sent.
    """
    require_group(world)
    flat = tensor.detach().contiguous().reshape(-1)  # a view if the tensor is contiguous, otherwise a copy
    chunks = flat.tensor_split(world.size)
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    sent: list[Message] = []
    for round_ in range(2 * (world.size - 1)):
        reducing = round_ < world.size - 1
        # Rank r first sends chunk r, and then in each round the chunk that it has just received.
        outgoing, incoming = (world.rank - round_) % world.size, (world.rank - round_ - 1) % world.size
        received = torch.empty_like(chunks[incoming]) if reducing else chunks[incoming]
        # Start the receive before the send, so that no message waits for its receiver. If the tensor is shorter than
        # the ring, some chunks are empty and are not sent.
        receiving = dist.irecv(received, left) if received.numel() else None
        sending = dist.isend(chunks[outgoing], right) if chunks[outgoing].numel() else None
        if receiving is not None:
            receiving.wait()
        if sending is not None:
            sending.wait()
            sent.append(Message(round_, world.rank, right, outgoing, chunks[outgoing].nbytes))
        if reducing:
            chunks[incoming].add_(received)
    _put_back(tensor, flat)
    return sent


def tree_all_reduce(world: World, tensor: torch.Tensor) -> list[Message]:
    """Sum `tensor` over all ranks, in place, along a binomial tree. Collective.

    In the first round, every second rank sends its tensor to the preceding rank. In the next round, every second
    receiver sends its sum to the preceding receiver. After ceil(log2 N) rounds, rank 0 sends the total down the tree.

    A tree requires few rounds, so it is fast for small tensors. Each round sends the full tensor, so a tree is slow for
    large tensors. The result is bitwise identical on all ranks.

    Returns:
        The messages that this rank sent.
    """
    require_group(world)
    flat = tensor.detach().contiguous().reshape(-1)
    steps = [1 << bit for bit in range((world.size - 1).bit_length())]
    sent: list[Message] = []
    rounds = [(step, True) for step in steps] + [(step, False) for step in reversed(steps)]
    for round_, (step, upwards) in enumerate(rounds):
        place = world.rank % (2 * step)
        child = world.rank + step if place == 0 and world.rank + step < world.size else None
        parent = world.rank - step if place == step else None
        receiver, sender = (parent, child) if upwards else (child, parent)
        if not flat.numel():
            continue
        if receiver is not None:
            dist.send(flat, receiver)
            sent.append(Message(round_, world.rank, receiver, 0, flat.nbytes))
        if sender is not None:
            received = torch.empty_like(flat) if upwards else flat
            dist.recv(received, sender)
            if upwards:
                flat.add_(received)
    _put_back(tensor, flat)
    return sent


def _put_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy `flat` to `tensor`, unless `flat` is a view of `tensor`."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
