"""The least time of a step on devices whose numbers are known (``jaxpp.targets``): what no run of these programs can beat.

Each compiled program takes at least the sum of its kernels' rooflines, each send at least its bytes over the link, and the host
hands over no instruction quicker than was measured for calls that do nothing else. A step is what these times give on the clock of
the plan's lines (``line_times``): with its update, the copies of its state, and the steps in flow beside it. Real kernels reach a
part of the peaks, so this is a bound and no prediction. The prediction beside it is the same clock with what kernels of their size
reach, and with the host that was measured; it has a range. The bound counts every array that a kernel reads or writes as memory
traffic; what stays in a cache may be read sooner.
"""

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple, cast

import jax

from jaxpp.efficiency import KERNEL, as_linked, moved_share
from jaxpp.engine.engine import Engine
from jaxpp.engine.made_to_measure import stage_costs
from jaxpp.engine.outcome import LoweredStep, Purpose
from jaxpp.lowering.builder import CALLER, Flow, Name
from jaxpp.lowering.plan import Plan
from jaxpp.observe.evaluate import Parts, costs_of_plan
from jaxpp.observe.memory.liveness import brought, memory_kind, step_liveness
from jaxpp.observe.profile.record import flowing_plan
from jaxpp.observe.profile.spans import line_times
from jaxpp.options import Options
from jaxpp.runtime import roofline
from jaxpp.runtime.bind import BoundLine
from jaxpp.runtime.hlo import read_kernels
from jaxpp.runtime.measure import copy_times
from jaxpp.runtime.place import Place, Placement
from jaxpp.schedule.action import Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.costs import StepCosts
from jaxpp.schedule.draw.canvas import Figure
from jaxpp.schedule.registry import make
from jaxpp.schedule.simulate import Simulation
from jaxpp.shardings import shared_stages
from jaxpp.stages.estimate import rates_of
from jaxpp.tables import three_digits
from jaxpp.targets import GPU, target_of
from jaxpp.types import Batch, Key

_CALL, _RESULT, _SEND = 7e-6, 1.2e-6, 6e-6
"""Seconds of the host: for a call of a compiled program, for each result but the first, and for a copy to another device, the
loop's share included. Measured on CPU devices with JAX 0.10.2, where nothing waits for a driver."""

_DRIVEN, _LAUNCH = 25e-6, 8.5e-6
"""Seconds of the host where a driver launches the kernels of a program: for a call, and for each kernel. Measured on an H200 in a
virtual machine, with JAX 0.11.2 and CUDA 13 (experiments/gpu); a kernel took 11.1 and 13.2 in two others. Other hosts may be
quicker, so the bound does not count them."""

_UPDATING = 2
"""Kernels of an update for each of its parameters. Set by the predictions of three compiled layouts of a GPT with Adam, where the
seconds of the update stood for 1.9 to 3.2 of them; they stood for up to 3.9 of an MLP's. No kernels were counted."""

_HIDDEN = 0.01
"""What part of a step copies may add that are said to hide."""

