"""``Pipeline(hbm=...)``: stages keep less only where a step would not fit, the cheapest way that fits; or it is refused."""

import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import ArgumentError, FitError
from jaxpp.observe.memory import fit
from jaxpp.observe.memory.forecast import again_of
from jaxpp.observe.memory.ledger import sample_step
from jaxpp.schedule import Kind, make, simulate
from tests.models import gpt_case, mlp_case
from tests.processes.test_process_front_door import PARAMS, loss_of_task, new_bank
from tests.processes.test_process_front_door import batch as made_batch

MLP = {"make": functools.partial(mlp_case, batch_size=64, width=64), "num_stages": 4, "num_microbatches": 8}
GPT = {"make": functools.partial(gpt_case, batch_size=12, width=32), "num_stages": 2, "num_microbatches": 6}
BOTH, SHARES = jaxpp.Offload(recompute=True), (0.75, 0.5, 0.25)
PAIR = {"make": functools.partial(mlp_case, batch_size=48, width=32), "num_stages": 2, "num_microbatches": 6}


@functools.cache
def case_of(make):
    return make()


def pipeline(run, schedule="gpipe", **options):
    """A pipeline of a run, and its case."""
    case = case_of(run["make"])
    sizes = {name: size for name, size in run.items() if name != "make"}
    return jaxpp.Pipeline(case.loss_fn, optax.adam(1e-3), has_aux=True, schedule=schedule, **sizes, **options), case


def peaks(run, schedule="gpipe", **options):
    """The peak of each device, by forecast."""
    pipe, case = pipeline(run, schedule, **options)
    return list(pipe.forecast(jax.eval_shape(lambda: case.params), case.batch, case.key).peaks.values())


@pytest.fixture
def costs(monkeypatch):
    """Says what a forward, a backward and a copy take; counts how often somebody measures."""
    calls = []

    def inject(forward, backward, copy):
        def times(cut, kinds, places, programs, where):
            calls.append(where)
            share = {Kind.F: forward, Kind.B: backward, Kind.I: [b / 2 for b in backward], Kind.W: [b / 2 for b in backward]}
            return {kind: share[kind] for kind in kinds}

        monkeypatch.setattr(fit, "action_times", times)
        monkeypatch.setattr(fit, "copy_times", lambda cut, places: (copy, copy))
        return calls

    return inject


def stepped(pipe, case):
    """The leaves of the state and the loss after two steps."""
    state = pipe.init(case.params, case.batch)
    for _ in range(2):
        state, metrics = pipe.step(state, case.batch, case.key)
    return [*jax.tree.leaves(jax.device_get(state.params)), jax.device_get(metrics.loss)]


def check_memory(pipe, case, room):
    """The forecast fits, and what is alive in a step is what it says."""
    state = pipe.init(case.params, case.batch)
    forecast = pipe.forecast(jax.eval_shape(lambda: case.params), case.batch, case.key)
    assert forecast.fits and forecast.hbm == room
    own = pipe.engine.copy(pipe.engine.leaves(state.held))
    ledger, _ = sample_step(pipe.engine, own, case.batch, case.key)
    for sample in ledger.samples:
        assert sample.kinds == tuple(ledger.liveness.levels[sample.device][sample.moment]), sample
    for device, sample in ledger.peaks.items():
        assert sum(sample.kinds) + sample.temporaries <= room, device


@pytest.mark.parametrize("run", [pytest.param(MLP, id="mlp"), pytest.param(GPT, id="gpt", marks=pytest.mark.slow)])
@pytest.mark.long
def test_ample_memory_changes_nothing_and_measures_nothing(run, costs, capsys):
    calls = costs([1.0] * run["num_stages"], [2.0] * run["num_stages"], [0.1] * run["num_stages"])
    (pipe, case), (plain, _) = pipeline(run, hbm=max(peaks(run))), pipeline(run)
    for each in (pipe, plain):
        each.init(case.params, case.batch)
    lines = [[str(line.label) for line in each.engine.lower("update", case.batch, case.key).bound.lines] for each in (pipe, plain)]
    assert lines[0] == lines[1]
    assert pipe.stages.remarks == () and not calls and capsys.readouterr().out == ""
    assert str(pipe.stages) == str(plain.stages)


