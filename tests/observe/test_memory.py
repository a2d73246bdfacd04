"""The account of a step is what is alive at every moment of it; the ledger and the forecast read it right."""

import functools
import gc
import html
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import ArgumentError, OptimizerError
from jaxpp.lowering.builder import CALLER, Name
from jaxpp.observe.memory.forecast import parse_bytes
from jaxpp.observe.memory.ledger import Ledger, homes_of, live_bytes, sample_step
from jaxpp.observe.memory.liveness import MEMORY_KINDS, step_liveness
from jaxpp.runtime.edges import put, to_host
from jaxpp.stages.program import Ref, Role
from tests.models import gpt_case, mlp_case

RUNS = {
    "mlp 1f1b": (mlp_case, {}, 4, 4, {"schedule": "1f1b"}),
    "mlp 1f1b, uneven": (mlp_case, {}, 3, 4, {"schedule": "1f1b"}),
    "gpt bf16 zb-h1": (gpt_case, {"compute": "bfloat16"}, 2, 3, {"schedule": "zb-h1"}),
    "gpt zb-v recompute": (gpt_case, {}, 4, 4, {"schedule": "zb-v", "remat": "recompute"}),
    "mlp interleaved": (mlp_case, {}, 4, 2, {"schedule": "interleaved"}),
    "gpt gpipe offload": (gpt_case, {}, 4, 5, {"schedule": "gpipe", "remat": "offload"}),
    "mlp gpipe": (mlp_case, {}, 2, 6, {"schedule": "gpipe"}),
}


@functools.cache
def ready(name):
    """A case, its pipeline and the first state."""
    make, options, stages, microbatches, settings = RUNS[name]
    case = make(**options)
    options = {"num_stages": stages, "num_microbatches": microbatches, "has_aux": True}
    pipe = jaxpp.Pipeline(case.loss_fn, optax.adam(1e-3), **options, **settings)
    return case, pipe, pipe.init(case.params, case.batch)


@pytest.mark.parametrize("name", ["mlp 1f1b", *(pytest.param(name, marks=pytest.mark.long) for name in list(RUNS)[1:5])])
def test_at_every_moment_the_account_equals_the_unique_live_buffers(name):
    case, pipe, state = ready(name)
    batch, engine = jax.tree.map(np.asarray, case.batch), pipe.engine
    lowered = engine.lower("update", batch, case.key)
    liveness = step_liveness(engine, lowered, homes_of(lowered, batch, case.key))
    own = engine.copy(engine.leaves(state.held))
    own = engine.run("update", own, batch, case.key).state
    jax.block_until_ready(own)
    gc.collect()
    before = {device: live_bytes(device) - liveness.levels[device][0].sum() for device in liveness.devices}
    moment = 0

    def look(instruction, slots):
        nonlocal moment
        moment += 1
        for device in liveness.devices:
            assert live_bytes(device) - before[device] == liveness.levels[device][moment].sum(), (instruction.label, device)

    engine.run("update", own, batch, case.key, observer=look)
    assert moment == len(liveness.lines)


def test_what_waits_in_host_memory_is_not_on_the_device():
    device = jax.devices()[5]
    here, before = put(np.ones(100, "f"), device), live_bytes(device)
    (there,) = to_host([here])
    assert there.devices() == {device}
    assert live_bytes(device) == before


@pytest.mark.parametrize(
    "name", ["mlp 1f1b", "mlp gpipe", *(pytest.param(name, marks=pytest.mark.long) for name in list(RUNS)[1:6])]
)
def test_the_ledger_finds_what_the_account_says_by_kind_and_the_forecast_said_so_before(name, monkeypatch):
    case, pipe, state = ready(name)
    own = pipe.engine.copy(pipe.engine.leaves(state.held))
    ledger, _ = sample_step(pipe.engine, own, case.batch, case.key)
    devices = ledger.liveness.devices
    assert [(s.device, s.when) for s in ledger.samples if s.when in ("begins", "ends")] == [
        (device, when) for when in ("begins", "ends") for device in devices
    ]
    for sample in ledger.samples:
        assert sample.kinds == tuple(ledger.liveness.levels[sample.device][sample.moment]), sample
        assert sample.elsewhere >= sum(leaf.nbytes for leaf in jax.tree.leaves(state.held) if leaf.devices() == {sample.device})
    forecast = pipe.forecast(jax.eval_shape(lambda: case.params), case.batch, case.key)
    for device, sample in ledger.peaks.items():
        measured = sum(sample.kinds) + sample.temporaries
        assert forecast.peaks[device] == pytest.approx(measured, rel=0.05)
        assert sample.temporaries > 0
    assert str(devices[0]) in str(ledger)
    assert "temporaries" in str(ledger)
    for shown, rows in ((ledger, 3 * len(devices)), (forecast, len(pipe.stages))):
        assert shown._repr_html_().count("<tr>") == 1 + rows
        monkeypatch.setenv("COLUMNS", "80")
        assert max(map(len, str(shown).splitlines())) <= 80
        cells = {cell for line in str(shown).splitlines() for cell in line.split()}
        assert set(html.unescape(re.sub(r"<[^>]*>", " ", shown._repr_html_())).split()) <= cells


