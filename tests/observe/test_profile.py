"""A profile tells what really ran: it obeys the schedule, idle time is told apart without remainder, nothing is changed."""

import bisect
import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import ArgumentError
from jaxpp.observe.memory.ledger import Ledger
from jaxpp.observe.memory.liveness import MEMORY_KINDS, Liveness
from jaxpp.observe.profile.profile import Causes, Profile
from jaxpp.observe.profile.spans import Span, covered
from jaxpp.schedule import Kind, dependencies, make, simulate
from jaxpp.schedule.residual_counts import lifetimes, peak
from tests.models import gpt_case, mlp_case

RESOLUTION = 1e-5  # seconds: the stamps of different threads
NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
SHORT = ("1f1b", "zb-h1")


@pytest.fixture(scope="module")
def run():
    """A function of the name of a schedule: a pipeline, its state, that state before it was profiled, and the profile."""
    case = mlp_case(batch_size=16)

    @functools.cache
    def run(name):
        options = {"num_stages": 4, "num_microbatches": 4, "schedule": name, "has_aux": True}
        pipe = jaxpp.Pipeline(case.loss_fn, optax.adam(1e-3), **options)
        state = pipe.init(case.init, jax.random.key(0), case.batch)
        before = jax.tree.map(np.asarray, state)
        return pipe, state, before, pipe.profile(state, case.batch, num_steps=2)

    return run


each_schedule = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in SHORT)) for name in NAMES]
)


@pytest.mark.parametrize("clock", ["trace", "isolated"])
@each_schedule
def test_the_timeline_obeys_the_schedule(run, name, clock):
    pipe, _, _, profile = run(name)
    assert not profile.missing, "every instruction of the plan has its run in the trace"
    assert profile.clock == "isolated", "the default on CPU"
    profile, schedule = dataclasses.replace(profile, clock=clock), pipe.schedule
    ran = {action for action in schedule.order if (action.stage, action.kind) != (0, Kind.I)}
    assert set(profile.actions) == ran
    present = frozenset(schedule.order)
    for action, span in profile.actions.items():
        assert 0 <= span.begun <= span.start < span.end
        assert span.begun <= span.handed
        assert span.rank == schedule.stage_to_rank[action.stage]
        for need in dependencies(action, schedule.num_stages, present):
            if need in ran:
                assert profile.actions[need].end <= span.start + RESOLUTION, (need, action)
    for span in profile.transfers:
        assert profile.actions[span.action].end <= span.start + RESOLUTION
        assert span.start <= span.end
    for row in schedule.rows if clock == "isolated" or not profile.beside else ():
        spans = [profile.actions[action] for action in row if action in ran]
        assert all(a.end <= b.start for a, b in itertools.pairwise(spans))


@each_schedule
def test_busy_and_idle_time_are_the_step_and_every_run_is_counted_once(run, name):
    profile = dataclasses.replace(run(name)[3], clock="trace")
    taken = sum(span.end - span.start for span in profile.actions.values())
    assert sum(profile.busy) == pytest.approx(taken, rel=0.05) or profile.beside
    for busy, idle in zip(profile.busy, profile.idle, strict=True):
        assert busy + idle == pytest.approx(profile.seconds)
    alone = dataclasses.replace(profile, clock="isolated")
    of_program = {}
    for span in alone.actions.values():
        key = span.action.stage, span.action.kind, span.action.microbatch == 0
        of_program.setdefault(key, set()).add(round(span.end - span.start, 12))
    later = [taken for (_, _, first), taken in of_program.items() if not first]
    assert all(len(taken) <= 2 for taken in later), "one program takes one time, whichever microbatch it is of"


@each_schedule
def test_the_causes_sum_to_the_idle_time_and_none_is_negative(run, name):
    profile = run(name)[3]
    for idle, busy, causes in zip(profile.idle, profile.busy, profile.causes, strict=True):
        assert sum(causes) == pytest.approx(idle, rel=1e-6)
        assert min(causes) >= -1e-9
        assert busy + idle == pytest.approx(profile.seconds)
    assert 0 < profile.bubble_fraction < 1
    assert len(profile.step_seconds) == 2
    assert max(profile.step_seconds) >= max(span.end for span in profile.spans) * 0.95


