"""Every feature on every kind of pipeline trains as a plain loop on one device: one matrix in place of a test for each pair.

``JAXPP_WRITE_MESSAGES=1 python -m pytest tests/end_to_end/test_matrix.py -k page`` writes the page of the docs that says so.
"""

import itertools
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import PartitionSpec

import jaxpp
from jaxpp.errors import JaxppError
from jaxpp.stages.loss.aux import REDUCERS
from jaxpp.verify import GRAD_FLOOR, compare, oracle
from tests.models import gpt_case, mlp_case

STEPS = 3
D = jax.devices()
RNG = np.random.default_rng(0)
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "together.md"
X = RNG.normal(size=(16, 8))
PARAMS = {name: RNG.normal(size=(8, 8)) / 2 for name in "abcd"}
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3))


def chain(params, x, between=lambda x: x):
    for name in "abcd":
        x = jnp.tanh(between(x @ params[name]))
    return jnp.mean(x**2)


def tied(params, x):
    """Reads the first matrix again at the end."""
    return chain(params, x) + jnp.mean((jnp.tanh(x @ params["d"]) @ params["a"].T) ** 2)


def looped(params, x):
    x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])
    return jnp.mean((x @ params["out"]) ** 2)


def with_aux(params, x):
    return chain(params, x), {"size": jnp.abs(x @ params["a"]).mean(), "most": jnp.abs(x @ params["d"]).max()}


def calling(params, x):
    jax.debug.print("loss")
    return chain(params, x)


def with_key(params, x, key):
    return chain(params, x, lambda x: x * jax.random.bernoulli(key, 0.8, x.shape))


def counting(params, means, x):
    """Each stage has a running mean of its own."""
    new = {}
    for name in "abcd":
        x = jnp.tanh(x @ params[name])
        new[name] = 0.9 * means[name] + 0.1 * jax.lax.stop_gradient(x).mean(0)
        x = x + means[name]
    return jnp.mean(x**2), (new, {})


def of_task(params, own, x):
    return chain(params | {"c": params["c"] @ own["w"]}, x)


def of_task_in_two(params, own, x):
    return chain(params | {"b": params["b"] @ own["v"], "c": params["c"] @ own["w"]}, x)


def everything(params, means, x):
    """A tied layer, a loop over layers, a layer that is not trained, running statistics and aux."""
    hidden = jnp.tanh(x @ params["tied"] + params["still"])
    new = {"mean": 0.9 * means["mean"] + 0.1 * hidden.mean(0)}
    hidden = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), hidden - 0.1 * means["mean"], params["layers"])[0]
    outputs = hidden @ params["tied"].T
    return jnp.mean(outputs**2), (new, {"size": jnp.abs(outputs).mean()})


class Norms(nn.Module):
    """Layers with running statistics."""

    @nn.compact
    def __call__(self, x):
        for name in "abcd":
            x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.8, param_dtype=float, name=f"norm_{name}")(x))
            x = nn.Dense(8, use_bias=False, param_dtype=float, name=name)(x)
        return x


def normed(params, stats, x):
    y, new = Norms().apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
    return jnp.mean(y**2), (new["batch_stats"], {})


def weight(batch):
    return 1 + jnp.abs(batch).sum()


def labelled(labels, trained=CLIPPED):
    return optax.multi_transform({"frozen": optax.set_to_zero(), "free": trained}, labels)


def trained_of(names):
    return lambda params: jax.tree_util.tree_map_with_path(lambda path, _: "free" if path[-1].key in names else "frozen", params)


class Feature(NamedTuple):
    """What a pipeline is asked for beside its kind: its loss and options, and what the plain loop calls them."""

    loss: Callable[..., Any] = chain
    options: dict[str, Any] = {}  # noqa: RUF012  (nobody writes it)
    plainly: dict[str, Any] = {}  # noqa: RUF012
    params: Any = PARAMS
    optimizer: Any = CLIPPED
    means: Any = None
    own: Any = None
    key: Any = None
    batch: Any = X


