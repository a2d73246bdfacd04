"""``schedule="auto"``: made when the stages are known, and then a schedule like any other."""

import itertools
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.engine import made_to_measure
from jaxpp.engine.made_to_measure import boundary_bytes
from jaxpp.errors import CutError, ScheduleError, StateError
from jaxpp.schedule import make, simulate
from jaxpp.stages.estimate import CPU_RATES

SIZES = 8, 64, 8, 8, 96, 8, 8, 32, 8


def loss_fn(params, batch):
    x = batch
    for weight in params:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def params():
    keys = jax.random.split(jax.random.key(0), len(SIZES))
    return [jax.random.normal(key, shape) for key, *shape in zip(keys, SIZES, SIZES[1:], strict=False)]


def pipeline(schedule="auto", **options):
    options = {"num_stages": 4, "num_microbatches": 4, "devices": jax.devices()[:4]} | options
    return jaxpp.Pipeline(loss_fn, optax.adam(1e-2), schedule=schedule, **options)


BATCH = jnp.linspace(-1, 1, 64).reshape(8, 8)
LONG = pytest.mark.long
FACES = {
    "one stage on each device": {},
    "two stages on each device": {"num_microbatches": 6, "devices": 2},
    "fewer devices than divide the stages": pytest.param(
        {"devices": 3}, marks=(LONG, pytest.mark.filterwarnings("ignore:(?s).*on 2 ranks, and devices for 3:jaxpp.DevicesWarning"))
    ),
    "replicas": pytest.param({"devices": 4, "data_parallel": 2}, marks=LONG),
    "recomputing": pytest.param({"remat": "recompute"}, marks=LONG),
    "offloading": pytest.param({"remat": "offload", "num_microbatches": 8}, marks=LONG),
    "measured": pytest.param({"balance": "time"}, marks=LONG),
    "with room": pytest.param({"hbm": "1MiB"}, marks=LONG),
}


@pytest.mark.parametrize("options", FACES.values(), ids=list(FACES))
def test_a_step_equals_the_plain_one(options):
    options = options | {"devices": jax.devices()[: options.get("devices", 4)]}
    pipe = pipeline(**options)
    state = pipe.init(params(), BATCH)
    assert pipe.schedule.name == "auto"
    assert pipe.schedule == pipe.engine.options.schedule
    assert "schedule: auto, 4 stages" in repr(pipe)
    pipe.verify(state, BATCH)


def test_the_numbers_of_ranks_are_as_many_as_there_are_devices_for():
    made = {n: pipeline(devices=jax.devices()[:n], num_stages=4) for n in (1, 2, 3, 4, 5)}
    ranks = {}
    for n, pipe in made.items():
        idle = pytest.warns(jaxpp.DevicesWarning, match="4 stages on 2 ranks, and devices for 3") if n == 3 else nullcontext()
        with idle:
            pipe.abstract_state(params(), BATCH)
        ranks[n] = pipe.schedule.num_ranks
    assert ranks == {1: 1, 2: 2, 3: 2, 4: 4, 5: 4}


def test_on_the_clock_it_is_shorter_than_1f1b_for_uneven_stages_and_holds_no_more():
    pipe = pipeline(num_microbatches=8)
    pipe.abstract_state(params(), BATCH)
    stages = pipe.engine.preparer.step(BATCH, None).cuts[0].stages
    costs = {name: [code.flops for code in stages] for name in ("forward", "input_grad", "weight_grad")}
    costs["input_grad"][0] = 0  # of the batch nobody wants a gradient
    auto, usual = (simulate(s, **costs) for s in (pipe.schedule, make("1f1b", num_ranks=4, num_microbatches=8)))
    assert auto.makespan < 0.95 * usual.makespan
    assert max(peak * code.kept for peak, code in zip(auto.peak_residuals, stages, strict=True)) <= 4 * max(s.kept for s in stages)


def test_a_state_goes_on_from_a_schedule_with_a_name():
    usual, auto = pipeline("1f1b"), pipeline()
    state, metrics = usual.step(usual.init(params(), BATCH), BATCH)
    target = auto.abstract_state(params(), BATCH)
    assert jax.tree.map(jnp.shape, target.params) == jax.tree.map(jnp.shape, state.params)
    state, after = auto.step(state, BATCH)
    assert state.step == 2
    assert float(after.loss) < float(metrics.loss)


def test_before_init_there_is_no_schedule_yet():
    pipe = pipeline()
    assert "schedule: auto, 4 stages, 4 microbatches" in repr(pipe)
    with pytest.raises(StateError, match=r"pipe\.schedule: a pipeline is cut by init"):
        _ = pipe.schedule


def test_by_name_alone_there_is_none():
    with pytest.raises(ScheduleError) as error:
        make("auto", num_ranks=2)
    for line in ("a schedule is made to measure where it is known what the stages take", "jaxpp.schedule.synthesise("):
        assert line in str(error.value)


def test_value_and_grad_takes_it_too():
    grad_fn = jaxpp.value_and_grad(loss_fn, num_stages=2, num_microbatches=4, schedule="auto", devices=jax.devices()[:2])
    loss, grads = grad_fn(params(), BATCH)
    expected = jax.value_and_grad(loss_fn)(params(), BATCH)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    for own, other in zip(grads, expected[1], strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6)


