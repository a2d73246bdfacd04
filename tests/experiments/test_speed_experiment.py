"""The speed experiment on models of a few units: its rows add up, its tables and its figure show them, wrong sizes are refused.

No time is asserted: what a machine takes is not what a test can know.
"""

import dataclasses
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from PIL import Image

from experiments.plain import PLAIN, plain_steps
from experiments.speed import synchronous
from experiments.speed.main import Config, main, run, summary
from experiments.speed.one_thread import ideal
from experiments.speed.problems import PROBLEMS, sizes_of
from experiments.speed.synchronous import WAYS, Synchronous, measure_synchronous, row_of
from experiments.speed.tables import in_text
from jaxpp.schedule import make, simulate

TINY = Config(
    problems=("tiny",),
    schedules=("1f1b", "zb-v"),
    microbatches=(2,),
    rounds=2,
    seconds=0.001,
    width=8,
    depth=5,
    batch=3,
    ranks=2,
    host_steps=2,
    growth=((2, 2), (2, 4)),
    lowering=((2, 4),),
    thread_steps=4,
    thread_rounds=2,
    thread_microbatches=4,
    synchronous_loops=1,
    synchronous_rounds=2,
    synchronous_microbatches=2,
    no_figure=True,
)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    figure = tmp_path_factory.mktemp("out") / "folder" / "speed.png"
    return run(dataclasses.replace(TINY, no_figure=False, figure=figure))


@pytest.mark.slow
def test_rows_of_steps_host_times_and_growing_plans_add_up(result):
    first, second = result.steps
    assert (first.schedule, first.stages, second.schedule, second.stages) == ("1f1b", 2, "zb-v", 4)
    for row in result.steps:
        assert row.plain_kind in PLAIN
        assert row.loop_kind in ("scan", "unrolled")
        assert row.plain <= row.loop
        assert row.quartiles[0] <= row.ratio <= row.quartiles[1]
        assert row.loop_quartiles[0] <= row.loop_ratio <= row.loop_quartiles[1]
        assert 0 < row.peak < row.peak_sum
        assert row.plain_peak > 0
    assert second.instructions > first.instructions
    made = first.compiling
    assert second.compiling is None
    assert made.programs > made.plain_programs > 0
    assert min(made.seconds, made.again, made.plain) > 0
    *kinds, loop, around, whole = result.host
    counts = {row.what: row.count for row in kinds}
    assert (counts["F"], counts["B"], counts["begin"]) == (4, 4, 2)
    assert sum(counts.values()) == loop.count == whole.count == result.steps[0].instructions
    assert 0 < loop.total < sum(row.total for row in kinds)
    assert (around.what, whole.what) == ("around the instructions", "pipe.step")
    less, more = result.growth
    assert less.instructions < more.instructions
    assert all(row.host > 0 and row.cpu > 0 for row in result.growth)
    (lowered,) = result.lowering
    assert lowered.instructions > more.instructions  # adam has more to update than sgd
    assert lowered.seconds == lowered.lines + lowered.slots


@pytest.mark.slow
def test_one_thread_wide_stages_are_compared_with_the_formula(result):
    one = result.one_thread
    assert set(one.seconds) == {"naive", "1f1b", "gpipe", "plain"}
    assert one.faster["naive"] == 1
    for microbatches, ranks in ((4, 2), (16, 2), (16, 4)):
        sizes = {"num_ranks": ranks, "num_microbatches": microbatches}
        naive, *others = (float(simulate(make(name, **sizes)).makespan) for name in ("naive", "1f1b", "gpipe"))
        assert [naive / other for other in others] == pytest.approx([ideal(microbatches, ranks)] * 2)
    assert one.ideal == ideal(4, 2)


@pytest.mark.slow
def test_devices_that_run_what_they_are_called_for_train_the_same_parameters_in_each_way(result):
    found = result.synchronous
    assert (found.stages, found.microbatches) == (2, 2)
    assert [row.schedule for row in found.rows] == ["naive", "gpipe", "1f1b", "zb-h1"]
    for row in found.rows:
        assert row.same_bits
        assert set(row.seconds) == set(row.least) == {"one thread", "a thread for each rank", "asynchronous dispatch"}
        assert row.ratio["asynchronous dispatch"] == 1
        for way, (low, high) in row.quartiles.items():
            assert 0 < row.least[way] <= row.seconds[way]
            assert 0 < low <= row.ratio[way] <= high


