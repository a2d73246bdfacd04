"""The virtual clock of sets that are brought in for a step each: what loading costs, and what hides it.

Steps compute one after another, each with a set of its own that is on the host before and after. One engine copies to the device
and one from it, both beside the computation::

    load        L0  L1      L2  L3
    compute         C0  C1      C2  C3
    store               S0  S1      S2  S3        two slots: L2 waits until S0 has freed a slot

A load waits for the engine and for a slot; a step for its set and for the step before; a store for its step, and its slot is free
once it is done. With ``slots`` sets on the device a step takes, in the long run, the longest of ``compute``, ``load``, ``store``
and ``(load + compute + store) / slots``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxpp.errors import ScheduleError
from jaxpp.schedule.clock import Number

__all__ = ["PrefetchSimulation", "simulate_prefetch"]


@dataclass(frozen=True)
class PrefetchSimulation:
    """Steps with a set each on the virtual clock.

    Attributes:
        loads: start and end of each load.
        steps: of each step.
        stores: of each store.
    """

    loads: tuple[tuple[Number, Number], ...]
    steps: tuple[tuple[Number, Number], ...]
    stores: tuple[tuple[Number, Number], ...]

    @property
    def makespan(self) -> Number:
        """From the start of the first load to the end of the last step; the last stores run on behind it."""
        return self.steps[-1][1]

    @property
    def busy(self) -> Number:
        """Time the device computes: the makespan if all sets were on it."""
        total: Any = sum(end - start for start, end in self.steps)
        return total

    @property
    def idle(self) -> Number:
        """Time it waits for a set."""
        total: Any = self.makespan - self.busy
        return total


def simulate_prefetch(
    num_steps: int,
    compute: Number | Sequence[Number],
    load: Number | Sequence[Number],
    store: Number | Sequence[Number] = 0,
    slots: int = 2,
) -> PrefetchSimulation:
    """Run steps, each with another set, on the virtual clock; the next sets are prefetched as soon as a slot is free.

    Args:
        num_steps: how many.
        compute: time of a step, one number or one a step; any unit, the same for all.
        load: time to bring its set to the device, likewise.
        store: time to write it back, likewise.
        slots: sets the device has room for; with 1 nothing is prefetched.

    Raises:
        ScheduleError: fewer than one step or slot, or a time that is negative or not one a step.

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
    loads: list[tuple[Any, Any]] = []
    steps: list[tuple[Any, Any]] = []
    stores: list[tuple[Any, Any]] = []
    loaded = computed = stored = 0
    for k, (work, bring, write) in enumerate(zip(*lists.values(), strict=True)):
        begin = max(loaded, stores[k - slots][1]) if k >= slots else loaded
        loaded = begin + bring
        loads.append((begin, loaded))
        begin = max(loaded, computed)
        computed = begin + work
        steps.append((begin, computed))
        begin = max(computed, stored)
        stored = begin + write
        stores.append((begin, stored))
    return PrefetchSimulation(tuple(loads), tuple(steps), tuple(stores))
