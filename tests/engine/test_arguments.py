"""Arguments of another kind than is asked for are refused in whole sentences, each line of which is matched here."""

import copy
import pathlib
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import (
    ArgumentError,
    BatchError,
    CutError,
    JaxppError,
)
from tests import messages

PARAMS = {"w1": jnp.full((4, 4), 0.1), "w2": jnp.ones((4, 2))}
X = jnp.ones((8, 4))


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"]) ** 2)


def pipeline(loss=loss_fn, optimizer=None, **options):
    return jaxpp.Pipeline(loss, optimizer or optax.sgd(0.1), **{"num_stages": 2} | options)


def layer(params, x):
    return jnp.tanh(x @ params)


def by_hand(stages, loss=lambda out, targets: jnp.mean((out - targets) ** 2)):
    return jaxpp.Pipeline.from_stages(stages, loss=loss, optimizer=optax.sgd(0.1))


def started(loss=loss_fn, **options):
    pipe = pipeline(loss, **options)
    return pipe, pipe.init(PARAMS, X)


def called(method):
    """Calls a method of a pipeline and its first state."""
    return lambda: method(*started())


def generated(pipe, state, **options):
    return pipe.generate(state, lambda params, carry, tokens: (carry, tokens), {}, [[1]], 2, **options)


MODEL, BANK = nn.Dense(2), jaxpp.Bank({"cat": PARAMS}, optax.sgd(0.1))
COUNTS = {
    "num_stages": (4.0, "4", 1.5, "four", True, float("inf"), float("nan")),
    "num_microbatches": (8.0,),
    "max_shapes": (np.float32(2),),
}
CASES = {
    "shardings without a mesh": lambda: pipeline(shardings={"w1": "column"}),
    "rules for shard": lambda: pipeline(shard={"w1": "column"}, data_parallel=2),
    "what replicas divide for shardings": lambda: pipeline(shardings="optimizer", data_parallel=2),
    "residuals that wait on the host": lambda: pipeline(host="residuals"),
    "shardings with replicas only": lambda: pipeline(shardings={"w1": "column"}, data_parallel=2),
    "shardings on a mesh without a model axis": lambda: pipeline(
        shardings={"w1": "column"}, mesh=jax.make_mesh((2, 2), ("pipe", "data"))
    ),
    "reduce_aux of a loss without aux": lambda: pipeline(reduce_aux="sum"),
    "the name of a platform for devices": lambda: pipeline(devices="cpu"),
    "numbers for devices": lambda: pipeline(devices=[0, 1]),
    "how many devices": lambda: pipeline(devices=2),
    "one device": lambda: pipeline(devices=jax.devices()[1]),
    "a mesh for devices": lambda: pipeline(devices=jax.make_mesh((2,), ("pipe",))),
    "names of devices": lambda: pipeline(devices=["cpu:0"]),
    "the name of a platform for a bank's device": lambda: jaxpp.Bank({"cat": PARAMS}, optax.sgd(0.1), device="cpu"),
    "a number for the weight": lambda: pipeline(weight=3),
    "a number for the loss": lambda: pipeline(3),
    "a number for the loss of an evaluation": called(lambda pipe, state: pipe.evaluate(state, X, loss_fn=3)),
    "loss and optimizer the wrong way round": lambda: pipeline(optax.sgd(0.1), loss_fn),
    "an optimizer that was not called": lambda: pipeline(optimizer=optax.adam),
    "one tree too many for the stages": lambda: by_hand([layer, layer]).init([jnp.eye(4)] * 3, (X, X)),
    "a dictionary for the stages' parameters": lambda: by_hand([layer, layer]).init({"a": jnp.eye(4), "b": jnp.eye(4)}, (X, X)),
    "one function instead of a list": lambda: by_hand(layer),
    "stages that are no functions": lambda: by_hand([layer, 3]),
    "no stage functions": lambda: by_hand([]),
    "a number for the loss of stages": lambda: by_hand([layer], loss=3),
    "one name for two cuts": lambda: pipeline(cuts="w2", num_stages=3),
    "numbers for cuts": lambda: pipeline(cuts=[1]),
    "an integer loss": lambda: pipeline(lambda params, x: jnp.argmax(x @ params["w1"])).init(PARAMS, X),
    "a comparison for a loss": lambda: pipeline(lambda params, x: (x @ params["w1"]).sum() > 0).init(PARAMS, X),
    "a complex loss": lambda: pipeline(lambda params, x: (x @ params["w1"]).sum() * 1j).init(PARAMS, X),
    "the name of a file for a CSV": lambda: jaxpp.schedule.from_csv("sched.csv"),
    "a path for a CSV": lambda: jaxpp.schedule.from_csv(pathlib.PurePosixPath("sched.csv")),
    "an optimizer with a line search": lambda: pipeline(optimizer=optax.lbfgs()).init(PARAMS, X),
    **{
        f"jax.jit of {name}": called(lambda pipe, state, name=name: jax.jit(getattr(pipe, name))(state, X))
        for name in ("step", "evaluate", "verify")
    },
    "a step with a traced batch": called(lambda pipe, state: jax.jit(lambda x: pipe.step(state, x))(X)),
    "has_aux='no'": lambda: pipeline(has_aux="no"),
    "has_aux=1 of a gradient": lambda: jaxpp.value_and_grad(loss_fn, num_stages=2, has_aux=1),
    "has_state='no'": lambda: pipeline(has_state="no"),
    "has_state=None": lambda: pipeline(has_state=None),
    "has_state='no' with a bank": lambda: pipeline(has_state="no", bank=BANK),
    "donate='no' of a step": called(lambda pipe, state: pipe.step(state, X, donate="no")),
    "progress='no' of a generation": called(lambda pipe, state: generated(pipe, state, progress="no")),
    **{
        f"{name}={value!r}": lambda name=name, value=value: pipeline(**{name: value})
        for name, values in COUNTS.items()
        for value in values
    },
    "two counts, of which one says which number is meant": lambda: pipeline(num_stages=4.0, num_microbatches=0),
    "a count of replicas in another type": lambda: pipeline(data_parallel=2.0),
    **{f"remat={value!r}": lambda value=value: pipeline(remat=value) for value in (True, False, jaxpp.Offload, ["least", True], 3)},
    "a model for the loss": lambda: pipeline(MODEL),
    "a class of models for the function": lambda: jaxpp.Forward(nn.Dense, num_stages=2),
    "a model for the function of a generation": called(lambda pipe, state: pipe.generate(state, MODEL, {}, [[1]], 2)),
    "a number for the loss whose reads are asked for": called(lambda pipe, state: pipe.reads(X, loss_fn=3)),
    **{
        f"{how} of a pipeline": called(lambda pipe, state, copied=copied: copied(pipe))
        for how, copied in (("a pickle", pickle.dumps), ("a deep copy", copy.deepcopy), ("a copy", copy.copy))
    },
    "the name of a platform for the device of gather": lambda: jaxpp.gather(PARAMS, "cpu"),
    "a deep copy of a Forward": lambda: copy.deepcopy(jaxpp.Forward(lambda params, x: x @ params["w1"], num_stages=1)),
    "jax.jit of init": lambda: jax.jit(pipeline().init)(PARAMS, X),
}


