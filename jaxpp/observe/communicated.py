"""The collectives of a step: those of all its compiled programs, with how often each runs."""

from collections import Counter
from typing import Any

import jax

from jaxpp.observe.collectives import Collective, Collectives, Row, read_collectives
from jaxpp.runtime.draft import Line
from jaxpp.runtime.engine import Engine
from jaxpp.runtime.groups import Mean
from jaxpp.runtime.submesh import DATA, MODEL, Submesh
from jaxpp.stages.cost import count_bytes

__all__ = ["collectives_of"]


def collectives_of(engine: Engine, batch: Any, key: Any, other_bytes: int = 0) -> Collectives:
    """Read the programs of a step.

    Args:
        engine: settled.
        batch: of the step, or its shapes.
        key: likewise.
        other_bytes: of parameters that the step does not know of.

    Returns:
        the collectives; programs are named by what they do, and those that run alike for every microbatch are one.
    """
    plan, drafted = engine.plan("update", batch, key)
    calls = [instruction.call for instruction in plan.instructions]
    runs: Counter[tuple[str, int]] = Counter()
    found: dict[tuple[str, int], tuple[Collective, ...]] = {}
    for line, call in zip(drafted.draft.lines, calls, strict=True):
        for label, program, shape in _programs(line, call):
            name = label, id(program)
            runs[name] += 1
            if name not in found:
                found[name] = read_collectives(program.as_text(), shape)
    rows = tuple(Row(name[0], runs[name], collective) for name, collectives in found.items() for collective in collectives)
    assert engine.preparer.layout is not None
    own = sum(map(count_bytes, jax.tree.leaves(engine.preparer.layout.params)))
    return Collectives(rows, own + other_bytes)


def _programs(line: Line, call: Any) -> list[tuple[str, Any, dict[str, int]]]:
    """What a line runs on several devices: label, compiled program, and the shape of its mesh."""
    place = line.device
    if not isinstance(place, Submesh):
        return []
    if isinstance(call, Mean):
        groups = call.groups.current
        shards = place.mesh.shape[MODEL]
        return [(f"{line.label}, replicas {_and(g)}", call.program(g), {DATA: len(g), MODEL: shards}) for g in groups]
    if line.job is None:
        return []
    label = line.label if line.action is None else f"{line.action.kind} of stage {line.action.stage}"
    return [(label, call, dict(place.mesh.shape))]


def _and(group: tuple[int, ...]) -> str:
    return " ".join(map(str, group))
