"""What ``init`` opens: a pipeline cut, placed and compiled for the shapes that it has seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxpp.errors import CutError
from jaxpp.observe.dead_stages import Detector
from jaxpp.plan.init_arguments import Given
from jaxpp.plan.init_params import trace_init
from jaxpp.runtime.engine import Engine
from jaxpp.runtime.transfer import put
from jaxpp.stages.by_hand import by_hand, scope
from jaxpp.stages.cuts.uneven import warn_of
from jaxpp.stages.table import Stages, tabulate
from jaxpp.state import States, states_of
from jaxpp.tasks.pipeline import Tasks

__all__ = ["Opened", "first_leaves", "open_engine"]


@dataclass(frozen=True)
class Opened:
    """A pipeline that can be stepped.

    Attributes:
        states: makes states and takes them apart.
        stages: the table of stages.
        detector: looks for stages that learn nothing.
    """

    states: States
    stages: Stages
    detector: Detector


def open_engine(
    engine: Engine,
    variables: tuple[Any, ...],
    batch: Any,
    key: Any,
    functions: Sequence[Callable[..., Any]] = (),
    tasks: Tasks | None = None,
) -> Opened:
    """Cut the loss, place the stages, and compile the step.

    Args:
        engine: of the pipeline.
        variables: parameters, and model state if there is any; arrays or shapes.
        batch: of the step, or its shapes.
        key: of the kind that steps will be given; not used if the loss takes none.
        functions: the stages, if they were written by hand.
        tasks: of the pipeline's bank, if it has one.

    Raises:
        CutError: too many stages, or cuts that the model does not have.
    """
    whole = variables if tasks is None else tasks.variables(variables)
    key = key if engine.preparer.takes_key(whole, batch) else None
    try:
        engine.settle(whole, batch, key)
    except CutError as error:
        if not functions:
            raise
        idle = [f"stage {k} does not" for k in range(len(functions)) if scope(k) in error.unknown]
        raise CutError(
            "Pipeline.from_stages",
            "each stage computes something that the next one reads",
            idle or "one that returns what it is given",
            "leave it out",
        ) from error
    layout, update = engine.preparer.layout, engine.update
    assert layout is not None and update is not None
    warn_of(engine.unevenness)
    engine.plan("update", batch, key)
    cut = engine.preparer.job(batch, key).cuts[0]
    places = [(place.shown, place.devices[0]) for place in engine.placement.places]
    stages = tabulate(cut, layout.owner, places, functions or by_hand(engine.preparer))
    states = states_of(engine)
    if tasks is not None:
        fit = tasks.open(engine, variables, batch, key)
        states = states.of_shared(lambda leaves: fit.split(leaves)[0])
    return Opened(states, stages, Detector(update.watched))


def first_leaves(engine: Engine, given: Given, tasks: Tasks | None) -> list[Any]:
    """The leaves of the first state, each on its owner: parameters, optimizer, model state, loss scale; of Theta, with a bank.

    Args:
        engine: settled.
        given: to ``Pipeline.init``.
        tasks: of the pipeline's bank, if it has one.
    """
    if given.makes:
        made, key = given.made, given.key
        function = (lambda key: engine.sliced(made(key))) if engine.slicing.any else made
        leaves = engine.birth(trace_init(function, key)[0], key)
    else:
        held = jax.tree.leaves(engine.sliced(given.made))
        names = [*engine.params[: len(held) - len(engine.states)], *engine.states]
        pairs = zip(held, names, strict=True)
        leaves = [put(leaf, engine.placement[name.stage].home(name.ref)) for leaf, name in pairs]
    count = len(leaves) - len(engine.states)
    params, states = leaves[:count], leaves[count:]
    if tasks is None:
        return [*params, *engine.opt_birth(params), *states, *engine.scale_birth()]
    return [*params, *tasks.opt_birth(engine, params), *states, *engine.scale_birth()]
