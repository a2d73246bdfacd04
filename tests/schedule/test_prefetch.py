"""Loads behind computation on the virtual clock. Row D11 of the acceptance table."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpp.schedule import simulate_prefetch

TIMES = st.integers(0, 20)


@pytest.mark.parametrize(("load", "store", "slots"), [(99, 0, 2), (60, 40, 2), (1, 0, 2), (99, 99, 3)])
def test_loads_shorter_than_the_steps_cost_less_than_a_hundredth(load, store, slots):
    run = simulate_prefetch(1000, compute=100, load=load, store=store, slots=slots)
    assert run.busy == 100_000
    assert run.busy < run.makespan <= 1.01 * run.busy
    assert run.idle == load  # the first, which nothing hides


def test_loads_longer_than_the_steps_are_bounded_by_the_copy_engine():
    run = simulate_prefetch(1000, compute=100, load=150)
    assert run.makespan == 1000 * 150 + 100
    assert simulate_prefetch(1000, compute=100, load=150, store=20).makespan == 1000 * 150 + 100
    both = {slots: simulate_prefetch(1000, compute=100, load=150, store=120, slots=slots).makespan for slots in (2, 3)}
    assert both[2] == pytest.approx(1000 * (150 + 100 + 120) / 2, rel=0.01)  # a slot is loaded once it is written back
    assert both[3] == 1000 * 150 + 100


def test_with_one_slot_a_step_is_load_and_compute_and_store():
    assert simulate_prefetch(1000, compute=100, load=50, slots=1).makespan == 1000 * 150
    assert simulate_prefetch(1000, compute=100, load=50, store=30, slots=1).makespan == 1000 * 180 - 30


def test_the_drawing_of_two_slots_is_what_the_clock_says():
    run = simulate_prefetch(4, compute=1, load=1, store=1)
    assert run.loads == ((0, 1), (1, 2), (3, 4), (4, 5))
    assert run.steps == ((1, 2), (2, 3), (4, 5), (5, 6))
    assert run.stores == ((2, 3), (3, 4), (5, 6), (6, 7))
    assert (run.makespan, run.busy, run.idle) == (6, 4, 2)


@given(st.lists(st.tuples(TIMES, TIMES, TIMES), min_size=1, max_size=20), st.integers(1, 4))
def test_any_run_keeps_to_the_engines_the_order_and_the_slots(times, slots):
    compute, load, store = (list(column) for column in zip(*times, strict=True))
    run = simulate_prefetch(len(times), compute, load, store, slots)
    for spans, lengths in ((run.loads, load), (run.steps, compute), (run.stores, store)):
        assert [end - start for start, end in spans] == lengths
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    for (_, loaded), (begun, done), (stored, _) in zip(run.loads, run.steps, run.stores, strict=True):
        assert loaded <= begun
        assert done <= stored
    for k, (start, _) in enumerate(run.loads):  # those that hold a slot: their load has begun, their store has not ended
        assert sum(end > start for _, end in run.stores[:k]) < slots
    assert max(sum(load) + compute[-1], sum(compute)) <= run.makespan <= sum(map(sum, times))
    assert simulate_prefetch(len(times), compute, load, store, slots + 1).makespan <= run.makespan
