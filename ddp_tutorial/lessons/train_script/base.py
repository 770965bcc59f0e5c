"""Train a digit classifier with `torchrun --nproc-per-node=2 train.py model.pt`. Rerun the command to resume."""

import os
import time
from argparse import ArgumentParser, Namespace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def setup(cpu: bool) -> torch.device:
    """Initialize the process group, and return this rank's device. Collective."""
    device = torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator and not cpu:
        device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))  # not RANK, which is the global rank
        torch.accelerator.set_device_index(device)
    backend = dist.get_default_backend_for_device(device)  # "gloo" for CPUs, "nccl" for NVIDIA and AMD GPUs
    dist.init_process_group(backend, device_id=None if device.type == "cpu" else device)
    return device


class Digits(Dataset):
    """Images of 8 x 8 pixels and their digits. Each epoch adds different noise with standard deviation `noise`."""

    def __init__(self, path: Path, noise: float = 0.0) -> None:
        table = pyarrow.parquet.read_table(path)
        self.pixels = torch.tensor(table["pixels"].to_pylist()) / 16
        self.digits = torch.tensor(table["digit"].to_pylist())
        self.noise, self.epoch = noise, 0

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # The seed depends only on the epoch and the sample, not on the rank or the DataLoader worker.
        generator = torch.Generator().manual_seed(self.epoch * len(self) + index)
        return self.pixels[index] + self.noise * torch.randn(64, generator=generator), self.digits[index]


def make_loader(data: Digits, args: Namespace, rank: int, size: int) -> DataLoader:
    """Return a DataLoader that yields this rank's local batches."""
    if args.batch % size:
        raise ValueError(f"--batch must be a multiple of the world size, got {args.batch} on {size} ranks")
    # All ranks use the same permutation. Rank r of N reads positions r, r + N, r + 2N, ...
    sampler = DistributedSampler(data, size, rank, drop_last=True)  # the same number of samples on every rank
    return DataLoader(
        data,
        args.batch // size,
        sampler=sampler,
        drop_last=True,  # drop the last batch if it is incomplete
        num_workers=args.workers,
        pin_memory=torch.accelerator.is_available(),  # for asynchronous copies to the device
        generator=torch.Generator().manual_seed(rank),  # otherwise, the loader would advance dropout's generator
    )


def make_state(args: Namespace, device: torch.device) -> dict[str, Any]:
    """Return the objects whose state dicts form a checkpoint."""
    torch.manual_seed(0)  # the same weights in every run; DDP broadcasts rank 0's weights
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=args.steps)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train_step(ddp: nn.Module, state: dict[str, Any], batch: Any, args: Namespace, device: torch.device) -> Tensor:
    """Take one optimizer step, and return the loss of this rank's local batch. Collective."""
    pixels, digits = (tensor.to(device, non_blocking=True) for tensor in batch)
    with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):  # forward pass only
        loss = F.cross_entropy(ddp(pixels), digits)
    loss.backward()  # DDP averages the gradients over the ranks
    state["optimizer"].step()
    state["scheduler"].step()
    state["optimizer"].zero_grad()
    return loss.detach()


def mean_over_ranks(losses: list[Tensor]) -> list[float]:
    """Return each loss, averaged over the ranks. The local batches must have equal sizes. Collective."""
    dist.all_reduce(stacked := torch.stack(losses), op=dist.ReduceOp.AVG)
    return stacked.tolist()  # waits for the device


def log(message: str) -> None:
    """Print a message on rank 0 only."""
    if dist.get_rank() == 0:
        print(message, flush=True)


def generators(device: torch.device) -> list[Any]:
    """Return the modules that manage the default random number generators of the CPU and of `device`."""
    return [torch] if device.type == "cpu" else [torch, torch.get_device_module(device)]


