"""A module's parameters in two: what all tasks share, and the part that each task has its own of.

``take`` cuts a subtree out of a parameter tree, ``insert`` puts one in, and ``bind`` makes a loss over the two of a loss over the
whole, so that one module definition serves any number of parameter sets.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from jaxpp.errors import BankError
from jaxpp.types import LossFn, Params

__all__ = ["bind", "insert", "take"]


Path = str | Sequence[str]
"""The keys down to a subtree, such as ``"head"`` or ``"block_1/adapter"``; or several of these."""


def take(params: Params, path: Path) -> tuple[Params, Params]:
    """Cut the subtree at ``path`` out of a parameter tree.

    Args:
        params: the whole, of mappings down to the subtree.
        path: the keys on the way; or several paths, for a task whose parameters are in several places.

    Returns:
        the rest, and the subtree (for several paths a dictionary of them); ``insert(rest, subtree, path)`` is the whole again.

    Raises:
        BankError: there is nothing at that path.

    Example:
        >>> take({"body": 1, "block_1": {"adapter": 2, "dense": 3}}, "block_1/adapter")
        ({'body': 1, 'block_1': {'dense': 3}}, 2)
        >>> take({"body": 1, "block_1": {"adapter": 2, "dense": 3}, "head": 4}, ["block_1/adapter", "head"])
        ({'body': 1, 'block_1': {'dense': 3}}, {'block_1/adapter': 2, 'head': 4})
    """
    if not isinstance(path, str):
        subtrees = {}
        for one in _paths(path):
            params, subtrees[one] = take(params, one)
        return params, subtrees
    found: list[Params] = []

    def cut(node: Any, key: Hashable) -> Any:
        found.append(node[key])
        return type(node)({name: child for name, child in node.items() if name != key})

    return _at(params, path, cut, there=True), found[0]


def insert(params: Params, task_params: Params, path: Path) -> Params:
    """A parameter tree with ``task_params`` at ``path``, in place of what is there, if anything is.

    Args:
        params: the whole, or the whole without that subtree; it stays as it is.
        task_params: the subtree; for several paths a dictionary of them.
        path: the keys on the way, all but the last of which must be there; or several paths.

    Raises:
        BankError: they are not.

    Example:
        >>> insert({"body": 1, "block_1": {"dense": 3}}, 2, "block_1/adapter")
        {'body': 1, 'block_1': {'dense': 3, 'adapter': 2}}
    """
    if not isinstance(path, str):
        for one in _paths(path):
            params = insert(params, task_params[one], one)
        return params
    return _at(params, path, lambda node, key: type(node)({**node, key: task_params}), there=False)


def bind(loss_fn: LossFn, path: Path) -> Callable[..., Any]:
    """A loss over shared parameters and a task's own, of a loss over one module's whole parameters.

    Args:
        loss_fn: ``loss_fn(params, batch[, key])``, over the whole.
        path: where the task's parameters belong in ``params``; several paths for parameters in several places.

    Returns:
        ``loss_fn(params, task_params, batch[, key])``; whatever ``params`` has at the path is not read.

    Raises:
        BankError: ``path`` is no path; when the loss is called, that the parameters have no such place.

    Example:
        >>> loss_fn = bind(lambda params, batch: params["body"] * batch + params["head"], "head")
        >>> loss_fn({"body": 2.0}, 1.0, 3.0)
        7.0
    """
    for one in [path] if isinstance(path, str) else _paths(path):
        _keys(one)

    @functools.wraps(loss_fn)
    def bound(params: Params, task_params: Params, *rest: Any, **named: Any) -> Any:
        return loss_fn(insert(params, task_params, path), *rest, **named)

    try:  # it takes one argument more than the loss that it wraps
        first, *others = inspect.signature(loss_fn).parameters.values()
        task = inspect.Parameter("task_params", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        bound.__signature__ = inspect.Signature([first, task, *others])  # pyright: ignore[reportAttributeAccessIssue]
    except (TypeError, ValueError):  # a function that does not say, or one of keywords alone
        pass
    return bound


def _paths(paths: Any) -> Sequence[str]:
    if not isinstance(paths, Sequence) or not paths:
        fix = 'write it like "head", or ["block_0/adapter", "block_1/adapter"]'
        raise BankError(f"path={paths!r}", "a path is a text, or several are a list of at least one", repr(paths), fix)
    return paths


def _keys(path: str) -> list[str]:
    keys = path.split("/") if isinstance(path, str) else []
    if not keys or not all(keys):
        fix = 'write it like "head" or "block_1/adapter"'
        raise BankError(f"path={path!r}", "a path is the keys down to a subtree, with slashes between them", repr(path), fix)
    return keys


def _at(tree: Any, path: str, change: Callable[[Any, Hashable], Any], *, there: bool) -> Any:
    """The tree with the mapping that holds the last key changed, those above it rebuilt, and all else as it is."""
    keys = _keys(path)

    def walk(node: Any, depth: int) -> Any:
        last = depth == len(keys) - 1
        if not isinstance(node, Mapping):
            raise _missing(path, keys[:depth], type(node).__name__, ())
        key = int(keys[depth]) if keys[depth] not in node and keys[depth].isdecimal() else keys[depth]
        if key not in node and (there or not last):
            raise _missing(path, keys[:depth], f"no {keys[depth]!r}", difflib.get_close_matches(keys[depth], map(str, node)))
        if last:
            return change(node, key)
        return type(node)({**node, key: walk(node[key], depth + 1)})  # pyright: ignore[reportCallIssue]

    return walk(tree, 0)


def _missing(path: str, above: list[str], got: str, near: Any) -> BankError:
    place = f"params[{'/'.join(above)}]" if above else "params"
    fix = f"one of {', '.join(map(repr, near))}, perhaps" if near else "print the parameters' keys, and name one of them"
    return BankError(f"path={path!r}", "a path leads through the parameters' mappings", f"{place} is or has {got}", fix)
