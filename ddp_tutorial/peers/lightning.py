"""Lightning's Trainer: the loop is its own; a module says what a step is."""

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
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
    # The sampler that it would put in shuffles, in spite of a loader that does not. It tells ours the epoch.
    sampler = DistributedSampler(work.samples, world.size, world.rank, shuffle=work.shuffle)
    saving = ModelCheckpoint("lightning", "checkpoint", every_n_train_steps=work.save_after or 0, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=world.size,
        max_steps=work.steps,
        gradient_clip_val=work.clip,
        use_distributed_sampler=False,
        logger=False,
        callbacks=[saving] if work.save_after else [],
        enable_checkpointing=work.save_after is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(work.samples, batch_size=work.per_rank, sampler=sampler)
    trainer.fit(module, loader, ckpt_path="lightning/checkpoint.ckpt" if work.resume else None)
    return module.model
