"""Training runs published by other organizations, with their plans and throughputs.

The runs were chosen before the first prediction, according to three criteria:

- The plan is published (parallel degrees, micro-batch, recomputation).
- The plan uses only data, tensor and pipeline parallelism.
- The run computes in bfloat16 or float16.

No run was removed afterward. The number of chunks in Llama 3 405B and the recomputation in torchtitan's runs were later
refined based on the sources. `CONTEXT_PARALLEL_RUNS` contains runs that also use context parallelism.

These runs were excluded:

- PaLM 540B: its TPU v4 torus has no fast domain inside a slower fabric.
- OPT-175B: the source states a maximum ("up to 147 TFLOP/s"), but not the degree of tensor parallelism.
- Llama 2 and OLMo-core: either the parallel degrees or the number of GPUs is not published.
- Megatron-LM, table 1 (2021) and the README's H100 table: the micro-batch sizes are not published.

The sources use several conventions. `PublishedRun.tokens_per_second` converts all figures to tokens per second per
device. Only the converted throughput is compared with a prediction.
"""

from dataclasses import dataclass
from typing import Any, Literal

from ddp_tutorial.planning.transformer import Recomputation

Unit = Literal["tokens/s/device", "step seconds", "TFLOP/s/device"]
Convention = Literal["none", "model", "hardware, Megatron", "hardware, 8 N"]

_LLM_FOUNDRY = "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md"
_TITAN_A100 = "https://github.com/pytorch/torchtitan/blob/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md"
_TITAN_H100 = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
_LLAMA3 = "https://arxiv.org/abs/2407.21783"
_MEGATRON = "https://arxiv.org/abs/2104.04473"
_DGXC = "https://github.com/NVIDIA/dgxc-benchmarking/blob"


