"""A trunk that many tasks share, and what a task has of its own: a small residual adapter after each block, and a head.

All that belongs to a task is the module ``task``, one subtree of the parameters: ``jaxpp.Bank.take(params, "task")`` cuts it out.
"""

import flax.linen as nn
import jax
from jaxtyping import Array, Float

__all__ = ["AdaptedMLP", "Adapter", "Task"]


class Adapter(nn.Module):
    """Adds to features what it makes of them through ``rank`` of its own; nothing before training.

    Attributes:
        rank: features between its two layers.
        dtype: type to compute in; None follows the inputs and parameters.
        param_dtype: type of the parameters.
    """

    rank: int
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = "float32"

    @nn.compact
    def __call__(self, x: Float[Array, "batch width"]) -> Float[Array, "batch width"]:
        """Features to features."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        hidden = nn.relu(nn.Dense(self.rank, name="down", **types)(x))
        return x + nn.Dense(x.shape[-1], kernel_init=nn.initializers.zeros, name="up", **types)(hidden)


class Task(nn.Module):
    """What a task has of its own.

    Attributes:
        depth: adapters, one after each block of the trunk.
        rank: of each.
        num_classes: outputs of the head.
        dtype: type to compute in; None follows the inputs and parameters.
        param_dtype: type of the parameters.
    """

    depth: int
    rank: int
    num_classes: int
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = "float32"

    def setup(self) -> None:
        """The adapters and the head."""
        self.adapters = [Adapter(self.rank, self.dtype, self.param_dtype) for _ in range(self.depth)]
        self.head = nn.Dense(self.num_classes, dtype=self.dtype, param_dtype=self.param_dtype)

    def adapt(self, block: int, x: Float[Array, "batch width"]) -> Float[Array, "batch width"]:
        """The features that a block has made, adapted."""
        return self.adapters[block](x)

    def __call__(self, x: Float[Array, "batch width"]) -> Float[Array, "batch {self.num_classes}"]:
        """The logits of the features."""
        return self.head(x)


class AdaptedMLP(nn.Module):
    """Dense blocks with ReLU, each followed by the task's adapter, then the task's head.

    Attributes:
        width: features of each block.
        depth: blocks.
        rank: of each adapter.
        num_classes: outputs of the head.
        dtype: type to compute in; None follows the inputs and parameters.
        param_dtype: type of the parameters.
    """

    width: int = 256
    depth: int = 3
    rank: int = 16
    num_classes: int = 10
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = "float32"

    @nn.compact
    def __call__(self, x: Float[Array, "batch features"]) -> Float[Array, "batch {self.num_classes}"]:
        """The logits of the inputs."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        task = Task(self.depth, self.rank, self.num_classes, name="task", **types)
        for block in range(self.depth):
            x = nn.relu(nn.Dense(self.width, name=f"dense_{block}", **types)(x))
            x = task.adapt(block, x)
        return task(x)
