"""Running steps, or forwards, under JAX's profiler, and making a ``Profile`` of what the trace says.

Some steps run as they are; the trace says when each program ran, and the host's stamps when each instruction was handed over. In
more steps the host waits for each instruction, so every program takes the time that it would take on a device of its own. Such
steps run without the tracer too, from the call of each program until its results are ready: the tracer notes every operation, and
slows a program with a loop inside several times, while that call takes longer than a tiny program. The less of the two counts.
Where the trace of a backend lacks something, the results are polled instead (``Watch``), which cannot see when a program began.
Several processes (``AllProcesses``) tell each other what they saw, on the clock of process 0, and all make the same steps of it. A
send between processes is handed over by both sides: it begins no earlier than either, and is done when the receiver has it.
"""

import contextlib
import itertools
import math
import os
import statistics
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax

from jaxpp.engine.engine import Engine
from jaxpp.engine.outcome import LoweredStep
from jaxpp.engine.tail import Tail
from jaxpp.errors import ArgumentError, shown
from jaxpp.lowering.builder import CALLER, Flow, Name
from jaxpp.lowering.plan import About, Instruction, Plan
from jaxpp.lowering.step import Leaves
from jaxpp.observe.memory.ledger import Ledger, Sample, homes_of, sample_step
from jaxpp.observe.memory.liveness import Gathered, Life, Liveness, liveness_in_flow, step_liveness
from jaxpp.observe.profile.profile import Clock, Profile, RingPass
from jaxpp.observe.profile.spans import (
    Span,
    Stamp,
    beginning,
    durations_of,
    isolated_spans,
    traced_spans,
    typical,
    watched_spans,
)
from jaxpp.observe.profile.trace import STEP, DamagedTraceError, Run, TraceError, matched, read_runs
from jaxpp.runtime.bind import Bound, BoundLine
from jaxpp.runtime.execute import Observer
from jaxpp.runtime.interrupts import held
from jaxpp.runtime.place import Place, devices_of
from jaxpp.runtime.processes.channel import Alignment, align_clocks, told_by_all
from jaxpp.runtime.processes.here import processes_of
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.flow import flow
from jaxpp.schedule.validate import check_counts
from jaxpp.types import Array, Batch, Device, Key, Leaf, Tree

_WARM_UP = 3  # steps that do not count: the first find the caches of other programs
_ALONE = 3  # steps in which each program runs alone, with the tracer and without it
_SHORTEST_PAUSE, _LOOKS = 5e-5, 300  # seconds; about how often to look in a step: looking takes time from small machines


class SeenStep(NamedTuple):
    """One step as it was seen, in seconds on a clock of the host."""

    begun: float  # when the host began
    ended: float  # when all results were there
    stamps: tuple[Stamp, ...] = ()  # of each line; empty if nobody looked

    @property
    def seconds(self) -> list[float]:
        """How long each line took, if each waited for the one before."""
        return [stamp.seconds for stamp in self.stamps]

    def timed(self, plan: Plan) -> "SeenStep":
        """With the seconds of each line: of a program by the trace, or from its call until its results were there."""
        seen = zip(plan.instructions, self.stamps, strict=True)
        return self._replace(stamps=tuple(stamp._replace(seconds=_seconds(line, stamp)) for line, stamp in seen))


def _seconds(line: Instruction, stamp: Stamp) -> float:
    if stamp.run is not None:
        return stamp.run.end - stamp.run.start
    return stamp.done - stamp.begun if line.about.program else _sent(stamp)


def _sent(stamp: Stamp) -> float:
    """Of a send or a copy: from when the host (of two, the last) went on to when the result was there."""
    return max(0.0, stamp.done - max(stamp.handed, stamp.asked))


class Seen(NamedTuple):
    """Steps as they were seen, in the order in which they ran."""

    steps: tuple[SeenStep, ...]
    missing: str  # what the trace lacks; or empty
    error: float  # seconds by which times may be wrong beside each other: of the trace and the host, or of different processes


