"""Configs: the files that are read, their order, and the errors for invalid files."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from ddp_tutorial.config import (
    CONFIGS,
    Config,
    ConfigError,
    config_names,
    did_you_mean,
    find_config,
    group_of,
    load,
    merge,
    named_ranks,
)
from ddp_tutorial.ddp.config import DDPConfig
from ddp_tutorial.training.config import TaskConfig

pytestmark = pytest.mark.usefixtures("workdir")


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def message_of(source: str | Path, *overrides: str) -> str:
    """Return the error of loading a config, after checking that it is one line."""
    with pytest.raises(ConfigError) as caught:
        load(source, TaskConfig, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert message.strip() == message
    return message


# ---------------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize("name", config_names())
def test_every_config_of_the_package_loads(name: str) -> None:
    assert isinstance(load(name, TaskConfig), TaskConfig)


def test_every_config_named_by_a_command_exists() -> None:
    assert {"base", "tiny", "2proc", "single_process"} <= set(config_names())


def test_base_lists_the_default_of_every_field_except_the_name() -> None:
    assert load("base", TaskConfig) == TaskConfig()
    spelled_out = yaml.safe_load((CONFIGS / "base.yaml").read_text())
    assert set(spelled_out) == set(TaskConfig.model_fields) - {"name"}
    assert set(spelled_out["model"]) == set(TaskConfig().model.model_dump())


def test_two_ranks_and_one_process_differ_only_in_nprocs() -> None:
    two, one = load("2proc", TaskConfig), load("single_process", TaskConfig)
    assert (two.nprocs, one.nprocs) == (2, 1)
    assert two.model_dump() | {"nprocs": 1} == one.model_dump()


def test_a_config_can_extend_a_neighboring_file_from_any_directory() -> None:
    write("far/below.yaml", "steps: 7\nseed: 1\n")
    above = write("far/above.yaml", "extends: below.yaml\nseed: 2\n")
    config = load(above, TaskConfig)
    assert (config.steps, config.seed) == (7, 2)


def test_a_config_can_extend_a_package_config_by_name() -> None:
    config = load(write("mine.yaml", "extends: tiny\nseed: 5\n"), TaskConfig)
    assert (config.corpus, config.seed, config.model.width) == ("stories", 5, 32)


def test_in_a_chain_of_three_the_nearest_value_wins_and_mappings_merge() -> None:
    write("one.yaml", "steps: 1\nseed: 1\nwarmup_steps: 1\nmodel: {layers: 1, width: 64, heads: 1}\n")
    write("two.yaml", "extends: one.yaml\nseed: 2\nwarmup_steps: 2\nmodel: {layers: 2}\n")
    config = load(write("three.yaml", "extends: two.yaml\nwarmup_steps: 3\nmodel: {heads: 2}\n"), TaskConfig)
    assert (config.steps, config.seed, config.warmup_steps) == (1, 2, 3)
    assert (config.model.layers, config.model.width, config.model.heads) == (2, 64, 2)


def test_a_neighboring_file_takes_precedence_over_a_package_config() -> None:
    write("tiny.yaml", "steps: 3\n")
    assert load("tiny.yaml", TaskConfig).steps == 3
    assert load("tiny", TaskConfig).steps == 20  # the config of the package: there is no file of that name here
    assert find_config("tiny") == CONFIGS / "tiny.yaml"


def test_an_empty_file_gives_all_defaults() -> None:
    assert load(write("empty.yaml", ""), TaskConfig) == TaskConfig()
    assert load(write("comment.yaml", "# nothing yet\n"), TaskConfig) == TaskConfig()


def test_overrides_change_nested_settings_and_keep_their_neighbors() -> None:
    config = load("tiny", TaskConfig, ["model.layers=3", "steps=4", "name=mine", "device=cpu"])
    assert (config.model.layers, config.model.width) == (3, 32)
    assert (config.steps, config.name, config.device) == (4, "mine", "cpu")


def test_the_last_override_wins() -> None:
    assert load("tiny", TaskConfig, ["steps=4", "steps=6"]).steps == 6
    assert load("tiny", TaskConfig, ["model={layers: 2}", "model.layers=3"]).model.layers == 3


def test_an_equals_sign_in_a_value_is_part_of_it() -> None:
    assert load("tiny", TaskConfig, ["corpus=text:a=b"]).corpus == "text:a=b"


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 0.001), ("1E2", 100.0), ("2.5e-4", 0.00025), ("1", 1.0), ("0.5", 0.5), ("+1e+1", 10)]
)
def test_numbers_are_parsed_in_every_notation(text: str, value: float) -> None:
    assert load("tiny", TaskConfig, [f"learning_rate={text}"]).learning_rate == value
    assert load(write("rate.yaml", f"learning_rate: {text}\n"), TaskConfig).learning_rate == value


def test_a_quoted_number_stays_a_string() -> None:
    assert load("tiny", TaskConfig, ["name='1e-3'"]).name == "1e-3"


def test_a_config_is_frozen_at_every_depth() -> None:
    config = load("tiny", TaskConfig)
    with pytest.raises(ValidationError, match="frozen"):
        config.steps = 5  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        config.model.layers = 5  # type: ignore[misc]


def test_a_copy_with_new_values_is_validated() -> None:
    config = TaskConfig(steps=7)
    copy = config.model_copy(update={"nprocs": 1, "ddp": DDPConfig(variant="flat")})
    assert (copy.steps, copy.nprocs, copy.ddp.variant, config.nprocs) == (7, 1, "flat", 2)
    assert copy.model_fields_set == {"steps", "nprocs", "ddp"}
    assert config.model_copy() == config
    for wrong, told in (
        ({"nproc": 1}, "model_copy: unknown key 'nproc'. Did you mean 'nprocs'?"),
        ({"steps": -5}, "model_copy: 'steps' must be greater than or equal to 1, got -5"),
        ({"steps": "20"}, "model_copy: 'steps' must be a valid integer, got '20'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(told)):
            config.model_copy(update=wrong)


def test_merge_changes_none_of_its_arguments() -> None:
    below, above = {"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 3}, "d": [2]}
    assert merge(below, above) == {"a": {"b": 3, "c": 2}, "d": [2]}
    assert below == {"a": {"b": 1, "c": 2}, "d": [1]}
    assert above == {"a": {"b": 3}, "d": [2]}


# --------------------------------------------------------------------------------------- what is said of bad ones


def test_a_missing_file_is_named() -> None:
    assert "'gone.yaml' does not exist" in message_of("gone.yaml")
    assert "'some/where' does not exist" in message_of("some/where")


def test_an_unknown_name_is_answered_with_similar_or_all_names() -> None:
    assert message_of("tinny") == "there is no config named 'tinny'. Did you mean 'tiny'?"
    everything = message_of("qqq")
    assert all(name in everything for name in config_names())


def test_a_folder_is_not_a_config() -> None:
    write("folder/a.yaml", "")
    write("folder.yaml/a.yaml", "")
    assert "'folder'" in message_of("folder")
    assert "folder.yaml" in message_of("folder.yaml")


def test_an_unknown_key_is_answered_with_the_most_similar_key() -> None:
    path = write("typo.yaml", "stepz: 10\n")
    assert message_of(path) == "typo.yaml: unknown key 'stepz'. Did you mean 'steps'?"


def test_an_unknown_nested_key_is_answered_with_the_most_similar_one() -> None:
    path = write("typo.yaml", "model: {layer: 10}\n")
    assert message_of(path) == "typo.yaml: unknown key 'model.layer'. Did you mean 'layers'?"
    assert "Did you mean 'model'?" in message_of("tiny", "modle.layers=3")


def test_an_unknown_key_without_a_similar_one_is_answered_with_all_keys() -> None:
    message = message_of(write("odd.yaml", "zzzzzz: 10\n"))
    assert message.startswith("odd.yaml: unknown key 'zzzzzz'. Known: ")
    assert "batch_size" in message


@pytest.mark.parametrize(
    ("line", "key", "found"),
    [
        ("steps: many", "steps", "'many' (text)"),
        ("steps: '10'", "steps", "'10' (text)"),
        ("steps: 10.0", "steps", "10.0 (a number)"),
        ("steps: true", "steps", "True (true or false)"),
        ("steps:", "steps", "nothing"),
        ("steps: null", "steps", "nothing"),
        ("steps: [10]", "steps", "[10] (a list)"),
        ("steps: {count: 10}", "steps", "a mapping"),
        ("learning_rate: fast", "learning_rate", "'fast' (text)"),
        ("learning_rate: true", "learning_rate", "True (true or false)"),
        ("corpus: 5", "corpus", "5 (a whole number)"),
        ("corpus: 2024-02-03", "corpus", "2024"),
        ("device: gpu", "device", "'gpu' (text)"),
        ("model: 3", "model", "3 (a whole number)"),
        ("model:", "model", "nothing"),
        ("model: {layers: two}", "model.layers", "'two' (text)"),
        ("model: {dropout: null}", "model.dropout", "nothing"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_and_shown(line: str, key: str, found: str) -> None:
    message = message_of(write("wrong.yaml", line + "\n"))
    assert message.startswith(f"wrong.yaml: '{key}' ")
    assert found in message


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("steps: 0", "steps"),
        ("nprocs: 0", "nprocs"),
        ("seed: -1", "seed"),
        ("seed: 2147483648", "seed"),  # 2**31
        ("learning_rate: 0", "learning_rate"),
        ("learning_rate: .nan", "learning_rate"),
        ("final_lr_fraction: 1.5", "final_lr_fraction"),
        ("clip: -1", "clip"),
        ("log_every: 0", "log_every"),
        ("name: a b", "name"),
        ("name: /a", "name"),
        ("name: a/../b", "name"),
        ("name: ..", "name"),
        ("name: '../up'", "name"),
        ("model: {dropout: 1.0}", "model.dropout"),
        ("model: {layers: 0}", "model.layers"),
        ("model: {width: 30, heads: 4}", "model.width"),
    ],
)
def test_a_value_out_of_range_is_named(line: str, key: str) -> None:
    assert f"'{key}'" in message_of(write("range.yaml", line + "\n"))


@pytest.mark.parametrize("key", ["learning_rate", "weight_decay", "clip"])
def test_infinity_is_out_of_range(key: str) -> None:
    assert f"'{key}'" in message_of("tiny", f"{key}=.inf")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("steps: 1\nseed: [1, 2\n", "line 3, column 1"),
        ("steps: 1\nseed: 2: 3\n", "line 2, column 8"),
        ("steps: 1\n\tseed: 2\n", "line 2, column 1"),
        ("name: 'open\n", "line 2, column 1"),
    ],
)
def test_malformed_yaml_is_reported_with_line_and_column(text: str, place: str) -> None:
    message = message_of(write("broken.yaml", text))
    assert message.startswith(f"broken.yaml, {place}: not valid YAML: ")


@pytest.mark.parametrize("text", ["- steps: 1\n", "just words\n", "42\n", "true\n"])
def test_a_file_that_is_not_a_mapping_is_rejected_with_an_example(text: str) -> None:
    assert message_of(write("list.yaml", text)).startswith(
        "list.yaml: the file must contain a mapping such as 'steps: 100', got "
    )


@pytest.mark.parametrize("line", ["1: 2", "on: 1", "null: 1", "model: {1: 2}"])
def test_a_key_that_is_not_a_string_is_reported_as_unknown(line: str) -> None:
    assert message_of(write("keys.yaml", line + "\n")).startswith("keys.yaml: ")


@pytest.mark.parametrize("value", ["2024-02-30", "!!int many", "!!int ''", "!!bool many", "!!timestamp many", "0b_"])
def test_an_invalid_yaml_scalar_is_malformed(value: str) -> None:
    assert message_of(write("scalar.yaml", f"name: {value}\n")).startswith("scalar.yaml")
    assert "override" in message_of("tiny", f"name={value}")


def test_yaml_that_is_nested_too_deeply_is_malformed() -> None:
    assert message_of(write("deep.yaml", "[" * 9999)).startswith("deep.yaml: not valid YAML: ")


def test_a_circular_extends_is_reported() -> None:
    write("a.yaml", "extends: b.yaml\n")
    write("b.yaml", "extends: c.yaml\n")
    write("c.yaml", "extends: a.yaml\n")
    assert "a.yaml -> b.yaml -> c.yaml -> a.yaml" in message_of("a.yaml")


def test_a_config_that_extends_itself_is_circular() -> None:
    write("self.yaml", "extends: self.yaml\n")
    assert "self.yaml -> self.yaml" in message_of("self.yaml")
    write("other/../same.yaml", "extends: other/../same.yaml\n")
    assert "same.yaml -> same.yaml" in message_of("same.yaml")


def test_using_the_same_base_twice_is_not_circular() -> None:
    write("a.yaml", "extends: base\n")
    assert load(write("b.yaml", "extends: a.yaml\n"), TaskConfig) == TaskConfig()


@pytest.mark.parametrize("value", ["[base]", "5", "{a: b}", "true"])
def test_extends_accepts_a_single_name(value: str) -> None:
    message = message_of(write("bases.yaml", f"extends: {value}\n"))
    assert message.startswith("bases.yaml: 'extends' must be one file or config name, got ")


def test_a_missing_extended_config_is_named() -> None:
    assert "'gone.yaml' does not exist" in message_of(write("a.yaml", "extends: gone.yaml\n"))
    assert "Did you mean 'tiny'?" in message_of(write("b.yaml", "extends: tinny\n"))


@pytest.mark.parametrize("override", ["steps", "", "=1", "a..b=1", ".a=1", "a.=1", " =1", "."])
def test_an_override_without_a_value_is_rejected_with_the_form(override: str) -> None:
    assert message_of("tiny", override).startswith("an override must have the form key=value")


def test_an_override_through_a_scalar_names_the_scalar() -> None:
    assert "'steps' must be a valid integer, got a mapping" in message_of("tiny", "steps.x=1")
    assert "'model.layers' must be a valid integer, got a mapping" in message_of("tiny", "model.layers.x=1")


def test_a_malformed_value_of_an_override_names_the_override() -> None:
    assert message_of("tiny", "steps=[1").startswith("override 'steps=[1', line 1, column 3: not valid YAML: ")
    assert "'steps' must be a valid integer, got nothing" in message_of("tiny", "steps=")


@pytest.mark.parametrize(
    "text",
    [
        '!!python/object/apply:os.system ["touch pwned"]\n',
        'name: !!python/object/apply:os.system ["touch pwned"]\n',
        'name: !!python/object/new:subprocess.check_call [["touch", "pwned"]]\n',
        "name: !!python/name:os.system\n",
        "name: !!python/module:antigravity\n",
    ],
)
def test_yaml_that_constructs_objects_is_rejected_and_not_executed(text: str) -> None:
    assert "python/" in message_of(write("evil.yaml", text))
    assert "python/" in message_of("tiny", text.replace("name: ", "name=", 1) if "name" in text[:4] else f"name={text}")
    assert not Path("pwned").exists()


@pytest.mark.parametrize("text", ["model: &own {layers: *own}\n", "ddp: &own\n  variant: [*own]\n"])
def test_a_yaml_value_that_contains_itself_is_malformed(text: str) -> None:
    assert re.search(
        r"^own.yaml, line 1, column \d: not valid YAML: the value of an", message_of(write("own.yaml", text))
    )


def test_an_alias_copies_the_value_of_its_anchor() -> None:
    config = load(write("copy.yaml", "steps: &n 3\nseed: *n\n"), TaskConfig)
    assert (config.steps, config.seed) == (3, 3)


def test_a_file_that_is_not_utf8_is_named() -> None:
    Path("latin.yaml").write_bytes("name: caf\xe9\n".encode("latin-1"))
    assert message_of("latin.yaml").startswith("config file 'latin.yaml' cannot be read: ")
    Path("nul.yaml").write_bytes(b"name: a\0b\n")
    assert message_of("nul.yaml").startswith("nul.yaml: not valid YAML: ")


def test_a_missing_required_key_is_reported() -> None:
    class Strict(Config):
        size: int

    path = write("strict.yaml", "")
    with pytest.raises(ConfigError, match=r"^strict.yaml: 'size' is missing; add a line 'size: ...'$"):
        load(path, Strict)


def test_did_you_mean_falls_back_to_all_known_names() -> None:
    assert did_you_mean("tinny", ["base", "tiny"]) == " Did you mean 'tiny'?"
    assert did_you_mean("xyz", ["base", "tiny"]) == " Known: base, tiny."


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([0], "rank 0"),
        ((12,), "rank 12"),
        ([0, 1], "ranks 0 and 1"),
        (range(1, 4), "ranks 1, 2 and 3"),
        ([0, 1, 3, 10], "ranks 0, 1, 3 and 10"),
    ],
)
def test_ranks_are_listed_as_text(ranks: Sequence[int], text: str) -> None:
    assert named_ranks(ranks) == text


# ------------------------------------------------------------------------- where it was set, and what to type instead


@pytest.mark.parametrize(
    ("overrides", "origin"),
    [
        (["steps=abc"], "command line: 'steps' "),
        (["model.layers=two"], "command line: 'model.layers' "),
        (["steps.x=1"], "command line: 'steps' "),
        (["stepz=1"], "command line: unknown key 'stepz'"),
        (["model.width=31"], "command line: 'model.width' must be a multiple of "),
        (["ddp.variant=flat", "ddp.hook=fp16"], "command line: 'hook' requires variant="),
        (["resume=auto"], "command line: 'resume' must not be auto "),
        (["seed=3"], "above.yaml: 'clip' "),
        (["clip=1.0", "seed=3"], "below.yaml: 'warmup_steps' "),
    ],
)
def test_an_invalid_value_is_attributed_to_the_layer_that_set_it_last(overrides: list[str], origin: str) -> None:
    write("below.yaml", "warmup_steps: some\nclip: 2.0\n")
    write("above.yaml", "extends: below.yaml\nclip: -1\n")
    source = "above.yaml" if "seed=3" in overrides else "tiny"
    if "clip=1.0" not in overrides:
        write("below.yaml", "warmup_steps: 1\nclip: 2.0\n")
    assert message_of(source, *overrides).startswith(origin)


def test_examples_use_the_syntax_of_their_source() -> None:
    assert message_of("tiny", "steps=abc").endswith(", for example steps=200")
    assert message_of("tiny", "model.layers=two").endswith(", for example model.layers=4")
    assert message_of("tiny", "resume_allow=5").endswith(", for example resume_allow=[learning_rate]")
    assert message_of("tiny", "profile=3").endswith(", for example profile.steps=0")
    assert message_of(write("a.yaml", "profile: 3\n")).endswith(", for example profile: {steps: 0}")
    assert message_of(write("b.yaml", "model: {layers: two}\n")).endswith(", for example layers: 4")
    assert message_of(write("c.yaml", "tensorboard: 3\n")).endswith(", for example tensorboard: true")


def settings_of(cls: type[Config], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Return every setting as a path, and whether it contains other settings."""
    for name, field in cls.model_fields.items():
        group = group_of(field)
        yield (*prefix, name), group is not None
        if group is not None:
            yield from settings_of(group, (*prefix, name))


