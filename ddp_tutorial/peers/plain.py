"""Nothing but torch."""

from itertools import chain, islice, repeat

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from ddp_tutorial.peers.work import Work
from ddp_tutorial.world import World


def train(world: World, work: Work) -> nn.Module:
    model = work.model()
    ddp = DistributedDataParallel(model)
    optimizer = work.optimizer(model)
    scheduler = work.scheduler(optimizer)
    sampler = DistributedSampler(work.samples, world.size, world.rank, shuffle=False)
    loader = DataLoader(work.samples, batch_size=work.per_rank, sampler=sampler)
    for batch in islice(chain.from_iterable(repeat(loader)), work.steps):
        work.mean(ddp, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model
