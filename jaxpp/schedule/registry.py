"""Names of schedules, and ``make``, which builds one by name."""

import difflib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jaxpp.errors import ScheduleError
from jaxpp.errors.tracebacks import entry
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.generators import can_interleave, gpipe, interleaved, looped_bfs, naive, one_f_one_b, zb_h1, zb_h2
from jaxpp.schedule.v_shape import dualpipe_v, v_half, v_min, zb_v
from jaxpp.schedule.validate import check_counts


@dataclass(frozen=True)
class Recipe:
    """How to build a schedule, and for which sizes there is one."""

    build: Callable[..., Schedule]
    """``build(num_ranks, num_microbatches)``, with ``stages_per_rank`` behind them if these vary."""
    stages_per_rank: int = 1
    varies: bool = False
    """Whether any number of stages a rank will do."""
    allows: Callable[[int, int], bool] = lambda num_ranks, num_microbatches: True  # noqa: ARG005
    rule: str = ""
    """What ``allows`` asks of ranks and microbatches, in words."""


SCHEDULES: Mapping[str, Recipe] = MappingProxyType(
    {
        "naive": Recipe(naive),
        "gpipe": Recipe(gpipe),
        "1f1b": Recipe(one_f_one_b),
        "interleaved": Recipe(
            interleaved,
            2,
            varies=True,
            allows=can_interleave,
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

_FORWARDS = {"forward": "forward(num_ranks, num_microbatches)", "ring": "ring(num_ranks, num_groups, num_turns)"}


@entry
def make(name: str, num_ranks: int, num_microbatches: int | None = None, stages_per_rank: int | None = None) -> Schedule:
    """Build the schedule called ``name``.

    Args:
        name: a key of ``SCHEDULES``.
        num_ranks: ranks, at least 1.
        num_microbatches: microbatches, at least 1; as many as stages unless said.
        stages_per_rank: stages on each rank; what the schedule is made for unless said (1, or 2 for interleaved, looped-bfs and
            the schedules in a V).

    Raises:
        ScheduleError: an unknown name (the nearest one is suggested), a count below 1, or sizes for which there is no such
            schedule (the nearest ones are suggested).

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
    if not recipe.allows(num_ranks, m):
        near = " or ".join(f"num_microbatches={n}" for n in _nearest(m, lambda n: recipe.allows(num_ranks, n)))
        got = f"num_ranks={num_ranks}, num_microbatches={m}"
        raise ScheduleError(where, f"{name} runs where {recipe.rule}", got, f"pass {near}")
    return recipe.build(num_ranks, m, v) if recipe.varies else recipe.build(num_ranks, m)


def make_for_stages(name: str, *, num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule called ``name`` for a pipeline of ``num_stages``, with the stages a rank that the schedule is made for."""
    v = _find(name).stages_per_rank
    if num_stages % v:
        near = " or ".join(f"num_stages={n}" for n in _nearest(num_stages, lambda n: n % v == 0))
        rule = f"{name} runs {v} stages on each rank, so the number of stages is a multiple of {v}"
        raise ScheduleError(f"schedule={name!r}", rule, f"num_stages={num_stages}", f"pass {near}")
    return make(name, num_ranks=num_stages // v, num_microbatches=num_microbatches)


def _find(name: str) -> Recipe:
    if isinstance(name, str) and name in SCHEDULES:
        return SCHEDULES[name]
    if isinstance(name, str) and name in _FORWARDS:
        rule = f"a step needs backwards, and {name!r} has forwards only"
        fix = f"use another name, or jaxpp.schedule.{_FORWARDS[name]} where nothing trains"
        raise ScheduleError(f"schedule {name!r}", rule, repr(name), fix)
    near = difflib.get_close_matches(name.lower(), SCHEDULES, n=1) if isinstance(name, str) else []
    names = ", ".join(map(repr, SCHEDULES))
    fix = f"write {near[0]!r}" if near else "pass one of these names, or a Schedule"
    raise ScheduleError(f"schedule {name!r}", f"the schedules are {names}", repr(name), fix)


def _nearest(size: int, allowed: Callable[[int], bool]) -> Iterator[int]:
    yield from itertools.islice((n for n in range(size, 0, -1) if allowed(n)), 1)
    yield from itertools.islice((n for n in itertools.count(size) if allowed(n)), 1)
