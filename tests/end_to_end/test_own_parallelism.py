"""Recipes in which a model divides its work inside a stage itself: each step equals plain JAX and communicates as it should."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp

ROOT = pathlib.Path(__file__).parents[2]
KINDS = {"shard_the_sequence": "all-gather", "ring_attention": "collective-permute", "expert_parallelism": "all-to-all"}


def defined_by(name):
    """What a recipe has defined before it makes a state; ``.ci/docs`` runs all of it."""
    source = (ROOT / "docs" / "how-to" / f"{name}.py").read_text().partition("\nstate = ")[0]
    source = re.sub(r"^jax\.config\.update\(.*$", "", source, flags=re.MULTILINE)  # conftest.py has made the devices
    names = {"__name__": name}
    exec(source, names)  # noqa: S102
    return names


def plain(name, recipe):
    """The loss of the same model without anything divided, and its parameters."""
    if name == "shard_the_sequence":
        alone = defined_by(name)
        alone["between"] = alone["whole"] = lambda x: x
        return alone["loss_fn"], alone["model"].init(alone["keys"][2], alone["batch"]["x"])
    return recipe["loss_with"](recipe["plain_attention" if name == "ring_attention" else "plain"]), recipe["params"]


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_a_recipe_equals_plain_jax_and_communicates_as_it_says(name):
    with jax.enable_x64(True):
        recipe = defined_by(name)
        pipe, batch = recipe["pipe"], recipe["batch"]
        alone, params = plain(name, recipe)
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
        loss, grads = jax.jit(jax.value_and_grad(alone))(params, batch)
        state, metrics = pipe.step(pipe.init(params, batch), batch)
        updates, _ = recipe["optimizer"].update(grads, recipe["optimizer"].init(params), params)
        np.testing.assert_allclose(metrics.loss, loss, rtol=1e-12)
        pairs = zip(jax.tree.leaves(jaxpp.gather(state.params)), jax.tree.leaves(optax.apply_updates(params, updates)), strict=True)
        for leaf, expected in pairs:
            np.testing.assert_allclose(leaf, expected, rtol=1e-12, atol=1e-12)
        found = pipe.collectives(batch)
        for program in ("F of stage 0", "F of stage 1", "B of stage 0", "B of stage 1"):
            assert found.count(KINDS[name], "model", program) > 0
