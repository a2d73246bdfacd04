"""Any optax optimizer, run where the parameters live, exactly as on one device.

``optimizer.update`` is traced on the whole tree, as shapes, and every equation goes to the stage of its largest operand. What
depends on no parameter is repeated where it is needed; scalars of several stages meet on stage 0; an equation's *level* counts the
hops before it, and one program runs per stage and level: adamw, lion, adafactor and lamb need one level, clip_by_global_norm three.
A state leaf lives with the gradients it is combined with, else on stage 0. A condition over all leaves becomes one choice a leaf.
It is the user's tree that the update is traced on: where a stacked parameter is held as slices, its equations are rewritten for
these (``divided.py``), and ``slicing_for`` asks before whether they can be.
"""

import functools
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import JaxprEqn, Literal, Var

from jaxpp.errors import JaxppError, OptimizerError
from jaxpp.optim.divided import MOVABLE, Along, divided_function
from jaxpp.optim.loss_scale import Scaling
from jaxpp.optim.update import HUB, Update, UpdateInputs, UpdatePart, flat, refilled
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.floating import floating, masked_like, with_others
from jaxpp.stages.graph import Graph, ancestors, marked, trace
from jaxpp.stages.jaxpr import ELEMENTWISE, Atom, aval_of, branches_of, describe, kind_of, shapes_of, variables
from jaxpp.stages.loss.microbatch import scale_dtype
from jaxpp.stages.loss.traced_loss import path_name
from jaxpp.stages.stacked import Slices, Slicing, assembled_shapes, is_slices, rows, slicing_of
from jaxpp.types import Array, Aval, Grads, Params, Tree

_Sizes = Sequence[tuple[int, ...]]  # for each leaf the rows of each of its slices; empty for one that is not sliced
_ROWWISE = (
    "where a loop over layers is cut, each stage updates the rows of its own layers, and of all rows an update may have sums and"
    " other small values"
)
_FIX = (
    "let the optimizer treat the layers' axis as a batch (muon_weight_dimension_numbers for optax.contrib.muon, None for stacked"
    " vectors), give these parameters another one with optax.multi_transform (optax.adamw), write the layers as a Python loop, or"
    " pass num_stages=1"
)
_SPREADING = ELEMENTWISE | {"broadcast_in_dim"}
_NO_VALUE = re.compile(r"unexpected keyword argument 'value'")  # an update that takes nothing of the loss
_WANTS_LOSS = re.compile(r"missing \d+ required keyword-only arguments?: .*_fn'|\b\w+_fn must be provided")  # to call it


def unread_gradients(optimizer: optax.GradientTransformation, params: Params, loss: Aval) -> frozenset[int]:
    """The parameter leaves whose gradient changes nothing, as with ``optax.set_to_zero``: the optimizer freezes them."""
    graph, leaves = traced_update(optimizer, params, loss)[0], jax.tree.leaves(params)
    read = ancestors(graph, variables(graph.outputs))
    return frozenset(k for k, var in enumerate(graph.inputs[: len(leaves)]) if var not in read)


