"""All that decides a step, as text: what the processes of a run compare before they run it.

Parts stand in the order of causes, batches before losses, so that an error shows the cause. The lines of the step come last.
"""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np

from jaxpp.engine.layout import Placed
from jaxpp.engine.outcome import LoweredStep
from jaxpp.lowering.builder import Name
from jaxpp.options import Options
from jaxpp.runtime.processes.here import is_addressable
from jaxpp.runtime.processes.texts import flags_text, listing, plain, versions_text
from jaxpp.stages.cuts.cut_loss import CutLoss
from jaxpp.stages.graph import Graph
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.loss.microbatch import batch_avals, raw_key
from jaxpp.stages.loss.traced_loss import path_name
from jaxpp.types import Batch, Key, Tree

_ELSEWHERE = {"loss_fn", "schedule", "places"}  # options that are parts of their own


def opening_texts(options: Options, placed: Placed, cut: CutLoss, batch: Batch, key: Key | None) -> Mapping[str, str]:
    """What decides where a loss is cut and which leaves live where; ``batch`` and ``key`` are those of the first step."""
    layout, update = placed.layout, placed.update
    names = [field.name for field in dataclasses.fields(options) if field.name not in _ELSEWHERE]
    owned = zip(cut.loss.param_paths, layout.owner, strict=True)
    return {
        "versions": versions_text(),
        "flags": flags_text(),
        "devices": "\n".join(f"rank {rank}: {place}" for rank, place in enumerate(options.placement.by_rank)),
        "schedule": f"{options.schedule.name}\n{options.schedule.to_csv()}",
        "options": "\n".join(f"{name} = {plain(' '.join(repr(getattr(options, name)).split()))}" for name in names),
        "parameters": _shapes(layout.given),
        "batch": _shapes(batch_avals(batch)),
        "key": _key(key),
        "loss": listing(cut.loss.graph),
        "optimizer": "" if update is None else f"{listing(update.init_graph)}\n{listing(update.graph)}",
        "cuts": "\n".join([f"cuts {layout.cuts}", *(f"{path} on stage {stage}" for path, stage in owned)]),
    }


def step_texts(options: Options, placed: Placed, lowered: LoweredStep, batch: Batch, key: Key | None) -> Mapping[str, str]:
    """What decides a step: what decides where things live, and the lines over all ranks."""
    *others, first = reversed(lowered.step.cuts)
    found = dict(opening_texts(options, placed, first, batch, key))
    found["loss"] = "\n".join([found["loss"], *(listing(cut.loss.graph) for cut in reversed(others))])
    found["lines"] = "\n".join(
        " ".join([line.label, str(line.place), *map(_name, line.inputs), "->", *map(_name, line.outputs)])
        for line in lowered.bound.lines
    )
    return found


def init_texts(graph: Graph, key: Key) -> Mapping[str, str]:
    """What decides the first parameters: the traced ``init``, and its key."""
    return {"flags": flags_text(), "key": _key(key), "init": listing(graph)}


def _shapes(tree: Tree) -> str:
    return "\n".join(f"{path_name(path)} {describe(leaf)}" for path, leaf in jax.tree_util.tree_leaves_with_path(tree))


def _key(key: Key | None) -> str:
    """A key, with its numbers if this process can read them: a key that differs would drop other units in each stage."""
    if isinstance(key, (jax.Array, np.ndarray)) and is_addressable(key):
        return f"{describe(key)} {np.asarray(raw_key(key)).tolist()}"
    return "none" if key is None else describe(key)


def _name(name: Name) -> str:
    ref = name.ref
    parts = name.stage, f"{ref.role}{ref.index}", ref.source, ref.variant, int(ref.new), name.microbatch, name.visit, name.run
    return ".".join(map(str, parts))
