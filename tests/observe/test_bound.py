"""The bound of a step counts every device and its products, on devices that are taken for GPUs of the table."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.observe import bound as bounds
from jaxpp.observe.evaluate import parts
from jaxpp.schedule import Kind, Schedule
from jaxpp.schedule.costs import StepCosts
from jaxpp.targets import TARGETS

H100 = next(target for target in TARGETS if target.name == "h100")
SHAPES, BATCH = [jax.ShapeDtypeStruct((8, 8), "float32")] * 2, jax.ShapeDtypeStruct((16, 8), "float32")


def loss_fn(params, batch):
    for w in params:
        batch = jnp.tanh(batch @ w)
    return jnp.mean(batch**2)


@pytest.mark.parametrize(("replicas", "devices", "num_devices"), [(1, 2, 2), (1, 1, 1), (2, 4, 4)])
def test_all_devices_count_once_and_so_does_each_product_on_them(monkeypatch, replicas, devices, num_devices):
    monkeypatch.setattr(bounds, "target_of", lambda device: H100)
    given = {"devices": jax.devices()[:devices], "data_parallel": replicas}
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=2, **given)
    pipe.abstract_state(SHAPES, BATCH)
    bound = bounds.bound_of(pipe.engine, BATCH, None)
    assert bound.num_devices == num_devices
    assert f"on {num_devices} x H100" in str(bound)
    products = 5 * 2 * 16 * 8 * 8  # three a layer, and no cotangent of the batch
    assert sum(bound.products.values()) == products
    (kind,) = bound.products
    peak = getattr(H100.peaks, kind)
    assert bound.peak_fraction == pytest.approx(products / peak / num_devices / bound.seconds)
    assert np.isfinite(bound.seconds)


def test_the_bound_is_that_of_programs_that_nobody_looks_into(monkeypatch):
    monkeypatch.setattr(bounds, "target_of", lambda device: H100)
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=2, devices=jax.devices()[:2])
    pipe.abstract_state(SHAPES, BATCH)
    with jax.debug_nans(True):  # whose programs look at their results
        looked_at = bounds.bound_of(pipe.engine, BATCH, None)
    assert looked_at.parts == bounds.bound_of(pipe.engine, BATCH, None).parts


def test_copies_of_a_state_that_visits_hide_or_take_what_the_link_takes(monkeypatch):
    width, count = 64, 5
    shapes, batch = [jax.ShapeDtypeStruct((width, width), "float32")] * count, jax.ShapeDtypeStruct((4, width), "float32")

    def bound_with(host, rate):
        slow = dataclasses.replace(H100, links=dataclasses.replace(H100.links, host=rate))
        monkeypatch.setattr(bounds, "target_of", lambda device: slow)
        order = jaxpp.schedule.make("looped-bfs", num_ranks=1, num_microbatches=2, stages_per_rank=count)
        options = {"num_stages": count, "num_microbatches": 2, "schedule": order, "devices": jax.devices()[:1], "host": host}
        pipe = jaxpp.Pipeline(loss_fn, optax.adam(0.1), **options)
        pipe.abstract_state(shapes, batch)
        return bounds.bound_of(pipe.engine, batch, None)

    plain, quick, slow = bound_with(None, 1e12), bound_with("params", 1e12), bound_with("params", 1e6)
    size = 4 * width * width
    assert plain.visits is None and "link to host memory" not in str(plain)
    assert (quick.visits.brought, quick.visits.taken) == ((4 * count - 1) * size, 3 * count * size)
    assert 0 <= quick.visits.added <= 0.05 * quick.seconds
    assert quick.seconds >= quick.host.seconds, "which hands over the copies, too"
    assert slow.visits.link == pytest.approx(slow.visits.brought / 1e6)
    alone = 4 * size / 1e6  # the last stage goes out beside nothing, and the link waits once
    assert slow.visits.link <= slow.seconds <= 1.01 * (slow.visits.link + alone)
    assert sum(slow.parts) == pytest.approx(slow.seconds) and slow.parts.copies > 0.99 * slow.seconds
    assert "hide under the work of the visits" in str(quick) and "that no work hides" in str(slow)
    assert slow.simulation.times.complete[0] == pytest.approx(slow.visits.link, rel=0.01)


def test_the_bound_names_the_order_beside_which_slow_transfers_hide(monkeypatch):
    def bound_with(rate, schedule):
        slow = dataclasses.replace(H100, links=dataclasses.replace(H100.links, peer=rate))
        monkeypatch.setattr(bounds, "target_of", lambda device: slow)
        options = {"num_stages": 4, "num_microbatches": 8, "schedule": schedule, "devices": jax.devices()[:4]}
        pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), **options)
        pipe.abstract_state(SHAPES * 2, BATCH)
        return bounds.bound_of(pipe.engine, BATCH, None)

    quick, slow, other = bound_with(1e15, "1f1b"), bound_with(1e5, "1f1b"), bound_with(1e5, "gpipe")
    eager, host = bound_with(1e5, "eager-1f1b"), bound_with(1e8, "1f1b")  # of the last, the host takes a thousand times as long
    assert quick.hidden_by is other.hidden_by is eager.hidden_by is host.hidden_by is None and slow.hidden_by == eager.schedule
    (line,) = (line for line in str(slow).splitlines() if "eager-1f1b" in line)
    assert "up to 7 microbatches in place of 4" in line and "eager" not in str(quick) + str(other) + str(eager)
    assert f"{1e3 * eager.simulation.makespan:.3g} ms in place of {1e3 * slow.simulation.makespan:.3g} ms" in line


def test_a_step_of_many_in_flow_has_no_bubble_and_waits_for_its_busiest_device(monkeypatch):
    monkeypatch.setattr(bounds, "target_of", lambda device: H100)
    batch = jax.ShapeDtypeStruct((32, 8), "float32")

    def bound_with(delay):
        options = {"num_stages": 2, "num_microbatches": 4, "devices": jax.devices()[:2], "delay": delay}
        pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), **options)
        pipe.abstract_state(SHAPES, batch)
        return bounds.bound_of(pipe.engine, batch, None)

    late = bound_with(1)
    assert late.seconds == pytest.approx(late.host.seconds), "calls of programs as small as these are what limits"
    assert late.parts.dispatch > 0.5 * late.seconds and late.host_limits
    for name in ("_CALL", "_RESULT", "_SEND"):
        monkeypatch.setattr(bounds, name, 0.0)
    late, alone = bound_with(1), bound_with(0)
    assert "a step of many in flow takes at least" in str(late) and "in flow" not in str(alone)
    assert late.seconds < alone.seconds
    assert late.parts.bubble < 0.01 * late.seconds < alone.parts.bubble
    assert sum(late.parts) == pytest.approx(late.seconds)
    busiest = max(4 * sum(late.costs.of(jaxpp.schedule.Action(stage, kind, 0)) for kind in "FB") for stage in (0, 1))
    assert late.seconds - late.parts.rest == pytest.approx(busiest)
    assert late.parts.rest <= alone.parts.rest  # the update, whose kernels another XLA divides otherwise


def test_what_the_host_does_to_a_step_goes_by_its_kernels_and_by_what_devices_really_take(monkeypatch):
    monkeypatch.setattr(bounds, "target_of", lambda device: H100)
    batch = jax.ShapeDtypeStruct((32, 8), "float32")
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=4, devices=jax.devices()[:2])
    pipe.abstract_state(SHAPES, batch)
    bound = bounds.bound_of(pipe.engine, batch, None)
    kernels = sum(row.runs * sum(kernel.runs for kernel in row.kernels) for row in pipe.programs(SHAPES, batch).rows)
    assert bound.host.num_kernels == kernels
    assert bound.host.likely == pytest.approx(25e-6 * bound.host.num_instructions + 8.5e-6 * kernels)
    assert f"{kernels:,} kernels of a step" in " ".join(str(bound).split())
    least, likely = bound.seconds - bound.parts.dispatch, bound.predicted.seconds - bound.likely_parts.dispatch
    for seconds, says in (
        (0.9 * least, "does not limit"),
        ((least + likely) / 2, "may limit"),
        (1.1 * likely, "is likely to limit"),
    ):
        host = bound.host._replace(seconds=0.0, likely=seconds)
        assert f"so it {says} the step" in " ".join(str(dataclasses.replace(bound, host=host)).split())


def test_a_prediction_has_a_range_that_begins_at_the_bound_or_above(monkeypatch):
    monkeypatch.setattr(bounds, "target_of", lambda device: H100)

    def bound_with(width, rows, **options):
        shapes, batch = [jax.ShapeDtypeStruct((width, width), "float32")] * 2, jax.ShapeDtypeStruct((rows, width), "float32")
        given = {"num_stages": 2, "num_microbatches": 4, "devices": jax.devices()[:2], **options}
        pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), **given)
        pipe.abstract_state(shapes, batch)
        return bounds.bound_of(pipe.engine, batch, None)

    small, large, late, host = (
        bound_with(8, 32),
        bound_with(4096, 16384),
        bound_with(8, 32, delay=1),
        bound_with(64, 32, host="params"),
    )
    for bound in (small, large, late, host):
        seconds, low, high = bound.predicted
        assert bound.seconds <= low <= seconds <= high
        assert sum(bound.likely_parts) == pytest.approx(seconds)
        (line,) = (line for line in bound.lines() if "likely takes" in line)
        unit, scale = ("s", 1) if seconds >= 1 else ("ms", 1e3)
        assert line.startswith(f"a step likely takes {scale * seconds:.3g} {unit} ({scale * low:.3g} to {scale * high:.3g}): ")
        assert bound.lines().index(line) == 1
    assert small.predicted.seconds > 0.9 * small.host.likely, "whose host is likely to limit it"
    assert small.predicted.low < 0.5 * small.predicted.seconds, "where another host may be quicker"
    assert large.predicted.low == pytest.approx(bounds.roofline.SPREAD[0] * large.predicted.seconds, rel=0.01)
    assert "waiting for the host" in small.lines()[1] and "waiting for the host" not in large.lines()[1]


def test_costs_that_are_likely_charge_small_microbatches_for_their_slower_products(monkeypatch):
    monkeypatch.setattr(bounds, "target_of", lambda device: H100)

    def costs_with(microbatches):
        shapes, batch = [jax.ShapeDtypeStruct((1024, 1024), "float32")] * 2, jax.ShapeDtypeStruct((4096, 1024), "float32")
        pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=microbatches, devices=jax.devices()[:2])
        pipe.abstract_state(shapes, batch)
        bound = bounds.bound_of(pipe.engine, batch, None)
        work = [microbatches * max(each.actions[Kind.F]) for each in (bound.costs, bound.likely)]
        assert bound.likely.dispatch[Kind.F][0] > bound.costs.dispatch[Kind.F][0]
        return work

    (least, likely), (least_of_small, likely_of_small) = costs_with(2), costs_with(32)
    assert likely > least and likely_of_small > least_of_small
    assert likely_of_small / likely > 1.2 * least_of_small / least


def test_a_stage_with_whole_backwards_beside_one_that_splits_them_is_simulated_with_them():
    mine = Schedule("mine", [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1"]])
    actions = {Kind.F: (1.0, 1.0), Kind.B: (3.0, 0.0), Kind.I: (0.0, 1.0), Kind.W: (0.0, 1.0)}
    host = bounds.HostWork(10, 10, 1, 0.0, 0.0)
    made, costs = parts(mine, StepCosts(actions)), StepCosts(actions)
    likely = bounds.roofline.Prediction(sum(made), sum(made), sum(made))
    bound = bounds.StepBound(mine, (H100, H100), made, costs, (), {}, 0.0, 2, host, likely, costs, made, 0.0)
    assert bound.simulation.busy == (8.0, 6.0)
    assert bound.simulation.makespan == bound.seconds
    idle = f"ranks compute 6 to 8 s of a step: others wait for rank 0, and devices are idle {bound.bubble_fraction:.0%} of the time"
    assert idle in bound.lines()
    even = {Kind.F: (1.0, 1.0), Kind.B: (2.0, 0.0), Kind.I: (0.0, 1.0), Kind.W: (0.0, 1.0)}
    bound = dataclasses.replace(bound, costs=StepCosts(even))
    assert not [line for line in bound.lines() if "others wait" in line]
