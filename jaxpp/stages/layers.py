"""Parameters stacked over layers, cut between two layers: loops over them, and rows of them read one by one.

*Loops*: each layer of a ``lax.scan`` becomes an equation, and the cuts say which rows each stage owns (``slices_between``). From
then on the parameters come as slices, and the loop is split where these end (``split_scans``), casts of all weights before each
loop, so that not every microbatch keeps them. *Rows*: a Python loop may read ``w[3]`` or ``w[2:4]``. The stage that reads rows
first owns them (``first_reads``, ``rows_between``); from then on they are read of the slice that has them (``place_rows``).

An iteration may read several rows: those of ``w[:8].reshape(4, 2, -1)``, such as the words of a slice of a vocabulary. An embedding
that is held as slices, because a loop reads it too, asks each slice for the rows that it has.
"""

import bisect
import itertools
import operator
import posixpath
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from jaxpp.stages.axes import AxisEnv
from jaxpp.stages.floating import is_quantised
from jaxpp.stages.graph import Graph, Rewriter
from jaxpp.stages.jaxpr import (
    CHEAP,
    ELEMENTWISE,
    Atom,
    Concatenation,
    Lookup,
    Scan,
    aval_of,
    concatenated_rows,
    concatenation_of,
    equations_at,
    function_of,
    grouped_rows,
    is_by_row,
    is_cast,
    kind_of,
    length_of,
    lookup_of,
    module_path,
    new_variable,
    order_of,
    scan_of,
    sliced_like,
    split_rows,
    variables,
    varying_shapes,
    window_of,
    without_sharding,
)
from jaxpp.types import Tree


class RowSpan(NamedTuple):
    """Consecutive rows of a parameter, or of a model state leaf."""

    leaf: Atom
    start: int
    stop: int
    axis: int = 0  # along which the rows lie


@dataclass(frozen=True)
class Layers:
    """Some layers of a loop, as an equation of their own."""

    result: Var  # what the equation makes first
    loop: int  # the number of the loop
    rows: tuple[RowSpan, ...]  # what it reads


def split_scans(
    graph: Graph, params: Sequence[Var], state: Sequence[Var] = (), *, per_layer: bool = False
) -> tuple[Graph, tuple[Layers, ...]]:
    """The graph with the loops over stacked parameters, or stacked model state leaves, split; and what they were split into."""
    splitter = _Splitter(frozenset(params), frozenset(state), per_layer, graph.env)
    splitter.follow(graph)
    return splitter.graph(graph), tuple(splitter.layers)


def slices_between(params: Sequence[Var], layers: Sequence[Layers], stages: Sequence[int | None]) -> tuple[tuple[int, ...], ...]:
    """The rows of each slice of each parameter; empty for a parameter that is not sliced."""
    ends: dict[Atom, set[int]] = {}
    axes: dict[Atom, int] = dict(zip(params, stacked_axes(params, layers), strict=True))
    for before, after, stage, following in zip(layers, layers[1:], stages, stages[1:], strict=False):
        if stage != following and before.loop == after.loop:
            for rows, others in zip(before.rows, after.rows, strict=True):
                if rows.axis == axes.get(rows.leaf):
                    ends.setdefault(rows.leaf, set()).add(max(rows.start, others.start))
    extents: dict[tuple[int, Atom], list[int]] = {}
    for each in layers:
        for rows in each.rows:
            if rows.axis == axes.get(rows.leaf):
                extents.setdefault((each.loop, rows.leaf), []).extend((rows.start, rows.stop))
    for (_, var), rows in extents.items():  # what the loop does not read is apart
        if var in ends:
            ends[var].update({min(rows), max(rows)} - {0, aval_of(var).shape[axes[var]]})
    cuts = {var: [0, *sorted(starts), aval_of(var).shape[axes.get(var, 0)]] for var, starts in ends.items()}
    return tuple(tuple(b - a for a, b in itertools.pairwise(cuts.get(var, ()))) for var in params)


