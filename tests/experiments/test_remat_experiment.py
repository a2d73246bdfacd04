"""The remat experiment on models of a few units: its rows, its table, its line of JSON, and what it refuses."""

import json

import pytest

from experiments.remat.main import Config, main, run, table

TINY = {"models": ("gpt",), "computes": ("float32",), "ways": ("keep", "least"), "stages": 2, "microbatches": 2}
TINY |= {"gpt_width": 64, "gpt_depth": 2, "gpt_heads": 2, "gpt_length": 16, "gpt_batch": 4, "rounds": 1, "steps": 1}


@pytest.mark.long
def test_each_way_has_a_row_and_the_least_keeps_less():
    result = run(Config(**TINY))
    keep, least = result.rows
    assert (keep.way, least.way) == ("keep", "least")
    assert keep.kept == keep.keepable == least.keepable
    assert least.kept <= least.keepable / 2
    for row in result.rows:
        assert row.peak > 0
        assert row.seconds > 0
        assert row.spread[0] <= row.ratio <= row.spread[1]
    lines = table(result).splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [["gpt", "float32", "keep"], ["gpt", "float32", "least"]]
    assert json.loads(result.to_json())["rows"][1]["kept"] == least.kept


@pytest.mark.long
def test_bytes_alone_are_counted_and_nothing_is_timed(tmp_path, monkeypatch, capsys):
    sizes = "--stages 2 --microbatches 2 --mlp-width 8 --mlp-depth 3 --mlp-batch 4 --rounds 0"
    path = tmp_path / "results.jsonl"
    monkeypatch.setattr("sys.argv", f"remat --models mlp --computes bfloat16 --ways least {sizes} --json {path}".split())
    main()
    assert "bfloat16  least" in capsys.readouterr().out
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["seconds"], row["ratio"]) == (0.0, 0.0)
