"""Compare strategies by their computed step time, memory and traffic for one model, device and network.

    work = Work(parameters=1e9, per_sample=0.02, activations=2e9, handed_on=8e6, units=24)
    network = Network(ranks=64, per_machine=8, inside=NETWORKS["NVLink class"], between=NETWORKS["10 Gbit/s Ethernet"])
    rows = compare(work, network, batch=512, memory=80e9)
    print(as_text(rows))

All results are computed; the inputs may be measured. The model rests on these assumptions:

- A message of n bytes takes latency + n / bandwidth (Hockney, 1994). A ring reduce-scatter or all-gather of n bytes
  over W ranks takes W - 1 messages of n / W bytes. An all-reduce consists of both (Patarasuk & Yuan, 2009).
- The backward pass takes twice as long as the forward pass. A model consists of `units` equal parts. A unit's gradient
  is reduced while the next unit's backward pass runs (Li et al., "PyTorch Distributed", 2020). With ZeRO-3, the next
  unit's weights are gathered while the current unit computes (Zhao et al., "PyTorch FSDP", 2023). Computation and
  communication do not slow each other down.
- Each ZeRO stage divides part of the model state by the number of ranks (Rajbhandari et al., 2020). A hybrid divides it
  by the ranks of one copy and reduces gradients across copies (HSDP: Zhao et al., 2023, section 3.2.2).
- A pipeline takes as long as its simulated schedule, including messages (`pipeline.schedules`). With equal stages and
  free messages, it is idle for (S - 1) / (M + S - 1) of a step (Huang et al., "GPipe", 2019).
- Local SGD averages the weights every H steps (Stich, 2019). DiLoCo averages the change in the weights since the last
  round. It also stores an outer momentum and the weights of the last round (Douillard et al., 2023).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ddp_tutorial.ddp.link_model import LinkModel
from ddp_tutorial.experiments.scaling import BACKWARD, StepModel
from ddp_tutorial.mesh import Mesh
from ddp_tutorial.pipeline.config import Name
from ddp_tutorial.pipeline.schedules import make_table, peaks, simulate
from ddp_tutorial.zero.memory import bytes_sent, model_state_bytes

FLOAT = 4  # bytes
Kind = Literal["ddp", "zero1", "zero2", "zero3", "pipeline", "local", "diloco"]


@dataclass(frozen=True)
class Work:
    """The cost of the model and its training computation on one rank.

    Attributes:
        parameters: The number of parameters.
        per_sample: Seconds per sample for the forward and backward pass.
        fixed: Seconds per step that do not depend on the number of samples.
        activations: Bytes per sample that the forward pass stores for the backward pass.
        handed_on: Bytes per sample that pass from one part of the model to the next.
        units: The number of equal parts (blocks) in the model.
        optimizer: Bytes of optimizer state per parameter: 8 with AdamW, 4 with momentum.
        overlap: The fraction of the overlappable communication that does overlap with computation, from 0 to 1.
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
        """Validate the fields."""
        if self.parameters <= 0 or self.per_sample < 0 or self.units < 1:
            raise ValueError(f"parameters must be above 0, per_sample at least 0 and units at least 1, got {self}")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap must be between 0 and 1, got {self}")

    @staticmethod
    def of(step: StepModel, **others: Any) -> "Work":
        """Return the work of a fitted step model: its parameters, computation and overlap.

        Args:
            step: The fitted model.
            others: Further fields of `Work`; they take precedence over the fitted values.
        """
        return Work(step.nbytes / FLOAT, step.per_sample, step.fixed, **{"overlap": step.overlap} | others)

    @property
    def nbytes(self) -> float:
        """The size in bytes of the float32 parameters, which is also the size of their gradients."""
        return FLOAT * self.parameters


@dataclass(frozen=True)
class Network:
    """The ranks and the links between them.

    Attributes:
        ranks: The number of ranks.
        between: The link between machines. Concurrent flows that leave a machine share its bandwidth.
        per_machine: The number of ranks per machine.
        inside: The link between ranks of the same machine. Defaults to `between`.
        scatter: The number of ring passes in a reduce-scatter: 1 in general, but 2 with gloo. In torch 2.13, gloo
            performs an all-reduce and keeps one shard.
    """

    ranks: int
    between: LinkModel
    per_machine: int = 1
    inside: LinkModel | None = None
    scatter: int = 1

    def row(self, span: int) -> LinkModel:
        """Return the slowest link of a ring of `span` consecutive ranks."""
        return (self.inside or self.between) if span <= self.per_machine else self.between

    def column(self, mesh: Mesh) -> LinkModel:
        """Return the slowest link of a ring across the copies of a mesh.

        The rings of all ranks of a copy share the link of their machine.
        """
        if mesh.replicate * mesh.span <= self.per_machine:
            return self.inside or self.between
        flows = min(mesh.span, self.per_machine)
        return replace(self.between, bandwidth=self.between.bandwidth / flows)


