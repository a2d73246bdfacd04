"""What observes a pipeline, across processes: forecast, verify, profile and tables. What the processes run stands first."""

import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp import verify
from jaxpp.runtime.processes.channel import align_clocks, texts_of_all
from jaxpp.schedule.action import Action, Kind, parse
from tests.processes.processes import launch

pytestmark = pytest.mark.long

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


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two processes has seen."""
    folder = tmp_path_factory.mktemp("observed")
    launch("tests.processes.test_process_observe:main", 2, {"folder": str(folder)}, seconds=90)
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(2)]


@pytest.fixture(scope="module")
def alone():
    """The same pipeline in this process."""
    pipe = make(jax.devices()[:4])
    state = pipe.init(PARAMS, BATCH)
    return pipe, pipe.step(state, BATCH)[0]


def test_every_process_forecasts_all_ranks_without_asking_the_others(found, alone):
    first, second = found
    wanted = str(alone[0].forecast(PARAMS, BATCH))
    assert first["before init"] == second["before init"]
    assert [line.split()[2:] for line in first["before init"].splitlines()] == [line.split()[2:] for line in wanted.splitlines()]
    assert second["own forecast"].startswith(first["before init"])
    assert "it fits" in second["own forecast"]


def test_texts_of_any_length_reach_all_processes(found):
    for each in found:
        assert each["texts"] == ["process 0", "process 1" * 1001]


def test_clocks_are_aligned_to_within_the_error_that_is_stated(found):
    assert found[0]["clock"] == [0, 0]
    offset, error = found[1]["clock"]
    assert abs(offset) <= error < 0.1  # on one machine both processes read the same clock


def test_tables_print_and_say_where_what_lives(found):
    for number, each in enumerate(found):
        pipe, state, metrics, stages, schedule = each["shown"]
        assert "cpu:0, cpu:1, cpu:2048, cpu:2049" in pipe
        assert f"process {number} of 2 holds what is on cpu:{2048 * number}, cpu:{2048 * number + 1}" in state
        assert metrics.startswith("Metrics(loss=1.")
        assert "cpu:2049" in stages
        assert schedule.startswith("1f1b: 4 ranks")


def test_what_verify_finds_in_one_process_is_raised_in_all(found):
    assert found[0]["differs"] == found[1]["differs"]
    assert found[0]["differs"].startswith("VerifyError: verify: the pipelined step must equal the single-device step, and ")
    assert found[1]["shapes"].startswith("BatchError: pipe.verify: every process computes the plain step")
    assert "only the shape of x, y" in found[1]["shapes"]
    assert "process 1 raised BatchError: pipe.verify" in found[0]["shapes"]
    assert found[0]["loss"] == found[1]["loss"]  # and the processes are still together


def test_all_processes_return_the_same_profile_of_all_ranks(found, alone):
    pipe, state = alone
    first, second = (each["profile"] for each in found)
    assert first == second
    assert found[0]["printed"][:2] == found[1]["printed"][:2]
    wanted = pipe.profile(state, BATCH, num_steps=1)
    mine = [(span["action"], span["rank"]) for span in first["spans"] if span["action"]]
    assert mine == [(str(span.action), span.rank) for span in wanted.spans if span.action]
    assert {span["process"] for span in first["spans"]} == {0, 1}
    assert {span["rank"] for span in first["isolated"]} == {0, 1, 2, 3}
    assert not first["missing"]
    assert first["num_processes"] == 2
    error = first["clock_error"]
    assert 0 < error < 0.1
    printed, perfetto, page = found[0]["printed"]
    assert "<svg" in page or "<img" in page
    assert f"2 processes, whose clocks are aligned to within {1e6 * error:.0f} us" in printed
    assert "host of process 1" in perfetto


def test_a_value_is_not_there_before_it_was_sent(found):
    profile = found[0]["profile"]
    ran = {parse(span["action"]): span for span in profile["spans"] if span["action"] and not span["sends"]}
    assert len(ran) == 2 * STAGES * 3
    for action, span in ran.items():
        source = Action(action.stage + (-1 if action.kind == Kind.F else 1), action.kind, action.microbatch)
        if source in ran:
            assert span["start"] >= ran[source]["end"] - profile["clock_error"], (source, action)
    for span in profile["isolated"]:
        assert 0 <= span["start"] <= span["end"]


def test_the_ledger_of_each_process_equals_the_account_of_its_ranks(found):
    for each in found:
        assert [size for size, _ in each["ledger"]] == each["account"]
        assert len(each["account"]) == 3 * 4  # at the beginning, the peak and the end, on each device
        assert [peak for _, peak in each["curves"]] == each["peaks"]
        assert [label for label, _ in each["curves"]][2] == "cpu:2048 (rank 2)"
