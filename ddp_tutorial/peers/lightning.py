"""Train with Lightning's Trainer, which runs the loop and requires a module that defines the training step."""

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from ddp_tutorial.peers.work import Batch, Work
from ddp_tutorial.world import World


class Module(LightningModule):
    """A Lightning module that defines the model, the training step and the optimizer."""

    def __init__(self, work: Work) -> None:
        """Create the model of `work`."""
        super().__init__()
        self.work, self.model = work, work.model()

    def training_step(self, batch: Batch, _: int) -> Tensor:
        """Return the loss of a batch."""
        loss = self.work.mean(self.model, batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """Report the mean loss of the step."""
        self.work.report(self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self) -> Any:
        """Return the optimizer, and a scheduler that advances after each step."""
        optimizer = self.work.optimizer(self.model)
        return [optimizer], [{"scheduler": self.work.scheduler(optimizer), "interval": "step"}]


def train(world: World, work: Work) -> nn.Module:
    """Train with Lightning's Trainer."""
    module = Module(work)
    # Lightning's default sampler would always shuffle. Lightning calls `set_epoch` on this sampler.
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
