"""Hugging Face's Accelerate: a loop of one's own, with what it needs prepared."""

from itertools import chain, islice, repeat

from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from ddp_tutorial.peers.work import Work
from ddp_tutorial.world import World


def train(_: World, work: Work) -> nn.Module:
    accelerator = Accelerator(cpu=True)
    model = work.model()
    optimizer = work.optimizer(model)
    # It would step a schedule once for each process at every step, unless told that the schedule counts all batches.
    scheduler = work.scheduler(optimizer)
    loader = DataLoader(work.samples, batch_size=work.per_rank)
    ddp, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in islice(chain.from_iterable(repeat(loader)), work.steps):
        accelerator.backward(work.mean(ddp, batch))
        accelerator.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model
