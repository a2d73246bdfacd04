"""Schedules of forwards only: predictions take (m + p - 1) T, a stream drains once, and a ring of g >= p groups never waits."""

import itertools
from collections import defaultdict
from fractions import Fraction

import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxpp
from jaxpp.errors import ScheduleError
from jaxpp.lowering.lower import forward_actions
from jaxpp.schedule import Action, Kind, Schedule, dependencies, forward, from_csv, make, ring, simulate
from tests.figures import key_words, numbers

THIRD = Fraction(1, 3)  # a time that is exact, and no whole number of slots
RANKS, MICROBATCHES = (1, 2, 3, 4, 7), (1, 2, 3, 8, 21)


@pytest.mark.parametrize(("p", "m"), [*itertools.product(RANKS, MICROBATCHES)])
def test_m_microbatches_take_m_plus_p_minus_1_forwards(p, m):
    schedule = forward(p, m)
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (p, p, m)
    result = simulate(schedule, forward=THIRD)
    assert result.makespan == (m + p - 1) * THIRD
    assert result.bubble_fraction == float(Fraction(p - 1, m + p - 1))
    assert result.own_bubble == (0,) * p
    assert result.peak_residuals == (0,) * p
    assert [tuple(causes) for causes in result.causes] == [((p - 1) * THIRD, 0, 0, 0)] * p


@pytest.mark.parametrize(("p", "m"), [*itertools.product(RANKS, MICROBATCHES)])
def test_evaluation_runs_in_the_order_of_the_schedule(p, m):
    slots = sorted(itertools.product(range(p), range(m)), key=lambda at: (sum(at), at[0]))
    assert list(forward_actions(p, m)) == [Action(stage, Kind.F, i) for stage, i in slots]


@pytest.mark.parametrize(("p", "g", "n"), [*itertools.product((1, 2, 3, 4, 7), (1, 2, 3, 4, 5, 9), (1, 2, 5))])
def test_a_ring_takes_the_turns_of_its_groups_or_of_its_ranks_whichever_are_more(p, g, n):
    schedule = ring(p, g, n)
    assert (schedule.num_ranks, schedule.num_microbatches, schedule.num_groups) == (p, n * g, g)
    result = simulate(schedule, forward=THIRD)
    assert result.makespan == (n * p + g - 1 if g <= p else n * g + p - 1) * THIRD
    assert result.own_bubble == ((n - 1) * max(0, p - g) * THIRD,) * p  # none with g >= p groups: no rank waits
    for causes in result.causes:
        assert (causes.fill_drain, causes.token) == ((p - 1) * THIRD, (n - 1) * max(0, p - g) * THIRD)
        assert (causes.imbalance, causes.transfer, causes.dispatch) == (0, 0, 0)


@pytest.mark.parametrize(("p", "g", "c"), [*itertools.product((2, 4), (1, 2, 3, 4, 5, 6, 8), (Fraction(1, 4), Fraction(1, 2), 2))])
def test_more_groups_than_ranks_hide_transfers_and_what_they_do_not_hide_is_said(p, g, c):
    n = 6
    result = simulate(ring(p, g, n), transfer=c)
    turn = max(g, p * (1 + c))
    assert result.makespan == (n - 1) * turn + g - 1 + p + (p - 1) * c
    assert (result.own_bubble == (0,) * p) == (g >= p + p * c)
    assert result.causes[0].token == (n - 1) * max(0, p - g)
    assert result.causes[0].transfer == result.makespan - simulate(ring(p, g, n)).makespan


costs = st.integers(0, 9)


@given(p=st.integers(1, 5), g=st.integers(1, 7), data=st.data())
def test_a_turn_takes_the_slowest_stages_passes_or_one_pass_and_its_way_back(p, g, data):
    times, ways = (data.draw(st.lists(costs, min_size=p, max_size=p)) for _ in range(2))
    one, more = (simulate(ring(p, g, n), forward=times, transfer=ways).makespan for n in (60, 61))
    assert more - one == max(max(times) * g, sum(times) + (sum(ways) if p > 1 else 0))


def by_hand(times, ways, groups, passes, handed, overlap):
    """Starts of every pass on every stage, pass by pass."""
    num_stages, starts, ends, free = len(times), {}, {}, [0] * len(times)
    for i, s in itertools.product(range(passes), range(num_stages)):
        arrived = ends[s - 1, i] + ways[s - 1] if s else 0
        if not s and groups and i >= groups:
            arrived = ends[num_stages - 1, i - groups] + ways[-1]
        starts[s, i] = max(free[s], arrived, handed[s, i])
        free[s] = ends[s, i] = starts[s, i] + times[s]
        is_sent = s < num_stages - 1 or (groups and i + groups < passes)
        free[s] += ways[s] if is_sent and not overlap else 0
    return starts


@given(
    p=st.integers(1, 4), g=st.integers(0, 5), n=st.integers(1, 5), dispatch=st.integers(0, 3), overlap=st.booleans(), data=st.data()
)
def test_the_clock_is_that_of_a_few_lines_and_causes_sum_to_idle_time(p, g, n, dispatch, overlap, data):
    times, ways = (data.draw(st.lists(costs, min_size=p, max_size=p)) for _ in range(2))
    schedule = ring(p, g, n) if g else forward(p, n)
    result = simulate(schedule, forward=times, transfer=ways, dispatch=dispatch, overlap=overlap)
    even = by_hand([1] * p, [1 / 8 if p > 1 else 0] * p, g, schedule.num_microbatches, defaultdict(int), True)
    order = sorted(even, key=lambda at: (even[at], -at[0]))
    assert [(action.stage, action.microbatch) for action in schedule.order] == order
    handed = {at: dispatch * k for k, at in enumerate(order, start=1)}
    expected = by_hand(times, ways if p > 1 else [0], g, schedule.num_microbatches, handed, overlap)
    assert {(stage, i): start for (stage, _, i), start in result.starts.items()} == expected
    for idle, causes in zip(result.idle, result.causes, strict=True):
        assert min(causes) >= 0 and sum(causes) == pytest.approx(idle)


