"""Models by the names that people call them by: numbers of ``models/gpt.py`` and ``models/llama.py``, with a loss.

Parameters are counted as their makers count them, to the last one. The weights are not here: what is planned, profiled or trained
from the beginning needs shapes alone.
"""

import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from models.gpt import GPT
from models.llama import Llama

__all__ = ["MODELS", "Named", "named"]


def _gpt(width: int, depth: int, heads: int, vocabulary: int = 50257, length: int = 1024) -> GPT:
    return GPT(vocabulary, length, width, depth, heads, dropout=0.0, dtype="bfloat16", attention="xla", scan=True)


def _llama2(width: int, depth: int, heads: int, groups: int, hidden: int) -> Llama:
    return Llama(32000, 4096, width, depth, heads, groups, hidden)


def _llama3(width: int, depth: int, heads: int, hidden: int, length: int = 8192, **switches: Any) -> Llama:
    return Llama(128256, length, width, depth, heads, 8, hidden, rope_base=5e5, **switches)


def _qwen3(width: int, depth: int, heads: int, hidden: int, vocabulary: int = 151936, *, tied: bool = False) -> Llama:
    switches = {"rope_base": 1e6, "epsilon": 1e-6, "qk_norm": True, "tied": tied}
    return Llama(vocabulary, 32768, width, depth, heads, 8, hidden, head_width=128, **switches)


def _mpt(width: int, depth: int, heads: int) -> GPT:
    return _gpt(width, depth, heads, 50368, 2048)


MODELS: Mapping[str, GPT | Llama] = {
    "gpt2-124m": _gpt(768, 12, 12),
    "gpt2-355m": _gpt(1024, 24, 16),
    "gpt2-774m": _gpt(1280, 36, 20),
    "gpt2-1.5b": _gpt(1600, 48, 25),
    "gpt-3-175b": _gpt(12288, 96, 96, length=2048),
    "mpt-125m": _mpt(768, 12, 12),
    "mpt-350m": _mpt(1024, 24, 16),
    "mpt-760m": _mpt(1536, 24, 12),
    "mpt-1b": _mpt(2048, 24, 16),
    "mpt-3b": _mpt(2560, 32, 20),
    "mpt-7b": _mpt(4096, 32, 32),
    "mpt-13b": _mpt(5120, 40, 40),
    "mpt-30b": _mpt(7168, 48, 56),
    "mpt-70b": _mpt(8192, 80, 64),
    "llama-2-7b": _llama2(4096, 32, 32, 32, 11008),
    "llama-2-13b": _llama2(5120, 40, 40, 40, 13824),
    "llama-2-70b": _llama2(8192, 80, 64, 8, 28672),
    "llama-3-8b": _llama3(4096, 32, 32, 14336),
    "llama-3-70b": _llama3(8192, 80, 64, 28672),
    "llama-3.2-1b": _llama3(2048, 16, 32, 8192, tied=True),
    "llama-3.2-3b": _llama3(3072, 28, 24, 8192, tied=True),
    "mistral-7b": Llama(32000, 8192, 4096, 32, 32, 8, 14336),
    "mixtral-8x7b": Llama(32000, 32768, 4096, 32, 32, 8, 14336, rope_base=1e6, num_experts=8),
    "qwen-2.5-7b": Llama(152064, 32768, 3584, 28, 28, 4, 18944, rope_base=1e6, epsilon=1e-6, qkv_bias=True),
    "qwen-3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen-3-8b": _qwen3(4096, 36, 32, 12288),
    "qwen-3-32b": _qwen3(5120, 64, 64, 25600),
}
"""The models. MPT is that of MosaicML's benchmarks: the shape of GPT-2 with another vocabulary. Mistral attends to all tokens; its
first version attended to the last 4,096."""


class Named(NamedTuple):
    """A model that is ready to be planned or trained.

    Attributes:
        model: the Flax module.
        loss_fn: ``loss_fn(params, tokens)``: the mean cross entropy of the next token; tokens are (sequences, length + 1).
        init: ``init(key)``: the parameters.
        batch: ``batch(sequences, length)``: the shape of tokens for the loss; the model's own length unless given.
    """

    model: GPT | Llama
    loss_fn: Callable[[Any, jax.Array], jax.Array]
    init: Callable[[jax.Array], Any]
    batch: Callable[..., jax.ShapeDtypeStruct]

    def num_params(self) -> int:
        """How many parameters there are; nothing is allocated."""
        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(self.init, jax.random.key(0))))


def named(name: str, cross_entropy: Callable[..., jax.Array] | None = None, **changes: Any) -> Named:
    """A model by its name, with the loss of a language model.

    Args:
        name: a key of ``MODELS``.
        cross_entropy: for a loss that makes no logits: ``cross_entropy(hidden, table, labels)``, of each token, such as
            ``jaxpp.linear_cross_entropy``. Without it the loss makes all logits, in the type that the model computes in.
        **changes: attributes of the module: ``attention="cudnn"``, ``depth=4``, ``scan=False``, ``param_dtype="bfloat16"``.

    Returns:
        The module, its loss, its parameters and its batch. Parameters are made without attention by cuDNN, which asks for a GPU.

    Raises:
        KeyError: no model has the name; the message has the nearest.

    Example:
        >>> named("llama-3-8b").num_params()
        8030261248
    """
    if name not in MODELS:
        near = difflib.get_close_matches(name.lower(), MODELS, 3, 0.3)
        raise KeyError(f"no model is called {name!r}; {'nearest' if near else 'known'} are {', '.join(near or MODELS)}")
    model = MODELS[name].clone(**changes)
    body = model if cross_entropy is None else model.clone(head=False)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        found: Any = body.apply({"params": params}, tokens[:, :-1])
        if cross_entropy is not None:
            table = params["head"] if "head" in params else params["embed"]["embedding"]
            return cross_entropy(found, table, tokens[:, 1:]).mean()
        found = found.astype(jnp.promote_types(found.dtype, "float32"))
        return optax.softmax_cross_entropy_with_integer_labels(found, tokens[:, 1:]).mean()

    def init(key: jax.Array) -> Any:
        plain = model.clone(attention="xla") if model.attention == "cudnn" else model
        return plain.init(key, jnp.zeros((1, 8), int))["params"]

    def batch(sequences: int, length: int | None = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((sequences, (length or model.max_length) + 1), "int32")

    return Named(model, loss_fn, init, batch)
