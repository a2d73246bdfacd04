"""What replicas divide between them (``shard=``): the results stay the same, and what each holds and sends is what it says."""

import itertools
from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import Mesh, PartitionSpec

import jaxpp
from jaxpp.errors import ArgumentError
from jaxpp.observe.memory.ledger import sample_step
from jaxpp.verify import GRAD_FLOOR, compare, noise_of
from tests.models import LAYERS, gpt_case, looped, mlp_case

SHARDS = ("optimizer", "gradients", "parameters", ("gradients", "parameters"))
RULES = {
    "mlp": {"dense_[024]": "column", "dense_[135]": "row"},
    "gpt": {"*/fc": "column", "*/proj": "row", "*/attn": "heads", "embed": "embedding"},
}


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


@pytest.mark.parametrize("shard", SHARDS)
def test_training_is_the_same_and_verified(x64, shard):
    params, x = wide(X, dtype=jnp.float64), X.astype(jnp.float64)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    wanted, _ = trained(pipeline(optimizer=optimizer), params, x)
    pipe = pipeline(optimizer=optimizer, shard=shard)
    found, state = trained(pipe, params, x)
    compare("state", found, wanted, floor=GRAD_FLOOR)
    pipe.verify(state, x)


def largest_of(tree):
    return max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(tree))


@cache
def case_of(name):
    """A case in float64, and which gradients are nothing but rounding.

    For each parameter of which that is so, how large rounding may be beside the largest gradient of the model; for the others 0.
    """
    case = {"mlp": mlp_case, "gpt": gpt_case}[name]("float64", batch_size=16)
    key = () if case.key is None else (case.key,)
    grads_of = jax.jit(jax.grad(lambda params: case.loss_fn(params, case.batch, *key)[0]))
    grads = grads_of(case.params)
    noise, largest = noise_of(grads_of, case.params, grads), largest_of(grads)
    return case, jax.tree.map(lambda grad, most: most / largest if largest_of(grad) <= most else 0.0, grads, noise)


def compare_trained(found, wanted, rounding):
    """Compare what Adam has trained; a parameter whose gradient is nothing but rounding is compared by its gradient.

    Adam divides a gradient by its size, so rounding moves such a parameter differently in each run. Its first moment, a mean of the
    gradients, must be no more than rounding in both runs.
    """
    kept = []
    for params, opt_state, *others in (found, wanted):
        moments = optax.tree_utils.tree_get(opt_state, "mu")
        largest = largest_of(moments)
        for (path, moment), most in zip(jax.tree.leaves_with_path(moments), jax.tree.leaves(rounding), strict=True):
            assert not most or largest_of(moment) <= most * largest, jax.tree_util.keystr(path)
        kept.append((jax.tree.map(lambda leaf, most: () if most else leaf, params, rounding), opt_state, *others))
    compare("state", *kept, floor=GRAD_FLOOR)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "found"), [("mlp", []), ("gpt", [f"['h_{k}']['attn']['key']['bias']" for k in range(2)])])
def test_only_gradients_of_the_biases_of_keys_are_rounding(x64, name, found):
    _, rounding = case_of(name)
    assert [jax.tree_util.keystr(path) for path, most in jax.tree.leaves_with_path(rounding) if most] == found


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "interleaved"])
@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 2, 2), (1, 4, 2)], ids=str)
@pytest.mark.parametrize("shard", SHARDS, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_every_mesh_and_schedule_trains_the_same(x64, name, shard, sizes, schedule):
    case, rounding = case_of(name)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    stages = sizes[0] * (1 if schedule == "1f1b" else 2)
    given = {"mesh": mesh_of(*sizes), "schedule": schedule, "num_stages": stages, "has_aux": True}
    given["shardings"] = RULES[name] if sizes[2] > 1 else None
    key = () if case.key is None else (case.key,)
    options = {key: value for key, value in given.items() if key != "mesh"} | {"data_parallel": 1}
    wanted, _ = trained(pipeline(case.loss_fn, optimizer, mesh=given["mesh"], **options), case.params, case.batch, *key)
    found, state = trained(pipe := pipeline(case.loss_fn, optimizer, **given | options, shard=shard), case.params, case.batch, *key)
    compare_trained(found, wanted, rounding)
    pipe.verify(state, case.batch, *key)


class Norms(nn.Module):
    """Layers with running statistics."""

    @nn.compact
    def __call__(self, x):
        for k in range(3):
            x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.8, param_dtype=float, name=f"norm_{k}")(x))
            x = nn.Dense(8, param_dtype=float, name=f"dense_{k}")(x)
        return x


