"""A multilayer perceptron that classifies: ``depth`` hidden layers of one width, then a head."""

import flax.linen as nn
import jax
from jaxtyping import Array, Float

__all__ = ["MLP"]


class MLP(nn.Module):
    """Dense layers with ReLU between them.

    Attributes:
        width: features of each hidden layer.
        depth: hidden layers.
        num_classes: outputs of the head.
        dtype: type to compute in; None follows the inputs and parameters.
        param_dtype: type of the parameters.
    """

    width: int = 128
    depth: int = 16
    num_classes: int = 2
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = "float32"

    @nn.compact
    def __call__(self, x: Float[Array, "batch features"]) -> Float[Array, "batch {self.num_classes}"]:
        """The logits of the inputs."""
        for i in range(self.depth):
            x = nn.Dense(self.width, dtype=self.dtype, param_dtype=self.param_dtype, name=f"dense_{i}")(x)
            x = nn.relu(x)
        return nn.Dense(self.num_classes, dtype=self.dtype, param_dtype=self.param_dtype, name="head")(x)
