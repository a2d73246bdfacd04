"""Whether an optimizer may run on the slices of a stacked parameter as it would on the whole.

It may if it treats every row by itself: an elementwise update does, and so does a norm over all parameters, to which the slices
add up. One that takes a norm of each parameter (lamb), or factors it (adafactor), or tells parameters apart by the last key of
their path, does not, and is refused. To find out, the update is traced on the user's tree and on the sliced one, and what happens
to the leaf and to each of its slices is compared.
"""

import heapq
from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.extend.core import JaxprEqn, Literal, Var

from jaxpp.errors import OptimizerError
from jaxpp.runtime.optimizer import flat_update, trace_update
from jaxpp.stages.graph import Graph, aval_of, variables
from jaxpp.stages.loss import path_name
from jaxpp.stages.microbatch import scale_dtype
from jaxpp.stages.stack import Slicing, assembled_shapes

__all__ = ["check_sliced"]

_ROWWISE = frozenset(
    "abs add add_any and cbrt ceil clamp convert_element_type copy cos div eq erf exp exp2 expm1 floor ge gt integer_pow "
    "is_finite le log log1p logistic lt max min mul ne neg nextafter not or pow reduce_precision rem round rsqrt select_n sign sin "
    "sqrt square stop_gradient sub tanh xor".split()
)


def check_sliced(optimizer: optax.GradientTransformation, whole: Any, held: Any, slicing: Slicing) -> None:
    """Refuse an optimizer that does not treat the rows of the stacked parameters one by one.

    Args:
        optimizer: any optax transformation.
        whole: shapes of the user's parameter tree.
        held: shapes of the tree with slices.
        slicing: which leaves are sliced.

    Raises:
        OptimizerError: naming the parameters and what is done with them.
    """
    if not slicing.any:
        return
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(whole)]
    plain = _traced(optimizer, whole)
    try:
        sliced = _traced(optimizer, held)
    except Exception as error:
        raise _refusal([f"{type(error).__name__}: {error}"]) from error
    wrong = []
    for leaf, sizes in enumerate(slicing.sizes):
        if sizes:
            found, odd = plain[0].of(leaf)
            same = all(sliced[0].of(k)[0] == found for k in slicing.leaves([leaf]))
            odd = odd or ("" if same else "other equations for its slices")
            wrong += [f"{paths[leaf]}: {odd}"] if odd else []
    if not wrong and assembled_shapes(sliced[1]) != plain[1]:
        wrong = ["an optimizer state of another structure"]
    if wrong:
        raise _refusal(wrong)


def _refusal(got: list[str]) -> OptimizerError:
    return OptimizerError(
        "optimizer",
        "where a loop over layers is cut, the optimizer treats each layer of a stacked parameter by itself",
        got,
        "use an elementwise one such as optax.adamw or optax.lion, not in a wrapper that looks at whole arrays; give masks as trees"
        " (to a function, a parameter's path ends in its rows); write the layers as a Python loop; or pass num_stages=1",
    )


def _traced(optimizer: optax.GradientTransformation, params: Any) -> tuple["_Treatments", Any]:
    update, opt_leaves, tree = flat_update(optimizer, params)
    leaves = jax.tree.leaves(params)
    graph = trace_update(update, leaves, opt_leaves, leaves, jax.ShapeDtypeStruct((), scale_dtype()))
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
            if not arrays and eqn.primitive.name in _ROWWISE | {"broadcast_in_dim"}:
                even.update(eqn.outvars)
            elif mates.issuperset(arrays) and eqn.primitive.name in _ROWWISE:
                mates.update(eqn.outvars)
        return even | mates

    def of(self, leaf: int) -> tuple[list[Any], str]:
        """What is done to a parameter and its gradient, in order; and what of that is not done row by row, if anything."""
        by_row, sums = {self.graph.inputs[leaf], self.graph.inputs[self.opt + leaf]}, set[Var]()
        waiting = sorted({i for var in by_row for i in self.users.get(var, ())})
        seen = set(waiting)
        done: list[Any] = []
        odd = ""
        while waiting:
            eqn = self.graph.eqns[heapq.heappop(waiting)]
            operands = variables(eqn.invars)
            reached, zero = by_row, False
            if not sums.isdisjoint(operands):
                kept, zero, fine = _summed(eqn, sums)
                reached = sums if kept else None
            elif eqn.primitive.name == "reduce_sum" and aval_of(eqn.outvars[0]).shape == ():
                reached, fine = sums, True
            else:
                known = (var in by_row or var in self.alike for var in operands if aval_of(var).shape != ())
                fine = eqn.primitive.name in _ROWWISE and all(known)
            if not zero:
                done.append((eqn.primitive.name, [str(atom) for atom in eqn.invars if isinstance(atom, Literal)]))
            odd = odd or ("" if fine else eqn.primitive.name)
            if reached is not None:
                reached.update(eqn.outvars)
                for i in {i for var in eqn.outvars for i in self.users.get(var, ())} - seen:
                    seen.add(i)
                    heapq.heappush(waiting, i)
        return done, odd


def _summed(eqn: JaxprEqn, sums: set[Var]) -> tuple[bool, bool, bool]:
    """For an equation that reads the sum of a leaf: whether its result is such a sum again, whether it adds zero, whether it may.

    A sum may be added to those of other leaves, as in a norm over all; after that it is no leaf's. Zero is added to the first.
    """
    if eqn.primitive.name == "convert_element_type":
        return True, False, True
    others: Sequence[Any] = [atom for atom in eqn.invars if isinstance(atom, Literal) or atom not in sums]
    if eqn.primitive.name not in ("add", "add_any") or len(others) > 1:
        return False, False, False
    kept = all(isinstance(atom, Literal) and atom.val == 0 for atom in others)
    return kept, kept and bool(others), kept or not any(isinstance(atom, Literal) for atom in others)