class AllProcesses:
    """The processes of a pipeline, which put together what they saw on process 0's clock; all make the same calls."""

    def __init__(self, engine: Engine, batch: Batch, key: Key | None, clock: Alignment):
        own, whole = engine.plan("update", batch, key)[1].bound, engine.lower("update", batch, key)
        # Where the lines of this process are among all; a process that has no devices of the pipeline has those that cross.
        self._numbers = range(len(own.lines)) if own.numbers is None else own.numbers
        self._bound, self._placement, self._clock = whole.bound, engine.placement, clock
        read = [name for line in self._bound.lines for name in (*line.inputs, *line.outputs)]
        self._names = list(dict.fromkeys([*whole.bound.inputs, *self._bound.constants, *read]))
        self.plan = _plan_of(self._bound)
        told = told_by_all(list(self._numbers))
        self._places = [{number: k for k, number in enumerate(numbers)} for numbers in told]

    def seen(self, mine: Seen) -> Seen:
        """What all processes saw, of all lines."""
        shift = self._clock.offset

        def told_of(stamp: Stamp) -> list[Any]:
            return [*(time + shift for time in stamp[:3]), stamp.run and [time + shift for time in stamp.run], stamp.seconds]

        steps = [{"at": [step.begun + shift, step.ended + shift], "stamps": list(map(told_of, step.stamps))} for step in mine.steps]
        error = mine.error + self._clock.error
        told = told_by_all({"steps": steps, "missing": mine.missing, "error": error})
        missing = [f"process {k}: {each['missing']}" for k, each in enumerate(told) if each["missing"]]
        found = [self._step([each["steps"][k] for each in told]) for k in range(len(mine.steps))]
        return Seen(tuple(found), missing[0] if missing else "", sum(sorted(each["error"] for each in told)[-2:]))

    def _step(self, told: Sequence[Mapping[str, Any]]) -> SeenStep:
        begun, ended = min(each["at"][0] for each in told), max(each["at"][1] for each in told)
        stamps = list[Stamp]()
        for number, line in enumerate(self._bound.lines if told[0]["stamps"] else ()):
            givers, owners = self._of(number, line)
            seen = {k: told[k]["stamps"][self._places[k][number]] for k in {*givers, *owners}}
            first = min(givers or owners, key=lambda k, seen=seen: seen[k][:3])
            asked, done, took = (max(seen[k][at] for k in owners) for at in (1, 2, 4))
            begins, handed, *_ = seen[first]
            runs = [seen[k][3] for k in owners if seen[k][3]]
            run = Run(min(run[0] for run in runs), max(run[1] for run in runs)) if runs else None
            stamp = Stamp(begins, handed, max(done, handed), asked if givers else -math.inf, first, run, took)
            stamps.append(stamp._replace(seconds=_sent(stamp)) if givers else stamp)
        return SeenStep(begun, ended, tuple(stamps))

    def _of(self, number: int, line: BoundLine) -> tuple[list[int], list[int]]:
        """The processes that give what a line sends between processes, and those that run it or receive it."""

        def having(place: Place) -> list[int]:
            return [process for process in processes_of(place.devices) if number in self._places[process]]

        owners = having(line.place) or [k for k, numbers in enumerate(self._places) if number in numbers]
        if not line.is_send or line.inputs[0].stage == CALLER:
            return [], owners
        givers = having(self._placement[line.inputs[0].stage])
        return ([], owners) if set(givers) == set(owners) else (givers, owners)  # if they are the same, each sends to itself

    def ledger(self, mine: Ledger) -> Ledger:
        """What all processes found on their devices; a rank that spans processes is told of by the first of them."""
        devices = tuple(dict.fromkeys(self._placement.ranks_shown))
        places, known = ({each: k for k, each in enumerate(group)} for group in (devices, self._names))
        end, me = len(self._bound.lines) + 1, jax.process_index()
        moments = [0, *(number + 1 for number in self._numbers), end, end + 1]
        told = {device for device in mine.liveness.devices if processes_of(devices_of(device))[0] == me}
        said = {
            "lives": [  # a value stays until what comes next in its own process
                [known[name], places[device], num_bytes, kind, moments[begins], moments[ends + 1] - 1, donated]
                for name, device, num_bytes, kind, begins, ends, donated in (*mine.liveness.lives, *mine.liveness.hosted)
                if device in told
            ],
            "temporaries": mine.liveness.temporaries,
            "samples": [
                [each.when, moments[each.moment], places[each.device], *each[3:]] for each in mine.samples if each.device in told
            ],
            "stats": [[places[device], dict(found)] for device, found in mine.stats.items() if device in told],
        }
        lives, hosted, samples = list[Life](), list[Life](), list[Sample]()
        stats, extra = dict[Device, Mapping[str, int]](), [0] * len(self._bound.lines)
        for process, each in enumerate(told_by_all(said)):
            for number, device, *rest in each["lives"]:
                name = self._names[number]
                (hosted if name.ref.waits else lives).append(Life(name, devices[device], *rest))
            for when, moment, device, kinds, *rest in each["samples"]:
                samples.append(Sample(when, moment, devices[device], tuple(kinds), *rest))
            stats |= {devices[device]: found for device, found in each["stats"]}
            for number, k in self._places[process].items():
                extra[number] = max(extra[number], each["temporaries"][k])
        liveness = Liveness(devices, self._bound.lines, tuple(lives), tuple(extra), hosted=tuple(hosted))
        return Ledger(liveness, tuple(samples), stats)


