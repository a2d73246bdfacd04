"""The gpu experiment without a GPU: plans of small models, what they refuse, and measured times over bounds that are injected."""

import json
import sys

import jax
import pytest

import jaxpp.targets
from experiments.gpu import main as module
from experiments.gpu.bounds import find_bounds, over_bounds
from experiments.gpu.main import Config, main, run, table
from experiments.gpu.models import MODELS, count_of
from experiments.gpu.parts import perform, saved_rows
from experiments.gpu.pipelines import ready
from experiments.gpu.plan import case_of, summary
from experiments.gpu.rows import Job
from experiments.gpu.sizes import LARGE, SMALL
from jaxpp.observe.bound import HostWork, StepBound
from jaxpp.observe.evaluate import parts
from jaxpp.runtime.roofline import Prediction
from jaxpp.schedule import make
from jaxpp.schedule.action import Kind
from jaxpp.schedule.costs import StepCosts

H100 = next(each for each in jaxpp.targets.TARGETS if each.name == "h100")
WHATS = [
    "a step",
    "examples a second",
    "of the peak (MFU)",
    "bubble",
    "plain: forwards and backwards",
    "kernels / plain",
    "bytes / plain",
    "memory of the fullest device",
    "over the links",
    "time of the host",
]


def planned(tmp_path, model, num_devices):
    pytest.importorskip("jax_plugins.xla_cuda12")
    results = tmp_path / f"{model}{num_devices}.json"
    perform("plan", case_of(model, num_devices, "h100"), tmp_path, results, small=True, seconds=60)
    return saved_rows(results)


@pytest.mark.targets
def test_a_plan_has_a_row_for_each_bound_and_the_first_has_all_numbers(tmp_path):
    rows = planned(tmp_path, "mlp", 4)
    assert [row.what for row in rows] == WHATS
    assert {(row.part, row.case) for row in rows} == {("plan", "mlp, 4 x h100")}
    it, said = rows[0].numbers, {row.what: row.measured for row in rows}
    models = SMALL.models
    assert (it["count"], it["unit"]) == (models.mlp_batch, "examples")
    assert said["examples a second"] == f"at most {models.mlp_batch / it['seconds']:,.0f}"
    assert said["a step"] == f"at least {1e3 * it['seconds']:.3g} ms"
    assert said["kernels / plain"] == f"{it['work'][0] / it['plain_work'][0]:.3f}"
    assert it["plain_work"][0] % models.microbatches == 0  # a program of one microbatch, as often as there are microbatches
    weights = 4 * models.mlp_width**2 * models.mlp_depth  # of float32: each microbatch reads them
    assert min(it["work"][1], it["plain_work"][1]) > 2 * models.microbatches * weights
    activation = 2 * models.mlp_batch // models.microbatches * models.mlp_width  # of bfloat16
    assert it["link_bytes"] >= 2 * 3 * models.microbatches * activation  # forth and back over three boundaries
    assert 0 < it["bubble"] < 1
    assert 0 < it["most"] < 1
    head, line = summary(rows)
    assert dict(zip(head, line, strict=True))["devices"] == "4 x h100"
    assert line[-2] == said["kernels / plain"]
    notes = {row.what: row.note for row in rows}
    assert [what for what, note in notes.items() if " kernels of a step in " in note] == ["time of the host"]
    assert [what for what, note in notes.items() if "hides transfers" in note] in ([], ["over the links"])


@pytest.mark.targets
def test_stages_share_a_single_gpu_as_in_a_real_run_on_it(tmp_path):
    rows = {row.what: row for row in planned(tmp_path, "mlp", 1)}
    assert (rows["bubble"].measured, rows["bubble"].note) == ("none", "the 4 ranks share devices")
    assert rows["over the links"].note == "0 sends between devices"
    assert rows["a step"].numbers["link_bytes"] == 0


@pytest.mark.targets
@pytest.mark.long
def test_the_command_plans_in_other_processes_and_writes_the_table_and_the_json(tmp_path, capsys):
    pytest.importorskip("jax_plugins.xla_cuda12")
    result = run(Config(small=True, out=tmp_path, plan=("NVIDIA H100 80GB HBM3", "h100"), devices=2, models=("mlp",)))
    assert result.whole
    assert list(result.seconds) == ["plan, mlp, 2 x h100"]
    assert [row.what for row in result.rows] == WHATS
    assert "plan, mlp, 2 x h100: ends" in capsys.readouterr().out
    page = (tmp_path / "table.md").read_text()
    head, _, made, *_ = page.splitlines()
    assert head == "# Planned, not measured: 2 x h100, small models"
    assert made.startswith("Made by `python -m experiments.gpu --plan h100 --small --devices 2 --models mlp`, with jax 0.")
    assert "\n\n| model | devices | " in page
    assert "| part | case | what | bound | aim | note |" in page
    assert len(json.loads((tmp_path / "results.json").read_text())["rows"]) == len(WHATS)
    assert table(result).splitlines()[-1].startswith("mlp    2 x h100")


