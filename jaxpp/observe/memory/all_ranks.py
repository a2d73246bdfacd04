"""What is alive on the devices of all ranks, also of those that are in other processes.

A process knows the lines of the whole step, and so the arrays of every rank. What a compiled program needs besides is known to the
process that compiles it. So that a process need not ask the others, the programs of their ranks are compiled here too, for devices
of this process that stand in for theirs, and thrown away. Stages that do the same are compiled once.
"""

import dataclasses

import jax

from jaxpp.engine.engine import Engine
from jaxpp.engine.outcome import Purpose
from jaxpp.observe.memory.liveness import Liveness, step_liveness, temporaries
from jaxpp.runtime.bind import BoundLine, compile_lines
from jaxpp.runtime.compile import Programs
from jaxpp.types import Batch, Device, Key

__all__ = ["liveness_of_all"]


def liveness_of_all(engine: Engine, batch: Batch, key: Key | None, purpose: Purpose = "update") -> Liveness:
    """What is alive during a step on the devices of all ranks, with the temporaries of the compiled programs.

    Where this process has fewer devices than a rank of another one, the temporaries of that rank are not known: their device is in
    ``Liveness.unknown``.
    """
    _, lowered = engine.plan(purpose, batch, key)
    if lowered.bound.numbers is None:
        return step_liveness(engine, lowered, compiled=True)
    own, whole = lowered.bound, engine.lower(purpose, batch, key)
    others, lines, unknown = Programs(), dict[int, BoundLine](), dict[Device, None]()
    for number, line in enumerate(whole.bound.lines):
        if line.program is not None and not line.place.is_here:
            place = line.place.moved(jax.local_devices())
            if place is None:
                unknown[line.device] = None
            else:
                lines[number] = dataclasses.replace(line, place=place)
    _, chosen = compile_lines(list(lines.values()), others, "the ranks of other processes, for the forecast")
    bound = dataclasses.replace(whole.bound, chosen={**chosen, **own.chosen})
    extra = [0] * len(bound.lines)
    away = dataclasses.replace(own, lines=tuple(lines.values()), numbers=tuple(lines))
    for mine, programs in ((own, engine.programs), (away, others)):
        for number, needs in zip(mine.numbers or (), temporaries(mine, programs), strict=True):
            extra[number] = needs
    found = step_liveness(engine, dataclasses.replace(whole, bound=bound))
    return dataclasses.replace(found, temporaries=tuple(extra), unknown=tuple(unknown))
