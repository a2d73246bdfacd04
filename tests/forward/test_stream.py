"""A stream of batches: their order, how far it looks ahead, what it holds, what goes wrong; and that devices never drain."""

import functools
import gc
import itertools
import threading
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import ArgumentError, BatchError, StateError
from jaxpp.forward import stream as ahead
from jaxpp.forward.stream import Stream
from jaxpp.runtime import execute as loop
from tests import messages
from tests.forward.signals import CtrlCAt
from tests.outputs import close, plain, rows, same

# Python cannot raise what comes while it runs a finalizer; it prints that and goes on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SIZES = [4, 2, 5, 1, 3]
BATCHES = [np.arange(size, dtype=np.float32) + k for k, size in enumerate(SIZES)]
double = jax.jit(lambda k, batch: {"twice": 2 * batch, "sum": batch.sum() + k})


class Loader:
    """An iterable with a length that records what it was asked for; a batch that is an exception is raised."""

    def __init__(self, batches=BATCHES):
        self.batches, self.given = batches, 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return self

    def __next__(self):
        if self.given == len(self.batches):
            raise StopIteration
        self.given += 1
        if isinstance(found := self.batches[self.given - 1], Exception):
            raise found
        return found


class Run:
    """Counts what it dispatches, and knows which of its outputs are alive."""

    def __init__(self, function=double):
        self.function, self.numbers, self.refs = function, [], []

    def __call__(self, number, batch):
        self.numbers.append(number)
        outputs = self.function(number, batch)
        self.refs += [weakref.ref(leaf) for leaf in jax.tree.leaves(outputs)[:1]]
        return outputs

    @property
    def alive(self):
        return sum(ref() is not None for ref in self.refs)


def check(outputs, numbers=None):
    for k, found in zip(range(len(SIZES)) if numbers is None else numbers, outputs, strict=True):
        np.testing.assert_array_equal(found["twice"], 2 * BATCHES[k])
        assert found["sum"] == BATCHES[k].sum() + k


@pytest.mark.parametrize("max_in_flight", [1, 2, 3, 100, np.int64(2)])
@pytest.mark.parametrize("make", [list, tuple, iter, Loader, lambda batches: (batch for batch in batches)])
def test_outputs_come_in_the_order_of_the_batches_whatever_their_sizes(make, max_in_flight):
    check(list(Stream(make(BATCHES), double, max_in_flight)))


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_batches_are_pulled_and_dispatched_just_so_far_ahead(max_in_flight):
    loader, run = Loader(), Run()
    stream = Stream(loader, run, max_in_flight)
    assert loader.given == 0 and run.numbers == []
    for taken in range(1, len(SIZES) + 1):
        next(stream)
        ahead = min(taken + max_in_flight - 1, len(SIZES))
        assert loader.given == ahead and run.numbers == list(range(ahead))


@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
def test_with_a_slow_consumer_so_many_outputs_exist_and_no_more(max_in_flight):
    run, most = Run(), 0
    stream = Stream(itertools.repeat(BATCHES[0]), run, max_in_flight)
    for _ in range(50):
        outputs = next(stream)
        assert run.alive == max_in_flight  # what it was given counts
        del outputs
        assert run.alive == max_in_flight - 1
        most = max(most, run.alive)
    assert most == max_in_flight - 1


def test_the_batches_themselves_are_dropped_once_they_are_dispatched():
    class Tracked(np.ndarray):
        pass

    refs = []

    def batches():
        for k in range(6):
            array = np.full(3, k, np.float32).view(Tracked)
            refs.append(weakref.ref(array))
            yield array
            del array

    stream = Stream(batches(), lambda k, batch: jnp.array(np.asarray(batch) + k), 2)
    for _ in range(6):
        next(stream)
        assert sum(ref() is not None for ref in refs) <= 1, "the generator holds the last one itself"


def test_outputs_are_there_when_they_are_given():
    release = threading.Event()

    def wait(x):
        release.wait(20)
        return np.asarray(x)

    slow = jax.jit(lambda k, x: jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * 2)
    stream = Stream([jnp.ones(3), jnp.ones(3)], slow, 2)
    timer = threading.Timer(0.2, release.set)
    timer.start()
    outputs = next(stream)
    assert release.is_set() and outputs.is_ready()
    timer.join()


