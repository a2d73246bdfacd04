"""Public models: what is counted as glue, what a package that is missing looks like, and one model that trains."""

import pytest

from experiments.options import ConfigError
from experiments.zoo import public


def test_the_glue_of_a_model_is_the_lines_that_plain_jax_does_not_need():
    counts = {name: public.glue_of(make) for name, (_, make) in public.MODELS.items()}
    assert {name: counts[name] for name in ("Qwen3", "Mamba-2", "ViT of Equimo", "GPT-2", "NanoMoE", "MLP of Haiku")} == {
        "Qwen3": 2,
        "Mamba-2": 2,
        "ViT of Equimo": 2,
        "GPT-2": 0,
        "NanoMoE": 0,
        "MLP of Haiku": 0,
    }


def test_a_model_whose_package_is_missing_has_a_row_that_says_so(monkeypatch):
    monkeypatch.setitem(public.MODELS, "a model", ("no-such-package-of-models", public.qwen3))
    row = public.train("a model", public.Config())
    assert row.failed.startswith("not installed: ") and "no-such-package-of-models" in row.failed
    assert "not installed" in public.table(public.Result(public.Config(), (row,)))
    with pytest.raises(ConfigError, match="Qwen4"):
        public.Config(models=("Qwen4",))


@pytest.mark.long
def test_a_model_of_haiku_trains_as_it_does_in_plain_jax():
    pytest.importorskip("haiku")
    (row,) = public.run(public.Config(models=("MLP of Haiku",), steps=3)).rows
    assert not row.failed and row.after < row.before and row.error < 1e-5 and row.share < 1