def stacked_axes(params: Sequence[Var], layers: Sequence[Layers]) -> tuple[int, ...]:
    """The axis of each parameter along which layers read its rows: of several, the first."""
    axes: dict[Atom, int] = {}
    for rows in itertools.chain.from_iterable(each.rows for each in layers):
        axes[rows.leaf] = min(axes.get(rows.leaf, rows.axis), rows.axis)
    return tuple(axes.get(var, 0) for var in params)


class _View(NamedTuple):
    """Rows of a parameter from its row ``first`` on, each of which has ``size`` rows of the parameter."""

    leaf: Atom
    first: int = 0
    size: int = 1
    axis: int = 0  # of the parameter, along which its rows lie; they lie along the first axis of the view


class _Splitter(Rewriter):
    def __init__(self, params: frozenset[Var], state: frozenset[Var], per_layer: bool, env: AxisEnv):
        super().__init__()
        self._env = env
        self.layers: list[Layers] = []
        self._state, self._per_layer = set[Atom](state), per_layer
        self._views = {var: _View(var) for var in params | state}
        self._orders: dict[Atom, tuple[int, ...]] = {var: tuple(range(len(aval_of(var).shape))) for var in params}
        self._divided: dict[Atom, Concatenation] = {}  # along another axis than the first, from slices of parameters
        self._loops = 0
        self._parts: dict[Atom, list[tuple[int, Atom]]] = {}
        self._casts: dict[Atom, JaxprEqn] = {}
        self._made: dict[Atom, list[tuple[int, Atom]]] = {}
        self._slices: dict[tuple[Atom, int], JaxprEqn] = {}  # by what they take, and how many rows of it

    def plain(self, eqn: JaxprEqn, values: list[Atom]) -> Sequence[Atom]:
        eqn = eqn.replace(invars=values)
        joined = concatenated_rows(eqn)
        if joined and self._views.keys() >= set(joined):
            starts = itertools.accumulate((aval_of(atom).shape[0] for atom in joined[:-1]), initial=0)
            self._parts[eqn.outvars[0]] = list(zip(starts, joined, strict=True))
            self._state.update(eqn.outvars if self._state.issuperset(joined) else ())
        view = self._view(eqn)
        if view is not None:
            self._views[eqn.outvars[0]] = view
        self._turn(eqn)
        if kind_of(eqn) == "slice" and eqn.invars[0] in self._made and _first_row(eqn) is not None:  # rows of what was made of each
            start, stop = (eqn.params[name][0] for name in ("start_indices", "limit_indices"))
            return [self._rows(eqn.invars[0], start, stop)]
        if is_by_row(eqn) and self._is_stacked(eqn.invars[0]):
            self._casts[eqn.outvars[0]] = eqn
        loop = scan_of(eqn) if eqn.outvars else None
        return self.emit(eqn) if loop is None or not self._stacked(eqn, loop) else self._split(eqn, loop)

    def _view(self, eqn: JaxprEqn) -> "_View | None":
        """What the result of an equation is of a parameter: rows of it as they are, cast, or put together."""
        atom = eqn.invars[0] if eqn.invars else None
        if not isinstance(atom, Var) or atom not in self._views or atom in self._state:
            return None
        leaf, first, size, axis = self._views[atom]
        start, grouped, order = _first_row(eqn), grouped_rows(eqn), order_of(eqn)
        if start is not None and not axis:
            return _View(leaf, first + size * start, size)
        if order and order[0] and atom in self._orders:  # the rows are others
            return _View(leaf, axis=self._orders[atom][order[0]])
        return _View(leaf, first, size * (grouped or 1), axis) if (grouped and not axis) or is_by_row(eqn) else None

    def _turn(self, eqn: JaxprEqn) -> None:
        """Follow the axes of whole parameters, and of what is put together from slices of parameters along a later axis."""
        atom, order = eqn.invars[0] if eqn.invars else None, order_of(eqn)
        if isinstance(atom, Literal) or (order is None and not is_by_row(eqn)):
            parts = concatenation_of(eqn)
            if parts is not None and parts.axis and self._orders.keys() >= set(parts.parts):
                self._divided[eqn.outvars[0]] = parts
            return
        (out,) = eqn.outvars
        if atom in self._orders and atom is not None:
            axes = self._orders[atom]
            self._orders[out] = axes if order is None else tuple(axes[axis] for axis in order)
        if atom not in self._divided or atom is None:
            return
        axis, parts = self._divided[atom]
        at = axis if order is None else order.index(axis)
        made = []
        for part in parts:
            count = aval_of(part).shape[axis]
            shape = aval_of(out).shape
            new = new_variable(out, (*shape[:at], count, *shape[at + 1 :]))
            self.emit(without_sharding(eqn, at).replace(invars=[part], outvars=[new]))
            made.append(new)
        if at:
            self._divided[out] = Concatenation(at, tuple(made))
        else:
            starts = itertools.accumulate((aval_of(part).shape[0] for part in made[:-1]), initial=0)
            self._parts[out] = list(zip(starts, made, strict=True))

    def _stacked(self, eqn: JaxprEqn, loop: Scan) -> tuple[Var, ...]:
        return tuple(var for var in variables(eqn.invars[loop.num_before :]) if self._is_stacked(var))

    def _is_stacked(self, atom: Atom) -> bool:
        """Whether a value is a parameter, or rows of it, or put together from slices of it, or a cast of these."""
        if isinstance(atom, Literal):
            return False
        origin = self._origin(atom)
        return bool(aval_of(atom).shape) and (origin in self._views or origin in self._parts)

    def _origin(self, atom: Atom) -> Atom:
        while atom in self._casts:
            atom = self._casts[atom].invars[0]
        return atom

    def _split(self, eqn: JaxprEqn, loop: Scan) -> list[Atom]:
        stacked = self._stacked(eqn, loop)
        ends = {start for var in stacked for start, _ in self._parts.get(self._origin(var), [])}
        ends = set(range(loop.length)) if self._per_layer else ends
        spans = list(itertools.pairwise(sorted(ends | {0, loop.length})))
        consts, carry, whole = loop.split(eqn.invars)
        name = self.name
        pieces: dict[int, list[Atom]] = {}
        traced: dict[Hashable, ClosedJaxpr] = {}  # by shapes: most layers differ only in their rows
        inner = list(filter(None, map(module_path, loop.body.jaxpr.eqns)))  # what they share names the loop
        label, *inside = (posixpath.commonpath(inner or [""]) or "scan").split("/")
        for start, stop in reversed(spans) if loop.reverse else spans:
            rows = f"{label}[{start}:{stop}]" if stop - start > 1 else f"{label}[{start}]"
            self.name = "/".join(filter(None, (name, rows, *inside) if len(spans) > 1 else (name,)))
            inputs = [self._rows(atom, start, stop) if len(spans) > 1 else atom for atom in whole]
            is_param = [self._is_stacked(atom) and self._origin(atom) not in self._state for atom in whole]
            atoms = [*consts, *carry, *inputs]
            shapes = varying_shapes(atoms)
            if (like := (stop - start, *is_param, *shapes)) not in traced:
                traced[like] = _over(loop, shapes, is_param, stop - start, self._env)
            eqns, results = equations_at(traced[like], atoms)
            for made in eqns:
                self.emit(made)
            carry, pieces[start] = results[: loop.num_carry], results[loop.num_carry :]
            result = next(made.outvars[0] for made in reversed(eqns) if length_of(made) is not None)
            if len(spans) > 1:
                views = [self._views[atom] for atom in map(self._origin, stacked) if atom in self._views]
                read = tuple(RowSpan(leaf, first + size * start, first + size * stop, axis) for leaf, first, size, axis in views)
                self.layers.append(Layers(result, self._loops, read))
        self._loops += 1
        self.name = name
        columns = [[(start, pieces[start][k]) for start, _ in spans] for k in range(len(eqn.outvars) - loop.num_carry)]
        whole = [_joined(self, [piece for _, piece in column]) for column in columns]
        self._made.update(zip(whole, columns, strict=True))
        return [*carry, *whole]

    def _rows(self, atom: Atom, start: int, stop: int) -> Atom:
        """Rows of a stacked operand: the slices that hold them, if there are such slices, else cut out of the whole."""
        cast = self._casts.get(atom)
        if cast is not None:
            rows = self._rows(cast.invars[0], start, stop)
            out = new_variable(atom, (stop - start, *aval_of(atom).shape[1:]))
            self.emit(without_sharding(cast, 0).replace(invars=[rows], outvars=[out]))
            return out
        parts = [] if isinstance(atom, Literal) else self._parts.get(atom, self._made.get(atom, []))
        inside = [part for first, part in parts if start <= first and first + aval_of(part).shape[0] <= stop]
        if sum(aval_of(part).shape[0] for part in inside) < stop - start:
            return self._sliced(atom, start, stop)
        return _joined(self, inside)

    def _sliced(self, whole: Atom, start: int, stop: int) -> Atom:
        like = self._slices.get((whole, stop - start))
        made = sliced_like(like, whole, start, stop) if like is not None else None
        if made is not None:
            return self.emit(made)[0]
        (rows,) = self.compute(lambda whole: jax.lax.slice_in_dim(whole, start, stop), [whole])
        self._slices[whole, stop - start] = self.eqns[-1]
        return rows


