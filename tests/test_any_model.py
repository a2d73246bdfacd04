"""Any model: random stacks of layers under random pipelines equal the oracle. A failing example can be pasted into ``check``."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import jaxpp
from jaxpp.schedule import SCHEDULES, Schedule, make
from jaxpp.verify import COARSE_FLOOR, GRAD_FLOOR, compare, oracle

TOKENS = 6
WAVE = np.cos(np.arange(8.0))  # an array that a layer closes over


def normalise(x, p, axes):
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 0.1) * p["scale"] + p["bias"]


@jax.custom_vjp
def clip(x):
    return jnp.clip(x, -1, 1)


clip.defvjp(lambda x: (clip(x), x), lambda x, g: (jnp.where(jnp.abs(x) < 2, 0.5 * g, 0),))  # another gradient than autodiff's


@jax.jit
def dense(p, x, mask, key):
    return jnp.tanh(x @ p["w"] + p["bias"])


def conv(p, x, mask, key):
    return jax.lax.conv_general_dilated(x, p["w"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")) + p["bias"]


def layer_norm(p, x, mask, key):
    return normalise(x, p, -1)


def batch_norm(p, x, mask, key):
    return normalise(x, p, (0, 1))


def attention(p, x, mask, key):
    q, k, v = (x @ w for w in p["w"])
    visible = jnp.tril(jnp.ones((x.shape[1],) * 2, bool)) & mask[:, None, :]
    scores = jnp.where(visible, q @ k.swapaxes(1, 2), -1e9 if x.dtype == jnp.float64 else -1e4)
    return jax.nn.softmax(scores) @ v


def dropout(p, x, mask, key):
    return jnp.where(jax.random.bernoulli(key, 0.75, x.shape), x / 0.75, 0)


def noise(p, x, mask, key):
    return x + p["scale"] * jax.random.normal(key, x.shape, x.dtype)


def positions(p, x, mask, key):
    return x * jnp.asarray(WAVE[: x.shape[1], None], x.dtype) + p["w"][jnp.arange(x.shape[1]) % 3]


def energy(p, x, mask, key):
    return x - 0.1 * jax.grad(lambda x: jnp.logaddexp(0, x @ p["w"]).sum())(x)


def scan(p, x, mask, key):
    return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, p["w"])[0]


def recurrent(p, x, mask, key):
    step = lambda h, x: (jnp.tanh(h @ p["w"] + x),) * 2  # noqa: E731
    return jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1)


def cond(p, x, mask, key):
    return jax.lax.cond(x[..., 0].sum() > 0.1, lambda x: jnp.tanh(x @ p["w"]), lambda x: x * p["scale"], x)


def route(p, x, mask, key):
    return jnp.einsum("blw,blwv->blv", x, p["w"][x[..., :2].argmax(-1)])


def activation(p, x, mask, key):
    return clip(p["scale"] * x)


def fourier(p, x, mask, key):
    return jnp.fft.ifft(jnp.fft.fft(x, axis=1) * jax.lax.complex(p["scale"], p["bias"]), axis=1).real


LAYERS: dict[Callable[..., Any], dict[str, str]] = {  # with the shapes of their parameters, w for the width
    dense: {"w": "ww", "bias": "w"},
    conv: {"w": "3ww", "bias": "w"},
    layer_norm: {"scale": "w", "bias": "w"},
    batch_norm: {"scale": "w", "bias": "w"},
    attention: {"w": "3ww"},
    dropout: {},
    noise: {"scale": "w"},
    positions: {"w": "3w"},
    energy: {"w": "ww"},
    scan: {"w": "2ww"},
    recurrent: {"w": "ww"},
    cond: {"w": "ww", "scale": "w"},
    route: {"w": "2ww"},
    activation: {"scale": "w"},
    fourier: {"scale": "w", "bias": "w"},
}
RANDOM = (dropout, noise)
BY_NAME = {layer.__name__: layer for layer in LAYERS}
EXACT = (cond, route, activation, fourier)  # not for bfloat16: its rounding decides otherwise, and it has no complex numbers
FRAMES: dict[str, Callable[..., Any]] = {
    "plain": lambda layer: layer,
    "checkpoint": jax.checkpoint,
    "jit": jax.jit,
    "frozen": lambda layer: lambda p, *more: layer(jax.lax.stop_gradient(p), *more),
    "vmap": lambda layer: lambda p, x, mask, key: jax.vmap(lambda x, m: layer(p, x[None], m[None], key)[0])(x, mask),
}


def add(p, x, early, positive):
    return x + early


def stop(p, x, early, positive):
    return x + jax.lax.stop_gradient(early)


def concatenate(p, x, early, positive):
    return jnp.concatenate([x, early], -1) @ p


def gate(p, x, early, positive):
    return jnp.where(positive, x, 0.5 * x)  # a bool crosses


def count(p, x, early, positive):
    return x * positive.sum(-1, keepdims=True) / x.shape[-1]  # an int crosses


SKIPS = (add, stop, concatenate, gate, count)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer: what it is, whose parameters it uses (its own, or an earlier layer's), and what skips to it from where."""

    kind: str
    owner: int
    frame: str = "plain"
    skip: str | None = None
    source: int = 0