def plan_update(  # noqa: PLR0913  (what decides an update)
    optimizer: optax.GradientTransformation,
    params: Params,
    owner: Sequence[int],
    loss_stage: int,
    loss: Aval,
    frozen: Collection[int] = (),
    scaling: Scaling | None = None,
    states: Sequence[tuple[int, Aval]] = (),
    counted: Collection[int] | None = None,
    *,
    kept: frozenset[int] = frozenset(),
) -> Update:
    """Trace an optimizer on a spread tree of shapes and place its equations.

    Gradients of ``frozen`` leaves are not read; ``counted`` leaves (default: all) count in the reported norm. With ``scaling`` a
    gradient that is not finite changes nothing, nor the model state (``states``: stages and shapes). The update leaves what is
    ``kept`` as it is, of parameters and optimizer leaves, numbered one after another; these live where they otherwise would.
    """
    leaves, made = jax.tree.leaves(params), _flat(optimizer, params, loss)
    opt_leaves, plain = made.opt_leaves, made.update
    counted = range(len(leaves)) if counted is None else counted
    apart = {*frozen, *(k for k in range(len(leaves)) if k not in counted)}
    watched = sorted({stage for leaf, stage in enumerate(owner) if leaf not in apart})

    def update(inputs: UpdateInputs[Array], kept: Collection[int] = ()) -> list[Array]:
        grads = [jnp.zeros_like(grad) if k in frozen else grad for k, grad in enumerate(inputs.grads)]
        scale, finite = [], []
        if scaling is None:
            results = plain(grads, inputs.opt, inputs.params, *inputs.loss)
        else:
            grads, all_finite = scaling.unscale(grads, inputs.scale)
            after = *plain(grads, inputs.opt, inputs.params, *inputs.loss), *inputs.new_state
            before = *inputs.params, *inputs.opt, *inputs.old_state
            results = [jnp.where(all_finite, new, old) for new, old in zip(after, before, strict=True)]
            scale, finite = scaling.adjust(inputs.scale, all_finite), [all_finite]
        free = [(stage, _wide(grad)) for k, (stage, grad) in enumerate(zip(owner, grads, strict=True)) if k not in apart]
        squares = [optax.tree.norm([grad for own, grad in free if own == stage], squared=True) for stage in watched]
        norm = optax.tree.norm([_wide(grad) for k, grad in enumerate(grads) if k in counted and k not in frozen])
        new = (*results, *scale, *finite, norm, *squares)
        old = dict(enumerate((*inputs.params, *inputs.opt)))
        return [old[k] if k in kept else jnp.array(leaf, copy=True) for k, leaf in enumerate(new)]

    def init(params: list[Array]) -> list[Array]:
        return [jnp.array(leaf, copy=True) for leaf in made.init(params)]

    scale = () if scaling is None else shapes_of(scaling.init())
    state_owner, state = tuple(stage for stage, _ in states), tuple(shape for _, shape in states)
    inputs = UpdateInputs[Aval](tuple(leaves), tuple(opt_leaves), tuple(leaves), (loss,), scale, state, state)
    init_graph, _ = trace(init, leaves)
    others = tuple(owner), (loss_stage,), (loss_stage,) * len(scale), state_owner, state_owner

    def placer_of(opt_owner: tuple[int | None, ...], kept: Collection[int]) -> _Placer:
        graph, _ = trace(functools.partial(update, kept=kept), inputs)
        graph = open_conditions(graph) if len(set(owner)) > 1 else graph
        return _Placer(graph, UpdateInputs(*refilled(inputs, graph.inputs)), UpdateInputs(tuple(owner), opt_owner, *others))

    placer = placer_of(_made_with(init_graph, owner), ())
    placer = placer_of(placer.opt_owner(), kept) if kept else placer
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    placed = placer.opt_owner(), placer.parts(paths), tuple(watched), scaling, state_owner, loss_stage, kept
    return Update(placer.graph, init_graph, made.opt_tree, tuple(owner), *placed)


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
            raise OptimizerError("optimizer", rule, str(error).rstrip("."), fix) from error
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


def traced_update(optimizer: optax.GradientTransformation, params: Params, loss: Aval) -> tuple[Graph, Tree]:
    """The flat graph of an update, from gradients, state, parameters and loss to parameters and state; the shapes of the state."""
    flat, leaves = _flat(optimizer, params, loss), jax.tree.leaves(params)
    graph = flat.graph or trace(flat.update, leaves, flat.opt_leaves, leaves, loss)[0]
    return graph, flat.opt_tree.unflatten(flat.opt_leaves)


class _Flat(NamedTuple):
    """An optimizer as functions of flat lists: of the leaves of parameters, some of which may be slices."""

    init: Callable[[list[Array]], list[Array]]
    update: Callable[..., list[Array]]  # gradients, state, parameters, loss
    opt_leaves: Sequence[Aval]
    opt_tree: Tree
    graph: Graph | None = None  # of the update; None where slices are updated
    objections: Mapping[int, str] = MappingProxyType({})  # what slices forbid, by leaf of the user's tree


