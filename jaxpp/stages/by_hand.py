"""Stages run by hand: explicit stage functions made into a loss, and a cut loss given back as functions.

``compose`` puts each stage function under a name of its own, so that the loss is cut exactly there. ``by_hand`` goes the other way.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp.errors import ArgumentError, BatchError, ParamsError, StateError, shown
from jaxpp.errors.checks import check_function
from jaxpp.stages.axes import maps
from jaxpp.stages.cuts.cut_loss import CutLoss
from jaxpp.stages.loss.microbatch import raw_key
from jaxpp.stages.program import ACCUMULATED, Ref, Role
from jaxpp.stages.stacked import Slicing
from jaxpp.types import Array, Batch, Key, Params, Tree


def scope(stage: int) -> str:
    """The name under which a hand-written stage is traced."""
    return f"stage_{stage}__by_hand"


def check_stages(stages: Any, loss: Any) -> tuple[Callable[[Any, Any], Any], ...]:
    """The stage functions, if that is what they are."""
    where, rule = "Pipeline.from_stages(stages, loss=...)", "the stages are a list of functions (params, x) -> x, one a stage"
    fix = "pass a list such as [lambda params, x: jnp.tanh(x @ params), ...]"
    if callable(stages):
        got = f"one function instead of a list: {shown(stages)}"
        raise ArgumentError(where, rule, got, "pass a list, such as [stage_0, stage_1]")
    if isinstance(stages, (str, Mapping)) or not isinstance(stages, Iterable):
        raise ArgumentError(where, rule, shown(stages), fix)
    functions = tuple(stages)
    wrong = [f"stages[{k}]: {shown(stage)}" for k, stage in enumerate(functions) if not callable(stage)]
    if wrong or not functions:
        raise ArgumentError(where, rule, wrong or "an empty list", fix)
    check_function(where, "the loss is a function (output, targets) -> scalar", loss)
    return functions


def compose(stages: Sequence[Callable[[Any, Any], Any]], loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The loss of a chain of stage functions, over ``params = (params_0, params_1, ...)`` and ``batch = (inputs, targets)``."""

    def loss_fn(params: Any, batch: Any) -> Any:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            rule = "a pipeline from_stages takes a pair (inputs, targets)"
            raise BatchError("batch", rule, type(batch).__name__, "pass (inputs, targets)")
        if isinstance(params, Mapping) or not isinstance(params, Sequence) or len(params) != len(stages):
            got = f"{len(params)} trees" if isinstance(params, Sequence) else type(params).__name__
            rule = "a pipeline from_stages takes a list of parameters, one tree a stage"
            fix = "pass [params_0, params_1, ...]; a stage without parameters has {}"
            raise ParamsError("params", rule, f"{got} for {len(stages)} stages", fix)
        x, targets = batch
        for k, (stage, own) in enumerate(zip(stages, params, strict=True)):
            with jax.named_scope(scope(k)):
                x = stage(own, x)
        return loss(x, targets)

    return loss_fn


def by_hand(
    num_stages: int, cut_at: Callable[[Batch, Key | None], CutLoss], slicing: Slicing, *, has_state: bool
) -> tuple[Callable[..., Tree], ...]:
    """The stages of a cut loss as functions ``(params, x, batch, key) -> x``; ``x`` holds what crosses, and is ``{}`` at first.

    The last stage returns the loss, or the outputs of a function that has no loss.
    """

    def function(stage: int) -> Callable[..., Tree]:
        def run(params: Params, x: dict[int, Array], batch: Batch, key: Key | None = None) -> Tree:
            cut = cut_at(batch, key)
            where = f"pipe.stages[{stage}].forward"
            if cut.loss.graph.communicates or maps(cut.loss.graph.eqns):
                rule, fix = "a stage is run by hand on one device, without the others of its rank", "call pipe.step or pipe.verify"
                communicates = cut.loss.graph.communicates
                what = "collectives between replicas" if communicates else "a jax.shard_map over the devices of a rank"
                raise StateError(where, rule, f"a loss with {what}", fix)
            if has_state:
                rule = "a stage is run by hand on its parameters, its input and the batch"
                raise StateError(where, rule, "a loss with model state", "run one without has_state, closing over the state")
            return _run(cut, stage, jax.tree.leaves(slicing.of(params)), x, batch, key)

        return jax.jit(run)

    return tuple(function(stage) for stage in range(num_stages))


def _run(cut: CutLoss, stage: int, params: Sequence[Array], x: dict[int, Array], batch: Batch, key: Key | None) -> Tree:
    code = cut.stages[stage]
    values: dict[Ref, Array] = {Ref(Role.PARAM, k): leaf for k, leaf in enumerate(params)}
    values |= {Ref(Role.BATCH, k, shared=k in cut.loss.shared): leaf for k, leaf in enumerate(jax.tree.leaves(batch))}
    values |= {Ref(Role.CONSTANT, k): value for k, value in enumerate(code.constants)}
    values |= {Ref(Role.ACTIVATION, k): value for k, value in x.items()}
    values[Ref(Role.SCALE)] = jnp.ones(())
    if key is not None:
        values[Ref(Role.KEY)] = raw_key(key)
    for program in (code.statics, code.forward):
        for ref, aval in zip(program.inputs, program.avals, strict=True):
            if ref.role in ACCUMULATED:
                values[ref] = jnp.zeros(aval.shape, aval.dtype)
        results = program.function(*(values[ref] for ref in program.inputs))
        values.update(zip(program.outputs, results, strict=True))
    if Ref(Role.LOSS) in code.forward.outputs:
        return values[Ref(Role.LOSS)]
    if not cut.loss.is_loss and stage == len(cut.stages) - 1:
        outputs = {ref.index: values[ref] for ref in code.forward.outputs if ref.role in (Role.AUX, Role.ROWS)}
        return cut.loss.aux_tree.unflatten([outputs[k] for k in range(len(outputs))])
    later = [k for k, peers in enumerate(cut.consumers) if max(peers) > stage >= cut.producer[k]]
    return {k: values[Ref(Role.ACTIVATION, k)] for k in later}
