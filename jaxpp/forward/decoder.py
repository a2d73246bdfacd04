"""A language model of Flax as what ``generate`` wants: a function of one sequence, and the carry of one that has had no token.

Each of three kinds of models keeps keys and values in its own way: Linen modules in a collection ``cache``, NNX modules in
variables of the type ``nnx.Cache``, Flax models of Hugging Face's transformers in ``past_key_values``. None is imported here.
Functions compare equal if they stand for the same model, so one that is made anew for each generation is traced once.
"""

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.errors import ArgumentError, is_count, shown
from jaxpp.errors.tracebacks import entry
from jaxpp.stages.loss.microbatch import raw_key
from jaxpp.types import ForwardFn, Params, Tree


@entry
def decoder(model: Any, max_length: int, **options: Any) -> tuple[ForwardFn, Tree]:
    """A language model with a cache as ``fn`` and ``carry``, which ``generate`` takes after the parameters.

    The model is a module of Flax's Linen (``decode=True`` is set where it has such a field; the cache is its collection ``cache``),
    one of NNX (attention with ``init_cache``, or a model with ``init_cache(batch, length)``; a copy gets the cache), or a Flax
    model of Hugging Face's transformers (``init_cache``). The parameters are those that the pipeline was given: for Linen the tree
    below ``"params"`` or the tree with it, for NNX the state of ``nnx.Param``, for transformers ``model.params``.

    Args:
        model: called with tokens ``[1, length]``, it gives their logits ``[1, length, vocab]``.
        max_length: for how many tokens of a sequence, its prompt included, the cache has room.
        **options: for every call of the model, such as ``deterministic=True`` or ``train=False``.

    Returns:
        ``(fn, carry)``, with ``fn(params, carry, tokens) -> (new_carry, logits)`` of one sequence.

    Raises:
        ArgumentError: a model of another kind, one without a cache, or a ``max_length`` below 1.

    Example:
        >>> import jaxpp
        >>> from models.gpt import GPT
        >>> model = GPT(vocab_size=16, max_length=8, width=8, depth=2, num_heads=2, dropout=0.0)
        >>> init, tokens = lambda key: model.init(key, jnp.ones((1, 8), int))["params"], jnp.ones((2, 8), int)
        >>> forward = jaxpp.Forward(lambda params, tokens: model.apply({"params": params}, tokens), num_stages=2)
        >>> params = forward.init(init, jax.random.key(0), tokens)
        >>> made = forward.generate(params, *jaxpp.decoder(model, 8), prompts=[[1, 2, 3], [4]], num_tokens=4).collect()
        >>> [row.shape for row in made]
        [(4,), (4,)]
    """
    if not is_count(max_length, least=1):
        rule, fix = "it is the number of tokens for which the cache has room", "pass for example max_length=256"
        raise ArgumentError("jaxpp.decoder(model, max_length)", rule, shown(max_length), fix)
    given = tuple(sorted(options.items()))
    nnx = sys.modules.get("flax.nnx")
    if callable(getattr(model, "init_cache", None)) and hasattr(model, "module") and hasattr(model, "config"):
        return _of_hugging_face(model, int(max_length), given)
    if nnx is not None and isinstance(model, nnx.Module):
        return _of_nnx(nnx, model, int(max_length), given)
    if all(callable(getattr(model, name, None)) for name in ("init", "apply", "clone")):
        return _of_linen(model, int(max_length), given)
    raise _refused(shown(model))


def _refused(got: str) -> ArgumentError:
    rule = "the model is a Linen module, an NNX module, or a Flax model of transformers, and it has a cache"
    fix = "write fn(params, carry, tokens) and its carry for this model; the guide on predictions shows how"
    return ArgumentError("jaxpp.decoder(model, max_length)", rule, got, fix)


def _zeros(shapes: Tree) -> Tree:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


