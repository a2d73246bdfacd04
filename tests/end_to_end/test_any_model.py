"""Any model: random stacks of layers under random pipelines equal the oracle. A failing example can be pasted into ``check``."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from jaxpp.engine.engine import open_engine
from jaxpp.options import Options
from jaxpp.schedule import SCHEDULES, Schedule, make
from jaxpp.stages.loss.aux import REDUCERS, Join
from jaxpp.stages.stacked import assembled
from jaxpp.verify import COARSE_FLOOR, GRAD_FLOOR, compare, oracle
from tests.layers import BY_NAME, EXACT, FRAMES, LAYERS, RANDOM, SKIPS, STATES, counter, floats_as, stateless, stream

TOKENS = 6
AUX = ("row_mean", "row_labels", "places", "early", "spare", "words", "row_top", "hits")  # the last two not in bfloat16


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer: what it is, whose parameters it uses (its own, or an earlier layer's; its state is its own), what skips to it."""

    kind: str
    owner: int
    frame: str = "plain"
    skip: str | None = None
    source: int = 0


@dataclasses.dataclass(frozen=True)
class Example:
    """A model, the sizes of the batches that it is given one after the other, and a pipeline."""

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
    reduced: str = "mean"
    recalled: bool = False
    weighted: bool = False
    checkpointed: bool = False
    compute: str = "float64"
    remat: str | None = None
    cuts: tuple[int, ...] | None = None
    devices: int | None = None
    seed: int = 0

    @property
    def has_state(self) -> bool:
        return any(BY_NAME[layer.kind] in STATES for layer in self.layers)

    @property
    def prng_key(self) -> Any:
        if self.key is None:
            return None
        return jax.random.PRNGKey(self.seed) if self.key == "raw" else jax.random.key(self.seed, impl=self.key)

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
    examples_each, rest = choose(2, 1, 3), choose(0, 0, 1) % microbatches
    sizes = examples_each * microbatches + rest, (3 - examples_each) * microbatches + rest
    compute = choose(*["float64"] * 5, "bfloat16")
    key = choose("threefry2x32", "raw", "rbg", None)
    barred = (() if key else RANDOM) + (EXACT if compute == "bfloat16" else ())
    kinds = [layer.__name__ for layer in LAYERS if layer not in barred]
    skips = list(SKIPS)[: 3 if compute == "bfloat16" else None]
    layers: list[Layer] = []
    for k in range(choose(2, 3, 2, 3, 4)):
        shared = choose(*[None] * 3, *(layer for layer in layers if LAYERS[BY_NAME[layer.kind]]))
        kind, owner = (choose(*kinds), k) if shared is None else (shared.kind, shared.owner)
        frames = [frame for frame in FRAMES if frame != "vmap" or BY_NAME[kind] not in STATES]
        frame, skip = choose(*["plain"] * 3, *frames), choose(*[None] * 4, *skips)
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
        batch_sizes=sizes if choose(*[False] * 5, True) and min(sizes) >= microbatches else sizes[:1],
        width=choose(4, 5, 6, 7, 8),
        length=choose(3, 4, 5),
        embedding=choose("floats", "tokens", "tied"),
        key=key,
        aux=choose(False, True),
        reduced=choose(*REDUCERS),
        recalled=choose(False, True),
        weighted=choose(False, True),
        checkpointed=choose(*[False] * 7, True),
        compute=compute,
        remat=choose(None, None, "recompute", "dots_saveable"),
        cuts=tuple(inner[: stages - 1]) if choose(False, True) and stages - 1 <= len(inner) else None,
        devices=choose(None, None, 1, 2),
        seed=choose(*range(256)),
    )


examples = st.binary(min_size=64, max_size=64).map(drawn)


