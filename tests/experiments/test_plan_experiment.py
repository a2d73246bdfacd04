"""The experiment that plans models by name."""

import json

import pytest

from experiments.options import ConfigError
from experiments.plan.main import Config, run, table


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model": "llama-9"}, "llama-3-8b"),
        ({"attention": "flash"}, "cudnn"),
        ({"sequences": 0}, "--sequences"),
        ({"compiled": -1}, "--compiled"),
        ({"shards": (2, 0)}, "--shards"),
        ({"tokens": -1.0}, "--tokens"),
        ({"prices": ("h100",)}, "name=dollars"),
    ],
)
def test_options_that_make_no_plan_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        Config(**wrong)


@pytest.mark.targets
def test_a_model_is_planned_by_its_name(tmp_path):
    pytest.importorskip("jax_plugins.xla_cuda12")
    figure = tmp_path / "plan.png"
    result = run(Config("gpt2-124m", ("2xh100",), ("h100=2",), 16, 1024, 1e9, compiled=0, figure=figure))
    assert figure.stat().st_size > 0
    assert [row["mesh"] for row in result.rows if row["fits"]]
    assert table(result).startswith("gpt2-124m, 16 sequences of 1,024 tokens a step")
    assert json.loads(result.to_json())["rows"][0]["gpu"] == "h100"
