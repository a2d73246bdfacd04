"""Any optax optimizer, run where the parameters live, exactly as on one device.

``optimizer.update`` is traced on the whole tree, as shapes, and every equation goes to the stage of its largest operand. What
depends on no parameter is repeated where it is needed; scalars of several stages meet on stage 0; an equation's *level* counts the
hops before it, and one program runs per stage and level: adamw, lion, adafactor and lamb need one level, clip_by_global_norm three.
A state leaf lives with the gradients it is combined with, else on stage 0. A condition over all leaves becomes one choice a leaf.
An optimizer that treats every row by itself may run on slices of a stacked parameter (``slicing_for``): what happens to a leaf in
an update traced on the user's tree is compared with what happens to its slices.
"""

import functools
import heapq
import math
import operator
import re
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import JaxprEqn, Literal, Var

from jaxpp.errors import OptimizerError
from jaxpp.optim.loss_scale import Scaling
from jaxpp.optim.update import HUB, Update, UpdateInputs, UpdatePart, flat, refilled
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.graph import Graph, ancestors, marked, trace
from jaxpp.stages.jaxpr import ELEMENTWISE, Atom, aval_of, branches_of, describe, is_cast, kind_of, number_in, shapes_of, variables
from jaxpp.stages.loss.microbatch import scale_dtype
from jaxpp.stages.loss.traced_loss import path_name
from jaxpp.stages.stacked import Slicing, assembled_shapes, slicing_of
from jaxpp.types import Array, Aval, Params, Tree

_Sizes = Sequence[tuple[int, ...]]  # for each leaf the rows of each of its slices; empty for one that is not sliced
_TREE = -1  # among the leaves of which something is wrong: the tree
_ROWWISE = (
    "use an elementwise one such as optax.adamw or optax.lion, not in a wrapper that looks at whole arrays; give masks as trees (to"
    " a function, a parameter's path ends in its rows); write the layers as a Python loop; or pass num_stages=1"
)
_MOVABLE = 1024  # the most elements of a value that may move between stages in an update
_LINE_SEARCH = re.compile(r"missing \d+ required keyword-only arguments?: .*'value_fn'")  # an update that wants to call the loss


def unread_gradients(optimizer: optax.GradientTransformation, params: Params, loss: Aval) -> frozenset[int]:
    """The parameter leaves whose gradient changes nothing, as with ``optax.set_to_zero``: the optimizer freezes them."""
    graph, _ = traced_update(optimizer, params, loss)
    read = ancestors(graph, variables(graph.outputs))
    return frozenset(k for k, var in enumerate(graph.inputs[: len(jax.tree.leaves(params))]) if var not in read)


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
    leaves, tree = jax.tree.flatten(params)
    plain, opt_leaves, opt_tree = flat_update(optimizer, params)
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
        norm = optax.tree.norm([grad for k, grad in enumerate(grads) if k in counted])
        new = (*results, *scale, *finite, norm, *squares)
        old = dict(enumerate((*inputs.params, *inputs.opt)))
        return [old[k] if k in kept else jnp.array(leaf, copy=True) for k, leaf in enumerate(new)]

    def init(params: list[Array]) -> list[Array]:
        return [jnp.array(leaf, copy=True) for leaf in jax.tree.leaves(optimizer.init(tree.unflatten(params)))]

    scale = () if scaling is None else shapes_of(scaling.init())
    state_owner, state = tuple(stage for stage, _ in states), tuple(shape for _, shape in states)
    inputs = UpdateInputs[Aval](tuple(leaves), tuple(opt_leaves), tuple(leaves), (loss,), scale, state, state)
    init_graph, _ = trace(init, leaves)
    others = tuple(owner), (loss_stage,), (loss_stage,) * len(scale), state_owner, state_owner

    def placer_of(opt_owner: tuple[int | None, ...], kept: Collection[int]) -> _Placer:
        graph = _trace_update(functools.partial(update, kept=kept), inputs)
        graph = open_conditions(graph) if len(set(owner)) > 1 else graph
        return _Placer(graph, UpdateInputs(*refilled(inputs, graph.inputs)), UpdateInputs(tuple(owner), opt_owner, *others))

    placer = placer_of(_made_with(init_graph, owner), ())
    placer = placer_of(placer.opt_owner(), kept) if kept else placer
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    placed = placer.opt_owner(), placer.parts(paths), tuple(watched), scaling, state_owner, loss_stage, kept
    return Update(placer.graph, init_graph, opt_tree, tuple(owner), *placed)


