"""The least time of a step on devices whose numbers are known (``jaxpp.targets``): what no run of these programs can beat.

Each compiled program takes at least the sum of its kernels' rooflines, each send at least its bytes over the link, and the host
hands over no instruction quicker than was measured for calls that do nothing else. A step is what these times give on the clock of
the plan's lines (``line_times``): with its update, the copies of its state, and the steps in flow beside it. Real kernels reach a
part of the peaks, so this is a bound and never a prediction. It counts every array that a kernel reads or writes as memory traffic;
what stays in a cache may be read sooner.
"""

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

from jax.stages import Compiled

from jaxpp.engine.engine import Engine
from jaxpp.engine.outcome import LoweredStep, Purpose
from jaxpp.observe.evaluate import Parts, costs_of_plan
from jaxpp.observe.memory.liveness import step_liveness
from jaxpp.observe.profile.record import flowing_plan
from jaxpp.observe.profile.spans import line_times
from jaxpp.plan.builder import CALLER, Flow, MemoryCopy, Name
from jaxpp.plan.plan import Plan
from jaxpp.runtime.bind import BoundLine
from jaxpp.runtime.hlo import Kernel, read_kernels
from jaxpp.runtime.place import Place
from jaxpp.runtime.roofline import copy_seconds, peaks_of, program_roofline, send_seconds
from jaxpp.schedule.action import Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.costs import StepCosts
from jaxpp.schedule.draw.canvas import Figure
from jaxpp.schedule.simulate import Simulation
from jaxpp.targets import Target, target_of
from jaxpp.types import Batch, Key

_CALL, _RESULT, _SEND = 7e-6, 1.2e-6, 6e-6
"""Seconds of the host: for a call of a compiled program, for each result but the first, and for a copy to another device, the
loop's share included. Measured on CPU devices with JAX 0.10.2, where nothing waits for a driver."""

_DRIVEN, _LAUNCH = 25e-6, 8.5e-6
"""Seconds of the host where a driver launches the kernels of a program: for a call, and for each kernel. Measured on an H200 in a
virtual machine, with JAX 0.11.2 and CUDA 13 (experiments/gpu). Other hosts may be quicker, so the bound does not count them."""

_REAL = 1.9
"""How many times its bound a step took on that GPU."""

_HIDDEN = 0.01
"""What part of a step copies may add that are said to hide."""

_MORE = 4
"""Steps by which two flows differ that show what a step of many takes."""

_PARTS = ("computing", "bubble", "devices that are shared", "transfers", "copies", "waiting for the host", "beginning and update")


class HostWork(NamedTuple):
    """What the process that hands over the instructions of a step has to do."""

    num_instructions: int
    num_kernels: int  # of all programs that they call
    num_threads: int  # that hand them over side by side: one for each rank, or one
    seconds: float  # to hand over all of them, at least; of several threads, those of the one that takes longest
    likely: float  # to hand them over where a driver takes for each kernel what it took on a measured GPU


class VisitBound(NamedTuple):
    """What the copies of a state that visits the devices take and add, at least."""

    added: float  # seconds that they add to the step, and no work hides
    link: float  # that they take of the busier half of a link to host memory
    brought: int  # bytes that come to all devices together
    taken: int  # and go back


