"""The bubble experiment: every schedule's row is that of its profile and of the virtual clock; what cannot run is said."""

import json

import pytest

from experiments.bubble.main import Config, main, run, table
from experiments.bubble.tracing import Config as Tracing
from experiments.bubble.tracing import run as tracing
from jaxpp.errors import ArgumentError
from jaxpp.schedule import make, simulate

SMALL = {"ranks": 2, "microbatches": 4, "examples": 2, "width": 16, "depth": 6, "steps": 1}


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "figures"
    return run(Config(schedules=("1f1b", "zb-v", "bogus"), out=out, **SMALL))


@pytest.mark.slow
def test_rows_hold_what_was_measured_beside_what_was_simulated_and_every_profile_is_drawn(result):
    first, second = result.rows
    assert first.ideal == simulate(make("1f1b", num_ranks=2, num_microbatches=4)).bubble_fraction
    assert (first.residuals, second.residuals) == (2, 2)
    for row in result.rows:
        assert 0 < row.measured < 1
        assert 0 <= row.clock < 1
        assert row.uneven >= 1
        assert row.alone > 0
        assert row.seconds > 0
        assert sum(row.causes.values()) == pytest.approx(row.measured)
        assert row.forecast == pytest.approx(row.peak, rel=0.05)
        assert 0 < row.bytes_of_residuals < row.peak
    assert table(result).count("MiB") == 6
    assert "bogus: " in table(result)
    assert json.loads(result.to_json())["rows"][1]["name"] == "zb-v"
    names = {path.name for path in result.config.out.iterdir()}
    assert names == {f"{name}{end}" for name in ("1f1b", "zb-v") for end in (".png", "_pebbles.png", ".html", ".trace.json")}
    assert json.loads((result.config.out / "zb-v.trace.json").read_text())["traceEvents"]


def test_schedules_of_which_none_runs_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ArgumentError, match="at least one schedule must run"):
        run(Config(schedules=("bogus",), **SMALL))
    monkeypatch.setattr("sys.argv", ["bubble", "--schedules", "bogus", "--ranks", "2", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="bubble: schedules: at least one"):
        main()


@pytest.mark.long
def test_the_price_of_tracing_is_a_ratio_for_each_model(capsys):
    found = tracing(Tracing(steps=1), {"small": Config(**SMALL)}).ratios
    assert found["small"] > 0
    assert f"small: a traced step takes {found['small']:.3f} times as long as another" in capsys.readouterr().out
