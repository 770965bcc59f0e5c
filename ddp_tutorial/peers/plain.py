"""Train with plain torch. As in PyTorch's recipe, checkpoints contain all state dicts and the step number."""

from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_tutorial.peers.work import Work
from ddp_tutorial.world import World


def train(world: World, work: Work) -> nn.Module:
    """Train with torch alone."""
    model = work.model()
    ddp = DistributedDataParallel(model)
    optimizer = work.optimizer(model)
    scheduler = work.scheduler(optimizer)
    sampler = DistributedSampler(work.samples, world.size, world.rank, shuffle=work.shuffle)
    loader = DataLoader(work.samples, batch_size=work.per_rank, sampler=sampler)
    step = 0
    if work.resume:
        saved = torch.load("checkpoint.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        step = saved["step"]
    while step < work.steps:
        sampler.set_epoch(step // len(loader))
        for batch in islice(loader, work.steps - step):
            loss = work.mean(ddp, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            mean = loss.detach()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            work.report(mean.item())
            if step == work.save_after and world.rank == 0:
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save({**saved, "scheduler": scheduler.state_dict()}, "checkpoint.pt")
    return model
