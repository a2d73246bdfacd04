"""Arguments of another kind than is asked for are refused in whole sentences, each line of which is matched here."""

import copy
import pathlib
import pickle
import re

import flax.linen as nn
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


def generated(pipe, state, **options):
    return pipe.generate(state, lambda params, carry, tokens: (carry, tokens), {}, [[1]], 2, **options)


def line_of(function):
    return re.sub(r"0x\w+", "0x...", shown(function))


DEVICES = "a pipeline runs on a list of JAX's devices, one a rank."
STAGES = "Pipeline.from_stages(stages, loss=...): the stages are a list of functions (params, x) -> x, one a stage."
CUT = 'pass a list of names, such as cuts=["h_2", "h_4"].'
FLOATS = "return a loss made of floating numbers; what counts or compares (argmax, ==, a cast to integers) has no gradient."
MESH = 'pass for example mesh=jax.make_mesh((2, 2), ("pipe", "model")), or leave shardings out.'
TRACED = "a pipeline runs programs on several devices itself, so it cannot run inside jax.jit, jax.grad or jax.vmap."
COUNTED = "jaxpp.Pipeline / jaxpp.value_and_grad"
REMAT = (
    'a stage keeps the least ("least"; "offload": in host memory), a share of it (above 0.0, at most 1.0), everything ("keep"), '
    'its inputs only ("recompute"), or what a policy says.'
)
MODEL, BANK = nn.Dense(2), jaxpp.Bank({"cat": PARAMS}, optax.sgd(0.1))
AUX = "it says how the aux values of the microbatches become those of the step, so the loss must return some."
PATH = "it takes the CSV itself, not the path of a file."

