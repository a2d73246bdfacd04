"""The sets of a bank as files: each version of a set is a checkpoint of Orbax's, in a folder of its own that nothing overwrites.

A *manifest* says which folder holds each set, also those that earlier saves wrote, and what Orbax does not keep: names that are not
texts, tuples, and the dtypes and shapes of leaves. It is made of what JSON gives back unchanged::

    {"jaxpp_bank": 1, "sets": [[name, folder, number of its form], ...],
     "forms": [{"params": the nodes, or null, "leaves": [[path, dtype, shape], ...]}, ...]}
"""

import contextlib
import importlib
import math
import os
import re
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxpp.errors import BankError, shown
from jaxpp.runtime.interrupts import Hold
from jaxpp.runtime.processes.channel import agreement, texts_of_all
from jaxpp.runtime.processes.trees import array_handler
from jaxpp.runtime.progress import progress
from jaxpp.stages.jaxpr import describe
from jaxpp.tasks.host_store import HostCopy
from jaxpp.tasks.sets import BankSets, SetLayout, is_key
from jaxpp.types import Params, Tree

Json = Any  # what JSON gives back unchanged: dicts with texts as keys, lists, texts, numbers, booleans, None

_FORMAT = 1
_MANIFEST = (
    "a manifest says where the sets of a bank are",
    "pass what bank.save returned, as json or Orbax's JsonRestore give it back; if it is damaged, restore an earlier checkpoint",
)
_SET = "a set's folder is as it was saved", "restore an earlier manifest; if the folder is a copy, copy it again"
_FOLDER = re.compile(r"(set-[\w-]*-[0-9a-f]{16,})(\.orbax-checkpoint-tmp.*)?", re.ASCII)  # a set's folder, or unfinished one
_Directory = str | os.PathLike[str]


class _Saved(NamedTuple):
    path: str
    dtype: str
    shape: tuple[int, ...]


@dataclass
class _Account:
    """The newest folder of each set in a directory, with ``HostCopy.version``, and those that the last manifest names."""

    sets: dict[Hashable, tuple[str, object]] = field(default_factory=dict)
    named: frozenset[str] = frozenset()

    def close(self, names: Iterable[Hashable]) -> dict[Hashable, str]:
        """The folders of these sets, which are all that the newest manifest names."""
        self.sets = {name: self.sets[name] for name in names}
        folders = {name: folder for name, (folder, _) in self.sets.items()}
        self.named = frozenset(folders.values())
        return folders


