"""Schedules are checked values: they obey the laws, print as the golden tables, and refuse what cannot run."""

import itertools
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxpp
from jaxpp.errors import ScheduleError
from jaxpp.schedule import SCHEDULES, Action, Kind, Schedule, dependencies, from_csv, make, parse, simulate
from jaxpp.schedule.clock import Timing, bars, makespan, queues, replay
from tests.grids import covering

GOLDEN = pathlib.Path(__file__).parent / "golden"
PYTORCH = sorted((GOLDEN / "pytorch").glob("*.csv"))


def sizes(name, ranks=range(1, 9), microbatches=range(1, 34)):
    """Every size up to 8 ranks, 33 microbatches and 4 stages a rank that ``make`` does not refuse."""
    for p, m, v in itertools.product(ranks, microbatches, range(1, 5)):
        recipe = SCHEDULES[name]
        if (recipe.varies or v == recipe.stages_per_rank) and recipe.allows(p, m):
            yield p, m, v


@given(st.integers(0, 999), st.sampled_from(list(Kind)), st.integers(0, 999))
def test_an_action_prints_and_parses_back(stage, kind, microbatch):
    action = Action(stage, kind, microbatch)
    assert parse(str(action)) == action


def broken_laws(schedule, p, m, v):
    """The laws, counted and walked here by other means than the constructor's."""
    owner = {stage: rank for rank, row in enumerate(schedule.rows) for stage in {a.stage for a in row}}
    if sorted(owner) != list(range(p * v)) or [owner[s] for s in range(p * v)] != list(schedule.stage_to_rank):
        yield "owners"
    actions = [a for row in schedule.rows for a in row]
    if len(set(actions)) != len(actions):
        yield "duplicates"
    kinds = {}
    for stage, kind, microbatch in actions:
        kinds[stage, microbatch] = kinds.get((stage, microbatch), "") + kind
    if set(kinds) != set(itertools.product(range(p * v), range(m))) or not set(kinds.values()) <= {"FB", "FIW"}:
        yield "each F once, then B, or I then W"  # kinds are in the order of the row, so F before B and I before W
    done, present = set(), frozenset(actions)
    for action in schedule.order:
        if not set(dependencies(action, p * v, present)) <= done:
            yield f"{action} is dispatched before what it needs"
        done.add(action)
    place = {action: k for k, action in enumerate(schedule.order)}
    if any([place[a] for a in row] != sorted(place[a] for a in row) for row in schedule.rows):
        yield "dispatch order is not the rows' order"


@pytest.mark.parametrize(("p", "name"), covering(range(1, 9), list(SCHEDULES)))
def test_the_laws_hold_at_every_size(name, p):
    checked = 0
    for _, m, v in sizes(name, ranks=[p]):
        schedule = make(name, num_ranks=p, num_microbatches=m, stages_per_rank=v)
        assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (p, p * v, m)
        assert not list(broken_laws(schedule, p, m, v)), (p, m, v)
        checked += 1
    assert checked >= 18


@pytest.mark.parametrize(("p", "name"), covering(range(2, 9), list(SCHEDULES)))
def test_no_send_is_handed_over_behind_a_program_of_its_receiver_that_ends_later(name, p):
    for _, m, v in sizes(name, ranks=[p], microbatches=(p, 2 * p, 4 * p + 1)):
        schedule = make(name, num_ranks=p, num_microbatches=m, stages_per_rank=v)
        owner, present, place = schedule.stage_to_rank, frozenset(schedule.order), {a: k for k, a in enumerate(schedule.order)}
        ends = simulate(schedule, transfer=0.125).ends
        for action in schedule.order:
            receiver = owner[action.stage]
            for need in dependencies(action, schedule.num_stages, present):
                if owner[need.stage] != receiver:
                    ahead = [other for other in schedule.rows[receiver] if place[other] < place[need]]
                    assert all(ends[other] <= ends[need] for other in ahead)
        # So transfers that wait for what their receiver was handed before cost no more than others.
        for transfer in (0.125, 0.25, 0.5):
            assert simulate(schedule, transfer=transfer, queued=True).times == simulate(schedule, transfer=transfer).times


