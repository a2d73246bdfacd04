"""What no schedule can be, and what no clock can run, is refused with its place: one table for each function of the room."""

import pytest

import jaxpp.schedule as schedules
from jaxpp.errors import ScheduleError
from jaxpp.schedule import Action, Kind, Schedule, flow, forward, from_csv, make, parse, ring, simulate, synthesise

ONE = make("1f1b", num_ranks=3)
OWNERS = "stage_to_rank is a sequence that gives each stage the rank of a row"
COUNTS = "counts are whole numbers of at least 1"


def made(*rows, owners=None, groups=None):
    return Schedule("mine", [row.split() if isinstance(row, str) else row for row in rows], owners, num_groups=groups)


ROWS = {  # rows, and the lines of the error
    ("0F0 0F0 0B0",): ["0F0, rank 0: a duplicate", ">0F0<"],
    ("0F0 0F1 0B1",): ["0B0 is missing", ">0B0 missing<"],
    ("0F0 0I0",): ["0W0 is missing", ">0W0 missing<"],
    ("0F0 0W0",): ["0I0 is missing", ">0I0 missing<"],
    ("0F0 0B0 0I0 0W0",): ["0B0 beside 0I0 beside 0W0", ">0B0< >0I0< >0W0<"],
    ("0F0 0F1 0B0 0I0 0W0",): ["0B1 is missing", ">0B1 missing<"],  # a count of backwards does not see it
    ("0B0",): ["0F0 is missing", ">0F0 missing<"],
    ("0F0 0B0 1F0 1B0", "1F1 1B1", "0F1 0B1"): ["0F1 stands in the row of rank 2, its stage belongs to rank 0", ">0F1<"],
    ("0F0 0B0 5F0",): ["stage 5 is out of range, for there is no stage 1: 5F0", ">5F0<"],
    ("0F0 0B0 0F7",): ["microbatch 7 is out of range, for there is no microbatch 1: 0F7", ">0F7<"],
    ("0F0 0B0", "1F0 1B0", "3F0 3B0"): ["stage 3 is out of range, for there is no stage 2: 3F0, 3B0"],
    ("1F0 1B0",): ["stage 1 is out of range, for there is no stage 0"],
    ("0F1 0B1",): ["microbatch 1 is out of range, for there is no microbatch 0"],
    ("0F0 0F2 0F3 0F4 0F5",): ["microbatches 2 to 5 are out of range, for there is no microbatch 1: 0F2, 0F3"],
    ("1F0 0F0 0B0", "1F0 1B0"): ["1F0 stands in the row of rank 0, its stage belongs to rank 1"],
    ("0F0 0B0", ()): ["rank 1: no action"],
    (): ["no rows"],
    ("0F0 0B0", "1F0 1X0"): ["rank 1, cell 1: '1X0'"],
    ((0, None),): ["rank 0, cell 0: 0"],
    ((Action(0, Kind.F, 0), Action(0, Kind.B, 0), Action(0, Kind.F, -1)),): ["rank 0, cell 2: Action("],
    ((Action(0, "X", 0),),): ["rank 0, cell 0: Action("],
    ((Action(False, Kind.F, 1),),): ["rank 0, cell 0: Action("],
    (" ".join([*(f"0F{i}" for i in range(41)), "0B40"]),): ["0B0 is missing\n", "\n       and 30 more.\n", "(34 more)"],
    # those that wait for one another, with the shortest cycle
    ("0F0 0B0 0F1 0B1", "1F1 1F0 1B0 1B1"): [
        "Got: 0B0 needs 1B0\n       1B0 stands after 1F1 in its row\n       1F1 needs 0F1\n       0F1 stands after 0B0 in its row.",
        *(">0B0<", ">1B0<", ">1F1<", ">0F1<"),
    ],
    ("0F0 0F1 0B0 0B1", "1B0 1F0 1F1 1B1"): ["Got: 1B0 needs 1F0\n       1F0 stands after 1B0 in its row.", ">1B0<", ">1F0<"],
    ("0F0 0W0 0I0",): ["Got: 0W0 needs 0I0\n       0I0 stands after 0W0 in its row.", ">0W0<", ">0I0<"],
    ("0F0 0B1 0F1 0B0", "1F0 1B0 1F1 1B1"): ["Got: 0B1 needs 0F1\n       0F1 stands after 0B1 in its row.", ">0B1<", ">0F1<"],
}


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: ROWS[rows][0].split("\n")[0])
def test_rows_that_are_no_schedule_are_refused(rows):
    with pytest.raises(ScheduleError) as error:
        made(*rows)
    text = str(error.value)
    assert all(line in text for line in ROWS[rows]), text
    assert len(text.splitlines()) < 30
    if ROWS[rows][0].startswith("Got: "):  # and nothing else is marked
        assert text.count(">") == len(ROWS[rows]) - 1


