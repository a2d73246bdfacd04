"""What several processes say of the same thing, and how the error message shows where they differ."""

import itertools
from collections.abc import Mapping, Sequence

from jaxpp.errors import ProcessError

__all__ = ["difference", "listed"]

_MOST_PARTS = 3
"""Parts whose difference is shown; others are named."""

_FOLLOW = frozenset({"loss", "optimizer", "init", "cuts", "lines"})
"""Parts that differ where others do; shown only if no other part differs."""

_BEFORE, _WIDTH = 40, 120
"""Letters of a line that are shown before the first difference, and in all."""

_RULE = "all processes run the same pipeline, made by the same code"
_CALLS = "give every process the same batches, and call the same methods in the same order, also where one of them prints or saves"
_REMEDIES = {
    "earlier calls": _CALLS,
    "call": _CALLS,
    "versions": "install the same versions on every host",
    "flags": "set the same options of JAX, and the same XLA_FLAGS, in every process",
    "devices": "give every process the same devices or mesh, made of jax.devices(), which lists those of all processes",
    "batch": "pass batches of the same shapes in every process; a loader that divides the data gives each as many examples",
    "key": "make the key of the same seed in every process",
}
_SAME_CODE = "start the same script, with the same arguments, on every host"


def listed(processes: Sequence[int]) -> str:
    """Processes as people write them.

    Example:
        >>> listed([1]), listed([0, 1, 2, 4])
        ('process 1', 'processes 0 to 2 and 4')
    """
    runs: list[list[int]] = []
    for process in processes:
        if runs and runs[-1][-1] == process - 1:
            runs[-1].append(process)
        else:
            runs.append([process])
    words = [word for run in runs for word in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    joined = " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    return f"process{'es' if len(processes) > 1 else ''} {joined}"


def difference(where: str, texts: Mapping[str, Mapping[int, str]]) -> ProcessError:
    """The error for texts that differ.

    Args:
        where: the call.
        texts: of each part that differs, what each process says; parts that cause others come first.
    """
    texts = {part: said for part, said in texts.items() if part not in _FOLLOW} or texts
    got: list[str] = []
    for part, said in list(texts.items())[:_MOST_PARTS]:
        got += _shown(part, said)
    if others := list(texts)[_MOST_PARTS:]:
        got.append(f"also different: {', '.join(others)}")
    return ProcessError(where, _RULE, got, _REMEDIES.get(next(iter(texts)), _SAME_CODE))


def _shown(part: str, said: Mapping[int, str]) -> list[str]:
    """The first line in which the texts of a part differ, once for all processes that say the same."""
    lines = {process: text.splitlines() for process, text in said.items()}
    longest = max(map(len, lines.values()))
    at = dict.fromkeys(lines, "(nothing)")
    number = 0
    for number in range(longest):
        at = {process: text[number] if number < len(text) else "(nothing)" for process, text in lines.items()}
        if len(set(at.values())) > 1:
            break
    groups: dict[str, list[int]] = {}
    for process, line in at.items():
        groups.setdefault(line, []).append(process)
    where = part if longest == 1 else f"{part}, line {number + 1}"
    same = sum(1 for _ in itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*groups, strict=False)))
    begin = max(0, same - _BEFORE)
    return [f"{where}: {listed(who)}: {_window(line, begin)}" for line, who in groups.items()]


def _window(line: str, begin: int) -> str:
    """The part of a line around the first difference."""
    shown = line[begin : begin + _WIDTH]
    return ("..." if begin else "") + shown + ("..." if begin + _WIDTH < len(line) else "")