def test_profiling_leaves_the_state_as_it_was_and_the_pipeline_goes_on(run):
    pipe, state, before, _ = run("1f1b")
    jax.tree.map(np.testing.assert_array_equal, state, before)
    case = mlp_case(batch_size=16)
    _, metrics = pipe.step(state, case.batch, donate=False)
    assert jnp.isfinite(metrics.loss)


@each_schedule
def test_the_number_of_transfers_is_that_of_the_boundaries_between_ranks(run, name):
    pipe, _, _, profile = run(name)
    owner = pipe.schedule.stage_to_rank
    crossings = sum(a != b for a, b in itertools.pairwise(owner))
    assert len(profile.transfers) == 2 * crossings * 4


def span(label, action, rank, start, end, begun=None, sends=False):
    begun = start if begun is None else begun
    return Span(label, action, rank, sends, start, end, begun, begun)


def made_up(schedule, spans):
    """A profile of spans that were never measured."""
    length = max(span.end for span in spans)
    return Profile(schedule, ("a", "b"), spans, spans, "trace", (length,), 1.0, Ledger(Liveness((), (), ()), (), {}))


def test_causes_of_a_made_up_run_are_those_it_was_made_with():
    schedule = make("naive", num_ranks=2, num_microbatches=1)
    f0, b0, f1, b1 = (a for row in schedule.rows for a in row)
    spans = (
        span("begin", None, 0, 0.0, 1.0),
        span("0F0", f0, 0, 1.0, 2.0),
        span("send", f0, 1, 2.0, 2.5, sends=True),
        span("1F0", f1, 1, 2.5, 5.5),
        span("1B0", b1, 1, 5.5, 7.5),
        span("send", b1, 0, 7.5, 8.0, sends=True),
        span("0B0", b0, 0, 9.0, 11.0, begun=9.0),
        span("update", None, 0, 11.0, 14.0),
    )
    profile = made_up(schedule, spans)
    assert profile.busy == (3.0, 5.0)
    assert profile.simulated_seconds == 9.0
    # equal stages (F 2, B 2) take 8 of which each idles 4; as they were also 8; transfers make it 9, the late 0B0 11, the update 14
    assert profile.causes == (Causes(4.0, 1.0, 1.0, 2.0, 3.0, 0.0), Causes(3.0, 0.0, 1.0, 2.0, 3.0, 0.0))
    assert profile.latencies == (10.0,)
    assert "waiting for transfers 7.1%" in str(profile)


def test_the_optimizer_is_what_it_takes_and_a_gap_among_forwards_is_not():
    """An action that began late on a busy machine was called the optimizer's time, whose update took a twentieth of it."""
    schedule = make("naive", num_ranks=2, num_microbatches=1)
    f0, b0, f1, b1 = (a for row in schedule.rows for a in row)
    spans = (
        span("begin stage 0", None, 0, 0.0, 0.5),
        span("0F0", f0, 0, 1.0, 2.0, begun=0.0),
        span("begin stage 1", None, 1, 8.0, 9.0),  # late, for no reason that the clock knows
        span("1F0", f1, 1, 9.0, 10.0, begun=0.0),
        span("1B0", b1, 1, 10.0, 12.0, begun=0.0),
        span("update stage 1", None, 1, 12.0, 13.0),  # beside an action
        span("0B0", b0, 0, 12.0, 14.0, begun=0.0),
        span("update stage 0", None, 0, 14.5, 14.75),
        span("send 1 scalars to stage 1", None, 1, 14.75, 15.0, sends=True),
        span("update stage 1, part 2", None, 1, 15.0, 15.5),
    )
    profile = made_up(schedule, spans)
    assert profile.causes == (Causes(3.0, 0.0, 0.0, 0.0, 1.0, 8.5),) * 2
    assert profile.causes_table()[0][-2:] == ["optimizer", "other"]


