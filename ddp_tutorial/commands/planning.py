"""Command that predicts the step time, memory and cost of a run on many devices, without starting the run."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from typing import Any

import click

from ddp_tutorial.config import ConfigError
from ddp_tutorial.ddp.link_model import LinkModel
from ddp_tutorial.planning import choice, comparison
from ddp_tutorial.planning.hardware import DEVICES, NETWORKS, Network
from ddp_tutorial.planning.step import Estimate
from ddp_tutorial.planning.transformer import MODELS, Transformer


def _by_option(presets: Iterable[str]) -> dict[str, str]:
    """Return a dict that maps command-line names to preset names, such as "dgx-h100" to "DGX H100"."""
    return {name.lower().replace(",", "").replace("/", "-").replace(" ", "-"): name for name in presets}


_MODELS, _DEVICES, _NETWORKS = _by_option(MODELS), _by_option(DEVICES), _by_option(NETWORKS)


@click.command(epilog=f"Models: {', '.join(_MODELS)}.")
@click.argument("model", required=False)
@click.argument("shape", nargs=-1)
@click.option("--devices", type=click.IntRange(min=1), default=8, show_default=True, help="Number of devices.")
@click.option("--device", type=click.Choice(list(_DEVICES)), default="h100", show_default=True, help="Kind of device.")
@click.option("--network", type=click.Choice(list(_NETWORKS)), default="dgx-h100", show_default=True, help="Network.")
@click.option("--node-gbit", type=click.FloatRange(min=0, min_open=True), help="Network bandwidth per node in Gbit/s.")
@click.option(
    "--batch",
    type=click.FloatRange(min=1),
    default=2.0**22,
    show_default="4194304",
    help="Global batch size in tokens; a plan may differ from it by 10 %.",
)
@click.option("--tokens", type=click.FloatRange(min=1), help="Number of training tokens, to compute time and cost.")
@click.option("--price", type=click.FloatRange(min=0), default=0.0, help="Price per device hour, to compute the cost.")
@click.option("--top", type=click.IntRange(min=1), default=12, show_default=True, help="Number of plans to print.")
@click.option("--published", is_flag=True, help="Compare the predictions with published runs instead.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    model: str | None,
    shape: tuple[str, ...],
    devices: int,
    device: str,
    network: str,
    node_gbit: float | None,
    batch: float,
    tokens: float | None,
    price: float,
    top: int,
    published: bool,
    as_json: bool,
) -> None:
    """Predict each strategy's step time, memory and cost for MODEL on many devices. The run is not started.

    MODEL is one of the models below. SHAPE changes the model, for example layers=48 sequence=8192.

    \b
    plan llama-3.1-8b --devices 64 --device h100 --network dgx-h100
    plan llama-2-7b sequence=2048 --devices 16 --device a100-40 --network aws-p4d --tokens 1e11 --price 2
    plan --published
    """
    if published:
        rows = comparison.comparison()
        click.echo(json.dumps(_published(rows), indent=2) if as_json else comparison.as_text(rows))
        return
    for option, value in (("--node-gbit", node_gbit), ("--batch", batch), ("--tokens", tokens), ("--price", price)):
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"'{option}' must be a finite number, got {value}")
    if model is None:
        raise ConfigError(f"a model is required: specify one of {', '.join(_MODELS)}, or use --published")
    shaped, on = _model(model, shape), _network(_NETWORKS[network], node_gbit)
    try:
        found = choice.choose(shaped, DEVICES[_DEVICES[device]], on, devices, batch)[:top]
    except ValueError as error:
        raise ConfigError(str(error)) from None
    costs = [choice.run_cost(estimate, tokens, price) for estimate in found] if tokens else []
    if as_json:
        plans = [_plan(estimate) for estimate in found]
        for each, cost in zip(plans, costs, strict=False):
            each["run"] = asdict(cost)
        click.echo(json.dumps({"model": asdict(shaped), "parameters": shaped.parameters, "plans": plans}, indent=2))
        return
    click.echo(f"{shaped.name}, {shaped.parameters:,} parameters, {devices:,} x {_DEVICES[device]}, {on.name}")
    click.echo(choice.as_text(found))
    if costs:
        days, hours = costs[0].seconds / 86400, costs[0].device_hours
        click.echo(f"the first plan trains on {tokens:,.0f} tokens in {days:,.1f} days: {hours:,.0f} device hours")
        if price:
            click.echo(f"at {price:g} per device hour, this costs {costs[0].price:,.0f}")


def _model(name: str, shape: Iterable[str]) -> Transformer:
    """Return the model named `name` on the command line, with the changes in `shape`, such as "layers=48".

    Raises:
        ConfigError: If the name or a change is invalid.
    """
    if name not in _MODELS:
        raise ConfigError(f"the model must be one of {', '.join(_MODELS)}, got {name!r}")
    preset = MODELS[_MODELS[name]]
    names = [field.name for field in fields(Transformer) if field.name != "name"]
    changes: dict[str, Any] = {}
    for change in shape:
        field, _, text = change.partition("=")
        if field not in names:
            raise ConfigError(
                f"a shape setting must be NAME=VALUE, where NAME is one of {', '.join(names)}, got {change!r}"
            )
        changes[field] = _value(field, text, isinstance(getattr(preset, field), bool))
    model = replace(preset, **changes)
    if model.width % model.heads or model.heads % (model.kv_heads or model.heads):
        raise ConfigError(
            f"'width' must be a multiple of 'heads', and 'heads' must be a multiple of 'kv_heads', got "
            f"width={model.width}, heads={model.heads}, kv_heads={model.kv_heads}"
        )
    return model


def _value(field: str, text: str, is_switch: bool) -> int | bool:
    """Parse the value of one shape setting."""
    if is_switch and text in {"true", "false"}:
        return text == "true"
    if not is_switch and text.isdecimal() and int(text) > 0:
        return int(text)
    expected = "true or false" if is_switch else "a whole number of at least 1"
    raise ConfigError(f"'{field}' must be {expected}, got {text!r}")


def _network(name: str, node_gbit: float | None) -> Network:
    """Return the network `name`. If set, `node_gbit` (in Gbit/s per node) replaces the bandwidth between nodes."""
    network = NETWORKS[name]
    if node_gbit is None:
        return network
    across = LinkModel(network.across.latency, node_gbit * 1e9 / 8 / network.per_node)
    return replace(network, name=f"{name} with {node_gbit:g} Gbit/s per node", across=across)


def _plan(estimate: Estimate) -> dict[str, Any]:
    """Return an estimate and its computed properties as a dict."""
    return asdict(estimate) | {
        "label": estimate.plan.label,
        "seconds": estimate.seconds,
        "tokens_per_second_per_device": estimate.tokens_per_second_per_device,
        "memory": asdict(estimate.memory) | {"total": estimate.memory.total},
    }


def _published(rows: Iterable[comparison.Comparison]) -> dict[str, Any]:
    """Return the comparisons and their median errors as a dict."""
    rows = list(rows)
    return {
        "runs": [
            {
                "run": row.run.name,
                "software": row.run.software,
                "source": row.run.source,
                "published_mfu": row.published,
                "predicted_mfu": row.estimate.mfu,
                "error": row.error,
                "error_left_out": row.left_out,
            }
            for row in rows
        ],
        "median_error": comparison.median_error([row.error for row in rows]),
        "median_error_left_out": comparison.median_error([row.left_out for row in rows]),
    }
