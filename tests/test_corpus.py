"""Training text."""

import json
import os
import struct
import sysconfig
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_tutorial.collectives import digest
from ddp_tutorial.config import ConfigError
from ddp_tutorial.processes.launcher import launch
from ddp_tutorial.sharding import corpus as corpora
from ddp_tutorial.sharding.corpus import Corpus, decode, encode, load_corpus
from ddp_tutorial.sharding.stories import story, write_stories
from ddp_tutorial.sharding.tokenizer import Tokenizer, _tokenized, load_tokenizer, tokenize
from ddp_tutorial.training.config import TaskConfig
from ddp_tutorial.training.export import sample
from ddp_tutorial.training.tasks import check_start, train
from ddp_tutorial.world import World
from ranks import error_of


def digest_of(corpus: Corpus) -> str:
    return digest({"train": corpus.train, "valid": corpus.valid})


def documents(tokens: torch.Tensor) -> list[bytes]:
    return bytes(tokens.tolist()).split(b"\0")


def test_the_python_corpus_is_large_and_reproducible() -> None:
    corpus = load_corpus("python")
    assert corpus.train.dtype == corpus.valid.dtype == torch.uint8
    assert corpus.train.dim() == corpus.valid.dim() == 1
    assert len(corpus.train) > 5_000_000
    assert 0.01 < len(corpus.valid) / len(corpus.train) < 0.15  # one document in 20
    text = decode(corpus.train)
    assert text.count("\n    def ") > 5_000
    assert text.count("import ") > 1_000
    assert digest_of(corpus) == digest_of(load_corpus("python"))


def test_the_python_corpus_excludes_tests_and_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ["a.py", "contest/b.py", "pkg/testing.py"]
    left_out = ["test/c.py", "pkg/tests/d.py", "idlelib/idle_test/e.py", "site-packages/f.py", "dist-packages/g.py"]
    for name in [*kept, *left_out, "pkg/__pycache__/h.py", "notes.txt"]:
        path = tmp_path / "test" / "lib" / name  # a `test` above the library does not count
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "test" / "lib"))
    listed, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(Path(path).name) or scandir(path))
    corpus = load_corpus("python")
    assert documents(corpus.train) + documents(corpus.valid) == [b"# a.py", b"# contest/b.py", b"# pkg/testing.py"]
    # Installed packages may be much larger than the library.
    assert sorted(listed) == ["contest", "idlelib", "lib", "pkg"]


def test_the_python_corpus_has_no_argument() -> None:
    with pytest.raises(ConfigError, match="does not accept an argument, got 'python:3'"):
        load_corpus("python:3")


def test_one_document_in_twenty_is_in_the_validation_set_only() -> None:
    corpus = load_corpus("stories:100")
    held_out = {19, 39, 59, 79, 99}
    assert documents(corpus.valid) == [story(number).encode() for number in sorted(held_out)]
    assert documents(corpus.train) == [story(number).encode() for number in range(100) if number not in held_out]


def test_the_last_of_few_documents_is_the_validation_set(tmp_path: Path) -> None:
    for name in ["a", "b", "c"]:
        (tmp_path / name).write_text(name * 5)
    corpus = load_corpus(f"text:{tmp_path}")
    assert (documents(corpus.train), documents(corpus.valid)) == ([b"aaaaa", b"bbbbb"], [b"ccccc"])


def test_the_end_of_a_single_document_is_the_validation_set(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_bytes(b"a" * 950 + b"b" * 50)
    corpus = load_corpus(f"text:{path}")
    assert bytes(corpus.train.tolist()) == b"a" * 950  # all but 1000 // 20 = 50
    assert bytes(corpus.valid.tolist()) == b"b" * 50


def test_the_story_sample_equals_the_output_of_the_generator(root: Path) -> None:
    files = sorted((root / "data" / "stories").iterdir())
    assert [file.name for file in files] == ["stories-0.parquet", "stories-1.parquet", "stories-2.parquet"]
    tables = [pyarrow.parquet.read_table(file)["text"].to_pylist() for file in files]
    assert all(tables)
    assert [text for table in tables for text in table] == [story(number) for number in range(3000)]
    assert sum(file.stat().st_size for file in files) < 1_000_000  # the sample is in the repository
    assert digest_of(load_corpus("stories")) == digest_of(load_corpus("stories:3000"))


def test_a_story_depends_only_on_its_number_and_seed() -> None:
    assert story(7) == story(7)
    assert story(7) != story(8)
    assert story(7) != story(7, seed=1)
    assert story(7).startswith("Once there was a ")
    assert len({story(number) for number in range(3000)}) > 2990
    assert all("{" not in story(number) and len(story(number)) > 200 for number in range(200))


@pytest.mark.parametrize("argument", ["abc", "0", "-3", "1.5", "²"])
def test_stories_takes_a_number(argument: str) -> None:
    with pytest.raises(ConfigError, match=r"the number of stories must be at least 1, as in 'stories:3000', got"):
        load_corpus(f"stories:{argument}")


def test_a_missing_story_sample_is_reported_with_an_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "STORIES", Path("/not/there"))
    with pytest.raises(ConfigError, match="Without it, use 'stories:3000'"):
        load_corpus("stories")


