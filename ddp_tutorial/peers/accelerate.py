"""Train with Hugging Face Accelerate, which prepares the model, optimizer and data loader for the user's loop."""

from itertools import islice
from pathlib import Path

from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from ddp_tutorial.peers.work import Work
from ddp_tutorial.world import World


def train(_: World, work: Work) -> nn.Module:
    """Train with Hugging Face Accelerate."""
    accelerator = Accelerator(cpu=True)
    model = work.model()
    optimizer = work.optimizer(model)
    # A prepared scheduler would advance once per process in each step, so the scheduler is not prepared.
    scheduler = work.scheduler(optimizer)
    loader = DataLoader(work.samples, batch_size=work.per_rank, shuffle=work.shuffle)
    ddp, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(scheduler)
    step = 0
    if work.resume:
        [folder] = Path().glob("step_*")
        accelerator.load_state(str(folder))
        step = int(folder.name.removeprefix("step_"))
    while step < work.steps:
        done = step % len(loader)  # batches of this epoch before the interruption
        rest = accelerator.skip_first_batches(loader, done) if done else loader
        for batch in islice(rest, work.steps - step):
            loss = work.mean(ddp, batch)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), work.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            work.report(accelerator.reduce(loss.detach(), "mean").item())
            if step == work.save_after:
                accelerator.save_state(f"step_{step}")
    return model
