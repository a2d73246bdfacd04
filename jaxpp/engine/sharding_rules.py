"""Which axis of which parameter is sharded over ``model``, and which over ``data``.

Over ``model`` the compiler divides the work accordingly: two layers sharded by column and then by row need one all-reduce. Over
``data`` leaves are divided only while nobody computes with them: each replica then holds a part of a parameter between steps, of
the sum of its gradients, and of its optimizer state.
"""

import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from jaxpp.errors import ArgumentError, shown
from jaxpp.stages.axes import DATA, MODEL, RankAxes, axes_of_spec, axis_names
from jaxpp.stages.jaxpr import aval_of, describe
from jaxpp.stages.loss.traced_loss import TracedLoss, fits_pattern, path_name
from jaxpp.types import Aval, Leaf, Params, Tree

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


def specs_of(shardings: Tree, params: Params, axes: RankAxes, *, evenly: bool = True) -> tuple[PartitionSpec, ...]:
    """How each parameter leaf is sharded over the ``model`` axis of a rank, and divided over ``data``; empty if none can be.

    ``shardings``: rules, ``PartitionSpec``s or ``NamedSharding``s by path or pattern; a tree of these; a function of a path and a
    shape that returns one; pairs of a regular expression and a ``PartitionSpec``, of which the first that is found in a path
    counts; or Flax's logical axis rules (pairs of names), for parameters with such names. None: as the parameters say themselves,
    by Flax's metadata (axes of the mesh), or as arrays that are sharded already. ``axes`` say what the names in specs stand
    for. Not ``evenly``: ranks are of unequal width, and ``check_even`` says later whether each can share what it holds.

    Raises:
        ArgumentError: rules that fit no parameter, or shardings that cannot be.
    """
    places = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda leaf: leaf is None)  # None may stand where a leaf may be
    leaves = [(path, leaf) for path, leaf in places if leaf is not None]
    if shardings is None and math.prod(axes.sizes.values()) == 1:
        return ()
    paths = [path_name(path) for path, _ in leaves]
    if shardings is None:
        specs = _own(params, [leaf for _, leaf in leaves], axes)
        if axes.sizes[MODEL] == 1:  # names are those of a mesh that has more axes, or of no mesh
            known = axes.called(DATA)
            specs = [PartitionSpec(*(entry if known.issuperset(axis_names(entry)) else None for entry in spec)) for spec in specs]
            if not any(map(axes_of_spec, specs)):
                return ()
    elif callable(shardings):
        pairs = zip(paths, leaves, strict=True)
        specs = [_spec_of(shardings(path, tuple(leaf.shape)), path, len(leaf.shape)) for path, (_, leaf) in pairs]
        _check_model(specs, paths, axes)
    elif isinstance(shardings, Sequence) and not isinstance(shardings, (str, PartitionSpec)) and all(map(_is_pair, shardings)):
        by_regex = all(isinstance(spec, (PartitionSpec, NamedSharding)) for _, spec in shardings) and bool(shardings)
        specs = _matched(shardings[::-1], places, _is_found) if by_regex else _logical(list(shardings), params)
    else:
        by_path = dict(_by_path(shardings)) if isinstance(shardings, Mapping) else {}
        flat = jax.tree.leaves(shardings, is_leaf=_is_rule)
        if isinstance(shardings, Mapping) and all(map(_is_rule, by_path.values())):  # without any, nothing is sharded
            specs = _matched(by_path.items(), places, fits_pattern)
        elif len(flat) in (len(leaves), len(places)) and all(map(_is_rule, flat)):
            if len(flat) > len(leaves):
                flat = [rule for rule, (_, leaf) in zip(flat, places, strict=True) if leaf is not None]
            specs = [_spec_of(rule, path, len(leaf.shape)) for rule, path, (_, leaf) in zip(flat, paths, leaves, strict=True)]
        else:
            rule, got = "a tree of shardings has one for each parameter", f"{len(flat)} leaves for {len(leaves)} parameters"
            fix = f"pass such a tree, {_rules_like(paths, [leaf for _, leaf in leaves])}"
            raise ArgumentError("shardings", rule, got, fix)
    specs = [axes.named(spec) for spec in specs]
    _check(specs, leaves, axes.sizes if evenly else {})
    return tuple(specs)


def _rules_like(paths: Sequence[str], leaves: Sequence[Leaf]) -> str:
    """What may be passed for these parameters, for the end of a sentence."""
    wide = next((path for path, leaf in zip(paths, leaves, strict=True) if len(leaf.shape) > 1), paths[0] if paths else "*")
    return f'a dictionary by path, such as {{"{wide}": "column"}}, or what jaxpp.propose_shardings(loss_fn, params, batch) returns'