@pytest.mark.parametrize("run", [pytest.param(MLP, id="mlp"), pytest.param(GPT, id="gpt", marks=pytest.mark.long)])
@pytest.mark.long
def test_only_the_stage_that_needs_it_offloads_and_the_bits_stay(run, costs, capsys):
    count = run["num_stages"]
    calls = costs([1.0] * count, [2.0] * count, [0.5] * count)
    least = peaks(run)
    full = least.index(max(least))
    assert least.count(max(least)) == 1
    pipe, case = pipeline(run, hbm=max(least) - 1)
    found, expected = stepped(pipe, case), stepped(pipeline(run)[0], case)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [each is not None for each in pipe.engine.options.offload] == [stage == full for stage in range(count)]
    assert calls == [f"Pipeline(hbm={words(max(least) - 1)})"]
    after = peaks(run, remat=["offload" if stage == full else "least" for stage in range(count)])
    remark = f"stage {full}: offload (peak {words(least[full])} -> {words(after[full])}, step +0%)"
    assert pipe.stages.remarks == (remark,)
    assert capsys.readouterr().out == f"jaxpp: hbm={words(max(least) - 1)}: {remark}\n"
    assert str(pipe.stages).rstrip().endswith(remark[-20:]) and f"  memory: {remark}" in str(pipe)
    assert f"stage {full}: offload" in pipe.stages._repr_html_()
    check_memory(pipe, case, max(least) - 1)


def words(size):
    return jaxpp.stages.stage_table.bytes_in_words(size)


@pytest.mark.parametrize(
    "run", [pytest.param(MLP, id="mlp", marks=pytest.mark.long), pytest.param(GPT, id="gpt", marks=pytest.mark.slow)]
)
def test_a_stage_recomputes_where_copies_take_longer_and_the_step_equals_the_oracle(run, costs, monkeypatch):
    monkeypatch.setattr(fit, "_SHARES", ())  # one of them would do here
    count = run["num_stages"]
    costs([1.0] * count, [2.0] * count, [100.0] * count)
    least = peaks(run)
    full, room = least.index(max(least)), max(least) - 1
    pipe, case = pipeline(run, hbm=room)
    state = pipe.init(case.params, case.batch)
    recomputes = [kept.recomputes for kept in pipe.engine.options.remat]
    assert recomputes == [stage == full for stage in range(count)] and not pipe.engine.options.offloaded
    # A forward more for each microbatch, on one stage: the clock says what that costs.
    (remark,) = pipe.stages.remarks
    base, slower = (
        simulate(pipe.schedule, forward=1, input_grad=[2 + again * more for again in recomputes], weight_grad=0).makespan
        for more in (0, 1)
    )
    assert remark.startswith(f"stage {full}: recompute (peak ") and remark.endswith(f", step {slower / base - 1:+.0%})")
    pipe.verify(state, case.batch, case.key)
    check_memory(pipe, case, room)


@pytest.mark.parametrize(
    "run", [pytest.param(MLP, id="mlp", marks=pytest.mark.long), pytest.param(GPT, id="gpt", marks=pytest.mark.slow)]
)
def test_a_stage_keeps_a_share_where_that_is_enough_and_repeats_no_more_than_it_must(run, costs):
    count = run["num_stages"]
    costs([1.0] * count, [2.0] * count, [100.0] * count)
    least = peaks(run)
    full, room = least.index(max(least)), max(least) - 1
    pipe, case = pipeline(run, hbm=room)
    state = pipe.init(case.params, case.batch)
    (remark,) = pipe.stages.remarks
    after = peaks(run, remat=[0.75 if stage == full else "least" for stage in range(count)])
    assert remark.startswith(f"stage {full}: remat=0.75 (peak {words(least[full])} -> {words(after[full])}, step ")
    plain, _ = pipeline(run)
    plain.init(case.params, case.batch)
    code, known = (each.engine.preparer.step(case.batch, case.key).cuts[0].stages[full] for each in (pipe, plain))
    assert 0 < code.repeated < code.products
    # The backward is longer by what it repeats, and by the bytes that it reads for that.
    again = [(code.costs["B"] - known.costs["B"]) / known.costs["F"] * (stage == full) for stage in range(count)]
    base, slower = (
        simulate(pipe.schedule, forward=1, input_grad=[2 + times * part for part in again], weight_grad=0).makespan
        for times in (0, 1)
    )
    assert remark.endswith(f", step {slower / base - 1:+.0%})")
    pipe.verify(state, case.batch, case.key)
    check_memory(pipe, case, room)


