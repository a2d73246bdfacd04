"""An optax optimizer, traced once on the user's tree of shapes, and whose each leaf of its state is.

A leaf of the state lives beside a parameter, its *home*: the one of which ``init`` makes it, else the one whose gradient or value
an update combines it with first. Its stage, its sharding and the bytes that a parameter brings with it follow from that. What has
no home, such as a count of steps, lives on the stage where scalars of several stages meet.

``Pipeline(trains=...)`` asks more: a leaf *belongs* to all parameters whose new values are computed from it. A step that trains
some parameters leaves the others as they are, and what belongs to them: a generator's step leaves the moments and the count of its
critic alone. What belongs to both, as the one count of an ``optax.adam`` over everything, would advance with both; it is refused.

It is the user's tree that the update is traced on: where a stacked parameter is held as slices, its equations are rewritten for
these (``divided.py``), and ``slicing`` asks before whether they can be.
"""

import functools
import math
import operator
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import JaxprEqn, Literal, Var
from jax.tree_util import KeyPath

from jaxpp.errors import ArgumentError, JaxppError, OptimizerError, shown
from jaxpp.optim.divided import Along, divided_function
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.floating import floating, masked_like, with_others
from jaxpp.stages.graph import CONDITIONS, Graph, ancestors, marked, opened, trace
from jaxpp.stages.jaxpr import Atom, aval_of, describe, shapes_of, variables
from jaxpp.stages.loss.microbatch import scale_dtype
from jaxpp.stages.loss.traced_loss import fits_pattern, path_name
from jaxpp.stages.own_params import OWN_NAME, num_shared
from jaxpp.stages.stacked import Slices, Slicing, joined, rows, slicing_of, whole_shape
from jaxpp.types import Array, Aval, Grads, Params, Tree

LOSS = -1  # the home of what an update combines with the loss before any parameter
_MANY = 8  # names that an error lists
_ROWWISE = (
    "where a loop over layers is cut, each stage updates the rows of its own layers, and of all rows an update may have sums and"
    " other small values"
)
_FIX = (
    "let the optimizer treat the layers' axis as a batch (muon_weight_dimension_numbers for optax.contrib.muon, None for stacked"
    " vectors), give these parameters another one with optax.multi_transform (optax.adamw), write the layers as a Python loop, or"
    " pass num_stages=1"
)
_NO_VALUE = re.compile(r"unexpected keyword argument 'value'")  # an update that takes nothing of the loss
_WANTS_LOSS = re.compile(r"missing \d+ required keyword-only arguments?: .*_fn'|\b\w+_fn must be provided")  # to call it


class HeldOptimizer(NamedTuple):
    """An optimizer as functions of flat lists of leaves as a pipeline holds them, of which some may be slices."""

    init: Callable[[list[Array]], list[Array]]
    update: Callable[..., list[Array]]  # gradients, state, parameters, loss
    shapes: Sequence[Aval]  # of the leaves of its state
    tree: Tree  # of its state
    homes: Sequence[int | None]  # the parameter beside which each leaf of its state lives, or ``LOSS``; None: it has no home
    kept: frozenset[int] = frozenset()  # the leaves of its state that a step leaves as they are
    objections: Mapping[int, str] = MappingProxyType({})  # what slices forbid, by leaf of the user's tree


class _Flat(NamedTuple):
    """An optimizer as functions of flat lists of whole leaves."""

    init: Callable[[list[Array]], list[Array]]
    graph: Graph  # of the update, from gradients, state, parameters and loss to parameters and state
    shapes: Sequence[Aval]
    tree: Tree


