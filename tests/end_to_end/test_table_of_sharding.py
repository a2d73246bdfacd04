"""What users of JAX's own sharding try first, each on 2 x 2 x 2 devices and in float64: each step equals plain JAX."""

from contextlib import nullcontext

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxpp
from jaxpp.errors import ArgumentError, LossError
from jaxpp.verify import compare

P = PartitionSpec
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


def chain(between):
    def loss_fn(params, batch):
        x = batch
        for k in range(4):
            x = jnp.tanh(between(x @ params[f"l{k}"]))
        return jnp.mean(x**2)

    return loss_fn


def check(loss_fn, plain, given=PARAMS, batch=BATCH, parts=1, **options):
    """Train a step; equal to plain JAX with so many microbatches, and found so by ``verify``. Return the new parameters."""
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), **{"num_stages": 2, "num_microbatches": 2} | options)
    state = pipe.init(given, batch)
    pipe.verify(state, batch)
    state, metrics = pipe.step(state, batch)
    given = jax.device_get(given)
    found = [jax.value_and_grad(plain)(given, part) for part in np.split(jax.device_get(batch), parts)]
    loss, grads = jax.tree.map(lambda *each: sum(each) / parts, *found)
    wanted = jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, given, grads)
    compare("step", (state.params, metrics.loss), (wanted, loss))
    return state.params


def constrained(sharding):
    return lambda x: jax.lax.with_sharding_constraint(x, sharding)


def mapped(function, spec, out=None, **options):
    return jax.shard_map(function, in_specs=spec, out_specs=spec if out is None else out, **options)


def same(x):
    return x


@jax.custom_vjp
def doubled(x):
    def kernel(given, made):
        made[...] = given[...] * 2

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (2 * g,))

IN_THE_MODEL = {
    "a bare spec in a mesh's context": (constrained(P("data", "model")), same, lambda: MESH),
    "a bare spec in the context of an abstract mesh": (
        constrained(P("data", "model")),
        same,
        lambda: jax.sharding.use_abstract_mesh(MESH.abstract_mesh),
    ),
    "a map over a part of the mesh": (mapped(jnp.sin, P(None, "model"), mesh=SHARDS), jnp.sin, nullcontext),
    "a kernel": (doubled, lambda x: 2 * x, nullcontext),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=() if name in ("a kernel", "a bare spec in the context of an abstract mesh") else pytest.mark.long)
        for name in IN_THE_MODEL
    ],
)
def test_in_the_model(case):
    between, plain, context = IN_THE_MODEL[case]
    with context():
        check(chain(between), chain(plain), **ON)


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


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (AxisType.Auto, ON),
        pytest.param(AxisType.Explicit, {"shardings": RULES}, marks=pytest.mark.long),
        pytest.param(AxisType.Explicit, {"mesh": None}, marks=pytest.mark.long),
        pytest.param(AxisType.Explicit, {"mesh": None, "data_parallel": 2}, marks=pytest.mark.long),
    ],
)
def test_a_kernel_where_a_mesh_is_set(kind, options):
    # The shape of what a kernel returns named the mesh that was set, and differentiation failed in JAX's words on a rank.
    mesh = Mesh(MESH.devices, MESH.axis_names, axis_types=(kind,) * 3)
    with jax.set_mesh(mesh):
        check(chain(scaled_both_ways), chain(lambda x: 2 * x), **{"mesh": mesh} | options)


BOTH = P("data", "model")
RING = [(0, 1), (1, 0)]
OWN = Mesh(np.array(jax.devices()[:2]), ("x",))


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
    [
        pytest.param(name, marks=() if name in ("a mean over both", "devices of one's own") else pytest.mark.long)
        for name in IN_MAPS
    ],
)
def test_maps_over_any_devices_are_computed_block_by_block(case):
    between, plain, options = IN_MAPS[case]
    replicas = 2 if "data_parallel" in options or options.get("mesh") is MESH else 1
    check(chain(between), chain(plain), parts=2 * replicas, **options)


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


def test_a_callback_with_effects_and_results_is_refused():
    def between(x):
        return x + io_callback(np.zeros_like, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x))

    pipe = jaxpp.Pipeline(chain(between), optax.sgd(0.1), num_stages=2, num_microbatches=2, **ON)
    with pytest.raises(LossError, match=r"a callback with effects has no results(.|\n)*jax.pure_callback"):
        pipe.init(PARAMS, BATCH)


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
    "a function": (lambda path, shape: P(None, "model") if path == "l0" and shape == (8, 8) else None, {}, P(None, "model")),
    "replicas without a mesh": ({"*": P("data")}, {"mesh": None, "data_parallel": 2}, P("data")),
}