@dataclass(frozen=True)
class StepBound:
    """The least time of a step, and what it is made of. ``print`` it; ``figure()`` draws the step on the virtual clock.

    Attributes:
        schedule: in what order the programs run.
        targets: the numbers of each rank's device.
        parts: what the seconds of a step are made of, on the clock of its lines: computing, the bubble, devices that are shared,
            transfers and copies that nothing hides, waiting for the host, the rest.
        costs: the least seconds of every action, transfer and copy, and of what is done once a step.
        offload: of how many microbatches a stage's residuals stay on the device, as ``jaxpp.Offload`` says; None of all.
        products: FLOPs of all matrix products of a step by the type that they are computed in, those that are run again included.
        again: FLOPs of those that are run again (``remat="recompute"``, or a share).
        num_devices: how many devices there are, on all ranks.
        host: what the host has to do.
        visits: of a state that waits in host memory (``Pipeline(host=...)``), what its copies take and add.
        flows: whether each step begins while the one before it ends (``Pipeline(delay=1)``); the seconds are then those of one step
            of many, which neither fills the pipeline nor drains it.
    """

    schedule: Schedule
    targets: tuple[Target, ...]
    parts: Parts
    costs: StepCosts
    offload: tuple[int | None, ...]
    products: Mapping[str, float]
    again: float
    num_devices: int
    host: HostWork
    visits: VisitBound | None = None
    flows: bool = False

    @property
    def seconds(self) -> float:
        """The least time of a step, from the call until all its results are there; of many in flow, the time that each adds."""
        return sum(self.parts)

    @cached_property
    def bubble_fraction(self) -> float:
        """Idle time over ranks x makespan, of the actions and transfers of the schedule."""
        return self.simulation.bubble_fraction

    @property
    def host_limits(self) -> bool:
        """Whether handing over all instructions may take longer than the devices take for them."""
        return max(self.host.seconds, self.host.likely) > self.seconds - self.parts.dispatch

    @property
    def _limit(self) -> str:
        """What the host does to the step, whose devices are likely to take longer than their bound."""
        if not self.host_limits:
            return "does not limit"
        return "is likely to limit" if self.host.likely > _REAL * (self.seconds - self.parts.dispatch) else "may limit"

    @property
    def peak_fraction(self) -> float:
        """The most of the devices' peak that the model's own matrix products can reach, each type at its own peak (MFU)."""
        flops = sum(self.products.values())
        at_peak = sum(peaks_of(self.products, target) for target in self.targets) / len(self.targets) / self.num_devices
        return (1 - self.again / flops) * at_peak / self.seconds if flops else 0.0

    @cached_property
    def simulation(self) -> Simulation:
        """The actions and transfers on the virtual clock, as ``jaxpp.schedule.simulate`` gives it for these costs, in seconds."""
        return self._simulated(1.0)

    def _simulated(self, scale: float) -> Simulation:
        costs = self.costs.scaled(scale, "actions", "transfer", "offload", "visit", "visit_state")
        costs = dataclasses.replace(costs, dispatch={}, before=0)
        return Simulation(self.schedule, costs, self.offload)

    def figure(self, width: float | None = None) -> Figure:
        """The step on the virtual clock with these times, in milliseconds, as a timeline; ``width`` in inches. Needs matplotlib."""
        return self._simulated(1e3).figure(width)

    def lines(self) -> list[str]:
        """What to know of it, in sentences."""
        unit, scale = ("s", 1.0) if self.seconds >= 1 else ("ms", 1e3)
        names = Counter(target.shown for target in self.targets)
        per = self.num_devices / len(self.targets)  # less than one where ranks share a device
        on = " and ".join(f"{round(per * count)} x {name}" for name, count in names.items())
        shown = [(word, part) for word, part in zip(_PARTS, self.parts, strict=True) if part > 5e-4 * self.seconds]
        made = ", ".join(f"{word} {_digits(scale * part)}" for word, part in shown)
        noun = "pass" if self.schedule.forward_only else "step"
        least = f"a {noun}{' of many in flow' * self.flows} takes at least {_digits(scale * self.seconds)} {unit}"
        lines = [f"{least} on {on} (a bound, no prediction): {made}"]
        if self.products:
            most = max(self.products, key=self.products.__getitem__)
            kinds = most if len(self.products) == 1 else f"each type, most of them {most}"
            lines.append(f"its matrix products reach at most {self.peak_fraction:.0%} of the devices' peak for {kinds}")
        host = self.host
        work = f"{host.num_instructions} instructions and {host.num_kernels:,} kernels"
        by = "the host hands" if host.num_threads == 1 else f"{host.num_threads} threads of the host, one for each rank, hand"
        taken = f"{_digits(1e3 * host.seconds)} ms at least, and in about {_digits(1e3 * host.likely)} ms as measured with an H200"
        it = "it" if host.num_threads == 1 else "the host"
        lines.append(f"{by} over {work} of a {noun} in {taken}, so {it} {self._limit} the {noun}")
        if self.visits is not None:
            link, added = (_digits(scale * each) for each in (self.visits.link, self.visits.added))
            hides = self.visits.added <= _HIDDEN * (self.seconds - self.visits.added)
            so = "hide under the work of the visits" if hides else f"add {added} {unit} that no work hides"
            lines.append(f"the copies of the state take {link} {unit} of a link to host memory, and {so}")
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def bound_of(engine: Engine, batch: Batch, key: Key | None, purpose: Purpose = "update") -> StepBound | None:
    """The bound of a step, or of forwards, whose programs are compiled for that; None if the numbers of a device are not known."""
    placement, schedule = engine.placement, engine.options.schedule
    ranks = tuple(target_of(place.devices[0]) for place in placement.by_rank)
    targets = tuple(target for target in ranks if target is not None)
    if len(targets) < len(ranks) or not engine.alone:
        return None
    plan, lowered = engine.plan(purpose, batch, key)
    lines, numbers = lowered.bound.lines, dict(zip(placement.by_rank, targets, strict=True))
    liveness = step_liveness(engine, lowered)
    sizes = {life.name: life.num_bytes for life in (*liveness.lives, *liveness.hosted)}
    known: dict[int, tuple[Kernel, ...]] = {}
    alone, handing, products, again = list[float](), list[float](), Counter[str](), 0.0
    lanes, launched = [turn.lane for turn in plan.turns] or [0] * len(lines), Counter[int]()
    repeated = [code.repeated for code in engine.preparer.step(batch, key).cuts[0].stages] if purpose == "update" else []
    for number, (line, instruction) in enumerate(zip(lines, plan.instructions, strict=True)):
        target = numbers[line.place]
        handing.append(_handing(line))
        if line.program is None:
            alone.append(_moving(line, placement.places, sizes, target))
            continue
        if id(instruction.call) not in known:
            known[id(instruction.call)] = read_kernels(cast("Compiled", instruction.call).as_text() or "")
        kernels = known[id(instruction.call)]
        alone.append(program_roofline(kernels, target).seconds)
        launched[lanes[number]] += int(sum(kernel.runs for kernel in kernels))
        own = Counter[str]()
        for kernel in kernels:
            own.update({kind: len(line.place.devices) * kernel.runs * flops for kind, flops in kernel.products.items()})
        products.update(own)
        if repeated and line.action is not None and line.action.kind == Kind.F and line.fused is None:
            again += placement.num_replicas * repeated[line.stage]
    offload = engine.options.offload if purpose == "update" else ()
    visiting = engine.options.waiting and purpose == "update"
    still = [0.0 if visiting and _visits(line) else seconds for line, seconds in zip(lines, alone, strict=True)]
    costs = costs_of_plan(plan, schedule.num_stages, still, handing, usual=min)
    host = _host_work(handing, lanes, launched)
    devices = {device for place in placement.by_rank for device in place.devices}
    found, added = _parts_of(_Lines(plan, alone, still, handing, lanes), lowered, schedule.stage_to_rank, placement.by_rank)
    visits = None
    if visiting:
        costs = costs.visited(liveness.brought(schedule.num_stages), [1 / numbers[place].links.host for place in placement.places])
        visits = _visits_of(lines, alone, sizes, added)
    flows = lowered.bound.flow is not None
    return StepBound(schedule, targets, found, costs, offload, dict(products), again, len(devices), host, visits, flows)


