"""The losses of a run as it goes: read one step late, shown on a progress bar, and timed."""

import time

import jax
from tqdm import tqdm

from experiments.lm.checkpoints import History
from jaxpp.runtime.progress import progress

__all__ = ["Meter"]

NUM_PRINTED = 20  # losses of the first steps, to compare by eye with --plain


class Meter:
    """Reads losses one step late, so that the devices always have a step to work on, and times the steps.

    The first ``pause`` is taken to end the compilation.

    Args:
        steps: of the whole run, those before it was resumed included.
        tokens_a_step: what one step trains on.
        history: of the steps before the run was resumed; the losses of the steps that are taken are added to it.
    """

    def __init__(self, steps: int, tokens_a_step: int, history: History):
        self.history = history
        self.compile_seconds = 0.0
        self.tokens_per_second: float | None = None
        self._tokens_a_step = tokens_a_step
        self._waiting: list[jax.Array] = []
        self._began = time.perf_counter()
        self._timed, self._seconds, self._since = 0, 0.0, 0.0
        self._bar = progress(total=steps, initial=len(self.history.losses), unit="step", desc="compile")

    def add(self, loss: jax.Array) -> None:
        """Take the loss of the newest step and read that of the one before."""
        self._waiting.append(loss)
        self._read(keep=1)

    def read(self) -> None:
        """Wait for every step taken, while the clock runs on."""
        self._read(keep=0)

    def pause(self) -> None:
        """Wait for every step taken, and stop the clock."""
        self._read(keep=0)
        if not self.compile_seconds:
            self.compile_seconds = time.perf_counter() - self._began
            self._bar.set_description("train")
        elif self._since:
            self._seconds, self._since = self._seconds + time.perf_counter() - self._since, 0.0

    def start(self) -> None:
        """Start the clock."""
        self._since = time.perf_counter()

    def close(self) -> None:
        """End the progress bar."""
        self._bar.close()

    def _read(self, keep: int) -> None:
        while len(self._waiting) > keep:
            loss = float(self._waiting.pop(0))
            if len(self.history.losses) < NUM_PRINTED:
                tqdm.write(f"step {len(self.history.losses) + 1:2d}: loss {loss:.4f}")
            self.history.losses.append(loss)
            if self._since:
                self._timed += 1
                seconds = self._seconds + time.perf_counter() - self._since
                self.tokens_per_second = self._timed * self._tokens_a_step / seconds
                self._bar.set_postfix_str(f"loss {loss:.3f}, {self.tokens_per_second:,.0f} tokens/s", refresh=False)
            self._bar.update()