def _check_model(specs: Sequence[PartitionSpec], paths: Sequence[str], axes: RankAxes) -> None:
    """Refuse that a function shards parameters over ``model`` where there is no such axis; the options refuse all other rules."""
    names = axes.called(MODEL)
    if axes.whole is not None and not names.isdisjoint(axes.whole.axis_names):
        return
    if sharded := [path for path, spec in zip(paths, specs, strict=True) if not names.isdisjoint(axes_of_spec(spec))]:
        rule = 'parameters are sharded over the "model" axis of a mesh, or divided over "data"'
        got = f'a function that shards {", ".join(sharded[:3])} over "model", and no mesh with that axis'
        fix = 'pass for example mesh=jax.make_mesh((2, 2), ("pipe", "model")), or leave shardings out'
        raise ArgumentError("shardings", rule, got, fix)


def _is_rule(value: object) -> bool:
    return value is None or isinstance(value, (str, PartitionSpec, NamedSharding))


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def _by_path(tree: Mapping[str, Tree], prefix: str = "") -> Iterator[tuple[str, Tree]]:
    """The rules of a dictionary by path or pattern, or of dictionaries in it."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _by_path(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _spec_of(rule: Tree, path: str, ndim: int) -> PartitionSpec:
    if isinstance(rule, str) and rule in RULES:
        return RULES[rule](path, ndim)
    if isinstance(rule, NamedSharding):
        return rule.spec
    if rule is None or isinstance(rule, PartitionSpec):
        return _WHOLE if rule is None else rule
    names = ", ".join(map(repr, RULES))
    raise ArgumentError(f"shardings[{path!r}]", f"a rule is one of {names}", shown(rule), "pass one, or a PartitionSpec")


def _own(params: Params, leaves: Sequence[Leaf], axes: RankAxes) -> list[PartitionSpec]:
    """What parameters say of themselves: Flax's metadata where there is some, or how an array is sharded along ``model``."""
    named = [
        [spec if isinstance(spec, PartitionSpec) else _WHOLE for spec in jax.tree.leaves(tree, is_leaf=_is_rule)]
        for tree in _metadata(params)
    ]
    named += [[_divided(leaf, axes) for leaf in leaves]]
    columns = [specs for specs in named if len(specs) == len(leaves)]
    return [next((spec for spec in specs if any(spec)), _WHOLE) for specs in zip(*columns, strict=True)]


def _metadata(params: Params) -> Iterator[Tree]:
    from flax.linen import get_logical_axis_rules, get_partition_spec, spmd  # noqa: PLC0415  (takes long, and few need it)

    named, rules = get_partition_spec(params), get_logical_axis_rules()
    yield spmd.logical_to_mesh(named, rules) if _names_in(named).intersection(name for name, _ in rules) else named
    if "flax.nnx" in sys.modules:
        from flax import nnx  # noqa: PLC0415

        leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        if any(isinstance(leaf, nnx.Variable) for leaf in leaves):
            yield nnx.get_partition_spec(params)


def _names_in(named: Tree) -> set[object]:
    """The names in a tree of ``PartitionSpec``s."""
    return {name for spec in jax.tree.leaves(named, is_leaf=_is_rule) for name in spec or ()}


def _divided(leaf: Leaf, axes: RankAxes) -> PartitionSpec:
    """How an array is sharded along ``model``; its other axes were those of the devices it comes from."""
    sharding = getattr(leaf, "sharding", None)
    return over_model(axes.named(sharding.spec)) if isinstance(sharding, NamedSharding) else _WHOLE


def _logical(rules: list[tuple[str, Tree]], params: Params) -> list[PartitionSpec]:
    """By the axis names of Flax's annotated modules, for each of which there is a rule."""
    from flax.linen import get_partition_spec, spmd  # noqa: PLC0415  (takes long, and few need it)

    named = get_partition_spec(params)
    names = _names_in(named)
    if not names.intersection(name for name, _ in rules):
        rule = "logical axis rules map names that parameters give their axes"
        known = ", ".join(sorted(repr(name) for name in names if name is not None)) or "no names (of Flax's metadata)"
        leaves = jax.tree_util.tree_leaves_with_path(params)
        fix = f"map those names, or pass {_rules_like([path_name(path) for path, _ in leaves], [leaf for _, leaf in leaves])}"
        got = f"rules for {', '.join(repr(name) for name, _ in rules) or 'nothing'}; the axes have {known}"
        raise ArgumentError("shardings", rule, got, fix)
    return jax.tree.leaves(spmd.logical_to_mesh(named, rules), is_leaf=_is_rule)


def _is_found(path: str, pattern: str) -> bool:
    """Whether a regular expression is found in a path."""
    try:
        return re.search(pattern, path) is not None
    except (re.error, TypeError) as error:
        rule, fix = "names beside a PartitionSpec in a list of pairs are regular expressions", "write it as one"
        fix += ', for example (".*/kernel", PartitionSpec(...)), or pass a dictionary, whose patterns are like "*/kernel"'
        raise ArgumentError("shardings", rule, f"{pattern!r}: {error}", fix) from error