class TracedOptimizer:
    """An optimizer over whole parameters of these shapes, traced when it is first asked; a step leaves those ``untrained`` alone.

    ``loss`` is the shape of the loss whose value an update may read; unless given it has the type of the weights of microbatches.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        params: Params,
        untrained: frozenset[int] = frozenset(),
        loss: Aval | None = None,
    ):
        self._optimizer, self.untrained = optimizer, untrained
        self._loss = jax.ShapeDtypeStruct((), scale_dtype()) if loss is None else loss
        leaves, self._tree = jax.tree.flatten(joined(params, whole_shape))
        self._leaves = shapes_of(leaves)
        self._held = dict[Slicing, HeldOptimizer]()

    def reading(self, loss: Aval) -> "TracedOptimizer":
        """The same whose update reads the value of such a loss."""
        same = (loss.shape, loss.dtype) == (self._loss.shape, self._loss.dtype)
        return self if same else TracedOptimizer(self._optimizer, self._params, self.untrained, loss)

    def again(self) -> "TracedOptimizer":
        """The same, to be traced under other options of JAX."""
        return TracedOptimizer(self._optimizer, self._params, self.untrained)

    @property
    def _params(self) -> Params:
        return self._tree.unflatten(self._leaves)

    @cached_property
    def unread(self) -> frozenset[int]:
        """The parameters whose gradient changes nothing, as with ``optax.set_to_zero``: the optimizer freezes them."""
        kept = self.untrained | {len(self._leaves) + leaf for leaf in self.kept}
        changed = variables(atom for k, atom in enumerate(self._traced.graph.outputs) if k not in kept)
        read = ancestors(self._traced.graph, changed)
        grads = self._traced.graph.inputs[: len(self._leaves)]
        return self.untrained | {k for k, var in enumerate(grads) if var not in read}

    @cached_property
    def _traced(self) -> _Flat:
        """The optimizer sees the floating leaves alone, and the others stay as they are.

        An update may return a leaf of the state in another type than init makes it in: where a hyperparameter is an array of
        float32, a moment of a bfloat16 parameter is float32 from the first update on. Such a leaf has its last type from the
        beginning.
        """
        tree, leaves = self._tree, self._leaves
        try:
            made = jax.eval_shape(self._optimizer.init, floating(self._params))
        except Exception as error:
            error.add_note("jaxpp: raised while tracing the optimizer's init(params)")
            raise
        shapes, opt_tree = jax.tree.flatten(made)
        shapes = _types_of(shapes)

        def init(params: list[Array]) -> list[Array]:
            made = map(jnp.asarray, jax.tree.leaves(self._optimizer.init(floating(tree.unflatten(params)))))
            return [leaf if leaf.dtype == like.dtype else leaf.astype(like.dtype) for leaf, like in zip(made, shapes, strict=True)]

        def update(grads: Sequence[Array], opt: Sequence[Array], params: Sequence[Array], loss: Array) -> list[Array]:
            whole = tree.unflatten(params)
            seen, grads = floating(whole), masked_like(tree.unflatten(grads), whole)
            new, state = updated(self._optimizer, grads, opt_tree.unflatten(opt), seen, loss)
            return [*jax.tree.leaves(with_others(new, whole)), *jax.tree.leaves(state)]

        graph, _ = trace(update, leaves, shapes, leaves, self._loss)
        known = [shapes]
        while (found := _returned(opt_tree, shapes, graph.outputs[len(leaves) :])) not in known:
            shapes, (graph, _) = found, trace(update, leaves, found, leaves, self._loss)
            known.append(found)
        return _Flat(init, graph, shapes, opt_tree)

    @property
    def shapes(self) -> Sequence[Aval]:
        """Those of the leaves of the whole state."""
        return self._traced.shapes

    @property
    def eqns(self) -> Sequence[JaxprEqn]:
        """The equations of an update."""
        return self._traced.graph.eqns

    @cached_property
    def _init_graph(self) -> Graph:
        return trace(self._traced.init, list(self._leaves))[0]

    @cached_property
    def _opened(self) -> Graph:
        return opened(self._traced.graph, CONDITIONS)

    @cached_property
    def homes(self) -> tuple[int | None, ...]:
        """The parameter beside which each leaf of the whole state lives, or ``LOSS``; None: it has no home."""
        count, num_opt, graph = len(self._leaves), len(self._traced.shapes), self._opened
        grads, opt, params = graph.inputs[:count], graph.inputs[count : count + num_opt], graph.inputs[count + num_opt : -1]
        made_of = marked(self._init_graph, {var: 1 << k for k, var in enumerate(self._init_graph.inputs)})
        bits = [0 if isinstance(atom, Literal) else made_of.get(atom, 0) for atom in self._init_graph.outputs]
        home = dict(zip([*grads, *params, graph.inputs[-1]], [*range(count), *range(count), LOSS], strict=True))
        home |= {var: each.bit_length() - 1 for var, each in zip(opt, bits, strict=True) if each.bit_count() == 1}
        found = _combined(graph, home, [var for var in opt if var not in home])
        return tuple(found.get(var, home.get(var)) for var in opt)

    @cached_property
    def belonging(self) -> list[frozenset[int]]:
        """The parameters to which each leaf of the whole state belongs; where it is one that has a home, that is this one.

        Those that are computed from it; else those of the leaves from which its new value is; else those whose gradients or values
        it records; and if nothing of all this is, those of the leaves beside it in the tree.
        """
        graph, count, paths = self._traced.graph, len(self._leaves), self._opt_paths
        num_opt = len(paths)
        opt, others = graph.inputs[count : count + num_opt], (*graph.inputs[:count], *graph.inputs[count + num_opt :][:count])
        of_opt = marked(graph, {var: 1 << k for k, var in enumerate(opt)})
        of_params = marked(graph, {var: 1 << k % count for k, var in enumerate(others)})

        def numbers(marks: Mapping[Var, int], atom: Atom, most: int) -> frozenset[int]:
            bits = marks.get(atom, 0) if isinstance(atom, Var) else 0
            return frozenset(k for k in range(most) if bits >> k & 1)

        before = [numbers(of_opt, atom, num_opt) for atom in graph.outputs]
        read = [frozenset(leaf for leaf in range(count) if k in before[leaf]) for k in range(num_opt)]
        found = [
            read[k] or frozenset().union(*(read[other] for other in before[count + k])) or numbers(of_params, new, count)
            for k, new in enumerate(graph.outputs[count:])
        ]

        def beside(k: int) -> frozenset[int]:
            shared = {j: _num_shared(paths[k], paths[j]) for j, linked in enumerate(found) if linked}
            nearest = max(shared.values(), default=0)
            return frozenset[int]().union(*(found[j] for j, length in shared.items() if length == nearest > 0))

        return [linked or beside(k) for k, linked in enumerate(found)]

    @cached_property
    def kept(self) -> frozenset[int]:
        """The leaves of the whole state that a step leaves as they are.

        Raises:
            OptimizerError: a leaf belongs to parameters of both kinds.
        """
        if not self.untrained:
            return frozenset()
        shared, names = num_shared(self._params), self.paths
        kept, clash, parts = set[int](), list[str](), set[bool]()
        for k, (path, linked) in enumerate(zip(self._opt_paths, self.belonging, strict=True)):
            if linked and linked <= self.untrained:
                kept.add(k)
            elif linked & self.untrained:
                pair = names[min(linked - self.untrained)], names[min(linked & self.untrained)]
                of_set = min(linked) >= shared
                parts.add(of_set)
                where = "bank.opt_state(task)" if of_set else "state.opt_state"
                where += jax.tree_util.keystr(path[1:] if shared < len(names) else path)  # a bank's is the second of a pair
                clash.append(f"{where} belongs to {pair[0]}, which is trained, and to {pair[1]}, which is not")
        if clash:
            rule = "a step that trains some parameters leaves what the optimizer holds for the others as it is"
            got = clash[:_MANY] + [f"and {len(clash) - _MANY} more"] * (len(clash) > _MANY)
            of_these = [
                (k, name.removeprefix(f"{OWN_NAME}/") if k >= shared else name)
                for k, name in enumerate(names)
                if (k >= shared) in parts
            ]
            others, trained = ([n for k, n in of_these if (k in self.untrained) == other] for other in (True, False))
            fix = (
                'give the others an optimizer that holds nothing: optax.multi_transform({"trained": optimizer, "frozen": '
                f"optax.set_to_zero()}}, label), with label = {_labelling(others, trained)}; or, if pipe.other trains them, "
                "one of their own in its place"
            )
            raise OptimizerError("trains", rule, got, fix)
        return frozenset(kept)

    @property
    def _opt_paths(self) -> list[KeyPath]:
        return [path for path, _ in jax.tree_util.tree_leaves_with_path(self._traced.tree.unflatten(self._traced.shapes))]

    @cached_property
    def paths(self) -> list[str]:
        """What the parameters are called."""
        return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(self._params)]

    def held(self, slicing: Slicing) -> HeldOptimizer:
        """The optimizer over parameters that are held so."""
        if slicing not in self._held:
            self._held[slicing] = self._holding(slicing)
        return self._held[slicing]

    def _holding(self, slicing: Slicing) -> HeldOptimizer:
        traced, leaves, graph = self._traced, self._leaves, self._traced.graph
        if not slicing.any:
            run = graph.function(range(len(graph.eqns)), [*graph.inputs, *graph.constants], graph.outputs)
            constants = graph.constants.values()

            def update(grads: Sequence[Array], opt: Sequence[Array], params: Sequence[Array], loss: Array) -> list[Array]:
                return run(*grads, *opt, *params, loss, *constants)

            return HeldOptimizer(traced.init, update, traced.shapes, traced.tree, self.homes, self.kept)
        count, opts = len(leaves), traced.shapes
        nodes = self._tree.flatten_up_to(slicing.of(self._params))
        held = [Along(node.axis, tuple(rows(node.sizes)), sum(node.sizes)) if isinstance(node, Slices) else None for node in nodes]
        of_opt = list[Along | None]([None] * len(opts))
        while True:  # until a leaf of the state that is made of slices is read as slices, too
            made = divided_function(self._init_graph, held, of_opt)
            done = divided_function(self._opened, [*held, *of_opt, *held, None], [*held, *of_opt])
            found = [next(filter(None, each), None) for each in zip(of_opt, made.found, done.found[count:], strict=True)]
            if found == of_opt:
                break
            of_opt = found
        leaf_of = {k: k % (count + len(opts)) for k in range(2 * count + len(opts)) if not count <= k < count + len(opts)}
        wrong = made.objections | {leaf_of[k]: odd for k, odd in done.objections.items() if k in leaf_of}
        if done.objections and not wrong:  # to rows that the state alone has
            wrong = {k: next(iter(done.objections.values())) for k, along in enumerate(held) if along}
        avals = [_divided_shape(aval, along) for aval, along in zip(opts, of_opt, strict=True)]
        shapes, tree = jax.tree.flatten(traced.tree.unflatten(avals))
        homes, kept = list[int | None](), set[int]()
        for leaf, (home, along) in enumerate(zip(self.homes, of_opt, strict=True)):
            slices = [home] if home in (None, LOSS) else slicing.leaves([home])  # beside those of its home, one by one
            number = len(along.bounds) if along else 1
            kept.update(range(len(homes), len(homes) + number) if leaf in self.kept else ())
            homes += slices if len(slices) == number else slices[:1] * number
        return HeldOptimizer(
            lambda params: made.run(*params),
            lambda grads, opt, params, loss: done.run(*grads, *opt, *params, loss),
            shapes,
            tree,
            homes,
            frozenset(kept),
            wrong,
        )

    def bytes_beside(self, slicing: Slicing) -> tuple[int, ...]:
        """The bytes of the state that live beside each parameter as it is held: a slice has its share of the whole leaf's."""
        num_bytes = [0] * len(self._leaves)
        for home, aval in zip(self.homes, self._traced.shapes, strict=True):
            if home is not None and home != LOSS:
                num_bytes[home] += count_bytes(aval)
        shares = slicing.sizes if slicing.any else [()] * len(num_bytes)
        return tuple(
            total * size // sum(sizes or (1,)) for total, sizes in zip(num_bytes, shares, strict=True) for size in sizes or (1,)
        )

    def slicing(self, loops: Sequence[tuple[int, ...]], single: Sequence[tuple[int, ...]], axes: Sequence[int]) -> Slicing:
        """The slices that a pipeline holds, along these axes, of leaves with the rows of each given; empty: of one that is whole.

        Where the optimizer cannot update them, what is read row by row (``single``) is held whole, and a cut loop over layers
        (``loops``) is refused.
        """
        slicing = slicing_of(loops, single, axes=axes)
        wrong = self.held(slicing).objections if slicing.any else {}
        while wrong and any(single):
            cannot = {leaf for leaf in wrong if single[leaf]} or set(range(len(single)))
            single = [() if leaf in cannot else sizes for leaf, sizes in enumerate(single)]
            slicing = slicing_of(loops, single, axes=axes)
            wrong = self.held(slicing).objections
        if wrong:
            got = [f"{self.paths[leaf]}: {odd} combines its layers" for leaf, odd in sorted(wrong.items())]
            raise OptimizerError("optimizer", _ROWWISE, got, _FIX)
        return slicing