def test_in_the_order_of_starts_transfers_that_wait_for_their_receiver_would_cost_more():
    schedule = make("gpipe", num_ranks=8, num_microbatches=32)
    starts = tuple(sorted(schedule.order, key=lambda a: (schedule.starts[a], -a.stage)))
    hops, durations = [0.5] * 7, {a: 2 if a.kind == Kind.B else 1 for a in starts}

    def makespan_of(order):
        timing = Timing(durations, hops, queued=queues(order, schedule.rows, schedule.stage_to_rank))
        return makespan(replay(schedule.rows, schedule.stage_to_rank, timing))

    assert (makespan_of(schedule.order), makespan_of(starts)) == (124, 139.5)


@pytest.mark.parametrize("file", PYTORCH, ids=lambda file: file.stem)
def test_the_order_of_each_rank_is_pytorchs(file):
    name, size = file.stem.rsplit("_", 1)
    p, m, v = map(int, size.split("x"))
    assert make(name, num_ranks=p, num_microbatches=m, stages_per_rank=v) == from_csv(file.read_text())


def test_a_v_puts_first_and_last_stage_on_rank_0_and_others_are_dealt_round_robin():
    assert make("interleaved", num_ranks=3, num_microbatches=3, stages_per_rank=2).stage_to_rank == (0, 1, 2, 0, 1, 2)
    assert Schedule("mine", rows("1F0 1B0", "0F0 0B0")).stage_to_rank == (1, 0), "read off the rows"
    for name in ("zb-v", "v-half", "v-min", "dualpipe-v"):
        assert make(name, num_ranks=3).stage_to_rank == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_tables_are_the_golden_ones(name):
    m = 6 if name == "dualpipe-v" else 4
    assert make(name, num_ranks=3, num_microbatches=m).table(width=120) + "\n" == (GOLDEN / f"{name}_3x{m}.txt").read_text()


def test_a_table_is_wrapped_to_the_width_a_long_one_becomes_an_overview_and_headings_count():
    schedule = make("1f1b", num_ranks=4, num_microbatches=8)
    assert max(map(len, schedule.table(width=80).splitlines())) <= 80
    assert all(schedule.table(width=80).count(str(action)) for row in schedule.rows for action in row)
    long = make("1f1b", num_ranks=16, num_microbatches=64).table(width=80).splitlines()
    assert len(long) == 17
    assert max(map(len, long)) <= 80
    assert long[1][6:10] == "FFFF"
    assert long[16][6:8] == "··"
    assert make("naive", num_ranks=1, num_microbatches=1).heading == "naive: 1 rank, 1 stage, 1 microbatch"
    assert make("gpipe", num_ranks=2, num_microbatches=3).heading == "gpipe: 2 ranks, 2 stages, 3 microbatches"


def test_nothing_ties_one_microbatch_to_another():
    schedule = make("1f1b", num_ranks=4, num_microbatches=6)
    present = frozenset(schedule.order)
    for action in schedule.order:
        assert {need.microbatch for need in dependencies(action, 4, present)} <= {action.microbatch}


def rows(*texts):
    return tuple(tuple(text.split()) for text in texts)


def test_a_microbatch_left_out_of_a_large_table_is_one_line():
    good = make("1f1b", num_ranks=16, num_microbatches=64)
    with pytest.raises(ScheduleError) as error:
        Schedule("mine", [[a for a in row if a.microbatch != 31] for row in good.rows])
    text = str(error.value)
    assert "microbatches 32 to 63 are out of range, for there is no microbatch 31: 0F32, 0F33, 0F34, 0F35 and 1020 more" in text
    assert len(text) < 4000


def test_rows_may_be_strings_and_numpys_integers_are_integers():
    plain = Schedule("mine", [["0F0", "0B0"], ["1F0", "1B0"]])
    assert Schedule("mine", ["0F0 0B0", "1F0 1B0"]) == plain
    assert Schedule("mine", [[Action(np.int64(a.stage), a.kind, a.microbatch) for a in row] for row in plain.rows]) == plain
    assert make("1f1b", num_ranks=np.int64(2), num_microbatches=np.int32(3)) == make("1f1b", num_ranks=2, num_microbatches=3)


def test_what_a_schedule_hands_out_cannot_change_it():
    schedule = make("1f1b", num_ranks=2)
    with pytest.raises(TypeError):
        schedule.starts[schedule.rows[0][0]] = 7


