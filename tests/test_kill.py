"""A run that is killed at random moments goes on from a whole checkpoint, and ends with the bits of the run that was not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
STEPS, EVERY = 60, 3


class Runs:
    """Starts ``tests/kill_run.py``; all runs share the programs that were compiled.

    Attributes:
        saved: the bits of the state at each step that a run without kills saves, and at step 0.
        seconds: how long a run without kills takes.
    """

    def __init__(self, folder: Path):
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        lines = self.start(folder / "told", "told")
        self.saved = {words[1]: words[2] for words in lines if words[0] in ("found", "saved", "done")}
        began = time.perf_counter()
        assert self.start(folder / "quiet") == [lines[0], lines[-1]]
        self.seconds = time.perf_counter() - began

    def start(self, folder: Path, *words: str, after: float | None = None) -> list[list[str]]:
        """Run; kill it ``after`` so many seconds, unless it has ended. What it printed, as words."""
        command = [sys.executable, "-m", "tests.kill_run", str(folder), str(STEPS), str(EVERY), *words]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=ROOT, env=self.environment, **options) as process:
            try:
                out, errors = process.communicate(timeout=after)
            except subprocess.TimeoutExpired:
                process.kill()
                out, errors = process.communicate()
            assert process.returncode in ((0,) if after is None else (0, -signal.SIGKILL)), errors
        return [line.split() for line in out.splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"))


def kill(runs: Runs, folder: Path, kills: int, seed: int) -> None:
    """Kill runs at random moments until there were ``kills``; a run that ends in spite of that is compared, and begun anew."""
    rng, done, newest = np.random.default_rng(seed), 0, 0
    place = folder / "0"
    while True:
        last = done >= kills
        lines = runs.start(place, after=None if last else rng.uniform(0, runs.seconds))
        for what, step, bits in lines:
            assert runs.saved[step] == bits, f"{what} {step}: not the bits of the run without kills, after {done} kills"
        found = next((step for what, step, _ in lines if what == "found"), None)
        if found is not None:  # every checkpoint that was found once is there until a newer one is
            assert newest <= int(found.replace("None", "0"))
            newest = int(found.replace("None", "0"))
        if lines and lines[-1][0] == "done":
            left = sorted(path.name for path in place.iterdir())
            assert left == sorted([str(STEPS), str(STEPS - EVERY)]), "what is left on disk after many kills"
            if last:
                return
            place, newest = folder / str(done), 0
        else:
            done += 1
            print("kill", done, "found", found, "left", sorted(path.name for path in place.iterdir()) if place.exists() else None)


def test_a_run_killed_six_times_ends_with_the_bits_of_one_that_was_not(runs, tmp_path):
    kill(runs, tmp_path, 6, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_fifty_kills(runs, tmp_path, part):
    kill(runs, tmp_path, 10, seed=1 + part)