def test_only_a_ring_has_the_cause_of_waiting_for_tokens_and_only_steps_have_residuals():
    heads = [str(simulate(s)).splitlines()[-1 - s.num_ranks] for s in (ring(4, 2, 3), forward(4, 2), make("1f1b", 4, 4))]
    assert ["token" in head for head in heads] == [True, False, False]
    assert ["peak residuals" in head for head in heads] == [False, False, True]
    sent = simulate(ring(2, 2, 4), transfer=[0, 3])
    assert sent.causes[0].token == 0 < sent.causes[0].transfer  # the token's way back, and nothing else, takes time
    assert simulate(ring(2, 2, 4), forward=[1, 3]).causes[0].imbalance > 0


def test_a_pass_waits_for_the_token_of_its_group():
    assert simulate(forward(3, 2), transfer=[1, 1]).makespan == simulate(forward(3, 2), transfer=1).makespan == 6
    schedule = ring(3, 2, 2)
    present = frozenset(schedule.order)
    needs = {str(a): [str(need) for need in dependencies(a, 3, present, schedule.num_groups)] for a in present}
    assert needs["0F1"] == [] and needs["0F2"] == ["2F0"] and needs["0F3"] == ["2F1"] and needs["1F2"] == ["0F2"]


SCHEDULES_OF_FORWARDS = [forward(1, 1), forward(3, 5), ring(1, 1, 3), ring(3, 2, 4), ring(2, 5, 2), ring(4, 40, 30)]


@pytest.mark.parametrize("schedule", SCHEDULES_OF_FORWARDS, ids=lambda s: s.heading)
def test_they_print_and_are_written_and_read_as_csv(schedule):
    assert schedule.forward_only and not make("gpipe", 2).forward_only
    again = from_csv(schedule.to_csv(), num_groups=schedule.num_groups)
    assert again == schedule and again.times == schedule.times
    assert (from_csv(schedule.to_csv()) == schedule) == (schedule.num_groups is None)
    assert str(schedule).startswith(f"{schedule.heading}\n") and len(str(schedule).splitlines()) > schedule.num_ranks
    assert schedule.table(80).splitlines()[0] == schedule.heading


def test_a_long_ring_prints_its_groups():
    lines = ring(2, 12, 20).table(80).splitlines()
    assert lines[0] == "ring: 2 ranks, 2 stages, 12 groups, 20 turns"
    assert len(lines) == 3
    assert ring(2, 12, 3).overview(80).splitlines()[1:] == ["0     " + 3 * "0123456789ab" + "·", "1     ·" + 3 * "0123456789ab"]


@pytest.mark.parametrize(("p", "g", "n"), [(2, 1, 3), (4, 4, 3), (3, 14, 2)])
def test_a_rings_figure_has_a_colour_for_each_group_and_the_numbers_of_turns(p, g, n):
    result = simulate(ring(p, g, n), transfer=0.5)
    figure = result.figure()
    (axes,), colours = figure.axes, set()
    for group in range(g):
        drawn = [c for c in axes.collections if c.get_label() == f"group {group}"]
        spans = sorted((path.get_extents().x0, path.get_extents().x1) for c in drawn for path in c.get_paths())
        assert spans == sorted((bar.start, bar.end) for bar in result.bars if bar.action.microbatch % g == group)
        colours |= {tuple(colour) for c in drawn for colour in c.get_facecolor().tolist()}
    assert len(colours) == g and len(numbers(axes)) == p * g * n
    assert {"group 0", "idle"} <= set(key_words(figure)) and axes.get_xlabel() == "time  (numbers: turns)"
    assert ("and 2 more" in key_words(figure)) == (g == 14)


@pytest.mark.parametrize("schedule", [forward(3, 2), ring(2, 3, 2), ring(4, 30, 9)], ids=lambda s: s.heading)
@pytest.mark.long
def test_they_draw_themselves_in_notebooks_and_their_pebble_graph_has_no_pebbles(schedule, tmp_path):
    assert "<svg" in schedule._repr_html_() or "<img" in schedule._repr_html_()
    assert "fill, drain" in simulate(schedule)._repr_html_()
    figure = schedule.pebble_figure()
    assert not [c for axes in figure.axes for c in axes.collections if c.get_label() == "pebbles"]
    assert "residuals alive" not in key_words(figure)
    if schedule.num_microbatches == 2:
        schedule.pebble_gif(tmp_path / "forward.gif")
        assert (tmp_path / "forward.gif").stat().st_size


def loss(params, batch):
    return params * batch.sum()


@pytest.mark.parametrize("schedule", [forward(2, 4), ring(2, 2, 2), "forward", "ring", Schedule("mine", ["0F0", "1F0"])])
def test_a_step_refuses_a_schedule_without_backwards(schedule):
    for train in (
        lambda **sizes: jaxpp.Pipeline(loss, optax.sgd(1e-3), **sizes),
        lambda **sizes: jaxpp.value_and_grad(loss, **sizes),
    ):
        with pytest.raises(ScheduleError, match="a step needs backwards") as error:
            train(num_stages=2, num_microbatches=4, schedule=schedule)
        assert "forwards only" in str(error.value)
    if isinstance(schedule, str):
        with pytest.raises(ScheduleError, match=rf"or jaxpp.schedule.{schedule}\(num_ranks"):
            make(schedule, num_ranks=2)
