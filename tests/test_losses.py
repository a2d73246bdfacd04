"""The cross entropy of a linear head: equal to the plain one, without logits, and cut between slices of the vocabulary."""

import re
import warnings

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.engine.layout import lay_out
from jaxpp.observe.memory.liveness import MEMORY_KINDS
from jaxpp.options import Options
from jaxpp.runtime.compile import Programs
from models.gpt import GPT
from tests import messages
from tests.grids import covering
from tests.stages.test_split_scan import ScannedBlock

VOCAB, WIDTH = 101, 8
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, VOCAB, (8, 6))
LABELS = RNG.integers(0, VOCAB, (8, 6))


def head(dtype="float64"):
    hidden, table, bias = RNG.normal(size=(8, 6, WIDTH)), RNG.normal(size=(VOCAB, WIDTH)), RNG.normal(size=VOCAB)
    return jnp.asarray(hidden, dtype), jnp.asarray(table, dtype), jnp.asarray(bias, dtype)


def plain(hidden, table, labels, bias=0.0, label_smoothing=0.0, z_loss=0.0, ignore_index=None):
    """The same loss with all logits."""
    logits = hidden @ table.T + bias
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    targets = optax.smooth_labels(jax.nn.one_hot(labels, table.shape[0], dtype=logits.dtype), label_smoothing)
    loss = optax.softmax_cross_entropy(logits, targets) + z_loss * log_sum**2
    return loss if ignore_index is None else jnp.where(labels == ignore_index, 0.0, loss)


def weighted(loss_fn, *args, **options):
    """A number in which the loss of every token has another weight."""
    loss = loss_fn(*args, **options)
    return jnp.vdot(loss, jnp.arange(1.0, loss.size + 1).reshape(loss.shape) / loss.size), loss


