"""The README tells the truth: its snippet runs and prints the table under it; its words about schedules are the code's."""

import pathlib
import re
import subprocess
import sys

from jaxpp.schedule import SCHEDULES

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_snippet_has_at_most_ten_lines_and_prints_the_table_below_it():
    code, table = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.DOTALL).groups()
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout == table


def test_every_schedule_has_a_row():
    for name in SCHEDULES:
        assert f"| `{name}` |" in README


def test_every_module_is_named():
    table = README[README.index("## How it works") :]
    for file in (ROOT / "jaxpp").rglob("*.py"):
        assert file.stem == "__init__" or file.stem in table, file