def test_files_of_a_folder_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ["b.txt", "a.txt", "below/c.txt", "empty.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.txt" else name)
    corpus = load_corpus(f"text:{tmp_path}")
    assert documents(corpus.train) + documents(corpus.valid) == [b"a.txt", b"b.txt", b"below/c.txt"]


def test_missing_or_empty_text_is_reported(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match="there is no file or folder '/not/there'"):
        load_corpus("text:/not/there")
    with pytest.raises(ConfigError, match="there is no file or folder ''"):
        load_corpus("text:")
    for empty in ["folder", "empty.txt", ""]:
        with pytest.raises(ConfigError, match=r"corpus 'text:.*' must contain text, but is empty"):
            load_corpus(f"text:{tmp_path / empty}")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("pyton", "unknown corpus 'pyton'. Did you mean 'python'?"),
        ("story:30", "unknown corpus 'story:30'. Did you mean 'stories'?"),
        ("qqq", "unknown corpus 'qqq'. Known: "),
        ("", "unknown corpus ''. Known: "),
    ],
)
def test_an_unknown_corpus_is_answered_with_a_similar_name(name: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_corpus(name)
    assert str(caught.value).startswith(told)


@given(st.text())
def test_decoding_restores_the_text(text: str) -> None:
    tokens = encode(text)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == list(text.encode())
    assert decode(tokens) == text


@given(st.binary())
def test_any_tokens_can_be_decoded(data: bytes) -> None:
    assert decode(torch.tensor(list(data), dtype=torch.int64)) == data.decode(errors="replace")


# ----------------------------------------------------------------------------------------- data that a user has


def write_json(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def write_parquet(path: Path, columns: dict[str, list[object]]) -> Path:
    pyarrow.parquet.write_table(pa.table(columns), path)
    return path


STORIES = [f"story {number}" for number in range(40)]


def test_json_and_parquet_return_their_documents_in_order(workdir: Path) -> None:
    write_json(workdir / "a.jsonl", [{"text": story, "n": 1} for story in STORIES])
    write_parquet(workdir / "a.parquet", {"id": list(range(40)), "body": STORIES})
    expected = [story.encode() for number, story in enumerate(STORIES) if number not in (19, 39)]
    for name in ("json:a.jsonl", "parquet:a.parquet#body"):
        corpus = load_corpus(name)
        assert documents(corpus.train) == expected
        assert documents(corpus.valid) == [b"story 19", b"story 39"]


def test_a_folder_consists_of_its_files_in_the_order_of_their_names(workdir: Path) -> None:
    paths = write_stories(60, workdir / "stories", files=3)
    (workdir / "stories" / "README.md").write_text("not a story")
    assert [len(pyarrow.parquet.read_table(path)) for path in paths] == [20, 20, 20]
    corpus, on_the_spot = load_corpus("parquet:stories"), load_corpus("stories:60")
    assert digest_of(corpus) == digest_of(on_the_spot)


def test_a_corpus_may_contain_empty_parquet_files(workdir: Path) -> None:
    write_stories(3, workdir / "stories", files=4)
    assert digest_of(load_corpus("parquet:stories")) == digest_of(load_corpus("stories:3"))


def test_a_path_is_not_expanded_as_a_wildcard(workdir: Path) -> None:
    for name, text in (("notes[1].jsonl", "the file"), ("notes1.jsonl", "a match")):
        write_json(workdir / name, [{"text": text}])
    assert bytes(load_corpus("json:notes[1].jsonl").train.tolist()) == b"the file"


def test_tokens_are_cached_until_the_file_changes(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_json(workdir / "a.jsonl", [{"text": story} for story in STORIES])
    first = load_corpus("json:a.jsonl")
    with monkeypatch.context() as patched:
        patched.setattr(corpora, "_read_dataset", lambda *_: pytest.fail("should have come from the cache"))
        assert digest_of(load_corpus("json:a.jsonl")) == digest_of(first)
    write_json(path, [{"text": story.upper()} for story in STORIES])
    assert documents(load_corpus("json:a.jsonl").train)[0] == b"STORY 0"


def test_two_concurrent_readers_of_the_same_files_both_succeed(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(workdir / "a.jsonl", [{"text": story} for story in STORIES])
    both, read = threading.Barrier(2, timeout=300), corpora._read_dataset

    def read_when_both_do(*arguments: str) -> Iterator[bytes]:
        both.wait()
        return read(*arguments)

    monkeypatch.setattr(corpora, "_read_dataset", read_when_both_do)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(load_corpus, ["json:a.jsonl"] * 2)
    assert digest_of(first) == digest_of(second)
    assert len(list((workdir / "runs" / "cache").glob("*corpus*"))) == 1


def test_caches_are_stored_under_runs(workdir: Path) -> None:
    write_json(workdir / "a.jsonl", [{"text": story} for story in STORIES])
    load_corpus("json:a.jsonl")
    assert {path.name for path in workdir.iterdir()} == {"a.jsonl", "runs"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("json:nowhere", "corpus 'json:nowhere': there is no file or folder 'nowhere'"),
        ("parquet:empty", "there is no .parquet file in folder 'empty'"),
        ("json:", "there is no file or folder"),
        (
            "json:a.jsonl#body",
            "does not contain column 'body'. Use 'json:a.jsonl#COLUMN', where COLUMN is one of: 'n', 'text'",
        ),
        ("json:mixed.jsonl", "row 1: 'text' must contain text, got int"),
        ("parquet:numbers.parquet", "row 0: 'text' must contain text, got int"),
        ("parquet:broken.parquet", "corpus 'parquet:broken.parquet' cannot be read: "),
        ("json:broken.jsonl", "corpus 'json:broken.jsonl' cannot be read: "),
        ("parquet:none.parquet", "is empty"),
        ("jsonl:a.jsonl", "Did you mean 'json'"),
    ],
)
def test_unsuitable_data_are_reported_in_one_message(workdir: Path, name: str, message: str) -> None:
    (workdir / "empty").mkdir()
    write_json(workdir / "a.jsonl", [{"n": 1, "text": "x"}])
    write_json(workdir / "mixed.jsonl", [{"text": "x"}, {"text": 7}])
    write_parquet(workdir / "numbers.parquet", {"text": [1, 2]})
    write_parquet(workdir / "none.parquet", {"text": ["", ""]})
    (workdir / "broken.parquet").write_bytes(b"PAR1 this is no parquet file PAR1")
    (workdir / "broken.jsonl").write_text('{"text": "x"}\n{"text": ')
    with pytest.raises(ConfigError) as error:
        load_corpus(name)
    assert message in str(error.value)
    assert not list(Path().glob("runs/cache/corpus-*")), "nothing half-made is kept"


def test_an_unreachable_hub_is_reported_immediately_with_advice(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    with pytest.raises(
        ConfigError, match=r"cannot be reached \(Name or service .* HF_HUB_OFFLINE=1\. .* 'stories:100000'"
    ):
        load_corpus("hub:owner/stories")


def test_a_hub_dataset_with_a_script_is_rejected(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **__: object) -> None:
        raise RuntimeError("Dataset scripts are no longer supported, but found stories.py")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr(corpora, "_reach_hub", lambda argument: None)
    with pytest.raises(ConfigError, match=r"corpus 'hub:a/b' cannot be read: Dataset scripts are no longer supported"):
        load_corpus("hub:a/b")


@pytest.mark.parametrize(
    ("name", "where", "revision", "streaming", "count"),
    [
        ("hub:owner/stories", "owner/stories", None, False, 40),
        ("hub:owner/stories@v1.0", "owner/stories", "v1.0", False, 40),
        ("hub:a/b@main[:5]", "a/b", "main", True, 5),
    ],
)
def test_a_hub_corpus_is_the_train_split_of_a_revision_and_a_slice_is_streamed(
    name: str,
    where: str,
    revision: str | None,
    streaming: bool,
    count: int,
    workdir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, object]] = []

    def load_dataset(where: str, **options: object) -> datasets.Dataset:
        asked.append({"where": where} | options)
        return datasets.Dataset.from_dict({"text": STORIES})

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr(corpora, "_reach_hub", lambda argument: None)
    corpus = load_corpus(name)
    assert asked == [{"where": where, "split": "train", "revision": revision, "streaming": streaming}]
    assert len(documents(corpus.train) + documents(corpus.valid)) == count


def test_stories_reject_an_existing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="already exists"):
        write_stories(3, tmp_path)


# ------------------------------------------------------------------------------------------------- files of tokens


def write_tokens(folder: Path, index: bytes = b"", dtype: str = "uint16", vocab: int = 1000) -> np.ndarray:
    """Write `train.bin`, `val.bin` and their indexes, and return the training tokens."""
    folder.mkdir(exist_ok=True)
    train = np.random.default_rng(0).integers(vocab, size=400).astype(dtype)
    for part, tokens in (("train", train), ("val", train[:60])):
        tokens.tofile(folder / f"{part}.bin")
        if index:
            (folder / f"{part}.idx").write_bytes(index)
    return train


MEGATRON = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 1, 2)  # version 1, int32, one sequence, two documents


@pytest.mark.parametrize(("index", "dtype"), [(b"", "uint16"), (MEGATRON, "int32")])
def test_token_files_are_mapped_as_the_index_specifies(tmp_path: Path, index: bytes, dtype: str) -> None:
    written = write_tokens(tmp_path / "tokens", index, dtype)
    corpus = load_corpus(f"bin:{tmp_path / 'tokens'}")
    assert corpus.train.numpy().dtype == dtype
    assert np.array_equal(corpus.train.numpy(), written)
    assert np.array_equal(corpus.valid.numpy(), written[:60])


@pytest.mark.parametrize(
    ("content", "index", "message"),
    [
        (b"abc", b"", "must be a positive multiple of 2 bytes (one uint16 token), got 3 bytes"),
        (b"", b"", "got 0 bytes"),
        (b"abcd", b"not an index", "is not a Megatron-LM index file"),
        (b"abcd", MEGATRON.replace(b"\x01" + bytes(7) + b"\x04", b"\x02" + bytes(7) + b"\x04"), "got version 2 and"),
        (b"abcd", MEGATRON.replace(b"\x04", b"\x06", 1), "got version 1 and type code 6"),
    ],
)
def test_damaged_token_files_are_rejected(tmp_path: Path, content: bytes, index: bytes, message: str) -> None:
    write_tokens(tmp_path, index)
    (tmp_path / "train.bin").write_bytes(content)
    assert message in error_of(lambda: load_corpus(f"bin:{tmp_path}"))


def test_a_folder_without_token_files_is_rejected(tmp_path: Path) -> None:
    assert "does not exist" in error_of(lambda: load_corpus(f"bin:{tmp_path}"))


def tokens_config(folder: Path, **values: Any) -> TaskConfig:
    model = {"layers": 1, "heads": 1, "width": 8, "context": 8, "vocab": 1000}
    common = {"corpus": f"bin:{folder}", "model": model, "device": "cpu", "batch_size": 6, "warmup_steps": 2}
    return TaskConfig.model_validate(common | {"steps": 6, "checkpoint": {"every": 2}} | values)


@pytest.mark.parametrize("kind", ["sharded", "dispatched", "fast_stream", "streamed"])
def test_every_source_trains_on_token_files_and_resumes_exactly(workdir: Path, kind: str) -> None:
    write_tokens(workdir / "tokens")
    config = tokens_config(workdir / "tokens", source={"kind": kind}, schedule_steps=6)
    weights = {result.weights for result in launch(train, 2, config, echo=False)}
    for steps in (3, 6):
        half = config.model_copy(update={"steps": steps, "name": "half", "resume": "auto", "resume_allow": ("steps",)})
        resumed = launch(train, 2, half, echo=False)
    assert {result.weights for result in resumed} == weights


def test_a_token_outside_the_vocabulary_is_rejected_before_ranks_start(workdir: Path) -> None:
    write_tokens(workdir / "tokens")
    config = tokens_config(workdir / "tokens", model={"vocab": 256, "context": 8})
    assert "'model.vocab' must be at least 99" in error_of(lambda: check_start(config, 2))
    assert not (workdir / "runs").exists()


# ------------------------------------------------------------------------------------------------------- tokenizers


def write_tokenizer(path: Path, special: Sequence[str] = ("<|endoftext|>",)) -> Tokenizer:
    """Train a byte-level BPE with 300 tokens on stories, and write it."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator((story(number) for number in range(20)), trainer)
    inner.save(str(path))
    return load_tokenizer(str(path))


def test_a_tokenizer_encodes_documents_and_separates_them(workdir: Path) -> None:
    tokenizer = write_tokenizer(workdir / "tokenizer.json")
    assert (tokenizer.vocab, tokenizer.separator) == (300, (0,))
    text, corpus = load_corpus("stories:60"), tokenize(load_corpus("stories:60"), "tokenizer.json")
    pieces = np.split(corpus.train.numpy(), np.flatnonzero(corpus.train.numpy() == 0))
    tokens = [torch.from_numpy(piece[piece != 0].astype(np.int64)) for piece in pieces]
    assert [tokenizer.decode(each).encode() for each in tokens] == documents(text.train)
    assert len(corpus.train) < len(text.train)
    assert tokenize(text, "bytes") is text


@pytest.mark.parametrize(("special", "separator"), [((), ()), (("[PAD]", "</s>", "[SEP]"), (1,))])
def test_the_separator_is_the_first_known_end_token(
    workdir: Path, special: tuple[str, ...], separator: tuple[int, ...]
) -> None:
    assert write_tokenizer(workdir / "tokenizer.json", special).separator == separator


@pytest.mark.parametrize(("vocab", "dtype"), [(2**16, torch.uint16), (2**16 + 1, torch.int32)])
def test_tokens_are_stored_in_the_smallest_type_for_the_vocabulary(vocab: int, dtype: torch.dtype) -> None:
    last = torch.tensor([vocab - 1])
    stored = _tokenized(torch.tensor([97], dtype=torch.uint8), Tokenizer(lambda text: last, str, (), vocab))
    assert (stored.dtype, stored.tolist()) == (dtype, [vocab - 1])


def test_the_vocabulary_includes_the_largest_token_of_a_tokenizer_with_gaps(workdir: Path) -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 70_000}, unk_token="a"))
    inner.save("tokenizer.json")
    Path("b.txt").write_text("b")
    assert load_tokenizer("tokenizer.json").vocab == 70_001
    assert tokenize(load_corpus("text:b.txt"), "tokenizer.json").train.tolist() == [70_000]


def test_cached_tokens_are_found_without_reading_the_corpus(workdir: Path) -> None:
    write_tokenizer(workdir / "tokenizer.json")
    rows = [json.dumps({"text": story(number)}) for number in range(30)]
    (workdir / "a.jsonl").write_text("\n".join(rows))
    corpus = load_corpus("json:a.jsonl")
    first = tokenize(corpus, "tokenizer.json")
    nothing = torch.zeros(0, dtype=torch.uint8)
    assert torch.equal(tokenize(replace(corpus, train=nothing, valid=nothing), "tokenizer.json").train, first.train)
    (workdir / "a.jsonl").write_text("\n".join(rows[:20]))
    assert len(tokenize(load_corpus("json:a.jsonl"), "tokenizer.json").train) < len(first.train)


def test_a_run_with_a_tokenizer_trains_on_its_tokens_and_generates_text(workdir: Path) -> None:
    tokenizer = write_tokenizer(workdir / "tokenizer.json")
    model = {"layers": 1, "heads": 1, "width": 8, "context": 8, "vocab": tokenizer.vocab}
    values = {"corpus": "stories:60", "tokenizer": "tokenizer.json", "model": model, "steps": 3, "warmup_steps": 1}
    config = TaskConfig.model_validate({"device": "cpu", "name": "bpe", **values})
    check_start(config, 2)
    [first, _] = launch(train, 2, config, echo=False)
    assert first.losses[0] == pytest.approx(np.log(tokenizer.vocab), rel=0.05)
    assert sample("runs/bpe", "Once upon", length=5).startswith("Once upon")
    small = config.model_copy(update={"model": {"vocab": 256, "context": 8}, "name": "small"})
    assert "'model.vocab' must be at least 300" in error_of(lambda: train(World(), small))


@pytest.mark.parametrize(("content", "message"), [(None, "is not a file"), ("{}", "cannot be loaded")])
def test_a_tokenizer_that_cannot_be_loaded_is_rejected_before_ranks_start(
    workdir: Path, content: str | None, message: str
) -> None:
    if content:
        (workdir / "tokenizer.json").write_text(content)
    config = TaskConfig(tokenizer="tokenizer.json")
    assert message in error_of(lambda: check_start(config, 2))
    assert not (workdir / "runs").exists()
