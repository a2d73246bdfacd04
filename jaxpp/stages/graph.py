"""A traced function as a flat list of equations, and ``partition``, which takes it apart.

Stages, the halves of a pullback, and the parts of an optimizer update are all some equations of a traced function, run somewhere.
``trace`` inlines every ``jit`` (equations keep their module path) and drops what nobody needs; ``partition`` takes a colour for
each equation and returns a ``Piece`` for each colour. An equation of colour None is repeated in every piece that needs it (a mask).
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from jaxpp.stages.axes import AxisEnv, RankAxes, axes_named, divides, moved, rules_in
from jaxpp.stages.fingerprint import fingerprint
from jaxpp.stages.interpreter import Interpreter
from jaxpp.stages.jaxpr import (
    CALLS,
    CHECKPOINTS,
    CUSTOM_RULES,
    Atom,
    Checkpoint,
    Cond,
    Inner,
    checkpoint_like,
    equations_of,
    function_of,
    kind_of,
    module_path,
    needed_of,
    new_variable,
    variables,
    without_refs,
)
from jaxpp.types import Tree

_Color = TypeVar("_Color", bound=Hashable)  # What marks the equations of one piece
CONDITIONS = frozenset({"cond"})  # Kinds of equations that choose between functions


@dataclass(frozen=True)
class Graph:
    """A traced function, flat."""

    eqns: tuple[JaxprEqn, ...]  # in an order in which they can run
    names: tuple[str, ...]  # the module path of each, such as ``GPT/h_2/attn``; empty where the model gave none
    inputs: tuple[Var, ...]  # one variable for each argument leaf
    outputs: tuple[Atom, ...]  # one variable or literal for each result leaf
    constants: Mapping[Var, jax.Array]  # arrays the function closed over, by variable
    env: AxisEnv = ()  # the axes that collectives among the equations may be over
    sharded: bool = False  # whether the function said itself how its values are divided among devices
    communicates: AxisEnv = ()  # the names of axes over which it has collectives between replicas

    @cached_property
    def does(self) -> Hashable:
        """Equal for graphs that do the same with inputs and constants; None if that cannot be said."""
        return fingerprint(self.eqns, [*self.inputs, *self.constants], self.outputs)

    def function(self, eqns: Iterable[int], inputs: Sequence[Var], outputs: Sequence[Atom]) -> Callable[..., list[jax.Array]]:
        """The function of ``inputs`` that runs the equations numbered ``eqns`` and returns ``outputs``."""
        return function_of([self.eqns[i] for i in eqns], inputs, outputs)

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

    eqns: tuple[int, ...] = ()
    inputs: tuple[Var, ...] = ()
    outputs: tuple[Var, ...] = ()


class Rewriter(Interpreter[Atom]):
    """Copies the equations of a graph one by one; its values are what stands for others now, where they are replaced on the way."""

    enters = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.eqns: list[JaxprEqn] = []
        self.names: list[str] = []
        self.name = ""  # the module path of what is added

    def read(self, atom: Atom) -> Atom:
        """What stands for a value now."""
        return atom if isinstance(atom, Literal) else self.values.get(atom, atom)

    def plain(self, eqn: JaxprEqn, values: list[Atom]) -> Sequence[Atom]:
        """What stands for the results of an equation: they themselves, unless a subclass says otherwise."""
        return self.emit(eqn.replace(invars=values))

    def emit(self, eqn: JaxprEqn) -> Sequence[Var]:
        """Add an equation."""
        self.eqns.append(eqn)
        self.names.append(self.name)
        return eqn.outvars

    def compute(self, function: Callable[..., Tree], args: Sequence[Atom]) -> list[Atom]:
        """Add the equations that compute ``function``, and return its results."""
        eqns, results = equations_of(function, args)
        for eqn in eqns:
            self.emit(eqn)
        return results

    def follow(self, graph: Graph) -> None:
        """Copy the equations of a graph."""
        for eqn, self.name in zip(graph.eqns, graph.names, strict=True):
            self.step(eqn)

    def graph(self, old: Graph) -> Graph:
        """The graph that is rewritten from another, without what nobody needs."""
        outputs = tuple(map(self.read, old.outputs))
        return live(replace(old, eqns=tuple(self.eqns), names=tuple(self.names), outputs=outputs))


def trace(
    function: Callable[..., Tree],
    *args: Tree,
    opened: bool = False,
    env: AxisEnv = (),
    axes: RankAxes | None = None,
    rank: RankAxes | None = None,
    differentiable: bool = False,
) -> tuple[Graph, Tree]:
    """The flat graph of ``function`` at the shapes of ``args`` (arrays or shapes), and the tree of result shapes.

    ``env``: the axes over which it may communicate. With ``axes`` it is the user's, and moved to a rank with these axes; and so are
    derivatives of its own, where it is ``differentiable``. With ``rank`` it was moved to the widest rank, and is moved to this one.
    """
    env = env if axes is None else axes.env
    made = jax.make_jaxpr(function, axis_env=env, return_shape=True)

    def of_values() -> tuple[ClosedJaxpr, Tree]:
        closed, shapes = made(*args)
        return without_refs(closed, env), shapes

    closed, shapes = of_values() if axes is None else axes.in_force(of_values)
    said = False, ()
    if axes is not None:
        rules = rules_in(closed.jaxpr, axes) if differentiable else {}
        eqns = [*closed.jaxpr.eqns, *(eqn for rule in rules.values() for eqn in rule.jaxpr.eqns)]
        said = divides(eqns), tuple(pair for pair in env if pair[0] in axes_named(eqns))
        closed = moved(closed, axes, rules)
    closed = closed if rank is None else moved(closed, rank)
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    whole = Graph((), (), tuple(closed.jaxpr.invars), tuple(closed.jaxpr.outvars), constants, env, *said)
    flat = _Flattener(constants, CALLS | CUSTOM_RULES if opened else CALLS)
    flat.walk(closed.jaxpr.eqns)
    return flat.graph(whole), shapes


def inline_remat(graph: Graph) -> tuple[Graph, Checkpoint | None]:
    """The graph, opened if it was one ``jax.checkpoint``, so that it can be cut; and what checkpoints a piece in the same way."""
    remat = [eqn for eqn in graph.eqns if kind_of(eqn) in CHECKPOINTS]
    others = {kind_of(eqn) for eqn in graph.eqns} - CHECKPOINTS - {"copy", "random_wrap", "concatenate"}
    if len(remat) != 1 or others:
        return graph, None
    return opened(graph, CHECKPOINTS), checkpoint_like(remat[0])


def opened(graph: Graph, kinds: frozenset[str]) -> Graph:
    """The graph with its equations of these kinds, and those inside them, opened."""
    constants = dict(graph.constants)
    flat = _Flattener(constants, CALLS | kinds)
    flat.walk(graph.eqns)
    return flat.graph(replace(graph, constants=constants))


class _Flattener(Rewriter):
    """Copies equations into one list, opening calls, each opening with fresh variables (inner jaxprs are shared).

    Of a condition without effects that is opened, all branches run, and one of their results is chosen.
    """

    def __init__(self, constants: dict[Var, jax.Array], opened: frozenset[str]):
        super().__init__()
        self.enters, self._constants, self._depth = opened, constants, 0

    def step(self, eqn: JaxprEqn) -> None:
        around, self.name = self.name, "/".join(filter(None, (self.name, module_path(eqn))))
        super().step(eqn)
        self.name = around

    def constant(self, var: Var, value: jax.Array) -> Var:
        constant = new_variable(var)
        self._constants[constant] = value
        return constant

    def call(self, body: ClosedJaxpr, values: Sequence[Atom]) -> list[Atom]:
        self._depth += 1
        results = super().call(body, values)
        self._depth -= 1
        return results

    def inner(self, eqn: JaxprEqn) -> Inner | None:
        return None if eqn.effects and kind_of(eqn) in CONDITIONS else super().inner(eqn)

    def chosen(self, eqn: JaxprEqn, choice: Cond, values: list[Atom]) -> list[Atom]:  # noqa: ARG002
        which, *operands = values
        cases = (self.call(branch, operands) for branch in choice.branches)
        return [self.compute(jax.lax.select_n, [which, *results])[0] for results in zip(*cases, strict=True)]

    def plain(self, eqn: JaxprEqn, values: list[Atom]) -> Sequence[Atom]:
        outputs: list[Any] = list(map(new_variable, eqn.outvars)) if self._depth else eqn.outvars
        return self.emit(eqn.replace(invars=values, outvars=outputs))


def live(graph: Graph) -> Graph:
    """The graph without the equations whose results nobody needs."""
    keep = needed_of(graph.eqns, graph.outputs, lambda eqn: bool(eqn.effects))
    return replace(graph, eqns=tuple(graph.eqns[i] for i in keep), names=tuple(graph.names[i] for i in keep))


def descendants(graph: Graph, sources: Iterable[Var], until: Callable[[JaxprEqn], bool] = lambda _: False) -> set[Var]:
    """``sources`` and every variable computed from one of them, but for what the equations at which ``until`` is true make."""
    reached = set(sources)
    for eqn in graph.eqns:
        if not reached.isdisjoint(variables(eqn.invars)) and not until(eqn):
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
    marks_of = dict(marks)
    for eqn in graph.eqns:
        union = 0
        for var in variables(eqn.invars):
            union |= marks_of.get(var, 0)
        if union:
            marks_of.update(dict.fromkeys(eqn.outvars, union))
    return marks_of


def partition(graph: Graph, colors: Sequence[_Color | None], homes: Mapping[Var, _Color] | None = None) -> dict[_Color, Piece]:
    """Split a graph into one piece for each colour; equations of colour None are repeated in every piece that needs them.

    ``homes`` says which colour returns a result that no other piece reads. A piece's ``inputs`` are in order of first use, its
    ``outputs`` in the order in which they are made.
    """
    wanted: dict[_Color, list[Var]] = {color: [] for color in colors if color is not None}
    for var, color in (homes or {}).items():
        wanted.setdefault(color, []).append(var)
    own: dict[_Color, list[int]] = {color: [] for color in wanted}
    for i, color in enumerate(colors):
        if color is not None:
            own[color].append(i)
    shared = {var: i for var, i in graph.producers().items() if colors[i] is None}
    members = {color: needed_in(graph, shared, own[color], vars_) for color, vars_ in wanted.items()}
    inputs = {color: _inputs(graph, eqns, wanted[color]) for color, eqns in members.items()}
    read = {var for needs in inputs.values() for var in needs}  # a piece never reads what it makes itself
    return {
        color: Piece(tuple(eqns), tuple(inputs[color]), tuple(v for i in own[color] for v in graph.eqns[i].outvars if v in read))
        for color, eqns in members.items()
    }


def needed_in(graph: Graph, among: Mapping[Var, int], own: Iterable[int], wanted: Iterable[Var]) -> list[int]:
    """The equations ``own``, and those ``among`` the makers given that they or the values ``wanted`` need."""
    members = set(own)
    pending = [*(var for i in members for var in variables(graph.eqns[i].invars)), *wanted]
    while pending:
        i = among.get(pending.pop())
        if i is not None and i not in members:
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