def _flat(optimizer: optax.GradientTransformation, params: Params, loss: Aval) -> _Flat:
    nodes = jax.tree.leaves(params, is_leaf=is_slices)
    whole = _flat_whole(optimizer, assembled_shapes(params), loss)
    if whole.graph is None or not any(map(is_slices, nodes)):
        return whole
    leaves, count, opts = jax.tree.leaves(assembled_shapes(params)), len(nodes), whole.opt_leaves
    update = open_conditions(whole.graph)
    init, _ = trace(whole.init, leaves)
    held = [Along(node.axis, tuple(rows(node.sizes)), sum(node.sizes)) if isinstance(node, Slices) else None for node in nodes]
    kept = list[Along | None]([None] * len(opts))
    while True:  # until a leaf of the state that is made of slices is read as slices, too
        made = divided_function(init, held, kept)
        done = divided_function(update, [*held, *kept, *held, None], [*held, *kept])
        found = [next(filter(None, each), None) for each in zip(kept, made.found, done.found[count:], strict=True)]
        if found == kept:
            break
        kept = found
    leaf_of = {k: k % (count + len(opts)) for k in range(2 * count + len(opts)) if not count <= k < count + len(opts)}
    wrong = made.objections | {leaf_of[k]: odd for k, odd in done.objections.items() if k in leaf_of}
    if done.objections and not wrong:  # to rows that the state alone has
        wrong = {k: next(iter(done.objections.values())) for k, along in enumerate(held) if along}
    avals = [_divided_shape(aval, along) for aval, along in zip(opts, kept, strict=True)]
    opt_leaves, opt_tree = jax.tree.flatten(whole.opt_tree.unflatten(avals))
    return _Flat(
        lambda params: made.run(*params),
        lambda grads, opt, params, loss: done.run(*grads, *opt, *params, loss),
        opt_leaves,
        opt_tree,
        objections=wrong,
    )


def _divided_shape(aval: Aval, along: Along | None) -> Aval | Slices:
    sizes = [end - begin for begin, end in along.bounds] if along else []
    return Slicing((tuple(sizes),), (along.axis if along else 0,)).of([aval])[0]


def _flat_whole(optimizer: optax.GradientTransformation, params: Params, loss: Aval) -> _Flat:
    """An optimizer as functions of flat lists; it sees the floating leaves alone, and the others stay as they are.

    An update may return a leaf of the state in another type than init makes it in: where a hyperparameter is an array of float32, a
    moment of a bfloat16 parameter is float32 from the first update on. Such a leaf has its last type from the beginning.
    """
    leaves, tree = jax.tree.flatten(params)
    try:
        made = jax.eval_shape(optimizer.init, floating(params))
    except Exception as error:
        error.add_note("jaxpp: raised while tracing the optimizer's init(params)")
        raise
    opt_leaves, opt_tree = jax.tree.flatten(made)
    opt_leaves = _types_of(opt_leaves)

    def init(params: list[Array]) -> list[Array]:
        made = map(jnp.asarray, jax.tree.leaves(optimizer.init(floating(tree.unflatten(params)))))
        return [leaf if leaf.dtype == like.dtype else leaf.astype(like.dtype) for leaf, like in zip(made, opt_leaves, strict=True)]

    def update(grads: Sequence[Array], opt: Sequence[Array], params: Sequence[Array], loss: Array) -> list[Array]:
        whole = tree.unflatten(params)
        seen, grads = floating(whole), masked_like(tree.unflatten(grads), whole)
        new, state = updated(optimizer, grads, opt_tree.unflatten(opt), seen, loss)
        return [*jax.tree.leaves(with_others(new, whole)), *jax.tree.leaves(state)]

    graph, _ = trace(update, leaves, opt_leaves, leaves, loss)
    known = [opt_leaves]
    while (found := _returned(opt_tree, opt_leaves, graph.outputs[len(leaves) :])) not in known:
        opt_leaves, (graph, _) = found, trace(update, leaves, found, leaves, loss)
        known.append(found)
    run = graph.function(range(len(graph.eqns)), [*graph.inputs, *graph.constants], graph.outputs)
    constants = graph.constants.values()
    return _Flat(
        init,
        lambda grads, opt, params, loss: run(*grads, *opt, *params, loss, *constants),
        opt_leaves,
        opt_tree,
        graph,
    )


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


def _wide(grad: Array) -> Array:
    """A gradient of float16, or of floating numbers of a byte, as float32: its square would vanish where it is small."""
    return grad.astype(jnp.float32) if grad.dtype == jnp.float16 or grad.dtype.itemsize == 1 else grad


