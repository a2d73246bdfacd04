"""Places: the device, or the devices, on which a stage lives, and the placement: which rank and stage lives where.

A stage lives on one device (``OneDevice``), or on a sub-mesh (``Submesh``): replicas along ``data``, shards of the parameters along
``model``. The rest of jaxpp speaks of one replica. What each has of its own (activations, residuals, gradients not yet summed) is
one array with the replicas as its first axis, sharded over ``data``; programs on such arrays run under ``jax.shard_map``. Along
``model`` the compiler divides the work as parameters are sharded.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxpp.errors import ArgumentError, is_count, shown
from jaxpp.errors.checks import check_ranks
from jaxpp.lowering.step import Leaves, StateLeaf
from jaxpp.runtime.processes.here import processes_of
from jaxpp.runtime.send import HOST_MEMORY
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.validate import check_counts
from jaxpp.stages.axes import DATA, MODEL, ONE_DEVICE, PIPE, RankAxes, axes_of_spec, axis_names
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.program import HELD_LIKE, Program, Ref, Role
from jaxpp.targets import compiles_only, device_name, stand_ins
from jaxpp.types import Aval, Device, Home, Leaf

_FREE = frozenset({Role.RESIDUAL, Role.STATIC})  # only their own stage reads them; the compiler shards them as it likes


class Place(abc.ABC):
    """Where a stage lives, by default one replica that shards nothing; equal places hold the same values sharded alike."""

    @property
    @abc.abstractmethod
    def devices(self) -> tuple[Device, ...]:
        """Its devices."""

    @property
    def shown(self) -> "Device | Submesh":
        """What users see of it: the device, or the sub-mesh."""
        return self.devices[0]

    @property
    def is_here(self) -> bool:
        """Whether some of its devices are of this process."""
        return jax.process_index() in processes_of(self.devices)

    @property
    def axis_sizes(self) -> Mapping[str, int]:
        """The axes along which its devices can communicate; one device has none."""
        return {}

    @property
    def num_replicas(self) -> int:
        """How many replicas share the work of a microbatch."""
        return self.axis_sizes.get(DATA, 1)

    @property
    def num_shards(self) -> int:
        """How many devices share the parameters of a replica's stage."""
        return self.axis_sizes.get(MODEL, 1)

    def per_replica(self, ref: Ref) -> bool:
        """Whether each replica has a value of its own; it then has the replicas as its first axis."""
        if self.num_replicas == 1 or ref.per_replica:
            return self.num_replicas > 1
        leaf = self.leaf(ref)
        return leaf is not None and leaf.own

    def leaf(self, ref: Ref) -> StateLeaf | None:  # noqa: ARG002  (nothing is sharded)
        """The leaf of a state that a value is, or is held like, if that is known here."""
        return None

    def leading(self, ref: Ref) -> tuple[int, ...]:
        """The axes that a value has here before those of one replica's."""
        return (self.num_replicas,) if self.per_replica(ref) else ()

    @abc.abstractmethod
    def sharding(self, ref: Ref) -> Sharding:
        """How a value is sharded."""

    def home(self, ref: Ref) -> Home:
        """Where ``jax.device_put`` brings a value that is to be here."""
        sharding = self.sharding(ref)
        return sharding.with_memory_kind(HOST_MEMORY) if ref.waits else sharding

    def num_parts(self, ref: Ref) -> int:  # noqa: ARG002  (nothing is sharded)
        """Into how many parts its devices divide a value."""
        return 1

    def is_free(self, ref: Ref) -> bool:
        """Whether the compiler decides how a value is sharded."""
        return ref.role in _FREE and self.num_shards > 1

    def replica(self, number: int) -> "Place":  # noqa: ARG002  (there is one)
        """The devices of one replica, as a place of its own."""
        return self

    def alone(self, number: int) -> "Place":  # noqa: ARG002  (there is one)
        """The devices of one replica as a place that knows of no others, a device if it is one."""
        return self

    @abc.abstractmethod
    def moved(self, devices: Sequence[Device]) -> "Place | None":
        """The same on the first of other devices; None if these are too few."""

    @property
    def compiled_at(self) -> "Place":
        """Where its programs are compiled: here, but of devices that only compile, where those of all places like this one are."""
        found = stand_ins(self.devices)
        return self if found == self.devices else self.moved(found) or self

    def holding(self, leaves: Mapping[tuple[Role, int], StateLeaf]) -> "Place":  # noqa: ARG002  (nothing is sharded)
        """The same devices, told how leaves of a state are held there."""
        return self

    def aval(self, ref: Ref, aval: Aval, sharding: Sharding | None = None, *, lead: bool = True) -> jax.ShapeDtypeStruct:
        """Shape, dtype and sharding of a value here; with ``lead`` the shape given is that of one replica."""
        shape = (*self.leading(ref), *aval.shape) if lead else aval.shape
        return jax.ShapeDtypeStruct(shape, aval.dtype, sharding=sharding or self.sharding(ref))

    def num_bytes(self, ref: Ref, aval: Aval, sharding: Sharding | None = None) -> int:
        """Bytes on each device of a value whose shape is given as one replica has it."""
        shape = (sharding or self.sharding(ref)).shard_shape((*self.leading(ref), *aval.shape))
        return count_bytes(jax.ShapeDtypeStruct(shape, aval.dtype))

    def jit(self, program: Program, donated: Sequence[int]) -> "jax.stages.Wrapped":
        """A program as ``jax.jit`` runs it here, given all its arguments, read or not."""
        outs = [None if self.is_free(ref) else self.sharding(ref) for ref in program.outputs]
        function = self._of_all(program)

        def run(*args: Leaf) -> list[Leaf]:
            return list(function(*args))

        run.__name__ = run.__qualname__ = program.name  # by which the compiler and its traces call it
        return jax.jit(run, donate_argnums=donated, out_shardings=outs, keep_unused=True)

    def _of_all(self, program: Program) -> Callable[..., list[Leaf]]:
        return program.function


