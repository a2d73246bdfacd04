"""The guide and the recipe on GPUs that are not there run as a reader would paste them; the guide prints what it shows."""

import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

pytest.importorskip("jax_plugins.xla_cuda12")
pytestmark = pytest.mark.targets

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guide" / "targets.md"
BLOCK = re.compile(
    r'^``` \{ \.python title="with the extra targets" \}\n(.*?)^```\n\n```text\n(.*?)^```$', re.DOTALL | re.MULTILINE
)
MARK = "-- the next block --"


def run(script, folder, seconds=600):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "MPLBACKEND": "agg"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=seconds)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_guide_prints_what_it_shows(tmp_path):
    text = PAGE.read_text()
    blocks = BLOCK.findall(text)
    assert len(blocks) == 4
    printed = run("".join(f"{code}\nprint({MARK!r})\n" for code, _ in blocks), tmp_path)
    found = [part.strip("\n") for part in printed.split(MARK)[:-1]]
    assert max(len(line) for part in found for line in part.splitlines()) <= 132
    if f"JAX {jax.__version__};" in text:  # another version fuses other kernels
        assert found == [shown.strip("\n") for _, shown in blocks]


def test_the_recipe_runs_and_finds_what_it_says(tmp_path):
    printed = run((ROOT / "docs" / "how-to" / "plan_for_gpus_you_do_not_have.py").read_text(), tmp_path)
    assert "it fits: H100:" in printed
    assert "what should fit (estimates), the quickest first" in printed
    assert re.search(r"4 x RTX 4090: .* at least \d+ ms, \d+% idle", printed)
    assert max(map(len, printed.splitlines())) <= 132