class BankFiles:
    """Saves the sets of a bank, restores them, and deletes files; ``Bank`` says what each of the three promises."""

    def __init__(self, sets: BankSets, init: Callable[[Params], Tree], home: SingleDeviceSharding):
        self._sets, self._init, self._home = sets, init, home
        self._accounts: defaultdict[str, _Account] = defaultdict(_Account)
        self._last = _Account()  # of the last save or restore

    def save(self, directory: _Directory) -> dict[str, Json]:
        """Write the sets that changed, each to a folder of its own, and return the manifest."""
        where = f"bank.save({str(directory)!r})"
        ocp, path = _open(where, directory)
        if wrong := [f"{shown(name)}, a {type(name).__name__}" for name in self._sets.layouts if not _is_json(name)]:
            rule = "the name of a set that is saved is a text, a number, a boolean, None or a tuple of these"
            fix = "name the set otherwise: bank.add(str(name), bank.params(name), bank.opt_state(name))"
            raise BankError(where, rule, wrong, fix)
        self._sets.store.wait()
        layouts, copies = dict(self._sets.layouts), {name: self._sets.store.held(name) for name in self._sets.layouts}
        account, folders = self._accounts[str(path)], _folders(where, path, make=True)
        saved = {name: version for name, (folder, version) in account.sets.items() if folder in folders}
        changed = [name for name, copy in copies.items() if saved.get(name) is not copy.version]
        for name in changed:
            _check_paths(where, name, layouts[name])
        with agreement(where, jax.devices()) as agree:
            homes = [homes.processes for homes in self._sets.homes.values()]
            lines = {"sets": copies, "sets that changed": changed, "homes": homes}
            agree(lambda: {part: "\n".join(map(repr, items)) for part, items in lines.items()})
        token = texts_of_all(secrets.token_hex(6))[0]
        with contextlib.closing(_writer(ocp)) as writer, progress(changed, desc="sets saved", unit="set", after=2) as bar:
            for count, name in enumerate(bar):
                leaves = self._sets.everywhere(layouts[name], copies[name].leaves)
                tree = _saved_tree(layouts[name], [leaf if leaf.size else None for leaf in leaves])
                folder = f"set-{re.sub(r'[^A-Za-z0-9]+', '-', str(name))[:40].strip('-')}-{token}{count:04x}"
                done = f"{count} of the {len(changed)} sets that changed are saved, {name!r} is not"
                _write(where, writer, path / folder, ocp.args.PyTreeSave(tree), done)
                account.sets[name] = folder, copies[name].version
        self._last = account
        numbers: dict[SetLayout, int] = {}
        rows = account.close(copies).items()
        sets = [[_encoded(name), folder, numbers.setdefault(layouts[name], len(numbers))] for name, folder in rows]
        return {"jaxpp_bank": _FORMAT, "sets": sets, "forms": list(map(_form, numbers))}

    def restore(self, directory: _Directory, manifest: Json) -> None:
        """Give every set the values that a manifest names: all sets, or none."""
        where = f"bank.restore({str(directory)!r}, ...)"
        ocp, path = _open(where, directory)
        (sets, forms), store = _read_manifest(where, manifest), self._sets.store
        store.wait()
        if extra := [repr(name) for name in self._sets.layouts if name not in sets]:
            rule = "a bank is restored whole, so the manifest names all its sets"
            fix = "bank.remove(name) first; bank.add(name, params) afterwards, if the set is a new one"
            raise BankError(where, rule, f"sets that the manifest does not name: {', '.join(extra[:4])}", fix)
        for name in self._sets.layouts:
            store.check_idle(name, "be restored")
        there = _folders(where, path)
        with _reading(where, manifest, *_MANIFEST):
            layouts = self._layouts(where, sets, forms)
            if missing := [f"{name!r}: {folder} is not there" for name, (folder, _) in sets.items() if folder not in there]:
                fix = "pass the directory that the sets were saved in; a folder that bank.prune has deleted is gone"
                raise BankError(where, "the folders that a manifest names are in the directory", missing, fix)
        copies = {}
        bar = progress(sets.items(), desc="sets read", unit="set", after=2)
        with contextlib.closing(ocp.PyTreeCheckpointer()) as reader, bar as items:
            for name, (folder, _) in items:
                with _reading(where, f"{name!r}, in {path / folder}", *_SET):
                    copies[name] = self._read(where, ocp, reader, name, path / folder, layouts[name])
        with Hold() as hold:
            hold.begin()
            store.replace(copies)
            self._sets.layouts |= layouts
            self._last = self._accounts[str(path)]
            self._last.sets |= {name: (folder, copies[name].version) for name, (folder, _) in sets.items()}
            self._last.close(sets)

    def prune(self, directory: _Directory, manifests: Iterable[Json]) -> tuple[str, ...]:
        """Delete the folders of sets that nobody names, and return their names."""
        where = f"bank.prune({str(directory)!r}, manifests)"
        _, path = _open(where, directory)
        if isinstance(manifests, Mapping):
            raise BankError(where, "manifests are given as a list", "one manifest", "pass [manifest]")
        account = self._accounts[str(path)]
        kept = {folder for manifest in manifests for folder, _ in _read_manifest(where, manifest)[0].values()}
        kept |= {*account.named, *(folder for folder, _ in account.sets.values())}
        matches = [match for match in map(_FOLDER.fullmatch, sorted(_folders(where, path))) if match and match[1] not in kept]
        gone = tuple(match[0] for match in matches if (path / match[0]).is_dir() and not os.path.islink(path / match[0]))
        with agreement(where, jax.devices()) as agree:  # all have looked before the first deletes
            agree(lambda: {"folders": "\n".join(gone)})
        wrong: list[OSError] = []
        for folder in gone if jax.process_index() == 0 else ():
            try:
                (path / folder).rmtree()
            except OSError as error:  # the others are deleted even so
                wrong.append(error)
        if wrong:
            fix = "give the process the right to delete it, then prune again"
            raise BankError(where, "folders that no manifest names are deleted", list(map(_in_words, wrong)), fix) from wrong[0]
        return gone

    def remarks(self) -> list[str]:
        """How much changed since the last save or restore; nothing if there was none."""
        if not self._last.named:
            return []
        changed = sum(self._last.sets.get(name, ("", None))[1] is not copy.version for name, copy in self._sets.store.hosts.items())
        words = f"{changed} sets" if changed != 1 else "1 set"
        return [f"{words} changed since the last save" if changed else "all saved"]

    def _layouts(self, where: str, sets: Mapping[Hashable, tuple[str, int]], forms: Sequence[Json]) -> dict[Hashable, SetLayout]:
        """The layout of each set: the bank's own, or that of a set with the same tree, or a new one as the form says."""
        double = {leaf.dtype for form in forms for leaf in _leaves(form)} & {"float64", "complex128", "int64", "uint64"}
        if double and jax.dtypes.result_type(float) != np.float64:
            fix = 'jax.config.update("jax_enable_x64", True) first, as in the run that saved the bank'
            raise BankError(where, "64-bit numbers are restored as such", f"{', '.join(sorted(double))}, and x64 is off", fix)
        own, layouts, wrong, unknown = self._sets.layouts, {}, [], []
        for k, form in enumerate(forms):
            names = [name for name, (_, number) in sets.items() if number == k]
            added = self._layout_of(where, form) if any(name not in own for name in names) else None
            layouts |= {name: own.get(name, added) for name in names}
            lines = {layout: _differences(form, layout) for layout in {layouts[name] for name in names} if layout is not None}
            wrong += [f"{name!r}: {line}" for name in names for line in lines.get(layouts[name], ())]
            unknown += [repr(name) for name in names if layouts[name] is None]
        if wrong:
            fix = "restore into a bank whose sets have the shapes, and the optimizer, of the bank that was saved"
            raise BankError(where, "a set is restored with the leaves that it was saved with", wrong, fix)
        if unknown:
            rule = "a set that the bank does not have is added if its parameters are dicts, lists and tuples"
            fix = "bank.add(name, params) with any values first; restore replaces them"
            raise BankError(where, rule, ", ".join(unknown[:4]), fix)
        return {name: layouts[name] for name in sets}

    def _layout_of(self, where: str, form: Json) -> SetLayout | None:
        for layout in dict.fromkeys(self._sets.layouts.values()):
            if _form(layout) == form:
                return layout
        if form["params"] is None:
            return None
        tree = jax.tree.structure(_tree(form["params"]))
        avals = [jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype)) for leaf in _leaves(form)[: tree.num_leaves]]
        try:
            moments, opt_tree = jax.tree.flatten(jax.eval_shape(self._init, tree.unflatten(avals)))
        except Exception as error:  # whatever an optimizer may raise for the parameters of another
            rule, fix = "the bank's optimizer takes the parameters that were saved", "make the bank with the optimizer that it had"
            raise BankError(where, rule, _in_words(error), fix) from error
        return SetLayout(tree, opt_tree, (*avals, *(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in moments)))

    def _read(self, where: str, ocp: Any, reader: Any, name: Hashable, path: Any, layout: SetLayout) -> HostCopy:
        here = set(self._sets.here(layout, range(len(layout.shapes))))  # a leaf that lives in another process is not read
        stored = [aval if aval.size else None for aval in layout.shapes]
        as_key, as_numpy = ocp.ArrayRestoreArgs(sharding=self._home), ocp.RestoreArgs(restore_type=np.ndarray)
        types = [aval if aval is None else as_key if is_key(aval) else as_numpy for aval in stored]
        item = [aval if aval is None or k in here else ocp.PLACEHOLDER for k, aval in enumerate(stored)]
        args = ocp.args.PyTreeRestore(item=_saved_tree(layout, item), restore_args=_saved_tree(layout, types))
        tree = reader.restore(path, args=args)
        values = iter(jax.tree.leaves((tree["params"], tree["opt_state"])))
        leaves = [next(values) if aval.size else np.zeros(aval.shape, aval.dtype) for aval in layout.shapes]
        held, store = self._sets.here(layout, leaves), self._sets.store
        homes = store.held(name).packing.homes if name in self._sets.layouts else (self._home,) * len(held)
        copy = store.copied(held, homes)
        shapes = dict(enumerate(layout.shapes)) | dict(zip(sorted(here), copy.packing.shapes, strict=True))
        if wrong := layout.differences(*layout.fill([shapes[k] for k in range(len(leaves))])):
            raise BankError(where, _SET[0], [f"{name!r}, in {path}: {line}" for line in wrong], _SET[1])
        return copy