@pytest.mark.parametrize(("num_devices", "copy"), [(2, 0.1), (2, 2.5), pytest.param(2, 9.0, marks=pytest.mark.slow), (1, 2.5)])
@pytest.mark.long
def test_no_other_choice_that_fits_is_cheaper(num_devices, copy, costs):
    forward, backward, copies = [1.0, 3.0], [2.0, 4.0], [copy, copy / 2]
    costs(forward, backward, copies)
    order = make("gpipe", num_ranks=2, num_microbatches=6)

    def time(ways):
        again = [{"recompute": 1.0}.get(way, 0.0) if isinstance(way, str) else repeats(way)[k] for k, way in enumerate(ways)]
        grads = [b + f * part for b, f, part in zip(backward, forward, again, strict=True)]
        kept = [1 if way == "offload" else None for way in ways]
        return simulate(order, forward=forward, input_grad=grads, weight_grad=0, offload=kept, copy=copies).makespan

    known = every_choice(num_devices)
    for room in sorted({max(found) for found in known.values()})[:6:2]:
        pipe, case = pipeline(PAIR, devices=jax.devices()[:num_devices], hbm=room)
        pipe.abstract_state(case.params, case.batch)
        options = pipe.engine.options
        offload = options.offload or (None, None)
        chosen = tuple(
            getattr(kept, "share", "recompute" if kept.recomputes else "least" if except_last is None else "offload")
            for kept, except_last in zip(options.remat, offload, strict=True)
        )
        assert max(known[chosen]) <= room
        assert time(chosen) == min(time(ways) for ways, found in known.items() if max(found) <= room)


@functools.cache
def every_choice(num_devices):
    """The peaks of the devices, for all that two stages may do; on one device both keep the same share, if any.

    On two devices what each holds depends on its own stage alone.
    """
    devices = jax.devices()[:num_devices]
    if num_devices == 2:
        own = {way: peaks(PAIR, remat=way, devices=devices) for way in ("least", "offload", "recompute", *SHARES)}
        return {(a, b): (own[a][0], own[b][1]) for a, b in itertools.product(own, repeat=2)}
    ways = [*itertools.product(("least", "offload", "recompute"), repeat=2), *zip(SHARES, SHARES, strict=True)]
    return {each: peaks(PAIR, remat=list(each), devices=devices) for each in ways}


@functools.cache
def repeats(share):
    """What the backward of each stage runs again, in parts of its forward, where it keeps a share of the least."""
    engines = []
    for remat in (share, "least"):
        pipe, case = pipeline(PAIR, remat=remat)
        pipe.abstract_state(case.params, case.batch)
        engines.append(pipe.engine)
    return again_of(*engines, case.batch, case.key)


@pytest.mark.long
def test_inputs_wait_in_host_memory_where_neither_copies_nor_repeats_are_enough(costs):
    costs([1.0] * 2, [2.0] * 2, [0.5] * 2)
    device = jax.devices()[:1]
    room, again = (max(peaks(PAIR, remat=remat, devices=device)) for remat in (BOTH, "recompute"))
    assert room < again
    pipe, case = pipeline(PAIR, hbm=room, devices=device)
    state = pipe.init(case.params, case.batch)
    options = pipe.engine.options
    assert options.host is None and options.offload[1] == 1 and options.remat[1].recomputes
    assert any(remark.startswith("stage 1: offload and recompute (peak ") for remark in pipe.stages.remarks)
    pipe.verify(state, case.batch, case.key)
    check_memory(pipe, case, room)


@pytest.mark.long
def test_what_is_left_to_measure_is_measured_on_the_devices():
    least = peaks(PAIR)
    pipe, case = pipeline(PAIR, hbm=max(least) - 1)
    state = pipe.init(case.params, case.batch)
    assert pipe.stages.remarks
    pipe.verify(state, case.batch)
    check_memory(pipe, case, max(least) - 1)


@pytest.mark.long
def test_a_second_init_keeps_the_choice_and_says_nothing(costs, capsys):
    costs([1.0] * 2, [2.0] * 2, [0.5] * 2)
    room = max(peaks(PAIR)) - 1
    pipe, case = pipeline(PAIR, hbm=room)
    pipe.abstract_state(case.params, case.batch)
    engine, remarks = pipe.engine, pipe.stages.remarks
    assert remarks and capsys.readouterr().out
    pipe.init(case.params, case.batch)
    assert pipe.engine is engine and pipe.stages.remarks == remarks and capsys.readouterr().out == ""
    smaller = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((24, *leaf.shape[1:]), leaf.dtype), case.batch)
    assert pipe.forecast(jax.eval_shape(lambda: case.params), smaller).fits