@cache
def norms():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(16, 8)))
    variables = jax.jit(Norms().init)(jax.random.key(0), x)
    stats = jax.tree.map(lambda leaf: leaf.astype(float), variables["batch_stats"])

    def loss_fn(params, model_state, batch):
        y, new = Norms().apply({"params": params, **model_state}, batch, mutable=["batch_stats"])
        return jnp.mean(y**2), (new, {})

    return loss_fn, (variables["params"], {"batch_stats": stats}), x


def tied(params, x):
    return jnp.mean((jnp.tanh(jnp.tanh(x @ params["w1"]) @ params["w2"]) @ params["w2"].T @ params["w1"].T) ** 2)


def of_task(params, task, x):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] @ task["w"]) ** 2)


def two_tasks():
    return jaxpp.Bank({name: {"w": jnp.full((4, 4), value)} for name, value in (("a", 0.1), ("b", 0.2))}, optax.adam(1e-2))


def with_aux(params, x):
    return two_layers(params, x), {"size": jnp.abs(x @ params["w1"]).mean()}


def with_key(params, x, key):
    return two_layers(params, x * jax.random.bernoulli(key, 0.8, x.shape))


def features():
    """What may come together with ``shard``: a pipeline's options, where it starts, its batch and what a step is given."""
    params, x = wide(X, dtype=jnp.float64), X.astype(jnp.float64)
    loops = {name: leaf.astype(float) for name, leaf in LAYERS.items()}
    labels = {"w1": "frozen", "w2": "free"}
    frozen = optax.multi_transform({"frozen": optax.set_to_zero(), "free": optax.adam(1e-2)}, labels)
    loss_fn, made, rows = norms()
    return {
        "ties": ({"loss_fn": tied}, params, x, ()),
        "a loop that is cut": ({"loss_fn": looped}, loops, x[:, :4], ()),
        "frozen": ({"optimizer": frozen}, params, x, ()),
        "model state": ({"loss_fn": loss_fn, "has_state": True}, made, rows, ()),
        "aux": ({"loss_fn": with_aux, "has_aux": True}, params, x, ()),
        "a bank": ({"loss_fn": of_task, "bank": two_tasks()}, params, x, ()),
        "a loss scale": ({"loss_scale": DynamicScale(scale=2.0**10)}, params, x, ()),
        "weights": ({"weight": lambda batch: 1 + jnp.abs(batch).sum()}, params, x, ()),
        "a key": ({"loss_fn": with_key}, params, x, (jax.random.key(3),)),
        "MultiSteps": ({"optimizer": optax.MultiSteps(optax.adam(1e-2), 2)}, params, x, ()),
        "factored moments": ({"optimizer": optax.adafactor(1e-2, min_dim_size_to_factor=8)}, params, x, ()),
        "a fused last stage": ({"fuse": True}, params, x, ()),
        "recompute": ({"remat": "recompute", "num_microbatches": 3}, params, x[:12], ()),
        "unequal microbatches": ({"num_microbatches": 3}, params, x, ()),
    }


NAMES = "ties,a loop that is cut,frozen,model state,a loss scale,weights,a key,MultiSteps,factored moments,a fused last stage"
NAMES = (*NAMES.split(","), "recompute", "unequal microbatches", "aux", "a bank")
MESHES = (2, 2, 1), (2, 2, 2), (1, 4, 1), (2, 1, 2)
SHORT = {("ties", "gradients"), ("a loop that is cut", "parameters")}


def over_model(path, shape):
    return PartitionSpec(*[None] * (len(shape) - 1), "model") if shape and shape[-1] % 2 == 0 else PartitionSpec()