def far(got, want):
    """The largest difference between two trees, relative to the largest number of each leaf."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


OPTIONS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "z loss": {"z_loss": 1e-2},
    "all of them": {"ignore_index": -100, "label_smoothing": 0.2, "z_loss": 1e-3},
}


@pytest.mark.parametrize(("name", "num_slices"), covering(list(OPTIONS), [1, 2, 7, 100, 101, 1000, None]))
def test_loss_and_gradient_are_those_with_all_logits_however_many_slices(x64, name, num_slices):
    options = OPTIONS[name]
    hidden, table, bias = head()
    labels = jnp.asarray(LABELS).at[0, 2:5].set(-100) if "ignore_index" in options else jnp.asarray(LABELS)

    def run(loss_fn, **more):
        def of(hidden, table, bias):
            return weighted(loss_fn, hidden, table, labels, bias=bias, **options, **more)

        return jax.jit(jax.value_and_grad(of, (0, 1, 2), has_aux=True))(hidden, table, bias)

    assert far(run(jaxpp.linear_cross_entropy, num_slices=num_slices), run(plain)) < 1e-13


def test_it_is_what_optax_computes(x64):
    hidden, table, _ = head()
    want = optax.softmax_cross_entropy_with_integer_labels(hidden @ table.T, LABELS)
    np.testing.assert_allclose(jaxpp.linear_cross_entropy(hidden, table, LABELS, num_slices=5), want, rtol=1e-14)


def test_large_and_small_logits_overflow_nowhere():
    hidden, table, _ = head("float32")
    loss, grads = jax.value_and_grad(lambda *args: weighted(jaxpp.linear_cross_entropy, *args, LABELS, num_slices=7)[0], (0, 1))(
        1e4 * hidden, table
    )
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((loss, grads)))


def test_a_label_that_does_not_count_has_no_loss_and_no_gradient_and_a_wrong_one_shows():
    hidden, table, _ = head("float32")
    labels = jnp.asarray(LABELS).at[0, 0].set(-100).at[1, 1].set(VOCAB)
    loss = jaxpp.linear_cross_entropy(hidden, table, labels, num_slices=7, ignore_index=-100)
    assert loss[0, 0] == 0
    assert np.isnan(np.asarray(loss)).sum() == 1
    assert np.isnan(loss[1, 1])
    grad = jax.grad(lambda hidden: jaxpp.linear_cross_entropy(hidden, table, labels, ignore_index=-100).sum())(hidden)
    assert not grad[0, 0].any()
    assert grad[0, 1].any()


def test_words_that_a_bias_rules_out_may_fill_a_whole_slice():
    hidden, table, _ = head("float32")
    ruled_out = jnp.where(jnp.arange(len(table)) < len(table) // 4, -jnp.inf, 0.0)
    labels = jnp.maximum(LABELS, len(table) // 4)

    def both(loss):
        return jax.value_and_grad(lambda hidden, table: loss(hidden, table).mean(), (0, 1))(hidden, table)

    found = both(lambda hidden, table: jaxpp.linear_cross_entropy(hidden, table, labels, bias=ruled_out, num_slices=8))
    logits = lambda hidden, table: hidden @ table.T + ruled_out  # noqa: E731
    wanted = both(lambda h, t: optax.softmax_cross_entropy_with_integer_labels(logits(h, t), labels))
    chex.assert_trees_all_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_bfloat16_is_summed_in_float32_and_its_gradients_have_the_types_of_the_arguments():
    hidden, table, _ = head("float32")
    short = hidden.astype(jnp.bfloat16)

    def of(hidden, table):
        return weighted(jaxpp.linear_cross_entropy, hidden, table, LABELS, num_slices=50)

    got, grads = jax.value_and_grad(of, (0, 1), has_aux=True)(short, table)
    want = jax.value_and_grad(of, (0, 1), has_aux=True)(short.astype("float32"), table.astype(jnp.bfloat16).astype("float32"))
    assert [leaf.dtype for leaf in grads] == [jnp.bfloat16, jnp.float32]
    assert got[1].dtype == jnp.float32
    assert far(got, want[0]) < 1e-6
    assert far([leaf.astype("float32") for leaf in grads], want[1]) < 1e-2


def test_it_may_be_mapped_and_differentiated_twice_and_takes_a_single_token(x64):
    hidden, table, _ = head()

    def of(loss_fn, hidden, labels, **options):
        return weighted(loss_fn, hidden, table, labels, **options)[0]

    def sliced(hidden, labels):
        return of(jaxpp.linear_cross_entropy, hidden, labels, num_slices=7)

    mapped = jax.vmap(jax.grad(sliced))(hidden, LABELS)
    assert far(mapped, jnp.stack([jax.grad(sliced)(*pair) for pair in zip(hidden, jnp.asarray(LABELS), strict=True)])) < 1e-13
    twice = [
        jax.grad(lambda hidden: (jax.grad(lambda hidden: loss(hidden, LABELS))(hidden) ** 2).sum())(hidden)  # noqa: B023
        for loss in (sliced, lambda hidden, labels: of(plain, hidden, labels))
    ]
    assert far(*twice) < 1e-12
    assert far(sliced(hidden[0, 0], LABELS[0, 0]), of(plain, hidden[0, 0], LABELS[0, 0])) < 1e-13


def test_without_a_pipeline_the_logits_are_never_in_memory():
    tokens, vocab, width = 2048, 10_007, 16
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((tokens, width), (vocab, width))]
    labels = jax.ShapeDtypeStruct((tokens,), "int32")

    def temporaries(loss_fn):
        step = jax.value_and_grad(lambda *args: loss_fn(*args).mean(), (0, 1))
        return jax.jit(step).lower(*shapes, labels).compile().memory_analysis().temp_size_in_bytes

    logits = 4 * tokens * vocab
    assert temporaries(plain) > logits
    assert temporaries(jaxpp.linear_cross_entropy) < logits / 3


def case(tied, *, loss_fn=jaxpp.linear_cross_entropy, **options):
    """A loss of a few layers between an embedding and a head, and its parameters."""
    rng = np.random.default_rng(3)
    params = {"layers": [rng.normal(size=(WIDTH, WIDTH)) / 3 for _ in range(4)], "table": rng.normal(size=(VOCAB, WIDTH))}
    params |= {} if tied else {"embed": rng.normal(size=(VOCAB, WIDTH)), "bias": rng.normal(size=VOCAB)}

    def loss(params, batch):
        x = jnp.take(params.get("embed", params["table"]), batch["tokens"], axis=0)
        for w in params["layers"]:
            x = x + jnp.tanh(x @ w)
        return loss_fn(x, params["table"], batch["labels"], bias=params.get("bias", None if options else 0.0), **options).mean()

    return loss, jax.tree.map(jnp.asarray, params), {"tokens": TOKENS, "labels": LABELS}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("schedule", "num_stages", "devices"),
    [
        ("1f1b", 2, 2),
        ("1f1b", 4, 4),
        pytest.param("zb-v", 4, 2, marks=pytest.mark.long),
        pytest.param("zb-h1", 4, 4, marks=pytest.mark.long),
        pytest.param("interleaved", 4, 2, marks=pytest.mark.long),
    ],
)
@pytest.mark.filterwarnings("ignore::jaxpp.UnevenStagesWarning")  # so few rows that the bytes of tables count
def test_a_pipeline_computes_what_plain_jax_does_with_all_logits(x64, tied, schedule, num_stages, devices):
    loss_fn, params, batch = case(tied, num_slices=12, z_loss=1e-3, label_smoothing=0.1)
    want = jax.value_and_grad(case(tied, loss_fn=lambda *a, bias: plain(*a, bias, 0.1, 1e-3))[0])(params, batch)
    options = {"num_stages": num_stages, "num_microbatches": 4, "schedule": schedule, "devices": jax.devices()[:devices]}
    assert far(jaxpp.value_and_grad(loss_fn, **options)(params, batch), want) < 1e-12


def owned_and_read(pipe):
    """The paths of the parameters that each stage owns, and of all that it reads."""
    return [stage.params for stage in pipe.stages], [(*stage.params, *stage.borrowed) for stage in pipe.stages]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_each_stage_owns_the_rows_of_its_slices_or_receives_only_these(x64, tied):
    loss_fn, params, batch = case(tied, num_slices=12)
    pipe = jaxpp.Pipeline(loss_fn, optax.adamw(1e-2), num_stages=4, num_microbatches=8)
    state = pipe.init(params, batch)
    owned, read = ([[path for path in paths if "table" in path] for paths in each] for each in owned_and_read(pipe))
    parts = [path for paths in read[tied:] for path in paths]
    ends = [int(path.rpartition(":")[2]) for path in parts]
    assert len(parts) >= 3
    assert ends == sorted(set(ends)), "rows are read by two stages"
    assert ends[-2:] == [99, 101]
    assert all(end % 9 == 0 for end in ends[:-1]), "a slice is divided"
    assert owned == ([parts, [], [], []] if tied else read)
    flops = [stage.flops for stage in pipe.stages]
    assert max(flops) < 0.3 * sum(flops)
    first = dict(zip(MEMORY_KINDS, pipe.forecast(params, batch).stages[0].kinds, strict=True))
    assert first["statics"] == 0, "the embedding is put together again"
    state, _ = pipe.step(state, batch)
    pipe.verify(state, batch)
    assert state.params["table"].shape == (VOCAB, WIDTH)


@pytest.mark.long
def test_an_embedding_held_as_slices_finds_the_rows_that_one_array_would(x64):
    """A row that is not there is NaN, or the nearest, as the model says."""
    for lookup in (
        lambda table, tokens: jnp.take(table, tokens, axis=0, mode="fill"),
        lambda table, tokens: jnp.take(table, tokens, axis=0, mode="clip"),
        lambda table, tokens: table[tokens.astype("uint8")],
    ):

        def loss_fn(params, batch, lookup=lookup):
            x = jnp.nan_to_num(lookup(params["table"], batch["tokens"]), nan=0.5)
            for w in params["layers"]:
                x = x + jnp.tanh(x @ w)
            return jaxpp.linear_cross_entropy(x, params["table"], batch["labels"], num_slices=12).mean()

        _, params, _ = case(tied=True)
        batch = {"tokens": np.arange(VOCAB + 3).reshape(8, 13), "labels": RNG.integers(0, VOCAB, (8, 13))}
        want = jax.value_and_grad(loss_fn)(params, batch)
        assert far(jaxpp.value_and_grad(loss_fn, num_stages=4, num_microbatches=4)(params, batch), want) < 1e-12


def test_an_optimizer_with_sums_over_whole_leaves_updates_a_table_that_is_divided():
    loss_fn, params, batch = case(tied=False, num_slices=12)
    pipe = jaxpp.Pipeline(loss_fn, optax.adafactor(1e-2), num_stages=4, num_microbatches=4)
    pipe.verify(pipe.init(params, batch), batch)


class ScannedGPT(nn.Module):
    """A GPT whose blocks are one loop, without its head."""

    vocab_size: int
    width: int
    depth: int

    @nn.compact
    def __call__(self, tokens, deterministic=True):
        embed = nn.Embed(self.vocab_size, self.width, name="embed")
        broadcast = {"variable_axes": {"params": 0}, "split_rngs": {"params": True, "dropout": True}, "in_axes": nn.broadcast}
        layers = nn.scan(ScannedBlock, length=self.depth, **broadcast)(None, name="layers")
        return nn.LayerNorm(name="ln_f")(layers(embed(tokens), nn.make_causal_mask(tokens, dtype=bool))[0])


def language_model(model, length, num_slices=None, *, plainly=False):
    """The loss of a model whose head is its embedding, and the shapes of its parameters; nothing is allocated."""

    def loss_fn(params, batch):
        hidden = model.apply({"params": params}, batch[:, :-1], True, rngs={"dropout": jax.random.key(0)})
        table = params["embed"]["embedding"]
        loss = plain(hidden, table, batch[:, 1:]) if plainly else None
        return (jaxpp.linear_cross_entropy(hidden, table, batch[:, 1:], num_slices=num_slices) if loss is None else loss).mean()

    tokens = jax.ShapeDtypeStruct((1, length), "int32")
    return loss_fn, jax.eval_shape(lambda tokens: model.init(jax.random.key(0), tokens, True), tokens)["params"]


def largest_share(model, num_stages, length=1024):
    """How many times the mean the largest stage of the automatic cut takes in a step, by estimated seconds."""
    loss_fn, params = language_model(model, length)
    batch = jax.ShapeDtypeStruct((2 * num_stages, length + 1), "int32")
    options = {"num_stages": num_stages, "num_microbatches": 2 * num_stages, "schedule": "1f1b"}
    given = Options.of(loss_fn, devices=jax.devices()[:num_stages], **options)
    _, _, cut = lay_out(given, optax.adamw(1e-3), (params,), batch, None, Programs())
    seconds = [code.costs["F"] + code.costs["B"] for code in cut.stages]
    return max(seconds) * num_stages / sum(seconds)


@pytest.mark.parametrize(
    ("vocab", "depth", "num_stages"),
    [
        pytest.param(vocab, depth, num_stages, marks=getattr(pytest.mark, "long" if depth < 8 else "slow"))
        for vocab in (50_257, 128_256)
        for depth in (4, 6, 8, 10, 12)
        for num_stages in (4, 8)
    ],
)
def test_with_a_divided_head_the_largest_stage_of_a_gpt_takes_at_most_a_twentieth_more_than_the_mean(vocab, depth, num_stages):
    assert largest_share(GPT(vocab, 1024, 768, depth, 12, dropout=0.0, head=False), num_stages) <= 1.05


@pytest.mark.long
@pytest.mark.parametrize("depth", [5, 7, 9, 11])
def test_of_odd_numbers_of_blocks_the_largest_stage_takes_a_little_more_or_as_much(depth):
    # A more even cut would send the scores of attention, 18 times the bytes of the hidden states.
    share = largest_share(GPT(50_257, 1024, 768, depth, 12, dropout=0.0, head=False), 8)
    assert share <= (1.05 if depth == 7 else 1.065)


@pytest.mark.long
def test_a_loop_over_blocks_and_the_loop_of_the_head_are_cut_in_one_model():
    # A block of a loop stays whole, so no cut has a largest stage below 1.07 times the mean.
    assert largest_share(ScannedGPT(128_256, 768, 12), 8) <= 1.12


@pytest.mark.long
def test_the_last_stage_holds_nothing_as_large_as_the_logits():
    vocab, length, examples = 10_007, 32, 4
    model = GPT(vocab, length, 32, 4, 2, dropout=0.0, head=False)
    held = {}
    for plainly in (True, False):
        loss_fn, params = language_model(model, length, plainly=plainly)
        batch = jax.ShapeDtypeStruct((4 * examples, length + 1), "int32")
        pipe = jaxpp.Pipeline(loss_fn, optax.adamw(1e-3), num_stages=4, num_microbatches=4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", jaxpp.UnevenStagesWarning)
            last = pipe.forecast(params, batch).stages[-1]
        held[plainly] = last.temporaries + last.residuals
    logits = 4 * examples * length * vocab
    assert held[True] > logits
    assert held[False] < logits / 2


def test_the_logits_of_a_slice_are_not_kept_for_the_backward_whatever_else_is_in_the_stage():
    """The last slice is outside of the loop if it has fewer rows; the loop over blocks keeps what is cheaper to keep."""
    vocab, tokens = 1001, 16
    model = ScannedGPT(vocab, 16, 3)
    batch = jax.ShapeDtypeStruct((1, tokens + 1), "int32")
    kept = []
    for plainly in (True, False):
        loss_fn, params = language_model(model, tokens, num_slices=2, plainly=plainly)
        pipe = jaxpp.Pipeline(loss_fn, optax.adamw(1e-3), num_stages=1, num_microbatches=1)
        pipe.forecast(params, batch)
        kept.append(pipe.stages[0].kept)
    assert kept[1] < kept[0] - 0.9 * 4 * tokens * vocab


def decoder(vocab=50_257, *, use_bias=False, dtype=None):
    """A small language model with a large head of its own."""

    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(100, 32, name="embed", dtype=dtype)(tokens)
            for k in range(4):
                x = x + nn.Dense(32, name=f"out_{k}", dtype=dtype)(nn.gelu(nn.Dense(128, name=f"in_{k}", dtype=dtype)(x)))
            return nn.Dense(vocab, use_bias=use_bias, name="lm_head", dtype=dtype)(x)

    model = Decoder()
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 8), int))["params"]
    return lambda params, batch: model.apply({"params": params}, batch[:, :-1]), params


BATCH = jax.ShapeDtypeStruct((8, 9), "int32")


def advice(loss_fn, params, batch=BATCH, num_stages=4, **options):
    """What the warning of uneven stages says."""
    pipe = jaxpp.Pipeline(loss_fn, optax.adamw(1e-3), num_stages=num_stages, num_microbatches=4, **options)
    with pytest.warns(jaxpp.UnevenStagesWarning) as found:
        pipe.forecast(params, batch)
    return str(found[0].message)


def integer_labels(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def log_softmax(logits, batch):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits.astype("float32")), batch[:, 1:, None], axis=-1).mean()


SHORT = {"use_bias": True, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("cross_entropy", "options", "line"),
    [
        (integer_labels, {}, "jaxpp.linear_cross_entropy(hidden, table, labels).mean()"),
        (
            log_softmax,
            SHORT,
            "jaxpp.linear_cross_entropy(hidden, table, labels, bias=bias).mean()",
        ),
    ],
    ids=["optax", "log softmax in float32 of a bfloat16 model with a bias"],
)
def test_where_a_head_makes_stages_uneven_the_warning_has_the_line_that_divides_it_and_the_gain(cross_entropy, options, line):
    apply, params = decoder(**options)
    text = advice(lambda params, batch: cross_entropy(apply(params, batch), batch), params, balance="flops")
    assert f"Fix: return the hidden states, and write {line} for the product with lm_head/kernel and its cross entropy" in text
    before, after = map(float, re.findall(r"at most (\d+\.\d+) times as fast as one device", text))
    assert before < 1.1
    assert 3.8 < after <= 4


@pytest.mark.long
def test_the_gain_that_is_promised_is_there_and_no_warning_is_left():
    model = GPT(50_257, 64, 96, 4, 4, dropout=0.0)
    loss_fn, params = language_model(model.clone(head=False), 64)
    batch = jax.ShapeDtypeStruct((8, 65), "int32")
    text = advice(lambda params, batch: integer_labels(model.apply({"params": params}, batch[:, :-1], True), batch), params, batch)
    promised = float(re.findall(r"at most (\d+\.\d+) times as fast as one device; or", text)[0])
    assert "the product with embed/embedding" in text
    pipe = jaxpp.Pipeline(loss_fn, optax.adamw(1e-3), num_stages=4, num_microbatches=4)
    pipe.forecast(params, batch)  # where warnings are errors
    flops = [stage.flops for stage in pipe.stages]
    assert sum(flops) / max(flops) > 0.95 * promised
    modules = [stage.modules for stage in pipe.stages]  # those of the head stand beside those of the model
    assert modules[0].startswith("embed")
    assert modules[-1].startswith("linear_cross_entropy[")
    cuts = ["h_2", "linear_cross_entropy[8]", "linear_cross_entropy[40]"]
    named = jaxpp.Pipeline(loss_fn, optax.adamw(1e-3), num_stages=4, num_microbatches=4, cuts=cuts)
    named.forecast(params, batch)
    assert [stage.modules.partition(" ")[0] for stage in named.stages][2:] == [
        f"linear_cross_entropy[{rows}]" for rows in ("8:40", "40:65")
    ]


@pytest.mark.parametrize(
    ("vocab", "loss_of"),
    [
        (50_257, lambda logits, batch: jnp.square(logits).mean()),
        (50_257, lambda logits, batch: integer_labels(30 * jnp.tanh(logits / 30), batch)),
        (50_257, lambda logits, batch: integer_labels(logits, batch) + 1e-3 * logits.argmax(-1).mean()),
        (50_257, lambda logits, batch: optax.softmax_cross_entropy(logits, jnp.ones_like(logits)).mean()),
        (1_000, integer_labels),
    ],
    ids=["no cross entropy", "capped logits", "logits read elsewhere", "labels that are distributions", "an ordinary classifier"],
)
def test_where_the_loss_is_another_or_the_head_is_small_nothing_is_said_of_it(vocab, loss_of):
    apply, params = decoder(vocab)
    said = advice(lambda params, batch: loss_of(apply(params, batch), batch), params, balance="flops")
    assert "linear_cross_entropy" not in said


HIDDEN, TABLE, _ = head("float32")


REFUSED = {
    "labels of floats": lambda: jaxpp.linear_cross_entropy(HIDDEN, TABLE, LABELS * 1.0),
    "fewer labels": lambda: jaxpp.linear_cross_entropy(HIDDEN, TABLE, LABELS[:, 1:]),
    "a table that is transposed": lambda: jaxpp.linear_cross_entropy(HIDDEN, TABLE.T, LABELS),
    "another width": lambda: jaxpp.linear_cross_entropy(HIDDEN[..., :4], TABLE, LABELS),
    "a table of three axes": lambda: jaxpp.linear_cross_entropy(HIDDEN, TABLE[:, :, None], LABELS),
    "a bias of another size": lambda: jaxpp.linear_cross_entropy(HIDDEN, TABLE, LABELS, bias=TABLE[0]),
    "no table": lambda: jaxpp.linear_cross_entropy(HIDDEN, None, LABELS),
    "no slices": lambda: jaxpp.linear_cross_entropy(HIDDEN, TABLE, LABELS, num_slices=0),
    "two numbers that are none": lambda: jaxpp.linear_cross_entropy(HIDDEN, TABLE, LABELS, num_slices=True, z_loss=-1),
    "all smoothed": lambda: jaxpp.linear_cross_entropy(HIDDEN, TABLE, LABELS, label_smoothing=1.0),
    "half an index": lambda: jaxpp.linear_cross_entropy(HIDDEN, TABLE, LABELS, ignore_index=-0.5),
    "a misspelt name": lambda: jaxpp.linear_cross_entropy(HIDDEN, TABLE, LABELS, slices=8),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_its_shapes_and_what_to_pass(name):
    messages.check("linear_cross_entropy", REFUSED, name, REFUSED[name])