def _first_row(eqn: JaxprEqn) -> int | None:
    """The first of the whole rows that an equation takes of its operand; None for any other equation."""
    window = window_of(eqn, lambda _: None) if kind_of(eqn) == "slice" else None
    if window is None:
        return None
    shape = aval_of(eqn.invars[0]).shape
    whole = (window.start[0], *[0] * (len(shape) - 1)), (window.stop[0], *shape[1:]), (1,) * len(shape)
    return window.start[0] if window[:3] == whole else None


def _joined(rewriter: Rewriter, parts: Sequence[Atom]) -> Atom:
    return parts[0] if len(parts) == 1 else rewriter.compute(lambda *parts: jax.lax.concatenate(parts, 0), parts)[0]


def _over(loop: Scan, shapes: Sequence[jax.ShapeDtypeStruct], is_param: Sequence[bool], length: int, env: AxisEnv) -> ClosedJaxpr:
    """What runs a loop over other rows, casts of parameters before it, and returns the carry and the outputs."""
    moved, rest = _hoisted(loop, is_param)

    def run(*args: jax.Array) -> list[jax.Array]:
        consts, carry, rows = args[: loop.num_fixed], list(args[loop.num_fixed : loop.num_before]), args[loop.num_before :]
        early = jax.vmap(moved)(*itertools.compress(rows, is_param)) if moved else []

        def step(carry: list[jax.Array], row: tuple[list[jax.Array], ...]) -> tuple[list[jax.Array], list[jax.Array]]:
            results = rest(*consts, *carry, *row[0], *row[1])
            return results[: loop.num_carry], results[loop.num_carry :]

        options = {"length": length, "reverse": loop.reverse, "unroll": loop.unroll}
        carry, outputs = jax.lax.scan(step, carry, (list(rows), list(early)), **options)
        return [*carry, *outputs]

    return jax.make_jaxpr(run, axis_env=env)(*shapes)