def flat_update(optimizer: optax.GradientTransformation, params: Params) -> tuple[Callable[..., list[Array]], list[Aval], Tree]:
    """The update as a function of flat lists (gradients, state, parameters, loss); and the leaves and tree of the state."""
    tree = jax.tree.structure(params)
    try:
        opt_leaves, opt_tree = jax.tree.flatten(jax.eval_shape(optimizer.init, params))
    except Exception as error:
        error.add_note("jaxpp: raised while tracing the optimizer's init(params)")
        raise
    with_value = optax.with_extra_args_support(optimizer)

    def update(grads: Sequence[Array], opt: Sequence[Array], params: Sequence[Array], loss: Array) -> list[Array]:
        whole = tree.unflatten(params)
        updates, new_opt = with_value.update(tree.unflatten(grads), opt_tree.unflatten(opt), whole, value=loss)
        return [*jax.tree.leaves(optax.apply_updates(whole, updates)), *jax.tree.leaves(new_opt)]

    return update, opt_leaves, opt_tree


def traced_update(optimizer: optax.GradientTransformation, params: Params, loss: Aval) -> tuple[Graph, Tree]:
    """The flat graph of an update, and the shapes of the optimizer state.

    From gradients, state, parameters and loss to parameters and state.
    """
    update, opt_leaves, opt_tree = flat_update(optimizer, params)
    leaves = jax.tree.leaves(params)
    return _trace_update(update, leaves, opt_leaves, leaves, loss), opt_tree.unflatten(opt_leaves)


def _trace_update(update: Callable[..., list[Array]], *shapes: Tree) -> Graph:
    try:
        return trace(update, *shapes)[0]
    except Exception as error:
        if isinstance(error, TypeError) and _LINE_SEARCH.search(str(error)):
            sees = "gradients, its state, the parameters and the value of the loss"
            rule, fix = f"an optimizer sees {sees}, and cannot call the loss again", "use a transformation without a line search"
            raise OptimizerError("optimizer", rule, str(error), f"{fix}, such as optax.adamw or optax.sgd") from error
        what = "the optimizer's update(grads, state, params)"
        error.add_note(f"jaxpp: raised while tracing {what}; a transformation that takes more is given value=loss")
        raise


def _wide(grad: Array) -> Array:
    """A float16 gradient as float32: its square would vanish where it is small."""
    return grad.astype(jnp.float32) if grad.dtype == jnp.float16 else grad


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
        for eqn in self.graph.eqns:
            owned = [var for var in variables(eqn.invars) if var in place]
            if not owned:
                parts.append(None)
                continue
            stages = {place[var].stage for var in owned}
            largest = max(owned, key=_size)
            home = place[largest].stage if len(stages) == 1 or _size(largest) > 1 else HUB
            for var in owned:
                away = place[var].stage
                if away != home and _size(var) > _MOVABLE:
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
        for i, eqn in reversed(list(enumerate(self.graph.eqns))):
            part = parts[i]
            readers = [late[j] for var in eqn.outvars for j in users.get(var, ())]
            large = any(_size(var) > 1 for var in eqn.outvars)
            if part is not None and large and readers and results.isdisjoint(eqn.outvars):
                latest = min(reader.level - (reader.stage != part.stage) for reader in readers if reader is not None)
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
    """The bytes of the optimizer state that belong to each parameter leaf: those leaves whose path ends in the parameter's."""
    paths = {path: leaf for leaf, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(params))}
    num_bytes = [0] * len(paths)
    if optimizer is None:
        return tuple(num_bytes)
    for path, aval in jax.tree_util.tree_leaves_with_path(jax.eval_shape(optimizer.init, params)):
        leaf = next((paths[path[k:]] for k in range(len(path) + 1) if path[k:] in paths), None)
        if leaf is not None:
            num_bytes[leaf] += count_bytes(aval)
    return tuple(num_bytes)


def slicing_for(optimizer: optax.GradientTransformation | None, whole: Params, loops: _Sizes, single: _Sizes) -> Slicing:
    """The slices that a pipeline holds, where its optimizer treats the rows of the stacked parameters by themselves.

    Where it does not, what is read row by row (``single``) is held whole, and a cut loop over layers (``loops``) refuses it.
    """
    slicing = slicing_of(loops, single)
    if optimizer is None or not slicing.any:
        return slicing
    plain = _Treatments(optimizer, whole)
    wrong = _objections(optimizer, plain, whole, slicing)
    while wrong and any(single):
        cannot = {leaf for leaf in wrong if leaf != _TREE and single[leaf]} or set(range(len(single)))
        single = [() if leaf in cannot else sizes for leaf, sizes in enumerate(single)]
        slicing = slicing_of(loops, single)
        wrong = _objections(optimizer, plain, whole, slicing)
    if wrong:
        rule = "where a loop over layers is cut, the optimizer treats each layer of a stacked parameter by itself"
        raise OptimizerError("optimizer", rule, list(wrong.values()), _ROWWISE)
    return slicing


