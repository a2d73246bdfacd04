"""The options of a pipeline: what the user asked for, checked before anything is traced."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike

from jaxpp.errors import ArgumentError, ScheduleError, is_count, shown
from jaxpp.errors.checks import as_tuple, check_flags, check_function
from jaxpp.errors.keywords import spelt
from jaxpp.lowering.passes.visits import WAITING
from jaxpp.optim.loss_scale import Scaling, check_loss_scale
from jaxpp.runtime.edges import HOST_MEMORY
from jaxpp.runtime.place import (
    AxisMap,
    DevicesWarning,
    Place,
    Placement,
    axes_alone,
    axes_of,
    axis_map,
    devices_warning,
    num_places,
    place,
    submeshes,
)
from jaxpp.runtime.processes.here import is_here, processes_of
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.flow import overlaps
from jaxpp.schedule.forward import forward
from jaxpp.schedule.offload import Offloaded, offloads
from jaxpp.schedule.registry import AUTO, make, make_for_stages
from jaxpp.schedule.simulate import simulate
from jaxpp.schedule.validate import check_counts
from jaxpp.stages.axes import DATA, MODEL, ONE_DEVICE, RankAxes, axes_of_spec
from jaxpp.stages.loss.aux import check_reducers
from jaxpp.stages.loss.rng_key import positional_key
from jaxpp.stages.program import Role
from jaxpp.stages.remat import Remat, RematPolicy, offload_of, policies_of
from jaxpp.targets import compiles_only, device_name
from jaxpp.types import Batch, Device, LossFn, ReduceAux, Tree


class OptionWarning(UserWarning):
    """An option that changes nothing beside the others, or does not do what it is for."""


@dataclass(frozen=True)
class Options:
    """What the user asked for: the arguments of a front door, checked and settled by ``Asked``."""

    loss_fn: LossFn  # loss_fn(params[, model_state], batch[, key]); takes the key by position
    schedule: Schedule  # if made_to_measure, another one with as many ranks, until the stages are known
    places: tuple[Place, ...]  # of the ranks, in order, reused round-robin: devices, or sub-meshes of mesh
    has_aux: bool = False
    weight: Callable[[Batch], ArrayLike] | str | None = None  # of a microbatch; None: the number of its examples; "auto"
    reduction: str = "mean"  # or "sum": what the loss of a step is of those of the microbatches
    cuts: tuple[str, ...] | None = None  # the names at which the stages after the first begin; None if jaxpp chooses
    remat: tuple[RematPolicy, ...] | None = None  # one for each stage; None if every stage keeps everything
    offload: tuple[int | None, ...] = ()  # of how many microbatches a stage's residuals stay on the device; None: of all
    cut_gradient: frozenset[int] = frozenset()
    has_state: bool = False
    reduce_aux: Mapping[str, Any] = field(default_factory=dict)  # by path
    loss_scale: Scaling | None = None
    balance: str = "cost"
    shardings: Tree = None  # of the parameters inside a stage, as the user wrote them
    shard: frozenset[str] = frozenset()  # what replicas divide between them: "optimizer", "gradients", "parameters"
    broadcast: tuple[str, ...] = ()
    trains: tuple[str, ...] | None = None  # the paths of the parameters that a step changes; None: of all
    host: str | None = None  # what waits in host memory while no device works with it: a word of ``WAITING``
    delay: int = 0  # how many steps the gradients of a step are late
    late: tuple[str, ...] | None = None  # with ``delay``, the paths of what any loss of a state trains; None: of all
    max_shapes: int = 8
    fuse: bool | None = None  # whether a forward and the backward behind it run as one program, where a stage can; see ``fuses``
    threads: str = "auto"  # what hands over a step: "one" thread, one for each of the "ranks", or what is likely to be quicker
    hbm: int | None = None  # bytes of each device, into which a step is to fit; None if nobody asks
    devices_warning: DevicesWarning | None = None  # what to tell the user of devices that nobody named
    counts_microbatches: bool = False  # whether jaxpp chose num_microbatches, as nobody said it
    made_to_measure: bool = False  # whether the schedule is yet to be found for what the stages will take: schedule="auto"
    examined: bool = True  # whether it is asked what microbatches make of the loss; nobody reads that where nothing will run
    axes: RankAxes = ONE_DEVICE  # of a rank, which functions may name
    by_list: bool = False  # whether devices were listed, those of a rank of several in a list of its own; else there is a mesh
    allow_int: bool = True  # whether parameters may have leaves of types without a gradient, which are frozen
    is_loss: bool = True  # False: loss_fn is a function that returns outputs, with has_state (new_model_state, outputs)

    @classmethod
    def of(cls, loss_fn: LossFn, **given: Any) -> "Options":
        """The options from arguments by name, as ``Pipeline`` has them."""
        return Asked.of(**given).settled(loss_fn)

    @cached_property
    def placement(self) -> Placement:
        """Where each stage lives: the ranks get the places in order."""
        return place(self.schedule, self.places)

    def alone(self, number: int) -> "Options":
        """The options of a pipeline of one of the replicas."""
        places = tuple(place.alone(number) for place in self.places)
        return replace(self, places=places, axes=axes_alone(self.axes, _widest(places)))

    def with_host(self, host: str | None) -> "Options":
        """The same with other parts of a state in host memory; an ArgumentError if that cannot be."""
        found = self if host == self.host else replace(self, host=host)
        if host is not None:
            _check_memories(found.devices, f"host={host!r}", "no host=")
        return found

    def hosted(self) -> list["Options"]:
        """The same with more in host memory, each with more than the one before; none if the state cannot wait there."""
        words = list(WAITING)
        more = words if self.host is None else words[words.index(self.host) + 1 :]
        found = list[Options]()
        with contextlib.suppress(ArgumentError):
            for word in more:
                found.append(self.with_host(word))
        return found

    def idle(self, *, calls_host: bool, waits: bool, divides: bool, shares: bool, copies: bool) -> Iterator["OptionWarning"]:
        """What to tell of options that change nothing beside the others, and beside this loss and optimizer.

        Args:
            calls_host: whether either of these calls Python on the host.
            waits: whether the optimizer's state has leaves that can wait in host memory.
            divides: whether the loss says how its values are divided over axes.
            shares: whether replicas hold parts of what they are asked to divide.
            copies: whether another loss trains parameters that this one leaves alone.
        """
        schedule, known, delay = self.schedule, not self.made_to_measure, bool(self.delay)
        single, several = self.placement.num_replicas == 1, len(processes_of(self.devices)) > 1
        axes, sizes = self.axes.names if self.by_list else (), self.axes.sizes
        unnamed = [name for name, axis, _ in axes if axis != DATA and sizes.get(axis, 1) == 1 and not divides]
        fuses = any(action.stage == schedule.num_stages - 1 for action in schedule.pairs)
        late, out, both = f"delay={self.delay}", "leave delay out", "leave one of them out"
        cut, ends = "the stages begin where cuts= says", "a step ends before the next begins, and no time is won"
        called, full = "a loss or an optimizer that calls it", f"where no rank has room for the next step's forwards, {ends}"
        named, nothing = "it says what the axes of a mesh are, and over what functions reduce", "an optimizer without arrays"
        behind, waiting = "the last stage runs B right behind each F", "the optimizer's state waits in host memory"
        scaled = "a loss scale and has_state=True"
        able = "replicas divide an axis that their number divides, and of the optimizer's state what has its parameter's shape"
        alone, more, order = "replicas divide it between them", "pass data_parallel=2, or leave it out", 'pass schedule="1f1b"'
        for is_idle, where, rule, got, fix in (
            (self.cuts is not None and self.balance != "cost", f"balance={self.balance!r}", cut, "cuts too", both),
            (self.shard and single, f"shard={sorted(self.shard)}", alone, "one replica", more),
            (self.shard and not single and not shares, f"shard={sorted(self.shard)}", able, "nothing like that", "leave it out"),
            (unnamed, f"axes with {', '.join(map(repr, unnamed))}", named, "no mesh", "pass mesh=..., or leave these out"),
            (self.host == "optimizer" and not waits, 'host="optimizer"', waiting, nothing, "leave it out"),
            (self.fuse and known and not fuses, "fuse=True", behind, schedule.name, f"{order}, or leave it out"),
            (delay and self.offloaded, late, f'with remat="offload" {ends}', "both", both),
            (copies, late, f"where another loss trains what this one leaves alone, {ends}", f"trains={self.trains!r}", out),
            (delay and self.host == "params", late, f"where parameters visit their devices, {ends}", 'host="params" too', both),
            (delay and several, late, f"where processes meet at each step, {ends}", "several processes", out),
            (delay and calls_host, late, f"where the host is waited for, {ends}", called, out),
            (
                delay and self.loss_scale and self.has_state,
                late,
                f"where gradients decide on the model state, {ends}",
                scaled,
                both,
            ),
            (delay and known and not overlaps(schedule), late, full, schedule.heading, f"{order} on several ranks, or {out}"),
        ):
            if is_idle:
                yield OptionWarning(f"{where}: {rule}.\n  Got: {got}.\n  Fix: {fix}.")

    @property
    def fuses(self) -> bool:
        """Whether a forward and the backward right behind it run as one program, where a stage can: unless asked, not on CPUs."""
        return self.devices[0].platform != "cpu" if self.fuse is None else self.fuse

    @property
    def waiting(self) -> frozenset[Role]:
        """The roles of what is on devices only while it is used."""
        return frozenset() if self.host is None else WAITING[self.host]

    @cached_property
    def compile_only(self) -> bool:
        """Whether the devices only compile, and hold no arrays."""
        return compiles_only(self.devices[0])

    @cached_property
    def offloaded(self) -> tuple[Offloaded, ...]:
        """The stages and microbatches whose residuals wait in host memory."""
        moves = any(each is not None for each in self.offload)
        return offloads(self.schedule.rows, self.offload) if moves else ()

    @property
    def remarks(self) -> tuple[str, ...]:
        """What was chosen for the user before anything is known of the loss, a sentence each, and what else would have cost."""
        made = self.schedule
        if not self.counts_microbatches or made.num_ranks == 1:
            return ()
        said = f"num_microbatches={made.num_microbatches} was chosen, as many as there are stages"
        if self.made_to_measure:
            return (f"{said}; two to four times as many leave devices idle for less time",)
        more = [2 * made.num_microbatches, 4 * made.num_microbatches]
        others = [make_for_stages(made.name, num_stages=made.num_stages, num_microbatches=count) for count in more]
        idle, *less = [simulate(each).bubble_fraction for each in (made, *others)]
        if less[-1] >= idle:
            return (said,)
        would = ", ".join(f"{bubble:.0%} with {count}" for bubble, count in zip(less, more, strict=True))
        return (f"{said}: devices idle for {idle:.0%} of a step of {made.name} whose stages take equally long; {would}",)

    @property
    def described(self) -> list[str]:
        """The schedule and the devices, a line each, for people."""
        schedule, placement = self.schedule, self.placement
        devices = list(dict.fromkeys(device_name(device) for place in placement.by_rank for device in place.devices))
        names = ", ".join(devices if len(devices) <= 8 else [*devices[:7], f"... ({len(devices)})"])
        counts = {"replicas": [placement.num_replicas], "shards": sorted({place.num_shards for place in placement.by_rank})}
        shared = " x ".join(f"{' or '.join(map(str, each))} {what}" for what, each in counts.items() if max(each) > 1)
        sizes = [f"{schedule.num_stages} stage{'s' * (schedule.num_stages > 1)}"]
        sizes += [f"{schedule.num_microbatches} microbatch{'es' * (schedule.num_microbatches > 1)}"]
        return [
            f"  schedule: {schedule.name}, {', '.join(sizes)}",
            f"  devices: {names}" + f" ({shared} a rank)" * bool(shared),
        ]

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices."""
        return tuple(device for place in self.places for device in place.devices)


