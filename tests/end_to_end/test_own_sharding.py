"""Models that say themselves how values are sharded, or name the replicas: in float64 each step equals plain JAX."""

import contextlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxpp
from jaxpp.errors import ArgumentError, BatchError, LossError, StateError
from jaxpp.verify import compare

P = PartitionSpec
LONG = pytest.mark.long
COLUMNS = PartitionSpec(None, "model")
RULES = {"l0": "column", "l1": "row", "l2": "column", "l3": "row"}
BATCH = np.random.default_rng(0).normal(size=(16, 8))
PARAMS = {f"l{k}": np.random.default_rng(k + 1).normal(size=(8, 8)) / 3 for k in range(4)}

pytestmark = [
    pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning"),  # it does not know what maps and callbacks do with examples
    pytest.mark.filterwarnings("ignore::jaxpp.DevicesWarning"),
    pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning"),  # which many users still have
    pytest.mark.usefixtures("x64"),
]


def mesh_of(*sizes, names=("pipe", "data", "model")):
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


MESH = mesh_of(2, 2, 2)
SHARDS = Mesh(MESH.devices[0, 0], ("model",))  # a part of it
ON = {"mesh": MESH, "shardings": RULES}


def chain(between, activation=jnp.tanh):
    def loss_fn(params, batch):
        x = batch
        for k in range(4):
            x = activation(between(x @ params[f"l{k}"]))
        return jnp.mean(x**2)

    return loss_fn


def pipeline(loss_fn, optimizer=None, **options):
    return jaxpp.Pipeline(loss_fn, optimizer or optax.sgd(0.1), **{"num_stages": 2, "num_microbatches": 2} | options)


def check(loss_fn, plain, given=PARAMS, batch=BATCH, parts=1, axis="data", **options):
    """Train a step; equal to plain JAX with so many parts, along an axis of this name, and found so by ``verify``.

    Return the pipeline and the new parameters.
    """
    pipe = pipeline(loss_fn, **options)
    state = pipe.init(given, batch)
    pipe.verify(state, batch)
    state, metrics = pipe.step(state, batch)
    given, rows = jax.device_get(given), jax.device_get(batch).reshape(parts, -1, 8)
    found = jax.vmap(jax.value_and_grad(plain), (None, 0), axis_name=axis)(given, rows)
    loss, grads = jax.tree.map(lambda leaf: leaf.mean(0), found)
    compare("step", (state.params, metrics.loss), (jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, given, grads), loss))
    return pipe, state.params


def constrained(sharding):
    return lambda x: jax.lax.with_sharding_constraint(x, sharding)


def mapped(function, spec=COLUMNS, out=None, **options):
    return lambda x: jax.shard_map(function, in_specs=spec, out_specs=spec if out is None else out, **options)(x)  # noqa: PLW0108


def same(x):
    return x


@jax.custom_vjp
def kernel_doubled(x):
    def kernel(given, made):
        made[...] = given[...] * 2

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


kernel_doubled.defvjp(lambda x: (kernel_doubled(x), None), lambda _, g: (2 * g,))


def constrained_in_a_loop(x):
    def body(carry, _):
        return nn.gelu(jax.lax.with_sharding_constraint(carry, P("data", "model"))), None

    return jax.lax.scan(body, x, None, length=2)[0]


def called_back(x):
    jax.debug.callback(lambda y: None, x.sum())
    given = jax.lax.stop_gradient(x).astype("float32")  # the thread that calls back has no float64
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, "float32"), given) * 0 + x


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * nn.relu(g) - 2 * nn.relu(-g),))


@jax.custom_vjp
def partitioned(x):
    return _partitioned(x)


@custom_partitioning
def _partitioned(x):
    return x * 1.0


_partitioned.def_partition(
    partition=lambda mesh, args, result: (mesh, lambda x: x * 1.0, result.sharding, (args[0].sharding,)),
    infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
    sharding_rule="i j -> i j",
)
partitioned.defvjp(lambda x: (_partitioned(x), None), lambda _, g: (g,))


def with_partitioning(x):
    return x + 0 * partitioned(x.astype("float32"))  # the thread that partitions has no float64