def _combined(graph: Graph, home: Mapping[Var, int], lost: Sequence[Var]) -> dict[Var, int]:
    """The homes of those of these leaves that have one: that of the first value with a home that each is combined with.

    A single number finds a home only among single numbers, and a whole number none: it would be a count of steps.
    """
    home, found = dict(home), dict[Var, int]()
    bits = {1 << k: var for k, var in enumerate(lost)}
    origins = {var: bit for bit, var in bits.items()}  # the leaves without a home that each value is computed from
    arrays = sum(bit for bit, var in bits.items() if size(var) > 1)
    inexact = sum(bit for bit, var in bits.items() if jnp.issubdtype(aval_of(var).dtype, jnp.inexact))
    for eqn in graph.eqns:
        operands = variables(eqn.invars)
        leaves = functools.reduce(operator.or_, (origins.get(var, 0) for var in operands), 0)
        largest = max((var for var in operands if var in home), key=size, default=None)
        if largest is None:
            origins.update(dict.fromkeys(eqn.outvars, leaves))
            continue
        placed = leaves & (arrays | inexact if size(largest) == 1 else arrays)
        arrays, inexact = arrays & ~placed, inexact & ~placed
        while placed:
            var = bits[placed & -placed]
            found[var] = home[var] = home[largest]
            placed &= placed - 1
        home.update(dict.fromkeys(eqn.outvars, home[largest]))
    return found


