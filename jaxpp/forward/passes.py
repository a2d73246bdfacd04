"""Passes: one function with a carry, run through all stages again and again on the same parameters.

Problem: to make one token takes little work, so whatever a step does beside it costs more than it does in training: a cast of all
weights to bfloat16, a tied embedding that is sent to the last stage, a cache that is copied. Idea: what depends on parameters alone
outlives the pass. Mechanism: the lines of a pass are written in two parts; the lasting part is run once for all passes of all
shapes, and the values that it makes are arguments of the other. The carry's buffers are taken over, so a cache changes in place.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Sharding

from jaxpp.engine.engine import Engine
from jaxpp.engine.outcome import aux_names
from jaxpp.errors import StateError
from jaxpp.plan.builder import CALLER, Builder, Line, Name, last_uses
from jaxpp.plan.lower import forward_actions, lower
from jaxpp.plan.plan import Plan
from jaxpp.plan.step import Leaves, Step, state_name
from jaxpp.runtime.bind import Bound, bind_lines, compile_plan
from jaxpp.runtime.execute import Observer, execute
from jaxpp.runtime.interrupts import despite_ctrl_c
from jaxpp.stages.program import Role
from jaxpp.types import Array, Aval, Batch, Home, Leaf, Tree

__all__ = ["CompiledPass", "Lasting", "LastingShapes", "Passes", "check_unstepped"]


def check_unstepped(where: str, what: str, leaves: Leaves[Array]) -> None:
    """Refuse to go on with a stream or a generation whose state a step has consumed.

    Args:
        where: what was called.
        what: "stream" or "generation".
        leaves: of the state that it was given.

    Raises:
        StateError: it has.
    """
    held = leaves.flat()
    if gone := sum(leaf.is_deleted() for leaf in held):
        rule = f"a {what} reads the state that it was given until it ends, and a step reuses the buffers of that state"
        got = f"{gone} of {len(held)} arrays were consumed by a step while the {what} was open"
        fix = f"read the {what} to its end before the step, or call step(..., donate=False)"
        raise StateError(where, rule, got, fix)


@dataclass(frozen=True)
class CompiledPass:
    """What runs for inputs of one shape.

    Attributes:
        plan: the instructions.
        bound: the lines that they were made of.
        inputs: the names of the arguments.
        outputs: the names of the results: the outputs of the function, then the new carry.
        step: what was lowered.
        lasting: for each argument that depends on parameters alone, the key of its value.
    """

    plan: Plan
    bound: Bound
    inputs: tuple[Name, ...]
    outputs: tuple[Name, ...]
    step: Step
    lasting: tuple[Hashable, ...]


class Lasting:
    """The values that depend on parameters alone, computed and sent once, and shared by the passes of all shapes.

    Args:
        leaves: the parameters, each on its owner.
    """

    def __init__(self, leaves: Leaves[Leaf]):
        self.leaves = leaves
        self.values: dict[Hashable, Leaf] = {}

    def add(self, engine: Engine, builder: Builder, wanted: Sequence[Name]) -> list[Hashable]:
        """Run the lines that make what is wanted and not there yet, and return the key of each name that is wanted."""
        params = engine.placed.names.all_params
        given: dict[Name, Leaf] = dict(zip(params, self.leaves.all_params, strict=True))
        keys: dict[Name, Hashable] = {name: name for name in params}
        for line in builder.lines:
            does = object() if line.program is None or line.program.does is None else line.program.does
            does = "send" if line.is_send else does
            inputs = tuple(keys.get(name, name) for name in line.inputs)
            keys.update((name, (does, line.stage, inputs, k)) for k, name in enumerate(line.outputs))
        given |= {name: self.values[key] for name, key in keys.items() if key in self.values}
        names = [name for name in wanted if name not in given]
        missing = Builder(constants=builder.constants)
        needed = set(names)
        for line in reversed(builder.lines):
            if not needed.isdisjoint(line.outputs):
                needed |= {name for name in line.inputs if name not in given}
                missing.lines.insert(0, line)
        if names:
            bound = bind_lines(missing, engine.placement)
            options: dict[str, Any] = {"leaves": engine.placed.shapes_by_role, "given": _shardings(engine, given)}
            options["what"] = "for what depends on parameters alone"
            plan, bound = compile_plan(bound, engine.programs, engine.preparer.groups, list(given), names, **options)
            self.values.update(zip((keys[name] for name in names), self._made(plan, bound, given, names), strict=True))
        return [keys[name] for name in wanted]

    def _made(self, plan: Plan, bound: Bound, given: Mapping[Name, Leaf], names: Sequence[Name]) -> Sequence[Leaf]:
        """What the lines make of what they are given."""
        del bound, names
        return execute(plan, list(given.values()))


class LastingShapes(Lasting):
    """The shapes of these values, which are not computed: for passes that are compiled and not run.

    A value that is known by two names, because two stages share a device, is one object.

    Args:
        leaves: the shapes of the parameters.
    """

    def __init__(self, leaves: Leaves[Aval]):
        super().__init__(leaves.fill([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves.flat()]))

    def _made(self, plan: Plan, bound: Bound, given: Mapping[Name, Leaf], names: Sequence[Name]) -> Sequence[Leaf]:
        del plan
        found: dict[Name, Leaf] = dict(given)
        for line in bound.lines:
            results = line.program.results if line.program else [found[name] for name in line.inputs]
            for name, made in zip(line.outputs, results, strict=True):
                found[name] = jax.ShapeDtypeStruct(made.shape, made.dtype, sharding=bound.chosen.get(name))
        return [found[bound.resolve(name)] for name in names]


class Passes:
    """Runs ``fn(params, carry, batch) -> (carry, outputs)`` through the stages, once at each call.

    Args:
        engine: of the function (``Functions.engine``).
        lasting: of the parameters.
    """

    def __init__(self, engine: Engine, lasting: Lasting):
        self.engine, self._lasting = engine, lasting
        self._known: dict[Hashable, tuple[CompiledPass, list[Leaf]]] = {}

    @property
    def carry_homes(self) -> Sequence[Home]:
        """Where each leaf of the carry lives."""
        return self.engine.placed.homes.model_state

    @property
    def carry_stages(self) -> Sequence[int]:
        """The stage of each leaf of the carry."""
        return self.engine.layout.state_owner

    def prepare(self, batch: Batch) -> tuple[CompiledPass, list[Leaf]]:
        """What runs for inputs of these shapes, compiled at the first call, and its first arguments."""
        leaves, tree = jax.tree.flatten(batch)
        name = tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = despite_ctrl_c(self._make, batch)
        return found

    def __call__(self, carry: Sequence[Array], batch: Batch, observer: Observer | None = None) -> tuple[list[Array], Tree]:
        """Run one pass; the carry is consumed. Returns the new carry and the outputs, and waits for nothing."""
        try:
            made, first = self.prepare(batch)
            results = execute(made.plan, [*first, *carry, *jax.tree.leaves(batch)], observer)
        except Exception:
            check_unstepped("next(generation)", "generation", self._lasting.leaves)
            raise
        split = len(results) - len(carry)
        return results[split:], made.step.cuts[0].loss.aux_tree.unflatten(results[:split])

    def _make(self, batch: Batch) -> tuple[CompiledPass, list[Leaf]]:
        engine, lasting = self.engine, Builder()
        step = engine.preparer.step(batch, None, train=False)
        builder = lower(step, forward_actions(step.num_stages, 1), lasting)
        carry = list(engine.placed.names.model_state)
        new = [state_name(name.stage, leaf, 1) for leaf, name in enumerate(carry)]
        outputs = (*aux_names(step), *new)
        builder.lines[:] = _in_place(builder.lines, set(carry), set(outputs))
        made = {name for line in lasting.lines for name in line.outputs}
        wanted = [name for name in dict.fromkeys(name for line in builder.lines for name in line.inputs) if name in made]
        params = engine.placed.names.all_params
        inputs = (*params, *wanted, *carry, *(Name(CALLER, step.batch_ref(k)) for k in range(len(step.batch))))
        keys = self._lasting.add(engine, lasting, wanted)
        values = [self._lasting.values[key] for key in keys]
        options: dict[str, Any] = {"leaves": engine.placed.shapes_by_role}
        options["given"] = _shardings(engine, dict(zip(wanted, values, strict=True)))
        options["what"] = f"for a pass of {', '.join(str(tuple(leaf.shape)) for leaf in jax.tree.leaves(batch))}"
        bound = bind_lines(builder, engine.placement)
        plan, bound = compile_plan(bound, engine.programs, engine.preparer.groups, inputs, outputs, **options)
        first = [*self._lasting.leaves.all_params, *values]
        return CompiledPass(plan, bound, inputs, outputs, step, tuple(keys)), first


def _shardings(engine: Engine, values: Mapping[Name, Leaf]) -> dict[Name, Sharding]:
    """How the values are sharded that the compiler has sharded as it likes."""
    return {name: value.sharding for name, value in values.items() if engine.placement[name.stage].is_free(name.ref)}


def _in_place(lines: Sequence[Line], carry: set[Name], kept: set[Name]) -> list[Line]:
    """The lines, of which the last reader of each leaf of the carry takes over its buffer, unless the leaf stays as it is."""
    last = last_uses(lines)
    found = []
    for number, line in enumerate(lines):
        taken = [k for k, name in enumerate(line.inputs) if name in carry and last[name] == number and name not in kept]
        new = line.program is not None and any(name.ref.role == Role.STATE for name in line.outputs)
        found.append(dataclasses.replace(line, donated=(*line.donated, *taken)) if taken and new else line)
    return found