@dataclass(frozen=True)
class _Linen:
    """A Linen module, whose cache is a collection."""

    model: Any
    options: tuple[tuple[str, Any], ...]

    def __call__(self, params: Params, carry: Tree, tokens: jax.Array) -> tuple[Tree, Tree]:
        variables = params if isinstance(params, Mapping) and "params" in params else {"params": params}
        logits, new = self.model.apply({**variables, "cache": carry}, tokens, mutable=["cache"], **dict(self.options))
        return new["cache"], logits


def _of_linen(model: Any, max_length: int, options: tuple[tuple[str, Any], ...]) -> tuple[ForwardFn, Tree]:
    model = model.clone(decode=True) if getattr(model, "decode", True) is not True else model
    tokens = jax.ShapeDtypeStruct((1, max_length), jnp.int32)
    shapes = jax.eval_shape(lambda key, tokens: model.init(key, tokens, **dict(options)), jax.random.key(0), tokens)
    if "cache" not in shapes:
        raise _refused(f"{type(model).__name__} with the collections {', '.join(shapes)}, and no cache among them")
    return _Linen(model, options), _zeros(shapes["cache"])


@dataclass(frozen=True, eq=False)
class _Nnx:
    """An NNX module, whose cache is a state of the type ``nnx.Cache``."""

    graph: Any
    rest: Any  # what is neither parameter nor cache, such as random keys
    options: tuple[tuple[str, Any], ...]

    def __call__(self, params: Params, carry: Tree, tokens: jax.Array) -> tuple[Tree, Tree]:
        nnx = sys.modules["flax.nnx"]
        model = nnx.merge(self.graph, params, carry, self.rest)
        logits = model(tokens, **dict(self.options))
        return nnx.state(model, nnx.Cache), logits

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Nnx) or (self.graph, self.options) != (other.graph, other.options):
            return False
        ours, theirs = ([np.asarray(raw_key(leaf)) for leaf in jax.tree.leaves(each.rest)] for each in (self, other))
        return len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))

    def __hash__(self) -> int:
        return hash(self.graph)


def _of_nnx(nnx: Any, model: Any, max_length: int, options: tuple[tuple[str, Any], ...]) -> tuple[ForwardFn, Tree]:
    model = nnx.clone(model)
    if callable(getattr(model, "init_cache", None)):
        model.init_cache(1, max_length)
    else:
        for _, module in nnx.iter_modules(model):
            if isinstance(module, nnx.MultiHeadAttention):
                module.decode = True
                module.init_cache((1, max_length, module.in_features))
    graph, _, cache, rest = nnx.split(model, nnx.Param, nnx.Cache, ...)
    if not jax.tree.leaves(cache):
        raise _refused(f"{type(model).__name__}, in which nothing has the type nnx.Cache")
    return _Nnx(graph, rest, options), jax.tree.map(jnp.zeros_like, cache)


@dataclass(frozen=True)
class _HuggingFace:
    """A Flax model of transformers, whose cache is ``past_key_values``; it wants to be told the positions of the new tokens."""

    model: Any
    max_length: int
    positions: bool
    options: tuple[tuple[str, Any], ...]

    def __call__(self, params: Params, carry: Tree, tokens: jax.Array) -> tuple[Tree, Tree]:
        given = {"attention_mask": jnp.ones((1, self.max_length), jnp.int32), "past_key_values": carry["cache"]}
        if self.positions:
            given["position_ids"] = (carry["used"] + jnp.arange(tokens.shape[1]))[None]
        output = self.model(tokens, params=params, return_dict=True, **given, **dict(self.options))
        return {"cache": output.past_key_values, "used": carry["used"] + tokens.shape[1]}, output.logits


def _of_hugging_face(model: Any, max_length: int, options: tuple[tuple[str, Any], ...]) -> tuple[ForwardFn, Tree]:
    positions = "position_ids" in inspect.signature(type(model).__call__).parameters
    cache = _zeros(jax.eval_shape(lambda: model.init_cache(1, max_length)))
    return _HuggingFace(model, max_length, positions, options), {"cache": cache, "used": jnp.int32(0)}
