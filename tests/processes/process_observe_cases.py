"""What the processes of ``test_process_observe.py`` run: all that observes a pipeline; each process writes what it has seen."""

import json
from pathlib import Path

import jax
import numpy as np
import optax

import jaxpp
from jaxpp import verify
from jaxpp.runtime.processes.channel import align_clocks, texts_of_all

WIDTH, STAGES = 8, 4
BATCH = {"x": np.linspace(-1, 1, 12 * WIDTH, dtype=np.float32).reshape(12, WIDTH), "y": np.ones((12, WIDTH), np.float32)}
PARAMS = {f"w{k}": np.eye(WIDTH, dtype=np.float32) * (0.5 + 0.1 * k) for k in range(STAGES)}


def loss_fn(params, batch):
    x = batch["x"]
    for k in range(STAGES):
        x = jax.numpy.tanh(x @ params[f"w{k}"])
    return jax.numpy.mean((x - batch["y"]) ** 2)


def make(devices) -> jaxpp.Pipeline:
    return jaxpp.Pipeline(loss_fn, optax.adam(1e-2), num_stages=STAGES, num_microbatches=3, devices=devices)


def error_of(call, *args) -> str:
    """What a call raises, on one line for each of the message's."""
    try:
        call(*args)
    except jaxpp.errors.JaxppError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(folder: str) -> None:
    """Observe a pipeline over all devices."""
    me, pipe = jax.process_index(), make(jax.devices())
    found = {"before init": str(pipe.forecast(PARAMS, BATCH))}
    state = pipe.init(PARAMS, BATCH)
    state, metrics = pipe.step(state, BATCH)
    found["texts"] = texts_of_all(f"process {me}" * (1 + 1000 * me))
    found["clock"] = align_clocks()
    found["own forecast"] = str(pipe.forecast(PARAMS, BATCH, hbm="64KiB")) if me else ""  # the other process is not asked
    found["shown"] = [repr(pipe), repr(state), repr(metrics), str(pipe.stages), str(pipe.schedule)]
    pipe.verify(state, BATCH)
    rounded = verify.tolerance
    verify.tolerance = (lambda _: -1.0) if me else rounded  # so that one process alone finds a difference
    found["differs"] = error_of(pipe.verify, state, BATCH)
    verify.tolerance = rounded
    found["shapes"] = error_of(pipe.verify, state, jax.eval_shape(lambda: BATCH) if me else BATCH)
    profile = pipe.profile(state, BATCH, num_steps=2)
    liveness = profile.ledger.liveness
    found["profile"] = json.loads(jaxpp.observe.to_json(profile))
    found["printed"] = [str(profile), jaxpp.observe.to_perfetto(profile), "" if me else jaxpp.observe.to_html(profile)]
    found["account"] = [int(liveness.levels[each.device][each.moment].sum()) for each in profile.ledger.samples]
    found["ledger"] = [[sum(each.kinds), each.elsewhere] for each in profile.ledger.samples]
    found["curves"] = [[curve.label, int(max(map(sum, curve.levels)))] for curve in profile.memory]
    found["peaks"] = [int(liveness.levels[device].sum(axis=1).max()) for device in liveness.devices]
    found["loss"] = float(pipe.step(state, BATCH)[1].loss)
    Path(folder, f"{me}.json").write_text(json.dumps(found))