@dataclass(frozen=True)
class Order:
    """In what parts a loss and a batch run, and in which order, as the user writes it."""

    num_stages: int
    num_microbatches: int | None = None  # None: as many as there are stages
    schedule: str | Schedule = "1f1b"
    cuts: Sequence[str] | None = None
    balance: str = "cost"
    threads: str = "auto"


@dataclass(frozen=True)
class Loss:
    """What the function takes and returns, and how what it returns of microbatches becomes that of a step."""

    has_aux: bool = False
    has_state: bool = False
    allow_int: bool = True
    reduce_aux: ReduceAux = None
    weight: Callable[[Batch], ArrayLike] | str | None = None
    reduction: str = "mean"
    broadcast: str | Sequence[str] = ()
    is_loss: bool = True  # False: of forwards alone, whose function returns outputs


@dataclass(frozen=True)
class Training:
    """What of the parameters learns, and when."""

    trains: str | Sequence[str] | None = None
    cut_gradient: Iterable[int] = ()
    loss_scale: Tree = None
    delay: int = 0


@dataclass(frozen=True)
class Where:
    """Which devices there are, and how the parameters of a stage are divided among them."""

    devices: Sequence[Device] | None = None
    mesh: Mesh | None = None
    data_parallel: int = 1
    axes: Mapping[str, str | Sequence[str]] | None = None
    shardings: Tree = None
    shard: str | Sequence[str] | None = None