@dataclasses.dataclass(frozen=True)
class Example:
    """A model, a batch of each size, and a pipeline."""

    layers: tuple[Layer, ...]
    schedule: str = "1f1b"
    ranks: int = 2
    stages_per_rank: int = 1
    microbatches: int = 2
    batch_sizes: tuple[int, ...] = (4,)
    width: int = 4
    length: int = 3
    embedding: str = "floats"  # or tokens, or tied: tokens whose embedding is the head
    key: str | None = None
    aux: bool = False
    weighted: bool = False
    checkpointed: bool = False
    compute: str = "float64"
    remat: str | None = None
    cuts: tuple[int, ...] | None = None
    devices: int | None = None
    seed: int = 0

    @property
    def made(self) -> Schedule:
        sizes = {"num_ranks": self.ranks, "num_microbatches": self.microbatches, "stages_per_rank": self.stages_per_rank}
        return make(self.schedule, **sizes)


def drawn(numbers: bytes) -> Example:
    """An example, one byte a choice; each choice begins with the simplest, so that hypothesis shrinks to a simple example.

    (Drawn one by one, hypothesis copies choices from one example to the next, and most of thirty are nearly the same.)
    """
    supply = iter(numbers)

    def choose(*options: Any) -> Any:
        return options[next(supply) % len(options)]

    schedule = choose(*SCHEDULES)
    recipe = SCHEDULES[schedule]
    per_rank = choose(2, 1, 3) if recipe.varies else recipe.stages_per_rank
    ranks = choose(*{1: (2, 3, 4, 1), 2: (1, 2), 3: (1,)}[per_rank])
    microbatches = choose(*(m for m in (2, 3, 4, 5, 1) if recipe.allows(ranks, m)))
    examples_each, rest = choose(2, 1, 3), choose(0, 0, 0, 1, 2) % microbatches
    sizes = examples_each * microbatches + rest, (3 - examples_each) * microbatches + rest
    compute = choose(*["float64"] * 5, "bfloat16")
    key = choose("threefry2x32", "raw", "rbg", None)
    barred = (() if key else RANDOM) + (EXACT if compute == "bfloat16" else ())
    kinds = [layer.__name__ for layer in LAYERS if layer not in barred]
    skips = [skip.__name__ for skip in (SKIPS[:3] if compute == "bfloat16" else SKIPS)]
    layers: list[Layer] = []
    for k in range(choose(2, 3, 4, 5)):
        shared = choose(*[None] * 3, *(layer for layer in layers if LAYERS[BY_NAME[layer.kind]]))
        kind, owner = (choose(*kinds), k) if shared is None else (shared.kind, shared.owner)
        frame, skip = choose(*["plain"] * 3, *FRAMES), choose(*[None] * 4, *skips)
        layers.append(Layer(kind, owner, frame, skip, choose(*range(k, -1, -1)) if skip else 0))
    stages = ranks * per_rank
    skipped = choose(*range(len(layers)))
    inner = [k for k in range(len(layers)) if k != skipped]
    return Example(
        layers=tuple(layers),
        schedule=schedule,
        ranks=ranks,
        stages_per_rank=per_rank,
        microbatches=microbatches,
        batch_sizes=sizes if choose(False, False, False, True) and min(sizes) >= microbatches else sizes[:1],
        width=choose(4, 5, 6, 7, 8),
        length=choose(3, 4, 5),
        embedding=choose("floats", "tokens", "tied"),
        key=key,
        aux=choose(False, True),
        weighted=choose(False, True),
        checkpointed=choose(*[False] * 7, True),
        compute=compute,
        remat=choose(None, None, "recompute", "dots_saveable"),
        cuts=tuple(inner[: stages - 1]) if choose(False, True) and stages - 1 <= len(inner) else None,
        devices=choose(None, None, 1, 2),
        seed=choose(*range(256)),
    )


examples = st.binary(min_size=64, max_size=64).map(drawn)


