"""Any model on any mesh: what is divided over its axes, and constrained inside the loss, changes no result."""

import dataclasses
import itertools

import jax
import numpy as np
import optax
import pytest
from hypothesis import Phase, given, reject, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

import jaxpp
from jaxpp.errors import ArgumentError, CutError
from jaxpp.schedule import SCHEDULES, make
from jaxpp.verify import GRAD_FLOOR, compare
from tests.end_to_end.test_any_model import SETTINGS, drawn, loss_of, variables

SHAPES = [shape for shape in itertools.product((1, 2, 4), (1, 2, 4), (1, 2)) if shape[1] * shape[2] > 1 and np.prod(shape) <= 8]
SHARDS = (None, "optimizer", "gradients", "parameters", ("gradients", "parameters"))
numbers = st.tuples(st.binary(min_size=64, max_size=64), st.integers(0, 2**32 - 1))


def divided(rng, shape, **sizes):
    """A random axis for each of some axes of a mesh, if there is one that it divides."""
    entries = [None] * len(shape)
    for axis, size in sizes.items():
        able = [k for k, length in enumerate(shape) if entries[k] is None and length % size == 0]
        if able and size > 1 and rng.random() < 0.7:
            entries[rng.choice(able)] = axis
    return PartitionSpec(*entries)


def check(bits, seed):
    rng = np.random.default_rng(seed)
    example = drawn(bits)
    able = [shape for shape in SHAPES if SCHEDULES[example.schedule].allows(shape[0], example.microbatches)]
    shape = able[rng.integers(len(able))]
    sizes = dict(zip(("pipe", "data", "model"), shape, strict=True))
    rows = sizes["data"] * example.microbatches * int(rng.integers(1, 3))
    example = dataclasses.replace(
        example, compute="float64", width=int(rng.choice([4, 8])), batch_sizes=(rows,), checkpointed=False
    )
    params, model_state, batch = variables(example)
    mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), tuple(sizes))
    shard, by_spec = SHARDS[rng.integers(len(SHARDS))], bool(rng.random() < 0.3)
    over = {"model": sizes["model"]} | ({"data": sizes["data"]} if by_spec else {})
    specs = jax.tree.map(lambda leaf: divided(rng, leaf.shape, **over), params)
    held = jax.tree.map(lambda leaf: divided(rng, leaf.shape, model=sizes["model"]), params)
    constrained, plain = rng.random() < 0.4, loss_of(example)

    def loss_fn(params, *rest):
        params = jax.tree.map(jax.lax.with_sharding_constraint, params, held) if constrained else params
        return plain(params, *rest)

    schedule = make(
        example.schedule, num_ranks=shape[0], num_microbatches=example.microbatches, stages_per_rank=example.stages_per_rank
    )
    options = {
        "num_stages": schedule.num_stages,
        "num_microbatches": example.microbatches,
        "schedule": schedule,
        "has_state": example.has_state,
        "has_aux": example.aux,
        "reduce_aux": {"early": example.reduced} if example.aux else None,
        "mesh": mesh,
    }
    divide = {"shard": shard, "shardings": specs if sizes["model"] > 1 or (by_spec and sizes["data"] > 1) else None}
    optimizer = optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.1, momentum=0.9))
    key = () if example.prng_key is None else (example.prng_key,)
    with jax.enable_x64(True):
        first = (params, model_state) if example.has_state else params
        other = jaxpp.Pipeline(plain, optimizer, **options)
        try:
            wanted = other.init(first, batch)
        except CutError:
            reject()  # a model that cannot be cut into stages of equal work
        pipe = jaxpp.Pipeline(loss_fn, optimizer, **options, **divide)
        try:
            state = pipe.init(first, batch)
        except ArgumentError as error:
            if "devices share these evenly" not in str(error):
                raise
            reject()  # a loop is cut where an axis of the mesh does not divide the rows of a stage
        pipe.verify(state, batch, *key)
        for _ in range(2):
            state, metrics = pipe.step(state, batch, *key)
            wanted, plainly = other.step(wanted, batch, *key)
        found = (state.params, state.opt_state, state.model_state, metrics.loss)
        compare("training", found, (wanted.params, wanted.opt_state, wanted.model_state, plainly.loss), floor=GRAD_FLOOR)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of losses that mix examples, stages of unequal work, axes without use
@settings(max_examples=300, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False, **SETTINGS)
@given(numbers)
def test_many_random_models_on_random_meshes_train_the_same(drawn_numbers):
    check(*drawn_numbers)
