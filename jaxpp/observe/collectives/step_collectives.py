"""The collectives of a step: of each of its compiled programs, with how often the program runs."""

from collections import Counter
from typing import Any

import jax

from jaxpp.engine.engine import Engine
from jaxpp.observe.collectives import Collective, Collectives, ProgramCollective, read_collectives
from jaxpp.runtime.bind import BoundLine
from jaxpp.runtime.place import DATA
from jaxpp.runtime.replica_groups import Mean
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.own_params import Joint
from jaxpp.types import Batch, Key

__all__ = ["collectives_of"]


def collectives_of(engine: Engine, batch: Batch, key: Key | None, num_other: int = 0) -> Collectives:
    """Read the programs of a step; ``num_other`` are the bytes of all other tasks' parameters, before they are sharded.

    Programs are named by what they do, and a program that runs for every microbatch is named once. The bytes of all parameters are
    what one device would hold of them, with the parameters of each stage counted once.
    """
    plan, lowered = engine.plan("update", batch, key)
    calls = [instruction.call for instruction in plan.instructions]
    runs: Counter[tuple[str, int]] = Counter()
    found: dict[tuple[str, int], tuple[Collective, ...]] = {}
    for line, call in zip(lowered.bound.lines, calls, strict=True):
        for label, program, shape in _programs(line, call):
            name = label, id(program)
            runs[name] += 1
            if name not in found:
                found[name] = read_collectives(program.as_text(), shape)
    rows = tuple(ProgramCollective(name[0], runs[name], each) for name, collectives in found.items() for each in collectives)
    params = engine.layout.params
    pairs = zip(engine.placed.names.all_params, jax.tree.leaves(params), strict=True)
    sizes = [engine.placement[name.stage].num_bytes(name.ref, aval) for name, aval in pairs]
    own = sizes[len(jax.tree.leaves(params.shared)) :] if isinstance(params, Joint) else []
    share = sum(own) / sum(map(count_bytes, jax.tree.leaves(params.own))) if own else 1.0
    return Collectives(rows, sum(sizes) + round(share * num_other))


def _programs(line: BoundLine, call: Any) -> list[tuple[str, Any, dict[str, int]]]:
    """What a line runs on several devices: label, compiled program, and the shape of its mesh."""
    sizes = dict(line.place.axis_sizes)
    if not sizes:
        return []
    if isinstance(call, Mean):
        groups = call.groups.current
        return [(f"{line.label}, replicas {' '.join(map(str, g))}", call.program(g), sizes | {DATA: len(g)}) for g in groups]
    if line.program is None:
        return []
    label = line.label if line.action is None else f"{line.action.kind} of stage {line.action.stage}"
    return [(label, call, sizes)]
