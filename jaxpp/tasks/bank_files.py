"""The sets of a bank as files: each set a checkpoint of Orbax's, written again only after it has changed.

Problem: a bank of many sets is large, and a step changes one. Idea: a version of a set is written once, into a folder of its own
that nothing overwrites, and a *manifest* says which folder holds each set. The next save writes the sets that changed, and its
manifest names the earlier folders of all others. ::

    save     set-cat-1a..  set-dog-5c..                    {cat: 1a, dog: 5c}
    save                                 set-dog-e0..      {cat: 1a, dog: e0}
    prune    (keeps what a manifest that still counts names)

The manifest is saved with the state of the pipeline, in one step of a ``CheckpointManager``. Whatever interrupts a save leaves at
most folders that no manifest names.
"""

import contextlib
import importlib
import os
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import SingleDeviceSharding

from jaxpp.errors import BankError, shown
from jaxpp.errors.tracebacks import entries
from jaxpp.runtime.interrupts import Hold
from jaxpp.runtime.processes.channel import agreement
from jaxpp.runtime.progress import progress
from jaxpp.tasks.host_store import HostStore
from jaxpp.tasks.manifest import Json, SavedSet, SetForm, encoded_name, layout_of, read_manifest, write_manifest
from jaxpp.tasks.set_homes import SetHomes
from jaxpp.tasks.set_layout import SetLayout
from jaxpp.tasks.set_packing import HostCopy
from jaxpp.tasks.shared_files import fresh_tokens, open_writer
from jaxpp.types import Leaf, Tree

__all__ = ["BankFiles"]

_FOLDER = re.compile(r"(set-[\w-]*-[0-9a-f]{16})(\.orbax-checkpoint-tmp.*)?", re.ASCII)
"""A set's folder, and what Orbax calls it while it is being written."""


class _Version(NamedTuple):
    """What a folder holds: values, by the object that stands for them (``HostCopy.version``)."""

    folder: str
    version: object


class _Directory(NamedTuple):
    """What a bank knows of a directory: the folder of each set, and those named last, whose checkpoint may not be complete yet."""

    sets: dict[Hashable, _Version]
    named: set[str]

    def named_anew(self, names: Iterable[Hashable]) -> dict[Hashable, str]:
        """The folder of each of these sets, which are now all that a manifest names."""
        found = {name: self.sets[name] for name in names}
        self.sets.clear()
        self.sets.update(found)
        self.named.clear()
        self.named.update(item.folder for item in found.values())
        return {name: item.folder for name, item in found.items()}


