"""Weights of microbatches: those that have no mean are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import LossError

PARAMS = {"w1": jnp.full((4, 4), 0.1), "w2": jnp.ones((4, 2))}
X = jnp.ones((8, 4))


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"]) ** 2)


def pipeline(loss=loss_fn, **options):
    return jaxpp.Pipeline(loss, optax.sgd(0.1), num_stages=2, **options)


def weighted(weight, **options):
    pipe = pipeline(lambda params, batch: loss_fn(params, batch["x"]), weight=weight, **{"num_microbatches": 2} | options)
    return pipe, pipe.init(PARAMS, {"x": X, "mask": jnp.ones(8)})


MEAN = "weight: the loss is a mean over microbatches, so their weights are finite numbers that do not add up to 0."
COUNTS = "return how much of a microbatch counts, such as the number of its tokens, and leave out batches in which nothing does."


@pytest.mark.parametrize("value", [0, 0.0, np.nan, jnp.float32(0), np.float64(np.nan)])
def test_a_weight_that_is_nothing_whatever_the_batch_is_refused_when_it_is_traced(value, monkeypatch):
    monkeypatch.setattr("jaxpp.runtime.compile.Programs.compile", pytest.fail)
    for call in (
        lambda: weighted(lambda batch: value),
        lambda: jaxpp.value_and_grad(loss_fn, num_stages=2, weight=lambda batch: value)(PARAMS, X),
    ):
        with pytest.raises(LossError) as error:
            call()
        shown_value = f"{float(value):g}"
        got = f"  Got: microbatch 0: {shown_value}\n       microbatch 1: {shown_value}."
        assert str(error.value) == f"{MEAN}\n{got}\n  Fix: {COUNTS}"


@pytest.mark.parametrize("options", [{}, {"data_parallel": 2}], ids=["one replica", "two replicas"])
@pytest.mark.parametrize("kind", ["numpy", "device"])
def test_weights_that_add_up_to_nothing_are_refused_in_the_first_batch_of_a_shape(options, kind):
    pipe, state = weighted(lambda batch: batch["mask"].sum(), **options)
    batch = {"x": X, "mask": jnp.zeros(8)}
    batch = jax.tree.map(np.asarray, batch) if kind == "numpy" else batch
    for _ in range(2):
        with pytest.raises(LossError, match="microbatch 1: 0"):
            pipe.step(state, batch)
    with pytest.raises(LossError, match="microbatch 0: nan"):
        pipe.step(state, batch | {"mask": jnp.full(8, jnp.nan)})
    state, metrics = pipe.step(state, batch | {"mask": jnp.ones(8)})  # nothing was lost by it
    assert jnp.isfinite(metrics.loss)


def test_a_batch_for_init_may_be_of_zeros_and_one_microbatch_may_weigh_nothing():
    pipe = pipeline(lambda params, batch: loss_fn(params, batch["x"]), num_microbatches=2, weight=lambda batch: batch["mask"].sum())
    state = pipe.init(PARAMS, {"x": X, "mask": jnp.zeros(8)})
    pipe.step(state, {"x": X, "mask": (jnp.arange(8) < 4).astype("float32")})


def test_weights_are_looked_at_once_a_shape(monkeypatch):
    pipe, state = weighted(lambda batch: batch["mask"].sum())
    batch = {"x": X, "mask": jnp.ones(8)}
    state, _ = pipe.step(state, batch)
    monkeypatch.setattr("jaxpp.lowering.microbatch_weights.Weights.look", pytest.fail)
    _, metrics = pipe.step(state, batch | {"mask": jnp.zeros(8)})
    assert jnp.isnan(metrics.loss)


def test_the_count_that_a_loss_divides_by_is_found_beside_a_key_that_it_closes_over(x64):
    noise = jax.random.key(7)

    def masked(params, batch):
        x = batch["x"] + jax.random.normal(noise, (4,))
        each = ((jnp.tanh(x @ params["w1"]) @ params["w2"]) ** 2).mean(-1)
        return (each * batch["mask"]).sum() / batch["mask"].sum()

    params = jax.tree.map(lambda leaf: leaf.astype(float), PARAMS)
    batch = {"x": jnp.arange(32.0).reshape(8, 4) / 32, "mask": jnp.array([1.0, 0, 1, 1, 0, 0, 0, 1])}
    pipe = pipeline(masked, weight="auto", num_microbatches=2)
    state = pipe.init(params, batch)
    np.testing.assert_allclose(pipe.step(state, batch)[1].loss, masked(params, batch), rtol=1e-12)
