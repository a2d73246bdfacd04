"""A position that all layers read: each stage keeps its own, and none is sent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp
from jaxpp.forward.functions import Functions
from jaxpp.forward.ring import Lasting, Passes
from jaxpp.runtime.edges import put
from jaxpp.stages.cuts.cut_loss import StateCopy

RNG = np.random.default_rng(0)
DEPTH, WIDTH, ROOM = 4, 8, 16
PARAMS = [RNG.normal(size=(WIDTH, WIDTH)).astype("f") for _ in range(DEPTH)]


def carry():
    return {"at": jnp.int32(0), "scale": jnp.float32(0.5), "kept": [jnp.zeros((1, ROOM, WIDTH)) for _ in range(DEPTH)]}


def remember(params, carry, x):
    """Each layer adds the mean of all that it has seen; ``at`` counts, ``scale`` stays."""
    at, kept = carry["at"], []
    seen = (jnp.arange(ROOM) < at + x.shape[1])[None, :, None]
    for w, old in zip(params, carry["kept"], strict=True):
        kept.append(jax.lax.dynamic_update_slice(old, x, (0, at, 0)))
        x = jnp.tanh(x @ w) + carry["scale"] * jnp.where(seen, kept[-1], 0).sum(1, keepdims=True) / (at + x.shape[1])
    return {"at": at + x.shape[1], "scale": carry["scale"], "kept": kept}, x


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_each_stage_advances_its_own_position(num_stages):
    shapes = jax.eval_shape(carry)
    forward = jaxpp.Forward(lambda params, x: remember(params, carry(), x)[1], num_stages=num_stages)
    params = forward.init(PARAMS, np.ones((1, 3, WIDTH), "f"))
    x = RNG.normal(size=(1, 3, WIDTH)).astype("f")
    engine, leaves = forward.engine, forward.engine.leaves(params)
    passes = Passes(Functions().engine(engine, remember, x, None, carry=shapes, reduce_aux="last"), Lasting(leaves), engine)
    copies = passes.engine.layout.copies
    assert copies == tuple(StateCopy(leaf, stage) for leaf in (0, 5) for stage in range(1, num_stages))
    given = jax.tree.leaves(carry())
    given += [given[leaf] for leaf, _ in copies]
    held = [put(leaf, home) for leaf, home in zip(given, passes.engine.placed.homes.model_state, strict=True)]
    plain = carry()
    for length in (3, 1, 2):
        x = RNG.normal(size=(1, length, WIDTH)).astype("f")
        ((held, got),) = passes([held], [x])
        plain, wanted = jax.jit(remember)(PARAMS, plain, x)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
        leaves = jax.tree.leaves(plain)
        for k, leaf in enumerate(held):
            np.testing.assert_allclose(leaf, leaves[k if k < len(leaves) else copies[k - len(leaves)].leaf], rtol=1e-5, atol=1e-6)
    sent = [line.label for line in passes.prepare(x).plan.instructions if line.about.sends]
    assert len(sent) == num_stages  # the input, and one activation across each boundary
