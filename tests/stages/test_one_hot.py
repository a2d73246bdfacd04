"""Scatters of one element a row become arithmetic with the same bits; other scatters stay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpp.stages.graph import trace
from jaxpp.stages.jaxpr import kind_of
from jaxpp.stages.scatters import with_one_hots

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(3, 4, 7)), jnp.float32)
LABELS = jnp.asarray(RNG.integers(0, 7, (3, 4)))


def kinds(graph):
    return [kind_of(eqn) for eqn in graph.eqns]


def gradient(function, *args):
    graph, _ = trace(jax.grad(function), *args)
    return graph, with_one_hots(graph)


def run(graph, *args):
    given = [*graph.inputs, *graph.constants]
    return graph.function(range(len(graph.eqns)), given, graph.outputs)(*args, *graph.constants.values())


def cross_entropy(x, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()


def picked(axis, mode):
    def function(x, index):
        return (jnp.take_along_axis(x, index, axis, mode=mode) ** 2).sum() + jnp.tanh(x).sum()

    return function


@pytest.mark.parametrize(
    ("function", "labels"),
    [
        pytest.param(cross_entropy, LABELS, id="cross entropy"),
        pytest.param(cross_entropy, LABELS - 7, id="negative labels"),
        pytest.param(cross_entropy, LABELS.at[0, 0].set(9).at[1, 1].set(-30), id="labels beyond the classes"),
        pytest.param(picked(2, "clip"), LABELS[..., None].at[0, 0].set(9).at[1, 1].set(-30), id="clipped"),
        pytest.param(picked(2, "fill"), LABELS[..., None].at[0, 0].set(9), id="filled"),
        pytest.param(picked(0, None), LABELS[:1, :, None] % 3 + jnp.zeros((1, 4, 7), int), id="the first axis"),
        pytest.param(picked(1, None), LABELS[:, :1, None] % 4 + jnp.zeros((3, 1, 7), int), id="an axis between"),
    ],
)
def test_one_element_of_each_row_has_the_bits_of_the_scatter_without_one(function, labels):
    graph, arithmetic = gradient(function, X, labels)
    large = [eqn for eqn in graph.eqns if kind_of(eqn) == "scatter-add" and eqn.outvars[0].aval.shape == X.shape]
    assert len(large) == 1
    assert not [eqn for eqn in arithmetic.eqns if kind_of(eqn) == "scatter-add" and eqn.outvars[0].aval.shape == X.shape]
    (wanted,), (found,) = run(graph, X, labels), run(arithmetic, X, labels)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("function", "x", "index"),
    [
        pytest.param(picked(2, None), X, jnp.stack([LABELS, LABELS], -1), id="two elements of a row, which may be one"),
        pytest.param(lambda x, index: (x[index] ** 2).sum(), X[0], jnp.array([0, 1, 1, 3]), id="an embedding"),
        pytest.param(lambda x, index: (x.at[index].add(x[0]) ** 2).sum(), X[0], jnp.array([0, 1, 1, 3]), id="a scatter forward"),
    ],
)
def test_other_scatters_stay(function, x, index):
    graph, same = gradient(function, x, index)
    assert kinds(same) == kinds(graph)
    np.testing.assert_array_equal(run(same, x, index)[0], jax.grad(function)(x, index))