def _host_work(handing: Sequence[float], lanes: Sequence[int], launched: Mapping[int, int]) -> HostWork:
    threads = [[k for k, own in enumerate(lanes) if own == lane] for lane in set(lanes)]
    seconds = max(sum(handing[k] for k in mine) for mine in threads)
    likely = max(_DRIVEN * len(mine) + _LAUNCH * launched[lanes[mine[0]]] for mine in threads)
    return HostWork(len(handing), sum(launched.values()), len(threads), seconds, likely)


class _Lines(NamedTuple):
    """The lines of a plan, and what they take at least."""

    plan: Plan
    alone: Sequence[float]
    still: Sequence[float]  # where copies of a state that visits take no time
    handing: Sequence[float]
    lanes: Sequence[int]  # which thread hands over each

    def in_flow(self, lowered: LoweredStep, num_steps: int) -> "_Lines":
        """The lines of so many steps in flow."""
        order = [number for _, number in cast("Flow", lowered.bound.flow).lines(num_steps)]
        alone, still, handing = ([own[k] for k in order] for own in (self.alone, self.still, self.handing))
        return _Lines(flowing_plan(self.plan, lowered, num_steps), alone, still, handing, [self.lanes[k] for k in order])

    def rising(self, stage_to_rank: Sequence[int], rank_to_device: Sequence[int]) -> list[float]:
        """How long the lines take, each time with one more thing that takes time: as in ``Parts``, last copies of the state."""
        about, device = [line.about for line in self.plan.instructions], [rank_to_device[rank] for rank in stage_to_rank]
        acting = [seconds * (each.action is not None) for each, seconds in zip(about, self.still, strict=True)]
        sends = [seconds * (each.copies is None) for each, seconds in zip(about, acting, strict=True)]
        programs = [seconds * bool(each.program) for each, seconds in zip(about, sends, strict=True)]
        at_once, handed, late = [0.0] * len(about), list[float](), list[float]()
        spent, before = defaultdict[int, float](float), dict[int, float]()  # by each thread in all, and before its first action
        for each, lane, seconds in zip(about, self.lanes, self.handing, strict=True):
            if each.action is not None:
                before.setdefault(lane, spent[lane])
            spent[lane] += seconds
            handed.append(spent[lane])
            late.append((spent[lane] - before.get(lane, 0.0)) * (each.action is not None))
        busy = [0.0] * len(rank_to_device)
        for each, seconds in zip(about, programs, strict=True):
            busy[stage_to_rank[each.stage]] += seconds
        found = [max(busy)]
        for taken, owner, told in (
            (programs, stage_to_rank, at_once),
            (programs, device, at_once),
            (sends, device, at_once),
            (acting, device, at_once),
            (acting, device, late),
            (self.still, device, handed),
            (self.alone, device, handed),
        ):
            found.append(max(found[-1], *(end for _, end in line_times(self.plan, taken, owner, told))))
        return found


