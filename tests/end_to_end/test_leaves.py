"""What leaves may be: typed PRNG keys wherever arrays go; what JAX does not take is refused; slices in host memory."""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import jaxpp
from jaxpp.errors import JaxppError

KEY = jax.random.key(7)
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def noise(key):
    return 0.1 * jax.random.normal(key, (4,))


def bits(tree):
    """The tree with keys as the numbers that they are made of."""
    return jax.tree.map(
        lambda leaf: np.asarray(
            jax.random.key_data(leaf)
            if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        ),
        tree,
    )


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, bits(a), bits(b))


def layers(x, pair):
    weights, key = pair
    new, now = jax.random.split(key)
    return jnp.tanh(x @ weights) + noise(now), new


def with_keys_everywhere(params, state, batch, key):
    """A loss with keys in its parameters, state (one a layer), batch (one an example, one for all) and aux."""
    x = batch["x"] + jax.vmap(noise)(batch["each"]) + noise(batch["all"]) + noise(params["key"]) + noise(key)
    of_values = jax.random.fold_in(key, jax.lax.bitcast_convert_type(x[0, 0], jnp.int32) & 0xFF)  # crosses the stages
    x, keys = jax.lax.scan(layers, x, (params["w"], state["keys"]))
    rows = jax.vmap(partial(jax.random.fold_in, data=3))(batch["each"])
    aux = {"rows": rows, "last": jax.random.fold_in(key, 1)}
    return ((x + noise(of_values)) ** 2).mean(), ({"keys": keys, "count": state["count"] + 1}, aux)


PARAMS = {"w": 0.5 * jax.random.normal(jax.random.key(1), (3, 4, 4)), "key": KEY}
STATE = {"keys": jax.random.split(jax.random.key(2), 3), "count": jnp.zeros(())}
BATCH = {"x": X, "each": jax.random.split(jax.random.key(3), 8), "all": jax.random.key(4)}


@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")  # a key that is made of values is no mean
@pytest.mark.parametrize("host", [None, pytest.param("params", marks=pytest.mark.long)])
def test_typed_keys_go_where_arrays_go(host, tmp_path):
    # Keys in unequal slices of a state ended in NumPy's words, and parameters with keys were refused.
    optimizer = optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(5)), optax.sgd(0.1))
    options = {"num_stages": 2, "num_microbatches": 2, "has_state": True, "reduce_aux": {"last": "last"}, "host": host}
    pipe = jaxpp.Pipeline(with_keys_everywhere, optimizer, **options)
    state = pipe.init((PARAMS, STATE), BATCH)
    assert len(set(state.held[2]["keys"].sizes)) == 2  # slices of unequal size
    pipe.verify(state, BATCH, KEY)
    state, metrics = pipe.step(state, BATCH, KEY)
    keys = STATE["keys"]
    for _ in range(2):
        keys = jax.vmap(jax.random.split)(keys)[:, 0]
    assert_same(state.model_state, {"keys": keys, "count": jnp.full((), 2.0)})
    assert_same(state.params["key"], KEY)
    rows = jax.vmap(partial(jax.random.fold_in, data=3))(BATCH["each"])
    assert_same(metrics.aux, {"rows": rows, "last": jax.random.fold_in(jax.random.fold_in(KEY, 1), 1)})
    assert "key" in str(pipe.stages) and str(state) and str(metrics)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "state", pipe.abstract_state((PARAMS, STATE), BATCH))
    for one, other in ((back, state), [pipe.step(each, BATCH, KEY, donate=False)[0] for each in (back, state)]):
        for part in ("params", "opt_state", "model_state"):
            assert_same(getattr(one, part), getattr(other, part))
        assert int(one.step) == other.step


def test_a_loss_closes_over_typed_keys():
    one, one_a_layer, one_a_row = KEY, jax.random.split(KEY, 3), jax.random.split(KEY, 8)

    def loss(w, x):
        x, _ = jax.lax.scan(layers, x + noise(one), (w, one_a_layer))
        return ((x + jax.vmap(noise)(one_a_row).sum(0)) ** 2).mean()

    value, grads = jaxpp.value_and_grad(loss, num_stages=2, num_microbatches=2)(PARAMS["w"], X)
    expected = jax.value_and_grad(loss)(PARAMS["w"], X)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), (value, grads), expected)