def scaled(x):
    """Twice as much, computed block by block."""

    def kernel(factor, given, made):
        made[...] = given[...] * factor[0]

    block = pl.BlockSpec((x.shape[0] // 2, 4), lambda i, j: ((i + 1) % 2, j))
    options = {"grid": (2, 2), "in_specs": [pl.BlockSpec((1,), lambda i, j: (0,)), block], "out_specs": block, "interpret": True}
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, **options)(jnp.full(1, 2, x.dtype), x)


@jax.custom_vjp
def scaled_both_ways(x):
    return scaled(x)


scaled_both_ways.defvjp(lambda x: (scaled(x), None), lambda _, g: (scaled(g),))

BOTH = P("data", "model")
RING = [(0, 1), (1, 0)]
OWN = Mesh(np.array(jax.devices()[:2]), ("x",))
TYPED, AUTO = (Mesh(MESH.devices, MESH.axis_names, axis_types=(kind,) * 3) for kind in (AxisType.Explicit, AxisType.Auto))


def twice(x):
    return 2 * x


def set_mesh():
    return jax.set_mesh(MESH)


def a_kernel_where_a_mesh_is_set(mesh, mesh_of_it=MESH, **options):
    # The shape of what a kernel returns named the mesh that was set, and differentiation failed in JAX's words on a rank.
    return scaled_both_ways, twice, options | {"mesh": mesh_of_it and mesh}, lambda: jax.set_mesh(mesh)


IN_THE_MODEL = {
    "a bare spec": (constrained(BOTH), same, ON),
    "a bare spec in a mesh's context": (constrained(BOTH), same, ON, lambda: MESH),
    "a bare spec in the context of an abstract mesh": (
        constrained(BOTH),
        same,
        ON,
        lambda: jax.sharding.use_abstract_mesh(MESH.abstract_mesh),
    ),
    "the whole mesh": (constrained(NamedSharding(MESH, P(("pipe", "data"), "model"))), same, ON),
    "the mesh that is set": (constrained(BOTH), same, ON, set_mesh),
    "an abstract mesh": (constrained(NamedSharding(MESH.abstract_mesh, BOTH)), same, ON),
    "a mesh is set, and nobody asks": (doubled, twice, ON, set_mesh),
    "a constraint in a loop": (constrained_in_a_loop, lambda x: nn.gelu(nn.gelu(x)), ON, set_mesh),
    "a constraint in a checkpoint": (jax.checkpoint(constrained(P(None, "model"))), same, ON, set_mesh),
    "a constraint in a rule of its own": (lambda x: doubled(constrained(P(None, "model"))(x)), twice, ON, set_mesh),
    "a map over model": (mapped(nn.gelu, axis_names={"model"}), nn.gelu, ON),
    "a map over the whole mesh": (mapped(nn.gelu, mesh=MESH), nn.gelu, ON),
    "a map over an abstract mesh": (mapped(nn.gelu, mesh=MESH.abstract_mesh, axis_names={"model"}), nn.gelu, ON),
    "a map over a part of the mesh": (mapped(jnp.sin, mesh=SHARDS), jnp.sin, ON),
    "a sum over model": (mapped(lambda x: jax.lax.psum(x, "model") / 2, P(), mesh=MESH, axis_names={"model"}), same, ON),
    "callbacks": (called_back, same, ON),
    "callbacks and replicas": (called_back, same, {"data_parallel": 2}),
    "partitioning of its own": (with_partitioning, same, ON),
    "partitioning of its own and replicas": (with_partitioning, same, {"data_parallel": 2}),
    "a kernel": (kernel_doubled, twice, ON),
    "a kernel where a mesh is set": a_kernel_where_a_mesh_is_set(AUTO, shardings=RULES),
    "a kernel where a mesh of explicit types is set": a_kernel_where_a_mesh_is_set(TYPED, shardings=RULES),
    "a kernel where a mesh is set that is not the pipeline's": a_kernel_where_a_mesh_is_set(TYPED, mesh_of_it=None),
    "a kernel and replicas where a mesh is set": a_kernel_where_a_mesh_is_set(TYPED, mesh_of_it=None, data_parallel=2),
    "a mesh is set, and the pipeline has none": (doubled, twice, {}, lambda: jax.set_mesh(OWN)),
    "a constraint on devices of one's own": (constrained(NamedSharding(OWN, P("x"))), same, {}),
    "a constraint on the mesh that is set, and the pipeline has none": (constrained(P("x")), same, {}, lambda: jax.set_mesh(OWN)),
}
SHORT = {
    "a bare spec",
    "the mesh that is set",
    "a map over the whole mesh",
    "callbacks",
    "a kernel",
    "a bare spec in the context of an abstract mesh",
    "a kernel where a mesh is set",
    "a mesh is set, and the pipeline has none",
    "a constraint on devices of one's own",
}


@pytest.mark.parametrize("case", [pytest.param(name, marks=() if name in SHORT else LONG) for name in IN_THE_MODEL])
def test_in_the_model(case):
    between, plain, options, *context = IN_THE_MODEL[case]
    with context[0]() if context else contextlib.nullcontext():
        pipe, _ = check(chain(between), chain(plain), **options)
    if plain is same and case.startswith(("a bare spec", "the ", "an abstract mesh")):  # the programs have the constraint too
        (cut,) = pipe.engine.preparer.step(BATCH, None).cuts
        for stage in cut.stages:
            assert "sharding_constraint" in str(jax.make_jaxpr(stage.forward.function)(*stage.forward.avals))


def halves(x):
    return x.reshape(2, -1, x.shape[1])


def centred(axes):
    return lambda x: x - jax.lax.pmean(x.mean(0, keepdims=True), axes)


def in_a_loop(x):
    return jax.lax.scan(lambda x, _: (jnp.sin(x + jax.lax.pmean(x, "data")), None), x, None, length=2)[0]


def in_a_plain_loop(x):
    for _ in range(2):
        x = jnp.sin(halves(x) + halves(x).mean(0)).reshape(x.shape)
    return x


IN_MAPS = {  # what is computed of blocks, and of the whole
    "rows": (mapped(jnp.sin, BOTH, mesh=MESH), jnp.sin, ON),
    "rows over two axes": (
        mapped(centred(("pipe", "data")), P(("pipe", "data"), "model"), mesh=MESH),
        lambda x: x - x.mean(0),
        ON,
    ),
    "a mean over data": (mapped(centred("data"), BOTH, mesh=MESH), lambda x: x - x.mean(0), ON),
    "a mean over both": (
        mapped(lambda x: x - jax.lax.pmean(x.mean(), ("data", "model")), BOTH, mesh=MESH),
        lambda x: x - x.mean(),
        ON,
    ),
    "a mean of all as a result": (
        lambda x: (
            x - jax.shard_map(lambda x: jax.lax.pmean(x.mean(), ("data", "model")), mesh=MESH, in_specs=BOTH, out_specs=P())(x)
        ),
        lambda x: x - x.mean(),
        ON,
    ),
    "a sum of what is whole": (mapped(lambda x: x + jax.lax.psum(x, "data"), P(), mesh=MESH), lambda x: 3 * x, ON),
    "a ring": (
        mapped(lambda x: x + jnp.sin(jax.lax.ppermute(x, "data", RING)), BOTH, mesh=MESH),
        lambda x: x + jnp.sin(jnp.roll(x, len(x) // 2, 0)),
        ON,
    ),
    "all to all": (
        mapped(lambda x: x * jax.lax.all_to_all(x, "data", 1, 1, tiled=True), P("data"), mesh=MESH),
        lambda x: x * halves(x).reshape(2, -1, 2, 4).transpose(2, 1, 0, 3).reshape(x.shape),
        ON,
    ),
    "a number of the block": (
        mapped(lambda x: x * (1 + jax.lax.axis_index("data") + 2 * jax.lax.axis_index("model")), BOTH, mesh=MESH),
        lambda x: x * (1 + (jnp.arange(len(x)) * 2 // len(x))[:, None] + 2 * (jnp.arange(8) // 4)),
        ON,
    ),
    "blocks of shards": (
        mapped(lambda x: x * (1 + jnp.arange(8 // 4)), P(None, ("model", "data")), mesh=MESH),
        lambda x: x * (1 + jnp.arange(8) % 2),
        ON,
    ),
    "another order": (
        lambda x: jax.shard_map(lambda x: jnp.sin(x).T, mesh=MESH, in_specs=BOTH, out_specs=P("model", "data"))(x).T,
        jnp.sin,
        ON,
    ),
    "a loop": (mapped(in_a_loop, BOTH, mesh=MESH), in_a_plain_loop, ON),
    "a checkpoint": (jax.checkpoint(mapped(centred("data"), BOTH, mesh=MESH)), lambda x: x - x.mean(0), ON),
    "a rule of its own": (mapped(lambda x: nn.relu6(centred("data")(x)), BOTH, mesh=MESH), lambda x: nn.relu6(x - x.mean(0)), ON),
    "nobody checks": (
        mapped(lambda x: x - jax.lax.pmean(x.mean(1, keepdims=True), "model"), BOTH, mesh=MESH, check_vma=False),
        lambda x: x - x.mean(1, keepdims=True),
        ON,
    ),
    "backwards in two": (mapped(centred("data"), BOTH, mesh=MESH), lambda x: x - x.mean(0), ON | {"schedule": "zb-h1"}),
    "a mesh for a pipeline without": (mapped(centred("data"), BOTH, mesh=MESH), lambda x: x - x.mean(0), {}),
    "devices of one's own": (mapped(centred("x"), P("x"), mesh=OWN), lambda x: x - x.mean(0), {}),
    "devices of one's own and replicas": (mapped(centred("x"), P("x"), mesh=OWN), lambda x: x - x.mean(0), {"data_parallel": 2}),
    "more shards than a rank has": (
        mapped(
            lambda x: x - jax.lax.pmean(x.mean(1, keepdims=True), "model"),
            P(None, "model"),
            mesh=mesh_of(2, 4, names=("a", "model")),
        ),
        lambda x: x - x.mean(1, keepdims=True),
        ON,
    ),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=() if name in ("a mean over both", "devices of one's own") else LONG) for name in IN_MAPS],
)
def test_maps_over_any_devices_are_computed_block_by_block(case):
    between, plain, options = IN_MAPS[case]
    replicas = 2 if "data_parallel" in options or options.get("mesh") is MESH else 1
    check(chain(between), chain(plain), parts=2 * replicas, **options)


ON_2_1_2 = ON | {"mesh": mesh_of(2, 1, 2)}


def relus(x):
    return nn.relu6(2 * nn.relu6(2 * nn.relu(x)))


@pytest.mark.long
def test_a_function_that_asks_for_names_where_xla_has_none_is_refused():
    @custom_partitioning
    def by_names(x):
        return x * 1.0

    by_names.def_partition(
        partition=lambda mesh, args, result: (
            mesh,
            lambda x: x * 1.0,
            result.sharding,
            (NamedSharding(mesh, args[0].sharding.spec),),
        ),
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        sharding_rule="i j -> i j",
    )
    between = jax.custom_vjp(by_names)
    between.defvjp(lambda x: (by_names(x), None), lambda _, g: (g,))
    loss_fn = chain(lambda x: x + 0 * between(x.astype("float32")))
    pipeline(loss_fn, **ON | {"mesh": mesh_of(2, 1, 2)}).forecast(PARAMS, BATCH)
    with pytest.raises(jaxpp.errors.ArgumentError, match="attention by cuDNN"):
        pipeline(loss_fn, **ON).forecast(PARAMS, BATCH)


@pytest.mark.parametrize("names", [pytest.param(None, marks=LONG), {"model"}])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (2, 2, 1)])
def test_functions_with_rules_of_their_own_and_collectives_work_in_a_map(sizes, names):
    # A review found that JAX refused relu there, and every psum over an axis of one device.
    mesh = mesh_of(*sizes)
    turn = [(k, (k + 1) % sizes[2]) for k in range(sizes[2])]

    def inside(x):
        x = nn.relu(jax.lax.ppermute(x, "model", turn) if sizes[2] == 1 else x)
        x = jax.lax.scan(lambda carry, _: (nn.relu6(doubled(carry)), None), x, None, length=2)[0]
        return x / jax.lax.psum(jnp.ones_like(x).sum() / 32 + 0 * x.sum(), "model")

    options = {} if names is None else {"axis_names": names}
    check(chain(mapped(inside, mesh=mesh, **options), nn.relu), chain(relus, nn.relu), mesh=mesh)


def normalised(axis):
    """Batch normalisation over the examples of all replicas."""

    def between(x):
        mean = jax.lax.pmean(x.mean(0), axis)
        variance = jax.lax.pmean((x**2).mean(0), axis) - mean**2
        return (x - mean) / jnp.sqrt(variance + 1e-3)

    return between


def gathered(x):
    """What ``normalised`` computes, from the examples of all replicas."""
    everything = jax.lax.all_gather(x, "data", tiled=True)
    mean, index = everything.mean(0), jax.lax.axis_index("data")
    own = jax.lax.dynamic_slice_in_dim(everything, index * len(x), len(x))
    return (own - mean) / jnp.sqrt((everything**2).mean(0) - mean**2 + 1e-3)


def whole(x):
    return (x - x.mean(0)) / jnp.sqrt((x**2).mean(0) - x.mean(0) ** 2 + 1e-3)


def with_derivative(rule, kind="custom_vjp"):
    """The identity, whose derivative is what a rule makes of cotangents or tangents."""
    function = getattr(jax, kind)(lambda x: x * 1.0)
    if kind == "custom_vjp":
        function.defvjp(lambda x: (x * 1.0, None), lambda _, cotangent: (rule(cotangent),))
    else:
        function.defjvp(lambda primals, tangents: (primals[0] * 1.0, rule(tangents[0])))
    return function


def averaged(axis="data", **options):
    return with_derivative(lambda given: jax.lax.pmean(given, axis), **options)


def refused(cotangent):
    raise NotImplementedError


def both(between, options):
    """What is to equal itself in plain JAX, on the axis of the replicas."""
    return between, between, options


def on_axes(data, model=None, sizes=(2, 2, 2), names=None, **options):
    """Normalisation over axes of these names, with shards if there is one."""
    between = normalised(data)
    if names:
        options["mesh"] = mesh_of(*sizes, names=names)
    if model:
        options["shardings"] = {"l0": P(None, model), "l1": P(model, None), "l2": "column"}
    return (lambda x: constrained(P(None, model))(between(x))) if model else between, whole, options


REPLICAS = {"data_parallel": 2}
COLLECTIVES = {
    "replicas": (normalised("data"), whole, REPLICAS),
    "four replicas": (normalised("data"), whole, {"data_parallel": 4, "devices": jax.devices()}),
    "a mesh": (normalised("data"), whole, ON),
    "one device a stage": (normalised("data"), whole, {}),
    "a gather of replicas": (gathered, whole, REPLICAS),
    "a gather on one device a stage": (gathered, whole, {}),
    "a checkpoint": (jax.checkpoint(normalised("data")), whole, REPLICAS | {"schedule": "zb-h1"}),
    "forwards that are repeated": (normalised("data"), whole, REPLICAS | {"remat": "recompute"}),
    "usual names of axes": on_axes("replica", "tensor", names=("stage", "replica", "tensor")),
    "names of one's own": on_axes("b", "c", names=("a", "b", "c"), axes={"pipe": "a", "data": "b", "model": "c"}),
    "two axes of replicas": on_axes(("replica", "fsdp"), names=("replica", "pipe", "fsdp"), axes={"data": ("replica", "fsdp")}),
    "a name for the replicas": on_axes("batch", data_parallel=2, axes={"data": "batch"}),
    "a name beside the mesh's": on_axes("batch", "model", names=("pipe", "data", "model"), axes={"data": "batch"}),
    # A derivative of its own may be the only one to name axes: JAX said "unbound axis name" in pipe.verify, and without replicas in
    # pipe.init too.
    "a derivative over replicas": both(averaged(), REPLICAS),
    "a derivative on one device a stage": both(averaged(), {}),
    "a tangent": both(averaged(kind="custom_jvp"), REPLICAS),
    "a tangent on one device": both(averaged(kind="custom_jvp"), {}),
    "a derivative of another name": both(averaged("batch"), REPLICAS | {"axes": {"data": "batch"}}),
    "a derivative on a mesh": both(averaged(), ON),
    "a derivative on a mesh without replicas": both(averaged(), ON_2_1_2),
    "a derivative in a loop": both(lambda x: jax.lax.scan(lambda x, _: (averaged()(x), None), x, None, length=2)[0], ON),
    "a derivative in a checkpoint": both(jax.checkpoint(averaged()), REPLICAS),
    "a derivative with a constraint": (with_derivative(constrained(NamedSharding(MESH, BOTH))), same, ON),
    "a derivative with a bare constraint": (with_derivative(constrained(BOTH)), same, ON),
    "a derivative with a map": (with_derivative(mapped(lambda x: x * 1.0, mesh=MESH, axis_names={"model"})), same, ON),
    "a derivative that nobody asks for": (
        lambda x: x + 0 * jax.lax.stop_gradient(with_derivative(refused)(jax.lax.stop_gradient(x))),
        same,
        {},
    ),
}
SHORT = {"replicas", "names of one's own", "a derivative on one device a stage", "a derivative of another name"}


@pytest.mark.parametrize("case", [pytest.param(name, marks=() if name in SHORT else LONG) for name in COLLECTIVES])
def test_a_collective_over_the_replicas_is_one_between_them(case):
    between, plain, options = COLLECTIVES[case]
    replicas = options["mesh"].shape.get("data", 1) if "mesh" in options else options.get("data_parallel", 1)
    axis = options.get("axes", {}).get("data", "data") if between is plain else "data"
    parts = replicas if between is plain or plain is same else 1
    _, params = check(chain(between), chain(plain), parts=parts, axis=axis, num_microbatches=1, **options)
    if "model" in options.get("axes", {}):
        assert params["l0"].sharding.spec == P(None, "model")


@pytest.mark.parametrize(
    ("between", "context"),
    [
        (mapped(nn.gelu, axis_names={"model"}), lambda: jax.set_mesh(TYPED)),
        pytest.param(mapped(nn.gelu, mesh=TYPED, axis_names={"model"}), contextlib.nullcontext, marks=LONG),
        pytest.param(lambda x: mapped(nn.gelu)(jax.reshard(x, P(None, "model"))), contextlib.nullcontext, marks=LONG),
    ],
)
def test_maps_over_axes_of_explicit_types_are_verified(between, context):
    # JAX said "Expected cotangent type float32[4,8] but got float32[4,8@model]".
    with jax.set_mesh(TYPED):
        try:
            jax.eval_shape(chain(between), PARAMS, BATCH)
        except ValueError as error:
            pytest.skip(f"this JAX wants values divided before a map over explicit axes: {str(error)[:60]}")
    with context():
        check(chain(between), chain(nn.gelu), mesh=TYPED, shardings=RULES)


def test_a_callback_with_effects_runs_once_on_each_replica():
    seen = []

    def between(x):
        io_callback(lambda x: seen.append(x.shape), None, jax.lax.stop_gradient(x))
        return x

    pipe = jaxpp.Pipeline(chain(between), optax.sgd(0.1), num_stages=2, num_microbatches=2, **ON)
    state = pipe.init(PARAMS, BATCH)
    seen.clear()
    state, _ = pipe.step(state, BATCH)
    jax.block_until_ready(state)
    jax.effects_barrier()
    assert seen == [(4, 8)] * 4 * 2 * 2  # in four layers, of two microbatches on two replicas
    grads = jax.grad(chain(same))(PARAMS, BATCH)
    compare("params", state.params, {name: leaf - 0.1 * grads[name] for name, leaf in PARAMS.items()})


TREE = {name: NamedSharding(MESH, P("data", "model") if name == "l0" else P()) for name in RULES}
NINE = ("data", "stage", "fsdp", "fsdp_transpose", "sequence", "tensor", "expert", "autoregressive", "context")
EMBED, MLP = ("fsdp", "sequence", "context", "expert"), ("fsdp_transpose", "tensor", "autoregressive")
SHARDINGS = {
    "an axis for everything, most of one device": (
        {"*": P(EMBED, MLP)},
        {"mesh": mesh_of(1, 2, 2, 1, 1, 2, 1, 1, 1, names=NINE)},
        P("data", "model"),
    ),
    "regular expressions, of which the first counts": ([("0$|2$", P(None, "model")), ("l", P("model"))], {}, P(None, "model")),
    "over data": ({"*": P("data", None)}, {}, P("data")),
    "over both": ({"*": P(("data", "model"))}, {}, P(("model", "data"))),
    "over each": ({"*": P("model", "data")}, {}, P("model", "data")),
    "axes of other names": (
        {"*": P("fsdp", "tensor")},
        {"mesh": mesh_of(2, 2, 2, names=("stage", "fsdp", "tensor"))},
        P("data", "model"),
    ),
    "shardings of the mesh": (TREE, {}, P("data", "model")),
    "a tree of rules": ({"l0": "column", "l1": "row", "l2": None, "l3": None}, {}, COLUMNS),
    "a rule for an axis of one device": (RULES, {"mesh": mesh_of(2, 1, 1)}, None),
    "a function": (lambda path, shape: P(None, "model") if path == "l0" and shape == (8, 8) else None, {}, P(None, "model")),
    "replicas without a mesh": ({"*": P("data")}, {"mesh": None, "data_parallel": 2}, P("data")),
}


SHORT = {"an axis for everything, most of one device", "regular expressions, of which the first counts"}


@pytest.mark.parametrize("case", [pytest.param(name, marks=() if name in SHORT else LONG) for name in SHARDINGS])
def test_parameters_over_the_axes_of_a_mesh(case):
    shardings, options, spec = SHARDINGS[case]
    _, params = check(chain(same), chain(same), **{"mesh": MESH, "shardings": shardings} | options)
    assert getattr(params["l0"].sharding, "spec", None) == spec


AXIS_RULES = "logical axis rules map names that parameters give their axes"


@pytest.mark.parametrize(
    ("shardings", "line", "mesh"),
    [
        ([("zzz", P("model"))], "'zzz' matches none.\n  Fix: use paths like those below.", MESH),
        ([("*/kernel", P("model"))], "'*/kernel': nothing to repeat at position 0.\n  Fix: write it as one", MESH),
        ({"*": P("sequence")}, "l0, f64[8,8]: P('sequence',) has another axis, 'sequence'", MESH),
        ([("typo", "model")], AXIS_RULES, MESH),
        ([("l.", "column")], AXIS_RULES, MESH),
        ([], AXIS_RULES, MESH),
        ({"*": "column"}, "is not divisible by 3", mesh_of(2, 1, 3)),
    ],
)
def test_rules_that_fit_nothing_are_refused(shardings, line, mesh):
    with pytest.raises(ArgumentError) as error:
        pipeline(chain(same), mesh=mesh, shardings=shardings).init(PARAMS, BATCH)
    assert line in str(error.value)


@pytest.mark.parametrize(
    ("shardings", "tree"),
    [
        ({"a": P(None, "model"), "none": None, "b": None}, {"a": 0, "none": None, "b": 1}),
        pytest.param([NamedSharding(MESH, P(None, "model")), None, P("model")], [0, None, 1], marks=LONG),
        pytest.param({"a": "column", "b": "row"}, {"a": 0, "none": None, "b": 1}, marks=LONG),
    ],
    ids=["by path", "a list", "only the others"],
)
def test_parameters_may_be_none(shardings, tree):
    given = jax.tree.map(lambda k: PARAMS[f"l{k}"], tree)

    def loss_fn(params, batch):
        first, second = jax.tree.leaves(params)
        return jnp.mean((jnp.tanh(batch @ first) @ second) ** 2)

    _, params = check(loss_fn, loss_fn, given, mesh=MESH, shardings=shardings)
    assert jax.tree.leaves(params)[0].sharding.spec == P(None, "model")


class Named(nn.Module):
    """Layers whose kernels have names for their axes, and so has what is between them."""

    up: tuple[str | None, ...]
    down: tuple[str | None, ...]
    logical: bool = False

    @nn.compact
    def __call__(self, x):
        boxed = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        for k, (names, width) in enumerate(((self.up, 16), (self.down, 8)) * 2):
            made = boxed(nn.initializers.lecun_normal(), names)
            x = jnp.tanh(nn.Dense(width, param_dtype=float, kernel_init=made, name=f"dense_{k}")(x))
            x = nn.with_logical_constraint(x, ("batch", names[1])) if self.logical else x
        return x


FSDP = mesh_of(2, 2, 2, names=("stage", "fsdp", "tensor"))
METADATA = {
    "names of the mesh": (Named((None, "model"), ("model", None)), {"mesh": MESH}, (), P(None, "model")),
    "names of an FSDP mesh": (Named(("fsdp", "tensor"), ("tensor", "fsdp")), {"mesh": FSDP}, (), P("data", "model")),
    "an FSDP mesh without shards": (
        Named(("fsdp", "tensor"), ("tensor", "fsdp")),
        {"mesh": mesh_of(2, 2, names=("pipe", "fsdp"))},
        (),
        P("data"),
    ),
    "replicas without a mesh": (Named(("embed", "mlp"), ("mlp", "embed")), {"data_parallel": 2}, (), P()),
    "rules in force": (
        Named(("embed", "mlp"), ("mlp", "embed"), logical=True),
        {"mesh": MESH},
        (("embed", "data"), ("mlp", "model"), ("batch", "data")),
        P("data", "model"),
    ),
    "rules in force for other names of axes": (
        Named(("embed", "mlp"), ("mlp", "embed"), logical=True),
        {"mesh": FSDP},
        (("embed", "fsdp"), ("mlp", "tensor"), ("batch", ("fsdp",))),
        P("data", "model"),
    ),
}


def test_names_without_rules_are_refused():
    model = Named(("embed", "mlp"), ("mlp", "embed"), logical=True)
    pipe = pipeline(lambda p, b: jnp.mean(model.apply(p, b)), mesh=MESH)
    with pytest.raises(ArgumentError, match=r"P\('embed', 'mlp'\) has another axis(.|\n)*map Flax's axis names"):
        pipe.init(model.init(jax.random.key(0), BATCH), BATCH)


@pytest.mark.parametrize("case", [pytest.param(name, marks=() if name == "rules in force" else LONG) for name in METADATA])
def test_metadata_of_flax_say_how_parameters_are_sharded(case):
    # Where the mesh had no axis model, axes of replicas in metadata were dropped; and rules that are in force were not read.
    model, options, rules, spec = METADATA[case]
    with nn.logical_axis_rules(rules):
        given = model.init(jax.random.key(0), BATCH)

        def loss_fn(params, batch):
            return jnp.mean(model.apply(params, batch) ** 2)

        _, params = check(loss_fn, loss_fn, given, **options)
    assert params["params"]["dense_0"]["kernel"].value.sharding.spec == spec


@LONG
def test_arrays_that_are_on_the_mesh_already():
    given = jax.device_put(PARAMS, dict.fromkeys(PARAMS, NamedSharding(MESH, P("data", "model"))))
    batch = jax.device_put(BATCH, NamedSharding(MESH, P(("pipe", "data"))))
    _, params = check(chain(same), chain(same), given, batch, mesh=MESH)
    assert params["l0"].sharding.spec == P(None, "model")


@LONG
@pytest.mark.parametrize("spec", ["column", P("data", "model"), P("model", "data")], ids=str)
def test_the_sets_of_a_bank_over_the_axes_of_a_mesh(spec):
    def loss_fn(params, task, batch):
        return jnp.mean((jnp.tanh(batch @ params["l0"] @ task["w"]) @ params["l1"]) ** 2)

    sets = {"a": {"w": PARAMS["l2"]}, "b": {"w": PARAMS["l3"]}}
    given = {"l0": PARAMS["l0"], "l1": PARAMS["l1"]}
    bank = jaxpp.Bank(sets, optax.sgd(0.1))
    options = {"num_stages": 2, "num_microbatches": 2, "mesh": MESH, "shardings": {"task/w": spec, "l?": "row"}}
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), bank=bank, **options)
    state = pipe.init(given, BATCH)
    pipe.verify(state, BATCH, task="b")
    state, _ = pipe.step(state, BATCH, task="a")
    grads = jax.grad(loss_fn, (0, 1))(given, sets["a"], BATCH)
    wanted = jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, (given, sets["a"]), grads)
    compare("step", (state.params, bank.params("a")), wanted)
    compare("the other set", bank.params("b"), sets["b"])


def test_a_stage_that_maps_over_the_devices_of_a_rank_is_not_run_by_hand():
    mesh = mesh_of(2, 1, 2)
    between = mapped(nn.gelu, mesh=mesh, axis_names={"model"})
    pipe = pipeline(chain(between), mesh=mesh)
    state = pipe.init(PARAMS, BATCH)
    with pytest.raises(StateError, match=r"pipe.stages\[0\].forward: a stage is run by hand on one device") as error:
        pipe.stages[0].forward(state.params, {}, BATCH)
    assert "a loss with a jax.shard_map over the devices of a rank" in str(error.value)


def test_a_mesh_of_jax_s_default_axis_types_and_an_init_with_constraints_and_maps():
    # jax.make_mesh makes explicit axes from JAX 0.10 on: a bare spec, or a map without a mesh, failed in JAX's words.
    def between(x):
        return mapped(lambda x: x + 0 * jax.lax.psum(x, "model"))(constrained(COLUMNS)(x))

    def plain(key):
        return {f"l{k}": jax.random.normal(each, (8, 8)) / 3 for k, each in enumerate(jax.random.split(key, 4))}

    def init(key):
        made = plain(key)
        jnp.tanh(between(BATCH @ made["l0"]))  # as a model's init runs the model
        return made | {"l1": constrained(COLUMNS)(made["l1"])}

    pipe = pipeline(chain(between), mesh=jax.make_mesh((2, 1, 2), ("pipe", "data", "model")))
    state = pipe.init(init, jax.random.key(0), BATCH)
    compare("params", state.params, plain(jax.random.key(0)))
    pipe.verify(state, BATCH)


def test_a_map_that_mixes_examples_is_told_and_one_that_does_not_is_not():
    def centred(axis):
        return lambda x: x - jax.lax.pmean(x.mean(axis), "model") if axis == 0 else x - jax.lax.pmean(x.mean(1), "model")[:, None]

    options = {"mesh": mesh_of(2, 1, 2)}
    pipeline(chain(mapped(centred(1), axis_names={"model"})), **options).init(PARAMS, BATCH)
    for axis, spec, message in ((0, P("model"), "does with the examples"), (0, COLUMNS, "goes into the row of each")):
        with pytest.warns(jaxpp.MicrobatchWarning, match=message):
            pipeline(chain(mapped(centred(axis), spec, axis_names={"model"})), **options).init(PARAMS, BATCH)


def test_a_mesh_that_is_set_stays_so_and_the_other_front_doors_do_not_mind_it():
    with jax.set_mesh(OWN):
        forward = jaxpp.Forward(lambda p, b: nn.relu(b @ p["l0"]) @ p["l1"], num_stages=2, num_microbatches=2)
        held = forward.init(PARAMS, BATCH)
        outputs = forward.apply(held, BATCH)
        streamed = np.concatenate(list(forward.stream(held, [BATCH[:8], BATCH[8:11], BATCH[11:]])))
        loss, grads = jaxpp.value_and_grad(chain(nn.relu), num_stages=2, num_microbatches=2)(PARAMS, BATCH)
        assert jax.sharding.get_abstract_mesh().shape == {"x": 2}
    for found in (outputs, streamed):
        compare("outputs", found, nn.relu(BATCH @ PARAMS["l0"]) @ PARAMS["l1"])
    compare("grads", (loss, grads), jax.value_and_grad(chain(nn.relu))(PARAMS, BATCH))


@pytest.mark.parametrize("options", [{"data_parallel": 2}, pytest.param(ON, marks=LONG)], ids=["replicas", "mesh"])
def test_gradients_and_stages_by_hand_have_replicas_and_shards_too(options):
    found = jaxpp.value_and_grad(chain(nn.relu), num_stages=2, num_microbatches=2, **options)(PARAMS, BATCH)
    compare("grads", found, jax.value_and_grad(chain(nn.relu))(PARAMS, BATCH))
    stages = [lambda p, x: nn.relu(x @ p["w"]), lambda p, x: x @ p["w"]]
    options = options | ({"shardings": {"0/w": "column"}} if "shardings" in options else {})
    pipe = jaxpp.Pipeline.from_stages(
        stages, loss=lambda y, t: jnp.mean((y - t) ** 2), optimizer=optax.sgd(0.1), num_microbatches=2, **options
    )
    state = pipe.init([{"w": PARAMS["l0"]}, {"w": PARAMS["l1"]}], (BATCH, BATCH))
    pipe.verify(state, (BATCH, BATCH))


def with_results(x):
    return x + io_callback(np.zeros_like, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x))


