"""How a loss takes its key (after the batch, by keyword, or not at all), and how it becomes positional."""

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxpp.errors import ArgumentError
from jaxpp.types import LossFn

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
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p for p in parameters if p.kind == p.KEYWORD_ONLY and _WORDS.intersection(p.name.lower().split("_"))]
    for parameter in (*positional[before : before + 1], *named):
        needed = parameter.default is parameter.empty
        if needed or parameter.default is None:
            return KeyArgument(parameter.name, parameter.kind == parameter.KEYWORD_ONLY, needed)
    if len(positional) <= before and any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return KeyArgument(sure=False)
    if len(positional) <= before and any(p.kind == p.VAR_KEYWORD for p in parameters):
        return KeyArgument("key", by_keyword=True, sure=False)
    return KeyArgument()


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
    named = {argument.name: None} if argument.name is not None and argument.by_keyword else {}
    try:
        signature.bind(*[None] * (before + (argument.name is not None and not argument.by_keyword)), **named)
    except TypeError as error:
        names = {3: "params, model_state or task_params, batch", 4: "params, task_params, model_state, batch"}
        arguments = names.get(before, "params, batch")
        rule = f"{'the loss' if called == 'loss_fn' else 'it'} is called as {called}({arguments}[, key])"
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
