"""Models that say themselves how values are sharded, or name the replicas: each step equals the plain one."""

from contextlib import nullcontext

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxpp
from jaxpp.errors import ArgumentError, BatchError, LossError, StateError

P = PartitionSpec
LONG = pytest.mark.long
RULES = {"l0": "column", "l1": "row", "l2": "column", "l3": "row"}
BATCH = jnp.linspace(-1, 1, 16 * 8).reshape(16, 8)


def mesh_of(*sizes, names=("pipe", "data", "model")):
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


MESH = mesh_of(2, 2, 2)
OWN = Mesh(np.array(jax.devices()[:2]), ("x",))


def params():
    keys = jax.random.split(jax.random.key(0), 4)
    return {f"l{k}": jax.random.normal(key, (8, 8)) / 3 for k, key in enumerate(keys)}


def chain(between, activation=nn.relu):
    def loss_fn(params, batch):
        x = batch
        for k in range(4):
            x = activation(between(x @ params[f"l{k}"]))
        return jnp.mean(x**2)

    return loss_fn


def constrained(sharding):
    return lambda x: jax.lax.with_sharding_constraint(x, sharding)


COLUMNS = P(None, "model")


def mapped(function, spec=COLUMNS, **options):
    return lambda x: jax.shard_map(function, in_specs=spec, out_specs=spec, **options)(x)  # noqa: PLW0108  (not before a mesh is set)


def in_a_loop(x):
    def body(carry, _):
        return nn.gelu(jax.lax.with_sharding_constraint(carry, P("data", "model"))), None

    return jax.lax.scan(body, x, None, length=2)[0]


def called_back(x):
    jax.debug.callback(lambda y: None, x.sum())
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x)) * 0 + x


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

WITH_MESH = {
    "a bare spec": (constrained(P("data", "model")), nullcontext),
    "the whole mesh": (constrained(NamedSharding(MESH, P(("pipe", "data"), "model"))), nullcontext),
    "the mesh that is set": (constrained(P("data", "model")), lambda: jax.set_mesh(MESH)),
    "an abstract mesh": (constrained(NamedSharding(MESH.abstract_mesh, P("data", "model"))), nullcontext),
    "a mesh is set, and nobody asks": (doubled, lambda: jax.set_mesh(MESH)),
    "a loop": (in_a_loop, lambda: jax.set_mesh(MESH)),
    "a checkpoint": (jax.checkpoint(constrained(P(None, "model"))), lambda: jax.set_mesh(MESH)),
    "a map over model": (mapped(nn.gelu, axis_names={"model"}), nullcontext),
    "a map over the whole mesh": (mapped(nn.gelu, mesh=MESH), nullcontext),
    "a map over an abstract mesh": (mapped(nn.gelu, mesh=MESH.abstract_mesh, axis_names={"model"}), nullcontext),
    "a sum over model": (mapped(lambda x: jax.lax.psum(x, "model") / 2, P(), mesh=MESH, axis_names={"model"}), nullcontext),
    "a rule of its own": (lambda x: doubled(constrained(P(None, "model"))(x)), lambda: jax.set_mesh(MESH)),
    "callbacks": (called_back, nullcontext),
    "partitioning of its own": (partitioned, nullcontext),
}
CONSTRAINED = [WITH_MESH[name][0] for name in ("a bare spec", "the whole mesh", "the mesh that is set", "an abstract mesh")]
SHORT = {"a bare spec", "the mesh that is set", "a map over the whole mesh", "callbacks"}


@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")  # it does not know what maps and callbacks do with examples
@pytest.mark.parametrize("case", [pytest.param(name, marks=() if name in SHORT else LONG) for name in WITH_MESH])
def test_on_a_mesh_it_equals_the_plain_step(case):
    between, context = WITH_MESH[case]
    with context():
        pipe = jaxpp.Pipeline(chain(between), optax.sgd(0.1), num_stages=2, num_microbatches=2, mesh=MESH, shardings=RULES)
        state = pipe.init(params(), BATCH)
        pipe.step(state, BATCH)
        after = pipe.step(pipe.init(params(), BATCH), BATCH)[0].params
    if between in CONSTRAINED:  # which changes no value: the programs have it too
        (cut,) = pipe.engine.preparer.step(BATCH, None).cuts
        for stage in cut.stages:
            assert "sharding_constraint" in str(jax.make_jaxpr(stage.forward.function)(*stage.forward.avals))
    alone = chain(doubled if case in ("a mesh is set, and nobody asks", "a rule of its own") else _alone(case))
    grads = jax.grad(alone)(params(), BATCH)
    for name, leaf in params().items():
        np.testing.assert_allclose(after[name], leaf - 0.1 * grads[name], rtol=1e-4, atol=1e-6)