@dataclass(frozen=True)
class Choice:
    """A strategy and its settings.

    Attributes:
        kind: The strategy.
        copies: The number of model copies. With zero3, more than one copy makes it a hybrid. With a pipeline, this is
            the number of pipelines.
        micro_batches: The number of micro-batches per step on each rank, or through each pipeline.
        round: The number of steps between two synchronizations of local SGD or DiLoCo.
        schedule: The pipeline schedule.
    """

    kind: Kind
    copies: int = 1
    micro_batches: int = 1
    round: int = 1
    schedule: Name = "1f1b"

    def label(self, ranks: int) -> str:
        """Return the strategy's name and settings as a table label."""
        mesh = f" {self.copies} x {ranks // self.copies}" if self.copies > 1 or self.kind == "pipeline" else ""
        parts = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        name = {"local": "local SGD", "diloco": "DiLoCo"}.get(self.kind, self.kind)
        return f"{name}{mesh}{parts}" + (f", H={self.round}" if self.kind in {"local", "diloco"} else "")


@dataclass(frozen=True)
class Cost:
    """The cost of a step on the bottleneck rank.

    Attributes:
        seconds: The step time.
        computing: The part of the step time that the rank computes.
        memory: Bytes that the rank stores.
        sent: Bytes that the rank sends per step, averaged over a round.
    """

    seconds: float
    computing: float
    memory: float
    sent: float


def cost(choice: Choice, work: Work, network: Network, batch: int) -> Cost:
    """Return the cost of a step with a global batch of `batch` samples.

    Raises:
        ValueError: If the number of ranks is not a multiple of `copies`, or a number is less than 1.
    """
    if network.ranks % choice.copies or min(batch, choice.copies, choice.micro_batches, choice.round) < 1:
        raise ValueError(f"{choice} cannot run on {network.ranks} ranks with {batch} samples")
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
        memory += round(work.nbytes * min(1.0, 2 / work.units))  # the current unit and the next one are gathered
    sent = bytes_sent(kept, round(work.parameters), mesh.span, choice.micro_batches, mesh.replicate)
    return Cost(seconds, total, memory, sent)


def _sharded_seconds(choice: Choice, work: Work, network: Network, mesh: Mesh, computing: float) -> float:
    """Return the step time of DDP or a ZeRO stage: computation plus the exposed communication.

    Args:
        choice: The strategy.
        work: The model.
        network: The ranks and links.
        mesh: The arrangement of the ranks in replicas.
        computing: Seconds of computation per micro-batch.
    """
    unit, parts = work.nbytes / work.units, choice.micro_batches
    inside = network.row(mesh.span)
    one_pass = _ring(inside, unit, mesh.span)  # of one unit over the ranks of a copy
    over_copies = 2 * _ring(network.column(mesh), unit / mesh.span, mesh.replicate)
    all_reduce = 2 * _ring(network.row(network.ranks), unit, network.ranks)
    at_the_end = work.units * one_pass if choice.kind in {"zero1", "zero2"} else 0.0  # updated weights
    if choice.kind in {"ddp", "zero1"}:
        last = _partly_overlapped(work, computing, 0.0, all_reduce)
        return (parts - 1) * computing + last + at_the_end
    gather = one_pass if choice.kind == "zero3" else 0.0
    reduce = network.scatter * one_pass + over_copies
    return parts * _partly_overlapped(work, computing, gather, reduce) + at_the_end


def _partly_overlapped(work: Work, computing: float, gather: float, reduce: float) -> float:
    """Return the seconds of one forward and backward pass in which `work.overlap` of the possible overlap occurs."""
    one_by_one = computing + work.units * (2 * gather + reduce)
    hidden = one_by_one - overlapped(work.units, computing, gather, reduce)
    return one_by_one - work.overlap * hidden


