"""Residuals that wait in host memory: the same bits, the lines that move them, and the bytes that devices hold less."""

import functools
import gc
import json
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, SingleDeviceSharding

import jaxpp
from jaxpp import options as options_module
from jaxpp.errors import ArgumentError
from jaxpp.lowering.builder import Builder, LineList, MemoryCopy, Name
from jaxpp.lowering.passes.offload import without_needless
from jaxpp.observe.memory.ledger import sample_step
from jaxpp.runtime import not_public, send
from jaxpp.runtime.place import OneDevice
from jaxpp.schedule.action import Action, Kind
from jaxpp.stages.program import Ref, Role
from tests.end_to_end import test_model_state as normed
from tests.models import Case, gpt_case, mlp_case

CASES = {"mlp": (mlp_case, 6), "gpt": (functools.partial(gpt_case, batch_size=8), 4)}
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "v-min")
EACH = [(name, schedule) for name in CASES for schedule in SCHEDULES]
SLOW = [("gpt", schedule) for schedule in SCHEDULES if schedule not in ("1f1b", "zb-v")]
SHORT = [("mlp", "zb-h1")]
RUNS = [pytest.param(*run, marks=pytest.mark.slow if run in SLOW else pytest.mark.long if run not in SHORT else ()) for run in EACH]
HOSTED = "pinned_host"


def pipeline(case, remat, schedule="1f1b", stages=4, microbatches=6, **options):
    options = {"num_stages": stages, "num_microbatches": microbatches, "schedule": schedule, "has_aux": True} | options
    return jaxpp.Pipeline(case.loss_fn, optax.adam(1e-2), remat=remat, **options)


@functools.cache
def trained(name, remat, schedule):
    """A pipeline of a case, and its state and metrics after two steps."""
    make, microbatches = CASES[name]
    case = make()
    pipe = pipeline(case, remat, schedule, 4, microbatches)
    state = pipe.init(case.params, case.batch)
    for _ in range(2):
        state, metrics = pipe.step(state, case.batch, case.key)
    return case, pipe, state, metrics


def large_case():
    """A loss whose residuals are most of what a step holds: few small examples, each of which fills many positions."""

    def loss_fn(params, batch):
        x = batch[:, None] + params["positions"]
        for k in range(12):
            x = jnp.tanh(x @ params[f"w{k:02}"])
        return (x**2).mean(), {}

    keys = jax.random.split(jax.random.key(0), 12)
    params = {f"w{k:02}": jax.random.normal(key, (8, 8)) / 2 for k, key in enumerate(keys)} | {"positions": jnp.ones((128, 8))}
    return Case("large", loss_fn, None, params, jnp.ones((16, 8)), None, None)


def everything(state, metrics):
    return jax.device_get((state.params, state.opt_state, metrics.loss, metrics.aux, metrics.grad_norm))


def lines_of(pipe, case):
    return pipe.engine.lower("update", case.batch, case.key).bound.lines


def copies_of(pipe, case):
    return [line.label for line in lines_of(pipe, case) if line.copies]


def peak_of(pipe, case):
    return max(pipe.forecast(jax.eval_shape(lambda: case.params), case.batch, case.key).peaks.values())


def hosted_arrays():
    gc.collect()
    return [array for array in jax.live_arrays() if array.sharding.memory_kind == HOSTED]


@pytest.mark.parametrize(("name", "schedule"), RUNS)
def test_a_step_has_the_same_bits_whether_residuals_wait_on_the_device_or_on_the_host(name, schedule):
    before = len(hosted_arrays())
    _, _, *kept = trained(name, "least", schedule)
    case, pipe, *moved = trained(name, "offload", schedule)
    chex.assert_trees_all_equal(everything(*kept), everything(*moved))
    assert copies_of(pipe, case)
    assert len(hosted_arrays()) == before, "a step leaves nothing in host memory"


@pytest.mark.parametrize(("name", "schedule"), [("mlp", "1f1b"), pytest.param("gpt", "zb-v", marks=pytest.mark.long)])
def test_a_step_equals_the_oracle(name, schedule):
    case, pipe, state, _ = trained(name, "offload", schedule)
    pipe.verify(state, case.batch, case.key)


