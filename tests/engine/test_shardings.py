"""Shardings that are proposed: Megatron's for the models that it knows, nothing where an axis is taken apart, the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxpp
from jaxpp.shardings import shared_stages
from jaxpp.stages.estimate import CPU_RATES
from jaxpp.verify import GRAD_FLOOR, compare
from models.llama import Llama
from models.resnet import ResNet
from tests.models import gpt_case

MLP = {"up": PartitionSpec(None, "model"), "down": PartitionSpec("model", None)}


def rand(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def mesh_of(pipe, model):
    return Mesh(np.array(jax.devices()[: pipe * model]).reshape(pipe, 1, model), ("pipe", "data", "model"))


def llama(**changes):
    sizes = {"vocab_size": 64, "max_length": 16, "width": 16, "depth": 2, "num_heads": 4, "num_kv_heads": 2, "hidden": 24}
    model = Llama(**sizes, attention="xla", dtype=None, param_dtype="float64", **changes)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (4, 9)))

    def loss_fn(params, tokens):
        logits = jnp.asarray(model.apply({"params": params}, tokens[:, :-1]))
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss_fn, jax.jit(model.init)(jax.random.key(0), tokens[:1, :-1])["params"], tokens


def convolutions():
    model = ResNet(num_classes=4, width=8, groups=(1, 1), dtype="float64")
    images = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 8, 3)))
    variables = jax.jit(model.init)(jax.random.key(0), images)
    params, statistics = (jax.tree.map(lambda leaf: leaf.astype("float64"), variables[name]) for name in ("params", "batch_stats"))

    def loss_fn(params, batch):
        logits = jnp.asarray(model.apply({"params": params, "batch_stats": statistics}, batch["x"], train=False))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return loss_fn, params, {"x": images, "y": jnp.arange(4)}


MODELS = {
    "heads in groups": lambda: llama(scan=False),
    "a loop over layers": lambda: llama(scan=True, tied=True, checkpoint=True),
    "experts": lambda: llama(scan=True, num_experts=4),
    "norms of heads": lambda: llama(scan=False, qk_norm=True, qkv_bias=True),
    "convolutions": convolutions,
}


@pytest.mark.parametrize(
    "name", [name if name == "heads in groups" else pytest.param(name, marks=pytest.mark.long) for name in MODELS]
)
@pytest.mark.parametrize("stages", [1, 2])
def test_what_is_proposed_trains_as_one_device_does(name, stages):
    with jax.enable_x64(True):
        loss_fn, params, batch = MODELS[name]()
        shardings = jaxpp.propose_shardings(loss_fn, params, batch)
        assert shardings
        grad_fn = jaxpp.value_and_grad(loss_fn, num_stages=stages, num_microbatches=2, mesh=mesh_of(stages, 2), shardings=shardings)
        loss, grads = jax.jit(jax.value_and_grad(loss_fn))(params, batch)
        own, found = grad_fn(params, batch)
        compare("loss", own, loss, coarsest=jnp.dtype("float32"))
        rounded = None if name == "convolutions" else jnp.dtype("float32")  # a Llama's softmax and positions are
        compare("gradients", jaxpp.gather(found), grads, floor=GRAD_FLOOR, coarsest=rounded)


def test_attention_and_mlps_of_a_llama_are_divided_as_megatron_does():
    column, row = PartitionSpec(None, None, "model"), PartitionSpec(None, "model", None)
    heads, joined = PartitionSpec(None, None, "model", None), PartitionSpec(None, "model", None, None)
    with jax.enable_x64(True):
        given = llama(scan=True)
        found, of_four = (jaxpp.propose_shardings(*given, model=model) for model in (2, 4))
    assert found == {
        "head": PartitionSpec("model", None),
        "layers/attention/query/kernel": heads,
        "layers/attention/key/kernel": heads,
        "layers/attention/value/kernel": heads,
        "layers/attention/out/kernel": joined,
        "layers/mlp/up/kernel": column,
        "layers/mlp/gate/kernel": column,
        "layers/mlp/down/kernel": row,
    }
    heads_of = {f"layers/attention/{name}/kernel" for name in ("query", "key")}
    assert set(found) - set(of_four) == heads_of  # keys and values have two heads, so four devices divide the features of a head
    assert of_four["layers/attention/value/kernel"] == PartitionSpec(None, None, None, "model")


def sums_over_model(case, shardings):
    """What the programs of a pipeline sum over ``model``, and what the forward of each stage was estimated to."""
    loss_fn, params, batch, key, has_aux = case
    given = {"num_stages": 2, "num_microbatches": 2, "fuse": False, "has_aux": has_aux, "mesh": mesh_of(2, 2)}
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(1e-2), **given, shardings=shardings)
    pipe.init(params, batch)
    rows = [row for row in pipe.collectives(batch, key).rows if row.collective.axes == ("model",)]
    cut = pipe.engine.preparer.step(batch, key).cuts[0]
    stages = shared_stages(cut.loss, [leaf.spec for leaf in pipe.engine.layout.leaves.all_params], cut.cuts, CPU_RATES, 2)
    assert all(0.5 < stage.part < 0.9 for stage in stages)  # norms and residuals are the work of both
    return sorted((row.program, row.collective.kind, row.collective.num_bytes) for row in rows), [each.exchanged for each in stages]


@pytest.mark.long
def test_a_gpt_exchanges_what_it_does_under_rules_by_hand_and_as_much_as_is_estimated():
    found = gpt_case(batch_size=8)
    case = found.loss_fn, found.params, found.batch, found.key, True
    by_hand = {"*/fc": "column", "*/proj": "row", "*/attn": "heads", "embed": "embedding"}
    rows, estimated = sums_over_model(case, jaxpp.propose_shardings(*case[:4], has_aux=True))
    assert rows == sums_over_model(case, by_hand)[0]
    assert {kind for _, kind, _ in rows} == {"all-reduce"}
    assert estimated == [sum(size for name, _, size in rows if name == f"F of stage {stage}") for stage in range(2)]


@pytest.mark.long
def test_a_loop_over_layers_exchanges_what_is_estimated():
    with jax.enable_x64(True):
        loss_fn, params, batch = llama(scan=True)
        rows, estimated = sums_over_model((loss_fn, params, batch, None, False), jaxpp.propose_shardings(loss_fn, params, batch))
    assert estimated == [sum(size for name, _, size in rows if name == f"F of stage {stage}") for stage in range(2)]


def sliced(x, up, down):
    left, right = jnp.split(x @ up, 2, axis=-1)
    return jnp.concatenate([left, right * 2], -1) @ down


KEPT = {
    "an activation between": (lambda x, up, down: jnp.tanh(x @ up) @ down, MLP),
    "a softmax between": (lambda x, up, down: jax.nn.softmax(x @ up) @ down, MLP),
    "a loop between": (lambda x, up, down: jax.lax.fori_loop(0, 3, lambda _, h: jnp.sin(h), x @ up) @ down, MLP),
    "a branch between": (lambda x, up, down: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x @ up) @ down, MLP),
    "dropout between, by a key closed over": (
        lambda x, up, down: x @ up * jax.random.bernoulli(jax.random.key(0), 0.9, (8,)) @ down,
        MLP,
    ),
    "rows of features": (lambda x, up, down: jnp.tanh(x @ up).reshape(-1, 4, 2).reshape(-1, 8) @ down, MLP),
    "parts of features": (sliced, {}),
    "one feature of them": (lambda x, up, down: (x @ up) @ down + (x @ up)[:, :1], {}),
    "two features of them": (lambda x, up, down: (x @ up) @ down + jnp.tile((x @ up)[:, :2], 3), {}),
    "sorted features": (lambda x, up, down: jnp.sort(x @ up) @ down, {}),
    "features that add up": (lambda x, up, down: jnp.cumsum(x @ up, -1) @ down, {}),
    "features turned round": (lambda x, up, down: (x @ up)[:, ::-1] @ down, {}),
    "the second of two factors": (lambda x, up, down: (x @ up).reshape(-1, 2, 4).swapaxes(1, 2).reshape(-1, 8) @ down, {}),
}


@pytest.mark.parametrize("name", KEPT)
def test_an_axis_that_something_takes_apart_stays_whole(name):
    function, expected = KEPT[name]
    params = {"up": rand(0, 6, 8), "down": rand(1, 8, 6)}
    found = jaxpp.propose_shardings(lambda p, x: ((function(x, p["up"], p["down"]) - x) ** 2).mean(), params, rand(2, 4, 6))
    assert found == expected


def test_sizes_that_cannot_be_divided_and_features_of_the_batch_stay_whole():
    params = {"up": rand(0, 6, 9), "down": rand(1, 9, 6)}

    def loss_fn(params, x):
        return ((x @ params["up"] @ params["down"] - x) ** 2).mean()

    nothing = jaxpp.propose_shardings(loss_fn, params, rand(2, 4, 6), model=2)
    assert nothing == {}
    with pytest.warns(UserWarning, match="model"):  # which a pipeline takes, and says that devices repeat one another's work
        jaxpp.Pipeline(
            loss_fn, optax.sgd(0.1), num_stages=1, num_microbatches=1, mesh=mesh_of(1, 2), shardings=nothing
        ).abstract_state(params, rand(2, 4, 6))
    assert set(jaxpp.propose_shardings(loss_fn, params, rand(2, 4, 6), model=3)) == {"up", "down"}


def test_functions_that_make_parameters_and_wrong_arguments():
    params, x = {"up": rand(0, 6, 8), "down": rand(1, 8, 6)}, rand(2, 4, 6)

    def loss_fn(params, x):
        return ((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2).mean()

    assert jaxpp.propose_shardings(loss_fn, lambda _: params, x) == MLP
    assert jaxpp.propose_shardings(loss_fn, params, jaxpp.Microbatches([x[:1], x[1:]])) == MLP
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, x))
    assert jaxpp.propose_shardings(loss_fn, *shapes) == MLP
    with pytest.raises(jaxpp.errors.ArgumentError, match="at least two devices share a stage"):
        jaxpp.propose_shardings(loss_fn, params, x, model=1)
    with pytest.raises(jaxpp.errors.ArgumentError, match="takes the batch before the key"):
        jaxpp.propose_shardings(loss_fn, lambda _: params, jax.random.key(0), x)