@pytest.mark.long
def test_what_never_fits_is_refused_with_the_forecast_and_the_advice(costs):
    costs([1.0] * 2, [2.0] * 2, [0.5] * 2)
    least, *others = (peaks(PAIR, remat=remat) for remat in ("least", "offload", "recompute", BOTH))
    room = min(map(min, others)) - 1
    pipe, case = pipeline(PAIR, hbm=room)
    with pytest.raises(FitError) as error:
        pipe.init(case.params, case.batch)
    lines = str(error.value).splitlines()
    still = [words(min(each)) for each in zip(*others, strict=True)]
    needs = [f"cpu:{k} needs {words(least[k])} of {words(room)}" for k in range(2)]
    assert lines[:3] == [
        f"Pipeline(hbm={words(room)}): a step fits into the memory that each device has.",
        f"  Got: {needs[0]}, and still {still[0]} where its stages offload, recompute, or both",
        f"       {needs[1]}, and still {still[1]} where its stages offload, recompute, or both",
    ]
    for line, host in zip(lines[3:5], ("optimizer", "params"), strict=True):
        assert re.fullmatch(rf'       host="{host}" leaves at least [\d.]+ KiB on the device that holds most\.?', line), line
    assert re.fullmatch(
        r'  Fix: pass num_stages=4, or pass num_stages=8, schedule=jaxpp.schedule.make\("looped-bfs", 2, \d+, stages_per_rank=4\), '
        r'host="params", remat="recompute", '
        r"which leaves [\d.]+ KiB on the fullest device\.",
        lines[5],
    )
    assert lines[6] == "" and lines[7].split()[:2] == ["stage", "device"]
    assert any("it does not fit: cpu:0 needs" in line for line in lines)
    assert any(line.split()[:1] == ["num_stages=4"] for line in lines)


def test_parameters_that_alone_are_too_large_are_refused_before_anything_is_compiled(monkeypatch):
    pipe, case = pipeline(MLP, hbm="30KiB")
    monkeypatch.setattr(fit, "forecast", None)
    with pytest.raises(FitError) as error:
        pipe.init(case.params, case.batch)
    sizes = [words(stage.num_bytes) for stage in pipeline_stages(MLP)]
    lines = str(error.value).splitlines()
    assert lines[:4] == [
        "Pipeline(hbm=30 KiB): the parameters of each device fit into its memory.",
        f"  Got: cpu:0: parameters of {sizes[0]}",
        f"       cpu:1: parameters of {sizes[1]}",
        f"       cpu:2: parameters of {sizes[2]}",
    ]
    assert [line.partition(" leaves at least ")[0].strip() for line in lines[4:6]] == ['host="optimizer"', 'host="params"']
    assert lines[6] == (
        "  Fix: cut the model into more stages, many on each device or on more devices, or give each device more memory."
    )
    assert lines[-1] == "  temporaries are not known: nothing was compiled"


def test_a_forecast_of_steps_in_flow_says_what_they_copy_from_host_memory():
    pipe, case = pipeline(PAIR, "1f1b", host="optimizer", delay=1)
    forecast = pipe.forecast(jax.eval_shape(lambda: case.params), case.batch, case.key)
    shapes = jax.tree.leaves(jax.eval_shape(lambda: case.params))
    moments = 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in shapes)
    copied = forecast.liveness.visiting.values()
    assert sum(each.brought for each in copied) == sum(each.taken for each in copied) == moments
    assert "a step copies" in str(forecast)


def pipeline_stages(run):
    pipe, case = pipeline(run)
    pipe.abstract_state(case.params, case.batch)
    return pipe.stages