def _plan_of(bound: Bound) -> Plan:
    """The lines of all processes as a plan, of which nothing can be run."""
    lines = list[_Named]()
    for line in bound.lines:
        call, name = (_elsewhere, "") if line.program is None else (line.program.function, line.program.name)
        about = About(line.device, line.stage, line.action, line.is_send, name, -1, line.copies, line.fused)
        lines.append((Instruction(line.label, call, (), (), (), about), line.inputs, line.outputs))
    return _plan_of_names(lines)


def _elsewhere(*_: Array) -> Sequence[Array]:
    raise AssertionError("a plan that is only looked at is not run")


class Stamps:
    """Observes when the host hands each instruction of a step over; waits for each result if instructions are to run alone."""

    def __init__(self, *, waits: bool):
        self.waits = waits
        self.stamps: list[Stamp] = []
        self._went_on = 0.0

    def begin(self) -> None:
        """The step begins."""
        self._went_on = time.perf_counter()

    def __call__(self, instruction: Instruction, slots: Sequence[Leaf]) -> None:
        """Called by the executor after each instruction."""
        handed = time.perf_counter()
        if self.waits:
            jax.block_until_ready([slots[slot] for slot in instruction.outputs])
        done = time.perf_counter()
        self.stamps.append(Stamp(self._went_on, handed, done))
        self._went_on = time.perf_counter()


class Watch:
    """Polls the results of one step without stopping it, for backends whose trace lacks something; ``stamps`` returns all times.

    A timer that blocks on every action destroys the overlap that it measures, and threads that wait take Python's lock from the one
    that dispatches. So this observer keeps one result of each instruction in a queue of its device and kind (programs, arrivals,
    copies), and looks after each instruction, and at the end until all are there, whether the heads of the queues are. A stamp is
    late by one instruction's dispatch at most, or by the pause between looks. A program without a small result that stays alive
    returns one byte more (``compile_plan(watched=True)``), so that nothing large is held on to.
    """

    def __init__(self, plan: Plan):
        abouts = [line.about for line in plan.instructions]
        self._lanes = {(about.device, about.sends, about.copies): deque[tuple[int, Leaf]]() for about in abouts}
        self._times: list[tuple[float, float]] = []
        self._done: dict[int, float] = {}
        self._went_on = time.perf_counter()

    def __call__(self, instruction: Instruction, slots: Sequence[Leaf]) -> None:
        """Called by the executor after each instruction."""
        handed = time.perf_counter()
        about = instruction.about
        if about.watch < 0:  # a send to another process, say, of which nothing is here
            self._done[len(self._times)] = handed
        else:
            self._lanes[about.device, about.sends, about.copies].append((len(self._times), slots[about.watch]))
        self._times.append((self._went_on, handed))
        self._look()
        self._went_on = time.perf_counter()

    def _look(self) -> bool:
        """Note which results are there; returns whether any are still to come."""
        left = False
        for queue in self._lanes.values():
            while queue and queue[0][1].is_ready():
                self._done[queue.popleft()[0]] = time.perf_counter()
            left = left or bool(queue)
        return left

    def stamps(self) -> list[Stamp]:
        """The stamp of each instruction, in the order of the plan; waits for the last result."""
        begun = self._times[0][0]
        while self._look():
            time.sleep(max(_SHORTEST_PAUSE, (time.perf_counter() - begun) / _LOOKS))
        return [Stamp(begun, handed, max(handed, self._done[k])) for k, (begun, handed) in enumerate(self._times)]