@entries
class BankFiles:
    """Saves the sets of a bank and restores them; ``Bank`` is the rest.

    Args:
        optimizer: as of the bank.
        host_store: the sets, as flat leaves.
        home: where sets are used.
    """

    def __init__(self, optimizer: optax.GradientTransformation, host_store: HostStore, home: SingleDeviceSharding):
        self.optimizer, self.host_store, self._home = optimizer, host_store, home
        self._layouts: dict[Hashable, SetLayout] = {}
        self._homes: dict[SetLayout, SetHomes] = {}  # where sets live, in several processes, once a pipeline has said so
        self._saved: dict[str, _Directory] = {}  # the last one used is last

    def save(self, directory: str | os.PathLike[str]) -> dict[str, Json]:
        """Write the sets that changed since they were saved in this directory, or restored from it, each to a folder of its own.

        What it returns says where each set is, those that did not change included. Save it with the state, in the same step of an
        ``orbax.checkpoint.CheckpointManager``, so that the two always belong together::

            items = {"state": ocp.args.StandardSave(state), "bank": ocp.args.JsonSave(bank.save(directory))}
            manager.save(step, args=ocp.args.Composite(**items))

        In several processes, every process calls it with the same directory, and writes the leaves that it holds; any number of
        processes can restore them.

        It waits for the write-backs of earlier steps. A set in use has the values that ``bank.params`` reads: those from before the
        block that uses it. Nothing that was saved earlier is overwritten. Each folder is a checkpoint of ``{"params": ...,
        "opt_state": ...}`` that Orbax opens without jaxpp.

        Args:
            directory: where the folders of the sets are; made if it does not exist. Give the steps of the manager another one.

        Returns:
            the manifest: dicts, lists, texts and numbers, which JSON keeps as they are. It does not name the directory, which may
            be moved.

        Raises:
            BankError: Orbax is not installed; a name is not a text, a number, a boolean, None or a tuple of these; the directory
                cannot be written to; a write-back failed. The bank is as before, and so are all earlier manifests and their
                folders; the next call writes what is missing.

        Example:
            >>> import tempfile
            >>> from jaxpp import Bank
            >>> bank, folder = Bank({"cat": {"w": np.ones(2, "f")}}, optax.sgd(0.5)), tempfile.mkdtemp()
            >>> manifest = bank.save(folder)
            >>> again = Bank({}, optax.sgd(0.5))
            >>> again.restore(folder, manifest)
            >>> again.params("cat")["w"]
            array([1., 1.], dtype=float32)
        """
        where = f"bank.save({str(directory)!r})"
        ocp, path = _open(where, directory)
        self._check_names(where)
        self.host_store.wait()
        copies = {name: self.host_store.held(name) for name in self._layouts}
        folders = self._folders(where, path, make=True)
        there = self._directory(path)
        changed = [name for name, copy in copies.items() if not _is_saved(there.sets.get(name), copy.version, folders)]
        for name in changed:
            _check_paths(where, name, self._layouts[name])
        with agreement(where, jax.devices()) as agree:
            lines = {"sets": copies, "sets that changed": changed, "homes": [homes.processes for homes in self._homes.values()]}
            agree(lambda: {part: "\n".join(map(repr, each)) for part, each in lines.items()})
        tokens = fresh_tokens(len(changed))
        writer, arguments = open_writer(ocp)
        with contextlib.closing(writer) as orbax, progress(changed, desc="sets saved", unit="set", after=2) as bar:
            for count, name in enumerate(bar):
                folder = _folder_name(name, tokens[count])
                done = f"{count} of the {len(changed)} sets that changed are saved, {name!r} is not"
                tree = self._tree_of(name, copies[name].leaves)
                _write_set(where, orbax, path / folder, arguments(tree), done)
                there.sets[name] = _Version(folder, copies[name].version)
        return write_manifest(there.named_anew(copies), self._layouts)

    def restore(self, directory: str | os.PathLike[str], manifest: Json) -> None:
        """Give every set the parameters and the optimizer state that a manifest names, bit for bit: all sets, or none.

        Sets that the bank does not have are added if their parameters are dicts, lists and tuples of arrays, or if a set of the
        bank has the same tree. A bank made without sets, ``Bank({}, optimizer)``, therefore gets all of them, and holds each only
        once: everything is read before the first set changes, so sets that the bank has are in memory twice meanwhile.

        Restored sets count as saved in this directory. Pipelines with this bank go on with the restored sets.

        Args:
            directory: where the folders of the sets are, as given to ``save``.
            manifest: what ``save`` returned.

        Raises:
            BankError: Orbax is not installed; a folder is missing or cannot be read; leaves differ from those of the bank's set, or
                from what its optimizer makes; the bank has a set that the manifest does not name; a set is in use; a write-back
                failed. The bank is as before.
        """
        where = f"bank.restore({str(directory)!r}, ...)"
        ocp, path = _open(where, directory)
        sets = read_manifest(where, manifest)
        self.host_store.wait()
        if extra := [repr(name) for name in self._layouts if name not in sets]:
            rule = "a bank is restored whole, so the manifest names all its sets"
            fix = "bank.remove(name) first; bank.add(name, params) afterwards, if the set is a new one"
            raise BankError(where, rule, f"sets that the manifest does not name: {', '.join(extra[:4])}", fix)
        for name in self._layouts:
            self.host_store.check_idle(name, "be restored")
        layouts = self._layouts_of(where, sets)
        folders = self._folders(where, path)
        if missing := [f"{name!r}: {item.folder} is not there" for name, item in sets.items() if item.folder not in folders]:
            fix = "pass the directory that the sets were saved in; a folder that bank.prune has deleted is gone"
            raise BankError(where, "the folders that a manifest names are in the directory", missing, fix)
        copies = {}
        reader = contextlib.closing(ocp.PyTreeCheckpointer())
        with reader as orbax, progress(sets.items(), desc="sets read", unit="set", after=2) as bar:
            for name, item in bar:
                copies[name] = self._read_set(where, ocp, orbax, name, path / item.folder, layouts[name])
        with Hold() as hold:
            hold.begin()
            self.host_store.replace(copies)
            self._layouts |= layouts
            self._directory(path).sets.update({name: _Version(item.folder, copies[name].version) for name, item in sets.items()})
            self._directory(path).named_anew(sets)

    def prune(self, directory: str | os.PathLike[str], manifests: Iterable[Json]) -> tuple[str, ...]:
        """Delete the folders of sets that none of these manifests names; what else is in the directory stays.

        Also kept are the folders that this bank saved last or restored, because later manifests will name them. What an interrupted
        save has left behind is deleted. It can be interrupted at any time, and called again.

        Args:
            directory: where the folders of the sets are. If several runs save there, pass the manifests of all of them.
            manifests: of the checkpoints that still count.

        Returns:
            the names of the folders that are gone.

        Raises:
            BankError: Orbax is not installed; one of these is not a manifest; a folder cannot be deleted.
        """
        where = f"bank.prune({str(directory)!r}, manifests)"
        _, path = _open(where, directory)
        if isinstance(manifests, Mapping):
            raise BankError(where, "manifests are given as a list", "one manifest", "pass [manifest]")
        kept = {item.folder for manifest in manifests for item in read_manifest(where, manifest).values()}
        there = self._saved.get(str(path), _Directory({}, set()))
        kept |= {*there.named, *(item.folder for item in there.sets.values())}
        found = map(_FOLDER.fullmatch, sorted(self._folders(where, path)))
        gone = tuple(folder[0] for folder in found if folder and folder[1] not in kept)
        with agreement(where, jax.devices()) as agree:  # all have looked before the first deletes
            agree(lambda: {"folders": "\n".join(gone)})
        for folder in gone if jax.process_index() == 0 else ():
            try:
                (path / folder).rmtree()
            except OSError as error:
                fix = "give the process the right to delete it, then prune again"
                raise BankError(where, "folders that no manifest names are deleted", _in_words(error), fix) from error
        return gone

    def _held(self, layout: SetLayout, leaves: Sequence[Leaf]) -> Sequence[Leaf]:
        """The leaves of a set that this process holds."""
        return self._homes[layout].of(leaves) if layout in self._homes else leaves

    def _directory(self, path: Any) -> _Directory:
        """What is known of a directory."""
        found = self._saved[str(path)] = self._saved.pop(str(path), _Directory({}, set()))
        return found

    def _saved_remark(self) -> list[str]:
        """How much changed since the last save or restore; nothing if there was none."""
        found = [there.sets for there in self._saved.values() if there.named]
        if not found:
            return []
        saved, versions = found[-1], self.host_store.versions
        changed = sum(name not in saved or saved[name].version is not version for name, version in versions.items())
        words = f"{changed} sets" if changed != 1 else "1 set"
        return [f"{words} changed since the last save" if changed else "all saved"]

    def _check_names(self, where: str) -> None:
        wrong = []
        for name in self._layouts:
            try:
                encoded_name(name)
            except TypeError:
                wrong.append(f"{shown(name)}, a {type(name).__name__}")
        if wrong:
            rule = "the name of a set that is saved is a text, a number, a boolean, None or a tuple of these"
            raise BankError(
                where, rule, wrong, "name the set otherwise: bank.add(str(name), bank.params(name), bank.opt_state(name))"
            )

    def _folders(self, where: str, path: Any, *, make: bool = False) -> set[str]:
        """The names in a directory."""
        try:
            if make:
                path.mkdir(parents=True, exist_ok=True)
            return {child.name for child in path.iterdir()} if path.exists() else set()
        except OSError as error:
            rule, fix = "sets are in a directory of their own", "pass a directory that this process may read and write"
            raise BankError(where, rule, _in_words(error), fix) from error

    def _tree_of(self, name: Hashable, leaves: Sequence[Leaf]) -> dict[str, Tree]:
        """A set as Orbax saves it."""
        layout = self._layouts[name]
        if layout in self._homes:
            return _as_saved(layout, [leaf if leaf.size else None for leaf in self._homes[layout].all(leaves, layout.shapes)])
        found = [leaf if _is_key(leaf) else np.asarray(leaf) if leaf.size else None for leaf in leaves]
        return _as_saved(layout, found)

    def _layouts_of(self, where: str, sets: Mapping[Hashable, SavedSet]) -> dict[Hashable, SetLayout]:
        """The layout of each set: the bank's own, or that of a set with the same tree, or a new one as the form says."""
        double = {leaf.dtype for item in sets.values() for leaf in item.form.leaves} & {"float64", "complex128", "int64", "uint64"}
        if double and jax.dtypes.result_type(float) != np.float64:
            fix = 'jax.config.update("jax_enable_x64", True) first, as in the run that saved the bank'
            raise BankError(where, "64-bit numbers are restored as such", f"{', '.join(sorted(double))}, and x64 is off", fix)
        likes = [(SetForm.of(layout), layout) for layout in dict.fromkeys(self._layouts.values())]
        made: dict[int, SetLayout | None] = {}
        compared: dict[tuple[int, SetLayout], list[str]] = {}
        layouts, wrong, unknown = {}, [], []
        for name, (_, form) in sets.items():
            if name not in self._layouts and id(form) not in made:
                like = next((layout for other, layout in likes if other == form), None)
                made[id(form)] = like or layout_of(form, self.optimizer.init)
            layout = self._layouts[name] if name in self._layouts else made[id(form)]
            if layout is None:
                unknown.append(repr(name))
                continue
            if (id(form), layout) not in compared:
                compared[id(form), layout] = form.differences(layout)
            wrong += [f"{name!r}: {line}" for line in compared[id(form), layout]]
            layouts[name] = layout
        if wrong:
            fix = "restore into a bank whose sets have the shapes, and the optimizer, of the bank that was saved"
            raise BankError(where, "a set is restored with the leaves that it was saved with", wrong, fix)
        if unknown:
            rule = "a set that the bank does not have is added if its parameters are dicts, lists and tuples"
            fix = "bank.add(name, params) with any values first; restore replaces them"
            raise BankError(where, rule, ", ".join(unknown[:4]), fix)
        return layouts

    def _read_set(self, where: str, ocp: Any, reader: Any, name: Hashable, path: Any, layout: SetLayout) -> HostCopy:
        """A set as its folder has it, in host memory."""
        avals = [aval if aval.size else None for aval in layout.shapes]
        as_key, as_numpy = ocp.ArrayRestoreArgs(sharding=self._home), ocp.RestoreArgs(restore_type=np.ndarray)
        types = [aval if aval is None else as_key if _is_key(aval) else as_numpy for aval in avals]
        here = set(self._held(layout, range(len(avals))))  # of a leaf that lives in another process nothing is read
        avals = [aval if aval is None or k in here else ocp.PLACEHOLDER for k, aval in enumerate(avals)]
        args = ocp.args.PyTreeRestore(item=_as_saved(layout, avals), restore_args=_as_saved(layout, types))
        rule = "a set's folder is as it was saved"
        fix = "restore an earlier manifest; if the folder is a copy, copy it again"
        try:
            restored = reader.restore(path, args=args)
        except Exception as error:  # whatever Orbax and the disk may raise
            raise BankError(where, rule, f"{name!r}, in {path}: {_in_words(error)}", fix) from error
        found = iter(jax.tree.leaves((restored["params"], restored["opt_state"])))
        leaves = [next(found) if aval.size else np.zeros(aval.shape, aval.dtype) for aval in layout.shapes]
        held = self._held(layout, leaves)
        homes = self.host_store.held(name).packing.homes if name in self._layouts else (self._home,) * len(held)
        copy = self.host_store.copied(held, homes)
        shapes = dict(enumerate(layout.shapes)) | dict(zip(sorted(here), copy.packing.shapes, strict=True))
        if wrong := layout.differences(*layout.fill([shapes[k] for k in range(len(leaves))])):
            raise BankError(where, rule, [f"{name!r}: {line}" for line in wrong], fix)
        return copy


