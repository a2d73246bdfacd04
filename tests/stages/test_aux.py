"""Aux of the microbatches becomes aux of the step: averaged, joined, or as the user says."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import ArgumentError, LossError

PARAMS = {"a": jnp.eye(4), "b": jnp.ones((4, 3))}
BATCH = jnp.asarray(np.random.default_rng(0).normal(size=(10, 4)), jnp.float32)


def loss_fn(params, batch):
    y = jnp.tanh(batch @ params["a"]) @ params["b"]
    counts = {"positive": (y > 0).sum(), "rows": jnp.asarray(y.shape[0])}
    return (y**2).mean(), {"counts": counts, "largest": y.max(), "mean": y.mean(), "y": y, "sums": y.sum(0)}


def aux_of(reduce_aux, loss=loss_fn, num_microbatches=4):
    options = {"num_stages": 2, "num_microbatches": num_microbatches, "has_aux": True}
    (_, aux), _ = jaxpp.value_and_grad(loss, reduce_aux=reduce_aux, **options)(PARAMS, BATCH)
    return aux


def test_each_leaf_is_reduced_as_its_path_says_and_the_others_as_ever():
    def spread(values, weights):
        return jnp.sqrt((weights * values**2).sum() - (weights * values).sum() ** 2)

    aux = aux_of({"counts": "sum", "counts/rows": "stack", "largest": "max", "sums": "last", "mean": spread})
    plain = loss_fn(PARAMS, BATCH)[1]
    pieces = [loss_fn(PARAMS, piece)[1] for piece in jnp.split(BATCH, (3, 6, 8))]
    assert int(aux["counts"]["positive"]) == int(plain["counts"]["positive"])
    np.testing.assert_array_equal(aux["counts"]["rows"], [3, 3, 2, 2])
    np.testing.assert_allclose(aux["largest"], plain["largest"], rtol=1e-6)
    np.testing.assert_allclose(aux["y"], plain["y"], rtol=1e-5)
    np.testing.assert_allclose(aux["sums"], pieces[-1]["sums"], rtol=1e-5)
    means, weights = np.array([piece["mean"] for piece in pieces]), np.array([3, 3, 2, 2]) / 10
    np.testing.assert_allclose(aux["mean"], np.sqrt((weights * means**2).sum() - (weights * means).sum() ** 2), rtol=1e-4)


@pytest.mark.parametrize(("name", "expected"), [("min", 2), ("sum", 10), ("mean", 2.6), ("join", [3, 3, 2, 2])])
def test_one_name_is_for_all(name, expected):
    aux = aux_of(name, lambda params, batch: (loss_fn(params, batch)[0], jnp.full(1 if name == "join" else (), batch.shape[0])))
    np.testing.assert_allclose(aux, expected, rtol=1e-6)


def test_verify_and_evaluate_reduce_alike():
    pipe = jaxpp.Pipeline(
        loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=4, has_aux=True, reduce_aux={"counts": "sum", "y": "stack"}
    )
    batch = BATCH[:8]
    state = pipe.init(PARAMS, batch)
    pipe.verify(state, batch)
    assert pipe.evaluate(state, batch).aux["y"].shape == (4, 2, 3)
    other = pipe.evaluate(state, batch, loss_fn=lambda p, b: (loss_fn(p, b)[0], {"counts": jnp.asarray(1)}))
    assert int(other.aux["counts"]) == 4


@pytest.mark.parametrize(
    ("reduce_aux", "lines"),
    [
        ("average", ["reduce_aux: an aux leaf is reduced by 'mean', 'join',", "Got: 'average'.", '{"num_correct": "sum"}']),
        ({"mean": 3}, ["'mean': 3"]),
        ({"larges": "max"}, ["each path is one of the loss's aux leaves", "Got: 'larges'.", "write 'largest'"]),
    ],
)
def test_what_is_no_reducer_or_no_leaf_is_refused(reduce_aux, lines):
    with pytest.raises(ArgumentError) as caught:
        aux_of(reduce_aux)
    assert all(line in str(caught.value) for line in lines), str(caught.value)


@pytest.mark.parametrize(
    ("aux", "reduce_aux", "lines"),
    [
        (lambda batch: {"name": "x"}, None, ["every aux leaf is an array or a number", "aux['name']: str"]),
        (
            lambda batch: {"key": jax.random.key(batch[0, 0].astype(int))},
            None,
            ["without an average needs another reducer", "aux key: key<fry>[]"],
        ),
        (
            lambda batch: {"w": batch @ batch.T @ batch @ batch.T},
            {"w": "sum"},
            ["one shape at all microbatches", "aux w: f32[3,3] and f32[2,2]"],
        ),
        (lambda batch: batch.T, "sum", ["aux itself: f32[4,3] and f32[4,2]", "move the examples to the first axis"]),
    ],
)
def test_aux_that_cannot_be_reduced_is_refused(aux, reduce_aux, lines):
    with pytest.raises(LossError) as caught:
        aux_of(reduce_aux, lambda params, batch: (loss_fn(params, batch)[0], aux(batch)))
    assert all(line in str(caught.value) for line in lines), str(caught.value)


def test_a_sum_counts_what_is_true():
    assert int(aux_of("sum", lambda params, batch: (loss_fn(params, batch)[0], batch.shape[0] > 0))) == 4


def test_a_reducer_that_fails_is_refused_with_its_path():
    with pytest.raises(ArgumentError, match=r"reduce_aux for counts/rows: a reducer makes one array"):
        aux_of({"counts/rows": "join"})


def test_a_key_can_be_the_last_one():
    aux = aux_of("last", lambda params, batch: (loss_fn(params, batch)[0], jax.random.key(3)))
    assert jax.random.key_data(aux).tolist() == [0, 3]
