"""What of an optimizer a step runs that trains some of the parameters: ``Pipeline(trains=...)``.

The others keep their values, and so does what the optimizer holds for them: a generator's step leaves the moments and the count of
steps of its critic alone. Which leaves of the optimizer's state are whose is read off the traced update: a leaf belongs to the
parameters whose new values are computed from it. What the new values of both are computed from, the one count of an
``optax.adam`` over everything, would advance with the steps of both; it is refused.
"""

import fnmatch
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Var
from jax.tree_util import KeyPath

from jaxpp.errors import ArgumentError, OptimizerError
from jaxpp.optim.owners import traced_update
from jaxpp.stages.graph import Graph, marked
from jaxpp.stages.jaxpr import Atom
from jaxpp.stages.loss.microbatch import scale_dtype
from jaxpp.stages.loss.traced_loss import path_name
from jaxpp.types import Grads, Params, Tree

_MANY = 8  # names that an error lists


def untrained_leaves(params: Params, patterns: Sequence[str] | None) -> frozenset[int]:
    """The numbers of the parameter leaves that none of the paths, or patterns of paths, names; none if there are no patterns.

    Raises:
        ArgumentError: a pattern names no parameter.
    """
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    if missed := [f"{pattern!r} matches none" for pattern in patterns or () if not _named(paths, pattern)]:
        rule, fix = "a pattern names parameters or modules by their path", "use paths like those below, with * for any part"
        raise ArgumentError("trains", rule, missed, fix, "\n".join(paths[:12] + ["..."] * (len(paths) > 12)))
    return _untrained(params, patterns)


def _untrained(params: Params, patterns: Sequence[str] | None) -> frozenset[int]:
    if patterns is None:
        return frozenset()
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return frozenset(range(len(paths))).difference(*(_named(paths, pattern) for pattern in patterns))


def _named(paths: Sequence[str], pattern: str) -> set[int]:
    both = pattern, f"{pattern}/*"
    return {leaf for leaf, path in enumerate(paths) if any(fnmatch.fnmatchcase(path, each) for each in both)}


def kept_leaves(optimizer: optax.GradientTransformation, params: Params, untrained: frozenset[int]) -> frozenset[int]:
    """The leaves of the optimizer's state that a step leaves alone which trains all parameters but these.

    Raises:
        OptimizerError: a leaf belongs to parameters of both kinds.
    """
    if not untrained:
        return frozenset()
    graph, state = traced_update(optimizer, params, jax.ShapeDtypeStruct((), scale_dtype()))
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    kept, clash = set[int](), list[str]()
    for k, linked in enumerate(_belonging(graph, len(names), paths)):
        if linked and linked <= untrained:
            kept.add(k)
        elif linked & untrained:
            pair = names[min(linked - untrained)], names[min(linked & untrained)]
            where = f"state.opt_state{jax.tree_util.keystr(paths[k])}"
            clash.append(f"{where} belongs to {pair[0]}, which is trained, and to {pair[1]}, which is not")
    if clash:
        rule = "a step that trains some parameters leaves what the optimizer holds for the others as it is"
        got = clash[:_MANY] + [f"and {len(clash) - _MANY} more"] * (len(clash) > _MANY)
        fix = "give the parameters of each step an optimizer: optax.multi_transform({name: optax.adam(...), ...}, labels)"
        raise OptimizerError("trains", rule, got, fix)
    return frozenset(kept)


def _belonging(graph: Graph, count: int, paths: Sequence[KeyPath]) -> list[frozenset[int]]:
    """The parameters, of so many, to which each leaf of the optimizer's state belongs, by its traced update.

    Those that are computed from it; else those of the leaves from which its new value is; else those whose gradients or values it
    records; and if nothing of all this is, those of the leaves beside it in the tree.
    """
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


def _num_shared(path: KeyPath, other: KeyPath) -> int:
    """With how many equal keys two paths begin."""
    return next((k for k, (a, b) in enumerate(zip(path, other, strict=False)) if a != b), min(len(path), len(other)))


def part_of(optimizer: optax.GradientTransformation, patterns: Sequence[str] | None) -> optax.GradientTransformation:
    """The optimizer as a step runs it that trains the parameters of these paths; the optimizer itself if there are no patterns."""
    if patterns is None:
        return optimizer
    whole = optax.with_extra_args_support(optimizer)

    def update(updates: Grads, state: Tree, params: Params | None = None, **extra: Tree) -> tuple[Tree, Tree]:
        untrained = _untrained(params, patterns)  # of those that the optimizer sees, which may be none of a pattern's
        kept = kept_leaves(optimizer, params, untrained)

        def zeroed(tree: Tree) -> Tree:
            leaves, structure = jax.tree.flatten(tree)
            return structure.unflatten(jnp.zeros_like(leaf) if k in untrained else leaf for k, leaf in enumerate(leaves))

        new_updates, new = whole.update(zeroed(updates), state, params, **extra)
        leaves, structure = jax.tree.flatten(new)
        pairs = zip(jax.tree.leaves(state), leaves, strict=True)
        return zeroed(new_updates), structure.unflatten(old if k in kept else leaf for k, (old, leaf) in enumerate(pairs))

    return optax.GradientTransformationExtraArgs(optimizer.init, update)
