"""A residual network in one file: 3x3 convolutions, each followed by batch normalisation, in groups of falling resolution.

Its running averages are the collection ``batch_stats``, which a training step changes and an evaluation reads.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["Block", "ResNet"]


class Block(nn.Module):
    """Two convolutions added to their input, or, where the shape changes, to a 1x1 convolution of it."""

    features: int
    stride: int
    momentum: float
    dtype: jax.typing.DTypeLike | None
    param_dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch height width channels"], train: bool
    ) -> Float[Array, "batch height/{self.stride} width/{self.stride} {self.features}"]:
        """Images to images with their height and width divided by the stride."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        norm = {"use_running_average": not train, "momentum": self.momentum, **types}
        h = nn.Conv(self.features, (3, 3), self.stride, use_bias=False, name="conv_1", **types)(x)
        h = nn.relu(nn.BatchNorm(name="bn_1", **norm)(h))
        h = nn.Conv(self.features, (3, 3), use_bias=False, name="conv_2", **types)(h)
        h = nn.BatchNorm(name="bn_2", **norm)(h)
        if x.shape != h.shape:
            x = nn.Conv(self.features, (1, 1), self.stride, use_bias=False, name="conv_short", **types)(x)
            x = nn.BatchNorm(name="bn_short", **norm)(x)
        return nn.relu(x + h)


class ResNet(nn.Module):
    """Sorts images into classes.

    Attributes:
        num_classes: outputs of the head.
        width: channels of the first group; each group after it has twice as many, at half the resolution.
        groups: blocks in each group.
        momentum: of the running averages.
        dtype: type to compute in; None follows the inputs and parameters.
        param_dtype: type of the parameters.
    """

    num_classes: int = 10
    width: int = 16
    groups: Sequence[int] = (2, 2, 2)
    momentum: float = 0.9
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = "float32"

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch height width channels"], train: bool = True
    ) -> Float[Array, "batch {self.num_classes}"]:
        """The logits of the images, which are 8x8 or larger for three groups."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        x = nn.Conv(self.width, (3, 3), use_bias=False, name="stem", **types)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=self.momentum, name="bn_stem", **types)(x))
        for group, blocks in enumerate(self.groups):
            for i in range(blocks):
                stride = 2 if group > 0 and i == 0 else 1
                block = Block(self.width * 2**group, stride, self.momentum, name=f"group_{group}_block_{i}", **types)
                x = block(x, train)
        return nn.Dense(self.num_classes, name="head", **types)(jnp.mean(x, axis=(1, 2)))
