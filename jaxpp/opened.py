"""What ``init`` opens: a pipeline cut, placed and compiled for the shapes that it has seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jaxpp.by_hand import by_hand, scope
from jaxpp.errors import ArgumentError, CutError
from jaxpp.observe.detector import Detector
from jaxpp.runtime.birth import trace_init
from jaxpp.runtime.engine import Engine
from jaxpp.runtime.settings import Settings
from jaxpp.runtime.submesh import devices_of, home_of
from jaxpp.runtime.transfer import put
from jaxpp.stages.table import Stages, tabulate
from jaxpp.state import States, states_of
from jaxpp.tasks import Tasks

__all__ = ["Opened", "first_leaves", "open_engine", "variables_of", "wrong_init"]


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
    key = key if engine.preparer.takes_key() else None
    try:
        engine.settle(variables if tasks is None else tasks.variables(variables), batch, key)
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
    engine.plan("update", batch, key)
    cut = engine.preparer.job(batch, key).cuts[0]
    places = [(place, devices_of(place)[0]) for place in engine.placement.places]
    stages = tabulate(cut, layout.owner, places, functions or by_hand(engine.preparer))
    states = states_of(engine)
    if tasks is not None:
        fit = tasks.open(engine, variables, batch, key)
        states = states.of_shared(lambda leaves: fit.split(leaves)[0])
    return Opened(states, stages, Detector(update.watched))


def first_leaves(engine: Engine, init_or_params: Any, args: Sequence[Any], tasks: Tasks | None) -> list[Any]:
    """The leaves of the first state, each on its owner: parameters, optimizer, model state, loss scale; of Theta, with a bank.

    Args:
        engine: settled.
        init_or_params: as ``Pipeline.init`` was given it.
        args: likewise.
        tasks: of the pipeline's bank, if it has one.
    """
    if callable(init_or_params):
        made, key = init_or_params, args[0]
        function = (lambda key: engine.sliced(made(key))) if engine.slicing.any else made
        leaves = engine.birth(trace_init(function, key)[0], key)
    else:
        given = jax.tree.leaves(engine.sliced(init_or_params))
        names = [*engine.params[: len(given) - len(engine.states)], *engine.states]
        pairs = zip(given, names, strict=True)
        leaves = [put(leaf, home_of(engine.placement[name.stage], name.ref)) for leaf, name in pairs]
    count = len(leaves) - len(engine.states)
    params, states = leaves[:count], leaves[count:]
    if tasks is None:
        return [*params, *engine.opt_birth(params), *states, *engine.scale_birth()]
    return [*params, *tasks.opt_birth(engine, params), *states, *engine.scale_birth()]


def variables_of(settings: Settings, made: Any) -> tuple[Any, ...]:
    """The parameters, and with ``has_state`` the model state, of what init was given or made.

    Raises:
        ArgumentError: not a pair, with ``has_state``.
    """
    if not settings.has_state:
        return (made,)
    if not isinstance(made, tuple) or len(made) != 2:
        raise wrong_init(f"{type(made).__name__} instead of a pair (params, model_state), with has_state=True")
    if made[1] is None:
        raise wrong_init("None as the model state, with has_state=True; an empty one is {}")
    return made


def wrong_init(got: str) -> ArgumentError:
    """The error for arguments that ``init`` cannot use."""
    return ArgumentError(
        "pipe.init",
        "init takes a function, a key and a batch, or parameters and a batch",
        got,
        "call pipe.init(init_fn, key, batch) or pipe.init(params, batch), with has_state=True a pair (params, model_state)",
    )