@dataclass(frozen=True)
class Memory:
    """What is kept, and where it waits."""

    remat: Remat | Sequence[Remat] = "least"
    hbm: int | None = None  # bytes
    host: str | None = None
    fuse: bool | None = None
    max_shapes: int = 8


class Asked(NamedTuple):
    """The arguments of ``Pipeline``, ``value_and_grad`` and ``Forward``, in groups, as the user wrote them.

    The front doors put them together by name; ``settled`` is the one place where they are checked.
    """

    order: Order
    loss: Loss = Loss()
    training: Training = Training()
    where: Where = Where()
    memory: Memory = Memory()

    @classmethod
    def of(cls, **given: Any) -> "Asked":
        """The groups from arguments by name."""
        taken = [{name: given.pop(name) for name in (each.name for each in fields(group)) if name in given} for group in _GROUPS]
        if given:
            raise TypeError(f"options got unexpected keyword arguments {', '.join(given)}")
        return cls._make(group(**own) for group, own in zip(_GROUPS, taken, strict=True))

    def settled(self, function: LossFn) -> Options:
        """The options, checked one by one and then together; an ArgumentError if they cannot be."""
        order, loss, training, where, memory = self
        _check_kinds(self, function)
        known = axis_map(where.axes, where.mesh)
        there = partial(num_places, where.devices, where.mesh, where.data_parallel, known)
        num_stages = int(order.num_stages)
        num_microbatches = num_stages if order.num_microbatches is None else int(order.num_microbatches)
        auto = isinstance(order.schedule, str) and order.schedule == AUTO
        if auto:
            made = _before_measuring(num_stages, num_microbatches, there())
        elif loss.is_loss:
            made = _schedule_of(order.schedule, num_stages, num_microbatches)
        else:
            made = forward(num_stages, num_microbatches)
        if loss.has_state:
            _check_order(made)
        places = submeshes(where.devices, where.mesh, where.data_parallel, made.num_ranks, known)
        widest = _widest(places)
        warning = None
        if where.devices is None and where.mesh is None:
            warning = devices_warning(made, places, where.data_parallel, by_name=isinstance(order.schedule, str))
        trains = None if training.trains is None else _paths_of("trains", training.trains, *_TRAINED, least=1)
        found = Options(
            schedule=made,
            places=places,
            has_aux=loss.has_aux,
            has_state=loss.has_state,
            allow_int=loss.allow_int,
            is_loss=loss.is_loss,
            weight=loss.weight,
            reduction=_reduction_of(loss.reduction),
            cuts=_cuts_of(order.cuts, num_stages),
            reduce_aux=check_reducers(loss.reduce_aux),
            remat=policies_of(memory.remat, num_stages, places[0].devices[0].platform),
            offload=offload_of(memory.remat, num_stages),
            cut_gradient=_boundaries_of(training.cut_gradient, num_stages),
            balance=_balance_of(order.balance),
            loss_scale=check_loss_scale(training.loss_scale, late=bool(training.delay)),
            shardings=_check_shardings(where.shardings, where.mesh, widest, known),
            shard=_shard_of(where.shard, is_loss=loss.is_loss),
            broadcast=_paths_of("broadcast", loss.broadcast, "batch leaves for all microbatches", 'broadcast=("beta", "graph/*")'),
            trains=trains,
            max_shapes=int(memory.max_shapes),
            hbm=memory.hbm,
            fuse=memory.fuse,
            threads=_threads_of(order.threads),
            host=_host_of(memory.host, is_loss=loss.is_loss),
            delay=_delay_of(training.delay),
            late=trains,
            counts_microbatches=order.num_microbatches is None and loss.is_loss and isinstance(order.schedule, str),
            made_to_measure=auto,
            axes=axes_of(widest, where.mesh, known),
            by_list=where.mesh is None,
            devices_warning=(_idle_devices(made, there()) if auto else None) or warning,
            loss_fn=positional_key(function, 2 + loss.has_state, "loss_fn" if loss.is_loss else "fn"),
        )
        if any(each is not None for each in found.offload):
            _check_memories(found.devices, 'remat="offload"', 'remat="least" or remat="recompute"')
        return found.with_host(found.host)


