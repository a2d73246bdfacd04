"""theta[t]: parameter sets that live on the host, one of them on the device at a time.

A step uses Theta and the theta[t] of one of T tasks (heads, adapters, experts of a user). The sets with their optimizer moments
need not all fit on the device: the bank keeps them in pinned host memory, brings one in for a step and the next while that step
computes, and writes the result back behind it. Sets that are not used are not touched: no weight decay, not a byte.
"""

import difflib
import functools
import inspect
import os
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import optax
from jax.sharding import SingleDeviceSharding
from tqdm import tqdm

from jaxpp.engine.tracing import check_key
from jaxpp.errors import ArgumentError, BankError, shown
from jaxpp.errors.checks import check_function
from jaxpp.errors.tracebacks import entries, managed
from jaxpp.runtime.edges import HOST_MEMORY, check_alive, put, to_device, unaliased
from jaxpp.runtime.processes.here import is_addressable
from jaxpp.runtime.progress import progress
from jaxpp.stages.jaxpr import shapes_of
from jaxpp.tables import bytes_in_words, fold_lines, html_remarks, html_table, table_lines
from jaxpp.targets import refuse_compile_only
from jaxpp.tasks.bank_files import BankFiles, Json
from jaxpp.tasks.host_store import HostStore
from jaxpp.tasks.sets import BankSets, SetLayout, check_params, few_names
from jaxpp.types import Array, Device, Key, Leaf, LossFn, Params, Tree

Path = str | Sequence[str]  # the keys down to a subtree, such as "head" or "block_1/adapter"; or several such paths


class ActiveTask:
    """A set in use: its parameters and its optimizer state on the device, to be read and assigned inside the ``with`` block."""

    def __init__(self, name: Hashable, params: Params, opt_state: Tree):
        self.name, self.params, self.opt_state = name, params, opt_state

    def __getattr__(self, field: str) -> NoReturn:  # called only for an attribute that is not there
        if field in ("params", "opt_state"):
            fix = f"read it inside `with bank.use({self.name!r})`, or bank.{field}({self.name!r}) on the host"
            raise BankError(f"task.{field}", "a task is given back where its block ends", f"{self.name!r}, given back", fix)
        raise AttributeError(field)