def pairs():
    """Each feature with each ``shard``; the meshes and schedules take turns, so that any two of the four meet."""
    for (i, name), (j, shard) in itertools.product(enumerate(NAMES), enumerate((*SHARDS, None))):
        mesh, schedule = MESHES[(i + j) % 4], ("1f1b", "zb-v")[(i // 2 + j) % 2]
        mark = () if (name, shard) in SHORT else pytest.mark.slow if (i + j) % 3 == 1 else pytest.mark.long
        yield pytest.param(name, shard, mesh, schedule, marks=mark, id=f"{name}, {shard}, {mesh}, {schedule}")


def on_mesh(mesh, schedule):
    """The options of a pipeline on a mesh of these sizes."""
    stages = mesh[0] * (2 if schedule == "zb-v" else 1)
    schedule = "looped-bfs" if mesh[0] == 1 and schedule == "1f1b" else schedule
    options = {"mesh": mesh_of(*mesh), "data_parallel": 1, "schedule": schedule, "num_stages": max(2, stages)}
    return options | ({"shardings": over_model} if mesh[2] > 1 else {})


@pytest.mark.filterwarnings("ignore::UserWarning")  # of losses that mix examples, and of models smaller than their stages
@pytest.mark.parametrize(("name", "shard", "mesh", "schedule"), list(pairs()))
def test_other_options_mean_the_same(x64, name, shard, mesh, schedule):
    found = []
    for each in (None, shard):
        options, params, batch, key = features()[name]
        given = {"task": "a"} if "bank" in options else {}
        pipe = pipeline(**on_mesh(mesh, schedule) | options, shard=each)
        results, state = trained(pipe, params, batch, *key, **given)
        found.append((results, jax.device_get(options["bank"].params("a")) if given else ()))
    compare("state", found[1], found[0], floor=GRAD_FLOOR)
    pipe.verify(state, batch, *key, **given)


def everything(params, model_state, x):
    """A tied layer, a loop over layers, a layer that is not trained, running statistics and aux."""
    hidden = jnp.tanh(x @ params["tied"] + params["still"])
    new = {"mean": 0.9 * model_state["mean"] + 0.1 * hidden.mean(0)}
    hidden = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), hidden - 0.1 * model_state["mean"], params["layers"])[0]
    outputs = hidden @ params["tied"].T
    return jnp.mean(outputs**2), (new, {"size": jnp.abs(outputs).mean()})


def all_pairs():
    """Each mesh with each ``shard``; the schedules take turns."""
    for (i, mesh), (j, shard) in itertools.product(enumerate(MESHES), enumerate((*SHARDS, None))):
        schedule = ("1f1b", "zb-v")[(i + j) % 2]
        mark = pytest.mark.long if (i, j) == (1, 2) else pytest.mark.slow
        yield pytest.param(shard, mesh, schedule, marks=mark, id=f"{shard}, {mesh}, {schedule}")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("shard", "mesh", "schedule"), list(all_pairs()))
def test_all_options_together_mean_the_same(x64, shard, mesh, schedule):
    rng = np.random.default_rng(3)
    params = {"tied": rng.normal(size=(8, 8)) / 3, "still": rng.normal(size=8), "layers": rng.normal(size=(8, 8, 8)) / 3}
    first, x = (params, {"mean": jnp.zeros(8)}), rng.normal(size=(16, 8))
    labels = {"tied": "free", "still": "frozen", "layers": "free"}
    adam = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))
    options = {"has_state": True, "loss_scale": DynamicScale(scale=2.0**10), "weight": lambda batch: 1 + jnp.abs(batch).sum()}
    found = []
    for each in (None, shard):
        optimizer = optax.multi_transform({"frozen": optax.set_to_zero(), "free": adam}, labels)
        pipe = pipeline(everything, optimizer, **options, **on_mesh(mesh, schedule), shard=each)
        results, state = trained(pipe, first, x)
        found.append(results)
    compare("state", found[1], found[0], floor=GRAD_FLOOR)
    pipe.verify(state, x)


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


def test_a_forward_holds_parameters_in_parts():
    forward = jaxpp.Forward(lambda p, x: jnp.tanh(x @ p["w1"]) @ p["w2"], num_stages=2, data_parallel=2, shard="parameters")
    params = forward.init(wide(X), X)
    assert bytes_of(params)[1] * 2 == bytes_of(params)[0]
    compare("outputs", forward.apply(params, X), jnp.tanh(X @ wide(X)["w1"]) @ wide(X)["w2"])


def test_one_replica_has_nothing_to_divide():
    pipe = pipeline(data_parallel=1, shard="parameters")
    state = pipe.init(wide(X), X)
    pipe.verify(state, X)


@pytest.mark.parametrize("shard", ["optimiser", ("optimizer", 3), 3, "data"])
def test_other_words_are_refused(shard):
    with pytest.raises(ArgumentError, match="can divide between them 'optimizer', 'gradients', 'parameters'"):
        pipeline(shard=shard)
    with pytest.raises(ArgumentError, match="can divide between them 'parameters'"):
        jaxpp.Forward(lambda p, x: x, num_stages=1, shard="optimizer")


def test_a_spec_that_does_not_divide_is_refused():
    with pytest.raises(ArgumentError, match="is not divisible by 4"):
        pipeline(data_parallel=4, shardings={"w1": PartitionSpec("data")}).init(
            {"w1": jnp.ones((2, 64)), "w2": jnp.ones((64, 4))}, X[:, :2]
        )


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
