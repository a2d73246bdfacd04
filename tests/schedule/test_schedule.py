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
from jaxpp.schedule import SCHEDULES, Action, Kind, Schedule, dependencies, from_csv, make, parse
from jaxpp.schedule.clock import Timing, bars, replay
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


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "0B1.5", "1BOGUS", "-1F0", "2 F0", "02F0", "\u0662F0", 3, None, "9" * 5000]
)
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError, match="an action is written"):
        parse(text)


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


@pytest.mark.parametrize("file", PYTORCH, ids=lambda file: file.stem)
def test_the_order_of_each_rank_is_pytorchs(file):
    name, size = file.stem.rsplit("_", 1)
    p, m, v = map(int, size.split("x"))
    assert make(name, num_ranks=p, num_microbatches=m, stages_per_rank=v) == from_csv(file.read_text())


def test_a_v_puts_first_and_last_stage_on_rank_0_and_others_are_dealt_round_robin():
    assert make("interleaved", num_ranks=3, num_microbatches=3, stages_per_rank=2).stage_to_rank == (0, 1, 2, 0, 1, 2)
    for name in ("zb-v", "v-half", "v-min", "dualpipe-v"):
        assert make(name, num_ranks=3).stage_to_rank == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_tables_are_the_golden_ones(name):
    m = 6 if name == "dualpipe-v" else 4
    assert make(name, num_ranks=3, num_microbatches=m).table(width=120) + "\n" == (GOLDEN / f"{name}_3x{m}.txt").read_text()


def test_the_heading_counts_in_singular_and_plural():
    assert make("naive", num_ranks=1, num_microbatches=1).heading == "naive: 1 rank, 1 stage, 1 microbatch"
    assert make("gpipe", num_ranks=2, num_microbatches=3).heading == "gpipe: 2 ranks, 2 stages, 3 microbatches"


def test_a_table_is_wrapped_to_the_width_and_a_long_one_becomes_an_overview():
    schedule = make("1f1b", num_ranks=4, num_microbatches=8)
    assert max(map(len, schedule.table(width=80).splitlines())) <= 80
    assert all(schedule.table(width=80).count(str(action)) for row in schedule.rows for action in row)
    long = make("1f1b", num_ranks=16, num_microbatches=64).table(width=80).splitlines()
    assert len(long) == 17
    assert max(map(len, long)) <= 80
    assert long[1][6:10] == "FFFF"
    assert long[16][6:8] == "··"


def test_nothing_ties_one_microbatch_to_another():
    schedule = make("1f1b", num_ranks=4, num_microbatches=6)
    present = frozenset(schedule.order)
    for action in schedule.order:
        assert {need.microbatch for need in dependencies(action, 4, present)} <= {action.microbatch}


def rows(*texts):
    return tuple(tuple(text.split()) for text in texts)


