"""Streams of a pipeline and of a ``Forward``: the order, what goes wrong, what is alive, and that devices never drain."""

import functools
import gc
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import ArgumentError, BatchError, StateError
from jaxpp.runtime import execute as loop
from tests.outputs import close, plain, rows, same

RNG = np.random.default_rng(0)
PARAMS = {f"w{k}": RNG.normal(size=(4, 4)).astype("f") for k in range(4)}
X = RNG.normal(size=(19, 4)).astype("f")
SIZES = [8, 3, 8, 1, 19, 3]
KEY = jax.random.key(3)


def net(params, x):
    for k in range(4):
        x = jnp.tanh(x @ params[f"w{k}"])
    return x


def wide(params, x):
    return net(params, x)[:, None, None]


def noisy(params, x, key):
    return net(params, x * jax.random.bernoulli(key, 0.5, x.shape))


def batches(sizes=SIZES):
    return [np.roll(X, k, 0)[:size] for k, size in enumerate(sizes)]


@functools.cache
def pipeline(num_stages):
    return jaxpp.Pipeline(lambda params, x: (net(params, x) ** 2).mean(), optax.sgd(0.1), num_stages=num_stages)


def trained(num_stages=2):
    pipe = pipeline(num_stages)
    return pipe, pipe.init(PARAMS, X[:8])


@functools.cache
def cut(fn):
    return jaxpp.Forward(fn, num_stages=2)


def forward(fn=net):
    found = cut(fn)
    return found, found.init(PARAMS, X[:8])


def streams(given, fn=net, key=None, **options):
    """A stream of a pipeline, and one of a Forward."""
    (pipe, state), (found, params) = trained(), forward(fn=fn)
    return pipe.stream(state, given(), fn, key, **options), found.stream(params, given(), key, **options)


@pytest.mark.parametrize("max_in_flight", [1, 2, 5])
def test_outputs_come_in_order_and_are_those_of_each_batch_alone(max_in_flight):
    for stream in streams(batches, max_in_flight=max_in_flight):
        for outputs, batch in zip(stream, batches(), strict=True):
            assert same(outputs, rows(plain(net, (PARAMS,), batch, None, 2)))


def test_batch_k_has_the_key_of_its_number():
    for stream in streams(lambda: batches([8, 3, 8]), noisy, KEY):
        for k, (outputs, batch) in enumerate(zip(stream, batches([8, 3, 8]), strict=True)):
            assert same(outputs, rows(plain(noisy, (PARAMS,), batch, jax.random.fold_in(KEY, k), 2)))


def test_parameters_from_elsewhere_are_brought_home_once():
    pipe, _ = trained(4)
    stream = pipe.stream(PARAMS, batches(), net)
    next(stream)
    before = len(jax.live_arrays())
    next(stream), next(stream)
    assert len(jax.live_arrays()) == before
    assert len(list(stream)) == len(SIZES) - 3


def test_what_goes_wrong_comes_out_at_its_place_and_the_rest_is_usable():
    def fragile():
        yield X[:8]
        yield X[:8, :3]  # fn cannot take it
        yield X[:0]
        yield X[:3]
        raise OSError("the disk is full")

    for stream, where in zip(streams(fragile), ("pipe.stream", "forward.stream"), strict=True):
        close(next(stream), net(PARAMS, X[:8]))
        with pytest.raises(TypeError, match="dot_general") as caught:
            next(stream)
        assert f"jaxpp: {where}: this was batch 1, counted from 0" in caught.value.__notes__
        with pytest.raises(BatchError, match="a batch has at least one example"):
            next(stream)
        close(next(stream), net(PARAMS, X[:3]))
        with pytest.raises(OSError, match="the disk is full") as caught:
            next(stream)
        assert "when it was asked for batch 4" in caught.value.__notes__[-1]
        assert list(stream) == []


