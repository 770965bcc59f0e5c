"""Lightning's Trainer: the loop is its own; a module says what a step is."""

from typing import Any

from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from ddp_tutorial.peers.work import Batch, Work
from ddp_tutorial.world import World


class Module(LightningModule):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work, self.model = work, work.model()

    def training_step(self, batch: Batch, _: int) -> Tensor:
        return self.work.mean(self.model, batch)

    def configure_optimizers(self) -> Any:
        optimizer = self.work.optimizer(self.model)
        return [optimizer], [{"scheduler": self.work.scheduler(optimizer), "interval": "step"}]


def train(world: World, work: Work) -> nn.Module:
    module = Module(work)
    # The sampler that it would put in shuffles, in spite of a loader that does not.
    sampler = DistributedSampler(work.samples, world.size, world.rank, shuffle=False)
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=world.size,
        max_steps=work.steps,
        gradient_clip_val=work.clip,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(work.samples, batch_size=work.per_rank, sampler=sampler))
    return module.model
