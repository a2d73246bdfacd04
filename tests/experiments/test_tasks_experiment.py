"""Many tasks, one trunk: the ways agree, the bank's bytes do not grow, table and figure say so, wrong sizes are refused."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image

from experiments.tasks import compare as compare_module
from experiments.tasks import main as module
from experiments.tasks.compare import BANKS, PIPELINE, RESIDENT, WAYS, check_equal
from experiments.tasks.figure import tasks_figure
from experiments.tasks.main import Config, main, run, table
from experiments.tasks.measure import compilations, device_bytes, seconds_a_step
from experiments.tasks.problem import PATH, make_problem, shuffled
from experiments.tasks.ways import Banked, Resident, make_step
from experiments.zoo.data import digits
from jaxpp import Bank
from jaxpp.errors import JaxppError, VerifyError
from models.adapters import AdaptedMLP
from tests.figures import assert_apart

TINY = Config(
    tasks=(2, 5),
    steps=6,
    batch=16,
    width=16,
    depth=2,
    rank=2,
    rate=1e-2,
    microbatches=2,
    rounds=2,
    timed=2,
    warm_up=1,
    no_figure=True,
)
MODEL = AdaptedMLP(width=8, depth=2, rank=2)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return run(dataclasses.replace(TINY, no_figure=False, figure=tmp_path_factory.mktemp("out") / "folder" / "tasks.png"))


def rows_of(result, way):
    return [row for group in result.groups for row in group.rows if row.way == way]


@pytest.mark.slow
def test_the_ways_agree_to_the_bit_compile_once_and_the_bytes_of_a_bank_do_not_grow(result):
    assert [group.num_tasks for group in result.groups] == [2, 5]
    for group in result.groups:
        assert tuple(row.way for row in group.rows) == WAYS
        assert all(len(row.accuracies) == group.num_tasks for row in group.rows)
        assert all(min(row.seconds, row.host, row.ratio) > 0 for row in group.rows)
        assert group.rows[0].ratio == 1
        assert min(group.load, group.store) > 0 and group.clock >= 1
    for group in result.groups:
        expected = [0, *[group.num_tasks * group.set_bytes] * 3]
        assert [row.host_bytes for row in group.rows] == expected
    for group in result.groups:
        resident, *banks, pipeline = group.rows
        assert [row.equal for row in group.rows] == [None, True, True, None]
        assert resident.accuracies == banks[0].accuracies == banks[1].accuracies
        assert {row.compiled[2] for row in group.rows} == {0}
        assert [row.compiled[1] for row in (resident, *banks)] == [1, 2, 2]  # one step for all three; banks pack and unpack
        np.testing.assert_allclose(pipeline.accuracies, resident.accuracies, atol=0.1)
    sizes = {way: [sum(row.device_bytes) for row in rows_of(result, way)] for way in WAYS}
    one, shared = result.groups[0].set_bytes, shared_bytes()
    assert {group.set_bytes for group in result.groups} == {one}
    assert sizes[RESIDENT] == [shared + 2 * one, shared + 5 * one]
    for way in BANKS:
        assert sizes[way] == [shared + 2 * one] * 2
        assert all(len([size for size in row.device_bytes if size]) == 1 for row in rows_of(result, way))
    few, many = rows_of(result, PIPELINE)
    assert few.device_bytes == many.device_bytes
    assert len([size for size in few.device_bytes if size]) == TINY.stages


@pytest.mark.long
def test_bytes_are_looked_at_when_no_step_is_in_flight():
    # The pipeline looks at each step's squared gradients once they are there. Those of a step that a busy machine had not finished
    # were counted: 4 bytes a stage, so that a bank of more tasks seemed to take more.
    class InFlight:
        held = ()

        def step(self, task, batch, then):
            self.held = *self.held, jax.device_put(np.float32(task), jax.devices()[0])

        def wait(self):
            self.held = self.held[-1:]

    problem = make_problem(MODEL, 2, 4, "round-robin", 0)
    _, most, _ = compare_module._train(InFlight, problem, 5, SimpleNamespace(update=lambda: None))
    assert most[0] == 4


def shared_bytes() -> int:
    model = AdaptedMLP(width=TINY.width, depth=TINY.depth, rank=TINY.rank)
    params = jax.eval_shape(make_problem(model, 1, 1, "random", 0).shared, jax.random.key(0))
    leaves = jax.tree.leaves((params, jax.eval_shape(optax.adam(1e-2).init, params)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["round-robin", "random"])
def test_every_task_learns_far_more_than_chance(order):
    config = dataclasses.replace(TINY, tasks=(3,), order=order, steps=80, batch=64, width=64, rank=8, rounds=1, wait=True)
    for row in run(config).groups[0].rows:
        assert min(row.accuracies) > 0.6, row.way


def trained(make, problem, steps=3):
    way = make()
    for step in range(steps):
        way.step(problem.task(step), problem.batch(step), problem.task(step + 1))
    return way


@pytest.mark.long
def test_a_difference_of_one_bit_is_refused_and_named():
    problem, optimizer = make_problem(MODEL, 2, 4, "round-robin", 0), optax.adam(1e-2)
    step, device = make_step(problem, optimizer), jax.devices()[0]
    resident = trained(lambda: Resident(problem, optimizer, step, device), problem)
    bank = trained(lambda: Banked(problem, optimizer, step, device, prefetch=True), problem)
    check_equal("bank", bank, resident, problem.keys)
    with bank.bank.use(1) as task:
        bias = task.params["head"]["bias"]
        task.params = task.params | {"head": task.params["head"] | {"bias": bias.at[3].set(jnp.nextafter(bias[3], 1.0))}}
    with pytest.raises(VerifyError, match=r"bank, T=2(.|\n)*theta\[1\]\[0\]\['head'\]\['bias'\]: (.|\n)* instead of "):
        check_equal("bank", bank, resident, problem.keys)


@pytest.mark.long
def test_a_bank_that_loses_a_write_ends_the_run(monkeypatch):
    class Forgetful(Banked):
        def own(self, task):
            return jax.tree.map(np.zeros_like, super().own(task))

    monkeypatch.setattr(compare_module, "Banked", Forgetful)
    monkeypatch.setattr(sys, "argv", "tasks --tasks 1 --steps 1 --width 8 --depth 1 --no-figure".split())
    with pytest.raises(SystemExit, match=r"^tasks: bank, T=1: the same jitted step gives the same bits"):
        main()


def test_each_task_has_permutations_of_its_own_that_depend_on_the_seed_alone():
    data = jax.tree.map(lambda leaf: leaf[:50], digits().train)
    first, same, other, reseeded = (shuffled(data, seed, task) for seed, task in ((0, 1), (0, 1), (0, 2), (3, 1)))
    np.testing.assert_array_equal(first["image"], same["image"])
    for different in (other, reseeded):
        assert (first["image"] != different["image"]).any() and (first["label"] != different["label"]).any()
        np.testing.assert_array_equal(np.sort(first["image"]), np.sort(different["image"]))
    assert len({*zip(first["label"], data["label"], strict=True)}) == 10


@pytest.mark.long
def test_tasks_come_by_turns_or_at_random_and_are_the_same_however_many_there_are():
    turns, drawn = (make_problem(MODEL, 5, 4, order, 0) for order in ("round-robin", "random"))
    assert [turns.task(step) for step in range(7)] == [0, 1, 2, 3, 4, 0, 1]
    assert {drawn.task(step) for step in range(60)} == set(range(5))
    assert [drawn.task(step) for step in range(9)] != [turns.task(step) for step in range(9)]
    few = make_problem(MODEL, 3, 4, "round-robin", 0)
    for a, b in (
        (few.batch(2), turns.batch(2)),
        (few.held_out(2), turns.held_out(2)),
        (few.own(few.keys[2]), turns.own(turns.keys[2])),
    ):
        jax.tree.map(np.testing.assert_array_equal, a, b)


def test_all_that_a_task_has_of_its_own_is_one_subtree_and_adapters_add_nothing_before_training():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 64)), jnp.float32)
    params = MODEL.init(jax.random.key(0), x)["params"]
    rest, own = Bank.take(params, PATH)
    assert set(rest) == {"dense_0", "dense_1"}
    assert set(own) == {"adapters_0", "adapters_1", "head"}
    hidden = x
    for name in rest:
        hidden = np.maximum(hidden @ rest[name]["kernel"] + rest[name]["bias"], 0)
    expected = hidden @ own["head"]["kernel"] + own["head"]["bias"]
    np.testing.assert_allclose(MODEL.apply({"params": params}, x), expected, rtol=1e-5, atol=1e-5)


def test_bytes_are_counted_once_a_buffer_and_not_those_on_the_host():
    before, device = device_bytes(), jax.devices()[1]
    here = jax.device_put(np.ones(1000, "f"), device)
    home = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    on_host, again = jax.device_put(here, home), here.addressable_shards[0].data
    found = [new - old for new, old in zip(device_bytes(), before, strict=True)]
    assert found == [4000 * (k == 1) for k in range(len(before))]
    assert on_host.nbytes == again.nbytes == 4000


def test_programs_are_counted_in_the_block_alone():
    with compilations() as found:
        run_once = jax.jit(lambda x: x * 3 + 1)
        run_once(np.ones(7, "f"))
        run_once(np.ones(7, "f"))
        assert len(found) == 1
    jax.jit(lambda x: x * 5 + 1)(np.ones(7, "f"))
    assert len(found) == 1


@pytest.mark.parametrize(("wait", "expected"), [(False, "s.s.ss."), (True, "s.s.s.s..")])
def test_steps_are_waited_for_one_by_one_before_the_timed_ones_and_between_them_only_if_asked(wait, expected):
    class Watched:
        calls = ""

        def step(self, task, batch, then):
            self.calls += "s"

        def wait(self):
            self.calls += "."

    ways = {"a": Watched(), "b": Watched()}
    found = seconds_a_step(ways, [(0, None, 1)] * 4, warm_up=2, wait=wait)
    assert [way.calls for way in ways.values()] == [expected] * 2
    assert all(seconds > 0 and host > 0 for seconds, host in found.values())


@pytest.mark.slow
def test_the_table_the_figure_and_the_line_of_json_show_every_way(monkeypatch, capsys, tmp_path, result):
    head, *lines = table(result).splitlines()
    assert head.split()[:2] == ["T", "way"]
    rows = lines[: lines.index("")]
    assert len(rows) == 2 * len(WAYS)
    for line, row in zip(rows, [row for group in result.groups for row in group.rows], strict=True):
        assert row.way in line
        assert line.rstrip().endswith("equal") == (row.way in BANKS)
    assert [line.split(":")[0] for line in lines[-2:]] == ["T=2", "T=5"]
    assert "of a resident step" in lines[-1]
    path = tmp_path / "results.jsonl"
    monkeypatch.setattr(module, "run", lambda config: dataclasses.replace(result, config=config))
    monkeypatch.setattr(sys, "argv", f"tasks --tasks 2 5 --json {path}".split())
    main()
    assert capsys.readouterr().out == f"{table(result)}\nfigures: {result.figure}\nall numbers: {path}\n"
    found = json.loads(path.read_text())
    assert found["versions"]["jax"] == jax.__version__
    assert found["config"]["tasks"] == [2, 5]
    assert len(found["devices"]) == len(jax.devices())
    assert found["groups"][1]["rows"][0]["accuracies"] == list(result.groups[1].rows[0].accuracies)


@pytest.mark.slow
def test_no_labels_of_the_figure_overlap(result):
    with Image.open(result.figure) as image:
        image.verify()
    assert_apart(tasks_figure(result.groups))


@pytest.mark.slow
def test_without_matplotlib_there_is_a_message_and_no_figure(monkeypatch, tmp_path, capsys, result):
    monkeypatch.setattr("experiments.options.has_matplotlib", lambda: False)
    monkeypatch.setattr(module, "compare", lambda *_: result.groups[0])
    config = dataclasses.replace(TINY, no_figure=False, figure=tmp_path / "tasks.png")
    assert run(config).figure is None
    assert (
        'no figure, as matplotlib is not installed. Fix: pip install -e ".[figures]" in the checkout of jaxpp'
        in capsys.readouterr().err
    )
    assert not list(tmp_path.iterdir())


def test_what_jaxpp_refuses_ends_it_before_any_training(monkeypatch):
    monkeypatch.setattr(module, "compare", None)
    with pytest.raises(JaxppError, match="2f2b"):
        run(dataclasses.replace(TINY, schedule="2f2b"))
