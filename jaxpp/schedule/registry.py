"""The schedules, and ``make``, which builds one by name. A new schedule is a function here, and a line in ``SCHEDULES``.

Stages lie round robin, stage s on rank s modulo p, or in a V. With p ranks, v stages on each and m microbatches, the drawings show
which microbatch each rank runs when; B takes two slots, I and W one each (not to scale).
"""

import difflib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from jaxpp.errors import ScheduleError
from jaxpp.errors.tracebacks import entry
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.clock import ActionRow
from jaxpp.schedule.validate import check_counts


def naive(num_ranks: int, num_microbatches: int) -> Schedule:
    """One microbatch at a time, through all stages and back: the textbook picture of an idle pipeline.

    ::

        rank 0   F0             B0  F1             B1
        rank 1       F0     B0          F1     B1
        rank 2          F0B0               F1B1

    Bubble (p - 1) / p, whatever the number of microbatches; residuals of one microbatch on every rank.
    """
    return _one_stage_a_rank("naive", [[(num_microbatches, "F B")]] * num_ranks)


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    ::

        rank 0   F0 F1 F2 F3          B0 B1 B2 B3
        rank 1      F0 F1 F2 F3    B0 B1 B2 B3

    Bubble (p - 1) / (m + p - 1); residuals of all m microbatches on every rank. The order is PyTorch's ``ScheduleGPipe``.
    Reference: Huang et al., GPipe, arXiv:1811.06965.
    """
    return _one_stage_a_rank("gpipe", [[(num_microbatches, "F"), (num_microbatches, "B")]] * num_ranks)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """As soon as a microbatch can go back, it does: the bubble of gpipe, the memory of the pipeline's depth.

    ::

        rank 0   F0 F1 F2       B0    F3 B1    B2    B3
        rank 1      F0 F1    B0    F2 B1    F3 B2    B3
        rank 2         F0 B0    F1 B1    F2 B2    F3 B3

    Rank r warms up with p - r - 1 forwards, then alternates one forward, one backward (steady), then drains (cool_down). Bubble
    (p - 1) / (m + p - 1); residuals of min(m, p - r) microbatches on rank r. PyTorch's ``Schedule1F1B`` runs this order (its
    printed table differs on the last rank). Reference: Narayanan et al., arXiv:2104.04473, section 2.2.1 (PipeDream-Flush).
    """
    return _one_stage_a_rank("1f1b", [_alternating(num_microbatches, num_ranks - r - 1) for r in range(num_ranks)])


def eager_1f1b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1f1b with more forwards ahead, so that transfers hide behind work: for links that are slow.

    ::

        rank 0   F0 F1 F2 F3       B0    B1    B2    B3
        rank 1      F0 F1 F2    B0 F3 B1    B2    B3
        rank 2         F0 B0 F1 B1 F2 B2 F3 B3

    Rank r has 2 (p - r) - 1 forwards ahead, where 1f1b has just as many as it needs if transfers take no time. Then no rank but the
    last waits for one while it lasts no longer than half a forward, and the bubble is that of 1f1b; residuals of
    min(m, 2 (p - r) - 1) microbatches on rank r. NVIDIA's JaxPP calls the order ``Eager1F1B``. Reference: Zhuang et al., On
    Optimizing the Communication of Model Parallelism, arXiv:2211.05322.
    """
    return _one_stage_a_rank("eager-1f1b", [_alternating(num_microbatches, 2 * (num_ranks - r - 1)) for r in range(num_ranks)])


_Phases = Sequence[tuple[int, str]]  # a row as words, each so many times, such as (3, "F B"); see ``_written``


def _one_stage_a_rank(name: str, phases: Sequence[_Phases]) -> Schedule:
    return Schedule(name, tuple(_written({"": rank}, each) for rank, each in enumerate(phases)))


def _alternating(count: int, warm_up: int) -> _Phases:
    """So many forwards, then one forward and one backward in turn, then the other backwards."""
    ahead = min(count, warm_up)
    return [(ahead, "F"), (count - ahead, "F B"), (ahead, "B")]


