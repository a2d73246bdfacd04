"""Model state: every microbatch finds what the one before it left, whatever the stages and the schedule."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import CutError, StateError, VerifyError
from jaxpp.observe.memory.ledger import sample_step
from jaxpp.schedule import SCHEDULES
from jaxpp.verify import GRAD_FLOOR, compare, oracle
from tests import messages
from tests.models import schedule_for

pytestmark = pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")  # batch normalisation mixes examples


class Norms(nn.Module):
    """Dense layers with batch normalisation between them."""

    depth: int = 3

    @nn.compact
    def __call__(self, x, train=True):
        for i in range(self.depth):
            x = nn.Dense(8, param_dtype=float, name=f"dense_{i}")(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.8, param_dtype=float, name=f"norm_{i}")(x))
        return nn.Dense(3, param_dtype=float, name="head")(x)


MODEL = Norms()
RNG = np.random.default_rng(3)
BATCH = {"x": RNG.normal(size=(11, 5)) + 2, "y": RNG.integers(0, 3, 11)}


def loss_fn(params, model_state, batch, train=True):
    variables = {"params": params, **model_state}
    logits, new = MODEL.apply(variables, batch["x"], train, mutable=["batch_stats"])
    aux = {"accuracy": (logits.argmax(-1) == batch["y"]).mean()}
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), (new, aux)


def eval_fn(params, model_state, batch):
    return loss_fn(params, model_state, batch, train=False)


def init(key):
    variables = MODEL.init(key, BATCH["x"][:1])
    return variables["params"], {"batch_stats": jax.tree.map(lambda leaf: leaf.astype(float), variables["batch_stats"])}


def pipeline(num_stages, num_microbatches, schedule="1f1b", loss=loss_fn, **options):
    options = {"num_stages": num_stages, "num_microbatches": num_microbatches, "schedule": schedule} | options
    return jaxpp.Pipeline(loss, optax.sgd(0.1), has_state=True, **options)


@pytest.mark.long
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_running_statistics_equal_the_oracles_after_five_steps(x64, microbatches):
    pipe = pipeline(3, microbatches)
    state = pipe.init(init, jax.random.key(0), BATCH)
    params, stats = jax.jit(init)(jax.random.key(0))
    compare("model_state", state.model_state, stats)  # finding out shapes counts as no batch
    for _ in range(5):
        loss, aux, grads, stats = oracle(loss_fn, params, BATCH, None, microbatches, model_state=stats)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        state, metrics = pipe.step(state, BATCH)
        compare("model_state", state.model_state, stats)
        compare("loss", metrics.loss, loss)
        compare("aux", metrics.aux, aux)


@pytest.mark.parametrize("stages", [pytest.param(1, marks=pytest.mark.long), 4])
def test_every_schedule_equals_the_oracle(x64, stages):
    params, stats = jax.jit(init)(jax.random.key(0))
    loss, aux, grads, stats_after = oracle(loss_fn, params, BATCH, None, 4, model_state=stats)
    pipe = pipeline(stages, 4, "naive")
    pipe.init((params, stats), BATCH)
    first = pipe.engine
    for name in SCHEDULES:
        if schedule := schedule_for(name, stages, 4):
            engine = first.with_schedule(schedule)
            outcome = engine.run("grads", engine.bring((params, stats)), BATCH, None)
            compare(f"{name} model_state", outcome.model_state, jax.tree.leaves(stats_after))
            compare(f"{name} loss, aux", (outcome.loss, outcome.aux), (loss, aux))
            compare(f"{name} grads", outcome.grads, jax.tree.leaves(grads), floor=GRAD_FLOOR)


@pytest.mark.long
def test_verify_tells_rounding_from_a_difference_and_stages_with_state_are_not_run_by_hand(monkeypatch):
    pipe = pipeline(2, 4)  # a dense bias before a norm has a gradient of rounding alone, larger than float32's usual share
    state = pipe.init(init, jax.random.key(0), BATCH)
    pipe.verify(state, BATCH)
    with pytest.raises(StateError, match=r"pipe.stages\[0\].forward"):
        pipe.stages[0].forward(state.params, {}, BATCH)
    run = pipe.engine.run

    def tampered(kind, *args, **options):
        outcome = run(kind, *args, **options)
        leaves = [leaf + 1e-4 * (k == 0) for k, leaf in enumerate(outcome.grads)]
        return outcome._replace(grads=leaves) if kind == "grads" else outcome

    monkeypatch.setattr(pipe.engine, "run", tampered)
    with pytest.raises(VerifyError, match=r"grads\['dense_0'\]\['bias'\] does not"):
        pipe.verify(state, BATCH)


@pytest.mark.parametrize("replicas", [1, 2])
def test_another_loss_reads_and_makes_the_state_on_another_stage(x64, replicas):
    def delayed(params, model_state, batch, first=False):
        h = batch["x"] + model_state["old"] if first else batch["x"]
        made = jnp.tanh(jnp.tanh(h @ params["a"]) @ params["b"])
        new = {"new": (batch["x"] if first else made).mean(), "old": model_state["new"]}
        return ((made if first else made + model_state["old"]) ** 2).mean(), (new, {})

    params, means = dict.fromkeys("ab", jnp.eye(5)), {"new": jnp.asarray(0.5), "old": jnp.asarray(0.25)}
    pipe, at_first = pipeline(2, 2, loss=delayed, data_parallel=replicas), functools.partial(delayed, first=True)
    state, _ = pipe.step(pipe.init((params, means), EVEN), EVEN)
    found = pipe.evaluate(state, EVEN, loss_fn=at_first)
    given = jax.device_get((state.params, state.model_state))
    if replicas == 1:
        compare("loss", found.loss, oracle(at_first, given[0], EVEN, None, 2, model_state=given[1])[0])
    other = pipe.other(at_first)
    state = other.init(state, EVEN)
    other.verify(state, EVEN)
    state, _ = other.step(state, EVEN)
    pipe.verify(state, EVEN)


@pytest.mark.long
def test_evaluate_reads_the_statistics_and_leaves_them():
    pipe = pipeline(3, 2)
    state = pipe.init(init, jax.random.key(0), BATCH)
    state, _ = pipe.step(state, BATCH)
    before = jax.device_get(state.model_state)
    found = pipe.evaluate(state, BATCH, loss_fn=eval_fn)
    plain, _ = eval_fn(jax.device_get(state.params), before, BATCH)
    np.testing.assert_allclose(found.loss, plain, rtol=1e-6)
    pipe.evaluate(state, BATCH)  # in training mode
    compare("model_state", state.model_state, before)


def carried(params, model_state, batch, key):
    """The mean of what was seen enters the next loss; a counter and a key go on; one leaf is read and never changed."""
    seen, count, stream, fixed = (model_state[name] for name in ("seen", "count", "stream", "fixed"))
    x = jnp.tanh(batch @ params["a"]) + seen
    x = jnp.tanh(x @ params["b"]) * fixed + 0.1 * jax.random.normal(stream, x.shape) + count
    x = jnp.tanh(x @ params["c"] + jax.random.normal(key, x.shape) * fixed)
    new = {"seen": 0.5 * seen + 0.5 * jnp.tanh(batch @ params["a"]).mean(0), "count": count + 1, "fixed": fixed}
    return (x**2).mean(), (new | {"stream": jax.random.split(stream)[0]}, {"count": count})


CARRIED = {"a": jnp.eye(4), "b": 0.5 * jnp.eye(4), "c": jnp.ones((4, 4)) / 3}
CARRIED_STATE = {"seen": jnp.zeros(4), "count": jnp.zeros((), int), "stream": jax.random.key(5), "fixed": jnp.full(4, 0.7)}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_state_that_enters_the_loss_counters_and_keys_equal_the_oracles(schedule):
    batch, key = jnp.asarray(RNG.normal(size=(9, 4)), jnp.float32), jax.random.key(1)
    pipe = pipeline(3, 4, schedule, carried)
    state = pipe.init((CARRIED, CARRIED_STATE), batch)
    pipe.verify(state, batch, key)
    stepped, metrics = pipe.step(state, batch, key)
    expected = oracle(carried, CARRIED, batch, key, 4, model_state=CARRIED_STATE)
    compare("model_state", stepped.model_state, expected[3])
    assert int(stepped.model_state["count"]) == 4
    np.testing.assert_allclose(metrics.aux["count"], (0 * 3 + 1 * 2 + 2 * 2 + 3 * 2) / 9, rtol=1e-6)


def test_a_leaf_that_nobody_changes_is_sent_once_a_step():
    pipe = pipeline(3, 4, loss=carried, cuts=["b", "c"])
    batch = jnp.ones((8, 4))
    pipe.init((CARRIED, CARRIED_STATE), batch)
    plan, _ = pipe.engine.plan("update", batch, jax.random.key(0))
    sends = [line.label for line in plan.instructions if "fixed" in line.label]
    assert len(sends) == 1


@pytest.mark.long
def test_the_old_model_state_stays_whole_and_a_state_opens_at_any_number_of_stages():
    pipe, other = pipeline(3, 2), pipeline(2, 2)
    state = pipe.init(init, jax.random.key(0), BATCH)
    saved = jax.device_get(state)
    stepped, _ = pipe.step(state, BATCH)
    compare("old", state.model_state, saved.model_state)
    other.init(init, jax.random.key(1), BATCH)
    again, _ = other.step(saved, BATCH)
    compare("model_state", again.model_state, stepped.model_state)


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
def test_the_ledger_counts_model_state(count):
    pipe, batch = pipeline(3, 2, data_parallel=count), {name: leaf[:8] for name, leaf in BATCH.items()}
    state = pipe.init(init, jax.random.key(0), batch)
    ledger, _ = sample_step(pipe.engine, pipe.engine.leaves(state.held), batch, None)
    begins = [sample for sample in ledger.samples if sample.moment == 0]
    assert sum(sample.by_kind["model state"] for sample in begins) == 3 * 2 * 8 * 4
    for sample in ledger.samples:
        ours = [life for life in ledger.liveness.alive(sample.device, sample.moment) if life.kind == "model state"]
        assert sum(life.num_bytes for life in ours) == sample.by_kind["model state"], sample.when


def returning(new):
    return lambda params, model_state, batch: ((batch @ params["a"]).mean(), new(model_state, batch))


ANOTHER_STATE = {
    "another shape": lambda s, b: ({"n": jnp.zeros(b.shape[0])}, {}),
    "another type": lambda s, b: ({"n": s["n"].astype(int)}, {}),
    "another leaf": lambda s, b: ({"n": s["n"], "m": s["n"]}, {}),
    "no aux": lambda s, b: s,
    "three": lambda s, b: (s, {}, 1),
}


@pytest.mark.parametrize("name", ANOTHER_STATE)
def test_a_loss_that_returns_another_state_is_refused(name):
    pipe, start = pipeline(1, 2, loss=returning(ANOTHER_STATE[name])), ({"a": jnp.ones((4, 2))}, {"n": jnp.zeros(3)})
    messages.check("model_state", ANOTHER_STATE, name, lambda: pipe.init(start, jnp.ones((4, 4))))


def test_state_that_a_later_stage_would_have_to_send_back_is_refused():
    def backwards(params, model_state, batch):
        x = batch
        for k in range(4):
            x = jnp.tanh(x @ params[k] + model_state["last"])
        return x.mean(), ({"last": x.mean(0)}, {})

    init = ([jnp.eye(4)] * 4, {"last": jnp.zeros(4)})
    with pytest.raises(CutError) as caught:
        pipeline(5, 2, loss=backwards).init(init, jnp.ones((4, 4)))
    assert "one stage reads a model state leaf and makes its new value" in str(caught.value)
    assert "model_state last:" in str(caught.value)
    with pytest.raises(CutError, match="divides model_state last"):
        pipeline(2, 2, loss=backwards, cuts=["2"]).init(init, jnp.ones((4, 4)))


@pytest.mark.filterwarnings("ignore::jaxpp.UnevenStagesWarning")
def test_state_made_of_other_state_that_is_made_later_is_refused_too():
    # A review found that only what a new value is made by was looked at, not what that is made of.
    def chained(params, model_state, batch):
        x = jnp.tanh(batch @ params[0] + model_state["a"])
        for k in range(1, 4):
            x = jnp.tanh(x @ params[k])
        new = {"a": 0.9 * model_state["a"] + 0.1 * model_state["b"], "b": x.mean(0)}
        return x.mean(), (new, {})

    init = ([jnp.eye(4)] * 4, {"a": jnp.zeros(4), "b": jnp.ones(4)})
    with pytest.raises(CutError, match="one stage reads a model state leaf and makes its new value"):
        pipeline(6, 2, loss=chained).init(init, jnp.ones((4, 4)))
    for stages in (1, 3):  # cut before and after what must stay together
        pipe = pipeline(stages, 2, loss=chained)
        pipe.verify(pipe.init(init, jnp.ones((4, 4))), jnp.ones((4, 4)))


def test_new_state_may_share_what_it_is_made_of_with_aux_alone():
    # What depends on data alone and only aux reads runs last; state made of it had been put before it.
    def loss_fn(params, model_state, batch):
        x, seen = batch, batch.mean(0)
        for w in params:
            x = jnp.tanh(x @ w)
        return (x**2).mean(), ({"seen": 0.9 * model_state["seen"] + 0.1 * seen}, {"mean": seen})

    batch = jnp.asarray(RNG.normal(size=(6, 4)), jnp.float32)
    pipe = pipeline(3, 2, loss=loss_fn)
    state = pipe.init(([jnp.eye(4)] * 4, {"seen": jnp.zeros(4)}), batch)
    pipe.verify(state, batch)


EVEN = {"x": np.random.default_rng(4).normal(size=(32, 5)) + 2, "y": np.arange(32) % 3}
LONG = pytest.mark.long
SHARES = {
    "replicas": {"data_parallel": 2},
    "four replicas": pytest.param({"data_parallel": 4}, marks=LONG),
    "a mesh": pytest.param({"mesh": (2, 2, 2), "shardings": {"dense_0": "column", "dense_1": "row"}}, marks=LONG),
}


@pytest.mark.parametrize("options", SHARES.values(), ids=list(SHARES))
def test_replicas_have_statistics_of_their_own_and_their_mean_after_a_step(x64, options):
    mesh = {"mesh": jax.make_mesh(options["mesh"], ("pipe", "data", "model"))} if "mesh" in options else {}
    pipe = pipeline(2, 2, **options | mesh)
    state = pipe.init(init, jax.random.key(0), EVEN)
    count = options.get("data_parallel", 2)
    for _ in range(2):
        pipe.verify(state, EVEN)
        params, before = jax.device_get((state.params, state.model_state))
        state, _ = pipe.step(state, EVEN)
        after = []
        for replica in range(count):  # as a plain loop has it
            stats, size = before, 32 // count // 2
            for k in range(2):
                first = replica * 32 // count + k * size
                _, (stats, _) = loss_fn(params, stats, {name: leaf[first : first + size] for name, leaf in EVEN.items()})
            after.append(stats)
        compare("model_state", state.model_state, jax.tree.map(lambda *rows: np.mean(rows, axis=0), *after))
    found = pipe.evaluate(state, EVEN, loss_fn=eval_fn)
    np.testing.assert_allclose(found.loss, eval_fn(*jax.device_get((state.params, state.model_state)), EVEN)[0], rtol=1e-6)


def test_counters_and_keys_are_the_same_on_all_replicas():
    batch, key = jnp.asarray(RNG.normal(size=(8, 4)), jnp.float32), jax.random.key(1)
    pipe = pipeline(2, 2, loss=carried, data_parallel=2)
    state = pipe.init((CARRIED, CARRIED_STATE), batch)
    pipe.verify(state, batch, key)
    state, _ = pipe.step(state, batch, key)
    assert int(state.model_state["count"]) == 2
    stream = jax.random.split(jax.random.split(CARRIED_STATE["stream"])[0])[0]
    assert (jax.random.key_data(state.model_state["stream"]) == jax.random.key_data(stream)).all()
    np.testing.assert_array_equal(state.model_state["fixed"], CARRIED_STATE["fixed"])


def test_statistics_are_those_of_all_replicas_where_the_model_names_their_axis(x64):
    """Flax's own ``axis_name`` synchronises batch normalisation in the forward."""

    class Synchronised(nn.Module):
        axis: str | None = "data"

        @nn.compact
        def __call__(self, x):
            for i in range(2):
                x = nn.Dense(8, param_dtype=float, name=f"dense_{i}")(x)
                norm = nn.BatchNorm(use_running_average=False, axis_name=self.axis, param_dtype=float, name=f"norm_{i}")
                x = nn.relu(norm(x))
            return nn.Dense(3, param_dtype=float, name="head")(x)

    def loss_of(model):
        def loss(params, model_state, batch):
            logits, new = model.apply({"params": params, **model_state}, batch["x"], mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), (new, {})

        return loss

    whole = Synchronised(None)
    variables = whole.init(jax.random.key(0), EVEN["x"][:1])
    params, stats = variables["params"], {"batch_stats": jax.tree.map(lambda leaf: leaf.astype(float), variables["batch_stats"])}
    pipe = pipeline(2, 1, loss=loss_of(Synchronised()), data_parallel=2)
    state = pipe.init((params, stats), EVEN)
    pipe.verify(state, EVEN)
    state, metrics = pipe.step(state, EVEN)
    (loss, (new, _)), grads = jax.value_and_grad(loss_of(whole), has_aux=True)(params, stats, EVEN)
    compare("loss", metrics.loss, loss)
    compare("model_state", state.model_state, new)
    compare("params", state.params, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), floor=GRAD_FLOOR)