def _alone(case):
    if "map over" in case:
        return nn.gelu
    return (lambda x: nn.gelu(nn.gelu(x))) if case == "a loop" else (lambda x: x)


@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning", "ignore::jaxpp.DevicesWarning")
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
    pipe = jaxpp.Pipeline(chain(mapped(inside, mesh=mesh, **options)), optax.sgd(0.1), num_stages=2, num_microbatches=2, mesh=mesh)
    state, _ = pipe.step(pipe.init(params(), BATCH), BATCH)
    grads = jax.grad(chain(lambda x: nn.relu6(2 * nn.relu6(2 * nn.relu(x)))))(params(), BATCH)
    for name, leaf in params().items():
        np.testing.assert_allclose(state.params[name], leaf - 0.1 * grads[name], rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning", "ignore::jaxpp.DevicesWarning")
def test_a_stage_that_maps_over_the_devices_of_a_rank_is_not_run_by_hand():
    mesh = mesh_of(2, 1, 2)
    between = mapped(nn.gelu, mesh=mesh, axis_names={"model"})
    pipe = jaxpp.Pipeline(chain(between), optax.sgd(0.1), num_stages=2, num_microbatches=2, mesh=mesh)
    state = pipe.init(params(), BATCH)
    with pytest.raises(StateError, match=r"pipe.stages\[0\].forward: a stage is run by hand on one device") as error:
        pipe.stages[0].forward(state.params, {}, BATCH)
    assert "a loss with a jax.shard_map over the devices of a rank" in str(error.value)


@pytest.mark.filterwarnings("ignore::jaxpp.DevicesWarning")
def test_a_mesh_of_jax_s_default_axis_types_and_an_init_with_constraints_and_maps():
    # jax.make_mesh makes explicit axes from JAX 0.10 on: a bare spec, or a map without a mesh, failed in JAX's words.
    def between(x):
        x = constrained(P(None, "model"))(x)
        return jax.shard_map(lambda x: x + 0 * jax.lax.psum(x, "model"), in_specs=P(None, "model"), out_specs=P(None, "model"))(x)

    def init(key):
        made = {f"l{k}": jax.random.normal(each, (8, 8)) / 3 for k, each in enumerate(jax.random.split(key, 4))}
        jnp.tanh(between(BATCH @ made["l0"]))  # as a model's init runs the model
        return made | {"l1": constrained(P(None, "model"))(made["l1"])}

    pipe = jaxpp.Pipeline(
        chain(between), optax.sgd(0.1), num_stages=2, num_microbatches=2, mesh=jax.make_mesh((2, 1, 2), ("pipe", "data", "model"))
    )
    state = pipe.init(init, jax.random.key(0), BATCH)
    for name, leaf in params().items():
        np.testing.assert_allclose(state.params[name], leaf, rtol=1e-6)
    pipe.verify(state, BATCH)


@pytest.mark.filterwarnings("ignore::jaxpp.DevicesWarning")
def test_a_map_that_mixes_examples_is_told_and_one_that_does_not_is_not():
    def centred(axis):
        return lambda x: x - jax.lax.pmean(x.mean(axis), "model") if axis == 0 else x - jax.lax.pmean(x.mean(1), "model")[:, None]

    options = {"num_stages": 2, "num_microbatches": 2, "mesh": mesh_of(2, 1, 2)}
    jaxpp.Pipeline(chain(mapped(centred(1), axis_names={"model"})), optax.sgd(0.1), **options).init(params(), BATCH)
    for axis, spec, message in ((0, P("model"), "does with the examples"), (0, COLUMNS, "goes into the row of each")):
        with pytest.warns(jaxpp.MicrobatchWarning, match=message):
            jaxpp.Pipeline(chain(mapped(centred(axis), spec, axis_names={"model"})), optax.sgd(0.1), **options).init(
                params(), BATCH
            )


WITHOUT_MESH = {
    "a mesh is set": (doubled, lambda: jax.set_mesh(OWN), {}),
    "a constraint on devices of one's own": (constrained(NamedSharding(OWN, P("x"))), nullcontext, {}),
    "a constraint on the mesh that is set": (constrained(P("x")), lambda: jax.set_mesh(OWN), {}),
    "callbacks and replicas": (called_back, nullcontext, {"data_parallel": 2}),
    "partitioning of its own and replicas": (partitioned, nullcontext, {"data_parallel": 2}),
}


@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")
@pytest.mark.parametrize("case", [pytest.param(name, marks=LONG if "replicas" in name else ()) for name in WITHOUT_MESH])
def test_without_a_mesh_it_equals_the_plain_step(case):
    between, context, options = WITHOUT_MESH[case]
    with context():
        pipe = jaxpp.Pipeline(chain(between), optax.sgd(0.1), num_stages=2, num_microbatches=2, **options)
        state, _ = pipe.step(pipe.init(params(), BATCH), BATCH)
    grads = jax.grad(chain(doubled if case == "a mesh is set" else lambda x: x))(params(), BATCH)
    for name, leaf in params().items():
        np.testing.assert_allclose(state.params[name], leaf - 0.1 * grads[name], rtol=1e-4, atol=1e-6)


def test_a_mesh_that_is_set_stays_so_and_the_other_front_doors_do_not_mind_it():
    with jax.set_mesh(OWN):
        forward = jaxpp.Forward(lambda p, b: nn.relu(b @ p["l0"]) @ p["l1"], num_stages=2, num_microbatches=2)
        held = forward.init(params(), BATCH)
        outputs = forward.apply(held, BATCH)
        streamed = np.concatenate(list(forward.stream(held, [BATCH[:8], BATCH[8:11], BATCH[11:]])))
        loss, grads = jaxpp.value_and_grad(chain(nn.relu), num_stages=2, num_microbatches=2)(params(), BATCH)
        assert jax.sharding.get_abstract_mesh().shape == {"x": 2}
    for found in (outputs, streamed):
        np.testing.assert_allclose(found, nn.relu(BATCH @ params()["l0"]) @ params()["l1"], rtol=1e-5)
    expected = jax.value_and_grad(chain(nn.relu))(params(), BATCH)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    np.testing.assert_allclose(grads["l2"], expected[1]["l2"], rtol=1e-4, atol=1e-7)


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


@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")  # normalisation mixes examples
@pytest.mark.parametrize(
    ("between", "options"),
    [
        (normalised("data"), {"data_parallel": 2}),
        pytest.param(normalised("data"), {"data_parallel": 4, "devices": 8}, marks=LONG),
        pytest.param(normalised("data"), {"mesh": (2, 2, 2), "shardings": RULES}, marks=LONG),
        pytest.param(normalised("data"), {}, marks=LONG),
        pytest.param(gathered, {"data_parallel": 2}, marks=LONG),
        pytest.param(gathered, {}, marks=LONG),
        pytest.param(jax.checkpoint(normalised("data")), {"data_parallel": 2, "schedule": "zb-h1"}, marks=LONG),
        pytest.param(normalised("data"), {"data_parallel": 2, "remat": "recompute"}, marks=LONG),
    ],
)
def test_a_collective_over_data_is_one_between_replicas(between, options):
    if "mesh" in options:
        options = options | {"mesh": mesh_of(*options["mesh"])}
    if "devices" in options:
        options = options | {"devices": jax.devices()[: options["devices"]]}
    pipe = jaxpp.Pipeline(chain(between, jnp.tanh), optax.sgd(0.1), num_stages=2, num_microbatches=1, **options)
    state, metrics = pipe.step(pipe.init(params(), BATCH), BATCH)
    loss, grads = jax.value_and_grad(chain(whole, jnp.tanh))(params(), BATCH)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
    for name, leaf in params().items():
        np.testing.assert_allclose(state.params[name], leaf - 0.1 * grads[name], rtol=1e-4, atol=1e-5)


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


ON_MESH = {"mesh": MESH, "shardings": RULES}
IN_DERIVATIVES = {
    "replicas": (averaged(), {"data_parallel": 2}),
    "one device a stage": (averaged(), {}),
    "a tangent": (averaged(kind="custom_jvp"), {"data_parallel": 2}),
    "a tangent on one device": (averaged(kind="custom_jvp"), {}),
    "another name": (averaged("batch"), {"data_parallel": 2, "axes": {"data": "batch"}}),
    "a mesh": (averaged(), ON_MESH),
    "a mesh without replicas": (averaged(), ON_MESH | {"mesh": mesh_of(2, 1, 2)}),
    "a loop": (lambda x: jax.lax.scan(lambda x, _: (averaged()(x), None), x, None, length=2)[0], ON_MESH),
    "a checkpoint": (jax.checkpoint(averaged()), {"data_parallel": 2}),
    "a constraint": (with_derivative(constrained(NamedSharding(MESH, P("data", "model")))), ON_MESH),
    "a bare constraint": (with_derivative(constrained(P("data", "model"))), ON_MESH),
    "a map": (with_derivative(mapped(lambda x: x * 1.0, mesh=MESH, axis_names={"model"})), ON_MESH),
    "one that nobody asks for": (lambda x: x + 0 * jax.lax.stop_gradient(with_derivative(refused)(jax.lax.stop_gradient(x))), {}),
}


@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=() if name in ("one device a stage", "another name") else LONG) for name in IN_DERIVATIVES]
)
def test_a_derivative_of_its_own_may_be_the_only_one_to_name_axes(case):
    # JAX said "unbound axis name" in pipe.verify, and without replicas in pipe.init too.
    between, options = IN_DERIVATIVES[case]
    pipe = jaxpp.Pipeline(chain(between, jnp.tanh), optax.sgd(0.1), num_stages=2, num_microbatches=1, **options)
    state = pipe.init(params(), BATCH)
    pipe.verify(state, BATCH)
    state, _ = pipe.step(state, BATCH)
    replicas = 2 if "data_parallel" in options or options.get("mesh") is MESH else 1
    plain = chain(
        (lambda x: x) if case in ("a constraint", "a bare constraint", "a map", "one that nobody asks for") else between, jnp.tanh
    )
    grad = jax.vmap(jax.grad(plain), (None, 0), axis_name=options.get("axes", {}).get("data", "data"))
    grads = grad(params(), BATCH.reshape(replicas, -1, 8))
    for name, leaf in params().items():
        np.testing.assert_allclose(state.params[name], leaf - 0.1 * grads[name].mean(0), rtol=1e-4, atol=1e-6)