@dataclass(frozen=True)
class OneDevice(Place):
    """A place of one device."""

    device: Device

    def __str__(self) -> str:
        return device_name(self.device)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device."""
        return (self.device,)

    def moved(self, devices: Sequence[Device]) -> "OneDevice | None":
        """The first of the devices."""
        return OneDevice(devices[0]) if devices else None

    def sharding(self, ref: Ref) -> SingleDeviceSharding:  # noqa: ARG002
        """On the device, as every value."""
        return SingleDeviceSharding(self.device)

    def home(self, ref: Ref) -> Home:
        """The device itself, which ``jax.device_put`` takes quicker than a sharding."""
        return super().home(ref) if ref.waits else self.device


@dataclass(frozen=True)
class Submesh(Place):
    """A place of several devices, with the axes ``data`` and ``model``."""

    mesh: Mesh
    leaves: Mapping[tuple[Role, int], StateLeaf] = field(default_factory=dict, hash=False, repr=False)  # by role and number

    def __str__(self) -> str:
        ids = " ".join(str(device.id) for device in self.devices)
        shape = " x ".join(f"{size} {axis}" for axis, size in self.mesh.shape.items() if size > 1)
        kind = device_name(self.devices[0]).partition(":")[0] if compiles_only(self.devices[0]) else self.devices[0].platform
        return f"{kind}:{ids} ({shape or '1 device'})"

    @property
    def devices(self) -> tuple[Device, ...]:
        """Row by row of the mesh."""
        return tuple(self.mesh.devices.flat)

    @property
    def shown(self) -> "Submesh":
        """Itself."""
        return self

    @property
    def axis_sizes(self) -> Mapping[str, int]:
        """Those of the mesh."""
        return self.mesh.shape

    def sharding(self, ref: Ref) -> NamedSharding:
        """Over ``data`` where each replica has its own or a part, and as the leaf says that a value is held like."""
        leaf = self.leaf(ref)
        spec = PartitionSpec() if leaf is None else leaf.part if ref.shared else leaf.spec
        return NamedSharding(self.mesh, PartitionSpec(DATA, *spec) if self.per_replica(ref) else spec)

    def num_parts(self, ref: Ref) -> int:
        """As many as there are devices along the axes that its sharding names."""
        return math.prod(self.axis_sizes[axis] for axis in axes_of_spec(self.sharding(ref).spec))

    def replica(self, number: int) -> "Submesh":
        """A sub-mesh of one row."""
        return dataclasses.replace(self, mesh=Mesh(self.mesh.devices[number : number + 1], (DATA, MODEL)))

    def alone(self, number: int) -> Place:
        """A device, or a sub-mesh of one row."""
        row = self.replica(number)
        return row if row.num_shards > 1 else OneDevice(row.devices[0])

    def moved(self, devices: Sequence[Device]) -> "Submesh | None":
        """A mesh of the same shape."""
        if len(devices) < len(self.devices):
            return None
        grid = np.array(devices[: len(self.devices)]).reshape(self.mesh.devices.shape)
        return dataclasses.replace(self, mesh=Mesh(grid, (DATA, MODEL)))

    def leaf(self, ref: Ref) -> StateLeaf | None:
        """By its role and number: a gradient is held like its parameter."""
        return self.leaves.get((HELD_LIKE.get(ref.role, ref.role), ref.index))

    def holding(self, leaves: Mapping[tuple[Role, int], StateLeaf]) -> "Submesh":
        """With these leaves."""
        return dataclasses.replace(self, leaves=leaves)

    def _of_all(self, program: Program) -> Callable[..., list[Leaf]]:
        ends = program.inputs, program.outputs
        reads, writes = ([self.per_replica(ref) for ref in refs] for refs in ends)
        if program.spans or not any((*reads, *writes)):
            return program.function
        if program.sums:  # each device has its part of everything
            axes = set(self.axis_sizes)
            ins, outs = ([self.sharding(ref).spec for ref in refs] for refs in ends)
        else:
            axes, whole = set(RankAxes(self.mesh.abstract_mesh).manual), PartitionSpec()
            ins, outs = ([PartitionSpec(DATA) if mine else whole for mine in each] for each in (reads, writes))

        def of_one(*args: Leaf) -> list[Leaf]:
            given = [arg[0] if mine else arg for arg, mine in zip(args, reads, strict=True)]
            results = program.function(*given)
            if program.sums:
                sums = {ref: value for ref, value in zip(program.inputs, given, strict=True) if ref.role == Role.GRAD}
                made = zip(results, program.outputs, outs, writes, strict=True)
                parts = [(value if mine else _summed(value, spec), ref) for value, ref, spec, mine in made]
                results = [sums[ref] + value if ref in sums else value for value, ref in parts]
            return [jax.numpy.asarray(r)[None] if mine else r for r, mine in zip(results, writes, strict=True)]

        return jax.shard_map(of_one, mesh=self.mesh, in_specs=tuple(ins), out_specs=outs, axis_names=axes, check_vma=False)


def _summed(value: Leaf, spec: PartitionSpec) -> Leaf:
    """The sum over replicas, or of it the part that ``spec`` gives to this one."""
    at = next((k for k, entry in enumerate(spec) if DATA in axis_names(entry)), None)
    return jax.lax.psum(value, DATA) if at is None else jax.lax.psum_scatter(value, DATA, scatter_dimension=at, tiled=True)


def devices_of(shown: "Device | Submesh") -> tuple[Device, ...]:
    """The devices of what users see of a place."""
    return shown.devices if isinstance(shown, Submesh) else (shown,)


@dataclass(frozen=True)
class Placement:
    """Where stages and ranks live; several may share a place."""

    places: tuple[Place, ...]  # of the stages
    by_rank: tuple[Place, ...]

    def __getitem__(self, stage: int) -> Place:
        return self.places[stage]

    @property
    def num_replicas(self) -> int:
        """How many replicas share the work of a microbatch."""
        return self.places[0].num_replicas

    @property
    def num_shards(self) -> int:
        """How many devices share the parameters of a replica's stage; where ranks are of unequal width, of the widest."""
        return max(place.num_shards for place in self.by_rank)

    @property
    def is_even(self) -> bool:
        """Whether all ranks have as many devices."""
        return len({place.num_shards for place in self.by_rank}) == 1

    @property
    def speeds(self) -> tuple[float, ...]:
        """How many times as many devices each stage has as those of the narrowest rank; its work is divided by that."""
        narrowest = min(place.num_shards for place in self.by_rank)
        return tuple(place.num_shards / narrowest for place in self.places)

    @property
    def ranks_shown(self) -> tuple[Device | Submesh, ...]:
        """What users see of the place of each rank."""
        return tuple(place.shown for place in self.by_rank)

    def holding(self, leaves: Leaves[StateLeaf]) -> "Placement":
        """The same places, told how parameters and optimizer leaves are held there; all else is whole on each device."""
        table = {(leaf.role, leaf.index): leaf for leaf in (*leaves.all_params, *leaves.all_opt)}
        return Placement(*(tuple(place.holding(table) for place in places) for places in (self.places, self.by_rank)))