def save(path: Path, state: dict[str, Any], losses: list[float], device: torch.device) -> None:
    """Save the training state. Collective."""
    rng: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rng, [module.get_rng_state() for module in generators(device)])
    if dist.get_rank() == 0:
        contents = {name: component.state_dict() for name, component in state.items()}
        temporary = path.with_suffix(".part")
        with temporary.open("wb") as file:
            torch.save(contents | {"losses": losses, "rng": rng}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)  # atomic: a crash leaves either the old or the new checkpoint


def resume(path: Path, state: dict[str, Any], device: torch.device) -> list[float]:
    """Load the training state if rank 0 has a checkpoint, and return the losses of all completed steps. Collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1 + rank)  # a different dropout mask on each rank
    saved = [torch.load(path, map_location="cpu") if rank == 0 and path.exists() else None]
    dist.broadcast_object_list(saved, device=device)  # rank 0 decides, because other ranks may not see the file
    if saved[0] is None:
        return []
    for name, component in state.items():
        component.load_state_dict(saved[0][name])
    if len(saved[0]["rng"]) == size:  # restore the generators only if the number of ranks is unchanged
        for module, rng_state in zip(generators(device), saved[0]["rng"][rank], strict=False):
            module.set_rng_state(rng_state)
    return saved[0]["losses"]


@torch.no_grad()
def evaluate(model: nn.Module, data: Digits, args: Namespace, device: torch.device) -> tuple[float, float, int]:
    """Return the mean loss, the accuracy, and the number of samples over all ranks. Collective."""
    total = torch.zeros(3, dtype=torch.float64, device=device)
    model.eval()  # without DDP: DDP's forward pass may communicate, but the ranks may run different numbers of batches
    for indices in torch.arange(dist.get_rank(), len(data), dist.get_world_size()).split(args.batch):
        logits, digits = model(data.pixels[indices].to(device)), data.digits[indices].to(device)
        total[0] += F.cross_entropy(logits, digits, reduction="sum")
        total[1] += (logits.argmax(1) == digits).sum()
        total[2] += len(digits)
    model.train()
    dist.all_reduce(total)  # sums and counts, so that every sample has the same weight
    loss, correct, count = total.tolist()
    return loss / count, correct / count, int(count)


def main(args: Namespace) -> None:
    """Train up to step `args.steps`, then evaluate."""
    device = setup(args.cpu)
    data = Digits(args.data / "train.parquet", noise=0.1)
    loader = make_loader(data, args, dist.get_rank(), dist.get_world_size())
    state = make_state(args, device)
    losses = resume(args.checkpoint, state, device)  # before DDP's constructor, which broadcasts rank 0's weights
    ddp = DistributedDataParallel(state["model"], device_ids=None if device.type == "cpu" else [device])
    step, new, begin = len(losses), [], time.perf_counter()
    while step < args.steps:
        data.epoch, done = divmod(step, len(loader))
        loader.sampler.set_epoch(data.epoch)  # otherwise, every epoch uses the same order
        for batch in islice(loader, done, done + args.steps - step):
            new.append(train_step(ddp, state, batch, args, device))
            step += 1
            if step % args.every == 0 or step == args.steps:
                means = mean_over_ranks(new)
                speed = args.batch * len(means) / (time.perf_counter() - begin)
                log(f"step {step}: mean loss {sum(means) / len(means):.4f}, {speed:,.0f} samples/s")
                losses += means
                save(args.checkpoint, state, losses, device)
                new, begin = [], time.perf_counter()
    loss, accuracy, count = evaluate(state["model"], Digits(args.data / "validation.parquet"), args, device)
    log(f"validation: loss {loss:.4f}, accuracy {accuracy:.4f} over {count} samples")


def parse_args(arguments: list[str] | None = None) -> Namespace:
    """Parse the command-line arguments."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--data", type=Path, default="../data/digits", help="folder that contains the Parquet files")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--batch", type=int, default=48, help="global batch size")
    parser.add_argument("--workers", type=int, default=1, help="DataLoader workers per rank")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--cpu", action="store_true", help="do not use an accelerator")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parse_args())
    dist.destroy_process_group()
    os._exit(0)  # skip Python's shutdown, which DDP's gloo threads may abort or block (torch 2.13)