@pytest.mark.parametrize(("name", "schedule"), RUNS)
def test_what_goes_out_comes_back_once_and_the_backward_reads_what_came_back(name, schedule):
    case, pipe, _, _ = trained(name, "offload", schedule)
    lines = lines_of(pipe, case)
    moved = {each.forward: each for each in pipe.engine.options.offloaded}
    number = {line.action: k for k, line in enumerate(lines) if line.program is not None and line.action is not None}
    out = {line.action: k for k, line in enumerate(lines) if line.call == MemoryCopy.TO_HOST}
    back = {line.action: k for k, line in enumerate(lines) if line.call == MemoryCopy.TO_DEVICE}
    assert out.keys() == back.keys()
    assert out.keys() <= moved.keys()
    assert len(copies_of(pipe, case)) == 2 * len(out)
    for forward, k in out.items():
        assert lines[k].label == f"offload {forward}"
        assert lines[back[forward]].label == f"fetch {forward}"
        assert number[forward] < k < back[forward]
        assert all(line.is_send and line.action == forward for line in lines[number[forward] + 1 : k]), "right after its sends"
        assert lines[k].outputs == lines[back[forward]].inputs
        ahead = moved[forward].ahead
        assert ahead not in number or not any(line.program for line in lines[back[forward] + 1 : number[ahead]])
        gone, fetched = set(lines[k].inputs), set(lines[back[forward]].outputs)
        assert gone.isdisjoint(name for line in lines[k + 1 :] for name in line.inputs), "nobody reads what is gone"
        readers = {line.action for line in lines if fetched.intersection(line.inputs)}
        assert readers
        assert all(action[::2] == forward[::2] and action.kind != Kind.F for action in readers)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("mlp", "zb-h1"),
        *(pytest.param(*run, marks=pytest.mark.long) for run in [("mlp", "gpipe"), ("gpt", "1f1b"), ("gpt", "zb-v")]),
    ],
)
def test_devices_hold_what_the_forecast_says_to_the_byte(name, schedule):
    case, pipe, state, _ = trained(name, "offload", schedule)
    batch = jax.tree.map(np.asarray, case.batch)
    key = None if case.key is None else jax.device_put(case.key, jax.devices()[7])
    ledger, _ = sample_step(pipe.engine, pipe.engine.copy(pipe.engine.leaves(state.held)), batch, key)
    forecast = pipe.forecast(jax.eval_shape(lambda: case.params), case.batch, case.key)
    for device, sample in ledger.peaks.items():
        assert sample.kinds == tuple(ledger.liveness.levels[device][sample.moment])
        assert sum(sample.kinds) + sample.temporaries == forecast.peaks[device]
    assert any(forecast.hosted.values())
    assert "in host memory, at most: residuals of" in str(forecast)


@pytest.mark.parametrize(("schedule", "ratio"), [("1f1b", 0.8), pytest.param("gpipe", 0.5, marks=pytest.mark.long)])
@pytest.mark.long
def test_where_residuals_are_most_of_the_memory_the_forecast_is_lower(schedule, ratio):
    case = large_case()
    least, offload = (pipeline(case, remat, schedule, microbatches=8) for remat in ("least", "offload"))
    kept, moved = (each.forecast(jax.eval_shape(lambda: case.params), case.batch) for each in (least, offload))
    assert moved.peaks[jax.devices()[0]] < ratio * kept.peaks[jax.devices()[0]]
    assert max(moved.peaks.values()) < max(kept.peaks.values())
    hosted = moved.hosted
    assert [size > 0 for size in hosted.values()] == [schedule == "gpipe" or stage < 1 for stage in range(4)]


def test_the_stages_before_the_last_three_of_1f1b_move_residuals_and_the_table_says_so():
    case = mlp_case()
    pipe = pipeline(case, "offload", microbatches=8)
    pipe.init(case.params, case.batch)
    assert {label.split()[1][0] for label in copies_of(pipe, case)} == {"0"}
    assert [stage.offloads for stage in pipe.stages] == [True, False, False, False]
    rows = str(pipe.stages).splitlines()[1:5]
    assert [", offloaded" in row for row in rows] == [True, False, False, False]


