"""Train with `torchrun --nproc-per-node=2 mine.py WORDS CHECKPOINT STEPS EVERY`. Rerun to resume."""

import os
import sys
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def take_step(ddp: nn.Module, optimizer: torch.optim.SGD, batch: list[torch.Tensor]) -> tuple[float, int]:
    """Take one optimizer step. Return the mean loss over all ranks' letters, and the number of letters. Collective."""
    letters, following = batch
    total = torch.tensor([0.0, (following >= 0).sum()])
    dist.all_reduce(total[1:])  # before backward: words differ in length, and every letter must count equally
    loss = F.cross_entropy(ddp(letters).flatten(0, 1), following.flatten(), reduction="sum")
    (loss * dist.get_world_size() / total[1]).backward()  # DDP averages the gradients over ranks
    nn.utils.clip_grad_norm_(ddp.parameters(), 0.4)
    optimizer.step()
    optimizer.zero_grad()
    total[0] = loss.detach()
    dist.all_reduce(total[:1])
    return total[0].item() / total[1].item(), int(total[1].item())


def main(words: str, checkpoint: Path, steps: int, every: int) -> None:
    """Train up to step `steps`, and save a checkpoint every `every` steps. Resume from `checkpoint` if it exists."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if 16 % size:
        raise ValueError(f"the number of ranks must evenly divide 16 (the number of words per step), got {size}")
    data = TensorDataset(*torch.load(words))
    sampler = DistributedSampler(data, size, rank, seed=0)
    loader = DataLoader(data, 16 // size, sampler=sampler)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(27, 16), nn.Linear(16, 27))
    optimizer, done = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), 0
    sent = [torch.load(checkpoint) if rank == 0 and checkpoint.exists() else None]
    dist.broadcast_object_list(sent)  # only rank 0 reads the file, because the ranks may not share a disk
    if saved := sent[0]:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    ddp = DistributedDataParallel(model)

    while done < steps:
        epoch, taken = divmod(done, len(loader))
        sampler.set_epoch(epoch)
        for batch in islice(loader, taken, taken + steps - done):
            loss, count = take_step(ddp, optimizer, batch)
            done += 1
            if rank == 0:
                print(f"step {done}: loss {loss:.6f} over {count} letters", flush=True)
            if rank == 0 and (done % every == 0 or done == steps):
                state = {"step": done, "model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
                part = checkpoint.with_suffix(".part")
                torch.save(state, part)
                part.replace(checkpoint)  # atomic: a crash midway leaves the old checkpoint intact


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    dist.destroy_process_group()  # after main() has freed its DDP model, which otherwise could block
    os._exit(0)  # with DDP on gloo, threads that outlive the group may abort or block Python's exit (torch 2.13)
