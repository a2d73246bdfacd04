"""How fast the machine is at the moment, told by one step that is run again and again.

Problem: forced CPU devices share their cores with whatever else the machine does, and its speed may change by half within seconds.
Families are measured one after another, so one that met a slow moment would look slow. Idea: by turns with the steps of any family
run steps of the first family that was measured. If these take longer than they did at first, so did the others. Mechanism: seconds
are divided by that factor, turn by turn; they are seconds at the speed that the machine had at first. Devices that compute for
nobody else have no reference: there the factor is 1.
"""

import itertools
import math
import statistics
from typing import NamedTuple

from jaxpp.observe.profile.merge import SeenStep
from jaxpp.observe.profile.record import Stamps
from jaxpp.tuner.measure.opened import Opened

__all__ = ["Pace", "Paced"]

_WARM_UP = 3
"""Steps that do not count: the first find the caches of other programs."""

_LOOKS = 3
"""Steps of each kind that are looked at."""


class Paced(NamedTuple):
    """What some turns found.

    Attributes:
        seconds: of a step, at the speed that the machine had at first: the median.
        factor: how much longer a step took than at that speed: the median.
        free: steps at full speed that were looked at.
        apart: steps in which each instruction waited for the one before.
    """

    seconds: float
    factor: float
    free: tuple[SeenStep, ...]
    apart: tuple[SeenStep, ...]


class Pace:
    """Times steps, and the reference beside them."""

    def __init__(self):
        self._reference: Opened | None = None
        self._usual = 1.0

    def begin(self, reference: Opened, usual: float) -> None:
        """From now on ``reference`` tells the speed; its step takes ``usual`` seconds at the speed that counts."""
        self._reference, self._usual = reference, usual

    @property
    def known(self) -> bool:
        """Whether there is a reference."""
        return self._reference is not None

    def timed(self, opened: Opened, budget: float, *, looks: bool = False) -> Paced:
        """Run steps by turns with the reference.

        Args:
            opened: whose steps are timed.
            budget: seconds for all turns; there are at least six and at most forty.
            looks: whether some steps are looked at, too, before that.
        """
        first = min(opened.timed() for _ in range(_WARM_UP))
        seen = [opened.step(Stamps(waits=waits)).timed() for waits in (True, False) * (_LOOKS if looks else 0)]
        count = min(40, max(6, math.ceil(budget / (first + self._usual * self.known))))
        seconds, factors = list[float](), [self._factor()]
        for _ in range(count):
            seconds.append(opened.timed())
            factors.append(self._factor())
        between = [(before + after) / 2 for before, after in itertools.pairwise(factors)]
        own = statistics.median(taken / factor for taken, factor in zip(seconds, between, strict=True))
        seen = opened.told(seen)
        return Paced(own, statistics.median(between), tuple(seen[1::2]), tuple(seen[::2]))

    def _factor(self) -> float:
        """How much longer the reference takes now than at first."""
        if self._reference is None:
            return 1.0
        return self._reference.timed() / self._usual