@entries
class Bank:
    """Parameter sets with their optimizer states, on the host; ``use`` brings one to the device.

    All steps with sets of equal shapes are one compiled program. Put what all tasks share on the device too, its optimizer state
    included (``jaxpp.gather(tree, device)``): otherwise JAX compiles the first call separately.

    Args:
        sets: the parameters of each task by its name, which is any hashable value; the bank takes copies.
        optimizer: what makes the optimizer state of each set (``optimizer.init``).
        device: where sets are used; by default the first device of this process.
        slots: how many sets the device may hold (the devices of a pipeline as many of their own); 1 leaves no room to prefetch.

    Attributes:
        host_store: the flat leaves of the sets: of the parameters, then of the optimizer state.

    Raises:
        BankError: a set without leaves, or with others than floating arrays; no slot; no optimizer; no pinned host memory.

    Example:
        >>> import numpy as np, optax
        >>> optimizer = optax.sgd(0.5)
        >>> bank = Bank({"cat": {"w": np.ones(2, "f")}, "dog": {"w": np.zeros(2, "f")}}, optimizer)
        >>> with bank.use("dog") as task:
        ...     bank.prefetch("cat")
        ...     updates, task.opt_state = optimizer.update({"w": task.params["w"] - 1}, task.opt_state)
        ...     task.params = optax.apply_updates(task.params, updates)
        >>> bank.params("dog")["w"], bank.params("cat")["w"]
        (array([0.5, 0.5], dtype=float32), array([1., 1.], dtype=float32))
    """

    def __init__(
        self, sets: Mapping[Any, Params], optimizer: optax.GradientTransformation, *, device: Device | None = None, slots: int = 2
    ):
        self.device = jax.local_devices()[0] if device is None else device
        if not hasattr(self.device, "addressable_memories"):
            fix = "pass one of jax.devices(), such as device=jax.devices()[0]"
            raise BankError("Bank(device=...)", "sets are used on one of JAX's devices", shown(device), fix)
        refuse_compile_only("Bank(device=...)", [self.device], "pass one of jax.devices(), or leave device out")
        kinds = [memory.kind for memory in self.device.addressable_memories()]
        if HOST_MEMORY not in kinds:
            got = f"{self.device} with {', '.join(kinds) or 'none'}"
            raise BankError("Bank(device=...)", f"the device can reach {HOST_MEMORY} memory", got, "use another device or backend")
        if self.device.process_index != jax.process_index():
            got, fix = f"{self.device} of process {self.device.process_index}", "pass one of jax.local_devices()"
            raise BankError("Bank(device=...)", "a bank is used on a device of its own process", got, fix)
        if not callable(getattr(optimizer, "init", None)):
            raise BankError("Bank(sets, optimizer)", "it takes an optax optimizer", repr(optimizer), "pass optax.adamw(1e-3), say")
        self.optimizer, self.host_store, self._home = optimizer, HostStore(slots), SingleDeviceSharding(self.device)
        self._sets = BankSets(self.host_store)
        self._files = BankFiles(self._sets, optimizer.init, self._home)
        self._init = jax.jit(optimizer.init, out_shardings=self._home)
        self._task: ActiveTask | None = None
        with _with_bar("sets", sets) as bar:
            for name, params in bar:
                self.add(name, params)

    @classmethod
    def make(
        cls,
        init: Callable[[Key], Params],
        keys: Mapping[Any, Key],
        optimizer: optax.GradientTransformation,
        *,
        device: Device | None = None,
        slots: int = 2,
    ) -> "Bank":
        """A bank whose sets are made on the device, one at a time, by ``init(key)``, which is jitted; else as for the class."""
        where = "Bank.make(init, keys, optimizer)"
        check_function(where, "init is a function that makes the set of a task from its key", init)
        if not isinstance(keys, Mapping):
            rule, fix = "keys has a key for each task, by name", 'pass for example {"cat": jax.random.key(0)}'
            raise ArgumentError(where, rule, shown(keys), fix)
        for key in keys.values():
            check_key(key)
        bank = cls({}, optimizer, device=device, slots=slots)
        init = jax.jit(init, out_shardings=bank._home)
        with _with_bar("keys", keys) as bar:
            for name, key in bar:
                bank.add(name, init(put(key, bank._home)))
        return bank

    @staticmethod
    def take(params: Params, path: Path) -> tuple[Params, Params]:
        """Cut the subtree at ``path`` out of a parameter tree: the rest, and the subtree (for several paths a dictionary).

        All nodes on the way to the subtree are mappings.

        Raises:
            BankError: there is nothing at that path.

        Example:
            >>> Bank.take({"body": 1, "block_1": {"adapter": 2, "dense": 3}}, "block_1/adapter")
            ({'body': 1, 'block_1': {'dense': 3}}, 2)
            >>> Bank.take({"body": 1, "block_1": {"adapter": 2, "dense": 3}, "head": 4}, ["block_1/adapter", "head"])
            ({'body': 1, 'block_1': {'dense': 3}}, {'block_1/adapter': 2, 'head': 4})
        """
        subtrees: dict[str, Params] = {}
        for name in _paths(path):
            *above, (node, last) = _way(params, name, there=True)
            subtrees[name] = node[last]
            params = _rebuilt(above, type(node)({key: child for key, child in node.items() if key != last}))
        return params, subtrees[path] if isinstance(path, str) else subtrees

    @staticmethod
    def bind(loss_fn: LossFn, path: Path) -> LossFn:
        """Turn a loss over a module's whole parameters into a loss over the shared parameters and a task's own.

        ``loss_fn(params, batch[, key])`` becomes ``loss_fn(params, task_params, batch[, key])``. The task's parameters belong at
        ``path`` of ``params`` (or at several paths), and what ``params`` has there is not read.

        Raises:
            BankError: ``path`` is not a path. When the loss is called: the parameters have no such place.

        Example:
            >>> loss_fn = Bank.bind(lambda params, batch: params["body"] * batch + params["head"], "head")
            >>> loss_fn({"body": 2.0}, 1.0, 3.0)
            7.0
        """
        _paths(path)

        @functools.wraps(loss_fn)
        def bound(params: Params, task_params: Params, *rest: Tree, **named: Tree) -> Tree:
            return loss_fn(insert(params, task_params, path), *rest, **named)

        try:  # the bound loss takes one more argument than the loss that it wraps
            first, *others = inspect.signature(loss_fn).parameters.values()
            task = inspect.Parameter("task_params", inspect.Parameter.POSITIONAL_OR_KEYWORD)
            bound.__signature__ = inspect.Signature([first, task, *others])  # pyright: ignore[reportAttributeAccessIssue]
        except (TypeError, ValueError):  # a function without a signature, or with keyword arguments alone
            pass
        return bound

    @property
    def tasks(self) -> tuple[Hashable, ...]:
        """The names of the sets."""
        return tuple(self._sets.layouts)

    def __len__(self) -> int:
        return len(self._sets.layouts)

    def __contains__(self, name: object) -> bool:
        return name in self._sets.layouts

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self.tasks)

    @property
    def nbytes(self) -> int:
        """Bytes of all sets on the host."""
        return sum(self.host_store.sizes.values())

    def shapes(self, name: Hashable) -> tuple[Tree, Tree]:
        """Shape and dtype of each leaf of a set's parameters and of its optimizer state."""
        layout = self._sets.layout(name, f"bank.shapes({name!r})")
        return layout.fill(layout.shapes)

    def layout(self, name: Hashable) -> NoReturn:
        """An earlier name; the error names ``shapes``."""
        raise BankError(f"bank.layout({name!r})", "bank.shapes has the trees of a set", "an earlier name", f"bank.shapes({name!r})")

    def params(self, name: Hashable) -> Params:
        """The parameters of a set as NumPy arrays that cannot be written to; waits for the set's write-back.

        Once a pipeline of several processes uses the bank, they are ``jax.Array``s in host memory that ``jaxpp.gather`` completes.
        """
        return self._read(name, f"bank.params({name!r})")[0]

    def opt_state(self, name: Hashable) -> Tree:
        """The optimizer state of a set, as ``params`` gives the parameters; waits for its write-back."""
        return self._read(name, f"bank.opt_state({name!r})")[1]

    def add(self, name: Hashable, params: Params, opt_state: Tree = None) -> None:
        """Take a copy of a set in, and wait until it is on the host; unless ``opt_state`` is given, the optimizer makes it.

        Raises:
            BankError: the name is taken, or the trees are not what a set is made of.
        """
        where = f"bank.add({name!r}, ...)"
        if name in self._sets.layouts:
            raise BankError(where, "the names of sets differ", f"a second {name!r}", f"bank.remove({name!r}) first, or rename it")
        check_params(where, params)
        check_alive(where, params=params, opt_state=opt_state)
        if opt_state is not None:
            expected = jax.eval_shape(self.optimizer.init, params)
            layout = SetLayout(jax.tree.structure(()), jax.tree.structure(expected), tuple(jax.tree.leaves(expected)))
            if wrong := layout.differences((), opt_state):
                rule = "an optimizer state is one that the optimizer made for the parameters"
                raise BankError(where, rule, wrong, "leave it out")
        leaves, tree = jax.tree.flatten(params)
        if away := sum(not is_addressable(leaf) for leaf in jax.tree.leaves((params, opt_state))):
            got, fix = f"{away} arrays that live in other processes", "pass jaxpp.gather(params), and jaxpp.gather(opt_state)"
            raise BankError(where, "a set is added with all its values, the same in every process", got, fix)
        leaves = to_device(list(map(unaliased, leaves)), (self._home,) * len(leaves))
        moments, opt_tree = jax.tree.flatten(self._init(tree.unflatten(leaves)) if opt_state is None else opt_state)
        leaves = [_strong(leaf) for leaf in (*leaves, *moments)]
        layout = SetLayout(tree, opt_tree, shapes_of(leaves))
        held = self._sets.here(layout, leaves)
        self.host_store.put(name, held, (self._home,) * len(held))
        self._sets.layouts[name] = layout

    def remove(self, name: Hashable) -> None:
        """Forget a set; raises a ``BankError`` if there is none of this name, or it is in use."""
        self._sets.layout(name, f"bank.remove({name!r})")
        self.host_store.remove(name)
        del self._sets.layouts[name]

    def prefetch(self, name: Hashable) -> None:
        """Begin to bring a set to the device while another computes; waits for nothing.

        Raises:
            BankError: there is no such set, there is no slot beside the set in use (``slots=1``), or the device has no room.
        """
        layout = self._sets.whole_layout(name, f"bank.prefetch({name!r})", "pipe.prefetch(name)")
        self.host_store.prefetch(name, (self._home,) * len(layout.shapes))

    @managed
    def use(self, name: Hashable) -> Iterator[ActiveTask]:
        """Bring a set to the device; where the block ends, write it back without waiting.

        What the block assigns to ``task.params`` and ``task.opt_state`` is written; after an exception, nothing is.

        Raises:
            BankError: there is no such set, a set is in use, or the device has no room. Where the block ends: what was assigned
                does not have the trees and shapes of the set, or its arrays were given up (donated); the set stays as it was.
        """
        where = f"bank.use({name!r})"
        layout = self._sets.whole_layout(name, where, "pipe.step(..., task=name)")
        if self._task is not None:
            got, fix = f"{self._task.name!r} is in use", "leave its block first; prefetch brings the next"
            raise BankError(where, "one set is in use at a time", got, fix)
        leaves = self.host_store.fetch(name, (self._home,) * len(layout.shapes))
        lent = list(map(weakref.ref, leaves))
        self._task = task = ActiveTask(name, *layout.fill(leaves))
        del leaves  # the task alone holds them: what the step gives up is gone
        try:
            yield task
            self._give_back(task, layout, lent)
        except BaseException:
            self.host_store.release(name)
            raise
        finally:
            self._task = None
            vars(task).clear()
            task.name = name

    def wait(self) -> None:
        """Return once all write-backs have arrived; a ``BankError`` says that one failed: its set has the values of before."""
        self.host_store.wait()

    def save(self, directory: str | os.PathLike[str]) -> dict[str, Json]:
        """Write the sets that changed since they were saved in this directory, or restored from it, each to a folder of its own.

        What it returns, the manifest, says where each set is, those that did not change included. Save it with the state, in the
        same step of an ``orbax.checkpoint.CheckpointManager``, so that the two always belong together::

            items = {"state": ocp.args.StandardSave(state), "bank": ocp.args.JsonSave(bank.save(directory))}
            manager.save(step, args=ocp.args.Composite(**items))

        In several processes, all call it with the same directory, and each writes the leaves that it holds. The directory is made
        if it does not exist; give the steps of the manager another one. A set in use has the values that ``bank.params`` reads.
        Nothing that was saved earlier is overwritten. Each folder is a checkpoint of ``{"params": ..., "opt_state": ...}`` that
        Orbax opens without jaxpp. JSON keeps the manifest as it is; the directory is not in it, and may be moved.

        Raises:
            BankError: Orbax is not installed; a name is not a text, a number, a boolean, None or a tuple of these; the directory
                cannot be written to; a write-back failed. The bank and earlier manifests are as before.

        Example:
            >>> import numpy as np, tempfile
            >>> bank, folder = Bank({"cat": {"w": np.ones(2, "f")}}, optax.sgd(0.5)), tempfile.mkdtemp()
            >>> manifest = bank.save(folder)
            >>> again = Bank({}, optax.sgd(0.5))
            >>> again.restore(folder, manifest)
            >>> again.params("cat")["w"]
            array([1., 1.], dtype=float32)
        """
        return self._files.save(directory)

    def restore(self, directory: str | os.PathLike[str], manifest: Json) -> None:
        """Give every set the parameters and the optimizer state that a manifest names, bit for bit: all sets, or none.

        Sets that the bank does not have are added if their parameters are dicts, lists and tuples of arrays, or if a set of the
        bank has the same tree. Everything is read before the first set changes, so sets that the bank has are in memory twice
        meanwhile; ``Bank({}, optimizer)`` holds each only once. Pipelines with this bank go on with the restored sets.

        Raises:
            BankError: Orbax is not installed; a folder cannot be read; leaves differ from those of the bank's set, or from what its
                optimizer makes; the manifest misses a set; a set is in use; a write-back failed. The bank is as before.
        """
        self._files.restore(directory, manifest)

    def prune(self, directory: str | os.PathLike[str], manifests: Iterable[Json]) -> tuple[str, ...]:
        """Delete the folders of sets that none of these manifests names; what else is in the directory stays.

        The manifests are of the checkpoints that still count; if several runs save there, of all of them. The folders that this
        bank saved last or restored stay too, because later manifests will name them. What an interrupted save has left behind is
        deleted. It can be interrupted at any time, and called again. Returns the names of the folders that are gone.

        Raises:
            BankError: Orbax is not installed; one of these is not a manifest; a folder cannot be deleted.
        """
        return self._files.prune(directory, manifests)

    def __str__(self) -> str:
        return "\n".join([*table_lines(self._cells()), "", *fold_lines(self._remarks())])

    def __repr__(self) -> str:
        sizes = self.host_store.sizes
        words = [bytes_in_words(size) for size in sorted(set(sizes.values()))]
        sets = f"{len(sizes)} sets" + (f" of {' to '.join(dict.fromkeys((words[0], words[-1])))} each" if words else "")
        return f"Bank({', '.join([sets, f'{bytes_in_words(self.nbytes)} on the host', self._slots(), *self._files.remarks()])})"

    def _repr_html_(self) -> str:
        return html_table(self._cells()) + html_remarks(self._remarks())

    def _cells(self) -> list[list[str]]:
        store = self.host_store
        here = {name for row in store.rows for name in (*store.resident(row), *store.in_use(row))}  # a row for each replica
        groups: dict[int, list[Hashable]] = {}
        for name, size in store.sizes.items():
            groups.setdefault(size, []).append(name)
        rows = [["tasks", "sets", "bytes a set", "on the host", "on the device"]]
        for size, names in groups.items():
            resident = few_names([name for name in names if name in here])
            rows.append([few_names(names), str(len(names)), *map(bytes_in_words, (size, size * len(names))), resident or "none"])
        return rows

    def _remarks(self) -> list[str]:
        traffic = self.host_store.traffic
        moved = f"{bytes_in_words(traffic.bytes_to_device)} to the device, {bytes_in_words(traffic.bytes_to_host)} to the host"
        hits = f"{traffic.loads} loads, {traffic.hits} hits ({traffic.prefetch_hits} prefetched), {moved}"
        sets = f"{len(self)} sets, {bytes_in_words(self.nbytes)} on the host, {self._slots()}"
        return [sets, hits, *self._files.remarks()]

    def _slots(self) -> str:
        slots, devices = self.host_store.slots, self.host_store.devices or [self.device]
        return f"{slots} slot{'s' if slots > 1 else ''} on {'each of ' if len(devices) > 1 else ''}{few_names(devices)}"

    def _read(self, name: Hashable, where: str) -> tuple[Params, Tree]:
        layout = self._sets.layout(name, where)
        return layout.fill(self._sets.everywhere(layout, self.host_store.held(name).leaves))

    def _give_back(self, task: ActiveTask, layout: SetLayout, lent: Sequence[weakref.ref[Array]]) -> None:
        where = f"with bank.use({task.name!r})"
        (leaves, tree), (moments, opt_tree) = jax.tree.flatten(task.params), jax.tree.flatten(task.opt_state)
        leaves += moments
        known = ((leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else None for leaf in leaves)
        fits = (tree, opt_tree) == layout[:2] and all(a == (b.shape, b.dtype) for a, b in zip(known, layout.shapes, strict=True))
        if not fits and (wrong := layout.differences(task.params, task.opt_state)):  # which takes longer, as it names them
            fix = "assign the trees that the step returned for this task; the set stays as it was"
            raise BankError(where, "a set keeps its trees, shapes and dtypes", wrong, fix)
        gone = sum(getattr(leaf, "is_deleted", bool)() for leaf in leaves)
        if gone:
            got = f"{gone} of {len(leaves)} arrays are gone"
            fix = "assign what the step returned to task.params and task.opt_state; the set stays as it was"
            raise BankError(where, "a step that gives up (donates) a set's arrays returns new ones", got, fix)
        if all(ref() is leaf for ref, leaf in zip(lent, leaves, strict=True)):
            self.host_store.keep(task.name, leaves)
        else:
            self.host_store.write_back(task.name, self._placed(leaves))

    def _placed(self, leaves: Sequence[Leaf]) -> list[Array]:
        """Leaves at the bank's device, each with a buffer of its own, as a jitted step returns them."""
        placed, seen = [], set()
        for leaf in leaves:
            here = isinstance(leaf, jax.Array) and leaf.sharding == self._home and leaf.committed and id(leaf) not in seen
            placed.append(_strong(leaf if here else put(unaliased(leaf), self._home)))
            seen.add(id(leaf))
        return placed


def sets_of(bank: Bank) -> BankSets:
    """The layouts and homes of a bank's sets, which pipelines need and users do not."""
    return bank._sets


def insert(params: Params, task_params: Params, path: Path) -> Params:
    """A parameter tree with ``task_params`` at ``path``, in place of what is there: the inverse of ``Bank.take``."""
    subtrees = {path: task_params} if isinstance(path, str) else task_params
    for name in _paths(path):
        params = _rebuilt(_way(params, name, there=False), subtrees[name])
    return params


def _paths(path: Path) -> Sequence[str]:
    paths = [path] if isinstance(path, str) else path
    if not isinstance(paths, Sequence) or not paths:
        fix = 'write it like "head", or ["block_0/adapter", "block_1/adapter"]'
        raise BankError(f"path={path!r}", "a path is a text, or several are a list of at least one", repr(path), fix)
    for one in paths:
        if not isinstance(one, str) or not all(one.split("/")):
            fix = 'write it like "head" or "block_1/adapter"'
            raise BankError(f"path={one!r}", "a path is the keys down to a subtree, with slashes between them", repr(one), fix)
    return paths


def _way(params: Params, path: str, *, there: bool) -> list[tuple[Any, Hashable]]:
    """The mappings down to a subtree, each with its key on the way; unless ``there``, the last key may be a new one."""
    way, node, words = [], params, path.split("/")
    for depth, word in enumerate(words):
        got, near = type(node).__name__, ()
        if isinstance(node, Mapping):
            key = int(word) if word not in node and word.isdecimal() else word
            if key in node or not (there or depth < len(words) - 1):
                way.append((node, key))
                node = node.get(key)
                continue
            got, near = f"no {word!r}", difflib.get_close_matches(word, map(str, node))
        place = f"params[{'/'.join(words[:depth])}]" if depth else "params"
        fix = f"one of {', '.join(map(repr, near))}, perhaps" if near else "print the parameters' keys, and name one of them"
        raise BankError(f"path={path!r}", "a path leads through the parameters' mappings", f"{place} is or has {got}", fix)
    return way


def _rebuilt(way: Sequence[tuple[Any, Hashable]], node: Tree) -> Tree:
    for above, key in reversed(way):
        node = type(above)({**above, key: node})
    return node


def _strong(leaf: Array) -> Array:
    """Without JAX's weak type, which is not part of a set's shapes and would make a step compile again."""
    return jnp.asarray(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf


def _with_bar(what: str, by_name: Mapping[Any, Tree]) -> tqdm:
    if not isinstance(by_name, Mapping):
        fix = f"pass {what}={{name: ...}}, such as dict(enumerate(...))"
        raise BankError(f"{what}=...", "tasks have names", type(by_name).__name__, fix)
    return progress(list(by_name.items()), desc="parameter sets", unit="set", after=2)
