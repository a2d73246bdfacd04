"""Cuts by name: where the user says that stages begin, by module path or parameter prefix."""

import difflib
import re
from collections.abc import Sequence

from jaxpp.errors import CutError
from jaxpp.stages.cuts.balance import Cuts
from jaxpp.stages.jaxpr import aval_of
from jaxpp.stages.loops.split_scan import same_layer
from jaxpp.stages.loss.traced_loss import STATE_RULE, TracedLoss

__all__ = ["resolve"]


def resolve(loss: TracedLoss, names: Sequence[str]) -> Cuts:
    """Cut where the user says: stage k + 1 begins at the module, or the first use of the parameters, called ``names[k]``.

    ``w[3]`` is a layer of a loop, or the first use of row 3 of the parameter ``w`` (or of all parameters under that path).

    Raises:
        CutError: a name that is neither, or names out of order.
    """
    where = f"cuts={list(names)!r}"
    places = [_place(loss, name) for name in names]
    unknown = [name for name, place in zip(names, places, strict=True) if place is None]
    if unknown:
        known = _known_names(loss)
        near = [match for name in unknown for match in difflib.get_close_matches(str(name), known, n=1)]
        error = CutError(
            where,
            "a cut names a module path or a parameter prefix of the model",
            [repr(name) for name in unknown],
            f"write {near[0]!r}" if near else "use one of the names below",
            "names: " + ", ".join(known),
        )
        error.unknown = tuple(unknown)
        raise error
    cuts = tuple(place for place in places if place is not None)
    if list(cuts) != sorted(set(cuts)) or cuts[:1] == (0,) or cuts[-1:] == (len(loss.spine),):
        raise CutError(
            where,
            "cuts stand in the order in which the model runs, each after the start and before the end",
            [f"{name!r} begins at equation {cut} of {len(loss.spine)}" for name, cut in zip(names, cuts, strict=True)],
            "list the names in the order the model runs them, each once, without the first module",
        )
    barred = loss.barred
    divided = [f"{name!r} divides model_state {barred[cut]}" for name, cut in zip(names, cuts, strict=True) if cut in barred]
    if divided:
        raise CutError(where, STATE_RULE, divided, "begin the stage before or after the module that updates this state")
    return cuts


def _components(name: str) -> str:
    return f"/{same_layer(name).strip('/')}/"


def _place(loss: TracedLoss, name: str) -> int | None:
    wanted = _components(str(name))
    for k, i in enumerate(loss.spine):
        if wanted in _components(loss.graph.names[i]):
            return k
    each = enumerate(zip(loss.param_paths, loss.own_paths, strict=True))
    leaves = {leaf for leaf, paths in each if any(_components(path).startswith(wanted) for path in paths)}
    for k, uses in enumerate(loss.param_uses):
        if uses & leaves:
            return _retreat(loss, k)
    found = re.fullmatch(r"(.+)\[(\d+)\]", str(name))
    position = _first_use_of_row(loss, _components(found[1]), int(found[2])) if found else None
    return None if position is None else _retreat(loss, position)


def _first_use_of_row(loss: TracedLoss, wanted: str, row: int) -> int | None:
    """Where a row is first read, of the parameters with a path that begins so; not with all others, unless it only is so."""
    found: list[tuple[bool, int]] = []
    for leaf, (path, first) in enumerate(loss.stacks):
        length = sum(aval_of(loss.params[leaf]).shape[:1])
        if _components(path).startswith(wanted) and 0 <= row - first < length:
            is_slice = loss.param_paths[leaf] != path
            reads = (read for read in loss.reads if read.leaf == leaf and read.start <= row - first < read.stop)
            found += [(not is_slice and read.stop - read.start == length, read.position) for read in reads]
            found += [(False, k) for k, uses in enumerate(loss.param_uses) if is_slice and leaf in uses]
    return min(found, default=(False, None))[1]


def _retreat(loss: TracedLoss, position: int) -> int:
    """From the first use of a parameter back to where least crosses, not before the last use of an earlier one."""
    low = max((k + 1 for k in range(position) if loss.param_uses[k]), default=0)
    return min(range(position, low - 1, -1), key=lambda k: loss.boundary_bytes[k])


def _known_names(loss: TracedLoss) -> list[str]:
    if tuple(loss.graph.names[i] for i in loss.spine) != loss.modules:
        return [name.replace(".", "/") for name in dict.fromkeys(loss.modules) if name]
    modules = dict.fromkeys(loss.graph.names[i] for i in loss.spine)
    depth_two = dict.fromkeys("/".join(name.split("/")[1:2]) for name in modules)
    tops = dict.fromkeys(path.split("/")[0] for path in loss.own_paths)
    return [name for name in dict.fromkeys([*depth_two, *tops]) if name]
