"""What a step reports is copied to every process, which can read it then without asking the others."""

from collections.abc import Iterable

from jaxpp.plan.builder import Builder, Name
from jaxpp.runtime.placement import Placement
from jaxpp.runtime.processes.here import processes_of

__all__ = ["add_reports"]


def add_reports(builder: Builder, placement: Placement, names: Iterable[Name]) -> dict[Name, Name]:
    """Send values to one stage of each process that does not have them.

    Returns:
        the name of each value in this process.
    """
    readers: dict[int, int] = {}
    for stage, place in enumerate(placement.places):
        for process in processes_of(place.devices):
            readers.setdefault(process, stage)
    found = {}
    for name in names:
        found[name] = name
        home = placement[name.stage]
        for process, reader in readers.items():
            if process in processes_of(home.devices):
                continue
            target = Name(reader, name.ref, name.microbatch)
            builder.send(f"send {name.ref.role} {name.ref.index} to process {process}", name, target)
            if placement[reader].is_here and not home.is_here:
                found[name] = target
    return found
