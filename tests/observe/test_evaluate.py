"""How long a step takes, by what its programs cost: small cases that can be added up by hand."""

import dataclasses

import pytest

from jaxpp.observe.evaluate import CandidateSearch, alone, parts, step_seconds
from jaxpp.schedule import Kind, make
from jaxpp.schedule.costs import StepCosts

COSTS = StepCosts(
    actions={Kind.F: (1.0, 1.0), Kind.B: (2.0, 2.0)},
    dispatch={Kind.F: (0.0, 0.0), Kind.B: (0.0, 0.0)},
    transfer=(0.5,),
    offload=(0.0, 0.0),
    offload_dispatch=(0.0, 0.0),
    before=10.0,
    after=(3.0, 4.0),
    after_dispatch=0.0,
    capacity=2.0,
)
NAIVE = make("naive", 2, 1)


def costs(**changes):
    return dataclasses.replace(COSTS, **changes)


def handing(seconds):
    return dict.fromkeys((Kind.F, Kind.B), (seconds, seconds))


def test_a_step_is_what_comes_before_its_actions_its_transfers_and_what_follows_on_the_slowest_rank():
    # 0F0 1, to stage 1 0.5, 1F0 1, 1B0 2, back 0.5, 0B0 2; then rank 0 has 3 to do. Rank 1 began with its 4 before that, 2.5 ago.
    assert step_seconds(NAIVE, COSTS) == 10 + 1 + 0.5 + 1 + 2 + 0.5 + 2 + 3
    assert step_seconds(NAIVE, costs(after=(3.0, 7.0))) == 10 + 1 + 0.5 + 1 + 2 + 7
    assert parts(NAIVE, COSTS) == (3.0, 3.0, 0.0, 1.0, 0.0, 0.0, 13.0)
    assert alone(NAIVE, COSTS) == 10 + 6 + 7


def test_stages_of_one_rank_send_nothing_to_each_other():
    one = make("interleaved", 1, 1, 2)
    assert step_seconds(one, costs(transfer=(100.0,))) == 10 + 6 + 7


def test_one_process_hands_over_all_actions_and_several_their_own():
    slow = costs(dispatch=handing(5.0), after_dispatch=1.0)
    # 0F0 at 15, 1F0 at 20, 1B0 at 25, 0B0 at 30 until 32; the rest is handed over at 31.
    assert step_seconds(NAIVE, slow) == pytest.approx(35.0)
    # Each process: F at 15, B at 20: 0F0 15-16, 1F0 16.5-17.5, 1B0 20-22, 0B0 22.5-24.5.
    assert step_seconds(NAIVE, slow, processes=(0, 1)) == pytest.approx(27.5)
    assert parts(NAIVE, slow).dispatch == pytest.approx(32 - 17)


def test_copies_to_the_host_are_waited_for_and_handed_over_too():
    schedule, offload = make("gpipe", 1, 4), (1,)
    plain = costs(actions={Kind.F: (1.0,), Kind.B: (2.0,)}, transfer=(), after=(0.0,), offload=(0.5,), offload_dispatch=(0.0,))
    plain = dataclasses.replace(plain, dispatch=dict.fromkeys((Kind.F, Kind.B), (0.0,)))
    assert step_seconds(schedule, plain, offload) == 10 + 12
    # 0F0 and 0F1 leave; 0F1 comes back beside 0B2 and 0F0 beside 0B1, each 1 later than the action beside it takes.
    slow = dataclasses.replace(plain, offload=(3.0,))
    assert (
        step_seconds(schedule, slow, offload) > 22
        and parts(schedule, slow, offload).copies == step_seconds(schedule, slow, offload) - 22
    )
    assert step_seconds(schedule, dataclasses.replace(plain, offload_dispatch=(100.0,)), offload) > 200
    assert step_seconds(schedule, slow) == 22


def test_ranks_that_share_a_core_do_what_follows_at_half_speed():
    # 1B0 ends at 14.5 and 0B0 at 17: rank 1 has 1.5 of its 4 left when rank 0 joins it with 3, so for 3 both go at half speed.
    assert step_seconds(NAIVE, costs(capacity=1.0)) == pytest.approx(17 + 3 + 1.5)


def test_b_takes_i_and_w_where_it_was_not_measured():
    split = costs(actions={Kind.F: (1.0, 1.0), Kind.I: (1.5, 1.5), Kind.W: (0.5, 0.5)})
    split = dataclasses.replace(split, dispatch=dict.fromkeys((Kind.F, Kind.I, Kind.W), (0.0, 0.0)))
    assert step_seconds(NAIVE, split) == step_seconds(NAIVE, COSTS)


def test_what_is_left_out_takes_no_time_and_a_recomputed_stage_one_forward_more():
    costs = StepCosts({Kind.F: (1.0, 1.0), Kind.B: (2.0, 2.0)})
    assert step_seconds(NAIVE, costs) == 6
    assert step_seconds(NAIVE, costs.recomputed([False, True])) == 7
    split = StepCosts({Kind.F: (1.0, 1.0), Kind.I: (1.0, 1.0), Kind.W: (1.0, 1.0)})
    assert step_seconds(NAIVE, split.recomputed([True, True])) == 8


def test_a_candidate_is_priced_and_weighed_once_and_none_after_the_first_that_fits():
    asked = []
    search = CandidateSearch(float, lambda size: asked.append(size) or (size, size // 2), room=4)
    assert next(search.fitting([9, 4, 3]), None) == 4
    assert next(search.fitting([9, 8]), None) is None
    assert (asked, search.lightest(), search.seconds(9)) == ([9, 4, 8], [4, 8, 9], 9.0)
    assert CandidateSearch(float, lambda _: (1 << 60,), None).fits(9)


def test_what_visits_bring_is_on_the_clock_and_is_waited_for_by_the_update():
    order = make("looped-bfs", num_ranks=1, num_microbatches=2, stages_per_rank=4)
    costs = StepCosts({Kind.F: (1.0,) * 4, Kind.B: (2.0,) * 4}, after=(0.5,) * 4)
    visits = costs.visited(([4] * 4, [8] * 4), (0.25,) * 4)
    assert (visits.visit, visits.visit_state) == ((1.0,) * 4, (2.0,) * 4)
    assert step_seconds(order, costs) == 26
    assert step_seconds(order, visits) == 27, "the first visit has none before it"
    assert step_seconds(order, dataclasses.replace(costs, visit=(1.0,) * 4)) == 27, "nothing of an optimizer"
    slow = costs.visited(([4] * 4, [8] * 4), (25.0,) * 4)
    assert step_seconds(order, slow) == 7 * 100 + 4 * 200 + 2
    found = parts(order, slow)
    assert sum(found) == pytest.approx(step_seconds(order, slow)) and found.copies > 1200