def test_a_stream_is_an_iterator_that_ends_once():
    stream = Stream(Loader(), double, 2)
    assert iter(stream) is stream
    check([out for out, _ in zip(stream, range(2), strict=False)][:2], [0, 1])
    rest = list(stream)
    assert len(rest) == 2  # zip took batch 2 before it saw the end of its range
    assert list(stream) == [] and next(stream, None) is None


def test_it_has_the_length_of_its_batches_and_is_true_whatever_that_is():
    assert len(Stream(Loader(), double, 2)) == len(SIZES)
    unknown = Stream(iter(BATCHES), double, 2)
    with pytest.raises(TypeError, match="have no length"):
        len(unknown)
    assert unknown and Stream([], double, 2)
    check(list(unknown))


def test_it_says_where_it_is():
    stream = Stream(BATCHES[:2], double, 2, where="forward.stream")
    assert repr(stream) == "<forward.stream: batch 0 is next; 0 of at most 2 in flight>"
    next(stream)
    assert repr(stream) == "<forward.stream: batch 1 is next; 1 of at most 2 in flight>"
    list(stream)
    assert repr(stream) == "<forward.stream: ended after 2 batches>"


# What goes wrong.


@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
def test_what_the_source_raises_comes_out_at_its_place_and_the_source_is_asked_again(max_in_flight):
    raised = OSError("a file is broken")
    loader = Loader([*BATCHES[:2], raised, *BATCHES[3:]])
    stream = Stream(loader, double, max_in_flight)
    check([next(stream), next(stream)], [0, 1])
    with pytest.raises(OSError, match="a file is broken") as caught:
        next(stream)
    assert caught.value is raised
    assert raised.__notes__ == ["jaxpp: pipe.stream: the iterator of batches raised this when it was asked for batch 2"]
    check(list(stream), [3, 4])  # numbers, and so keys, are those of the places


def test_a_generator_that_has_raised_has_ended():
    def batches():
        yield BATCHES[0]
        yield BATCHES[1]
        raise RuntimeError("no more")

    stream = Stream(batches(), double, 2)
    check([next(stream), next(stream)], [0, 1])
    with pytest.raises(RuntimeError, match="no more"):
        next(stream)
    assert list(stream) == []


@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
@pytest.mark.parametrize("place", range(len(SIZES)))
def test_a_batch_that_the_model_refuses_raises_at_its_place_and_the_rest_is_usable(place, max_in_flight):
    weights = jnp.ones((3, 2))
    model = jax.jit(lambda k, x: x @ weights)
    batches: list = [jnp.full((2, 3), k) for k in range(5)]
    batches[place] = jnp.ones((2, 7))
    stream = Stream(batches, model, max_in_flight)
    for k in range(5):
        if k == place:
            with pytest.raises(TypeError, match="dot_general") as caught:
                next(stream)
            assert f"jaxpp: pipe.stream: this was batch {place}, counted from 0" in caught.value.__notes__
        else:
            np.testing.assert_array_equal(next(stream), jnp.full((2, 2), 3.0 * k))
    assert next(stream, "ended") == "ended"


@pytest.mark.parametrize("max_in_flight", [1, 2, 4])
def test_what_a_program_raises_while_it_runs_comes_out_at_its_place_and_the_rest_is_usable(max_in_flight):
    def fail_at_two(x):
        if x[0] == 2:
            raise ValueError("refused by the callback")
        return np.asarray(x)

    model = jax.jit(lambda k, x: jax.pure_callback(fail_at_two, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + k)
    stream = Stream([jnp.full(3, k) for k in range(4)], model, max_in_flight)
    assert [int(next(stream)[0]) for _ in range(2)] == [0, 2]
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="refused by the callback") as caught:
        next(stream)
    assert caught.value.__notes__[-1] == "jaxpp: pipe.stream: this was batch 2, counted from 0"
    assert [int(outputs[0]) for outputs in stream] == [6]


def test_what_a_device_raises_comes_out_when_its_outputs_are_waited_for():
    class Poisoned:
        def block_until_ready(self):
            raise FloatingPointError("found by a device")

    run = Run(lambda k, batch: {"x": Poisoned() if k == 1 else jnp.asarray(batch)})
    stream = Stream(BATCHES, run, 3)
    assert next(stream)["x"].shape == (4,) and run.numbers == [0, 1, 2]
    with pytest.raises(FloatingPointError, match="found by a device") as caught:
        next(stream)
    assert caught.value.__notes__ == ["jaxpp: pipe.stream: this was batch 1, counted from 0"]
    assert [outputs["x"].shape for outputs in stream] == [(5,), (1,), (3,)]


