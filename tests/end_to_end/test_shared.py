"""Batch leaves without examples: numbers, and what the user calls shared, go to every microbatch as they are."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import ArgumentError
from jaxpp.verify import compare, oracle
from tests import messages

RNG = np.random.default_rng(0)
PARAMS = {name: RNG.normal(size=(4, 4)).astype("f") for name in "abc"}
GRAPH = {"edges": RNG.normal(size=(5, 4)).astype("f"), "scale": np.float32(2)}
BATCH = {"x": RNG.normal(size=(8, 4)).astype("f"), "beta": 0.5, "graph": GRAPH}
SHARED = ("graph/*",)


def loss_fn(params, batch):
    h = jnp.tanh(batch["x"] @ params["a"]) * batch["beta"]
    h = jnp.tanh(h @ params["b"] + batch["graph"]["edges"].mean(0) * batch["graph"]["scale"])
    return jnp.mean((h @ params["c"]) ** 2) + batch["beta"] * jnp.mean(h)


def pipeline(loss=loss_fn, **options):
    given = {"num_stages": 3, "num_microbatches": 4, "broadcast": SHARED} | options
    return jaxpp.Pipeline(loss, optax.sgd(0.1), **given)


def number_of_programs(pipe):
    return len(pipe.engine.programs)


def test_numbers_and_shared_leaves_go_to_every_microbatch_and_new_values_compile_nothing():
    pipe = pipeline()
    state = pipe.init(PARAMS, BATCH)
    pipe.verify(state, BATCH)
    losses, compiled = [], []
    for beta in (0.5, 0.25, -1.5):
        batch = {**BATCH, "beta": beta, "graph": {**GRAPH, "scale": np.float32(beta)}}
        want = oracle(loss_fn, PARAMS, batch, None, 4, broadcast=SHARED)[0]
        losses.append(pipe.evaluate(state, batch).loss)
        compare("loss", losses[-1], want)
        compare("loss", pipe.step(state, batch, donate=False)[1].loss, want)
        compiled.append(number_of_programs(pipe))
    assert losses[0] != losses[1] and compiled[0] == compiled[1] == compiled[2]


NUMBERS = [2, True, np.float64(0.5), np.float32(0.5), np.int64(3), jnp.float32(0.5), np.array(0.5)]


@pytest.mark.parametrize("beta", NUMBERS, ids=repr)
def test_every_kind_of_number_is_taken(beta):
    pipe, batch = pipeline(num_stages=2), {**BATCH, "beta": beta}
    pipe.verify(pipe.init(PARAMS, batch), batch)


def test_a_python_number_takes_the_type_of_what_it_meets():
    # As under jax.jit: bfloat16 activations times a Python number are bfloat16.
    def loss(params, batch):
        h = jnp.tanh(batch["x"].astype(jnp.bfloat16) @ params["a"].astype(jnp.bfloat16)) * batch["beta"]
        return jnp.mean((h @ params["b"].astype(h.dtype)).astype(jnp.float32) ** 2), {"h": h}

    pipe = pipeline(loss, num_stages=2, has_aux=True)
    for beta, dtype in ((0.5, jnp.bfloat16), (np.float32(0.5), jnp.float32)):
        batch = {**BATCH, "beta": beta}
        state = pipe.init(PARAMS, batch)
        assert pipe.evaluate(state, batch).aux["h"].dtype == dtype
        pipe.verify(state, batch)


def test_a_shared_leaf_is_one_array_on_each_device_not_one_a_microbatch():
    pipe = pipeline(num_stages=2, num_microbatches=8)
    state = pipe.init(PARAMS, BATCH)
    _, lowered = pipe.engine.plan("update", BATCH, None)
    names = {name for line in lowered.bound.lines for name in line.inputs if name.ref.role == "batch" and name.ref.shared}
    assert names and {name.microbatch for name in names} == {-1}
    assert pipe.forecast(PARAMS, BATCH).peaks
    assert pipe.profile(state, BATCH, num_steps=1).ledger


@pytest.mark.parametrize(
    "weight",
    [pytest.param(None, marks=pytest.mark.long), lambda batch: jnp.abs(batch["x"]).sum() * batch["beta"]],
    ids=["sizes", "weight"],
)
@pytest.mark.long
def test_replicas_all_get_the_whole_of_a_shared_leaf(weight):
    pipe = pipeline(num_stages=2, num_microbatches=2, data_parallel=2, weight=weight)
    state = pipe.init(PARAMS, BATCH)
    pipe.verify(state, BATCH)
    batch = {**BATCH, "beta": 0.75}
    want = oracle(loss_fn, PARAMS, batch, None, 2, weight=weight, broadcast=SHARED, num_replicas=2)[0]
    compare("loss", pipe.evaluate(state, batch).loss, want)


@pytest.mark.long
def test_value_and_grad_weights_rows_of_aux_and_stages_by_hand_take_shared_leaves():
    def with_rows(params, batch):
        return loss_fn(params, batch), {"rows": batch["x"] @ params["a"], "edges": batch["graph"]["edges"]}

    options = {"num_stages": 2, "num_microbatches": 3, "broadcast": "graph", "has_aux": True}
    weight = lambda batch: batch["x"].shape[0] * batch["beta"]  # noqa: E731
    grad_fn = jaxpp.value_and_grad(with_rows, weight=weight, **options)
    (loss, aux), grads = grad_fn(PARAMS, BATCH)
    want = oracle(loss_fn, PARAMS, BATCH, None, 3, broadcast=("graph",), weight=weight)
    compare("loss, grads", (loss, grads), (want[0], want[2]))
    np.testing.assert_allclose(aux["rows"], BATCH["x"] @ PARAMS["a"], rtol=1e-5)
    assert aux["edges"].shape == (5, 4)
    pipe = pipeline()
    pipe.init(PARAMS, BATCH)
    x, part = {}, {**BATCH, "x": BATCH["x"][:2]}
    for stage in pipe.stages:
        x, _ = stage.forward(PARAMS, x, part)
    compare("by hand", x, loss_fn(PARAMS, part))


@pytest.mark.long
def test_from_stages_shares_the_inputs_and_targets_named():
    def first(w, x):
        return jnp.tanh(x["x"] @ w + x["bias"].sum(0))

    pipe = jaxpp.Pipeline.from_stages(
        [first, lambda w, x: x @ w], loss=lambda x, y: jnp.mean((x - y) ** 2), optimizer=optax.sgd(0.1), broadcast="0/bias"
    )
    batch = ({"x": BATCH["x"], "bias": GRAPH["edges"]}, 0.5)
    pipe.verify(pipe.init((PARAMS["a"], PARAMS["b"]), batch), batch)


REFUSED = {
    "an unknown name": ({"broadcast": ("grph/*", "graph/edge")}, BATCH),
    "everything shared": ({"broadcast": ("x", "graph")}, BATCH),
    "nested lists": ({"broadcast": ()}, [[0.5] * 30] * 30),
    "a flat batch of graphs": ({"broadcast": ()}, {"nodes": np.ones((9, 4)), "edges": np.ones((20, 4)), "n": np.ones(3)}),
    "text": ({"broadcast": ()}, {"x": np.ones((8, 4)), "name": "cat"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_is_refused(name):
    options, batch = REFUSED[name]
    messages.check("shared", REFUSED, name, lambda: pipeline(**options).init(PARAMS, batch))


def test_names_of_shared_leaves_are_texts():
    for shared in (3, ("x", 3)):
        with pytest.raises(ArgumentError, match="batch leaves for all microbatches are named by their paths"):
            pipeline(broadcast=shared)