def test_a_state_that_is_stepped_while_a_stream_reads_it_is_said_in_words():
    pipe, state = trained()
    stream = pipe.stream(state, batches(), net)
    close(next(stream), net(PARAMS, X[:8]))
    pipe.step(state, X[:8])
    close(next(stream), net(PARAMS, batches()[1]))  # under way before the step
    for number in (2, 3, 4, 5):
        with pytest.raises(StateError) as caught:
            next(stream)
        assert str(caught.value).startswith("pipe.stream: a stream reads the state that it was given until it ends")
        assert "Got: 4 of 4 arrays were consumed by a step while the stream was open" in str(caught.value)
        assert "read the stream to its end before the step, or call step(..., donate=False)" in str(caught.value)
        assert f"this was batch {number}" in caught.value.__notes__[-1]
    assert list(stream) == []
    outputs = list(pipe.stream(pipe.state, batches(), net))
    state, _ = pipe.step(pipe.state, X[:8], donate=False)
    assert len(outputs) == len(SIZES)


def test_a_cell_may_be_run_again():
    pipe, state = trained()
    loader = iter(batches())
    first = [np.asarray(outputs) for outputs in pipe.stream(state, batches(), net)]
    again = [np.asarray(outputs) for outputs in pipe.stream(state, batches(), net)]
    assert same(first, again)
    assert len(list(pipe.stream(state, loader, net))) == len(SIZES)
    with pytest.raises(BatchError, match="an iterator that was run through before is empty"):
        list(pipe.stream(state, loader, net))


