"""Whether an optimizer may run on the slices of a stacked parameter as it would on the whole.

It may if it treats every row by itself: an elementwise update does, and so does a norm over all parameters, to which the slices
add up. One that takes a norm of each parameter (lamb), or factors it (adafactor), or tells parameters apart by the last key of
their path, does not, and is refused. To find out, the update is traced on the user's tree and on the sliced one, and what happens
to the leaf and to each of its slices is compared.
"""

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
            found, odd = _treatment(plain[0], leaf, len(paths))
            same = all(_treatment(sliced[0], k, len(jax.tree.leaves(held)))[0] == found for k in slicing.leaves([leaf]))
            odd = odd or ("" if same else "other equations for its slices")
            wrong += [f"{paths[leaf]}: {odd}"] if odd else []
    if not wrong and assembled_shapes(sliced[1]) != plain[1]:
        wrong = ["an optimizer state of another structure"]
    if wrong:
        raise _refusal(wrong[:8])


def _refusal(got: list[str]) -> OptimizerError:
    return OptimizerError(
        "optimizer",
        "where a loop over layers is cut, the optimizer treats each layer of a stacked parameter by itself",
        got,
        "use an elementwise one such as optax.adamw or optax.lion, not in a wrapper that looks at whole arrays; give masks as trees"
        " (to a function, a parameter's path ends in its rows); write the layers as a Python loop; or pass num_stages=1",
    )


def _traced(optimizer: optax.GradientTransformation, params: Any) -> tuple[Graph, Any]:
    update, opt_leaves, tree = flat_update(optimizer, params)
    leaves = jax.tree.leaves(params)
    graph = trace_update(update, leaves, opt_leaves, leaves, jax.ShapeDtypeStruct((), scale_dtype()))
    return graph, tree.unflatten(opt_leaves)


def _treatment(graph: Graph, leaf: int, num_params: int) -> tuple[list[Any], str]:
    """What is done to a parameter and its gradient, in order; and what of that is not done row by row, if anything."""
    num_opt = len(graph.inputs) - 2 * num_params - 1
    given = graph.inputs[leaf], graph.inputs[num_params + num_opt + leaf]
    shape = aval_of(given[0]).shape
    by_row, even, sums = set(given), set[Var](), set[Var]()
    mates = {var for var in graph.inputs[num_params : num_params + num_opt] if aval_of(var).shape == shape}
    done: list[Any] = []
    odd = ""
    for eqn in graph.eqns:
        operands = variables(eqn.invars)
        if by_row.isdisjoint(operands) and sums.isdisjoint(operands):
            plain = [var for var in operands if aval_of(var).shape != () and var not in even]
            if not plain and eqn.primitive.name in _ROWWISE | {"broadcast_in_dim"}:
                even.update(eqn.outvars)
            elif mates.issuperset(plain) and eqn.primitive.name in _ROWWISE:
                mates.update(eqn.outvars)
            continue
        done.append((eqn.primitive.name, [str(atom) for atom in eqn.invars if isinstance(atom, Literal)]))
        if not sums.isdisjoint(operands):
            kept, fine = _summed(eqn, sums)
            sums.update(eqn.outvars if kept else ())
        elif eqn.primitive.name == "reduce_sum" and aval_of(eqn.outvars[0]).shape == ():
            sums.update(eqn.outvars)
            fine = True
        else:
            known = by_row | even | mates
            fine = eqn.primitive.name in _ROWWISE and all(aval_of(var).shape == () or var in known for var in operands)
            by_row.update(eqn.outvars)
        odd = odd or ("" if fine else eqn.primitive.name)
    return done, odd


def _summed(eqn: JaxprEqn, sums: set[Var]) -> tuple[bool, bool]:
    """For an equation that reads the sum of a leaf: whether its result is such a sum again, and whether it may.

    A sum may be added to those of other leaves, as in a norm over all; after that it is no leaf's.
    """
    if eqn.primitive.name == "convert_element_type":
        return True, True
    others: Sequence[Any] = [atom for atom in eqn.invars if isinstance(atom, Literal) or atom not in sums]
    if eqn.primitive.name not in ("add", "add_any") or len(others) > 1:
        return False, False
    zero = all(isinstance(atom, Literal) and atom.val == 0 for atom in others)
    return zero, zero or not any(isinstance(atom, Literal) for atom in others)
