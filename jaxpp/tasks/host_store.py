"""Sets of arrays on the host, few of them at a time on the device: what is behind ``theta[t]``.

``fetch`` *lends* a device copy of a set until ``write_back``, ``keep`` or ``release`` gives it back; meanwhile the store holds no
reference to it, so that a step may give its buffers up. A row is a replica under data parallelism, with its own slots.

To begin a transfer costs the host some 0.03 ms for each array, which for adapters is more than the step computes. So the small
leaves that share a home travel in vectors (``SetPacking``). They are taken apart where the set is fetched: at the prefetch, the
program would stand before the step that the transfer should hide behind.
"""

import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxpp.errors import BankError, is_count
from jaxpp.runtime.edges import to_device, to_host, unaliased
from jaxpp.runtime.interrupts import Hold
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.jaxpr import shapes_of
from jaxpp.stages.stacked import Slices, Slicing
from jaxpp.types import Array, Device, DType, Leaf

LARGEST_PACKED = 1 << 16  # bytes: arrays of 4 KiB travel three times as fast packed, arrays of 64 KiB as fast either way

SetHome = Sharding | Slices  # Where a leaf of a set lives on the device: somewhere, or each of some slices of it somewhere

_WRITES = 2  # how many write-backs a row may have under way
_Leaves = Sequence[Array]