def _widest(places: Sequence[Place]) -> Place:
    """The place of most devices in a replica."""
    return max(places, key=lambda each: each.num_shards)


_TRAINED = "the parameters that a step trains", 'trains="generator", or leave it out to train all'
_THREADS = ("auto", "one", "ranks")
_GROUPS = (Order, Loss, Training, Where, Memory)


def _check_kinds(asked: Asked, function: object) -> None:
    """Refuse counts, flags and functions that are none."""
    order, loss = asked.order, asked.loss
    counts = {"num_stages": order.num_stages, "max_shapes": asked.memory.max_shapes}
    if order.num_microbatches is not None:
        counts["num_microbatches"] = order.num_microbatches
    where = "jaxpp.Pipeline / jaxpp.value_and_grad" if loss.is_loss else "jaxpp.Forward"
    check_counts(where, counts, ArgumentError)
    check_flags(where, has_aux=loss.has_aux, has_state=loss.has_state, allow_int=loss.allow_int)
    if asked.memory.fuse is not None:
        check_flags(f"fuse={asked.memory.fuse!r}", fuse=asked.memory.fuse)
    check_function("loss_fn", "the loss is a function of (params, batch[, key])", function)
    if loss.weight is not None and loss.weight != "auto":
        fix = 'pass a function such as lambda batch: batch["mask"].sum(), or "auto", or leave weight out'
        check_function("weight", "the weight is a function that makes one number of a microbatch", loss.weight, fix)
    if loss.weight is not None and loss.reduction == "sum":
        fix = "leave weight out; or, for a weighted mean, reduction"
        raise ArgumentError('weight, reduction="sum"', "weights are those of a mean, and a sum has none", "both", fix)
    if loss.reduce_aux is not None and loss.is_loss and not (loss.has_aux or loss.has_state):
        rule = "it says how the aux values of the microbatches become those of the step, so the loss must return some"
        fix = "pass has_aux=True and return (loss, aux), or leave reduce_aux out"
        raise ArgumentError(f"reduce_aux={shown(loss.reduce_aux)}", rule, "a loss without aux (has_aux=False)", fix)


