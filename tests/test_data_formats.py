"""Data in common file formats: each format trains on two ranks, and a run resumes exactly."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ddp_tutorial import SourceConfig, TrainConfig, Trainer, World, launch, make_source

pytestmark = pytest.mark.usefixtures("workdir")
SHARDS, ROWS = 4, 15  # files, and samples in each


def points() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(SHARDS, ROWS, 3))


def write_parquet() -> None:
    for number, rows in enumerate(points()):
        pa.parquet.write_table(pa.table({"x": rows.tolist()}), f"points-{number}.parquet")


def write_tars() -> None:
    for number, rows in enumerate(points()):
        with tarfile.open(f"points-{number}.tar", "w") as tar:
            for place, row in enumerate(rows):
                content = json.dumps({"x": row.tolist()}).encode()
                info = tarfile.TarInfo(f"{number:02}{place:04}.json")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def streamed(kind: str, pattern: str) -> Any:
    # A URL, so that fsspec opens the files, as it does for s3:// and gs://.
    return datasets.load_dataset(kind, data_files=f"file://{Path.cwd()}/{pattern}", split="train", streaming=True)


def parquet() -> Any:
    return streamed("parquet", "points-*.parquet")


def webdataset() -> Any:
    rows = streamed("webdataset", "points-*.tar")
    return rows.map(lambda row: {"x": row["json"]["x"]}, remove_columns=["json", "__key__", "__url__"])


def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    x = torch.stack(batch["x"], 1).float() if isinstance(batch["x"], list) else batch["x"].float()
    return F.mse_loss(model(x), x.sin(), reduction="sum"), len(x)


def trained(world: World, data: Callable[[], Any], steps: int, name: str) -> tuple[list[float], str]:
    # `datasets` sleeps for 10 s whenever it closes a shuffled stream: apache/arrow#45214.
    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0.1
    torch.manual_seed(0)
    source = make_source(data(), 10, world, config=SourceConfig(kind="streamed", shuffle_buffer=7))
    config = TrainConfig(
        steps=steps,
        schedule_steps=9,
        name=name,
        resume="auto",
        resume_allow=("steps",),
        checkpoint={"every": 1},
        warmup_steps=1,
    )
    result = Trainer(nn.Linear(3, 3), source, loss, world, config).train()
    return result.losses, result.weights


def whole_and_resumed(world: World, data: Callable[[], Any]) -> list[tuple[list[float], str]]:
    whole = trained(world, data, 9, "whole")  # an epoch and a half
    trained(world, data, 4, "resumed")
    return [whole, trained(world, data, 9, "resumed")]


@pytest.mark.parametrize(("write", "data"), [(write_parquet, parquet), (write_tars, webdataset)])
def test_streamed_files_train_on_two_ranks_and_resume_exactly(
    write: Callable[[], None], data: Callable[[], Any]
) -> None:
    write()
    assert len({row["x"][0] for row in data()}) == SHARDS * ROWS
    for whole, resumed in launch(whole_and_resumed, 2, data, device="cpu", echo=False):
        assert whole == resumed
        assert len(whole[0]) == 9