def place(schedule: Schedule, places: Sequence[Place]) -> Placement:
    """Give each rank a place, in order; fewer places than ranks are cycled. A stage lives where its rank does."""
    by_rank = tuple(places[rank % len(places)] for rank in range(schedule.num_ranks))
    return Placement(tuple(by_rank[rank] for rank in schedule.stage_to_rank), by_rank)


AxisMap = Mapping[str, tuple[str, ...]]  # The names of pipe, data and model, of the user's mesh and in the user's functions

_USUAL: AxisMap = {
    PIPE: ("pipe", "stage", "pp"),
    DATA: ("data", "replica", "fsdp", "batch", "dp"),
    MODEL: ("model", "tensor", "tp"),
}


def axis_map(axes: object, mesh: object) -> AxisMap:
    """What the user's names of axes stand for: as ``axes`` says, or else as they are usually called."""
    names = mesh.axis_names if isinstance(mesh, Mesh) else ()
    usual = {axis: tuple(name for name in known if name in names or name == axis) for axis, known in _USUAL.items()}
    if axes is None:
        return usual
    rule = "it says what your axes are to a pipeline"
    fix = 'pass for example {"pipe": "stage", "data": ("replica", "fsdp"), "model": "tensor"}'
    if not isinstance(axes, Mapping) or not set(axes) <= set(_USUAL):
        got = shown(axes) if not isinstance(axes, Mapping) else ", ".join(map(repr, sorted(set(axes) - set(_USUAL))))
        raise ArgumentError("axes", rule, got, fix)
    given = {axis: (names,) if isinstance(names, str) else tuple(names) for axis, names in axes.items()}
    flat = [name for each in given.values() for name in each]
    if not all(isinstance(name, str) for name in flat) or len(set(flat)) < len(flat):
        raise ArgumentError("axes", rule, shown(axes), f"name each axis once; {fix}")
    left = {axis: tuple(name for name in each if name not in flat) for axis, each in usual.items()}
    more = {axis: left[axis] for axis, each in given.items() if set(each).isdisjoint(names)}  # names that only functions use
    return {axis: given.get(axis, ()) + more.get(axis, () if axis in given else left[axis]) for axis in _USUAL}


