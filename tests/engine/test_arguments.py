"""Arguments of another kind than is asked for are refused in whole sentences, each line of which is matched here."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import (
    ArgumentError,
    BankError,
    BatchError,
    CutError,
    JaxppError,
    LossError,
    OptimizerError,
    ParamsError,
    ScheduleError,
    shown,
)

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


def line_of(function):
    return re.sub(r"0x\w+", "0x...", shown(function))


DEVICES = "a pipeline runs on a list of JAX's devices, one a rank."
STAGES = "Pipeline.from_stages(stages, loss=...): the stages are a list of functions (params, x) -> x, one a stage."
CUT = 'pass a list of names, such as cuts=["h_2", "h_4"].'
FLOATS = "return a loss made of floating numbers; what counts or compares (argmax, ==, a cast to integers) has no gradient."
MESH = 'pass for example mesh=jax.make_mesh((2, 2), ("pipe", "model")), or leave shardings out.'
TRACED = "a pipeline runs programs on several devices itself, so it cannot run inside jax.jit, jax.grad or jax.vmap."
AUX = "it says how the aux values of the microbatches become those of the step, so the loss must return some."
PATH = "it takes the CSV itself, not the path of a file."

CASES = {
    "shardings without a mesh": (
        lambda: pipeline(shardings={"w1": "column"}),
        ArgumentError,
        'shardings: parameters are sharded over the "model" axis of a mesh.',
        "no mesh.",
        MESH,
    ),
    "shardings with replicas only": (
        lambda: pipeline(shardings={"w1": "column"}, data_parallel=2),
        ArgumentError,
        'shardings: parameters are sharded over the "model" axis of a mesh.',
        "no mesh.",
        MESH,
    ),
    "shardings on a mesh without a model axis": (
        lambda: pipeline(shardings={"w1": "column"}, mesh=jax.make_mesh((2, 2), ("pipe", "data"))),
        ArgumentError,
        'shardings: parameters are sharded over the "model" axis of a mesh.',
        "a mesh with the axes 'pipe', 'data'.",
        MESH,
    ),
    "reduce_aux of a loss without aux": (
        lambda: pipeline(reduce_aux="sum"),
        ArgumentError,
        f"reduce_aux='sum': {AUX}",
        "a loss without aux (has_aux=False).",
        "pass has_aux=True and return (loss, aux), or leave reduce_aux out.",
    ),
    "the name of a platform for devices": (
        lambda: pipeline(devices="cpu"),
        ArgumentError,
        f"devices='cpu': {DEVICES}",
        "the name 'cpu'.",
        "pass devices=jax.devices('cpu').",
    ),
    "numbers for devices": (
        lambda: pipeline(devices=[0, 1]),
        ArgumentError,
        f"devices: {DEVICES}",
        "devices[0]: 0\n       devices[1]: 1.",
        "pass devices=[jax.devices()[k] for k in [0, 1]].",
    ),
    "how many devices": (
        lambda: pipeline(devices=2),
        ArgumentError,
        f"devices: {DEVICES}",
        "2.",
        "pass devices=jax.devices()[:2].",
    ),
    "one device": (
        lambda: pipeline(devices=jax.devices()[1]),
        ArgumentError,
        f"devices={jax.devices()[1]}: {DEVICES}",
        "one device.",
        "pass a list: devices=[jax.devices()[1]].",
    ),
    "a mesh for devices": (
        lambda: pipeline(devices=jax.make_mesh((2,), ("pipe",))),
        ArgumentError,
        f"devices: {DEVICES}",
        f"{shown(jax.make_mesh((2,), ('pipe',)))}.",
        "pass it as mesh=mesh, and leave devices out.",
    ),
    "names of devices": (
        lambda: pipeline(devices=["cpu:0"]),
        ArgumentError,
        f"devices: {DEVICES}",
        "devices[0]: 'cpu:0'.",
        "pass some of jax.devices(), such as devices=jax.devices()[:2].",
    ),
    "the name of a platform for a bank's device": (
        lambda: jaxpp.Bank({"cat": PARAMS}, optax.sgd(0.1), device="cpu"),
        BankError,
        "Bank(device=...): sets are used on one of JAX's devices.",
        "'cpu'.",
        "pass one of jax.devices(), such as device=jax.devices()[0].",
    ),
    "a number for the weight": (
        lambda: pipeline(weight=3),
        ArgumentError,
        "weight: the weight is a function that makes one number of a microbatch.",
        "3.",
        'pass a function such as lambda batch: batch["mask"].sum(), or "auto", or leave weight out.',
    ),
    "a number for the loss": (
        lambda: pipeline(3),
        ArgumentError,
        "loss_fn: the loss is a function of (params, batch[, key]).",
        "3.",
        "pass the function itself.",
    ),
    "a number for the loss of an evaluation": (
        called(lambda pipe, state: pipe.evaluate(state, X, loss_fn=3)),
        ArgumentError,
        "pipe.evaluate(..., loss_fn=...): the loss is a function of (params, batch[, key]).",
        "3.",
        "pass the function itself.",
    ),
    "loss and optimizer the wrong way round": (
        lambda: pipeline(optax.sgd(0.1), loss_fn),
        ArgumentError,
        "Pipeline(loss_fn, optimizer, ...): the optimizer is an optax transformation, with init and update.",
        f"{line_of(loss_fn)}.",
        "change their places: the loss comes first.",
    ),
    "an optimizer that was not called": (
        lambda: pipeline(optimizer=optax.adam),
        ArgumentError,
        "Pipeline(loss_fn, optimizer, ...): the optimizer is an optax transformation, with init and update.",
        f"{line_of(optax.adam)}.",
        "call it: optax.adam(3e-4), for example.",
    ),
    "one tree too many for the stages": (
        lambda: by_hand([layer, layer]).init([jnp.eye(4)] * 3, (X, X)),
        ParamsError,
        "params: a pipeline from_stages takes a list of parameters, one tree a stage.",
        "3 trees for 2 stages.",
        "pass [params_0, params_1, ...]; a stage without parameters has {}.",
    ),
    "a dictionary for the stages' parameters": (
        lambda: by_hand([layer, layer]).init({"a": jnp.eye(4), "b": jnp.eye(4)}, (X, X)),
        ParamsError,
        "params: a pipeline from_stages takes a list of parameters, one tree a stage.",
        "dict for 2 stages.",
        "pass [params_0, params_1, ...]; a stage without parameters has {}.",
    ),
    "one function instead of a list": (
        lambda: by_hand(layer),
        ArgumentError,
        STAGES,
        f"one function instead of a list: {line_of(layer)}.",
        "pass a list, such as [stage_0, stage_1].",
    ),
    "stages that are no functions": (
        lambda: by_hand([layer, 3]),
        ArgumentError,
        STAGES,
        "stages[1]: 3.",
        "pass a list such as [lambda params, x: jnp.tanh(x @ params), ...].",
    ),
    "no stage functions": (
        lambda: by_hand([]),
        ArgumentError,
        STAGES,
        "an empty list.",
        "pass a list such as [lambda params, x: jnp.tanh(x @ params), ...].",
    ),
    "a number for the loss of stages": (
        lambda: by_hand([layer], loss=3),
        ArgumentError,
        "Pipeline.from_stages(stages, loss=...): the loss is a function (output, targets) -> scalar.",
        "3.",
        "pass the function itself.",
    ),
    "one name for two cuts": (
        lambda: pipeline(cuts="w2", num_stages=3),
        ArgumentError,
        "cuts=['w2']: n stages have n - 1 cuts between them.",
        "1 cut and num_stages=3.",
        "pass num_stages=2, or 2 cuts.",
    ),
    "numbers for cuts": (
        lambda: pipeline(cuts=[1]),
        ArgumentError,
        "cuts: a cut is the name of a module or parameter at which a stage begins.",
        "1.",
        CUT,
    ),
    "an integer loss": (
        lambda: pipeline(lambda params, x: jnp.argmax(x @ params["w1"])).init(PARAMS, X),
        LossError,
        "loss_fn: the loss is one float scalar.",
        "i32[].",
        FLOATS,
    ),
    "a comparison for a loss": (
        lambda: pipeline(lambda params, x: (x @ params["w1"]).sum() > 0).init(PARAMS, X),
        LossError,
        "loss_fn: the loss is one float scalar.",
        "bool[].",
        FLOATS,
    ),
    "a complex loss": (
        lambda: pipeline(lambda params, x: (x @ params["w1"]).sum() * 1j).init(PARAMS, X),
        LossError,
        "loss_fn: the loss is one float scalar.",
        "c64[].",
        "return a real number, for example with jnp.abs or .real.",
    ),
    "the name of a file for a CSV": (
        lambda: jaxpp.schedule.from_csv("sched.csv"),
        ScheduleError,
        f"from_csv('sched.csv'): {PATH}",
        "'sched.csv'.",
        "read the file: from_csv(pathlib.Path('sched.csv').read_text()).",
    ),
    "a path for a CSV": (
        lambda: jaxpp.schedule.from_csv(pathlib.PurePosixPath("sched.csv")),
        ScheduleError,
        "from_csv(PurePosixPath('sched.csv')): the CSV is text.",
        "PurePosixPath.",
        "read the file: from_csv(path.read_text()).",
    ),
    "an optimizer with a line search": (
        lambda: pipeline(optimizer=optax.lbfgs()).init(PARAMS, X),
        OptimizerError,
        "optimizer: an optimizer sees gradients, its state, the parameters and the value of the loss, and cannot call the loss "
        "again.",
        "scale_by_zoom_linesearch.<locals>.update_fn() missing 2 required keyword-only arguments: 'grad' and 'value_fn'.",
        "use a transformation without a line search, such as optax.adamw or optax.sgd.",
    ),
    **{
        f"jax.jit of {name}": (
            called(lambda pipe, state, name=name: jax.jit(getattr(pipe, name))(state, X)),
            ArgumentError,
            f"pipe.{name}(state, batch, key): {TRACED}",
            "a traced argument.",
            f"call pipe.{name} outside of these (it compiles what it runs itself), and jit what comes after it.",
        )
        for name in ("step", "evaluate", "verify")
    },
    "a step with a traced batch": (
        called(lambda pipe, state: jax.jit(lambda x: pipe.step(state, x))(X)),
        ArgumentError,
        f"pipe.step(state, batch, key): {TRACED}",
        "a traced argument.",
        "call pipe.step outside of these (it compiles what it runs itself), and jit what comes after it.",
    ),
    "jax.jit of init": (
        lambda: jax.jit(pipeline().init)(PARAMS, X),
        ArgumentError,
        f"pipe.init(...): {TRACED}",
        "a traced argument.",
        "call pipe.init outside of these (it compiles what it runs itself), and jit what comes after it.",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_argument_of_another_kind_is_refused_in_whole_sentences(name):
    call, kind, *lines = CASES[name]
    with pytest.raises(kind) as error:
        call()
    assert re.sub(r"0x\w+", "0x...", str(error.value)) == "{}\n  Got: {}\n  Fix: {}".format(*lines)


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
    first, *lines, fix = str(error.value).splitlines()
    assert first == "batch: a batch is a tree of arrays, and to JAX a list is no array but a tree with one leaf an item."
    assert lines[0] == "  Got: batch[0]: a list of 4 numbers"
    assert lines[9:] == ["       batch[9]: a list of 4 numbers", "       and 120 more."]
    assert fix == "  Fix: make arrays of the lists, nested ones included, with np.asarray."


def test_a_list_of_labels_is_not_taken_for_numbers_that_all_microbatches_share():
    with pytest.raises(BatchError, match=r"batch\['y'\]: a list of 8 numbers"):
        pipeline(lambda params, batch: loss_fn(params, batch["x"])).init(PARAMS, {"x": X, "y": [0, 1] * 4})


@pytest.mark.parametrize("kind", [JaxppError, CutError])
def test_ten_violations_are_all_listed(kind):
    assert str(kind("here", "a rule", [str(k) for k in range(10)], "this")).endswith("       9.\n  Fix: this.")


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
