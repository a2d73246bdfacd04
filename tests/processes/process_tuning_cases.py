"""What the processes of ``test_process_tuning.py`` run: ``jaxpp.tune`` over the devices of all of them."""

import json
from pathlib import Path

import jax
import optax

import jaxpp
from tests.processes.process_observe_cases import BATCH, PARAMS, loss_fn


def main(folder: str) -> None:
    """Tune with a budget, and train with what was found."""
    sizes = {"schedules": ("1f1b", "gpipe", "zb-h1"), "num_microbatches": (2, 3), "stages_per_rank": 1, "num_measured": 2}
    tuning = jaxpp.tune(loss_fn, optax.adam(1e-2), PARAMS, BATCH, hbm="1GiB", seconds=600, keep=False, **sizes)
    rows = [[row.candidate.words, row.predicted, row.peaks, row.measured] for row in tuning.rows]
    pipe = tuning.pipeline()
    state, metrics = pipe.step(pipe.init(PARAMS, BATCH), BATCH)
    told = {"rows": rows, "best": tuning.best, "why": tuning.why, "text": str(tuning), "loss": float(metrics.loss)}
    Path(folder, f"{jax.process_index()}.json").write_text(json.dumps(told))
    del state