ALL = {"tied": RNG.normal(size=(8, 8)) / 3, "still": RNG.normal(size=8), "layers": RNG.normal(size=(8, 8, 8)) / 3}
FEATURES = {
    "ties": Feature(tied),
    "a loop that is cut": Feature(looped, params={"w": RNG.normal(size=(8, 8, 8)) / 2, "out": RNG.normal(size=(8, 4))}),
    "frozen": Feature(optimizer=labelled({"a": "free", "b": "frozen", "c": "free", "d": "frozen"})),
    "half trained": Feature(
        options={"trains": ("b", "d")},
        optimizer=labelled({"a": "frozen", "b": "free", "c": "frozen", "d": "free"}, optax.adam(0.01)),
    ),
    "model state": Feature(counting, {"has_state": True}, means={name: np.zeros(8) for name in "abcd"}),
    "aux": Feature(with_aux, {"has_aux": True, "reduce_aux": {"most": "max"}}, {"has_aux": True, "reducers": {0: REDUCERS["max"]}}),
    "a bank": Feature(of_task, own={"w": np.eye(8) / 2}, optimizer=optax.adam(1e-2, eps=1e-3)),
    "a bank half trained": Feature(
        of_task_in_two,
        {"trains": ("b", "d", "task/w")},
        own={"v": np.eye(8) / 2, "w": np.eye(8) / 3},
        optimizer=labelled(trained_of({"b", "d", "w"}), optax.adam(1e-2, eps=1e-3)),
    ),
    "a bank with a loss scale": Feature(
        of_task, {"loss_scale": DynamicScale(scale=2.0**10)}, own={"w": np.eye(8) / 2}, optimizer=optax.adam(1e-2, eps=1e-3)
    ),
    "a loss scale": Feature(options={"loss_scale": DynamicScale(scale=2.0**10)}),
    "weights": Feature(options={"weight": weight}, plainly={"weight": weight}),
    "a sum": Feature(lambda *args: 16 * chain(*args), {"reduction": "sum"}, {"reduction": "sum"}),
    "a key": Feature(with_key, key=jax.random.key(3)),
    "momentum": Feature(tied, optimizer=optax.sgd(0.1, momentum=0.9)),
    "muon": Feature(optimizer=optax.contrib.muon(1e-2)),
    "MultiSteps": Feature(optimizer=optax.MultiSteps(optax.adam(1e-2, eps=1e-3), 2)),
    "factored moments": Feature(optimizer=optax.adafactor(1e-2, min_dim_size_to_factor=8)),
    "a fused last stage": Feature(options={"fuse": True}),
    "recompute": Feature(tied, {"remat": "recompute"}),
    "residuals in host memory": Feature(tied, {"remat": "offload"}),
    "unequal microbatches": Feature(options={"num_microbatches": 3}),
    "microbatches of one's own": Feature(with_key, key=jax.random.key(3), batch=jaxpp.Microbatches([X[:4], X, X[:8]], (1, 2, 3))),
    "an MLP": mlp_case,
    "a GPT": gpt_case,
    "everything": Feature(
        everything,
        {"has_state": True, "loss_scale": DynamicScale(scale=2.0**10), "weight": weight},
        {"weight": weight},
        params=ALL,
        optimizer=labelled({"tied": "free", "still": "frozen", "layers": "free"}),
        means={"mean": np.zeros(8)},
    ),
    "batch norm": Feature(
        normed,
        {"has_state": True},
        params={name: {"kernel": PARAMS[name]} for name in "abcd"}
        | {f"norm_{name}": {"scale": np.ones(8), "bias": np.zeros(8)} for name in "abcd"},
        means={f"norm_{name}": {"mean": np.zeros(8), "var": np.ones(8)} for name in "abcd"},
        batch=RNG.normal(size=(64, 8)),  # of a few examples it would normalise away what there is to learn
    ),
}


def of_case(case):
    """A model with aux and a key, by an optimizer that does not divide by gradients, some of which are nothing but rounding."""
    aux = {"has_aux": True, "reducers": case.reducers}
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))
    return Feature(case.loss_fn, {"has_aux": True}, aux, case.params, optimizer, key=case.key, batch=case.batch)


def over_model(path, shape):
    return PartitionSpec(*[None] * (len(shape) - 1), "model") if shape and shape[-1] % 4 == 0 else PartitionSpec()


def on_mesh(*sizes, **options):
    mesh = jax.make_mesh(sizes, ("pipe", "data", "model"), devices=D[: np.prod(sizes)])
    return {"mesh": mesh, "shardings": over_model if sizes[2] > 1 else None} | options


