"""Bad input is refused before any device work, in the template, with where, rule, got and fix."""

import dataclasses
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.errors import FlaxError

import jaxpp
from jaxpp.errors import (
    ArgumentError,
    JaxppError,
    warn,
)
from tests import messages

PARAMS = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 2))}
BATCH = {"x": jnp.ones((6, 4)), "y": jnp.ones((6, 2))}


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]) ** 2)


def grad(loss=loss_fn, params=PARAMS, batch=BATCH, **options):
    return jaxpp.value_and_grad(loss, **{"num_stages": 2, "num_microbatches": 2} | options)(params, batch)


def nearly_nothing(params, batch):
    return jnp.sum(batch["x"] * params["a"][0, 0])


def giant(params, batch):
    x = jax.lax.fori_loop(0, 9, lambda _, x: jnp.tanh(x @ params["a"]), jnp.tanh(batch["x"]))
    return jnp.mean((x @ params["b"] - batch["y"]) ** 2)


def ordered(params, batch):
    jax.debug.print("{x}", x=batch["x"].sum(), ordered=True)
    return loss_fn(params, batch)


def of_two(params, x, y):
    return loss_fn(params, {"x": x, "y": y})


def of_three(params, x, y, rng):
    return of_two(params, x, y)


class Loader:
    """Batches that can be read again and again."""

    def __iter__(self):
        return iter([BATCH])


def as_haiku_calls_it(params, rng, batch):
    return loss_fn(params, batch)


@dataclasses.dataclass
class Pair:
    """A batch that JAX takes for a leaf."""

    x: jax.Array
    y: jax.Array