_UNEVEN = 0.8
"""The least work of a rank over the most, from which it is said that ranks wait for the one with most."""

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
        predicted: what a step likely takes, and the range in which a measurement is expected.
        likely: the same costs as they are predicted, with what kernels of their size were measured to reach of the peaks
            (``jaxpp.efficiency``), and the time of a host whose driver launches each kernel.
        likely_parts: what the prediction is made of, as ``parts``.
        reached: what matrix products likely reach of their peak, while they run.
        visits: of a state that waits in host memory (``Pipeline(host=...)``), what its copies take and add.
        flows: whether each step begins while the one before it ends (``Pipeline(delay=1)``); the seconds are then those of one step
            of many, which neither fills the pipeline nor drains it.
    """

    schedule: Schedule
    targets: tuple[GPU, ...]
    parts: Parts
    costs: StepCosts
    offload: tuple[int | None, ...]
    products: Mapping[str, float]
    again: float
    num_devices: int
    host: HostWork
    predicted: roofline.Prediction
    likely: StepCosts
    likely_parts: Parts
    reached: float
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
        devices = self.predicted.seconds - self.likely_parts.dispatch
        return "is likely to limit" if self.host.likely > devices else "may limit"

    @property
    def peak_fraction(self) -> float:
        """The most of the devices' peak that the model's own matrix products can reach, each type at its own peak (MFU)."""
        flops = sum(self.products.values())
        at_peak = sum(roofline.peaks_of(self.products, target) for target in self.targets) / len(self.targets) / self.num_devices
        return (1 - self.again / flops) * at_peak / self.seconds if flops else 0.0

    @cached_property
    def simulation(self) -> Simulation:
        """The actions and transfers on the virtual clock, as ``jaxpp.schedule.simulate`` gives it for these costs, in seconds."""
        return self._simulated(1.0)

    def _simulated(self, scale: float, schedule: Schedule | None = None) -> Simulation:
        costs = self.costs.scaled(scale, "actions", "transfer", "offload", "visit", "visit_state")
        costs = dataclasses.replace(costs, dispatch={}, before=0)
        return Simulation(schedule or self.schedule, costs, self.offload)

    @cached_property
    def hidden_by(self) -> Schedule | None:
        """``"eager-1f1b"`` for a step in the order of ``"1f1b"`` that more forwards ahead would shorten; None otherwise."""
        size = self.schedule.num_ranks, self.schedule.num_microbatches
        if self.flows or self.schedule.num_stages > self.schedule.num_ranks or self.schedule != make("1f1b", *size):
            return None
        eager = make("eager-1f1b", *size)
        gained = self.simulation.makespan - self._simulated(1.0, eager).makespan
        return eager if gained > _HIDDEN * max(self.seconds, self.host.likely) else None

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
        made = ", ".join(f"{word} {three_digits(scale * part)}" for word, part in shown)
        noun = "pass" if self.schedule.forward_only else "step"
        least = f"a {noun}{' of many in flow' * self.flows} takes at least {three_digits(scale * self.seconds)} {unit}"
        lines = [f"{least} on {on} (a bound, no prediction): {made}", self._predicted(noun)]
        if self.products:
            most = max(self.products, key=self.products.__getitem__)
            kinds = most if len(self.products) == 1 else f"each type, most of them {most}"
            lines.append(f"its matrix products reach at most {self.peak_fraction:.0%} of the devices' peak for {kinds}")
        busy = self.simulation.busy
        if min(busy) < _UNEVEN * max(busy):
            least, most = (three_digits(scale * each) for each in (min(busy), max(busy)))
            idle = f"devices are idle {self.bubble_fraction:.0%} of the time"
            lines.append(
                f"ranks compute {least} to {most} {unit} of a {noun}: others wait for rank {busy.index(max(busy))}, and {idle}"
            )
        host = self.host
        work = f"{host.num_instructions} instructions and {host.num_kernels:,} kernels"
        by = "the host hands" if host.num_threads == 1 else f"{host.num_threads} threads of the host, one for each rank, hand"
        soonest, likely = (three_digits(1e3 * each) for each in (host.seconds, host.likely))
        taken = f"{soonest} ms at least, and in about {likely} ms as measured with an H200"
        it = "it" if host.num_threads == 1 else "the host"
        lines.append(f"{by} over {work} of a {noun} in {taken}, so {it} {self._limit} the {noun}")
        if self.hidden_by is not None:
            now, eager = self.simulation, self._simulated(1.0, self.hidden_by)
            share = max(self.costs.transfer) / max(self.costs.actions[Kind.F])
            old, new = (f"{three_digits(scale * each.makespan)} {unit}" for each in (now, eager))
            held, holds = (max(each.peak_residuals) for each in (now, eager))
            more = f", and a rank holds the residuals of up to {holds} microbatches in place of {held}" * (holds > held)
            lines.append(
                f'nothing hides transfers in "1f1b", and here one takes up to {three_digits(share)} of a forward: with '
                f'schedule="{self.hidden_by.name}" the actions take {new} in place of {old}{more}'
            )
        if self.visits is not None:
            link, added = (three_digits(scale * each) for each in (self.visits.link, self.visits.added))
            hides = self.visits.added <= _HIDDEN * (self.seconds - self.visits.added)
            so = "hide under the work of the visits" if hides else f"add {added} {unit} that no work hides"
            lines.append(f"the copies of the state take {link} {unit} of a link to host memory, and {so}")
        return lines

    def _predicted(self, noun: str) -> str:
        unit, scale = ("s", 1.0) if self.predicted.seconds >= 1 else ("ms", 1e3)
        seconds, low, high = (three_digits(scale * each) for each in self.predicted)
        parts = zip(_PARTS, self.likely_parts, strict=True)
        made = ", ".join(f"{word} {three_digits(scale * part)}" for word, part in parts if part > 5e-3 * self.predicted.seconds)
        said = f"; products at {self.reached:.0%} of their peak while they run" * bool(self.products)
        return f"a {noun} likely takes {seconds} {unit} ({low} to {high}): {made}{said}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__


def bound_of(engine: Engine, batch: Batch, key: Key | None, purpose: Purpose = "update") -> StepBound | None:
    """The bound of a step, or of forwards, whose programs are compiled for that; None if the numbers of a device are not known."""
    placement, schedule = engine.placement, engine.options.schedule
    ranks = tuple(target_of(place.devices[0]) for place in placement.by_rank)
    targets = tuple(target for target in ranks if target is not None)
    if len(targets) < len(ranks) or not engine.alone:
        return None
    with jax.debug_nans(False), jax.debug_infs(False):  # with which programs would be others, that look at their results
        plan, lowered = engine.plan(purpose, batch, key)
    lines, numbers = lowered.bound.lines, dict(zip(placement.by_rank, targets, strict=True))
    liveness = step_liveness(engine, lowered)
    sizes = {life.name: life.num_bytes for life in (*liveness.lives, *liveness.hosted)}
    lanes = [turn.lane for turn in plan.turns] or [0] * len(lines)
    work = _counted(plan, lines, placement, numbers, sizes)
    forwards = [line.stage for line in lines if line.program and not line.fused and line.action and line.action.kind == Kind.F]
    repeated = [code.repeated * (purpose == "update") for code in lowered.step.cuts[0].stages]
    visiting = engine.options.waiting and purpose == "update"

    def told(alone: Sequence[float], handing: Sequence[float], calls: Sequence[float]) -> _Lines:
        visits = (line.copies is not None and line.action is None for line in lines)  # copies of an action are those of residuals
        still = [0.0 if visiting and visit else seconds for visit, seconds in zip(visits, alone, strict=True)]
        return _Lines(plan, alone, still, handing, calls, lanes)

    launched = [max(each, driven - _DRIVEN) for each, driven in zip(work.likely, work.driving, strict=True)]  # beside one another
    least, likely, soonest = (
        told(work.alone, work.handing, work.handing),
        told(launched, work.driving, [_DRIVEN] * len(lines)),
        told([roofline.SPREAD[0] * seconds for seconds in work.likely], work.handing, work.handing),
    )
    (parts, added), (expected, _), (quick, _) = (
        _parts_of(each, lowered, schedule.stage_to_rank, placement.by_rank) for each in (least, likely, soonest)
    )
    seconds = max(sum(parts), sum(expected))
    predicted = roofline.Prediction(seconds, max(sum(parts), min(seconds, sum(quick))), roofline.SPREAD[1] * seconds)
    costs = costs_of_plan(plan, schedule.num_stages, least.still, work.handing, usual=min)
    probable = costs_of_plan(plan, schedule.num_stages, likely.still, work.driving)
    visits = None
    if visiting:
        rates = [[1 / rate(numbers[place]).links.host for place in placement.places] for rate in (lambda gpu: gpu, as_linked)]
        brings = brought(engine, lowered)
        costs, probable = (each.visited(brings, own) for each, own in zip((costs, probable), rates, strict=True))
        links = [max(liveness.visiting[place.shown]) / gpu.links.host for place, gpu in numbers.items()]
        visits = VisitBound(added, max(links), *map(sum, zip(*liveness.visiting.values(), strict=True)))
    return StepBound(
        schedule,
        targets,
        parts,
        costs,
        engine.options.offload if purpose == "update" else (),
        dict(work.products),
        placement.num_replicas * sum(repeated[stage] for stage in forwards),
        len({device for place in placement.by_rank for device in place.devices}),
        _host_work(work.handing, work.driving, lanes, work.num_kernels),
        predicted,
        probable,
        expected,
        work.reached,
        visits,
        lowered.bound.flow is not None,
    )


def estimated_costs(engine: Engine, batch: Batch, key: Key | None, options: Options) -> StepCosts:
    """What a step likely costs on GPUs whose numbers are known, from its equations and the bytes of its lines; nothing is compiled.

    The update reads and writes the state and the gradients, and replicas share these as a ring does; or it takes what the host
    needs to launch its kernels, if that is longer. Shards exchange what their products and their softmaxes sum. What the host takes
    to launch the kernels of stages is known only from compiled programs and counts nothing. ``options``: those of the engine,
    perhaps on other GPUs.
    """
    placement = options.placement
    cut = engine.preparer.step(batch, key).cuts[0]
    costs = stage_costs(options, cut, engine.programs)
    shards = placement.num_shards
    if shards > 1:
        specs = [leaf.spec for leaf in engine.layout.leaves.all_params]
        stages = shared_stages(cut.loss, specs, cut.cuts, rates_of(options.devices[0]), shards)
        ring = 2 * (shards - 1) / shards / as_linked(cast("GPU", target_of(options.devices[0]))).links.peer
        again = [kept.recomputes for kept in options.remat or ()] or [False] * len(stages)
        longer = dict[Kind, tuple[float, ...]]()
        for kind, seconds in costs.actions.items():
            sums = [(kind != Kind.W) + (repeats and kind in (Kind.B, Kind.I)) for repeats in again]
            pairs = zip(seconds, stages, sums, strict=True)
            longer[kind] = tuple(own * each.part + times * ring * each.exchanged for own, each, times in pairs)
        costs = dataclasses.replace(costs, actions=longer)
    if not any(kept.recomputes for kept in options.remat or ()):
        costs = dataclasses.replace(costs, offload=tuple(copy_times(cut, placement.places)[0]))
    num_stages, replicas, count = options.schedule.num_stages, placement.num_replicas, options.schedule.num_microbatches
    held, leaves, placed = {kind: [0] * num_stages for kind in ("parameters", "optimizer")}, Counter[int](), engine.placed
    for name, aval in zip(placed.names_on_devices.flat(), placed.shapes.flat(), strict=True):
        own = held.get(memory_kind(name))
        if own is not None:
            own[name.stage] += engine.placement[name.stage].num_bytes(name.ref, aval)
            leaves[name.stage] += own is held["parameters"]
    after = list[float]()
    for stage, (params, state) in enumerate(zip(*held.values(), strict=True)):
        place = placement.places[stage]
        numbers = as_linked(cast("GPU", target_of(place.devices[0])))
        whole = params * (replicas if "parameters" in options.shard else 1)
        hosts = Counter(device.process_index for device in place.devices)
        ring = ((count if "gradients" in options.shard else 1) + 1) * whole  # to sum the gradients, and back
        inside, outside = (max(hosts.values()) - 1) / max(hosts.values()), (len(hosts) - 1) / len(hosts) / min(hosts.values())
        shared = max(ring * inside / numbers.links.peer, ring * outside / numbers.links.network) if replicas > 1 else 0.0
        updated = (2 * (params + state) + whole / (replicas if options.shard else 1)) / (numbers.bandwidth * moved_share("update"))
        after.append(max(updated + shared, _UPDATING * _LAUNCH * leaves[stage]))
    handed = dict.fromkeys(costs.actions, (_DRIVEN,) * num_stages)
    costs = dataclasses.replace(costs, dispatch=handed, offload_dispatch=(_DRIVEN,) * num_stages, after=tuple(after))
    if options.waiting:
        rates = [1 / as_linked(cast("GPU", target_of(place.devices[0]))).links.host for place in placement.places]
        costs = costs.visited(brought(engine, engine.lower("update", batch, key)), rates)
    return costs


class _Work(NamedTuple):
    """What the lines of a plan take, and what the kernels of their programs do."""

    alone: list[float]  # seconds of each line, at least
    likely: list[float]  # and as they are predicted
    handing: list[float]  # of the host, to hand it over, at least
    driving: list[float]  # and likely, where a driver launches its kernels, one after the other
    products: Counter[str]  # FLOPs of all of them
    num_kernels: int
    reached: float  # what its products likely reach of their peak


def _counted(
    plan: Plan, lines: Sequence[BoundLine], placement: Placement, numbers: Mapping[Place, GPU], sizes: Mapping[Name, int]
) -> _Work:
    read = cache(lambda call: read_kernels(call.as_text() or ""))
    pairs, places = zip(lines, plan.instructions, strict=True), placement.places
    each = [(line, numbers[line.place], () if line.program is None else read(instruction.call)) for line, instruction in pairs]
    alone, likely, handing, products = list[float](), list[float](), list[float](), Counter[str]()
    for line, target, kernels in each:
        least, most = (_moving(line, places, sizes, gpu) for gpu in (target, as_linked(target)))
        alone.append(least + roofline.program_roofline(kernels, target, line.place.devices).seconds)
        likely.append(most + KERNEL * bool(most) + roofline.likely_seconds(kernels, target, line.place.devices))
        several = max(0, len(line.outputs) - 1)
        handing.append(_SEND * len(line.outputs) if line.program is None else _CALL + _RESULT * several)
        for kernel in kernels:
            products.update({kind: len(line.place.devices) * kernel.runs * flops for kind, flops in kernel.products.items()})
    launched = [sum(kernel.runs for kernel in kernels) for _, _, kernels in each]
    multiply = [(kernel, target) for _, target, kernels in each for kernel in kernels if kernel.products]
    at_peak = sum(kernel.runs * roofline.peaks_of(kernel.products, target) for kernel, target in multiply)
    taken = sum(roofline.kernel_seconds(kernel, target) for kernel, target in multiply)
    driving = [_DRIVEN + _LAUNCH * count for count in launched]
    return _Work(alone, likely, handing, driving, products, sum(launched), at_peak / taken if taken else 0.0)


def _host_work(handing: Sequence[float], driving: Sequence[float], lanes: Sequence[int], num_kernels: int) -> HostWork:
    threads = [[k for k, own in enumerate(lanes) if own == lane] for lane in set(lanes)]
    seconds, likely = (max(sum(each[k] for k in mine) for mine in threads) for each in (handing, driving))
    return HostWork(len(handing), num_kernels, len(threads), seconds, likely)


class _Lines(NamedTuple):
    """The lines of a plan, and what they take at least."""

    plan: Plan
    alone: Sequence[float]
    still: Sequence[float]  # where copies of a state that visits take no time
    handing: Sequence[float]
    calls: Sequence[float]  # of this, what passes before the line can begin
    lanes: Sequence[int]  # which thread hands over each

    def in_flow(self, lowered: LoweredStep, num_steps: int) -> "_Lines":
        """The lines of so many steps in flow."""
        order = [number for _, number in cast("Flow", lowered.bound.flow).lines(num_steps)]
        alone, still, handing, calls = ([own[k] for k in order] for own in (self.alone, self.still, self.handing, self.calls))
        return _Lines(flowing_plan(self.plan, lowered, num_steps), alone, still, handing, calls, [self.lanes[k] for k in order])

    def rising(self, stage_to_rank: Sequence[int], rank_to_device: Sequence[int]) -> list[float]:
        """How long the lines take, each time with one more thing that takes time: as in ``Parts``, last copies of the state."""
        about, device = [line.about for line in self.plan.instructions], [rank_to_device[rank] for rank in stage_to_rank]
        acting = [seconds * (each.action is not None) for each, seconds in zip(about, self.still, strict=True)]
        sends = [seconds * (each.copies is None) for each, seconds in zip(about, acting, strict=True)]
        programs = [seconds * bool(each.program) for each, seconds in zip(about, sends, strict=True)]
        at_once, handed, late = [0.0] * len(about), list[float](), list[float]()
        spent, before = defaultdict[int, float](float), dict[int, float]()  # by each thread in all, and before its first action
        for each, lane, seconds, call in zip(about, self.lanes, self.handing, self.calls, strict=True):
            if each.action is not None:
                before.setdefault(lane, spent[lane])
            handed.append(spent[lane] + call)
            late.append((handed[-1] - before.get(lane, 0.0)) * (each.action is not None))
            spent[lane] += seconds
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


def _moving(line: BoundLine, places: Sequence[Place], sizes: Mapping[Name, int], target: GPU) -> float:
    """What a send, or a copy to host memory and back, takes at least; nothing for a batch, which may be there before the call."""
    if line.copies is not None:
        return roofline.copy_seconds(sum(sizes.get(name, 0) for name in line.outputs), target)
    if not line.is_send or line.inputs[0].stage == CALLER:
        return 0.0
    (source,), (name,) = line.inputs, line.outputs
    return roofline.send_seconds(sizes.get(name, 0), places[source.stage].devices[0], line.place.devices[0], target)
