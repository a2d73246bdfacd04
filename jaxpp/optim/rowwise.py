"""Whether an optimizer may run on the slices of a stacked parameter as it would on the whole.

It may if it treats every row by itself: an elementwise update does, and so does a norm over all parameters, to which the slices
add up. One that takes a norm of each parameter (lamb), or factors it (adafactor), or tells parameters apart by the last key of
their path, does not. To find out, the update is traced on the user's tree and on the sliced one, and what happens to a leaf and to
its slices is compared.
"""

import heapq
from collections.abc import Sequence

import jax
import optax
from jax.extend.core import JaxprEqn, Literal, Var

from jaxpp.errors import OptimizerError
from jaxpp.optim.owners import flat_update, open_conditions, trace_update
from jaxpp.stages.graph import Graph
from jaxpp.stages.jaxpr import ELEMENTWISE, aval_of, is_cast, kind_of, number_in, variables
from jaxpp.stages.loss.microbatch import scale_dtype
from jaxpp.stages.loss.traced_loss import path_name
from jaxpp.stages.stacked import Slicing, assembled_shapes, slicing_of
from jaxpp.types import Params, Tree

Sizes = Sequence[tuple[int, ...]]
"""For each leaf the rows of each of its slices; empty for one that is not sliced."""

_TREE = -1
_FIX = (
    "use an elementwise one such as optax.adamw or optax.lion, not in a wrapper that looks at whole arrays; give masks as trees (to"
    " a function, a parameter's path ends in its rows); write the layers as a Python loop; or pass num_stages=1"
)


def slicing_for(optimizer: optax.GradientTransformation | None, whole: Params, loops: Sizes, single: Sizes) -> Slicing:
    """The slices that a pipeline holds, where its optimizer treats the rows of the stacked parameters by themselves.

    Where it does not, what is read row by row (``single``) is held whole, as in the user's tree; where a loop over layers was cut
    (``loops``), which cannot run on a whole leaf, the optimizer is refused.
    """
    slicing = slicing_of(loops, single)
    if optimizer is None or not slicing.any:
        return slicing
    plain = _traced(optimizer, whole)
    wrong = _objections(optimizer, plain, whole, slicing)
    while wrong and any(single):
        cannot = {leaf for leaf in wrong if leaf != _TREE and single[leaf]} or set(range(len(single)))
        single = [() if leaf in cannot else sizes for leaf, sizes in enumerate(single)]
        slicing = slicing_of(loops, single)
        wrong = _objections(optimizer, plain, whole, slicing)
    if wrong:
        rule = "where a loop over layers is cut, the optimizer treats each layer of a stacked parameter by itself"
        raise OptimizerError("optimizer", rule, list(wrong.values()), _FIX)
    return slicing


def _objections(
    optimizer: optax.GradientTransformation, plain: "tuple[_Treatments, Tree]", whole: Params, slicing: Slicing
) -> dict[int, str]:
    """What an optimizer does with sliced leaves that it may not, by leaf; or what is wrong with the trees, under ``_TREE``."""
    if not slicing.any:
        return {}
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(whole)]
    held = slicing.of(whole)
    try:
        sliced = _traced(optimizer, held)
    except Exception as error:  # noqa: BLE001  (whatever the optimizer makes of such a tree)
        return {_TREE: f"{type(error).__name__}: {error}"}
    wrong: dict[int, str] = {}
    for leaf, sizes in enumerate(slicing.sizes):
        if sizes:
            whole_done, odd, _ = plain[0].of(leaf)
            parts = [sliced[0].of(k) for k in slicing.leaves([leaf])]
            summed = next((use for _, _, use in parts if use), "")  # of slices: the only leaf's sum is the sum over all, too
            odd = odd or summed or ("" if all(done == whole_done for done, _, _ in parts) else "other equations for its slices")
            wrong |= {leaf: f"{paths[leaf]}: {odd}"} if odd else {}
    if not wrong and assembled_shapes(sliced[1]) != plain[1]:
        wrong = {_TREE: "an optimizer state of another structure"}
    return wrong


def _traced(optimizer: optax.GradientTransformation, params: Params) -> tuple["_Treatments", Tree]:
    update, opt_leaves, tree = flat_update(optimizer, params)
    leaves = jax.tree.leaves(params)
    graph = open_conditions(trace_update(update, leaves, opt_leaves, leaves, jax.ShapeDtypeStruct((), scale_dtype())))
    return _Treatments(graph, len(leaves)), tree.unflatten(opt_leaves)


class _Treatments:
    """Finds what an update does with a parameter, following its own equations alone."""

    def __init__(self, graph: Graph, num_params: int):
        self.graph = graph
        self.users = graph.users()
        self.opt = len(graph.inputs) - num_params - 1
        self.num_params = num_params
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