def test_on_the_clock_an_action_starts_when_the_last_of_what_it_waits_for_is_there():
    tables = [make(name, num_ranks=3, num_microbatches=6) for name in SCHEDULES]
    tables.append(Schedule("mixed", ["0F0 0F1 0I0 0B1 0W0", "1F0 1B0 1F1 1I1 1W1"]))
    for schedule in tables:
        present, hops = frozenset(schedule.order), range(1, schedule.num_stages)
        durations = {action: 1 + (7 * k) % 5 for k, action in enumerate(schedule.order)}
        owner, place = schedule.stage_to_rank, {action: k for k, action in enumerate(schedule.order)}
        for queued in ({}, queues(schedule.order, schedule.rows, owner)):
            times = replay(schedule.rows, owner, Timing(durations, hops, queued=queued))
            ran = {bar.action: bar for bar in bars(schedule.rows, times)}
            assert set(ran) == present
            for rank, row in enumerate(schedule.rows):
                for before, action in zip([None, *row], row, strict=False):
                    needs = dependencies(action, schedule.num_stages, present)
                    arrivals = []
                    for need in needs:
                        ahead = [ran[a].end for a in row if place[a] < place[need]] if queued and owner[need.stage] != rank else []
                        hop = hops[min(need.stage, action.stage)] if need.stage != action.stage else 0
                        arrivals.append(max(ran[need].end, *ahead, 0) + hop)
                    assert ran[action].start == max([0 if before is None else ran[before].end, *arrivals])
                    assert ran[action].end - ran[action].start == durations[action] and ran[action].rank == rank


def test_a_large_broken_table_is_refused_at_once_and_only_the_ranks_that_matter_are_shown():
    good = make("1f1b", num_ranks=32, num_microbatches=64)
    swapped = [list(row) for row in good.rows]
    early, late = (swapped[7].index(parse(text)) for text in ("7F30", "7B30"))
    swapped[7][early], swapped[7][late] = swapped[7][late], swapped[7][early]
    with pytest.raises(ScheduleError) as error:
        Schedule("mine", swapped)
    text = str(error.value)
    assert len(text.splitlines()) < 20
    assert "Got: 7B30 needs 7F30\n       7F30 stands after 7B30 in its row." in text
    assert ">7B30<" in text
    assert ">7F30<" in text
    assert "ranks 0 to 6: ..." in text
    assert "ranks 8 to 31: ..." in text


@pytest.mark.parametrize("name", SCHEDULES)
def test_csv_round_trips_both_ways(name):
    for p, m, v in sizes(name, ranks=(1, 3), microbatches=(1, 6)):
        schedule = make(name, num_ranks=p, num_microbatches=m, stages_per_rank=v)
        assert from_csv(schedule.to_csv()) == schedule
        assert from_csv(schedule.to_csv(), name="again").to_csv() == schedule.to_csv()


def test_csv_passes_over_idle_cells_and_a_mark_of_excel_and_reads_overlapped_pairs():
    text = '0F0,,,"0B0"\r\n,1F0, 1B0 ,\r\n'
    assert from_csv(text) == Schedule("mine", rows("0F0 0B0", "1F0 1B0"))
    assert from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n") == Schedule("mine", rows("0F0 0F1 0B0 0B1"))
    assert from_csv("\ufeff0F0,0B0\r\n") == Schedule("mine", rows("0F0 0B0"))
    assert from_csv("0F0,0B0\r1F0,1B0\r").num_ranks == 2


def test_the_schedule_lab_needs_neither_jax_nor_numpy():
    code = """
import sys, types
package = types.ModuleType("jaxpp")
package.__path__ = [sys.argv[1]]
sys.modules |= {"jax": None, "jaxlib": None, "numpy": None, "scipy": None, "flax": None, "optax": None, "jaxpp": package}
from jaxpp.schedule import SCHEDULES, make, simulate
print(sum(simulate(make(name, num_ranks=2, num_microbatches=4), transfer=0.5).makespan > 0 for name in SCHEDULES) == len(SCHEDULES))
"""
    folder = str(pathlib.Path(jaxpp.__file__).parent)
    found = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=False)
    assert found.stdout == "True\n", found.stderr
