"""Stages can be cut for equal times instead of equal FLOPs."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpp
from jaxpp.engine import layout
from jaxpp.errors import ArgumentError

PARAMS = [jax.random.normal(jax.random.key(k), (8, 8)) / 3 for k in range(12)]
BATCH = jnp.ones((6, 8))


def loss_fn(params, batch):
    for w in params:
        batch = jnp.tanh(batch @ w)
    return (batch**2).mean()


def looped(params, batch):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch, params["layers"])
    return (x**2).mean()


def owned(loss, params, **options):
    """How many layers each stage owns."""
    pipe = jaxpp.Pipeline(loss, optax.sgd(0.1), num_stages=3, num_microbatches=2, **options)
    state = pipe.init(params, BATCH)
    pipe.verify(state, BATCH)
    engine = pipe.engine
    sizes = [math.prod(aval.shape) // 64 for aval in jax.tree.leaves(engine.layout.params)]
    return [sum(size for size, home in zip(sizes, engine.owner, strict=True) if home == stage) for stage in range(3)]


@pytest.mark.parametrize(
    ("loss", "params"),
    [
        pytest.param(loss_fn, PARAMS, id="layers", marks=pytest.mark.long),
        pytest.param(looped, {"layers": jnp.stack(PARAMS)}, id="loop", marks=pytest.mark.long),
    ],
)
def test_a_slow_part_of_the_model_gets_fewer_layers(loss, params, monkeypatch):
    assert owned(loss, params, balance="flops") == [4, 4, 4]
    first = owned(loss, params)
    # The layers of the first stage take longer than the others.
    monkeypatch.setattr(layout, "stage_times", lambda cut, kinds, places, programs: [4.0, 1.0, 1.0])
    slow = owned(loss, params, balance="time")
    assert slow[0] < first[0] and slow[2] > first[2]


@pytest.mark.long
def test_stages_are_really_measured():
    assert sum(owned(loss_fn, PARAMS, balance="time")) == 12
    assert sum(owned(loss_fn, PARAMS, balance="time", schedule="zb-h1")) == 12


def test_an_unknown_balance_is_refused():
    with pytest.raises(ArgumentError, match=r'cut by "cost" \(estimated\), "flops" \(counted\), "time" \(measured\) or "memory"'):
        owned(loss_fn, PARAMS, balance="seconds")