RINGS = [  # rows of forwards, the number of groups, and the lines of the error
    (("0F1 0F0", "1F0 1F1"), 1, ["0F1 needs the token of 1F0", "0F0 stands after 0F1 in its row"]),
    (("0F2 0F0 0F1 0F3", "1F0 1F1 1F2 1F3"), 2, ["0F2 needs the token of 1F0", "1F0 needs 0F0"]),
    (("0F0 0F1 0B0 0B1",), 2, ["a ring has forwards only", "Got: 0B0, rank 0", ">0B1<"]),
    (("0F0 0F1 0F2",), 2, ["so the number of groups divides the number of passes", "num_groups=2, 3 passes", "num_groups=1 or 3"]),
    (("0F0 0F1",), 0, ["Got: num_groups=0, 2 passes"]),
    (("0F0 0F1",), True, ["Got: num_groups=True, 2 passes"]),
    (("0F0 0F1", "1F0"), None, ["each stage runs each microbatch's forward once, on the rank", "1F1 is missing", ">1F1 missing<"]),
    (("0F0 0F0",), None, ["0F0, rank 0: a duplicate"]),
]


@pytest.mark.parametrize(("rows", "groups", "lines"), RINGS)
def test_rows_that_contradict_the_ring_or_lack_a_forward_are_refused(rows, groups, lines):
    with pytest.raises(ScheduleError) as error:
        made(*rows, groups=groups)
    assert all(line in str(error.value) for line in lines), str(error.value)
    assert "missing" in lines[-1] or "0B0 is missing" not in str(error.value)


def each(function, argument, wrong, *lines, **given):
    """One argument of a function, and all that it cannot be."""
    for value in wrong:
        got = [line.format(value=value) if "{value" in line else line for line in lines]
        yield pytest.param(
            lambda value=value: function(**given | {argument: value}), got, id=f"{function.__name__} {argument} {value}"[:60]
        )


