"""Accelerate as a strategy: the weights of strategy ddp, and all features of a run."""

import importlib.util
import os
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from commands import call
from ddp_tutorial import TrainConfig, Trainer, World, launch, make_source
from ddp_tutorial.accumulation import accelerate_strategy
from ddp_tutorial.accumulation.precision import Precision
from ddp_tutorial.checkpoint import read_manifest
from ddp_tutorial.collectives import digest
from ddp_tutorial.config import ConfigError
from ddp_tutorial.sharding.config import SourceConfig
from ddp_tutorial.sharding.permutation import GlobalBatchSampler, Permutation, shard_indices
from ddp_tutorial.training.config import TaskConfig
from ddp_tutorial.training.plan import memory, step_bytes_sent
from ddp_tutorial.training.strategies import make_strategy
from ddp_tutorial.training.tasks import with_batch_size
from ranks import error_of

needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="an extra: pip install 'ddp-tutorial[peers]'"
)


class Toy(nn.Module):
    """A model with tied and frozen parameters, one that only rank 0 uses, dropout, and BatchNorm's buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(7, 7), nn.Linear(7, 7)
        self.again.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.shift = nn.Parameter(torch.ones(()))
        self.norm, self.drop = nn.BatchNorm1d(7), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, shifted: bool) -> torch.Tensor:
        x = self.drop(torch.tanh(self.norm(self.first(x))))
        return self.again(x + self.shift if shifted else x)


def batches_of(step: int, rank: int, parts: int) -> list[Any]:
    """Return ragged micro-batches of 2 to 6 samples."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    sizes = [2 + (step + rank + part) % 5 for part in range(parts)]
    return [(*torch.randn(2, size, 7, generator=generator), rank == 0) for size in sizes]


def steps_of(world: World, kind: str, parts: int, dtype: str) -> tuple[list[Any], list[Any]]:
    """Return totals and digests of the weights after each of five steps, and the micro-batches in which DDP
    synchronizes.
    """
    torch.manual_seed(0)
    model, talks = Toy(), []
    ddp = {"find_unused_parameters": True}
    config = TrainConfig.model_validate(
        {"strategy": kind, "accumulation": parts, "ddp": ddp, "precision": {"dtype": dtype}}
    )
    precision = Precision(config.precision, world)

    def loss(model: Any, batch: Any) -> tuple[torch.Tensor, int]:
        x, y, shifted = batch
        if len(x) == 1:
            raise ValueError("one sample")
        talks.append(getattr(getattr(strategy, "wrapped", None), "require_backward_grad_sync", None))
        return ((model(x, shifted) - y) ** 2).sum(), len(x)

    strategy = make_strategy(config, model, world, loss, precision)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
    torch.manual_seed(world.rank)
    found: list[Any] = []
    for step in range(5):
        totals = strategy.backward(batches_of(step, world.rank, parts), stop_flags=world.rank)
        made = precision.update(optimizer, 0.5, totals.sums["loss"], strategy.norm).applied
        found.append((totals.sums, totals.counts, totals.stop_flags, made, digest(model.state_dict())))
        if step == 2 and parts > 1:  # a step that fails on all ranks before communication does not affect later steps
            one = batches_of(step, world.rank, 1)
            broken = [*one, (torch.zeros(1, 7), torch.zeros(1, 7), False), *one]
            assert "one sample" in error_of(lambda broken=broken: strategy.backward(broken))
            optimizer.zero_grad()
    strategy.sync_buffers()
    return [*found, digest(model.state_dict())], talks


CASES = [(1, "fp32"), (3, "fp32"), (2, "bf16"), (3, "fp16")]


def in_all_cases(world: World) -> dict[Any, Any]:
    before = dict(os.environ), torch.get_num_threads()
    found = {(kind, *case): steps_of(world, kind, *case) for kind in ("ddp", "accelerate") for case in CASES}
    assert (dict(os.environ), torch.get_num_threads()) == before
    return found