@dataclass(frozen=True)
class PublishedRun:
    """One published training run.

    Attributes:
        name: The model, the number of devices, and the device type.
        year: The year of publication.
        software: The training framework.
        layers: The number of transformer blocks.
        width: The width of the residual stream.
        heads: The number of query heads.
        kv_heads: The number of key and value heads.
        feed_forward: The hidden width of the feed-forward layer.
        gated: Whether the feed-forward layer has a gate (SwiGLU), and therefore three matrices instead of two.
        vocabulary: The number of rows in the token embedding.
        tied: Whether the embedding and the output layer share their weights.
        sequence: The number of tokens per sequence.
        flash_attention: Whether a fused kernel computes attention, without writing the attention matrix to memory.
        device: The device type, which is a key of `DEVICES`.
        devices: The number of devices.
        fabric: The type of network between nodes. Each node contains eight devices.
        fabric_gbit: The bandwidth between nodes in each direction, in Gbit/s per device.
        fabric_published: Whether the source states `fabric_gbit`. Otherwise, `fabric_gbit` is a typical value.
        zero: The ZeRO stage over the data-parallel ranks, or 0 for DDP.
        data: The number of data-parallel ranks.
        tensor: The number of tensor-parallel ranks.
        pipeline: The number of pipeline stages.
        chunks: The number of model chunks per pipeline rank, which is above 1 with an interleaved schedule.
        context: The number of context-parallel ranks, which split each sequence.
        micro_batch: The number of sequences per micro-batch on each data-parallel rank.
        recompute: The activations that the backward pass recomputes, where "half" is torchtitan's option "op".
        gradient_bytes: The number of bytes sent per gradient value.
        batch_tokens: The number of tokens per optimizer step, over all devices.
        value: The published throughput or step time.
        unit: The unit of `value`.
        convention: The formula for a TFLOP/s value, which counts either model or hardware FLOPs.
        mfu: The published model FLOPs utilization in percent, if the source states it.
        source: The URL of the source.
        where: The table or section in the source.
        note: Assumptions and remarks.
    """

    name: str
    year: int
    software: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    feed_forward: int
    gated: bool
    vocabulary: int
    tied: bool
    sequence: int
    device: str
    devices: int
    fabric: str
    fabric_gbit: float
    fabric_published: bool
    data: int
    micro_batch: int
    batch_tokens: int
    value: float
    unit: Unit
    source: str
    where: str
    flash_attention: bool = True
    zero: int = 3
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    context: int = 1
    recompute: Recomputation = "none"
    gradient_bytes: int = 2
    convention: Convention = "none"
    mfu: float | None = None
    note: str = ""

    def __post_init__(self) -> None:
        """Raise `ValueError` if the parallel degrees do not match `devices`, or a micro-batch would be incomplete."""
        ranks = self.data * self.tensor * self.pipeline * self.context
        if ranks != self.devices:
            raise ValueError(
                f"{self.name}: the product of the parallel degrees must equal 'devices' ({self.devices}), got {ranks}"
            )
        if self.batch_tokens % (self.data * self.micro_batch * self.sequence):
            raise ValueError(
                f"{self.name}: batch_tokens must be a multiple of {self.data * self.micro_batch * self.sequence} (one "
                f"micro-batch on each of the {self.data} data-parallel ranks), got {self.batch_tokens}"
            )

    @property
    def parameters(self) -> int:
        """The number of weights in matrices and embeddings, excluding norms and biases."""
        head = self.width // self.heads
        attention = self.width * head * (2 * self.heads + 2 * self.kv_heads)
        feed_forward = (3 if self.gated else 2) * self.width * self.feed_forward
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.width
        return self.layers * (attention + feed_forward) + embeddings

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches per optimizer step on each data-parallel rank."""
        return self.batch_tokens // (self.data * self.micro_batch * self.sequence)

    @property
    def tokens_per_second(self) -> float:
        """The published throughput, in tokens per second per device."""
        if self.unit == "tokens/s/device":
            return self.value
        if self.unit == "step seconds":
            return self.batch_tokens / self.value / self.devices
        return self.value * 1e12 / self._counted_flops()

    def _counted_flops(self) -> float:
        """Return the number of FLOPs per token, counted according to the source's convention."""
        if self.convention == "hardware, 8 N":
            return 8.0 * self.parameters
        if self.convention == "hardware, Megatron":  # equation 3 of Narayanan et al.: ungated, inner width 4 h
            per_layer = 96 * self.width**2 + 16 * self.sequence * self.width
            return float(self.layers * per_layer + 6 * self.vocabulary * self.width)
        embedding = 0 if self.tied else self.vocabulary * self.width  # a lookup costs no FLOPs
        return 6.0 * (self.parameters - embedding) + 12.0 * self.layers * self.width * self.sequence


def _mpt(
    name: str,
    shape: tuple[int, int, int],
    device: str,
    devices: int,
    micro_batch: int,
    batch_tokens: int,
    tokens_per_second: float,
    mfu: float,
    recompute: Recomputation,
) -> PublishedRun:
    """Return a run from llm-foundry's tables. All runs use FULL_SHARD and sequences of 2,048 tokens.

    The A100 tables specify 1,600 Gbit/s per node. The H100 table omits the network. "PURE" runs send gradients in
    bfloat16, and "DEFAULT" runs send gradients in float32.
    """
    layers, width, heads = shape
    pure = device == "A100-40" or ("70B" in name and device == "A100-80")
    hopper = device == "H100"
    row = name.split(",", maxsplit=1)[0].removeprefix("MPT-").lower()
    return PublishedRun(
        name=name,
        year=2023,
        software="llm-foundry",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        feed_forward=4 * width,
        gated=False,
        vocabulary=50368,
        tied=True,
        sequence=2048,
        device=device,
        devices=devices,
        fabric="InfiniBand NDR class" if hopper else "RoCE",
        fabric_gbit=400 if hopper else 200,
        fabric_published=not hopper,
        data=devices,
        micro_batch=micro_batch,
        recompute=recompute,
        gradient_bytes=2 if pure else 4,
        batch_tokens=batch_tokens,
        value=tokens_per_second,
        unit="tokens/s/device",
        mfu=mfu,
        source=_LLM_FOUNDRY,
        where=f"Table {device}, row {row}, {devices} GPUs, sequence 2048",
    )


