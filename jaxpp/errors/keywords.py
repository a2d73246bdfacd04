"""Keyword arguments that a public function does not have: the names near them."""

import difflib
from collections.abc import Iterable, Mapping

from jaxpp.errors import ArgumentError, shown

__all__ = ["unknown_keywords"]


def unknown_keywords(where: str, given: Mapping[str, object], known: Iterable[str]) -> ArgumentError:
    """The error for arguments ``given`` by names that are not ``known``; says which known names are near.

    Example:
        >>> print(unknown_keywords("Pipeline(...)", {"stages": 4}, ["num_stages", "schedule"]))
        Pipeline(...): an argument is passed by a name that the function has.
          Got: stages=4.
          Fix: write num_stages=4.
    """
    names = list(known)
    near = {name: difflib.get_close_matches(name, names, n=1) for name in given}
    fixes = [f"write {near[name][0]}={shown(value)}" for name, value in given.items() if near[name]]
    if others := [name for name in given if not near[name]]:
        fixes.append(f"leave {', '.join(others)} out; the names are {', '.join(names) or 'none'}")
    got = [f"{name}={shown(value)}" for name, value in given.items()]
    return ArgumentError(where, "an argument is passed by a name that the function has", got, "; ".join(fixes))