TYPED = jax.make_mesh((2, 2, 2), ("pipe", "data", "model"), axis_types=(AxisType.Explicit,) * 3)


@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")
@pytest.mark.parametrize(
    ("between", "context"),
    [
        (mapped(nn.gelu, axis_names={"model"}), lambda: jax.set_mesh(TYPED)),
        pytest.param(mapped(nn.gelu, mesh=TYPED, axis_names={"model"}), nullcontext, marks=LONG),
        pytest.param(
            lambda x: jax.shard_map(nn.gelu, in_specs=COLUMNS, out_specs=COLUMNS)(jax.reshard(x, COLUMNS)), nullcontext, marks=LONG
        ),
    ],
)
def test_maps_over_axes_of_explicit_types_are_verified(between, context):
    # JAX said "Expected cotangent type float32[4,8] but got float32[4,8@model]".
    with jax.set_mesh(TYPED):
        try:
            jax.eval_shape(chain(between), params(), BATCH)
        except ValueError as error:
            pytest.skip(f"this JAX wants values divided before a map over explicit axes: {str(error)[:60]}")
    with context():
        pipe = jaxpp.Pipeline(chain(between), optax.sgd(0.1), num_stages=2, num_microbatches=2, mesh=TYPED, shardings=RULES)
        state = pipe.init(params(), BATCH)
        pipe.verify(state, BATCH)
        state, _ = pipe.step(state, BATCH)
    grads = jax.grad(chain(nn.gelu))(params(), BATCH)
    for name, leaf in params().items():
        np.testing.assert_allclose(state.params[name], leaf - 0.1 * grads[name], rtol=1e-4, atol=1e-6)


