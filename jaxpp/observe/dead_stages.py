"""Warns of training that comes to nothing: stages whose gradients stay zero, and a loss that is NaN.

A boundary that carries no gradient raises no error, but the stages before it never change; nor does a loss that is NaN, after which
all parameters are. Each update returns the sum of squared gradients of each stage. The detector looks at these sums and at the loss
some steps later, when they are there, so that nothing waits: after each of the first steps, then now and then. It keeps the losses
in between, a number each, to name the first that is NaN. One batch whose step the optimizer skips is no reason to warn.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from jax.errors import JaxRuntimeError

from jaxpp.errors import warn
from jaxpp.types import Leaf

_EAGER, _EVERY, _PATIENCE = 8, 16, 3  # steps looked at from the first, one of how many after those; zeros, or NaN, in a row


class DeadStageWarning(UserWarning):
    """The gradients of a stage stay zero, so it does not learn."""


class NanLossWarning(UserWarning):
    """The loss became NaN, and stays so: the parameters are NaN too."""


class _Loss(NamedTuple):
    """The loss of a step, on its device."""

    step: int  # as the metrics count it
    value: Leaf


class _Seen(NamedTuple):
    """What is looked at together, once the last of it is there."""

    losses: Sequence[_Loss]  # of the steps since the last that was looked at
    squares: Sequence[Leaf]  # of the last of these steps


class Detector:
    """Follows the training of one pipeline, given the stages that have parameters, and warns once of each."""

    def __init__(self, stages: Sequence[int]):
        self._zeros = dict.fromkeys(stages, 0)
        self._loss = math.inf  # the last that was looked at
        self._nans, self._since = list[int](), 0  # the last steps whose loss was NaN, and how many numbers came after them
        self._num_steps = 0
        self._losses = list[_Loss]()
        self._unread = deque[_Seen]()
        self._warned = set[type[Warning]]()

    def add(self, step: int, loss: Leaf, squares: Sequence[Leaf]) -> None:
        """Take the loss of a step and the sum of squared gradients of each stage, to be looked at later."""
        if len(self._warned) < 2:
            self._losses.append(_Loss(step, loss))
            if self._num_steps < _EAGER or self._num_steps % _EVERY == 0:
                self._unread.append(_Seen(self._losses, squares))
                self._losses = []
        self._num_steps += 1

    def look(self) -> None:
        """Look at what is there by now; warn if the sums of a stage were zero several times in a row, or a loss is NaN."""
        while self._unread:
            losses, squares = self._unread[0]
            if not all(value.is_ready() for value in (losses[-1].value, *squares) if _is_here(value)):
                break
            self._unread.popleft()
            try:
                found = [float(value) if _is_here(value) else 1.0 for value in squares]
                numbers = {step: float(value) for step, value in losses[-1:] if _is_here(value)}
                if any(map(math.isnan, numbers.values())):  # where the last is a number, so are those before, or they were skipped
                    numbers = {step: float(value) for step, value in losses if _is_here(value)}
            except JaxRuntimeError:  # of a step that failed, which its caller is told when reading what it returned
                continue
            for stage, square in zip(self._zeros, found, strict=True):
                self._zeros[stage] = 0 if square else self._zeros[stage] + 1
            self._loss = [self._loss, *numbers.values()][-1]
            self._count_nans(numbers, 1 if len(numbers) > 1 else len(losses))
        if len(self._nans) >= _PATIENCE and NanLossWarning not in self._warned:
            self._warned.add(NanLossWarning)
            warn(NanLossWarning(_nan_message(self._nans[0])))
        dead = [stage for stage, zeros in self._zeros.items() if zeros >= _PATIENCE]
        if dead and DeadStageWarning not in self._warned:
            self._warned.add(DeadStageWarning)
            done = self._loss == 0 and len(dead) == len(self._zeros)
            warn(DeadStageWarning(_ZERO if done else _message(dead, list(self._zeros))))

    def _count_nans(self, losses: dict[int, float], stands_for: int) -> None:
        """Take losses of steps, each of which stands for so many steps."""
        for step, loss in losses.items():
            if math.isnan(loss):
                self._since = 0
                self._nans = [*self._nans, step][:_PATIENCE]
            else:
                self._since += stands_for
                self._nans = [] if self._since >= _PATIENCE else self._nans  # with delay=1 one number comes between


def _is_here(value: Leaf) -> bool:
    """Whether this process can read a number; the sums of stages in other processes count as not zero."""
    return not value.is_deleted() and (value.is_fully_addressable or bool(value.addressable_shards))


def _nan_message(step: int) -> str:
    lines = [
        f"pipe.step: the loss is NaN since step {step}, and no later step changes that.",
        f"Got: NaN as the loss of step {step} (metrics.step), and of all that were looked at since.",
        'Fix: go on from a state before that step, with jax.config.update("jax_debug_nans", True): the step then raises, and names '
        "the stage, the microbatch and the line of the model, or the leaf of the batch, from which the first NaN comes",
    ]
    return "\n  ".join(lines)


_QUIET = 'warnings.filterwarnings("ignore", category=jaxpp.DeadStageWarning)'
_ZERO = f"""no stage learns any more: all gradients were zero {_PATIENCE} times in a row, because the loss is 0.
  Got: a loss of exactly 0.
  Fix: stop, if the model has learned all examples; otherwise look for labels that are all alike, or a mask of zeros; or {_QUIET}"""


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
        f"Fix: look there for stop_gradient, a cast to integers, argmax, or dead ReLU units; if this is intended, {_QUIET}",
    ]
    return "\n  ".join(lines)
