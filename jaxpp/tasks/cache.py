"""What a host store keeps account of: the copies on devices, the write-backs under way, and the traffic."""

from collections.abc import Hashable
from typing import NamedTuple

from jaxpp.errors import BankError
from jaxpp.tasks.set_packing import HostCopy, SetPacking
from jaxpp.types import Array, Leaf

__all__ = ["DeviceCache", "Traffic", "WriteBack", "arrived", "set_in_use", "write_failed"]


class Traffic(NamedTuple):
    """What a store has moved since it was made.

    Attributes:
        loads: sets brought to a device.
        hits: sets fetched whose copy was on the device already.
        prefetch_hits: the hits on a copy that a prefetch had brought and nobody had fetched before.
        bytes_to_device: of the loads.
        bytes_to_host: of the write-backs.
    """

    loads: int = 0
    hits: int = 0
    prefetch_hits: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0


class DeviceCache:
    """The sets on the devices of one replica: those that are lent, and copies that wait, the least recently used first.

    A copy that was prefetched waits as it travelled: packed.
    """

    def __init__(self) -> None:
        self.copies: dict[Hashable, tuple[Array, ...]] = {}
        self.lent: set[Hashable] = set()
        self.prefetched: dict[Hashable, SetPacking] = {}

    def drop(self, name: Hashable) -> tuple[Array, ...] | None:
        """Let go of a copy, and return it."""
        self.prefetched.pop(name, None)
        return self.copies.pop(name, None)

    def release(self, name: Hashable) -> None:
        """Forget that a set is lent, and let go of its copy."""
        self.lent.discard(name)
        self.drop(name)

    def make_room(self, slots: int) -> bool:
        """Let go of the least recently used copies until a slot is free; whether one is."""
        while self.copies and len(self.copies) + len(self.lent) >= slots:
            self.drop(next(iter(self.copies)))
        return len(self.lent) < slots


class WriteBack(NamedTuple):
    """A write-back under way, with the host copy that it replaces."""

    name: Hashable
    old: HostCopy
    new: HostCopy


def arrived(leaf: Leaf) -> bool:
    """Whether a copy is there; arrays of PRNG keys cannot say, and come with the others."""
    return getattr(leaf, "is_ready", lambda: True)()


def set_in_use(name: Hashable, rule: str, where: str = "") -> BankError:
    """The error for what cannot be done with a set in use."""
    return BankError(f"set {name!r}", rule, f"{name!r} is in use{where}", "leave the block that uses it first")


def write_failed(name: Hashable, error: Exception) -> BankError:
    """The error for a write-back that failed."""
    got = f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__
    fix = "free host memory if there was none, else look at the step that computed it (the cause is above); then use the set again"
    return BankError(f"set {name!r}", "a write-back that fails leaves the set as it was before", got, fix)
