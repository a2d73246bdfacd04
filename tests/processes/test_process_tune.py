"""Several processes measure and tune together: all of them find the same, also with a budget, which is of time."""

import json
from pathlib import Path

import jax
import optax
import pytest

import jaxpp
from jaxpp.schedule import make
from jaxpp.tuner.machine import Devices
from jaxpp.tuner.search import Candidate
from tests.processes.processes import launch
from tests.processes.test_process_observe import BATCH, PARAMS, loss_fn

pytestmark = pytest.mark.long

ADAM = optax.adam(1e-2)
CANDIDATES = [Candidate(make("1f1b", 4, 3)), Candidate(make("gpipe", 4, 3)), Candidate(make("zb-h1", 4, 3))]


def ask(folder: str) -> None:
    """Ask the machine, and once more what it remembers."""
    me, told = jax.process_index(), []
    for _ in range(2):
        machine = Devices(loss_fn, ADAM, PARAMS, BATCH, keep=Path(folder, f"kept by {me}"))
        answers = [[repr(machine.costs(each.family)), machine.peaks(each)] for each in CANDIDATES]
        answers = [[*answer, seconds] for answer, seconds in zip(answers, machine.steps(CANDIDATES), strict=True)]
        told.append([answers, machine.num_measured, machine.remark])
    Path(folder, f"{me}.json").write_text(json.dumps(told))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where two processes have written what they were told."""
    folder = tmp_path_factory.mktemp("tuned")
    launch("tests.processes.test_process_tune:ask", 2, {"folder": str(folder)}, seconds=120)
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
        assert len(seconds) >= 9 and min(seconds) > 0


def test_what_was_measured_is_remembered_by_the_first_for_all(found, folder):
    for first, second in found:
        assert second == [first[0], 0, ""]
    assert len(list((folder / "kept by 0").iterdir())) == 1
    assert not (folder / "kept by 1").exists()


def test_peaks_are_those_that_one_process_forecasts(found):
    for candidate, (_, peaks, _) in zip(CANDIDATES, found[0][0][0], strict=True):
        pipe = jaxpp.Pipeline(loss_fn, ADAM, devices=jax.devices()[:4], **candidate.options)
        forecast = pipe.forecast(PARAMS, BATCH)
        assert peaks == list(forecast.peaks.values())


def tune(folder: str) -> None:
    """Tune with a budget, and train with what was found."""
    sizes = {"schedules": ("1f1b", "gpipe", "zb-h1"), "num_microbatches": (2, 3), "stages_per_rank": 1, "num_measured": 2}
    tuning = jaxpp.tune(loss_fn, optax.adam(1e-2), PARAMS, BATCH, hbm="1GiB", seconds=600, keep=False, **sizes)
    rows = [[row.candidate.words, row.predicted, row.peaks, row.measured] for row in tuning.rows]
    pipe = tuning.pipeline()
    state, metrics = pipe.step(pipe.init(PARAMS, BATCH), BATCH)
    told = {"rows": rows, "best": tuning.best, "why": tuning.why, "text": str(tuning), "loss": float(metrics.loss)}
    Path(folder, f"{jax.process_index()}.json").write_text(json.dumps(told))
    del state


def test_all_processes_choose_the_same_and_train_with_it(tmp_path):
    launch("tests.processes.test_process_tune:tune", 2, {"folder": str(tmp_path)}, seconds=150)
    one, two = (json.loads((tmp_path / f"{number}.json").read_text()) for number in range(2))
    assert one == two
    assert len(one["rows"]) == 6 and sum(row[3] is not None for row in one["rows"]) == 2
    assert one["best"]["num_stages"] == 4 and one["loss"] > 0
    assert all(len(row[2]) == 4 for row in one["rows"] if row[3] is not None)
