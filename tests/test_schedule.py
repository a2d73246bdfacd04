"""Schedules are checked values: they obey the laws, print as the golden tables, and refuse what cannot run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpp.errors import ScheduleError
from jaxpp.schedule import SCHEDULES, Action, Kind, Schedule, dependencies, make, parse

SIZES = [(p, m) for p in range(1, 9) for m in (1, 2, 3, 5, 8, 13, 33)]


@given(st.integers(0, 999), st.sampled_from(list(Kind)), st.integers(0, 999))
def test_an_action_prints_and_parses_back(stage, kind, microbatch):
    action = Action(stage, kind, microbatch)
    assert parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "0B1.5", "1BOGUS", "-1F0", "2 F0"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError, match="an action is written"):
        parse(text)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_each_stage_runs_each_microbatch_once_forward_and_once_backward_in_order(name, p, m):
    schedule = make(name, num_ranks=p, num_microbatches=m)
    actions = [a for row in schedule.rows for a in row]
    assert len(actions) == len(set(actions)) == 2 * p * m == len(schedule.order)
    present = frozenset(actions)
    seen = set()
    for action in schedule.order:
        assert set(dependencies(action, p, present)) <= seen
        seen.add(action)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_1f1b_keeps_at_most_p_minus_r_microbatches_in_flight_and_gpipe_keeps_all(p, m):
    for name, bound in (("1f1b", lambda r: min(m, p - r)), ("gpipe", lambda r: m), ("naive", lambda r: 1)):
        for rank, row in enumerate(make(name, num_ranks=p, num_microbatches=m).rows):
            alive, peak = 0, 0
            for action in row:
                alive += 1 if action.kind == Kind.F else -1
                peak = max(peak, alive)
            assert peak == bound(rank)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_the_bubble_equals_its_formula(p, m):
    for name, makespan in (("1f1b", 3 * (m + p - 1)), ("gpipe", 3 * (m + p - 1)), ("naive", 3 * m * p)):
        schedule = make(name, num_ranks=p, num_microbatches=m)
        end = max(start + (1 if a.kind == Kind.F else 2) for a, start in schedule.starts.items())
        assert end == makespan, name


def test_the_tables_are_the_golden_ones(golden):
    for name in SCHEDULES:
        assert str(make(name, num_ranks=3, num_microbatches=4)) + "\n" == golden(f"{name}_3x4.txt")


def test_nothing_ties_one_microbatch_to_another():
    schedule = make("1f1b", num_ranks=4, num_microbatches=6)
    present = frozenset(schedule.order)
    for action in schedule.order:
        assert {need.microbatch for need in dependencies(action, 4, present)} <= {action.microbatch}


def rows(*texts):
    return tuple(tuple(parse(cell) for cell in text.split()) for text in texts)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (("0F0 0F0 0B0",), "0F0 appears 2 times"),
        (("0F0",), "needs one B, or one I and one W"),
        (("0F0 0B0 0I0 0W0",), "needs one B, or one I and one W"),
        (("0B0",), "0F0 is missing"),
        (("0F0 0B0 1F0 1B0", "0F1 0B1 1F1 1B1"), "1F0 stands in the row of rank 0, its stage belongs to rank 1"),
        (("0F0 0B0 5F0",), "its stage belongs to rank None"),
    ],
)
def test_an_incomplete_or_misplaced_schedule_is_refused_when_made(cells, message):
    with pytest.raises(ScheduleError) as error:
        Schedule("mine", rows(*cells))
    assert message in str(error.value)
    assert cells[0] in str(error.value)


def test_rows_that_wait_for_one_another_are_refused_with_the_cells_marked():
    with pytest.raises(ScheduleError) as error:
        Schedule("mine", rows("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"))
    assert "rank 0 waits at 0B0 for 1B0" in str(error.value)
    assert ">0B0<" in str(error.value)
    assert ">1F1<" in str(error.value)


def test_i_and_w_may_stand_for_b():
    assert Schedule("mine", rows("0F0 0I0 0W0", "1F0 1I0 1W0")).num_stages == 2


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(ScheduleError, match="Fix: write 'gpipe'"):
        make("gpip", num_ranks=2)


@pytest.mark.parametrize(("p", "m"), [(0, 1), (1, 0), (-1, -1), (1.5, 2)])
def test_counts_below_one_are_refused(p, m):
    with pytest.raises(ScheduleError, match="counts are whole numbers of at least 1"):
        make("1f1b", num_ranks=p, num_microbatches=m)
