"""Passes: each takes the lines of a step and returns them changed. ``Engine.bind`` has the one list of them, in their order.

Between two passes ``check_lines`` looks at the lines where it is asked to, as all tests do; users do not pay for it.
"""

from collections.abc import Callable, Iterable

from jaxpp.lowering.builder import LineList, Name

Pass = Callable[[LineList], LineList]

always_check = False


def transform(lines: LineList, passes: Iterable[Pass]) -> LineList:
    """The lines after all passes."""
    for one in passes:
        lines = one(lines)
        if always_check:
            check_lines(lines, one)
    return lines


def check_lines(lines: LineList, behind: object = None) -> None:
    """Raise if a line reads what is not there, or was taken over; loses a value by writing it again; or if a result is missing.

    Args:
        lines: lines over names, with places or without.
        behind: the pass that made them, for the message.

    Raises:
        AssertionError: if any does, with all of the reasons.
    """
    there, gone, wrong = {*lines.inputs, *lines.constants}, dict[Name, str](), list[str]()
    for line in lines.lines:
        missing = [name for name in line.inputs if name not in there]
        wrong += [f"{line.label} reads {name}, which {gone.get(name, 'no line before has made')}" for name in missing]
        lost = [name for name in line.outputs if name in there and name not in line.inputs]
        wrong += [f"{line.label} writes {name}, which is there and which it does not read" for name in lost]
        taken = line.taken.difference(line.outputs)
        gone |= dict.fromkeys(taken, f"{line.label} has taken over")
        there = (there - taken) | set(line.outputs)
    wrong += [f"result {name} {gone.get(name, 'is made by no line')}" for name in lines.outputs if name not in there]
    assert not wrong, "\n".join([f"behind {behind}:", *wrong])