REFUSED = {
    "a callback with effects and results": (with_results, ON, ["a callback with effects has no results", "jax.pure_callback"]),
    "one of two axes of replicas": (
        normalised("fsdp"),
        {"mesh": mesh_of(2, 2, 2, names=("replica", "pipe", "fsdp")), "axes": {"data": ("replica", "fsdp")}},
        ["name all axes that stand for 'data'"],
    ),
    "a name that nothing has": (
        normalised("batch"),
        {"data_parallel": 2},
        ["Got: the axis name 'batch', which nothing has.", "Fix: pass axes={\"data\": 'batch'} if it is between replicas"],
    ),
    "a name that nothing has, in a derivative": (
        averaged("other"),
        {"data_parallel": 2},
        ["Got: the axis name 'other', which nothing has."],
    ),
    "shards outside of a map": (
        lambda x: jax.lax.psum(x, "model"),
        ON,
        ["a collective between the shards of a rank stands in a jax.shard_map over them", "axis_names={'model'}"],
    ),
    "a map whose derivative communicates over data": (
        mapped(with_derivative(lambda g: g - jax.lax.pmean(g, "data")), P("data", "model"), mesh=MESH),
        ON,
        ["a derivative of one's own has collectives over axes of a rank, and no other", "the axis 'data'"],
    ),
    "one collective over data and model": (
        mapped(lambda x: x + jax.lax.all_gather(x, ("data", "model")).sum(), P("data", "model"), mesh=MESH),
        ON,
        [
            "a rank computes all blocks along 'data' itself, and its devices share those along 'model'",
            "all_gather over 'data', 'model'",
            "call one collective for each axis",
            __file__,
        ],
    ),
    "a ring over data and model": (
        mapped(lambda x: jax.lax.ppermute(x, ("data", "model"), [(0, 1), (1, 0)]), P("data", "model"), mesh=MESH),
        ON,
        ["ppermute over 'data', 'model'", "call one collective for each axis", __file__],
    ),
    "a block that replicas and shards cannot share": (  # as long as four rows, in plain JAX, and of one in a microbatch
        mapped(lambda x: jax.lax.all_to_all(x, ("data", "model"), 0, 0, tiled=True), P(("data", "model")), mesh=MESH),
        ON,
        [
            "all_to_all and psum_scatter give each device along their axes an equal share of a block",
            "split_axis (1) has to be divisible by the size of the named axis ('data', 'model') (4)",
            "the loss for one microbatch, batch leaves f64[4,8]",
            "if it is that of the examples, pass fewer microbatches or a larger batch",
        ],
    ),
    "a block that the devices of another mesh cannot share": (
        mapped(lambda x: jax.lax.all_to_all(x, ("data", "model"), 0, 0, tiled=True), P(("data", "model")), mesh=MESH),
        {"mesh": mesh_of(2, 1, 2), "shardings": RULES},
        ["an equal share of a block", "split_axis (2) has to be divisible", "batch leaves f64[8,8]"],
    ),
    "a block that replicas cannot share": (
        lambda x: jax.lax.psum_scatter(x[:, :3], "data", scatter_dimension=1, tiled=True) @ jnp.ones((1, 8)),
        {"data_parallel": 2},
        ["an equal share of a block", "size 3 must be divisible by shard_count 2", "split an axis of the block whose size"],
    ),
    "another axis": (
        constrained(NamedSharding(mesh_of(2, 4, names=("a", "b")), P("b"))),
        ON,
        ["values are sharded over the axes of a rank: 'data', 'model'", "the axis 'b'"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_stage_cannot_do_is_refused(case):
    between, options, lines = REFUSED[case]
    pipe = pipeline(chain(between), **options)
    before = len(jax.live_arrays())
    with pytest.raises(LossError) as error:
        pipe.init(PARAMS, BATCH)
    for line in lines:
        assert line in str(error.value)
    del error
    assert len(jax.live_arrays()) <= before  # no parameter was placed on a device


def test_the_metadata_of_nnx_become_shardings():
    class Model(nnx.Module):
        def __init__(self, rngs):
            init = nnx.initializers.lecun_normal()
            self.up = nnx.Linear(8, 16, rngs=rngs, kernel_init=nnx.with_partitioning(init, (None, "model")))
            self.down = nnx.Linear(16, 8, rngs=rngs, kernel_init=nnx.with_partitioning(init, ("model", None)))

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    mesh = mesh_of(2, 2, names=("pipe", "model"))
    with jax.set_mesh(mesh):
        graph, given = nnx.split(Model(nnx.Rngs(0)))
        pipe = pipeline(lambda p, b: jnp.mean(nnx.merge(graph, p)(b) ** 2), mesh=mesh)
        state = pipe.init(given, BATCH)
        assert state.params["up"]["kernel"][...].sharding.spec == COLUMNS
        assert state.params["down"]["kernel"][...].sharding.spec == P("model", None)
        pipe.verify(state, BATCH)


@pytest.mark.parametrize("rules", [{"l0": "column"}, {"*": COLUMNS}, RULES, lambda path, shape: "column"])
@pytest.mark.parametrize(
    "options", [{}, {"devices": jax.devices()[:1]}, {"data_parallel": 2}, {"mesh": mesh_of(2, 2, names=("pipe", "data"))}]
)
def test_rules_over_an_axis_that_a_pipeline_does_not_have_are_refused(options, rules):
    # What a function said was dropped without a word where there were replicas.
    with pytest.raises(ArgumentError) as error:
        pipeline(chain(nn.relu), shardings=rules, **options).init(PARAMS, BATCH)
    assert 'shardings: parameters are sharded over the "model" axis of a mesh, or divided over "data".' in str(error.value)
    assert 'Fix: pass for example mesh=jax.make_mesh((2, 2), ("pipe", "model"))' in str(error.value)


def test_devices_over_which_nothing_is_divided_are_warned_of():
    for options, message in (
        ({"mesh": MESH}, 'no parameter is sharded over "model": its 2 devices hold and compute the same'),
        ({"devices": [jax.devices()[:2], jax.devices()[2:4]]}, "devices, a list of devices for each rank: "),
    ):
        with pytest.warns(jaxpp.DevicesWarning, match=message) as found:
            pipeline(chain(nn.relu), **options).init(PARAMS, BATCH)
        assert "Fix: pass shardings=jaxpp.propose_shardings(loss_fn, params, batch, model=2), or" in str(found[0].message)
        rules = jaxpp.propose_shardings(chain(nn.relu), PARAMS, BATCH, model=2)
        pipeline(chain(nn.relu), shardings=rules, **options).init(PARAMS, BATCH)  # and nothing is told of it
    assert str(found[0].message).endswith("or one device for each rank.") and "mesh" not in str(found[0].message)


def test_collectives_between_replicas_of_unequal_weight_are_refused():
    pipe = pipeline(chain(normalised("data")), weight=lambda batch: batch.sum(), data_parallel=2)
    with pytest.raises(ArgumentError, match="these must weigh the same"):
        pipe.init(PARAMS, BATCH)
    pipe = pipeline(chain(normalised("data")), data_parallel=2)
    state = pipe.init(PARAMS, BATCH)
    with pytest.raises(BatchError, match="15 examples for 2 replicas"):
        pipe.evaluate(state, BATCH[:15])
    assert np.isfinite(pipe.evaluate(state, BATCH[:14]).loss)