def _open(where: str, directory: str | os.PathLike[str]) -> tuple[Any, Any]:
    """Orbax, and the directory as a path of its kind, which may be in a cloud."""
    try:
        ocp, epath = importlib.import_module("orbax.checkpoint"), importlib.import_module("etils.epath")
    except ImportError as error:
        fix = 'pip install "jaxpp[checkpoint]"'
        raise BankError(where, "sets are saved and read by Orbax, which is not installed", str(error), fix) from error
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
        raise BankError(where, "a directory is a path", shown(directory), 'pass a path, such as "runs/1/sets"')
    text = str(os.fspath(directory))
    return ocp, epath.Path(text if "://" in text else os.path.abspath(text))


def _write_set(where: str, writer: Any, path: Any, args: Any, done: str) -> None:
    """Save a set in a folder of its own; if that fails, nothing is left of the folder."""
    try:
        writer.save(path, args=args)
    except BaseException as error:
        _remove_half(path)
        if not isinstance(error, Exception):
            raise
        rule = "what was saved before stays whole if a save fails, and the next save writes only what is missing"
        fix = "free room on the disk, or give the process the right to write there, then save again"
        raise BankError(where, rule, [_in_words(error), done], fix) from error


def _as_saved(layout: SetLayout, leaves: Sequence[Any]) -> dict[str, Tree]:
    """The tree of a set as Orbax saves it. Orbax refuses arrays without elements: there is None for them."""
    return dict(zip(("params", "opt_state"), layout.fill(leaves), strict=True))


