"""Where each stage lives: the schedule says which rank, the placement which device, or which devices."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from jaxpp.errors import ArgumentError
from jaxpp.errors.checks import check_devices
from jaxpp.runtime.place import DATA, MODEL, OneDevice, Own, Place, Submesh
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.validate import is_count
from jaxpp.types import Device

__all__ = ["PIPE", "Placement", "place", "submeshes"]

PIPE = "pipe"


@dataclass(frozen=True)
class Placement:
    """Where stages and ranks live; several may share a place.

    Attributes:
        places: the device of each stage, or the sub-mesh.
        by_rank: that of each rank.
    """

    places: tuple[Place, ...]
    by_rank: tuple[Place, ...]

    def __getitem__(self, stage: int) -> Place:
        return self.places[stage]

    @property
    def own(self) -> Own:
        """The parameters, gradients and optimizer leaves of which each replica has its own."""
        return self.places[0].own

    @property
    def num_replicas(self) -> int:
        """How many replicas share the work of a microbatch."""
        return self.places[0].num_replicas

    @property
    def num_shards(self) -> int:
        """How many devices share the parameters of a replica's stage."""
        return self.places[0].num_shards

    @property
    def ranks_shown(self) -> tuple[Device | Submesh, ...]:
        """What users see of the place of each rank."""
        return tuple(place.shown for place in self.by_rank)

    def with_values(self, **known: object) -> "Placement":
        """The same places, told more of the values that live there (``Submesh.specs``, ``opt_specs``, ``own``)."""
        return Placement(*(tuple(place.with_values(**known) for place in places) for places in (self.places, self.by_rank)))


def place(schedule: Schedule, places: Sequence[Place]) -> Placement:
    """Give each rank a place, in order; fewer places than ranks are cycled. A stage lives where its rank does."""
    by_rank = tuple(places[rank % len(places)] for rank in range(schedule.num_ranks))
    return Placement(tuple(by_rank[rank] for rank in schedule.stage_to_rank), by_rank)


def submeshes(devices: Sequence[Device] | None, mesh: Mesh | None, data_parallel: int, num_ranks: int) -> tuple[Place, ...]:
    """The place of each rank, from the first; cycled by ``place`` if there are fewer.

    Args:
        devices: one a rank, or ``data_parallel`` of them.
        mesh: axes ``pipe``, ``data`` and ``model``, those that are wanted.
        data_parallel: replicas, without a mesh.
        num_ranks: of the schedule.

    Raises:
        ArgumentError: both ways at once, axes of other names, more pipe than ranks, or too few devices.
    """
    if not is_count(data_parallel, least=1):
        rule = "data_parallel is the number of replicas, at least 1"
        raise ArgumentError(f"data_parallel={data_parallel!r}", rule, repr(data_parallel), "pass 1 or more")
    if mesh is None:
        found = check_devices(devices)
        if data_parallel == 1:
            return tuple(map(OneDevice, found))
        if len(set(found)) < len(found):
            where, got = f"devices, data_parallel={data_parallel}", ", ".join(map(str, found))
            raise ArgumentError(where, "replicas of a stage have a device each", got, "name each device once")
        if len(found) < data_parallel:
            raise ArgumentError(
                f"data_parallel={data_parallel}",
                "each replica of a stage has a device of its own",
                f"{len(found)} devices for {data_parallel} replicas",
                f"pass data_parallel={len(found)} or less",
            )
        groups = min(num_ranks, len(found) // data_parallel)
        grid = np.array(found[: groups * data_parallel]).reshape(groups, data_parallel, 1)
    else:
        if devices is not None or data_parallel != 1:
            rule = "the mesh says which devices there are, and how many replicas"
            raise ArgumentError("mesh", rule, "devices or data_parallel too", "leave devices and data_parallel out")
        grid = _grid(mesh, num_ranks)
    if grid.shape[1:] == (1, 1):
        return tuple(map(OneDevice, grid.flat))
    return tuple(Submesh(Mesh(rows, (DATA, MODEL))) for rows in grid)


def _grid(mesh: object, num_ranks: int) -> np.ndarray:
    """The devices of a mesh along pipe, data and model."""
    axes = (PIPE, DATA, MODEL)
    if not isinstance(mesh, Mesh) or not set(mesh.axis_names) <= set(axes):
        raise ArgumentError(
            "mesh",
            'a mesh has axes called "pipe", "data" and "model", those that are wanted, in any order',
            repr(mesh.axis_names) if isinstance(mesh, Mesh) else type(mesh).__name__,
            'pass for example jax.make_mesh((2, 2, 2), ("pipe", "data", "model"))',
        )
    if mesh.shape.get(PIPE, 1) > num_ranks:
        raise ArgumentError(
            f"mesh, num_stages with {num_ranks} ranks",
            "each device along pipe is a rank of the schedule",
            f"{mesh.shape[PIPE]} along pipe for {num_ranks} ranks",
            f"pass more stages, or a mesh with {num_ranks} along pipe",
        )
    order = [mesh.axis_names.index(axis) for axis in axes if axis in mesh.axis_names]
    return np.transpose(mesh.devices, order).reshape([mesh.shape.get(axis, 1) for axis in axes])
