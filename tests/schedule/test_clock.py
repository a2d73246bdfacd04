"""The clock with copies of residuals to the host and back, with cores that ranks share, and with the dispatch of each action."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp.schedule import SCHEDULES, Kind, Schedule, make, ring, simulate
from jaxpp.schedule.action import Action
from jaxpp.schedule.clock import Timing, handed_over, makespan, replay
from jaxpp.schedule.offload import offloads

EVERY = [
    make(name, num_ranks=p, num_microbatches=m)
    for (name, recipe), p, m in itertools.product(SCHEDULES.items(), range(1, 7), range(1, 10))
    if recipe.allows(p, m)
]
GPIPE = Schedule("gpipe", ["0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"])


@st.composite
def timings(draw, least=0, schedule=None, offload=True):
    """A schedule, and what everything takes on the clock."""
    schedule = draw(st.sampled_from(EVERY)) if schedule is None else schedule
    durations = {action: draw(st.integers(least, 9)) for action in schedule.order}
    hops = draw(st.lists(st.integers(0, 5), min_size=schedule.num_stages - 1, max_size=schedule.num_stages - 1))
    kept = st.sampled_from([None, 0, 1, 2])
    except_last = draw(st.lists(kept, min_size=schedule.num_stages, max_size=schedule.num_stages)) if offload else [None]
    moved = offloads(schedule.rows, except_last) if offload else ()
    copies = draw(st.lists(st.integers(0, 9), min_size=schedule.num_stages, max_size=schedule.num_stages))
    timing = Timing(durations, hops, None, draw(st.booleans()), moved, copies)
    return schedule, timing


def run(schedule, timing):
    return replay(schedule.rows, schedule.stage_to_rank, timing, schedule.num_groups)


def test_copies_of_gpipe_on_one_rank_worked_by_hand():
    # The forwards end at 1, 2, 3, 4, and all but the residuals of microbatch 0 go out, one after another: 2 to 5, to 8, to 11.
    # Those of 1 come back beside B0, which starts at 4, once they have left: 5 to 8. B1 starts at 8, and those of 2 come back: 8 to
    # 11. B2 starts at 11, and those of 3 come back: 11 to 14.
    r = simulate(GPIPE, offload=1, copy=3)
    assert [str(each.offloaded.forward) for each in r.copies] == ["0F1", "0F2", "0F3"]
    assert [(each.out, each.back) for each in r.copies] == [((2, 5), (5, 8)), ((5, 8), (8, 11)), ((8, 11), (11, 14))]
    assert r.times.starts == ((0, 1, 2, 3, 4, 8, 11, 14),)
    assert r.makespan == 16
    assert [tuple(causes) for causes in r.causes] == [(0, 0, 4, 0)]
    assert r.peak_residuals == (4,)
    # Beside those of microbatch 0, those of the running forward and those on their way out are there.
    short = simulate(GPIPE, offload=1, copy=0.5)
    assert (short.makespan, short.peak_residuals) == (12, (3,))
    assert [(each.out, each.back) for each in short.copies] == [((k + 1, k + 1.5), (2 * k + 2, 2 * k + 2.5)) for k in (1, 2, 3)]


def test_copies_that_do_not_overlap_hold_their_rank_up_worked_by_hand():
    # F0, F1, out 1, F2, out 2, F3, out 3, back 1, B0, back 2, B1, back 3, B2, B3: each copy takes 3 of the rank's own time.
    r = simulate(GPIPE, offload=1, copy=3, overlap=False)
    assert [(each.out, each.back) for each in r.copies] == [((2, 5), (13, 16)), ((6, 9), (18, 21)), ((10, 13), (23, 26))]
    assert r.times.starts == ((0, 1, 5, 9, 16, 21, 26, 28),)
    assert r.makespan == 12 + 6 * 3
    assert [tuple(causes) for causes in r.causes] == [(0, 0, 18, 0)]


def test_residuals_away_do_not_count_and_those_of_other_stages_do():
    schedule = make("gpipe", num_ranks=2, num_microbatches=6)
    plain, first, both = (simulate(schedule, offload=offload, copy=0.5) for offload in (None, [1, None], 1))
    assert plain.copies == () and plain.peak_residuals == simulate(schedule).peak_residuals == (6, 6)
    assert first.peak_residuals == (3, 6)
    assert both.peak_residuals == (3, 3)
    assert simulate(schedule, offload=3, copy=0.5).peak_residuals == (5, 5)
    slow = simulate(schedule, offload=1, copy=50)
    assert slow.peak_residuals == (6, 6)  # the first copy has not ended when all forwards are done
    assert sum(slow.causes[0]) == slow.idle[0] and slow.causes[0].transfer > 0


def test_a_copy_shorter_than_every_action_never_delays_a_schedule():
    for schedule in EVERY:
        for except_last in (0, 1, 2):
            copied = simulate(schedule, forward=3, input_grad=4, weight_grad=3, transfer=1, offload=except_last, copy=3)
            assert copied.makespan == simulate(schedule, forward=3, input_grad=4, weight_grad=3, transfer=1).makespan


@settings(max_examples=200, deadline=None)
@given(timings())
def test_copies_delay_and_never_hasten_and_are_made_in_time(drawn):
    schedule, timing = drawn
    times, plain = run(schedule, timing), run(schedule, timing._replace(offloaded=()))
    assert makespan(times) >= makespan(plain)
    assert not plain.copies and {each.offloaded for each in times.copies} == set(timing.offloaded)
    starts = dict(zip(itertools.chain(*schedule.rows), itertools.chain(*times.starts), strict=True))
    ends = dict(zip(itertools.chain(*schedule.rows), itertools.chain(*times.ends), strict=True))
    links = {}
    for moved, out, back in times.copies:
        copy = timing.copies[moved.forward.stage]
        assert starts[moved.backward] - ends[moved.forward] >= 2 * copy
        assert out[0] >= ends[moved.forward] and out[1] <= back[0] and back[1] <= starts[moved.backward]
        assert out[1] - out[0] == back[1] - back[0] == copy
        assert back[0] >= starts[moved.ahead] if timing.overlap else back[1] <= starts[moved.ahead]
        rank = schedule.stage_to_rank[moved.forward.stage]
        links.setdefault((rank, "out"), []).append(out)
        links.setdefault((rank, "back"), []).append(back)
    for spans in links.values():
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(spans)))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_costs_more_ends_no_earlier(data):
    schedule, timing = data.draw(timings())
    _, more = data.draw(timings(schedule=schedule))
    slower = timing._replace(
        durations={action: time + more.durations[action] for action, time in timing.durations.items()},
        hops=[a + b for a, b in zip(timing.hops, more.hops, strict=True)],
        copies=[a + b for a, b in zip(timing.copies, more.copies, strict=True)],
    )
    for a, b in zip(itertools.chain(*run(schedule, timing).ends), itertools.chain(*run(schedule, slower).ends), strict=True):
        assert a <= b


@settings(max_examples=200, deadline=None)
@given(timings(), st.fractions(Fraction(1, 4), 8, max_denominator=4))
@pytest.mark.long
def test_shared_cores_slow_down_by_no_more_than_their_share(drawn, capacity):
    schedule, timing = drawn
    alone, shared = run(schedule, timing), run(schedule, timing._replace(capacity=capacity))
    if capacity >= schedule.num_ranks:
        assert shared == alone
    slow = max(Fraction(1), schedule.num_ranks / capacity)
    for a, b in zip(itertools.chain(*alone.ends), itertools.chain(*shared.ends), strict=True):
        assert a <= b
    assert makespan(shared) >= sum(timing.durations.values()) / capacity
    slowed = timing._replace(durations={action: time * slow for action, time in timing.durations.items()})
    assert makespan(shared) <= makespan(run(schedule, slowed))


@settings(max_examples=100, deadline=None)
@given(timings(), st.booleans())
def test_the_clock_of_shared_cores_is_the_other_clock_where_nobody_has_to_share(drawn, handed):
    schedule, timing = drawn
    if handed:
        timing = timing._replace(dispatched={action: k for k, action in enumerate(schedule.order)})
    # One more rank, with nothing to do in it, makes room for all others, and the clock that shares still has to run.
    rows, owner = (*schedule.rows, ()), schedule.stage_to_rank
    assert replay(rows, owner, timing._replace(capacity=schedule.num_ranks))[:2] == replay(rows, owner, timing)[:2]


@pytest.mark.parametrize(("capacity", "span"), [(3, 3), (2, Fraction(7, 2)), (1, 6), (Fraction(1, 2), 12)])
def test_three_ranks_on_shared_cores_worked_by_hand(capacity, span):
    # Forwards of 1, 2 and 3 on three ranks. Two cores: each has a speed of 2/3 until 3/2, when the first has ended; 1 and 2 are
    # left and have a core each, to 7/2. One core: a third each until 3, half each until 5, and 6.
    rows = [[Action(0, Kind.F, k)] for k in range(3)]
    durations = {row[0]: k + 1 for k, row in enumerate(rows)}
    times = replay(rows, (0,), Timing(durations, capacity=capacity))
    assert makespan(times) == span


def test_a_rank_that_starts_while_others_share_cores_takes_of_what_is_left_of_them():
    # Three forwards of 6 on two cores have done 2 each at 3, when a fourth, of 1, is handed over: half a core each, until 5 (3 are
    # left of each), then 2/3.
    actions = [Action(0, Kind.F, k) for k in range(4)]
    durations, handed = (dict(zip(actions, values, strict=True)) for values in ((6, 6, 6, 1), (0, 0, 0, 3)))
    times = replay([[action] for action in actions], (0,), Timing(durations, dispatched=handed, capacity=Fraction(2)))
    assert times.ends == ((Fraction(19, 2),),) * 3 + ((5,),)


def test_a_ring_on_shared_cores_takes_the_work_over_the_cores():
    schedule = ring(num_ranks=4, num_groups=4, num_turns=8)
    shared = simulate(schedule, capacity=2, transfer=[0, 0, 0, Fraction(1, 2)])
    assert shared.makespan >= 32 * 4 / 2
    own, all_ = simulate(schedule, transfer=1), simulate(schedule, transfer=1, capacity=4)
    assert own.times == all_.times
    makers = {i: i - 4 for i in range(4, 32)}
    timing = Timing(dict.fromkeys(schedule.order, 1), [1] * 4, None, False, capacity=4)
    rows = (*schedule.rows, ())
    assert replay(rows, schedule.stage_to_rank, timing, makers)[:2] == replay(rows, schedule.stage_to_rank, timing, 4)[:2]


def test_what_shared_cores_add_counts_as_waiting_for_the_host():
    r = simulate(make("1f1b", num_ranks=4, num_microbatches=8), capacity=2)
    assert [tuple(causes) for causes in r.causes] == [(9, 0, 0, r.makespan - 33)] * 4
    assert [sum(causes) for causes in r.causes] == list(r.idle)
    assert r.makespan >= 96 / 2


def test_thousands_of_actions_are_replayed_on_shared_cores():
    schedule = make("zb-h1", num_ranks=8, num_microbatches=200)
    assert len(schedule.order) == 4800
    shared = simulate(schedule, capacity=2, offload=1, copy=0.5)
    assert shared.makespan >= 4800 / 2


def test_actions_are_handed_over_one_after_another_and_copies_with_them_where_they_cost():
    (row,) = GPIPE.rows
    seconds = {action: 1 + (action.kind == Kind.B) for action in row}
    moved = offloads(GPIPE.rows, (1,))
    assert list(handed_over(row, seconds, (0,)).values()) == [1, 2, 3, 4, 6, 8, 10, 12]
    assert handed_over(row, seconds, (0,), moved) == handed_over(row, seconds, (0,))
    # 0F1, 0F2 and 0F3 are followed by a copy out; the copies back come before 0B0, 0B1 and 0B2.
    assert list(handed_over(row, seconds, (0,), moved, (10,)).values()) == [1, 2, 13, 24, 46, 58, 70, 72]


def test_each_process_hands_over_what_its_own_ranks_do():
    schedule = make("1f1b", num_ranks=2, num_microbatches=3)
    found = handed_over(schedule.order, dict.fromkeys(schedule.order, 1), (0, 1))
    for rank, row in enumerate(schedule.rows):
        assert [found[action] for action in row] == [1, 2, 3, 4, 5, 6], rank