class Work:
    """What is run under the profiler."""

    engine: Engine
    plan: Plan  # of everything that a run hands over
    schedule: Schedule  # the order of its actions
    passes: Sequence[RingPass] = ()  # of a generation
    lanes: Sequence[int] = ()  # of each line, which thread hands it over if nobody looks; empty if one hands over all

    def run(self, observer: Observer | None = None, *, watched: bool = False) -> Tree:
        """Hand everything over once; returns what to wait for."""
        raise NotImplementedError

    def watched_plan(self) -> Plan | None:
        """The plan that is run if the run is ``watched``; None if it cannot be."""
        raise NotImplementedError

    def ledger(self) -> Ledger:
        """What memory holds meanwhile."""
        raise NotImplementedError


class Steps(Work):
    """One training step after the other, on a state of its own."""

    def __init__(self, engine: Engine, leaves: Leaves[Array], batch: Batch, key: Key | None):
        self.engine = engine = engine.at(batch)
        self.batch, self.key = batch, key
        self.leaves, self.schedule = engine.copy(leaves), engine.options.schedule
        self.plan, _ = engine.plan("update", batch, key)
        self.lanes = [turn.lane for turn in self.plan.turns]

    def run(self, observer: Observer | None = None, *, watched: bool = False) -> Tree:
        """Hand a step over; the norm of the gradients is waited for too, or its program would run in the next step."""
        outcome = self.engine.run("update", self.leaves, self.batch, self.key, observer=observer, watched=watched)
        self.leaves = outcome.state
        return outcome

    def watched_plan(self) -> Plan:
        """Of a step of which every instruction can be asked whether it is done."""
        return self.engine.plan("update", self.batch, self.key, watched=True)[0]

    def ledger(self) -> Ledger:
        """Of one more step."""
        return sample_step(self.engine, self.leaves, self.batch, self.key)[0]


class Flowing(Steps):
    """Several training steps, each of which begins while the one before it ends (``delay``)."""

    def __init__(self, engine: Engine, leaves: Leaves[Array], batch: Batch, key: Key | None, num_steps: int):
        super().__init__(engine, leaves, batch, key)
        self._num_steps = num_steps
        one, lowered = engine.plan("update", batch, key)
        order = cast("Flow", lowered.bound.flow).lines(num_steps)
        self.plan, self.lanes = self.watched_plan(watched=False), [one.turns[k].lane for _, k in order if one.turns]
        self.schedule = flow(self.schedule, num_steps)

    def run(self, observer: Observer | None = None, *, watched: bool = False) -> Tree:
        """Hand all steps over; what they report is waited for too."""
        given: Leaves[Array] | Tail = self.leaves
        told = list[Tree]()
        for _ in range(self._num_steps):
            options = {"observer": observer, "watched": watched}
            given = cast("Tail", self.engine.step(given, self.batch, self.key, **options))
            given.then.append(lambda outcome: told.append(outcome._replace(state=Leaves())))
        self.leaves = cast("Tail", given).outcome(observer).state
        return told, self.leaves

    def watched_plan(self, *, watched: bool = True) -> Plan:
        """The lines of all steps in the order in which they are handed over."""
        plan, lowered = self.engine.plan("update", self.batch, self.key, watched=watched)
        return flowing_plan(plan, lowered, self._num_steps)

    def ledger(self) -> Ledger:
        """Of the rest of a step beside the next, from shapes."""
        _, lowered = self.engine.plan("update", self.batch, self.key)
        one = step_liveness(self.engine, lowered, homes_of(lowered, self.batch, self.key), compiled=True)
        return Ledger(liveness_in_flow(one, lowered), (), {})