class NormBody(nn.Module):
    """A layer with batch normalisation: the body of a loop."""

    axis: str | None = None

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(8, use_bias=False, param_dtype=float, name="dense")(x)  # a bias would have a gradient of rounding alone
        norm = nn.BatchNorm(use_running_average=not train, momentum=0.8, param_dtype=float, axis_name=self.axis, name="norm")
        return jnp.tanh(norm(x)), None


class ScannedNorms(nn.Module):
    """``Norms`` with its layers in one ``nn.scan``, which stacks their running statistics too."""

    axis: str | None = None
    reverse: bool = False
    length: int = 6

    @nn.compact
    def __call__(self, x, train=True):
        axes, rngs = {"params": 0, "batch_stats": 0}, {"params": True}
        layers = nn.scan(
            NormBody, variable_axes=axes, split_rngs=rngs, in_axes=nn.broadcast, length=self.length, reverse=self.reverse
        )
        x, _ = layers(self.axis, name="layers")(nn.Dense(8, use_bias=False, param_dtype=float, name="first")(x), train)
        return nn.Dense(3, param_dtype=float, name="head")(x)


def scanned(**options):
    """A loss of stacked layers, and what makes its parameters and its model state."""
    model, alone = ScannedNorms(**options), ScannedNorms(**options | {"axis": None})

    def loss_fn(params, model_state, batch, train=True):
        logits, new = model.apply({"params": params, **model_state}, batch["x"], train, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), (new if train else model_state, {})

    def init(key):
        variables = alone.init(key, BATCH["x"][:1])
        return variables["params"], {"batch_stats": jax.tree.map(lambda leaf: leaf.astype(float), variables["batch_stats"])}

    return loss_fn, init


