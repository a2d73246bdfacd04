"""What a bank says of itself: which sets there are, what is on the devices, and what was moved."""

from collections.abc import Hashable, Sequence

from jaxpp.stages.stage_table import bytes_in_words
from jaxpp.tasks.host_store import HostStore
from jaxpp.types import Device

__all__ = ["bank_cells", "bank_remarks", "few_names", "short_remarks"]


def bank_cells(store: HostStore) -> list[list[str]]:
    """The table of a bank: a line for all sets of one size, below the headings."""
    sizes = store.sizes
    here = {name for row in store.rows for name in (*store.resident(row), *store.in_use(row))}  # a row for each replica
    groups: dict[int, list[Hashable]] = {}
    for name, size in sizes.items():
        groups.setdefault(size, []).append(name)
    rows = [["tasks", "sets", "bytes a set", "on the host", "on the device"]]
    for size, names in groups.items():
        resident = few_names([name for name in names if name in here])
        rows.append([few_names(names), str(len(names)), *map(bytes_in_words, (size, size * len(names))), resident or "none"])
    return rows


def bank_remarks(store: HostStore, device: Device) -> list[str]:
    """What stands below the table: the sizes, and what was moved."""
    sizes, traffic = store.sizes, store.traffic
    moved = [f"{bytes_in_words(traffic.bytes_to_device)} to the device", f"{bytes_in_words(traffic.bytes_to_host)} to the host"]
    hits = f"{traffic.loads} loads, {traffic.hits} hits ({traffic.prefetch_hits} prefetched), {', '.join(moved)}"
    return [f"{len(sizes)} sets, {bytes_in_words(sum(sizes.values()))} on the host, {_slots(store, device)}", hits]


def short_remarks(store: HostStore, device: Device) -> list[str]:
    """A bank in one line, as parts of it."""
    sizes = store.sizes
    each = [bytes_in_words(size) for size in sorted(set(sizes.values()))]
    words = f" of {' to '.join(dict.fromkeys((each[0], each[-1])))} each" if each else ""
    return [f"{len(sizes)} sets{words}", f"{bytes_in_words(sum(sizes.values()))} on the host", _slots(store, device)]


def few_names(names: Sequence[Hashable]) -> str:
    """A few names, and how many there are if that is not all."""
    few = ", ".join(map(str, names[:4]))
    return few if len(names) <= 4 else f"{few}, ... ({len(names)})"


def _slots(store: HostStore, device: Device) -> str:
    """How many slots there are, and on which devices: those of a pipeline once it has used a set, else the bank's own."""
    slots, devices = store.slots, store.devices or [device]
    return f"{slots} slot{'s' if slots > 1 else ''} on {'each of ' if len(devices) > 1 else ''}{few_names(devices)}"