def interleaved(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """1f1b with v stages on each rank, so that a microbatch passes every rank v times.

    ::

        rank 0   0F0 0F1 2F0 2F1 0F2 0F3     2B0 2F2 2B1 ...
        rank 1       1F0 1F1 3F0 3F1 3B0 1F2 3B1 1F3 1B0 ...

    Rank r warms up with (v - 1) k + 2 (p - r - 1) forwards, k microbatches at a time through each of its stages (k = p where p
    divides m), then alternates one forward, one backward. Bubble (p - 1) / (v m + p - 1) of the step; residuals of p + (p - 1) / v
    microbatches' full share on rank 0; v times the transfers. The number of microbatches must split into max(1, m // p) equal
    rounds. The order is PyTorch's ``ScheduleInterleaved1F1B``. Reference: Narayanan et al., arXiv:2104.04473, section 2.2.2.
    """
    size = num_microbatches // max(1, num_microbatches // num_ranks)

    def deal(kind: Kind, stages: Sequence[int]) -> list[Action]:
        rounds = range(0, num_microbatches, size)
        return [Action(stage, kind, first + k) for first in rounds for stage in stages for k in range(size)]

    def row(rank: int) -> ActionRow:
        stages = range(rank, num_ranks * stages_per_rank, num_ranks)
        next_of = {Kind.F: iter(deal(Kind.F, stages)), Kind.B: iter(deal(Kind.B, stages[::-1]))}
        phases = _alternating(num_microbatches * stages_per_rank, (stages_per_rank - 1) * size + 2 * (num_ranks - rank - 1))
        return tuple(next(next_of[Kind(word)]) for times, words in phases for word in words.split() * times)

    return Schedule("interleaved", tuple(map(row, range(num_ranks))), tuple(range(num_ranks)) * stages_per_rank)


def looped_bfs(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """The order of gpipe with v stages on each rank: all microbatches through one stage, then the next; backwards reversed.

    ::

        rank 0   0F0 0F1 0F2 2F0 2F1 2F2                 2B2     2B1     2B0     0B2     0B1     0B0
        rank 1       1F0 1F1 1F2 3F0 3F1 3F2 3B2     3B1     3B0     1B2     1B1     1B0

    Bubble (p - 1) / (v m + p - 1) of the step, as interleaved, for any number of microbatches; residuals of all m microbatches on
    every rank. Each stage's parameters are wanted in one stretch, which is what fully sharded parameters like. The order is
    PyTorch's ``ScheduleLoopedBFS``: backwards run from the last microbatch to the first, so gradients are summed in reverse, and
    their last bits differ from other schedules'. Reference: Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv:2211.05953.
    """
    rows = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * stages_per_rank, num_ranks)
        forwards = [Action(stage, Kind.F, i) for stage in stages for i in range(num_microbatches)]
        rows.append((*forwards, *(action._replace(kind=Kind.B) for action in reversed(forwards))))
    return Schedule("looped-bfs", tuple(rows), tuple(range(num_ranks)) * stages_per_rank)


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """The backward split in two, and the half for which nobody waits put where 1f1b idles, within 1f1b's memory.

    I makes the input's cotangent, which another rank waits for; W the parameters' gradients::

        rank 0      F0 F1 F2       I0 W0 F3 I1 W1    I2 W2    I3 W3
        rank 1         F0 F1    I0 F2 I1 W0 F3 I2 W1    I3 W2 W3
        rank 2            F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

    Rank r has p - r forwards in flight and lags r weight gradients behind, so residuals of min(m, p) microbatches on every rank (a
    residual lives until W). Bubble, with F = I = W = 1, (p - 1) / (3 m + p - 1). XLA may fuse and round I and W otherwise than B:
    the last bits of a gradient may differ from 1f1b's, not between the schedules that split every backward. The order is that of
    PyTorch's ``ScheduleInterleavedZeroBubble`` (ZB1P) at one stage a rank. Reference: Qi et al., Zero Bubble, arXiv:2401.10241.
    """
    return _one_stage_a_rank("zb-h1", [_split(num_microbatches, num_ranks - r - 1, lag=r) for r in range(num_ranks)])


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """zb-h1 with twice the forwards in flight, so that the first cotangent never finds a rank idle.

    Rank r has 2 (p - r) - 1 forwards in flight and lags 2 r weight gradients behind, so residuals of min(m, 2 p - 1) microbatches
    on every rank. No rank idles between its first and its last action (m >= 2 p - 1). The makespan is that of zb-h1, but where
    steps follow one another without a barrier nothing is lost.
    """
    return _one_stage_a_rank("zb-h2", [_split(num_microbatches, 2 * (num_ranks - r - 1), lag=2 * r) for r in range(num_ranks)])


def _split(count: int, warm_up: int, lag: int) -> _Phases:
    """``warm_up`` forwards, then one forward, one input gradient, and the weight gradient of ``lag`` microbatches before."""
    ahead = min(count, warm_up)
    return [(ahead, "F"), *((1, "F " * (i + ahead < count) + "I" + " W" * (i >= lag)) for i in range(count)), (lag, "W")]


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two stages a rank, in a V (rank r owns stages r and 2 p - 1 - r), and forwards enough to never wait for a cotangent.

    ::

        zb-v, rank 0   0F0 0F1 0F2     3F0 3I0 3W0 0F3 0I0 0W0 3F1 3I1 3W1 ...
              rank 1       1F0 2F0 1F1 2F1 2I0 2W0 1F2 2I1 2W1 1I0 1W0 ...

    A microbatch turns around on the last rank and ends on the first, so memory is the same on every rank, and can be chosen:

    ==========  ========================================  ===================================
    name        bubble in slots, F = I = W = 1 a stage    residuals, in microbatches of a rank
    ==========  ========================================  ===================================
    ``zb-v``    p - 1 (*)                                 min(m, p)
    ``v-half``  (7 p - 8 - p % 2) / 2                     (p + 2) // 2
    ``v-min``   4 p - 5 + (p % 3 == 0)                    (p + 4) // 3
    ==========  ========================================  ===================================

    The step without a bubble takes 6 m slots; formulae for p >= 2, m >= 2 p. (*) and no rank idles between its actions.

    The order is PyTorch's ``ScheduleZBVZeroBubble``. v-half and v-min repeat one *building block*, the path of a microbatch, every
    six slots: the time a microbatch spends between F and W, over six, is what a rank holds. In v-min it moves on at once, one slot
    a stage; in v-half going down the V takes two. The last bits of gradients are those of zb-h1. References: Qi et al.,
    arXiv:2401.10241, section 6; Qi et al., Pipeline Parallelism with Controllable Memory, arXiv:2405.15362.
    """
    full = max(num_microbatches, 2 * num_ranks - 1)
    rows = []
    for rank in range(num_ranks):
        after = num_ranks - rank
        phases = [
            (2 * after - 1, "dF"),
            (rank, "uF dF"),
            (after, "uF uI uW"),
            (full - 2 * num_ranks + rank + 1, "dF dI dW uF uI uW"),
            (after - 1, "dI dW uF uI uW"),
            (rank, "dI uI"),
            (after, "dI dW"),
            (full, "uW"),
            (full, "dW"),
        ]
        rows.append(tuple(a for a in _written(_in_v(rank, num_ranks), phases) if a.microbatch < num_microbatches))
    return _v("zb-v", num_ranks, rows)


def _v(name: str, num_ranks: int, rows: Sequence[ActionRow]) -> Schedule:
    return Schedule(name, tuple(rows), (*range(num_ranks), *reversed(range(num_ranks))))


def _in_v(rank: int, num_ranks: int) -> Mapping[str, int]:
    """What the stages of a rank are called: on the way down the V, and on the way up."""
    return {"d": rank, "u": 2 * num_ranks - 1 - rank}


def _written(stages: Mapping[str, int], phases: _Phases) -> ActionRow:
    """A row of phases, each so many times some words, which begin with what ``stages`` call the rank's stages.

    ``dF`` is the next forward of the stage called ``d``, ``uI`` the next backward of that called ``u``; ``dW`` is the weight
    gradient that its stage owes longest, ``W`` that of any stage; nothing if none is owed.
    """
    row, owed = list[Action](), list[Action]()
    following = Counter[tuple[int, bool]]()
    for times, words in phases:
        for word in words.split() * times:
            kind, stage = Kind(word[-1]), stages.get(word[:-1])
            if kind == Kind.W:
                due = next((action for action in owed if stage in (None, action.stage)), None)
                if due is not None:
                    owed.remove(due)
                    row.append(due)
                continue
            assert stage is not None  # only W goes without
            action = Action(stage, kind, following[stage, kind == Kind.F])
            following[stage, kind == Kind.F] += 1
            row.append(action)
            if kind == Kind.I:
                owed.append(action._replace(kind=Kind.W))
    return tuple(row)


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Half of 1f1b's residuals, for about half of its bubble."""
    return _repeat("v-half", (2, 1, 2, 1), (2, 1, 1) if num_ranks % 2 else (4, 1, 5), num_ranks, num_microbatches)


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """A third of 1f1b's residuals, for about two thirds of its bubble."""
    return _repeat("v-min", (1, 1, 1, 1), (1, 1, 1) if num_ranks % 3 else (3, 1, 3), num_ranks, num_microbatches)


def _repeat(
    name: str, steps: tuple[int, int, int, int], turns: tuple[int, int, int], num_ranks: int, num_microbatches: int
) -> Schedule:
    """The block of every microbatch, six slots apart; weight gradients in the first slots left free.

    ``steps`` are the slots from rank to rank for F down the V, F up, I down and I up; ``turns`` those at the turns between them.
    """
    (forth, up, back, home), last = steps, num_ranks - 1
    top = forth * last + turns[0]
    middle = top + up * last + turns[1]
    end = middle + back * last + turns[2]
    rows = []
    for rank in range(num_ranks):
        above = 2 * num_ranks - 1 - rank
        path = (
            (forth * rank, rank, Kind.F),
            (top + up * (last - rank), above, Kind.F),
            (middle + back * rank, above, Kind.I),
            (end + home * (last - rank), rank, Kind.I),
        )
        slots = {start + 6 * i: Action(stage, kind, i) for start, stage, kind in path for i in range(num_microbatches)}
        row: list[Action] = []
        owed: deque[Action] = deque()
        for slot in range(min(slots), max(slots) + 1):
            if slot in slots:
                row.append(slots[slot])
                owed += [row[-1]._replace(kind=Kind.W)] * (row[-1].kind == Kind.I)
            elif owed:
                row.append(owed.popleft())
        rows.append((*row, *owed))
    return _v(name, num_ranks, rows)


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """The forward of one run against the backward of the other; two phases to fill, two to turn around, one steady, three to drain.

    ::

        rank 0   0F0 0F1 0F2     3F0 3I0 3W0 3F1 0F3 3B1     3F2 0B0     3B2 ...
        rank 1       1F0 2F0 1F1 2F1 2I0 2W0 2F2 1F2 2B0 ...

    DualPipe, DeepSeek's schedule for overlapping all-to-all with compute, cut in half and folded into a V by Sea AI Lab: in its
    main part each forward stands beside a backward of the rank's other stage. Here the two run one after the other; on a GPU their
    kernels may still overlap with each other's transfers.

    With F = I = W = 1 a stage, makespan 6 m + p - 1, the bubble of zb-v (the formula in DeepSeek's repository,
    (p - 1) (F&B + B - 3 W), gives twice that); residuals of 2 p + 1 stages, half a microbatch more than 1f1b. Needs at least as
    many microbatches as stages (2 p). The order is PyTorch's ``ScheduleDualPipeV``, its overlapped pairs written F, then B. Some
    backwards are split and some are not, so the last bits of gradients are neither 1f1b's nor zb-h1's. References: DualPipe could
    be better without the Dual, https://huggingface.co/blog/ufotalent/cut-in-half; DualPipe: DeepSeek-V3, arXiv:2412.19437.
    """
    rows = []
    for rank in range(num_ranks):
        after = num_ranks - rank - 1
        phases = [
            (2 * after, "dF"),
            (rank + 1, "dF uF"),
            (after, "uI W uF"),
            (num_microbatches - 2 * num_ranks + rank + 1, "dF uB uF dB"),
            (after, "uB uF dB"),
            # From the middle on, weight gradients are put off.
            *((1, "ud"[k % 2] + ("B" if k <= rank else "I")) for k in range(2 * (rank + 1))),
            (after, "W dI"),
            (num_microbatches, "W W"),
        ]
        rows.append(_written(_in_v(rank, num_ranks), phases))
    return _v("dualpipe-v", num_ranks, rows)


@dataclass(frozen=True)
class Recipe:
    """How to build a schedule, and for which sizes there is one."""

    build: Callable[..., Schedule]  # of num_ranks and num_microbatches, with stages_per_rank behind them if these vary
    stages_per_rank: int = 1
    varies: bool = False  # whether any number of stages a rank will do
    allows: Callable[[int, int], bool] = lambda num_ranks, num_microbatches: True  # noqa: ARG005
    rule: str = ""  # what ``allows`` asks of ranks and microbatches, in words


SCHEDULES: Mapping[str, Recipe] = MappingProxyType(
    {
        "naive": Recipe(naive),
        "gpipe": Recipe(gpipe),
        "1f1b": Recipe(one_f_one_b),
        "eager-1f1b": Recipe(eager_1f1b),
        "interleaved": Recipe(
            interleaved,
            2,
            varies=True,
            allows=lambda p, m: m % max(1, m // p) == 0,
            rule="the microbatches split into equal rounds, one for each time that the ranks go into them",
        ),
        "looped-bfs": Recipe(looped_bfs, 2, varies=True),
        "zb-h1": Recipe(zb_h1),
        "zb-h2": Recipe(zb_h2),
        "zb-v": Recipe(zb_v, 2),
        "v-half": Recipe(v_half, 2),
        "v-min": Recipe(v_min, 2),
        "dualpipe-v": Recipe(
            dualpipe_v, 2, allows=lambda p, m: m >= 2 * p, rule="there are at least as many microbatches as stages, two a rank"
        ),
    }
)
"""Every schedule of a training step, by name. A new one is a function and a line here; the tests walk this table."""

AUTO = "auto"
"""What a pipeline calls the schedule that it makes for its own stages; no recipe, as it is made for given costs."""

_FORWARDS = {"forward": "forward(num_ranks, num_microbatches)", "ring": "ring(num_ranks, num_groups, num_turns)"}


@entry
def make(name: str, num_ranks: int, num_microbatches: int | None = None, stages_per_rank: int | None = None) -> Schedule:
    """Build the schedule called ``name``.

    Args:
        name: a key of ``SCHEDULES``.
        num_ranks: ranks, at least 1.
        num_microbatches: microbatches, at least 1; as many as stages unless said.
        stages_per_rank: stages on each rank; 1, or 2 for interleaved, looped-bfs and the schedules in a V, unless said.

    Raises:
        ScheduleError: an unknown name, a count below 1, or sizes for which there is no such schedule; the nearest are suggested.

    Example:
        >>> s = make("gpipe", num_ranks=4, num_microbatches=8)
        >>> str(s.rows[2][0])
        '2F0'
        >>> make("zb-v", num_ranks=4).stage_to_rank
        (0, 1, 2, 3, 3, 2, 1, 0)
    """
    recipe = _find(name)
    counts = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank}
    given = {key: value for key, value in counts.items() if value is not None or key == "num_ranks"}
    where = f"make({name!r}, {', '.join(f'{key}={value!r}' for key, value in given.items())})"
    check_counts(where, given)
    num_ranks, v = int(num_ranks), recipe.stages_per_rank if stages_per_rank is None else int(stages_per_rank)
    if v != recipe.stages_per_rank and not recipe.varies:
        others = " or ".join(repr(key) for key, other in SCHEDULES.items() if other.varies)
        n = recipe.stages_per_rank
        fix = f"pass stages_per_rank={n}" + (f", or use {others}" if n == 1 else "")
        raise ScheduleError(where, f"{name} runs {n} stage{'s' * (n > 1)} on each rank", f"stages_per_rank={v}", fix)
    m = num_ranks * v if num_microbatches is None else int(num_microbatches)
    _check_allowed(where, name, num_ranks, m, f"num_ranks={num_ranks}")
    return recipe.build(num_ranks, m, v) if recipe.varies else recipe.build(num_ranks, m)


def make_for_stages(name: str, *, num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule called ``name`` for a pipeline of ``num_stages``, with the stages a rank that the schedule is made for."""
    where, v = f"schedule={name!r}", _find(name).stages_per_rank
    if num_stages % v:
        near = " or ".join(f"num_stages={n}" for n in _nearest(num_stages, lambda n: n % v == 0))
        rule = f"{name} runs {v} stages on each rank, so the number of stages is a multiple of {v}"
        raise ScheduleError(where, rule, f"num_stages={num_stages}", f"pass {near}")
    _check_allowed(where, name, num_stages // v, num_microbatches, f"num_stages={num_stages}")
    return make(name, num_ranks=num_stages // v, num_microbatches=num_microbatches)


def _check_allowed(where: str, name: str, num_ranks: int, num_microbatches: int, size: str) -> None:
    """Refuse a number of microbatches with which a schedule does not run; ``size``: what the user wrote beside."""
    recipe = SCHEDULES[name]
    if not recipe.allows(num_ranks, num_microbatches):
        near = " or ".join(f"num_microbatches={n}" for n in _nearest(num_microbatches, lambda n: recipe.allows(num_ranks, n)))
        got = f"{size}, num_microbatches={num_microbatches}"
        raise ScheduleError(where, f"{name} runs where {recipe.rule}", got, f"pass {near}")


def with_microbatches(schedule: Schedule, num_microbatches: int) -> Schedule:
    """A schedule that was made by its name, for another number of microbatches; a ``ScheduleError`` if its rows are others."""
    ranks, v = schedule.num_ranks, schedule.num_stages // schedule.num_ranks
    if schedule.name not in SCHEDULES or make(schedule.name, ranks, schedule.num_microbatches, v) != schedule:
        rule = "rows that were written for one number of microbatches say nothing of another"
        got = f"{num_microbatches} microbatches, and rows of {schedule.num_microbatches}"
        fix = "pass as many microbatches as the rows have, or the name of a schedule"
        raise ScheduleError(f"schedule={schedule.name!r}", rule, got, fix)
    return make(schedule.name, ranks, num_microbatches, v)


def _find(name: str) -> Recipe:
    if isinstance(name, str) and name in SCHEDULES:
        return SCHEDULES[name]
    if isinstance(name, str) and name in _FORWARDS:
        rule = f"a step needs backwards, and {name!r} has forwards only"
        fix = f"use another name, or jaxpp.schedule.{_FORWARDS[name]} where nothing trains"
        raise ScheduleError(f"schedule {name!r}", rule, repr(name), fix)
    if isinstance(name, str) and name == AUTO:
        rule = "a schedule is made to measure where it is known what the stages take"
        fix = 'pass jaxpp.Pipeline(schedule="auto"), or call jaxpp.schedule.synthesise(num_ranks, num_microbatches, forward=...)'
        raise ScheduleError(f"schedule {name!r}", rule, repr(name), fix)
    near = difflib.get_close_matches(name.lower(), [*SCHEDULES, AUTO], n=1) if isinstance(name, str) else []
    names = ", ".join(map(repr, SCHEDULES))
    fix = f"write {near[0]!r}" if near else "pass one of these names, or a Schedule"
    if isinstance(name, str) and "zero" in name.lower():
        fix = "write 'zb-h1', 'zb-h2' or 'zb-v': these are the schedules that others call zero bubble"
    raise ScheduleError(f"schedule {name!r}", f"the schedules are {names}", repr(name), fix)


def _nearest(size: int, allowed: Callable[[int], bool]) -> Iterator[int]:
    yield from itertools.islice((n for n in range(size, 0, -1) if allowed(n)), 1)
    yield from itertools.islice((n for n in itertools.count(size) if allowed(n)), 1)
