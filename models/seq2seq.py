"""An encoder-decoder transformer in one file: pre-norm blocks, learned positions, one embedding for source, target and head.

Every block of the decoder reads the encoder's output. Padding is neither attended to nor, if the loss leaves it out, learned.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

__all__ = ["DecoderBlock", "EncoderBlock", "Seq2Seq"]


class EncoderBlock(nn.Module):
    """Self-attention, then a two-layer MLP, each added to the residual stream."""

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
        drop = nn.Dropout(self.dropout, deterministic=deterministic)
        attention = nn.MultiHeadDotProductAttention(self.num_heads, dropout_rate=self.dropout, name="attn", **types)
        x = x + drop(attention(nn.LayerNorm(name="ln_1", **types)(x), mask=mask, deterministic=deterministic))
        h = nn.gelu(nn.Dense(4 * x.shape[-1], name="fc", **types)(nn.LayerNorm(name="ln_2", **types)(x)))
        return x + drop(nn.Dense(x.shape[-1], name="proj", **types)(h))


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to the encoder's output, then a two-layer MLP, each added to the residual stream."""

    num_heads: int
    dropout: float
    dtype: jax.typing.DTypeLike | None
    param_dtype: jax.typing.DTypeLike

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length width"],
        memory: Float[Array, "batch source width"],
        mask: Bool[Array, "batch 1 length length"],
        memory_mask: Bool[Array, "batch 1 length source"],
        deterministic: bool,
    ) -> Float[Array, "batch length width"]:
        """Hidden states to hidden states; ``memory`` is the encoder's output."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        drop = nn.Dropout(self.dropout, deterministic=deterministic)
        attention = nn.MultiHeadDotProductAttention(self.num_heads, dropout_rate=self.dropout, name="attn", **types)
        x = x + drop(attention(nn.LayerNorm(name="ln_1", **types)(x), mask=mask, deterministic=deterministic))
        cross = nn.MultiHeadDotProductAttention(self.num_heads, dropout_rate=self.dropout, name="cross", **types)
        x = x + drop(cross(nn.LayerNorm(name="ln_2", **types)(x), memory, mask=memory_mask, deterministic=deterministic))
        h = nn.gelu(nn.Dense(4 * x.shape[-1], name="fc", **types)(nn.LayerNorm(name="ln_3", **types)(x)))
        return x + drop(nn.Dense(x.shape[-1], name="proj", **types)(h))


class Seq2Seq(nn.Module):
    """Predicts the next token of a target sequence from its tokens so far and a whole source sequence.

    Attributes:
        vocab_size: tokens there are, in both languages.
        max_length: the longest sequence, of either kind.
        width: features of the residual stream.
        depth: blocks of the encoder, and as many of the decoder.
        num_heads: attention heads a block.
        dropout: rate, after the embeddings, in the attention and after each part of a block.
        pad: the token that fills sequences up.
        dtype: type to compute in; None follows the parameters.
        param_dtype: type of the parameters.
    """

    vocab_size: int = 256
    max_length: int = 128
    width: int = 128
    depth: int = 4
    num_heads: int = 4
    dropout: float = 0.1
    pad: int = 0
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = "float32"

    @nn.compact
    def __call__(
        self, source: Integer[Array, "batch source"], target: Integer[Array, "batch length"], deterministic: bool = False
    ) -> Float[Array, "batch length {self.vocab_size}"]:
        """Logits for the token after each token of ``target``, which begins with a token that starts it."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        block = {"num_heads": self.num_heads, "dropout": self.dropout, **types}
        embed = nn.Embed(self.vocab_size, self.width, name="embed", **types)
        positions = nn.Embed(self.max_length, self.width, name="positions", **types)
        drop = nn.Dropout(self.dropout, deterministic=deterministic)
        there, written = source != self.pad, target != self.pad
        source_mask = nn.make_attention_mask(there, there, dtype=bool)
        memory_mask = nn.make_attention_mask(written, there, dtype=bool)
        mask = nn.make_attention_mask(written, written, dtype=bool) & nn.make_causal_mask(target, dtype=bool)

        memory = drop(embed(source) + positions(jnp.arange(source.shape[-1])))
        for i in range(self.depth):
            memory = EncoderBlock(name=f"enc_{i}", **block)(memory, source_mask, deterministic)
        memory = nn.LayerNorm(name="ln_enc", **types)(memory)

        x = drop(embed(target) + positions(jnp.arange(target.shape[-1])))
        for i in range(self.depth):
            x = DecoderBlock(name=f"dec_{i}", **block)(x, memory, mask, memory_mask, deterministic)
        return embed.attend(nn.LayerNorm(name="ln_dec", **types)(x))