def size(atom: Atom) -> int:
    """How many numbers a value has."""
    return math.prod(getattr(aval_of(atom), "shape", ()))


def _divided_shape(aval: Aval, along: Along | None) -> Aval | Slices:
    sizes = [end - begin for begin, end in along.bounds] if along else []
    return Slicing((tuple(sizes),), (along.axis if along else 0,)).of([aval])[0]


def updated(optimizer: optax.GradientTransformation, grads: Grads, state: Tree, params: Params, loss: Array) -> tuple[Params, Tree]:
    """The parameters and the state after an update, which is given the value of the loss unless it does not take it.

    Raises:
        OptimizerError: it wants to call the loss, or makes updates of other shapes, as of gradients of each example.
    """
    whole = optax.with_extra_args_support(optimizer)
    try:
        try:
            updates, state = whole.update(grads, state, params, value=loss)
        except TypeError as error:
            if not _NO_VALUE.search(str(error)):
                raise
            updates, state = whole.update(grads, state, params)
        new, found = optax.apply_updates(params, updates), jax.tree.structure(params).flatten_up_to(updates)
    except JaxppError:  # of ``trains.part_of``
        raise
    except Exception as error:
        if isinstance(error, (TypeError, ValueError)) and _WANTS_LOSS.search(str(error)):
            sees = "gradients, its state, the parameters and the value of the loss"
            rule = f"an optimizer sees {sees}, and cannot call the loss again"
            without = "a line search" if "'value_fn'" in str(error) else "a function of the loss"
            fix = f"use a transformation without {without}, such as optax.adamw or optax.sgd"
            raise OptimizerError("optimizer", rule, str(error), fix) from error
        what = "the optimizer's update(grads, state, params)"
        error.add_note(f"jaxpp: raised while tracing {what}; a transformation that takes more is given value=loss")
        raise
    pairs = zip(jax.tree_util.tree_leaves_with_path(params), map(np.shape, found), strict=True)
    odd = [(path, leaf, shape) for (path, leaf), shape in pairs if shape not in ((), leaf.shape)]
    if odd:
        rule = "an optimizer is given the gradients of a mean over examples, not of each example, and updates whole parameters"
        got = [f"{path_name(path)}: {describe(leaf)}, and its update has the shape {shape}" for path, leaf, shape in odd]
        raise OptimizerError("optimizer", rule, got, "use a transformation whose updates have the shapes of the parameters")
    return new, state