@pytest.mark.parametrize("name", CASES)
def test_an_argument_of_another_kind_is_refused_in_whole_sentences(name):
    messages.check("arguments", CASES, name, CASES[name])


def test_a_message_lists_ten_violations_and_says_how_many_more_there_are():
    with pytest.raises(BatchError) as error:
        pipeline().init(PARAMS, [np.ones(k + 1) for k in range(130)])
    first, *lines, fix = str(error.value).splitlines()
    assert first == "batch: all batch leaves have the same first axis, the number of examples."
    assert lines == [f"{'  Got: ' if k == 0 else '       '}batch[{k}]: f64[{k + 1}]" for k in range(10)] + ["       and 120 more."]
    assert fix.startswith("  Fix: ")


def test_nested_lists_for_a_batch_are_told_to_become_arrays():
    with pytest.raises(BatchError) as error:
        pipeline().init(PARAMS, [[0.5] * 4] * 130)
    first, got, fix = str(error.value).splitlines()
    assert first == "batch: a batch is a tree of arrays, and to JAX a list is no array but a tree with one leaf an item."
    assert got == "  Got: batch: a list of 130 lists of 4 numbers."
    assert fix == "  Fix: make arrays of the lists, nested ones included, with np.asarray."


@pytest.mark.parametrize(
    ("batch", "got"),
    [
        ({"x": X, "y": [[1], [1, 2]]}, "batch['y']: a list of 2 lists of numbers, of several lengths"),
        (
            {"x": [X, [1.0]], "y": [1, [2, 3]]},
            "batch['x'][1]: a list of 1 number\n       batch['y']: a list of 2 numbers and lists",
        ),
        ([[[1.0] * 3] * 2], "batch: a list of 1 list of 2 lists of 3 numbers"),
    ],
)
def test_each_list_in_a_batch_has_one_line(batch, got):
    with pytest.raises(BatchError) as error:
        pipeline().init(PARAMS, batch)
    assert f"\n  Got: {got}.\n" in str(error.value)


@pytest.mark.parametrize("kind", [JaxppError, CutError])
def test_ten_violations_are_all_listed(kind):
    assert str(kind("here", "a rule", [str(k) for k in range(10)], "this")).endswith("       9.\n  Fix: this.")


KEYS = {
    "a number": (3, "int 3"),
    "a string": ("k", "str 'k'"),
    "floats": (jnp.ones(2), "f32[2]"),
    "integers with a sign": (np.zeros(2, np.int32), "i32[2]"),
    "three integers": (np.ones(3, np.uint32), "u32[3]"),
    "two raw keys": (np.zeros((2, 2), np.uint32), "u32[2,2]"),
    "two keys": (jax.random.split(jax.random.key(0)), "key<fry>[2]"),
}


