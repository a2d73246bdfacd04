"""Several processes measure together: each measures its own stages, and all of them know the same costs, memory and times."""

import json

import jax
import pytest

import jaxpp
from tests.processes import process_observe_cases, process_tune_cases
from tests.processes.processes import launch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where two processes have written what they were told."""
    folder = tmp_path_factory.mktemp("tuned")
    launch("tests.processes.process_tune_cases:main", 2, {"folder": str(folder)}, seconds=120)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(2)]


def test_all_processes_are_told_the_same(found):
    assert found[0] == found[1]
    (answers, measured, remark), _ = found[0]
    assert (measured, remark) == (5, "")  # two families, three candidates
    for costs, peaks, seconds in answers:
        assert "nan" not in costs
        assert len(peaks) == 4
        assert seconds > 0


def test_what_was_measured_is_remembered_by_the_first_for_all(found, folder):
    for first, second in found:
        assert second == [first[0], 0, ""]
    assert len(list((folder / "kept by 0").iterdir())) == 1
    assert not (folder / "kept by 1").exists()


def test_peaks_are_those_that_one_process_forecasts(found):
    for candidate, (_, peaks, _) in zip(process_tune_cases.CANDIDATES, found[0][0][0], strict=True):
        pipe = jaxpp.Pipeline(
            process_observe_cases.loss_fn, process_tune_cases.ADAM, devices=jax.devices()[:4], **candidate.options
        )
        forecast = pipe.forecast(process_observe_cases.PARAMS, process_observe_cases.BATCH)
        assert peaks == list(forecast.peaks.values())
