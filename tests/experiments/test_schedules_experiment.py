"""The comparison of schedules: its rows are the formulae's, its figures are there, sizes that cannot be are said."""

import dataclasses
import json

import pytest
from PIL import Image

from experiments.schedules.main import Config, main, run, table
from experiments.schedules.overview import overlap, place_labels
from jaxpp.errors import ScheduleError
from jaxpp.schedule import SCHEDULES


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return run(Config(ranks=2, microbatches=4, out=tmp_path_factory.mktemp("out") / "figures"))


@pytest.mark.long
def test_rows_are_those_of_the_formulae_and_every_figure_can_be_read(result):
    p, m = 2, 4
    rows = {row.name: row for row in result.rows}
    assert list(rows) == list(SCHEDULES) and not result.refused
    assert (rows["naive"].makespan, rows["naive"].peak) == (3 * m * p, 1)
    assert rows["gpipe"].makespan == rows["1f1b"].makespan == 3 * (m + p - 1)
    assert (rows["gpipe"].peak, rows["gpipe"].peak_ranks) == (m, (0, 1))
    assert (rows["1f1b"].peak, rows["1f1b"].peak_ranks) == (p, (0,))
    assert rows["1f1b"].bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
    assert rows["interleaved"].bubble_fraction == pytest.approx((p - 1) / (2 * m + p - 1))
    assert rows["zb-h1"].makespan == 3 * m + p - 1
    p, m = 2, 4
    for row in result.rows:
        assert row.makespan * (1 - row.bubble_fraction) == pytest.approx(3 * m)
        assert row.own_bubble <= row.bubble_fraction * p * row.makespan
    assert len(result.files) == 2 * len(SCHEDULES) + 2
    assert sorted(result.files) == sorted(result.config.out.iterdir())
    for file in result.files:
        with Image.open(file) as image:
            image.verify()


def test_sizes_that_a_schedule_cannot_do_are_a_row_with_the_nearest():
    result = run(Config(ranks=4, microbatches=5, figures=False))
    assert set(result.refused) == {"interleaved", "dualpipe-v"} - {row.name for row in result.rows} and result.refused
    assert "dualpipe-v   not for these sizes: pass num_microbatches=8" in table(result).splitlines()
    assert not result.files


def test_costs_are_those_asked_for():
    config = Config(ranks=2, microbatches=3, forward=2, input_grad=3, weight_grad=5, figures=False)
    for row in run(config).rows:
        assert row.makespan * (1 - row.bubble_fraction) == pytest.approx(3 * 10)
    slower = run(dataclasses.replace(config, transfer=1)).rows
    assert all(later.makespan >= row.makespan for row, later in zip(run(config).rows, slower, strict=True))


def test_a_cost_that_is_none_is_refused():
    with pytest.raises(ScheduleError, match="a cost is a finite number"):
        run(Config(forward=-1, figures=False))


def test_the_command_prints_the_table_and_writes_the_line_of_json(monkeypatch, capsys, tmp_path):
    path = tmp_path / "results.jsonl"
    monkeypatch.setattr("sys.argv", f"schedules --ranks 2 --microbatches 4 --no-figures --json {path}".split())
    main()
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split()[:4] == ["schedule", "stages", "makespan", "bubble"]
    assert rows[3].split()[:6] == ["1f1b", "1", "15", "20.0%", "3", "2"]
    assert rows[-1] == f"all numbers: {path}"
    assert json.loads(path.read_text())["rows"][2]["makespan"] == 15


def test_labels_overlap_neither_one_another_nor_the_dots():
    dots = [(100.0 + 3 * k, 100.0 + k % 2) for k in range(8)]
    boxes = place_labels(dots, ["some-name"] * 8, (0, 0, 400, 300))
    for k, box in enumerate(boxes):
        assert not any(overlap(box, other) for other in boxes[:k])
        assert not any(overlap(box, (x - 2, y - 2, x + 2, y + 2)) for x, y in dots)
