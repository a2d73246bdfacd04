"""What the programs of a family cost, and who says so.

A ``Machine`` is what a search asks: the devices themselves (``machine.py``), or numbers that a test injects. All that the search
decides follows from its answers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from jaxpp.schedule.action import Kind
from jaxpp.tuner.candidate import Candidate, Family

__all__ = ["FamilyCosts", "Machine"]


@dataclass(frozen=True)
class FamilyCosts:
    """What one step of a family is made of, in seconds.

    Attributes:
        actions: ``actions[kind][stage]``, what an action takes on its device for one microbatch once it was handed over: of F and
            B, and, if the family splits backwards, of I and W as well, since some schedules run all four.
        dispatch: ``dispatch[kind][stage]``, what the one Python process takes to hand over an action with the sends of its results.
        transfer: ``transfer[s]``, what the activation of a microbatch takes from stage s to s + 1, or its cotangent back, from the
            end of the action to the arrival; where two stages share a rank nothing is sent.
        offload: ``offload[s]``, what the residuals of one microbatch of stage s take to host memory, and as long back.
        offload_dispatch: ``offload_dispatch[s]``, what the process takes to hand over one of these copies.
        before: from the beginning of a step until the first action is handed over: splitting the batch, what is done once per step.
        after: ``after[s]``, what stage s does after its last action: sums, and the update.
        after_dispatch: what the process takes to hand over all of it.
        capacity: how many ranks compute at once at the speed at which one of them computes alone; as many as there are ranks where
            every rank has a device of its own, fewer where forced CPU devices share cores.
        overlap: whether a rank computes on while it sends.
    """

    actions: Mapping[Kind, tuple[float, ...]]
    dispatch: Mapping[Kind, tuple[float, ...]]
    transfer: tuple[float, ...]
    offload: tuple[float, ...]
    offload_dispatch: tuple[float, ...]
    before: float
    after: tuple[float, ...]
    after_dispatch: float
    capacity: float
    overlap: bool = True


class Machine(Protocol):
    """What a search asks about costs and memory."""

    @property
    def remark(self) -> str:
        """What should be known of how it measures; empty if nothing."""
        ...

    @property
    def param_bytes(self) -> int:
        """The bytes of all parameters."""
        ...

    def costs(self, family: Family) -> FamilyCosts:
        """Measure a family; asked once for each.

        Raises:
            JaxppError: the model cannot be cut so, or the batch not be split so; the candidates of the family are left out.
        """
        ...

    def peaks(self, candidate: Candidate) -> tuple[int, ...]:
        """The bytes that each device holds at its peak, of each rank in order; of a family that was measured."""
        ...

    def step(self, candidate: Candidate) -> float:
        """Run steps of a candidate; the median of their seconds, each from the call until all its results are there."""
        ...
