"""The virtual clock gives the formulae and the golden values of the literature, and says why ranks idle."""

import fractions
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpp.schedule import SCHEDULES, Kind, Schedule, make, simulate

SIZES = list(itertools.product(range(1, 9), (1, 2, 3, 5, 8, 13, 16, 33)))


def run(name, p, m, v=None, **costs):
    """Simulate with one unit of F, I and W a rank, whatever its number of stages."""
    share = fractions.Fraction(1, SCHEDULES[name].stages_per_rank if v is None else v)
    costs = {"forward": share, "input_grad": share, "weight_grad": share} | costs
    return simulate(make(name, num_ranks=p, num_microbatches=m, stages_per_rank=v), **costs)


GOLDEN = {  # (ranks, microbatches): makespan, bubble, peak residuals in microbatches of a rank's full share
    (4, 8): {"gpipe": (33, 9, 8), "1f1b": (33, 9, 4), 2: (28.5, 4.5, 5.5), 4: (26.25, 2.25, 4.75), "zb-h1": (27, 3, 4)},
    (4, 16): {"gpipe": (57, 9, 16), "1f1b": (57, 9, 4), 2: (52.5, 4.5, 5.5), 4: (50.25, 2.25, 4.75), "zb-h1": (51, 3, 4)},
    (8, 16): {"gpipe": (69, 21, 16), "1f1b": (69, 21, 8), 2: (58.5, 10.5, 11.5), 4: (53.25, 5.25, 9.75), "zb-h1": (55, 7, 8)},
    (8, 32): {"gpipe": (117, 21, 32), "1f1b": (117, 21, 8), 2: (106.5, 10.5, 11.5), 4: (101.25, 5.25, 9.75), "zb-h1": (103, 7, 8)},
}


@pytest.mark.parametrize(
    ("p", "m", "name", "expected"), [(p, m, name, values) for (p, m), row in GOLDEN.items() for name, values in row.items()]
)
def test_the_golden_values(p, m, name, expected):
    name, v = ("interleaved", name) if isinstance(name, int) else (name, 1)
    r = run(name, p, m, v)
    assert (r.makespan, r.makespan - 3 * m, fractions.Fraction(max(r.peak_residuals), v)) == expected
    assert r.bubble_fraction == expected[1] / expected[0]


@pytest.mark.parametrize(("p", "m", "span", "peak"), [(4, 8, 24, 7), (4, 16, 48, 7), (8, 16, 48, 15), (8, 32, 96, 15)])
def test_zb_h2_has_no_bubble_in_its_own_span_and_ends_as_late_as_zb_h1(p, m, span, peak):
    r = run("zb-h2", p, m)
    assert r.own_span == (span,) * p
    assert r.own_bubble == (0,) * p
    assert r.peak_residuals == (peak,) * p
    assert r.makespan == run("zb-h1", p, m).makespan


def test_zb_v_with_unit_stages_has_a_makespan_bubble_of_3_and_none_in_its_own_span():
    r = simulate(make("zb-v", num_ranks=4, num_microbatches=8))
    assert r.idle == (3,) * 4
    assert r.own_bubble == (0,) * 4


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_the_bubble_equals_its_formula(p, m):
    full = 3 * m
    assert run("naive", p, m).bubble_fraction == (p - 1) / p
    assert run("gpipe", p, m).bubble_fraction == run("1f1b", p, m).bubble_fraction == (p - 1) / (m + p - 1)
    assert run("eager-1f1b", p, m).makespan == run("1f1b", p, m).makespan
    for v in (1, 2, 3, 4):
        if m >= p:
            assert run("looped-bfs", p, m, v).makespan == full + fractions.Fraction(3 * (p - 1), v)
        if m % p == 0:
            assert run("interleaved", p, m, v).makespan == full + fractions.Fraction(3 * (p - 1), v)
    for name in ("zb-h1", "zb-h2", "zb-v"):
        if m >= 2 * p - 1:
            v = SCHEDULES[name].stages_per_rank
            assert run(name, p, m).makespan == full + fractions.Fraction(p - 1, v), name
    if m >= 2 * p:
        assert run("dualpipe-v", p, m).makespan == full + fractions.Fraction(p - 1, 2)


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 3, 1), (1, 2, 1), (3, 4, 2), (1, 1, 0), (4, 5, 3)])
def test_the_bubble_equals_its_formula_where_f_i_and_w_differ(p, f, i, w):
    def found(name, v=1):
        costs = {key: fractions.Fraction(cost, v) for key, cost in (("forward", f), ("input_grad", i), ("weight_grad", w))}
        return run(name, p, 4 * p, v, **costs)

    full = 4 * p * (f + i + w)
    assert found("gpipe").makespan - full == found("1f1b").makespan - full == (p - 1) * (f + i + w)
    assert found("interleaved", 2).makespan - full == fractions.Fraction((p - 1) * (f + i + w), 2)
    assert found("zb-h1").makespan - full == (p - 1) * (f + i - w)
    assert found("zb-h2").own_bubble[0] == (p - 1) * (f + i - 2 * w)
    overlapped = fractions.Fraction((p - 1) * ((f + i + w) + (i + w) - 3 * w), 2)
    assert found("dualpipe-v", 2).makespan - full <= overlapped


