"""A U-Net in one file: down to a small image of many channels and up again.

Each level on the way up reads what its fellow on the way down made, so values made early are used late.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["Block", "UNet"]


class Block(nn.Module):
    """Two convolutions, each normalised in groups of channels."""

    features: int
    num_groups: int
    dtype: jax.typing.DTypeLike | None
    param_dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "batch height width channels"]) -> Float[Array, "batch height width {self.features}"]:
        """Images to images of the same size."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        for i in range(2):
            x = nn.Conv(self.features, (3, 3), name=f"conv_{i}", **types)(x)
            x = nn.silu(nn.GroupNorm(self.num_groups, name=f"norm_{i}", **types)(x))
        return x


class UNet(nn.Module):
    """Gives each pixel one number a class: a mask to segment, a clean image to denoise.

    Attributes:
        num_outputs: numbers a pixel.
        width: channels at full resolution; each level below has twice as many.
        levels: times the image is halved.
        num_groups: of channels that are normalised together.
        dtype: type to compute in; None follows the inputs and parameters.
        param_dtype: type of the parameters.
    """

    num_outputs: int = 1
    width: int = 16
    levels: int = 2
    num_groups: int = 4
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = "float32"

    @nn.compact
    def __call__(self, x: Float[Array, "batch height width channels"]) -> Float[Array, "batch height width {self.num_outputs}"]:
        """The outputs for each pixel; height and width are multiples of ``2 ** levels``."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        skips = []
        for level in range(self.levels):
            x = Block(self.width * 2**level, self.num_groups, name=f"down_{level}", **types)(x)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = Block(self.width * 2**self.levels, self.num_groups, name="bottom", **types)(x)
        for level in reversed(range(self.levels)):
            x = nn.ConvTranspose(self.width * 2**level, (2, 2), (2, 2), name=f"grow_{level}", **types)(x)
            x = jnp.concatenate([skips[level], x], axis=-1)
            x = Block(self.width * 2**level, self.num_groups, name=f"up_{level}", **types)(x)
        return nn.Conv(self.num_outputs, (1, 1), name="head", **types)(x)
