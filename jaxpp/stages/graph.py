"""A traced function as a flat list of equations, and ``carve``, the one tool that takes it apart.

Problem: stages, the two halves of a pullback, and the parts of an optimizer update are all "some of the equations of a traced
function, run there, then". Idea: colour the equations; what crosses between colours follows. Mechanism: ``trace`` inlines every
``jit`` (each equation keeping the module path that Flax left in its name stack) and drops what nobody needs; ``carve`` takes one
colour an equation and returns one ``Piece`` a colour, with the values that enter and leave it. An equation whose colour is
``None`` belongs to nobody and is repeated in every piece that needs it (a mask, a position, a reshaped bias).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

__all__ = [
    "Graph",
    "Piece",
    "ancestors",
    "aval_of",
    "calls_host",
    "carve",
    "descendants",
    "inline_remat",
    "live",
    "marked",
    "trace",
    "variables",
]

_INLINED = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
_RULED = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
_REMAT = frozenset({"checkpoint", "remat", "remat2"})
_ON_HOST = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print"})

Atom = Var | Literal
Color = Any
"""What marks the equations of one piece: any hashable value."""


@dataclass(frozen=True)
class Graph:
    """A traced function, flat.

    Attributes:
        eqns: the equations, in an order in which they can run.
        names: the module path of each, such as ``GPT/h_2/attn``; empty where the model gave none.
        inputs: one variable an argument leaf.
        outputs: one variable or literal a result leaf.
        constants: arrays the function closed over, by variable.
    """

    eqns: tuple[JaxprEqn, ...]
    names: tuple[str, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Atom, ...]
    constants: Mapping[Var, Any]

    def function(self, eqns: Iterable[int], inputs: Sequence[Var], outputs: Sequence[Atom]) -> Callable[..., list[jax.Array]]:
        """The function of ``inputs`` that runs the equations numbered ``eqns`` and returns ``outputs``."""
        chosen = [self.eqns[i] for i in eqns]
        effects = frozenset().union(*(eqn.effects for eqn in chosen))
        jaxpr = _BLANK.replace(invars=list(inputs), outvars=list(outputs), eqns=chosen, effects=effects)
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, []))

    def users(self) -> dict[Var, list[int]]:
        """The equations that read each variable."""
        users: dict[Var, list[int]] = {}
        for i, eqn in enumerate(self.eqns):
            for var in variables(eqn.invars):
                users.setdefault(var, []).append(i)
        return users

    def producers(self) -> dict[Var, int]:
        """The equation that makes each variable."""
        return {var: i for i, eqn in enumerate(self.eqns) for var in eqn.outvars}


@dataclass(frozen=True)
class Piece:
    """The part of a graph that has one colour: which equations it runs, what it needs, what others need of it."""

    eqns: tuple[int, ...]
    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]


_BLANK: Jaxpr = jax.make_jaxpr(lambda: ())().jaxpr


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The atoms that are variables, each once, in order."""
    return list(dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal)))


def aval_of(atom: Atom) -> Any:
    """Shape and dtype of a variable or literal."""
    return atom.aval


def calls_host(eqns: Iterable[JaxprEqn]) -> bool:
    """Whether any of the equations, or of those inside them (of a loop, say), calls a Python function on the host."""
    for eqn in eqns:
        values = [value for given in eqn.params.values() for value in (given if isinstance(given, (tuple, list)) else (given,))]
        inner = [value.jaxpr if isinstance(value, ClosedJaxpr) else value for value in values]
        if eqn.primitive.name in _ON_HOST or any(calls_host(jaxpr.eqns) for jaxpr in inner if isinstance(jaxpr, Jaxpr)):
            return True
    return False