NAMES = {
    "usual names": ({"mesh": ((2, 2, 2), ("stage", "replica", "tensor"))}, "replica", "tensor"),
    "names of one's own": (
        {"mesh": ((2, 2, 2), ("a", "b", "c")), "axes": {"pipe": "a", "data": "b", "model": "c"}},
        "b",
        "c",
    ),
    "two axes of replicas": (
        {"mesh": ((2, 2, 2), ("replica", "pipe", "fsdp")), "axes": {"data": ("replica", "fsdp")}},
        ("replica", "fsdp"),
        None,
    ),
    "a name for the replicas": ({"data_parallel": 2, "axes": {"data": "batch"}}, "batch", None),
    "a name beside the mesh's": ({"mesh": ((2, 2, 2), ("pipe", "data", "model")), "axes": {"data": "batch"}}, "batch", "model"),
}


@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")
@pytest.mark.parametrize("case", [pytest.param(name, marks=() if name == "names of one's own" else LONG) for name in NAMES])
def test_axes_may_have_other_names(case):
    options, data, model = NAMES[case]
    if "mesh" in options:
        options = options | {"mesh": mesh_of(*options["mesh"][0], names=options["mesh"][1])}
    between = normalised(data)
    if model:
        options = options | {"shardings": {"l0": P(None, model), "l1": P(model, None), "l2": "column"}}
        inner = between
        between = lambda x: constrained(P(None, model))(inner(x))  # noqa: E731
    pipe = jaxpp.Pipeline(chain(between, jnp.tanh), optax.sgd(0.1), num_stages=2, num_microbatches=1, **options)
    state = pipe.init(params(), BATCH)
    pipe.verify(state, BATCH)
    state, _ = pipe.step(state, BATCH)
    grads = jax.grad(chain(whole, jnp.tanh))(params(), BATCH)
    for name, leaf in params().items():
        np.testing.assert_allclose(state.params[name], leaf - 0.1 * grads[name], rtol=1e-4, atol=1e-5)
    if model:
        assert state.params["l0"].sharding.spec == P(None, "model")


