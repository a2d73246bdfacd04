"""One walk over the equations of a traced function, for everything that follows values through it.

An *interpreter* has a value for each variable: what is known of it, how it is divided, or what stands for it in a copy. It takes
the equations in their order, reads the values of the operands, and makes those of the results by a table of its own (``plain``).
Equations that run functions inside them (calls, loops, branches; the form of each is in ``jaxpr.py``) are entered here, once for
all interpreters: each says which kinds it enters, and what it knows of a value that is one or the other (``either``), and of rows
of a value (``row``).
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from jax.extend.core import ClosedJaxpr, Literal

from jaxpp.stages.jaxpr import CALLS, CHECKPOINTS, CUSTOM_RULES, Cond, FunctionCall, Inner, Scan, While, inner_of
from jaxpp.types import Leaf

_V = TypeVar("_V")
_T = TypeVar("_T")
Variable = Equation = Function = Any  # JAX's variables, equations and jaxprs, or what an interpreter has in their place


class Body(NamedTuple):
    """What a function that is entered consists of."""

    inputs: Sequence[Variable]
    outputs: Sequence[Variable]
    eqns: Iterable[Equation]
    constants: Iterable[tuple[Variable, Leaf]] = ()  # each with its variable


class Interpreter(Generic[_V]):
    """Follows equations; a subclass says what its values are."""

    enters: frozenset[str] = CALLS | CHECKPOINTS | CUSTOM_RULES  # the kinds of equations whose functions are followed
    rounds = sys.maxsize  # how often a loop is followed, at most, until what it carries stays the same

    def __init__(self) -> None:
        self.values: dict[Variable, _V] = {}

    def read(self, atom: Variable) -> _V:
        """The value of a variable, or of a number in an equation."""
        return self.number(atom) if isinstance(atom, Literal) else self.values[atom]

    def walk(self, eqns: Iterable[Equation]) -> None:
        """Follow equations, in their order."""
        for eqn in eqns:
            self.step(eqn)

    def step(self, eqn: Equation) -> None:
        """Follow one equation."""
        results = self.results(eqn, list(map(self.read, eqn.invars)))
        self.values.update(zip(eqn.outvars, results, strict=True))

    def results(self, eqn: Equation, values: list[_V]) -> Sequence[_V]:
        """The values of the results of an equation, of those of its operands."""
        inner = self.inner(eqn)
        if isinstance(inner, Scan):
            return self.scanned(eqn, inner, values)
        if isinstance(inner, While):
            return self.looped(eqn, inner, values)
        if isinstance(inner, Cond):
            return self.chosen(eqn, inner, values)
        if isinstance(inner, FunctionCall):
            return self.call(inner.body, values if inner.reads is None else [values[k] for k in inner.reads])
        return self.plain(eqn, values)

    def inner(self, eqn: Equation) -> Inner | None:
        """The functions inside an equation that are followed; None if there are none."""
        return inner_of(eqn, self.enters)

    # ---------------------------------------------------------------------------------------------- what a subclass knows

    def number(self, atom: Literal) -> _V:
        """The value of a number in an equation."""
        raise NotImplementedError

    def constant(self, var: Variable, value: Leaf) -> _V:
        """The value of an array that a function closed over."""
        raise NotImplementedError

    def plain(self, eqn: Equation, values: list[_V]) -> Sequence[_V]:
        """The values of the results of an equation into which the walk does not go."""
        raise NotImplementedError

    def either(self, a: _V, b: _V) -> _V:
        """The value of what is one or the other, as after a branch or in another iteration."""
        raise NotImplementedError

    def row(self, value: _V) -> _V:
        """The value of a row of what a loop runs over; and of what it makes of such rows."""
        return value

    def unsettled(self, value: _V) -> _V:
        """The value of what a loop carries and has changed in as many rounds as there may be."""
        return value

    # ---------------------------------------------------------------------------------------- calls, loops and branches

    def opened(self, body: Function) -> Body:
        """What a function consists of."""
        closed: ClosedJaxpr = body
        jaxpr = closed.jaxpr
        return Body(jaxpr.invars, jaxpr.outvars, jaxpr.eqns, zip(jaxpr.constvars, closed.consts, strict=True))

    def call(self, body: Function, values: Sequence[_V]) -> list[_V]:
        """The values of the results of a function, of those of its arguments."""
        inputs, outputs, eqns, constants = self.opened(body)
        self.values.update((var, self.constant(var, value)) for var, value in constants)
        self.values.update(zip(inputs, values, strict=True))
        self.walk(eqns)
        return list(map(self.read, outputs))

    def scanned(self, eqn: Equation, loop: Scan, values: list[_V]) -> Sequence[_V]:  # noqa: ARG002  (a subclass may ask)
        """The values of what a ``lax.scan`` carries in the end, and of what its iterations make."""
        fixed, carry, rows = loop.split(values)
        rows = list(map(self.row, rows))

        def run(carried: list[_V]) -> list[_V]:
            return self.call(loop.body, [*fixed, *carried, *rows])

        carry = until_settled(lambda carried: run(carried)[: loop.num_carry], carry, self.either, self.rounds, self.unsettled)
        return [*carry, *map(self.row, run(carry)[loop.num_carry :])]

    def looped(self, eqn: Equation, loop: While, values: list[_V]) -> Sequence[_V]:
        """The values of what a ``lax.while_loop`` carries in the end."""
        tests, fixed, carry = loop.split(values)
        run = lambda carried: self.call(loop.body, [*fixed, *carried])  # noqa: E731
        carry = until_settled(run, carry, self.either, self.rounds, self.unsettled)
        (condition,) = self.call(loop.test, [*tests, *carry])
        return self.decided(eqn, condition, carry)

    def chosen(self, eqn: Equation, choice: Cond, values: list[_V]) -> Sequence[_V]:
        """The values of what the branches of a ``lax.cond`` or ``lax.switch`` return."""
        found, *others = (self.call(branch, values[1:]) for branch in choice.branches)
        for results in others:
            found = list(map(self.either, found, results))
        return self.decided(eqn, values[0], found)

    def decided(self, eqn: Equation, condition: _V, values: list[_V]) -> list[_V]:  # noqa: ARG002  (a subclass may ask)
        """These values where a condition has a say in which they are."""
        return values


def until_settled(
    run: Callable[[list[_T]], Sequence[_T]],
    carry: list[_T],
    either: Callable[[_T, _T], _T],
    rounds: int = sys.maxsize,
    unsettled: Callable[[_T], _T] = lambda value: value,
) -> list[_T]:
    """What a loop carries, joined by ``either`` over iterations until one leaves all as it is, or ``rounds`` are over."""
    for _ in range(rounds):
        after = list(map(either, carry, run(carry)))
        if after == carry:
            return carry
        carry = after
    return list(map(unsettled, carry))