def variables(example: Example) -> tuple[Any, Any, Any]:
    """Parameters, model state, and a batch of the largest size."""
    rng = np.random.default_rng(example.seed)
    width, length, size = example.width, example.length, max(example.batch_sizes)
    classes = 3 if example.embedding == "floats" else TOKENS
    dtype = "float64" if example.compute == "float64" else "float32"

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1), dtype)

    def arrays(words):
        return {name: array(*(width if c == "w" else int(c) for c in word)) for name, word in words.items()}

    params = {"embed": array(classes, width), "head": array(width, classes), "spare": array(2)}
    model_state = {}
    for k, layer in enumerate(example.layers):
        kind, own = BY_NAME[layer.kind], layer.owner == k
        params |= {f"layer_{k}": arrays(LAYERS[kind])} if own else {}
        params |= {f"join_{k}": array(2 * width, width)} if layer.skip == "concatenate" else {}
        model_state |= {f"layer_{k}": arrays(STATES[kind])} if kind in STATES else {}
        given = {"count": jnp.asarray(1), "key": jax.random.key(example.seed)}
        model_state |= {f"layer_{k}": {name: given[name] for name in STATES[kind]}} if kind in (counter, stream) else {}
    mask = rng.random((size, length)) < 0.7
    mask[:, 0] = True
    x = array(size, length, classes) if example.embedding == "floats" else rng.integers(0, TOKENS, (size, length))
    batch = {"x": x, "y": rng.integers(0, classes, (size, length)), "mask": mask}
    return params, model_state, jax.tree.map(jnp.asarray, batch)


def recall(states: Any) -> Any:
    return sum((leaf.mean() for leaf in jax.tree.leaves(states) if jnp.issubdtype(leaf.dtype, jnp.floating)), jnp.zeros(()))


def loss_of(example: Example) -> Callable[..., Any]:
    """``loss_fn(params[, model_state], batch[, key])``; the aux leaves called row_ have one row an example."""
    exact = example.compute == "float64"

    def stack(params, states, batch, keys):
        held = floats_as(params, jax.tree.map(lambda leaf: example.compute, params))
        x = batch["x"].astype(example.compute) @ held["embed"] if example.embedding == "floats" else held["embed"][batch["x"]]
        seen, positive, new = [x], [x > 0], {}
        for k, layer in enumerate(example.layers):
            kind, state = BY_NAME[layer.kind], states.get(f"layer_{k}", {})
            with jax.named_scope(f"layer_{k}"):
                key = jax.random.fold_in(keys[0], k) if keys else None
                run = FRAMES[layer.frame](kind if kind in STATES else stateless(kind))
                cast = floats_as(state, jax.tree.map(lambda leaf: example.compute, state))
                x, after = run(held[f"layer_{layer.owner}"], cast, x, batch["mask"], key)
                new |= {f"layer_{k}": floats_as(after, jax.tree.map(lambda leaf: leaf.dtype, state))} if state else {}
                if layer.skip:
                    x = SKIPS[layer.skip](held.get(f"join_{k}"), x, seen[layer.source], positive[layer.source])
                seen.append(x)
                positive.append(x > 0)
        if example.recalled:  # the state that all layers found
            x = x + recall(states).astype(x.dtype)
        head = held["embed"].T if example.embedding == "tied" else held["head"]
        return (x @ head).astype(params["head"].dtype), seen[1], new

    def loss_fn(params, *rest):
        states, batch, *keys = rest if example.has_state else ({}, *rest)
        logits, early, new = stack(params, states, batch, keys)
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][..., None], -1)[..., 0]
        loss = jnp.where(batch["mask"], losses, 0).sum() / batch["mask"].sum()
        values = logits.mean((1, 2)), batch["y"], losses.mean(0), early.mean((0, 1)), params["spare"], batch["mask"].sum()
        values += (logits.argmax(-1), (logits.argmax(-1) == batch["y"]).sum()) if exact else ()
        aux: Any = dict(zip(AUX, values, strict=False)) if example.aux else ()
        return (loss, (new, aux)) if example.has_state else (loss, aux) if example.aux else loss

    return jax.checkpoint(loss_fn) if example.checkpointed else loss_fn