def test_every_planned_model_is_a_scalar_loss_with_a_key_and_its_batch_divides():
    for name, make_problem in MODELS.items():
        problem = make_problem(SMALL, "bfloat16")
        shapes = jax.eval_shape(problem.init, jax.random.key(0))
        loss = jax.eval_shape(problem.loss_fn, shapes, problem.batch, jax.random.key(0))
        assert (loss.shape, loss.dtype) == ((), "float32"), name
        for leaf in jax.tree.leaves(problem.batch):
            assert len(leaf) % SMALL.models.microbatches == 0, name
    assert LARGE.zoo.unet_batch % LARGE.models.microbatches == LARGE.zoo.seq2seq_batch % LARGE.models.microbatches == 0


def test_language_models_count_the_tokens_that_they_predict():
    batch = MODELS["gpt"](SMALL, "float32").batch
    assert count_of("gpt", batch) == (8 * 8, "tokens")
    assert count_of("seq2seq", MODELS["seq2seq"](SMALL, "float32").batch) == (8 * 8, "tokens")
    assert count_of("unet", MODELS["unet"](SMALL, "float32").batch) == (8, "examples")


def command(monkeypatch, words):
    def no_work(*args):
        raise AssertionError("it began to work")

    monkeypatch.setattr(module, "run_process", no_work)
    monkeypatch.setattr(sys, "argv", ["gpu", *words.split()])
    with pytest.raises(SystemExit) as caught:
        main()
    return str(caught.value)


@pytest.mark.targets
def test_a_target_that_is_not_known_is_refused_with_those_near_it_before_any_work(monkeypatch):
    pytest.importorskip("jax_plugins.xla_cuda12")
    message = command(monkeypatch, "--plan h100 h10")
    assert message.startswith("gpu: target('h10'): a target is a GPU that jaxpp has the numbers of.\n  Got: 'h10'; near it: h100")


def test_without_the_plug_in_a_plan_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(jaxpp.targets, "_is_installed", lambda module: False)
    jaxpp.targets._devices.cache_clear()
    message = command(monkeypatch, "--plan h100 --devices 3")
    assert "JAX needs its CUDA plug-in" in message
    assert 'Fix: pip install -e ".[targets]" in the checkout of jaxpp' in message


JOB = Job("speed", "mlp", SMALL, None, 60)


def bound():
    """Two stages on two GPUs: 2 microbatches, F of 1 ms and B of 2 ms make 9 ms; half of the peak for 4.5 ms on both."""
    costs = StepCosts({Kind.F: (1e-3, 1e-3), Kind.B: (2e-3, 2e-3)})
    schedule = make("1f1b", num_ranks=2, num_microbatches=2)
    products = {"bfloat16": H100.peaks.bfloat16 * 9e-3}
    made, host = parts(schedule, costs), HostWork(8, 40, 1, 1e-4, 6e-4)
    likely = Prediction(2 * sum(made), sum(made), 3 * sum(made))
    return StepBound(schedule, (H100, H100), made, costs, (), products, 0.0, 2, host, likely, costs, made, 0.5)


def test_measured_over_bound_is_the_median_step_over_the_least_one_with_the_share_of_the_peak():
    times = {"1f1b": [18e-3, 20e-3, 18e-3], "plain": [1.0]}
    over, peak = over_bounds(JOB, "NVIDIA H100 80GB HBM3", times, {"1f1b": bound()})
    assert (over.what, over.measured, over.aim) == ("1f1b, measured / bound", "2.000", "at least 1")
    assert over.note.startswith("18.00 ms; a step takes at least 9 ms on 2 x H100 (a bound, no prediction): ")
    assert (peak.what, peak.measured) == ("1f1b, of the peak (MFU)", "25.0%")
    assert peak.note.startswith("at most 50.0% by the bound; ")


def test_a_bound_that_was_beaten_must_be_mended():
    over, _ = over_bounds(JOB, "", {"1f1b": [4.5e-3]}, {"1f1b": bound()})
    assert over.measured == "0.500"
    assert over.note.startswith("BEATEN: a step was faster than its bound, so the bound is wrong and must be mended; 4.50 ms; ")
    assert "BEATEN" not in next(over_bounds(JOB, "", {"1f1b": [9.1e-3]}, {"1f1b": bound()})).note


def test_a_device_without_numbers_is_one_row_and_a_bound_that_fails_is_another():
    it = ready("mlp", SMALL.models, "float32")
    pipes = {name: it.pipe(name) for name in ("1f1b", "zb-h1")}
    for pipe in pipes.values():
        it.init(pipe)
    bounds = find_bounds(pipes, it.batch, it.key)
    assert bounds == {"1f1b": None, "zb-h1": None}
    (row,) = over_bounds(JOB, "cpu", {"1f1b": [1.0], "zb-h1": [1.0]}, bounds)
    assert (row.what, row.measured) == ("measured / bound", "not known")
    assert row.note.startswith("jaxpp has no numbers of cpu, only of the GPUs in ")
    assert list(over_bounds(JOB, "cpu", {}, {})) == []
    failed, *others = over_bounds(JOB, "", {"1f1b": [1.0], "zb-h1": [9e-3]}, {"1f1b": "ValueError: no text", "zb-h1": bound()})
    assert (failed.measured, failed.note, len(others)) == ("failed", "ValueError: no text", 2)
    assert isinstance(find_bounds({"broken": None}, it.batch, it.key)["broken"], str)