@pytest.mark.parametrize(
    ("model", "options", "rows"),
    [
        ({}, {"num_stages": 3}, (2, 3, 1)),
        pytest.param({"reverse": True}, {"num_stages": 2, "cuts": ["layers[2]"]}, (3, 3), marks=pytest.mark.long),
        pytest.param({}, {"num_stages": 2, "cuts": ["layers[1]"], "schedule": "zb-h1"}, (1, 5), marks=pytest.mark.long),
        pytest.param({}, {"num_stages": 2, "cuts": ["layers[3]"], "data_parallel": 2}, (3, 3), marks=pytest.mark.long),
        pytest.param({}, {"num_stages": 4, "schedule": "zb-v"}, None, marks=pytest.mark.long),
    ],
)
def test_running_statistics_that_a_loop_stacks_live_with_its_layers(x64, model, options, rows):
    loss_fn, init = scanned(**model)
    options = {"num_microbatches": 2, "schedule": "1f1b"} | options
    pipe = pipeline(loss=loss_fn, **options)
    state = pipe.init(init, jax.random.key(0), EVEN)
    params, old = plain = jax.jit(init)(jax.random.key(0))
    sizes = set(pipe.engine.layout.state_slicing.sizes)
    assert len(sizes) == 1
    assert rows is None or sizes == {rows}
    compare("state", (state.params, state.model_state), plain)
    for _ in range(3):
        pipe.verify(state, EVEN)
        state, _ = pipe.step(state, EVEN)
        _, _, grads, old = oracle(
            loss_fn, params, EVEN, None, 2, model_state=old, num_replicas=options.get("data_parallel", 1), has_aux=True
        )
        params = jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, params, grads)
    compare("params", state.params, params)
    compare("model_state", state.model_state, old)
    found = pipe.evaluate(state, EVEN, loss_fn=lambda *args: loss_fn(*args, train=False))
    compare("loss", found.loss, jax.jit(loss_fn, static_argnums=3)(params, old, EVEN, False)[0])
    assert set(pipe.engine.layout.state_owner) == set(range(options["num_stages"]))


