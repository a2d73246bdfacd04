"""A decoder-only transformer in one file: learned positions, pre-norm blocks, embedding and head tied.

``dtype`` is what it computes in, ``param_dtype`` what its parameters are kept in. ``decode=True`` is the same model with a cache of
keys and values, for generating; it has the same parameters. ``attention="cudnn"`` is attention in one kernel that keeps no scores;
``scan=True`` writes the blocks as one loop, whose parameters are stacked.
"""

import functools
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

__all__ = ["GPT", "Attention", "Block", "CachedAttention"]

Attention = Literal["flax", "xla", "cudnn"]
"""Who computes attention: ``flax.linen``, which can drop scores, or one of the implementations of ``jax.nn``."""


class CachedAttention(nn.Module):
    """Attention of new tokens to themselves and to all tokens before them, whose keys and values are in the collection ``cache``.

    Unlike the cache of ``nn.MultiHeadDotProductAttention(decode=True)``, which takes one token a call, it takes any number.
    """

    @nn.compact
    def __call__(
        self,
        query: Float[Array, "batch length heads features"],
        key: Float[Array, "batch length heads features"],
        value: Float[Array, "batch length heads features"],
        dtype: jax.typing.DTypeLike | None = None,
    ) -> Float[Array, "batch length heads features"]:
        """What ``nn.dot_product_attention`` returns for the new tokens; ``init`` makes an empty cache, as long as its tokens."""
        keys = self.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype)
        values = self.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype)
        index = self.variable("cache", "cache_index", jnp.zeros, (), "int32")
        end = index.value + jnp.arange(1, key.shape[1] + 1)  # of what each new token attends to
        all_keys = jax.lax.dynamic_update_slice_in_dim(keys.value, key, index.value, axis=1)
        all_values = jax.lax.dynamic_update_slice_in_dim(values.value, value, index.value, axis=1)
        if not self.is_initializing():
            keys.value, values.value, index.value = all_keys, all_values, index.value + key.shape[1]
        mask = jnp.arange(all_keys.shape[1]) < end[:, None]
        return nn.dot_product_attention(query, all_keys, all_values, mask=mask, dtype=dtype)


class Block(nn.Module):
    """Attention, then a two-layer MLP, each added to the residual stream."""

    num_heads: int
    dropout: float
    dtype: jax.typing.DTypeLike | None
    param_dtype: jax.typing.DTypeLike
    decode: bool = False
    attention: Attention = "flax"

    @nn.compact
    def __call__(
        self, x: Float[Array, "batch length width"], mask: Bool[Array, "batch 1 length length"] | None, deterministic: bool
    ) -> Float[Array, "batch length width"]:
        """Hidden states to hidden states; ``mask`` says which positions each position may attend to, unless there is a cache.

        Attention of ``jax.nn`` is causal without a mask, and drops no scores.
        """
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        width = x.shape[-1]
        h = nn.LayerNorm(name="ln_1", **types)(x)
        attend: Any = nn.dot_product_attention  # with the mask
        if self.decode:
            attend = CachedAttention(name="cached")
        elif self.attention != "flax":
            attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=self.attention)
        attention = nn.MultiHeadDotProductAttention(
            self.num_heads, dropout_rate=self.dropout, attention_fn=attend, name="attn", **types
        )
        h = attention(h, mask=mask, deterministic=deterministic)
        x = x + nn.Dropout(self.dropout, deterministic=deterministic)(h)
        h = nn.LayerNorm(name="ln_2", **types)(x)
        h = nn.gelu(nn.Dense(4 * width, name="fc", **types)(h))
        h = nn.Dense(width, name="proj", **types)(h)
        return x + nn.Dropout(self.dropout, deterministic=deterministic)(h)


def _scanned(block: nn.Module, x: jax.Array, *constant: Any) -> tuple[jax.Array, None]:
    """A block as the body of a loop, which collects nothing."""
    return block(x, *constant), None  # pyright: ignore[reportCallIssue]


