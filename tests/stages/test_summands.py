"""What is added to a sum over microbatches: gradients that are scatters are added in place, and equal those of one device."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import Mesh, PartitionSpec

import jaxpp
from jaxpp.lowering.step import ZEROED
from jaxpp.runtime.hlo import aliased, read_kernels
from jaxpp.stages.graph import trace
from jaxpp.stages.scatters import summands_of
from jaxpp.targets import target
from jaxpp.verify import compare, oracle
from tests.grids import covering

pytestmark = pytest.mark.filterwarnings("ignore::jaxpp.UnevenStagesWarning", "ignore::jaxpp.MicrobatchWarning")

ROWS, WIDTH = 300, 4  # more bytes than are packed
TOKENS = jnp.asarray(np.random.default_rng(0).choice([0, 1, 1, 1, 2, 299], (7, 5)))  # most of them many times


def hidden(params, h):
    return jnp.tanh(jnp.tanh(h @ params["a"]) @ params["b"])


def embedded(params, x):
    return (hidden(params, params["table"][x]) ** 2).mean()


def tied(params, x):
    logits = hidden(params, jnp.take(params["table"], x, axis=0)) @ params["table"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, x).mean()


def tied_once_cast(params, x):
    """The gradient is one sum of a product and a scatter, and is converted afterwards."""
    table = params["table"].astype("float32")
    logits = hidden(params, table[x].astype(params["a"].dtype)).astype("float32") @ table.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, x).mean()


def twice(params, x):
    return (hidden(params, params["table"][x] + params["table"][x[:, ::-1] + 1]) ** 2).mean()


def columns(params, x):
    return (hidden(params, jnp.take(params["table"].T, x, axis=1).transpose(1, 2, 0)) ** 2).mean()


def clipped(params, x):
    return (hidden(params, jnp.take(params["table"], 200 * x, axis=0, mode="clip")) ** 2).mean()


def dropped(params, x):
    return (hidden(params, jnp.take(params["table"], 200 * x, axis=0, mode="fill", fill_value=0.5)) ** 2).mean()


def batched(params, x):
    """Each example reads its own part of the table: a gather with batching dimensions."""
    rows = jax.vmap(lambda table, x: table[x], in_axes=(None, 0))(params["table"].reshape(3, -1, WIDTH), x % 3)
    return (hidden(params, rows) ** 2).mean()


def scaled(params, x):
    return (hidden(params, (2 * params["table"])[x] * 3) ** 2).mean()


def read_twice(params, x):
    """The gradient of the table is read by another gradient as well."""

    @jax.custom_vjp
    def rows(table, bias, x):
        return table[x]

    def back(kept, g):
        grad = jnp.zeros_like(kept[0]).at[kept[1]].add(g)
        return grad, grad.sum(0), None

    rows.defvjp(lambda table, bias, x: (table[x], (table, x)), back)
    return (hidden(params, rows(params["table"], params["bias"], x)) ** 2).mean()


def decayed(params, x):
    """A gradient that is scattered onto what is not zero."""
    rows = jax.custom_vjp(lambda table, x: table[x])
    rows.defvjp(lambda table, x: (table[x], (table, x)), lambda kept, g: ((kept[0] / 2 + 1).at[kept[1]].add(g), None))
    return (hidden(params, rows(params["table"], x)) ** 2).mean()


def stacked(params, x):
    """A table a layer, in a loop."""

    def layer(h, table):
        return jnp.tanh(h + table[x]), None

    return (
        hidden(
            params, jax.lax.scan(layer, jnp.zeros((*x.shape, WIDTH), params["a"].dtype), params["table"].reshape(3, -1, WIDTH))[0]
        )
        ** 2
    ).mean()


LOSSES = [embedded, tied, tied_once_cast, twice, columns, clipped, dropped, batched, scaled, read_twice, decayed, stacked]


def params_of(dtype):
    rng = np.random.default_rng(1)
    shapes = {"table": (ROWS, WIDTH), "a": (WIDTH, WIDTH), "b": (WIDTH, WIDTH), "bias": (WIDTH,)}
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize(("loss_fn", "dtype"), covering(LOSSES, ["float64", "float32"]))
def test_gradients_equal_those_of_one_device_whatever_reads_the_table(loss_fn, dtype, monkeypatch):
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        params = params_of(dtype)
        loss, _, grads = oracle(loss_fn, params, TOKENS, None, 3)
        for schedule, stages in (("1f1b", 1), ("gpipe", 2), ("zb-h1", 2)):
            for zeroed in (ZEROED, 0):  # the sums begin as zeros, or the first backward makes them
                monkeypatch.setattr("jaxpp.lowering.step.ZEROED", zeroed)
                found = jaxpp.value_and_grad(loss_fn, num_stages=stages, num_microbatches=3, schedule=schedule)(params, TOKENS)
                compare("loss", found[0], loss)
                compare("grads", found[1], grads, coarsest=jnp.float32 if loss_fn is tied_once_cast else None)


def parts(loss_fn, dtype="float32"):
    """The arrays and scatters that add up to the gradient of the table."""
    graph, _ = trace(lambda *args: jax.grad(loss_fn)(*args)["table"], params_of(dtype), TOKENS, opened=True)
    (found,) = summands_of(graph, graph.outputs, range(len(graph.eqns)))
    return len(found.arrays), len(found.scatters)


def test_a_gradient_is_taken_apart_into_scatters_and_what_else_is_added():
    assert [parts(loss) for loss in (embedded, clipped, dropped)] == [(0, 1)] * 3
    assert parts(twice) == (0, 2)
    assert parts(tied) == parts(tied_once_cast) == (1, 1)
    assert [parts(loss) for loss in (scaled, decayed, stacked)] == [(1, 0)] * 3  # no scatter is the last that makes it
    assert parts(hidden_only) == (1, 0)


def hidden_only(params, x):
    return (hidden(params, params["table"][: len(x)]) ** 2).mean()


def test_a_scatter_that_something_else_reads_or_another_program_runs_is_an_array():
    graph, _ = trace(lambda *args: tuple(jax.grad(read_twice)(*args).values()), params_of("float32"), TOKENS, opened=True)
    assert all(not each.scatters for each in summands_of(graph, graph.outputs, range(len(graph.eqns))))
    graph, _ = trace(lambda *args: jax.grad(embedded)(*args)["table"], params_of("float32"), TOKENS, opened=True)
    assert not summands_of(graph, graph.outputs, range(len(graph.eqns) - 1))[0].scatters


def test_a_sum_of_few_digits_adds_a_microbatch_at_once():
    """A row that comes a thousand times is a small part of a large sum each time: 256 + 1 is 256 in bfloat16."""
    assert parts(embedded, "bfloat16") == (1, 0)


OPTIONS = {
    "replicas": {"data_parallel": 2},
    "loss scale": {"loss_scale": DynamicScale()},
    "fused": {"fuse": True},
    "rows sharded": {"mesh": (2, 1, 2), "shardings": {"**": PartitionSpec(), "table": PartitionSpec("model")}},
    "columns sharded": {"mesh": (2, 2, 2), "shardings": {"**": PartitionSpec(), "table": PartitionSpec(None, "model")}},
    "weights": {"weight": lambda x: (x > 0).sum()},
}


@pytest.mark.parametrize(("loss_fn", "name"), covering([embedded, tied], list(OPTIONS)))
def test_steps_are_verified_on_replicas_meshes_and_with_scales(loss_fn, name):
    options = OPTIONS[name]
    if "mesh" in options:
        count = np.prod(options["mesh"])
        options = options | {"mesh": Mesh(np.array(jax.devices()[:count]).reshape(options["mesh"]), ("pipe", "data", "model"))}
    pipe = jaxpp.Pipeline(loss_fn, optax.adam(1e-2), num_stages=2, num_microbatches=3, schedule="1f1b", **options)
    params = {name: leaf for name, leaf in params_of("float32").items() if name != "bias"}
    tokens = TOKENS[:6] if "data_parallel" in options or "mesh" in options else TOKENS
    state = pipe.init(params, tokens)
    pipe.verify(state, tokens)


def large(params, x):
    h = jnp.take(params["table"], x, axis=0).astype("bfloat16")
    for name, bias in (("a", "p"), ("b", "q")):
        h = jnp.tanh(
            (h @ params[name].astype("bfloat16") + params[bias].astype("bfloat16")) * params[f"{bias}_scale"].astype("bfloat16")
        )
    return (h.astype("float32") ** 2).mean()


@pytest.mark.targets
@pytest.mark.parametrize("replicas", [1, 2])
def test_on_a_gpu_rows_are_scattered_into_the_buffer_of_their_sum_and_small_gradients_are_added_in_place(replicas):
    """Nothing of the size of the table is written, read, or copied by the backward of the stage with the embedding."""
    pytest.importorskip("jax_plugins.xla_cuda12")
    rows, width = 1 << 15, 512
    params = {"table": (rows, width), "a": (width, width), "b": (width, width)}
    params |= dict.fromkeys(("p", "q", "p_scale", "q_scale"), (width,))
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in params.items()}
    batch = jax.ShapeDtypeStruct((8 * replicas, 64), "int32")
    options = {"devices": target("h100", 2 * replicas), "data_parallel": replicas}
    pipe = jaxpp.Pipeline(large, optax.sgd(1.0), num_stages=2, num_microbatches=4, schedule="1f1b", cuts=["b"], **options)
    pipe.abstract_state(params, batch)
    plan, low = pipe.engine.plan("update", batch, None)
    texts = {
        line.program.name: call.call.as_text()
        for line, call in zip(low.bound.lines, plan.instructions, strict=True)
        if line.program is not None and line.program.name.startswith("stage_0_backward")
    }
    assert sorted(texts) == ["stage_0_backward", "stage_0_backward_first"]
    table = rows * width * 4
    for name, text in texts.items():
        kernels = read_kernels(text)
        written = sorted(kernel.bytes_written for kernel in kernels)
        assert [kernel.kind for kernel in kernels].count("scatter") == 1
        assert sum(written) < (0 if name == "stage_0_backward" else 1) * table + table / 4, name
        assert sum(kernel.bytes_read for kernel in kernels) < table / 4
    assert len(aliased(texts["stage_0_backward"])) == 3  # the sums of the table, of the matrix, and of both small vectors as one
    assert not [kernel.name for kernel in read_kernels(texts["stage_0_backward"]) if kernel.name.startswith("copy")]
