"""A decoder-only transformer in one file, as Llama has made it usual: RMSNorm, rotary positions, grouped queries, SwiGLU.

Llama 2 and 3, Mistral, Qwen 2.5 and 3 differ in numbers and in three switches, and Mixtral has experts instead of the MLP;
``models/named.py`` has their numbers. By default it computes in bfloat16 with parameters in float32, its layers are one loop over
stacked parameters, and nothing is dropped.
"""

import functools
import math
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

__all__ = ["Attention", "Experts", "Layer", "Llama", "SwiGLU", "rotated"]


def rotated(x: Float[Array, "batch length heads features"], base: float) -> Float[Array, "batch length heads features"]:
    """Each pair of features, one of the first half and one of the second, turned by its position times a frequency of its own.

    The frequencies of the pairs fall from 1 to nearly ``1 / base``.

    References:
        Su et al., RoFormer, arXiv 2104.09864.
    """
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype="float32") / half)
    angles = jnp.arange(x.shape[1], dtype="float32")[:, None, None] * frequencies
    first, second = x[..., :half].astype("float32"), x[..., half:].astype("float32")
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class Attention(nn.Module):
    """Causal attention of groups of query heads to a key head each.

    Attributes:
        num_heads: query heads.
        num_kv_heads: heads of keys and of values, a divisor.
        head_width: features of a head.
        rope_base: of the rotary positions.
        qkv_bias: whether queries, keys and values have biases.
        qk_norm: whether queries and keys are normalised, head by head.
        epsilon: of that norm.
        implementation: of ``jax.nn.dot_product_attention``.
        types: what it computes in, and what its parameters are.
    """

    num_heads: int
    num_kv_heads: int
    head_width: int
    rope_base: float
    qkv_bias: bool
    qk_norm: bool
    epsilon: float
    implementation: Literal["xla", "cudnn"]
    types: Any

    @nn.compact
    def __call__(self, x: Float[Array, "batch length width"]) -> Float[Array, "batch length width"]:
        """Hidden states to what is added to them."""
        project = functools.partial(nn.DenseGeneral, use_bias=self.qkv_bias, **self.types)
        query = project((self.num_heads, self.head_width), name="query")(x)
        key = project((self.num_kv_heads, self.head_width), name="key")(x)
        value = project((self.num_kv_heads, self.head_width), name="value")(x)
        if self.qk_norm:
            query = nn.RMSNorm(self.epsilon, name="query_norm", **self.types)(query)
            key = nn.RMSNorm(self.epsilon, name="key_norm", **self.types)(key)
        query, key = rotated(query, self.rope_base), rotated(key, self.rope_base)
        found = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=self.implementation)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=False, name="out", **self.types)(found)


class SwiGLU(nn.Module):
    """An MLP whose hidden features are gated: ``down(silu(gate(x)) * up(x))``."""

    hidden: int
    types: Any

    @nn.compact
    def __call__(self, x: Float[Array, "batch length width"]) -> Float[Array, "batch length width"]:
        """Hidden states to what is added to them."""
        project = functools.partial(nn.Dense, use_bias=False, **self.types)
        gated = nn.silu(project(self.hidden, name="gate")(x)) * project(self.hidden, name="up")(x)
        return project(x.shape[-1], name="down")(gated)


class Experts(nn.Module):
    """MLPs of which each token takes the few that its router likes best, weighted by a softmax over these few.

    Every expert has room for a fixed number of the tokens of each sequence, since shapes are fixed: ``room`` times its equal share.
    Tokens beyond it pass without that expert. Sequences do not compete, so a microbatch's result is that of its sequences alone.

    Attributes:
        hidden: features inside each expert.
        num_experts: how many there are.
        num_chosen: how many a token takes.
        room: of an expert, over its equal share.
        types: what it computes in, and what its parameters are.

    References:
        Jiang et al., Mixtral of Experts, arXiv 2401.04088; Lepikhin et al., GShard, arXiv 2006.16668, for the room.
    """

    hidden: int
    num_experts: int
    num_chosen: int
    room: float
    types: Any

    @nn.compact
    def __call__(self, x: Float[Array, "batch length width"]) -> Float[Array, "batch length width"]:
        """Hidden states to what is added to them."""
        batch, length, width = x.shape
        router = nn.Dense(self.num_experts, use_bias=False, name="router", **self.types)(x).astype("float32")
        liked, chosen = jax.lax.top_k(router, self.num_chosen)
        weights = jax.nn.softmax(liked).astype(x.dtype)
        size = math.ceil(self.room * length * self.num_chosen / self.num_experts)
        asked = jax.nn.one_hot(chosen.reshape(batch, -1), self.num_experts, dtype="int32")
        turn = (jnp.cumsum(asked, axis=1) * asked).sum(-1) - 1  # of each choice among those of its expert
        place = jnp.where(turn < size, chosen.reshape(batch, -1) * size + turn, self.num_experts * size)
        tokens = jnp.repeat(x, self.num_chosen, axis=1)
        rooms = jax.vmap(lambda at, of: jnp.zeros((self.num_experts * size, width), x.dtype).at[at].set(of, mode="drop"))
        inside = rooms(place, tokens).reshape(batch, self.num_experts, size, width)
        made = self._mlps(inside).reshape(batch, self.num_experts * size, width)
        back = jax.vmap(lambda at, of: of.at[at].get(mode="fill", fill_value=0))(place, made)
        return (back.reshape(batch, length, self.num_chosen, width) * weights[..., None]).sum(2)

    def _mlps(self, x: Float[Array, "batch experts room width"]) -> Float[Array, "batch experts room width"]:
        """Each expert's SwiGLU of the tokens in its room."""
        inner, outer = (self.num_experts, x.shape[-1], self.hidden), (self.num_experts, self.hidden, x.shape[-1])
        init = nn.initializers.lecun_normal(in_axis=1, out_axis=2, batch_axis=0)
        gate, up, down = (
            self.param(name, init, shape, self.types["param_dtype"]).astype(x.dtype)
            for name, shape in (("gate", inner), ("up", inner), ("down", outer))
        )
        gated = nn.silu(jnp.einsum("bemw,ewh->bemh", x, gate)) * jnp.einsum("bemw,ewh->bemh", x, up)
        return jnp.einsum("bemh,ehw->bemw", gated, down)