@pytest.mark.parametrize(
    ("p", "m", "plain", "eager"),
    [(4, 16, (59.8, 64, 71), (57.6, 58.5, 60)), (8, 32, (123.8, 134, 151), (118.4, 120.5, 124))],
)
def test_transfers_hide_behind_the_forwards_that_eager_1f1b_has_ahead(p, m, plain, eager):
    for transfer, *spans in zip((0.1, 0.25, 0.5), plain, eager, strict=True):
        found = [run(name, p, m, transfer=transfer).makespan for name in ("1f1b", "eager-1f1b")]
        assert found == pytest.approx(spans, abs=1e-9)
        assert found[1] == pytest.approx(3 * m + (p - 1) * (3 + 2 * transfer))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_residuals_equal_their_formula(p, m):
    peaks = {
        "naive": [1] * p,
        "gpipe": [m] * p,
        "1f1b": [min(m, p - r) for r in range(p)],
        "eager-1f1b": [min(m, 2 * (p - r) - 1) for r in range(p)],
        "zb-h1": [min(m, p)] * p,
        "zb-h2": [min(m, 2 * p - 1)] * p,
        "zb-v": [2 * min(m, p)] * p if m >= 2 * p - 1 else None,
    }
    for name, peak in peaks.items():
        assert peak is None or list(run(name, p, m).peak_residuals) == peak, name
    assert max(run("zb-v", p, m).peak_residuals) == 2 * min(m, p)
    assert run("looped-bfs", p, m, 3).peak_residuals == (3 * m,) * p
    assert max(run("v-min", p, m).peak_residuals) == 2 * min(m, (p + 4) // 3)
    assert max(run("v-half", p, m).peak_residuals) in {2 * min(m, (p + 2) // 2), 2 * min(m, (p + 2) // 2) - 1}
    if m >= 2 * p:
        assert max(run("v-half", p, m).peak_residuals) == 2 * ((p + 2) // 2)
        assert run("dualpipe-v", p, m).peak_residuals == (2 * p + 1,) * p
    if m % p == 0 and m > p:
        for v in (2, 3, 4):
            assert run("interleaved", p, m, v).peak_residuals[0] == v * p + p - 1


@pytest.mark.parametrize("p", [2, 3, 4, 6, 8, 16])
def test_the_bubbles_of_v_half_and_v_min_are_about_a_half_and_two_thirds_of_1f1bs(p):
    m = 8 * p
    plain = run("1f1b", p, m).makespan - 3 * m
    assert 1 / 2 <= (run("v-half", p, m).makespan - 3 * m) / plain < 3 / 5
    assert 1 / 2 <= (run("v-min", p, m).makespan - 3 * m) / plain <= fractions.Fraction(2, 3)


def test_a_transfer_hidden_behind_compute_costs_less_than_one_that_is_not():
    schedule = make("1f1b", num_ranks=4, num_microbatches=8)
    free, hidden, open_ = (
        simulate(schedule, **costs).makespan for costs in ({}, {"transfer": 0.5}, {"transfer": 0.5, "overlap": False})
    )
    assert free < hidden < open_


def test_a_transfer_delays_what_needs_it_by_its_own_time_and_nothing_on_one_rank():
    chain = simulate(make("naive", num_ranks=3, num_microbatches=1), transfer=[0.25, 0.5, 99])
    assert chain.makespan == 9 + 2 * 0.75
    turn = simulate(make("zb-v", num_ranks=2, num_microbatches=1), transfer=[0.25, 99, 0.25, 99])
    assert turn.makespan == 8 + 2 + 4 * 0.25  # four F and I, the W of stage 2 before the I of stage 1, the last W, four transfers


def test_with_transfers_as_long_as_half_a_forward_there_is_a_best_number_of_ranks():
    def time(p):
        share = fractions.Fraction(1, p)
        costs = {"forward": share, "input_grad": share, "weight_grad": share, "transfer": 0 if p == 1 else 0.5}
        return simulate(make("1f1b", num_ranks=p, num_microbatches=8), **costs).makespan

    times = [time(p) for p in (1, 2, 4, 8, 16, 32)]
    best = times.index(min(times))
    assert 0 < best < 5, times


def test_dispatch_holds_back_the_start_of_actions_that_are_not_yet_handed_over():
    schedule = make("1f1b", num_ranks=2, num_microbatches=4)
    r = simulate(schedule, dispatch=2)
    for k, action in enumerate(schedule.order):
        assert r.starts[action] >= 2 * (k + 1)
    assert r.makespan == 2 * 16 + 2


def test_a_transfer_between_hosts_may_take_longer_than_one_within():
    # Ranks 0 and 1 are on one host, 2 and 3 on another; the boundaries of interleaved stages are 0-1, 1-2, 2-3, 3-0, 0-1, 1-2, 2-3.
    schedule = make("interleaved", num_ranks=4, num_microbatches=4)
    owner = schedule.stage_to_rank
    hops = [0.25 if owner[s] // 2 == owner[s + 1] // 2 else 1.5 for s in range(schedule.num_stages - 1)]
    assert hops == [0.25, 1.5, 0.25, 1.5, 0.25, 1.5, 0.25]
    within, mixed, between = (simulate(schedule, transfer=transfer) for transfer in (0.25, hops, 1.5))
    assert within.makespan < mixed.makespan < between.makespan
    assert mixed.starts[7, Kind.F, 0] == 7 + sum(hops)


def test_each_process_hands_over_the_actions_of_its_own_ranks():
    schedule, processes = make("1f1b", num_ranks=4, num_microbatches=8), (0, 0, 1, 1)
    one, own, free = (simulate(schedule, dispatch=1, rank_to_process=each) for each in (None, processes, range(4)))
    for process in (0, 1):
        actions = [action for action in schedule.order if processes[action.stage] == process]
        for k, action in enumerate(actions):
            assert own.starts[action] >= k + 1
    assert own.timing.dispatched is not None
    assert max(own.timing.dispatched.values()) == 32  # of 64 actions, half
    assert one.makespan > own.makespan > free.makespan > simulate(schedule).makespan
    assert one.makespan >= 64
    assert one.rank_to_process == (0,) * 4
    assert sum(own.causes[0]) == own.idle[0]


def test_one_process_a_rank_is_taken_as_array_too():
    schedule = make("1f1b", num_ranks=2, num_microbatches=4)
    own = simulate(schedule, dispatch=1, rank_to_process=(0, 1))
    assert simulate(schedule, dispatch=1, rank_to_process=np.arange(2)).makespan == own.makespan


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    p=st.integers(1, 5),
    rounds=st.integers(2, 4),
    data=st.data(),
)
def test_the_clock_obeys_dependencies_and_causes_sum_to_idle_time(name, p, rounds, data):
    schedule = make(name, num_ranks=p, num_microbatches=p * rounds)
    cost = st.lists(st.integers(0, 9), min_size=schedule.num_stages, max_size=schedule.num_stages)
    costs = {key: data.draw(cost) for key in ("forward", "input_grad", "weight_grad", "transfer")}
    r = simulate(schedule, dispatch=data.draw(st.integers(0, 3)), **costs)
    for rank, row in enumerate(schedule.rows):
        assert all(
            a <= b for a, b in itertools.pairwise(itertools.chain(*zip(r.times.starts[rank], r.times.ends[rank], strict=True)))
        )
        assert r.causes[rank].fill_drain >= 0
        assert min(r.causes[rank]) >= -1e-9
        assert sum(r.causes[rank]) == pytest.approx(r.idle[rank])
        for action in row:
            stage, kind, microbatch = action
            if kind == Kind.F and stage:
                way = 0 if schedule.stage_to_rank[stage] == schedule.stage_to_rank[stage - 1] else costs["transfer"][stage - 1]
                assert r.starts[action] >= r.ends[stage - 1, Kind.F, microbatch] + way
    assert r.makespan == max(r.ends.values())


def test_causes_tell_fill_and_drain_from_imbalance_from_transfers_from_dispatch():
    schedule = make("1f1b", num_ranks=2, num_microbatches=4)
    even = simulate(schedule)
    assert [tuple(c) for c in even.causes] == [(3, 0, 0, 0)] * 2
    uneven = simulate(schedule, forward=[1, 3])
    assert uneven.causes[0].imbalance > 0
    assert uneven.causes[1].imbalance == 0
    sent = simulate(schedule, transfer=1)
    assert sent.causes[0].transfer == sent.makespan - even.makespan > 0
    assert simulate(schedule, dispatch=2).causes[0].dispatch > 0


def test_costs_of_single_stages_are_taken_where_they_belong():
    r = simulate(Schedule("mine", [["0F0", "0B0"], ["1F0", "1I0", "1W0"]]), forward=[1, 2], input_grad=[4, 8], weight_grad=[16, 32])
    assert r.busy == (1 + 4 + 16, 2 + 8 + 32)
    assert r.ends[1, "W", 0] == 1 + 2 + 8 + 32
    assert r.ends[0, "B", 0] == 1 + 2 + 8 + 4 + 16


def test_arrays_of_costs_count_as_pythons_numbers():
    schedule = make("1f1b", num_ranks=2, num_microbatches=200)
    plain = simulate(schedule, forward=[100, 100], transfer=[0.5])
    assert simulate(schedule, forward=np.array([100, 100], np.int8), transfer=np.array([0.5, 0])).makespan == plain.makespan
    assert simulate(schedule, forward=np.uint8(100), transfer=np.array(0.5)).makespan == plain.makespan
    assert isinstance(simulate(schedule, forward=np.float32(0.1)).makespan, float)


def test_exact_costs_have_exact_causes():
    r = simulate(
        make("1f1b", num_ranks=2, num_microbatches=2), forward=[fractions.Fraction(1, 3), 1], transfer=fractions.Fraction(1, 7)
    )
    assert [sum(causes) for causes in r.causes] == list(r.idle)


def test_a_simulation_prints_a_line_and_a_row_a_rank():
    text = str(run("zb-h1", 3, 4))
    assert "makespan 14, bubble 14.3%" in text
    assert "peak residuals" in text
    assert len(text.splitlines()) == 1 + 3 + 1 + 1 + 3


def test_what_a_turn_brings_from_host_memory_is_hidden_by_the_turn_before_or_takes_what_the_link_takes():
    order = make("looped-bfs", num_ranks=1, num_microbatches=4, stages_per_rank=8)  # turns of 4 forwards, and of 4 backwards
    resident = simulate(order).makespan
    assert simulate(order, visit=4, visit_state=4).makespan == resident + 4 <= 1.05 * resident, "the first turn has none before it"
    assert simulate(order, visit=4, visit_state=4, overlap=False).makespan == resident + 15 * 4, "a rank that waits for each"
    slow = simulate(order, visit=40, visit_state=80)
    link = 15 * 40 + 8 * 80  # the last stage goes forward and back in one turn
    assert slow.times.complete[0] == link
    assert slow.makespan == link - 80 + 8, "the state of the last stage comes behind its parameters"
    assert max(slow.causes[0].transfer, 0) == slow.makespan - resident


def test_an_order_that_turns_more_often_brings_more():
    often, seldom = (make(name, 2, 4, stages_per_rank=4) for name in ("interleaved", "looped-bfs"))
    assert simulate(often).makespan <= simulate(seldom).makespan
    assert simulate(often, visit=8).makespan > 1.2 * simulate(seldom, visit=8).makespan
