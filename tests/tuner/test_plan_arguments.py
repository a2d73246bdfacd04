"""What ``jaxpp.plan`` says of arguments that cannot be what they stand for, and the lines that it gives to paste."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpp
from jaxpp.errors import ArgumentError, JaxppError

PARAMS = {name: jax.ShapeDtypeStruct((64, 64), "float32") for name in "abcd"}
BATCH = jax.ShapeDtypeStruct((16, 64), "float32")


def loss(params, batch):
    for name in "abcd":
        batch = jnp.tanh(batch @ params[name])
    return jnp.mean(batch**2)


def planned(**options):
    return jaxpp.plan(loss, optax.adam(1e-3), PARAMS, BATCH, **{"counts": 2, "num_compiled": 0, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": ()}, "at least one kind of GPU"),
        ({"gpus": 8}, "counts how many of them"),
        ({"gpus": "0xh100"}, "target"),
        ({"price": 2.5}, "dollars for an hour"),
        ({"price": {"h100": "2"}}, "dollars for an hour"),
        ({"price": {"a100-80gb": 2}}, "dollars for an hour"),
        ({"price": {"no such": 2}}, "dollars for an hour"),
        ({"per_host": (4, 8)}, "number of GPUs of a host"),
        ({"per_host": 0}, "number of GPUs of a host"),
        ({"model": 3}, "share a stage"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_traced(options, message):
    with pytest.raises(ArgumentError, match=message):
        planned(**options)


@pytest.mark.targets
def test_a_kind_has_its_price_under_each_of_its_names_and_is_looked_at_once():
    planning = planned(gpus=("4090", "RTX 4090"), counts=1, price={"rtx-4090": 0.5}, tokens=1e6)
    (row,) = planning.rows
    assert row.cost == pytest.approx(1e6 / 16 * row.seconds.seconds / 3600 * 0.5)


@pytest.mark.targets
def test_labels_are_no_tokens():
    for labels, what, per_step in (((16,), "examples", 16), ((16, 8), "tokens", 128)):
        batch = {"x": BATCH, "y": jax.ShapeDtypeStruct(labels, "int32")}
        planning = jaxpp.plan(
            lambda p, b: loss(p, b["x"]) * b["y"].mean(), optax.adam(1e-3), PARAMS, batch, counts=1, num_compiled=0
        )
        assert planning.what == what and planning.rows[0].per_step == per_step
        assert f"{what}/s" in str(planning)


@pytest.mark.targets
def test_the_line_to_paste_has_the_options_that_were_given():
    row = planned(host="optimizer").rows[0]
    assert "host='optimizer'" in row.line


@pytest.mark.targets
def test_fewer_examples_than_replicas_leave_out_that_layout_alone():
    planning = jaxpp.plan(loss, optax.adam(1e-3), PARAMS, jax.ShapeDtypeStruct((1, 64), "float32"), counts=2, num_compiled=0)
    assert [row.layout.mesh for row in planning.rows] == ["2 x 1 x 1"]
    assert list(planning.left_out) == ["2 x H100, 1 x 2 x 1"]


@pytest.mark.targets
def test_parameters_that_are_none_are_told_as_a_pipeline_tells_it():
    with pytest.raises(JaxppError):
        jaxpp.plan(loss, optax.adam(1e-3), {"a": "no array"}, BATCH, counts=2, num_compiled=0)
