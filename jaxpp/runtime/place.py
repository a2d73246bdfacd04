"""A rank that is several devices: replicas along ``data``, shards of the parameters along ``model``.

Everything else in jaxpp speaks of one replica: its part of a microbatch, its shapes. Here one program becomes that of all replicas.
What each replica has of its own (activations, residuals, gradients not yet summed) is one array with the replicas as its first
axis, sharded over ``data``; a program on such arrays runs under ``jax.shard_map``, which adds no communication. What all replicas
share (parameters, optimizer state) is the same on each. Along ``model`` the compiler divides the work as the parameters are
sharded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxpp.stages.cost import count_bytes
from jaxpp.stages.program import Program, Ref, Role
from jaxpp.types import Device

__all__ = ["DATA", "MODEL", "Place", "Submesh", "aval_on", "bytes_on", "devices_of", "home_of", "jitted", "leading"]

DATA, MODEL = "data", "model"
_FREE = frozenset({Role.RESIDUAL, Role.STATIC})
"""Values that only their own stage reads: sharded over ``model`` as the compiler likes."""


@dataclass(frozen=True)
class Submesh:
    """The devices of one rank.

    Attributes:
        mesh: axes ``data`` and ``model``.
        specs: how each parameter leaf is sharded over ``model``; nothing is unless given.
        opt_specs: the same for optimizer leaves.
        own: the parameters, gradients and optimizer leaves of which each replica has its own, by role and number.
    """

    mesh: Mesh
    specs: tuple[PartitionSpec, ...] = field(default=(), hash=False)
    opt_specs: tuple[PartitionSpec, ...] = field(default=(), hash=False)
    own: frozenset[tuple[Role, int]] = field(default_factory=frozenset, hash=False)

    def __str__(self) -> str:
        ids = " ".join(str(device.id) for device in self.mesh.devices.flat)
        shape = " x ".join(f"{size} {axis}" for axis, size in self.mesh.shape.items() if size > 1)
        return f"{self.mesh.devices.flat[0].platform}:{ids} ({shape or '1 device'})"

    @property
    def num_replicas(self) -> int:
        """How many replicas there are."""
        return self.mesh.shape[DATA]

    def per_replica(self, ref: Ref) -> bool:
        """Whether each replica has its own."""
        return ref.per_replica or (ref.role, ref.index) in self.own

    def spec(self, ref: Ref) -> PartitionSpec:
        """How a value is sharded over ``model``."""
        specs = self.opt_specs if ref.role == Role.OPT else self.specs if ref.role in (Role.PARAM, Role.GRAD) else ()
        return specs[ref.index] if 0 <= ref.index < len(specs) else PartitionSpec()

    def sharding(self, ref: Ref) -> NamedSharding:
        """How a value is sharded."""
        spec = self.spec(ref)
        return NamedSharding(self.mesh, PartitionSpec(DATA, *spec) if self.per_replica(ref) else spec)

    def is_free(self, ref: Ref) -> bool:
        """Whether the compiler decides how a value is sharded."""
        return ref.role in _FREE and self.mesh.shape[MODEL] > 1

    @cached_property
    def on_data(self) -> NamedSharding:
        """Replicas along the first axis."""
        return NamedSharding(self.mesh, PartitionSpec(DATA))


Place = Device | Submesh
"""Where a stage lives."""


def devices_of(place: Place) -> tuple[Device, ...]:
    """The devices of a place."""
    return tuple(place.mesh.devices.flat) if isinstance(place, Submesh) else (place,)


def home_of(place: Place, ref: Ref) -> Any:
    """Where a value goes to be at a place: a device, or a sharding."""
    return place.sharding(ref) if isinstance(place, Submesh) else place


def leading(place: Place, ref: Ref) -> tuple[int, ...]:
    """The axes that a value has at a place before its own."""
    return (place.num_replicas,) if isinstance(place, Submesh) and place.per_replica(ref) else ()


def aval_on(place: Place, ref: Ref, aval: Any, sharding: Any = None, *, lead: bool = True) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of a value at a place; with ``lead`` the shape given is that of one replica."""
    home = sharding or home_of(place, ref)
    home = home if isinstance(home, NamedSharding) else SingleDeviceSharding(place)
    return jax.ShapeDtypeStruct((*(leading(place, ref) if lead else ()), *aval.shape), aval.dtype, sharding=home)


def bytes_on(place: Place, ref: Ref, aval: Any, sharding: Any = None) -> int:
    """Bytes of a value on each device of a place."""
    if not isinstance(place, Submesh):
        return count_bytes(aval)
    shape = (sharding or place.sharding(ref)).shard_shape((*leading(place, ref), *aval.shape))
    return count_bytes(jax.ShapeDtypeStruct(shape, aval.dtype))


def jitted(program: Program, place: Place, donated: Sequence[int]) -> Any:
    """A program as ``jax.jit`` runs it at a place, given all its arguments, read or not."""
    if not isinstance(place, Submesh):
        home, function = SingleDeviceSharding(place), _called(program.name, program.function)
        return jax.jit(function, donate_argnums=donated, out_shardings=home, keep_unused=True)
    outs = [None if place.is_free(ref) else place.sharding(ref) for ref in program.outputs]
    ours = any(map(place.per_replica, (*program.inputs, *program.outputs)))
    function = _each(program, place) if ours and not program.spans else program.function
    return jax.jit(_called(program.name, function), donate_argnums=donated, out_shardings=outs, keep_unused=True)


def _called(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function by another name, by which the compiler and its traces call it."""

    def run(*args: Any) -> Any:
        return function(*args)

    run.__name__ = run.__qualname__ = name
    return run


def _each(program: Program, place: Submesh) -> Any:
    """A program of one replica, run on each."""
    reads, writes = ([place.per_replica(ref) for ref in refs] for refs in (program.inputs, program.outputs))
    split, whole = PartitionSpec(DATA), PartitionSpec()

    def of_one(*args: Any) -> list[Any]:
        results = program.function(*(arg[0] if mine else arg for arg, mine in zip(args, reads, strict=True)))
        return [jax.numpy.asarray(r)[None] if mine else r for r, mine in zip(results, writes, strict=True)]

    return jax.shard_map(
        of_one,
        mesh=place.mesh,
        in_specs=tuple(split if mine else whole for mine in reads),
        out_specs=[split if mine else whole for mine in writes],
        axis_names={DATA},
        check_vma=False,
    )
