"""What replicas divide between them (``shard=``): the results stay the same, and what each holds and sends is what it says."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxpp
from jaxpp.errors import ArgumentError
from jaxpp.observe.memory.ledger import sample_step
from jaxpp.stages.program import Role
from jaxpp.verify import GRAD_FLOOR, compare
from tests.models import LAYERS, gpt_case, looped

SHARDS = ("optimizer", "gradients", "parameters", ("gradients", "parameters"))


def mesh_of(pipe=2, data=2, model=1, names=("pipe", "data", "model")):
    return Mesh(np.array(jax.devices()[: pipe * data * model]).reshape(pipe, data, model), names)


def wide(x, width=64, dtype=jnp.float32):
    return {
        "w1": jnp.asarray(np.random.default_rng(0).normal(size=(x.shape[1], width)) / 4, dtype),
        "w2": jnp.ones((width, 4), dtype),
    }


X = jnp.asarray(np.random.default_rng(1).normal(size=(16, 32)), jnp.float32)


def two_layers(params, x):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"]) ** 2)


def pipeline(loss_fn=two_layers, optimizer=None, **options):
    given = {"num_stages": 2, "num_microbatches": 2, "data_parallel": 2} | options
    return jaxpp.Pipeline(loss_fn, optimizer or optax.adamw(1e-2), **given)


def trained(pipe, params, batch, *key, steps=2, **given):
    """The parameters, optimizer state, metrics and model state after some steps."""
    state = pipe.init(params, batch)
    for _ in range(steps):
        state, metrics = pipe.step(state, batch, *key, **given)
    return jax.device_get((state.params, state.opt_state, metrics.loss, metrics.grad_norm, state.model_state)), state


def bytes_of(tree):
    """Bytes of all leaves, and of what their devices hold of them."""
    leaves = jax.tree.leaves(tree)
    return sum(leaf.nbytes for leaf in leaves), sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)


def of_task(params, task, x):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] @ task["w"]) ** 2)


def two_tasks():
    return jaxpp.Bank({name: {"w": jnp.full((4, 4), value)} for name, value in (("a", 0.1), ("b", 0.2))}, optax.adam(1e-2))


@pytest.mark.long
@pytest.mark.parametrize("shard", SHARDS, ids=str)
def test_sets_of_a_bank_are_their_replicas_own(x64, shard):
    found = []
    for each in (None, shard):
        bank = two_tasks()
        pipe = pipeline(of_task, bank=bank, shard=each)
        results, state = trained(pipe, wide(X, dtype=jnp.float64), X.astype(float), task=["a", "b"])
        found.append((results, {name: jax.device_get(bank.params(name)) for name in ("a", "b")}))
        whole, held = bytes_of(state.opt_state)
        assert held < 0.51 * whole or each is None
    compare("state", found[1], found[0], floor=GRAD_FLOOR)


@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_device_holds_its_part_and_the_forecast_says_so(replicas):
    params = wide(X)
    held = {}
    for shard in (None, "optimizer", "gradients", "parameters"):
        pipe = pipeline(optimizer=optax.sgd(0.1, momentum=0.9), data_parallel=replicas, shard=shard)
        state = pipe.init(params, X)
        state, _ = pipe.step(state, X)
        held[shard] = bytes_of(state.params)[1], bytes_of(state.opt_state)[1]
        ledger, _ = sample_step(pipe.engine, pipe.engine.copy(pipe.engine.leaves(state.held)), X, None)
        for sample in ledger.samples:
            assert sample.kinds == tuple(ledger.liveness.levels[sample.device][sample.moment]), (shard, sample)
        forecast = pipe.forecast(params, X)
        for device, sample in ledger.peaks.items():
            assert forecast.peaks[device] == pytest.approx(sum(sample.kinds) + sample.temporaries, rel=0.05)
    whole = bytes_of(params)[0]
    assert held[None] == (whole, whole)
    assert held["optimizer"] == held["gradients"] == (whole, whole // replicas)
    assert held["parameters"] == (whole // replicas, whole // replicas)


def totals_of(pipe, **more):
    """Of each line that sums over replicas: how many gradients it sums, and how many of their buffers the sums take over."""
    lines = pipe.engine.plan("update", X, None, **more)[1].bound.lines
    grads = [[name for name in line.inputs if name.ref.role == Role.GRAD] for line in lines if line.label.startswith("total")]
    taken = [line.taken for line in lines if line.label.startswith("total")]
    assert all(own <= set(given) for own, given in zip(taken, grads, strict=True))
    return sum(map(len, grads)), sum(map(len, taken))


def test_gradients_that_replicas_have_summed_are_held_once():
    """The total takes over the buffers of what each replica has summed, unless it is a part of it, or NaN are looked for."""
    bank = jaxpp.Bank({"cat": {"w": jnp.eye(4)}, "dog": {"w": 2 * jnp.eye(4)}}, optax.sgd(0.1))
    plain, divided, tasks = pipes = pipeline(), pipeline(shard="optimizer"), pipeline(of_task, bank=bank)
    for pipe in pipes:
        pipe.init(wide(X), X)
    assert totals_of(plain) == totals_of(plain, donate=False) == (2, 2)
    assert totals_of(divided) == (2, 0)
    assert totals_of(tasks) == (3, 3)
    with jax.debug_nans(True):
        assert totals_of(plain) == (2, 0)


def test_each_byte_is_sent_once_a_step():
    sizes = bytes_of(wide(X))[0]
    for replicas, shard in itertools.product((2, 4), ("optimizer", "parameters", "gradients")):
        pipe = pipeline(optimizer=optax.sgd(0.1, momentum=0.9), data_parallel=replicas, shard=shard)
        pipe.init(wide(X), X)
        found, times = pipe.collectives(X), 2 if shard == "gradients" else 1  # microbatches
        assert found.num_bytes("reduce-scatter", "data") == times * sizes  # of which each device sends all but its part
        assert found.num_bytes("all-gather", "data") * replicas == sizes
        assert found.num_bytes("all-reduce") < 32  # the loss and the norm
        assert {row.collective.kind for row in found.rows} == {"reduce-scatter", "all-gather", "all-reduce"}
        assert "reduce-scattered over data" in str(found)


def test_nothing_whole_is_left_after_a_step():
    pipe = pipeline(optimizer=optax.sgd(0.1), shard="parameters")
    state = pipe.init(wide(X), X)
    before = {id(array) for array in jax.live_arrays()}
    state, metrics = pipe.step(state, X)
    jax.block_until_ready((state, metrics))
    shapes = [array.sharding.shard_shape(array.shape) for array in jax.live_arrays() if id(array) not in before]
    assert (16, 64) in shapes and (32, 64) not in shapes


def test_specs_that_name_data_divide_parameters():
    mesh = mesh_of(names=("stage", "fsdp", "tensor"))
    rules = {"w1": PartitionSpec(None, "fsdp"), "w2": PartitionSpec(("tensor", "fsdp"))}
    wanted, _ = trained(pipeline(data_parallel=1, mesh=mesh), wide(X), X)
    found, state = trained(pipe := pipeline(data_parallel=1, mesh=mesh, shardings=rules), wide(X), X)
    compare("state", found, wanted)
    assert state.params["w1"].sharding.shard_shape((32, 64)) == (32, 32)
    assert state.params["w2"].sharding.shard_shape((64, 4)) == (32, 4)
    assert state.opt_state[0].mu["w1"].sharding == state.params["w1"].sharding
    pipe.verify(state, X)


@pytest.mark.long
def test_leaves_that_no_axis_divides_stay_whole():
    params = {"w1": jnp.ones((32, 5)), "w2": jnp.ones((5, 3)), "b": jnp.zeros(3)}
    pipe = pipeline(lambda p, x: jnp.mean((jnp.tanh(x @ p["w1"]) @ p["w2"] + p["b"]) ** 2), shard=("gradients", "parameters"))
    state = pipe.init(params, X)
    state, _ = pipe.step(state, X)
    assert [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(state.params)] == [(3,), (16, 5), (5, 3)]
    pipe.verify(state, X)


@pytest.mark.long
def test_a_state_is_restored_in_parts(tmp_path):
    import orbax.checkpoint as ocp  # noqa: PLC0415  (takes long)

    pipe = pipeline(shard="parameters")
    state = pipe.init(wide(X), X)
    state, _ = pipe.step(state, X)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
    other = pipeline(shard="parameters", num_microbatches=4)
    target = other.abstract_state(wide(X), X)
    assert target.params["w1"].sharding.shard_shape((32, 64)) == (16, 64)
    with ocp.StandardCheckpointer() as saver:
        restored = saver.restore(tmp_path / "state", target)
    assert restored.params["w1"].sharding.shard_shape((32, 64)) == (16, 64)
    compare("params", restored.params, state.params)
    other.verify(restored, X)


@pytest.mark.long
@pytest.mark.parametrize("shard", ["parameters", pytest.param("optimizer", marks=pytest.mark.slow)])
def test_rules_in_words_shard_a_gpt_whose_replicas_divide_it_too(x64, shard):
    case, rules = gpt_case("float64", batch_size=8), {"*/fc": "column", "*/proj": "row", "*/attn": "heads", "embed": "embedding"}
    pipe = pipeline(case.loss_fn, mesh=mesh_of(2, 2, 2), data_parallel=1, shardings=rules, has_aux=True, shard=shard)
    state = pipe.init(case.params, case.batch)
    held = bytes_of((state.params, state.opt_state))
    assert held[1] < held[0] / 2
    pipe.verify(state, case.batch, case.key)


def test_a_forward_holds_parameters_in_parts_and_one_replica_has_nothing_to_divide():
    forward = jaxpp.Forward(lambda p, x: jnp.tanh(x @ p["w1"]) @ p["w2"], num_stages=2, data_parallel=2, shard="parameters")
    params = forward.init(wide(X), X)
    assert bytes_of(params)[1] * 2 == bytes_of(params)[0]
    compare("outputs", forward.apply(params, X), jnp.tanh(X @ wide(X)["w1"]) @ wide(X)["w2"])
    pipe = pipeline(data_parallel=1, shard="parameters")
    with pytest.warns(jaxpp.OptionWarning, match="one replica"):
        state = pipe.init(wide(X), X)
    pipe.verify(state, X)


@pytest.mark.long
def test_rows_of_a_stage_that_do_not_divide_are_divided_along_another_axis_or_refused():
    sizes = {"data": {"data": 2}, "model": {"data": 1, "model": 2}}
    pipes = {}
    for axis, each in sizes.items():
        given = {"mesh": mesh_of(**each), "shardings": {"w": PartitionSpec(axis)}, "cuts": ["w[3]"]}
        pipes[axis] = jaxpp.Pipeline(looped, optax.adam(1e-2), num_stages=2, **given)
    x = X[:, :4]
    state = pipes["data"].init(LAYERS, x)
    pipes["data"].verify(state, x)
    assert sum(bytes_of(leaf)[1] for leaf in pipes["data"].engine.leaves(state.held).params) * 2 == bytes_of(LAYERS)[0] + 32
    with pytest.raises(ArgumentError, match=r"devices share these evenly(.|\n)*3,4,4"):
        pipes["model"].init(LAYERS, x)