def overlapped(units: int, computing: float, gather: float, reduce: float) -> float:
    """Return the seconds of one forward and backward pass with the maximum overlap of computation and communication.

    The link transfers one unit at a time. A unit is gathered before its forward pass and again before its backward
    pass, each time while the previous unit computes. Its gradient is reduced after its backward pass.

    Args:
        units: The number of equal units in the model.
        computing: Seconds of computation for the whole model.
        gather: Seconds to gather one unit's weights.
        reduce: Seconds to reduce one unit's gradients.
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
    """Return the seconds of a reduce-scatter or an all-gather of `nbytes` bytes over a ring of `ranks` ranks."""
    return link.ring_seconds(nbytes, ranks) / 2


def _pipeline(choice: Choice, work: Work, network: Network, batch: int, mesh: Mesh) -> Cost:
    """Return the cost of pipelines with equal stages, one stage per rank.

    The gradients of the copies are all-reduced at the end, without overlap.
    """
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
    """Return the cost of a step with a fitted step model on `ranks` machines with one rank each.

    The machines are connected by the model's `link`, and its buckets are the units. The settings come from
    `choices_for`, but a pipeline uses at most one micro-batch per sample. On one rank, every kind is plain "ddp"
    because there is no communication.

    Args:
        kind: The strategy.
        step: The fitted step model.
        ranks: The number of ranks.
        batch: The global batch size.
        handed_on: Bytes per sample that pass from one pipeline stage to the next.

    Raises:
        ValueError: If the strategy cannot run on this number of ranks.
    """
    network, work = Network(ranks, step.link), Work.of(step, units=step.buckets, handed_on=handed_on)
    candidates = [
        choice for choice in choices_for(network, work.units) if choice.kind == (kind if ranks > 1 else "ddp")
    ]
    if not candidates:
        raise ValueError(f"{kind!r} cannot run on {ranks} ranks with a model of {work.units} units")
    choice = candidates[0]
    if choice.kind == "pipeline":
        of_each = max(ranks, batch) // choice.copies  # samples per pipeline, at least one per stage
        choice = replace(choice, micro_batches=min(choice.micro_batches, of_each))
    return cost(choice, work, network, batch)


def choices_for(network: Network, units: int = 1) -> list[Choice]:
    """Return the strategies worth comparing on `network`.

    A hybrid shards within one machine. A pipeline has at most `units` stages and, if a machine has at least two ranks,
    stays within one machine.
    """
    ranks, within = network.ranks, min(network.per_machine, network.ranks)
    choices = [Choice("ddp"), Choice("zero1"), Choice("zero2"), Choice("zero3")]
    if 1 < within < ranks and ranks % within == 0:
        choices.append(Choice("zero3", copies=ranks // within))
    stages = max(n for n in range(1, min(units, max(within, 2), ranks) + 1) if ranks % n == 0)
    if stages > 1:
        choices.append(Choice("pipeline", copies=ranks // stages, micro_batches=4 * stages))
    return [*choices, Choice("local", round=16), Choice("diloco", round=100)]


def compare(
    work: Work,
    network: Network,
    batch: int,
    memory: float = math.inf,
    choices: Sequence[Choice] | None = None,
) -> list[dict[str, Any]]:
    """Return the cost of each choice, the fastest first; choices that do not fit into memory come last.

    All figures are computed, not measured.

    Args:
        work: The model.
        network: The ranks and links.
        batch: The global batch size.
        memory: Bytes of memory per rank.
        choices: The strategies to compare. Defaults to `choices_for(network, work.units)`.

    Returns:
        One row per choice: "strategy", "seconds" per step, "samples_per_second", "efficiency" (relative to a single
        rank with unlimited memory), "memory" and "sent" in bytes per rank, and "fits".
    """
    alone = batch / (work.fixed + work.per_sample * batch)
    rows = []
    for choice in choices if choices is not None else choices_for(network, work.units):
        estimate = cost(choice, work, network, batch)
        rate = batch / estimate.seconds
        rows.append(
            {
                "strategy": choice.label(network.ranks),
                "seconds": estimate.seconds,
                "samples_per_second": rate,
                "efficiency": rate / alone / network.ranks,
                "memory": estimate.memory,
                "sent": estimate.sent,
                "fits": estimate.memory <= memory,
            }
        )
    return sorted(rows, key=lambda row: (not row["fits"], row["seconds"]))


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows of `compare` as a text table."""
    width = max(len(row["strategy"]) for row in rows)
    lines = [f"{'computed':{width}}  {'step':>9}  {'efficiency':>10}  {'memory':>9}  {'sent':>9}"]
    lines += [
        f"{row['strategy']:{width}}  {row['seconds']:7.3f} s  {row['efficiency']:10.0%}  {row['memory'] / 1e9:6.2f} GB"
        f"  {row['sent'] / 1e9:6.2f} GB" + ("" if row["fits"] else "  does not fit")
        for row in rows
    ]
    return "\n".join(lines)
