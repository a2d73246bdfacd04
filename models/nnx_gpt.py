"""The decoder-only transformer of gpt.py, written in Flax NNX: the parameters live in the modules, and so does their dropout.

Each ``nnx.Dropout`` keeps a key and counts its calls; that state is split from the parameters with ``nnx.split``. So is the cache
of keys and values, which a model has after ``init_cache``.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Integer

__all__ = ["NNXGPT", "Block", "CachedAttention"]


class CachedAttention(nnx.Module):
    """Attention of new tokens to themselves and to all tokens before them, whose keys and values it keeps.

    Unlike the cache of ``nnx.MultiHeadAttention(decode=True)``, which takes one token a call, it takes any number.
    """

    def __init__(self, batch: int, length: int, heads: int, features: int, dtype: jax.typing.DTypeLike):
        shape = batch, length, heads, features
        self.key, self.value = nnx.Cache(jnp.zeros(shape, dtype)), nnx.Cache(jnp.zeros(shape, dtype))
        self.index = nnx.Cache(jnp.zeros((), "int32"))

    def __call__(
        self,
        query: Float[Array, "batch length heads features"],
        key: Float[Array, "batch length heads features"],
        value: Float[Array, "batch length heads features"],
        **options: Any,
    ) -> Float[Array, "batch length heads features"]:
        """What ``nnx.dot_product_attention`` returns for the new tokens, with the same ``options`` but for the mask."""
        start = self.index[...]
        end = start + jnp.arange(1, key.shape[1] + 1)  # of what each new token attends to
        self.key[...] = jax.lax.dynamic_update_slice_in_dim(self.key[...], key, start, axis=1)
        self.value[...] = jax.lax.dynamic_update_slice_in_dim(self.value[...], value, start, axis=1)
        self.index[...] = start + key.shape[1]
        options["mask"] = jnp.arange(self.key.shape[1]) < end[:, None]
        return nnx.dot_product_attention(query, self.key[...], self.value[...], **options)


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
        self.index: nnx.Cache | None = nnx.data(None)

    def init_cache(self, batch: int, length: int, dtype: jax.typing.DTypeLike = "float32") -> None:
        """Begin to generate: each call from now on goes on where the last one ended, with one token or many, without dropout.

        ``nnx.split(model, nnx.Param, nnx.Cache, ...)`` then has the cache as a tree of its own. Call it again for an empty one.

        Args:
            batch: sequences.
            length: tokens that there is room for; they must not be overrun.
            dtype: of keys and values: the type that the model computes in.
        """
        self.index = nnx.Cache(jnp.zeros((), "int32"))
        for block in self.blocks:
            attention = block.attn
            cached = CachedAttention(batch, length, attention.num_heads, attention.head_dim, dtype)
            attention.attention_fn = nnx.data(cached)

    def __call__(
        self, tokens: Integer[Array, "batch length"], deterministic: bool = False
    ) -> Float[Array, "batch length vocab_size"]:
        """Logits for the token after each of ``tokens``."""
        mask, deterministic = nnx.make_causal_mask(tokens, dtype=bool), deterministic or self.index is not None
        x = self.embed(tokens) + self.positions(self._positions_of(tokens))
        x = self.drop(x, deterministic=deterministic)
        for block in self.blocks:
            x = block(x, mask, deterministic)
        return self.embed.attend(self.ln_f(x))

    def _positions_of(self, tokens: Integer[Array, "batch length"]) -> Integer[Array, " length"]:
        """The positions of the tokens: from 0, or where the last call ended."""
        if self.index is None:
            return jnp.arange(tokens.shape[-1])
        start = self.index[...]
        self.index[...] = start + tokens.shape[-1]
        return start + jnp.arange(tokens.shape[-1])
