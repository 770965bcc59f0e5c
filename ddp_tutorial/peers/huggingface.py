"""Train with Hugging Face's Trainer, which runs the loop and requires a model that returns the loss."""

from typing import Any

from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from ddp_tutorial.peers.work import Work
from ddp_tutorial.world import World


class WithLoss(nn.Module):
    """A model that accepts the columns of a batch by name and returns a dictionary with the loss.

    If a batch contains "labels", the Trainer counts all labels other than -100 on all ranks. The Trainer expects the
    loss sum divided by this count, and multiplies the quotient by the world size because DDP averages the gradients.
    """

    def __init__(self, work: Work) -> None:
        """Create the model of `work`."""
        super().__init__()
        self.work, self.model = work, work.model()

    def forward(self, num_items_in_batch: Tensor | None = None, **batch: Tensor) -> dict[str, Tensor]:
        """Return a dictionary with the loss of a batch."""
        total, count = self.work.loss(self.model, batch)
        return {"loss": total / (count if num_items_in_batch is None else num_items_in_batch)}


class Reporting(TrainerCallback):
    """A callback that reports the mean loss logged by the Trainer."""

    def __init__(self, work: Work) -> None:
        """Store `work`, whose `report` function receives the loss."""
        self.work = work

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        """Report the loss if `logs` contains one."""
        if "loss" in logs:
            self.work.report(logs["loss"])


def train(_: World, work: Work) -> nn.Module:
    """Train with Hugging Face's Trainer."""
    model = WithLoss(work)
    optimizer = work.optimizer(model)
    arguments = TrainingArguments(
        output_dir="huggingface",
        use_cpu=True,
        max_steps=work.steps,
        per_device_train_batch_size=work.per_rank,
        max_grad_norm=work.clip,
        train_sampling_strategy="random" if work.shuffle else "sequential",
        ddp_find_unused_parameters=False,  # as in DDP; the Trainer's default is True
        remove_unused_columns=False,
        logging_steps=1,
        save_strategy="steps" if work.save_after else "no",
        save_steps=work.save_after or 1,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=work.samples, optimizers=(optimizer, work.scheduler(optimizer)))
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Reporting(work))
    trainer.train(resume_from_checkpoint=work.resume)
    return model.model
