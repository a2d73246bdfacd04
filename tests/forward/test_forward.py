"""``jaxpp.Forward``: any function over several devices gives what one device gives, from parameters of any type and origin."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh

import jaxpp
from jaxpp.errors import ArgumentError
from tests import messages
from tests.outputs import SIZE, ZOO, Model, close, plain, rows, same

RNG = np.random.default_rng(0)
PARAMS = {f"w{k}": RNG.normal(size=(4, 4)).astype("f") for k in range(4)}
X = RNG.normal(size=(19, 4)).astype("f")
KEY = jax.random.key(3)
OTHER_PROGRAMS = {"gpt", "gpt with dropout", "resnet", "hugging face", "equinox", "haiku"}
"""Where a stage is other programs than the whole: a transposed embedding made once a call, sums that XLA fuses otherwise."""


def net(params, x):
    for k in range(4):
        x = jnp.tanh(x @ params[f"w{k}"])
    return x


def init(key):
    made = {f"w{k}": jax.random.normal(jax.random.fold_in(key, k), (4, 4)) for k in range(4)}
    return made | {"count": jax.random.randint(key, (3,), 0, 9), "on": jax.random.bernoulli(key, 0.5, (4,))}


# Every model of the zoo.


def check_model(model: Model, stages: int, sizes, *, bits: bool) -> None:
    has_state = model.state is not None
    variables = (model.params, model.state) if has_state else (model.params,)
    forward = jaxpp.Forward(model.with_state if has_state else model.fn, num_stages=stages)
    params = forward.init(variables if has_state else model.params, model.of(8))
    for size in sizes:
        outputs = forward.apply(params, model.of(size), model.key)
        wanted = rows(plain(model.fn, variables, model.of(size), model.key, stages))
        close(outputs, wanted)
        assert same(outputs, wanted) or not bits


LONG = [
    pytest.param(name, stages, marks=pytest.mark.long) for name, stages in (("nnx_gpt", 2), ("gpt", 2), ("unet", 4), ("seq2seq", 4))
]


@pytest.mark.parametrize(("name", "stages"), [("mlp", 4), *LONG])
def test_outputs_are_those_of_one_device(name, stages):
    check_model(ZOO[name](), stages, (SIZE,), bits=name not in OTHER_PROGRAMS)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", ZOO)
def test_outputs_of_every_model_are_those_of_one_device(name, stages):
    check_model(ZOO[name](), stages, (SIZE, 8, 3, 1), bits=name not in OTHER_PROGRAMS)


def hugging_face() -> Model:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=4, n_head=2)
    model = transformers.FlaxGPT2LMHeadModel(config, _do_init=False)
    tokens = RNG.integers(0, 32, (SIZE, 8)).astype("i4")
    return Model(lambda params, x: model(x, params=params).logits, model.init_weights(KEY, (1, 8)), tokens)


def haiku() -> Model:
    hk = pytest.importorskip("haiku")
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([16, 16, 16, 3], name="mlp")(x)))  # noqa: PLW0108
    return Model(model.apply, model.init(KEY, X[:SIZE]), X[:SIZE])


def equinox() -> Model:
    eqx = pytest.importorskip("equinox")
    params, static = eqx.partition(eqx.nn.MLP(4, 3, 16, 4, key=KEY), eqx.is_array)
    return Model(lambda params, x: jax.vmap(eqx.combine(params, static))(x), params, X[:SIZE])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # theirs
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("make", [hugging_face, haiku, equinox])
def test_outputs_of_models_of_other_libraries_are_those_of_one_device(make, stages):
    check_model(make(), stages, (SIZE, 8, 3, 1), bits=False)


# Where parameters come from.


@pytest.mark.parametrize("stages", [1, 4])
def test_init_makes_the_bits_of_the_plain_init_on_the_owners(stages):
    forward = jaxpp.Forward(lambda params, x: net(params, x) * params["on"] + params["count"].sum(), num_stages=stages)
    params = forward.init(init, KEY, X[:8])
    assert same(params, jax.jit(init)(KEY))
    assert [next(iter(params[f"w{k}"].devices())).id for k in range(4)] == [k * stages // 4 for k in range(4)]
    target = forward.abstract_params(init, KEY, X[:8])
    given = forward.init(jax.device_get(params), X[:8])
    for a, b, c in zip(*map(jax.tree.leaves, (target, params, given)), strict=True):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding) and b.sharding == c.sharding
    assert same(forward.apply(given, X[:7]), forward.apply(params, X[:7]))


def test_a_checkpoint_comes_straight_to_other_owners(tmp_path):
    fn = lambda params, x: net(params, x) * params["on"] + params["count"].sum()  # noqa: E731
    one, four = (jaxpp.Forward(fn, num_stages=stages) for stages in (1, 4))
    saved = one.init(init, KEY, X[:8])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", saved)
    target = four.abstract_params(jax.eval_shape(init, KEY), X[:8])
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "params", target)
    assert {name: leaf.sharding for name, leaf in restored.items()} == {name: leaf.sharding for name, leaf in target.items()}
    assert same(restored, saved)
    close(four.apply(restored, X[:7]), rows(plain(fn, (saved,), X[:7], None, 4)))
    assert len({leaf.sharding for leaf in restored.values()}) == 4


def quantised(params, x):
    y = x @ (params["q"].astype("f") * params["scale"]) * params["mask"] @ params["half"].astype("f")
    moved = x + jax.random.normal(params["key"], (4,))
    return {"y": y, "shifted": x[:, 0].astype(int) + params["count"], "moved": moved, "wide": x * params["wide"]}


@pytest.mark.parametrize("stages", [1, 2])
def test_parameters_may_have_any_type(stages):
    params = {
        "q": RNG.integers(-127, 127, (4, 4)).astype("int8"),
        "scale": np.full(4, 0.01, "f"),
        "mask": np.array([True, False, True, True]),
        "half": jnp.asarray(RNG.normal(size=(4, 4)), "bfloat16"),
        "count": np.ones((), "int32"),
        "key": jax.random.key(1),
        "wide": np.ones(4),  # float64, which JAX takes as float32
        "unused": np.zeros(3, "uint8"),
    }
    forward = jaxpp.Forward(quantised, num_stages=stages)
    for given in (forward.init(params, X[:8]), forward.init(lambda key: params | {"key": key}, jax.random.key(1), X[:8]), params):
        outputs = forward.apply(given, X[:7])
        assert same(outputs, rows(plain(quantised, (params,), X[:7], None, stages)))


def test_stacked_parameters_may_be_held_as_slices_and_are_the_users_tree():
    def scanned(params, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])[0]

    stacked = {"w": RNG.normal(size=(6, 4, 4)).astype("f") / 2}
    for stages in (3, 4):
        forward = jaxpp.Forward(scanned, num_stages=stages)
        params = forward.init(stacked, X[:8])
        assert forward.engine.layout.slicing.any and same(params, stacked)
        for given in (params, stacked):
            close(forward.apply(given, X[:7]), rows(plain(scanned, (stacked,), X[:7], None, stages)))


# Options.


def test_it_is_cut_by_what_the_forward_costs():
    def fn(params, x):
        h = jnp.tanh(x @ params["a"] @ params["b"])
        return jax.lax.stop_gradient(h) @ params["c"] @ params["d"]

    params = {name: RNG.normal(size=(8, 8)).astype("f") for name in "abcd"}
    forward = jaxpp.Forward(fn, num_stages=2)
    params = forward.init(params, np.ones((8, 8), "f"))
    assert [next(iter(params[name].devices())).id for name in "abcd"] == [0, 0, 1, 1]
    assert "init: not done yet" in repr(jaxpp.Forward(fn, num_stages=2)) and "print(forward.stages)" in repr(forward)
    assert [stage.num_params for stage in forward.stages] == [128, 128]


def test_names_and_devices_decide_where_stages_begin_and_live():
    devices = jax.devices()[3:5]
    forward = jaxpp.Forward(net, num_stages=2, cuts=["w3"], devices=devices, num_microbatches=3)
    params = forward.init(PARAMS, X[:8])
    assert [next(iter(params[f"w{k}"].devices())) for k in range(4)] == 3 * devices[:1] + devices[1:]
    outputs = forward.apply(params, X)
    assert outputs.devices() == set(devices[1:]) and same(outputs, rows(plain(net, (PARAMS,), X, None, 3)))


def test_shards_and_replicas_take_their_parts():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("pipe", "data", "model"))
    shardings = {"w0": "column", "w1": "row", "w2": "column", "w3": "row"}
    forward = jaxpp.Forward(net, num_stages=2, mesh=mesh, shardings=shardings)
    params = forward.init(PARAMS, X[:8])
    for size in (19, 1):
        close(forward.apply(params, X[:size]), jax.jit(net)(PARAMS, X[:size]))
    with pytest.raises(ArgumentError, match="no mesh"):
        jaxpp.Forward(net, num_stages=2, shardings=shardings)


def test_outputs_are_reduced_as_the_options_say_and_the_key_is_folded():
    def fn(params, x, *, key=None):
        y = net(params, x if key is None else x * jax.random.bernoulli(key, 0.5, x.shape))
        return {"y": y, "positive": (y > 0).sum(), "w": params["w0"]}

    forward = jaxpp.Forward(fn, num_stages=2, num_microbatches=4, reduce_aux={"positive": "sum"})
    params = forward.init(PARAMS, X[:1])
    for key in (None, KEY):
        outputs = forward.apply(params, X, key)
        found = plain(lambda params, x, key=None: fn(params, x, key=key), (PARAMS,), X, key, 4)
        assert same({name: outputs[name] for name in "yw"}, {"y": rows([part["y"] for part in found]), "w": PARAMS["w0"]})
        assert int(outputs["positive"]) == sum(int(part["positive"]) for part in found)


def test_one_stage_may_do_nearly_nothing():
    forward = jaxpp.Forward(lambda params, x: {"x": 2 * x, "p": params, "none": {}}, num_stages=1)
    assert same(forward.apply(forward.init(PARAMS, X), X[:3]), {"x": 2 * X[:3], "p": PARAMS, "none": {}})


def test_another_init_of_the_same_shapes_compiles_nothing():
    forward = jaxpp.Forward(net, num_stages=2)
    params = forward.init(PARAMS, X[:8])
    before = len(forward.engine.programs)
    forward.apply(params, X[:8]), forward.init(PARAMS, X[:8]), forward.abstract_params(PARAMS, X[:8])
    assert len(forward.engine.programs) == before
    forward.apply(params, X[:5])
    assert len(forward.engine.programs) > before


# Messages.

WRONG = {
    "parameters alone": lambda f, p: f.init(PARAMS),
    "a function without a key": lambda f, p: f.init(init, X),
    "parameters and a key": lambda f, p: f.init(PARAMS, KEY, X),
    "a batch before the key": lambda f, p: f.init(init, X, KEY),
    "a batch before parameters": lambda f, p: jaxpp.Forward(net, num_stages=2).init(X, PARAMS),
    "shapes alone": lambda f, p: f.abstract_params(PARAMS),
    "parameters that are no arrays": lambda f, p: f.init({"a": "b"}, X),
    "no function": lambda f, p: jaxpp.Forward(3, num_stages=2),
    "a function of other arguments": lambda f, p: jaxpp.Forward(lambda params: params, num_stages=2),
    "no stages": lambda f, p: jaxpp.Forward(net, num_stages=0),
    "too many stages": lambda f, p: jaxpp.Forward(net, num_stages=99).init(PARAMS, X),
    "a function that does nothing": lambda f, p: jaxpp.Forward(lambda params, x: {}, num_stages=2).init(PARAMS, X),
    "an unknown name": lambda f, p: jaxpp.Forward(net, num_stages=2, cuts=["x"]).init(PARAMS, X),
    "an unknown path to reduce": lambda f, p: jaxpp.Forward(net, num_stages=2, reduce_aux={"x": "sum"}).init(PARAMS, X),
    "outputs that cannot be merged": lambda f, p: jaxpp.Forward(lambda params, x: net(params, x)[::-1], num_stages=2).init(
        PARAMS, X
    ),
    "apply before init": lambda f, p: jaxpp.Forward(net, num_stages=2).apply(PARAMS, X),
    "stages before init": lambda f, p: jaxpp.Forward(net, num_stages=2).stages,
    "other parameters": lambda f, p: f.apply({"a": X}, X),
    "parameters of another type": lambda f, p: f.apply(PARAMS | {"w0": np.ones((4, 4), int)}, X),
    "a number as a parameter": lambda f, p: f.apply(PARAMS | {"w0": 3}, X),
    "nothing": lambda f, p: f.apply(None, X),
    "a key too much": lambda f, p: f.apply(p, X, KEY),
    "an empty batch": lambda f, p: f.apply(p, X[:0]),
    "no batch": lambda f, p: f.apply(p, None),
    "a traced batch": lambda f, p: jax.jit(lambda x: f.apply(p, x))(X),
    "traced parameters": lambda f, p: jax.jit(lambda w: f.apply(w, X))(PARAMS),
    "traced shapes": lambda f, p: jax.jit(lambda w: f.init(w, X))(PARAMS),
}


@pytest.fixture(scope="module")
def known():
    forward = jaxpp.Forward(net, num_stages=2)
    return forward, forward.init(PARAMS, X[:8])


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_in_our_words(known, name):
    error = messages.check("forward", WRONG, name, lambda: WRONG[name](*known))
    assert "loss" not in str(error) and "pipe.init" not in str(error)
