"""Which strategy on 64 GPUs? Step time, memory and traffic of each, computed for one model, device and network.

    work = Work(parameters=1e9, per_sample=0.02, activations=2e9, handed_on=8e6, units=24)
    network = Network(ranks=64, per_machine=8, inside=NETWORKS["NVLink class"], between=NETWORKS["10 Gbit/s Ethernet"])
    rows = compare(work, network, batch=512, memory=80e9)
    print(as_text(rows))

All of it is arithmetic; what goes in may have been measured. Where it comes from:

- A message of n bytes takes latency + n / bandwidth (Hockney, 1994). A ring over W ranks passes n bytes on in W - 1
  messages of n / W: that is a reduce-scatter or an all-gather; an all-reduce is both (Patarasuk & Yuan, 2009).
- Backward computes twice what forward does. Of a model in `units` parts the gradient of one travels while that of the
  next is computed (Li et al., "PyTorch Distributed", 2020), and with ZeRO-3 the next part's weights while this one
  computes (Zhao et al., "PyTorch FSDP", 2023). Computing and sending do not slow one another down.
- What each stage of ZeRO divides by the number of ranks: Rajbhandari et al., 2020. A hybrid divides by the ranks of one
  copy, and adds up over copies (HSDP: Zhao et al., 2023, section 3.2.2).
- A pipeline takes as long as its schedule, with the time of each message (`pipeline.schedules`); with equal stages and
  free messages it is idle for (S - 1) / (M + S - 1) of a step (Huang et al., "GPipe", 2019).
- Local SGD averages weights once in H steps (Stich, 2019); DiLoCo the difference since then, with an outer optimizer's
  momentum and the weights of the last round beside (Douillard et al., 2023).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ddp_tutorial.ddp.link import LinkModel
from ddp_tutorial.experiments.scaling import BACKWARD, StepModel
from ddp_tutorial.mesh import Mesh
from ddp_tutorial.pipeline.schedules import Name, make_table, peaks, simulate
from ddp_tutorial.zero.memory import bytes_sent, model_state_bytes

FLOAT = 4  # bytes
Kind = Literal["ddp", "zero1", "zero2", "zero3", "pipeline", "local", "diloco"]


@dataclass(frozen=True)
class Work:
    """What is trained, and how fast one rank computes it.

    `fixed` seconds in a step, and `per_sample` for each sample, forward and backward. `activations` bytes that a sample
    leaves for its backward, `handed_on` bytes that go from one part of the model to the next. `units` are its parts
    (blocks), taken for equal. `optimizer` bytes for each parameter: 8 with AdamW, 4 with momentum. Of the sending that
    can go on while something is computed, the part `overlap` does, 0 to 1.
    """

    parameters: float
    per_sample: float
    fixed: float = 0.0
    activations: float = 0.0
    handed_on: float = 0.0
    units: int = 1
    optimizer: int = 8
    overlap: float = 1.0

    def __post_init__(self) -> None:
        if self.parameters <= 0 or self.per_sample < 0 or self.units < 1:
            raise ValueError(f"parameters should be above 0, per_sample 0 or more, units 1 or more; found {self}")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap is from 0 to 1; found {self}")

    @staticmethod
    def of(step: StepModel, **others: Any) -> "Work":
        """The work of a fitted model of a step: its parameters, its computing and its overlap; `others` as in the
        class."""
        return Work(step.nbytes / FLOAT, step.per_sample, step.fixed, **{"overlap": step.overlap} | others)

    @property
    def nbytes(self) -> float:
        """The bytes of its parameters in float32, and as many of their gradients."""
        return FLOAT * self.parameters


@dataclass(frozen=True)
class Network:
    """`ranks`, so many on each machine; `inside` links those of a machine, `between` is what a machine has to the
    others: flows that leave it at a time share it. Without `inside`, that is used there, too.

    `scatter` is the number of passes of a reduce-scatter: 1; but 2 with gloo, which all-reduces and keeps a part (torch
    2.13).
    """

    ranks: int
    between: LinkModel
    per_machine: int = 1
    inside: LinkModel | None = None
    scatter: int = 1

    def row(self, span: int) -> LinkModel:
        """The slowest link of a ring of `span` ranks in a row."""
        return (self.inside or self.between) if span <= self.per_machine else self.between

    def column(self, mesh: Mesh) -> LinkModel:
        """The slowest link of a ring over the rows of a mesh; as many rings as a row has ranks leave a machine."""
        if mesh.replicate * mesh.span <= self.per_machine:
            return self.inside or self.between
        flows = min(mesh.span, self.per_machine)
        return replace(self.between, bandwidth=self.between.bandwidth / flows)


@dataclass(frozen=True)
class Choice:
    """A strategy with its numbers: `copies` of the model (as zero3, several make it a hybrid; of a pipeline, as many
    pipelines), `micro_batches` of a step on each rank (of a pipeline: through it), and steps of a `round`."""

    kind: Kind
    copies: int = 1
    micro_batches: int = 1
    round: int = 1
    schedule: Name = "1f1b"

    def label(self, ranks: int) -> str:
        mesh = f" {self.copies} x {ranks // self.copies}" if self.copies > 1 or self.kind == "pipeline" else ""
        parts = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        name = {"local": "local SGD", "diloco": "DiLoCo"}.get(self.kind, self.kind)
        return f"{name}{mesh}{parts}" + (f", H={self.round}" if self.kind in {"local", "diloco"} else "")


@dataclass(frozen=True)
class Cost:
    """What a step costs the rank for which the others wait: its seconds, and of these the ones in which it computes;
    the bytes that it keeps; the bytes that it sends, per step on average over a round."""

    seconds: float
    computing: float
    memory: float
    sent: float


def cost(choice: Choice, work: Work, network: Network, batch: int) -> Cost:
    """A step of `batch` samples over all ranks. Raises `ValueError` where copies do not divide the ranks."""
    if network.ranks % choice.copies or min(batch, choice.copies, choice.micro_batches, choice.round) < 1:
        raise ValueError(f"{choice} cannot be on {network.ranks} ranks with {batch} samples")
    mesh = Mesh(choice.copies, network.ranks // choice.copies)
    if choice.kind == "pipeline":
        return _pipeline(choice, work, network, batch, mesh)
    samples = math.ceil(batch / network.ranks / choice.micro_batches)
    computing = work.fixed / choice.micro_batches + work.per_sample * samples  # of a micro-batch
    kept = choice.kind if choice.kind.startswith("zero") else "ddp"
    memory = sum(model_state_bytes(kept, round(work.parameters), mesh.span, work.optimizer).values())
    memory += round(work.activations * samples)
    total = choice.micro_batches * computing
    if choice.kind in {"local", "diloco"}:
        sending = network.row(network.ranks).ring_seconds(work.nbytes, network.ranks) / choice.round
        sent = bytes_sent("ddp", round(work.parameters), network.ranks) / choice.round
        extra = 2 * work.nbytes if choice.kind == "diloco" else 0
        return Cost(total + sending, total, memory + extra, sent)
    seconds = _sharded_seconds(choice, work, network, mesh, computing)
    if kept == "zero3" and mesh.span > 1:
        memory += round(work.nbytes * min(1.0, 2 / work.units))  # whole for a while: a unit, and the next one
    sent = bytes_sent(kept, round(work.parameters), mesh.span, choice.micro_batches, mesh.replicate)
    return Cost(seconds, total, memory, sent)


def _sharded_seconds(choice: Choice, work: Work, network: Network, mesh: Mesh, computing: float) -> float:
    """Seconds of a step with ddp or a stage of ZeRO: `computing`, and the sending that is not hidden behind it."""
    unit, parts = work.nbytes / work.units, choice.micro_batches
    inside = network.row(mesh.span)
    one_pass = _ring(inside, unit, mesh.span)  # of one unit over the ranks of a copy
    over_copies = 2 * _ring(network.column(mesh), unit / mesh.span, mesh.replicate)
    all_reduce = 2 * _ring(network.row(network.ranks), unit, network.ranks)
    at_the_end = work.units * one_pass if choice.kind in {"zero1", "zero2"} else 0.0  # what has been stepped
    if choice.kind in {"ddp", "zero1"}:
        last = _partly_overlapped(work, computing, 0.0, all_reduce)
        return (parts - 1) * computing + last + at_the_end
    gather = one_pass if choice.kind == "zero3" else 0.0
    reduce = network.scatter * one_pass + over_copies
    return parts * _partly_overlapped(work, computing, gather, reduce) + at_the_end


def _partly_overlapped(work: Work, computing: float, gather: float, reduce: float) -> float:
    one_by_one = computing + work.units * (2 * gather + reduce)
    hidden = one_by_one - overlapped(work.units, computing, gather, reduce)
    return one_by_one - work.overlap * hidden


def overlapped(units: int, computing: float, gather: float, reduce: float) -> float:
    """Seconds of a forward and a backward that compute for `computing` seconds, of a model in so many equal units.

    The link does one thing after another: a unit is gathered (`gather` seconds) before its forward and once more before
    its backward, each while the one before computes, and reduced (`reduce` seconds) after its backward.
    """
    now = link = 0.0
    for part in (1 - BACKWARD, BACKWARD):
        link = max(link, now) + gather
        arrived = link
        for number in range(units):
            start = max(now, arrived)
            if number + 1 < units and gather:
                link = max(link, start) + gather
                arrived = link
            now = start + part * computing / units
            if part == BACKWARD and reduce:
                link = max(link, now) + reduce
    return max(now, link)


def _ring(link: LinkModel, nbytes: float, ranks: int) -> float:
    """Seconds of a reduce-scatter or an all-gather of `nbytes` over a ring of `ranks`."""
    return link.ring_seconds(nbytes, ranks) / 2


def _pipeline(choice: Choice, work: Work, network: Network, batch: int, mesh: Mesh) -> Cost:
    """Stages of equal work, one on each rank of a copy; the copies' gradients are added up at the end, unhidden."""
    stages, parts = mesh.span, choice.micro_batches
    samples = math.ceil(batch / mesh.replicate / parts)
    table = make_table(choice.schedule, stages, parts)
    seconds = (work.fixed / parts + work.per_sample * samples) / stages  # of a stage and a micro-batch
    message = network.row(stages).seconds(work.handed_on * samples)
    plan = simulate(table, (1 - BACKWARD) * seconds, BACKWARD * seconds, message if stages > 1 else 0.0)
    over_copies = 2 * _ring(network.column(mesh), work.nbytes / stages, mesh.replicate)
    own = work.parameters / stages
    memory = own * (2 * FLOAT + work.optimizer) + max(peaks(table)) * work.activations * samples / stages
    directions = 0 if stages == 1 else 1 if stages == 2 else 2  # a stage in the middle sends both ways
    sent = directions * parts * samples * work.handed_on + bytes_sent("ddp", round(own), mesh.replicate)
    return Cost(plan.makespan + over_copies, parts * seconds, memory, sent)