def _hoisted(loop: Scan, is_param: Sequence[bool]) -> tuple[Callable[..., Tree] | None, Callable[..., list[jax.Array]]]:
    """What the body makes of rows of parameters by cheap operations, same bits for all layers at once; and the rest of it.

    What it makes of quantised rows stays inside, so that those of one layer at a time are there in a floating type.
    """
    inner = loop.body.jaxpr
    rows = list(itertools.compress(inner.invars[loop.num_before :], is_param))
    of_params, moved = {var for var in rows if not is_quantised(aval_of(var))}, []
    for eqn in inner.eqns:
        operands = variables(eqn.invars)
        if kind_of(eqn) in CHEAP and operands and of_params.issuperset(operands) and not eqn.effects:
            moved.append(eqn)
            of_params.update(eqn.outvars)
    if not any(map(is_cast, moved)):
        return None, jaxpr_as_fun(loop.body)
    rest = [eqn for eqn in inner.eqns if not any(eqn is other for other in moved)]
    made = {var for eqn in moved for var in eqn.outvars}
    read = variables([*(atom for eqn in rest for atom in eqn.invars), *inner.outvars])
    needed = [var for var in read if var in made]
    return function_of(moved, rows, needed), function_of(rest, [*inner.invars, *needed], inner.outvars)