def test_several_failures_in_a_row_come_out_one_by_one():
    def run(k, batch):
        if batch < 0:
            raise ValueError(f"negative: {batch}")
        return jnp.asarray(batch)

    stream = Stream(Loader([1, -2, -3, KeyError("lost"), 5]), run, 3)
    assert next(stream) == 1
    for match in ("-2", "-3", "lost"):
        with pytest.raises((ValueError, KeyError), match=match):
            next(stream)
    assert next(stream) == 5 and next(stream, None) is None


def test_a_stop_iteration_inside_the_model_is_not_taken_for_the_end():
    def run(k, batch):
        return next(iter([])) if k == 1 else jnp.asarray(batch)

    stream = Stream([1, 2, 3], run, 2)
    assert next(stream) == 1
    with pytest.raises(RuntimeError, match="StopIteration was raised") as caught:
        next(stream)
    assert isinstance(caught.value.__cause__, StopIteration) and "batch 1" in caught.value.__cause__.__notes__[0]
    assert next(stream) == 3


def test_what_is_raised_keeps_its_cause():
    def run(k, batch):
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("outer") from inner

    with pytest.raises(ValueError, match="outer") as caught:
        next(Stream([1], run, 1))
    assert isinstance(caught.value.__cause__, KeyError)


class Pair(NamedTuple):
    x: jax.Array
    y: jax.Array


@pytest.mark.parametrize(
    "batches", [{"x": jnp.ones(3)}, jnp.ones((3, 2)), np.ones((3, 2)), "folder", Pair(jnp.ones(3), jnp.ones(3)), 7, None]
)
def test_a_single_batch_is_refused_in_words(batches):
    with pytest.raises(ArgumentError) as caught:
        Stream(batches, double, 2)
    where, got, fix = str(caught.value).splitlines()
    assert where.startswith("pipe.stream(..., batches, ...): batches is an iterable of batches: a list, a generator")
    assert got.startswith(f"  Got: a single {type(batches).__name__}")
    assert fix == "  Fix: pass [batch] for one batch, or call pipe.apply(...)."


@pytest.mark.parametrize("number", [0, -1, 1.5, "2", True, None])
def test_a_look_ahead_that_is_no_count_is_refused(number):
    with pytest.raises(ArgumentError, match="a whole number of at least 1") as caught:
        Stream(BATCHES, double, number)
    assert f"max_in_flight={number!r}" in str(caught.value)


def test_an_iterator_without_a_batch_is_refused_when_it_is_asked():
    used = iter(BATCHES)
    list(used)
    stream = Stream(used, double, 2)
    with pytest.raises(BatchError) as caught:
        next(stream)
    where, got, fix = str(caught.value).splitlines()
    assert where == "pipe.stream(..., batches, ...): there is at least one batch."
    assert got == "  Got: an iterator that ended before its first batch."
    assert fix.startswith("  Fix: pass a list or a fresh iterator of batches")
    assert not hasattr(caught.value, "__notes__")
    assert list(stream) == []


# What it holds.


def leave_by_break(make):
    for _ in make():
        break


def leave_by_with(make):
    with make() as stream:
        next(stream)
    assert next(stream, "ended") == "ended"
    return stream


def leave_by_close(make):
    stream = make()
    next(stream)
    stream.close()
    stream.close()
    assert repr(stream) == "<pipe.stream: ended after 1 batches>"
    return stream


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_with, leave_by_close])
def test_a_consumer_that_stops_early_leaves_nothing_alive(leave):
    class Weights:
        def __init__(self):
            self.array = jnp.ones(1000)

    weights = Weights()
    run = Run(lambda k, batch, weights=weights: jnp.asarray(batch) + weights.array[:3])
    lost = weakref.ref(weights)
    del weights
    gc.collect()
    before = len(jax.live_arrays())
    gc.disable()
    try:
        kept = leave(lambda run=run: Stream(itertools.repeat(np.ones(3)), run, 3))
        assert run.alive == 0 and len(run.refs) == 3
        assert len(jax.live_arrays()) == before
        del run
        assert lost() is None  # the stream has dropped what it ran, too
        assert kept is None or next(kept, "ended") == "ended"
    finally:
        gc.enable()