def test_a_step_that_the_tracer_slowed_says_so_and_one_that_it_did_not_says_nothing():
    """Noise had made a traced step 0.68 of others, which told nobody anything; a step slowed four times went without a word."""
    schedule = make("naive", num_ranks=2, num_microbatches=1)
    spans = tuple(span(str(a), a, rank, float(start), float(end)) for rank, a, start, end in schedule.drawing().bars)
    quick, slow = (dataclasses.replace(made_up(schedule, spans), trace_cost=cost) for cost in (0.68, 3.78))
    assert "traced: 6,000 ms" in quick.heading and "times as long" not in str(quick) and "0.68" not in str(quick)
    assert "traced (3.8 times as long as other steps): 6,000 ms" in slow.heading
    alone = dataclasses.replace(slow, clock="isolated")
    for shown in (slow, alone):
        assert "the step that was traced took 3.8 times as long as others: JAX's profiler notes each operation" in str(shown)
    assert "traced (3.8 times as long as other steps): 6,000 ms" in str(alone)
    assert "on their way" not in str(quick) + str(slow)


@pytest.mark.long
def test_where_ranks_have_threads_the_host_time_of_the_longest_is_said():
    case = mlp_case(batch_size=8)
    options = {"num_stages": 2, "num_microbatches": 2, "has_aux": True, "devices": jax.devices()[:2]}
    for threads, count in (("one", 0), ("ranks", 2)):
        pipe = jaxpp.Pipeline(case.loss_fn, optax.sgd(0.1), threads=threads, **options)
        profile = pipe.profile(pipe.init(case.params, case.batch), case.batch, num_steps=1)
        assert len(profile.lanes) == count
        assert sum(profile.lanes) == pytest.approx(sum(s.handed - s.begun for s in profile.spans) if count else 0)
        assert ("other steps have a thread for each rank" in str(profile)) == (count > 0)


def test_a_transfer_longer_than_what_could_hide_it_is_warned_of():
    schedule = make("naive", num_ranks=2, num_microbatches=1)
    f0, b0, f1, b1 = (a for row in schedule.rows for a in row)
    spans = (
        span("0F0", f0, 0, 0.0, 1.0),
        span("send", f0, 1, 1.0, 4.0, sends=True),
        span("1F0", f1, 1, 4.0, 5.0),
        span("1B0", b1, 1, 5.0, 6.0),
        span("send", b1, 0, 6.0, 9.0, sends=True),
        span("0B0", b0, 0, 9.0, 10.0),
    )
    text = str(made_up(schedule, spans))
    assert "warning: a transfer over boundary 0 (between stages 0 and 1) takes 3,000 ms, longer than the forward" in text
    assert text.count("waiting for transfers costs 6,000 ms a rank") == 1
    assert "warning" not in str(made_up(schedule, spans[:1] + spans[2:4] + spans[5:]))


def test_waiting_for_copies_of_residuals_is_waiting_for_transfers():
    schedule, copy = make("gpipe", num_ranks=1, num_microbatches=4), 3.0
    found = simulate(schedule, forward=1, input_grad=1, weight_grad=1, offload=1, copy=copy)
    assert found.copies
    assert found.makespan > simulate(schedule, forward=1, input_grad=1, weight_grad=1).makespan
    spans = [span(str(bar.action), bar.action, 0, float(bar.start), float(bar.end), begun=0.0) for bar in found.bars]
    for each in found.copies:
        forward = each.offloaded.forward
        for what, (start, end) in (("offload", each.out), ("fetch", each.back)):
            spans.append(span(f"{what} {forward}", forward, 0, start, end)._replace(copies=True))
    profile = dataclasses.replace(made_up(schedule, spans), offloaded=tuple(each.offloaded for each in found.copies))
    assert profile.copy_seconds == (copy,)
    assert profile.simulated_seconds == found.makespan == profile.seconds
    waited = float(found.makespan) - 12
    assert profile.causes == (Causes(0.0, 0.0, waited, 0.0, 0.0, 0.0),)
    text = " ".join(str(profile).split())
    assert "warning: to copy the residuals of stage 0 to host memory or back takes 3,000 ms, longer than a forward" in text


