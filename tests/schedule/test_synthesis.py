"""Schedules made to measure: exact on the clock, within their room, no longer than what has a name, and as short as can be."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp.schedule import SCHEDULES, Kind, Schedule, from_csv, make, simulate, synthesise
from jaxpp.schedule.costs import StepCosts
from jaxpp.schedule.synthesis.greedy import GREEDY_RULES, order_by
from jaxpp.schedule.synthesis.local_search import Search, improve
from jaxpp.schedule.synthesis.synthesise import placements
from jaxpp.schedule.synthesis.work import StepWork
from tests.schedule.shortest import shortest

TIMES = "forward", "input_grad", "weight_grad"


def random_costs(seed, num_stages):
    choose = np.random.default_rng(seed)
    costs = {name: [choose.uniform(0.5, 1.5) for _ in range(num_stages)] for name in (*TIMES, "residuals")}
    return costs | {"transfer": [0.5 * choose.integers(2) * choose.random() for _ in range(num_stages - 1)]}


def clock(schedule, costs):
    return simulate(schedule, **{name: value for name, value in costs.items() if name != "residuals"})


def most_held(schedule, residuals):
    """The most bytes on each rank, counted action by action."""
    found = []
    for row in schedule.rows:
        sizes = [(a.kind == Kind.F) * residuals[a.stage] - (a.kind in (Kind.B, Kind.W)) * residuals[a.stage] for a in row]
        found.append(max(itertools.accumulate(sizes)))
    return found


def v_shape(num_ranks, per_rank):
    return [rank if turn % 2 == 0 else num_ranks - 1 - rank for turn in range(per_rank) for rank in range(num_ranks)]


def work_of(seed, num_ranks=3, per_rank=2, num_microbatches=5, room=2.5, split=True):
    owner = v_shape(num_ranks, per_rank)
    costs = random_costs(seed, len(owner))
    actions = {kind: tuple(costs[name]) for kind, name in zip((Kind.F, Kind.I, Kind.W), TIMES, strict=True)}
    parts = StepCosts(actions, transfer=tuple(costs["transfer"]), residuals=tuple(costs["residuals"]))
    most = max(sum(size for size, rank in zip(parts.residuals, owner, strict=True) if rank == r) for r in range(num_ranks))
    return StepWork(parts, tuple(owner), num_microbatches, (room * most,) * num_ranks, (split,) * len(owner)), costs


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("room", [1, 1.3, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_every_rule_ends_within_the_room_that_one_microbatch_needs(seed, room, split):
    work, _ = work_of(seed, room=room, split=split)
    for rule in GREEDY_RULES:
        rows = order_by(work, rule)
        assert sorted(itertools.chain(*rows)) == list(work.actions)
        assert work.fits(rows) and work.clock(rows) is not None, rule


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("rule", [0, 3, 4])
def test_the_lean_clock_and_its_memory_are_those_of_simulate(rule, split):
    work, costs = work_of(rule, split=split)
    rows = order_by(work, GREEDY_RULES[rule])
    schedule = Schedule("it", work.action_rows(rows), work.owner)
    simulated, times = clock(schedule, costs), work.clock(rows)
    assert times.span == pytest.approx(simulated.makespan, rel=1e-12)
    actions = {
        number: action for row, named in zip(rows, schedule.rows, strict=True) for number, action in zip(row, named, strict=True)
    }
    assert {actions[n]: pytest.approx(times.starts[n]) for n in actions} == dict(simulated.starts)
    assert work.peaks(rows) == pytest.approx(most_held(schedule, costs["residuals"]))


@pytest.mark.parametrize("seed", range(6))
def test_the_search_only_makes_orders_shorter_and_never_shorter_than_the_bound(seed):
    work, _ = work_of(seed, room=(1, 2, 4)[seed % 3])
    rows = order_by(work, GREEDY_RULES[4])
    before, after = work.clock(rows).span, improve(work, rows, 60)
    assert work.fits(after)
    assert work.least_span - 1e-9 <= work.clock(after).span <= before


@pytest.mark.parametrize("seed", range(4))
def test_a_block_as_it_stands_is_estimated_at_the_makespan_and_a_swap_at_no_more_than_it_gives(seed):
    work, _ = work_of(seed)
    rows = order_by(work, GREEDY_RULES[seed])
    times = work.clock(rows)
    search = Search(work, rows, times)
    search.look_ahead()
    for rank, first, last in search.blocks():
        part = search.rows[rank][first : last + 1]
        assert search.estimate(rank, first, part) == pytest.approx(times.span)
        for move in search.moves(rank, first, last):
            changed = [list(row) for row in rows]
            changed[rank][move.first : move.first + len(move.part)] = move.part
            after = work.clock(changed)
            assert work.fits(changed)
            assert after is None or len(move.part) > 2 or move.estimate <= after.span + 1e-9


def test_the_search_finds_what_the_rule_missed():
    gains = []
    for seed in range(6):
        work, _ = work_of(seed)
        rows = order_by(work, GREEDY_RULES[4])
        gains.append(1 - work.clock(improve(work, rows, 100)).span / work.clock(rows).span)
    assert min(gains) >= 0 and np.mean(gains) > 0.03, gains


@settings(max_examples=10, deadline=None)
@given(
    ranks=st.integers(1, 3),
    per_rank=st.integers(1, 3),
    microbatches=st.integers(1, 5),
    seed=st.integers(0, 999),
    split=st.booleans(),
)
def test_it_is_a_schedule_within_its_room_and_no_longer_than_any_with_a_name(ranks, per_rank, microbatches, seed, split):
    costs, choose = random_costs(seed, ranks * per_rank), np.random.default_rng(seed)
    own = sum(sorted(costs["residuals"])[-per_rank:])
    room = own * choose.uniform(1, 3)
    made = synthesise(ranks, microbatches, stages_per_rank=per_rank, room=room, split=split, effort=60, **costs)
    assert (made.name, made.num_ranks, made.num_stages, made.num_microbatches) == ("auto", ranks, ranks * per_rank, microbatches)
    assert from_csv(made.to_csv()).rows == made.rows
    assert max(most_held(made, costs["residuals"])) <= room + 1e-9
    assert split or not {Kind.I, Kind.W} & {action.kind for action in made.order}
    for name, recipe in SCHEDULES.items():
        if recipe.allows(ranks, microbatches) and (recipe.stages_per_rank == per_rank or (recipe.varies and per_rank > 1)):
            other = make(name, num_ranks=ranks, num_microbatches=microbatches, stages_per_rank=per_rank)
            whole = not {Kind.I, Kind.W} & {action.kind for action in other.order}
            if max(most_held(other, costs["residuals"])) <= room and (split or whole):
                assert clock(made, costs).makespan <= clock(other, costs).makespan * (1 + 1e-9), name


SMALL = [(2, 1, 2), (2, 1, 3), (2, 1, 4), (2, 2, 2), (3, 1, 2), (3, 1, 3)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 5))])
@pytest.mark.parametrize(("ranks", "per_rank", "microbatches"), SMALL)
def test_of_small_sizes_it_is_within_two_percent_of_the_shortest_there_is(ranks, per_rank, microbatches, seed):
    owner = v_shape(ranks, per_rank)
    costs = random_costs(100 * seed + 10 * ranks + microbatches, len(owner))
    needs = [sum(size for size, owns in zip(costs["residuals"], owner, strict=True) if owns == rank) for rank in range(ranks)]
    room = [need * np.random.default_rng(seed).uniform(1, 2.5) for need in needs]
    found = clock(synthesise(ranks, microbatches, stage_to_rank=owner, room=room, **costs), costs).makespan
    least = shortest(owner, microbatches, costs, room, known=found)
    assert least <= found * (1 + 1e-6)
    assert found <= 1.02 * least


def test_equal_arguments_give_equal_schedules_and_numpys_numbers_are_numbers():
    options = random_costs(1, 6) | {"stages_per_rank": 2, "effort": 200}
    assert synthesise(3, 4, room=5, **options) == synthesise(3, 4, room=(5, 5, 5), **options)
    costs = random_costs(1, 4)
    arrays = {name: np.array(value) for name, value in costs.items()}
    assert synthesise(4, 4, room=np.float32(4), effort=20, **arrays) == synthesise(4, 4, room=4, effort=20, **costs)


def test_where_stages_are_alike_it_is_as_short_as_zero_bubble_and_splits_no_stage_that_gains_nothing():
    made = synthesise(4, 8, room=4)
    assert simulate(made).makespan == simulate(make("zb-h1", num_ranks=4, num_microbatches=8)).makespan
    assert simulate(synthesise(4, 8, room=7)).makespan == simulate(make("zb-h2", num_ranks=4, num_microbatches=8)).makespan
    assert {action.kind for action in made.order if action.stage == 0} == {Kind.F, Kind.B}  # nobody waits for its I


def test_with_little_room_it_does_what_no_schedule_with_a_name_does():
    costs = {"forward": [1, 2, 1, 1], "input_grad": [1, 2, 1, 1], "weight_grad": [1, 2, 1, 1]}
    made, naive = (
        simulate(s, **costs)
        for s in (synthesise(4, 8, room=2, effort=400, **costs), make("naive", num_ranks=4, num_microbatches=8))
    )
    assert made.peak_residuals == (2, 2, 2, 2)
    assert made.makespan < 0.6 * naive.makespan


def test_stages_may_lie_so_that_ranks_have_equal_work():
    uneven = [3, 1, 3, 1]  # round robin, one rank has three quarters of the work
    costs = dict.fromkeys(TIMES, uneven)
    made = synthesise(2, 8, stages_per_rank=2, effort=200, **costs)
    assert len(set(simulate(made, **costs).busy)) == 1
    assert synthesise(2, 2, stage_to_rank=(0, 1, 0, 1), effort=10, **costs).stage_to_rank == (0, 1, 0, 1)


def test_placements_give_each_rank_as_many_stages():
    for owner in placements([5, 1, 4, 2, 3, 3, 2, 9], num_ranks=4):
        assert sorted(owner) == sorted(list(range(4)) * 2)


def test_costs_of_nothing_are_costs_and_the_least_room_will_do():
    made = synthesise(2, 3, forward=0, input_grad=0, weight_grad=0, residuals=0, room=0, effort=10)
    assert simulate(made, forward=0, input_grad=0, weight_grad=0).makespan == 0
    synthesise(2, 4, residuals=[1, 3], room=3, effort=10)