def parts(example: Example, batch: Any) -> list[Any]:
    return [jax.tree.map(lambda leaf, size=size: leaf[:size], batch) for size in example.batch_sizes]


def told(example: Example) -> dict[str, str]:
    """What the user says of aux leaves: nobody could know of hits what they are of a whole batch, where layers mix examples."""
    return {"early": example.reduced} | ({"hits": "sum"} if example.compute == "float64" else {})


def options_of(example: Example) -> dict[str, Any]:
    return {"has_aux": example.aux, "weight": (lambda batch: 1 + batch["mask"].sum()) if example.weighted else None}


def expected(example: Example) -> list[tuple[Any, ...]]:
    """Loss, aux, gradients and new model state at each batch size, by the oracle."""
    with jax.enable_x64(True):
        params, model_state, batch = variables(example)
        loss_fn, key, options = loss_of(example), example.prng_key, options_of(example)
        reduced = {name: Join() for name in AUX if name.startswith("row")} | {"words": REDUCERS["sum"]}  # what nobody has to say
        reduced |= {name: REDUCERS[reducer] for name, reducer in told(example).items()}
        names = sorted(AUX if example.compute == "float64" else AUX[:-2])
        options["reducers"] = {k: reducer for k, name in enumerate(names) if (reducer := reduced.get(name))}
        results = []
        for part in parts(example, batch):
            options["model_state"] = model_state if example.has_state else None
            loss, aux, grads, *new = oracle(loss_fn, params, part, key, example.microbatches, **options)
            (model_state,) = new or ({},)
            results.append((loss, aux, grads, model_state))
        return results


def pipelined(example: Example) -> list[tuple[Any, ...]]:
    """The same, by a pipeline."""
    params, model_state, batch = variables(example)
    options = Options.of(
        loss_of(example),
        num_stages=example.made.num_stages,
        num_microbatches=example.microbatches,
        schedule=example.made,
        cuts=None if example.cuts is None else [f"layer_{k}" for k in example.cuts],
        devices=jax.devices()[: example.devices],
        remat=getattr(jax.checkpoint_policies, str(example.remat), example.remat),
        has_state=example.has_state,
        reduce_aux=told(example) if example.aux else None,
        **options_of(example),
    )
    given = (params, model_state) if example.has_state else (params,)
    engine = open_engine(options, None, given, parts(example, batch)[0], example.prng_key)
    results = []
    held = engine.layout.slicing.of(params)
    for part in parts(example, batch):
        found = engine.run("grads", engine.bring((held, model_state)), part, example.prng_key)
        model_state = jax.tree.structure(model_state).unflatten(found.model_state)
        grads = assembled(jax.tree.structure(held).unflatten(found.grads))
        results.append((found.loss, found.aux, grads, model_state))
    return results


def check(example: Example) -> None:
    """Compare a pipeline with the oracle, at each batch size."""
    exact = example.compute == "float64"
    coarsest, floor = (None, GRAD_FLOOR) if exact else (example.compute, COARSE_FLOOR)
    with jax.enable_x64(True), ThreadPoolExecutor(1) as pool:  # (the two compile side by side)
        wanted = pool.submit(expected, example)
        for found, want in zip(pipelined(example), wanted.result(), strict=True):
            compare("loss", found[0], want[0], coarsest=coarsest)
            compare("aux", found[1], want[1], coarsest=coarsest)
            compare("grads", found[2], want[2], floor=floor, coarsest=coarsest)
            compare("model_state", found[3], want[3], coarsest=coarsest)


@pytest.fixture(autouse=True, scope="module")
def quick_compiling():
    """Nearly all of the time is XLA's."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


SETTINGS = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=4, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False, **SETTINGS)
@given(examples)
def test_a_random_model_under_a_random_pipeline_equals_the_oracle(example):
    check(example)


@pytest.mark.slow
@settings(max_examples=300, **SETTINGS)
@given(examples)
def test_many_random_models_equal_the_oracle(example):
    check(example)