def _open(where: str, directory: _Directory) -> tuple[Any, Any]:
    """Orbax, and the directory as a path of its kind, which may be in a cloud."""
    try:
        ocp, epath = importlib.import_module("orbax.checkpoint"), importlib.import_module("etils.epath")
    except ImportError as error:
        fix = 'pip install -e ".[checkpoint]" in the checkout of jaxpp'
        raise BankError(where, "sets are saved and read by Orbax, which is not installed", str(error), fix) from error
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
        raise BankError(where, "a directory is a path", shown(directory), 'pass a path, such as "runs/1/sets"')
    text = str(os.fspath(directory))
    return ocp, epath.Path(text if "://" in text else os.path.abspath(text))


def _folders(where: str, path: Any, *, make: bool = False) -> set[str]:
    try:
        if make:
            path.mkdir(parents=True, exist_ok=True)
        return {child.name for child in path.iterdir()} if path.exists() else set()
    except OSError as error:
        rule, fix = "sets are in a directory of their own", "pass a directory that this process may read and write"
        raise BankError(where, rule, _in_words(error), fix) from error


def _writer(ocp: Any) -> Any:
    """Orbax's checkpointer for sets; of several processes each writes what it holds."""
    if jax.process_count() == 1:
        return ocp.PyTreeCheckpointer()
    numpy = np.ndarray, ocp.type_handlers.NumpyHandler()
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, array_handler()), numpy)
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry))


