"""Where the idle time of a rank comes from: in a step, in forwards, and in a generation."""

from typing import NamedTuple

__all__ = ["Causes", "ForwardCauses", "RingCauses"]


class Causes(NamedTuple):
    """Where a rank's idle time comes from, in seconds; the parts sum to it.

    Attributes:
        fill_drain: what the schedule costs even with equal stages.
        imbalance: what stages that differ add.
        transfer: what transfers add that nothing hides.
        dispatch: what waiting for the host adds.
        optimizer: the rest of the step: splitting the batch before, summing tied gradients and the optimizer after.
    """

    fill_drain: float
    imbalance: float
    transfer: float
    dispatch: float
    optimizer: float


class ForwardCauses(NamedTuple):
    """Where a rank's idle time in forwards comes from, in seconds; the parts sum to it.

    Attributes:
        fill_drain: what the schedule costs even with equal stages.
        imbalance: what stages that differ add.
        transfer: what transfers add that nothing hides.
        dispatch: what waiting for the host adds.
        other: splitting the batch before, putting outputs together after.
    """

    fill_drain: float
    imbalance: float
    transfer: float
    dispatch: float
    other: float


class RingCauses(NamedTuple):
    """Where a rank's idle time in a generation comes from, in seconds; the parts sum to it.

    Attributes:
        fill_drain: what the passes cost at the beginning and at the end.
        token: what waiting for tokens adds, even with equal stages: too few groups.
        imbalance: what stages that differ add.
        transfer: what transfers add that nothing hides, those of tokens included.
        dispatch: what waiting for the host adds.
        other: what is not a pass.
    """

    fill_drain: float
    token: float
    imbalance: float
    transfer: float
    dispatch: float
    other: float