@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")
def test_a_collective_over_one_of_two_axes_of_replicas_is_refused():
    options = {"mesh": mesh_of(2, 2, 2, names=("replica", "pipe", "fsdp")), "axes": {"data": ("replica", "fsdp")}}
    pipe = jaxpp.Pipeline(chain(normalised("fsdp")), optax.sgd(0.1), num_stages=2, num_microbatches=1, **options)
    with pytest.raises(LossError, match="name all axes that stand for 'data'"):
        pipe.init(params(), BATCH)


@pytest.mark.parametrize(
    ("axes", "line"),
    [
        ("fsdp", "it says what your axes are to a pipeline"),
        ({"tensor": "c"}, "Got: 'tensor'"),
        ({"data": "a", "model": "a"}, "name each axis once"),
        (None, "axes={\"data\": 'c'}"),
    ],
)
def test_wrong_axes_are_refused(axes, line):
    with pytest.raises(ArgumentError) as error:
        jaxpp.Pipeline(
            chain(nn.relu), optax.sgd(0.1), num_stages=2, mesh=mesh_of(2, 2, names=("pipe", "c")), axes=axes, num_microbatches=2
        )
    assert line in str(error.value)


@pytest.mark.parametrize(
    "options", [{"data_parallel": 2}, pytest.param({"mesh": (2, 2, 2), "shardings": RULES}, marks=LONG)], ids=["replicas", "mesh"]
)
def test_gradients_and_stages_by_hand_have_replicas_and_shards_too(options):
    if "mesh" in options:
        options = options | {"mesh": mesh_of(*options["mesh"])}
    expected = jax.value_and_grad(chain(nn.relu))(params(), BATCH)
    loss, grads = jaxpp.value_and_grad(chain(nn.relu), num_stages=2, num_microbatches=2, **options)(params(), BATCH)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    for name, leaf in grads.items():
        np.testing.assert_allclose(leaf, expected[1][name], rtol=1e-4, atol=1e-6)
    stages = [lambda p, x: nn.relu(x @ p["w"]), lambda p, x: x @ p["w"]]
    options |= {"shardings": {"0/w": "column"}} if "shardings" in options else {}
    pipe = jaxpp.Pipeline.from_stages(
        stages, loss=lambda y, t: jnp.mean((y - t) ** 2), optimizer=optax.sgd(0.1), num_microbatches=2, **options
    )
    state = pipe.init([{"w": params()["l0"]}, {"w": params()["l1"]}], (BATCH, BATCH))
    pipe.verify(state, (BATCH, BATCH))