@pytest.mark.parametrize("remat", [pytest.param("offload", marks=pytest.mark.long), ["least", "recompute"]])
@pytest.mark.long
def test_with_remat_of_the_users_own_only_what_waits_in_host_memory_is_chosen(remat, capsys):
    found, hosted = peaks(PAIR, remat=remat), max(peaks(PAIR, remat=remat, host="optimizer"))
    pipe, case = pipeline(PAIR, remat=remat, hbm=max(found))
    pipe.init(case.params, case.batch)
    assert pipe.stages.remarks == () and pipe.engine.options.host is None
    pipe, _ = pipeline(PAIR, remat=remat, hbm=hosted)
    pipe.init(case.params, case.batch)
    (remark,) = pipe.stages.remarks
    assert remark.startswith(f'host="optimizer" (peak {words(hosted)}, a step copies ')
    assert remark.endswith(f" out), since the step needs {words(max(found))}") and remark in capsys.readouterr().out
    assert pipe.engine.options.remat == pipeline(PAIR, remat=remat)[0]._options.remat
    pipe, _ = pipeline(PAIR, remat=remat, hbm=hosted - 1)
    with pytest.raises(FitError) as error:
        pipe.init(case.params, case.batch)
    device = f"cpu:{found.index(max(found))}"
    assert f"{device} needs {words(max(found))} of {words(hosted - 1)}\n" in str(error.value)
    assert f'host="optimizer" leaves at least {words(hosted)} on the device that holds most\n' in str(error.value)
    assert "leave remat out, so that jaxpp chooses what each stage keeps.\n" in str(error.value)


@pytest.mark.long
def test_replicas_choose_too(costs):
    costs([1.0] * 2, [2.0] * 2, [0.5] * 2)
    room = max(peaks(PAIR, data_parallel=2)) - 1
    pipe, case = pipeline(PAIR, data_parallel=2, hbm=room)
    state = pipe.init(case.params, case.batch)
    assert pipe.stages.remarks and pipe.forecast(case.params, case.batch).fits
    pipe.verify(state, case.batch)


@pytest.mark.long
def test_a_bank_counts_the_sets_that_wait_and_chooses_too(costs):
    costs([1.0] * 2, [2.0] * 2, [0.5] * 2)

    def opened(**options):
        sizes = {"num_stages": 2, "num_microbatches": 6, "schedule": "gpipe", "cuts": ["second"]}
        return jaxpp.Pipeline(loss_of_task, optax.adam(1e-3), bank=new_bank("cat", "horse"), **sizes, **options)

    shapes, batch = jax.eval_shape(lambda: PARAMS), made_batch(0, 48)
    room = max(opened().forecast(shapes, batch).peaks.values()) - 1
    pipe, plain = opened(hbm=room), opened()
    states = [each.init(PARAMS, batch) for each in (pipe, plain)]
    assert "offload" in pipe.stages.remarks[0] and pipe.forecast(shapes, batch).fits
    for task in ("cat", "horse"):
        states = [each.step(state, batch, task=task)[0] for each, state in zip((pipe, plain), states, strict=True)]
    for found, expected in zip(*(jax.tree.leaves(jax.device_get(state.params)) for state in states), strict=True):
        assert np.array_equal(found, expected)


