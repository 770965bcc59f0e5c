"""Lightning Fabric: a loop of one's own, with model, optimizer and loader set up."""

from itertools import chain, islice, repeat

from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from ddp_tutorial.peers.work import Work
from ddp_tutorial.world import World


def train(world: World, work: Work) -> nn.Module:
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=world.size)
    fabric.launch()
    model = work.model()
    ddp, optimizer = fabric.setup(model, work.optimizer(model))
    scheduler = work.scheduler(optimizer)
    loader = fabric.setup_dataloaders(DataLoader(work.samples, batch_size=work.per_rank))
    for batch in islice(chain.from_iterable(repeat(loader)), work.steps):
        fabric.backward(work.mean(ddp, batch))
        fabric.clip_gradients(ddp, optimizer, max_norm=work.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model
