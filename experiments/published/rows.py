"""Training steps that others have measured and published: what ran, how, how fast, and where it says so.

Each number was read at its address. ``differs`` says what the run did that its plan does not, or the other way round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxpp.targets import GPU

__all__ = ["ROWS", "Layout", "Published"]

Layout = Literal["replicas", "zero-1", "fsdp", "pipeline"]
"""How a step is divided among GPUs: replicas that hold all, or divide the optimizer's state, or divide all; or stages in 1F1B."""


@dataclass(frozen=True)
class Published:
    """A training run that somebody measured.

    Attributes:
        model: a name of ``models/named.py``.
        gpu: a name of ``jaxpp.target``, or the numbers of a GPU.
        gpus: how many.
        layout: how the step is divided among them.
        length: tokens of a sequence.
        sequences: in a microbatch of each replica.
        microbatches: of each replica.
        tokens_per_second: of all GPUs together, as measured.
        by: who ran what.
        source: address of the page or the file.
        where: the place on it.
        recompute: whether the backward runs the forward again (activation checkpointing); or the share of activations that is kept.
        attention: ``"cudnn"`` for one kernel that keeps no scores, whoever wrote the kernel that ran.
        compute: type of the arithmetic; parameters are float32.
        hosts: on how many machines.
        changes: of the model.
        differs: what was otherwise than in the plan.
    """

    model: str
    gpu: str | GPU
    gpus: int
    layout: Layout
    length: int
    sequences: int
    microbatches: int
    tokens_per_second: float
    by: str
    source: str
    where: str
    recompute: bool | float = False
    attention: Literal["xla", "cudnn"] = "cudnn"
    compute: Literal["bfloat16", "float16"] = "bfloat16"
    hosts: int = 1
    changes: Mapping[str, Any] = field(default_factory=dict)
    differs: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.length * self.sequences * self.microbatches * self.replicas

    @property
    def step(self) -> "Published":
        """The row without who measured what: rows of the same step have one plan."""
        return replace(self, tokens_per_second=0.0, by="", source="", where="", differs=())

    @property
    def replicas(self) -> int:
        """How many there are."""
        return 1 if self.layout == "pipeline" else self.gpus

    @property
    def seconds(self) -> float:
        """Of a step, as measured."""
        return self.tokens / self.tokens_per_second

    @property
    def card(self) -> str:
        """The name of the GPU."""
        return self.gpu if isinstance(self.gpu, str) else self.gpu.name

    @property
    def name(self) -> str:
        """``mpt-7b, 8 x a100-80gb, 2048``, and what else tells it from other rows."""
        layout = {"pipeline": ", 1f1b", "zero-1": ", zero-1"}.get(self.layout, "")
        return f"{self.model}, {self.gpus} x {self.card}, {self.length}{layout}{', recomputed' * (self.recompute is True)}"


_A800 = GPU.like("a100-80gb", "a800", peer=200e9)  # an A100 whose NVLinks are 400 GB/s in both directions
_H100_96GB = GPU.like("h100", "h100-96gb", memory=95 << 30, bandwidth=2.4e12)  # as torchtitan's page says

_FOUNDRY = (
    "https://github.com/mosaicml/llm-foundry/blob/061f2c7ce64e655100286584a7629e2a09f827ba/scripts/train/benchmarking/README.md"
)
_GATHERS = "FSDP gathers a layer's parameters for each forward and backward of it; the plan gathers all once a step"
_TRITON = "attention by Triton"