_MPT_1B, _MPT_7B, _MPT_13B, _MPT_30B, _MPT_70B = (
    (24, 2048, 16),
    (32, 4096, 32),
    (40, 5120, 40),
    (48, 7168, 56),
    (80, 8192, 64),
)


def _llama(size: Literal["8B", "70B", "405B"]) -> dict[str, int | bool]:
    """Return the shape of a Llama 3 model (table 3 of the paper)."""
    layers, width, heads, feed_forward = {
        "8B": (32, 4096, 32, 14336),
        "70B": (80, 8192, 64, 28672),
        "405B": (126, 16384, 128, 53248),
    }[size]
    return {
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": 8,
        "feed_forward": feed_forward,
        "gated": True,
        "vocabulary": 128256,
        "tied": False,
    }


def _titan(
    size: Literal["8B", "70B"],
    device: str,
    devices: int,
    micro_batch: int,
    tokens_per_second: float,
    recompute: Recomputation,
    where: str,
    mfu: float | None = None,
) -> PublishedRun:
    """Return a run from torchtitan's tables. All runs use float32 gradients, and `fully_shard` over all ranks."""
    hopper = device.startswith("H100")
    return PublishedRun(
        name=f"Llama 3 {size}, {devices} {device.split('-', maxsplit=1)[0]}",
        year=2024,
        software="torchtitan, compiled" if hopper else "torchtitan",
        sequence=8192,
        device=device,
        devices=devices,
        fabric="RDMA, 400 Gbit/s" if hopper else "InfiniBand HDR class",
        fabric_gbit=400 if hopper else 200,
        fabric_published=hopper,
        data=devices,
        micro_batch=micro_batch,
        recompute=recompute,
        gradient_bytes=4,
        batch_tokens=devices * micro_batch * 8192,
        value=tokens_per_second,
        unit="tokens/s/device",
        mfu=mfu,
        source=_TITAN_H100 if hopper else _TITAN_A100,
        where=where,
        note="These H100 GPUs run at 500 W instead of 700 W." if hopper else "",
        **_llama(size),  # type: ignore[arg-type]
    )


def _meta_405b(devices: int, data: int, tflops: float, mfu: float) -> PublishedRun:
    """Return a run from table 4 of the Llama 3 paper. The run does not use context parallelism."""
    return PublishedRun(
        name=f"Llama 3 405B, {devices:,} H100",
        year=2024,
        software="Meta",
        sequence=8192,
        device="H100",
        devices=devices,
        fabric="RoCE, 400 Gbit/s",
        fabric_gbit=400,
        fabric_published=True,
        zero=2,
        data=data,
        tensor=8,
        pipeline=16,
        chunks=8,
        micro_batch=1,
        gradient_bytes=4,
        batch_tokens=2048 * 8192,
        value=tflops,
        unit="TFLOP/s/device",
        convention="model",
        mfu=mfu,
        source=_LLAMA3,
        where="Table 4; section 3.3.2",
        note=(
            "The paper states that a chunk is one layer, and that the embedding and the output layer are chunks, too. "
            "The 16 ranks run 128 chunks. The micro-batch is not stated; 1 is assumed. Weights stay gathered after the "
            "forward pass, as in ZeRO-2."
        ),
        **_llama("405B"),  # type: ignore[arg-type]
    )


