"""What several processes saw of the same steps, put together on one clock.

All know the lines of the whole step in one order. So each tells the others what it saw of its own, on the clock of process 0, and
all make the same steps of it: the stamps and runs of every line, as one process with all devices would have seen them. A send
between processes is handed over by both sides: it begins no earlier than either, and is done when the receiver has it.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxpp.engine.engine import Engine
from jaxpp.observe.memory.ledger import Ledger, Sample
from jaxpp.observe.memory.liveness import Life, Liveness
from jaxpp.observe.profile.spans import Stamp
from jaxpp.observe.profile.trace import Run
from jaxpp.plan.builder import CALLER, Name
from jaxpp.plan.plan import About, Instruction, Plan
from jaxpp.runtime.bind import Bound, BoundLine
from jaxpp.runtime.place import Place, devices_of
from jaxpp.runtime.processes.channel import Alignment, texts_of_all
from jaxpp.runtime.processes.here import processes_of
from jaxpp.stages.program import Role
from jaxpp.types import Array, Batch, Device, Key


class SeenStep(NamedTuple):
    """One step as it was seen, in seconds on a clock of the host."""

    begun: float  # when the host began
    ended: float  # when all results were there
    stamps: tuple[Stamp, ...] = ()  # of each line; empty if nobody looked
    runs: tuple[Run | None, ...] = ()  # of each line the run of its program; None for a send, and empty without a trace
    seconds: tuple[float, ...] = ()  # how long each line took, if each waited for the one before

    def timed(self) -> "SeenStep":
        """With the seconds of each line: of a program by the trace, of the rest, such as sends, by the host's clock."""
        pairs = zip(self.stamps, self.runs or [None] * len(self.stamps), strict=True)
        return self._replace(seconds=tuple(_seconds(stamp) if run is None else run.end - run.start for stamp, run in pairs))


def _seconds(stamp: Stamp) -> float:
    """From when the host went on (of two, the last) to when the result was there."""
    return max(0.0, stamp.done - max(stamp.handed, stamp.asked))


class Seen(NamedTuple):
    """Steps as they were seen, in the order in which they ran."""

    steps: tuple[SeenStep, ...]
    missing: str  # what the trace lacks; or empty
    error: float  # seconds by which times may be wrong beside each other: of the trace and the host, or of different processes