CELL = "line 1, cell 2: {value!r}"
OFFLOAD = "offload is the number of microbatches whose residuals stay, at least 0, or None; or a sequence of one a stage"
CAPACITY = "simulate(...): capacity is the number of ranks that compute at full speed at once, more than 0."
TWO, SIZES = {"schedule": make("1f1b", num_ranks=2)}, {"num_ranks": 2, "num_microbatches": 2}
NOT_ACTIONS = ["", "F0", "2F", "2X0", "0B1.5", "1BOGUS", "-1F0", "2 F0", "02F0", "\u0662F0", 3, None, "9" * 5000]
WRONG_OWNERS = [(0, -1), (0.0, 1), "01", {0: 0, 1: 1}, 3, (0, 2)]
CALLS = [
    *each(parse, "text", NOT_ACTIONS, "an action is written"),
    *each(
        lambda owners: made("0F0 0B0", "1F0 1B0", owners=owners),
        "owners",
        [(0, -1), (0.0, 1), "01", {0: 0, 1: 1}, 3, (0, 2)],
        OWNERS,
    ),
    *each(lambda owners: made("1F0 1B0", "0F0 0B0", owners=owners), "owners", [(0, 1)], "1F0 stands in the row of rank 0"),
    *each(lambda rows: Schedule("mine", rows), "rows", [7], "rank 0, cell 0: 7"),
    *each(make, "name", ["gpip"], "Fix: write 'gpipe'", num_ranks=2),
    *each(make, "name", ["foo", None, 1, ["1f1b"]], "Fix: pass one of these names, or a Schedule", num_ranks=2),
    *each(make, "num_ranks", [0, -1, 1.5, True], COUNTS, name="1f1b", num_microbatches=2),
    *each(make, "num_microbatches", [0, -1], COUNTS, name="1f1b", num_ranks=1),
    *each(make, "stages_per_rank", [0], COUNTS, name="1f1b", num_ranks=2),
    *each(make, "num_microbatches", [13], "Fix: pass num_microbatches=12 or num_microbatches=15.", name="interleaved", num_ranks=4),
    *each(make, "num_microbatches", [7], "Fix: pass num_microbatches=8.", name="dualpipe-v", num_ranks=4),
    *each(make, "stages_per_rank", [2], "pass stages_per_rank=1, or use 'interleaved' or 'looped-bfs'.", name="1f1b", num_ranks=4),
    *each(make, "stages_per_rank", [3], "Fix: pass stages_per_rank=2.", name="zb-v", num_ranks=4),
    *each(
        lambda cell: from_csv(f"0F0,{cell},0B0\n1F0,x\n"),
        "cell",
        ["0B1.5", "1BOGUS", "0SEND_F1", "0UNSHARD", "(0F1)OVERLAP_F_B"],
        CELL,
        "line 2, cell 2: 'x'",
    ),
    *each(from_csv, "text", [None, "", "0F0,0B0\n\n1F0,1B0\n"], "Got: "),
    *each(forward, "num_ranks", [0, 1.5], COUNTS, num_microbatches=1),
    *each(ring, "num_groups", [0, 1.5], COUNTS, num_ranks=1, num_turns=1),
    *each(ring, "num_turns", [True], COUNTS, num_ranks=1, num_groups=1),
    *each(flow, "num_steps", [0], "num_steps", schedule=ONE),
    *each(flow, "schedule", [forward(2, 2)], "steps that train follow one another", num_steps=2),
    *each(simulate, "schedule", ["1f1b"], "it takes a Schedule"),
    *each(simulate, "forward", [-1, [1, 1], {1, 2, 3}, 10**400, True], "Got: forward=", schedule=ONE),
    *each(simulate, "input_grad", [float("nan")], "Got: input_grad=", schedule=ONE),
    *each(simulate, "transfer", ["fast"], "Got: transfer=", schedule=ONE),
    *each(simulate, "transfer", [[1, 1]], "the last is that of a token back to stage 0", schedule=ring(3, 3, 2)),
    *each(simulate, "dispatch", [float("inf")], "Got: dispatch=", schedule=ONE),
    *each(simulate, "weight_grad", [None], "Got: weight_grad=", schedule=ONE),
    *each(
        simulate,
        "rank_to_process",
        [2, (0,), (0, 1, 2), (0, -1), (0, 0.5), (0, True), "01", [0, None]],
        "each rank has the number of one process",
        "Got: rank_to_process={value!r}.",
        "Fix: pass 2 of them",
        **TWO,
    ),
    *each(
        simulate,
        "offload",
        [-1, 1.5, True, "1", [1], [1, 2, 3], [1, -1], {0: 1}],
        f"simulate(...): {OFFLOAD}.\n  Got: offload={{value!r}}.\n  Fix: pass offload=1, or 2 of them.",
        **TWO,
    ),
    *each(
        simulate,
        "capacity",
        [0, -1, float("nan"), float("inf"), True, "2", [2]],
        f"{CAPACITY}\n  Got: capacity={{value!r}}.\n  Fix: pass capacity=2 for two cores, or None.",
        **TWO,
    ),
    *each(simulate, "overlap", ["no", 2, None], "Got: overlap={value!r}.", "Fix: pass overlap=True or overlap=False.", **TWO),
    *each(simulate, "queued", ["yes", None], "overlap and queued are either True or False.", "Got: queued={value!r}.", **TWO),
    *each(simulate, "copy", [-1, [1], "slow", None], "Got: copy={value!r}.", offload=1, **TWO),
    *each(synthesise, "num_ranks", [0], COUNTS, "pass 1 or more", num_microbatches=2),
    *each(synthesise, "effort", [0], COUNTS, "pass 1 or more", **SIZES),
    *each(synthesise, "forward", [-1], "a cost is a finite number of at least 0", "or 2 of them (transfer: 1 will do)", **SIZES),
    *each(synthesise, "transfer", [[1, 2, 3]], "or a sequence of one a stage", "transfer: 1 will do", **SIZES),
    *each(synthesise, "residuals", [float("inf")], "a cost is a finite number", "pass one number, or 2 of them", **SIZES),
    *each(synthesise, "room", [[1, 2, 3]], "room is a finite number of at least 0, or a sequence of one a rank", **SIZES),
    *each(
        synthesise,
        "room",
        [[2, 2]],
        "synthesise(...): each rank has room for the residuals of one microbatch, those of all its stages.",
        "Got: rank 1 needs 3, and has room for 2.",
        "Fix: pass room=3 or more; or use smaller microbatches, more ranks, or a remat that keeps less.",
        num_ranks=2,
        num_microbatches=4,
        residuals=[1, 3],
    ),
    *each(synthesise, "split", ["no"], "split is either True or False", "pass split=True or split=False", **SIZES),
    *each(synthesise, "stage_to_rank", [[0, 2]], OWNERS, "numbers below 2", **SIZES),
    *each(synthesise, "stage_to_rank", [[0, 0]], "each rank owns at least one stage", "pass num_ranks=1", **SIZES),
    *(
        param
        for name, wrong in {"num_steps": 0, "slots": 0, "load": -1, "store": [1, 2], "compute": [1, 2, -3]}.items()
        for param in each(
            schedules.simulate_prefetch, name, [wrong], "simulate_prefetch", f"{name}=", num_steps=3, compute=1, load=1
        )
    ),
]


@pytest.mark.parametrize(("call", "lines"), CALLS)
def test_what_is_no_argument_is_refused(call, lines):
    with pytest.raises(ScheduleError) as error:
        call()
    assert all(line in str(error.value) for line in lines), str(error.value)


def test_zero_bubble_is_told_by_which_names_there_is_such_a_schedule():
    with pytest.raises(ScheduleError, match="Fix: write 'zb-h1', 'zb-h2' or 'zb-v'"):
        make("ZeroBubble", num_ranks=2)
