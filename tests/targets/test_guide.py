"""The guide to GPUs that are not there: its blocks run as a reader would paste them, and print what stands below them."""

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


def printed_by(blocks, folder):
    script = "".join(f"{code}\nprint({MARK!r})\n" for code, _ in blocks)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [part.strip("\n") for part in done.stdout.split(MARK)[:-1]]


def test_the_guide_prints_what_it_shows(tmp_path):
    text = PAGE.read_text()
    blocks = BLOCK.findall(text)
    assert len(blocks) == 3
    found = printed_by(blocks, tmp_path)
    assert max(len(line) for part in found for line in part.splitlines()) <= 132
    if f"JAX {jax.__version__};" in text:  # another version fuses other kernels
        assert found == [shown.strip("\n") for _, shown in blocks]