def nested(path: tuple[str, ...], value: Any) -> Any:
    return nested(path[:-1], {path[-1]: value}) if path else value


@pytest.mark.parametrize(
    ("path", "is_group"), [each for each in settings_of(TaskConfig) if each[0] != ("model", "args")], ids=str
)
def test_every_setting_has_a_valid_example_in_its_error(path: tuple[str, ...], is_group: bool) -> None:
    wrong: Any = 3 if is_group else {"x": {"y": 1}}
    example = message_of(write("wrong.yaml", yaml.safe_dump(nested(path, wrong)))).partition(", for example ")[2]
    [(name, value)] = yaml.safe_load(example).items()
    assert name == path[-1]
    try:
        load(write("right.yaml", yaml.safe_dump(nested(path, value))), TaskConfig)
    except ConfigError as error:
        assert re.search(r"' requires \w+=.*, got \w+=", str(error)), "of another option's value, that is"  # noqa: PT017
    typed = message_of("base", f"{'.'.join(path)}={'3' if is_group else '{x: {y: 1}}'}").partition(", for example ")[2]
    assert typed.startswith(f"{'.'.join(path)}{'.' if isinstance(value, dict) else '='}")


# ------------------------------------------------------------------------------------------------ alternatives


def test_a_setting_discards_its_alternative_in_earlier_layers() -> None:
    config = load("2proc", TaskConfig, ["num_epochs=2", "per_device_train_batch_size=8"])
    assert (config.num_epochs, config.per_device_train_batch_size) == (2, 8)
    assert not {"steps", "batch_size"} & config.model_fields_set
    assert load("2proc", TaskConfig, ["num_epochs=2", "steps=5"]).num_epochs is None
    assert load("2proc", TaskConfig, ["num_epochs=null"]).steps == 200