def _parts_of(lines: _Lines, lowered: LoweredStep, stage_to_rank: Sequence[int], places: Sequence[Place]) -> tuple[Parts, float]:
    """What a step is made of, of many in flow what each adds; and what of it the copies of a state add."""
    owner = [places.index(place) for place in places]
    if lowered.bound.flow is None:
        rising = lines.rising(stage_to_rank, owner)
    else:
        few, many = (lines.in_flow(lowered, count).rising(stage_to_rank, owner) for count in (_MORE, 2 * _MORE))
        rising = [(b - a) / _MORE for a, b in zip(few, many, strict=True)]
    *found, added = (b - a for a, b in itertools.pairwise((0.0, *rising)))
    parts = Parts(*found)
    return parts._replace(copies=parts.copies + added), added


def _visits(line: BoundLine) -> bool:
    """Whether a line copies a part of the state to host memory or back; copies of an action are those of residuals."""
    return line.copies is not None and line.action is None


def _visits_of(lines: Sequence[BoundLine], alone: Sequence[float], sizes: Mapping[Name, int], added: float) -> VisitBound:
    link, moved = Counter[tuple[Place, MemoryCopy]](), Counter[MemoryCopy]()
    for line, seconds in zip(lines, alone, strict=True):
        if _visits(line):
            copies = cast("MemoryCopy", line.copies)
            link[line.place, copies] += seconds  # pyright: ignore[reportArgumentType]
            moved[copies] += sum(sizes[name] for name in line.outputs)
    return VisitBound(added, max(link.values(), default=0.0), moved[MemoryCopy.TO_DEVICE], moved[MemoryCopy.TO_HOST])


def _handing(line: BoundLine) -> float:
    if line.program is None:
        return _SEND * len(line.outputs)
    return _CALL + _RESULT * max(0, len(line.outputs) - 1)


def _moving(line: BoundLine, places: Sequence[Place], sizes: Mapping[Name, int], target: Target) -> float:
    """What a send, or a copy to host memory and back, takes at least; nothing for a batch, which may be there before the call."""
    if line.copies is not None:
        return copy_seconds(sum(sizes.get(name, 0) for name in line.outputs), target)
    if not line.is_send or line.inputs[0].stage == CALLER:
        return 0.0
    (source,), (name,) = line.inputs, line.outputs
    return send_seconds(sizes.get(name, 0), places[source.stage].devices[0], line.place.devices[0], target)