REFUSED = {
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
        {"mesh": MESH, "shardings": RULES},
        ["a collective between the shards of a rank stands in a jax.shard_map over them", "axis_names={'model'}"],
    ),
    "a map whose derivative communicates over data": (
        mapped(with_derivative(lambda g: g - jax.lax.pmean(g, "data")), P("data", "model"), mesh=MESH),
        {"mesh": MESH, "shardings": RULES},
        ["a derivative of one's own has collectives over axes of a rank, and no other", "the axis 'data'"],
    ),
    "one collective over data and model": (
        mapped(lambda x: x + jax.lax.all_gather(x, ("data", "model")).sum(), P("data", "model"), mesh=MESH),
        {"mesh": MESH, "shardings": RULES},
        [
            "a rank computes all blocks along 'data' itself, and its devices share those along 'model'",
            "all_gather over 'data', 'model'",
            "call one collective for each axis",
            __file__,
        ],
    ),
    "a ring over data and model": (
        mapped(lambda x: jax.lax.ppermute(x, ("data", "model"), [(0, 1), (1, 0)]), P("data", "model"), mesh=MESH),
        {"mesh": MESH, "shardings": RULES},
        ["ppermute over 'data', 'model'", "call one collective for each axis", __file__],
    ),
    "a block that replicas and shards cannot share": (  # as long as four rows, in plain JAX, and of one in a microbatch
        mapped(lambda x: jax.lax.all_to_all(x, ("data", "model"), 0, 0, tiled=True), P(("data", "model")), mesh=MESH),
        {"mesh": MESH, "shardings": RULES},
        [
            "all_to_all and psum_scatter give each device along their axes an equal share of a block",
            "split_axis (1) has to be divisible by the size of the named axis ('data', 'model') (4)",
            "the loss for one microbatch, batch leaves f32[4,8]",
            "if it is that of the examples, pass fewer microbatches or a larger batch",
        ],
    ),
    "a block that the devices of another mesh cannot share": (
        mapped(lambda x: jax.lax.all_to_all(x, ("data", "model"), 0, 0, tiled=True), P(("data", "model")), mesh=MESH),
        {"mesh": mesh_of(2, 1, 2), "shardings": RULES},
        ["an equal share of a block", "split_axis (2) has to be divisible", "batch leaves f32[8,8]"],
    ),
    "a block that replicas cannot share": (
        lambda x: jax.lax.psum_scatter(x[:, :3], "data", scatter_dimension=1, tiled=True) @ jnp.ones((1, 8)),
        {"data_parallel": 2},
        ["an equal share of a block", "size 3 must be divisible by shard_count 2", "split an axis of the block whose size"],
    ),
    "another axis": (
        constrained(NamedSharding(mesh_of(2, 4, names=("a", "b")), P("b"))),
        {"mesh": MESH, "shardings": RULES},
        ["values are sharded over the axes of a rank: 'data', 'model'", "the axis 'b'"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_stage_cannot_do_is_refused(case):
    between, options, lines = REFUSED[case]
    pipe = jaxpp.Pipeline(chain(between), optax.sgd(0.1), num_stages=2, num_microbatches=2, **options)
    given = params()
    before = len(jax.live_arrays())
    with pytest.raises(LossError) as error:
        pipe.init(given, BATCH)
    for line in lines:
        assert line in str(error.value)
    del error
    assert len(jax.live_arrays()) <= before  # no parameter was placed on a device


SHARDINGS = {
    "a tree of rules": {"l0": "column", "l1": "row", "l2": None, "l3": None},
    "a tree of shardings": {name: NamedSharding(MESH, P(None, "model") if name == "l0" else P()) for name in RULES},
    "a function": lambda path, shape: "column" if path == "l0" and shape == (8, 8) else None,
    "arrays that are sharded": None,
}


@pytest.mark.parametrize("case", SHARDINGS)
def test_how_parameters_are_sharded_may_be_said_in_many_ways(case):
    given = params()
    if case == "arrays that are sharded":
        given["l0"] = jax.device_put(given["l0"], NamedSharding(MESH, P(None, "model")))
    pipe = jaxpp.Pipeline(chain(nn.relu), optax.sgd(0.1), num_stages=2, num_microbatches=2, mesh=MESH, shardings=SHARDINGS[case])
    state = pipe.init(given, BATCH)
    assert state.params["l0"].sharding.spec == P(None, "model")
    pipe.verify(state, BATCH)


def test_a_tree_of_rules_may_be_nested():
    def loss_fn(params, batch):
        return jnp.mean(nn.relu(batch @ params["a"]["w"]) @ params["b"]["w"])

    nested = {"a": {"w": params()["l0"]}, "b": {"w": params()["l1"]}}
    mesh, rules = mesh_of(2, 2, names=("pipe", "model")), {"a": {"w": "column"}, "b": {"w": "row"}}
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=2, mesh=mesh, shardings=rules)
    state = pipe.init(nested, BATCH)
    assert state.params["a"]["w"].sharding.spec == P(None, "model")
    pipe.verify(state, BATCH)


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
        pipe = jaxpp.Pipeline(
            lambda p, b: jnp.mean(nnx.merge(graph, p)(b) ** 2), optax.sgd(0.1), num_stages=2, num_microbatches=2, mesh=mesh
        )
        state = pipe.init(given, BATCH)
        assert state.params["up"]["kernel"][...].sharding.spec == P(None, "model")
        assert state.params["down"]["kernel"][...].sharding.spec == P("model", None)
        pipe.verify(state, BATCH)


@pytest.mark.parametrize("rules", [[("typo", "model")], [("l.", "column")], []], ids=["a name", "a word", "none"])
def test_rules_for_axes_that_nobody_has_are_refused(rules):
    pipe = jaxpp.Pipeline(chain(nn.relu), optax.sgd(0.1), num_stages=2, num_microbatches=2, mesh=MESH, shardings=rules)
    with pytest.raises(ArgumentError, match="logical axis rules map names that parameters give their axes"):
        pipe.init(params(), BATCH)


@pytest.mark.parametrize("rules", [{"l0": "column"}, {"*": P(None, "model")}, RULES, lambda path, shape: "column"])
@pytest.mark.parametrize(
    "options", [{}, {"devices": jax.devices()[:1]}, {"data_parallel": 2}, {"mesh": mesh_of(2, 2, names=("pipe", "data"))}]
)
def test_rules_over_an_axis_that_a_pipeline_does_not_have_are_refused(options, rules):
    # What a function said was dropped without a word where there were replicas.
    with pytest.raises(ArgumentError) as error:
        jaxpp.Pipeline(chain(nn.relu), optax.sgd(0.1), num_stages=2, num_microbatches=2, shardings=rules, **options).init(
            params(), BATCH
        )
    assert 'shardings: parameters are sharded over the "model" axis of a mesh, or divided over "data".' in str(error.value)
    assert 'Fix: pass for example mesh=jax.make_mesh((2, 2), ("pipe", "model"))' in str(error.value)


@pytest.mark.filterwarnings("ignore::jaxpp.DevicesWarning")
def test_rules_over_an_axis_of_one_device_divide_nothing():
    mesh = mesh_of(2, 1, 1)
    pipe = jaxpp.Pipeline(chain(nn.relu), optax.sgd(0.1), num_stages=2, num_microbatches=2, mesh=mesh, shardings=RULES)
    pipe.verify(pipe.init(params(), BATCH), BATCH)


def test_devices_over_which_nothing_is_divided_are_warned_of():
    pipe = jaxpp.Pipeline(chain(nn.relu), optax.sgd(0.1), num_stages=2, num_microbatches=2, mesh=MESH)
    with pytest.warns(jaxpp.DevicesWarning, match='no parameter is sharded over "model": its 2 devices hold and compute the same'):
        pipe.init(params(), BATCH)


def test_ranks_that_are_lists_of_devices_and_divide_nothing_are_warned_of_as_such():
    devices = [list(jax.devices()[:2]), list(jax.devices()[2:4])]
    pipe = jaxpp.Pipeline(chain(nn.relu), optax.sgd(0.1), num_stages=2, num_microbatches=2, devices=devices)
    with pytest.warns(jaxpp.DevicesWarning, match="devices, a list of devices for each rank: ") as found:
        pipe.init(params(), BATCH)
    assert str(found[0].message).endswith("or one device for each rank.") and "mesh" not in str(found[0].message)


@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")
def test_collectives_between_replicas_of_unequal_weight_are_refused():
    options = {"num_stages": 2, "num_microbatches": 2, "data_parallel": 2}
    pipe = jaxpp.Pipeline(chain(normalised("data")), optax.sgd(0.1), weight=lambda batch: batch.sum(), **options)
    with pytest.raises(ArgumentError, match="these must weigh the same"):
        pipe.init(params(), BATCH)
    pipe = jaxpp.Pipeline(chain(normalised("data")), optax.sgd(0.1), **options)
    state = pipe.init(params(), BATCH)
    with pytest.raises(BatchError, match="15 examples for 2 replicas"):
        pipe.evaluate(state, BATCH[:15])
    assert np.isfinite(pipe.evaluate(state, BATCH[:14]).loss)