def _is_saved(known: _Version | None, version: object, folders: set[str]) -> bool:
    return known is not None and known.version is version and known.folder in folders


def _is_key(leaf: Leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def _check_paths(where: str, name: Hashable, layout: SetLayout) -> None:
    """Refuse paths that Orbax does not tell apart, as it joins the keys on the way with dots: of two leaves it would keep one."""
    seen: dict[str, str] = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(_as_saved(layout, layout.shapes)):
        joined, mine = jax.tree_util.keystr(path, simple=True, separator="."), jax.tree_util.keystr(path)
        if joined in seen:
            rule = "Orbax joins the keys of a leaf with dots, so no two leaves may be the same then"
            raise BankError(where, rule, f"{name!r} has {seen[joined]} and {mine}", "rename the key that has a dot in it")
        seen[joined] = mine


def _folder_name(name: Hashable, token: str) -> str:
    """A folder that does not exist yet: it says whose it is."""
    return f"set-{re.sub(r'[^A-Za-z0-9]+', '-', str(name))[:40].strip('-')}-{token}"


def _remove_half(path: Any) -> None:
    """Delete what a save that failed has left of a folder, as far as the disk lets us."""
    with contextlib.suppress(OSError):
        for child in path.parent.iterdir():
            if child.name.startswith(path.name):
                child.rmtree()


def _in_words(error: Exception) -> str:
    """An error of the disk on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