SHARDS = ("optimizer", "gradients", "parameters", ("gradients", "parameters"))
PIPELINES = {
    "one device each": {},
    "replicas": {"data_parallel": 2},
    **{f"replicas that divide {shard}": {"data_parallel": 2, "shard": shard} for shard in SHARDS},
    "a mesh": on_mesh(2, 2, 2),
    **{f"a mesh that divides {shard}": on_mesh(2, 2, 2, shard=shard) for shard in SHARDS},
    "four replicas in a rank": on_mesh(1, 4, 1, shard="gradients"),
    "shards alone": on_mesh(2, 1, 2),
    "a wide rank first": {"devices": [D[:2], D[2]], "shardings": over_model},
    "a wide rank last": {"devices": [D[0], D[1:3]], "shardings": over_model},
    "ranks of three widths": {"devices": [D[:2], D[2], D[3:7]], "shardings": over_model},
    "replicas of ranks of two widths": {"devices": [D[:4], D[4:6]], "shardings": over_model, "data_parallel": 2},
    "replicas of ranks of two widths that divide both": {
        "devices": [D[:2], D[2:6]],
        "shardings": over_model,
        "data_parallel": 2,
        "shard": ("gradients", "parameters"),
    },
    "steps in flow": {"delay": 1},
    "replicas in flow": {"delay": 1, "data_parallel": 2},
    "replicas in flow that divide gradients": {"delay": 1, "data_parallel": 2, "shard": "gradients"},
    "a mesh in flow": on_mesh(2, 2, 2, delay=1),
    "a wide rank in flow": {"devices": [D[:2], D[2]], "shardings": over_model, "delay": 1},
    "an optimizer in host memory in flow": {"delay": 1, "host": "optimizer"},
    "a state in host memory": {"host": "params"},
    "a late state in host memory": {"host": "params", "delay": 1},
    "a late state in host memory in parts": on_mesh(2, 2, 2, host="params", delay=1, shard=("gradients", "parameters")),
    "an optimizer in host memory": {"host": "optimizer", "data_parallel": 2},
    "an optimizer in host memory in parts": {"host": "optimizer", "data_parallel": 2, "shard": "optimizer"},
    "parameters in host memory in parts": {"host": "params", "data_parallel": 2, "shard": "parameters"},
    "a mesh that divides a state in host memory": on_mesh(2, 2, 2, host="params", shard=("gradients", "parameters")),
}


def make(loss=chain, optimizer=CLIPPED, **options):
    return jaxpp.Pipeline(loss, optimizer, **{"num_stages": 2, "num_microbatches": 2} | options)


class Refusal(NamedTuple):
    """A pair of options that is refused: how to ask for it, a part of what is said, and why it is so."""

    call: Callable[[], object]
    said: str
    why: str


WIDE = {"devices": [D[:2], D[2]], "shardings": {"a": PartitionSpec(None, "model")}}
PAIRS = {
    '`weight=` with `reduction="sum"`': Refusal(
        lambda: make(weight=weight, reduction="sum"), "a sum has none", "Weights are those of a mean, and a sum has none."
    ),
    "`jaxpp.Microbatches` in `jaxpp.tune`": Refusal(
        lambda: jaxpp.tune(chain, CLIPPED, PARAMS, jaxpp.Microbatches([X, X[:4]])),
        "pipelines are compared on a batch",
        "Candidates differ in how many microbatches they make of a batch, and these are made.",
    ),
}
"""Pairs that no column or row of the matrix has, or that are refused whatever else is asked for."""


def page() -> str:
    """The page of the documentation that says which options go together, of what the tests of this file hold."""
    numbers = {kind.replace("('gradients', 'parameters')", "both"): f"{number}" for number, kind in enumerate(PIPELINES, 1)}
    lines = [
        "# Which options go together",
        "",
        "Every feature below was trained on every kind of pipeline for three steps, evaluated and verified, and its loss,",
        "gradients and parameters, the optimizer's state and all else that it returns were those of a plain optax loop on one",
        "device, to 1e-12 in float64. Tests do so, most of them before a release, and write this page; they fail if it is wrong.",
        "",
        "| number | kind of pipeline |",
        "|---|---|",
        *(f"| {number} | {kind} |" for kind, number in numbers.items()),
        "",
        "A tick: it works, and all do. What is refused beside one another, with an error before any device works, is",
        "[below](#what-is-refused).",
        "",
        f"| feature | {' | '.join(numbers.values())} |",
        f"|---|{'---|' * len(numbers)}",
    ]
    lines += [f"| {name} | {' | '.join('✓' * len(PIPELINES))} |" for name in FEATURES]
    lines += [
        "",
        "## What is refused",
        "",
        "There is nothing that such a pair could mean, so it is refused for good.",
        "",
        '<div class="sentences refused" markdown>',
        "",
        "| refused | why |",
        "|---|---|",
        *(f"| {pair} | {it.why} |" for pair, it in PAIRS.items()),
        "",
        "</div>",
        "",
        "[Limits](limits.md#what-is-refused-and-what-to-do-instead) says what to do instead.",
        "",
    ]
    return "\n".join(lines)