@needs_accelerate
@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_weights_are_bitwise_identical_to_ddp_on_ragged_micro_batches(nprocs: int) -> None:
    ranks = launch(in_all_cases, nprocs, threads=1, echo=False, timeout=300)
    for case in CASES:
        for rank in ranks:
            (ddp, _), (ours, talks) = rank["ddp", *case], rank["accelerate", *case]
            assert ours == ddp, case
            parts = case[0]
            # between steps, BatchNorm has the rank's own statistics; at the end, it has rank 0's
            assert ours[-1] == ranks[0]["accelerate", *case][0][-1]
            if nprocs > 1:  # ranks communicate only in the last micro-batch of each step
                whole = [talk for talk in talks if talk is not None]
                step = [False] * (parts - 1) + [True]
                failed = [False] if parts > 1 else []
                assert whole == 3 * step + failed + 2 * step, case


def loss_of(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    x, y = batch
    return nn.functional.mse_loss(model(x), y, reduction="sum"), len(x)


def trained(world: World, name: str, strategy: str, steps: int) -> tuple[list[float], str, int | None]:
    torch.manual_seed(0)
    x = torch.randn(50, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.GELU(), nn.Linear(16, 1))
    settings = {"strategy": strategy, "accumulation": 3, "steps": steps, "schedule_steps": 6, "name": name}
    settings |= {"resume": "auto", "resume_allow": ["steps"], "checkpoint": {"every": 2}, "tensorboard": False}
    config = TrainConfig.model_validate(settings, strict=False)
    data = TensorDataset(x, x[:, :1].sin())
    result = Trainer(model, make_source(data, 11, world), loss_of, world, config, validation_data=data).train()
    return result.losses, result.weights, result.stopped_at


def lives(world: World) -> list[Any]:
    whole = [trained(world, strategy, strategy, 6) for strategy in ("ddp", "accelerate")]
    return [*whole, trained(world, "cut", "accelerate", 4)]


def goes_on(world: World) -> Any:
    return trained(world, "cut", "accelerate", 6)


@needs_accelerate
def test_a_run_and_its_resumption_are_bitwise_identical_to_ddp(workdir: Path) -> None:
    options: dict[str, Any] = {"threads": 1, "echo": False, "timeout": 120}
    (ddp, whole, cut), _ = launch(lives, 2, **options)
    assert whole == ddp
    assert cut[0] == whole[0][:4]
    assert launch(goes_on, 2, **options) == [whole, whole]
    components = [
        set(read_manifest(Path("runs", name, "checkpoints", "step_00000006")).components) for name in ("ddp", "cut")
    ]
    assert components[0] == components[1]


def test_a_dry_run_reports_the_same_plan_as_for_ddp() -> None:
    of = {kind: TaskConfig(strategy=kind, accumulation=3) for kind in ("ddp", "accelerate")}
    kept = {kind: memory(config, 4, 3) for kind, config in of.items()}
    assert kept["accelerate"] == kept["ddp"]
    parameters = kept["ddp"]["parameters"]
    assert (
        step_bytes_sent(of["accelerate"], parameters, 3, 3)
        == step_bytes_sent(of["ddp"], parameters, 3, 3)
        == 2 * 4 * parameters * 2 // 3
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"ddp": {"variant": "bucket"}},
            "'ddp.variant' requires strategy=ddp or strategy=zero1, got strategy=accelerate",
        ),
        ({"ddp": {"hook": "fp16"}}, "'ddp.hook' requires strategy=ddp or strategy=zero1, got strategy=accelerate"),
        (
            {"ddp": {"simulated_link": {}}},
            "'ddp.simulated_link' requires strategy=ddp or strategy=zero1, got strategy=accelerate",
        ),
        ({"oom_skips": 1}, "'oom_skips' requires strategy=ddp, got strategy=accelerate"),
        ({"mesh": {"shard": 2}}, "'mesh.shard' requires .*, got strategy=accelerate"),
        ({"local": {"round": 4}}, "'local.round' requires strategy=local_sgd, post_local_sgd or"),
        ({"pipeline": {"per_rank": 2}}, "'pipeline.per_rank' requires strategy=pipeline, got strategy=accelerate"),
    ],
)
def test_an_option_that_accelerate_lacks_is_rejected_in_one_line(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TrainConfig.model_validate({"strategy": "accelerate", **values})


def test_a_missing_package_is_reported_with_the_install_command(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate_strategy, "find_spec", lambda name: None)
    for more in ((), ("--dry-run",)):
        done = call("train", "tiny", "strategy=accelerate", "name=x", *more)
        assert done.returncode == 2
        [line] = done.stderr.splitlines()
        assert "which is not installed. Run: pip install 'ddp-tutorial[peers]'" in line
    assert list(workdir.iterdir()) == []
    with pytest.raises(ConfigError, match="which is not installed"):
        accelerate_strategy.AccelerateStrategy(nn.Linear(1, 1), World(), loss_of)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            ("FSDP", 1, 2, "cpu"),
            "type MULTI_CPU, rank 1 of 2 and device cpu, got distributed type FSDP, rank 1 of 2 and device cpu",
        ),
        (("MULTI_CPU", 0, 1, "cpu"), "got distributed type MULTI_CPU, rank 0 of 1"),
        (("MULTI_CPU", 1, 2, "cuda:0"), "got distributed type MULTI_CPU, rank 1 of 2 and device cuda:0"),
    ],
)
def test_an_incompatible_accelerate_setup_is_rejected(found: tuple[Any, ...], said: str) -> None:
    kind, rank, size, device = found
    state = SimpleNamespace(
        distributed_type=SimpleNamespace(value=kind), process_index=rank, num_processes=size, device=device
    )
    with pytest.raises(ConfigError, match=said):
        accelerate_strategy._require_fit(state, World(1, 2, 1, 2))


