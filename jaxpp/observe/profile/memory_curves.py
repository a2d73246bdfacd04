"""The live bytes of a step along its measured time: what each device holds from moment to moment."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxpp.observe.memory.liveness import Liveness
from jaxpp.observe.profile.spans import Span
from jaxpp.types import Device

__all__ = ["Curve", "curves"]


class Curve(NamedTuple):
    """Live bytes of one device over a step, by kind.

    Attributes:
        label: the device and its ranks, ``cuda:0 (ranks 0, 4)``.
        times: milliseconds from the start of the step, in ascending order.
        levels: ``levels[k]`` are the bytes of each of ``MEMORY_KINDS`` from ``times[k]`` on, the last to the end of the step.
    """

    label: str
    times: tuple[float, ...]
    levels: tuple[tuple[int, ...], ...]


def curves(liveness: Liveness, spans: Sequence[Span], by_rank: Sequence[Device]) -> tuple[Curve, ...]:
    """One curve for each device, in milliseconds; there is one span for each line of ``liveness``.

    The results of a program are there from its start, and what nobody reads after it is freed at its end. What arrives is there
    once the device has begun what it was given before. So a curve goes through the moments of ``liveness`` in their order, and has
    the same peak.
    """
    return tuple(_curve(liveness, spans, device, by_rank) for device in liveness.devices)


def _curve(liveness: Liveness, spans: Sequence[Span], device: Device, by_rank: Sequence[Device]) -> Curve:
    ranks = [str(rank) for rank, home in enumerate(by_rank) if home == device]
    label = f"{device} (rank{'s' * (len(ranks) > 1)} {', '.join(ranks)})"
    levels, freed = liveness.levels[device].tolist(), liveness.freed[device].tolist()
    times, found, now = [0.0], [tuple(levels[0])], 0.0

    def note(time: float, level: Sequence[int]) -> None:
        if tuple(level) != found[-1]:
            times.append(time)
            found.append(tuple(level))

    for number, (line, span) in enumerate(zip(liveness.lines, spans, strict=True)):
        here = line.device == device and line.program is not None
        now = max(now, 1e3 * span.start) if here else now
        note(now, levels[number + 1])
        now = max(now, 1e3 * span.end) if here else now
        note(now, [a - b for a, b in zip(levels[number + 1], freed[number + 1], strict=True)])
    end = max(1e3 * span.end for span in spans)
    return Curve(label, (*times, max(now, end)), (*found, tuple(levels[-1])))