def _gpt3(*, batch: int, shape: tuple[int, int, int] = (96, 12288, 96), **fields: Any) -> PublishedRun:
    """Return a run of a GPT-3-like model, whose ungated feed-forward layers are four times as wide as the model.

    The batch is in sequences. Unspecified fields have the values of GPT-3 on Selene.
    """
    layers, width, heads = shape
    fields = {
        "kv_heads": heads,
        "vocabulary": 51200,
        "tied": True,
        "sequence": 2048,
        "flash_attention": False,
        "fabric": "InfiniBand HDR",
        "fabric_gbit": 200,
        "fabric_published": True,
        "zero": 0,
        "micro_batch": 1,
        "recompute": "full",
        **fields,
    }
    return PublishedRun(
        layers=layers,
        width=width,
        heads=heads,
        feed_forward=4 * width,
        gated=False,
        batch_tokens=batch * fields["sequence"],
        **fields,
    )


def _megatron(name: str, devices: int, tflops: float, **plan: Any) -> PublishedRun:
    """Return a run from Narayanan et al. (2021), table 2. All runs use full recomputation on 80 GB A100s (Selene)."""
    return _gpt3(
        name=name,
        software="Megatron-LM",
        year=2021,
        device="A100-80",
        devices=devices,
        value=tflops,
        unit="TFLOP/s/device",
        source=_MEGATRON,
        where="Table 2; equation 3; section 5",
        convention="hardware, Megatron",
        note="The number of chunks of the interleaved schedule is not stated; 1 is assumed."
        if plan.get("pipeline", 1) > 1
        else "ZeRO-3 by DeepSpeed, 2021.",
        **plan,
    )


