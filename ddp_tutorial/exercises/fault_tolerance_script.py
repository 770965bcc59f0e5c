"""Train with `torchrun --nproc-per-node=N elastic.py WORDS CHECKPOINT STEPS EVERY`. Rerun to resume."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

received: list[int] = []  # signals


def should_stop() -> bool:
    """Return whether any rank has received a signal. Collective."""
    flag = torch.tensor(len(received))
    dist.all_reduce(flag)
    return flag.item() > 0


def words_of(step: int, words: int, rank: int, size: int) -> torch.Tensor:
    """Return the indices of the words that this rank reads in step `step`, counted from 0."""
    epoch, taken = divmod(step, (words + 15) // 16)
    order = torch.randperm(words, generator=torch.Generator().manual_seed(epoch))  # like DistributedSampler, seed 0
    return order[16 * taken : 16 * taken + 16][rank::size]


def take_step(ddp: nn.Module, optimizer: torch.optim.SGD, letters: Any, following: Any) -> tuple[float, int]:
    """Take one optimizer step. Return the mean loss over all ranks' letters, and the number of letters. Collective."""
    total = torch.tensor([0.0, (following >= 0).sum()])
    dist.all_reduce(total[1:])
    loss = F.cross_entropy(ddp(letters).flatten(0, 1), following.flatten(), reduction="sum")
    (loss * dist.get_world_size() / total[1]).backward()  # DDP averages the gradients over ranks
    nn.utils.clip_grad_norm_(ddp.parameters(), 0.4)
    optimizer.step()
    optimizer.zero_grad()
    total[0] = loss.detach()
    dist.all_reduce(total[:1])
    return total[0].item() / total[1].item(), int(total[1].item())


def main(words: str, checkpoint: Path, steps: int, every: int) -> None:
    """Train up to step `steps`. Save a checkpoint every `every` steps and at exit. Resume if `checkpoint` exists."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    letters, following = torch.load(words)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(27, 16), nn.Linear(16, 27))
    optimizer, done, stop = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), 0, False
    sent = [torch.load(checkpoint) if rank == 0 and checkpoint.exists() else None]
    dist.broadcast_object_list(sent)
    if saved := sent[0]:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    ddp = DistributedDataParallel(model)

    while done < steps and not stop:
        own = words_of(done, len(letters), rank, size)
        loss, count = take_step(ddp, optimizer, letters[own], following[own])
        done += 1
        stop = should_stop()
        if rank == 0:
            print(f"step {done}: loss {loss:.6f} over {count} letters", flush=True)
        if rank == 0 and (stop or done % every == 0 or done == steps):
            state = {"step": done, "model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
            part = checkpoint.with_suffix(".part")
            torch.save(state, part)
            part.replace(checkpoint)
    dist.barrier()  # the other ranks wait until the checkpoint is complete


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: received.append(number))
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    dist.destroy_process_group()  # after main() has freed its DDP model, which otherwise could block
    os._exit(0)  # with DDP on gloo, threads that outlive the group may abort or block Python's exit (torch 2.13)
