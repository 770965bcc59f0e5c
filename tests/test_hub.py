"""`hub:OWNER/NAME` against a local server: a run downloads it, and resumes exactly after the server is gone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from datasets.exceptions import DatasetNotFoundError

from ddp_tutorial import launch
from ddp_tutorial.sharding import corpus as corpora
from ddp_tutorial.sharding.corpus import load_corpus
from ddp_tutorial.sharding.stories import story
from ddp_tutorial.training.config import TaskConfig
from ddp_tutorial.training.tasks import train
from hub import serving
from ranks import error_of

LINES = "\n".join(json.dumps({"text": story(number)}) for number in range(60))
FILES = {"README.md": b"# Stories", "data/train-0.jsonl": LINES.encode()}
CORPUS = "hub:owner/stories[:50]"
VALUES = {
    "corpus": CORPUS,
    "model": {"layers": 1, "heads": 1, "width": 8, "context": 8},
    "device": "cpu",
    "steps": 3,
    "schedule_steps": 6,
    "warmup_steps": 2,
    "eval_samples": 4,
    "checkpoint": {"every": 1},
    "tensorboard": False,
}


def train_on_hub(endpoint: str, folder: Path) -> None:
    """Run `train` in a process of its own: huggingface_hub reads HF_ENDPOINT when it is imported."""
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "home")}
    (folder / "half.yaml").write_text(yaml.safe_dump(VALUES | {"name": "half", "nprocs": 2}))
    subprocess.run([sys.executable, "-m", "ddp_tutorial", "train", "half.yaml"], env=environment, check=True)


def test_a_run_on_a_dataset_of_the_hub_resumes_exactly_without_the_hub(workdir: Path) -> None:
    with serving("owner/stories", FILES) as endpoint:
        train_on_hub(endpoint, workdir)
    assert Path("runs/half/checkpoints/step_00000003").is_dir()
    text = bytes(load_corpus(CORPUS).train.tolist()).split(b"\0")  # from the cache of the run
    assert text == [story(number).encode() for number in range(50) if number not in (19, 39)]
    values = VALUES | {"steps": 6, "resume": "auto", "resume_allow": ["steps"]}
    results = {
        name: launch(train, 2, TaskConfig.model_validate(values | {"name": name}), threads=1, echo=False)[0]
        for name in ("half", "whole")
    }
    assert results["half"].losses == results["whole"].losses
    assert results["half"].weights == results["whole"].weights


def test_a_dataset_that_the_hub_does_not_have_is_named(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(where: str, **_: object) -> None:
        raise DatasetNotFoundError(f"Dataset {where!r} doesn't exist") from OSError("404 Client Error")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr(corpora, "_reach_hub", lambda argument: None)
    assert "cannot be read: Dataset 'owner/novels' doesn't exist" in error_of(lambda: load_corpus("hub:owner/novels"))