def _returned(tree: Tree, before: Sequence[Aval], after: Sequence[Atom]) -> list[jax.ShapeDtypeStruct]:
    """The leaves of an optimizer's state as an update returns them.

    Raises:
        OptimizerError: they have other shapes than those it is given, or numbers that cannot hold those it is given.
    """
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree.unflatten(before))]
    new = _types_of(map(aval_of, after))
    pairs = list(zip(paths, before, new, strict=False))
    wrong = [
        f"opt_state{path}: {describe(a)}, then {describe(b)}" for path, a, b in pairs if a.shape != b.shape or not _holds(a, b)
    ]
    if len(new) != len(before):
        wrong = [f"{len(before)} arrays, then {len(new)}"]
    if wrong:
        rule = (
            "an update returns each array of the optimizer's state in the shape in which init makes it, and in a type that holds it"
        )
        raise OptimizerError("optimizer", rule, wrong, "let init make the state as update returns it")
    return new


def _types_of(avals: Iterable[Aval]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False)) for aval in avals]


def _holds(before: Aval, after: Aval) -> bool:
    """Whether numbers of one type are also numbers of another one; those of a count are small."""
    if before.dtype == after.dtype:
        return True
    if any(jnp.issubdtype(aval.dtype, jax.dtypes.extended) for aval in (before, after)):
        return False
    counts = jnp.issubdtype(before.dtype, jnp.integer) and jnp.issubdtype(after.dtype, jnp.inexact)
    return counts or np.can_cast(before.dtype, after.dtype)