def _check_memories(devices: Sequence[Device], where: str, instead: str) -> None:
    mine = [device for device in dict.fromkeys(devices) if is_here(device) and not compiles_only(device)]  # GPUs reach it
    kinds = {device: [memory.kind for memory in device.addressable_memories()] for device in mine}
    if wrong := [f"{device} with {', '.join(known) or 'none'}" for device, known in kinds.items() if HOST_MEMORY not in known]:
        fix = f"pass {instead}, or devices that have it, as CPUs and GPUs do"
        raise ArgumentError(where, f"each device reaches {HOST_MEMORY} memory, in which arrays wait", wrong, fix)


def _host_of(host: str | None, *, is_loss: bool) -> str | None:
    if host == "optimizer" and not is_loss:
        rule, fix = "forwards have parameters, and no optimizer", 'pass host="params", or leave it out'
        raise ArgumentError(f"host={host!r}", rule, "a jaxpp.Forward", fix)
    if host in ("activations", "residuals"):
        rule, fix = "it says what of the state waits in host memory", 'pass remat="offload"'
        raise ArgumentError(f"host={host!r}", rule, f"{host!r}, which are no part of it", fix)
    if host is not None and host not in tuple(WAITING):  # which asks for no hash
        rule = f"what can wait in host memory is {' or '.join(map(repr, WAITING))}"
        fix = 'pass host="optimizer", or host="params" for these, their gradients and the optimizer, or leave it out'
        raise ArgumentError(f"host={shown(host)}", rule, shown(host), fix)
    return host


def _delay_of(delay: int) -> int:
    if isinstance(delay, bool) or delay not in (0, 1):
        rule = "gradients are of the parameters that a step finds (0), or of those before the last step (1)"
        raise ArgumentError(f"delay={shown(delay)}", rule, shown(delay), "pass delay=1, or leave it out")
    return delay


