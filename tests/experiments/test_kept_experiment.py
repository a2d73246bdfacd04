"""The count of what stages keep: its lines, its table, its line of JSON, and what it refuses."""

import json

import pytest

from experiments.memory.kept import Config, main, run, table


@pytest.mark.long
def test_a_stage_of_gpt_blocks_keeps_at_most_half_and_its_activations_are_counted_a_block():
    result = run(Config(models=("gpt-blocks-bf16",), width=32, length=16, microbatch=2))
    (line,) = result.lines
    assert line.activation == 2 * 16 * 32 * 2
    assert 0 < line.least <= line.keep / 2
    assert line.a_block(line.least) == pytest.approx(line.least / (2 * line.activation))
    assert table(result).splitlines()[1].split()[0] == "gpt-blocks-bf16"


@pytest.mark.long
def test_the_command_prints_the_table_and_writes_the_line_of_json(tmp_path, monkeypatch, capsys):
    path = tmp_path / "kept.jsonl"
    monkeypatch.setattr("sys.argv", f"kept --models mlp --stages 2 --json {path}".split())
    main()
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "mlp"
    (line,) = json.loads(path.read_text())["lines"]
    assert (line["model"], line["activation"]) == ("mlp", 0)
    assert 0 < line["least"] <= line["keep"]