@pytest.mark.parametrize(
    ("cells", "message", "marked"),
    [
        (("0F0 0F0 0B0",), "0F0, rank 0: a duplicate", ">0F0<"),
        (("0F0 0F1 0B1",), "0B0 is missing", ">0B0 missing<"),
        (("0F0 0I0",), "0W0 is missing", ">0W0 missing<"),
        (("0F0 0W0",), "0I0 is missing", ">0I0 missing<"),
        (("0F0 0B0 0I0 0W0",), "0B0 beside 0I0 beside 0W0", ">0B0< >0I0< >0W0<"),
        (("0F0 0F1 0B0 0I0 0W0",), "0B1 is missing", ">0B1 missing<"),  # a count of backwards does not see it
        (("0B0",), "0F0 is missing", ">0F0 missing<"),
        (("0F0 0B0 1F0 1B0", "1F1 1B1", "0F1 0B1"), "0F1 stands in the row of rank 2, its stage belongs to rank 0", ">0F1<"),
        (("0F0 0B0 5F0",), "stage 5 is out of range, for there is no stage 1: 5F0", ">5F0<"),
        (("0F0 0B0 0F7",), "microbatch 7 is out of range, for there is no microbatch 1: 0F7", ">0F7<"),
    ],
)
def test_an_incomplete_or_misplaced_schedule_is_refused_when_made(cells, message, marked):
    with pytest.raises(ScheduleError) as error:
        Schedule("mine", rows(*cells))
    assert message in str(error.value)
    assert marked in str(error.value)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([["0F0", "0B0"], ["1F0", "1B0"], ["3F0", "3B0"]], "stage 3 is out of range, for there is no stage 2: 3F0, 3B0"),
        ([["1F0", "1B0"]], "stage 1 is out of range, for there is no stage 0"),
        ([["0F1", "0B1"]], "microbatch 1 is out of range, for there is no microbatch 0"),
        ([[f"0F{i}" for i in (0, 2, 3, 4, 5)]], "microbatches 2 to 5 are out of range, for there is no microbatch 1: 0F2, 0F3"),
        ([["1F0", "0F0", "0B0"], ["1F0", "1B0"]], "1F0 stands in the row of rank 0, its stage belongs to rank 1"),
        ([["0F0", "0B0"], []], "rank 1: no action"),
        ([], "no rows"),
        (["0F0 0B0", "1F0 1X0"], "rank 1, cell 1: '1X0'"),
        ([[0, None]], "rank 0, cell 0: 0"),
        ([[Action(0, Kind.F, 0), Action(0, Kind.B, 0), Action(0, Kind.F, -1)]], "rank 0, cell 2: Action("),
        ([[Action(0, "X", 0)]], "rank 0, cell 0: Action("),
        ([[Action(False, Kind.F, 0)]], "rank 0, cell 0: Action("),
        (7, "rank 0, cell 0: 7"),
    ],
)
def test_gaps_and_what_is_no_action_are_named_with_their_place(cells, message):
    with pytest.raises(ScheduleError) as error:
        Schedule("mine", cells)
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) < 30


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


@pytest.mark.parametrize("owners", [(0, -1), (0.0, 1), "01", {0: 0, 1: 1}, 3])
def test_owners_that_are_none_are_refused(owners):
    with pytest.raises(ScheduleError, match="stage_to_rank is a sequence that gives each stage the rank of a row"):
        Schedule("mine", rows("0F0 0B0", "1F0 1B0"), owners)


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
        times = replay(schedule.rows, schedule.stage_to_rank, Timing(durations, hops))
        ran = {bar.action: bar for bar in bars(schedule.rows, times)}
        assert set(ran) == present
        for rank, row in enumerate(schedule.rows):
            for before, action in zip([None, *row], row, strict=False):
                needs = dependencies(action, schedule.num_stages, present)
                arrivals = [
                    ran[need].end + (hops[min(need.stage, action.stage)] if need.stage != action.stage else 0) for need in needs
                ]
                assert ran[action].start == max([0 if before is None else ran[before].end, *arrivals])
                assert ran[action].end - ran[action].start == durations[action] and ran[action].rank == rank


def test_all_violations_are_listed_and_a_long_list_is_cut():
    with pytest.raises(ScheduleError) as error:
        Schedule("mine", [[*(f"0F{i}" for i in range(41)), "0B40"]])
    assert "0B0 is missing\n" in str(error.value)
    assert "\n       and 30 more.\n" in str(error.value)
    assert "(34 more)" in str(error.value)


@pytest.mark.parametrize(
    ("cells", "cycle"),
    [
        (
            ("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"),
            [
                "0B0 needs 1B0",
                "1B0 stands after 1F1 in its row",
                "1F1 needs 0F1",
                "0F1 stands after 0B0 in its row",
            ],
        ),
        (("0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1"), ["1B0 needs 1F0", "1F0 stands after 1B0 in its row"]),
        (("0F0 0W0 0I0",), ["0W0 needs 0I0", "0I0 stands after 0W0 in its row"]),
        (
            ("0F0 0B1 0F1 0B0", "1F0 1B0 1F1 1B1"),
            ["0B1 needs 0F1", "0F1 stands after 0B1 in its row"],
        ),
    ],
)
def test_rows_that_wait_for_one_another_are_refused_with_the_shortest_cycle_marked(cells, cycle):
    with pytest.raises(ScheduleError) as error:
        Schedule("mine", rows(*cells))
    text = str(error.value)
    assert text.split("Got: ")[1].split(".\n", maxsplit=1)[0].split("\n       ") == cycle
    for line in cycle:
        assert f">{line.split()[0]}<" in text
    assert text.count(">") == len(cycle)


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