def test_outputs_carries_and_gradients_may_be_keys():
    params = {"w": jnp.eye(4), "key": KEY}
    batch = {"x": X, "k": jax.random.split(KEY, 8)}
    forward = jaxpp.Forward(lambda p, b: {"y": b["x"] @ p["w"] + noise(p["key"]), "k": b["k"]}, num_stages=1, num_microbatches=2)
    held = forward.init(params, batch)
    for outputs in (forward.apply(held, batch), *forward.stream(held, [batch])):
        assert_same(outputs["k"], batch["k"])
        np.testing.assert_allclose(outputs["y"], X + noise(KEY), rtol=1e-6)
    assert_same(jaxpp.gather(held), params)

    def decode(p, carry, tokens):
        key, now = jax.random.split(carry["key"])
        return {"key": key}, p["w"][tokens] @ p["w"] + 100 * noise(now)

    found = [t.token for t in forward.generate(held, decode, {"key": KEY}, [[1]], 3, progress=False)]
    key, token, expected = KEY, 1, []
    for _ in range(3):
        key, now = jax.random.split(key)
        token = int(jnp.argmax(jnp.eye(4)[token] + 100 * noise(now)))
        expected.append(token)
    assert found == expected
    grad_fn = jaxpp.value_and_grad(
        lambda p, b: ((b["x"] @ p["w"] + noise(p["key"])) ** 2).mean(), num_stages=1, num_microbatches=2, allow_int=True
    )
    assert grad_fn(params, batch)[1]["key"].dtype == jax.dtypes.float0


def deleted(array):
    copy = jnp.array(array)
    copy.delete()
    return copy


class Duck:
    """What has a shape and a type and is no array."""

    def __init__(self, array):
        self.shape, self.dtype = array.shape, array.dtype


UNFIT: dict[str, Callable] = {
    "masked": lambda array: np.ma.array(array, mask=np.arange(array.size).reshape(array.shape) % 2),
    "object": lambda array: array.astype(object),
    "<U32": lambda array: array.astype("U32"),
    ">": lambda array: array.astype(array.dtype.newbyteorder(">")),
    "Duck": Duck,
    "delete": deleted,
}
P = {"w": np.eye(4, dtype=np.float32), "b": np.zeros(4, np.float32)}


def squares(p, b):
    return (((b["x"] @ p["w"] + p["b"]) ** 2).mean(-1) * b["c"]).mean()


