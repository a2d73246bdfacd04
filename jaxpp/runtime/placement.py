"""Where each stage lives: the schedule says which rank, the placement which device."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jaxpp.errors import ArgumentError
from jaxpp.schedule.base import Schedule
from jaxpp.types import Device

__all__ = ["Placement", "place", "pool"]


@dataclass(frozen=True)
class Placement:
    """Where stages and ranks live; several may share a device.

    Attributes:
        devices: the device of each stage.
        by_rank: the device of each rank.
    """

    devices: tuple[Device, ...]
    by_rank: tuple[Device, ...]

    def __getitem__(self, stage: int) -> Device:
        return self.devices[stage]


def place(schedule: Schedule, devices: Sequence[Device]) -> Placement:
    """Give each rank a device, in order; fewer devices than ranks are cycled. A stage lives where its rank does."""
    by_rank = tuple(devices[rank % len(devices)] for rank in range(schedule.num_ranks))
    return Placement(tuple(by_rank[rank] for rank in schedule.stage_to_rank), by_rank)


def pool(devices: Sequence[Device] | None) -> tuple[Device, ...]:
    """The devices given, or all there are.

    Raises:
        ArgumentError: an empty list of devices.
    """
    found = tuple(jax.devices() if devices is None else devices)
    if not found:
        raise ArgumentError("devices=[]", "a pipeline needs at least one device", "an empty list", "leave devices out to use all")
    return found