PUBLISHED_RUNS: tuple[PublishedRun, ...] = (
    _gpt3(
        name="GPT-2 124M, 8 A100",
        software="nanoGPT",
        year=2022,
        device="A100-40",
        devices=8,
        value=600_000 * 491_520 / (4 * 86_400) / 8,
        unit="tokens/s/device",
        source="https://github.com/karpathy/nanoGPT",
        where="README, 'reproducing GPT-2'; config/train_gpt2.py",
        batch=480,
        data=8,
        micro_batch=12,
        fabric="none, one node",
        fabric_gbit=0,
        recompute="none",
        gradient_bytes=4,
        shape=(12, 768, 12),
        vocabulary=50304,
        sequence=1024,
        flash_attention=True,
        note="The source states 300 billion tokens in 'about 4 days', a coarse figure that includes the evaluations.",
    ),
    PublishedRun(
        name="TinyLlama 1.1B, 16 A100",
        year=2023,
        software="lit-gpt",
        layers=22,
        width=2048,
        heads=32,
        kv_heads=4,
        feed_forward=5632,
        gated=True,
        vocabulary=32000,
        tied=False,
        sequence=2048,
        device="A100-40",
        devices=16,
        fabric="InfiniBand HDR class",
        fabric_gbit=200,
        fabric_published=False,
        data=16,
        micro_batch=8,
        gradient_bytes=2,
        batch_tokens=1024 * 2048,
        value=24_000,
        unit="tokens/s/device",
        mfu=56,
        source="https://github.com/jzhang38/TinyLlama",
        where="README, 'Training Details' and 'Blazingly Fast'; pretrain/tinyllama.py",
    ),
    _mpt("MPT-1B, 128 A100", _MPT_1B, "A100-40", 128, 10, 2621440, 18647, 54.41, "none"),
    _mpt("MPT-7B, 8 A100", _MPT_7B, "A100-80", 8, 6, 196608, 4641, 64.23, "none"),
    _mpt("MPT-7B, 128 A100", _MPT_7B, "A100-40", 128, 18, 4718592, 3623, 50.14, "full"),
    _mpt("MPT-30B, 128 A100", _MPT_30B, "A100-40", 128, 6, 1572864, 865, 52.25, "full"),
    _mpt("MPT-70B, 64 A100", _MPT_70B, "A100-80", 64, 8, 4194304, 410, 53.33, "full"),
    _mpt("MPT-1B, 64 H100", _MPT_1B, "H100", 64, 20, 2621440, 44402, 40.85, "none"),
    _mpt("MPT-13B, 64 H100", _MPT_13B, "H100", 64, 2, 262144, 4800, 39.86, "none"),
    _mpt("MPT-70B, 64 H100", _MPT_70B, "H100", 64, 8, 4194304, 1039, 42.57, "full"),
    _titan("8B", "A100-80", 64, 1, 2973, "half", "Table 'Llama 3', row 8B, selective op", 58.2),
    _titan("70B", "A100-80", 64, 1, 331, "full", "Table 'Llama 3', row 70B, full", 51.7),
    _titan("8B", "H100", 8, 2, 6667, "half", "Table 1, FSDP + torch.compile"),
    _titan("8B", "H100", 128, 2, 6514, "half", "Table 3, FSDP + torch.compile"),
    _gpt3(
        name="GPT-NeoX-20B, 96 A100",
        software="GPT-NeoX",
        year=2022,
        device="A100-40",
        devices=96,
        value=117,
        unit="TFLOP/s/device",
        source="https://arxiv.org/abs/2204.06745",
        where="Sections 2.3 and 3; configs/20B.yml of EleutherAI/gpt-neox",
        batch=1536,
        data=12,
        micro_batch=4,
        zero=1,
        tensor=2,
        pipeline=4,
        fabric_gbit=100,
        shape=(44, 6144, 64),
        vocabulary=50432,
        tied=False,
        convention="hardware, Megatron",
        note="Four 200 Gbit/s adapters for eight GPUs. FLOPs are counted as in the repository's log.",
    ),
    _gpt3(
        name="BLOOM 176B, 384 A100",
        software="Megatron-DeepSpeed",
        year=2022,
        device="A100-80",
        devices=384,
        value=150,
        unit="TFLOP/s/device",
        source="https://github.com/bigscience-workshop/bigscience/tree/master/train/tr11-176B-ml",
        where="README, 'Replica setup' and 'Throughput'; tr11-176B-ml.slurm; notion page 'BigScience 176B Model'",
        batch=2048,
        data=8,
        micro_batch=2,
        zero=1,
        tensor=4,
        pipeline=12,
        fabric="Omni-Path",
        fabric_gbit=50,
        shape=(70, 14336, 112),
        vocabulary=250880,
        convention="hardware, 8 N",
        note="Four 100 Gbit/s links for eight GPUs. 'About 150 TFLOPs'.",
    ),
    _megatron("GPT-3 175B ZeRO-3, 384 A100", 384, 144, batch=1536, data=384, micro_batch=4, zero=3),
    _megatron("GPT-3 175B ZeRO-3, 1,536 A100", 1536, 44, batch=1536, data=1536, micro_batch=1, zero=3),
    _megatron("GPT-3 175B, 384 A100", 384, 153, batch=1536, data=4, tensor=8, pipeline=12),
    _megatron("GPT-3 175B, 1,536 A100", 1536, 141, batch=1536, data=16, tensor=8, pipeline=12),
    _megatron("GPT 530B, 2,240 A100", 2240, 159, shape=(105, 20480, 128), batch=2240, data=8, tensor=8, pipeline=35),
    _gpt3(
        name="MT-NLG 530B, 3,360 A100",
        software="Megatron-DeepSpeed",
        year=2022,
        device="A100-80",
        devices=3360,
        value=44.4,
        unit="step seconds",
        source="https://arxiv.org/abs/2201.11990",
        where="Section 2.4",
        batch=1920,
        data=12,
        tensor=8,
        pipeline=35,
        shape=(105, 20480, 128),
        vocabulary=50272,
        note="The micro-batch is not stated; 1 is assumed. The paper names no ZeRO stage for these times.",
    ),
    _gpt3(
        name="GPT-3 175B, 128 H100",
        software="NeMo",
        year=2024,
        device="H100",
        devices=128,
        value=8.309,
        unit="step seconds",
        source=f"{_DGXC}/0b71cfda5163540778e2a3d2db59858bf62f96f7/nemo_megatron/README_175b.md",
        where="Table BF16, 128x H100; gpt3_175b_hydra.yaml",
        batch=256,
        data=4,
        zero=1,
        tensor=4,
        pipeline=8,
        chunks=12,
        fabric="InfiniBand NDR class",
        fabric_gbit=400,
        fabric_published=False,
        recompute="none",
        flash_attention=True,
        mfu=53.54,
    ),
    _gpt3(
        name="GPT-3 175B, 2,048 H100",
        software="NeMo",
        year=2024,
        device="H100",
        devices=2048,
        value=8.49,
        unit="step seconds",
        source=f"{_DGXC}/0b71cfda5163540778e2a3d2db59858bf62f96f7/nemo_megatron/README_175b.md",
        where="Table BF16, 2048x H100; gpt3_175b_hydra.yaml",
        batch=4096,
        data=64,
        zero=1,
        tensor=4,
        pipeline=8,
        chunks=12,
        fabric="InfiniBand NDR class",
        fabric_gbit=400,
        fabric_published=False,
        recompute="none",
        flash_attention=True,
        mfu=52.40,
    ),
    _gpt3(
        name="Nemotron-4 340B, 1,024 H100",
        software="NeMo",
        year=2024,
        device="H100",
        devices=1024,
        value=4.73,
        unit="step seconds",
        source=f"{_DGXC}/143b90dd91f9be958fed4773ae95d941a3356a82/nemotron/README_340b.md",
        where="Table BF16, 1024x H100; nemotron4-340b-synth.yaml",
        batch=256,
        data=16,
        zero=1,
        tensor=8,
        pipeline=8,
        chunks=12,
        fabric="InfiniBand NDR class",
        fabric_gbit=400,
        fabric_published=False,
        recompute="selective",
        flash_attention=True,
        shape=(96, 18432, 96),
        kv_heads=8,
        vocabulary=256000,
        tied=False,
        sequence=4096,
        mfu=53.98,
        note="The run recomputes attention selectively, which flash attention does in any case.",
    ),
    _meta_405b(8192, 64, 430, 43),
    _meta_405b(16384, 128, 400, 41),
)


