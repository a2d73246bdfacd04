"""The manifest of a bank: which folder holds each set, and what the sets look like, as values that JSON gives back unchanged.

A set's own folder holds its arrays. What the arrays cannot say is kept here: names that are no texts, and whether a node of the
parameters was a dict, a list or a tuple, so that a set can be restored into a bank that has never seen it. ::

    {"jaxpp_bank": 1,
     "sets": [[name, folder, number of its form], ...],
     "forms": [{"params": the nodes, or null, "leaves": [[path, dtype, shape], ...]}, ...]}
"""

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.errors import BankError, shown
from jaxpp.stages.jaxpr import describe
from jaxpp.tasks.set_layout import SetLayout
from jaxpp.types import Params, Tree

__all__ = ["Json", "SavedLeaf", "SavedSet", "SetForm", "encoded_name", "layout_of", "read_manifest", "write_manifest"]

Json = Any
"""What JSON gives back unchanged: dicts with texts as keys, lists, texts, numbers, booleans, None."""

_VERSION = 1
_LEAF, _NONE = "leaf", "none"


class SavedLeaf(NamedTuple):
    """A leaf of a set: its path, such as ``params['w']``, its dtype by name, and its shape."""

    path: str
    dtype: str
    shape: tuple[int, ...]


class SetForm(NamedTuple):
    """What a saved set looks like.

    Attributes:
        params: the dicts, lists and tuples of the parameters; None if there are nodes of other kinds.
        leaves: of the parameters, then of the optimizer state.
    """

    params: Json
    leaves: tuple[SavedLeaf, ...]

    @classmethod
    def of(cls, layout: SetLayout) -> "SetForm":
        """The form of a set in a bank."""
        trees = dict(zip(("params", "opt_state"), layout.fill(layout.shapes), strict=True))
        found = [(key, *pair) for key, tree in trees.items() for pair in jax.tree_util.tree_leaves_with_path(tree)]
        leaves = (SavedLeaf(key + jax.tree_util.keystr(path), str(aval.dtype), tuple(aval.shape)) for key, path, aval in found)
        return cls(_nodes(trees["params"]), tuple(leaves))

    def differences(self, layout: SetLayout) -> list[str]:
        """How the leaves of a set in a bank differ from these: a line for each difference."""
        saved, here = ({leaf.path: describe(leaf) for leaf in form.leaves} for form in (self, SetForm.of(layout)))
        return [
            f"{path} is {saved.get(path, 'missing')} in the manifest, {here.get(path, 'missing')} in the bank"
            for path in dict.fromkeys((*saved, *here))
            if saved.get(path) != here.get(path)
        ]


class SavedSet(NamedTuple):
    """A set in a manifest: its folder, and what it looks like."""

    folder: str
    form: SetForm


def encoded_name(name: Hashable) -> Json:
    """A name as JSON: texts, numbers, booleans and None are themselves, a tuple is a list.

    Raises:
        TypeError: for all other names, and for numbers that JSON does not have.
    """
    if isinstance(name, np.generic):
        name = name.item()  # which is equal to it, and has its hash
    if type(name) is tuple:
        return list(map(encoded_name, name))
    if name is not None and (type(name) not in (str, int, float, bool) or (type(name) is float and not math.isfinite(name))):
        raise TypeError(shown(name))
    return name


def write_manifest(folders: Mapping[Hashable, str], layouts: Mapping[Hashable, SetLayout]) -> dict[str, Json]:
    """The manifest of sets that lie in these folders."""
    numbers: dict[SetLayout, int] = {}
    sets = [[encoded_name(name), folder, numbers.setdefault(layouts[name], len(numbers))] for name, folder in folders.items()]
    forms = [SetForm.of(layout) for layout in numbers]
    written = [{"params": form.params, "leaves": [[*leaf[:2], list(leaf.shape)] for leaf in form.leaves]} for form in forms]
    return {"jaxpp_bank": _VERSION, "sets": sets, "forms": written}


def read_manifest(where: str, manifest: Json) -> dict[Hashable, SavedSet]:
    """The sets that a manifest names, in its order.

    Raises:
        BankError: it is none, or of a later version of jaxpp.
    """
    version = manifest.get("jaxpp_bank") if isinstance(manifest, Mapping) else None
    if version not in (None, _VERSION):
        got, fix = f"version {version!r}; this jaxpp reads version {_VERSION}", "use a later jaxpp, such as the one that saved it"
        raise BankError(where, "a manifest is of a version that jaxpp knows", got, fix)
    try:
        forms = [
            SetForm(form["params"], tuple(SavedLeaf(path, dtype, tuple(shape)) for path, dtype, shape in form["leaves"]))
            for form in manifest["forms"]
        ]
        return {_decoded(name): SavedSet(folder, forms[number]) for name, folder, number in manifest["sets"]}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        fix = "pass what bank.save returned, as json or Orbax's JsonRestore give it back"
        raise BankError(where, "a manifest says where the sets of a bank are", shown(manifest), fix) from error


def layout_of(form: SetForm, init: Callable[[Params], Tree]) -> SetLayout | None:
    """The layout of a set that has this form, with the optimizer state that ``init`` makes; None if its nodes are not known."""
    if form.params is None:
        return None
    tree = jax.tree.structure(_tree(form.params))
    avals = [jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype)) for leaf in form.leaves[: tree.num_leaves]]
    opt_state = jax.eval_shape(init, tree.unflatten(avals))
    moments, opt_tree = jax.tree.flatten(opt_state)
    return SetLayout(tree, opt_tree, (*avals, *(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in moments)))


def _decoded(name: Json) -> Hashable:
    return tuple(map(_decoded, name)) if isinstance(name, list | tuple) else name


def _nodes(node: Tree) -> Json:
    """The dicts, lists and tuples of a tree of shapes; None if there is a node of another kind."""
    if isinstance(node, jax.ShapeDtypeStruct):
        return _LEAF
    if node is None:
        return _NONE
    try:
        keys = list(map(encoded_name, node)) if type(node) is dict else []
    except TypeError:
        return None
    if type(node) not in (dict, list, tuple):
        return None
    children = [_nodes(child) for child in (node.values() if type(node) is dict else node)]
    if None in children:
        return None
    return [type(node).__name__, [list(pair) for pair in zip(keys, children, strict=True)] if type(node) is dict else children]


def _tree(nodes: Json) -> Tree:
    """A tree with these nodes; its leaves are placeholders."""
    if nodes in (_LEAF, _NONE):
        return None if nodes == _NONE else _LEAF
    kind, children = nodes
    if kind == "dict":
        return {_decoded(key): _tree(child) for key, child in children}
    return {"list": list, "tuple": tuple}[kind](map(_tree, children))
