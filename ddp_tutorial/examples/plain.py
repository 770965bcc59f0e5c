"""Train the same network as `digits.py` in plain PyTorch, with data parallelism written out step by step.

python -m ddp_tutorial.examples.plain steps=200 accumulate=2
torchrun --nproc-per-node 2 -m ddp_tutorial.examples.plain checkpoint=runs/plain.pt  # rerun to resume
"""

import os
import sys
from contextlib import nullcontext
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class AllReduce(torch.autograd.Function):  # dist.all_reduce is not differentiable
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x := x.clone())
        return x

    backward = forward  # type: ignore[assignment]  # each input affects the outputs of all ranks


class BatchNorm(nn.BatchNorm2d):  # over all ranks, with equal batch sizes; nn.SyncBatchNorm requires GPUs
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        count = x.numel() // x.shape[1] * dist.get_world_size()
        deviations = x - (mean := AllReduce.apply(x.sum((0, 2, 3))) / count).view(-1, 1, 1)
        variance = AllReduce.apply(deviations.square().sum((0, 2, 3))) / count
        self.get_buffer("running_mean").lerp_(mean.detach(), 0.1)
        self.get_buffer("running_var").lerp_(variance.detach() * count / (count - 1), 0.1)
        normal = deviations * (variance + self.eps).rsqrt().view(-1, 1, 1)
        return normal * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


def images(part: str) -> tuple[Tensor, Tensor]:
    """Return the images and digits of the `train` or `validation` split. Pixel values range from 0 to 1."""
    folder = next(up / "data" for up in Path(__file__).parents if (up / "data").is_dir())  # in the repository or wheel
    table = pyarrow.parquet.read_table(folder / "digits" / f"{part}.parquet")
    return torch.tensor(table["pixels"].to_pylist()).view(-1, 1, 8, 8) / 16, torch.tensor(table["digit"].to_pylist())


def main(checkpoint: str = "plain.pt", steps: int = 200, accumulate: int = 1, batch: int = 64) -> None:
    """Train on this rank. `batch` is the global batch size."""
    if "RANK" not in os.environ:  # not started by torchrun: run a single process
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    if batch % size:
        raise ValueError(f"'batch' must be a multiple of the number of ranks ({size}), got {batch}")
    torch.manual_seed(0)  # identical weights on all ranks
    convs = [(nn.Conv2d(a, b, 3, padding=1, bias=False), BatchNorm(b), nn.ReLU()) for a, b in pairwise((1, 16, 32, 64))]
    model = nn.Sequential(*sum(convs, ()), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=steps)
    sampler: Any = DistributedSampler(data := TensorDataset(*images("train")), size, rank)
    loader = DataLoader(data, batch // size, sampler=sampler, drop_last=True)
    parts: list[Any] = [model, optimizer, scheduler]
    path, aside = Path(checkpoint), Path(f"{checkpoint}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = [torch.load(path, map_location="cpu") if rank == 0 and path.exists() else [[]]]
    dist.broadcast_object_list(saved, device=device)  # rank 0 decides, because other ranks may not see the file
    losses, *states = saved[0]
    for part, state in zip(parts, states, strict=False):  # no states: start at step 0
        part.load_state_dict(state)
    ddp = DistributedDataParallel(model)  # broadcasts rank 0's weights
    while len(losses) < steps:
        epoch, done = divmod(len(losses), len(loader))
        sampler.set_epoch(epoch)  # otherwise, every epoch uses the same order
        for samples in islice(loader, done, done + steps - len(losses)):
            total = torch.zeros(2, device=device)
            for number in range(accumulate):
                pixels, digits = (tensor[number::accumulate].to(device) for tensor in samples)
                with nullcontext() if number == accumulate - 1 else ddp.no_sync():  # must include the forward pass
                    loss = nn.functional.cross_entropy(ddp(pixels), digits, reduction="sum")
                    (loss * (size / batch)).backward()  # DDP averages the gradients over ranks
                total += torch.stack([loss.detach(), loss.new_tensor(len(digits))])
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            dist.all_reduce(total)  # sum and count over all ranks
            losses.append((total[0] / total[1]).item())
            if rank == 0 and (len(losses) % 20 == 0 or len(losses) == steps):
                print(f"step {len(losses)}: loss {losses[-1]:.4f}", flush=True)
                torch.save([losses, *(part.state_dict() for part in parts)], aside)
                aside.replace(path)  # atomic: a kill leaves the old or the new file
    pixels, digits = (tensor[rank::size].to(device) for tensor in images("validation"))  # a different part on each rank
    right = (model.eval().requires_grad_(False)(pixels).argmax(1) == digits).sum()
    dist.all_reduce(total := torch.stack([right, right.new_tensor(len(digits))]))
    if rank == 0:
        print(f"validation accuracy {total[0] / total[1]:.4f} ({total[0]} of {total[1]})", flush=True)


if __name__ == "__main__":
    main(**{k: int(v) if v.isdigit() else v for k, v in (a.split("=") for a in sys.argv[1:])})  # type: ignore
    dist.destroy_process_group()  # after main() has freed its DDP model, which otherwise could block
    os._exit(0)  # DDP's gloo threads may outlive the group and abort or block Python's shutdown (torch 2.13)