def _nemo_llama(
    size: Literal["8B", "70B", "405B"],
    devices: int,
    seconds: float,
    mfu: float,
    *,
    batch: int,
    tensor: int = 1,
    pipeline: int = 1,
    chunks: int = 1,
) -> PublishedRun:
    """Return a Llama 3.1 run from NVIDIA's BF16 tables, with 2 context-parallel ranks and a micro-batch size of 1."""
    return PublishedRun(
        name=f"Llama 3.1 {size}, {devices:,} H100",
        year=2024,
        software="NeMo",
        sequence=8192,
        device="H100",
        devices=devices,
        fabric="InfiniBand NDR class",
        fabric_gbit=400,
        fabric_published=False,
        zero=1,
        data=devices // (2 * tensor * pipeline),
        tensor=tensor,
        pipeline=pipeline,
        chunks=chunks,
        context=2,
        micro_batch=1,
        batch_tokens=batch * 8192,
        value=seconds,
        unit="step seconds",
        mfu=mfu,
        source=f"{_DGXC}/143b90dd91f9be958fed4773ae95d941a3356a82/llama3.1/README_{size.lower()}.md",
        where=f"Table BF16, {devices}x H100",
        **_llama(size),  # type: ignore[arg-type]
    )


CONTEXT_PARALLEL_RUNS: tuple[PublishedRun, ...] = (
    _nemo_llama("8B", 128, 13.10, 58.51, batch=2048),
    _nemo_llama("70B", 64, 14.72, 54.10, batch=128, tensor=4, pipeline=4, chunks=5),
    _nemo_llama("70B", 2048, 14.98, 53.38, batch=4096, tensor=4, pipeline=4, chunks=5),
    _nemo_llama("405B", 2304, 17.62, 54.45, batch=1008, tensor=8, pipeline=9, chunks=7),
)