def submeshes(
    devices: Sequence[Device] | None, mesh: Mesh | None, data_parallel: int, num_ranks: int, axes: AxisMap
) -> tuple[Place, ...]:
    """The place of each rank, from the first; cycled by ``place`` if there are fewer. All violations are ``ArgumentError``.

    A list of devices in ``devices`` is the rank of all of them, as shards, or as shards of replica after replica: ranks may have
    unequal numbers.
    """
    if isinstance(data_parallel, Sequence) and not isinstance(data_parallel, str):
        where, rule = f"data_parallel={data_parallel!r}", "microbatch i of a replica passes through all ranks on devices of its own"
        fix = "pass one number, and cuts that give each device equal work"
        raise ArgumentError(where, rule, "numbers of replicas for ranks", fix)
    check_counts("data_parallel, the number of replicas", {"data_parallel": data_parallel}, ArgumentError)
    if mesh is None:
        ranks = check_ranks(devices)
        checked = tuple(device for rank in ranks for device in rank)
        _check_alike(checked)
        if len(checked) > len(ranks):
            _check_wide(ranks, data_parallel)
            rows = [np.array(rank).reshape(data_parallel, -1) for rank in ranks]
            return tuple(OneDevice(*each.flat) if each.size == 1 else Submesh(_mesh_of(each)) for each in rows)
        if data_parallel == 1:
            return tuple(map(OneDevice, checked))
        if len(set(checked)) < len(checked):
            where, got = f"devices, data_parallel={data_parallel}", ", ".join(map(device_name, checked))
            raise ArgumentError(where, "replicas of a stage have a device each", got, "name each device once")
        if len(checked) < data_parallel:
            where, rule = f"data_parallel={data_parallel}", "each replica of a stage has a device of its own"
            got, fix = f"{len(checked)} devices for {data_parallel} replicas", f"pass data_parallel={len(checked)} or less"
            raise ArgumentError(where, rule, got, fix)
        groups = min(num_ranks, len(checked) // data_parallel)
        grid = np.array(checked[: groups * data_parallel]).reshape(groups, data_parallel, 1)
    else:
        if devices is not None or data_parallel != 1:
            rule = "the mesh says which devices there are, and how many replicas"
            raise ArgumentError("mesh", rule, "devices or data_parallel too", "leave devices and data_parallel out")
        grid = _grid(mesh, num_ranks, axes)
    if grid.shape[1:] == (1, 1):
        return tuple(map(OneDevice, grid.flat))
    return tuple(Submesh(_mesh_of(rows)) for rows in grid)


def _mesh_of(rows: np.ndarray) -> Mesh:
    """The mesh of a rank: a row for each replica."""
    return Mesh(rows, (DATA, MODEL))


def _check_wide(ranks: Sequence[Sequence[Device]], data_parallel: int) -> None:
    """Refuse what ranks of several devices each cannot have beside them."""
    counts = [len(rank) for rank in ranks]
    if wrong := [f"devices[{k}]: {count} device{'s' * (count > 1)}" for k, count in enumerate(counts) if count % data_parallel]:
        where, rule = f"devices, data_parallel={data_parallel}", "each replica has as many devices of a rank as the others"
        fix = f"pass lists of {data_parallel}, {2 * data_parallel}, ... devices, those of one replica after another"
        raise ArgumentError(where, rule, wrong, fix)
    split = [
        f"devices[{k}]: {', '.join(map(device_name, rank))}"
        for k, rank in enumerate(ranks)
        if any(len(processes_of(row)) > 1 for row in np.array(rank).reshape(data_parallel, -1).tolist())
    ]
    if len(set(counts)) > 1 and split:
        rule = "where ranks have unequal numbers of devices, those of a replica of a rank are of one process"
        raise ArgumentError("devices", rule, split, "pass the devices of one process there, or ranks of as many devices each")


def axes_of(place: Place, mesh: Mesh | None, axes: AxisMap) -> RankAxes:
    """The axes of a rank; ``mesh`` has those of all devices, and is in force for functions unless the user has set one.

    Where lists of devices stand for ranks there is no such mesh, and that of the rank is in force.
    """
    sizes = {} if mesh is None else mesh.shape
    pairs = [(name, axis) for axis, each in axes.items() for name in each if name in sizes or name != axis]
    # A name that the mesh does not have stands for all its axes that divide the same.
    names = [(name, axis, sizes.get(name, place.axis_sizes.get(axis, 1))) for name, axis in pairs]
    in_force = place.mesh if mesh is None and isinstance(place, Submesh) and place.num_shards > 1 else mesh
    return RankAxes(mesh_in(place), names=tuple(names), whole=in_force)


def axes_alone(axes: RankAxes, place: Place) -> RankAxes:
    """The axes of a rank of which the devices of one replica are known: ``place``."""
    names = tuple((name, axis, 1 if axis == DATA else size) for name, axis, size in axes.names)
    return RankAxes(mesh_in(place), names=names, whole=axes.whole)


def mesh_in(place: Place) -> AbstractMesh:
    """The axes of one rank."""
    return place.mesh.abstract_mesh if isinstance(place, Submesh) else ONE_DEVICE.devices


def num_places(devices: Sequence[Device] | None, mesh: object, data_parallel: object, axes: AxisMap) -> int:
    """For how many ranks there are devices; what cannot be run is refused by ``submeshes``."""
    if mesh is not None:
        return math.prod(mesh.shape.get(name, 1) for name in axes[PIPE]) if isinstance(mesh, Mesh) else 1
    replicas = int(data_parallel) if is_count(data_parallel, least=1) else 1  # pyright: ignore[reportArgumentType]
    ranks = check_ranks(devices)
    return len(ranks) // (replicas if max(map(len, ranks), default=1) == 1 else 1)


def mesh_of_ranks(mesh: Mesh, num_ranks: int, axes: AxisMap) -> Mesh:
    """The part of a mesh that has the first ranks; an ``ArgumentError`` if ranks lie along several axes: no part has some then."""
    names = [name for name in axes[PIPE] if mesh.shape.get(name, 1) > 1]
    if num_ranks == math.prod(mesh.shape[name] for name in names):
        return mesh
    if len(names) > 1:
        rule, got = "fewer ranks are a part of one axis of the mesh", f"ranks along {', '.join(map(repr, names))}"
        raise ArgumentError(f"mesh, {num_ranks} rank{'s' * (num_ranks != 1)}", rule, got, "pass a mesh with one axis of ranks")
    part = np.take(mesh.devices, range(num_ranks), mesh.axis_names.index(names[0]))
    return Mesh(part, mesh.axis_names, axis_types=mesh.axis_types)


class DevicesWarning(UserWarning):
    """Nobody named the devices, and ``jax.devices()`` has fewer than there are ranks; or some of them have nothing to do."""


def devices_warning(schedule: Schedule, places: Sequence[Place], data_parallel: int, *, by_name: bool) -> DevicesWarning | None:
    """Devices that nobody named are too few, or stay idle, because a schedule ``by_name`` has several stages a rank; or None."""
    ranks, stages = schedule.num_ranks, schedule.num_stages
    devices = jax.devices()
    if len(places) < ranks:
        where, rule = f"num_stages={stages}", "each rank of a pipeline has a device of its own"
        got = f"{ranks * data_parallel} wanted, and jax.devices() has {len(devices)}: ranks that share one take turns"
        fix = f"pass num_stages={max(1, stages * len(places) // ranks)} or less"
        if devices[0].platform == "cpu":
            fix = f'write jax.config.update("jax_num_cpu_devices", {ranks * data_parallel}) before JAX is first used'
        fix += "; or pass devices=jax.devices(), if they shall share"
    elif by_name and ranks < stages and stages * data_parallel == len(devices):
        where, rule = f"schedule={schedule.name!r}", "it has several stages on a rank, and a rank has a device"
        idle = len(devices) - ranks * data_parallel
        have = "has" if idle == 1 else "have"
        got = f"{stages} stages on {ranks} rank{'s' * (ranks > 1)}: {idle} of {len(devices)} devices {have} nothing to do"
        these = f"devices=jax.devices()[:{ranks * data_parallel}]"
        fix = f"pass num_stages={stages * stages // ranks} to use all; or {these} to use no more"
    else:
        return None
    return DevicesWarning(f"{where}: {rule}.\n  Got: {got}.\n  Fix: {fix}.")


def undivided_warnings(placement: Placement, divided: Collection[int], *, by_list: bool) -> tuple[DevicesWarning, ...]:
    """What to tell the user of devices along ``model`` over which nothing is divided; ``divided`` are stages with sharded leaves.

    ``by_list``: ranks of several devices are lists in ``devices=``, and there is no mesh.
    Where ranks are of unequal width, each rank of several devices is there for its own stages; else one sharded leaf is enough.
    """
    rules, num_shards = "shardings=jaxpp.propose_shardings(loss_fn, params, batch, model={})", placement.num_shards
    if num_shards == 1 or (placement.is_even and divided):
        return ()
    if placement.is_even:
        where, rule = 'mesh with the axis "model"', "the devices along an axis of the mesh divide the work of a stage"
        instead = "a mesh without that axis"
        if by_list:
            where, rule = "devices, a list of devices for each rank", "the devices of a rank divide the parameters of its stages"
            instead = "one device for each rank"
        got = f'no parameter is sharded over "model": its {num_shards} devices hold and compute the same'
        return (DevicesWarning(f"{where}: {rule}.\n  Got: {got}.\n  Fix: pass {rules.format(num_shards)}, or {instead}."),)
    found = []
    for rank, place in enumerate(placement.by_rank):
        stages = [stage for stage, other in enumerate(placement.places) if other == place]
        if place.num_shards > 1 and place not in placement.by_rank[:rank] and set(stages).isdisjoint(divided):
            rule = "the devices of a rank divide the parameters of its stages"
            names = ", ".join(map(str, stages))
            got = f'no parameter of stage {names} is sharded over "model": its {place.num_shards} devices hold and compute the same'
            fix = f"pass {rules.format(place.num_shards)}, or one device there"
            found.append(DevicesWarning(f"devices, rank {rank}: {rule}.\n  Got: {got}.\n  Fix: {fix}."))
    return tuple(found)


def _check_alike(devices: Sequence[Device]) -> None:
    """Refuse devices of which some hold arrays and some only compile."""
    paper = [device for device in devices if compiles_only(device)]
    if paper and len(paper) < len(devices):
        rule, got = "either all devices hold arrays or all of them only compile", ", ".join(map(device_name, devices))
        raise ArgumentError("devices", rule, got, "pass devices of one kind: jaxpp.target(...) to plan, jax.devices() to run")


def _grid(mesh: object, num_ranks: int, axes: AxisMap) -> np.ndarray:
    known = [name for axis in (PIPE, DATA, MODEL) for name in axes[axis]]
    others = [name for name in mesh.axis_names if name not in known and mesh.shape[name] > 1] if isinstance(mesh, Mesh) else []
    if not isinstance(mesh, Mesh) or others:
        rule = 'a mesh has axes called "pipe", "data" and "model", those that are wanted, in any order'
        got = repr(mesh.axis_names) if isinstance(mesh, Mesh) else type(mesh).__name__
        fix = 'pass for example jax.make_mesh((2, 2, 2), ("pipe", "data", "model"))'
        fix += f', or axes={{"data": {others[0]!r}}}' if others else ""
        raise ArgumentError("mesh", rule, got, fix)
    sizes = [math.prod(mesh.shape.get(name, 1) for name in axes[axis]) for axis in (PIPE, DATA, MODEL)]
    if sizes[0] > num_ranks:
        where, rule = f"mesh, num_stages with {num_ranks} ranks", "each device along pipe is a rank of the schedule"
        got = f"{sizes[0]} along pipe for {num_ranks} ranks"
        raise ArgumentError(where, rule, got, f"pass more stages, or a mesh with {num_ranks} along pipe")
    order = [mesh.axis_names.index(name) for name in known if name in mesh.axis_names]
    order += [k for k in range(len(mesh.axis_names)) if k not in order]
    return np.transpose(mesh.devices, order).reshape(sizes)
