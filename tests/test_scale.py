"""What grows with a model, a schedule or the number of batch shapes grows no faster than that.

Work is counted, not timed: the lines of jaxpp's own code that run while Python traces it.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpp

HOME = str(pathlib.Path(jaxpp.__file__).parent)
LINEAR = 2.4
"""Times as much work for twice as much to do."""


def lines_run(function):
    """How many lines of jaxpp run in a call."""
    count = 0

    def inner(frame, event, argument):
        nonlocal count
        count += event == "line"
        return inner

    def outer(frame, event, argument):
        return inner if frame.f_code.co_filename.startswith(HOME) else None

    before = sys.gettrace()
    sys.settrace(outer)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def loop(params, batch):
    x = batch
    for name in sorted(params):
        x = x * params[name]
    return (x**2).mean()


def scan(params, batch):
    def layer(x, rows):
        for name in sorted(rows):
            x = x * rows[name]
        return x, None

    return (jax.lax.scan(layer, batch, params)[0] ** 2).mean()


OPTIMIZERS = {
    "clip and adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-3), 2),
}


@pytest.mark.parametrize(("loss_fn", "name"), [(loop, "clip and adamw"), (loop, "MultiSteps"), (scan, "clip and adamw")])
def test_tracing_cutting_and_lowering_grow_linearly_with_parameter_leaves(loss_fn, name):
    def prepare(num_leaves):
        shape = (2, 4) if loss_fn is scan else (4,)
        params = {f"w{k:03}": jax.ShapeDtypeStruct(shape, jnp.float32) for k in range(num_leaves)}
        engine = jaxpp.Pipeline(loss_fn, OPTIMIZERS[name](), num_stages=2)._engine
        batch = jnp.ones((4, 4))

        def run():
            engine.settle((params,), batch, None)
            engine.draft("update", batch, None)

        return lines_run(run)

    assert prepare(80) < LINEAR * prepare(40)