def test_what_crosses_a_boundary_is_counted():
    pipe = pipeline(cuts=["1", "2", "4"])
    pipe.abstract_state(params(), BATCH)
    assert boundary_bytes(pipe.engine.preparer.step(BATCH, None).cuts[0]) == [4 * 2 * 64, 4 * 2 * 8, 4 * 2 * 96]


@pytest.mark.long
def test_a_forecast_and_a_profile_know_it():
    pipe = pipeline(num_microbatches=8)
    assert "auto" not in str(pipe.forecast(params(), BATCH, hbm="1MiB").changes)
    state = pipe.init(params(), BATCH)
    assert pipe.profile(state, BATCH, num_steps=1).schedule == pipe.schedule


def test_of_another_number_of_microbatches_it_is_the_same_whichever_list_comes_first():
    def loss_fn(params, batch):
        x = batch
        for k, weight in enumerate(params):  # the seventh layer costs as the square of the length
            x = jnp.tanh((x + (x[:, :, None] - x[:, None]).sum(2) if k == 6 else x) @ weight)
        return jnp.mean(x**2)

    def given(*lengths):
        return jaxpp.Microbatches([jax.ShapeDtypeStruct((2, length, SIZES[0]), "float32") for length in lengths])

    def schedules(*lists):
        pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=4, num_microbatches=4, schedule="auto", max_shapes=2)
        pipe.abstract_state(params(), given(8, 8, 8, 8))
        for each in lists:
            pipe.engine.lower("update", each, None)
        return pipe.schedule, *(pipe.engine.at(each).options.schedule for each in lists)

    opened, long, other = schedules(given(*[500] * 6), given(8, 9, 10, 11, 12, 13, 14))
    assert (opened, other, long) == schedules(given(500, 8, 7, 6, 5, 4, 3), given(*[2] * 6))
    assert [made.num_microbatches for made in (opened, long, other)] == [4, 6, 7]
    # The cut of the first batch was made again, and is as it was.
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=4, num_microbatches=6, schedule="auto")
    pipe.abstract_state(params(), jax.ShapeDtypeStruct((6 * 2, 8, SIZES[0]), "float32"))
    assert pipe.schedule == long


@pytest.mark.long
@pytest.mark.parametrize(("num_stages", "num_devices"), [(4, 2), (6, 3)])
def test_of_another_number_of_microbatches_the_stages_stay_where_their_parameters_are(num_stages, num_devices):
    options = {"num_stages": num_stages, "devices": jax.devices()[:num_devices]}

    def given(count):
        return jaxpp.Microbatches([jax.ShapeDtypeStruct((2, 8), "float32")] * count)

    for first in (2, 6):
        pipe = pipeline(num_microbatches=first, **options)
        pipe.abstract_state(params(), given(first))
        for count in (1, 3, 8):
            again = pipe.engine.at(given(count)).options.schedule
            assert (again.stage_to_rank, again.num_microbatches) == (pipe.schedule.stage_to_rank, count)


@pytest.mark.long
def test_microbatches_of_another_number_and_another_loss_train_the_state_on_fewer_devices_than_stages():
    pipe = pipeline(num_microbatches=2, devices=jax.devices()[:2])
    other = pipe.other(lambda params, batch: loss_fn(params, jnp.sin(batch)), num_microbatches=1)
    state, rows = pipe.init(params(), BATCH[:2]), [BATCH[k : k + 1] for k in range(8)]
    state = other.init(state, BATCH[:1])
    for each, batch, wanted in ((other, BATCH[:1], jnp.sin(BATCH[:1])), (pipe, jaxpp.Microbatches(rows), BATCH)):
        before = jax.device_get(state.params)
        state, metrics = each.step(state, batch)
        np.testing.assert_allclose(metrics.loss, loss_fn(before, wanted), rtol=1e-5)


@pytest.mark.long
def test_a_schedule_whose_stages_lie_elsewhere_than_those_of_the_first_loss_is_refused():
    pipe = pipeline("looped-bfs", devices=jax.devices()[:2])
    state = pipe.init(params(), BATCH)
    with pytest.raises(CutError) as error:  # whose message was lost in an error of zip
        pipe.other(loss_fn, schedule="zb-v").init(state, BATCH)
    assert "state.params[4]: cpu:1 instead of cpu:0" in str(error.value)
    assert "Fix: pass a schedule that has the stages on the ranks on which the first has them" in str(error.value)


@pytest.mark.filterwarnings("ignore::jaxpp.UnevenStagesWarning", "ignore::jaxpp.MicrobatchWarning")
def test_stages_that_visit_turn_as_seldom_as_they_can_where_the_link_to_host_memory_is_slow(monkeypatch):
    options = {"num_stages": 6, "devices": jax.devices()[:2], "host": "params", "remat": "recompute"}
    weights = [jax.ShapeDtypeStruct((16, 16), "float32")] * 6

    def turns(rate):
        monkeypatch.setattr(made_to_measure, "rates_of", lambda device: CPU_RATES._replace(host=rate))
        pipe = pipeline(**options)
        pipe.abstract_state(weights, jax.ShapeDtypeStruct((8, 16), "float32"))
        assert pipe.schedule.name == "auto"
        return sum(a.stage != b.stage for row in pipe.schedule.rows for a, b in itertools.pairwise(row))

    assert turns(1e6) == 2 * 4 < turns(1e12)
