"""Exercises on a budget, incorrect claims, and context parallelism, for notebook 20_from_8_to_10000_gpus."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddp_tutorial.ddp.link_model import LinkModel
from ddp_tutorial.exercises import Answer, Exercise, WrongAnswerError
from ddp_tutorial.planning.communication import group_of, pass_seconds
from ddp_tutorial.planning.comparison import model_of, network_of, plan_of
from ddp_tutorial.planning.hardware import DEVICES, NETWORKS, Device, Network
from ddp_tutorial.planning.plan import Plan
from ddp_tutorial.planning.published import CONTEXT_PARALLEL_RUNS, PUBLISHED_RUNS
from ddp_tutorial.planning.step import Estimate, estimate_step
from ddp_tutorial.planning.transformer import MODELS, Transformer

# ---------------------------------------------------------------------------------------------------------- 1. a budget

_PLANS = (
    Plan("ddp", 64, accumulation=16),  # does not fit in memory
    Plan("zero3", 32, accumulation=32, recomputation="full"),
    Plan("zero3", 64, accumulation=16, recomputation="full"),
    Plan("zero3", 256, accumulation=4),
    Plan("zero3", 256, accumulation=4, recomputation="full"),
    Plan("zero3", 1024, accumulation=1, tensor=2),
    Plan("zero1", 1024, accumulation=16, tensor=8, pipeline=4),
)
_PRICE = 2.5
_TOKENS = 200e9


def _options() -> list[Estimate]:
    """Return estimates for Llama 3.1 8B plans whose rankings by cost, time, devices and MFU differ."""
    return [estimate_step(MODELS["Llama 3.1 8B"], plan, DEVICES["H100"], NETWORKS["DGX H100"]) for plan in _PLANS]


def _days_and_dollars(option: Estimate, tokens: float, price: float) -> tuple[float, float]:
    hours = tokens / option.tokens_per_second / 3600
    return hours / 24, hours * price * option.plan.devices


def _budgets(options: Sequence[Estimate]) -> Iterator[tuple[float, float]]:
    """Yield time limits (days) and cost limits (dollars) that exclude different options."""
    fitting = [_days_and_dollars(option, _TOKENS, _PRICE) for option in options if option.fits]
    by_cost, by_time = sorted(fitting, key=lambda each: each[1]), sorted(fitting)
    yield math.inf, math.inf
    yield by_cost[0][0] * 0.9, math.inf  # the cheapest option is too slow
    yield by_time[0][0] * 1.01, math.inf  # only the fastest option is fast enough
    yield by_time[0][0] * 1.01, by_cost[0][1] * 1.001  # no option meets both limits
    yield math.inf, by_cost[0][1] * 0.9  # no option is cheap enough
    yield by_cost[0][0] * 1.01, by_cost[0][1] * 1.01


def _test_cheapest(answer: Answer) -> str:
    options = _options()
    for days, dollars in _budgets(options):
        right = _cheapest(options, _TOKENS, days, dollars, _PRICE)
        got = answer(list(options), _TOKENS, days, dollars, _PRICE)
        if got is right:
            continue
        wanted = "None, because no option meets all limits" if right is None else _described(right)
        raise WrongAnswerError(
            f"With at most {days:.3g} days and ${dollars:,.0f} at ${_PRICE} per GPU hour, the result must be {wanted}, "
            f"got {_described(got) if isinstance(got, Estimate) else repr(got)}."
        )
    return "The cheapest plan does not always use the fewest GPUs or have the shortest step."


def _described(option: Estimate) -> str:
    days, dollars = _days_and_dollars(option, _TOKENS, _PRICE)
    fits = "" if option.fits else ", does not fit in memory"
    return f"{option.plan.label} on {option.plan.devices} GPUs ({days:.2f} days, ${dollars:,.0f}{fits})"


def _cheapest(options: Sequence[Estimate], tokens: float, days: float, dollars: float, price: float) -> Estimate | None:
    def cost(option: Estimate) -> tuple[float, float]:
        hours = tokens / option.tokens_per_second / 3600
        return hours * option.plan.devices * price, hours / 24

    allowed = [o for o in options if o.fits and cost(o)[0] <= dollars and cost(o)[1] <= days]
    return min(allowed, key=cost, default=None)


def _ignores_memory(options: Any, tokens: float, days: float, dollars: float, price: float) -> Any:
    return _cheapest([replace(o, fits=True) if not o.fits else o for o in options], tokens, days, dollars, price)


def _fewest_devices(options: Any, tokens: float, days: float, dollars: float, price: float) -> Any:
    return min((o for o in options if o.fits), key=lambda o: o.plan.devices, default=None)


def _shortest_step(options: Any, tokens: float, days: float, dollars: float, price: float) -> Any:
    return min((o for o in options if o.fits), key=lambda o: o.seconds, default=None)


def _ignores_the_deadline(options: Any, tokens: float, days: float, dollars: float, price: float) -> Any:
    return _cheapest(options, tokens, math.inf, dollars, price)


def _ignores_the_budget(options: Any, tokens: float, days: float, dollars: float, price: float) -> Any:
    return _cheapest(options, tokens, days, math.inf, price)


def _counts_one_device(options: Any, tokens: float, days: float, dollars: float, price: float) -> Any:
    return min(
        (
            o
            for o in options
            if o.fits
            and tokens / o.tokens_per_second / 86400 <= days
            and tokens / o.tokens_per_second / 3600 * price <= dollars
        ),
        key=lambda o: -o.tokens_per_second,
        default=None,
    )


cheapest = Exercise(
    task=(
        "cheapest(options, tokens, days, dollars, price): `options` contains results of estimate_step for different "
        "plans. Return the option that trains on `tokens` tokens at the lowest cost, within `days` days and `dollars` "
        "dollars, on devices with enough memory. A device costs `price` dollars per hour. Return None if no option "
        "meets all limits."
    ),
    test=_test_cheapest,
    solution=_cheapest,
    wrong={
        "ignores the memory": _ignores_memory,
        "chooses the fewest devices": _fewest_devices,
        "chooses the shortest step": _shortest_step,
        "ignores the deadline": _ignores_the_deadline,
        "ignores the budget": _ignores_the_budget,
        "includes the cost of one device only": _counts_one_device,
    },
    hints=(
        "An estimate contains tokens_per_second (over all devices), plan.devices, and fits.",
        "The time is tokens / tokens_per_second. The cost is hours times devices times price.",
        "First keep the options that meet all limits, then take the minimum by cost, with default=None.",
    ),
)

# ------------------------------------------------------------------------------------------------- 2. find the error

_EMBEDDING, _HEADS, _AGAIN = "counts the embedding", "ignores grouped queries", "counts recomputation"
_SPARSE, _FABRIC, _RIGHT = "uses the sparse peak", "faster than the fabric", "right"


@dataclass(frozen=True)
class Claim:
    """A published claim about a training run.

    Attributes:
        model: The model.
        device: The device.
        network: The network.
        devices: The number of devices.
        tokens_per_second: The number of tokens per second on each device.
        mfu: The claimed model FLOPs utilization, from 0 to 1.
        ring: The claimed number of bytes per second that each device sends in a ring over all devices, or None.
    """

    model: Transformer
    device: Device
    network: Network
    devices: int
    tokens_per_second: float
    mfu: float
    ring: float | None = None


def _claims() -> Iterator[tuple[Claim, str]]:
    """Yield each claim with the expected result. The first two claims contain published MFUs."""
    runs = {run.name: run for run in (*PUBLISHED_RUNS, *CONTEXT_PARALLEL_RUNS)}

    def claim(name: str, mfu: float | None = None, ring: float | None = None) -> Claim:
        run = runs[name]
        model, device, speed = model_of(run), DEVICES[run.device], run.tokens_per_second
        right = speed * model.flops_per_token / device.flops
        return Claim(model, device, network_of(run), run.devices, speed, mfu or right, ring)

    yield claim("Llama 3 8B, 64 A100", 0.582), _EMBEDDING
    yield claim("Nemotron-4 340B, 1,024 H100", 0.5398), _HEADS
    yield claim("GPT-3 175B, 128 H100"), _RIGHT
    for name in ("MPT-7B, 128 A100", "BLOOM 176B, 384 A100"):
        right = claim(name)
        forward = 2 * right.model.layers * right.model.layer_matrices + right.model.attention_flops
        yield replace(right, mfu=right.mfu * (1 + forward / right.model.flops_per_token)), _AGAIN
    yield replace(claim("Llama 3.1 70B, 2,048 H100"), mfu=claim("Llama 3.1 70B, 2,048 H100").mfu / 2), _SPARSE
    yield claim("MPT-70B, 64 A100"), _RIGHT
    yield claim("Llama 3.1 8B, 128 H100", ring=440e9), _FABRIC  # eight cards of 50 GB/s on each node
    yield claim("BLOOM 176B, 384 A100", ring=200e9), _FABRIC
    yield claim("Llama 3.1 8B, 128 H100", ring=370e9), _RIGHT
    yield claim("GPT-2 124M, 8 A100", ring=230e9), _RIGHT  # one node, connected by NVLink
    yield claim("Llama 3 405B, 8,192 H100", ring=40e9), _RIGHT


def _test_find_error(answer: Answer) -> str:
    for claim, right in _claims():
        got = answer(claim)
        if got != right:
            ring = "" if claim.ring is None else f", ring {claim.ring / 1e9:.0f} GB/s"
            raise WrongAnswerError(
                f"{claim.model.name}: {claim.tokens_per_second:,.0f} tokens/s per device, MFU {claim.mfu:.1%}{ring}. "
                f"The result must be {right!r}, got {got!r}."
            )
    return "The first two claims were published, in a documentation page and in a table."


def _find_error(claim: Claim) -> str:
    network, model = claim.network, claim.model
    link = network.inside.bandwidth
    if claim.devices > network.per_node:
        link = min(link, network.per_node * network.across.bandwidth)
    if claim.ring is not None and claim.ring > link:
        return "faster than the fabric"
    forward = 2 * model.layers * model.layer_matrices + model.attention_flops
    all_heads = replace(model, kv_heads=None)
    counted = {
        "right": model.flops_per_token,
        "counts the embedding": model.flops_per_token + 6 * model.vocabulary * model.width,
        "counts recomputation": model.flops_per_token + forward,
        "ignores grouped queries": all_heads.flops_per_token,
        "uses the sparse peak": model.flops_per_token / 2,
    }
    flops = claim.mfu * claim.device.flops / claim.tokens_per_second
    return min(counted, key=lambda name: abs(counted[name] / flops - 1))


def _believes_everything(claim: Claim) -> str:
    return "right"


def _never_looks_at_the_ring(claim: Claim) -> str:
    return _find_error(replace(claim, ring=None))


def _compares_with_nvlink(claim: Claim) -> str:
    return _find_error(replace(claim, network=replace(claim.network, per_node=claim.devices)))


def _compares_with_one_card(claim: Claim) -> str:
    return _find_error(replace(claim, network=replace(claim.network, per_node=1)))


def _six_n(claim: Claim) -> str:
    """Return the result of a variant that computes the MFU without attention FLOPs."""
    model = claim.model
    ratio = model.flops_per_token / (model.flops_per_token - 3 * model.attention_flops)
    return _find_error(replace(claim, mfu=claim.mfu * ratio))


def _all_too_high_is_recomputation(claim: Claim) -> str:
    found = _find_error(claim)
    return _AGAIN if found in (_EMBEDDING, _HEADS) else found


find_error = Exercise(
    task=(
        "find_error(claim): a claim contains model, device, network, devices, tokens_per_second (per device), mfu "
        "(from 0 to 1) and ring (bytes per second that each device sends in a ring over all devices, or None). Return "
        "'faster than the fabric' if the network is too slow for the ring. Otherwise, return how the MFU was computed: "
        "'right' (model.flops_per_token), 'counts the embedding', 'counts recomputation' (a second forward pass of all "
        "layers), 'ignores grouped queries' (as if every head had its own keys and values) or 'uses the sparse peak' "
        "(twice the peak)."
    ),
    test=_test_find_error,
    solution=_find_error,
    wrong={
        "believes every claim": _believes_everything,
        "never checks the ring": _never_looks_at_the_ring,
        "compares the ring with NVLink on any number of devices": _compares_with_nvlink,
        "compares the ring with one network card": _compares_with_one_card,
        "forgets the FLOPs of attention": _six_n,
        "blames recomputation for every high MFU": _all_too_high_is_recomputation,
    },
    hints=(
        "The MFU and the tokens per second determine the FLOPs per token that the claim counted.",
        "Compute the FLOPs per token for each way of counting, and return the closest. dataclasses.replace(model, "
        "kv_heads=None) gives every head its own keys and values.",
        "A ring over several nodes uses all network cards of a node. Its bandwidth is per_node times "
        "network.across.bandwidth, but at most network.inside.bandwidth.",
    ),
)

# ---------------------------------------------------------------------------------------------- 3. context parallelism

_FREE = replace(NETWORKS["DGX H100"], inside=LinkModel(0.0, 1e18), across=LinkModel(0.0, 1e18))
_SLOW = replace(NETWORKS["DGX H100"], across=LinkModel(1e-5, 5e9))
_LONG = replace(MODELS["Llama 3.1 8B"], name="Llama 3.1 8B, 64k tokens", sequence=65536)


def _test_context(answer: Answer) -> str:
    hopper, dgx = DEVICES["H100"], NETWORKS["DGX H100"]
    plan = Plan("zero3", 64, accumulation=4)
    right = estimate_step(_LONG, plan, hopper, dgx).seconds
    got = answer(_LONG, plan, 1, hopper, dgx)
    if not math.isclose(got, right, rel_tol=1e-6):
        raise WrongAnswerError(
            f"With context=1, the result must be {right:.3f} s, as in estimate_step, got {got:.3f} s."
        )
    one = estimate_step(_LONG, plan, hopper, _FREE).seconds
    for context in (2, 8):
        got = answer(_LONG, plan, context, hopper, _FREE)
        if not math.isclose(got, one / context, rel_tol=0.05):
            raise WrongAnswerError(
                f"On an infinitely fast network, {context} context-parallel ranks share {one:.2f} s of computation. "
                f"The result must be about {one / context:.2f} s, got {got:.2f} s. Each query attends to the keys of "
                "all ranks."
            )
    cases = [
        ("over a slow fabric", _LONG, Plan("zero3", 64, tensor=8), 8, _SLOW),
        ("with many key-value heads", replace(_LONG, kv_heads=32), Plan("zero3", 64, tensor=8), 8, _SLOW),
        ("in a pipeline", MODELS["Llama 3.1 70B"], Plan("zero1", 64, accumulation=8, tensor=8, pipeline=8), 2, _SLOW),
        ("with full recomputation", _LONG, Plan("zero3", 64, tensor=8, recomputation="full"), 8, _SLOW),
    ]
    for name, model, each, context, network in cases:
        right, got = (
            _context_parallel(model, each, context, hopper, network),
            answer(model, each, context, hopper, network),
        )
        if not math.isclose(got, right, rel_tol=0.1):
            raise WrongAnswerError(
                f"For {model.name} {name}, {each.label} and {context} context-parallel ranks, the result must be "
                f"within 10 % of {right:.2f} s, got {got:.2f} s. Each layer gathers keys and values from these ranks."
            )
    errors = []
    for run in CONTEXT_PARALLEL_RUNS:
        plan = replace(plan_of(run), devices=run.devices // run.context)
        seconds = answer(model_of(run), plan, run.context, DEVICES[run.device], network_of(run))
        errors.append(run.batch_tokens / seconds / run.devices / run.tokens_per_second - 1)
    listed = ", ".join(f"{run.name} {error:+.0%}" for run, error in zip(CONTEXT_PARALLEL_RUNS, errors, strict=True))
    return f"The throughput errors for published runs with context parallelism are: {listed}."


def _context_parallel(model: Transformer, plan: Plan, context: int, device: Device, network: Network) -> float:
    # Each rank processes a shorter sequence. For the gradients, these ranks are additional data-parallel ranks.
    short = replace(model, sequence=model.sequence // context)
    wide = replace(plan, devices=plan.devices * context)
    seconds = estimate_step(short, wide, device, network).seconds
    if context == 1:
        return seconds
    # A rank's queries attend to the keys of all ranks. A causal mask skips half of the scores.
    layers, tokens = model.layers / plan.pipeline, plan.micro_batch * short.sequence / plan.tensor
    flops = tokens * layers * 4 * (model.sequence - short.sequence) * model.width / 2
    passes = 1 + 2.5 + (plan.recomputation == "full")  # forward, backward, recomputation
    attention = passes * flops / (device.flops * device.attention_fraction)
    # Keys and values are gathered in each forward and backward pass, and their gradients are reduce-scattered.
    group = group_of(context, plan.tensor, network.per_node)
    nbytes = 2 * 2 * plan.micro_batch * model.sequence * model.kv_width / plan.tensor
    gathers = layers * (3 + (plan.recomputation == "full")) * pass_seconds(group, network, nbytes)
    times = plan.accumulation + (plan.pipeline - 1) / plan.interleaving
    return seconds + times * (attention + gathers)


def _more_data_ranks(model: Any, plan: Any, context: int, device: Any, network: Any) -> float:
    return estimate_step(model, replace(plan, devices=plan.devices * context), device, network).seconds


def _only_own_keys(model: Any, plan: Any, context: int, device: Any, network: Any) -> float:
    short = replace(model, sequence=model.sequence // context)
    return _more_data_ranks(short, plan, context, device, network)


def _divides_the_step(model: Any, plan: Any, context: int, device: Any, network: Any) -> float:
    return estimate_step(model, plan, device, network).seconds / context


def _gathers_nothing(model: Any, plan: Any, context: int, device: Any, network: Any) -> float:
    free = _context_parallel(model, plan, context, device, _FREE) - _only_own_keys(model, plan, context, device, _FREE)
    return _only_own_keys(model, plan, context, device, network) + free


def _gathers_queries(model: Any, plan: Any, context: int, device: Any, network: Any) -> float:
    seconds = _context_parallel(model, plan, context, device, network)
    group = group_of(context, plan.tensor, network.per_node)
    nbytes = 2 * plan.micro_batch * model.sequence * model.width / plan.tensor
    return seconds + 4 * plan.accumulation * model.layers / plan.pipeline * pass_seconds(group, network, nbytes)


context_parallel = Exercise(
    task=(
        "context_parallel(model, plan, context, device, network): return the step time in seconds if `context` "
        "devices split each sequence. `plan` describes data, tensor and pipeline parallelism, so the step uses "
        "plan.devices * context devices. Each layer gathers the keys and values of all context-parallel ranks in the "
        "forward and the backward pass, and reduce-scatters their gradients. This communication does not overlap."
    ),
    test=_test_context,
    solution=_context_parallel,
    wrong={
        "treats the ranks as data-parallel ranks only": _more_data_ranks,
        "attends only to its own keys": _only_own_keys,
        "divides the step time by the number of ranks": _divides_the_step,
        "gathers nothing": _gathers_nothing,
        "gathers the queries too": _gathers_queries,
    },
    hints=(
        "Start from estimate_step with a shorter sequence and plan.devices * context devices, because the "
        "gradients are averaged over all devices. Two terms are missing.",
        "Attention requires 4 s h FLOPs per token per layer. A fused kernel computes half of them, at device.flops * "
        "device.attention_fraction. The backward pass takes 2.5 times as long as the forward pass.",
        "pass_seconds(group_of(context, plan.tensor, network.per_node), network, nbytes) in "
        "ddp_tutorial.planning.communication returns the time of one all-gather or reduce-scatter.",
        "Add both terms once per micro-batch, and (pipeline - 1) / interleaving more times for the bubble.",
    ),
)
