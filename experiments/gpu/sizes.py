"""The sizes of everything: large ones for an accelerator, small ones that show on any machine that the command runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from experiments.remat.main import Config as Models

__all__ = ["LARGE", "SMALL", "Sizes", "Zoo"]


@dataclass(frozen=True)
class Zoo:
    """The models that are only planned.

    Attributes:
        unet_width: channels at full resolution.
        unet_levels: times the image is halved.
        unet_size: pixels of an image's side.
        unet_batch: images a step.
        seq2seq_width: features of the residual streams.
        seq2seq_depth: blocks of the encoder, and as many of the decoder.
        seq2seq_heads: attention heads a block.
        seq2seq_length: tokens of a sequence.
        seq2seq_batch: pairs of sequences a step.
        seq2seq_vocabulary: tokens there are.
    """

    unet_width: int = 64
    unet_levels: int = 3
    unet_size: int = 128
    unet_batch: int = 64
    seq2seq_width: int = 512
    seq2seq_depth: int = 6
    seq2seq_heads: int = 8
    seq2seq_length: int = 128
    seq2seq_batch: int = 256
    seq2seq_vocabulary: int = 32000


@dataclass(frozen=True)
class Sizes:
    """The models, and how often a step is timed.

    Attributes:
        models: those whose steps are timed, their stages and microbatches.
        exact: those whose gradients are compared leaf by leaf.
        tiny: an MLP whose step is nearly all host time.
        zoo: those that only a plan has.
        bank: options of ``experiments.tasks``.
        rounds: interleaved rounds.
        steps: steps of each kind timed in a round.
        traced: steps in the trace whose gaps are looked at.
        product: rows and columns of the matrices whose product is timed.
    """

    models: Models
    exact: Models
    tiny: Models
    zoo: Zoo = Zoo()
    bank: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 5
    steps: int = 3
    traced: int = 4
    product: int = 8192


LARGE = Sizes(
    models=Models(
        gpt_width=768,
        gpt_depth=12,
        gpt_heads=12,
        gpt_length=1024,
        gpt_batch=32,
        gpt_vocabulary=50304,
        mlp_width=4096,
        mlp_depth=16,
        mlp_batch=16384,
        resnet_width=64,
        resnet_size=64,
        resnet_batch=512,
        rounds=5,
        scan=True,
    ),
    exact=Models(
        gpt_width=128,
        gpt_depth=4,
        gpt_length=64,
        gpt_batch=16,
        gpt_vocabulary=512,
        mlp_width=256,
        mlp_depth=8,
        mlp_batch=64,
        resnet_batch=32,
    ),
    tiny=Models(mlp_width=128, mlp_depth=16, mlp_batch=32),
    bank={"tasks": (4,), "width": 4096, "depth": 4, "rank": 256, "batch": 8192, "steps": 2, "rounds": 5, "timed": 8, "warm_up": 3},
)
"""A GPT of 124 million parameters, an MLP 4096 wide, a ResNet of 19 convolutions on images of 64 x 64 pixels."""

_FEW = Models(
    gpt_width=16,
    gpt_depth=4,
    gpt_heads=2,
    gpt_length=8,
    gpt_batch=8,
    gpt_vocabulary=32,
    mlp_width=16,
    mlp_depth=8,
    mlp_batch=16,
    resnet_width=4,
    resnet_size=8,
    resnet_batch=8,
    microbatches=4,
    rounds=1,
    steps=1,
    scan=True,
)
SMALL = Sizes(
    models=_FEW,
    exact=_FEW,
    tiny=_FEW,
    zoo=Zoo(8, 1, 8, 8, 16, 2, 2, 8, 8, 32),
    bank={"tasks": (2,), "width": 16, "depth": 2, "rank": 4, "batch": 16, "steps": 1, "rounds": 1, "timed": 2, "warm_up": 1},
    rounds=1,
    steps=1,
    traced=2,
    product=256,
)
"""Models of a few units."""