class Forwards(Work):
    """The forwards of a batch, or of several like it that follow one another as in a stream, with keys folded from the first."""

    def __init__(self, engine: Engine, leaves: Leaves[Array], batch: Batch, key: Key | None, num_batches: int):
        self.engine, self.batch, self.leaves = engine, batch, leaves.variables
        self.keys: list[Key | None] = [key] * num_batches
        if num_batches > 1 and key is not None:
            self.keys = [jax.random.fold_in(key, k) for k in range(num_batches)]
        one, _ = engine.plan("forward", batch, self.keys[0])
        self.plan, self.lanes = self._joined(one), [turn.lane for turn in one.turns] * num_batches
        name = "forward" if num_batches == 1 else f"stream of {num_batches} batches"
        self.schedule = schedule_of(self.plan, engine.options.schedule.stage_to_rank, name)

    def run(self, observer: Observer | None = None, *, watched: bool = False) -> Tree:
        """Hand all batches over."""
        options = {"observer": observer, "watched": watched}
        return [self.engine.run("forward", self.leaves, self.batch, key, **options) for key in self.keys]

    def watched_plan(self) -> Plan:
        """Of all batches, if every instruction can be asked whether it is done."""
        return self._joined(self.engine.plan("forward", self.batch, self.keys[0], watched=True)[0])

    def ledger(self) -> Ledger:
        """Of one batch, looked at; of several, from shapes."""
        engine, batch, key = self.engine, self.batch, self.keys[0]
        if len(self.keys) == 1:
            return sample_step(engine, self.leaves, batch, key, "forward")[0]
        _, lowered = engine.plan("forward", batch, key)
        one = step_liveness(engine, lowered, homes_of(lowered, batch, key), compiled=True)
        return Ledger(join_liveness([one] * len(self.keys)), (), {})

    def _joined(self, plan: Plan) -> Plan:
        _, lowered = self.engine.plan("forward", self.batch, self.keys[0])
        return join_plans([(plan, lowered.bound, len(lowered.step.sizes))] * len(self.keys))


def run_once(work: Work, observer: Stamps | Watch | None = None, *, watched: bool = False) -> tuple[SeenStep, Run]:
    """Run the work to its end; returns the run, with the observer's stamps, and between when and when its annotation begins."""
    begun = time.perf_counter()
    with jax.profiler.TraceAnnotation(STEP):
        entered = time.perf_counter()
        if isinstance(observer, Stamps):
            observer.begin()
        results = work.run(observer, watched=watched)
        stamps = observer.stamps() if isinstance(observer, Watch) else () if observer is None else observer.stamps
        jax.block_until_ready(results)  # not before a Watch has looked when each arrives
    return SeenStep(begun, time.perf_counter(), tuple(stamps)), Run(begun, entered)


def check_profile(clock: str | None, where: str = "pipe.profile", **counts: int) -> None:
    """Refuse a count below 1, or an unknown clock."""
    check_counts(where, counts, ArgumentError)
    if clock not in (None, "trace", "isolated"):
        rule = 'the times are those of the trace ("trace"), or of each program alone ("isolated")'
        raise ArgumentError(where, rule, f"clock={clock!r}", 'pass clock="trace", or leave it out')


def record(work: Work, num_steps: int, clock: Clock | None) -> Profile:
    """Run the work under the profiler, then look at memory; the profile is of the most typical of the traced runs.

    Unless ``clock`` is given, it is isolated where devices share what they compute with. Several processes return the same profile.
    """
    engine, plan, schedule = work.engine, work.plan, work.schedule
    for _ in range(_WARM_UP):
        run_once(work)
    processes, all_processes = processes_of(engine.options.devices), None
    if len(processes) > 1:
        if not isinstance(work, Steps):
            rule, fix = "forwards are profiled in one process", "make a pipeline over the devices of one process"
            raise ArgumentError("profile", rule, "devices of several processes", fix)
        all_processes = AllProcesses(engine, work.batch, work.key, align_clocks())
    seen = _seen(work, num_steps)
    if all_processes is not None:
        plan, seen = all_processes.plan, all_processes.seen(seen)
    steps = iter(seen.steps)
    plain, quiet, together, traced = (list(itertools.islice(steps, count)) for count in (num_steps, _ALONE, num_steps, _ALONE))
    alone = durations_of(plan, *([step.seconds for step in apart] for apart in (quiet, traced)))
    if seen.missing:
        together, found = _watched(work, num_steps, all_processes, plan, seen.missing)
    else:
        found = [traced_spans(plan, step.stamps, alone, schedule) for step in together]
    lengths = [step.ended - step.begun for step in together]
    cost = statistics.median(lengths) / statistics.median(step.ended - step.begun for step in plain)
    ledger = work.ledger()
    ledger = ledger if all_processes is None else all_processes.ledger(ledger)
    chosen = typical(found)
    spans = found[chosen], isolated_spans(plan, alone, schedule)
    lanes = defaultdict[int, float](float)
    for lane, stamp in zip(work.lanes, together[chosen].stamps if work.lanes else (), strict=True):
        lanes[lane] += stamp.handed - stamp.begun
    places, shown = engine.placement.by_rank, engine.placement.ranks_shown
    shared = len(set(places)) < len(places) or places[0].devices[0].platform == "cpu"
    clock = clock or ("isolated" if shared else "trace")
    error = 0.0 if all_processes is None else seen.error
    made = {"missing": seen.missing, "num_processes": len(processes), "clock_error": error, "passes": tuple(work.passes)}
    made |= {"offloaded": engine.options.offloaded, "lanes": tuple(lanes[k] for k in sorted(lanes))}
    return Profile(schedule, shown, *spans, clock, tuple(lengths), cost, ledger, **made)


