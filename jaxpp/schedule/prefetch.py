"""The virtual clock for parameter sets that are loaded for one step each: what loading costs, and what hides it.

Steps compute one after another, each with a set of its own, which is on the host before and after the step. One copy engine loads
sets to the device and another stores them to the host, both while the device computes::

    load        L0  L1      L2  L3
    compute         C0  C1      C2  C3
    store               S0  S1      S2  S3        two slots: L2 waits until S0 has freed a slot

A load waits for its engine and for a free slot; a step waits for its set and for the step before; a store waits for its step, and
frees the slot when it ends. With ``slots`` sets on the device a step takes, in the long run, the longest of ``compute``, ``load``,
``store`` and ``(load + compute + store) / slots``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpp.errors import ScheduleError
from jaxpp.schedule.clock import Number

__all__ = ["PrefetchSimulation", "simulate_prefetch"]

_Span = tuple[Number, Number]


@dataclass(frozen=True)
class PrefetchSimulation:
    """Steps on the virtual clock, each with a parameter set of its own.

    Attributes:
        loads: start and end of each load.
        steps: start and end of each step.
        stores: start and end of each store.
    """

    loads: tuple[_Span, ...]
    steps: tuple[_Span, ...]
    stores: tuple[_Span, ...]

    @property
    def makespan(self) -> Number:
        """From the start of the first load to the end of the last step; the last stores may end later."""
        return self.steps[-1][1]

    @property
    def busy(self) -> Number:
        """Time in which the device computes: the makespan if all sets were on the device."""
        return sum(end - start for start, end in self.steps)

    @property
    def idle(self) -> Number:
        """Time in which the device waits for a set."""
        return self.makespan - self.busy


def simulate_prefetch(
    num_steps: int,
    compute: Number | Sequence[Number],
    load: Number | Sequence[Number],
    store: Number | Sequence[Number] = 0,
    slots: int = 2,
) -> PrefetchSimulation:
    """Run steps, each with another parameter set, on the virtual clock; the next sets are loaded as soon as a slot is free.

    Args:
        num_steps: how many steps.
        compute: time of a step, one number, or one number for each step; in any unit, the same for all times.
        load: time to load the set of a step, one number, or one number for each step.
        store: time to store the set of a step, one number, or one number for each step.
        slots: how many sets the device has room for; with 1 nothing is prefetched.

    Raises:
        ScheduleError: fewer than one step or slot, a negative time, or not one time for each step.

    Example:
        >>> simulate_prefetch(1000, compute=10, load=9).makespan
        10009
        >>> simulate_prefetch(1000, compute=10, load=9, slots=1).makespan
        19000
        >>> simulate_prefetch(1000, compute=10, load=12).idle
        2010
    """
    times = {"compute": compute, "load": load, "store": store}
    lists = {name: list(value) if isinstance(value, Sequence) else [value] * max(num_steps, 0) for name, value in times.items()}
    wrong = [f"{name}={count!r}" for name, count in {"num_steps": num_steps, "slots": slots}.items() if count < 1]
    wrong += [f"{name}={times[name]!r}" for name, listed in lists.items() if len(listed) != num_steps or min(listed, default=0) < 0]
    if wrong:
        rule = "there are steps and slots, and a time is a number of at least 0, or a sequence of one a step"
        raise ScheduleError(
            "simulate_prefetch(...)", rule, wrong, f"pass one number, or {num_steps} of them; slots=2 prefetches one"
        )
    loads, steps, stores = list[_Span](), list[_Span](), list[_Span]()
    loaded = computed = stored = (0, 0)
    for k, (work, bring, write) in enumerate(zip(*lists.values(), strict=True)):
        loaded = _next(loaded, stores[k - slots] if k >= slots else loaded, bring)
        computed = _next(computed, loaded, work)
        stored = _next(stored, computed, write)
        loads.append(loaded)
        steps.append(computed)
        stores.append(stored)
    return PrefetchSimulation(tuple(loads), tuple(steps), tuple(stores))


def _next(before: _Span, source: _Span, time: Number) -> _Span:
    """What an engine does next, once it is free and its source is there."""
    start = max(before[1], source[1])
    return start, start + time