@needs_accelerate
@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("MIXED_PRECISION", "bf16", r"'accelerate launch --mixed_precision bf16'.* precision\.dtype"),
        ("MIXED_PRECISION", "fp8", r"--mixed_precision fp8"),
        ("GRADIENT_ACCUMULATION_STEPS", "4", "--gradient_accumulation_steps .* set accumulation"),
        ("DYNAMO_BACKEND", "INDUCTOR", "--dynamo_backend .* compile=true with strategy=ddp"),
    ],
)
def test_options_of_accelerate_launch_against_the_config_are_rejected(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(f"ACCELERATE_{variable}", value)
    with pytest.raises(ConfigError, match=said):
        accelerate_strategy.AccelerateStrategy(nn.Linear(1, 1), World(), loss_of)
    for same in ("no", "NO", "1"):
        monkeypatch.setenv(f"ACCELERATE_{variable}", same)
        accelerate_strategy._require_launch_options("fp32", 1)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    accelerate_strategy._require_launch_options("bf16", 1)


# ------------------------------------------------------------------------------------ options of the data loader

SAMPLES, BATCH = 22, 8


def steps_of_accelerate(rank: int, **options: Any) -> list[list[int]]:
    """Return the samples of each step of an epoch on one of two ranks, without shuffling."""
    from accelerate.data_loader import BatchSamplerShard

    batch = BATCH if options["split_batches"] else BATCH // 2
    sampler = BatchSampler(SequentialSampler(range(SAMPLES)), batch, drop_last=False)
    return list(BatchSamplerShard(sampler, 2, rank, **options))


def steps_of_ours(rank: int, remainder: str) -> list[list[int]]:
    source = GlobalBatchSampler(Permutation(SAMPLES, None), BATCH, remainder, pad_to=2)
    return [shard_indices(indices, rank, 2).tolist() for indices in source.epoch(0)]


def together(*ranks: list[list[int]]) -> list[list[int]]:
    """Return the samples of each step on all ranks."""
    return [sorted(one + other) for one, other in zip_longest(*ranks, fillvalue=[])]


@needs_accelerate
@pytest.mark.parametrize("split", [True, False])
def test_a_step_has_accelerates_samples_with_and_without_split_batches(split: bool) -> None:
    uneven = together(*(steps_of_accelerate(rank, split_batches=split, even_batches=False) for rank in (0, 1)))
    even = together(*(steps_of_accelerate(rank, split_batches=split, even_batches=True) for rank in (0, 1)))
    exact, padded = (together(*(steps_of_ours(rank, kind) for rank in (0, 1))) for kind in ("exact", "pad"))
    assert exact == uneven
    assert exact[:2] == padded[:2] == even[:2]
    assert sorted(even[-1]) == sorted([*range(16, SAMPLES), 0, 1])  # Accelerate fills the batch
    assert padded[-1] == [*range(16, SAMPLES)]  # 3 samples on each rank need no padding
    lengths = [len(steps_of_ours(rank, "exact")[-1]) for rank in (0, 1)]
    assert lengths == [3, 3]
    assert len(steps_of_accelerate(1, split_batches=split, even_batches=False)[-1]) == 2  # and rank 0 has 4


def test_without_split_batches_the_batch_is_that_of_a_rank() -> None:
    config = with_batch_size(TaskConfig(per_device_train_batch_size=4), 2)
    assert config.batch_size == BATCH


@needs_accelerate
def test_the_order_depends_on_seed_and_epoch_as_with_seedable_sampler() -> None:
    from accelerate.data_loader import SeedableRandomSampler

    def accelerates(seed: int, epoch: int) -> list[int]:
        sampler = SeedableRandomSampler(range(SAMPLES), data_seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    def ours(seed: int, epoch: int) -> list[int]:
        return Permutation(SAMPLES, seed).take(epoch * SAMPLES, SAMPLES).tolist()

    for order in (accelerates, ours):
        assert order(1, 0) == order(1, 0)
        assert sorted(order(1, 0)) == list(range(SAMPLES))
        assert len({tuple(order(seed, epoch)) for seed in (1, 5) for epoch in (0, 1)}) == 4
    assert accelerates(1, 1) == accelerates(2, 0)  # seed + epoch: the second epoch repeats the first of the next seed
    assert ours(1, 1) != ours(2, 0)


class Counted(TensorDataset):
    """A dataset that counts the samples that this rank reads."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return super().__getitem__(index)


def dispatched(world: World) -> tuple[list[Any], list[Any]]:
    """Return the number of samples that a rank reads and those of its first step, with Accelerate and with ours."""
    from accelerate import PartialState
    from accelerate.data_loader import prepare_data_loader

    with accelerate_strategy._environment_of(world):
        PartialState(cpu=True)
    theirs, ours = Counted(torch.arange(16)), Counted(torch.arange(16))
    loader = DataLoader(theirs, batch_size=8)
    options = {"split_batches": True, "dispatch_batches": True, "put_on_device": True}
    [batch], *_ = prepare_data_loader(loader, world.device, 2, world.rank, **options)
    source = make_source(ours, 8, world, seed=None, config=SourceConfig(kind="dispatched", prefetch=1))
    [own] = next(source).samples
    source.close()
    return [theirs.reads > 0, sorted(batch.tolist())], [ours.reads > 0, sorted(own.tolist())]


@needs_accelerate
def test_only_rank_zero_reads_with_dispatch_batches_and_dispatched() -> None:
    (theirs, ours), (theirs_of_1, ours_of_1) = launch(dispatched, 2, device="cpu", threads=1, echo=False)
    assert [theirs[0], theirs_of_1[0]] == [ours[0], ours_of_1[0]] == [True, False]
    assert sorted(theirs[1] + theirs_of_1[1]) == sorted(ours[1] + ours_of_1[1]) == list(range(8))


def test_ranks_that_share_a_gpu_are_rejected() -> None:
    state = SimpleNamespace(
        distributed_type=SimpleNamespace(value="MULTI_GPU"), process_index=1, num_processes=2, device="cuda:0"
    )
    with pytest.raises(ConfigError, match="one GPU per rank; use strategy=ddp for ranks that share a GPU"):
        accelerate_strategy._require_fit(state, World(1, 2, 1, 2, torch.device("cuda", 0), backend="gloo"))