@pytest.mark.long
def test_a_state_of_stacked_statistics_opens_at_any_number_of_stages(x64):
    loss_fn, init = scanned()
    pipe, other = (pipeline(stages, 2, loss=loss_fn) for stages in (2, 4))
    state = pipe.init(init, jax.random.key(0), EVEN)
    other.init(init, jax.random.key(1), EVEN)
    state, _ = pipe.step(state, EVEN)
    saved = jax.tree.map(np.asarray, state)
    there, _ = other.step(saved, EVEN)
    here, _ = pipe.step(state, EVEN)
    compare("state", (here.params, here.model_state), (there.params, there.model_state))


@pytest.mark.long
def test_stacked_statistics_of_all_replicas(x64):
    loss_fn, init = scanned(axis="data")
    pipe = pipeline(2, 1, loss=loss_fn, data_parallel=2)
    state = pipe.init(init, jax.random.key(0), EVEN)
    params, old = jax.jit(init)(jax.random.key(0))
    pipe.verify(state, EVEN)
    state, _ = pipe.step(state, EVEN)
    (_, (new, _)), grads = jax.value_and_grad(scanned()[0], has_aux=True)(params, old, EVEN)
    compare("model_state", state.model_state, new)
    compare("params", state.params, jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, params, grads))
    assert any(pipe.engine.layout.state_slicing.sizes)


def test_a_loop_reads_rows_of_a_state_that_is_read_whole_elsewhere(x64):
    """A counter for each layer, of which the last stage reads all: it is sent the old ones of the others."""

    def loss_fn(params, counts, batch):
        def layer(x, row):
            return jnp.tanh(x @ row[0]) + row[1], row[1] + 0.1

        x, new = jax.lax.scan(layer, batch["x"], (params["w"], counts))
        return (x**2).mean() + (counts * params["v"]).sum(), (new, {})

    params = {"w": jnp.asarray(RNG.normal(size=(4, 5, 5))), "v": jnp.arange(4.0)}
    pipe = pipeline(2, 2, loss=loss_fn, cuts=["w[2]"])
    state = pipe.init((params, jnp.zeros(4)), EVEN)
    for _ in range(2):
        pipe.verify(state, EVEN)
        state, _ = pipe.step(state, EVEN)
    np.testing.assert_allclose(state.model_state, np.full(4, 0.4), rtol=1e-12)