WRONG = {
    "a single batch": (lambda pipe, state: pipe.stream(state, X, net), "pipe.stream(..., batches, ...)", "pipe.apply(...)"),
    "no count": (lambda pipe, state: pipe.stream(state, [X], net, max_in_flight=0), "max_in_flight=0", "pass 2"),
    "no function": (lambda pipe, state: pipe.stream(state, [X], 3), "pipe.stream(..., fn)", "pass the function itself"),
    "no key": (lambda pipe, state: next(pipe.stream(state, [X], noisy)), "no key, and noisy(params, x, key)", "in the function"),
    "a number as the key": (lambda pipe, state: pipe.stream(state, [X], noisy, 3), "int 3", "pass jax.random.key(seed)"),
    "a traced batch": (
        lambda pipe, state: jax.jit(lambda x: next(pipe.stream(state, [x], net)))(X),
        "pipe.stream(state, batches, fn): a pipeline runs programs on several devices itself",
        "a traced argument",
    ),
    "before init": (
        lambda pipe, state: jaxpp.Pipeline(net, optax.sgd(0.1), num_stages=2).stream(state, [X], net),
        "pipe.stream: a pipeline is cut by init",
        "call state = pipe.init(...) first",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_in_our_words(name):
    call, *lines = WRONG[name]
    with pytest.raises((ArgumentError, StateError)) as caught:
        call(*trained())
    assert not [line for line in lines if line not in str(caught.value)], str(caught.value)


def test_a_forward_refuses_what_is_no_key_or_traced_too():
    found, params = forward()
    for given in ((params, [X], 3), (params, [X], KEY)):
        with pytest.raises(ArgumentError, match="key: a key is"):
            found.stream(*given)
    for traced in (lambda x: next(found.stream(params, [x])), lambda x: found.stream({"w0": x}, [X])):
        with pytest.raises(ArgumentError, match=r"forward\.stream\(params, .*\): a pipeline runs programs on several devices"):
            jax.jit(traced)(X)


# What is alive.


def alive():
    """How many arrays are alive, and their bytes."""
    gc.collect()
    arrays = jax.live_arrays()
    return len(arrays), sum(array.nbytes for array in arrays)


def test_what_is_alive_stays_the_same_over_5000_batches():
    pipe, state = trained()
    counts = []
    for seen, outputs in enumerate(pipe.stream(state, itertools.islice(itertools.cycle([X[:2], X[:1]]), 5000), net), 1):
        del outputs
        if seen % 1000 == 10:
            counts.append(alive())
    assert seen == 5000 and len(counts) == 5 and len(set(counts)) == 1


@pytest.mark.parametrize("leave", ["close", "let go", "an exception"])
def test_a_consumer_that_stops_early_leaves_nothing_alive(leave):
    pipe, state = trained()
    list(pipe.stream(state, [X[:8], X[:3]], net))
    before, given = alive(), []

    def loader():
        while True:
            given.append(jnp.asarray(X[:8]))
            batch = given.pop()
            refs.append(weakref.ref(batch))
            yield batch

    refs = []
    stream = pipe.stream(state, loader(), net, max_in_flight=3)
    kept = [next(stream), next(stream)]
    assert alive()[0] > before[0] + 2
    if leave == "close":
        stream.close()
        assert list(stream) == []
    elif leave == "an exception":
        with pytest.raises(RuntimeError, match="enough"), stream:
            raise RuntimeError("enough")
    else:
        del stream
    kept.clear()
    assert alive() == before and not any(ref() is not None for ref in refs)


@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
def test_a_slow_consumer_holds_at_most_so_many_outputs(max_in_flight):
    found, params = forward(fn=wide)
    stream = found.stream(params, itertools.repeat(X[:8]), max_in_flight=max_in_flight)
    for _ in range(5):
        outputs = next(stream)
        assert sum(array.shape == (8, 1, 1, 4) for array in jax.live_arrays()) <= max_in_flight
        assert outputs.shape == (8, 1, 1, 4)


# Fill and drain.


def finished(rows, dispatched):
    """When each batch is done, a forward taking 1; batch k is there at ``dispatched(k, when those before it are done)``."""
    at, device, ends = {}, [0.0] * len(rows), []
    for k in range(COUNT):
        start = dispatched(k, ends)
        for stage, row in enumerate(rows):  # a device runs its queue in order; batch k comes after all before it
            for microbatch in row[k * MICROBATCHES : (k + 1) * MICROBATCHES]:
                device[stage] = at[stage, microbatch] = max(device[stage], at.get((stage - 1, microbatch), start)) + 1
        ends.append(device[-1])
    return ends


STAGES, MICROBATCHES, COUNT = 4, 4, 5  # microbatches as stages: the default


def test_there_is_one_fill_and_one_drain_in_all(monkeypatch):
    pipe, state = trained(STAGES)
    seen = [[] for _ in range(STAGES)]
    original = loop.execute

    def noted(plan, arguments, observer, hold):
        before = len(seen[0])

        def see(instruction, slots):
            if (action := instruction.about.action) is not None and instruction.label == str(action):
                seen[action.stage].append(action._replace(microbatch=before + action.microbatch))

        return original(plan, arguments, see, hold)

    monkeypatch.setattr("jaxpp.engine.engine.execute", noted)
    assert len(list(pipe.stream(state, itertools.repeat(X[:8], COUNT), net))) == COUNT
    # What each device was given, in order, is the table of one batch with the microbatches of all.
    whole = jaxpp.schedule.forward(STAGES, COUNT * MICROBATCHES)
    assert tuple(map(tuple, seen)) == whole.rows
    rows = [[action.microbatch for action in row] for row in seen]
    makespan = jaxpp.schedule.simulate(whole).makespan
    assert makespan == COUNT * MICROBATCHES + STAGES - 1
    assert finished(rows, lambda k, ends: 0)[-1] == makespan
    # It is given in time, other than with one apply after another: with two in flight, a batch is dispatched when the outputs of
    # the second batch before it are there.
    assert finished(rows, lambda k, ends: ends[k - 2] if k > 1 else 0)[-1] == makespan
    assert finished(rows, lambda k, ends: ends[k - 1] if k else 0)[-1] == COUNT * (MICROBATCHES + STAGES - 1)
