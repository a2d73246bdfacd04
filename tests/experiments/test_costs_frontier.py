"""The frontier of a tiny GPT as a table: less memory takes more time, and a smaller share is less memory."""

import itertools

import pytest

from experiments.costs.frontier import Config, main, run, table
from experiments.options import ConfigError

TINY = {"models": ("gpt",), "stages": 2, "microbatches": 4, "gpt_width": 32, "gpt_depth": 2, "gpt_length": 32, "gpt_batch": 4}


@pytest.mark.long
def test_each_way_has_a_row_and_less_memory_takes_no_less_time():
    result = run(Config(**TINY))
    ways = {row.remat: row for row in result.rows}
    assert next(iter(ways)) == "keep"
    assert ways["least"].slowdown == 1.0
    assert ways["recompute"].slowdown > 1.1
    line = [row for row in result.rows if not row.hosted][1:]  # to write and to read everything takes time, too
    for more, less in itertools.pairwise(line):
        assert more.peak >= less.peak
        assert more.slowdown <= less.slowdown
        assert more.again <= less.again
    assert ways["offload"].hosted > 0
    assert len(table(result).splitlines()) == 1 + len(result.rows) + 4


@pytest.mark.long
def test_the_command_prints_the_table_and_draws_the_figure(tmp_path, monkeypatch, capsys):
    sizes = "--models mlp --stages 2 --microbatches 2 --figure"
    monkeypatch.setattr("sys.argv", ["frontier", *sizes.split(), str(tmp_path / "frontier.png")])
    main()
    assert "recompute" in capsys.readouterr().out
    assert (tmp_path / "frontier.png").stat().st_size > 1000


def test_a_model_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="--models"):
        Config(models=("rnn",))