def _write(where: str, writer: Any, path: Any, args: Any, done: str) -> None:
    """Save a set in a folder of its own; if that fails, nothing is left of the folder, as far as the disk lets us delete it."""
    try:
        writer.save(path, args=args)
    except BaseException as error:
        with contextlib.suppress(OSError):
            for half in [child for child in path.parent.iterdir() if child.name.startswith(path.name)]:
                half.rmtree()
        if not isinstance(error, Exception):
            raise
        rule = "what was saved before stays whole if a save fails, and the next save writes only what is missing"
        fix = "free room on the disk, or give the process the right to write there, then save again"
        raise BankError(where, rule, [_in_words(error), done], fix) from error


def _saved_tree(layout: SetLayout, leaves: Sequence[Any]) -> dict[str, Tree]:
    """The tree of a set as Orbax saves it. Orbax refuses arrays without elements: there is None for them."""
    return dict(zip(("params", "opt_state"), layout.fill(leaves), strict=True))


def _check_paths(where: str, name: Hashable, layout: SetLayout) -> None:
    """Refuse paths that Orbax does not tell apart, as it joins the keys on the way with dots: of two leaves it would keep one."""
    seen: dict[str, str] = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(_saved_tree(layout, layout.shapes)):
        joined, mine = jax.tree_util.keystr(path, simple=True, separator="."), jax.tree_util.keystr(path)
        if joined in seen:
            rule = "Orbax joins the keys of a leaf with dots, so no two leaves may be the same then"
            raise BankError(where, rule, f"{name!r} has {seen[joined]} and {mine}", "rename the key that has a dot in it")
        seen[joined] = mine