def _foundry(
    model: str,
    gpu: str,
    gpus: int,
    length: int,
    batch: tuple[int, int],
    tokens_per_second: float,
    *,
    recompute: bool = False,
) -> Published:
    """A row of MosaicML's tables; ``batch`` is (MicroBatchSize, GradAccum)."""
    part = {"h100": "H100 80GB BF16", "a100-80gb": "A100 80GB with 1600 Gbps", "a100-40gb": "A100 40GB with 1600 Gbps"}[gpu]
    where = f"{part}: {model.removeprefix('mpt-')}, SeqLen {length}, {gpus} GPUs, MicroBatchSize {batch[0]}"
    return Published(
        model,
        gpu,
        gpus,
        "fsdp",
        length,
        *batch,
        tokens_per_second,
        "MosaicML LLM Foundry (PyTorch)",
        _FOUNDRY,
        where,
        recompute,
        hosts=max(1, gpus // 8),
        changes={"max_length": length},
        differs=(_GATHERS, _TRITON),
    )


_ARTIFACT = "https://github.com/ITcarrot/RoundPipe-artifact/blob/e44270aeac4eca61ff002ce5be87117d89fed635"


_VOCABULARY = "NeMo makes the tables as large as the vocabulary of its mock data, which is GPT-2's, padded; so does the plan"
_LAST = "the last stage ran its forward again too; the plan does not, as its backward follows at once in 1F1B"
_EAGER = "a model of Hugging Face that is not compiled: every elementwise operation is a kernel of its own"


def _artifact(model: str, gpu: str | GPU, layout: Layout, batch: tuple[int, int], tokens_per_second: float) -> Published:
    """A row of the artifact of the RoundPipe paper: what it was compared with; all of float16 and recomputed layer by layer."""
    by = {"fsdp": "PyTorch FSDP", "pipeline": "Megatron-LM by NeMo"}[layout]
    folder, named = ("fsdp", "FSDP-Zero3") if layout == "fsdp" else ("megatron", "Megatron-PP")
    card = gpu if isinstance(gpu, str) else gpu.name
    where = f"{named}, {card.removeprefix('rtx-').upper()}; sizes in {folder}/run.sh and {folder}/train.py"
    return Published(
        model,
        gpu,
        8,
        layout,
        2048,
        *batch,
        tokens_per_second,
        f"{by} (RoundPipe's artifact)",
        f"{_ARTIFACT}/exp/raw-data.csv",
        where,
        recompute=True,
        compute="float16",
        changes={} if layout == "fsdp" else {"vocab_size": 50304},
        differs=(_GATHERS, _EAGER) if layout == "fsdp" else (_VOCABULARY, _LAST),
    )


_LLM_C = "https://github.com/karpathy/llm.c/pull"
_BUILD = "https://github.com/aitobox/ATBNewsWeekly/issues/52"
_UNSCANNED = {"scan": False}
_MASTER = "llm.c kept the parameters in bfloat16, without a copy in float32"
_PCIE = "the card was the PCIe form, of 250 W"

ROWS: Sequence[Published] = (
    Published(
        "gpt2-124m",
        "rtx-4090",
        1,
        "replicas",
        1024,
        24,
        1,
        24 * 1024 / 0.17077,
        "llm.c (C and CUDA)",
        f"{_LLM_C}/322",
        "description: cuDNN: 170.77ms",
        changes=_UNSCANNED,
        differs=(_MASTER,),
    ),
    Published(
        "gpt2-124m",
        "rtx-4090",
        1,
        "replicas",
        1024,
        12,
        40,
        40 * 12 * 1024 / 4.622,
        "nanoGPT (PyTorch, compiled)",
        "https://github.com/karpathy/nanoGPT/pull/225",
        "description: gpt2, 1 GPU (4090), about 4622 ms for an iteration; 40 x 12 x 1024 tokens in config/train_gpt2.py",
        changes=_UNSCANNED,
        differs=("layers had no biases",),
    ),
    Published(
        "gpt2-124m",
        "a100-40gb",
        1,
        "replicas",
        1024,
        32,
        1,
        145e3,
        "llm.c (C and CUDA)",
        f"{_LLM_C}/323",
        "first comment: llm.c, tok/s: 145K",
        changes=_UNSCANNED,
        differs=(_MASTER, _PCIE),
    ),
    Published(
        "gpt2-124m",
        "a100-40gb",
        1,
        "replicas",
        1024,
        32,
        1,
        115e3,
        "PyTorch, compiled",
        f"{_LLM_C}/323",
        "first comment: PyTorch baseline, tok/s: 115K",
        changes=_UNSCANNED,
        differs=(_PCIE,),
    ),
    Published(
        "gpt2-124m",
        "a100-80gb",
        8,
        "zero-1",
        1024,
        64,
        1,
        10e9 / (90 * 60),
        "llm.c (C and CUDA)",
        "https://www.luisquintanilla.me/feed/repro-gpt-2-llm-c-90-min-20-dollars-karpathy",
        "quotes llm.c's discussion 481: 10B tokens on one 8X A100 80GB SXM node take about 90 minutes",
        changes=_UNSCANNED,
        differs=("the time is rounded, and has evaluations and checkpoints in it",),
    ),
    Published(
        "gpt2-124m",
        "a100-80gb",
        1,
        "replicas",
        1024,
        16,
        1,
        16 * 1024 / 0.096,
        "build-nanogpt (PyTorch, compiled)",
        _BUILD,
        "chapters of the video: 02:00:18 flash attention, 96 ms; B=16, T=1024 in train_gpt2.py",
        changes=_UNSCANNED,
    ),
    Published(
        "gpt2-124m",
        "a100-80gb",
        1,
        "replicas",
        1024,
        16,
        1,
        16 * 1024 / 0.130,
        "build-nanogpt (PyTorch, compiled)",
        _BUILD,
        "chapters of the video: 01:48:15 torch.compile, 130 ms; B=16, T=1024 in train_gpt2.py",
        attention="xla",
        changes=_UNSCANNED,
    ),
    _foundry("mpt-125m", "a100-80gb", 8, 2048, (32, 2), 1133901),
    _foundry("mpt-350m", "a100-80gb", 8, 2048, (32, 2), 470263),
    _foundry("mpt-760m", "a100-80gb", 8, 2048, (24, 2), 259472),
    _foundry("mpt-1b", "a100-80gb", 8, 2048, (14, 4), 164109),
    _foundry("mpt-3b", "a100-80gb", 8, 2048, (10, 2), 86491),
    _foundry("mpt-7b", "a100-80gb", 8, 2048, (6, 2), 37130),
    _foundry("mpt-13b", "a100-80gb", 8, 2048, (2, 3), 18097),
    _foundry("mpt-7b", "a100-80gb", 8, 8192, (8, 2), 25655, recompute=True),
    _foundry("mpt-30b", "a100-40gb", 32, 2048, (4, 1), 27431, recompute=True),
    _foundry("mpt-70b", "a100-80gb", 64, 2048, (8, 4), 26274, recompute=True),
    _foundry("mpt-3b", "a100-40gb", 64, 2048, (6, 1), 623167),
    _foundry("mpt-7b", "a100-40gb", 32, 2048, (18, 1), 119202, recompute=True),
    _foundry("mpt-1b", "h100", 8, 2048, (14, 1), 363645),
    _foundry("mpt-3b", "h100", 8, 1024, (20, 6), 216369),
    _foundry("mpt-7b", "h100", 8, 2048, (6, 1), 85144),
    _foundry("mpt-13b", "h100", 8, 2048, (2, 1), 38336),
    _foundry("mpt-30b", "h100", 16, 2048, (10, 3), 36209, recompute=True),
    _foundry("mpt-30b", "h100", 32, 2048, (14, 3), 73860, recompute=True),
    _foundry("mpt-1b", "h100", 64, 2048, (20, 1), 2841754),
    _foundry("mpt-13b", "h100", 64, 2048, (2, 1), 307209),
    _foundry("mpt-70b", "h100", 64, 2048, (8, 4), 66523, recompute=True),
    Published(
        "llama-3-8b",
        _H100_96GB,
        8,
        "fsdp",
        8192,
        2,
        1,
        8 * 6667,
        "torchtitan (PyTorch, compiled)",
        "https://github.com/pytorch/torchtitan/blob/31a17bfdb70bab6f62a13d21816a5339b911d6e3/benchmarks/llama3_h100_202412_torchtitan.md",
        "table 1: FSDP + torch.compile, 6,667 TPS/GPU",
        recompute=0.5,
        differs=(_GATHERS, "every second product was run again; the plan keeps half of the bytes", "cards were limited to 500 W"),
    ),
    _artifact("llama-3-8b", _A800, "fsdp", (8, 4), 29148.46),
    _artifact("qwen-3-1.7b", _A800, "fsdp", (16, 4), 85829.26),
    _artifact("llama-3-8b", _A800, "pipeline", (16, 16), 23672.01),
)
"""All rows. Left out is what plans cannot say: tensor parallelism by kernels of its own, FP8, more than 64 GPUs, those steps of
MosaicML's that have 16 or 21 microbatches, for each of which FSDP gathers all parameters again, and runs on RTX 4090s that may have
summed some products in float16, at twice the peak."""