def trace(function: Callable[..., Any], *args: Any, opened: bool = False) -> tuple[Graph, Any]:
    """Trace ``function`` at the shapes of ``args`` (arrays or ``jax.ShapeDtypeStruct``).

    Args:
        function: what to trace.
        *args: its arguments.
        opened: whether functions with rules of their own for gradients are opened too; not where it will be differentiated.

    Returns:
        the flat graph, and the tree of result shapes.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    flat = _Flattener(constants, _INLINED | _RULED if opened else _INLINED)
    flat.add(closed.jaxpr, "")
    outputs = tuple(flat.resolve(atom) for atom in closed.jaxpr.outvars)
    graph = Graph(tuple(flat.eqns), tuple(flat.names), tuple(closed.jaxpr.invars), outputs, constants)
    return live(graph), shapes


def inline_remat(graph: Graph) -> tuple[Graph, Callable[[Callable[..., Any]], Callable[..., Any]] | None]:
    """Open up a function that is one ``jax.checkpoint``, so that it can be cut; the pieces should then be checkpointed instead.

    Returns:
        the graph, opened if it was one checkpoint; and the wrapper that checkpoints a piece in the same way, or None.
    """
    remat = [eqn for eqn in graph.eqns if eqn.primitive.name in _REMAT]
    others = [eqn for eqn in graph.eqns if eqn.primitive.name not in _REMAT | {"copy", "copy_p", "random_wrap", "concatenate"}]
    if len(remat) != 1 or others:
        return graph, None
    flat = _Flattener(dict(graph.constants), opened=_INLINED | dict.fromkeys(_REMAT, "jaxpr"))
    flat.add(_BLANK.replace(invars=list(graph.inputs), outvars=list(graph.outputs), eqns=list(graph.eqns)), "")
    opened = replace(
        graph,
        eqns=tuple(flat.eqns),
        names=tuple(flat.names),
        outputs=tuple(flat.resolve(atom) for atom in graph.outputs),
        constants=flat.constants,
    )
    policy, prevent_cse = remat[0].params["policy"], remat[0].params["prevent_cse"]
    return live(opened), lambda f: jax.checkpoint(f, policy=policy, prevent_cse=prevent_cse)


class _Flattener:
    """Copies equations into one list, opening calls, each opening with fresh variables (inner jaxprs are shared)."""

    def __init__(self, constants: dict[Var, Any], opened: Mapping[str, str] = _INLINED):
        self.eqns: list[JaxprEqn] = []
        self.names: list[str] = []
        self.constants = constants
        self._opened = opened
        self._renamed: dict[Var, Atom] = {}

    def resolve(self, atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else self._renamed.get(atom, atom)

    def add(self, jaxpr: Jaxpr, prefix: str, fresh: bool = False) -> None:
        for eqn in jaxpr.eqns:
            name = "/".join(filter(None, (prefix, str(eqn.source_info.name_stack))))
            inputs = [self.resolve(atom) for atom in eqn.invars]
            parameter = self._opened.get(eqn.primitive.name)
            if parameter not in eqn.params:
                if fresh:
                    self._renamed.update({var: Var(var.aval) for var in eqn.outvars})
                outputs: Any = [self._renamed.get(var, var) for var in eqn.outvars] if fresh else eqn.outvars
                self.eqns.append(eqn.replace(invars=inputs, outvars=list(outputs)))
                self.names.append(name)
                continue
            inner = eqn.params[parameter]
            if isinstance(inner, ClosedJaxpr):
                for var, value in zip(inner.jaxpr.constvars, inner.consts, strict=True):
                    self._renamed[var] = constant = Var(var.aval)
                    self.constants[constant] = value
                inner = inner.jaxpr
            self._renamed.update(zip(inner.invars, inputs, strict=True))
            self.add(inner, name, fresh=True)
            self._renamed.update({out: self.resolve(atom) for out, atom in zip(eqn.outvars, inner.outvars, strict=True)})


def live(graph: Graph) -> Graph:
    """The graph without the equations whose results nobody needs."""
    needed = set(variables(graph.outputs))
    keep: list[int] = []
    for i in reversed(range(len(graph.eqns))):
        eqn = graph.eqns[i]
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            keep.append(i)
            needed.update(variables(eqn.invars))
    keep.reverse()
    return replace(graph, eqns=tuple(graph.eqns[i] for i in keep), names=tuple(graph.names[i] for i in keep))


def descendants(graph: Graph, sources: Iterable[Var]) -> set[Var]:
    """``sources`` and every variable computed from one of them."""
    reached = set(sources)
    for eqn in graph.eqns:
        if not reached.isdisjoint(variables(eqn.invars)):
            reached.update(eqn.outvars)
    return reached


def ancestors(graph: Graph, results: Iterable[Var]) -> set[Var]:
    """``results`` and every variable that one of them is computed from."""
    needed = set(results)
    for eqn in reversed(graph.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(variables(eqn.invars))
    return needed


def marked(graph: Graph, marks: Mapping[Var, int]) -> dict[Var, int]:
    """The marks (bits of an integer) of all variables that each variable is computed from, its own among them; in one pass."""
    found = dict(marks)
    for eqn in graph.eqns:
        union = 0
        for atom in eqn.invars:
            if not isinstance(atom, Literal):
                union |= found.get(atom, 0)
        if union:
            found.update(dict.fromkeys(eqn.outvars, union))
    return found


def carve(graph: Graph, colors: Sequence[Color | None], homes: Mapping[Var, Color] | None = None) -> dict[Color, Piece]:
    """Split a graph into one piece a colour.

    Args:
        graph: the function.
        colors: one an equation; None is repeated in every piece that needs it.
        homes: the colour that must be able to return a variable, where no other piece asks for it (the graph's results).

    Returns:
        a piece for each colour. ``inputs`` are in order of first use; ``outputs`` are what other pieces read, in order made.
    """
    producers = graph.producers()
    wanted: dict[Color, list[Var]] = {color: [] for color in colors if color is not None}
    for var, color in (homes or {}).items():
        wanted.setdefault(color, []).append(var)
    own: dict[Color, list[int]] = {color: [] for color in wanted}
    for i, color in enumerate(colors):
        if color is not None:
            own[color].append(i)
    members = {color: _members(graph, colors, own[color], producers, vars_) for color, vars_ in wanted.items()}
    inputs = {color: _inputs(graph, eqns, wanted[color]) for color, eqns in members.items()}
    read = {var for needs in inputs.values() for var in needs}  # a piece never reads what it makes itself
    return {
        color: Piece(tuple(eqns), tuple(inputs[color]), tuple(v for i in own[color] for v in graph.eqns[i].outvars if v in read))
        for color, eqns in members.items()
    }


def _members(
    graph: Graph, colors: Sequence[Color | None], own: Iterable[int], producers: Mapping[Var, int], wanted: list[Var]
) -> list[int]:
    members = set(own)
    pending = [var for i in members for var in variables(graph.eqns[i].invars)] + wanted
    while pending:
        i = producers.get(pending.pop())
        if i is not None and colors[i] is None and i not in members:
            members.add(i)
            pending += variables(graph.eqns[i].invars)
    return sorted(members)


def _inputs(graph: Graph, eqns: Iterable[int], wanted: Iterable[Var]) -> list[Var]:
    made: set[Var] = set()
    needed: dict[Var, None] = {}
    for i in eqns:
        needed.update((var, None) for var in variables(graph.eqns[i].invars) if var not in made)
        made.update(graph.eqns[i].outvars)
    needed.update((var, None) for var in wanted if var not in made)
    return list(needed)
