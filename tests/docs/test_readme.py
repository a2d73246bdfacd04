"""The README tells the truth: its snippet runs and prints the table under it; its words about schedules are the code's."""

import codeop
import fractions
import itertools
import os
import pathlib
import re
import subprocess
import sys

import pytest

from jaxpp.schedule import SCHEDULES, make, simulate

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_blocks_pasted_in_order_into_one_session_elsewhere_run_and_the_first_prints_the_table_below_it(tmp_path):
    # Only jaxpp is installed there: the models, experiments and tests beside it are not.
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "jaxpp").symlink_to(ROOT / "jaxpp")
    blocks, mark = re.findall(r"```python\n(.*?)```", README, re.DOTALL), "-- the next block --"
    code = f"\nprint({mark!r})\n".join(blocks)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    arguments = [sys.executable, "-W", "error::UserWarning", "-c", code]
    run = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    printed = run.stdout.split(f"{mark}\n")
    table = re.search(r"```python\n.*?```\n\n```\n(.*?)```", README, re.DOTALL).group(1)
    assert len(printed) == len(blocks)
    assert printed[0].strip() == table.strip()


PAGES = ["README.md", *(str(page.relative_to(ROOT)) for folder in ("docs", "docs/guide") for page in (ROOT / folder).glob("*.md"))]


@pytest.mark.parametrize("page", sorted(PAGES))
def test_blocks_can_be_pasted_at_python_s_own_prompt(page):
    # It takes a line after an indented block for part of the block, unless an empty line stands between them.
    lines: list[str] = []
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        for line in [*block.splitlines(), ""]:
            lines.append(line)
            if codeop.compile_command("\n".join(lines), symbol="single") is not None:
                lines.clear()
    assert not any(lines)


ROWS = re.findall(r"^\| `([\w-]+)` \| (\d).*? \| (3 m.*?) \| (.*?) \|", README, re.MULTILINE)


def test_every_schedule_has_a_row():
    assert [row[0] for row in ROWS] == list(SCHEDULES)


@pytest.mark.parametrize(("name", "usual", "makespan", "residuals"), ROWS)
def test_the_formulae_of_the_schedules_are_what_the_clock_says(name, usual, makespan, residuals):
    def value(formula, **numbers):
        product = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", formula)
        return eval(product, {}, numbers)  # noqa: S307  (our own README)

    recipe = SCHEDULES[name]
    assert int(usual) == recipe.stages_per_rank
    for p, rounds, v in itertools.product(range(2, 9), (2, 3), range(1, 5) if recipe.varies else [int(usual)]):
        schedule = make(name, num_ranks=p, num_microbatches=p * rounds, stages_per_rank=v)
        unit = fractions.Fraction(1, v)
        found = simulate(schedule, forward=unit, input_grad=unit, weight_grad=unit)
        sizes = {"p": fractions.Fraction(p), "m": fractions.Fraction(p * rounds), "v": fractions.Fraction(v)}
        assert found.makespan == value(makespan, **sizes)
        assert max(found.peak_residuals) * unit == value(residuals, **sizes)
