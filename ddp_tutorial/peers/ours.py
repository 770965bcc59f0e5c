"""Train with this package's Trainer, which writes a log and TensorBoard events."""

from torch import nn

from ddp_tutorial import DDPConfig, TrainConfig, Trainer, World, make_source
from ddp_tutorial.checkpoint.config import CheckpointConfig
from ddp_tutorial.peers.work import Work


def train(world: World, work: Work, *, shared_memory: bool = False) -> nn.Module:
    """Train with this package."""
    model = work.model()
    source = make_source(work.samples, work.per_rank * world.size, world, seed=0 if work.shuffle else None)
    config = TrainConfig(
        name="ours",
        steps=work.steps,
        clip=work.clip,
        ddp=DDPConfig(shared_memory=shared_memory),  # for two ranks on one host; a feature of this package
        checkpoint=CheckpointConfig(every=work.save_after or 0),
        resume="auto" if work.resume else "never",
    )
    trainer = Trainer(model, source, work.loss, world, config, optimizer=work.optimizer, scheduler=work.scheduler)
    for loss in trainer.train().losses:
        work.report(loss)
    return model
