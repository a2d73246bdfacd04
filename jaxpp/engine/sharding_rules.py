"""Tensor parallelism by rule: which axis of which parameter is sharded over ``model``.

The compiler divides the work accordingly; two layers sharded by column and then by row need one all-reduce.
"""

import fnmatch
from collections.abc import Callable, Mapping, Sequence

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath

from jaxpp.errors import ArgumentError
from jaxpp.runtime.place import MODEL
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.loss.traced_loss import path_name
from jaxpp.stages.own_params import Joint
from jaxpp.types import Aval, Params, Tree

_WHOLE = PartitionSpec()


def _heads(path: str, ndim: int) -> PartitionSpec:
    """Attention as Flax has it: kernels ``[width, heads, head]`` of query, key and value, ``[heads, head, width]`` of out."""
    if path.split("/")[-2:-1] == ["out"]:
        return PartitionSpec(MODEL, None, None) if ndim == 3 else _WHOLE
    return PartitionSpec(None, MODEL, None) if ndim == 3 else PartitionSpec(MODEL, None) if ndim == 2 else _WHOLE


RULES: Mapping[str, Callable[[str, int], PartitionSpec]] = {
    "column": lambda _, ndim: PartitionSpec(*[None] * (ndim - 1), MODEL) if ndim else _WHOLE,
    "row": lambda _, ndim: PartitionSpec(*[None] * (ndim - 2), MODEL, None) if ndim > 1 else _WHOLE,
    "heads": _heads,
    "embedding": lambda _, ndim: PartitionSpec(MODEL, None) if ndim == 2 else _WHOLE,
    "replicated": lambda _, ndim: _WHOLE,  # noqa: ARG005
}
"""The rules that have a name, of a parameter's path and number of axes.

``"column"`` divides a layer's outputs, ``"row"`` its inputs, whose parts are summed; ``"embedding"`` its words.
"""


def specs_of(shardings: Tree, params: Params, num_shards: int) -> tuple[PartitionSpec, ...]:
    """How each parameter leaf is sharded over ``num_shards`` devices along ``model``; empty if none can be.

    ``shardings``: rules or ``PartitionSpec``s by path or pattern; a tree of these; Flax's logical axis rules (pairs) for parameters
    with such names; or None, for parameters with axis names of the mesh or none.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if shardings is None and num_shards == 1:
        return ()
    if isinstance(shardings, Mapping) and all(isinstance(value, (str, PartitionSpec)) for value in shardings.values()):
        specs = _matched(shardings, leaves)
    else:
        from flax.linen import get_partition_spec, spmd  # noqa: PLC0415  (takes long, and few need it)

        rules = list(shardings) if isinstance(shardings, Sequence) else []
        pairs = isinstance(shardings, Sequence) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in rules)
        named = get_partition_spec(params) if pairs or shardings is None else shardings
        found = spmd.logical_to_mesh(named, rules) if pairs else named
        specs = jax.tree.leaves(found, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
        if len(specs) != len(leaves) or not all(isinstance(spec, PartitionSpec) for spec in specs):
            rule = "a tree of shardings has one PartitionSpec for each parameter"
            got = f"{len(specs)} leaves for {len(leaves)} parameters"
            fix = 'pass such a tree, or a dictionary by path, for example {"*/fc": "column", "*/proj": "row"}'
            raise ArgumentError("shardings", rule, got, fix)
    _check(specs, leaves, num_shards)
    return tuple(specs)


def _matched(shardings: Mapping[str, str | PartitionSpec], leaves: Sequence[tuple[KeyPath, Aval]]) -> list[PartitionSpec]:
    """By path; where several patterns match, the last counts."""
    paths = [path_name(path) for path, _ in leaves]
    specs, missed = [_WHOLE] * len(leaves), []
    for pattern, rule in shardings.items():
        if isinstance(rule, str) and rule not in RULES:
            names = ", ".join(map(repr, RULES))
            raise ArgumentError(f"shardings[{pattern!r}]", f"a rule is one of {names}", repr(rule), "pass one, or a PartitionSpec")
        found = [k for k, path in enumerate(paths) if fnmatch.fnmatch(path, pattern) or fnmatch.fnmatch(path, f"{pattern}/*")]
        missed += [] if found else [pattern]
        for k in found:
            specs[k] = RULES[rule](paths[k], len(leaves[k][1].shape)) if isinstance(rule, str) else rule
    if missed:
        rule, fix = "a pattern names parameters or modules by their path", "use paths like those below, with * for any part"
        got, picture = [f"{pattern!r} matches none" for pattern in missed], "\n".join(paths[:12] + ["..."] * (len(paths) > 12))
        raise ArgumentError("shardings", rule, got, fix, picture)
    return specs


def _check(specs: Sequence[PartitionSpec], leaves: Sequence[tuple[KeyPath, Aval]], num_shards: int) -> None:
    wrong = []
    for spec, (path, leaf) in zip(specs, leaves, strict=True):
        where = f"{path_name(path)}, {describe(leaf)}: {spec}"
        if {axis for axis in spec if axis is not None} - {MODEL}:
            wrong.append(f"{where} has another axis")
        elif len(spec) > len(leaf.shape) or sum(axis == MODEL for axis in spec) > 1:
            wrong.append(f"{where} does not fit its axes")
        elif any(axis == MODEL and size % num_shards for axis, size in zip(spec, leaf.shape, strict=False)):
            wrong.append(f"{where} is not divisible by {num_shards}")
    if wrong:
        fix = 'change the sharding, or map Flax\'s axis names: shardings=[("mlp", "model"), ("embed", None)]'
        raise ArgumentError("shardings", 'one axis of a parameter may be sharded over "model", evenly', wrong, fix)


def opt_specs_of(opt_state: Tree, params: Params, specs: Sequence[PartitionSpec]) -> tuple[PartitionSpec, ...]:
    """How each optimizer leaf is sharded: like the parameter whose path it ends with, if it has its shape."""
    if not specs:
        return ()
    pairs = zip(jax.tree_util.tree_leaves_with_path(params), specs, strict=True)
    joint = isinstance(params, Joint)
    known = {(str(path[0]) if joint else "", *map(str, path[joint:])): (leaf.shape, spec) for (path, leaf), spec in pairs}
    parts = ("[0]", ".shared"), ("[1]", ".task")  # the state of a pair's optimizers is a pair
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        part = dict(parts)[str(path[0])] if joint else ""
        names = tuple(map(str, path))
        ends = (known.get((part, *names[k:])) for k in range(len(names)))
        shape, spec = next((end for end in ends if end is not None), ((), _WHOLE))
        found.append(spec if shape == leaf.shape else _WHOLE)
    return tuple(found)