def simulated(kind: Kind, step: StepModel, ranks: int, batch: int, handed_on: float = 0.0) -> Cost:
    """A step of `batch` samples with a fitted model of a step, on `ranks` machines with one rank each and the `link` of
    that model between them. Its buckets are the units; a sample hands on `handed_on` bytes from stage to stage. `kind`
    has the numbers of `choices_for`, but a pipeline no more micro-batches than samples. One rank has nobody to talk to:
    all kinds are "ddp" there.

    Raises `ValueError` for a kind that cannot be on so many ranks.
    """
    network, work = Network(ranks, step.link), Work.of(step, units=step.buckets, handed_on=handed_on)
    found = [choice for choice in choices_for(network, work.units) if choice.kind == (kind if ranks > 1 else "ddp")]
    if not found:
        raise ValueError(f"{kind!r} cannot be on {ranks} ranks with a model in {work.units} units")
    choice = found[0]
    if choice.kind == "pipeline":
        of_each = max(ranks, batch) // choice.copies  # samples of a pipeline, one for each stage at least
        choice = replace(choice, micro_batches=min(choice.micro_batches, of_each))
    return cost(choice, work, network, batch)


def choices_for(network: Network, units: int = 1) -> list[Choice]:
    """The choices that one would try on `network`. A hybrid, and a pipeline of no more than `units` stages, stay in a
    machine."""
    ranks, within = network.ranks, min(network.per_machine, network.ranks)
    found = [Choice("ddp"), Choice("zero1"), Choice("zero2"), Choice("zero3")]
    if 1 < within < ranks and ranks % within == 0:
        found.append(Choice("zero3", copies=ranks // within))
    stages = max(n for n in range(1, min(units, max(within, 2), ranks) + 1) if ranks % n == 0)
    if stages > 1:
        found.append(Choice("pipeline", copies=ranks // stages, micro_batches=4 * stages))
    return [*found, Choice("local", round=16), Choice("diloco", round=100)]


def compare(
    work: Work,
    network: Network,
    batch: int,
    memory: float = math.inf,
    choices: Sequence[Choice] | None = None,
) -> list[dict[str, Any]]:
    """A row for each choice, the quickest first, and those that do not fit into `memory` bytes of a rank last:
    "strategy", "seconds" of a step, "samples_per_second", "efficiency" (over one rank that had the memory), "memory"
    and "sent", bytes of a rank, and whether it "fits". All are computed, none is measured."""
    alone = batch / (work.fixed + work.per_sample * batch)
    rows = []
    for choice in choices if choices is not None else choices_for(network, work.units):
        found = cost(choice, work, network, batch)
        rate = batch / found.seconds
        rows.append(
            {
                "strategy": choice.label(network.ranks),
                "seconds": found.seconds,
                "samples_per_second": rate,
                "efficiency": rate / alone / network.ranks,
                "memory": found.memory,
                "sent": found.sent,
                "fits": found.memory <= memory,
            }
        )
    return sorted(rows, key=lambda row: (not row["fits"], row["seconds"]))


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of `compare`, for people."""
    width = max(len(row["strategy"]) for row in rows)
    lines = [f"{'computed':{width}}  {'step':>9}  {'efficiency':>10}  {'memory':>9}  {'sent':>9}"]
    lines += [
        f"{row['strategy']:{width}}  {row['seconds']:7.3f} s  {row['efficiency']:10.0%}  {row['memory'] / 1e9:6.2f} GB"
        f"  {row['sent'] / 1e9:6.2f} GB" + ("" if row["fits"] else "  does not fit")
        for row in rows
    ]
    return "\n".join(lines)
