"""How a loss takes its key (after the batch, by keyword, or not at all), and how it becomes positional."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxpp.errors import ArgumentError
from jaxpp.types import LossFn

_KEY_FIRST = frozenset({"key", "rng", "rngs", "rng_key", "prng_key"})  # what Haiku's functions take after the parameters
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_ORDINALS = {2: "third", 3: "fourth", 4: "fifth"}  # by how many arguments come before
_WORDS = frozenset({"key", "keys", "rng", "rngs", "prng"})


class KeyArgument(NamedTuple):
    """The argument of a loss that its key is for."""

    name: str | None = None  # what the loss calls it; None if it takes none, or does not say
    by_keyword: bool = False  # it can only be passed by name
    needed: bool = False  # the loss cannot be called without
    sure: bool = True  # whether the signature says so: one of ``*args`` does not, nor does a builtin without a signature


def key_argument(loss_fn: LossFn, before: int) -> KeyArgument:
    """How a loss takes its key: as the positional argument after ``before`` others, else by a keyword that is called like a key.

    Such keywords are ``key``, ``rngs`` and ``dropout_rng``. An argument that has a default of its own is a flag, and no key.
    """
    signature = _signature(loss_fn)
    if signature is None:
        return KeyArgument(sure=False)
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in _BY_POSITION]
    named = [p for p in parameters if p.kind == p.KEYWORD_ONLY and _is_called_so(p.name)]
    for parameter in (*positional[before : before + 1], *named):
        needed = parameter.default is parameter.empty
        if needed or parameter.default is None:
            return KeyArgument(parameter.name, parameter.kind == parameter.KEYWORD_ONLY, needed)
    if len(positional) <= before and any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return KeyArgument(sure=False)
    if len(positional) <= before and any(p.kind == p.VAR_KEYWORD for p in parameters):
        return KeyArgument("key", by_keyword=True, sure=False)
    return KeyArgument()


def _is_called_so(name: str) -> bool:
    """Whether an argument has the name of a key: ``key``, ``rngs``, ``dropout_rng``."""
    return not _WORDS.isdisjoint(name.lower().split("_"))


def in_place_of_key(loss_fn: LossFn, before: int) -> tuple[str, str] | None:
    """The rule that a loss of ``params, x, y`` breaks, which is given its key for ``y``, and what to do.

    None for a loss whose key has the name of one, is passed by name, or is not taken.

    Example:
        >>> rule, fix = in_place_of_key(lambda params, x, y: 0.0, 2)
        >>> rule
        'the third argument, y, is the key, and the one before it, x, is the whole batch'
        >>> in_place_of_key(lambda params, batch, key: 0.0, 2)
    """
    argument, signature = key_argument(loss_fn, before), _signature(loss_fn)
    if signature is None or argument.name is None or argument.by_keyword or _is_called_so(argument.name):
        return None
    names = list(signature.parameters)[: before + 1]
    rule = f"the {_ORDINALS[before]} argument, {names[-1]}, is the key, and the one before it, {names[-2]}, is the whole batch"
    return rule, _in_one_batch(loss_fn, names, before)


def _in_one_batch(loss_fn: LossFn, names: Sequence[str], before: int, key: Sequence[str] = ()) -> str:
    """How to write a loss of these arguments, the last ones parts of the batch, and perhaps a key."""
    others, parts = names[: before - 1], names[before - 1 :]
    name = getattr(loss_fn, "__name__", "loss_fn").replace("<lambda>", "loss_fn")
    own = f"def {name}({', '.join([*others, 'batch', *key])}) with {', '.join(parts)} = batch as its first line"
    return f"put {' and '.join(parts)} into one batch: write {own}, and pass ({', '.join(parts)}) as the batch"


def name_of(loss_fn: LossFn) -> str:
    """A loss as people write it: ``loss_fn(params, batch, *, key)``."""
    return f"{getattr(loss_fn, '__name__', 'loss_fn')}{_signature(loss_fn) or ''}"


def _signature(loss_fn: LossFn) -> inspect.Signature | None:
    try:
        return inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return None


def positional_key(loss_fn: Any, before: int, called: str = "loss_fn") -> Any:
    """A loss that takes its key as the argument after ``before`` others; the loss itself if it does, or takes none."""
    if not callable(loss_fn) or isinstance(loss_fn, _Loss):
        return loss_fn
    argument = key_argument(loss_fn, before)
    _check_call(loss_fn, before, argument, called)
    name = argument.name if argument.by_keyword else None
    return _Loss(loss_fn, name, before) if name or not _hashable(loss_fn) else loss_fn


def _check_call(loss_fn: LossFn, before: int, argument: KeyArgument, called: str) -> None:
    signature = _signature(loss_fn)
    if signature is None:
        return
    known = {3: "params, model_state or task_params, batch", 4: "params, task_params, model_state, batch"}
    arguments = known.get(before, "params, batch")
    rule = f"{'the loss' if called == 'loss_fn' else 'it'} is called as {called}({arguments}[, key])"
    by_position = argument.name is not None and not argument.by_keyword
    names = list(signature.parameters)[: before + 1]
    if by_position and names[-2].lower() in _KEY_FIRST and not _is_called_so(names[-1]):
        own = getattr(loss_fn, "__name__", "loss_fn").replace("<lambda>", called)
        swapped = ", ".join([*names[:-2], names[-1], names[-2]])
        fix = f"change their places, lambda {swapped}: {own}({', '.join(names)}); or, if {names[-2]} is the batch, call it so"
        raise ArgumentError(called, rule, f"{name_of(loss_fn)}, with {names[-2]} before {names[-1]}", fix)
    named = {argument.name: None} if argument.name is not None and argument.by_keyword else {}
    try:
        signature.bind(*[None] * (before + by_position), **named)
    except TypeError as error:
        needed = [p.name for p in signature.parameters.values() if p.kind in _BY_POSITION and p.default is p.empty]
        key = needed[-1:] if _is_called_so(needed[-1]) else []
        parts = needed[before - 1 : len(needed) - len(key)]
        if len(parts) > 1 and parts[0] != "batch" and not any(map(_is_called_so, parts)):
            fix = _in_one_batch(loss_fn, needed[: before - 1] + parts, before, key)
            fix += f"; bind what never changes: functools.partial({called}, name=value)"
            raise ArgumentError(called, rule, name_of(loss_fn), fix) from error
        fix = f"take these by position, def {called}({arguments}); put what changes from step to step into the batch"
        fix += f", and bind the rest: functools.partial({called}, name=value)"
        raise ArgumentError(called, rule, f"{name_of(loss_fn)}: {error}", fix) from error


def _hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@dataclass(frozen=True, eq=False)
class _Loss:
    """A loss whose key is positional, or that can be looked up: equal to another of the same function."""

    function: LossFn
    name: str | None
    before: int

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self.name is None or len(args) <= self.before:
            return self.function(*args, **named)
        return self.function(*args[: self.before], **{self.name: args[self.before]})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Loss) or (self.name, self.before) != (other.name, other.before):
            return False
        return self.function is other.function or (_hashable(self.function) and bool(self.function == other.function))

    def __hash__(self) -> int:
        return hash(self.function) if _hashable(self.function) else id(self.function)

    @property
    def __name__(self) -> str:
        return getattr(self.function, "__name__", "loss_fn")

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.function)