def _made_with(init: Graph, owner: Sequence[int]) -> tuple[int | None, ...]:
    """The stage of each optimizer leaf that is made from one parameter (a copy, an average), None for others."""
    stages_of = marked(init, {var: 1 << stage for var, stage in zip(init.inputs, owner, strict=True)})
    stages = [0 if isinstance(atom, Literal) else stages_of.get(atom, 0) for atom in init.outputs]
    return tuple(bits.bit_length() - 1 if bits.bit_count() == 1 else None for bits in stages)


def _size(atom: Atom) -> int:
    return math.prod(getattr(aval_of(atom), "shape", ()))


class _Placer:
    def __init__(self, graph: Graph, inputs: UpdateInputs[Var], stages: UpdateInputs[int | None]):
        self.graph, self.opt = graph, inputs.opt
        pairs = zip(flat(inputs), flat(stages), strict=True)
        self.stage: dict[Var, int] = {var: stage for var, stage in pairs if stage is not None}  # None: to be placed
        self._follow()

    def _follow(self) -> None:
        """Follow the dataflow: an optimizer leaf goes to the stage of the first owned value it is combined with."""
        stage = dict(self.stage)
        lost = {1 << k: var for k, var in enumerate(self.opt) if var not in stage}  # leaves without a stage yet, a bit each
        origins = {var: bit for bit, var in lost.items()}
        arrays = sum(bit for bit, var in lost.items() if _size(var) > 1)
        inexact = sum(bit for bit, var in lost.items() if jnp.issubdtype(aval_of(var).dtype, jnp.inexact))
        for eqn in self.graph.eqns:
            operands = variables(eqn.invars)
            owned = [var for var in operands if var in stage]
            leaves = functools.reduce(operator.or_, (origins.get(var, 0) for var in operands), 0)
            if not owned:
                origins.update(dict.fromkeys(eqn.outvars, leaves))
                continue
            largest = max(owned, key=_size)
            home = stage[largest]
            placed = leaves & (arrays | inexact if _size(largest) == 1 else arrays)
            arrays, inexact = arrays & ~placed, inexact & ~placed
            while placed:
                var = lost[placed & -placed]
                stage[var] = self.stage[var] = home
                placed &= placed - 1
            stage.update(dict.fromkeys(eqn.outvars, home))

    def opt_owner(self) -> tuple[int, ...]:
        return tuple(self.stage.get(var, HUB) for var in self.opt)

    def parts(self, paths: Sequence[str]) -> tuple[UpdatePart | None, ...]:
        place: dict[Var, UpdatePart] = {var: UpdatePart(0, stage) for var, stage in self.stage.items()}
        parts: list[UpdatePart | None] = []
        crossed: list[str] = []
        spread: dict[Var, Var] = {}  # what is computed where it is read, as it is computed of one small value: that value
        results = set(variables(self.graph.outputs))
        for eqn in self.graph.eqns:
            owned = [var for var in dict.fromkeys(spread.get(var, var) for var in variables(eqn.invars)) if var in place]
            if not owned:
                parts.append(None)
                continue
            grows = kind_of(eqn) in _SPREADING and MOVABLE >= _size(owned[0]) < _size(eqn.outvars[0])
            if len(owned) == 1 and grows and results.isdisjoint(eqn.outvars):
                spread[eqn.outvars[0]] = owned[0]
                parts.append(None)
                continue
            stages = {place[var].stage for var in owned}
            largest = max(owned, key=_size)
            home = place[largest].stage if len(stages) == 1 or _size(largest) > 1 else HUB
            for var in owned:
                away = place[var].stage
                if away != home and _size(var) > MOVABLE:
                    both = f"{describe(aval_of(largest))} of stage {home}, {describe(aval_of(var))} of stage {away}"
                    crossed.append(f"{eqn.primitive.name}: {both}")
            level = max(place[var].level + (place[var].stage != home and var not in self.stage) for var in owned)
            parts.append(UpdatePart(level, home))
            place.update(dict.fromkeys(eqn.outvars, UpdatePart(level, home)))
        if crossed:
            rule = "an update may combine small values of different stages (a norm), but not move large arrays between them"
            fix = "use a transformation that treats each parameter by itself, or pass num_stages=1"
            names = f"parameters: {', '.join(paths[:8])}{', ...' if len(paths) > 8 else ''}"
            raise OptimizerError("optimizer", rule, crossed, fix, names)
        return self._late(parts)

    def _late(self, parts: Sequence[UpdatePart | None]) -> tuple[UpdatePart | None, ...]:
        """Each equation at the last level at which it serves its readers, so that no moment is held from one level to the next."""
        users, results = self.graph.users(), set(variables(self.graph.outputs))
        late = list(parts)

        def readers_of(eqn: JaxprEqn) -> Iterator[UpdatePart]:
            for j in (j for var in eqn.outvars for j in users.get(var, ())):
                reader = late[j]
                yield from readers_of(self.graph.eqns[j]) if reader is None else [reader]

        for i, eqn in reversed(list(enumerate(self.graph.eqns))):
            part = parts[i]
            large = any(_size(var) > 1 for var in eqn.outvars)
            readers = list(readers_of(eqn)) if part is not None and large and results.isdisjoint(eqn.outvars) else []
            if part is not None and readers:
                latest = min(reader.level - (reader.stage != part.stage) for reader in readers)
                late[i] = UpdatePart(max(part.level, latest), part.stage)
        return tuple(late)