def test_the_page_says_what_these_tests_hold():
    if os.environ.get("JAXPP_WRITE_MESSAGES"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_that_is_refused_is_so_before_any_device_works(pair):
    with pytest.raises(JaxppError, match=re.escape(PAIRS[pair].said)):
        PAIRS[pair].call()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cuts": ["c"], "balance": "time"}, "balance='time': the stages begin where cuts= says"),
        ({"shard": "parameters"}, "shard=['parameters']: replicas divide it"),
        (
            {"shard": "optimizer", "data_parallel": 2, "optimizer": optax.adafactor(1e-2, min_dim_size_to_factor=2)},
            "shard=['optimizer']: replicas divide an axis",
        ),
        ({"shard": "optimizer", "data_parallel": 2, "optimizer": optax.sgd(1e-2)}, "shard=['optimizer']: replicas divide an axis"),
        ({"axes": {"pipe": "stage"}}, "axes with 'stage': it says what the axes of a mesh are"),
        ({"axes": {"data": "batch", "model": ("tensor", "expert")}, "data_parallel": 2}, "axes with 'tensor', 'expert'"),
        ({"host": "optimizer", "optimizer": optax.sgd(lambda step: 0.1 / (1 + step))}, 'host="optimizer": the optimizer\'s state'),
        ({"fuse": True, "schedule": "zb-h1"}, "fuse=True: the last stage runs B right behind each F"),
        ({"delay": 1, "remat": "offload", "num_stages": 4, "num_microbatches": 8}, "delay=1: with remat"),
        ({"delay": 1, "host": "params"}, "delay=1: where parameters visit"),
        ({"delay": 1, "schedule": "gpipe"}, "delay=1: where no rank has room"),
        ({"delay": 1, "num_stages": 1}, "delay=1: where no rank has room"),
        ({"delay": 1, "loss_scale": DynamicScale(), "has_state": True}, "delay=1: where gradients decide on the model state"),
        ({"delay": 1, "loss": calling}, "delay=1: where the host is waited for"),
    ],
)
def test_an_option_that_changes_nothing_is_told(options, said):
    given = {"loss": counting} | options if "has_state" in options else options
    params = (PARAMS, FEATURES["model state"].means) if "has_state" in options else PARAMS
    with pytest.warns(jaxpp.OptionWarning, match=re.escape(said)):
        make(**given).abstract_state(params, X)


@pytest.mark.parametrize(
    "options",
    [
        {"axes": {"data": "batch"}},
        {"axes": {"model": "tensor"}, **WIDE},
        {"shard": "optimizer", "data_parallel": 2},
        {"shard": "gradients", "data_parallel": 2, "optimizer": optax.sgd(1e-2)},
        {"host": "optimizer"},
        {"fuse": True},
        {"fuse": True, "schedule": "auto"},
        {"delay": 1},
        {"delay": 1, "remat": "offload"},  # of which nothing waits
        {"delay": 1, "schedule": "zb-v", "num_stages": 4},
    ],
)
def test_an_option_that_changes_something_is_not(options):
    make(**options).abstract_state(PARAMS, X)


SCHEDULES = {"1f1b": 1, "zb-v": 2, "zb-h1": 1, "looped-bfs": 2}
"""How many stages each has on a rank. They take turns."""


SHORT = {
    ("ties", "replicas that divide gradients"),
    ("a loop that is cut", "replicas that divide parameters"),
    ("momentum", "steps in flow"),
    ("a loss scale", "steps in flow"),
    ("frozen", "an optimizer in host memory in flow"),
    ("a bank", "replicas"),
    ("everything", "a mesh"),
}


