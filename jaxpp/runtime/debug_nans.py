"""``jax_debug_nans`` for a pipeline: every program's results are looked at, and the first NaN is traced to its line in the model.

JAX's own check runs a program again, which it cannot where buffers were given up. While the flag is on, no program takes over a
buffer, each result is looked at before anything reads it, and the equations of a program that made a NaN are run one by one. A NaN
residual may come to nothing (``jnp.where`` around a root), so it is only remembered where it was made.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from jaxpp.errors import NonFiniteError
from jaxpp.lowering.step import Step
from jaxpp.runtime.bind import BoundLine, Runnable
from jaxpp.runtime.compile import PlacedProgram
from jaxpp.stages.axes import axes_named, divides
from jaxpp.stages.graph import Graph, trace
from jaxpp.stages.jaxpr import describe, is_named, shapes_of, user_line, variables
from jaxpp.stages.program import Program, Ref, Role
from jaxpp.stages.stacked import on_host
from jaxpp.types import Array, Leaf

_UNCHECKED = frozenset({Role.BATCH, Role.KEY, Role.SCALE, Role.STATIC, Role.CONSTANT, Role.RESIDUAL, Role.REPLICA})
_ALONE = {Role.LOSS: "the loss", Role.STATIC: "what is made of the parameters alone", Role.SCALE: "the microbatch's weight"}
_WORDS = {
    Role.GRAD: "the gradient of",
    Role.ADDEND: "the gradient of",
    Role.PARAM: "parameter",
    Role.STATE: "model state",
    Role.OPT: "optimizer state",
    Role.VALUE: "a value of the optimizer,",
}


def flags() -> tuple[bool, bool]:
    """Whether NaN and infinities are to be looked for: ``jax_debug_nans``, ``jax_debug_infs``."""
    config: Any = jax.config  # whose flags checkers of types do not know
    return bool(config.jax_debug_nans), bool(config.jax_debug_infs)


class NanCheck:
    """Looks at the results of the programs of one plan."""

    def __init__(self, step: Step, *, scaled: bool):
        self._step, self._nans, self._infs = step, *flags()
        self._unchecked = _UNCHECKED | ({Role.COTANGENT, Role.GRAD, Role.ADDEND, Role.VALUE} if scaled else set())
        self._kept: dict[tuple[int, int], str] = {}

    def __call__(self, line: BoundLine, job: PlacedProgram, call: Runnable) -> Runnable:
        """What runs instead of ``call``, the compiled program of a line."""

        def checked(*args: Array) -> Sequence[Array]:
            with jax.debug_nans(False), jax.debug_infs(False):
                results = call(*args)
                wrong = [(ref, value) for ref, value in zip(job.program.outputs, results, strict=True) if self._count(value)]
                if wrong:
                    self._tell(line, job, args, wrong)
            return results

        return checked

    def _count(self, value: Array | np.ndarray) -> int:
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            return 0
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype.itemsize < 4 else array
        return int(self._nans * np.isnan(array).sum() + self._infs * np.isinf(array).sum())

    def _tell(self, line: BoundLine, job: PlacedProgram, args: Sequence[Array], wrong: Sequence[tuple[Ref, Array]]) -> None:
        made, given = self._find(job, args)
        microbatch = -1 if line.action is None else line.action.microbatch
        here = line.stage, microbatch
        kept = self._kept.get(here, "it was kept by the forward")
        sources = [kept if ref.role == Role.RESIDUAL else f"it comes in with {self._name(ref)}" for ref in given]
        origin = made or "; ".join(dict.fromkeys(sources))
        seen = [(ref, value) for ref, value in wrong if ref.role not in self._unchecked]
        if not seen:
            self._kept[here] = origin
            return
        where = f"stage {line.stage}" + (f", microbatch {microbatch}" if microbatch >= 0 else "")
        got = [f"{self._name(ref)}, {describe(value)}: {self._count(value)} of {value.size} elements" for ref, value in seen[:4]]
        got += [f"and {len(seen) - 4} more"] * (len(seen) > 4)
        flag, what = "jax_debug_nans" if self._nans else "jax_debug_infs", ["NaN"] * self._nans + ["infinity"] * self._infs
        rule = f"with {flag} on, no value that a program returns is {' or '.join(what)}"
        got.append(origin or "which equation makes it is not seen when they run one by one")
        data = [self._name(ref) for ref in given if ref.role == Role.BATCH] if not made else []
        look = f"look at what makes {', '.join(data)}" if data else "look at that line of the model"
        fix = f"{look}; the state is as it was before, pipe.state"
        raise NonFiniteError(f"{line.label} ({where})", rule, got, fix)

    def _name(self, ref: Ref) -> str:
        loss = self._step.cuts[0].loss
        if ref.role in _ALONE:
            return _ALONE[ref.role]
        if ref.role == Role.BATCH:  # the last may be the weights of microbatches
            return ([*loss.batch_leaves, "the weights of the microbatches"])[min(ref.index, len(loss.batch_leaves))]
        of_params = dict.fromkeys((Role.PARAM, Role.GRAD, Role.ADDEND), loss.param_paths)
        paths = {**of_params, Role.STATE: loss.state_paths}.get(ref.role, ())
        path = paths[ref.index] if 0 <= ref.index < len(paths) else str(ref.index)
        return f"{_WORDS.get(ref.role, ref.role)} {path}"

    def _find(self, job: PlacedProgram, args: Sequence[Array]) -> tuple[str, tuple[Ref, ...]]:
        program = job.program
        given = tuple(ref for ref, arg in zip(program.inputs, args, strict=True) if self._count(arg))
        avals = [jax.ShapeDtypeStruct(arg.shape, arg.dtype) for arg in args] if program.spans else program.avals
        graph, _ = trace(program.function, *avals, env=program.env)
        read = {*variables(graph.outputs), *(var for eqn in graph.eqns for var in variables(eqn.invars))}
        own = [not program.spans and job.place.per_replica(ref) for ref in program.inputs]
        numbers = range(job.place.num_replicas if any(own) else 1)
        rows = [[on_host(arg)[k] if mine else on_host(arg) for arg, mine in zip(args, own, strict=True)] for k in numbers]
        values = [dict(zip(graph.inputs, row, strict=True)) | dict(graph.constants) for row in rows]  # as each replica has them
        for i, (eqn, name) in enumerate(zip(graph.eqns, graph.names, strict=True)):
            inputs, outputs = variables(eqn.invars), [var for var in eqn.outvars if var in read]
            if not all(map(is_named, eqn.effects)) or any(var not in values[0] for var in inputs):
                continue  # what has side effects is not called again, and what it returned is not known
            results = _alone(graph, i, outputs, [[each[var] for var in inputs] for each in values], job)
            clean = [not any(self._count(each[var]) for var in inputs) for each in values]
            if any(unlike and any(map(self._count, made)) for unlike, made in zip(clean, results, strict=True)):
                return self._made(eqn, name), given
            for each, made in zip(values, results, strict=True):
                each.update(zip(outputs, made, strict=True))
        return "", given

    def _made(self, eqn: JaxprEqn, name: str) -> str:
        module = re.sub(r"\b(transpose|jvp|vmap|checkpoint|remat)\(|\)", "", name)
        backward = "the gradient of " if "transpose(" in name else ""
        lines = user_line(eqn)
        if not lines:  # those of the loss's own equations of that kind in that module
            graph, kind = self._step.cuts[0].loss.graph, eqn.primitive.name
            pairs = zip(graph.eqns, graph.names, strict=True)
            found = [user_line(other) for other, its in pairs if other.primitive.name == kind and its == module]
            lines = ", ".join(dict.fromkeys(filter(None, found)))
        where = f" in {backward}{module}" if module else ""
        return f"the first is made by `{eqn.primitive.name}`{where}" + f" ({lines})" * bool(lines)


def _alone(graph: Graph, i: int, outputs: Sequence[Var], given: Sequence[Sequence[Leaf]], job: PlacedProgram) -> list[list[Leaf]]:
    """What an equation makes of the values of each replica; where devices exchange something in it, or divide it, on these."""
    eqn, several = graph.eqns[i], len(given) > 1
    needs = variables(eqn.invars)
    run = graph.function([i], needs, outputs)
    if not axes_named([eqn]) and not divides([eqn]):
        return [run(*values) for values in given]
    reads, writes = (tuple(Ref(Role.RESIDUAL, k, shared=not several) for k in range(len(each))) for each in (needs, outputs))
    program = Program(run, reads, writes, shapes_of(needs), spans=job.program.spans, env=job.program.env)
    together = [jnp.stack(each) if several else each[0] for each in zip(*given, strict=True)]
    made = list(map(on_host, job.place.jit(program, ())(*together)))
    return [[value[k] if several else value for value in made] for k in range(len(given))]
