"""What each device holds at its peak in a step that was not compiled, because its programs were, for another order.

Arrays are counted from the lines of the step, as a forecast does. What a program needs besides was said by the compiler when the
same program was compiled for the family. A program that was not (where stages share a device with others, what is donated may
differ) is compiled.
"""

import dataclasses
import json
from collections.abc import Hashable, Mapping

import jax

from jaxpp.engine.engine import Engine
from jaxpp.observe.memory.liveness import step_liveness, temporaries
from jaxpp.runtime.bind import BoundLine, compile_lines
from jaxpp.runtime.compile import Programs
from jaxpp.runtime.processes.channel import texts_of_all
from jaxpp.types import Batch, Key

__all__ = ["Needs", "needs_of", "peak_bytes"]

Needs = dict[Hashable, int]
"""Bytes that programs need while they run, besides their arguments and results."""


def needs_of(engine: Engine, batch: Batch, key: Key | None) -> Needs:
    """What the programs of a step need, which are compiled; of several processes, each tells the others of its own."""
    own = engine.plan("update", batch, key)[1].bound
    found = dict(zip(own.numbers or range(len(own.lines)), temporaries(own, engine.programs), strict=True))
    if not engine.alone:
        told = [json.loads(text) for text in texts_of_all(json.dumps(found))]
        found = {int(number): needs for each in told for number, needs in each.items() if needs} | found
    lines = engine.lower("update", batch, key).bound.lines
    return {_same(line): found.get(number, 0) for number, line in enumerate(lines) if line.program is not None}


def peak_bytes(engine: Engine, batch: Batch, key: Key | None, known: Needs) -> tuple[int, ...]:
    """The bytes that each device holds at its peak, of each rank in order; ``known`` is added to."""
    lowered = engine.lower("update", batch, key)
    lines = lowered.bound.lines
    _add(known, {_same(line): line for line in lines if line.program is not None})
    extra = tuple(0 if line.program is None else known[_same(line)] for line in lines)
    liveness = dataclasses.replace(step_liveness(engine, lowered), temporaries=extra)
    return tuple(liveness.most(place.shown) for place in engine.placement.by_rank)


def _same(line: BoundLine) -> Hashable:
    """Equal for lines of one family that run the same program, wherever they run."""
    program = line.program
    return program and (program.name, program.inputs, program.outputs, program.avals, program.spans, line.donated)


def _add(known: Needs, lines: Mapping[Hashable, BoundLine]) -> None:
    """Compile what is not known, for devices of this process."""
    missing = list[BoundLine]()
    for same, line in lines.items():
        if same not in known:
            place = line.place if line.place.is_here else line.place.moved(jax.local_devices())
            known[same] = 0  # where this process has fewer devices than a rank of another, it cannot be known
            missing += [] if place is None else [dataclasses.replace(line, place=place)]
    if not missing:
        return
    programs = Programs()
    compile_lines(missing, programs, "what another order needs")
    for line in missing:
        if line.placed is not None and (stats := programs[line.placed].memory_analysis()) is not None:
            known[_same(line)] = int(stats.temp_size_in_bytes)