def cases():
    """Each feature on each pipeline; the names of both say which schedule."""
    for (i, name), (j, kind) in itertools.product(enumerate(FEATURES), enumerate(PIPELINES)):
        schedule = list(SCHEDULES)[(i + j) % 4 if "host" not in kind else 3]
        marks = () if (name, kind) in SHORT else pytest.mark.slow if (5 * i + j) % 4 else pytest.mark.long
        yield pytest.param(name, kind, schedule, id=f"{name}, {kind}, {schedule}", marks=marks)


def seen(means):
    return {} if means is None else {"model_state": means}


def trained_plainly(it, num_microbatches, num_replicas, *, late):
    """The loop that says what is right: with ``late``, gradients are of the parameters before the last step, and of newest sets."""
    params, loss_fn = it.params, it.loss
    if it.own is not None:
        params, loss_fn = {"theta": it.params, "own": it.own}, lambda both, x: it.loss(both["theta"], both["own"], x)
    before, opt_state, means, losses = params, it.optimizer.init(params), it.means, []
    for number in range(STEPS):
        key = None if it.key is None else jax.random.fold_in(it.key, number)
        given = it.plainly | {"num_replicas": num_replicas}
        loss, aux, grads, *new = oracle(loss_fn, before, it.batch, key, num_microbatches, **given | seen(means))
        means = new[0] if new else None
        updates, opt_state = it.optimizer.update(grads, opt_state, params)
        after = optax.apply_updates(params, updates)
        before, params = params if late else after, after
        before = before if it.own is None else before | {"own": params["own"]}
        losses.append((loss, aux, optax.tree.norm(grads)))
    loss, *_ = oracle(loss_fn, params, it.batch, key, num_microbatches, **given | seen(means))
    return params, before, opt_state, means, losses, loss


@pytest.mark.filterwarnings("ignore::UserWarning")  # of losses that mix examples, of stages that are uneven, of devices that share
@pytest.mark.parametrize(("name", "kind", "schedule"), list(cases()))
def test_every_feature_trains_on_every_pipeline_as_on_one_device(x64, name, kind, schedule):
    it, options = FEATURES[name], PIPELINES[kind]
    it = it if isinstance(it, Feature) else of_case(it("float64", batch_size=16))
    ranks = options["mesh"].shape["pipe"] if "mesh" in options else len(options.get("devices", D[:2]))
    schedule, per_rank = ("looped-bfs", 2) if ranks == 1 else (schedule, SCHEDULES[schedule])
    given = {"num_microbatches": 2} | options | it.options | {"schedule": schedule, "num_stages": ranks * per_rank}
    bank = None if it.own is None else jaxpp.Bank({"t": it.own}, it.optimizer)
    pipe = jaxpp.Pipeline(it.loss, it.optimizer, bank=bank, **given)
    state, losses = pipe.init(it.params if it.means is None else (it.params, it.means), it.batch), []
    task = {} if bank is None else {"task": "t"}
    for number in range(STEPS):
        key = () if it.key is None else (jax.random.fold_in(it.key, number),)
        state, metrics = pipe.step(state, it.batch, *key, **task)
        losses.append((metrics.loss, metrics.aux, metrics.grad_norm))
    replicas = options["mesh"].shape["data"] if "mesh" in options else options.get("data_parallel", 1)
    plainly = trained_plainly(it, given["num_microbatches"], replicas, late="delay" in options)
    params, before, opt_state, means, expected, loss = plainly
    if bank is None:
        compare("optimizer", state.opt_state, opt_state, floor=GRAD_FLOOR)
    else:
        compare("set", bank.params("t"), params["own"], floor=GRAD_FLOOR)
        params, before = params["theta"], before["theta"]
    compare("params", state.params, params, floor=GRAD_FLOOR)
    compare("losses", [loss for loss, *_ in losses], [loss for loss, *_ in expected])
    if name not in ("frozen", "half trained", "everything") and bank is None:  # of which some have no gradient, or another's
        compare("norms", [norm for *_, norm in losses], [norm for *_, norm in expected])
    if "delay" in options:
        compare("previous", state.previous, before, floor=GRAD_FLOOR)
        assert isinstance(state.previous_scale, jax.Array) == ("loss_scale" in it.options)
    if means is not None:
        compare("model state", state.model_state, means)
    elif "has_aux" in it.options:
        compare("aux", [aux for _, aux, _ in losses], [aux for _, aux, _ in expected])
    compare("evaluation", pipe.evaluate(state, it.batch, *key, **task).loss, loss)
    assert pipe.verify(state, it.batch, *key, **task)