def test_a_failure_in_flight_keeps_nothing_alive_either():
    def run(k, batch):
        if k == 2:
            raise ValueError("too late to be seen")
        return jnp.asarray(batch)

    counted = Run(run)
    stream = Stream(Loader(), counted, 4)
    next(stream)
    assert 1 <= counted.alive <= 4
    stream.close()
    assert counted.alive == 0
    stream = Stream(Loader(), run, 4)
    next(stream)
    gone = weakref.ref(stream)
    del stream
    gc.collect()  # the exception knows the frames that called it, and these know the stream
    assert gone() is None


def test_a_stream_that_has_ended_holds_nothing():
    run = Run()
    stream = Stream(Loader(), run, 2)
    for _ in stream:
        pass
    del _
    assert run.alive == 0
    gone = weakref.ref(run)
    del run
    assert gone() is None and next(stream, None) is None


@pytest.mark.long
def test_what_is_alive_stays_the_same_over_1000_batches():
    stream = Stream((batch for _ in range(200) for batch in BATCHES), double, 3)
    counts = []
    for seen, outputs in enumerate(stream, 1):
        del outputs
        if seen % 200 == 10:
            gc.collect()  # of other tests
            counts.append(len(jax.live_arrays()))
    assert seen == 1000 and len(counts) == 5 and len(set(counts)) == 1


# Ctrl-C.


def drained(stream, number):
    """All that a stream gives and raises, under one Ctrl-C at the point of this number; and whether it came."""
    found, came, seen = [], False, 0
    while True:
        try:
            with CtrlCAt([(ahead.__file__, None), (__file__, {"run"})], -1 if came else number - seen) as tracer:
                outputs = stream.__next__()
            found.append(outputs)
        except StopIteration:
            return found, came
        except KeyboardInterrupt:
            came = True
        seen += tracer.seen