class Read(NamedTuple):
    """Rows of a parameter, and the first use of them."""

    leaf: int
    start: int
    stop: int
    position: int  # where on the spine they are first needed


class _RowSlice(NamedTuple):
    """Rows that an equation takes of its first operand, and what it makes of them; None if these rows are its result."""

    start: int
    stop: int
    finish: Callable[[jax.Array], jax.Array] | None = None


def first_reads(graph: Graph, params: Sequence[Var], spine: Sequence[int]) -> tuple[Read, ...]:
    """Where the rows of each parameter that is read by rows anywhere are first needed; all of them where it is read whole."""
    numbers = _Integers()
    views = {var: (leaf, 0, 1) for leaf, var in enumerate(params) if aval_of(var).shape}  # a leaf, its first row, rows a row
    views_of = [(var, leaf, 0, aval_of(var).shape[0]) for var, (leaf, _, _) in views.items()]
    passing: set[int] = set()
    for i, eqn in enumerate(graph.eqns):
        numbers.add(eqn)
        operand = _operand(eqn)
        view = None if operand is None else views.get(operand)
        grouped = grouped_rows(eqn)
        results = None if view is None else [_RowSlice(0, aval_of(eqn.invars[0]).shape[0])] if grouped else _follow(eqn, numbers)
        if view is not None and results is not None:
            passing.add(i)
            leaf, first, size = view
            for var, (start, stop, finish) in zip(eqn.outvars, results, strict=True):
                views_of.append((var, leaf, first + size * start, first + size * stop))
                if finish is None:
                    views[var] = (leaf, first + size * start, size * (grouped or 1))
    needed = _first_needs(graph, spine, passing)
    divided = {leaf for _, leaf, start, stop in views_of if stop - start < aval_of(params[leaf]).shape[0]}
    read = ((var, leaf, start, stop) for var, leaf, start, stop in views_of if leaf in divided and var in needed)
    return tuple(Read(leaf, start, stop, needed[var]) for var, leaf, start, stop in read)


