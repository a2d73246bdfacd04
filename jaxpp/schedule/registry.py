"""Names of schedules, and ``make``, which builds one by name."""

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxpp.errors import ScheduleError
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.gpipe import gpipe
from jaxpp.schedule.naive import naive
from jaxpp.schedule.one_f_one_b import one_f_one_b

__all__ = ["SCHEDULES", "make"]

SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = MappingProxyType({"naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b})
"""Every schedule there is, by name. A new one is a file and a line here; the tests walk this table."""


def make(name: str, *, num_ranks: int, num_microbatches: int | None = None) -> Schedule:
    """Build the schedule called ``name``.

    Args:
        name: a key of ``SCHEDULES``.
        num_ranks: ranks, at least 1.
        num_microbatches: microbatches, at least 1; as many as ranks unless said.

    Raises:
        ScheduleError: unknown name (the nearest one is suggested), or a count below 1.

    Example:
        >>> s = make("gpipe", num_ranks=4, num_microbatches=8)
        >>> str(s.rows[2][0])
        '2F0'
    """
    where = f"make({name!r}, num_ranks={num_ranks}, num_microbatches={num_microbatches})"
    if name not in SCHEDULES:
        near = difflib.get_close_matches(str(name).lower(), SCHEDULES, n=1, cutoff=0.3)
        names = ", ".join(map(repr, SCHEDULES))
        raise ScheduleError(
            where,
            f"the schedules are {names}",
            repr(name),
            f"write {near[0]!r}" if near else "pass one of these names, or a Schedule",
        )
    num_microbatches = num_ranks if num_microbatches is None else num_microbatches
    counts = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    low = [f"{key}={value!r}" for key, value in counts.items() if not isinstance(value, int) or value < 1]
    if low:
        raise ScheduleError(where, "counts are whole numbers of at least 1", low, "pass 1 or more")
    return SCHEDULES[name](num_ranks, num_microbatches)