@pytest.mark.parametrize("remat", ["keep", "recompute"])
@pytest.mark.parametrize("m", [pytest.param(2, marks=pytest.mark.long), 4, pytest.param(7, marks=pytest.mark.long)])
@pytest.mark.long
def test_1f1b_holds_the_residuals_of_min_m_p_microbatches_on_stage_0_and_with_recompute_only_inputs(m, remat):
    case, p = mlp_case(batch_size=28), 4
    pipe = jaxpp.Pipeline(case.loss_fn, optax.sgd(1.0), num_stages=p, num_microbatches=m, has_aux=True, remat=remat)
    pipe.init(case.params, case.batch)
    engine = pipe.engine
    lowered = engine.lower("update", case.batch, None)
    liveness = step_liveness(engine, lowered)
    boundary = 28 // m * 16 * 4
    for stage, device in list(enumerate(liveness.devices))[remat == "recompute" :]:  # the first keeps parts of the batch then
        residuals = [life for life in liveness.lives if life.device == device and life.kind == "residuals"]
        held = [
            {life.name.microbatch for life in residuals if life.begins <= moment <= life.ends}
            for moment in range(len(liveness.lines) + 2)
        ]
        assert max(map(len, held)) == min(m, p - stage)
        most = liveness.levels[device][:, MEMORY_KINDS.index("residuals")].max()
        if remat == "recompute":
            assert {life.name.ref.role for life in residuals} <= {Role.ACTIVATION}
            assert most == min(m, p - stage) * boundary
        else:
            assert most > min(m, p - stage) * boundary


def test_a_batch_that_is_already_on_the_device_of_the_first_stage_is_not_counted_twice():
    case, pipe, _ = ready("mlp 1f1b")
    lowered = pipe.engine.lower("update", case.batch, None)
    here = {Name(CALLER, Ref(Role.BATCH, k)): jax.devices()[0] for k in range(2)}
    peaks = [step_liveness(pipe.engine, lowered, homes).levels[jax.devices()[0]].sum(axis=1).max() for homes in (None, here)]
    assert peaks[0] >= peaks[1]
    first = [step_liveness(pipe.engine, lowered, homes).levels[jax.devices()[0]][1].sum() for homes in (None, here)]
    assert first[0] - first[1] == case.batch["x"].nbytes


@pytest.mark.long
def test_a_forecast_needs_no_parameters_and_init_uses_what_it_compiled():
    case = mlp_case()
    pipe = jaxpp.Pipeline(case.loss_fn, optax.adam(1e-3), num_stages=2, num_microbatches=2, has_aux=True)
    shapes = jax.eval_shape(case.init, jax.random.key(0))
    forecast = pipe.forecast(shapes, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.batch))
    assert forecast.fits
    assert forecast.hbm is None
    assert not forecast.changes
    assert pipe.stages
    programs = len(pipe.engine.programs)
    state = pipe.init(case.init, jax.random.key(0), case.batch)
    owned = [sum(leaf.nbytes for leaf in jax.tree.leaves(state.params) if leaf.devices() == {d}) for d in jax.devices()[:2]]
    assert len(pipe.engine.programs) == programs, "births are compiled besides, and let go"
    pipe.step(state, case.batch)
    assert len(pipe.engine.programs) == programs
    assert [row.kinds[MEMORY_KINDS.index("parameters")] for row in forecast.stages] == owned