def build(example: Example) -> tuple[Callable[..., Any], Any, Any, list[Any]]:
    """The loss of an example, its parameters, a batch of the largest size and the key, if there is one."""
    rng = np.random.default_rng(example.seed)
    exact, skips = example.compute == "float64", {skip.__name__: skip for skip in SKIPS}
    width, length, size = example.width, example.length, max(example.batch_sizes)
    classes = 3 if example.embedding == "floats" else TOKENS

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1), "float64" if exact else "float32")

    params: dict[str, Any] = {"embed": array(classes, width), "head": array(width, classes), "spare": array(2)}
    for k, layer in enumerate(example.layers):
        shapes = LAYERS[BY_NAME[layer.kind]] if layer.owner == k else {}
        params[f"layer_{k}"] = {name: array(*(width if c == "w" else int(c) for c in word)) for name, word in shapes.items()}
        if layer.skip == "concatenate":
            params[f"join_{k}"] = array(2 * width, width)
    mask = rng.random((size, length)) < 0.7
    mask[:, 0] = True
    tokens = example.embedding != "floats"
    x = rng.integers(0, TOKENS, (size, length)) if tokens else array(size, length, classes)
    y = rng.integers(0, classes, (size, length))
    batch = jax.tree.map(jnp.asarray, {"x": x, "y": y, "mask": mask})

    def loss_fn(params, batch, *keys):
        held = jax.tree.map(lambda leaf: leaf.astype(example.compute), params)
        x = held["embed"][batch["x"]] if tokens else batch["x"].astype(example.compute) @ held["embed"]
        seen, positive = [x], [x > 0]
        for k, layer in enumerate(example.layers):
            with jax.named_scope(f"layer_{k}"):
                key = jax.random.fold_in(keys[0], k) if keys else None
                x = FRAMES[layer.frame](BY_NAME[layer.kind])(held[f"layer_{layer.owner}"], x, batch["mask"], key)
                if layer.skip:
                    x = skips[layer.skip](held.get(f"join_{k}"), x, seen[layer.source], positive[layer.source])
                seen.append(x)
                positive.append(x > 0)
        head = held["embed"].T if example.embedding == "tied" else held["head"]
        logits = (x @ head).astype(params["head"].dtype)
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][..., None], -1)[..., 0]
        loss = jnp.where(batch["mask"], losses, 0).sum() / batch["mask"].sum()
        aux = {"rows": logits.mean((1, 2)), "places": losses.mean(0), "early": seen[1].mean(), "spare": params["spare"]}
        aux |= {"words": batch["mask"].sum(), "labels": batch["y"]}
        aux |= {"top": logits.argmax(-1), "hits": (logits.argmax(-1) == batch["y"]).sum()} if exact else {}
        return (loss, aux) if example.aux else loss

    seed = {None: None, "raw": jax.random.PRNGKey}.get(example.key, functools.partial(jax.random.key, impl=example.key))
    return loss_fn, params, batch, [] if seed is None else [seed(example.seed)]


ROWS = ("rows", "labels", "top")


def check(example: Example) -> None:
    """Compare loss, aux and every gradient with the oracle's, at each batch size."""
    with jax.enable_x64(True):
        loss_fn, params, batch, key = build(example)
        loss_fn = jax.checkpoint(loss_fn) if example.checkpointed else loss_fn
        weight = (lambda batch: 1 + batch["mask"].sum()) if example.weighted else None
        grad_fn = jaxpp.value_and_grad(
            loss_fn,
            num_stages=example.made.num_stages,
            num_microbatches=example.microbatches,
            schedule=example.made,
            has_aux=example.aux,
            weight=weight,
            cuts=None if example.cuts is None else [f"layer_{k}" for k in example.cuts],
            devices=jax.devices()[: example.devices],
            remat=getattr(jax.checkpoint_policies, str(example.remat), example.remat),
        )
        names = sorted([*ROWS[:2], "places", "early", "spare", "words", *(["top", "hits"] if example.compute == "float64" else [])])
        rows = frozenset(k for k, name in enumerate(names) if name in ROWS)
        coarsest, floor = (None, GRAD_FLOOR) if example.compute == "float64" else (example.compute, COARSE_FLOOR)
        for size in example.batch_sizes:
            part = jax.tree.map(lambda leaf, size=size: leaf[:size], batch)
            value, found = grad_fn(params, part, *key)
            loss, aux = value if example.aux else (value, ())
            options = {"has_aux": example.aux, "weight": weight, "rows": rows}
            want = oracle(loss_fn, params, part, *(key or [None]), example.microbatches, **options)
            compare("loss", loss, want[0], coarsest=coarsest)
            compare("aux", aux, want[1], coarsest=coarsest)
            compare("grads", found, want[2], floor=floor, coarsest=coarsest)


SETTINGS = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=30, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False, **SETTINGS)
@given(examples)
def test_a_random_model_under_a_random_pipeline_equals_the_oracle(example):
    check(example)


@pytest.mark.slow
@settings(max_examples=300, **SETTINGS)
@given(examples)
def test_many_random_models_equal_the_oracle(example):
    check(example)
