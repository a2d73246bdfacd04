"""A candidate: the options of one pipeline that ``tune`` considers.

Candidates that run the same stage programs are a *family*: they have the same cuts, the same microbatch size, keep the same
residuals, and split their backwards alike. What costs time in a search is to trace, cut and compile, so families are measured, and
candidates only simulated. Which schedule orders the programs, which rank runs them, and whether residuals wait in host memory makes
no other program.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from jaxpp.schedule.action import Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.registry import SCHEDULES
from jaxpp.stages.remat import Offload
from jaxpp.types import Arguments

__all__ = ["Candidate", "Family"]


class Family(NamedTuple):
    """What candidates with the same stage programs have in common.

    Attributes:
        num_stages: of the pipeline.
        num_microbatches: of a batch; with the batch it says the size of a microbatch.
        remat: ``"least"``, ``"keep"`` or ``"recompute"``, the same for all stages.
        balance: what the stages have equal amounts of.
        splits: whether backwards are split into I and W.
    """

    num_stages: int
    num_microbatches: int
    remat: str
    balance: str
    splits: bool

    @property
    def words(self) -> str:
        """The sizes, for people."""
        recompute = ", recomputed" * (self.remat == "recompute")
        return f"{_counted(self.num_stages, 'stage')}, {_counted(self.num_microbatches, 'microbatch', 'es')}{recompute}"


@dataclass(frozen=True)
class Candidate:
    """The options of one pipeline.

    Attributes:
        schedule: made for its ranks, stages and microbatches, under a name that ``Pipeline`` takes.
        remat: ``"least"``, ``"keep"``, ``"recompute"`` or ``"offload"``, the same for all stages.
        except_last: with ``"offload"``, of how many microbatches a stage keeps the residuals on the device.
        balance: what the stages have equal amounts of.
    """

    schedule: Schedule
    remat: str = "least"
    except_last: int = 1
    balance: str = "flops"

    @cached_property
    def splits(self) -> bool:
        """Whether the schedule splits backwards into I and W."""
        return any(action.kind == Kind.W for row in self.schedule.rows for action in row)

    @property
    def family(self) -> Family:
        """The family whose programs it runs; offloading keeps what ``"least"`` keeps."""
        kept = "least" if self.remat == "offload" else self.remat
        return Family(self.schedule.num_stages, self.schedule.num_microbatches, kept, self.balance, self.splits)

    @property
    def offload(self) -> tuple[int | None, ...]:
        """``except_last`` of each stage, as ``schedule.offload.offloads`` takes it; None of each where nothing is offloaded."""
        return (self.except_last if self.remat == "offload" else None,) * self.schedule.num_stages

    @property
    def words(self) -> str:
        """The options, for people."""
        ranks, v = self.schedule.num_ranks, self.stages_per_rank
        sizes = f"{_counted(self.schedule.num_microbatches, 'microbatch', 'es')}, {_counted(v, 'stage')} a rank"
        return f"{self.schedule.name} with {_counted(ranks, 'rank')}, {sizes}, remat={self.remat!r}, balance={self.balance!r}"

    @property
    def stages_per_rank(self) -> int:
        """How many stages each rank runs."""
        return self.schedule.num_stages // self.schedule.num_ranks

    @property
    def options(self) -> Arguments:
        """The arguments of ``Pipeline`` that differ between candidates.

        The schedule is a name, or the schedule itself if it has other numbers of stages on a rank than its name stands for.
        """
        schedule = self.schedule
        named = schedule.name in SCHEDULES and SCHEDULES[schedule.name].stages_per_rank == self.stages_per_rank
        found: Arguments = {"num_stages": schedule.num_stages, "num_microbatches": schedule.num_microbatches}
        remat = Offload(self.except_last) if self.remat == "offload" and self.except_last != 1 else self.remat
        return {**found, "schedule": schedule.name if named else schedule, "remat": remat, "balance": self.balance}


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural * (number != 1)}"
