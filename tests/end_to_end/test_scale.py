"""What grows with a model, a schedule or the number of batch shapes grows no faster than that.

Work is counted, not timed: the lines of jaxpp's own code that run while Python traces it.
"""

import gc
import itertools
import pathlib
import sys
import weakref

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpp
from jaxpp.engine.engine import open_engine
from jaxpp.options import Options
from jaxpp.runtime.compile import PlacedProgram, Programs
from jaxpp.runtime.place import OneDevice
from jaxpp.stages.program import Program, Ref, Role

HOME = str(pathlib.Path(jaxpp.__file__).parent)
LINEAR = 2.4
"""Times as much work for twice as much to do."""


def lines_run(function):
    """How many lines of jaxpp run in a call."""
    count = 0

    def inner(frame, event, argument):
        nonlocal count
        count += event == "line"
        return inner

    def outer(frame, event, argument):
        return inner if frame.f_code.co_filename.startswith(HOME) else None

    before = sys.gettrace()
    sys.settrace(outer)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def loop(params, batch):
    x = batch
    for name in sorted(params):
        x = x * params[name]
    return (x**2).mean()


def scan(params, batch):
    def layer(x, rows):
        for name in sorted(rows):
            x = x * rows[name]
        return x, None

    return (jax.lax.scan(layer, batch, params)[0] ** 2).mean()


OPTIMIZERS = {
    "clip and adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-3), 2),
}


@pytest.mark.long
@pytest.mark.parametrize(("loss_fn", "name"), [(loop, "clip and adamw"), (loop, "MultiSteps"), (scan, "clip and adamw")])
def test_tracing_cutting_and_lowering_grow_linearly_with_parameter_leaves(loss_fn, name):
    def prepare(num_leaves):
        shape = (2, 4) if loss_fn is scan else (4,)
        params = {f"w{k:03}": jax.ShapeDtypeStruct(shape, jnp.float32) for k in range(num_leaves)}
        options, batch = Options.of(loss_fn, num_stages=2), jnp.ones((4, 4))

        def run():
            engine = open_engine(options, OPTIMIZERS[name](), (params,), batch, None)
            engine.lower("update", batch, None)

        return lines_run(run)

    assert prepare(60) < LINEAR * prepare(30)


def squares(params, batch, key=None):
    x = batch if key is None else batch * jax.random.bernoulli(key, 0.5, batch.shape)
    for name in sorted(params):
        x = jnp.tanh(x * params[name])
    return (x**2).mean()


def dropout(params, batch, key):
    return squares(params, batch, key)


def pipeline(loss_fn=squares, num_stages=2, num_microbatches=2, **options):
    params = {f"w{k:03}": jnp.full(4, 0.5) for k in range(num_stages)}
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=num_stages, num_microbatches=num_microbatches, **options)
    return pipe, pipe.init(params, jnp.ones((2 * num_microbatches, 4)))


@pytest.mark.long
def test_of_all_batch_shapes_the_last_ones_used_are_kept():
    # Plans, drafts, cuts and programs were kept for every size for ever: 24 MiB a size.
    pipe, state = pipeline(max_shapes=2)
    engine = pipe.engine
    held = [weakref.ref(program) for program in engine.programs._compiled]
    for size in (6, 8, 6, 10):
        pipe.step(state, jnp.ones((size, 4)), donate=False)
    gc.collect()
    assert {lowered.step.batch[0].shape[0] for _, lowered in engine.kept} == {6, 10}, "the least recently used one goes"
    assert len(engine.kept) == engine.preparer.num_cuts == 2
    count = len(engine.programs)
    drafts = [lowered.bound for _, lowered in engine.kept]
    used = {line.program for draft in drafts for line in draft.lines if line.program is not None}
    alive = [ref() for ref in held if ref() is not None]
    assert used.issuperset(alive) and len(alive) < len(held), "programs go with the last plan that uses them"
    assert used.issuperset(engine.programs._compiled.keys())
    del drafts, used, alive
    pipe.step(state, jnp.ones((10, 4)), donate=False)
    for size in (5, 7):  # microbatches of 3 and 2, and of 4 and 3
        pipe.step(state, jnp.ones((size, 4)), donate=False)
    gc.collect()
    assert len(engine.kept) == 2 and engine.preparer.num_cuts == 3
    _, found = pipe.step(state, jnp.ones((6, 4)), donate=False)
    _, again = pipe.step(state, jnp.ones((10, 4)), donate=False)
    assert found.loss == pytest.approx(again.loss), "what was forgotten is made again"
    gc.collect()
    assert len(engine.programs) == count


@pytest.mark.long
def test_programs_that_call_the_host_are_forgotten_with_their_plans():
    # Each was known by itself to what was compiled for it, so it lived as long as the pipeline.
    def loss_fn(params, batch):
        jax.debug.callback(lambda _: None, batch.sum())
        return squares(params, batch)

    pipe, state = pipeline(loss_fn, max_shapes=1)
    counts = []
    for size in (4, 6, 8):
        jax.block_until_ready(pipe.step(state, jnp.ones((size, 4)), donate=False))
        gc.collect()
        counts.append(len(pipe.engine.programs))
    assert counts == sorted(counts, reverse=True), "none of an earlier size is left"