@pytest.mark.parametrize("except_last", [0, 2, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.long
def test_except_last_says_how_many_microbatches_stay(except_last):
    case = mlp_case(batch_size=24)
    kept = pipeline(case, "least", "gpipe")
    pipe = pipeline(case, jaxpp.Offload(except_last), "gpipe")
    moved = [label for label in copies_of(opened(pipe, case), case) if label.startswith("offload 0")]
    assert moved == [f"offload 0F{i}" for i in range(max(1, except_last), 6)]  # that of 0F0 would free nothing
    chex.assert_trees_all_equal(*(everything(*stepped(each, case)) for each in (kept, pipe)))


def opened(pipe, case):
    pipe.forecast(jax.eval_shape(lambda: case.params), case.batch, case.key)
    return pipe


def stepped(pipe, case):
    state = pipe.init(case.params, case.batch)
    return pipe.step(state, case.batch, case.key)


@pytest.mark.long
def test_each_stage_may_have_its_own_way():
    case = mlp_case(batch_size=12)
    ways = ["offload", "recompute", jaxpp.Offload(except_last=2), "least"]
    kept, pipe = (pipeline(case, remat, "gpipe") for remat in (["least", "recompute", "least", "least"], ways))
    chex.assert_trees_all_equal(*(everything(*stepped(each, case)) for each in (kept, pipe)))
    moved = [label.split()[1][0] for label in copies_of(pipe, case) if label.startswith("offload")]
    assert moved.count("0") > moved.count("2") > 0
    assert {"1", "3"}.isdisjoint(moved)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.long
def test_replicas_and_shards_move_their_own_parts(name):
    case = {"mlp": mlp_case, "gpt": gpt_case}[name](batch_size=16)
    rules = {"mlp": {"dense_[024]": "column", "dense_[135]": "row"}, "gpt": {"*/fc": "column", "*/proj": "row", "*/attn": "heads"}}
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("pipe", "data", "model"))
    given = {"stages": 2, "microbatches": 4, "mesh": mesh, "shardings": rules[name]}
    kept, pipe = (pipeline(case, remat, "gpipe", **given) for remat in ("least", "offload"))
    found = [stepped(each, case) for each in (kept, pipe)]
    chex.assert_trees_all_equal(*(everything(*each) for each in found))
    assert copies_of(pipe, case)
    state = found[1][0]
    ledger, _ = sample_step(pipe.engine, pipe.engine.copy(pipe.engine.leaves(state.held)), case.batch, case.key)
    assert any(line.copies for line in ledger.liveness.lines)
    for device, sample in ledger.peaks.items():
        assert sample.kinds == tuple(ledger.liveness.levels[device][sample.moment])


@pytest.mark.long
def test_value_and_grad_and_stages_by_hand_take_it_too():
    case = mlp_case()
    options = {"num_stages": 4, "num_microbatches": 5, "schedule": "gpipe", "has_aux": True}
    found = [jaxpp.value_and_grad(case.loss_fn, remat=way, **options)(case.params, case.batch) for way in ("least", "offload")]
    chex.assert_trees_all_equal(*jax.device_get(found))
    stages = [lambda p, x: jnp.tanh(x @ p), lambda p, x: x @ p]
    weights, batch = [jnp.ones((4, 4)), jnp.ones((4, 2))], (jnp.ones((6, 4)), jnp.zeros((6, 2)))
    losses = []
    for remat in ("least", jaxpp.Offload(0)):
        options = {"optimizer": optax.sgd(0.1), "num_microbatches": 6, "schedule": "gpipe", "remat": remat}
        pipe = jaxpp.Pipeline.from_stages(stages, loss=lambda y, t: jnp.mean((y - t) ** 2), **options)
        state = pipe.init(weights, batch)
        state, _ = pipe.step(state, batch)
        losses.append(float(pipe.step(state, batch)[1].loss))
        assert bool([line for line in pipe.engine.lower("update", batch, None).bound.lines if line.copies]) == (remat != "least")
    assert losses[0] == losses[1]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")  # batch normalisation mixes examples
def test_model_state_passes_on_beside_it(x64):
    pipes = [normed.pipeline(4, 5, "gpipe", remat=remat) for remat in ("least", "offload")]
    found = []
    for pipe in pipes:
        state = pipe.init(normed.init, jax.random.key(0), normed.BATCH)
        for _ in range(2):
            state, metrics = pipe.step(state, normed.BATCH)
        found.append(jax.device_get((state.params, state.model_state, metrics.loss)))
    chex.assert_trees_all_equal(*found)
    pipes[1].verify(state, normed.BATCH)


@pytest.mark.long
def test_debugging_nans_finds_nothing_in_what_was_away():
    case = mlp_case()
    pipe = pipeline(case, "offload", "gpipe")
    with jax.debug_nans(True):
        _, metrics = stepped(pipe, case)
    assert np.isfinite(float(metrics.loss))


@pytest.mark.long
def test_what_another_stage_on_the_device_still_reads_does_not_move():
    case = mlp_case()
    kept, pipe = (pipeline(case, remat, "gpipe", devices=jax.devices()[:1]) for remat in ("least", "offload"))
    chex.assert_trees_all_equal(*(everything(*stepped(each, case)) for each in (kept, pipe)))
    lines = lines_of(pipe, case)
    moved = [name for line in lines if line.call == MemoryCopy.TO_HOST for name in line.inputs]
    assert moved
    assert len(moved) == len(set(moved)), "a value that two stages share moves for neither"
    shared = [name for line in lines for name in line.inputs if name in moved and line.call != MemoryCopy.TO_HOST]
    last = {name: k for k, line in enumerate(lines) for name in line.inputs}
    assert shared
    assert all(lines[last[name]].call == MemoryCopy.TO_HOST for name in moved)


def test_a_value_that_is_read_later_under_its_own_name_stays():
    builder = Builder()
    own, read = (Name(0, Ref(Role.RESIDUAL, k), 0) for k in (0, 1))
    out, back = ([Name(0, Ref(Role.FETCHED, k, waits=waits), 0) for k in (0, 1)] for waits in (True, False))
    action = Action(0, Kind.F, 0)
    builder.call("offload 0F0", MemoryCopy.TO_HOST, 0, [own, read], out, action)
    builder.send("to another", read, Name(1, Ref(Role.ACTIVATION), 0))
    builder.call("fetch 0F0", MemoryCopy.TO_DEVICE, 0, out, back, action)
    builder.send("backward", back[1], Name(1, Ref(Role.ACTIVATION, 1), 0))
    lines = without_needless(builder.finish([own, read], [])).lines
    assert [(line.inputs, line.outputs) for line in lines if line.copies] == [((own,), (out[0],)), ((out[0],), (back[0],))]
    assert lines[-1].inputs == (read,)
    alone = LineList(builder.lines[:1] + builder.lines[2:3], {}, (own, read), ())
    assert without_needless(alone) is alone


@pytest.mark.parametrize("route", ["direct", "public", "shards"])
def test_copies_share_nothing_with_their_originals_and_come_back_as_they_were(route, monkeypatch):
    if route != "direct":
        monkeypatch.setattr(send, "copies_memory", lambda home, there: False)
    if route == "shards":
        monkeypatch.setattr(send, "is_whole_here", lambda home: False)
    homes = [SingleDeviceSharding(jax.devices()[3])] * 2
    values = jax.device_put([np.arange(300.0, dtype="f"), np.ones((), "bool")], homes)
    there = send.memory_copies(homes, to_host=True)(*values)
    back = send.memory_copies(homes, to_host=False)(*there)
    assert [each.sharding for each in there] == [homes[0].with_memory_kind(HOSTED)] * 2
    assert [(each.sharding, each.aval, each.committed) for each in back] == [(v.sharding, v.aval, v.committed) for v in values]
    assert len({each.unsafe_buffer_pointer() for each in (*values, *there, *back)}) == 6
    for array in (*values, *there):
        array.delete()
    np.testing.assert_array_equal(back[0], np.arange(300.0))
    assert bool(back[1])


def test_the_direct_copy_is_used_where_jax_has_it_and_only_if_it_really_copies(monkeypatch):
    tried, home = not_public.copies_memory.__wrapped__, SingleDeviceSharding(jax.devices()[2])
    there = home.with_memory_kind(HOSTED)
    assert tried(home, there)
    stays = types.SimpleNamespace(
        DeviceList=not_public.xla_client.DeviceList,
        ArrayCopySemantics=not_public.xla_client.ArrayCopySemantics,
        batched_copy_array_to_devices_with_sharding=lambda arrays, *_: list(arrays),
    )
    for client in (stays, None, types.SimpleNamespace()):
        monkeypatch.setattr(not_public, "xla_client", client)
        assert not tried(home, there)


@pytest.mark.long
def test_a_forecast_that_does_not_fit_names_it_and_says_what_the_copies_need():
    case = large_case()
    pipe = pipeline(case, "least", "gpipe", microbatches=8)
    offload = peak_of(pipeline(case, "offload", "gpipe", microbatches=8), case)
    tight = pipe.forecast(case.params, case.batch, hbm=offload)
    change = next(change for change in tight.changes if change.what == 'remat="offload"')
    assert change.peak == pytest.approx(offload, rel=0.05)
    assert change.slowdown == 1
    assert change.moved > 0
    assert "that time is without the copies to the host and back, of" in " ".join(str(tight).split())
    moved = pipeline(case, "offload", "gpipe", microbatches=8).forecast(case.params, case.batch, hbm=0.9 * offload)
    assert 'remat="offload"' not in [change.what for change in moved.changes]


@pytest.mark.parametrize("value", [-1, 1.5, True, None, "2"])
def test_except_last_is_a_count(value):
    with pytest.raises(ArgumentError) as error:
        jaxpp.Offload(except_last=value)
    assert str(error.value).splitlines() == [
        f"Offload(except_last={value!r}): except_last says of how many microbatches the residuals stay on the device, "
        "a whole number of at least 0.",
        f"  Got: {value!r}.",
        "  Fix: pass except_last=1, or leave it out.",
    ]


def test_a_device_without_such_memory_is_refused(monkeypatch):
    class Bare:
        def __init__(self, device):
            self.device = device

        def __getattr__(self, name):
            return getattr(self.device, name)

        def addressable_memories(self):
            return [self.device.default_memory()]

    bare = [Bare(jax.devices()[0]), jax.devices()[1]]
    monkeypatch.setattr(options_module, "submeshes", lambda *_: tuple(map(OneDevice, bare)))
    with pytest.raises(ArgumentError) as error:
        jaxpp.Pipeline(lambda p, b: 0.0, optax.sgd(1.0), num_stages=2, remat=["least", "offload"])
    assert str(error.value).splitlines() == [
        'remat="offload": each device reaches pinned_host memory, in which arrays wait.',
        f"  Got: {bare[0]} with device.",
        '  Fix: pass remat="least" or remat="recompute", or devices that have it, as CPUs and GPUs do.',
    ]
    assert jaxpp.Pipeline(lambda p, b: 0.0, optax.sgd(1.0), num_stages=2)


@pytest.mark.long
def test_a_pipeline_that_only_runs_forward_moves_nothing():
    case, pipe, state, _ = trained("mlp", "offload", "gpipe")
    lowered = pipe.engine.lower("forward", case.batch, case.key)
    assert not any(line.copies for line in lowered.bound.lines)
    assert np.isfinite(float(pipe.evaluate(state, case.batch).loss))


@pytest.mark.long
def test_a_profile_has_a_span_for_each_copy_in_a_lane_of_its_own():
    case, pipe, state, _ = trained("mlp", "offload", "gpipe")
    profile = pipe.profile(state, case.batch, num_steps=1)
    labels = copies_of(pipe, case)
    for spans in (profile.spans, profile.isolated):
        assert [span.label for span in spans if span.copies] == labels
    ends = {span.label: span.end for span in profile.isolated}
    starts = {span.label: span.start for span in profile.isolated}
    for label in labels:
        forward = label.split()[1]
        if label.startswith("offload"):
            assert ends[forward] <= starts[label] <= ends[label] <= starts[f"fetch {forward}"]
        else:
            assert ends[label] <= starts[forward.replace("F", "B")]
    assert len(profile.actions) == 4 * 6 * 2, "copies are no actions"
    assert not {span.label for span in profile.transfers}.intersection(labels)
    assert f"{len(labels)} copies of residuals to host memory or back" in " ".join(str(profile).split())
    events = json.loads(jaxpp.observe.to_perfetto(profile))["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = [e for e in events if e.get("cat") == "copy"]
    assert sorted(e["name"] for e in found) == sorted(labels)
    assert {lanes[e["pid"], e["tid"]] for e in found} == {"copies to host memory and back"}
    again = trained("mlp", "least", "gpipe")[1].profile(trained("mlp", "least", "gpipe")[2], case.batch, num_steps=1)
    assert not again.copies
    assert "copies" not in str(again)
