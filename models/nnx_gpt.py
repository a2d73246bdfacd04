"""The decoder-only transformer of gpt.py, written in Flax NNX: the parameters live in the modules, and so does their dropout.

Each ``nnx.Dropout`` keeps a key and counts its calls; that state is split from the parameters with ``nnx.split``.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Integer

__all__ = ["NNXGPT", "Block"]


class Block(nnx.Module):
    """Attention, then a two-layer MLP, each added to the residual stream."""

    def __init__(self, width: int, num_heads: int, dropout: float, *, rngs: nnx.Rngs, **types: Any):
        self.ln_1 = nnx.LayerNorm(width, rngs=rngs, **types)
        self.attn = nnx.MultiHeadAttention(num_heads, width, dropout_rate=dropout, decode=False, rngs=rngs, **types)
        self.ln_2 = nnx.LayerNorm(width, rngs=rngs, **types)
        self.fc = nnx.Linear(width, 4 * width, rngs=rngs, **types)
        self.proj = nnx.Linear(4 * width, width, rngs=rngs, **types)
        self.drop = nnx.Dropout(dropout, rngs=rngs)

    def __call__(
        self, x: Float[Array, "batch length width"], mask: Bool[Array, "batch 1 length length"], deterministic: bool
    ) -> Float[Array, "batch length width"]:
        """Hidden states to hidden states; ``mask`` says which positions each position may attend to."""
        h = self.attn(self.ln_1(x), mask=mask, deterministic=deterministic)
        x = x + self.drop(h, deterministic=deterministic)
        h = self.proj(nnx.gelu(self.fc(self.ln_2(x))))
        return x + self.drop(h, deterministic=deterministic)


class NNXGPT(nnx.Module):
    """Predicts the next token.

    Attributes:
        embed: the tokens' embedding, and, transposed, the head.
        positions: the positions' embedding.
        drop: dropout after the embedding.
        blocks: the transformer blocks.
        ln_f: the last normalisation.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        max_length: int = 128,
        width: int = 128,
        depth: int = 8,
        num_heads: int = 4,
        dropout: float = 0.1,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = "float32",
        *,
        rngs: nnx.Rngs,
    ):
        """Make the parameters.

        Args:
            vocab_size: tokens there are.
            max_length: the longest sequence.
            width: features of the residual stream.
            depth: blocks.
            num_heads: attention heads a block.
            dropout: rate, after the embedding, in the attention and after each half of a block.
            dtype: type to compute in; None follows the parameters.
            param_dtype: type of the parameters.
            rngs: keys, for the parameters and for dropout.
        """
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        self.embed = nnx.Embed(vocab_size, width, rngs=rngs, **types)
        self.positions = nnx.Embed(max_length, width, rngs=rngs, **types)
        self.drop = nnx.Dropout(dropout, rngs=rngs)
        self.blocks = nnx.List([Block(width, num_heads, dropout, rngs=rngs, **types) for _ in range(depth)])
        self.ln_f = nnx.LayerNorm(width, rngs=rngs, **types)

    def __call__(
        self, tokens: Integer[Array, "batch length"], deterministic: bool = False
    ) -> Float[Array, "batch length vocab_size"]:
        """Logits for the token after each of ``tokens``."""
        mask = nnx.make_causal_mask(tokens, dtype=bool)
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        x = self.drop(x, deterministic=deterministic)
        for block in self.blocks:
            x = block(x, mask, deterministic)
        return self.embed.attend(self.ln_f(x))
