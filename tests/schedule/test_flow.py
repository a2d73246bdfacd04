"""Steps in flow: every rank runs each step in the order of its row, holds no more, and does not take longer."""

import pytest

from jaxpp.schedule import SCHEDULES, flow, make, simulate
from jaxpp.schedule.action import Kind

COSTS = {"forward": 1, "input_grad": 1, "weight_grad": 1}
STEPS = 3


@pytest.fixture(scope="module", params=SCHEDULES)
def pair(request):
    one = make(request.param, num_ranks=4, num_microbatches=8)
    return one, flow(one, STEPS)


def of_steps(row, count):
    """The actions of each step in a row, with the microbatches numbered as in one step."""
    steps = [[], [], []]
    for action in row:
        steps[action.microbatch // count].append(action._replace(microbatch=action.microbatch % count))
    return [tuple(step) for step in steps]


def test_every_rank_runs_each_step_in_the_order_of_its_row(pair):
    one, several = pair
    for row, expected in zip(several.rows, one.rows, strict=True):
        assert of_steps(row, one.num_microbatches) == [expected] * STEPS


def test_at_most_two_steps_are_under_way_and_the_forwards_of_the_first_are_over(pair):
    one, several = pair
    count = one.num_microbatches
    for row in several.rows:
        steps = [action.microbatch // count for action in row]
        last = {step: max(k for k, at in enumerate(steps) if at == step) for step in range(STEPS)}
        forwards = {s: max(k for k, a in enumerate(row) if a.kind == Kind.F and a.microbatch // count == s) for s in range(STEPS)}
        for step in range(1, STEPS):
            assert steps.index(step) > forwards[step - 1]
            assert step < 2 or steps.index(step) > last[step - 2], "its weights are those after that step"


def test_it_holds_no_more_and_is_never_longer_than_steps_one_after_another(pair):
    one, several = (simulate(each, **COSTS) for each in pair)
    assert several.makespan <= STEPS * one.makespan
    assert all(many <= few for many, few in zip(several.peak_residuals, one.peak_residuals, strict=True))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 16)])
def test_a_hundred_steps_of_1f1b_have_less_than_a_hundredth_of_bubble(ranks, microbatches):
    one = make("1f1b", num_ranks=ranks, num_microbatches=microbatches)
    assert simulate(one, **COSTS).bubble_fraction > 0.1
    assert simulate(flow(one, 100), **COSTS).bubble_fraction < 0.01


def test_it_is_a_schedule_as_any_other():
    several = flow(make("1f1b", num_ranks=2, num_microbatches=2), 2)
    assert several == make("1f1b", num_ranks=2, num_microbatches=4), "which never drains"
    assert "2 steps in flow" in str(several)
    assert flow(make("zb-v", num_ranks=2, num_microbatches=2), 1) == make("zb-v", num_ranks=2, num_microbatches=2)
