"""Exactness and bits at XLA's default optimisation, in a process of its own: the others have LLVM optimise less (``conftest``)."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.end_to_end.test_transparency import check

ROOT = pathlib.Path(__file__).parents[2]
ONE_A_RANK = ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2")
REPRESENTATIVE = (
    ("mlp", "float64", 4, 3, ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min"), {"width": 8}),
    ("mlp", "float32", 3, 5, ONE_A_RANK, {"width": 12, "batch_size": 23}),
    ("gpt", "float32", 2, 2, ONE_A_RANK, {"batch_size": 4, "depth": 1, "width": 8}),
)


@pytest.mark.slow  # the notebooks and recipes compile as users do, too
def test_results_equal_the_oracle_and_schedules_give_the_same_bits_at_the_default_optimisation():
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "optimization_level" not in flag and "fusion_emitters" not in flag]
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags)}
    command = [sys.executable, "-m", "tests.end_to_end.test_default_level"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal") == len(REPRESENTATIVE)


if __name__ == "__main__":
    for model, dtype, stages, microbatches, names, options in REPRESENTATIVE:
        check(model, dtype, stages, microbatches, names, **options)
        print(f"{model} {dtype}, {stages} stages, {microbatches} microbatches: {len(names)} schedules equal")