class GPT(nn.Module):
    """Predicts the next token.

    To generate, clone it with ``decode=True``. Each call then goes on where the last one ended, with one token or many, without
    dropout. The cache is as long as the tokens that ``init`` is given, and must not be overrun. An empty one for each sequence::

        decoder = model.clone(decode=True)
        shapes = jax.eval_shape(decoder.init, jax.random.key(0), jnp.ones((1, 512), int))["cache"]  # a cache of 512 tokens
        cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        logits, updated = decoder.apply({"params": params, "cache": cache}, tokens, mutable=["cache"])

    Attributes:
        vocab_size: tokens there are.
        max_length: the longest sequence.
        width: features of the residual stream.
        depth: blocks.
        num_heads: attention heads a block.
        dropout: rate, after the embedding, in the attention and after each half of a block.
        dtype: type to compute in; None follows the parameters.
        param_dtype: type of the parameters.
        attention: who computes it: ``"flax"``, or ``jax.nn`` by ``"xla"`` or ``"cudnn"``, which drop no scores.
        scan: whether the blocks are one loop over stacked parameters, ``h``, instead of ``h_0``, ``h_1``, ...: quicker to trace,
            cut and compile.
        checkpoint: whether the backward runs each block's forward again (``jax.checkpoint``), of which its input alone is kept.
        decode: whether to keep the keys and values of the tokens so far, for those of later calls.
        head: whether to return logits. Without a head it returns what the head would read, for a loss that makes no logits::

            hidden = model.clone(head=False).apply({"params": params}, tokens)
            loss = jaxpp.linear_cross_entropy(hidden, params["embed"]["embedding"], labels)
    """

    vocab_size: int = 256
    max_length: int = 128
    width: int = 128
    depth: int = 8
    num_heads: int = 4
    dropout: float = 0.1
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = "float32"
    decode: bool = False
    head: bool = True
    attention: Attention = "flax"
    scan: bool = False
    checkpoint: bool = False

    @nn.compact
    def __call__(
        self, tokens: Integer[Array, "batch length"], deterministic: bool = False
    ) -> Float[Array, "batch length features"]:
        """Logits for the token after each of ``tokens``; without a head the hidden states that they are made of."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        embed = nn.Embed(self.vocab_size, self.width, name="embed", **types)
        positions = nn.Embed(self.max_length, self.width, name="positions", **types)
        mask = nn.make_causal_mask(tokens, dtype=bool) if self.attention == "flax" and not self.decode else None
        deterministic = deterministic or self.decode
        x = embed(tokens) + positions(self._positions_of(tokens))
        x = nn.Dropout(self.dropout, deterministic=deterministic)(x)
        kind: Any = nn.remat(Block, prevent_cse=not self.scan, static_argnums=(3,)) if self.checkpoint else Block
        block = functools.partial(kind, self.num_heads, self.dropout, decode=self.decode, attention=self.attention, **types)
        for i in range(0 if self.scan else self.depth):
            x = block(name=f"h_{i}")(x, mask, deterministic)
        if self.scan:
            rngs = {"params": True, "dropout": True}
            loop: Any = nn.scan(_scanned, {"params": 0, "cache": 0}, split_rngs=rngs, length=self.depth, in_axes=nn.broadcast)  # pyright: ignore[reportArgumentType]
            x, _ = loop(block(name="h"), x, mask, deterministic)
        x = nn.LayerNorm(name="ln_f", **types)(x)
        return embed.attend(x) if self.head else x

    def _positions_of(self, tokens: Integer[Array, "batch length"]) -> Integer[Array, " length"]:
        """The positions of the tokens: from 0, or where the last call ended."""
        if not self.decode:
            return jnp.arange(tokens.shape[-1])
        index = self.variable("cache", "cache_index", jnp.zeros, (), "int32")
        start = index.value
        if not self.is_initializing():
            index.value = start + tokens.shape[-1]
        return start + jnp.arange(tokens.shape[-1])
