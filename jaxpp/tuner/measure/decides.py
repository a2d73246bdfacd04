"""All that decides what a search measures, as text."""

import os
from collections import Counter
from collections.abc import Mapping

import jax

from jaxpp.engine.init_arguments import variables_of
from jaxpp.engine.tracing import Tracing, avals_of
from jaxpp.runtime.processes.texts import flags_text, listing, plain, versions_text
from jaxpp.schedule.registry import make
from jaxpp.stages.graph import trace
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.loss.microbatch import batch_avals
from jaxpp.stages.loss.traced_loss import path_name
from jaxpp.tuner.measure.opened import Problem
from jaxpp.types import Tree

__all__ = ["deciding_texts"]


def deciding_texts(problem: Problem) -> Mapping[str, str]:
    """What two searches have in common if they would measure the same.

    Raises:
        JaxppError: for a loss, parameters, options or a batch that cannot be run.
        Exception: what the user's functions raise, unchanged.
    """
    options = problem.options_of(make("naive", 1, 1), "least", "flops")
    variables, batch = tuple(map(avals_of, variables_of(options, problem.shapes))), batch_avals(problem.batch)
    tracing = Tracing(options)
    key = None
    if tracing.takes_key(variables, batch):
        key = jax.random.key(0) if problem.key is None else problem.key
    loss = tracing.trace(options.loss_fn, variables, batch, key)
    state = jax.eval_shape(problem.optimizer.init, variables[0])
    update, _ = trace(problem.optimizer.update, variables[0], state, variables[0])
    devices = options.devices if problem.devices is None else problem.devices
    kinds = Counter((device.platform, device.device_kind, device.process_index) for device in devices)
    return {
        "versions": versions_text(),
        "flags": flags_text(),
        "devices": "\n".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())),
        "cores": str(os.cpu_count()),
        "options": plain(repr(sorted(problem.options.items(), key=lambda item: item[0]))),
        "batch": _shapes(batch),
        "key": "none" if key is None else describe(key),
        "loss": listing(loss.graph),
        "optimizer": listing(update),
    }


def _shapes(tree: Tree) -> str:
    return "\n".join(f"{path_name(path)} {describe(leaf)}" for path, leaf in jax.tree_util.tree_leaves_with_path(tree))