def _seen(work: Work, num_steps: int) -> Seen:
    """Steps as they are, with each program alone, and both again under the profiler, which runs between some and the others."""
    plain, alone = list[SeenStep](), list[SeenStep]()

    def run_untraced(num_plain: int, num_alone: int) -> None:
        plain.extend(run_once(work)[0] for _ in range(num_plain))
        alone.extend(run_once(work, Stamps(waits=True))[0].timed(work.plan) for _ in range(num_alone))

    run_untraced(num_steps - num_steps // 2, _ALONE - _ALONE // 2)
    observers = [Stamps(waits=k >= num_steps) for k in range(num_steps + _ALONE)]
    with tempfile.TemporaryDirectory() as folder:
        with _session(folder):
            found = [run_once(work, stamps) for stamps in observers]
        run_untraced(num_steps // 2, _ALONE // 2)
        try:
            read = read_runs(Path(folder))
            runs = matched(work.plan, read, len(found))
        except (TraceError, FileNotFoundError) as error:
            return Seen((*plain, *alone, *(step.timed(work.plan) for step, _ in found)), str(error), 0.0)
    clocks = [  # the error and the seconds from the clock of the trace to that of the host, which knows between when a step began
        ((window.end - window.start) / 2, (window.start + window.end) / 2 - begun)
        for (_, window), begun in zip(found, read.steps, strict=True)
    ]
    error, offset = min(clocks)
    traced = list[SeenStep]()
    for (step, _), begun, each in zip(found, read.steps, runs, strict=True):
        on_host = [run and Run(*(time + begun + offset for time in run)) for run in each]
        stamps = tuple(stamp._replace(run=run) for stamp, run in zip(step.stamps, on_host, strict=True))
        traced.append(step._replace(stamps=stamps).timed(work.plan))
    return Seen((*plain, *alone, *traced), "", error)


@contextlib.contextmanager
def _session(folder: str) -> Iterator[None]:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    takes, interrupt = False, None
    try:
        with held():  # Ctrl-C comes before there is a trace, or when there is one that is known
            try:
                jax.profiler.start_trace(folder, profiler_options=options)
            except RuntimeError as error:
                rule, fix = "it takes a trace with JAX's profiler, which takes one at a time", "jax.profiler.stop_trace()"
                raise ArgumentError("pipe.profile", rule, str(error), f"end the other trace first: {fix}") from None
            takes = True
        yield
    finally:
        while takes:
            try:
                with held():
                    takes = False
                    jax.profiler.stop_trace()
            except KeyboardInterrupt as error:  # before signals were held, or held until now
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _watched(
    work: Work, num_steps: int, all_processes: AllProcesses | None, plan: Plan, missing: str
) -> tuple[list[SeenStep], list[tuple[Span, ...]]]:
    watched = work.watched_plan()
    if watched is None:
        rule, fix = "the profile of a generation is read from the trace of JAX's profiler", "profile pipe.apply in its place"
        raise ArgumentError("generation.profile", rule, f"a trace that lacks what is needed: {missing}", fix)
    found = [run_once(work, Watch(watched), watched=True)[0] for _ in range(_WARM_UP + num_steps)][_WARM_UP:]
    seen = Seen(tuple(found), "", 0.0)
    seen = seen if all_processes is None else all_processes.seen(seen)
    found = [step._replace(begun=beginning(step.stamps), ended=max(stamp.done for stamp in step.stamps)) for step in seen.steps]
    return found, [watched_spans(plan, step.stamps, work.schedule) for step in found]


_Named = tuple[Instruction, Iterable[Hashable], Iterable[Hashable]]  # and what the values are called that it reads and writes


def _plan_of_names(lines: Iterable[_Named]) -> Plan:
    """Instructions as a plan to look at, not to run: each name is a slot of its own."""
    slots = defaultdict[Hashable, int](itertools.count().__next__)
    made = tuple(
        line._replace(inputs=tuple(slots[name] for name in reads), outputs=tuple(slots[name] for name in writes), free=())
        for line, reads, writes in lines
    )
    return Plan(made, len(slots), (), (), (), len(made))


def _later(line: Instruction, first: int) -> Instruction:
    """The instruction with its microbatches counted from ``first``."""
    label, about = line.label, line.about
    if about.action is None:
        return line
    action, fused = cast("Action", about.action), about.fused
    if fused is not None:
        behind = fused.action._replace(microbatch=first + fused.action.microbatch)
        label, fused = label.replace(str(fused.action), str(behind)), fused._replace(action=behind)
    later = action._replace(microbatch=first + action.microbatch)
    return line._replace(label=label.replace(str(action), str(later)), about=about._replace(action=later, fused=fused))


def join_plans(parts: Sequence[tuple[Plan, Bound, int]], awaits: Mapping[int, int] = MappingProxyType({})) -> Plan:
    """Plans one after another as one to look at, not to run; each with its names, and the number of its microbatches.

    Of plans that are passes of sequences side by side, and take tokens last: pass k takes the first result of pass ``awaits[k]``.
    """
    lines, made, first = list[_Named](), dict[int, Hashable](), 0
    given = dict[Hashable, Hashable]()  # for each token that a pass takes, the result that it is
    for plan, bound, count in parts:
        tokens = {bound.inputs[k - count]: awaits[first + k] for k in range(count) if first + k in awaits}
        given |= {(first, name): made[maker] for name, maker in tokens.items()}
        for line, own in zip(plan.instructions, bound.lines, strict=True):
            known, token = _later(line, first), next((tokens[name] for name in own.inputs if name in tokens), None)
            if own.is_send and own.action is None and token is not None:
                action = Action(len(bound.placement.places) - 1, Kind.F, token)
                known = known._replace(label=f"token of {action}", about=known.about._replace(action=action))
            reads, writes = ([given.get((first, name), (first, name)) for name in names] for names in (own.inputs, own.outputs))
            lines.append((known, reads, writes))
        for k in range(count if bound.outputs else 0):
            name = first, bound.outputs[k * len(bound.outputs) // count]
            made[first + k] = given.get(name, name)
        first += count
    return _plan_of_names(lines)


def flowing_plan(plan: Plan, lowered: LoweredStep, num_steps: int) -> Plan:
    """Steps in flow as one plan to look at, not to run: each takes the state of the one before it."""
    bound, count, made = lowered.bound, len(lowered.step.sizes), lowered.tree.unflatten(lowered.bound.outputs).state
    state = made.with_own([None] * len(made.own), made).flat()  # a set of the next step is another
    before = {name: source for name, source in zip(bound.inputs, state) if source is not None}  # noqa: B905  (the batch comes behind)

    def called(name: Name, step: int) -> Hashable:
        while step and name in before:
            step, name = step - 1, before[name]
        return step, name

    order = cast("Flow", bound.flow).lines(num_steps)
    named = ((step, plan.instructions[number], bound.lines[number]) for step, number in order)
    return _plan_of_names(
        (_later(line, step * count), [called(name, step) for name in own.inputs], [called(name, step) for name in own.outputs])
        for step, line, own in named
    )


def schedule_of(plan: Plan, stage_to_rank: Sequence[int], name: str) -> Schedule:
    """The order in which the actions of forwards are handed over, as a schedule."""
    rows: list[list[Action]] = [[] for _ in range(max(stage_to_rank) + 1)]
    for line in plan.instructions:
        if line.about.action is not None and not line.about.sends:
            rows[stage_to_rank[line.about.stage]].append(cast("Action", line.about.action))
    return Schedule(name, tuple(map(tuple, rows)), tuple(stage_to_rank))


def join_liveness(parts: Sequence[Liveness]) -> Liveness:
    """What is alive while plans run one after another; arguments are there all the time, and results stay until the end."""
    end, first = sum(len(part.lines) for part in parts) + 1, 0
    stay: dict[Name, Life] = {}
    lives: list[Life] = []
    gathered: dict[int, Gathered] = {}
    for part in parts:
        last = len(part.lines) + 1
        gathered |= {first + number: whole for number, whole in part.gathered.items()}
        for life in part.lives:
            if life.begins == 0 and life.ends == last:
                stay[life.name] = life._replace(ends=end)
            else:
                begins = max(life.begins, 1) + first if life.begins or first else 0
                lives.append(life._replace(begins=begins, ends=end if life.ends == last else first + life.ends))
        first += len(part.lines)
    lines = tuple(line for part in parts for line in part.lines)
    extra = tuple(each for part in parts for each in part.temporaries)
    passes = tuple(len(part.lines) for part in parts)
    return Liveness(parts[0].devices, lines, (*stay.values(), *lives), extra, gathered=gathered, passes=passes)


def from_trace(folder: str | os.PathLike[str], pipe: Any, batch: Batch, key: Key | None = None) -> Profile:
    """The profile of steps that were traced with ``jax.profiler.trace``, here or on another machine: of the most typical of them.

    Unlike ``pipe.profile`` it runs nothing. So it does not know what the host did or what memory held, and takes a program's median
    time in the trace for the time that the program takes alone, though the profiler slows programs with loops inside.

    Args:
        folder: what was given to ``jax.profiler.trace``; its newest trace is read.
        pipe: a pipeline like the one whose steps were traced, after ``init`` or ``forecast``.
        batch: of the traced steps, or its shapes.
        key: of the traced steps, or its shape.

    Raises:
        ArgumentError: there is no trace, its file is damaged, or it does not hold whole steps of such a pipeline and nothing else
            of it.

    Example:
        In ``with jax.profiler.trace("out"):`` call ``state, metrics = pipe.step(state, batch)`` some times, and
        ``jax.block_until_ready((state, metrics.grad_norm))``; then ``jaxpp.observe.from_trace("out", pipe, batch).figure()``.
    """
    where, fix = "jaxpp.observe.from_trace", "call from_trace(folder, pipe, batch)"
    if not isinstance(folder, (str, os.PathLike)):
        raise ArgumentError(where, "it reads what jax.profiler.trace(folder) has written", shown(folder), fix)
    if not isinstance(getattr(pipe, "engine", None), Engine):
        raise ArgumentError(where, "the trace is one of a pipeline, given after its init or forecast", shown(pipe), fix)
    engine = pipe.engine.at(batch)
    plan, lowered = engine.plan("update", batch, key)
    try:
        runs = read_runs(Path(folder))
        found = matched(plan, runs, max(1, len(runs.steps)))
    except (FileNotFoundError, DamagedTraceError) as error:
        rule, is_missing = "it reads what jax.profiler.trace(folder) has written", isinstance(error, FileNotFoundError)
        fix = "pass the folder that you gave to jax.profiler.trace" if is_missing else "take the trace again, or copy it again"
        raise ArgumentError(where, rule, str(error), fix) from None
    except TraceError as error:
        rule = "the trace has whole steps of a pipeline like this one, with this batch's shapes"
        fix = "call jax.block_until_ready((state, metrics.grad_norm)) before the trace begins, and before it ends"
        raise ArgumentError(where, rule, str(error), fix) from None
    schedule = engine.options.schedule
    alone = durations_of(plan, [[0.0 if run is None else run.end - run.start for run in step] for step in found])
    steps = [traced_spans(plan, [Stamp(run=run) for run in step], alone, schedule) for step in found]
    lengths = [max(span.end for span in spans) for spans in steps]
    spans = steps[typical(steps)], isolated_spans(plan, alone, schedule)
    ledger, ranks = Ledger(step_liveness(engine, lowered), (), {}), engine.placement.ranks_shown
    return Profile(schedule, ranks, *spans, "trace", tuple(lengths), 1.0, ledger, offloaded=engine.options.offloaded)
