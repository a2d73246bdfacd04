"""A decoder-only transformer in one file: learned positions, pre-norm blocks, embedding and head tied.

``dtype`` is what it computes in, ``param_dtype`` what its parameters are kept in.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

__all__ = ["GPT", "Block"]


class Block(nn.Module):
    """Attention, then a two-layer MLP, each added to the residual stream."""

    num_heads: int
    dropout: float
    dtype: jax.typing.DTypeLike | None
    param_dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch length width"], mask: Bool[Array, "batch 1 length length"], deterministic: bool
    ) -> Float[Array, "batch length width"]:
        """Hidden states to hidden states; ``mask`` says which positions each position may attend to."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        width = x.shape[-1]
        h = nn.LayerNorm(name="ln_1", **types)(x)
        attention = nn.MultiHeadDotProductAttention(self.num_heads, dropout_rate=self.dropout, name="attn", **types)
        h = attention(h, mask=mask, deterministic=deterministic)
        x = x + nn.Dropout(self.dropout, deterministic=deterministic)(h)
        h = nn.LayerNorm(name="ln_2", **types)(x)
        h = nn.gelu(nn.Dense(4 * width, name="fc", **types)(h))
        h = nn.Dense(width, name="proj", **types)(h)
        return x + nn.Dropout(self.dropout, deterministic=deterministic)(h)


class GPT(nn.Module):
    """Predicts the next token.

    Attributes:
        vocab_size: tokens there are.
        max_length: the longest sequence.
        width: features of the residual stream.
        depth: blocks.
        num_heads: attention heads a block.
        dropout: rate, after the embedding, in the attention and after each half of a block.
        dtype: type to compute in; None follows the parameters.
        param_dtype: type of the parameters.
    """

    vocab_size: int = 256
    max_length: int = 128
    width: int = 128
    depth: int = 8
    num_heads: int = 4
    dropout: float = 0.1
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = "float32"

    @nn.compact
    def __call__(
        self, tokens: Integer[Array, "batch length"], deterministic: bool = False
    ) -> Float[Array, "batch length {self.vocab_size}"]:
        """Logits for the token after each of ``tokens``."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        embed = nn.Embed(self.vocab_size, self.width, name="embed", **types)
        positions = nn.Embed(self.max_length, self.width, name="positions", **types)
        mask = nn.make_causal_mask(tokens, dtype=bool)
        x = embed(tokens) + positions(jnp.arange(tokens.shape[-1]))
        x = nn.Dropout(self.dropout, deterministic=deterministic)(x)
        for i in range(self.depth):
            x = Block(self.num_heads, self.dropout, name=f"h_{i}", **types)(x, mask, deterministic)
        return embed.attend(nn.LayerNorm(name="ln_f", **types)(x))
