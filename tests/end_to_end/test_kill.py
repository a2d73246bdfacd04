"""A run that is killed at random moments goes on from a whole checkpoint, and ends with the bits of the run that was not."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
STEPS, EVERY = 60, 3


class Runs:
    """Starts ``tests/end_to_end/kill_run.py``; all runs share the programs that were compiled.

    Args:
        folder: of the checkpoints.
        always: further arguments of every run.

    Attributes:
        saved: the bits of the state at each step that a run without kills saves, and at the start (``None``).
        seconds: how long a run without kills takes until it has a state, and from then to its end.
    """

    def __init__(self, folder: Path, *always: str):
        self.always = always
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self.seconds = (0.0, 0.0)
        lines = self.start(folder / "told", "told")
        self.saved = {words[1]: words[2] for words in lines if words[0] in ("found", "saved", "done")}
        assert self.start(folder / "quiet") == [lines[0], lines[-1]]

    def start(self, folder: Path, *words: str, kill: float | None = None, training: bool = False) -> list[list[str]]:
        """Run, and see what it prints, as words.

        Args:
            folder: of the checkpoints.
            words: further arguments.
            kill: the moment at which the run is killed, unless it has ended: 0 is its start and 1 its end.
            training: 0 is rather the moment at which it has a state, begun or restored, and trains.
        """
        command = [sys.executable, "-m", "tests.end_to_end.kill_run", str(folder), str(STEPS), str(EVERY), *words, *self.always]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}  # a line is read, and no byte more
        began = time.perf_counter()
        with subprocess.Popen(command, cwd=ROOT, env=self.environment, **options) as process:
            first = process.stdout.readline() if kill is None or training else b""
            ready = time.perf_counter() - began
            try:
                out, errors = process.communicate(timeout=None if kill is None else kill * sum(self.seconds[training:]))
            except subprocess.TimeoutExpired:
                process.kill()
                out, errors = process.communicate()
            assert process.returncode in ((0,) if kill is None else (0, -signal.SIGKILL)), errors.decode()
        if kill is None:
            self.seconds = ready, time.perf_counter() - began - ready
        return [line.split() for line in (first + out).decode().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def runs_from_host(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"), "params")


def kill(runs: Runs, folder: Path, kills: int, seed: int) -> None:
    """Kill runs at random moments, every other one while it trains; a run that ends all the same is compared, and begun anew."""
    rng, done, newest, places = np.random.default_rng(seed), 0, 0, map(str, itertools.count())
    place = folder / next(places)
    while True:
        last = done == kills
        lines = runs.start(place, kill=None if last else rng.uniform(), training=done % 2 == 1)
        for what, step, bits in lines:
            assert runs.saved[step] == bits, f"{what} {step}: not the bits of the run without kills, after {done} kills"
        for found in (0 if step == "None" else int(step) for what, step, _ in lines if what == "found"):
            assert found >= newest, "a checkpoint that an earlier run has found is lost"
            newest = found
        if lines and lines[-1][0] == "done":
            left = sorted(int(path.name) for path in place.iterdir())  # no temporary folder, whose name is no number
            expected = {STEPS, STEPS - EVERY, STEPS - 2 * EVERY}  # the last if a run was killed before it was deleted
            assert left[-1] == STEPS and set(left) <= expected, "what is left on disk after many kills"
            if last:
                return
            place, newest = folder / next(places), 0  # in the same one it would end at once, before any moment at which it trains
        else:
            done += 1
            print("kill", done, "found", newest, "left", sorted(path.name for path in place.iterdir()) if place.exists() else None)


@pytest.mark.long
def test_a_run_killed_three_times_ends_with_the_bits_of_one_that_was_not(runs, tmp_path):
    kill(runs, tmp_path, 3, seed=0)


@pytest.mark.long
def test_so_does_a_run_whose_parameters_wait_in_host_memory(runs_from_host, tmp_path):
    kill(runs_from_host, tmp_path, 3, seed=9)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_fifty_kills(runs, tmp_path, part):
    kill(runs, tmp_path, 10, seed=1 + part)