CASES = {
    "shardings without a mesh": (
        lambda: pipeline(shardings={"w1": "column"}),
        ArgumentError,
        'shardings: parameters are sharded over the "model" axis of a mesh, or divided over "data".',
        "no mesh.",
        MESH,
    ),
    "shardings with replicas only": (
        lambda: pipeline(shardings={"w1": "column"}, data_parallel=2),
        ArgumentError,
        'shardings: parameters are sharded over the "model" axis of a mesh, or divided over "data".',
        "no mesh.",
        MESH,
    ),
    "shardings on a mesh without a model axis": (
        lambda: pipeline(shardings={"w1": "column"}, mesh=jax.make_mesh((2, 2), ("pipe", "data"))),
        ArgumentError,
        'shardings: parameters are sharded over the "model" axis of a mesh, or divided over "data".',
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
    **{
        f"{name}={value!r} of {called_on}": (
            call,
            ArgumentError,
            f"{where}: it is either True or False.",
            f"{name}={value!r}.",
            fix,
        )
        for name, value, called_on, where, call in (
            ("has_aux", "no", "a pipeline", COUNTED, lambda: pipeline(has_aux="no")),
            ("has_aux", 1, "a gradient", COUNTED, lambda: jaxpp.value_and_grad(loss_fn, num_stages=2, has_aux=1)),
            ("has_state", "no", "a pipeline", COUNTED, lambda: pipeline(has_state="no")),
            ("has_state", None, "a pipeline", COUNTED, lambda: pipeline(has_state=None)),
            ("has_state", "no", "a bank's pipeline", COUNTED, lambda: pipeline(has_state="no", bank=BANK)),
            ("donate", "no", "a step", "pipe.step", called(lambda pipe, state: pipe.step(state, X, donate="no"))),
            (
                "progress",
                "no",
                "a generation",
                "pipe.generate(...)",
                called(lambda pipe, state: generated(pipe, state, progress="no")),
            ),
        )
        for fix in [f"pass {name}=True or {name}=False."]
    },
    **{
        f"{name}={value!r} of a pipeline": (
            lambda name=name, value=value: pipeline(**{name: value}),
            ArgumentError,
            f"{COUNTED}: counts are whole numbers of at least 1.",
            f"{name}={value!r}.",
            f"{fix}.",
        )
        for name, value, fix in (
            ("num_stages", 4.0, "pass num_stages=4"),
            ("num_stages", "4", "pass num_stages=4"),
            ("num_microbatches", 8.0, "pass num_microbatches=8"),
            ("max_shapes", np.float32(2), "pass max_shapes=2"),
            ("num_stages", 1.5, "pass 1 or more"),
            ("num_stages", "four", "pass 1 or more"),
            ("num_stages", True, "pass 1 or more"),
            ("num_stages", float("inf"), "pass 1 or more"),
            ("num_stages", float("nan"), "pass 1 or more"),
        )
    },
    "two counts, of which one says which number is meant": (
        lambda: pipeline(num_stages=4.0, num_microbatches=0),
        ArgumentError,
        f"{COUNTED}: counts are whole numbers of at least 1.",
        "num_stages=4.0\n       num_microbatches=0.",
        "pass num_stages=4; pass 1 or more.",
    ),
    "a count of replicas in another type": (
        lambda: pipeline(data_parallel=2.0),
        ArgumentError,
        "data_parallel, the number of replicas: counts are whole numbers of at least 1.",
        "data_parallel=2.0.",
        "pass data_parallel=2.",
    ),
    **{
        f"remat={value!r}": (
            lambda value=value: pipeline(remat=value),
            ArgumentError,
            f"remat: {REMAT}",
            f"{got}.",
            f"{fix}.",
        )
        for value, got, fix in (
            (True, "True", 'pass remat="recompute", which runs each forward again'),
            (False, "False", 'pass remat="keep", which keeps everything'),
            (jaxpp.Offload, "<class 'jaxpp.stages.remat.Offload'>", "call it: remat=jaxpp.Offload()"),
            (["least", True], "stage 1: True", 'pass remat="recompute", which runs each forward again'),
            (3, "3", 'pass "least", "offload", "recompute", a policy of jax.checkpoint_policies, or a list of one a stage'),
        )
    },
    "a model for the loss": (
        lambda: pipeline(MODEL),
        ArgumentError,
        "loss_fn: the loss is a function of (params, batch[, key]).",
        "a model, Dense.",
        'write a function that calls model.apply, such as lambda params, batch: jnp.mean((model.apply(params, batch["x"]) '
        '- batch["y"]) ** 2).',
    ),
    "a class of models for the function": (
        lambda: jaxpp.Forward(nn.Dense, num_stages=2),
        ArgumentError,
        "Forward(fn, ...): fn is a function of (params, batch[, key]) that returns outputs.",
        "a model, Dense.",
        'write a function that calls model.apply, such as lambda params, batch: model.apply(params, batch["x"]).',
    ),
    "a model for the function of a generation": (
        called(lambda pipe, state: pipe.generate(state, MODEL, {}, [[1]], 2)),
        ArgumentError,
        "pipe.generate(..., fn, ...): fn is a function of (params, carry, tokens) that returns (new_carry, logits).",
        "a model, Dense.",
        "write a function that calls model.apply.",
    ),
    "a number for the loss whose reads are asked for": (
        called(lambda pipe, state: pipe.reads(X, loss_fn=3)),
        ArgumentError,
        "pipe.reads(..., loss_fn=...): the loss is a function of (params, batch[, key]).",
        "3.",
        "pass the function itself.",
    ),
    **{
        f"{how} of a pipeline": (
            called(lambda pipe, state, copied=copied: copied(pipe)),
            ArgumentError,
            "pickle or copy of pipe: it holds devices and compiled programs, which belong to this process.",
            "a jaxpp.Pipeline.",
            "keep the state, as a checkpoint or pickle.dumps(jax.device_get(state)), and make the jaxpp.Pipeline anew.",
        )
        for how, copied in (("a pickle", pickle.dumps), ("a deep copy", copy.deepcopy), ("a copy", copy.copy))
    },
    "the name of a platform for the device of gather": (
        lambda: jaxpp.gather(PARAMS, "cpu"),
        ArgumentError,
        "jaxpp.gather(tree, device): a tree is gathered on one of JAX's devices.",
        "'cpu'.",
        "pass one of jax.devices(), such as jax.devices()[0], or leave it out.",
    ),
    "a deep copy of a Forward": (
        lambda: copy.deepcopy(jaxpp.Forward(lambda params, x: x @ params["w1"], num_stages=1)),
        ArgumentError,
        "pickle or copy of forward: it holds devices and compiled programs, which belong to this process.",
        "a jaxpp.Forward.",
        "keep the parameters, as a checkpoint or pickle.dumps(jax.device_get(params)), and make the jaxpp.Forward anew.",
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
        assert text.startswith("key: a key is ") and f"  Got: {got}.\n  Fix: pass jax.random.key(seed)." in text, name


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