def _num_shared(path: KeyPath, other: KeyPath) -> int:
    """With how many equal keys two paths begin."""
    return next((k for k, (a, b) in enumerate(zip(path, other, strict=False)) if a != b), min(len(path), len(other)))


def _labelling(others: Sequence[str], trained: Sequence[str]) -> str:
    """A function that tells trained parameters from others, for ``optax.multi_transform``, as a line of code.

    Example:
        >>> label = eval(_labelling(["w/kernel"], ["w/lora_a", "w/lora_b"]))
        >>> label({"w": {"kernel": 0, "lora_a": 0}})
        {'w': {'kernel': 'frozen', 'lora_a': 'trained'}}
    """
    parts = [path.split("/") for path in trained]
    words = [
        posixpath.commonprefix([path[-1] for path in parts]),
        *(word for word in parts[0] if all(word in each for each in parts)),
    ]
    apart = [repr(word).replace("'", '"') for word in words if word and not any(word in path for path in others)]
    told = f'jax.tree_util.keystr(path, simple=True, separator="/") in {shown(list(trained))}'
    if apart:
        told = f"{apart[0]} in jax.tree_util.keystr(path)"
    by_path = f'lambda path, _: "trained" if {told} else "frozen"'
    return f"lambda params: jax.tree_util.tree_map_with_path({by_path}, params)"


def untrained_leaves(params: Params, patterns: Sequence[str] | None, *, strict: bool = True) -> frozenset[int]:
    """The numbers of the parameter leaves that none of the paths, or patterns of paths, names; none if there are no patterns.

    Raises:
        ArgumentError: ``strict``, and a pattern names no parameter.
    """
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    named = {pattern: {k for k, path in enumerate(paths) if fits_pattern(path, pattern)} for pattern in patterns or ()}
    if strict and (missed := [f"{pattern!r} matches none" for pattern, found in named.items() if not found]):
        rule, fix = "a pattern names parameters or modules by their path", "use paths like those below, with * for any part"
        raise ArgumentError("trains", rule, missed, fix, "\n".join(paths[:12] + ["..."] * (len(paths) > 12)))
    return frozenset() if patterns is None else frozenset(range(len(paths))).difference(*named.values())


def part_of(optimizer: optax.GradientTransformation, trains: Sequence[str] | None) -> optax.GradientTransformation:
    """The optimizer as a step runs it that trains the parameters of these paths; the optimizer itself if there are no patterns."""
    if trains is None:
        return optimizer
    whole = optax.with_extra_args_support(optimizer)

    def update(updates: Grads, state: Tree, params: Params | None = None, **extra: Tree) -> tuple[Tree, Tree]:
        untrained = untrained_leaves(params, trains, strict=False)  # the optimizer may see none of a pattern's
        kept = TracedOptimizer(optimizer, params, untrained).kept

        def zeroed(tree: Tree) -> Tree:
            leaves, structure = jax.tree.flatten(tree)
            return structure.unflatten(jnp.zeros_like(leaf) if k in untrained else leaf for k, leaf in enumerate(leaves))

        new_updates, new = whole.update(zeroed(updates), state, params, **extra)
        leaves, structure = jax.tree.flatten(new)
        pairs = zip(jax.tree.leaves(state), leaves, strict=True)
        return zeroed(new_updates), structure.unflatten(old if k in kept else leaf for k, (old, leaf) in enumerate(pairs))

    return optax.GradientTransformationExtraArgs(optimizer.init, update)
