"""The tune experiment on a small model: a row for each candidate, the choice among them, its table and its figure.

No time is asserted: what a machine takes is not what a test can know.
"""

import dataclasses
import json

import pytest
from PIL import Image

from experiments.tune.main import PROBLEMS, Config, main, run, summary
from jaxpp.errors import JaxppError

TINY = Config(
    schedules=("1f1b", "gpipe", "zb-v"),
    microbatches=(2, 4),
    rounds=2,
    steps=1,
    width=8,
    depth=7,
    batch=8,
    ranks=2,
    tried=2,
    no_figure=True,
)


@pytest.mark.long
def test_every_candidate_has_a_row_and_the_summary_names_the_choice_among_those_that_tune_ran(tmp_path):
    result = run(dataclasses.replace(TINY, no_figure=False, figure=tmp_path / "folder" / "tune.png"))
    found = {(row.schedule, row.microbatches, row.stages) for row in result.rows}
    assert found == {(name, m, 4 if name == "zb-v" else 2) for name in TINY.schedules for m in TINY.microbatches}
    assert all(row.predicted > 0 and row.measured > 0 and row.ratio > 0 for row in result.rows)
    assert all(row.error == row.predicted / row.measured - 1 for row in result.rows)
    assert [row.chosen for row in result.rows].count(True) == 1
    tried = [row for row in result.rows if row.tried is not None]
    assert len(tried) == TINY.tried
    assert result.choice.tried == min(row.tried for row in tried)
    assert result.choice.ratio == 1
    assert result.best.ratio <= 1
    text = summary(result)
    assert f"tune chose {result.choice.name}: {1e3 * result.choice.measured:.1f} ms" in text
    assert f"the fastest was {result.best.name}" in text
    assert text.count("chosen") == 1
    assert len([line for line in text.splitlines() if line.startswith(TINY.schedules)]) >= len(result.rows)
    table = summary(dataclasses.replace(result, config=dataclasses.replace(result.config, markdown=True)))
    assert table.count("| ") > text.count("| ")
    assert json.loads(result.to_json())["rows"][0]["predicted"] == result.rows[0].predicted
    with Image.open(result.figure) as image:
        assert min(image.size) > 100


def test_all_problems_have_sizes():
    for name, (_, sizes) in PROBLEMS.items():
        assert Config(problem=name, no_figure=True).sizes == sizes


@pytest.mark.long
def test_what_cannot_run_is_said(monkeypatch):
    with pytest.raises(JaxppError):
        run(dataclasses.replace(TINY, schedules=("zb-v",), depth=1, batch=1, microbatches=(64,)))
    monkeypatch.setattr("sys.argv", "tune --schedules zb-v --microbatches 64 --batch 1 --width 8 --no-figure".split())
    with pytest.raises(SystemExit, match="tune: "):
        main()
