"""The outputs of a function on one device, microbatch by microbatch, and the models of the zoo as such functions."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpp.stages.loss.microbatch import sizes
from models.adapters import AdaptedMLP
from models.nnx_gpt import NNXGPT
from models.resnet import ResNet
from models.seq2seq import Seq2Seq
from models.unet import UNet
from tests.models import gpt_case, mlp_case

SIZE = 11
"""Examples of a batch: no number of microbatches but 1 divides it."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A function of ``(params[, state], batch[, key])``, what it is called with, and a batch of ``SIZE`` examples."""

    fn: Callable[..., Any]
    params: Any
    batch: Any
    key: Any = None
    state: Any = None

    def of(self, count: int) -> Any:
        """The first examples."""
        return jax.tree.map(lambda leaf: leaf[:count], self.batch)

    def with_state(self, variables: Any, *rest: Any) -> Any:
        """The function with the state as a part of its parameters."""
        return self.fn(*variables, *rest)

    def mean(self, *args: Any) -> jax.Array:
        """A loss over the same parameters."""
        return sum(jnp.mean(leaf.astype("float32") ** 2) for leaf in jax.tree.leaves(self.fn(*args)))


def plain(fn: Any, variables: Sequence[Any], batch: Any, key: Any, num_microbatches: int) -> list[Any]:
    """What ``fn`` returns for each microbatch: a jitted loop on one device."""
    leaves = jax.tree.leaves(batch)
    count = max(leaf.shape[0] for leaf in leaves if np.ndim(leaf))
    parts = sizes(count, min(count, num_microbatches))
    ends = np.cumsum(parts)
    jitted, found = jax.jit(fn), []
    for i, (end, part) in enumerate(zip(ends, parts, strict=True)):
        piece = jax.tree.map(lambda leaf, a=end - part, b=end: leaf[a:b] if np.ndim(leaf) else leaf, batch)
        found.append(jitted(*variables, piece, *([] if key is None else [jax.random.fold_in(key, i)])))
    return found


def rows(found: Sequence[Any]) -> Any:
    """The rows of all microbatches in their order."""
    return jax.tree.map(lambda *parts: np.concatenate([np.asarray(part) for part in parts]), *found)


def same(outputs: Any, wanted: Any) -> bool:
    """Whether two trees have the same bits."""
    assert jax.tree.structure(outputs) == jax.tree.structure(wanted)
    equal = []
    for pair in zip(*map(jax.tree.leaves, (outputs, wanted)), strict=True):
        a, b = map(np.asarray, pair)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        equal.append(a.tobytes() == b.tobytes())
    return all(equal)


def close(outputs: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    """Two trees agree up to a part of the largest output, and to the bit in what is no floating number."""
    assert jax.tree.structure(outputs) == jax.tree.structure(wanted)
    for (path, found), leaf in zip(jax.tree_util.tree_leaves_with_path(outputs), jax.tree.leaves(wanted), strict=True):
        a, b, name = np.asarray(found), np.asarray(leaf), jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        if jnp.issubdtype(a.dtype, jnp.inexact):
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(initial=0), 1e-30), err_msg=name)
        else:
            np.testing.assert_array_equal(a, b, err_msg=name)


def filled(init: Any, *args: Any) -> Any:
    """What ``init`` makes, filled with random numbers: quicker than to compile it."""
    rng = np.random.default_rng(0)

    def fill(leaf: Any) -> Any:
        floating = jnp.issubdtype(leaf.dtype, jnp.inexact)
        return jnp.asarray(rng.normal(size=leaf.shape) / 3 if floating else np.zeros(leaf.shape), leaf.dtype)

    return jax.tree.map(fill, jax.eval_shape(init, *args))


def tokens(length: int, seed: int, vocabulary: int = 16) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, vocabulary, (SIZE, length)).astype("int32")


def mlp() -> Model:
    case = mlp_case(batch_size=SIZE)
    fn = lambda params, batch: {"logits": case.model.apply({"params": params}, batch["x"]), "label": batch["y"]}  # noqa: E731
    return Model(fn, case.params, case.batch)


def gpt(*, sampled: bool = False) -> Model:
    case = gpt_case(batch_size=SIZE)

    def fn(params, batch, key):
        return case.model.apply({"params": params}, batch[:, :-1], rngs={"dropout": key})

    def steady(params, batch):
        return case.model.apply({"params": params}, batch[:, :-1], deterministic=True)

    return Model(fn if sampled else steady, case.params, case.batch, case.key if sampled else None)


def nnx_gpt() -> Model:
    model = NNXGPT(16, 6, 8, depth=2, num_heads=2, dropout=0.1, rngs=nnx.Rngs(0))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def fn(params, rest, batch):
        return nnx.merge(graphdef, params, rest, copy=True)(batch, deterministic=True)

    return Model(fn, params, tokens(6, 7), state=rest)


def resnet() -> Model:
    model, x = ResNet(num_classes=3, width=4, groups=(1, 1)), np.random.default_rng(3).normal(size=(SIZE, 8, 8, 1)).astype("f")
    variables = filled(model.init, jax.random.key(0), x)
    averages = jax.tree.map(jnp.abs, variables["batch_stats"])

    def fn(params, model_state, x):
        return model.apply({"params": params, **model_state}, x, train=False)

    return Model(fn, variables["params"], x, state={"batch_stats": averages})


def unet() -> Model:
    model, x = UNet(width=4, levels=2, num_groups=2), np.random.default_rng(4).normal(size=(SIZE, 8, 4, 2)).astype("f")
    return Model(lambda params, x: model.apply({"params": params}, x), filled(model.init, jax.random.key(0), x)["params"], x)


def seq2seq() -> Model:
    model = Seq2Seq(vocab_size=16, max_length=6, width=8, depth=2, num_heads=2, dropout=0.0)
    batch = {"source": tokens(5, 5), "target": tokens(6, 6)}

    def fn(params, batch):
        return model.apply({"params": params}, batch["source"], batch["target"], deterministic=True)

    return Model(fn, filled(model.init, jax.random.key(0), *batch.values())["params"], batch)


def adapters() -> Model:
    model, x = AdaptedMLP(width=8, depth=2, rank=2, num_classes=3), np.random.default_rng(8).normal(size=(SIZE, 6)).astype("f")
    return Model(lambda params, x: model.apply({"params": params}, x), filled(model.init, jax.random.key(0), x)["params"], x)


ZOO: dict[str, Callable[[], Model]] = {
    "mlp": mlp,
    "gpt": gpt,
    "gpt with dropout": lambda: gpt(sampled=True),
    "nnx_gpt": nnx_gpt,
    "resnet": resnet,
    "unet": unet,
    "seq2seq": seq2seq,
    "adapters": adapters,
}
