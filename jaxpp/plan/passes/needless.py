"""Copies to host memory that free nothing, as a stage on the device reads the value later: they are left out."""

from collections import Counter
from dataclasses import replace

from jaxpp.plan.builder import Line, LineListT, MemoryCopy, Name


def without_needless(draft: LineListT) -> LineListT:
    """The lines without copies of residuals that free nothing; who would read what came back reads the value that stayed."""
    lines, last = draft.lines, draft.last_uses
    leaving = [(number, line) for number, line in enumerate(lines) if line.call == MemoryCopy.TO_HOST and line.action]
    readers = Counter(name for _, line in leaving for name in line.inputs)
    stays: dict[Name, Name] = {}
    for number, line in leaving:
        pairs = zip(line.inputs, line.outputs, strict=True)
        stays |= {copy: name for name, copy in pairs if readers[name] > 1 or last[name] > number}
    for line in lines:
        if line.call == MemoryCopy.TO_DEVICE:
            stays |= {back: stays[copy] for copy, back in zip(line.inputs, line.outputs, strict=True) if copy in stays}
    return replace(draft, lines=tuple(filter(None, (_without(line, stays) for line in lines)))) if stays else draft


def _without(line: Line, stays: dict[Name, Name]) -> Line | None:
    if not line.copies:
        return replace(line, inputs=tuple(stays.get(name, name) for name in line.inputs))
    pairs = [pair for pair in zip(line.inputs, line.outputs, strict=True) if stays.keys().isdisjoint(pair)]
    inputs, outputs = zip(*pairs, strict=True) if pairs else ((), ())
    return replace(line, inputs=inputs, outputs=outputs) if pairs else None