class SetPacking:
    """How all sets whose leaves have these shapes and device shardings (homes) travel: vectors first, then the leaves left alone.

    The vectors hold unsigned integers: a backend may carry narrow floats through float32, which changes signalling NaNs. A leaf
    whose rows are divided over several homes (``Slices``) travels as its slices; on the device, these are leaves of their own.
    ``groups`` are the numbers of the leaves in each array that travels, and ``places`` the device shardings of these arrays.
    """

    def __init__(self, shapes: Sequence[jax.ShapeDtypeStruct], homes: Sequence[SetHome]):
        self.shapes, self.homes = tuple(shapes), tuple(homes)
        self._divided = [home if isinstance(home, Slices) else None for home in homes]
        self._shapes = tuple(jax.tree.leaves(list(map(_divided_like, shapes, homes))))
        self._homes = tuple(jax.tree.leaves(list(homes)))
        self._siblings: dict[Hashable, SetPacking] = {_key(homes): self}
        small: dict[Sharding, dict[DType, list[int]]] = {}
        for k, (aval, home) in enumerate(zip(self._shapes, self._homes, strict=True)):
            whole, word = _whole(home), _word(aval.dtype)
            if whole is not None and word is not None and 0 < count_bytes(aval) <= LARGEST_PACKED:
                small.setdefault(whole, {}).setdefault(word, []).append(k)
        packed = {home: [tuple(group) for group in by_word.values() if len(group) > 1] for home, by_word in small.items()}
        self._packed = [group for groups in packed.values() for group in groups]
        self._alone = sorted(set(range(len(self._shapes))).difference(*self._packed))
        self._programs = [(groups, *self._compiled(home, groups)) for home, groups in packed.items() if groups]
        self.groups = (*self._packed, *((k,) for k in self._alone))
        self.places = (*(home for home, groups in packed.items() for _ in groups), *(self._homes[k] for k in self._alone))

    def at(self, homes: Sequence[SetHome]) -> "SetPacking":
        """The packing of these leaves at other homes; the same object for the same homes."""
        key = _key(homes)
        if key not in self._siblings:
            self._siblings[key] = other = SetPacking(self.shapes, homes)
            other._siblings = self._siblings
        return self._siblings[key]

    def travels_as(self, other: "SetPacking") -> bool:
        """Whether the arrays that travel are those of another packing of these leaves."""
        return (self.groups, self._shapes) == (other.groups, other._shapes)

    def pack(self, leaves: Sequence[Array]) -> tuple[Array, ...]:
        """The arrays that travel, made of device arrays at their homes; waits for nothing. The leaves may be donated at once."""
        vectors = []
        for groups, join, _ in self._programs:
            vectors += join([[leaves[k] for k in group] for group in groups])
        return (*vectors, *(leaves[k] for k in self._alone))

    def unpack(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """The leaves of arrays that have travelled to the device, each at its home with a buffer of its own; waits for nothing."""
        leaves, rest = {}, iter(arrays)
        for groups, _, split in self._programs:
            leaves |= split(list(islice(rest, len(groups))))
        leaves |= zip(self._alone, rest, strict=True)
        return tuple(leaves[k] for k in range(len(self._shapes)))

    def on_host(self, leaves: Sequence[Leaf], version: object = None) -> "HostCopy":
        """The host copy of whole leaves that are on the host; waits until it is there. Without a version, its values are new."""
        leaves = self._slices(leaves)
        bits = [[np.ravel(np.asarray(leaves[k])).view(_word(self._shapes[k].dtype)) for k in group] for group in self._packed]
        vectors = list(map(np.concatenate, bits))
        there = jax.block_until_ready(to_host(vectors, self.places[: len(vectors)]))
        return HostCopy(self, (*there, *(leaves[k] for k in self._alone)), object() if version is None else version)

    def _slices(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Whole leaves on the host as what travels of each."""
        parts: list[Leaf] = []
        for leaf, node in zip(leaves, self._divided, strict=True):
            if node is None:
                parts.append(leaf)
            else:
                parts += jax.block_until_ready(to_host(node.of(np.asarray(leaf)), node.parts))
        return parts

    def views(self, arrays: Sequence[Array]) -> tuple[Leaf, ...]:
        """The whole leaves of arrays on the host: small ones as views of the vectors, which cannot be written to."""
        leaves: dict[int, Leaf] = dict(zip(self._alone, arrays[len(self._packed) :], strict=True))
        for group, vector in zip(self._packed, arrays, strict=False):
            for k, part in zip(group, np.split(np.asarray(vector), self._cuts(group)), strict=True):
                leaves[k] = part.view(self._shapes[k].dtype).reshape(self._shapes[k].shape)
        parts = iter(leaves[k] for k in range(len(self._shapes)))
        return tuple(
            next(parts) if node is None else _whole_rows(list(islice(parts, len(node.sizes))), node.axis) for node in self._divided
        )

    def _cuts(self, group: Sequence[int]) -> list[int]:
        return list(accumulate(math.prod(self._shapes[k].shape) for k in group[:-1]))

    def _compiled(self, home: Sharding, groups: Sequence[Sequence[int]]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Programs that make the vectors of one home of its small leaves, and the leaves, by their numbers, of the vectors."""

        def join(parts: list[list[Array]]) -> list[Array]:
            assert list(map(shapes_of, parts)) == [tuple(self._shapes[k] for k in group) for group in groups]
            return [jnp.concatenate([_as_bits(leaf, _word(leaf.dtype)).ravel() for leaf in leaves]) for leaves in parts]

        def split(vectors: list[Array]) -> dict[int, Array]:
            leaves = {}
            for group, vector in zip(groups, vectors, strict=True):
                for k, part in zip(group, jnp.split(vector, self._cuts(group)), strict=True):
                    leaves[k] = _as_bits(part.reshape(self._shapes[k].shape), self._shapes[k].dtype)
            return leaves

        homes = {k: self._homes[k] for group in groups for k in group}
        return jax.jit(join, out_shardings=home), jax.jit(split, out_shardings=homes)


class HostCopy(NamedTuple):
    """A host copy of a set, as it travels; copies of one ``version``, packed in whatever way, have the same values."""

    packing: SetPacking
    arrays: tuple[Array, ...]
    version: object

    @property
    def nbytes(self) -> int:
        """Bytes of the set."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """An array for each leaf; the small leaves are views of the vectors, NumPy arrays that cannot be written to."""
        return self.packing.views(self.arrays)


class Traffic(NamedTuple):
    """What a store has moved: sets loaded, sets fetched that were there already (and of these the prefetched), and bytes."""

    loads: int = 0
    hits: int = 0
    prefetch_hits: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0


@dataclass
class _Row:
    """The sets on the devices of one replica: those lent, and copies that wait, the oldest first; the prefetched wait packed."""

    copies: dict[Hashable, tuple[SetPacking | None, tuple[Array, ...]]] = field(default_factory=dict)
    lent: set[Hashable] = field(default_factory=set)

    def release(self, name: Hashable) -> None:
        self.lent.discard(name)
        self.copies.pop(name, None)

    def make_room(self, slots: int) -> bool:
        """Let go of the least recently used copies until a slot is free; whether one is."""
        while self.copies and len(self.copies) + len(self.lent) >= slots:
            del self.copies[next(iter(self.copies))]
        return len(self.lent) < slots


class _WriteBack(NamedTuple):
    name: Hashable
    old: HostCopy
    new: HostCopy

    def has_arrived(self) -> bool:
        """Whether the copy is there; arrays of PRNG keys cannot say, and come with the others."""
        return all(getattr(array, "is_ready", lambda: True)() for array in self.new.arrays)


class HostStore:
    """Sets of arrays by name, on the host, with at most ``slots`` copies on the device for each row, always with the same homes."""

    def __init__(self, slots: int = 2):
        if not is_count(slots, least=1):
            fix = "pass slots=2: one set to compute with, one that is prefetched"
            raise BankError(f"slots={slots!r}", "a device needs a slot for the set in use", f"slots={slots!r}", fix)
        self.slots, self.traffic = slots, Traffic()
        self._lock = threading.RLock()  # whoever looks at a state in flow, in whatever thread, has its sets written back
        self.hosts: dict[Hashable, HostCopy] = {}  # of sets under way the new copies, which may still be undone
        self._packings: dict[tuple[jax.ShapeDtypeStruct, ...], SetPacking] = {}
        self._rows: defaultdict[Hashable, _Row] = defaultdict(_Row)
        self._writes: deque[_WriteBack] = deque()
        self._flowing: dict[Hashable, Callable[[], object]] = {}  # for each set that a step in flow has, what ends that step
        self._late: list[BankError] = []

    @property
    def rows(self) -> tuple[Hashable, ...]:
        """The rows that have slots."""
        return tuple(self._rows)

    @property
    def sizes(self) -> Mapping[Hashable, int]:
        """Bytes of each set."""
        return {name: copy.nbytes for name, copy in self.hosts.items()}

    @property
    def devices(self) -> list[Device]:
        """The devices on which copies wait, in their order."""
        copies = [leaf for cache in self._rows.values() for _, leaves in cache.copies.values() for leaf in leaves]
        return sorted({device for leaf in copies for device in leaf.devices()}, key=lambda device: device.id)

    def resident(self, row: Hashable = 0) -> tuple[Hashable, ...]:
        """The sets that wait on a row's device, the oldest first."""
        return tuple(self._rows[row].copies) if row in self._rows else ()

    def in_use(self, row: Hashable = 0) -> tuple[Hashable, ...]:
        """The sets lent on a row."""
        return tuple(self._rows[row].lent) if row in self._rows else ()

    def held(self, name: Hashable) -> HostCopy:
        """The host copy of a set, once its write-back has arrived; if that fails, this raises, and next gives what was before."""
        with self._alone(name):
            self._known(name)
            while any(write.name == name for write in self._writes):
                self._finish()
            return self.hosts[name]

    def put(self, name: Hashable, leaves: Sequence[Leaf], homes: Sequence[SetHome]) -> None:
        """Copy a set in, in place of a set of this name that is not in use; waits until it is on the host."""
        self._settle()
        self.check_idle(name, "be replaced")
        self.replace({name: self.copied(leaves, homes)})

    def copied(self, leaves: Sequence[Leaf], homes: Sequence[SetHome]) -> HostCopy:
        """A host copy of leaves, beside the device sharding of each; waits until it is there. ``replace`` takes it in."""
        firsts = [home.parts[0] if isinstance(home, Slices) else home for home in homes]
        new = jax.block_until_ready(to_host([unaliased(leaf) for leaf in leaves], firsts))
        return self._packing(shapes_of(new), homes).on_host(new)

    def keep_only(self, name: Hashable, members: Sequence[int]) -> None:
        """Forget all leaves of a set but some, by their numbers; the set counts as unchanged, and is not in use."""
        self.check_idle(name, "be divided")
        held = self.held(name)
        leaves, packing = held.leaves, held.packing
        kept = self._packing(tuple(packing.shapes[k] for k in members), [packing.homes[k] for k in members])
        self.hosts[name] = kept.on_host([leaves[k] for k in members], held.version)
        self._drop(name)

    def _packing(self, shapes: tuple[jax.ShapeDtypeStruct, ...], homes: Sequence[SetHome]) -> SetPacking:
        if shapes not in self._packings:
            self._packings[shapes] = SetPacking(shapes, homes)
        return self._packings[shapes].at(homes)

    def replace(self, copies: Mapping[Hashable, HostCopy]) -> None:
        """Take host copies in, in place of sets of these names, none of which is in use: all of them, or none."""
        with self._lock, Hold() as hold:
            hold.begin()
            for name, copy in copies.items():
                self._drop(name)
                self.hosts[name] = copy

    def remove(self, name: Hashable) -> None:
        """Forget a set that is not in use."""
        with self._alone(name):
            self._settle()
            self._known(name)
            self.check_idle(name, "be removed")
            self._drop(name)
            del self.hosts[name]

    def fetch(self, name: Hashable, homes: Sequence[SetHome], row: Hashable = 0) -> tuple[Array, ...]:
        """Lend a set on a row's device until it is given back, as arrays that the caller may donate; waits for nothing.

        A leaf whose home is divided comes as its slices, one after another.
        """
        with self._alone(name, row):
            self._settle()
            self._known(name)
            cache = self._rows[row]
            if name in cache.lent:
                raise _set_in_use(name, "a set is in use once at a time")
            found = cache.copies.pop(name, None)
            packing, leaves = self._load(name, homes, row) if found is None else found
            if found is not None:
                self._count(Traffic(hits=1, prefetch_hits=packing is not None))
            if packing is not None:
                leaves = self._with_room(name, partial(packing.unpack, leaves))
            cache.lent.add(name)
            return leaves

    def prefetch(self, name: Hashable, homes: Sequence[SetHome], row: Hashable = 0) -> None:
        """Begin to bring a set that will be fetched, as ``fetch`` does. The least recently used copy makes room."""
        with self._alone(name, row):
            self._settle()
            self._known(name)
            cache = self._rows[row]
            if name in cache.copies:
                cache.copies[name] = cache.copies.pop(name)
            elif name not in cache.lent:
                cache.copies[name] = self._load(name, homes, row)

    def write_back(
        self, name: Hashable, leaves: Sequence[Array | Slices], rows: Sequence[Hashable] = (0,), resident: Sequence[_Leaves] = ()
    ) -> None:
        """Give a set back, changed: begin its write-back, and keep on each row its copy of ``resident``, or else ``leaves``.

        ``leaves`` has what was lent as slices under ``Slices``.

        The host copy changes in one assignment, and is put back if the arrays do not arrive. Copies on other rows are dropped. The
        leaves may be donated at once. If an earlier write-back failed, the next call says so.
        """
        with self._lock:
            old = self._known(name)
            self._flowing.pop(name, None)
            assert len(leaves) == len(old.packing.shapes)
            homes, leaves = jax.tree.map(lambda leaf: leaf.sharding, list(leaves)), jax.tree.leaves(list(leaves))
            if any(name in cache.lent for row, cache in self._rows.items() if row not in rows):
                raise _set_in_use(name, "a set is written back once, for all that use it", " elsewhere as well")
            try:
                packing = old.packing.at(homes)
                new = HostCopy(packing, to_host(self._again(lambda: packing.pack(leaves))), object())
            except (JaxRuntimeError, BankError) as error:  # the latter of an earlier write-back that made no room
                self.release(name, rows)
                raise _write_failed(name, error) from error
            self._writes.append(_WriteBack(name, old, new))
            self.hosts[name] = new
            self._count(Traffic(bytes_to_host=new.nbytes))
            self._drop(name)
            for row, copy in zip(rows, resident or (leaves,) * len(rows), strict=True):
                self.keep(name, copy, row)
            try:
                self._settle(_WRITES * len(self._rows))
            except BankError as error:
                self.tell_later(error)

    def keep(self, name: Hashable, leaves: Sequence[Array], row: Hashable = 0) -> None:
        """Give a set back unchanged: it stays on the device while there is a slot, and nothing is written."""
        with self._lock:
            cache = self._rows[row]
            cache.lent.discard(name)
            if cache.make_room(self.slots):
                cache.copies[name] = None, tuple(leaves)

    def release(self, name: Hashable, rows: Sequence[Hashable] = (0,)) -> None:
        """Give a set back as if it had not been lent: nothing is written, and its copy is dropped."""
        with self._lock:
            self._flowing.pop(name, None)
            for row in rows:
                self._rows[row].release(name)

    def flows(self, names: Iterable[Hashable], end: Callable[[], object]) -> None:
        """Say that a step in flow has these sets; ``end`` ends it and gives them back, as soon as any of them is asked for."""
        self._flowing |= dict.fromkeys(names, end)

    def _end(self, name: Hashable) -> None:
        if (end := self._flowing.pop(name, None)) is not None:
            end()

    @contextmanager
    def _alone(self, name: Hashable, row: Hashable | None = None) -> Iterator[None]:
        """A block in which no other thread is, once the steps in flow have ended that have this set, or all slots of a row."""
        if row is not None and len(self._rows[row].lent) >= self.slots:
            for each in tuple(self._flowing):
                self._end(each)
        self._end(name)  # without the lock, which whoever ends a step in another thread waits for
        with self._lock:
            yield

    def tell_later(self, error: BankError) -> None:
        """Have the next call raise an error that must not cost its caller what it holds."""
        self._late.append(error)

    def forget(self, rows: Iterable[Hashable]) -> None:
        """Drop the copies of rows that nobody will use any more."""
        for row in rows:
            self._rows.pop(row, None)

    def check_idle(self, name: Hashable, what: str) -> None:
        """Refuse what cannot be done with a set that is in use on any row."""
        with self._alone(name):
            if any(name in cache.lent for cache in self._rows.values()):
                raise _set_in_use(name, f"a set in use cannot {what}")

    def wait(self) -> None:
        """Return once all write-backs have arrived; after a BankError for one, its set has the values that it had before."""
        for name in tuple(self._flowing):
            self._end(name)
        with self._lock:
            self._settle(0)

    def _count(self, more: Traffic) -> None:
        self.traffic = Traffic(*map(add, self.traffic, more))

    def _known(self, name: Hashable) -> HostCopy:
        if name not in self.hosts:
            got = f"{name!r}; the sets are {', '.join(map(repr, self.hosts)) or 'none'}"
            raise BankError(f"set {name!r}", "a set is put into the store before it is used", got, "put it there first")
        return self.hosts[name]

    def _drop(self, name: Hashable) -> None:
        for cache in self._rows.values():
            cache.release(name)

    def _load(self, name: Hashable, homes: Sequence[SetHome], row: Hashable) -> tuple[SetPacking, tuple[Array, ...]]:
        cache = self._rows[row]
        if not cache.make_room(self.slots):
            got = f"slots={self.slots}, in use: {', '.join(map(repr, cache.lent))}"
            fix = f"make the bank with slots={self.slots + 1}, or leave the block that uses one first"
            raise BankError(f"set {name!r}", "a set is brought to the device where a slot is free", got, fix)
        packing = self.hosts[name].packing.at(homes)
        if not packing.travels_as(self.hosts[name].packing):
            held = self.held(name)
            self.hosts[name] = packing.on_host(held.leaves, held.version)
        host = self.hosts[name]
        arrays = self._with_room(name, lambda: to_device(host.arrays, packing.places))
        self._count(Traffic(loads=1, bytes_to_device=host.nbytes))
        return packing, arrays

    def _with_room(self, name: Hashable, work: Callable[[], tuple[Array, ...]]) -> tuple[Array, ...]:
        try:
            return self._again(work)
        except JaxRuntimeError as error:
            if not _is_full(error):
                raise
            rule = "a set in use fits on the device beside what is there"
            got = f"no room for its {self.hosts[name].nbytes:,} bytes ({self.slots} slots)"
            fix = f"use {'slots=1 (nothing is prefetched), ' if self.slots > 1 else ''}a smaller batch, or smaller sets"
            raise BankError(f"set {name!r}", rule, got, fix) from error

    def _again(self, work: Callable[[], tuple[Array, ...]]) -> tuple[Array, ...]:
        """The result of ``work``; if there is no room, again without the copies that wait and with no write-back under way."""
        try:
            return work()
        except JaxRuntimeError as error:
            if not _is_full(error) or not (self._writes or any(cache.copies for cache in self._rows.values())):
                raise
        for cache in self._rows.values():
            cache.copies.clear()
        self._settle(0)
        return work()

    def _settle(self, most: float = float("inf")) -> None:
        """Let go of the old copies whose successors have arrived; wait if more than ``most`` are under way."""
        if self._late:
            raise self._late.pop(0)
        while self._writes and (len(self._writes) > most or self._writes[0].has_arrived()):
            self._finish()

    def _finish(self) -> None:
        write = self._writes[0]
        try:
            jax.block_until_ready(write.new.arrays)
            self._writes.popleft()
        except JaxRuntimeError as error:
            self._writes.popleft()
            now, followed = self.hosts.get(write.name) is write.new, any(later.old is write.new for later in self._writes)
            if now:
                self.hosts[write.name] = write.old
                for cache in self._rows.values():
                    cache.copies.pop(write.name, None)
            self._writes = deque(w._replace(old=write.old) if w.old is write.new else w for w in self._writes)
            if now or followed:  # else the set was removed or replaced meanwhile
                raise _write_failed(write.name, error) from error


def _is_full(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)


def _set_in_use(name: Hashable, rule: str, where: str = "") -> BankError:
    return BankError(f"set {name!r}", rule, f"{name!r} is in use{where}", "leave the block that uses it first")


def _write_failed(name: Hashable, error: Exception) -> BankError:
    got = f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__
    fix = "free host memory if there was none, else look at the step that computed it (the cause is above); then use the set again"
    return BankError(f"set {name!r}", "a write-back that fails leaves the set as it was before", got, fix)


def _key(homes: Sequence[SetHome]) -> Hashable:
    """What is the same for the same homes."""
    return tuple((home.parts, home.division) if isinstance(home, Slices) else home for home in homes)


def _divided_like(aval: jax.ShapeDtypeStruct, home: SetHome) -> jax.ShapeDtypeStruct | Slices:
    """The shape of what travels of a leaf."""
    return Slicing((home.sizes,), (home.axis,)).of([aval])[0] if isinstance(home, Slices) else aval


def _whole_rows(parts: Sequence[Leaf], axis: int) -> np.ndarray:
    whole = np.concatenate([np.asarray(part) for part in parts], axis)
    whole.flags.writeable = False
    return whole


def _whole(home: Sharding) -> Sharding | None:
    """The sharding of a vector of leaves that live here; None if they are divided over devices, or that is not known."""
    if isinstance(home, SingleDeviceSharding):
        return home
    if isinstance(home, NamedSharding) and home.is_fully_replicated:
        return NamedSharding(home.mesh, PartitionSpec(), memory_kind=home.memory_kind)
    return None


def _word(dtype: DType) -> DType:
    """The unsigned integer as wide as a dtype; None for keys, complex numbers and what is not whole bytes."""
    if dtype == jnp.bool_:
        return np.dtype("uint8")
    if jnp.issubdtype(dtype, jnp.floating):
        bits = jnp.finfo(dtype).bits
    elif jnp.issubdtype(dtype, jnp.integer):
        bits = jnp.iinfo(dtype).bits
    else:
        return None
    return np.dtype(f"uint{bits}") if bits >= 8 else None


def _as_bits(array: Array, dtype: DType) -> Array:
    convert = jax.lax.convert_element_type if np.dtype(bool) in (array.dtype, dtype) else jax.lax.bitcast_convert_type
    return convert(array, dtype)
