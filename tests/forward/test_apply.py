"""``pipe.apply``: the outputs of any function over a pipeline's parameters are those of one device, for batches of any size."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import Mesh

import jaxpp
from tests import messages
from tests.outputs import SIZE, ZOO, Model, close, plain, rows, same

RNG = np.random.default_rng(0)
PARAMS = {f"w{k}": RNG.normal(size=(4, 4)).astype("f") for k in range(4)} | {"n": np.arange(3, dtype="f")}
X = RNG.normal(size=(19, 4)).astype("f")
KEY = jax.random.key(3)


def net(params, x):
    for k in range(4):
        x = jnp.tanh(x @ params[f"w{k}"])
    return x


def loss_fn(params, x):
    return (net(params, x) ** 2).mean() + params["n"].sum()


def noisy(params, x, key):
    return net(params, x * jax.random.bernoulli(key, 0.5, x.shape))


def tree(params, x):
    """Rows of several types, an early activation, and what is the same for all examples."""
    early = jnp.tanh(x @ params["w0"])
    y = net(params, x)
    rows = {"y": y, "early": early, "positive": y > 0, "label": y.argmax(-1), "x": x}
    return rows, {"n": params["n"], "w": params["w0"], "twice": 2 * params["w1"], "three": 3, "yes": np.bool_(True)}


def pipeline(loss=loss_fn, start=PARAMS, batch=X[:16], **options):
    pipe = jaxpp.Pipeline(loss, optax.adam(1e-2), **({"num_stages": 2} | options))
    return pipe, pipe.init(start, batch)


def check_rows(outputs, fn, variables, batch, key=None, num_microbatches=2):
    """Bits: the loop over the same microbatches on one device."""
    assert same(outputs, rows(plain(fn, variables, batch, key, num_microbatches)))


# Every model of the zoo.

OTHER_PROGRAMS = {"gpt", "gpt with dropout", "resnet"}
"""Where a stage is other programs than the whole: a transposed embedding made once a step, sums that XLA fuses otherwise."""


def check_model(name: str, stages: int, sizes=(SIZE, 8, 3, 1)) -> None:
    model: Model = ZOO[name]()
    has_state = model.state is not None

    def loss(params, *rest):
        value = model.mean(params, *rest)
        return (value, (rest[0], {})) if has_state else value

    pipe = jaxpp.Pipeline(loss, optax.sgd(1e-2), num_stages=stages, has_state=has_state)
    state = pipe.init((model.params, model.state) if has_state else model.params, model.of(8))
    state, _ = pipe.step(state, model.of(8), model.key)
    held = (state.params, state.model_state) if has_state else (state.params,)
    variables = jax.device_get(held)
    for size in sizes:
        outputs = pipe.apply(state, model.of(size), model.fn, model.key)
        wanted = rows(plain(model.fn, variables, model.of(size), model.key, stages))
        close(outputs, wanted)
        assert name in OTHER_PROGRAMS or same(outputs, wanted)
    assert same(pipe.apply(held if has_state else held[0], model.of(size), model.fn, model.key), jax.device_get(outputs))


@pytest.mark.long
@pytest.mark.parametrize(("name", "stages"), [("resnet", 2), ("adapters", 4)])
def test_outputs_of_a_trained_model_are_those_of_one_device(name, stages):
    check_model(name, stages, (SIZE, 1))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", ZOO)
def test_outputs_of_every_trained_model_are_those_of_one_device(name, stages):
    check_model(name, stages)


# What a function may return.


@pytest.mark.long
def test_rows_are_joined_and_what_is_the_same_everywhere_is_given_as_it_is():
    pipe, state = pipeline(num_stages=4, num_microbatches=3)
    for size in (19, 6, 2, 1):
        per_example, constant = pipe.apply(state, X[:size], tree)
        found = plain(tree, (PARAMS,), X[:size], None, 3)
        close(per_example, rows([part for part, _ in found]))
        assert same(constant, found[0][1])
        assert set().union(*(leaf.devices() for leaf in jax.tree.leaves((per_example, constant)))) == {pipe.stages[-1].device}


def test_other_outputs_are_averaged_or_reduced_as_the_caller_says():
    def fn(params, x):
        y = net(params, x)
        return {"y": y, "mean": y.mean(), "columns": y.mean(0), "positive": (y > 0).sum(), "most": y.max(), "any": (y > 0).any()}

    pipe, state = pipeline(num_microbatches=4)
    reduce_aux = {"positive": "sum", "most": "max", "columns": lambda values, weights: weights @ values}
    outputs, whole = pipe.apply(state, X, fn, reduce_aux=reduce_aux), fn(PARAMS, X)
    assert int(outputs["positive"]) == int(whole["positive"]) and outputs["any"] == 1.0
    for name in ("y", "mean", "columns", "most"):
        np.testing.assert_allclose(outputs[name], whole[name], rtol=1e-5, atol=1e-6)
    assert pipe.apply(state, X[:16], fn, reduce_aux={"y": "stack"})["y"].shape == (4, 4, 4)
    assert pipe.apply(state, X, fn)["y"].shape == (19, 4)  # another reducer, another engine


def test_a_function_need_not_return_anything_or_read_anything():
    pipe, state = pipeline()
    assert pipe.apply(state, X, lambda params, x: {}) == {} and pipe.apply(state, X, lambda params, x: None) is None
    assert same(pipe.apply(state, X, lambda params, x: x), X)
    assert int(pipe.apply(state, X, lambda params, x: 3)) == 3
    assert same(pipe.apply(state, X[:1], lambda params, x: params["w3"]), PARAMS["w3"])
    assert same(pipe.apply(state, X, lambda params, x: jnp.arange(10)), np.arange(10, dtype="int32"))  # as long as a microbatch


def test_shared_leaves_and_numbers_go_to_every_microbatch_and_come_back_as_they_are():
    def fn(params, batch):
        return {
            "y": net(params, batch["x"] * batch["beta"] + batch["graph"].sum()),
            "graph": 2 * batch["graph"],
            "beta": batch["beta"],
        }

    def batch(size):
        return {"x": X[:size], "beta": 0.5, "graph": np.ones(7, "f")}

    pipe, state = pipeline(lambda params, batch: fn(params, batch)["y"].mean(), batch=batch(8), broadcast="graph")
    for size in (14, 7, 1):  # a microbatch of 7 has as many examples as the graph has nodes
        outputs = pipe.apply(state, batch(size), fn)
        parts = [fn(PARAMS, batch(size) | {"x": part}) for part in np.array_split(X[:size], min(size, 2))]
        close(outputs, {"y": rows([part["y"] for part in parts]), "graph": parts[0]["graph"], "beta": np.float32(0.5)})


def test_each_microbatch_has_the_key_of_its_number():
    pipe, state = pipeline(num_microbatches=4)
    for key, sizes in ((KEY, (19, 3)), (jax.random.PRNGKey(3), (1,)), (jax.random.key(3, impl="rbg"), (3,))):
        for size in sizes:
            check_rows(pipe.apply(state, X[:size], noisy, key), noisy, (PARAMS,), X[:size], key, 4)
    named = lambda params, x, *, rngs=None: noisy(params, x, rngs) if rngs is not None else net(params, x)  # noqa: E731
    check_rows(pipe.apply(state, X, named, KEY), noisy, (PARAMS,), X, KEY, 4)
    check_rows(pipe.apply(state, X, named), net, (PARAMS,), X, None, 4)


# Every kind of pipeline.


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches"),
    [
        ("interleaved", 4, 4),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("zb-v", 4, 4), ("naive", 2, 1), ("dualpipe-v", 4, 8))),
    ],
)
def test_the_schedule_changes_nothing_not_even_with_two_stages_a_rank(schedule, stages, microbatches):
    if schedule == "interleaved":
        schedule = jaxpp.schedule.make(schedule, num_ranks=2, num_microbatches=microbatches, stages_per_rank=2)
    pipe, state = pipeline(num_stages=stages, num_microbatches=microbatches, schedule=schedule)
    for size in (19, 3):
        check_rows(pipe.apply(state, X[:size], net), net, (PARAMS,), X[:size], None, microbatches)


@pytest.mark.long
@pytest.mark.parametrize("options", [{"data_parallel": 2}, {"data_parallel": 4, "num_microbatches": 1}, {"mesh": (2, 2, 2)}])
def test_replicas_and_shards_give_the_rows_of_the_batch_in_order(options):
    options = dict(options)
    if "mesh" in options:
        options["mesh"] = Mesh(np.array(jax.devices()).reshape(options["mesh"]), ("pipe", "data", "model"))
        options["shardings"] = {"w0": "column", "w1": "row", "w2": "column", "w3": "row"}
    pipe, state = pipeline(**options)
    for size in (19, 8, 3, 1):
        for params in (state, state.params) if size == 3 else (state,):
            close(pipe.apply(params, X[:size], tree), jax.jit(tree)(PARAMS, X[:size]))


@pytest.mark.long
def test_replicas_number_their_microbatches_and_keys_like_a_step():
    pipe, state = pipeline(data_parallel=2, num_microbatches=2)
    parts = [noisy(PARAMS, X[2 * i : 2 * i + 2], jax.random.fold_in(KEY, i)) for i in range(4)]
    close(pipe.apply(state, X[:8], noisy, KEY), rows(parts))


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_function_of_a_pipeline_with_a_bank_reads_the_task_that_is_named(replicas):
    sets = {name: {"head": RNG.normal(size=(4, 3)).astype("f")} for name in ("cat", "dog")}
    fn = lambda params, task, x: net(params, x) @ task["head"]  # noqa: E731
    options = {"bank": jaxpp.Bank(sets, optax.sgd(0.1)), "data_parallel": replicas}
    pipe, state = pipeline(lambda params, task, x: fn(params, task, x).mean() + params["n"].sum(), **options)
    for task, params in (("cat", state), ("dog", state.params), ("cat", PARAMS)):
        close(pipe.apply(params, X[:7], fn, task=task), jax.jit(fn)(PARAMS, sets[task], X[:7]))
    if replicas == 2:
        both = [jax.jit(fn)(PARAMS, sets[task], part) for task, part in (("cat", X[:4]), ("dog", X[4:8]))]
        close(pipe.apply(state, X[:8], fn, task=["cat", "dog"]), rows(both))


def test_a_model_state_is_read_and_left_as_it_is():
    def loss(params, state, x, key):
        return loss_fn(params, x), ({"mean": 0.5 * state["mean"] + x.mean()}, {})

    def fn(params, state, x, *, key):
        return noisy(params, x, key) + state["mean"]

    pipe, state = pipeline(loss, (PARAMS, {"mean": np.ones((), "f")}), has_state=True)
    state, _ = pipe.step(state, X[:16], KEY)
    variables = jax.device_get((state.params, state.model_state))
    by_position = lambda params, state, x, key: fn(params, state, x, key=key)  # noqa: E731
    for given in (state, (state.params, state.model_state), variables):
        check_rows(pipe.apply(given, X[:7], fn, KEY), by_position, variables, X[:7], KEY)
    assert same(jax.device_get(state.model_state), variables[1])
    counted = pipe.apply(state, X[:7], lambda params, state, x: state)
    assert same(counted, variables[1])


@pytest.mark.parametrize(
    "stages", [pytest.param(3, marks=pytest.mark.slow), *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4))]
)
def test_stacked_parameters_may_be_held_as_slices(stages):
    stacked = {"w": RNG.normal(size=(6, 4, 4)).astype("f") / 2, "head": RNG.normal(size=(4, 3)).astype("f")}

    def scanned(params, x):
        x, sums = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum(-1)), x, params["w"])
        return {"y": x @ params["head"], "sums": sums.T}

    pipe, state = pipeline(lambda params, x: scanned(params, x)["y"].mean(), stacked, num_stages=stages)
    assert pipe.engine.layout.slicing.any
    for params in (state, state.params, stacked):
        close(pipe.apply(params, X[:7], scanned), rows(plain(scanned, (stacked,), X[:7], None, stages)))
    assert same(pipe.apply(state, X[:7], lambda params, x: params["w"]), stacked["w"])


def test_a_loss_scale_is_not_in_the_outputs():
    pipe, state = pipeline(loss_scale=DynamicScale(scale=4.0))
    state, _ = pipe.step(state, X[:16])
    check_rows(pipe.apply(state, X[:7], net), net, (jax.device_get(state.params),), X[:7])


def test_the_parameters_of_stages_by_hand_are_their_sequence():
    first, second = (lambda params, x: jnp.tanh(x @ params["a"])), (lambda params, x: jnp.tanh(x @ params["b"]))
    pipe = jaxpp.Pipeline.from_stages([first, second], loss=lambda y, t: ((y - t) ** 2).mean(), optimizer=optax.sgd(0.1))
    state = pipe.init([{"a": PARAMS["w0"]}, {"b": PARAMS["w1"]}], (X[:8], X[:8]))
    fn = lambda params, x: second(params[1], first(params[0], x))  # noqa: E731
    check_rows(pipe.apply(state, X[:7], fn), fn, (jax.device_get(state.params),), X[:7])


def test_parameters_stay_where_they_are():
    pipe, state = pipeline(num_stages=4)
    before = [(leaf.unsafe_buffer_pointer(), leaf.devices()) for leaf in jax.tree.leaves(state.params)]
    pipe.apply(state, X[:7], net)
    pipe.apply(state.params, X[:7], net)
    assert before == [(leaf.unsafe_buffer_pointer(), leaf.devices()) for leaf in jax.tree.leaves(state.params)]
    state, _ = pipe.step(state, X[:16])  # the state was not consumed
    check_rows(pipe.apply(state, X[:7], net), net, (jax.device_get(state.params),), X[:7], None, 4)


# What is compiled and kept.


def test_a_function_is_compiled_once_and_another_size_compiles_what_depends_on_it():
    traced = []

    def fn(params, x):
        traced.append(x.shape)
        return net(params, x)

    pipe, state = pipeline(num_microbatches=4)

    def fresh(size, **options):
        before, counted = len(pipe.engine.programs), len(traced)
        pipe.apply(state, X[:size], fn, **options)
        return len(pipe.engine.programs) - before, len(traced) - counted

    assert min(fresh(16)) > 0
    assert fresh(16) == fresh(16) == (0, 0)
    assert min(fresh(12)) > 0
    programs, traces = fresh(14)  # microbatches of 4 and 3 are known: the batch split otherwise, and the rows joined
    assert (programs, traces) == (2, 0)
    assert fresh(16) == fresh(12) == fresh(14) == (0, 0)


@pytest.mark.long
def test_functions_that_are_not_used_again_are_forgotten():
    pipe, state = pipeline(max_shapes=2)
    refs, programs = [], []
    for k in range(12):
        fn = lambda params, x: params["w0"] @ x.sum(0)  # noqa: E731
        pipe.apply(state, X[:2], fn)
        refs.append(weakref.ref(fn))
        if k in (7, 11):
            gc.collect()
            programs.append((len(pipe.engine.programs), len(jax.live_arrays())))
    del fn
    alive = [ref() is not None for ref in refs]  # those used last
    assert alive == sorted(alive) and not any(alive[:4]) and alive[-1] and programs[0] == programs[1]


# Messages.


def with_a_stepped_state(pipe, state):
    pipe.step(state, X[:16])
    pipe.apply(state, X, net)


def with_stepped_parameters(pipe, state):
    pipe.step(state, X[:16])
    pipe.apply(state.params, X, net)


def of_another_pipeline():
    return pipeline(lambda p, x: (x @ p["a"]).mean(), {"a": X[:4]}, num_stages=1)[1]


WRONG = {
    "outputs that mix examples": lambda pipe, s: pipe.apply(s, X[:8], lambda p, x: {"a": net(p, x).T, "b": (x[1:],)}),
    "outputs that are no arrays": lambda pipe, s: pipe.apply(s, X, lambda p, x: {"name": "x"}),
    "a key among the outputs": lambda pipe, s: pipe.apply(s, X, lambda p, x, key: {"key": key}, KEY),
    "rows that are summed": lambda pipe, s: pipe.apply(s, X, net, reduce_aux="sum"),
    "an unknown path to reduce": lambda pipe, s: pipe.apply(
        s, X, lambda p, x: {"mean": net(p, x).mean()}, reduce_aux={"mea": "sum"}
    ),
    "parameters of another model": lambda pipe, s: pipe.apply({"a": PARAMS["w0"]}, X, net),
    "parameters of another shape": lambda pipe, s: pipe.apply(PARAMS | {"w0": np.ones((5, 4))}, X, net),
    "a state of another pipeline": lambda pipe, s: pipe.apply(
        pipeline(lambda p, x: (x @ p["a"]).mean(), {"a": X[:4]}, num_stages=1)[1], X, net
    ),
    "before init": lambda pipe, s: jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=2).apply(s, X, net),
    "a traced batch": lambda pipe, s: jax.jit(lambda x: pipe.apply(s, x, net))(X),
    "traced parameters": lambda pipe, s: jax.jit(lambda params: pipe.apply(params, X, net))(PARAMS),
    "no function": lambda pipe, s: pipe.apply(s, net, X),
    "a function left out": lambda pipe, s: pipe.apply(s, X),
    "a function left out of a stream": lambda pipe, s: pipe.stream(s, [X]),
    "a function of other arguments": lambda pipe, s: pipe.apply(s, X, lambda params: params),
    "no key": lambda pipe, s: pipe.apply(s, X, noisy),
    "a key too much": lambda pipe, s: pipe.apply(s, X, net, KEY),
    "an empty batch": lambda pipe, s: pipe.apply(s, X[:0], net),
    "a list of numbers": lambda pipe, s: pipe.apply(s, [1.0, 2.0], net),
    "a task without a bank": lambda pipe, s: pipe.apply(s, X, net, task="cat"),
    "a stepped state": with_a_stepped_state,
    "stepped parameters": with_stepped_parameters,
}


@pytest.fixture(scope="module")
def known():
    return pipeline()


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_in_our_words(known, name):
    pipe, state = known
    given = state if "stepped" not in name else jax.tree.map(jnp.copy, state)
    error = messages.check("apply", WRONG, name, lambda: WRONG[name](pipe, given))
    assert "loss" not in str(error).replace("runs the loss", "")


def test_what_the_function_raises_comes_out_unchanged_with_a_note(known):
    pipe, state = known
    with pytest.raises(TypeError, match="dot_general") as caught:
        pipe.apply(state, X[:, :3], net)
    assert "jaxpp: raised while tracing fn with f32[10,3] beside its parameters" in caught.value.__notes__
    check_rows(pipe.apply(state, X, net), net, (PARAMS,), X)
