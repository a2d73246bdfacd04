"""What ``init`` makes of a pipeline: the loss cut, placed and compiled for the shapes that it has seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import optax

from jaxpp.engine.compared import opening_texts
from jaxpp.engine.engine import Engine, open_engine
from jaxpp.engine.init_arguments import Given, first_leaves, variables_of
from jaxpp.engine.state_leaves import States, states_of
from jaxpp.engine.tracing import Tracing
from jaxpp.errors import CutError
from jaxpp.errors.checks import refuse_tracers
from jaxpp.observe.dead_stages import Detector
from jaxpp.observe.memory.fit import fit
from jaxpp.options import Options
from jaxpp.plan.step import Leaves
from jaxpp.runtime.processes.channel import Agreement
from jaxpp.runtime.transfer import check_alive
from jaxpp.stages.by_hand import by_hand, scope
from jaxpp.stages.cuts.balance import warn_of
from jaxpp.stages.stage_table import Stages, tabulate
from jaxpp.tasks.bank import Bank
from jaxpp.tasks.pipeline import BankRunner, Runner, waiting_names, with_set
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
        engine, held = self.engine, self.runner.held
        found = first_leaves(engine, given, held(engine.placed.names), held(engine.placed.homes))
        return self.runner.with_opt_state(found)._replace(loss_scale=engine.make_loss_scale())

    def bring(self, where: str, options: Options, made: Tree) -> Leaves[Array]:
        """Parameters that the method ``where`` was given, with ``has_state`` a pair, each leaf on its owner.

        Raises:
            ParamsError: they are not of this pipeline's model.
        """
        refuse_tracers(f"pipe.{where}(params, ...)", made)
        check_alive(f"pipe.{where}", made)
        return self.states.bring(*variables_of(options, made))


def compile_step(
    options: Options,
    optimizer: optax.GradientTransformation,
    made: Tree,
    batch: Batch,
    key: Key | None,
    *,
    functions: Sequence[Callable[..., Tree]] = (),
    bank: Bank | None = None,
    known: Compiled | None = None,
    agree: Agreement | None = None,
) -> Compiled:
    """Cut the loss, place the stages, and compile the step.

    ``made`` are the parameters, with ``has_state`` a pair with the model state; arrays or shapes. The key is of the kind that steps
    will be given. ``functions`` are the stages, if they were written by hand; the compiled programs of ``known`` may serve. With
    ``agree``, what is compiled is compared over all processes before. If the step does not fit into ``options.hbm``, the stages
    keep less, and a line says so.

    Raises:
        FitError: nothing that the stages may do makes the step fit.
        CutError: too many stages, or cuts that the model does not have.
        JaxppError: for a loss, parameters, batch or optimizer that cannot be run.
    """
    variables = variables_of(options, made)
    whole = with_set(bank, variables)
    taken = key if Tracing(options).takes_key(whole, batch) else None
    try:
        engine = open_engine(options, optimizer, whole, batch, taken, known=known and known.engine)
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
    if known is not None and engine is known.engine:
        remarks = known.stages.remarks
    else:
        engine, remarks = _fitted(engine, batch, taken, bank)
    engine.plan("update", batch, taken)
    places = [(place.shown, place.devices[0]) for place in engine.placement.places]
    cut = engine.preparer.step(batch, taken).cuts[0]
    alone = functions or by_hand(len(places), engine.cut_at, engine.slicing, has_state=options.has_state)
    offloading = {each.forward.stage for each in engine.options.offloaded}
    stages = Stages(tabulate(cut, engine.owner, places, alone, offloading), remarks)
    runner = Runner(engine) if bank is None else BankRunner(bank, engine, variables, batch, taken)
    return Compiled(engine, runner, states_of(engine, own=bank is None), stages, Detector(engine.update.watched))


def _fitted(engine: Engine, batch: Batch, key: Key | None, bank: Bank | None) -> tuple[Engine, tuple[str, ...]]:
    """The engine, or one that fits, and the remarks about it, which are printed."""
    found = fit(engine, batch, key, waiting_names(bank, engine))
    if found.remarks and jax.process_index() == 0:
        print(found.said, flush=True)
    return found.engine, found.remarks
