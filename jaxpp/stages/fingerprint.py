"""What equations do, as a value: equal fingerprints, equal programs.

Lowering a program to compare its text takes most of the time that is left when nothing is compiled. ``fingerprint`` digests the
traced equations instead, which decide what is compiled. Python functions, effects and large arrays cannot be compared: no
fingerprint. The rules of custom derivatives and the policies of checkpoints are left out, because what is compiled has been
differentiated already; where it has not, they count as the objects that they are.
"""

import enum
import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import Mesh

from jaxpp.stages.jaxpr import CHECKPOINTS, CUSTOM_RULES, Atom, aval_of, called, kind_of

_LARGE = 1 << 16  # Bytes of a constant above which it is not read back from its device for a digest

_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.dtype)


@dataclass(frozen=True, eq=False)
class ComparableFunction:
    """A function that can be compared: with a value that says all it does, or what makes this value once somebody asks."""

    run: Any
    says: Hashable | Callable[[], Hashable]

    @cached_property
    def does(self) -> Hashable:
        """Equal for functions that do the same; None if that cannot be said."""
        return self.says() if callable(self.says) else self.says

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run the function."""
        return self.run(*args, **options)


class _UnknownError(Exception):
    """Something of which it cannot be said whether another is the same."""


def fingerprint(
    eqns: Sequence[JaxprEqn],
    inputs: Sequence[Var],
    outputs: Sequence[Atom],
    constants: Mapping[Var, Any] | None = None,
    *,
    differentiable: bool = False,
) -> Hashable:
    """A value that two functions have in common only if they do the same; None if that cannot be said.

    If ``differentiable``, their derivatives do the same too, for as long as the equations of both are there.
    """
    digest = _Digest(differentiable=differentiable)
    try:
        for var, value in (constants or {}).items():
            digest.define(var)
            digest.value(value)
        digest.body(eqns, inputs, outputs)
    except _UnknownError:
        return None
    return hashlib.sha256("\0".join(digest.words).encode()).digest(), tuple(digest.others)


class _Digest:
    """Writes words of everything it is shown; values that are compared as they are become numbers of a list."""

    def __init__(self, *, differentiable: bool) -> None:
        self._differentiable = differentiable
        self.words: list[str] = []
        self._numbers: dict[Var, int] = {}
        self.others: dict[Any, int] = {}

    def define(self, var: Var) -> None:
        self._numbers[var] = len(self._numbers)
        self._other(aval_of(var))

    def body(self, eqns: Sequence[JaxprEqn], inputs: Sequence[Var], outputs: Sequence[Atom]) -> None:
        for var in inputs:
            self.define(var)
        for eqn in eqns:
            self._equation(eqn)
        self.words.append("out")
        for atom in outputs:
            self._atom(atom)

    def _equation(self, eqn: JaxprEqn) -> None:
        if eqn.effects:
            raise _UnknownError
        self._other(eqn.primitive)  # not its name: the cell that defines one may be run again
        self._other(eqn.ctx)  # the settings under which it was traced, as far as they decide how it is compiled
        for atom in eqn.invars:
            self._atom(atom)
        self.words.append("to")
        for var in eqn.outvars:
            self.define(var)
        rule = called(eqn, CUSTOM_RULES)
        if self._differentiable and kind_of(eqn) in CUSTOM_RULES | CHECKPOINTS:
            self.words += [repr(value) if isinstance(value, _PLAIN) else str(id(value)) for value in eqn.params.values()]
        if rule is not None:  # its derivative has been taken, or nobody wants it
            self.value(rule)
        elif kind_of(eqn) in CHECKPOINTS:  # likewise what is to be kept for it
            self.value({name: value for name, value in eqn.params.items() if name != "policy"})
        elif kind_of(eqn) in CUSTOM_RULES:
            raise _UnknownError
        else:
            self.value(eqn.params)

    def _atom(self, atom: Atom) -> None:
        if isinstance(atom, Literal):
            self.words.append("literal")
            self._other(aval_of(atom))
            self.value(atom.val)
        elif atom in self._numbers:
            self.words.append(str(self._numbers[atom]))
        else:
            raise _UnknownError

    def value(self, value: Any) -> None:
        self.words.append(type(value).__qualname__)
        if isinstance(value, (Jaxpr, ClosedJaxpr)):  # since JAX 0.11 a closed one is its own ``jaxpr``
            for constant in getattr(value, "consts", ()):
                self.value(constant)
            if isinstance(value, Jaxpr):
                self.body(value.eqns, [*value.constvars, *value.invars], value.outvars)
            else:
                self.value(value.jaxpr)
        elif isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
            self.words.append(repr(value))
        elif isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
            self.words.append(str(len(value)))
            for item in value:
                self.value(item)
        elif isinstance(value, dict):
            self.words.append(str(len(value)))
            for name in sorted(value, key=repr):
                self.words.append(repr(name))
                self.value(value[name])
        elif isinstance(value, (np.ndarray, np.generic, jax.Array)):
            self._array(value)
        else:
            self._other(value)

    def _array(self, value: Any) -> None:
        far = isinstance(value, jax.Array) and not value.is_fully_addressable
        if far or jnp.issubdtype(value.dtype, jax.dtypes.extended) or value.nbytes > _LARGE:
            raise _UnknownError
        self.words += [str(value.dtype), str(value.shape), hashlib.sha256(np.asarray(value).tobytes()).hexdigest()]

    def _other(self, value: Any) -> None:
        if callable(value) and not isinstance(value, (enum.Enum, Mesh)):  # which can be called, and compared
            raise _UnknownError
        try:
            self.words.append(f"#{self.others.setdefault(value, len(self.others))}")
        except TypeError:  # it cannot be hashed
            raise _UnknownError from None
