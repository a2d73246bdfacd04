"""Microbatches of the user's own: of any lengths, in any order, with any weights; nothing is split, padded or put together."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import jaxpp
from jaxpp.errors import BatchError, OutputError, ScheduleError
from jaxpp.observe import to_json
from jaxpp.stages.program import Role
from jaxpp.verify import compare, oracle
from models.mlp import MLP
from tests import messages

WIDTH, VOCABULARY = 8, 20


def init_fn(key, dtype=None, num_layers=4):
    keys = jax.random.split(key, num_layers + 3)
    shapes = [(VOCABULARY, WIDTH), (32, WIDTH), (WIDTH, VOCABULARY), *[(WIDTH, WIDTH)] * num_layers]
    table, places, head, *layers = (jax.random.normal(key, shape, dtype) * 0.5 for key, shape in zip(keys, shapes, strict=True))
    return {"table": table, "places": places, "layers": layers, "head": head}


def losses(params, batch, key=None, dtype=None):
    """The loss of each token, and whether it counts; a token attends to those of its own segment alone."""
    tokens, segments = batch["tokens"], batch["segments"]
    cast = functools.partial(jnp.asarray, dtype=dtype)
    x = cast(params["table"])[tokens] + cast(params["places"])[: tokens.shape[1]]
    same = (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))
    for w in params["layers"]:
        x = x + jnp.tanh(jnp.where(same, x @ x.mT, 0) @ x @ cast(w))
    if key is not None:
        x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)
    logits = (x @ cast(params["head"])).astype(jnp.float32 if dtype == jnp.bfloat16 else x.dtype)
    counted = (segments > 0).astype(logits.dtype)
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1, 1)) * counted, counted


def loss_fn(params, batch, key=None):
    return losses(params, batch, key)[0].mean()


def sentences(length, rows=2, seed=0):
    rng = np.random.default_rng(seed + 100 * length)
    return {"tokens": rng.integers(0, VOCABULARY, (rows, length)), "segments": np.sort(rng.integers(1, 3, (rows, length)), 1)}


def microbatches(*lengths, weights=None, rows=2):
    return jaxpp.Microbatches([sentences(length, rows, k) for k, length in enumerate(lengths)], weights)


def tokens_of(batch):
    return batch["segments"].size


def pipeline(loss=loss_fn, **options):
    given = {"num_stages": 3, "num_microbatches": 4} | options
    return jaxpp.Pipeline(loss, optax.sgd(0.1), **given)


def check(pipe, params, given, key=None, loss=loss_fn, **options):
    """Verify a step, and compare its loss and gradients with the sum, written out here, over microbatches by their weights."""
    state = pipe.init(params, given)
    pipe.verify(state, given, key)
    weights = np.asarray([2.0] * len(given) if given.weights is None else given.weights, np.float64)
    weights = np.asarray(list(map(options["weight"], given)), np.float64) if "weight" in options else weights
    total, grads = 0.0, jax.tree.map(jnp.zeros_like, params)
    for k, (batch, weight) in enumerate(zip(given, weights, strict=True)):
        keys = () if key is None else (jax.random.fold_in(key, k),)
        value, grad = jax.value_and_grad(loss)(params, batch, *keys)
        share = weight / weights.sum()
        total += value * share
        grads = optax.tree.add_scale(grads, share, grad)
    new, metrics = pipe.step(state, given, key, donate=False)
    compare("loss", metrics.loss, total)
    compare("params", jaxpp.gather(new.params), jax.tree.map(lambda p, g: p - 0.1 * g, params, grads))


@pytest.mark.long
def test_eight_lengths_in_one_step_are_exact_and_each_is_compiled_once(x64):
    lengths = (3, 5, 8, 13, 4, 7, 9, 2)
    params = init_fn(jax.random.key(0), jnp.float64)
    pipe = pipeline(fuse=False)
    check(pipe, params, microbatches(*lengths))
    state = pipe.state
    for first in range(8):  # the first one's slice of the table of places is made by the program that begins the step
        state, _ = pipe.step(state, microbatches(*lengths[first:], *lengths[:first]))
    compiled = pipe.engine.programs.num_compiled
    for order in (lengths[::-1], (3, 3, 8, 2, 3, 3, 9, 9), (5, 5), (13, 2, 7)):
        want = oracle(loss_fn, jaxpp.gather(state.params), microbatches(*order), None, len(order))
        state, metrics = pipe.step(state, microbatches(*order))
        compare("loss", metrics.loss, want[0])
    assert pipe.engine.programs.num_compiled == compiled  # no order, and no subset, compiles anything
    lines = [line for _, lowered in pipe.engine.at(microbatches(*lengths)).kept for line in lowered.bound.lines]
    programs = Counter(program.name for program in {line.program for line in lines if line.program is not None})
    assert {programs[f"stage_{stage}_{what}"] for stage in range(3) for what in ("forward", "backward")} == {8}


@pytest.mark.long
def test_weights_say_how_much_a_microbatch_counts_and_keys_are_those_of_their_numbers(x64):
    params, pipe = init_fn(jax.random.key(0), jnp.float64), pipeline()
    for weights in ((3.0, 0.0, 1.5), [1, 2, 3], jnp.asarray([0.25, 0.5, 0.25])):
        check(pipe, params, microbatches(4, 9, 6, weights=weights))
    check(pipeline(weight=tokens_of), params, microbatches(4, 9, 6), weight=tokens_of)
    check(pipeline(weight=tokens_of), params, microbatches(4, 9, 6, weights=(1, 1, 5)))
    check(pipe, params, microbatches(4, 9, 6, weights=(1, 2, 3)), key=jax.random.key(5))


def test_weights_change_without_compiling():
    pipe = pipeline()
    state = pipe.init(init_fn(jax.random.key(0)), microbatches(4, 9, weights=(1, 2)))
    pipe.evaluate(state, microbatches(4, 9, weights=(1, 2)))
    pipe.step(state, microbatches(4, 9, weights=(1, 2)), donate=False)
    compiled, chosen = pipe.engine.programs.num_compiled, ((1, 2), (5, 1), (1, 0), (0, 1))
    found = [pipe.evaluate(state, microbatches(4, 9, weights=weights)).loss for weights in chosen]
    again = [pipe.step(state, microbatches(4, 9, weights=weights), donate=False)[1].loss for weights in chosen]
    np.testing.assert_allclose(found, again, rtol=1e-6)
    assert len(set(map(float, found))) == 4
    np.testing.assert_allclose(found[0], found[2] / 3 + 2 * found[3] / 3, rtol=1e-6)
    assert pipe.engine.programs.num_compiled == compiled


@pytest.mark.long
def test_the_loss_of_all_tokens_is_that_of_one_batch_however_they_are_grouped(x64):
    # Weighed by their tokens, microbatches of any lengths make the mean over all tokens.
    params = init_fn(jax.random.key(0), jnp.float64)
    groups = microbatches(4, 9, 6, rows=3)
    pipe = pipeline(weight=tokens_of)
    found = pipe.evaluate(pipe.init(params, groups), groups).loss
    each = np.concatenate([np.ravel(losses(params, batch)[0]) for batch in groups])
    np.testing.assert_allclose(found, each.mean(), rtol=1e-12)


def test_the_count_that_a_loss_divides_by_is_found_at_every_length(x64):
    def counted(params, batch):
        x = batch["x"] if batch["x"].shape[1] < 7 else jnp.tanh(batch["x"])  # an equation more for long sequences
        total, count = batch["seen"].sum(), batch["counts"].sum()
        h = jnp.tanh(jnp.tanh(x[..., None] * params["a"]) * params["b"]).sum(-1)
        return ((h - 1) ** 2 * batch["counts"]).sum() / count, {"total": total}

    rng, params = np.random.default_rng(0), {"a": jnp.linspace(0.1, 1, 4), "b": jnp.linspace(0.3, 1, 4)}
    given = [
        {"x": rng.normal(size=(2, n)), "seen": np.ones((2, n)), "counts": np.arange(n) < np.full((2, 1), k)}
        for n, k in ((6, 5), (8, 6), (8, 1))
    ]
    given = [batch | {"counts": batch["counts"].astype(float)} for batch in given]
    weights = [batch["counts"].sum() for batch in given]
    want = sum(counted(params, batch)[0] * weight for batch, weight in zip(given, weights, strict=True)) / sum(weights)
    for num_microbatches in (3, 1):
        options = {"weight": "auto", "has_aux": True, "reduce_aux": {"total": "sum"}}
        pipe = pipeline(counted, num_stages=2, num_microbatches=num_microbatches, **options)
        state = pipe.init(params, jaxpp.Microbatches(given) if num_microbatches == 3 else given[0])
        np.testing.assert_allclose(pipe.step(state, jaxpp.Microbatches(given), donate=False)[1].loss, want, rtol=1e-12)


def test_weights_of_ones_own_take_the_place_of_the_count_that_a_loss_divides_by(x64):
    def masked(params, batch):
        each, seen = losses(params, batch)
        return (each * (batch["segments"] > 1)).sum() / (seen * (batch["segments"] > 1)).sum()

    params = init_fn(jax.random.key(0), jnp.float64)
    check(pipeline(masked, num_stages=2, weight="auto"), params, microbatches(4, 9, weights=(1, 5)), loss=masked)


def test_weights_of_sixteen_bits_are_as_exact_as_others():
    params, given = init_fn(jax.random.key(0)), microbatches(4, 6, 4)
    pipe = pipeline(num_stages=2)
    state = pipe.init(params, given)
    weights = jnp.asarray([60000, 6000, 7], jnp.float16), [60000, 6000, 7]
    found = [pipe.evaluate(state, jaxpp.Microbatches(given.batches, each)).loss for each in weights]
    np.testing.assert_allclose(*found, rtol=1e-3)
    assert found[0] > 0


def test_a_mean_of_own_microbatches_is_judged_though_the_first_batch_was_whole():
    def masked(params, batch):
        each, _ = losses(params, batch)
        return (each * (batch["segments"] > 1)).sum() / (batch["segments"] > 1).sum()

    pipe = pipeline(masked, num_stages=2, num_microbatches=1)
    state = pipe.init(init_fn(jax.random.key(0)), sentences(6))
    with pytest.warns(jaxpp.MicrobatchWarning, match="mean over 2 microbatches"):
        pipe.step(state, microbatches(6, 6))


@pytest.mark.long
def test_sums_add_up(x64):
    def summed(params, batch):
        return losses(params, batch)[0].sum()

    params, given = init_fn(jax.random.key(0), jnp.float64), microbatches(4, 9, 6)
    pipe = pipeline(summed, reduction="sum")
    state = pipe.init(params, given)
    pipe.verify(state, given)
    np.testing.assert_allclose(pipe.evaluate(state, given).loss, sum(summed(params, batch) for batch in given), rtol=1e-12)
    with pytest.raises(BatchError, match="the losses of all microbatches are added, so none has a weight"):
        pipe.step(state, microbatches(4, 9, weights=(1, 2)))


OPTIONS = [
    {"schedule": "zb-h1"},
    pytest.param({"schedule": "gpipe", "remat": "offload"}, marks=pytest.mark.slow),
    pytest.param({"schedule": "zb-v", "num_stages": 4}, marks=pytest.mark.slow),
    {"schedule": "interleaved", "num_stages": 4, "num_microbatches": 2},
    {"schedule": "auto"},
    pytest.param({"data_parallel": 2}, marks=pytest.mark.slow),
    {"data_parallel": 2, "weight": tokens_of, "schedule": "zb-h1"},
    {"data_parallel": 2, "shard": "gradients"},
]


@pytest.mark.long
@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda options: " ".join(getattr(value, "__name__", str(value)) for value in options.values())
)
def test_on_every_kind_of_pipeline(options, x64):
    params = init_fn(jax.random.key(0), jnp.float64)
    given = microbatches(4, 9, 6, 9, weights=None if "weight" in options else (1, 2, 3, 4))
    pipe = pipeline(**options)
    if "data_parallel" in options:  # whose replicas have keys of their own
        pipe.verify(pipe.init(params, given), given, jax.random.key(1))
    else:
        check(pipe, params, given, key=jax.random.key(1))
    pipe.verify(pipe.state, microbatches(9, 4), jax.random.key(2))


@pytest.mark.long
def test_the_schedule_is_that_of_as_many_as_there_are():
    pipe = pipeline(schedule="interleaved", num_stages=4, num_microbatches=4)
    given = microbatches(*(4, 6) * 3)
    profile = pipe.profile(pipe.init(init_fn(jax.random.key(0)), given), given, num_steps=1)
    assert profile.schedule.num_microbatches == 6 and pipe.schedule.num_microbatches == 4
    assert to_json(profile)
    with pytest.raises(ScheduleError, match="interleaved"):
        pipe.step(pipe.state, microbatches(4, 6, 4, 6, 4))
    own = jaxpp.schedule.Schedule("mine", jaxpp.schedule.make("1f1b", 3, 4).rows)
    pipe = pipeline(schedule=own)
    state = pipe.init(init_fn(jax.random.key(0)), microbatches(4, 6, 4, 6))
    with pytest.raises(ScheduleError, match="rows that were written for one number of microbatches say nothing of another"):
        pipe.step(state, microbatches(4, 6, 4))
    pipe.step(state, microbatches(6, 6, 4, 6))


@pytest.mark.long
def test_model_state_passes_from_each_to_the_next_and_counts_add_up(x64):
    def with_state(params, model_state, batch):
        each, counted = losses(params, batch)
        seen = {"seen": model_state["seen"] + counted.sum(), "last": each.mean()}
        return each.mean(), (seen, {"count": counted.sum()})

    params, given = init_fn(jax.random.key(0), jnp.float64), microbatches(4, 9, 6)
    pipe = pipeline(with_state, has_state=True, has_aux=True)
    state = pipe.init((params, {"seen": jnp.zeros(()), "last": jnp.zeros(())}), given)
    pipe.verify(state, given)
    new, metrics = pipe.step(state, given, donate=False)
    assert new.model_state["seen"] == 2 * (4 + 9 + 6)
    np.testing.assert_allclose(new.model_state["last"], losses(params, given[2])[0].mean(), rtol=1e-12)
    np.testing.assert_array_equal(metrics.aux["count"], 2 * (4 + 9 + 6))


@pytest.mark.long
def test_a_loss_scale_a_bank_and_gradients_alone():
    given = microbatches(4, 9, 6, weights=(1, 2, 3))
    params = init_fn(jax.random.key(0))
    pipe = pipeline(loss_scale=DynamicScale(scale=2.0**8))
    pipe.verify(pipe.init(params, given), given)

    def with_task(params, own, batch):
        return loss_fn(params | {"head": own["head"]}, batch)

    heads = {name: {"head": params["head"] * k} for k, name in enumerate("ab", 1)}
    bank = jaxpp.Bank(heads, optax.sgd(0.1))
    pipe = jaxpp.Pipeline(with_task, optax.sgd(0.1), num_stages=3, num_microbatches=4, bank=bank)
    state = pipe.init(params, given)
    state, metrics = pipe.step(state, given, task="b")
    want = oracle(lambda params, batch: with_task(params, heads["b"], batch), params, given, None, 3)
    compare("loss", metrics.loss, want[0])
    loss, grads = jaxpp.value_and_grad(loss_fn, num_stages=3, num_microbatches=2)(params, given)
    want = oracle(loss_fn, params, given, None, 2)
    compare("loss", loss, want[0])
    compare("grads", jaxpp.gather(grads), want[2])


@pytest.mark.long
def test_casts_of_parameters_are_made_once_for_all_lengths():
    def loss(params, batch):
        return losses(params, batch, dtype=jnp.bfloat16)[0].mean()

    params, made = init_fn(jax.random.key(0)), []
    for lengths in ((5,), (5, 7, 9, 11)):
        pipe = pipeline(loss)
        given = microbatches(*lengths)
        pipe.verify(pipe.init(params, given), given)
        lines = pipe.engine.plan("update", given, None)[1].bound.lines
        names = [name for line in lines for name in line.outputs if name.ref.role == Role.STATIC]
        made.append([len([name for name in names if name.stage == stage]) for stage in range(3)])
    # The table of places is read up to a length, so its cast may be one for each; all else is one.
    assert all(alone <= several <= alone + 3 for alone, several in zip(*made, strict=True)) and sum(made[0]) > 0


def test_casts_of_weights_of_one_shape_are_not_taken_for_one_another():
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w.astype(jnp.bfloat16))
        return (x.astype(jnp.float32) ** 2).mean()

    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=(64, 64)) / 8, jnp.float32) for _ in range(4)]  # too large to be packed
    given = jaxpp.Microbatches([jnp.asarray(rng.normal(size=(n, 64)), jnp.bfloat16) for n in (2, 3, 2)])
    pipe = pipeline(loss, num_stages=2)
    pipe.verify(pipe.init(params, given), given)
    lines = pipe.engine.plan("update", given, None)[1].bound.lines
    assert len({name for line in lines for name in line.outputs if name.ref.role == Role.STATIC}) == 4


@pytest.mark.long
def test_an_array_that_the_loss_closes_over_is_on_a_device_once():
    table = jnp.asarray(np.random.default_rng(0).normal(size=(VOCABULARY, WIDTH)), jnp.float32)
    pipe = pipeline(lambda params, batch: loss_fn(params | {"table": table + params["table"]}, batch))
    given = microbatches(4, 6)
    state = pipe.init(init_fn(jax.random.key(0)), given)
    held = set()
    for other in (given, microbatches(6, 4), microbatches(6, 6, 4), microbatches(5)):
        state, _ = pipe.step(state, other)
        constants = [value for _, value in pipe.engine.plan("update", other, None)[0].constants]
        held |= {value.unsafe_buffer_pointer() for value in constants if value.shape == table.shape}
    assert len(held) == 1


@pytest.mark.long
def test_observers_tell_of_the_step_as_it_runs():
    params, given = init_fn(jax.random.key(0)), microbatches(4, 9, 6, 4, 9)
    pipe = pipeline()
    forecast = pipe.forecast(jax.eval_shape(init_fn, jax.random.key(0)), jax.tree.map(jnp.asarray, given))
    state = pipe.init(init_fn, jax.random.key(0), given)
    profile = pipe.profile(state, given, num_steps=1)
    assert {row.device: row.num_residuals for row in forecast.stages} and profile.ledger.liveness.lines
    assert forecast.peaks == pipe.forecast(params, given).peaks
    assert pipe.reads(given).batches[1] == {"tokens": True, "segments": True}
    assert "no collectives" in str(pipe.collectives(given))


def test_flax_init_gets_the_first():
    model = MLP(width=8, depth=2, num_classes=3)
    rng = np.random.default_rng(0)
    given = jaxpp.Microbatches([{"x": jnp.asarray(rng.normal(size=(n, 5)), "f"), "y": rng.integers(0, 3, n)} for n in (2, 5)])

    def loss(params, batch):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, batch["x"]), batch["y"]).mean()

    pipe = pipeline(loss, num_stages=2)
    pipe.verify(pipe.init(model.init, jax.random.key(0), given), given)


def test_a_list_that_raises_in_the_middle_leaves_the_state_as_it_was():
    def broken():
        yield sentences(4)
        yield sentences(6)
        raise OSError("the disk is gone")

    pipe = pipeline()
    state = pipe.init(init_fn(jax.random.key(0)), microbatches(4, 6))
    before = jax.device_get(state.params)
    with pytest.raises(OSError, match="the disk is gone"):
        pipe.step(state, jaxpp.Microbatches(broken()))
    with pytest.raises(BatchError, match=r"microbatch 1"):
        pipe.step(state, jaxpp.Microbatches([sentences(4), jax.tree.map(lambda leaf: leaf[0, 0], sentences(6))]))
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))
    pipe.step(pipe.state, jaxpp.Microbatches(sentences(n) for n in (4, 6)))


REFUSED = {
    "none": ([],),
    "an array": (np.zeros((3, 4)),),
    "a dict": ({"x": np.zeros(3)},),
    "two structures": ([np.zeros(3), {"x": np.zeros(3)}],),
    "one weight for two": ([np.zeros(3)] * 2, [1.0]),
    "weights that add up to nothing": ([np.zeros(3)] * 2, [1.0, -1.0]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_are_no_microbatches_is_refused(name):
    messages.check("microbatches", REFUSED, name, lambda: jaxpp.Microbatches(*REFUSED[name]))


def test_the_search_takes_one_batch():
    given, params = microbatches(4, 6), init_fn(jax.random.key(0))
    with pytest.raises(BatchError, match="compared on a batch that each of them can split"):
        jaxpp.tune(loss_fn, optax.sgd(0.1), params, given, num_microbatches=[2])


def with_rows(params, x):
    rows = jnp.tanh(x @ params["a"]) @ params["b"]
    return jnp.mean(rows**2), {"rows": rows, "mean": x.mean(), "sums": rows.sum(-1)}


@pytest.mark.parametrize("options", [{}, {"data_parallel": 2}, {"data_parallel": 2, "shard": "parameters", "host": "params"}])
@pytest.mark.parametrize("weights", [None, (1, 3, 2)])
def test_functions_run_on_microbatches_and_rows_are_joined_in_their_order_whatever_the_replicas(options, weights):
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(4, 4)).astype("f") for name in "ab"}
    parts = [rng.normal(size=(rows, 4)).astype("f") for rows in (8, 2, 6)]
    given, shares = jaxpp.Microbatches(parts, weights), np.float32(weights or [8, 2, 6]) / (6 if weights else 16)
    pipe = jaxpp.Pipeline(with_rows, optax.sgd(0.1), num_stages=2, num_microbatches=2, has_aux=True, **options)
    state, fn = pipe.init(params, parts[0]), lambda params, x: with_rows(params, x)[1]
    each = [with_rows(params, part)[1] for part in parts]
    joined = {name: np.concatenate([one[name] for one in each]) for name in ("rows", "sums")}
    wanted = joined | {"mean": sum(share * one["mean"] for share, one in zip(shares, each, strict=True))}
    outputs = [pipe.apply(state, given, fn), *pipe.stream(state, [given, given], fn), pipe.evaluate(state, given).aux]
    assert pipe.verify(state, given)
    for found in (*outputs, pipe.step(state, given)[1].aux):
        compare("outputs", found, wanted)
    with pytest.raises(OutputError, match=r"f32\[\d,4\] and f32\[\d,2\]"):
        pipe.apply(pipe.state, jaxpp.Microbatches([parts[0], parts[0][:, :2]]), lambda params, x: 2 * x + params["a"][0, 0])


def random_list(rng, buckets, most):
    lengths = rng.choice(buckets, rng.integers(1, most + 1)).tolist()
    kind = rng.integers(3)
    some = rng.integers(0, 3, len(lengths)) + (np.arange(len(lengths)) == rng.integers(len(lengths)))
    weights = (None, rng.uniform(0.1, 5, len(lengths)), some)[kind]
    return microbatches(*lengths, weights=weights, rows=2)


def check_random_lists(seed, count):
    rng = np.random.default_rng(seed)
    schedule = ("1f1b", "zb-h1", "gpipe", "naive", "zb-v", "v-half", "looped-bfs")[seed % 7]
    options = {"num_stages": 4 if schedule in ("zb-v", "v-half", "looped-bfs") else int(rng.integers(1, 5)), "schedule": schedule}
    options |= {"remat": (None, "keep", "recompute")[seed % 3]} if seed % 2 else {}
    key = jax.random.key(seed) if seed % 2 else None
    with jax.enable_x64(True):
        params = init_fn(jax.random.key(seed), jnp.float64)
        pipe = pipeline(**options)
        buckets = rng.choice(np.arange(2, 20), 4, replace=False)
        state = pipe.init(params, random_list(rng, buckets, 6))
        for _ in range(count):
            given = random_list(rng, buckets, 6)
            before = jaxpp.gather(state.params)
            want = oracle(loss_fn, before, given, key, len(given))
            state, metrics = pipe.step(state, given, key)
            compare("loss", metrics.loss, want[0])
            compare("params", jaxpp.gather(state.params), jax.tree.map(lambda p, g: p - 0.1 * g, before, want[2]))


@pytest.mark.long
def test_some_random_lists_equal_the_oracle():
    check_random_lists(1, 5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_three_hundred_random_lists_equal_the_oracle(seed):
    check_random_lists(seed, 10)


def test_padded_graphs_whose_nodes_and_edges_are_as_many_as_they_are_come_as_microbatches_with_weights():
    def graphs(seed, num_nodes, num_edges):
        rng = np.random.default_rng(seed)
        return {
            "nodes": rng.normal(size=(num_nodes, 4)).astype(np.float32),
            "senders": rng.integers(0, num_nodes, num_edges),
            "receivers": rng.integers(0, num_nodes, num_edges),
            "n_node": np.array([num_nodes - 1, 1]),
            "real": np.array([1.0, 0.0], np.float32),
        }

    def loss(params, graph):
        h = jnp.tanh(graph["nodes"] @ params["a"])
        h = jnp.tanh(jax.ops.segment_sum(h[graph["senders"]], graph["receivers"], len(h)) @ params["b"])
        count = graph["n_node"].shape[0]
        number = jnp.repeat(jnp.arange(count), graph["n_node"], total_repeat_length=len(h))
        return (jax.ops.segment_sum((h**2).sum(1), number, count) * graph["real"]).sum()

    params = {name: np.random.default_rng(9).normal(size=(4, 4)).astype(np.float32) / 2 for name in "ab"}
    parts, weights = [graphs(0, 6, 9), graphs(1, 6, 9), graphs(2, 8, 12)], [1.0, 1.0, 2.0]
    pipe = jaxpp.Pipeline(loss, optax.sgd(0.1), num_stages=2, num_microbatches=3)
    batch = jaxpp.Microbatches(parts, weights=weights)
    state = pipe.init(params, batch)
    pipe.verify(state, batch)
    wanted = sum(w * loss(params, part) for w, part in zip(weights, parts, strict=True)) / 4
    np.testing.assert_allclose(pipe.step(state, batch)[1].loss, wanted, rtol=1e-5)
    with pytest.raises(BatchError, match="all batch leaves have the same first axis"):
        pipe.evaluate(pipe.init(params, batch), jaxpp.Microbatches(parts))
