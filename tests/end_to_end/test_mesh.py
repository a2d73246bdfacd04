"""Ranks that are sub-meshes: replicas along data, shards of the parameters along model."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxpp
from jaxpp.engine.engine import open_engine
from jaxpp.options import Options
from jaxpp.runtime.send import Send
from jaxpp.schedule import SCHEDULES
from jaxpp.stages.program import Role
from jaxpp.verify import GRAD_FLOOR, compare, oracle
from tests.models import gpt_case, mlp_case, schedule_for

GPT_RULES = {"*/fc": "column", "*/proj": "row", "*/attn": "heads", "embed": "embedding"}
MLP_RULES = {"dense_[024]": "column", "dense_[135]": "row"}
RULES = {"mlp": MLP_RULES, "gpt": GPT_RULES}


def mesh_of(pipe=2, data=2, model=2):
    devices = np.array(jax.devices()[: pipe * data * model]).reshape(pipe, data, model)
    return Mesh(devices, ("pipe", "data", "model"))


def engines(case, stages, microbatches, **options):
    """One engine a schedule that these sizes allow, on two ranks or four that share two sub-meshes."""
    given = {"num_stages": stages, "num_microbatches": microbatches, "has_aux": True, "weight": None, "cuts": None}
    first = open_engine(
        Options.of(case.loss_fn, **given, schedule="naive", devices=None, shardings=RULES[case.name], **options),
        None,
        (case.params,),
        case.batch,
        case.key,
    )
    made = {name: schedule_for(name, stages, microbatches) for name in SCHEDULES}
    return {name: first.with_schedule(schedule) for name, schedule in made.items() if schedule}


@pytest.mark.parametrize(
    ("model", "dtype", "stages"),
    [
        ("mlp", "float64", 2),
        pytest.param("mlp", "float32", 4, marks=pytest.mark.slow),
        pytest.param("gpt", "float32", 2, marks=pytest.mark.long),
    ],
)
def test_two_by_two_by_two_equals_the_oracle_whatever_the_schedule(model, dtype, stages):
    with jax.enable_x64(dtype == "float64"):
        case = {"mlp": mlp_case, "gpt": gpt_case}[model](dtype, batch_size=16)
        found = engines(case, stages, 2, mesh=mesh_of())
        assert len(found) >= (6 if stages == 2 else 10)
        reducers = next(iter(found.values())).layout.reducers
        loss, aux, grads = oracle(case.loss_fn, case.params, case.batch, case.key, 4, has_aux=True, reducers=reducers)
        for name, engine in found.items():
            outcome = engine.run("grads", engine.bring(case.params), case.batch, case.key)
            compare(f"{name} loss", outcome.loss, loss)
            compare(f"{name} aux", outcome.aux, aux)
            compare(f"{name} grads", jax.tree.structure(grads).unflatten(outcome.grads), grads, floor=GRAD_FLOOR)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 4, 1), (4, 1, 2), (1, 2, 4), (4, 2, 1), (1, 8, 1)])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("model", RULES)
def test_every_mesh_equals_the_oracle_whatever_the_schedule(model, stages, shape):
    if shape[0] > stages // 2 or (model == "mlp" and shape[2] > 2):
        pytest.skip("more ranks than the schedules with two stages a rank have, or a head of two classes")
    with jax.enable_x64(True):
        case = gpt_case("float64", batch_size=24, heads=max(2, shape[2])) if model == "gpt" else mlp_case("float64", batch_size=24)
        for name, engine in engines(case, stages, 3, mesh=mesh_of(*shape)).items():
            reducers = engine.layout.reducers
            count = 3 * shape[1]
            _, _, grads = oracle(case.loss_fn, case.params, case.batch, case.key, count, has_aux=True, reducers=reducers)
            outcome = engine.run("grads", engine.bring(case.params), case.batch, case.key)
            compare(f"{name} grads", jax.tree.structure(grads).unflatten(outcome.grads), grads, floor=GRAD_FLOOR)


def pipeline(case, optimizer=None, num_microbatches=2, **options):
    given = {"num_stages": 2, "has_aux": True, "shardings": RULES[case.name]} | options
    return jaxpp.Pipeline(case.loss_fn, optimizer or optax.adamw(1e-2), num_microbatches=num_microbatches, **given)


@pytest.mark.long
def test_parameters_are_born_sharded_with_the_bits_of_jit_and_stay_so():
    case = gpt_case(batch_size=8)
    pipe = pipeline(case, mesh=mesh_of())
    state = pipe.init(case.init, jax.random.key(0), case.batch)
    chex.assert_trees_all_equal(jax.device_get(state.params), jax.device_get(case.params))
    kernel = PartitionSpec(None, "model")
    for _ in range(2):
        adam = state.opt_state[0]
        for tree in (state.params, adam.mu, adam.nu):
            assert tree["h_0"]["fc"]["kernel"].sharding.spec == kernel
            assert tree["h_1"]["proj"]["kernel"].sharding.spec == PartitionSpec("model", None)
            assert tree["ln_f"]["scale"].sharding.spec == PartitionSpec()
        assert state.params["h_0"]["fc"]["kernel"].addressable_shards[0].data.shape == (16, 32)
        state, _ = pipe.step(state, case.batch, case.key)


def test_gradients_are_reduced_over_data_once_a_step():
    case = mlp_case(batch_size=16)
    pipe = pipeline(case, num_microbatches=4, data_parallel=2, shardings=None, has_aux=False, schedule="1f1b")
    pipe = jaxpp.Pipeline(lambda p, b: case.loss_fn(p, b)[0], optax.sgd(0.1), num_stages=2, num_microbatches=4, data_parallel=2)
    state = pipe.init(case.params, case.batch)
    found = pipe.collectives(case.batch)
    assert {row.program for row in found.rows} == {"total stage 0", "total stage 1"} and {row.runs for row in found.rows} == {1}
    assert {row.collective.kind for row in found.rows} == {"all-reduce"}
    loss_bytes = 4
    assert found.communicated == sum(leaf.nbytes for leaf in jax.tree.leaves(state.params)) + loss_bytes
    labels = [line.label for line in pipe.engine.plan("update", case.batch, None)[0].instructions]
    assert sum(label.startswith("total") for label in labels) == 2 and labels.count("0B3") == 1


@pytest.mark.long
def test_a_tied_gradient_and_scalars_are_reduced_once_a_step_and_activations_by_the_formula():
    rows, length, width, depth, microbatches = 16, 8, 16, 2, 2
    case = gpt_case(batch_size=rows, depth=depth, width=width)
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    pipe = pipeline(case, clipped, microbatches, mesh=mesh_of(), cuts=["h_1"])
    pipe.abstract_state(case.params, case.batch)
    found = pipe.collectives(case.batch, case.key)
    names, leaves = pipe.engine.placed.names.all_params, jax.tree.leaves(case.params)
    held = sum(pipe.engine.placement[name.stage].num_bytes(name.ref, leaf) for name, leaf in zip(names, leaves, strict=True))
    totals = [f"total stage {stage}" for stage in range(2)]
    assert [found.count(axes="data", program=name) for name in totals] == [1, 1]
    assert sum(found.num_bytes("all-reduce", ("data",), name) for name in totals) == held + 4  # the tied leaf once, and the loss
    others = [row for row in found.rows if "data" in row.collective.axes and row.program not in totals]
    assert {(row.program, row.runs) for row in others} == {("reduce aux 0", 1)}
    assert sum(row.collective.num_bytes for row in others) <= 32
    for stage in range(2):
        assert found.count(axes="model", program=f"update stage {stage}") == 1  # what the norm is made of
    activation = rows // (2 * microbatches) * length * width * 4
    runs = {stage: [row for row in found.rows if row.program.endswith(f" of stage {stage}")] for stage in range(2)}
    over_model = [row for row in (*runs[0], *runs[1]) if row.collective.num_bytes >= activation]
    assert {(row.runs, row.collective.kind, row.collective.axes) for row in over_model} == {
        (microbatches, "all-reduce", ("model",))
    }
    forward, backward = 1 + 2 * depth, 2 * depth + 1  # the embedding, then two for each block; and back, with the head's
    apart = 2 * depth  # XLA for CPU reduces the cotangents of query, key and value, and adds them then; XLA for GPUs adds first
    assert sum(row.collective.num_bytes for row in over_model) == (forward + backward + apart) * activation


def test_the_forward_of_two_layers_has_one_all_reduce_over_model():
    case = mlp_case(batch_size=16, depth=4)
    pipe = pipeline(case, mesh=mesh_of(), cuts=["dense_2"], shardings={"dense_[02]": "column", "dense_[13]": "row"})
    pipe.init(case.params, case.batch)
    found = pipe.collectives(case.batch)
    for stage in range(2):
        assert found.count("all-reduce", program=f"F of stage {stage}") == 2  # one for each of two microbatches
        assert found.count(program=f"F of stage {stage}") == 2  # and nothing else
    assert found.num_bytes("all-reduce", ("model",), "F of stage 0") == 2 * 4 * 16 * 4
    assert not any(row.collective.on_host for row in found.rows)


@pytest.mark.long
def test_activations_go_from_sub_mesh_to_sub_mesh_without_the_host():
    case = gpt_case(batch_size=16)
    pipe = pipeline(case, mesh=mesh_of())
    state = pipe.init(case.params, case.batch)
    _, lowered = pipe.engine.plan("grads", case.batch, case.key)
    sent = {line.label: line for line in lowered.bound.lines if line.is_send and line.action is not None}
    assert {"send 0F0 to stage 1", "send 1B0 to stage 0"} <= set(sent)
    seen = []

    def observer(instruction, slots):
        if instruction.label in sent:
            (source,), (target,) = instruction.inputs, instruction.outputs
            seen.append((slots[source].sharding, slots[target].sharding))

    leaves = pipe.engine.leaves(state.held)
    pipe.engine.run("grads", leaves, case.batch, case.key, observer=observer)
    assert len(seen) == len(sent)
    for source, target in seen:  # the same parts on as many other devices: each goes straight to its like
        assert source.spec == target.spec and source.mesh.shape == target.mesh.shape
        assert source.device_set.isdisjoint(target.device_set)
        assert {source.memory_kind, target.memory_kind} == {jax.devices()[0].default_memory().kind}


def test_a_send_between_sub_meshes_reads_nothing_on_the_host(monkeypatch):
    places = [Mesh(np.array(jax.devices()[k : k + 4]).reshape(2, 2), ("data", "model")) for k in (0, 4)]
    homes = [jax.sharding.NamedSharding(mesh, PartitionSpec("data")) for mesh in places]
    value = jax.device_put(np.arange(32.0, dtype="f").reshape(2, 16), homes[0])
    read = []
    array = type(value)
    plain = array.__array__
    monkeypatch.setattr(array, "__array__", lambda self, *args, **named: (read.append(self), plain(self, *args, **named))[1])
    monkeypatch.setattr(array, "_value", property(read.append), raising=False)
    (moved,) = Send(homes[1]).bind()(value)
    jax.block_until_ready(moved)
    assert not read and moved.sharding == homes[1]


class Annotated(nn.Module):
    """A dense layer whose parameters carry logical axis names."""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.tanh(nn.Dense(16, kernel_init=nn.with_logical_partitioning(init, ("embed", "mlp")), name="up")(x))
        return nn.Dense(4, kernel_init=nn.with_logical_partitioning(init, ("mlp", "embed")), name="down")(x)


def test_the_axis_names_of_flax_become_shardings():
    model, x = Annotated(), jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), "float32")
    boxed = model.init(jax.random.key(0), x)["params"]

    def loss_fn(params, batch):
        return jnp.mean(model.apply({"params": params}, batch) ** 2)

    rules = [("embed", None), ("mlp", "model")]
    plain = nn.meta.unbox(boxed)
    for params, shardings in ((boxed, rules), (plain, nn.logical_to_mesh(nn.get_partition_spec(boxed), rules))):
        pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=1, mesh=mesh_of(1), shardings=shardings)
        state = pipe.init(params, x)
        up, down = (nn.meta.unbox(state.params)[name]["kernel"] for name in ("up", "down"))
        assert up.sharding.spec == PartitionSpec(None, "model") and down.sharding.spec == PartitionSpec("model", None)
        pipe.verify(state, x)


@pytest.mark.long
def test_forecast_and_profile_count_what_each_device_of_a_rank_holds():
    case = mlp_case(batch_size=16)
    pipe = pipeline(case, mesh=mesh_of())
    state = pipe.init(case.params, case.batch)
    whole = pipeline(case, shardings=None)
    whole.init(case.params, case.batch)
    assert " as fast as one rank" in " ".join(str(pipe.stages).split())  # of four devices
    assert " as fast as one device" in " ".join(str(whole.stages).split())
    kinds = jaxpp.observe.KINDS if hasattr(jaxpp.observe, "KINDS") else None
    per_device, alone = (p.forecast(case.params, case.batch).stages[0].kinds for p in (pipe, whole))
    assert kinds is None or len(kinds) == len(per_device)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.params) if 0 in ids(leaf))
    assert per_device[0] == held < alone[0]
    profile = pipe.profile(state, case.batch, num_steps=1)
    ledger = {(sample.when, str(sample.device)): sample for sample in profile.ledger.samples}
    place = str(pipe.engine.placement[0])
    assert ledger["begins", place].kinds[0] == held


def ids(leaf):
    return {device.id for device in leaf.sharding.device_set}


@pytest.mark.long
def test_ranks_share_sub_meshes_if_there_are_fewer_and_without_a_mesh_nothing_is_communicated_inside_of_stages():
    case = mlp_case(batch_size=16)
    pipe = pipeline(case, num_stages=4, data_parallel=4, shardings=None, devices=jax.devices())
    state = pipe.init(case.params, case.batch)
    assert len({str(stage.device) for stage in pipe.stages}) == 2
    pipe.verify(state, case.batch)
    case = mlp_case()
    pipe = pipeline(case, shardings=None)
    pipe.init(case.params, case.batch)
    assert not pipe.collectives(case.batch).rows


@pytest.mark.long
def test_an_optimizer_leaf_is_sharded_like_its_parameter():
    case = gpt_case(batch_size=8)
    for optimizer in (optax.lion(1e-3), optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9))):
        pipe = pipeline(case, optimizer, mesh=mesh_of())
        pipe.init(case.params, case.batch)
        place, leaves = pipe.engine.placement[0], pipe.engine.placed.leaves
        divided = [sum(leaf.spec != PartitionSpec() for leaf in each) for each in (leaves.all_opt, leaves.all_params)]
        assert divided[0] == divided[1] > 0
        assert not any(place.per_replica(name.ref) for name in pipe.engine.placed.names.all_opt)
        assert all(name.ref.role == Role.OPT for name in pipe.engine.placed.names.all_opt)


@pytest.mark.long
def test_a_batch_leaf_without_elements_is_shared_among_replicas():
    case = mlp_case(batch_size=16)

    def loss_fn(params, batch):
        return case.loss_fn(params, {k: batch[k] for k in "xy"})

    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=2, has_aux=True, data_parallel=2)
    batch = case.batch | {"nothing": np.zeros((16, 0), "float32")}
    state = pipe.init(case.params, batch)
    pipe.verify(state, batch)