def by_hand(stages=3, **options):
    """A pipeline from stage functions, its parameters and a batch."""

    def stage(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return x

    options = {"optimizer": optax.adam(1e-3), "num_microbatches": 6, "schedule": "gpipe"} | options
    pipe = jaxpp.Pipeline.from_stages([stage] * stages, loss=lambda y, t: jnp.mean((y - t) ** 2), **options)
    return pipe, [[jnp.eye(32)] * 6] * stages, (np.ones((96, 32), np.float32), np.zeros((96, 32), np.float32))


@pytest.mark.long
def test_stages_by_hand_choose_too(costs):
    costs([1.0] * 3, [2.0] * 3, [0.5] * 3)
    plain, params, batch = by_hand()
    least = max(plain.forecast(jax.eval_shape(lambda: params), batch).peaks.values())
    pipe, *_ = by_hand(hbm=int(0.9 * least))
    state = pipe.init(params, batch)
    assert "offload" in pipe.stages.remarks[0]
    pipe.verify(state, batch)
    assert "6 stage functions" in str(plain.forecast(jax.eval_shape(lambda: params), batch, hbm=int(0.6 * least)))
    with pytest.raises(FitError, match=r'12 stage functions, schedule=jaxpp.schedule.make\("looped-bfs", 3, '):
        by_hand(hbm=int(0.58 * least))[0].init(params, batch)
    alone, *_ = by_hand(stages=1)
    assert "2 stage functions" in str(alone.forecast(jax.eval_shape(lambda: params[:1]), batch, hbm="190KiB"))


@pytest.mark.long
def test_more_stages_than_there_are_cuts_for_are_proposed_without_the_cuts(costs):
    costs([1.0] * 2, [2.0] * 2, [0.5] * 2)
    cuts = {"cuts": ["dense_4"]}
    room = min(*peaks(PAIR, remat="offload", **cuts), *peaks(PAIR, remat="recompute", **cuts)) - 1
    pipe, case = pipeline(PAIR, hbm=room, **cuts)
    with pytest.raises(FitError, match=r"Fix: pass num_stages=4, cuts=None, or pass num_stages=8, cuts=None in "):
        pipe.init(case.params, case.batch)


@pytest.mark.long
def test_with_shards_of_parameters_only_what_waits_in_host_memory_is_chosen():
    mesh = jax.make_mesh((2, 2), ("pipe", "model"))
    options = {"mesh": mesh, "shardings": {"*kernel": "column"}}
    found, hosted = max(peaks(PAIR, **options)), max(peaks(PAIR, host="optimizer", **options))
    pipe, case = pipeline(PAIR, **options, hbm=found)
    pipe.init(case.params, case.batch)
    assert pipe.stages.remarks == ()
    pipe, _ = pipeline(PAIR, **options, hbm=hosted)
    pipe.init(case.params, case.batch)
    assert pipe.engine.options.host == "optimizer"
    pipe, _ = pipeline(PAIR, **options, hbm=hosted - 1)
    with pytest.raises(FitError) as error:
        pipe.init(case.params, case.batch)
    assert "leave remat out" not in str(error.value)


def stack_loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def stacked(num_layers=8, **options):
    """A pipeline in which one device has many stages, its parameters and a batch."""
    order = make("looped-bfs", num_ranks=1, num_microbatches=2, stages_per_rank=num_layers)
    options = {"schedule": order, "devices": jax.devices()[:1], "remat": "recompute", "optimizer": optax.adam(1e-2)} | options
    pipe = jaxpp.Pipeline(stack_loss, num_stages=num_layers, num_microbatches=2, **options)
    return pipe, [jnp.eye(32)] * num_layers, jnp.ones((4, 32))


def test_a_model_larger_than_its_device_waits_in_host_memory_and_trains_with_the_same_bits(capsys):
    plain, params, batch = stacked()
    size = sum(leaf.nbytes for leaf in params)
    pipe, *_ = stacked(hbm=size - 1)
    pipe.init(params, batch)
    said = capsys.readouterr().out
    assert pipe.engine.options.host == "params" and f"since the parameters alone are {words(size)}" in said
    assert f"a step copies {words(4 * size - size // 8)} in and {words(3 * size)} out" in said
    found, expected = (each.step(each.init(params, batch), batch)[0].params for each in (pipe, plain))
    chex.assert_trees_all_equal(jax.device_get(found), jax.device_get(expected))
    assert pipe.forecast(params, batch).fits


def test_a_forecast_that_does_not_fit_names_what_more_in_host_memory_leaves():
    pipe, params, batch = stacked()
    room = max(stacked(host="params")[0].forecast(params, batch).peaks.values())
    forecast = pipe.forecast(params, batch, hbm=room + 4096)
    change = next(each for each in forecast.changes if each.what.startswith('host="params"'))
    assert change.peak <= room + 4096
    size = sum(leaf.nbytes for leaf in params)
    assert change.visiting.taken >= 3 * size > change.visiting.brought / 2
    words_of_it = " ".join(str(forecast).split())
    assert f'host="params": leaves {words(change.peak)} on the device that then holds most' in words_of_it


@pytest.mark.parametrize("wrong", ["much", "-1GiB", 0, -5, True, float("nan"), [24]])
def test_an_hbm_that_is_no_size_is_refused(wrong):
    with pytest.raises(ArgumentError, match="a size is a number of bytes, at least 1, or a number with a unit") as error:
        pipeline(PAIR, hbm=wrong)
    assert str(error.value).startswith(f"hbm={wrong!r}: ")
    assert 'Fix: pass for example "80GiB".' in str(error.value)


@pytest.mark.long
def test_another_pipeline_of_the_same_state_finds_it_where_the_first_has_put_it():
    labels = ["first"] * 4 + ["second"] * 4
    optimizer = optax.multi_transform({"first": optax.adam(1e-2), "second": optax.sgd(1e-2)}, labels)
    pipe, params, batch = stacked(hbm=62_000, trains="[0-3]", optimizer=optimizer)
    state = pipe.init(params, batch)
    other = pipe.other(lambda params, x: 2 * stack_loss(params, x), trains="[4-7]")
    other.abstract_state(state, batch)
    assert pipe.engine.options.host == other.engine.options.host == "params"
    state, _ = other.step(pipe.step(state, batch)[0], batch)
    pipe.step(state, batch)