class Company:
    """The processes of a pipeline, which put together what they saw on process 0's clock; all make the same calls."""

    def __init__(self, engine: Engine, batch: Batch, key: Key | None, clock: Alignment):
        self._own = engine.plan("update", batch, key)[1].bound
        whole = engine.lower("update", batch, key)
        self._bound, self._placement, self._clock = whole.bound, engine.placement, clock
        read = [name for line in self._bound.lines for name in (*line.inputs, *line.outputs)]
        self._names = list(dict.fromkeys([*whole.inputs, *self._bound.constants, *read]))
        self.plan = _plan_of(self._bound)
        told = [json.loads(text) for text in texts_of_all(json.dumps(list(self._numbers)))]
        self._places = [{number: k for k, number in enumerate(numbers)} for numbers in told]

    @property
    def _numbers(self) -> Sequence[int]:
        """Where the lines of this process are among all; a process that has no devices of the pipeline has those that cross."""
        return range(len(self._own.lines)) if self._own.numbers is None else self._own.numbers

    def seen(self, mine: Seen) -> Seen:
        """What all processes saw, of all lines."""
        shift = self._clock.offset
        steps = [
            {
                "at": [step.begun + shift, step.ended + shift],
                "stamps": [[time + shift for time in stamp[:3]] for stamp in step.stamps],
                "runs": [run and [time + shift for time in run] for run in step.runs],
                "seconds": step.seconds,
            }
            for step in mine.steps
        ]
        error = mine.error + self._clock.error
        texts = texts_of_all(json.dumps({"steps": steps, "missing": mine.missing, "error": error}))
        told: list[dict[str, Any]] = [json.loads(text) for text in texts]
        missing = [f"process {k}: {each['missing']}" for k, each in enumerate(told) if each["missing"]]
        found = [self._step([each["steps"][k] for each in told]) for k in range(len(mine.steps))]
        return Seen(tuple(found), missing[0] if missing else "", sum(sorted(each["error"] for each in told)[-2:]))

    def _step(self, told: Sequence[Mapping[str, Any]]) -> SeenStep:
        """A step of which each process tells."""
        begun, ended = min(each["at"][0] for each in told), max(each["at"][1] for each in told)
        stamps, runs, seconds = list[Stamp](), list[Run | None](), list[float]()
        for number, line in enumerate(self._bound.lines if told[0]["stamps"] else ()):
            givers, owners = self._of(number, line)
            seen = {k: told[k]["stamps"][self._places[k][number]] for k in {*givers, *owners}}
            first = min(givers or owners, key=lambda k, seen=seen: seen[k])
            asked, done = (max(seen[k][at] for k in owners) for at in (1, 2))
            begins, handed, _ = seen[first]
            stamps.append(Stamp(begins, handed, max(done, handed), asked if givers else -math.inf, first))
            mine, took = ([told[k][what][self._places[k][number]] for k in owners if told[k][what]] for what in ("runs", "seconds"))
            there = [run for run in mine if run is not None]
            runs.append(Run(min(run[0] for run in there), max(run[1] for run in there)) if there else None)
            seconds.append(_seconds(stamps[-1]) if givers else max(took, default=0.0))
        return SeenStep(begun, ended, tuple(stamps), tuple(runs) if all(each["runs"] for each in told) else (), tuple(seconds))

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
        numbers, end = self._numbers, len(self._bound.lines) + 1
        moments = [0, *(number + 1 for number in numbers), end]
        me = jax.process_index()
        told = {device for device in mine.liveness.devices if processes_of(devices_of(device))[0] == me}
        said = {
            "lives": [
                [known[life.name], places[life.device], *life[2:4], *_stretched(life, moments, end), life.donated]
                for life in (*mine.liveness.lives, *mine.liveness.hosted)
                if life.device in told
            ],
            "temporaries": mine.liveness.temporaries,
            "samples": [
                [sample.when, moments[sample.moment], places[sample.device], *sample[3:]]
                for sample in mine.samples
                if sample.device in told
            ],
            "stats": [[places[device], dict(found)] for device, found in mine.stats.items() if device in told],
        }
        lives, samples, stats, extra = list[Life](), list[Sample](), dict[Device, Mapping[str, int]](), [0] * len(self._bound.lines)
        for process, text in enumerate(texts_of_all(json.dumps(said, default=int))):
            each = json.loads(text)
            for name, device, *rest in each["lives"]:
                lives.append(Life(self._names[name], devices[device], *rest))
            for when, moment, device, kinds, *rest in each["samples"]:
                samples.append(Sample(when, moment, devices[device], tuple(kinds), *rest))
            stats |= {devices[device]: found for device, found in each["stats"]}
            for number, k in self._places[process].items():
                extra[number] = max(extra[number], each["temporaries"][k])
        hosted = tuple(life for life in lives if life.name.ref.role == Role.OFFLOADED)
        lives = [life for life in lives if life.name.ref.role != Role.OFFLOADED]
        liveness = Liveness(devices, self._bound.lines, tuple(lives), tuple(extra), hosted=hosted)
        return Ledger(liveness, tuple(samples), stats)


def _stretched(life: Life, moments: Sequence[int], end: int) -> tuple[int, int]:
    """When a value begins and ends among the moments of all lines: it stays until what comes next in its own process."""
    return moments[life.begins], moments[life.ends + 1] - 1 if life.ends + 1 < len(moments) else end


def _plan_of(bound: Bound) -> Plan:
    """The lines of all processes as a plan, of which nothing can be run; each value has a slot of its own."""
    slots: dict[Name, int] = {}
    lines = []
    for line in bound.lines:
        reads, writes = (tuple(slots.setdefault(name, len(slots)) for name in names) for names in (line.inputs, line.outputs))
        call, name = (_elsewhere, "") if line.program is None else (line.program.function, line.program.name)
        about = About(line.device, line.stage, line.action, line.is_send, name, -1, line.copies)
        lines.append(Instruction(line.label, call, reads, writes, (), about))
    return Plan(tuple(lines), len(slots), (), (), (), len(lines))


def _elsewhere(*_: Array) -> Sequence[Array]:
    raise AssertionError("a plan that is only looked at is not run")