def _reduction_of(reduction: str) -> str:
    if reduction not in ("mean", "sum"):
        rule = 'the loss of a step is the "mean" over the microbatches, or their "sum" if the loss is a sum over its examples'
        raise ArgumentError("reduction", rule, repr(reduction), 'pass reduction="sum", or leave it out')
    return reduction


_BALANCES = ("cost", "flops", "time", "memory")


def _balance_of(balance: str) -> str:
    if balance not in _BALANCES:
        rule = 'a loss is cut by "cost" (estimated), "flops" (counted), "time" (measured) or "memory" (estimated)'
        fix = spelt([balance], _BALANCES, 'pass balance="time" or balance="memory", or leave it out')
        raise ArgumentError("balance", rule, repr(balance), fix)
    return balance


def _threads_of(threads: object) -> str:
    if threads not in _THREADS:
        rule = "one thread hands over a step, or one for each rank"
        raise ArgumentError(f"threads={threads!r}", rule, shown(threads), "pass 'auto', 'one' or 'ranks'")
    return str(threads)


def _check_shardings(shardings: Tree, mesh: Mesh | None, widest: Place, axes: AxisMap) -> Tree:
    if isinstance(shardings, str) and shardings in SHARDS:
        rule, fix = "it says how single parameters are sharded inside their stage", f"pass shard={shardings!r}"
        raise ArgumentError("shardings", rule, f"{shardings!r}, what replicas may divide between them", fix)
    there = {axis for axis, names in axes.items() if mesh is not None and not set(names).isdisjoint(mesh.axis_names)}
    there |= {axis for axis, size in widest.axis_sizes.items() if size > 1}
    if shardings is None or MODEL in there or (DATA in there and not _names_model(shardings, axes[MODEL])):
        return shardings
    got = "no mesh" if mesh is None else f"a mesh with the axes {', '.join(map(repr, mesh.axis_names))}"
    fix = 'pass for example mesh=jax.make_mesh((2, 2), ("pipe", "model")), or leave shardings out'
    raise ArgumentError("shardings", 'parameters are sharded over the "model" axis of a mesh, or divided over "data"', got, fix)


