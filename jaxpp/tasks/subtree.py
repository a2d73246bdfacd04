"""A module's parameters in two: the parameters that all tasks share, and a subtree that each task has of its own.

``take`` cuts a subtree out of a parameter tree, ``insert`` puts a subtree in, and ``bind_subtree`` turns a loss over the whole tree
into a loss over the two parts, so that one module definition serves any number of parameter sets.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from jaxpp.errors import BankError
from jaxpp.types import LossFn, Params, Tree

__all__ = ["bind_subtree", "insert", "take"]

Path = str | Sequence[str]
"""The keys down to a subtree, such as ``"head"`` or ``"block_1/adapter"``; or several such paths."""


def take(params: Params, path: Path) -> tuple[Params, Params]:
    """Cut the subtree at ``path`` out of a parameter tree.

    Args:
        params: the whole tree; all nodes on the way to the subtree are mappings.
        path: the keys on the way; or several paths, if a task has parameters in several places.

    Returns:
        the rest, and the subtree (for several paths a dictionary of subtrees). ``insert(rest, subtree, path)`` is the whole tree.

    Raises:
        BankError: there is nothing at that path.

    Example:
        >>> take({"body": 1, "block_1": {"adapter": 2, "dense": 3}}, "block_1/adapter")
        ({'body': 1, 'block_1': {'dense': 3}}, 2)
        >>> take({"body": 1, "block_1": {"adapter": 2, "dense": 3}, "head": 4}, ["block_1/adapter", "head"])
        ({'body': 1, 'block_1': {'dense': 3}}, {'block_1/adapter': 2, 'head': 4})
    """
    subtrees: dict[str, Params] = {}
    for name in _paths(path):

        def cut(node: Tree, key: Hashable, name: str = name) -> Tree:
            subtrees[name] = node[key]
            return type(node)({other: child for other, child in node.items() if other != key})

        params = _at(params, name, cut, there=True)
    return params, subtrees[path] if isinstance(path, str) else subtrees


def insert(params: Params, task_params: Params, path: Path) -> Params:
    """A parameter tree with ``task_params`` at ``path``, in place of what is there, if anything is.

    Args:
        params: the whole tree, or the rest; it stays as it is.
        task_params: the subtree; for several paths a dictionary of subtrees.
        path: the keys on the way; or several paths. All keys but the last must be in ``params``.

    Raises:
        BankError: a key on the way is not there.

    Example:
        >>> insert({"body": 1, "block_1": {"dense": 3}}, 2, "block_1/adapter")
        {'body': 1, 'block_1': {'dense': 3, 'adapter': 2}}
    """
    subtrees = {path: task_params} if isinstance(path, str) else task_params
    for name in _paths(path):
        params = _at(params, name, lambda node, key, name=name: type(node)({**node, key: subtrees[name]}), there=False)
    return params


def bind_subtree(loss_fn: LossFn, path: Path) -> LossFn:
    """Turn a loss over a module's whole parameters into a loss over the shared parameters and a task's own.

    Args:
        loss_fn: ``loss_fn(params, batch[, key])``, over the whole tree.
        path: where the task's parameters belong in ``params``; several paths, if they belong in several places.

    Returns:
        ``loss_fn(params, task_params, batch[, key])``; what ``params`` has at the path is not read.

    Raises:
        BankError: ``path`` is not a path. When the loss is called: the parameters have no such place.

    Example:
        >>> loss_fn = bind_subtree(lambda params, batch: params["body"] * batch + params["head"], "head")
        >>> loss_fn({"body": 2.0}, 1.0, 3.0)
        7.0
    """
    for name in _paths(path):
        _keys(name)

    @functools.wraps(loss_fn)
    def bound(params: Params, task_params: Params, *rest: Tree, **named: Tree) -> Tree:
        return loss_fn(insert(params, task_params, path), *rest, **named)

    try:  # the bound loss takes one more argument than the loss that it wraps
        first, *others = inspect.signature(loss_fn).parameters.values()
        task = inspect.Parameter("task_params", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        bound.__signature__ = inspect.Signature([first, task, *others])  # pyright: ignore[reportAttributeAccessIssue]
    except (TypeError, ValueError):  # a function without a signature, or with keyword arguments alone
        pass
    return bound


def _paths(path: Path) -> Sequence[str]:
    if isinstance(path, str):
        return [path]
    if not isinstance(path, Sequence) or not path:
        fix = 'write it like "head", or ["block_0/adapter", "block_1/adapter"]'
        raise BankError(f"path={path!r}", "a path is a text, or several are a list of at least one", repr(path), fix)
    return path


def _keys(path: str) -> list[str]:
    keys = path.split("/") if isinstance(path, str) else []
    if not keys or not all(keys):
        fix = 'write it like "head" or "block_1/adapter"'
        raise BankError(f"path={path!r}", "a path is the keys down to a subtree, with slashes between them", repr(path), fix)
    return keys


def _at(tree: Tree, path: str, change: Callable[[Tree, Hashable], Tree], *, there: bool) -> Tree:
    """The tree with a change to the mapping that holds the last key; the mappings above it are rebuilt, all else stays."""
    keys = _keys(path)

    def walk(node: Tree, depth: int) -> Tree:
        word, last = keys[depth], depth == len(keys) - 1
        if not isinstance(node, Mapping):
            raise _missing(path, keys[:depth], type(node).__name__, ())
        key = int(word) if word not in node and word.isdecimal() else word
        if key not in node and (there or not last):
            raise _missing(path, keys[:depth], f"no {word!r}", difflib.get_close_matches(word, map(str, node)))
        if last:
            return change(node, key)
        return type(node)({**node, key: walk(node[key], depth + 1)})  # pyright: ignore[reportCallIssue]

    return walk(tree, 0)


def _missing(path: str, above: list[str], got: str, near: Iterable[str]) -> BankError:
    place = f"params[{'/'.join(above)}]" if above else "params"
    fix = f"one of {', '.join(map(repr, near))}, perhaps" if near else "print the parameters' keys, and name one of them"
    return BankError(f"path={path!r}", "a path leads through the parameters' mappings", f"{place} is or has {got}", fix)