def drawing(params, x, key):
    return loss_fn(params, x + jax.random.uniform(key))


@pytest.fixture(scope="module")
def keyed():
    """A pipeline whose loss takes a key, and one whose loss takes none."""
    pipe = pipeline(drawing, num_stages=1)
    return pipe, pipe.init(PARAMS, X), *started(num_stages=1)


@pytest.mark.parametrize("kind", KEYS)
def test_what_is_no_key_is_refused_wherever_a_key_is_taken(keyed, kind):
    key, got = KEYS[kind]
    pipe, state, plain, plain_state = keyed
    draws = lambda params, x, key: x @ params["w1"] + jax.random.uniform(key)  # noqa: E731
    calls = {
        "step": lambda: pipe.step(state, X, key),
        "step without a key": lambda: plain.step(plain_state, X, key),
        "evaluate": lambda: pipe.evaluate(state, X, key),
        "verify": lambda: pipe.verify(state, X, key),
        "profile": lambda: pipe.profile(state, X, key),
        "forecast": lambda: pipe.forecast(PARAMS, X, key),
        "collectives": lambda: pipe.collectives(X, key),
        "reads": lambda: pipe.reads(X, key),
        "apply": lambda: pipe.apply(state, X, draws, key),
        "apply, key unused": lambda: pipe.apply(state, X, lambda params, x, key: x @ params["w1"], key),
        "stream": lambda: next(pipe.stream(state, [X], draws, key)),
        "generate": lambda: generated(pipe, state, key=key),
        "value_and_grad": lambda: jaxpp.value_and_grad(drawing, num_stages=1)(PARAMS, X, key),
        "tune": lambda: jaxpp.tune(loss_fn, optax.sgd(0.1), PARAMS, X, key, keep=False),
    }
    for name, call in calls.items():
        with pytest.raises(ArgumentError) as error:
            call()
        text = str(error.value)
        assert text.startswith("key: a key is ") and f"  Got: {got}.\n  Fix: pass jax.random.key(seed)" in text, name


def test_a_raw_key_and_its_shape_are_keys(keyed):
    pipe, state, *_ = keyed
    raw = jax.random.PRNGKey(0)
    assert pipe.evaluate(state, X, raw).loss == pipe.evaluate(state, X, np.asarray(raw)).loss
    assert pipe.collectives(X, jax.ShapeDtypeStruct((2,), "uint32")) is not None


@pytest.mark.parametrize("keep", [3, None, 0, ["folder"]])
def test_tune_refuses_what_is_neither_a_choice_nor_a_folder(keep):
    with pytest.raises(ArgumentError) as error:
        jaxpp.tune(loss_fn, optax.sgd(0.1), PARAMS, X, keep=keep)
    assert str(error.value).startswith("jaxpp.tune(..., keep=...): keep is True or False, or the name of a folder.\n  Got: ")


def test_a_string_is_the_name_of_one_cut():
    assert str(started(cuts="w2")[0].stages) == str(started(cuts=["w2"])[0].stages)


def test_the_numbers_of_a_schedule_may_stand_in_their_order():
    assert jaxpp.schedule.make("gpipe", 4) == jaxpp.schedule.make("gpipe", num_ranks=4)
    assert jaxpp.schedule.make("gpipe", 4, 8) == jaxpp.schedule.make("gpipe", num_ranks=4, num_microbatches=8)


def test_a_mesh_whose_model_axis_is_one_device_takes_shardings():
    pipe = pipeline(shardings={"w1": "column"}, mesh=jax.make_mesh((2, 1), ("pipe", "model")))
    pipe.step(pipe.init(PARAMS, X), X)


def needing(name):
    def update(updates, state, params=None, *, temperature, **extra):
        return updates, state

    def wrong(updates, state, params=None, **extra):
        raise TypeError(f"the {name} was passed as keyword-only")

    return optax.GradientTransformationExtraArgs(lambda params: (), update if name == "temperature" else wrong)


@pytest.mark.parametrize("name", ["temperature", "value_fn"])
def test_an_exception_of_the_optimizer_comes_out_unchanged_with_a_note(name):
    # Every TypeError that mentioned "keyword-only" was told to be a line search.
    with pytest.raises(TypeError, match=f"{name}.*keyword-only|keyword-only.*{name}") as error:
        pipeline(optimizer=needing(name)).init(PARAMS, X)
    note = "jaxpp: raised while tracing the optimizer's update(grads, state, params); a transformation that takes more is given "
    assert note + "value=loss" in error.value.__notes__


def test_an_exception_of_the_optimizers_init_comes_out_unchanged_with_a_note():
    with pytest.raises(KeyError, match="lost") as error:
        pipeline(optimizer=optax.GradientTransformation(lambda params: {}["lost"], lambda *args: args)).init(PARAMS, X)
    assert "jaxpp: raised while tracing the optimizer's init(params)" in error.value.__notes__