def _objections(optimizer: optax.GradientTransformation, plain: "_Treatments", whole: Params, slicing: Slicing) -> dict[int, str]:
    """What an optimizer does with sliced leaves that it may not, by leaf; or what is wrong with the trees, under ``_TREE``."""
    if not slicing.any:
        return {}
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(whole)]
    held = slicing.of(whole)
    try:
        sliced = _Treatments(optimizer, held)
    except Exception as error:  # noqa: BLE001  (whatever the optimizer makes of such a tree)
        return {_TREE: f"{type(error).__name__}: {error}"}
    wrong: dict[int, str] = {}
    for leaf, sizes in enumerate(slicing.sizes):
        if sizes:
            whole_done, odd, _ = plain.of(leaf)
            parts = [sliced.of(k) for k in slicing.leaves([leaf])]
            summed = next((use for _, _, use in parts if use), "")  # of slices: the only leaf's sum is the sum over all, too
            odd = odd or summed or ("" if all(done == whole_done for done, _, _ in parts) else "other equations for its slices")
            wrong |= {leaf: f"{paths[leaf]}: {odd}"} if odd else {}
    if not wrong and assembled_shapes(sliced.state) != plain.state:
        wrong = {_TREE: "an optimizer state of another structure"}
    return wrong


class _Treatments:
    def __init__(self, optimizer: optax.GradientTransformation, params: Params):
        graph, self.state = traced_update(optimizer, params, jax.ShapeDtypeStruct((), scale_dtype()))
        self.graph, self.num_params = open_conditions(graph), len(jax.tree.leaves(params))
        self.users = self.graph.users()
        self.opt = len(self.graph.inputs) - self.num_params - 1
        self.alike = self._alike()

    def _alike(self) -> set[Var]:
        """The arrays made of scalars alone, each of one number, and those made row by row of them and of optimizer leaves."""
        even, mates = set[Var](), set(self.graph.inputs[self.num_params : self.opt])
        for eqn in self.graph.eqns:
            arrays = [var for var in variables(eqn.invars) if aval_of(var).shape != () and var not in even]
            if not arrays and (kind_of(eqn) in ELEMENTWISE or kind_of(eqn) == "broadcast_in_dim"):
                even.update(eqn.outvars)
            elif mates.issuperset(arrays) and kind_of(eqn) in ELEMENTWISE:
                mates.update(eqn.outvars)
        return even | mates

    def of(self, leaf: int) -> tuple[list[tuple[str, list[str]]], str, str]:
        """What is done to the rows of a parameter and its gradient; what else, if anything; what their sum does beside a norm."""
        by_row, sums = {self.graph.inputs[leaf], self.graph.inputs[self.opt + leaf]}, set[Var]()
        waiting = sorted({i for var in by_row for i in self.users.get(var, ())})
        seen = set(waiting)
        done: list[tuple[str, list[str]]] = []
        odd = use = ""
        while waiting:
            eqn = self.graph.eqns[heapq.heappop(waiting)]
            operands = variables(eqn.invars)
            reached = by_row
            if not sums.isdisjoint(operands):
                kept, fine = _summed(eqn, sums)
                reached = sums if kept else None
                use = use or ("" if fine else eqn.primitive.name)
            else:
                done.append((eqn.primitive.name, [str(atom) for atom in eqn.invars if isinstance(atom, Literal)]))
                alike = (var in by_row or var in self.alike for var in operands if aval_of(var).shape != ())
                if kind_of(eqn) == "reduce_sum" and aval_of(eqn.outvars[0]).shape == ():
                    reached = sums
                elif kind_of(eqn) not in ELEMENTWISE or not all(alike):
                    odd = odd or eqn.primitive.name
            if reached is not None:
                reached.update(eqn.outvars)
                for i in {i for var in eqn.outvars for i in self.users.get(var, ())} - seen:
                    seen.add(i)
                    heapq.heappush(waiting, i)
        return done, odd, use


def _summed(eqn: JaxprEqn, sums: set[Var]) -> tuple[bool, bool]:
    """For an equation that reads the sum of a leaf: whether its result is such a sum again, and whether it may.

    A sum may be added to those of other leaves, as in a norm over all; after that it is no leaf's. Zero is added to the first.
    """
    if is_cast(eqn):
        return True, True
    others = [atom for atom in eqn.invars if isinstance(atom, Literal) or atom not in sums]
    if kind_of(eqn) not in ("add", "add_any") or len(others) > 1:
        return False, False
    zero = all(number_in(atom) == 0 for atom in others)
    return zero, zero or not any(isinstance(atom, Literal) for atom in others)