def test_ratios_of_ways_are_medians_over_rounds_and_other_bits_are_shown():
    ways = list(WAYS)
    times = {("1f1b", way): taken for way, taken in zip(ways, [[3.0, 4.0, 6.0], [2.0, 2.2, 4.0], [2.0, 2.0, 4.0]], strict=True)}
    bits = {"sync": {"1f1b one": "a", "1f1b ranks": "a"}, "async": {"1f1b one": "a"}}
    row = row_of("1f1b", times, bits)
    assert (row.seconds[ways[0]], row.least[ways[0]]) == (4.0, 3.0)
    assert (row.ratio[ways[0]], row.ratio[ways[1]], row.ratio[ways[2]]) == (1.5, 1.0, 1.0)
    assert row.quartiles[ways[1]] == pytest.approx((1.0, 1.05))
    assert row.same_bits
    bits["async"]["1f1b one"] = "b"
    other = row_of("1f1b", times, bits)
    assert not other.same_bits
    shown = in_text((), ("", ()), (), (), None, Synchronous(2, 16, (row, other)))
    assert "1f1b (BITS DIFFER)" in shown
    assert "4000 (3000)" in shown


@pytest.mark.long
def test_a_process_that_times_steps_and_fails_says_why(monkeypatch):
    monkeypatch.setattr(synchronous, "SCHEDULES", ("no-such-schedule",))
    with pytest.raises(RuntimeError, match=r"ended with status 1: (.|\n)*no-such-schedule"):
        measure_synchronous(2, 1, 1, None)


def test_whoever_asks_a_process_that_has_ended_is_told_so(tmp_path):
    with (tmp_path / "log").open("w+") as log:
        code = "import sys; sys.exit('no memory is left')"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
            process.wait()
            with pytest.raises(RuntimeError, match="ended with status 1: no memory is left"):
                synchronous.Worker(process, log).ask("bits")


@pytest.mark.slow
def test_the_tables_show_the_rows_as_text_and_as_markdown_and_the_figure_is_drawn(result):
    text, marked = summary(result), summary(dataclasses.replace(result, config=dataclasses.replace(TINY, markdown=True)))
    for title in (
        "A step, over",
        "The first step",
        "Peak memory",
        "Where the host",
        "Host time an",
        "Lowering",
        "one thread wide",
        "Devices that run",
    ):
        assert text.count(title) == marked.count(title) == 1
    assert "| tiny | zb-v | 4 | 2 |" in marked
    assert "tiny     zb-v           4             2" in text
    assert json.loads(result.to_json())["steps"][0]["schedule"] == "1f1b"
    with Image.open(result.figure) as image:
        assert 800 <= image.width <= 2000


@pytest.mark.long
def test_only_the_parts_that_are_asked_for_run(tmp_path, monkeypatch, capsys):
    path = tmp_path / "results.jsonl"
    monkeypatch.setattr("sys.argv", f"speed --parts lowering --lowering 2 3 2 4 --no-figure --json {path}".split())
    main()
    assert capsys.readouterr().out.startswith("Lowering a schedule to a plan")
    found = json.loads(path.read_text())
    assert [row["microbatches"] for row in found["lowering"]] == [3, 4]
    assert not found["steps"] and not found["host"] and found["one_thread"] is None and found["synchronous"] is None


def test_a_batch_is_rounded_up_to_equal_microbatches():
    assert sizes_of("tiny", 8, {}).batch == 32
    assert sizes_of("tiny", 64, {}).batch == 64
    assert sizes_of("tiny", 8, {"batch": 9, "width": 0})[:3] == (128, 16, 16)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.long
def test_every_problem_has_a_loss(name):
    make_problem, sizes = PROBLEMS[name]
    small = sizes._replace(width=8 if name != "gpt-small" else 64, depth=1, batch=2, length=8)
    problem = make_problem(small)
    params = jax.eval_shape(problem.init, jax.random.key(0))
    assert jax.eval_shape(problem.loss_fn, params, problem.batch).shape == ()


def test_all_plain_steps_do_the_same():
    def loss_fn(params, batch):
        return (params["w"] * batch).mean() ** 2

    found = []
    for step in plain_steps(loss_fn, optax.sgd(0.1), 2).values():
        params = {"w": jnp.full(3, 0.5)}
        (state, _), (loss, norm) = step((params, optax.sgd(0.1).init(params)), jnp.ones((4, 3)))
        found.append([*state["w"].tolist(), float(loss), float(norm)])
    for other in found[1:]:
        assert other == pytest.approx(found[0])