CASES = {
    "swapped arguments": lambda: grad(params={**BATCH, "n": np.arange(6)}, batch=PARAMS),
    "one giant equation": lambda: grad(giant),
    "ordered effects": lambda: grad(ordered),
    "a key for a loss without one": lambda: jaxpp.value_and_grad(loss_fn, num_stages=2)(PARAMS, BATCH, jax.random.key(0)),
    "no stages": lambda: grad(num_stages=0),
    "half a stage": lambda: grad(num_stages=1.5),
    "no microbatches": lambda: grad(num_microbatches=0),
    "too many stages": lambda: grad(nearly_nothing, num_stages=8),
    "too many microbatches": lambda: grad(num_microbatches=7),
    "unequal leaves": lambda: grad(batch=BATCH | {"y": jnp.ones((5, 2))}),
    "a text in the batch": lambda: grad(batch=BATCH | {"t": jnp.ones(()), "u": "three"}),
    "an empty batch": lambda: grad(batch={}),
    "a vector for a loss": lambda: grad(lambda p, b: (b["x"] @ p["a"]).sum(0)),
    "an integer loss": lambda: grad(lambda p, b: jnp.argmax(b["x"] @ p["a"])),
    "a pair without has_aux": lambda: grad(lambda p, b: (loss_fn(p, b), 1)),
    "has_aux without a pair": lambda: grad(has_aux=True),
    "a loss without parameters": lambda: grad(lambda p, b: jnp.mean(b["x"])),
    "an unknown schedule": lambda: grad(schedule="1f2b"),
    "an unknown cut": lambda: grad(cuts=["bb"]),
    "unknown cuts": lambda: grad(num_stages=4, cuts=["bb", "dense", "aa"]),
    "cuts out of order": lambda: grad(num_stages=3, cuts=["b", "a"]),
    "too few cuts": lambda: grad(num_stages=3, cuts=["b"]),
    "integer parameters": lambda: grad(params=PARAMS | {"n": {"k": jnp.arange(3)}}),
    "a python number in params": lambda: grad(params=PARAMS | {"s": 2.0}),
    "no loss": lambda: grad(lambda p, b: None),
    "an integer for a key": lambda: jaxpp.value_and_grad(loss_fn, num_stages=2)(PARAMS, BATCH, 0),
    "labels in the place of the key": lambda: jaxpp.value_and_grad(of_two, num_stages=2)(PARAMS, BATCH["x"], BATCH["y"]),
    "inputs and labels and a key": lambda: grad(of_three),
    "more arguments than a batch and a key": lambda: grad(lambda params, batch, key, scale: loss_fn(params, batch) * scale),
    "labels for a loss without a key": lambda: jaxpp.value_and_grad(loss_fn, num_stages=2)(PARAMS, BATCH["x"], BATCH["y"]),
    "a loader of batches": lambda: grad(batch=Loader()),
    "a key before the batch": lambda: grad(as_haiku_calls_it),
    "a plain dataclass for a batch": lambda: grad(batch=Pair(**BATCH)),
    "an iterator of batches": lambda: grad(batch=iter([BATCH])),
    "a batch of examples of several sizes": lambda: grad(batch=[{"x": np.ones(4), "y": np.ones(2)}] * 6),
    "no parameters": lambda: grad(params={}),
    "a schedule of other sizes": lambda: grad(schedule=jaxpp.schedule.make("gpipe", num_ranks=3, num_microbatches=2)),
    "no devices": lambda: grad(devices=[]),
    "a weight that is no scalar": lambda: grad(weight=lambda b: b["y"]),
    "weights of a sum": lambda: grad(weight=lambda b: b["y"].sum(), reduction="sum"),
    "a loss that is no function": lambda: grad("loss"),
    "jit": lambda: jax.jit(jaxpp.value_and_grad(loss_fn, num_stages=2))(PARAMS, BATCH),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_in_the_template_before_any_device_work(name, monkeypatch):
    monkeypatch.setattr("jaxpp.runtime.compile.Programs.compile", pytest.fail)
    error = messages.check("value_and_grad", CASES, name, CASES[name])
    text = str(error)
    first, got, *rest = text.splitlines()
    assert ": " in first
    assert first.endswith(".")
    assert got.startswith("  Got: ")
    assert any(line.startswith("  Fix: ") for line in rest)
    assert isinstance(error, ValueError)


def pipeline(loss=loss_fn, **options):
    return jaxpp.Pipeline(loss, optax.sgd(0.1), **{"num_stages": 2} | options)


def test_an_exception_of_init_comes_out_unchanged_with_a_note():
    with pytest.raises(KeyError, match="lost") as error:
        pipeline().init(lambda key: {}["lost"], jax.random.key(0), BATCH)
    assert "jaxpp: raised while tracing init" in error.value.__notes__


def test_an_init_of_shapes_is_told_to_make_arrays_of_them():
    shapes = jax.eval_shape(lambda: BATCH)
    with pytest.raises(TypeError, match="ShapeDtypeStruct") as error:
        pipeline().abstract_state(lambda key: PLAIN.init(key, shapes["x"]), jax.random.key(0), shapes)
    note = "jaxpp: shapes hold no numbers; in init put jnp.zeros(leaf.shape, leaf.dtype) in the place of each"
    assert note in error.value.__notes__


def test_an_exception_of_the_loss_comes_out_unchanged_with_a_note():
    with pytest.raises(KeyError, match="z") as error:
        grad(lambda p, b: b["z"])
    note = "jaxpp: raised while tracing the loss for one microbatch, batch leaves f32[3,4], f32[3,2]"
    assert note in error.value.__notes__


def test_a_loss_of_inputs_and_labels_that_fails_on_its_key_is_told_to_take_both_in_one_batch():
    note = "jaxpp: the third argument, y, is the key, and the one before it, x, is the whole batch; put x and y into one batch: "
    note += "write def of_two(params, batch) with x, y = batch as its first line, and pass (x, y) as the batch"
    for batch in (BATCH, BATCH["x"]):
        with pytest.raises((TypeError, IndexError)) as error:
            jaxpp.Pipeline(of_two, optax.sgd(0.1), num_stages=2).init(PARAMS, batch)
        assert error.value.__notes__[-1] == note


def test_a_list_of_examples_is_told_to_be_stacked_in_a_note_that_is_no_list_itself():
    examples = [(np.ones(4, "f"), np.float32(1))] * 30
    with pytest.raises(TypeError, match="indices") as error:
        grad(batch=examples)
    *_, shapes, note = error.value.__notes__
    assert shapes.endswith("batch leaves f32[2], f32[], f32[2], f32[], f32[2], f32[], f32[2], f32[], ...")
    stack = "stack them: jax.tree.map(lambda *rows: np.stack(rows), *batch)"
    assert note == f"jaxpp: if each of the 30 items of the list is an example, {stack}"
    assert jax.tree.map(lambda *rows: np.stack(rows), *examples)[0].shape == (30, 4)


DROPPING = nn.Sequential([nn.Dense(4), nn.Dropout(0.5, deterministic=False), nn.Dense(2)])
NORMED = nn.Sequential([nn.Dense(4), nn.BatchNorm(use_running_average=False), nn.Dense(2)])
PLAIN = nn.Sequential([nn.Dense(4), nn.Dense(2)])


def error_of(model, params, batch, **options):
    return jnp.mean((model.apply(params, batch["x"], **options) - batch["y"]) ** 2)


def forward(model):
    return jaxpp.Forward(model.apply, num_stages=2)


OF_FLAX = {
    "dropout without a key": (
        lambda: pipeline(loss=lambda p, b: error_of(DROPPING, p, b)).init(DROPPING.init(jax.random.key(0), BATCH["x"]), BATCH),
        "give the loss one more argument, key, after the batch, pass a key to each step, and call the model with "
        'rngs={"dropout": key}',
    ),
    "a key that is not passed on": (
        lambda: pipeline(loss=lambda p, b, key: error_of(DROPPING, p, b)).init(DROPPING.init(jax.random.key(0), BATCH["x"]), BATCH),
        'call the model with rngs={"dropout": key}',
    ),
    "statistics that cannot change": (
        lambda: pipeline(loss=lambda p, b: error_of(NORMED, p, b)).init(NORMED.init(jax.random.key(0), BATCH["x"]), BATCH),
        "pass has_state=True, with a loss_fn(params, model_state, batch) that calls "
        'model.apply({"params": params, **model_state}, ..., mutable=["batch_stats"]), and returns loss, (new_model_state, aux)',
    ),
    "the whole batch for a model": (
        lambda: forward(PLAIN).init(PLAIN.init(jax.random.key(0), BATCH["x"]), BATCH),
        'model.apply is given the whole batch; pass lambda params, batch: model.apply(params, batch["x"])',
    ),
}


@pytest.mark.filterwarnings("ignore:shape requires ndarray:DeprecationWarning")  # of a dict, where the model reads its shape
@pytest.mark.parametrize("name", OF_FLAX)
def test_what_flax_raises_has_a_note_that_says_what_to_write(name):
    call, note = OF_FLAX[name]
    with pytest.raises((FlaxError, IndexError)) as error:
        call()
    assert error.value.__notes__[-1] == f"jaxpp: {note}"


@pytest.mark.parametrize("args", [(), (BATCH, BATCH), (jax.random.key(0), BATCH, 1)])
def test_wrong_arguments_of_init_are_refused(args):
    with pytest.raises(ArgumentError, match="init takes a function, a key and a batch"):
        pipeline().init(PARAMS if len(args) != 3 else (lambda key: PARAMS), *args)


def test_a_warning_is_at_the_users_line_however_deep_inside_the_library_it_is_given():
    code = "def outer(depth):\n    outer(depth - 1) if depth else warn(jaxpp.DevicesWarning('idle'))"
    inside = {"warn": warn, "jaxpp": jaxpp}
    exec(compile(code, str(pathlib.Path(jaxpp.__file__).with_name("inside.py")), "exec"), inside)  # noqa: S102  (a module of the library)
    for depth in range(3):
        with pytest.warns(jaxpp.DevicesWarning) as found:
            inside["outer"](depth)
        assert found[0].filename == __file__


def test_every_error_is_a_value_error():
    kinds = [value for value in map(vars(jaxpp.errors).get, jaxpp.errors.__all__) if isinstance(value, type)]
    assert len(kinds) > 10
    for kind in kinds:
        assert issubclass(kind, ValueError)
        assert issubclass(kind, JaxppError)