def test_what_jax_takes_for_no_array_is_refused_by_its_path():
    # Masks were dropped without a word; the others ended in JAX's words, some after the step had begun.
    counts = np.ones(8, np.float32)
    batch = {"x": X, "c": counts}
    options = {"num_stages": 1, "num_microbatches": 2}
    pipe = jaxpp.Pipeline(squares, optax.sgd(0.1), **options)
    stateful = jaxpp.Pipeline(lambda p, s, b: (squares(p, b), (s, {})), optax.sgd(0.1), has_state=True, **options)
    forward = jaxpp.Forward(lambda p, b: b["x"] @ p["w"] * b["c"][:, None], **options)
    state, held, grad_fn = pipe.init(P, batch), forward.init(P, batch), jaxpp.value_and_grad(squares, **options)
    pipe.step(state, batch, donate=False)
    forward.apply(held, batch)
    bank = jaxpp.Bank({"a": P}, optax.sgd(0.1))

    def decode(p, carry, tokens):
        return carry, p["w"][tokens] + carry["c"]

    def use(p):
        with bank.use("a") as task:
            task.params = p

    def microbatches(c):
        return jaxpp.Microbatches([{"x": X[:4], "c": counts[:4]}, {"x": X[4:], "c": c[4:] if isinstance(c, np.ndarray) else c}])

    of_params = {
        "pipe.init": lambda p: pipe.init(p, batch),
        "pipe.step": lambda p: pipe.step(state.replace(params=p), batch, donate=False),
        "forward.apply": lambda p: forward.apply(p, batch),
        "grad_fn": lambda p: grad_fn(p, batch),
        "bank.add": lambda p: bank.add("b", p),
        "bank.use": use,
        "gather": jaxpp.gather,
    }
    of_batch = {
        "init": lambda c: pipe.init(P, batch | {"c": c}),
        "step": lambda c: pipe.step(state, batch | {"c": c}, donate=False),
        "microbatches": lambda c: pipe.step(state, microbatches(c), donate=False),
        "evaluate": lambda c: pipe.evaluate(state, batch | {"c": c}),
        "verify": lambda c: pipe.verify(state, batch | {"c": c}),
        "apply": lambda c: forward.apply(held, batch | {"c": c}),
        "stream": lambda c: list(forward.stream(held, [batch | {"c": c}])),
        "model state": lambda c: stateful.init((P, {"c": c}), batch),
        "carry": lambda c: forward.generate(held, decode, {"c": c}, [[1]], 2, progress=False),
    }
    tried = [(where, call, "['w']", P["w"], lambda w: P | {"w": w}) for where, call in of_params.items()]
    tried += [(where, call, "['c']", counts, lambda c: c) for where, call in of_batch.items()]
    for what, of in UNFIT.items():
        for where, call, path, array, tree in tried:
            with pytest.raises(JaxppError) as caught:
                call(tree(of(array)))
            assert what in str(caught.value) or what == "delete", (where, str(caught.value))
            assert path in str(caught.value) or (where, what) == ("bank.use", "delete"), (where, str(caught.value))
    for prompt in (np.ma.array([1, 2], mask=[0, 1]), [1, np.ma.array(2)], deleted([1, 2])):
        with pytest.raises(jaxpp.errors.BatchError, match=r"masked|deleted"):
            list(forward.generate(held, lambda p, c, t: (c, p["w"][t]), {"c": counts}, [prompt], 2, progress=False))
    with pytest.raises(jaxpp.errors.BatchError, match="masked"):
        jaxpp.Microbatches([batch, batch], weights=np.ma.array([1.0, 2.0], mask=[0, 1]))
    pipe.step(state, batch)  # which nothing of that has touched


def test_microbatches_of_an_iterator_that_fills_its_arrays_again_are_copies():
    # All microbatches were the last one.
    def refilled() -> Iterator[dict]:
        buffer = {"x": np.empty((4, 4), np.float32), "c": np.ones(4, np.float32)}
        for begin in (0, 4):
            buffer["x"][...] = X[begin : begin + 4]
            yield buffer

    grad_fn = jaxpp.value_and_grad(squares, num_stages=1, num_microbatches=2)
    value, _ = grad_fn(P, jaxpp.Microbatches(refilled()))
    np.testing.assert_allclose(value, squares(P, {"x": X, "c": np.ones(8)}), rtol=1e-6)


@pytest.mark.parametrize("host", ["optimizer", pytest.param("params", marks=pytest.mark.long)])
def test_equal_slices_that_wait_in_host_memory_are_read_saved_and_verified(host, tmp_path):
    # "Memory kind mismatch": the joined array was said to be on the devices.
    def loss(w, x):
        return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] ** 2).mean()

    made = [jaxpp.Pipeline(loss, optax.adam(1e-2), num_stages=3, num_microbatches=2, host=each) for each in (host, None)]
    states = [pipe.step(pipe.init(PARAMS["w"], X), X)[0] for pipe in made]
    assert_same(*states)
    made[0].verify(states[0], X)
    gathered = jaxpp.gather(states[0].opt_state)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(gathered)} == {"device"}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", states[0])
        checkpointer.wait_until_finished()
        back = [checkpointer.restore(tmp_path / "state", pipe.abstract_state(PARAMS["w"], X)) for pipe in made]
    assert_same(*(pipe.step(state, X)[0] for pipe, state in zip(made, back, strict=True)))
    moved = made[1].step(states[0], X, donate=False)[0]  # by a pipeline whose leaves are on the devices
    assert_same(moved, made[0].step(states[0], X)[0])