def rows_between(params: Sequence[Var], reads: Sequence[Read], cuts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The rows of each slice of each parameter; empty for a parameter that is not sliced.

    Rows belong to the first stage that reads them, and rows that nothing reads to the stage of the row before.
    """
    unread = len(cuts) + 1
    stages: dict[int, np.ndarray] = {}
    for leaf, start, stop, position in reads:
        rows = stages.setdefault(leaf, np.full(aval_of(params[leaf]).shape[0], unread))
        np.minimum(rows[start:stop], bisect.bisect_right(cuts, position), out=rows[start:stop])
    sizes: list[tuple[int, ...]] = [()] * len(params)
    for leaf, rows in stages.items():
        read = np.flatnonzero(rows < unread)
        first = np.flatnonzero(np.diff(rows[read])) + 1  # the first row of another stage, among the rows that are read
        if len(first):
            sizes[leaf] = tuple(np.diff([0, *read[first], len(rows)]).tolist())
    return tuple(sizes)


def place_rows(graph: Graph, params: Sequence[Var]) -> Graph:
    """The graph with rows read of the slices that have them, where it reads them of parameters put together from slices."""
    placer = _Placer(frozenset(params))
    placer.follow(graph)
    return placer.graph(graph) if placer.stacks else graph


def _operand(eqn: JaxprEqn) -> Var | None:
    """The operand whose rows an equation may take: the only array of an elementwise equation, the first operand of any other."""
    if kind_of(eqn) in ELEMENTWISE:
        operands = [atom for atom in eqn.invars if not isinstance(atom, Literal) or aval_of(atom).shape]
        return operands[0] if len(operands) == 1 and not isinstance(operands[0], Literal) else None
    return eqn.invars[0] if eqn.invars and not isinstance(eqn.invars[0], Literal) else None


def _first_needs(graph: Graph, spine: Sequence[int], passing: set[int]) -> dict[Var, int]:
    """The spine position at which each value is first needed, also through what parameters alone decide; none for ``passing``."""
    position = {i: k for k, i in enumerate(spine)}
    needed: dict[Var, int] = {}
    for i in reversed(range(len(graph.eqns))):
        eqn = graph.eqns[i]
        at = position.get(i, min((needed[var] for var in eqn.outvars if var in needed), default=None))
        if at is not None and i not in passing:
            for var in variables(eqn.invars):
                needed[var] = min(needed.get(var, at), at)
    return needed


class _Placer(Rewriter):
    """Copies the equations of a graph; rows of what is put together from slices are taken of these."""

    def __init__(self, params: frozenset[Var]):
        super().__init__()
        self.stacks: dict[Atom | None, tuple[Atom, ...]] = {}
        self._params = params
        self._numbers = _Integers()

    def plain(self, eqn: JaxprEqn, values: list[Atom]) -> Sequence[Atom]:
        eqn = eqn.replace(invars=values)
        self._numbers.add(eqn)
        joined = concatenated_rows(eqn)
        if joined and self._params.issuperset(joined):
            self.stacks[eqn.outvars[0]] = joined
        operand = _operand(eqn)
        results = _follow(eqn, self._numbers) if operand in self.stacks else None
        parts, size, lookup = self.stacks.get(operand, ()), grouped_rows(eqn), lookup_of(eqn)
        if len(parts) > 1 and size is not None and all(aval_of(part).shape[0] % size == 0 for part in parts):
            return [self._grouped(parts, size)]
        if len(parts) > 1 and lookup is not None and results is None:
            return self._found(parts, lookup)
        if results is None:
            return self.emit(eqn)
        if kind_of(eqn) in ELEMENTWISE:
            (out,), parts = eqn.outvars, self.stacks[operand]
            self.stacks[out] = (out,) if len(parts) == 1 else tuple(self._elementwise(eqn, operand, part) for part in parts)
            return self.emit(eqn)
        found = []
        for start, stop, finish in results:
            rows = self._rows(self.stacks[operand], start, stop, eqn)
            result = _joined(self, rows)
            if finish is None:
                self.stacks[result] = tuple(rows)
            found.append(result if finish is None else self.compute(finish, [result])[0])
        return found

    def _grouped(self, parts: Sequence[Atom], size: int) -> Atom:
        """Put ``size`` rows at a time together in each slice, none of which has a part of such a group."""

        def group(part: jax.Array) -> jax.Array:
            return part.reshape(-1, size, *part.shape[1:])

        grouped = [self.compute(group, [part])[0] for part in parts]
        whole = _joined(self, grouped)
        self.stacks[whole] = tuple(grouped)
        return whole

    def _found(self, parts: Sequence[Atom], lookup: Lookup) -> list[Atom]:
        """Look rows up by data in every slice, and take those of the slice that has them; of the nearest, where none has."""
        starts = list(itertools.accumulate((aval_of(part).shape[0] for part in parts), initial=0))

        def find(indices: jax.Array, *parts: jax.Array) -> jax.Array:
            indices = indices.astype(jnp.promote_types(indices.dtype, jnp.int32))
            found = lookup.rows(parts[0], indices)
            for part, start in zip(parts[1:], starts[1:], strict=False):
                is_later = jax.lax.broadcast_in_dim((indices >= start)[..., 0], found.shape, lookup.batch_axes)
                found = jnp.where(is_later, lookup.rows(part, indices - start), found)
            return found

        return self.compute(find, [lookup.indices, *parts])

    def _elementwise(self, eqn: JaxprEqn, whole: Atom | None, part: Atom) -> Var:
        out = new_variable(eqn.outvars[0], aval_of(part).shape)
        self.emit(eqn.replace(invars=[part if atom is whole else atom for atom in eqn.invars], outvars=[out]))
        return out

    def _rows(self, parts: Sequence[Atom], start: int, stop: int, like: JaxprEqn) -> list[Atom]:
        rows, first = [], 0
        for part in parts:
            size = aval_of(part).shape[0]
            low, high = max(start - first, 0), min(stop - first, size)
            if (low, high) == (0, size):
                rows.append(part)
            elif low < high and (sliced := sliced_like(like, part, low, high)) is not None:
                self.emit(sliced)
                rows.append(sliced.outvars[0])
            elif low < high:
                rows += self.compute(lambda part, low=low, high=high: jax.lax.slice_in_dim(part, low, high), [part])
            first += size
        return rows


def _follow(eqn: JaxprEqn, numbers: "_Integers") -> list[_RowSlice] | None:
    """The rows that each result of an equation takes of its operand; None if it does anything else with it."""
    shape = tuple(aval_of(eqn.invars[0]).shape)
    if kind_of(eqn) in ELEMENTWISE:
        return [_RowSlice(0, aval_of(eqn.outvars[0]).shape[0])]
    split = split_rows(eqn)
    if split is not None:
        sizes, squeezed = split
        return [_RowSlice(a, b, _first if squeezed else None) for a, b in itertools.pairwise([0, *itertools.accumulate(sizes)])]
    window = window_of(eqn, numbers.get)
    if window is None or window.start[0] >= window.stop[0]:
        return None
    (low, *start), (high, *stop), strides, squeezed = window
    if (tuple(start), tuple(stop), set(strides)) == ((0,) * len(start), shape[1:], {1}):
        return [_RowSlice(low, high, _first if squeezed else None)]
    limits = (high - low, *stop)
    return [_RowSlice(low, high, lambda rows: jax.lax.slice(rows, (0, *start), limits, strides))]


def _first(rows: jax.Array) -> jax.Array:
    return jax.lax.squeeze(rows, (0,))


class _Integers:
    """The integers that equations compute from numbers alone: an index such as ``i - 1``, where ``jax.jit`` has traced ``i``."""

    def __init__(self) -> None:
        self._known: dict[Var, int] = {}

    def get(self, atom: Atom) -> int | None:
        if not isinstance(atom, Literal):
            return self._known.get(atom)
        value = np.asarray(atom.val)
        return int(value.item()) if value.size == 1 and value.dtype.kind in "iub" else None

    def add(self, eqn: JaxprEqn) -> None:
        compute = _COMPUTED.get(kind_of(eqn))
        if compute is None or not eqn.invars or aval_of(eqn.outvars[0]).size != 1:
            return
        dtype = aval_of(eqn.outvars[0]).dtype
        values = [self.get(atom) for atom in eqn.invars]
        if None not in values and dtype.kind in "iub":
            result = int(compute(*values))
            result = int(bool(result)) if dtype.kind == "b" else result  # what is not 0 is True, and True is 1
            if dtype.kind == "b" or jnp.iinfo(dtype).min <= result <= jnp.iinfo(dtype).max:
                self._known[eqn.outvars[0]] = result


_COMPUTED: Mapping[str, Callable[..., int]] = {
    **{name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne", "add", "sub", "mul", "neg")},
    **dict.fromkeys(("broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "copy"), lambda value: value),
    "max": max,
    "min": min,
    "clamp": lambda low, value, high: min(max(value, low), high),
    "select_n": lambda which, *cases: cases[which],
}
