"""A pipeline that is built again in a process compiles nothing; one that differs in anything does what it says."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.runtime.compile import BEFORE, CompiledBefore, Executable, settings
from jaxpp.stages.fingerprint import fingerprint
from jaxpp.stages.graph import trace

COMPILED: list[str] = []


@pytest.fixture(autouse=True, scope="module")
def listener():
    def note(event, _, **__):
        if event.endswith("backend_compile_duration"):
            COMPILED.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)


def make(scale=1.0, constant=(1.0, 2.0), activation=jnp.tanh, rate=0.1, host=None):
    """A pipeline of three layers, made of new functions each time."""
    constant = jnp.asarray(constant)

    def loss_fn(params, batch):
        for w in params:
            batch = activation(batch @ w) * scale + constant
        if host is not None:
            batch = jax.pure_callback(host, jax.ShapeDtypeStruct(batch.shape, batch.dtype), jax.lax.stop_gradient(batch)) + batch
        return jnp.mean(batch**2)

    pipe = jaxpp.Pipeline(loss_fn, optax.adam(rate), num_stages=3, num_microbatches=2)
    init = lambda key: [jax.random.normal(k, (2, 2)) for k in jax.random.split(key, 3)]  # noqa: E731
    return pipe, loss_fn, init


def losses(**options):
    pipe, _, init = make(**options)
    batch = jnp.linspace(-1, 1, 8).reshape(4, 2)
    state = pipe.init(init, jax.random.key(0), batch)
    found = []
    for _ in range(2):
        state, metrics = pipe.step(state, batch)
        found.append(float(metrics.loss))
    return found


def plain_losses(**options):
    _, loss_fn, init = make(**options)
    optimizer, batch = optax.adam(options.get("rate", 0.1)), jnp.linspace(-1, 1, 8).reshape(4, 2)
    params, found = init(jax.random.key(0)), []
    state = optimizer.init(params)
    for _ in range(2):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        found.append(float(loss))
    return found


def test_an_identical_pipeline_compiles_nothing():
    expected = losses()
    before = len(COMPILED)
    assert losses() == expected
    assert len(COMPILED) == before


def test_after_clear_caches_everything_is_compiled_again():
    expected = losses()
    jax.clear_caches()
    before = len(COMPILED)
    assert losses() == expected
    assert len(COMPILED) >= before + 9, "three stages have a forward, a backward and an update each"


@pytest.mark.parametrize(
    "options",
    [{"scale": 0.5}, {"constant": (1.0, 3.0)}, {"activation": jnp.sin}, {"activation": jax.nn.softplus}, {"rate": 0.2}],
    ids=["a number", "an array", "a function", "a function with a derivative of its own", "the optimizer"],
)
def test_pipelines_that_differ_in(options):
    losses()
    np.testing.assert_allclose(losses(**options), plain_losses(**options), rtol=1e-5)


def test_derivative_rules_that_differ_are_told_apart():
    def with_slope(slope):
        @jax.custom_vjp
        def same(x):
            return jnp.tanh(x)

        same.defvjp(lambda x: (same(x), None), lambda _, cotangent: (slope * cotangent,))
        return same

    for slope in (1.0, 2.0, 1.0):
        np.testing.assert_allclose(losses(activation=with_slope(slope)), plain_losses(activation=with_slope(slope)), rtol=1e-5)


def test_functions_on_the_host_are_told_apart():
    for add in (0.0, 1.0):
        host = lambda x, add=add: np.asarray(x) + np.float32(add)  # noqa: E731
        np.testing.assert_allclose(losses(host=host), plain_losses(host=host), rtol=1e-5)


def test_a_setting_that_may_change_what_is_compiled_compiles_again():
    losses()
    before = len(COMPILED)
    with jax.default_matmul_precision("highest"):
        losses()
    assert len(COMPILED) > before
    with jax.numpy_rank_promotion("warn"):
        changed = settings()
    assert changed != settings()


def test_what_is_remembered_holds_neither_the_loss_nor_its_arrays():
    pipe, loss_fn, init = make(constant=np.ones(2))
    pipe.init(init, jax.random.key(0), jnp.ones((4, 2)))
    (constant,) = [cell.cell_contents for cell in loss_fn.__closure__ if isinstance(cell.cell_contents, jax.Array)]
    held = [weakref.ref(part) for part in (pipe, pipe.engine, loss_fn, constant, *pipe.engine.programs._compiled)]
    del pipe, loss_fn, init, constant
    gc.collect()
    assert not [ref() for ref in held if ref() is not None]
    assert len(BEFORE) > 0


def test_the_least_recently_used_is_forgotten():
    compiled = jax.jit(jnp.sin).lower(1.0).compile()
    known, made = CompiledBefore(2), [Executable(compiled, name) for name in "abc"]
    for executable in made[:2]:
        known.add(executable.name, executable)
    assert known.get("a") is made[0]
    known.add("c", made[2])
    assert [known.get(name) for name in "abc"] == [made[0], None, made[2]]
    assert len(known) == 2


def _fingerprint(function, *args):
    graph, _ = trace(function, *args)
    return fingerprint(graph.eqns, graph.inputs, graph.outputs, graph.constants)


def _loop(length, factor):
    return lambda x: jax.lax.scan(lambda c, _: (c * factor, None), x, length=length)[0]


_ONE = jnp.ones(3)
_DIFFERENT = {
    "sin": (jnp.sin, _ONE),
    "cos": (jnp.cos, _ONE),
    "another shape": (jnp.sin, jnp.ones(4)),
    "another dtype": (jnp.sin, _ONE.astype("bfloat16")),
    "a sum": (lambda x: x + 1.0, _ONE),
    "another number": (lambda x: x + 2.0, _ONE),
    "another order": (lambda x, y: x - y, _ONE, _ONE),
    "one order": (lambda x, y: y - x, _ONE, _ONE),
    "twice": (lambda x: (x, x), _ONE),
    "an array": (lambda x: x * np.arange(3.0, dtype="f4"), _ONE),
    "another array": (lambda x: x * np.arange(1.0, 4.0, dtype="f4"), _ONE),
    "a loop": (_loop(3, 2.0), _ONE),
    "a longer loop": (_loop(4, 2.0), _ONE),
    "a loop with another body": (_loop(3, 3.0), _ONE),
    "random": (lambda key: jax.random.normal(key, (2,)), jax.random.key(0)),
    "random by another algorithm": (lambda key: jax.random.normal(key, (2,)), jax.random.key(0, impl="rbg")),
    "a precision": (lambda x: jnp.dot(x, x, precision="highest"), _ONE),
    "another precision": (lambda x: jnp.dot(x, x), _ONE),
}


def test_fingerprints_are_equal_for_the_same_and_differ_for_all_else():
    first, second = ({name: _fingerprint(*what) for name, what in _DIFFERENT.items()} for _ in range(2))
    assert None not in first.values()
    assert first == second
    assert len(set(first.values())) == len(first)


def test_what_cannot_be_compared_has_no_fingerprint():
    host = jax.ShapeDtypeStruct((3,), "float32")
    assert _fingerprint(lambda x: jax.pure_callback(np.sin, host, x), _ONE) is None
    assert _fingerprint(lambda x: (jax.debug.print("{}", x), x)[1], _ONE) is None
    assert _fingerprint(lambda x: x + np.ones(1 << 15, "f4"), jnp.ones(1 << 15)) is None


def test_programs_that_do_the_same_under_other_names_keep_their_names_in_a_trace():
    for schedule, kind, name in (("1f1b", "B", "stage_0_backward"), ("zb-h1", "W", "stage_0_weight_grad")):
        pipe = jaxpp.Pipeline(make()[1], optax.adam(0.1), num_stages=3, num_microbatches=2, schedule=schedule)
        batch = jnp.linspace(-1, 1, 8).reshape(4, 2)
        pipe.init(make()[2], jax.random.key(0), batch)
        plan, _ = pipe.engine.plan("update", batch, None)
        assert {line.about.program for line in plan.instructions if line.label.startswith(f"0{kind}")} == {name}