def test_the_trace_has_one_lane_for_each_rank_and_its_durations_are_the_profiles(run):
    profile = dataclasses.replace(run("zb-h1")[3], clock="trace")
    events = json.loads(jaxpp.observe.to_perfetto(profile))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [names[rank, 0] for rank in range(4)] == ["computes"] * 4
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["ph"] for e in events} == {"M", "X", "C"}
    assert all(e["ts"] >= 0 and isinstance(e["pid"], int) and isinstance(e["tid"], int) for e in events if e["ph"] != "M")
    assert all(e["dur"] >= 0 and (e["pid"], e["tid"]) in names for e in slices)
    for action, found in profile.actions.items():
        (event,) = [e for e in slices if e["name"] == str(action) and e["cat"] == action.kind]
        assert (event["pid"], event["tid"]) == (found.rank, 0)
        assert event["dur"] == pytest.approx(1e6 * (found.end - found.start))
        assert event["ts"] == pytest.approx(1e6 * found.start)
    arrived = sorted((e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in slices if e["cat"] == "send")
    sends = [s for s in profile.spans if s.sends]
    expected = sorted((s.label, s.rank, 1, 1e6 * s.start, 1e6 * (s.end - s.start)) for s in sends)
    assert arrived == expected
    assert {names[e["pid"], e["tid"]] for e in slices if e["cat"] == "send"} == {"receives"}
    handed = [(e["name"], e["dur"]) for e in slices if e["cat"] == "host"]
    assert handed == [(s.label, 1e6 * (s.handed - s.begun)) for s in profile.spans]
    ends = max(e["ts"] for e in events if e["ph"] == "C")
    assert ends == pytest.approx(1e6 * profile.seconds)


def test_a_profile_prints_and_draws_itself(run):
    profile = run("zb-v")[3]
    assert "zb-v: 2 ranks, 4 stages, 4 microbatches; each program alone, on devices of its own: " in str(profile)
    assert "optimizer" in str(profile)
    page = profile._repr_html_()
    assert page.count("<svg") == 1
    assert "\ntraced" in str(profile)
    assert page.count("<tr>") == 1 + 2 + 1 + 3 * len(profile.memory)  # idle time of each rank; three looks at each device
    file = jaxpp.observe.to_html(profile)
    assert file.startswith("<!DOCTYPE html>") and 'name="viewport"' in file
    assert file.count("<table>") == file.count('<div style="overflow-x:auto"><table>') == 2
    assert file.count("<svg") == file.count('style="max-width:100%;height:auto"') == 1
    titles = {axes.get_title(loc="left").split(" (")[0] for axes in profile.pebble_figure().axes}
    assert {"traced", "each program alone, on devices of its own"} <= titles


@each_schedule
def test_shares_sum_to_one_and_the_latencies_cover_all_actions(run, name):
    profile = run(name)[3]
    assert sum(profile.shares) == pytest.approx(1)
    assert min(profile.shares) >= 0
    spans = profile.actions.values()
    assert max(profile.latencies) < max(span.end for span in spans) - min(span.start for span in spans) + 1e-12
    assert sum(profile.latencies) >= covered(spans) - 1e-12  # each action lies in the time of its microbatch


def test_the_json_has_every_number(run):
    profile = run("1f1b")[3]
    found = json.loads(jaxpp.observe.to_json(profile))
    assert found["seconds"] == profile.seconds
    assert [span["label"] for span in found["spans"]] == [span.label for span in profile.spans]
    assert found["spans"][3]["end"] == profile.spans[3].end
    for rank, causes in zip(found["ranks"], profile.causes, strict=True):
        assert rank["causes"] == causes._asdict()
    assert [m["total"] for m in found["memory"]] == [sample.total for sample in profile.ledger.samples]
    assert found["schedule"]["rows"][1][0] == "1F0"


@each_schedule
def test_the_memory_curve_has_the_peak_of_the_account_and_ends_with_the_step(run, name):
    profile = run(name)[3]
    for device, curve in zip(profile.ledger.liveness.devices, profile.memory, strict=True):
        levels = profile.ledger.liveness.levels[device].sum(axis=1)
        assert max(map(sum, curve.levels)) == levels.max()
        assert (sum(curve.levels[0]), sum(curve.levels[-1])) == (levels[0], levels[-1])
        assert all(a <= b for a, b in itertools.pairwise(curve.times))
        assert curve.times[-1] == pytest.approx(1e3 * max(span.end for span in profile.spans))
        lasting = [MEMORY_KINDS.index(kind) for kind in ("parameters", "optimizer")]
        assert min(level[k] for level in curve.levels for k in lasting) > 0, "what is taken over does not vanish between"
        idle = curve.levels[bisect.bisect_left(curve.times, curve.times[-1]) - 1]  # of several levels at one time the last
        assert idle[MEMORY_KINDS.index("residuals")] == 0, "what was let go is gone"


@pytest.mark.long
def test_a_loss_with_tied_parameters_a_key_and_fewer_devices_is_profiled():
    case = gpt_case()
    options = {"num_stages": 2, "num_microbatches": 2, "has_aux": True, "devices": jax.devices()[:1]}
    pipe = jaxpp.Pipeline(case.loss_fn, optax.sgd(0.1), **options)
    state = pipe.init(case.init, jax.random.key(0), case.batch)
    profile = pipe.profile(state, case.batch, case.key, num_steps=1)
    assert not profile.transfers
    assert {s.rank for s in profile.spans if s.label.startswith("update")} == {0, 1}
    assert {s.rank for s in profile.actions.values()} == {0, 1}


@pytest.mark.parametrize("num_steps", [0, -1, 1.5, True])
def test_fewer_than_one_step_is_refused(run, num_steps):
    pipe, state, _, _ = run("1f1b")
    with pytest.raises(ArgumentError, match=r"counts are whole numbers of at least 1\.\n  Got: num_steps="):
        pipe.profile(state, mlp_case(batch_size=16).batch, num_steps=num_steps)


@each_schedule
def test_pebbles_are_as_many_as_the_residuals_that_are_held(run, name):
    profile = run(name)[3]
    liveness = profile.ledger.liveness
    lives = lifetimes(profile.bars)
    for stage in range(profile.schedule.num_stages):
        residuals = [life for life in liveness.lives if life.kind == "residuals" and life.name.stage == stage]
        held = [
            len({life.name.microbatch for life in residuals if life.begins <= moment <= life.ends})
            for moment in range(len(liveness.lines) + 2)
        ]
        drawn = [residual for residual in lives if residual.stage == stage]
        if not profile.beside:  # in the order of the schedule, as the liveness is
            assert peak(drawn) <= max(held)
        assert len(drawn) == profile.schedule.num_microbatches
        schedule = [r for r in lifetimes(profile.schedule.drawing().bars) if r.stage == stage]
        assert peak(schedule) == max(held)


def test_transfers_arrive_at_the_rank_they_are_for_where_ranks_share_devices():
    case = mlp_case(batch_size=16)
    options = {"num_stages": 4, "num_microbatches": 2, "has_aux": True, "devices": jax.devices()[:2]}
    pipe = jaxpp.Pipeline(case.loss_fn, optax.sgd(0.1), **options)
    profile = pipe.profile(pipe.init(case.params, case.batch), case.batch, num_steps=1)
    for span in profile.transfers:
        assert span.label.endswith(f"to stage {span.rank}")


def test_actions_side_by_side_count_once_and_no_cause_is_negative():
    schedule = make("gpipe", num_ranks=1, num_microbatches=2)
    f0, f1, b0, b1 = schedule.rows[0]
    times = ((f0, 5, 10, 2), (f1, 3, 7, 3), (b0, 10, 11, 10), (b1, 11, 12, 11))
    spans = tuple(span(str(a), a, 0, float(start), float(end), begun=float(begun)) for a, start, end, begun in times)
    profile = made_up(schedule, spans)
    assert profile.busy == (9.0,)
    assert sum(profile.measured.durations.values()) == 9.0
    assert min(profile.causes[0]) >= 0
    assert sum(profile.causes[0]) == pytest.approx(3.0)
