"""Train with Lightning Fabric, which sets up the model, optimizer and data loader for the user's loop."""

from itertools import islice

from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from ddp_tutorial.peers.work import Work
from ddp_tutorial.world import World


def train(world: World, work: Work) -> nn.Module:
    """Train with Lightning Fabric."""
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=world.size)
    fabric.launch()
    model = work.model()
    ddp, optimizer = fabric.setup(model, work.optimizer(model))
    scheduler = work.scheduler(optimizer)
    loader = fabric.setup_dataloaders(DataLoader(work.samples, batch_size=work.per_rank, shuffle=work.shuffle))
    state = {"model": ddp, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    if work.resume:
        fabric.load("checkpoint.ckpt", state)
    while state["step"] < work.steps:
        for batch in islice(loader, work.steps - state["step"]):
            loss = work.mean(ddp, batch)
            fabric.backward(loss)
            fabric.clip_gradients(ddp, optimizer, max_norm=work.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            state["step"] += 1
            work.report(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
            if state["step"] == work.save_after:
                fabric.save("checkpoint.ckpt", state)
    return model