def open_conditions(graph: Graph) -> Graph:
    """The graph with every condition, and those inside it, opened; the graph itself if it has none."""
    if all(_branches(eqn) is None for eqn in graph.eqns):
        return graph

    def run(*args: Array) -> list[Array]:
        values: dict[Var, Array] = {**graph.constants, **dict(zip(graph.inputs, args, strict=True))}

        def read(atom: Atom) -> Array:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for i, eqn in enumerate(graph.eqns):
            branches = _branches(eqn)
            if branches is not None:
                which, *operands = map(read, eqn.invars)
                cases = [branch(*operands) for branch in branches]
                results = [jax.lax.select_n(which, *values_of) for values_of in zip(*cases, strict=True)]
            else:
                needs = variables(eqn.invars)
                results = graph.function([i], needs, eqn.outvars)(*map(read, needs))
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in graph.outputs]

    avals = [aval_of(var) for var in graph.inputs]
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False)) for aval in avals]
    return open_conditions(trace(run, *shapes)[0])


def _branches(eqn: JaxprEqn) -> list[Callable[..., list[Array]]] | None:
    return None if eqn.effects else branches_of(eqn)


def state_bytes(optimizer: optax.GradientTransformation | None, params: Params) -> tuple[int, ...]:
    """The bytes of the optimizer state that belong to each parameter leaf: those leaves whose path ends in the parameter's.

    A slice of a leaf has its share of them.
    """
    whole = assembled_shapes(params)
    paths = {path: leaf for leaf, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(whole))}
    num_bytes = [0] * len(paths)
    state = () if optimizer is None else jax.eval_shape(optimizer.init, floating(whole))
    for path, aval in jax.tree_util.tree_leaves_with_path(state):
        leaf = next((paths[path[k:]] for k in range(len(path) + 1) if path[k:] in paths), None)
        if leaf is not None:
            num_bytes[leaf] += count_bytes(aval)
    nodes = jax.tree.leaves(params, is_leaf=is_slices)
    shares = [node.sizes if isinstance(node, Slices) else (1,) for node in nodes]
    return tuple(total * size // sum(sizes) for total, sizes in zip(num_bytes, shares, strict=True) for size in sizes)


def slicing_for(
    optimizer: optax.GradientTransformation | None, whole: Params, loops: _Sizes, single: _Sizes, axes: Sequence[int]
) -> Slicing:
    """The slices that a pipeline holds, along these axes, where its optimizer can update the slices of the stacked parameters.

    Where it cannot, what is read row by row (``single``) is held whole, and a cut loop over layers (``loops``) refuses it.
    """
    slicing = slicing_of(loops, single, axes=axes)
    if optimizer is None or not slicing.any:
        return slicing
    loss = jax.ShapeDtypeStruct((), scale_dtype())
    wrong = _flat(optimizer, slicing.of(whole), loss).objections
    while wrong and any(single):
        cannot = {leaf for leaf in wrong if single[leaf]} or set(range(len(single)))
        single = [() if leaf in cannot else sizes for leaf, sizes in enumerate(single)]
        slicing = slicing_of(loops, single, axes=axes)
        wrong = _flat(optimizer, slicing.of(whole), loss).objections
    if wrong:
        paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(whole)]
        got = [f"{paths[leaf]}: {odd} combines its layers" for leaf, odd in sorted(wrong.items())]
        raise OptimizerError("optimizer", _ROWWISE, got, _FIX)
    return slicing