def _matched(
    rules: Iterable[tuple[str, Tree]], leaves: Sequence[tuple[KeyPath, Aval | None]], matches: Callable[[str, str], bool]
) -> list[PartitionSpec]:
    """By path; where several patterns match, the last counts. A None among the leaves can be named, and has no sharding."""
    paths = [path_name(path) for path, _ in leaves]
    specs, missed = [_WHOLE] * len(leaves), []
    for pattern, rule in rules:
        _spec_of(rule, pattern, 0)
        found = [k for k, path in enumerate(paths) if matches(path, pattern)]
        missed += [] if found else [pattern]
        for k in found:
            specs[k] = _spec_of(rule, paths[k], len(getattr(leaves[k][1], "shape", ())))
    if missed:
        rule = "a pattern names parameters or modules by their path"
        fix = "use paths like those below" + ", with * for any part" * (matches is fits_pattern)
        got, picture = [f"{pattern!r} matches none" for pattern in missed], "\n".join(paths[:12] + ["..."] * (len(paths) > 12))
        raise ArgumentError("shardings", rule, got, fix, picture)
    return [spec for spec, (_, leaf) in zip(specs, leaves, strict=True) if leaf is not None]


def _check(specs: Sequence[PartitionSpec], leaves: Sequence[tuple[KeyPath, Aval]], sizes: Mapping[str, int]) -> None:
    wrong = []
    for spec, (path, leaf) in zip(specs, leaves, strict=True):
        where = f"{path_name(path)}, {describe(leaf)}: {spec}"
        named = axes_of_spec(spec)
        if others := [axis for axis in named if axis not in (DATA, MODEL)]:
            wrong.append(f"{where} has another axis, {others[0]!r}")
        elif len(spec) > len(leaf.shape) or len(set(named)) < len(named):
            wrong.append(f"{where} does not fit its axes")
        elif not fits(spec, leaf.shape, sizes):
            counts = [num_parts(entry, sizes) for entry in spec]
            uneven = next(count for count, size in zip(counts, leaf.shape, strict=False) if size % count)
            wrong.append(f"{where} is not divisible by {uneven}")
    if wrong:
        fix = 'change the sharding, or map Flax\'s axis names: shardings=[("mlp", "model"), ("embed", None)]'
        raise ArgumentError("shardings", 'axes of a parameter may be sharded over "model" and "data", evenly', wrong, fix)


def check_even(specs: Sequence[PartitionSpec], loss: TracedLoss, widths: Sequence[Collection[int]], fix: str) -> None:
    """Refuse parameters that ranks of these ``widths``, of each leaf those that hold it, cannot share evenly.

    Raises:
        ArgumentError: an axis of a parameter is not divisible by the number of devices of a rank.
    """
    wrong = [
        f"{path}, {describe(aval_of(var))}: {spec} is not divisible by {width}, the devices of a rank that holds it"
        for path, var, spec, each in zip(loss.param_paths, loss.params, specs, widths, strict=bool(specs))
        for width in sorted(each)
        if not fits(over_model(spec), aval_of(var).shape, {MODEL: width})
    ]
    if wrong:
        raise ArgumentError("shardings", 'axes of a parameter may be sharded over "model", evenly', wrong, fix)


def num_parts(given: Tree, sizes: Mapping[str, int]) -> int:
    """Into how many parts axes of a mesh of these sizes divide, of a whole ``PartitionSpec`` or an entry of one."""
    names = axes_of_spec(given) if isinstance(given, PartitionSpec) else axis_names(given)
    return math.prod(sizes.get(axis, 1) for axis in names)


def fits(spec: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int]) -> bool:
    """Whether devices share an array evenly."""
    return all(size % num_parts(entry, sizes) == 0 for entry, size in zip(spec, shape, strict=False))


def over_model(spec: PartitionSpec) -> PartitionSpec:
    """How the leaf is sharded while it is computed with."""
    return PartitionSpec(*(MODEL if MODEL in axis_names(entry) else None for entry in spec))


def over_both(spec: PartitionSpec, shape: Sequence[int], sizes: Mapping[str, int], *, divide: bool) -> PartitionSpec:
    """How the leaf is held divided over ``data``: as ``spec`` says, or else, to ``divide``, along the first axis that can be."""
    if not fits(spec, shape, sizes):  # rows of a stacked leaf are fewer on each stage than the axis divides
        divide = divide or DATA in axes_of_spec(spec)
        spec = over_model(spec)
    entries = [axis_names(entry) for entry in spec] + [()] * (len(shape) - len(spec))
    if divide and not any(DATA in entry for entry in entries):
        counts = [num_parts((*entry, DATA), sizes) for entry in entries]
        able = [k for k, (count, size) in enumerate(zip(counts, shape, strict=True)) if size and size % count == 0]
        for k in sorted(able, key=lambda k: len(entries[k]))[:1]:
            entries[k] = (*entries[k], DATA)
    ordered = [tuple(axis for axis in (MODEL, DATA) if axis in each) for each in entries]  # parts of a shard, not shards of a part
    while ordered and not ordered[-1]:
        ordered.pop()
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in ordered))
