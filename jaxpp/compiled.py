"""What ``init`` makes of a pipeline: the loss cut, placed and compiled for the shapes that it has seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import optax

from jaxpp.engine.compared import init_texts, opening_texts
from jaxpp.engine.engine import Engine, open_engine
from jaxpp.engine.init_arguments import Given, variables_of
from jaxpp.engine.state_leaves import States, states_of
from jaxpp.engine.tracing import Tracing
from jaxpp.errors import CutError
from jaxpp.observe.dead_stages import Detector
from jaxpp.options import Options
from jaxpp.plan.init_params import trace_init
from jaxpp.plan.leaves import Leaves
from jaxpp.runtime.agreement.meeting import Agreement, agreement
from jaxpp.runtime.transfer import put
from jaxpp.stages.by_hand import by_hand, scope
from jaxpp.stages.cuts.uneven import warn_of
from jaxpp.stages.stage_table import Stages, tabulate
from jaxpp.tasks.bank import Bank
from jaxpp.tasks.pipeline import BankRunner, Runner, with_set
from jaxpp.types import Array, Batch, Key, Tree

__all__ = ["Compiled", "compile_step"]


@dataclass(frozen=True)
class Compiled:
    """A pipeline that can be stepped.

    Attributes:
        engine: runs plans on flat leaves.
        runner: runs steps on the engine, with the sets of a bank or without.
        states: makes states and takes them apart.
        stages: the table of stages.
        detector: looks for stages that learn nothing.
    """

    engine: Engine
    runner: Runner
    states: States
    stages: Stages
    detector: Detector

    def first_leaves(self, given: Given) -> Leaves[Array]:
        """The leaves of the first state, each on its owner."""
        engine = self.engine
        homes = self.runner.held(engine.placed.homes)._replace(opt=(), own_opt=(), loss_scale=())
        made, key = given.made, given.key
        if key is not None:
            function = (lambda key: engine.sliced(made(key))) if engine.slicing.any else made
            names = self.runner.held(engine.placed.names)._replace(opt=(), own_opt=(), loss_scale=())
            graph, _ = trace_init(function, key)
            with agreement("pipe.init", engine.options.devices) as agree:
                agree(lambda: init_texts(graph, key))
            found = engine.make_params(graph, key, names)
        else:
            held = jax.tree.leaves(engine.sliced(made))
            found = homes.fill([put(leaf, home) for leaf, home in zip(held, homes.flat(), strict=True)])
        return self.runner.with_opt_state(found)._replace(loss_scale=engine.make_loss_scale())


def compile_step(
    options: Options,
    optimizer: optax.GradientTransformation,
    made: Tree,
    batch: Batch,
    key: Key | None,
    *,
    functions: Sequence[Callable[..., Tree]] = (),
    bank: Bank | None = None,
    known: Engine | None = None,
    agree: Agreement | None = None,
) -> Compiled:
    """Cut the loss, place the stages, and compile the step.

    ``made`` are the parameters, with ``has_state`` a pair with the model state; arrays or shapes. The key is of the kind that steps
    will be given. ``functions`` are the stages, if they were written by hand; the compiled programs of ``known`` may serve. With
    ``agree``, what is compiled is compared over all processes before.

    Raises:
        CutError: too many stages, or cuts that the model does not have.
        JaxppError: for a loss, parameters, batch or optimizer that cannot be run.
    """
    variables = variables_of(options, made)
    whole = with_set(bank, variables)
    taken = key if Tracing(options).takes_key(whole, batch) else None
    try:
        engine = open_engine(options, optimizer, whole, batch, taken, known=known)
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
    warn_of(engine.layout.unevenness)
    if agree is not None:
        agree(lambda: opening_texts(options, engine.placed, engine.preparer.step(batch, taken).cuts[0], batch, taken))
    engine.plan("update", batch, taken)
    places = [(place.shown, place.devices[0]) for place in engine.placement.places]
    cut = engine.preparer.step(batch, taken).cuts[0]
    alone = functions or by_hand(len(places), engine.cut_at, engine.slicing, has_state=options.has_state)
    stages = tabulate(cut, engine.owner, places, alone)
    runner = Runner(engine) if bank is None else BankRunner(bank, engine, variables, batch, taken)
    return Compiled(engine, runner, states_of(engine, own=bank is None), stages, Detector(engine.update.watched))