@pytest.mark.long
def test_what_does_not_fit_is_named_with_the_quickest_changes_that_would():
    case = mlp_case(batch_size=256)
    options = {"num_stages": 4, "num_microbatches": 4, "has_aux": True}
    pipe = jaxpp.Pipeline(case.loss_fn, optax.adam(1e-3), schedule="gpipe", **options)
    free = pipe.forecast(case.params, case.batch, case.key)
    worst = max(free.peaks.values())
    assert pipe.forecast(case.params, case.batch, case.key, hbm=worst).fits
    tight = pipe.forecast(case.params, case.batch, case.key, hbm=0.9 * worst)
    assert not tight.fits
    page = tight._repr_html_()
    assert all(html.escape(change.what) in page for change in tight.changes[:6])
    assert "it does not fit: cpu:" in page and 'schedule="naive"' not in page
    assert "it does not fit: cpu:" in str(tight)
    assert "most of that residuals" in str(tight)
    what = [change.what for change in tight.changes]
    assert {'schedule="naive"', 'remat="recompute"', 'num_microbatches=8, remat="recompute"'} <= set(what)
    assert all(change.peak <= 0.9 * worst for change in tight.changes)
    assert [c.slowdown for c in tight.changes] == sorted(c.slowdown for c in tight.changes)
    changed = jaxpp.Pipeline(case.loss_fn, optax.adam(1e-3), schedule="gpipe", remat="recompute", **options)
    promised = next(change.peak for change in tight.changes if change.what == 'remat="recompute"')
    assert max(changed.forecast(case.params, case.batch, case.key).peaks.values()) == pytest.approx(promised, rel=0.25)


def test_where_nothing_fits_the_forecast_says_so():
    pipe = jaxpp.Pipeline(lambda p, x: (jnp.tanh(x @ p["a"]) @ p["b"]).mean(), optax.sgd(0.1), num_stages=2, num_microbatches=2)
    params = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}
    assert "nothing that was looked at fits" in str(pipe.forecast(params, jnp.ones((8, 8)), hbm="100B"))


@pytest.mark.long
def test_a_forecast_for_other_shapes_leaves_the_pipeline_as_it_is():
    pipe = jaxpp.Pipeline(lambda p, x: (jnp.tanh(x @ p["a"]) @ p["b"]).mean(), optax.sgd(0.1), num_stages=2, num_microbatches=2)

    def peak(width, rows):
        params = {name: jax.ShapeDtypeStruct((width, width), jnp.float32) for name in "ab"}
        return max(pipe.forecast(params, jax.ShapeDtypeStruct((rows, width), jnp.float32)).peaks.values())

    state = pipe.init({"a": jnp.eye(8), "b": jnp.eye(8)}, jnp.ones((4, 8)))
    assert peak(8, 4) < peak(8, 64) < peak(64, 64)
    _, metrics = pipe.step(state, jnp.ones((4, 8)))
    assert jnp.isfinite(metrics.loss)


@pytest.mark.parametrize("wrong", ["", "much", "-3GiB", "0", 0, 0.5, True, float("nan"), float("inf"), "3 apples"])
def test_a_size_that_is_none_is_refused(wrong):
    case, pipe, _ = ready("mlp gpipe")
    with pytest.raises(ArgumentError, match='Fix: pass for example "80GiB"'):
        pipe.forecast(case.params, case.batch, hbm=wrong)
    assert (parse_bytes("80GiB"), parse_bytes(".5 mb"), parse_bytes(1e16), parse_bytes(np.float32(8192))) == (
        80 * 2**30,
        500_000,
        10**16,
        8192,
    )


def test_where_a_backend_counts_for_itself_the_difference_is_explained():
    case, pipe, state = ready("mlp gpipe")
    own = pipe.engine.copy(pipe.engine.leaves(state.held))
    ledger, _ = sample_step(pipe.engine, own, case.batch, case.key)
    device, sample = next(iter(ledger.peaks.items()))
    mine = sample.total + sample.temporaries
    for used, words in ((mine + 1024, "1 KiB more: padding"), (mine - 2048, "2 KiB less: its peak")):
        assert words in str(Ledger(ledger.liveness, ledger.samples, {device: {"peak_bytes_in_use": used}}))


def test_what_the_caller_holds_is_not_counted_as_the_steps():
    case, pipe, state = ready("mlp gpipe")
    own = pipe.engine.copy(pipe.engine.leaves(state.held))
    ledger, _ = sample_step(pipe.engine, own, case.batch, case.key)
    begins = ledger.samples[0]
    assert begins.by_kind["batch"] < case.batch["x"].nbytes
    assert begins.elsewhere >= case.batch["x"].nbytes