def test_after_ctrl_c_wherever_python_handles_it_in_next_no_output_is_lost(ctrl_c):
    def run(k, batch):
        return k, str(batch)

    wanted = [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert drained(Stream("a b c d".split(), run, 2), -1) == (wanted, False)
    hits = 0
    for number in itertools.count(1):
        found, came = drained(Stream("a b c d".split(), run, 2), number)
        if not came:
            break
        assert found == wanted, number
        hits += 1
    assert hits > 50


# Over a pipeline, and over a Forward.

RNG = np.random.default_rng(0)
PARAMS = {f"w{k}": RNG.normal(size=(4, 4)).astype("f") for k in range(4)}
X = RNG.normal(size=(19, 4)).astype("f")
LENGTHS = [8, 3, 8, 1, 19, 3]
KEY = jax.random.key(3)


def net(params, x):
    for k in range(4):
        x = jnp.tanh(x @ params[f"w{k}"])
    return x


def wide(params, x):
    return net(params, x)[:, None, None]


def noisy(params, x, key):
    return net(params, x * jax.random.bernoulli(key, 0.5, x.shape))


def batches(sizes=LENGTHS):
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


@pytest.mark.parametrize("max_in_flight", [1, pytest.param(2, marks=pytest.mark.long), 5])
def test_outputs_come_in_order_and_are_those_of_each_batch_alone(max_in_flight):
    for stream in streams(batches, max_in_flight=max_in_flight):
        for outputs, batch in zip(stream, batches(), strict=True):
            assert same(outputs, rows(plain(net, (PARAMS,), batch, None, 2)))


@pytest.mark.long
def test_batch_k_has_the_key_of_its_number():
    for stream in streams(lambda: batches([8, 3, 8]), noisy, KEY):
        for k, (outputs, batch) in enumerate(zip(stream, batches([8, 3, 8]), strict=True)):
            assert outputs.devices() == {jax.devices()[1]}
            assert same(outputs, rows(plain(noisy, (PARAMS,), batch, jax.random.fold_in(KEY, k), 2)))


@pytest.mark.long
def test_parameters_from_elsewhere_are_brought_home_once():
    pipe, _ = trained(4)
    stream = pipe.stream(PARAMS, batches(), net)
    next(stream)
    before = len(jax.live_arrays())
    next(stream), next(stream)
    assert len(jax.live_arrays()) == before
    assert len(list(stream)) == len(LENGTHS) - 3


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
    assert len(outputs) == len(LENGTHS)


def test_a_cell_may_be_run_again():
    pipe, state = trained()
    loader = iter(batches())
    first = [np.asarray(outputs) for outputs in pipe.stream(state, batches(), net)]
    again = [np.asarray(outputs) for outputs in pipe.stream(state, batches(), net)]
    assert same(first, again)
    assert len(list(pipe.stream(state, loader, net))) == len(LENGTHS)
    with pytest.raises(BatchError, match="an iterator that was run through before is empty"):
        list(pipe.stream(state, loader, net))


WRONG = {
    "a single batch": lambda pipe, state: pipe.stream(state, X, net),
    "no count": lambda pipe, state: pipe.stream(state, [X], net, max_in_flight=0),
    "no function": lambda pipe, state: pipe.stream(state, [X], 3),
    "no key": lambda pipe, state: next(pipe.stream(state, [X], noisy)),
    "a number as the key": lambda pipe, state: pipe.stream(state, [X], noisy, 3),
    "a traced batch": lambda pipe, state: jax.jit(lambda x: next(pipe.stream(state, [x], net)))(X),
    "before init": lambda pipe, state: jaxpp.Pipeline(net, optax.sgd(0.1), num_stages=2).stream(state, [X], net),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_in_our_words(name):
    messages.check("stream", WRONG, name, lambda: WRONG[name](*trained()))


def test_a_forward_refuses_what_is_no_key_or_traced_too():
    found, params = forward()
    for given in ((params, [X], 3), (params, [X], KEY)):
        with pytest.raises(ArgumentError, match="key: a key is"):
            found.stream(*given)
    for traced in (lambda x: next(found.stream(params, [x])), lambda x: found.stream({"w0": x}, [X])):
        with pytest.raises(ArgumentError, match=r"forward\.stream\(params, .*\): a pipeline runs programs on several devices"):
            jax.jit(traced)(X)


# What is alive.


def live_arrays():
    """How many arrays are alive, and their bytes."""
    gc.collect()
    arrays = jax.live_arrays()
    return len(arrays), sum(array.nbytes for array in arrays)


@pytest.mark.long
def test_what_a_pipeline_holds_stays_the_same_over_5000_batches():
    pipe, state = trained()
    counts = []
    for seen, outputs in enumerate(pipe.stream(state, itertools.islice(itertools.cycle([X[:2], X[:1]]), 5000), net), 1):
        del outputs
        if seen % 1000 == 10:
            counts.append(live_arrays())
    assert seen == 5000 and len(counts) == 5 and len(set(counts)) == 1


@pytest.mark.parametrize("leave", ["close", "let go", "an exception"])
def test_over_a_pipeline_a_consumer_that_stops_early_leaves_nothing_alive(leave):
    pipe, state = trained()
    list(pipe.stream(state, [X[:8], X[:3]], net))
    before, given = live_arrays(), []

    def loader():
        while True:
            given.append(jnp.asarray(X[:8]))
            batch = given.pop()
            refs.append(weakref.ref(batch))
            yield batch

    refs = []
    stream = pipe.stream(state, loader(), net, max_in_flight=3)
    kept = [next(stream), next(stream)]
    assert live_arrays()[0] > before[0] + 2
    if leave == "close":
        stream.close()
        assert list(stream) == []
    elif leave == "an exception":
        with pytest.raises(RuntimeError, match="enough"), stream:
            raise RuntimeError("enough")
    else:
        del stream
    kept.clear()
    assert live_arrays() == before and not any(ref() is not None for ref in refs)


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

    def noted(plan, arguments, observer, hold, threads=None):
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


def test_after_ctrl_c_at_random_moments_a_stream_over_a_pipeline_goes_on_with_every_output(ctrl_c_after):
    pipe, state = trained()
    wanted = list(pipe.stream(state, batches() * 4, noisy, KEY))
    rng, hits = np.random.default_rng(0), 0
    while hits < 20:
        stream, found = pipe.stream(state, batches() * 4, noisy, KEY, max_in_flight=3), []
        while len(found) < len(wanted):
            try:
                ctrl_c_after(rng.uniform(0.1, 8))
                found.extend(stream)  # in C: what was given is kept
                ctrl_c_after(None)
            except KeyboardInterrupt:
                hits += 1
        assert same(found, wanted)
