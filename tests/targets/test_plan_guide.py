"""The guide on plans answers its questions as it shows: some minutes each, so in the slow tier."""

import re

import jax
import pytest

from tests.targets.test_guide import MARK, ROOT, run

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "guide" / "plan.md"
BLOCKS = re.compile(
    r'^``` \{ \.python title="with the extra targets.*?" \}\n(.*?)^```\n\n```text\n(.*?)^```$', re.DOTALL | re.MULTILINE
)


def test_the_guide_answers_what_it_shows(tmp_path):
    pytest.importorskip("jax_plugins.xla_cuda12")
    blocks = BLOCKS.findall(PAGE.read_text())
    assert len(blocks) == 5
    printed = run("".join(f"{code}\nprint({MARK!r})\n" for code, _ in blocks), tmp_path, seconds=3000)
    found = [part.strip("\n") for part in printed.split(MARK)[:-1]]
    if f"JAX {jax.__version__};" in PAGE.with_name("targets.md").read_text():  # another version fuses other kernels
        assert found == [shown.strip("\n") for _, shown in blocks]