@pytest.mark.long
def test_a_device_that_says_what_it_has_is_believed(monkeypatch):
    case, pipe, _ = ready("mlp gpipe")
    device = type(jax.devices()[0])
    monkeypatch.setattr(device, "memory_stats", lambda self: {"bytes_limit": 5000})
    forecast = pipe.forecast(case.params, case.batch)
    assert forecast.hbm == 5000
    assert not forecast.fits


@pytest.mark.long
def test_what_only_just_fits_is_found_by_compiling_it():
    shapes = {f"w{i}": jax.ShapeDtypeStruct((256, 256), jnp.float32) for i in range(8)}
    batch = jax.ShapeDtypeStruct((4, 512, 256), jnp.float32)

    def loss_fn(params, x):
        for i in range(8):
            x = jnp.tanh(x @ params[f"w{i}"])
        return (x**2).mean()

    options = {"num_stages": 4, "num_microbatches": 4, "devices": jax.devices()[:4]}
    real = jaxpp.Pipeline(loss_fn, optax.adam(1e-3), remat="recompute", **options).forecast(shapes, batch)
    room = 1.02 * max(real.peaks.values())
    tight = jaxpp.Pipeline(loss_fn, optax.adam(1e-3), **options).forecast(shapes, batch, hbm=room)
    assert [change.what for change in tight.changes] == ['remat="recompute"']
    assert tight.changes[0].peak == max(real.peaks.values())


def test_an_optimizer_that_is_refused_is_refused_again_and_the_old_state_goes_on():
    pipe = jaxpp.Pipeline(lambda p, x: (jnp.tanh(x @ p["a"]) @ p["b"]).var(), optax.lbfgs(), num_stages=2, num_microbatches=2)
    params = {"a": jnp.eye(4), "b": jnp.eye(4)}
    for ask in (pipe.init, pipe.init, pipe.forecast, pipe.forecast):
        with pytest.raises(OptimizerError, match="line search"):
            ask(params, jnp.ones((4, 4)))


@pytest.mark.long
def test_shapes_of_keys_and_wider_batches_make_no_other_plan():
    case = gpt_case()
    pipe = jaxpp.Pipeline(case.loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=2, has_aux=True)
    pipe.forecast(case.params, case.batch, jax.eval_shape(lambda: jax.random.key(0)))
    programs = len(pipe.engine.programs)
    state = pipe.init(case.params, np.asarray(case.batch, np.int64))
    pipe.step(state, case.batch, case.key)
    assert len(pipe.engine.programs) - programs <= 4, "making the optimizer's state"


@pytest.mark.parametrize("has_state", [False, True])
def test_a_forecast_takes_a_state_by_its_shapes(has_state):
    def with_state(params, count, batch):
        return loss_fn(params, batch), (count + 1, {})

    def loss_fn(params, batch):
        return jnp.mean(jnp.tanh(batch @ params["a"]) @ params["b"])

    params, batch = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4))}, jnp.ones((4, 4))
    options = {"has_state": True, "has_aux": True} if has_state else {}
    pipe = jaxpp.Pipeline(with_state if has_state else loss_fn, optax.adam(0.1), num_stages=2, **options)
    given = (params, jnp.zeros(())) if has_state else params
    state = pipe.init(given, batch)
    wanted = str(pipe.forecast(given, batch))
    pipe.step(state, batch)  # the state is consumed, and its shapes are still known
    assert str(pipe.forecast(state, batch)) == wanted
    assert str(pipe.programs(state, batch)) == str(pipe.programs(given, batch))


@pytest.mark.parametrize(("dtype", "said"), [("bfloat16", True), ("float32", False)])
def test_on_cpus_a_forecast_says_whose_temporaries_those_of_bfloat16_are(dtype, said):
    def loss_fn(params, x):
        for w in params:
            x = jnp.tanh(x @ w.astype(dtype))
        return (x**2).mean().astype("float32")

    shapes = [jax.ShapeDtypeStruct((8, 8), "float32")] * 2
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=2)
    text = " ".join(str(pipe.forecast(shapes, jax.ShapeDtypeStruct((8, 8), dtype))).split())
    assert ("temporaries are those of programs for CPUs, which widen bfloat16 to float32" in text) == said
