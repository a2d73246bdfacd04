"""Warns of stages that do not learn: a boundary that carries no gradient raises no error, but the stages before it never change.

Each update returns the sum of squared gradients of each stage. The detector looks at these sums some steps later, when they are
there, so that nothing waits: after each of the first steps, then now and then.
"""

from collections import deque
from collections.abc import Sequence

from jax.errors import JaxRuntimeError

from jaxpp.errors import warn
from jaxpp.types import Leaf

_EAGER, _EVERY, _PATIENCE = 8, 16, 3  # steps looked at from the first, one of how many after those, and zeros in a row


class DeadStageWarning(UserWarning):
    """The gradients of a stage stay zero, so it does not learn."""


class Detector:
    """Follows the training of one pipeline, given the stages that have parameters, and warns once."""

    def __init__(self, stages: Sequence[int]):
        self._zeros = dict.fromkeys(stages, 0)
        self._num_steps = 0
        self._waiting: deque[Sequence[Leaf]] = deque()
        self._warned = False

    def add(self, squares: Sequence[Leaf]) -> None:
        """Take the sum of squared gradients of each stage in one step, to be looked at later."""
        if not self._warned and (self._num_steps < _EAGER or self._num_steps % _EVERY == 0):
            self._waiting.append(squares)
        self._num_steps += 1

    def look(self) -> None:
        """Look at the sums that are there by now; warn if those of a stage were zero several times in a row."""
        while self._waiting and all(value.is_ready() for value in self._waiting[0] if _is_here(value)):
            try:
                squares = [float(value) if _is_here(value) else 1.0 for value in self._waiting.popleft()]
            except JaxRuntimeError:  # of a step that failed, which its caller is told when reading what it returned
                continue
            for stage, square in zip(self._zeros, squares, strict=True):
                self._zeros[stage] = 0 if square else self._zeros[stage] + 1
        dead = [stage for stage, zeros in self._zeros.items() if zeros >= _PATIENCE]
        if dead and not self._warned:
            self._warned = True
            self._waiting.clear()
            warn(DeadStageWarning(_message(dead, list(self._zeros))))


def _is_here(value: Leaf) -> bool:
    """Whether this process can read a sum; those of stages in other processes count as not zero."""
    return value.is_fully_addressable or bool(value.addressable_shards)


def _message(dead: Sequence[int], stages: Sequence[int]) -> str:
    who = f"stage {dead[0]} does" if len(dead) == 1 else f"stages {', '.join(map(str, dead))} do"
    alive = [stage for stage in stages if stage not in dead]
    others = ", while the others learn" if alive else ""
    got = [f"no gradient reaches the parameters of stage {s}, though one passes it" for s in dead if alive and s > alive[0]]
    before = [stage for stage in dead if alive and stage < alive[0]]
    if before:
        last, then = before[-1], alive[0]
        boundaries = " or ".join(map(str, range(last, then)))
        got.append(f"no gradient crosses boundary {boundaries} (between stages {last} and {then})")
    lines = [
        f"{who} not learn{others}: all gradients (the sum of their squares) were zero {_PATIENCE} times in a row.",
        f"Got: {'; '.join(got) or 'no gradient comes from the loss'}.",
        "Fix: look there for stop_gradient, a cast to integers, argmax, or dead ReLU units; if this is intended, "
        'warnings.filterwarnings("ignore", category=jaxpp.DeadStageWarning)',
    ]
    return "\n  ".join(lines)
