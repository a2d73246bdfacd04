"""What a shelf keeps account of: the slots of a device, write-backs under way, and what was moved."""

from collections.abc import Hashable
from typing import Any, NamedTuple

from jaxpp.errors import BankError
from jaxpp.tasks.packed import Crate, Packed
from jaxpp.types import Array

__all__ = ["Slots", "Traffic", "Write", "arrived", "failed"]


class Traffic(NamedTuple):
    """What a shelf has moved since it was made.

    Attributes:
        loads: sets brought to a device.
        hits: sets fetched that were there.
        prefetch_hits: those of the hits that a prefetch had brought, not fetched before.
        bytes_to_device: of the loads.
        bytes_to_host: of the write-backs.
    """

    loads: int = 0
    hits: int = 0
    prefetch_hits: int = 0
    bytes_to_device: int = 0
    bytes_to_host: int = 0


class Slots:
    """The slots of a replica: which sets are lent, and the copies that wait, the least recently used first.

    What was prefetched waits as it came, in its crate.
    """

    __slots__ = ("copies", "lent", "prefetched")

    def __init__(self) -> None:
        self.copies: dict[Hashable, tuple[Array, ...]] = {}
        self.lent: set[Hashable] = set()
        self.prefetched: dict[Hashable, Crate] = {}

    def drop(self, name: Hashable) -> tuple[Array, ...] | None:
        """Let go of a copy, and return it."""
        self.prefetched.pop(name, None)
        return self.copies.pop(name, None)

    def make_room(self, slots: int) -> bool:
        """Let go of the least recently used copies until a slot is free; whether one is."""
        while self.copies and len(self.copies) + len(self.lent) >= slots:
            self.drop(next(iter(self.copies)))
        return len(self.lent) < slots


class Write(NamedTuple):
    """A write-back under way, with the host copy that it replaces."""

    name: Hashable
    old: Packed
    new: Packed


def arrived(leaf: Any) -> bool:
    """Whether a copy is there; arrays of PRNG keys cannot say, and come with the others."""
    ready = getattr(leaf, "is_ready", None)
    return ready is None or ready()


def failed(name: Hashable, error: Exception) -> BankError:
    """The error for a write-back that failed."""
    got = f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__
    fix = "free host memory if there was none, else look at the step that computed it (the cause is above); then use the set again"
    return BankError(f"set {name!r}", "a write-back that fails leaves the set as it was before", got, fix)
