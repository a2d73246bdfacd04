"""Sets of arrays on the host, few of them at a time on the device: what is behind ``theta[t]``.

A device holds ``slots`` sets, however many there are. The host copy of a set is an immutable tuple of arrays in pinned memory. A
device copy is *lent* from ``fetch`` until ``write_back``, ``keep`` or ``release`` gives it back; meanwhile the store holds no
reference to it, so that a step may give its buffers up. A copy that was given back stays on the device until its slot is needed:
to fetch it again costs no transfer. A row is a replica under data parallelism, with slots of its own.

Nothing here waits for the device, except reading the host copies and the bound on write-backs: at most two for each row are under
way (the third waits for the first, two steps behind what is computing), so the host holds at most so many sets twice. The memory
of a set that has left its slot is free once its write-back has arrived; if the device has no room before, the load waits for that.

The store knows no trees and no optimizer: a set is leaves in an order that its owner knows. Small leaves travel and wait together,
in vectors (``SetPacking``), and are taken apart where the set is fetched: a program that did so at the prefetch would stand before
the step that the transfer should hide behind.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from operator import add

import jax
from jax.errors import JaxRuntimeError
from jax.sharding import Sharding, SingleDeviceSharding

from jaxpp.errors import BankError
from jaxpp.runtime.interrupts import Hold
from jaxpp.runtime.transfer import to_device, to_host, unaliased
from jaxpp.stages.jaxpr import shapes_of
from jaxpp.tasks.cache import DeviceCache, Traffic, WriteBack, arrived, set_in_use, write_failed
from jaxpp.tasks.set_packing import HostCopy, SetPacking
from jaxpp.types import Array, Device, Leaf

__all__ = ["HostStore"]

_WRITES = 2
"""How many write-backs a row may have under way."""


class HostStore:
    """Sets of arrays by name, on the host, with a few copies on the device.

    The homes of a set on a row are the same at every fetch, because copies are known by name and row alone. To bring sets to other
    homes, use other rows.

    Args:
        slots: how many sets each row may hold on its device, at least 1; the second is for what is prefetched.

    Attributes:
        slots: as given.
        traffic: what was moved so far.
    """

    def __init__(self, slots: int = 2):
        if not isinstance(slots, int) or isinstance(slots, bool) or slots < 1:
            fix = "pass slots=2: one set to compute with, one that is prefetched"
            raise BankError(f"slots={slots!r}", "a device needs a slot for the set in use", f"slots={slots!r}", fix)
        self.slots = slots
        self.traffic = Traffic()
        self._hosts: dict[Hashable, HostCopy] = {}
        self._packings: dict[tuple[jax.ShapeDtypeStruct, ...], SetPacking] = {}
        self._rows: defaultdict[Hashable, DeviceCache] = defaultdict(DeviceCache)
        self._writes: deque[WriteBack] = deque()
        self._late: list[BankError] = []

    @property
    def rows(self) -> tuple[Hashable, ...]:
        """The rows that have slots."""
        return tuple(self._rows)

    @property
    def sizes(self) -> Mapping[Hashable, int]:
        """Bytes of each set, in the order in which the sets came."""
        return {name: copy.nbytes for name, copy in self._hosts.items()}

    @property
    def versions(self) -> Mapping[Hashable, object]:
        """What stands for the values of each set: another object after a change, the earlier object once a change is undone."""
        return {name: copy.version for name, copy in self._hosts.items()}

    @property
    def devices(self) -> list[Device]:
        """The devices on which copies wait, in their order."""
        copies = [leaf for cache in self._rows.values() for leaves in cache.copies.values() for leaf in leaves]
        return sorted({device for leaf in copies for device in leaf.devices()}, key=lambda device: device.id)

    def resident(self, row: Hashable = 0) -> tuple[Hashable, ...]:
        """The sets that wait on a row's device, the least recently used first."""
        return tuple(self._rows[row].copies) if row in self._rows else ()

    def in_use(self, row: Hashable = 0) -> tuple[Hashable, ...]:
        """The sets lent on a row."""
        return tuple(self._rows[row].lent) if row in self._rows else ()

    def shapes(self, name: Hashable) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of each leaf of a set."""
        return self._known(name).packing.shapes

    def held(self, name: Hashable) -> HostCopy:
        """The host copy of a set, which never changes (a change replaces it); waits for the set's write-back.

        If the write-back fails, this raises a BankError, and the next call gives what was there before.
        """
        self._known(name)
        while any(write.name == name for write in self._writes):
            self._finish()
        return self._hosts[name]

    def stored(self, name: Hashable) -> tuple[Array, ...]:
        """The arrays in pinned memory that are the host copy of a set: vectors of small leaves, then the others; waits for them."""
        return self.held(name).arrays

    def read(self, name: Hashable) -> tuple[Leaf, ...]:
        """The host copy of a set, an array for each leaf (small leaves are read-only views); waits for them."""
        return self.held(name).leaves

    def put(self, name: Hashable, leaves: Sequence[Leaf], homes: Sequence[Sharding] | None = None) -> None:
        """Copy a set in, in place of a set of this name that is not in use; waits until it is on the host.

        Each leaf is kept beside its device sharding in ``homes``. Without ``homes``, device arrays stay beside their own devices,
        and NumPy arrays beside the first device.
        """
        self._settle()
        self.check_idle(name, "be replaced")
        here = SingleDeviceSharding(jax.local_devices()[0])
        homes = [getattr(leaf, "sharding", here) for leaf in leaves] if homes is None else homes
        self.replace({name: self.copied(leaves, homes)})

    def copied(self, leaves: Sequence[Leaf], homes: Sequence[Sharding]) -> HostCopy:
        """A host copy of leaves, beside the device sharding of each; waits until it is there. ``replace`` takes it in."""
        new = jax.block_until_ready(to_host([unaliased(leaf) for leaf in leaves], homes))
        return self._packing(shapes_of(new), homes).on_host(new)

    def keep_only(self, name: Hashable, members: Sequence[int]) -> None:
        """Forget all leaves of a set but some, by their numbers; the set counts as unchanged, and is not in use."""
        self.check_idle(name, "be divided")
        held = self.held(name)
        leaves, packing = held.leaves, held.packing
        kept = self._packing(tuple(packing.shapes[k] for k in members), [packing.homes[k] for k in members])
        self._hosts[name] = kept.on_host([leaves[k] for k in members], held.version)
        self._drop(name)

    def _packing(self, shapes: tuple[jax.ShapeDtypeStruct, ...], homes: Sequence[Sharding]) -> SetPacking:
        if shapes not in self._packings:
            self._packings[shapes] = SetPacking(shapes, homes)
        return self._packings[shapes].at(homes)

    def replace(self, copies: Mapping[Hashable, HostCopy]) -> None:
        """Take host copies in, in place of sets of these names, none of which is in use: all of them, or none."""
        for name in copies:
            self.check_idle(name, "be replaced")
        with Hold() as hold:
            hold.begin()
            for name, copy in copies.items():
                self._drop(name)
                self._hosts[name] = copy

    def remove(self, name: Hashable) -> None:
        """Forget a set that is not in use."""
        self._settle()
        self._known(name)
        self.check_idle(name, "be removed")
        self._drop(name)
        del self._hosts[name]

    def fetch(self, name: Hashable, homes: Sequence[Sharding], row: Hashable = 0) -> tuple[Array, ...]:
        """Lend a set on a row's device until it is given back, as arrays that the caller may donate; waits for nothing.

        If the small leaves of the set shared homes otherwise when it was written, it is first packed anew, on the host.

        Raises:
            BankError: there is no such set, it is lent already, all slots are, or the device has no room.
        """
        self._settle()
        self._known(name)
        cache = self._rows[row]
        if name in cache.lent:
            raise set_in_use(name, "a set is in use once at a time")
        packing = cache.prefetched.get(name)
        leaves = cache.drop(name)
        if leaves is None:
            packing, leaves = self._load(name, homes, row)
        else:
            self._count(Traffic(hits=1, prefetch_hits=packing is not None))
        if packing is not None:
            leaves = self._with_room(name, partial(packing.unpack, leaves))
        cache.lent.add(name)
        return leaves

    def prefetch(self, name: Hashable, homes: Sequence[Sharding], row: Hashable = 0) -> None:
        """Begin to bring a set that will be fetched, as ``fetch`` does. The least recently used copy makes room."""
        self._settle()
        self._known(name)
        cache = self._rows[row]
        if name in cache.copies:
            cache.copies[name] = cache.copies.pop(name)
        elif name not in cache.lent:
            cache.prefetched[name], cache.copies[name] = self._load(name, homes, row)

    def write_back(
        self,
        name: Hashable,
        leaves: Sequence[Array],
        rows: Sequence[Hashable] = (0,),
        resident: Sequence[Sequence[Array]] | None = None,
    ) -> None:
        """Give a set back, changed: begin its write-back, and keep it on the device.

        The host copy is the old values or the new values, never some of both: it changes in one assignment, once all copies are
        under way. The old copy is kept until the new copy has arrived, and put back if that fails. Copies on other rows are out of
        date, and dropped. The leaves may be donated at once. Each row keeps its own of the copies ``resident``, or else ``leaves``.

        Raises:
            BankError: there is no such set, it is in use on another row as well, or this write-back failed: then nothing was
                changed. (If an earlier write-back failed, the next call says so.)
        """
        old = self._known(name)
        assert len(leaves) == len(old.packing.shapes)
        if any(name in cache.lent for row, cache in self._rows.items() if row not in rows):
            raise set_in_use(name, "a set is written back once, for all that use it", " elsewhere as well")
        try:
            packing = old.packing.at([leaf.sharding for leaf in leaves])
            new = HostCopy(packing, to_host(self._again(lambda: packing.pack(leaves))), object())
        except (JaxRuntimeError, BankError) as error:  # the latter of an earlier write-back that made no room
            self.release(name, rows)
            raise write_failed(name, error) from error
        self._writes.append(WriteBack(name, old, new))
        self._hosts[name] = new
        self._count(Traffic(bytes_to_host=new.nbytes))
        self._drop(name)
        for row, copy in zip(rows, (leaves,) * len(rows) if resident is None else resident, strict=True):
            self.keep(name, copy, row)
        try:
            self._settle(_WRITES * len(self._rows))
        except BankError as error:
            self.tell_later(error)

    def keep(self, name: Hashable, leaves: Sequence[Array], row: Hashable = 0) -> None:
        """Give a set back unchanged: it stays on the device while there is a slot, and nothing is written."""
        cache = self._rows[row]
        cache.lent.discard(name)
        if cache.make_room(self.slots):
            cache.copies[name] = tuple(leaves)

    def release(self, name: Hashable, rows: Sequence[Hashable] = (0,)) -> None:
        """Give a set back as if it had not been lent: nothing is written, and its copy is dropped."""
        for row in rows:
            self._rows[row].release(name)

    def tell_later(self, error: BankError) -> None:
        """Have the next call raise an error that must not cost its caller what it holds."""
        self._late.append(error)

    def forget(self, rows: Iterable[Hashable]) -> None:
        """Drop the copies of rows that nobody will use any more."""
        for row in rows:
            self._rows.pop(row, None)

    def check_idle(self, name: Hashable, what: str) -> None:
        """Refuse what cannot be done with a set that is in use on any row."""
        if any(name in cache.lent for cache in self._rows.values()):
            raise set_in_use(name, f"a set in use cannot {what}")

    def wait(self) -> None:
        """Return once all write-backs have arrived; after a BankError for one, its set has the values that it had before."""
        self._settle(0)

    def _count(self, more: Traffic) -> None:
        self.traffic = Traffic(*map(add, self.traffic, more))

    def _known(self, name: Hashable) -> HostCopy:
        if name not in self._hosts:
            got = f"{name!r}; the sets are {', '.join(map(repr, self._hosts)) or 'none'}"
            raise BankError(f"set {name!r}", "a set is put into the store before it is used", got, "put it there first")
        return self._hosts[name]

    def _drop(self, name: Hashable) -> None:
        for cache in self._rows.values():
            cache.release(name)

    def _load(self, name: Hashable, homes: Sequence[Sharding], row: Hashable) -> tuple[SetPacking, tuple[Array, ...]]:
        """The arrays of a set on their way to a row's device, and how they are packed there."""
        cache = self._rows[row]
        if not cache.make_room(self.slots):
            got = f"slots={self.slots}, in use: {', '.join(map(repr, cache.lent))}"
            fix = f"make the bank with slots={self.slots + 1}, or leave the block that uses one first"
            raise BankError(f"set {name!r}", "a set is brought to the device where a slot is free", got, fix)
        packing = self._hosts[name].packing.at(homes)
        if packing.groups != self._hosts[name].packing.groups:
            held = self.held(name)
            self._hosts[name] = packing.on_host(held.leaves, held.version)
        host = self._hosts[name]
        arrays = self._with_room(name, lambda: to_device(host.arrays, packing.places))
        self._count(Traffic(loads=1, bytes_to_device=host.nbytes))
        return packing, arrays

    def _with_room(self, name: Hashable, work: Callable[[], tuple[Array, ...]]) -> tuple[Array, ...]:
        """Arrays on the device, if it has room for them."""
        try:
            return self._again(work)
        except JaxRuntimeError as error:
            if not _is_full(error):
                raise
            rule = "a set in use fits on the device beside what is there"
            got = f"no room for its {self._hosts[name].nbytes:,} bytes ({self.slots} slots)"
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
            for name in tuple(cache.copies):
                cache.drop(name)
        self.wait()
        return work()

    def _settle(self, most: float = float("inf")) -> None:
        """Let go of the old copies whose successors have arrived; wait if more than ``most`` are under way."""
        if self._late:
            raise self._late.pop(0)
        while self._writes and (len(self._writes) > most or all(map(arrived, self._writes[0].new.arrays))):
            self._finish()

    def _finish(self) -> None:
        """Wait for the oldest write-back; undo it if it failed."""
        write = self._writes[0]
        try:
            jax.block_until_ready(write.new.arrays)
            self._writes.popleft()
        except JaxRuntimeError as error:
            self._writes.popleft()
            now, followed = self._hosts.get(write.name) is write.new, any(later.old is write.new for later in self._writes)
            if now:
                self._hosts[write.name] = write.old
                for cache in self._rows.values():
                    cache.drop(write.name)
            self._writes = deque(w._replace(old=write.old) if w.old is write.new else w for w in self._writes)
            if now or followed:  # else the set was removed or replaced meanwhile
                raise write_failed(write.name, error) from error


def _is_full(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)
