"""Whole models compiled for an H100 that is not there: nothing of double precision, no weight copied, every state leaf in place.

What a program does on a GPU (its kernels, its bytes, whose buffers its results take over) is decided when it is compiled, so it is
checked here on every commit. The bounds on kernels and bytes are measured ones, a few per cent wider: another version of XLA fuses
otherwise.
"""

import math
import warnings
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.observe import ProgramTable
from jaxpp.observe.memory.liveness import MEMORY_KINDS
from jaxpp.runtime.hlo import aliased, read_kernels
from jaxpp.schedule.action import Kind
from jaxpp.stages.program import Role
from models.gpt import GPT
from models.resnet import ResNet

pytest.importorskip("jax_plugins.xla_cuda12")
pytestmark = pytest.mark.targets

MICROBATCHES = 4


class Model(NamedTuple):
    """A loss of ``(params, batch[, key])``, the shapes of its parameters and of a batch."""

    loss_fn: object
    shapes: object
    batch: object
    keyed: bool = True
    stages: int = 2
    cuts: list[str] | None = None


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), labels).mean()


def gpt(depth=1, width=256, vocabulary=8192, length=256, batch=16, dropout=0.1):
    model = GPT(vocabulary, length, width, depth, 4, dropout, "bfloat16")

    def loss_fn(params, batch, key):
        return cross_entropy(model.apply({"params": params}, batch[:, :-1], rngs={"dropout": key}), batch[:, 1:])

    shapes = jax.eval_shape(model.init, {"params": jax.random.key(0), "dropout": jax.random.key(0)}, jnp.zeros((1, length), int))
    return Model(loss_fn, shapes["params"], shape(batch, length + 1, dtype="int32"))


def resnet():
    model = ResNet(num_classes=10, width=64, groups=(3, 3, 3), dtype="bfloat16")
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 64, 64, 3)))
    averages = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), variables["batch_stats"])

    def loss_fn(params, batch):
        logits, _ = model.apply({"params": params, "batch_stats": averages}, batch["x"], mutable=["batch_stats"])
        return cross_entropy(logits, batch["y"])

    batch = {"x": shape(256, 64, 64, 3), "y": shape(256, dtype="int32")}
    cuts = ["group_1_block_0", "group_1_block_2", "group_2_block_1"]  # kernels and bytes depend on where within a block a cut is
    return Model(loss_fn, variables["params"], batch, keyed=False, stages=4, cuts=cuts)


class Scanned(nn.Module):
    """A stack of residual blocks, their parameters stacked, run by one ``lax.scan``, between an embedding and a head."""

    width: int = 256
    depth: int = 4

    @nn.compact
    def __call__(self, tokens):
        """Logits for the token after each."""
        x = nn.Embed(8192, self.width, dtype="bfloat16")(tokens)
        x, _ = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.depth)(self.width)(x, None)
        return nn.Dense(8192, dtype="bfloat16")(x)


class Block(nn.Module):
    """A layer of the stack."""

    width: int

    @nn.compact
    def __call__(self, x, _):
        """What ``nn.scan`` calls: the carry, and nothing else."""
        h = nn.Dense(4 * self.width, dtype="bfloat16")(nn.LayerNorm(dtype="bfloat16")(x))
        return x + nn.Dense(self.width, dtype="bfloat16")(nn.gelu(h)), None


def scanned():
    model = Scanned()

    def loss_fn(params, batch):
        return cross_entropy(model.apply({"params": params}, batch[:, :-1]), batch[:, 1:])

    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), int))["params"]
    return Model(loss_fn, shapes, shape(64, 65, dtype="int32"), keyed=False)


MODELS = {"gpt": gpt, "resnet": resnet, "scanned": scanned}


def pipeline(model, stages=None, **options):
    stages = stages or model.stages
    given = {"devices": jaxpp.target("h100", stages), "cuts": model.cuts} | options
    return jaxpp.Pipeline(model.loss_fn, optax.adamw(1e-3), num_stages=stages, num_microbatches=MICROBATCHES, **given)


