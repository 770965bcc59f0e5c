"""The benchmarks: equal conditions for all arms, and no files outside their temporary folders."""

import os
from pathlib import Path
from typing import Any

import pytest

from ddp_tutorial.benches import compile as compile_bench
from ddp_tutorial.benches import overhead, sources
from ddp_tutorial.files import observe_disk
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.training.config import ModelConfig, TaskConfig
from ddp_tutorial.world import World


def test_each_arm_finds_its_own_compiled_files_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """An arm does not use the files that a different arm has compiled."""
    compiled: dict[str, list[str]] = {}

    def launched(fn: Any, size: int, *arm: str, **_: Any) -> list[Any]:
        compiled.setdefault(os.environ["TORCHINDUCTOR_CACHE_DIR"], []).extend(arm)
        return [1.0] if arm else [dict.fromkeys(("ours", "bare", *both), 1.0)]

    both = ["ours_compiled", "bare_compiled"]
    monkeypatch.setattr(compile_bench, "launch", launched)
    compile_bench.measure(5)
    *cold, cached = compiled.values()
    assert cold == [[arm] for arm in both]
    assert cached[:2] == both
    assert sorted(cached) == sorted(6 * both), "once to fill the cache, and five times to measure"


def test_the_source_benchmark_writes_only_to_its_folder(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_LOADED", sources.BATCH)
    folder = tmp_path / "of the benchmark"
    folder.mkdir()
    found = sources._load(World(), str(folder), 1)
    assert set(found) == {"load_iterable", *(f"load_{kind}" for kind in sources.KINDS)}
    assert list(workdir.iterdir()) == []


def log_writes(world: World, config: TaskConfig) -> int:
    """Return the number of writes to the logs of the overhead benchmark in two rounds of `log_every` steps."""
    names: list[str] = []
    with observe_disk(lambda operation, path: names.append(path.name)):
        overhead._alternate(world, config, config.log_every)
    return names.count("metrics.jsonl")


def test_the_trainers_of_the_overhead_benchmark_write_their_logs(workdir: Path) -> None:
    (workdir / "notes.txt").write_bytes(bytes(range(32, 127)) * 100)
    config = TaskConfig.model_validate(
        {
            "corpus": f"text:{workdir / 'notes.txt'}",
            "model": ModelConfig(layers=1, heads=1, width=16, context=16),
            "device": "cpu",
            "batch_size": 4,
            "log_every": 2,
            "eval_samples": 2,
        }
    )
    assert launch(log_writes, 2, config, device="cpu", threads=1, echo=False, timeout=300) == [4, 0]