def test_i_and_w_may_stand_for_b():
    assert Schedule("mine", rows("0F0 0I0 0W0", "1F0 1I0 1W0")).num_stages == 2


def test_owners_are_read_off_the_rows_or_given():
    cells = rows("1F0 1B0", "0F0 0B0")
    assert Schedule("mine", cells).stage_to_rank == (1, 0)
    with pytest.raises(ScheduleError, match="1F0 stands in the row of rank 0, its stage belongs to rank 1"):
        Schedule("mine", cells, (0, 1))
    with pytest.raises(ScheduleError, match="stage_to_rank is a sequence that gives each stage the rank of a row"):
        Schedule("mine", cells, (0, 2))


def test_an_unknown_name_gets_the_nearest_one():
    with pytest.raises(ScheduleError, match="Fix: write 'gpipe'"):
        make("gpip", num_ranks=2)
    for name in ("foo", None, 1, ["1f1b"]):
        with pytest.raises(ScheduleError, match="Fix: pass one of these names, or a Schedule"):
            make(name, num_ranks=2)


@pytest.mark.parametrize(("p", "m", "v"), [(0, 1, 1), (1, 0, 1), (-1, -1, 1), (1.5, 2, 1), (2, 2, 0), (True, 2, 1)])
def test_counts_below_one_are_refused(p, m, v):
    with pytest.raises(ScheduleError, match="counts are whole numbers of at least 1"):
        make("1f1b", num_ranks=p, num_microbatches=m, stages_per_rank=v)


@pytest.mark.parametrize(
    ("name", "options", "fix"),
    [
        ("interleaved", {"num_ranks": 4, "num_microbatches": 13}, "pass num_microbatches=12 or num_microbatches=15"),
        ("dualpipe-v", {"num_ranks": 4, "num_microbatches": 7}, "pass num_microbatches=8"),
        ("1f1b", {"num_ranks": 4, "stages_per_rank": 2}, "pass stages_per_rank=1, or use 'interleaved' or 'looped-bfs'"),
        ("zb-v", {"num_ranks": 4, "stages_per_rank": 3}, "pass stages_per_rank=2"),
    ],
)
def test_sizes_a_schedule_cannot_do_are_refused_with_the_nearest_ones(name, options, fix):
    with pytest.raises(ScheduleError) as error:
        make(name, **options)
    assert f"Fix: {fix}." in str(error.value)


@pytest.mark.parametrize("name", SCHEDULES)
def test_csv_round_trips_both_ways(name):
    for p, m, v in sizes(name, ranks=(1, 3), microbatches=(1, 6)):
        schedule = make(name, num_ranks=p, num_microbatches=m, stages_per_rank=v)
        assert from_csv(schedule.to_csv()) == schedule
        assert from_csv(schedule.to_csv(), name="again").to_csv() == schedule.to_csv()


def test_csv_has_no_text_no_action_or_a_mark_of_excel():
    assert from_csv("\ufeff0F0,0B0\r\n") == Schedule("mine", rows("0F0 0B0"))
    assert from_csv("0F0,0B0\r1F0,1B0\r").num_ranks == 2
    for text in (None, "", "0F0,0B0\n\n1F0,1B0\n"):
        with pytest.raises(ScheduleError):
            from_csv(text)


def test_csv_passes_over_idle_cells_and_reads_overlapped_pairs():
    text = '0F0,,,"0B0"\r\n,1F0, 1B0 ,\r\n'
    assert from_csv(text) == Schedule("mine", rows("0F0 0B0", "1F0 1B0"))
    assert from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n") == Schedule("mine", rows("0F0 0F1 0B0 0B1"))


@pytest.mark.parametrize("cell", ["0B1.5", "1BOGUS", "0SEND_F1", "0UNSHARD", "(0F1)OVERLAP_F_B"])
def test_csv_names_every_cell_it_cannot_read(cell):
    with pytest.raises(ScheduleError) as error:
        from_csv(f"0F0,{cell},0B0\n1F0,x\n")
    assert f"line 1, cell 2: {cell!r}" in str(error.value)
    assert "line 2, cell 2: 'x'" in str(error.value)


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
