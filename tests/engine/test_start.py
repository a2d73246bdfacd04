"""The first hour: what init and the loss may be given, and what is said of the rest."""

import functools
import warnings

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxpp
from jaxpp.errors import ArgumentError, ParamsError
from jaxpp.options import Options
from jaxpp.verify import compare, oracle
from tests import messages

RNG = np.random.default_rng(0)
PARAMS = {"a": RNG.normal(size=(4, 6)).astype("f"), "b": RNG.normal(size=(6, 2)).astype("f")}
BATCH = {"x": RNG.normal(size=(8, 4)).astype("f"), "y": RNG.normal(size=(8, 2)).astype("f")}
KEY = jax.random.key(3)


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]) ** 2)


def init_fn(key):
    return jax.tree.map(lambda leaf: jax.random.normal(key, leaf.shape), PARAMS)


def noisy(params, batch, key):
    keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return loss_fn(params, {**batch, "x": batch["x"] * keep})


def pipeline(loss=loss_fn, **options):
    given = {"num_stages": 2, "num_microbatches": 4} | options
    return jaxpp.Pipeline(loss, optax.sgd(0.1), **given)


@jax.tree_util.register_pytree_with_keys_class
class Module:
    """A tree that can be called, as Equinox's modules are."""

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __call__(self, x):
        return jnp.tanh(x @ self.a) @ self.b

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in "ab"], None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


def test_parameters_that_can_be_called_are_parameters():
    pipe = pipeline(lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2))
    model = Module(**PARAMS)
    state = pipe.init(model, BATCH)
    assert isinstance(state.params, Module)
    pipe.verify(state, BATCH)
    state = pipe.init(lambda key: Module(**init_fn(key)), KEY, BATCH)
    assert isinstance(state.params, Module)
    with pytest.raises(ValueError, match="matmul") as error:  # the number of arguments makes a function of it
        pipe.init(model, KEY, BATCH)
    assert "init was given a Module of 2 leaves as its function" in error.value.__notes__[-1]


def test_the_message_on_parameters_that_are_functions_says_how_to_divide_a_module():
    with pytest.raises(ParamsError, match=r"params\.b: PjitFunction") as error:
        pipeline().init(Module(PARAMS["a"], jax.nn.tanh), BATCH)
    assert "eqx.partition(model, eqx.is_inexact_array)" in str(error.value)


ORDERS = {
    "batch, params": (BATCH, PARAMS),
    "init, batch, key": (init_fn, BATCH, KEY),
    "key, init, batch": (KEY, init_fn, BATCH),
    "batch, init, key": (BATCH, init_fn, KEY),
    "params, key, batch": (PARAMS, KEY, BATCH),
    "params, batch, key": (PARAMS, BATCH, KEY),
    "params, key": (PARAMS, KEY),
    "init, key": (init_fn, KEY),
    "init, batch": (init_fn, BATCH),
    "init, a number, batch": (init_fn, 0, BATCH),
    "init, nothing, batch": (init_fn, None, BATCH),
    "params": (PARAMS,),
    "params, inputs, labels": (PARAMS, BATCH["x"], BATCH["y"]),
    "init, key, inputs, labels": (init_fn, KEY, BATCH["x"], BATCH["y"]),
    "a state of Flax's, batch": (TrainState.create(apply_fn=loss_fn, params=PARAMS, tx=optax.sgd(0.1)), BATCH),
    "a model, key, batch": (nn.Sequential([nn.Dense(2)]), KEY, BATCH),
    "a class of models, key, batch": (nn.Dense, KEY, BATCH),
}


@pytest.mark.parametrize("order", ORDERS)
def test_arguments_of_init_in_another_order_are_told_apart(order):
    messages.check("arguments_of_init", ORDERS, order, lambda: pipeline().init(*ORDERS[order]))


@pytest.mark.long
def test_a_batch_may_be_an_array_of_keys():
    def loss(params, keys):
        return ((jax.vmap(jax.random.normal)(keys)[:, None] * params["a"]["kernel"] * params["b"]["kernel"]) ** 2).mean()

    keys = jax.random.split(KEY, 8)
    params = {name: {"kernel": jnp.full(4, 0.5)} for name in "ab"}
    pipe = pipeline(loss)
    pipe.verify(pipe.init(params, keys), keys)
    pipe.verify(pipe.init(lambda _: params, KEY, keys), keys)


def test_an_error_of_the_loss_itself_is_not_taken_for_swapped_arguments():
    def broken(params, batch):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pipeline(broken).init(PARAMS, BATCH)