SHORT = {"an axis for everything, most of one device", "regular expressions, of which the first counts"}


@pytest.mark.parametrize("case", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in SHARDINGS])
def test_parameters_over_the_axes_of_a_mesh(case):
    shardings, options, spec = SHARDINGS[case]
    params = check(chain(same), chain(same), **{"mesh": MESH, "shardings": shardings} | options)
    assert params["l0"].sharding.spec == spec


@pytest.mark.parametrize(
    ("shardings", "line"),
    [
        ([("zzz", P("model"))], "'zzz' matches none.\n  Fix: use paths like those below."),
        ([("*/kernel", P("model"))], "'*/kernel': nothing to repeat at position 0.\n  Fix: write it as one"),
        ({"*": P("sequence")}, "l0, f64[8,8]: P('sequence',) has another axis, 'sequence'"),
    ],
)
def test_rules_that_fit_nothing_are_refused(shardings, line):
    pipe = jaxpp.Pipeline(chain(same), optax.sgd(0.1), num_stages=2, num_microbatches=2, mesh=MESH, shardings=shardings)
    with pytest.raises(ArgumentError) as error:
        pipe.init(PARAMS, BATCH)
    assert line in str(error.value)


@pytest.mark.parametrize(
    ("shardings", "tree"),
    [
        ({"a": P(None, "model"), "none": None, "b": None}, {"a": 0, "none": None, "b": 1}),
        pytest.param([NamedSharding(MESH, P(None, "model")), None, P("model")], [0, None, 1], marks=pytest.mark.long),
        pytest.param({"a": "column", "b": "row"}, {"a": 0, "none": None, "b": 1}, marks=pytest.mark.long),
    ],
    ids=["by path", "a list", "only the others"],
)
def test_parameters_may_be_none(shardings, tree):
    given = jax.tree.map(lambda k: PARAMS[f"l{k}"], tree)

    def loss_fn(params, batch):
        first, second = jax.tree.leaves(params)
        return jnp.mean((jnp.tanh(batch @ first) @ second) ** 2)

    params = check(loss_fn, loss_fn, given, mesh=MESH, shardings=shardings)
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


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name == "rules in force" else pytest.mark.long) for name in METADATA]
)
def test_metadata_of_flax_say_how_parameters_are_sharded(case):
    # Where the mesh had no axis model, axes of replicas in metadata were dropped; and rules that are in force were not read.
    model, options, rules, spec = METADATA[case]
    with nn.logical_axis_rules(rules):
        given = model.init(jax.random.key(0), BATCH)

        def loss_fn(params, batch):
            return jnp.mean(model.apply(params, batch) ** 2)

        params = check(loss_fn, loss_fn, given, **options)
    assert params["params"]["dense_0"]["kernel"].value.sharding.spec == spec


def test_names_without_rules_are_refused():
    model = Named(("embed", "mlp"), ("mlp", "embed"), logical=True)
    given = model.init(jax.random.key(0), BATCH)
    pipe = jaxpp.Pipeline(lambda p, b: jnp.mean(model.apply(p, b)), optax.sgd(0.1), num_stages=2, num_microbatches=2, mesh=MESH)
    with pytest.raises(ArgumentError, match=r"P\('embed', 'mlp'\) has another axis(.|\n)*map Flax's axis names"):
        pipe.init(given, BATCH)


@pytest.mark.long
def test_arrays_that_are_on_the_mesh_already():
    given = jax.device_put(PARAMS, dict.fromkeys(PARAMS, NamedSharding(MESH, P("data", "model"))))
    batch = jax.device_put(BATCH, NamedSharding(MESH, P(("pipe", "data"))))
    params = check(chain(same), chain(same), given, batch, mesh=MESH)
    assert params["l0"].sharding.spec == P(None, "model")


@pytest.mark.long
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


def test_replicas_of_unequal_number_are_refused():
    with pytest.raises(ArgumentError, match="passes through all ranks on devices of its own"):
        jaxpp.Pipeline(chain(same), optax.sgd(0.1), num_stages=2, num_microbatches=2, data_parallel=[2, 1])


def test_parts_of_unequal_size_are_refused_as_by_jax():
    mesh = mesh_of(2, 1, 3)
    with pytest.raises(ValueError, match=r"evenly|divisible"):
        jax.device_put(PARAMS["l0"], NamedSharding(mesh, P("pipe", "model")))
    pipe = jaxpp.Pipeline(chain(same), optax.sgd(0.1), num_stages=2, num_microbatches=2, mesh=mesh, shardings={"*": "column"})
    with pytest.raises(ArgumentError, match=r"evenly(.|\n)*is not divisible by 3"):
        pipe.init(PARAMS, BATCH)