def test_losses_that_are_evaluated_once_are_forgotten_too():
    pipe, state = pipeline(max_shapes=2)
    batch = jnp.ones((4, 4))
    for k in range(4):
        pipe.evaluate(state, batch, loss_fn=lambda params, batch, k=k: squares(params, batch) + k)
    assert len(pipe.engine.kept) == pipe.engine.preparer.num_cuts == 2


def test_a_pipeline_that_is_dropped_gives_back_all_that_it_was_made_of():
    pipe, state = pipeline()
    pipe.evaluate(state, jnp.ones((4, 4)))
    engine = pipe.engine
    parts = [engine, engine.preparer, engine.programs, *engine.programs._compiled]
    held = [weakref.ref(part) for part in parts]  # what was compiled stays, for a pipeline that is built again
    del pipe, state, engine, parts
    gc.collect()
    assert not [ref() for ref in held if ref() is not None]


@pytest.mark.long
def test_what_is_the_same_is_compiled_once_a_device():
    # Each stage's programs, and the update at each batch size, were compiled by themselves.
    device = jax.devices()[:1]
    pipes = [pipeline(num_stages=n, num_microbatches=4, devices=device, balance="flops")[0] for n in (6, 12)]
    few, many = (pipe.engine.programs for pipe in pipes)
    assert 3 * (many.num_compiled - few.num_compiled) < len(many) - len(few)
    pipe, state = pipeline()
    plans = []
    for size in (8, 12):
        pipe.step(state, jnp.ones((size, 4)), donate=False)
        plans.append(pipe.engine.plan("update", jnp.ones((size, 4)), None, donate=False)[0])
    updates = [{line.label: line.call for line in plan.instructions if line.label.startswith("update")} for plan in plans]
    assert updates[0] == updates[1], "the update does not depend on the size of the batch"


def test_programs_on_keys_and_on_their_bits_are_two():
    # To the text of a program a key is an array of integers; the second one was refused by what was compiled for the first.
    keys = jax.random.split(jax.random.key(0), 3)
    device, refs = jax.devices()[0], ((Ref(Role.ACTIVATION, 0),), (Ref(Role.ACTIVATION, 1),))
    programs, both = Programs(), (keys, jax.random.key_data(keys))
    shapes = [jax.ShapeDtypeStruct(given.shape, given.dtype) for given in both]
    jobs = [PlacedProgram(Program(lambda x: [x], *refs, (shape,)), OneDevice(device), ()) for shape in shapes]
    programs.compile(jobs)
    for job, given in zip(jobs, both, strict=True):
        (found,) = programs.get(job).call(given)
        assert (found.dtype, found.shape) == (given.dtype, given.shape)


@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")  # nobody knows what a callback does with the examples
def test_host_functions_of_equal_stages_are_called_each():
    called = []

    def note(number, x):
        called.append(number)
        return x

    def loss_fn(params, batch):
        x = batch
        for k in range(4):
            x = jax.pure_callback(lambda x, k=k: note(k, x), x, jax.lax.stop_gradient(x)) + x * params[f"w{k:03}"]
        return (x**2).mean()

    pipe, state = pipeline(loss_fn, num_stages=4, devices=jax.devices()[:1])
    called.clear()
    jax.block_until_ready(pipe.step(state, jnp.ones((4, 4)))[1])
    assert set(called) == {0, 1, 2, 3}


@pytest.mark.parametrize("kind", ["threefry2x32", pytest.param("rbg", marks=pytest.mark.long), "unsafe_rbg"])
@pytest.mark.long
def test_the_keys_of_all_microbatches_are_folded_by_one_operation(kind):
    # A fold for each stage and microbatch: 64 x 256 did not finish compiling.
    key = jax.random.key(3, impl=kind)
    pipe = jaxpp.Pipeline(dropout, optax.sgd(0.1), num_stages=2, num_microbatches=6)
    state = pipe.init({f"w{k}": jnp.full(4, 0.5) for k in range(4)}, jnp.ones((12, 4)))
    pipe.verify(state, jnp.ones((12, 4)), key)
    lines = pipe.engine.lower("update", jnp.ones((12, 4)), key).bound.lines
    begins = [line.program for line in lines if line.label.startswith("begin") and line.program]
    folds = [str(jax.make_jaxpr(program.function)(*program.avals)).count("random_fold_in") for program in begins]
    assert set(folds) <= {0, 1} and 1 in folds


@pytest.mark.long
def test_lowering_grows_linearly_with_actions():
    schedules = [jaxpp.schedule.make("1f1b", num_ranks=8, num_microbatches=count) for count in (16, 32)]
    counts = []
    for schedule in schedules:
        params = {f"w{k:03}": jax.ShapeDtypeStruct((4,), jnp.float32) for k in range(8)}
        options = {"num_stages": 8, "num_microbatches": schedule.num_microbatches, "schedule": schedule}
        batch = jnp.ones((schedule.num_microbatches, 4))
        engine = open_engine(Options.of(squares, **options), optax.sgd(0.1), (params,), batch, None)
        counts.append(lines_run(lambda engine=engine, batch=batch: engine.lower("update", batch, None)))
    assert all(more < LINEAR * less for less, more in itertools.pairwise(counts))