@pytest.fixture(scope="module")
def compiled():
    """Every model's pipeline and its programs, compiled once."""
    known = {}

    def get(name):
        if name not in known:
            model = MODELS[name]()
            pipe = pipeline(model)
            with warnings.catch_warnings():  # batch normalisation is told
                warnings.simplefilter("ignore", jaxpp.MicrobatchWarning)
                known[name] = model, pipe, pipe.programs(model.shapes, model.batch)
        return known[name]

    return get


def plain(model):
    """Kernels and bytes of a microbatch of gradient accumulation in one program on the same GPU."""
    (device,) = jaxpp.target("h100")
    home = jax.sharding.SingleDeviceSharding(device)

    def there(tree, rows=lambda sizes: sizes):
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(rows(leaf.shape), leaf.dtype, sharding=home), tree)

    def step(params, sums, batch, key):
        keys = [jax.random.wrap_key_data(key)] if model.keyed else []
        loss, grads = jax.value_and_grad(model.loss_fn)(params, batch, *keys)
        return loss, jax.tree.map(lambda total, grad: total + grad / MICROBATCHES, sums, grads)

    microbatch = there(model.batch, lambda sizes: (sizes[0] // MICROBATCHES, *sizes[1:]))
    arguments = there(model.shapes), there(model.shapes), microbatch, there(shape(2, dtype="uint32"))
    kernels = read_kernels(jax.jit(step, donate_argnums=1).lower(*arguments).compile().as_text())
    number = sum(kernel.runs for kernel in kernels)
    return number, sum(kernel.runs * (kernel.bytes_read + kernel.bytes_written) for kernel in kernels)


def of_microbatches(programs: ProgramTable) -> tuple[float, float]:
    """Kernels and bytes of the forwards and backwards of a step, for each microbatch; a program that is both counts once."""
    rows = [row for row in programs if {Kind.F, Kind.B}.intersection(row.kinds)]
    kernels, moved = (
        sum(row.runs * number for row, number in zip(rows, each, strict=True))
        for each in (
            [row.num_kernels for row in rows],
            [row.num_bytes for row in rows],
        )
    )
    return kernels / MICROBATCHES, moved / MICROBATCHES


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_of_double_precision_and_nothing_is_wasted(compiled, name):
    _, _, programs = compiled(name)
    assert not any(row.has_float64 for row in programs)
    if name != "resnet":  # cuDNN wants the filters of a convolution in an order of its own
        assert not [row.copied for row in programs if row.copied and row.kinds]
    assert not [sentence for sentence in programs.waste() if "weight" in sentence]
    assert not [sentence for sentence in programs.waste() if "float" in sentence]


@pytest.mark.parametrize("name", MODELS)
def test_every_leaf_of_the_state_is_updated_in_place(compiled, name):
    model, pipe, _ = compiled(name)
    plan, lowered = pipe.engine.plan("update", model.batch, jax.random.key(0) if model.keyed else None)
    state, large = set(lowered.bound.outputs), 0
    for line, instruction in zip(lowered.bound.lines, plan.instructions, strict=True):
        if line.program is None or line.action is not None:
            continue
        new = [name for name in line.outputs if name in state and name.ref.role in (Role.PARAM, Role.OPT)]
        taken = aliased(instruction.call.as_text())
        sizes = [math.prod(aval.shape) * aval.dtype.itemsize for aval in line.program.results]
        kept = sum(size for name, size in zip(line.outputs, sizes, strict=True) if name in new)
        assert instruction.call.memory_analysis().alias_size_in_bytes >= kept - 4, line.label  # all but the step's number
        assert len(taken) >= len(new) - 1, line.label
        large += len(new)
    params = sum(name.ref.role == Role.PARAM for name in state)
    assert params >= len(jax.tree.leaves(model.shapes))  # a leaf of a loop that is cut is one for each stage of the loop
    assert large == params * 3 + 1  # adamw: parameters, two moments, one count


@pytest.mark.parametrize("name", MODELS)
def test_every_sum_of_gradients_is_added_to_in_place(compiled, name):
    model, pipe, _ = compiled(name)
    plan, lowered = pipe.engine.plan("update", model.batch, jax.random.key(0) if model.keyed else None)
    for line, instruction in zip(lowered.bound.lines, plan.instructions, strict=True):
        if line.program is not None and line.action is not None:
            assert len(aliased(instruction.call.as_text())) == len(line.donated), line.label


@pytest.mark.parametrize(("name", "kernels", "moved"), [("gpt", 0.88, 0.85), ("resnet", 1.02, 1.02), ("scanned", 0.75, 0.65)])
def test_forwards_and_backwards_run_about_the_kernels_and_move_about_the_bytes_of_the_plain_step(compiled, name, kernels, moved):
    model, _, programs = compiled(name)
    own, whole = of_microbatches(programs), plain(model)
    ratios = tuple(a / b for a, b in zip(own, whole, strict=True))
    assert ratios[0] <= kernels
    assert ratios[1] <= moved


def test_the_logits_of_the_last_stage_are_never_a_residual(compiled):
    _, _, programs = compiled("gpt")
    (row,) = [row for row in programs if row.name == "stage_1_forward_backward"]
    assert not row.residuals
    logits = 4 * 4 * 256 * 8192  # bytes, in float32, of a microbatch
    assert row.temporaries < 2.5 * logits


def test_a_bank_an_offload_and_a_schedule_that_splits_backwards_are_compiled():
    model = gpt()
    split = pipeline(model, schedule="zb-h1").programs(model.shapes, model.batch)
    assert len(split.of("W")) >= 2
    assert split.of("W").products.keys() == {"bfloat16"}
    offloading = pipeline(model, remat="offload", schedule="gpipe")
    hosted = offloading.forecast(model.shapes, model.batch)
    assert any(hosted.hosted.values())
    assert hosted.bound.costs.offload[0] > 0
    shared, own = {"w": shape(256, 256)}, {"v": jnp.zeros((256, 256))}

    def loss_fn(params, task_params, batch):
        return jnp.mean((jnp.tanh(batch @ params["w"]) @ task_params["v"]) ** 2)

    bank = jaxpp.Bank({"cat": own, "dog": own}, optax.adam(1e-3))
    pipe = jaxpp.Pipeline(loss_fn, optax.adam(1e-3), num_stages=2, devices=jaxpp.target("h100", 2), bank=bank)
    assert "H100:1" in str(pipe.forecast(shared, shape(64, 256)))


def test_a_mesh_of_eight_has_its_collectives():
    model = gpt(dropout=0.0)
    mesh = jax.sharding.Mesh(np.array(jaxpp.target("h100", 8)).reshape(2, 2, 2), ("pipe", "data", "model"))
    rules = {"*/fc": "column", "*/proj": "row", "*/attn": "heads", "embed": "embedding"}
    pipe = pipeline(model, 2, devices=None, mesh=mesh, shardings=rules, shard="optimizer", cuts=["ln_f"])
    programs = pipe.programs(model.shapes, model.batch)
    assert any(kernel.kind == "collective" for row in programs for kernel in row.kernels)
    found = pipe.collectives(model.batch, jax.random.key(0))
    tokens = 256 * 16 // (2 * MICROBATCHES)  # of a microbatch
    activation, losses = tokens * 256 * 2, 3 * tokens * 4  # in bfloat16; the largest logit of each token, and two sums
    over_model = [row for row in found.rows if row.collective.axes == ("model",) and not row.program.startswith("update")]
    large = [row.runs for row in over_model if row.collective.num_bytes == activation]
    once = 1 + 2 + 2 + 1  # embedding, block, backward of the block: query, key and value together; backward of the head
    assert sum(large) == MICROBATCHES * once
    total = sum(row.runs * row.collective.num_bytes for row in over_model)
    assert total == sum(large) * activation + MICROBATCHES * losses
    names, shapes = pipe.engine.placed.names.all_params, jax.tree.leaves(model.shapes)
    held = sum(pipe.engine.placement[name.stage].num_bytes(name.ref, leaf) for name, leaf in zip(names, shapes, strict=True))
    assert found.num_bytes("reduce-scatter", ("data",)) == 2 * found.num_bytes("all-gather", ("data",)) == held  # once a step
    assert found.num_bytes("all-reduce", ("data",)) < 256  # scalars: the loss, and what a norm is made of
    assert pipe.forecast(model.shapes, model.batch).bound.num_devices == 8


def test_a_generation_keeps_its_cache_in_place():
    model = GPT(1024, 64, 128, 2, 4, 0.0, "bfloat16")
    decoder = model.clone(decode=True)
    variables = jax.eval_shape(decoder.init, jax.random.key(0), jnp.zeros((1, 64), int))

    def step(params, cache, tokens):
        logits, updated = decoder.apply({"params": params, "cache": cache}, tokens, mutable=["cache"])
        return updated["cache"], logits

    def forward(params, tokens):
        return model.apply({"params": params}, tokens, deterministic=True)

    lm = jaxpp.Forward(forward, num_stages=2, devices=jaxpp.target("h100", 2))
    shapes = lm.abstract_params(variables["params"], shape(2, 64, dtype="int32"))
    forecast = lm.generate(shapes, step, variables["cache"], [], 8).forecast()
    carries = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(variables["cache"]))
    held = sum(row.kinds[MEMORY_KINDS.index("carries")] for row in forecast.stages)
    assert carries <= held // 3 <= 1.01 * carries  # the sequence's, the empty one, and that of a prompt that comes again


class Flash(nn.Module):
    """A block of causal attention by cuDNN, as it is written for GPUs."""

    heads: int = 4
    head: int = 256  # which only Hopper and what came later can do

    @nn.compact
    def __call__(self, x):
        """Attention, and what it adds to."""
        q, k, v = (nn.DenseGeneral((self.heads, self.head), dtype="bfloat16")(x) for _ in range(3))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return x + nn.DenseGeneral(x.shape[-1], axis=(-2, -1), dtype="bfloat16")(attended)


def test_attention_by_cudnn_is_planned_on_a_machine_without_it():
    width, length, examples = 512, 256, 16
    model = nn.Sequential([nn.Embed(1024, width, dtype="bfloat16"), Flash(), Flash(), nn.Dense(1024, dtype="bfloat16")])

    def loss_fn(params, batch):
        return cross_entropy(model.apply(params, batch[:, :-1]), batch[:, 1:])

    def init(key):
        return model.init(key, jnp.zeros((1, length), int))

    tokens = shape(examples, length + 1, dtype="int32")
    pipe = pipeline(Model(loss_fn, None, tokens), 2)
    state = pipe.abstract_state(init, jax.random.key(0), tokens)
    programs = pipe.programs(state, tokens)
    forward = 2 * 2 * (examples // MICROBATCHES * 4) * (length * (length + 1) // 2) * 256
    for row in programs.of("F").rows + programs.of("B").rows:
        by_cudnn = sum(sum(kernel.products.values()) for kernel in row.kernels if kernel.by == "cuDNN")
        assert by_cudnn == forward * (Kind.F in row.kinds) + forward * 5 // 2 * (Kind.B in row.kinds), row.name
    assert not [row.residuals for row in programs if any("256,256]" in kept.shape for kept in row.residuals)]  # no scores
    assert pipe.forecast(state, tokens).bound.products.keys() == {"bfloat16"}
    with pytest.raises(RuntimeError, match="cuDNN"):
        jax.eval_shape(init, jax.random.key(0))  # JAX is as it was


def test_what_a_gpu_has_no_attention_by_cudnn_for_is_refused():
    def loss_fn(params, batch):
        q = batch["q"] * params["scale"]
        return jax.nn.dot_product_attention(q, q, q, implementation="cudnn").astype("float32").mean()

    batch, params = {"q": shape(8, 64, 4, 64, dtype="bfloat16")}, {"scale": shape(dtype="bfloat16")}
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=1, num_microbatches=2, devices=jaxpp.target("t4"))
    with pytest.raises(jaxpp.errors.ArgumentError, match="attention by cuDNN is for GPUs of compute capability 8"):
        pipe.forecast(params, batch)