def _names_model(shardings: Tree, names: Sequence[str]) -> bool:
    """Whether rules say of any parameter that it is sharded over ``model``; what a function says is not known yet."""
    leaves = jax.tree.leaves(shardings, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
    specs = [getattr(leaf, "spec", leaf) for leaf in leaves]
    named = {name for spec in specs if isinstance(spec, PartitionSpec) for name in axes_of_spec(spec)}
    words = {spec for spec in specs if isinstance(spec, str)}
    return not (named | words).isdisjoint((*names, "column", "row", "heads", "embedding"))


SHARDS = ("optimizer", "gradients", "parameters")  # what replicas can divide between them; the last two with the first


def _shard_of(shard: object, *, is_loss: bool) -> frozenset[str]:
    able, asked = SHARDS if is_loss else SHARDS[-1:], () if shard is None else as_tuple(shard)
    if wrong := [shown(what) for what in asked if what not in able]:
        rule = f"replicas of a stage can divide between them {', '.join(map(repr, able))}"
        fix = f"pass shard={able[0]!r}, for example, or leave it out"
        if isinstance(shard, Mapping) or any(isinstance(what, PartitionSpec) for what in asked):
            fix = "pass rules for single parameters as shardings, which says how they are sharded inside their stage"
        raise ArgumentError("shard", rule, wrong, fix)
    return frozenset(map(str, asked))


def _cuts_of(cuts: object, num_stages: int) -> tuple[str, ...] | None:
    if cuts is None:
        return None
    names = as_tuple(cuts)
    if wrong := [shown(name) for name in names if not isinstance(name, str)]:
        rule = "a cut is the name of a module or parameter at which a stage begins"
        raise ArgumentError("cuts", rule, wrong, 'pass a list of names, such as cuts=["h_2", "h_4"]')
    if len(names) != num_stages - 1:
        got = f"{len(names)} cut{'s' * (len(names) != 1)} and num_stages={num_stages}"
        fix = f"pass num_stages={len(names) + 1}, or {num_stages - 1} cut{'s' * (num_stages != 2)}"
        raise ArgumentError(f"cuts={list(names)!r}", "n stages have n - 1 cuts between them", got, fix)
    return tuple(map(str, names))


def _schedule_of(schedule: str | Schedule, num_stages: int, num_microbatches: int) -> Schedule:
    made = schedule
    if not isinstance(made, Schedule):
        made = make_for_stages(made, num_stages=num_stages, num_microbatches=num_microbatches)
    if made.forward_only:
        rule = "a step needs backwards, and this schedule has forwards only"
        fix = "pass a schedule that trains, as those of jaxpp.schedule.make are, or write the backwards into its rows"
        raise ScheduleError(f"schedule={made.name!r}", rule, made.heading, fix)
    sizes = made.num_stages, made.num_microbatches
    if sizes != (num_stages, num_microbatches):
        rule = "a schedule must be made for the pipeline's numbers of stages and microbatches"
        got = [f"schedule: {sizes[0]} stages, {sizes[1]} microbatches", f"pipeline: {num_stages}, {num_microbatches}"]
        fix = f"pass num_stages={sizes[0]}, num_microbatches={sizes[1]}, or another schedule"
        raise ArgumentError(f"schedule={made.name!r}", rule, got, fix)
    return made


def _before_measuring(num_stages: int, num_microbatches: int, num_places: int) -> Schedule:
    """What stands for a schedule that is yet to be made: as many ranks as there are places for, with equally many stages each."""
    num_ranks = max(count for count in range(1, num_stages + 1) if num_stages % count == 0 and count <= max(1, num_places))
    per_rank = num_stages // num_ranks
    options = {} if per_rank == 1 else {"stages_per_rank": per_rank}
    made = make("1f1b" if per_rank == 1 else "looped-bfs", num_ranks=num_ranks, num_microbatches=num_microbatches, **options)
    return Schedule(AUTO, made.rows, made.stage_to_rank)


def _idle_devices(schedule: Schedule, there: int) -> DevicesWarning | None:
    """A warning of devices that ``schedule="auto"`` leaves idle, because ranks of equally many stages need fewer."""
    stages, ranks = schedule.num_stages, schedule.num_ranks
    if ranks == min(stages, there):
        return None
    rule = 'schedule="auto": equally many stages lie on each rank, and a rank has a device'
    got = f"{stages} stages on {ranks} rank{'s' * (ranks > 1)}, and devices for {there}"
    fix = f"pass num_stages={there} or {2 * there}, or another multiple of {there}"
    return DevicesWarning(f"{rule}.\n  Got: {got}.\n  Fix: {fix}.")


def _check_order(schedule: Schedule) -> None:
    """Model state passes from microbatch to microbatch, so every stage must run its forwards in their order."""
    if wrong := [f"stage {stage} runs F of {', '.join(map(str, found))}" for stage, found in schedule.out_of_order.items()]:
        rule = "model state is updated microbatch by microbatch, so each stage runs its forwards in order"
        fix = "use a schedule whose forwards are in order, as those of jaxpp.schedule.make are"
        raise ScheduleError(f"schedule={schedule.name!r}, has_state=True", rule, wrong, fix)


def _paths_of(name: str, given: object, what: str, fix: str, *, least: int = 0) -> tuple[str, ...]:
    """Paths, or patterns of paths, at least so many."""
    names = as_tuple(given)
    if len(names) < least or not all(isinstance(each, str) for each in names):
        raise ArgumentError(name, f"{what} are named by their paths, or patterns of paths", repr(given), f"pass for example {fix}")
    return tuple(map(str, names))


def _boundaries_of(cut_gradient: Iterable[int] | int, num_stages: int) -> frozenset[int]:
    boundaries = tuple(cut_gradient) if isinstance(cut_gradient, Iterable) else (cut_gradient,)
    wrong = [repr(b) for b in boundaries if not is_count(b, least=0) or b > num_stages - 2]
    if wrong:
        rule, got = "boundary s lies between stages s and s + 1", f"{', '.join(wrong)} with {num_stages} stages"
        fix = f"pass a list of numbers from 0 to {num_stages - 2}" if num_stages > 1 else "leave it out: one stage has no boundary"
        raise ArgumentError(f"cut_gradient={cut_gradient!r}", rule, got, fix)
    return frozenset(map(int, boundaries))