def _read_manifest(where: str, manifest: Json) -> tuple[dict[Hashable, tuple[str, int]], list[Json]]:
    version = manifest.get("jaxpp_bank") if isinstance(manifest, Mapping) else None
    if version is not None and (version != _FORMAT or type(version) is not int):
        got = f"version {shown(version)}; this jaxpp reads version {_FORMAT}"
        fix = "use a later jaxpp, such as the one that saved it"
        raise BankError(where, "a manifest is of a version that jaxpp knows", got, fix)
    with _reading(where, manifest, *_MANIFEST):
        rows, forms = [(_decoded(name), folder, number) for name, folder, number in manifest["sets"]], list(manifest["forms"])
        sets = {name: (folder, number) for name, folder, number in rows}
        right = [version == _FORMAT, len(sets) == len(rows)]  # equal names would be one set
        every = range(len(forms))
        right += [isinstance(folder, str) and type(number) is int and number in every for folder, number in sets.values()]
        named = Counter(folder for _, folder, _ in rows)
        if twice := [f"{name!r}: {folder}" for name, folder, _ in rows if named[folder] > 1]:
            raise BankError(where, "each set has a folder of its own", twice, _MANIFEST[1])
        for form in forms:
            jax.tree.structure(_tree(form["params"]))
            for leaf in _leaves(form):
                right += [isinstance(leaf.path, str), *(type(size) is int and size >= 0 for size in leaf.shape)]
                right.append(leaf.dtype.startswith("key<") or np.dtype(leaf.dtype).itemsize > 0)
        if not all(right):
            raise ValueError("a part of it is not what it should be")
    return sets, forms


@contextlib.contextmanager
def _reading(where: str, what: Json, rule: str, fix: str) -> Iterator[None]:
    """A block that reads what may be damaged, and then may raise anything: that becomes one error, which says what was read."""
    try:
        yield
    except BankError:
        raise
    except Exception as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else _in_words(error)
        raise BankError(where, rule, f"{what if isinstance(what, str) else shown(what)}: {why}", fix) from error


def _form(layout: SetLayout) -> Json:
    trees, nodes = _saved_tree(layout, layout.shapes), None
    with contextlib.suppress(TypeError):
        nodes = _nodes(trees["params"])
    pairs = [(key, pair) for key, tree in trees.items() for pair in jax.tree_util.tree_leaves_with_path(tree)]
    leaves = [[key + jax.tree_util.keystr(path), str(aval.dtype), list(aval.shape)] for key, (path, aval) in pairs]
    return {"params": nodes, "leaves": leaves}


def _leaves(form: Json) -> list[_Saved]:
    return [_Saved(path, dtype, tuple(shape)) for path, dtype, shape in form["leaves"]]


def _differences(form: Json, layout: SetLayout) -> list[str]:
    saved, here = ({leaf.path: describe(leaf) for leaf in _leaves(one)} for one in (form, _form(layout)))
    return [
        f"{path} is {saved.get(path, 'missing')} in the manifest, {here.get(path, 'missing')} in the bank"
        for path in dict.fromkeys((*saved, *here))
        if saved.get(path) != here.get(path)
    ]


def _nodes(node: Tree) -> Json:
    if node is None or isinstance(node, jax.ShapeDtypeStruct):
        return "none" if node is None else "leaf"
    if type(node) is dict:
        return ["dict", [[_encoded(key), _nodes(child)] for key, child in node.items()]]
    if type(node) not in (list, tuple):
        raise TypeError(type(node).__name__)
    return [type(node).__name__, list(map(_nodes, node))]


def _tree(nodes: Json) -> Tree:
    if nodes in (None, "leaf", "none"):
        return None if nodes == "none" else 0
    kind, children = nodes
    if kind == "dict":
        return {_decoded(key): _tree(child) for key, child in children}
    return {"list": list, "tuple": tuple}[kind](map(_tree, children))


def _encoded(name: Hashable) -> Json:
    if isinstance(name, np.generic):
        name = name.item()  # which is equal to it, and has its hash
    if type(name) is tuple:
        return list(map(_encoded, name))
    if type(name) not in (str, int, float, bool, type(None)) or (type(name) is float and not math.isfinite(name)):
        raise TypeError(shown(name))
    return name


def _decoded(name: Json) -> Hashable:
    return tuple(map(_decoded, name)) if isinstance(name, list | tuple) else name


def _is_json(name: Hashable) -> bool:
    try:
        _encoded(name)
    except TypeError:
        return False
    return True


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
