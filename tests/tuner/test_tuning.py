"""``jaxpp.tune``: its arguments, what it hands to the machine, and the pipeline that comes of it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jaxpp
from jaxpp.errors import ArgumentError, BatchError, InitError, OptimizerError, ScheduleError
from jaxpp.schedule import make
from jaxpp.schedule.action import Kind
from jaxpp.schedule.costs import StepCosts
from jaxpp.tuner.machine import Devices
from jaxpp.tuner.search import Candidate, _made_like
from tests import messages
from tests.tuner.virtual_machine import Virtual

OPTIMIZER = optax.adam(1e-2)


def loss_fn(params, batch):
    x = batch
    for k in range(8):
        x = jnp.tanh(x @ params[f"w{k}"])
    return jnp.mean(x**2)


def init(key):
    return {f"w{k}": jax.random.normal(jax.random.fold_in(key, k), (8, 8)) for k in range(8)}


BATCH = jnp.linspace(-1, 1, 24 * 8).reshape(24, 8)


class Given:
    """What a machine was made with."""


@pytest.fixture
def machine(monkeypatch):
    """A machine of numbers in place of the devices; it remembers what it was made with."""
    given = Given()

    def devices(*args, **kwargs):
        given.args, given.kwargs = args, kwargs
        given.machine = Virtual(num_ranks=len(kwargs["devices"]))
        return given.machine

    monkeypatch.setattr("jaxpp.tuning.Devices", devices)
    return given


def tune(**options):
    return jaxpp.tune(loss_fn, OPTIMIZER, init, BATCH, **{"devices": jax.devices()[:4], **options})


WRONG = [
    {"devices": []},
    {"hbm": "much"},
    {"seconds": 0},
    {"num_microbatches": (4, 0)},
    {"num_ranks": (2, 6)},
    {"stages_per_rank": 1.5},
    {"remat": "nothing"},
    {"num_measured": -1},
    {"schedules": ()},
    {"num_stages": 4, "schedule": "1f1b"},
    {"data_parallel": (2, 3), "num_ranks": (2, 3)},
    {"hbm": "1023KiB"},
]


def test_the_arguments_of_init_are_not_those_of_tune(machine):
    with pytest.raises(ArgumentError, match="tune takes the batch before the key") as error:
        jaxpp.tune(loss_fn, OPTIMIZER, init, jax.random.key(0), BATCH)
    assert "Got: a function, a key, an array f32[24,8].\n  Fix: call jaxpp.tune(..., init_fn, batch, key)" in str(error.value)
    with pytest.raises(ArgumentError, match="tune takes the function that makes the parameters"):
        jaxpp.tune(loss_fn, OPTIMIZER, nn.Dense(2), BATCH)
    assert not hasattr(machine, "machine")


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_what_cannot_be_an_argument_is_refused_before_anything_is_measured(machine, wrong):
    messages.check("tune", WRONG, str(wrong), lambda: tune(**wrong))
    assert "hbm" in wrong or not hasattr(machine, "machine")
    assert not hasattr(machine, "machine") or not machine.machine.asked


REFUSED = {
    "write '1f1b'": (ScheduleError, lambda: tune(schedules=("gpipe", "1fb1"))),
    "balance": (ArgumentError, lambda: tune(balance=("flops", "luck"))),
    "24 examples for 25 microbatches": (BatchError, lambda: tune(num_microbatches=(25, 30))),
    "a batch is a tree of arrays": (BatchError, lambda: jaxpp.tune(loss_fn, OPTIMIZER, init, {})),
    "change their places": (ArgumentError, lambda: jaxpp.tune(OPTIMIZER, loss_fn, init, BATCH)),
    "Fix: write num_microbatches=4": (ArgumentError, lambda: tune(number_of_microbatches=4)),
    "Fix: pass lambda key: ": (InitError, lambda: jaxpp.tune(loss_fn, OPTIMIZER, lambda key, width: init(key), BATCH)),
    "cannot run inside": (
        ArgumentError,
        lambda: jax.jit(lambda batch: jaxpp.tune(loss_fn, OPTIMIZER, init, batch).found)(BATCH),
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_pipelines_refuse_is_refused_as_they_do(machine, message):
    kind, call = REFUSED[message]
    with pytest.raises(kind, match=message):
        call()
    assert not hasattr(machine, "machine")


def test_too_little_memory_for_anything_is_refused(machine):
    with pytest.raises(ArgumentError) as raised:
        tune(hbm="2MiB")
    lines = str(raised.value).splitlines()
    assert lines[0] == "jaxpp.tune(..., hbm='2 MiB'): a pipeline fits if no device holds more than hbm at its peak."
    assert "none of which fits into 2 MiB" in lines[1] and "the least is 34.17 MiB, of 1f1b" in lines[2]


def test_the_bytes_of_the_parameters_are_those_of_the_model():
    found = Devices(loss_fn, OPTIMIZER, init, BATCH, devices=tuple(jax.devices()[:2]), keep=False).param_bytes
    assert found == sum(leaf.nbytes for leaf in jax.tree.leaves(init(jax.random.key(0))))


def test_the_machine_is_made_of_what_the_user_gave(machine):
    key = jax.random.key(3)
    tuning = tune(key=key, has_aux=False, num_ranks=(2, 4), schedules="gpipe", num_microbatches=4, keep=False)
    assert machine.args == (loss_fn, OPTIMIZER, init, BATCH, key)
    assert machine.kwargs == {"devices": tuple(jax.devices()[:4]), "mesh": None, "options": {"has_aux": False}, "keep": False}
    assert {(row.candidate.schedule.name, row.candidate.schedule.num_ranks) for row in tuning.rows} == {("gpipe", 2), ("gpipe", 4)}
    assert isinstance(tuning, jaxpp.Tuning)


def test_by_default_all_devices_and_schedules_are_looked_at_and_remat_only_if_memory_is_short(machine):
    tuning = jaxpp.tune(loss_fn, OPTIMIZER, init, BATCH)
    assert {row.candidate.schedule.num_ranks for row in tuning.rows} == {8} and "devices" not in tuning.best
    assert {row.candidate.schedule.name for row in tuning.rows} == {*jaxpp.schedule.SCHEDULES, "auto"}
    assert {row.candidate.remat for row in tuning.rows} == {"least"}
    assert {row.candidate.remat for row in tune(hbm="42MiB").rows} == {"least", "offload", "recompute"}
    assert {row.candidate.remat for row in tune(hbm="100MiB", remat="recompute").rows} == {"recompute"}


@pytest.mark.usefixtures("machine")
def test_devices_are_divided_into_ranks_and_replicas():
    given = {"schedules": ("gpipe", "1f1b"), "stages_per_rank": 1}
    tuning = tune(**given, data_parallel=(1, 2, 4))
    assert {(row.candidate.schedule.num_ranks, row.candidate.replicas) for row in tuning.rows} == {(4, 1), (2, 2), (1, 4)}
    assert {row.candidate.schedule.num_microbatches for row in tuning.rows if row.candidate.replicas == 4} == {1, 2, 3, 6}
    wide = next(row.candidate for row in tuning.rows if row.candidate.replicas == 2)
    assert wide.options["data_parallel"] == 2 and wide.words.split(", ")[1] == "2 replicas"
    assert "replicas" in str(tuning).split() and any(why.startswith("Replicas: ") for why in tuning.why)
    assert "replicas" not in str(tune(**given)).split()
    alone = tune(**given, data_parallel=2)
    assert alone.best["data_parallel"] == 2 and {row.candidate.schedule.num_ranks for row in alone.rows} == {2}
    both = tune(**given, data_parallel=(1, 2), num_ranks=(2, 3))
    assert {(row.candidate.schedule.num_ranks, row.candidate.replicas) for row in both.rows} == {(2, 1), (3, 1), (2, 2)}
    with pytest.raises(BatchError, match="25 examples for 2 replicas"):
        jaxpp.tune(loss_fn, OPTIMIZER, init, jnp.ones((25, 8)), data_parallel=(1, 2))


def test_a_mesh_says_the_ranks_replicas_and_shards(machine):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("stage", "tensor"))
    given = {"devices": None, "mesh": mesh, "schedules": "1f1b", "stages_per_rank": 1}
    tuning = tune(**given, num_ranks=(2, 4), shardings={"w*": "column"})
    assert machine.kwargs["mesh"] is mesh and machine.kwargs["options"] == {"shardings": {"w*": "column"}}
    assert {row.candidate.schedule.num_ranks for row in tuning.rows} == {2, 4}
    assert tuning.best["mesh"].shape["stage"] == tuning.best["num_stages"] and tuning.best["shardings"] == {"w*": "column"}
    few = tune(**given, num_ranks=2).best
    assert few["num_stages"] == 2 and few["mesh"].shape == {"stage": 2, "tensor": 2}
    with pytest.raises(ArgumentError, match="the mesh says which devices there are, and how many replicas"):
        tune(**given, data_parallel=2)
    with pytest.raises(ArgumentError, match="num_ranks=5 with devices for 4"):
        tune(**given, num_ranks=5)


SHARDINGS = {"w[0246]": "column", "w[1357]": "row"}


def test_lists_of_devices_are_ranks_of_unequal_width_whose_stages_stay_on_them(machine):
    d = jax.devices()
    order = {"schedules": ("1f1b", "interleaved", "zb-v", "auto"), "num_microbatches": 4, "shardings": SHARDINGS}
    tuning = tune(devices=[d[0], d[1:3], d[3]], num_ranks=(1, 2, 3), num_measured=0, **order)
    assert tuning.best["devices"] == ((d[0],), (d[1], d[2]), (d[3],))
    assert {row.candidate.schedule.num_ranks for row in tuning.rows} == {1, 2, 3}
    for row in tuning.rows:
        schedule = row.candidate.schedule
        assert row.candidate.family.homes == (schedule.stage_to_rank if schedule.num_ranks > 1 else ())
    made = {row.candidate.family.homes for row in tuning.rows if row.candidate.schedule.name == "auto"}
    assert made and made <= {row.candidate.family.homes for row in tuning.rows if row.candidate.schedule.name != "auto"}
    even = tune(devices=[d[:2], d[2:4]], num_measured=0, **order)
    assert not any(row.candidate.family.homes for row in even.rows)
    with pytest.raises(ArgumentError, match="each replica has as many devices of a rank as the others"):
        tune(devices=[d[:2], d[2]], data_parallel=2)
    with pytest.raises(ArgumentError, match="num_ranks=3 with devices for 2"):
        tune(devices=[d[:2], d[2]], num_ranks=3)


@pytest.mark.parametrize("name", ["zb-v", "interleaved"])
def test_a_schedule_made_to_measure_leaves_stages_on_ranks_of_their_width(name):
    schedule, times = make(name, 2, 4, 2), (1.0, 5.0, 1.0, 1.0)
    costs = StepCosts({Kind.F: times, Kind.I: times, Kind.W: times})
    homes = [
        _made_like(Candidate(schedule, unequal=unequal), costs, (1.0,) * 4, (9.0,) * 2).stage_to_rank for unequal in (False, True)
    ]
    assert homes[0] != homes[1] == schedule.stage_to_rank


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::jaxpp.DevicesWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"data_parallel": (1, 2)},
        {"data_parallel": (1, 2), "delay": 1},
        {"mesh": (2, 2, 2), "shardings": SHARDINGS},
        {"devices": "4 and 2", "shardings": SHARDINGS},
        {"devices": "4 and 2", "data_parallel": (1, 2), "shardings": SHARDINGS},
    ],
)
def test_replicas_and_meshes_are_measured_and_run(options):
    given = {"devices": jax.devices()[:4]}
    if "mesh" in options:
        mesh = Mesh(np.array(jax.devices()).reshape(options["mesh"]), ("pipe", "data", "model"))
        options, given = options | {"mesh": mesh}, {}
    elif "devices" in options:
        options = options | {"devices": [jax.devices()[:4], jax.devices()[4:6]]}
    sizes = {"schedules": "1f1b", "num_microbatches": 2, "stages_per_rank": 1, "balance": "flops"}
    tuning = jaxpp.tune(loss_fn, OPTIMIZER, init, BATCH, **given | options, **sizes, keep=False)
    assert len(tuning.measured) == len(tuning.rows) == (2 if "data_parallel" in options else 1)
    pipe = tuning.pipeline()
    state = pipe.init(init, jax.random.key(0), BATCH)
    pipe.verify(state, BATCH)
    peaks = tuple(pipe.forecast(jax.eval_shape(init, jax.random.key(0)), BATCH).peaks.values())
    assert tuning.found.best.peaks == peaks


@pytest.mark.long
def test_the_pipeline_of_a_tuning_trains(machine):
    tuning = tune(num_measured=1)
    pipe = tuning.pipeline()
    assert pipe.schedule == tuning.found.best.candidate.schedule
    state = pipe.init(init, jax.random.key(0), BATCH)
    state, metrics = pipe.step(state, BATCH)
    assert float(metrics.loss) > 0 and pipe.schedule.num_stages == tuning.best["num_stages"]


def test_the_devices_say_what_candidates_cost_and_run_the_best():
    sizes = {"schedules": ("gpipe", "1f1b"), "num_microbatches": (2, 4), "stages_per_rank": 1, "balance": "flops"}
    tuning = tune(devices=jax.devices()[:2], **sizes, hbm="1GiB", keep=False)
    assert len(tuning.rows) == 4 and len(tuning.measured) == 3
    assert all(isinstance(costs, StepCosts) for costs in tuning.found.costs.values())
    assert tuning.found.best == tuning.measured[0] and tuning.found.best.measured > 0
    assert all(len(row.peaks) == 2 and min(row.peaks) > 0 for row in tuning.measured)
    pipe = tuning.pipeline()
    state = pipe.init(init, jax.random.key(0), BATCH)
    pipe.verify(state, BATCH)
    peaks = tuple(pipe.forecast(jax.eval_shape(init, jax.random.key(0)), BATCH).peaks.values())
    assert tuning.found.best.peaks == peaks


@pytest.mark.long
@pytest.mark.parametrize("balance", [None, "cost"])
def test_cuts_and_schedules_that_are_made_are_those_of_the_pipeline_that_is_returned(balance, tmp_path):
    """The widths differ, so the cut for the shortest step is another one than by FLOPs; a second call measures nothing."""
    sizes = (8, 64, 8, 8, 96, 8, 8, 32, 8)
    keys = jax.random.split(jax.random.key(0), len(sizes))
    params = [jax.random.normal(key, shape) for key, *shape in zip(keys, sizes, sizes[1:], strict=False)]

    def uneven(params, batch):
        for weight in params:
            batch = jnp.tanh(batch @ weight)
        return jnp.mean(batch**2)

    given = {"devices": jax.devices()[:2], "schedules": ("1f1b", "auto"), "num_microbatches": 4, "balance": balance}
    first, again = (jaxpp.tune(uneven, OPTIMIZER, params, BATCH, **given, hbm="1GiB", keep=tmp_path) for _ in range(2))
    assert first.rows == again.rows
    assert "auto" in {row.candidate.schedule.name for row in first.rows}
    assert {row.candidate.balance for row in first.rows} == ({"flops", "cost"} if balance is None else {"cost"})
    for row in first.measured:
        pipe = jaxpp.Pipeline(uneven, OPTIMIZER, **first.given, **row.candidate.options)
        state = pipe.init(params, BATCH)
        assert pipe.schedule == row.candidate.schedule
        assert not row.candidate.cuts or pipe.engine.layout.cuts == row.candidate.cuts
        assert row.peaks == tuple(pipe.forecast(params, BATCH).peaks.values())
        pipe.verify(state, BATCH)


def test_parameters_and_a_state_of_the_model_may_be_given_too(machine):
    def stateful(params, model_state, batch):
        return loss_fn(params, batch), (model_state, {})

    params = init(jax.random.key(0))
    variables = params, {"n": jnp.zeros(())}
    tuning = jaxpp.tune(stateful, OPTIMIZER, variables, BATCH, has_state=True, num_measured=1, schedules="1f1b")
    assert tuning.best["has_state"] is True
    with pytest.raises(ArgumentError, match="optimizer"):
        jaxpp.tune(stateful, None, params, BATCH)
    assert issubclass(OptimizerError, ValueError)


def of_task(params, own, batch):
    return loss_fn(params, batch) + jnp.mean((batch @ own["head"]) ** 2)


@pytest.mark.long
@pytest.mark.parametrize("made", [False, True])
def test_a_step_of_a_bank_is_measured_with_its_first_set_there_and_the_bank_stays_as_it_is(made):
    params = init if made else jax.device_get(init(jax.random.key(0)))
    bank = jaxpp.Bank({task: {"head": np.full((8, 16), k, "float32")} for k, task in enumerate("pq")}, OPTIMIZER, slots=3)
    order = {"schedules": "1f1b", "num_microbatches": 3, "stages_per_rank": 1, "balance": "flops", "num_measured": 2, "keep": False}
    given = {"devices": jax.devices()[:4], "data_parallel": (1, 2), "bank": bank}
    tuning = jaxpp.tune(of_task, OPTIMIZER, params, BATCH, **order, **given)
    assert {row.candidate.replicas for row in tuning.measured} == {1, 2}
    assert bank.host_store.traffic.loads == 0
    np.testing.assert_array_equal(bank.params("q")["head"], np.ones((8, 16)))
    pipe = tuning.pipeline()
    state = pipe.init(params, jax.random.key(0), BATCH) if made else pipe.init(params, BATCH)
    state, _ = pipe.step(state, BATCH, task="q")
    (best,) = (row for row in tuning.with_memory if row.candidate == tuning.found.best.candidate)
    assert best.peaks == tuple(pipe.forecast(state, BATCH).peaks.values()), "with the sets that wait"
