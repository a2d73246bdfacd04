"""The visits experiment: a plan's bytes are those of its shapes, with times where the devices have numbers; sizes are checked."""

import json

import jax
import pytest

import jaxpp.observe.bound as bounds
from experiments.options import ConfigError
from experiments.visits.main import MODELS, Config, plan, run, table
from jaxpp.targets import TARGETS

SMALL = {"models": ("tiny",), "target": "", "microbatches": 2, "sequences": 1, "length": 8}
CARD = next(each for each in TARGETS if each.name == "rtx-4090")


@pytest.mark.long
def test_a_row_has_the_bytes_of_the_state_and_the_times_of_the_bound(monkeypatch):
    monkeypatch.setattr(bounds, "target_of", lambda device: CARD)
    result = run(Config(gpus=(2,), **SMALL))
    _, shapes, _ = plan(result.config, "tiny", 1)
    params = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    for row in result.rows:
        assert row.params == params
        assert 3 * 4 * params <= row.taken < row.brought < 5 * 4 * params
        assert 3 * 4 * params <= row.hosted < 2 * 3 * 4 * params > row.peak
        assert row.link == pytest.approx(row.brought / row.gpus / CARD.links.host, rel=0.5)
        assert 0 <= row.added < row.seconds
    text = table(result)
    assert text.count("tiny") == 1 and "tokens/s, at most" in text and "2 microbatches of 1 x 8 tokens" in text
    assert json.loads(result.to_json())["rows"][0]["gpus"] == 2


@pytest.mark.targets
def test_models_are_planned_for_cards_that_are_not_here():
    pytest.importorskip("jax_plugins.xla_cuda12")
    (row,) = run(Config(**SMALL | {"target": "rtx-4090"}, gpus=(2,))).rows
    assert row.seconds > 0 and row.link > 0


def test_models_and_counts_are_checked():
    with pytest.raises(ConfigError, match="each GPU needs a block"):
        Config(models=("tiny",), gpus=(MODELS["tiny"].depth + 1,))
    with pytest.raises(ConfigError, match="models"):
        Config(models=("9b",))