def by_key(params, batch, *, key):
    return noisy(params, batch, key)


def by_rngs(params, batch, train=True, *, rngs=None):
    return loss_fn(params, batch) if rngs is None else noisy(params, batch, rngs)


class Trainer:
    scale = 1.0

    def loss(self, params, batch, *, dropout_rng):
        return self.scale * noisy(params, batch, dropout_rng)


def starred(*args):
    return noisy(*args)


def keywords(params, batch, **named):
    return noisy(params, batch, named["key"]) if named else loss_fn(params, batch)


LOSSES = {
    "key": by_key,
    "rngs": by_rngs,
    "a bound method": Trainer().loss,
    "a partial function": functools.partial(lambda params, batch, beta, key: beta * noisy(params, batch, key), beta=1.0),
    "any arguments": starred,
    "any keywords": keywords,
    "jitted": jax.jit(by_key),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_key_by_keyword_is_the_key(name):
    loss, want = LOSSES[name], oracle(noisy, PARAMS, BATCH, KEY, 4)
    pipe = pipeline(loss)
    state = pipe.init(PARAMS, BATCH)
    compare("loss", pipe.step(state, BATCH, KEY, donate=False)[1].loss, want[0])
    if name in ("key", "rngs"):
        pipe.verify(state, BATCH, KEY)
        compare("loss", pipe.evaluate(state, BATCH, KEY).loss, want[0])
        found, grads = jaxpp.value_and_grad(loss, num_stages=2, num_microbatches=4)(PARAMS, BATCH, KEY)
        compare("grads", (found, grads), (want[0], want[2]))
    compare("oracle", oracle(loss, PARAMS, BATCH, KEY, 4), want)


def test_losses_that_hide_their_arguments_are_tried_before_they_are_given_a_key():
    def hidden(*args):
        return loss_fn(*args)

    pipe = pipeline(hidden)
    compare("loss", pipe.step(pipe.init(PARAMS, BATCH), BATCH)[1].loss, oracle(loss_fn, PARAMS, BATCH, None, 4)[0])


def test_a_loss_with_model_state_and_one_of_a_bank_take_a_key_by_keyword():
    def stateful(params, state, batch, *, rngs):
        return noisy(params, batch, rngs), (state, {})

    pipe = pipeline(stateful, has_state=True)
    pipe.verify(pipe.init((PARAMS, {"n": np.zeros(3)}), BATCH), BATCH, KEY)

    def of_task(params, task, batch, *, key):
        return noisy({"a": params["a"], "b": task}, batch, key)

    pipe = pipeline(of_task, bank=jaxpp.Bank({"one": PARAMS["b"]}, optax.sgd(0.1)))
    state = pipe.init({"a": PARAMS["a"]}, BATCH)
    want = oracle(noisy, PARAMS, BATCH, KEY, 4)[0]
    compare("loss", pipe.evaluate(state, BATCH, KEY, task="one", loss_fn=of_task).loss, want)
    pipe.verify(state, BATCH, KEY, task="one")


@pytest.mark.long
def test_flax_takes_the_key_that_a_loss_calls_rngs():
    model = nn.Sequential([nn.Dense(6), nn.Dropout(0.5, deterministic=False), nn.Dense(2)])

    def loss(params, batch, *, rngs):
        return jnp.mean((model.apply({"params": params}, batch["x"], rngs=rngs) - batch["y"]) ** 2)

    pipe = pipeline(loss)
    state = pipe.init(lambda key: model.init(key, BATCH["x"])["params"], KEY, BATCH)
    pipe.verify(state, BATCH, KEY)


@pytest.mark.parametrize("loss", [noisy, by_key], ids=["positional", "by keyword"])
def test_a_loss_that_needs_a_key_and_is_given_none_says_so(loss):
    rule = r"key: a loss that takes a key is given one at each call\.\n  Got: no key, and (noisy|by_key)\(params, batch, "
    pipe = pipeline(loss)
    state = pipe.init(PARAMS, BATCH)
    for call in (pipe.step, pipe.evaluate, pipe.verify, pipe.profile, pipe.collectives):
        with pytest.raises(ArgumentError, match=rule):
            call(*([] if call == pipe.collectives else [state]), BATCH)
    with pytest.raises(ArgumentError, match=rule):
        jaxpp.value_and_grad(loss, num_stages=2)(PARAMS, BATCH)
    with pytest.raises(ArgumentError, match=rule):
        pipe.stages[0].forward(PARAMS, {}, BATCH)
    pipe.evaluate(state, BATCH, loss_fn=loss_fn)


def test_a_loss_that_needs_what_jaxpp_does_not_give_is_refused():
    for loss in (lambda params: 0.0, lambda params, batch, key, beta: 0.0, lambda params, batch, *, train: 0.0):
        with pytest.raises(ArgumentError, match=r"loss_fn: the loss is called as loss_fn\(params, batch\[, key\]\)"):
            pipeline(loss)


def test_a_loss_that_cannot_be_hashed_runs():
    class Loss(list):
        def __call__(self, params, batch):
            return loss_fn(params, batch)

    loss = Loss()
    pipe = pipeline(loss)
    state = pipe.init(PARAMS, BATCH)
    compare("loss", pipe.evaluate(state, BATCH, loss_fn=loss).loss, oracle(loss_fn, PARAMS, BATCH, None, 4)[0])


def told_of_devices(monkeypatch, count, **options):
    """What is said of so many devices by a pipeline, by gradients and by a function."""
    known = jax.devices()[:count]
    monkeypatch.setattr(jax, "devices", lambda *_: known)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jaxpp.Pipeline(loss_fn, optax.sgd(0.1), **options).init(PARAMS, BATCH)
        jaxpp.value_and_grad(loss_fn, **options)(PARAMS, BATCH)
        if "schedule" not in options:
            jaxpp.Forward(lambda params, batch: jnp.tanh(batch["x"] @ params["a"]) @ params["b"], **options).init(PARAMS, BATCH)
    caught = [each for each in caught if each.category is not jaxpp.UnevenStagesWarning]
    assert all(each.category is jaxpp.DevicesWarning and each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


def test_too_few_devices_that_nobody_named_are_told_with_the_line_to_write(monkeypatch):
    told = told_of_devices(monkeypatch, 1, num_stages=2)
    assert told == [told[0]] * 3
    assert told[0] == (
        "num_stages=2: each rank of a pipeline has a device of its own.\n"
        "  Got: 2 wanted, and jax.devices() has 1: ranks that share one take turns.\n"
        '  Fix: write jax.config.update("jax_num_cpu_devices", 2) before JAX is first used; '
        "or pass devices=jax.devices(), if they shall share."
    )


def test_devices_that_a_schedule_by_name_leaves_idle_are_told(monkeypatch):
    (told, again) = told_of_devices(monkeypatch, 2, num_stages=2, schedule="interleaved")
    assert told == again
    assert told == (
        "schedule='interleaved': it has several stages on a rank, and a rank has a device.\n"
        "  Got: 2 stages on 1 rank: 1 of 2 devices has nothing to do.\n"
        "  Fix: pass num_stages=4 to use all; or devices=jax.devices()[:1] to use no more."
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_stages": 8}, ""),
        ({"num_stages": 16, "devices": jax.devices()}, ""),
        ({"num_stages": 4, "data_parallel": 2}, ""),
        ({"num_stages": 5, "data_parallel": 2}, '("jax_num_cpu_devices", 10)'),
        ({"num_stages": 8, "schedule": "interleaved"}, "8 stages on 4 ranks: 4 of 8 devices have nothing to do"),
        ({"num_stages": 4, "schedule": "interleaved"}, ""),
        ({"num_stages": 8, "schedule": "interleaved", "devices": jax.devices()[:4]}, ""),
        ({"num_stages": 8, "schedule": jaxpp.schedule.make("interleaved", num_ranks=4, num_microbatches=8)}, ""),
    ],
)
def test_devices_are_told_of_where_nobody_named_them(options, told):
    warning = Options.of(loss_fn, num_microbatches=8, **options).devices_warning
    assert told in str(warning) if told else warning is None


class Normed(nn.Module):
    """A layer with a batch normalisation that uses its running statistics."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=True)(nn.Dense(6)(x))
        return nn.Dense(2)(jnp.tanh(x))


def normed_loss(variables, batch):
    return jnp.mean((Normed().apply(variables, batch["x"]) - batch["y"]) ** 2)


def nnx_loss(graph, params, batch):
    return jnp.mean((nnx.merge(graph, params)(batch["x"]) - batch["y"]) ** 2)


def told_of_statistics(loss, optimizer, params):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jaxpp.Pipeline(loss, optimizer, num_stages=1).init(params, BATCH)
    assert all(each.category is jaxpp.ModelStateWarning for each in caught), caught
    return [str(each.message) for each in caught]


def test_running_statistics_that_the_optimizer_trains_are_told():
    variables = Normed().init(KEY, BATCH["x"])
    (told,) = told_of_statistics(normed_loss, optax.sgd(0.1), variables)
    assert "Got: params['batch_stats']['BatchNorm_0']['mean'], params['batch_stats']['BatchNorm_0']['var'].\n" in told
    assert "Fix: pass has_state=True, with a loss_fn(params, model_state, batch) that returns" in told
    mask = {"params": "train", "batch_stats": "keep"}
    frozen = optax.multi_transform({"train": optax.sgd(0.1), "keep": optax.set_to_zero()}, mask)
    assert not told_of_statistics(normed_loss, frozen, variables)


def test_running_statistics_of_nnx_are_told_too_and_a_plain_model_is_not():
    model = nnx.Sequential(nnx.Linear(4, 6, rngs=nnx.Rngs(0)), nnx.BatchNorm(6, use_running_average=True, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(nnx.Sequential(model, nnx.Linear(6, 2, rngs=nnx.Rngs(1))))
    (told,) = told_of_statistics(functools.partial(nnx_loss, graph), optax.sgd(0.1), state)
    assert "mean" in told and "var" in told and "kernel" not in told, told
    assert not told_of_statistics(loss_fn, optax.adamw(0.1), PARAMS)


class Dropping(nnx.Module):
    """Dropout that counts its random numbers, perhaps beside running statistics; what it is called with says whether it drops."""

    def __init__(self, *, normed=False):
        rngs = nnx.Rngs(0)
        self.first, self.drop, self.last = nnx.Linear(4, 6, rngs=rngs), nnx.Dropout(0.5, rngs=rngs), nnx.Linear(6, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs) if normed else nnx.Linear(6, 6, rngs=rngs)

    def __call__(self, x, *, train=True):
        return self.last(self.norm(self.drop(self.first(x), deterministic=not train)))


def dropping_loss(model, batch, *, train=True):
    return jnp.mean((model(batch["x"], train=train) - batch["y"]) ** 2)


def test_a_count_of_random_numbers_that_nobody_keeps_is_told():
    pipe = jaxpp.Pipeline(dropping_loss, optax.sgd(0.0), num_stages=2, num_microbatches=2)
    with pytest.warns(jaxpp.ModelStateWarning) as caught:  # and no MicrobatchWarning, whose remedy is another
        state = pipe.init(Dropping(), BATCH)
    (told,) = [str(each.message) for each in caught]
    assert "each step has the same dropout.\n  Got: params.drop.rngs.count.\n  Fix: split it off, graphdef, params, rest =" in told
    assert "statistics" not in told, told
    state, first = pipe.step(state, BATCH)
    assert float(pipe.step(state, BATCH)[1].loss) == float(first.loss)  # as is told
    (told,) = told_of_statistics(dropping_loss, optax.sgd(0.1), Dropping(normed=True))
    assert "running statistics" in told and "Got: params.drop.rngs.count, params.norm.mean, params.norm.var.\n" in told
    assert not told_of_statistics(functools.partial(dropping_loss, train=False), optax.sgd(0.1), Dropping())


@pytest.mark.parametrize("copy", [True, False])
def test_with_the_remedy_that_is_told_each_step_has_another_dropout(copy):
    graphdef, params, rest = nnx.split(Dropping(), nnx.Param, ...)

    def loss_with_rest(params, rest, batch):
        model = nnx.merge(graphdef, params, rest, copy=copy)
        return dropping_loss(model, batch), (nnx.state(model, nnx.Not(nnx.Param)), {})

    pipe = jaxpp.Pipeline(loss_with_rest, optax.sgd(0.0), num_stages=2, num_microbatches=1, has_state=True)
    state, first = pipe.step(pipe.init((params, rest), BATCH), BATCH)
    pipe.verify(state, BATCH)  # without a copy steps ran, and this raised Flax's TraceContextError
    assert float(pipe.step(state, BATCH)[1].loss) != float(first.loss)


class Linen(nn.Module):
    """What a newcomer writes: its ``init`` takes the inputs beside the key."""

    @nn.compact
    def __call__(self, x, scale=1.0):
        return nn.Dense(2)(nn.tanh(nn.Dense(4)(x))) * scale


MODEL = Linen()


def of_model(params, batch):
    return jnp.mean((MODEL.apply(params, batch["x"]) - batch["y"]) ** 2)


def init_with_x(key, x):
    return MODEL.init(key, x)


def init_with_batch(key, batch, dtype="float32"):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), MODEL.init(key, batch["x"]))


@pytest.mark.parametrize(
    "init",
    [
        MODEL.init,
        functools.partial(MODEL.init, mutable=["params"]),
        init_with_x,
        init_with_batch,
    ],
)
def test_an_init_function_that_takes_inputs_too_gets_those_of_the_batch(init):
    pipe = pipeline(of_model)
    state = pipe.init(init, KEY, BATCH)
    wanted = jax.jit(MODEL.init)(KEY, BATCH["x"])
    chex.assert_trees_all_equal(jax.device_get(state.params), jax.device_get(wanted))
    shapes = pipe.abstract_state(init, KEY, jax.eval_shape(lambda: BATCH))  # no values are made: shapes will do
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes.params, wanted)


def test_an_init_function_gets_a_batch_that_is_one_array():
    forward = jaxpp.Forward(MODEL.apply, num_stages=2)
    params = forward.init(MODEL.init, KEY, BATCH["x"])
    chex.assert_trees_all_equal(jax.device_get(params), jax.device_get(jax.jit(MODEL.init)(KEY, BATCH["x"])))
    taught = jaxpp.Forward(lambda params, tokens: MODEL.apply(params, tokens[:, 1:]), num_stages=2)
    with pytest.raises(Exception, match="shape") as error:  # of Flax: the model sees less than the whole array
        taught.init(MODEL.init, KEY, BATCH["x"])
    assert "the parameters are made by lambda key: model.init(key, batch); if the model takes other" in error.value.__notes__[-1]


class TwoInputs(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(2)(x)


def needs_config(key, config):
    return MODEL.init(key, config)


UNCERTAIN = {
    "a tuple": (MODEL.init, (BATCH["x"], BATCH["y"])),
    "other names": (MODEL.init, {"image": BATCH["x"], "label": BATCH["y"]}),
    "two inputs": (TwoInputs().init, BATCH),
    "a config": (needs_config, BATCH["x"]),
    "a config, and a dict": (needs_config, BATCH),
    "shapes": (MODEL.init, jax.eval_shape(lambda: BATCH)),
}


@pytest.mark.parametrize("name", UNCERTAIN)
def test_an_init_function_whose_inputs_are_not_certain_is_refused_with_the_line_to_write(name):
    init, batch = UNCERTAIN[name]
    messages.check("inputs_of_init", UNCERTAIN, name, lambda: pipeline(of_model).init(init, KEY, batch))


def test_an_init_function_that_does_not_say_what_it_takes_has_the_line_in_a_note():
    with pytest.raises(TypeError, match="required positional argument: 'x'") as error:
        pipeline(of_model).init(lambda *args: MODEL.init(*args), KEY, BATCH)  # noqa: PLW0108
    note = (
        'jaxpp: pipe.init calls its function with the key alone; if it takes inputs too, pass lambda key: init_fn(key, batch["x"])'
    )
    assert note in error.value.__notes__

    with pytest.raises(TypeError, match="required positional argument: 'inputs'") as error:
        pipeline(of_model).init(nn.Sequential([nn.Dense(2)]).init, KEY, BATCH)
    assert note.replace("init_fn", "model.init") in error.value.__notes__

    def of_two(a, b):
        return a

    with pytest.raises(TypeError, match="required positional") as error:
        pipeline(of_model).init(lambda key: of_two(key), KEY, BATCH)  # noqa: PLW0108  (it takes a key, and says so)
    assert not any("takes inputs too" in note for note in error.value.__notes__)


def test_init_says_how_many_microbatches_were_chosen_and_what_more_would_bring(capsys):
    said = "num_microbatches=2 was chosen, as many as there are stages"
    bubbles = [
        jaxpp.schedule.simulate(jaxpp.schedule.make("1f1b", num_ranks=2, num_microbatches=m)).bubble_fraction for m in (2, 4, 8)
    ]
    idle, less, least = (f"{bubble:.0%}" for bubble in bubbles)
    whole = f"{said}: devices idle for {idle} of a step of 1f1b whose stages take equally long; {less} with 4, {least} with 8"
    pipe = pipeline(num_microbatches=None)
    pipe.init(PARAMS, BATCH)
    assert (
        capsys.readouterr().out == f"jaxpp: {whole}\n"
        and pipe.stages.remarks == (whole,)
        and whole in " ".join(str(pipe.stages).split())
    )
    pipe.init(PARAMS, BATCH)
    assert capsys.readouterr().out == ""  # once a pipeline
    for options, remarks in (
        ({"schedule": "naive"}, (said,)),  # more microbatches leave it as idle as it is
        ({"num_stages": 1}, ()),
        ({"num_microbatches": 4}, ()),
    ):
        assert Options.of(loss_fn, **({"num_stages": 2} | options)).remarks == remarks
    assert Options.of(loss_fn, num_stages=2, schedule="auto").remarks[0].startswith(said)