class Layer(nn.Module):
    """Attention, then an MLP or experts, each of the normalised residual stream and added to it."""

    attention: Any
    mlp: Any
    epsilon: float
    types: Any

    @nn.compact
    def __call__(self, x: Float[Array, "batch length width"]) -> Float[Array, "batch length width"]:
        """Hidden states to hidden states."""
        norm = functools.partial(nn.RMSNorm, self.epsilon, **self.types)
        x = x + self.attention(name="attention")(norm(name="norm_1")(x))
        return x + self.mlp(name="mlp")(norm(name="norm_2")(x))


def _scanned(layer: nn.Module, x: jax.Array, _: None) -> tuple[jax.Array, None]:
    """A layer as the body of a loop, which reads and collects nothing."""
    return layer(x), None  # pyright: ignore[reportCallIssue]


class Llama(nn.Module):
    """Predicts the next token.

    Attributes:
        vocab_size: tokens there are.
        max_length: the sequences that it was trained on; no shape depends on it.
        width: features of the residual stream.
        depth: layers.
        num_heads: query heads a layer.
        num_kv_heads: heads of keys and values a layer.
        hidden: features inside the MLP, or inside each expert.
        head_width: features of a head; None for ``width / num_heads``.
        rope_base: of the rotary positions.
        epsilon: of the norms.
        qkv_bias: whether queries, keys and values have biases (Qwen 2.5).
        qk_norm: whether queries and keys are normalised (Qwen 3).
        tied: whether the head is the embedding.
        num_experts: experts in place of the MLP; none without.
        num_chosen: experts that a token takes.
        room: of an expert, over its equal share of the tokens of a sequence.
        attention: who computes it, as ``jax.nn.dot_product_attention`` calls it. ``"cudnn"`` keeps no scores.
        scan: whether the layers are one loop over stacked parameters, ``layers``, instead of ``layers_0``, ``layers_1``, ...:
            quicker to trace, cut and compile.
        checkpoint: whether the backward runs each layer's forward again (``jax.checkpoint``), of which its input alone is kept.
        dtype: type to compute in; None follows the parameters.
        param_dtype: type of the parameters.
        head: whether to return logits. Without a head it returns what the head would read, for a loss that makes no logits
            (``jaxpp.linear_cross_entropy``); the table is ``params["head"]``, or the embedding where they are tied.
    """

    vocab_size: int = 256
    max_length: int = 128
    width: int = 128
    depth: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    hidden: int = 352
    head_width: int | None = None
    rope_base: float = 10000.0
    epsilon: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    num_experts: int = 0
    num_chosen: int = 2
    room: float = 1.25
    attention: Literal["xla", "cudnn"] = "xla"
    scan: bool = True
    checkpoint: bool = False
    dtype: jax.typing.DTypeLike | None = "bfloat16"
    param_dtype: jax.typing.DTypeLike = "float32"
    head: bool = True

    @nn.compact
    def __call__(self, tokens: Integer[Array, "batch length"]) -> Float[Array, "batch length features"]:
        """Logits for the token after each of ``tokens``; without a head the hidden states that they are made of."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        embed = nn.Embed(self.vocab_size, self.width, name="embed", **types)
        x = embed(tokens)
        kind: Any = nn.remat(Layer, prevent_cse=not self.scan) if self.checkpoint else Layer
        layer = functools.partial(kind, self._attention(types), self._mlp(types), self.epsilon, types)
        for i in range(0 if self.scan else self.depth):
            x = layer(name=f"layers_{i}")(x)
        if self.scan:
            loop: Any = nn.scan(_scanned, {"params": 0}, split_rngs={"params": True}, length=self.depth)
            x, _ = loop(layer(name="layers"), x, None)
        x = nn.RMSNorm(self.epsilon, name="norm", **types)(x)
        if self.tied:
            return embed.attend(x) if self.head else x
        table = self.param("head", nn.initializers.lecun_normal(1, 0), (self.vocab_size, self.width), self.param_dtype)
        return x @ table.astype(x.dtype).T if self.head else x

    def _attention(self, types: Any) -> Any:
        heads = self.num_heads, self.num_kv_heads, self.head_width or self.width // self.num_heads
        options = self.rope_base, self.qkv_bias, self.qk_norm, self.epsilon, self.attention
        return functools.partial(Attention, *heads, *options, types)

    def _mlp(self, types: Any) -> Any:
        if not self.num_experts:
            return functools.partial(SwiGLU, self.hidden, types)
        return functools.partial(Experts, self.hidden, self.num_experts, self.num_chosen, self.room, types)
