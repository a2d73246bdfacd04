"""Cuts for the shortest step, where it is known what sends cost."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.engine import layout
from jaxpp.runtime.measure import link_times, waiting
from jaxpp.runtime.place import OneDevice
from jaxpp.schedule.registry import make
from jaxpp.schedule.simulate import simulate
from jaxpp.stages.cuts.balance import SLACK, balance
from jaxpp.stages.cuts.by_time import Links, balance_time, predicted
from jaxpp.stages.loss.traced_loss import trace_loss
from tests.stages.test_balance import MODELS, traced


def products(widths):
    """Matrix products alone, so that no stage can be without real work."""

    def loss_fn(params, x):
        for w in params:
            x = x @ w
        return x.sum()

    params = [jax.ShapeDtypeStruct(shape, "float32") for shape in itertools.pairwise(widths)]
    return trace_loss(loss_fn, params, jax.ShapeDtypeStruct((8, widths[0]), "float32"), None, has_aux=False)


def even(loss, num_stages):
    """The least that the largest stage can cost, and every cut in which each stage has a product of two matrices."""
    is_product = np.asarray([loss.graph.eqns[i].primitive.name == "dot_general" for i in loss.spine])
    size = len(loss.spine)
    every = itertools.combinations(range(1, size), num_stages - 1)
    return [cuts for cuts in every if all(is_product[a:b].any() for a, b in itertools.pairwise([0, *cuts, size]))]


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_the_best_of_all_cuts(seed):
    rng = np.random.default_rng(seed)
    loss = products([8, *rng.integers(2, 96, 8).tolist()])
    num_stages = int(rng.integers(2, 5))
    total = sum(loss.costs)
    scale = total / max(loss.boundary_bytes) * 10 ** rng.uniform(-3, 0)
    rates = tuple((scale * rng.uniform(0.2, 1.0, num_stages - 1)).tolist())
    links = Links((total * 1e-3,) * (num_stages - 1), rates, float(rng.choice([0.0, 0.5, 1.0])), int(rng.integers(1, 17)))
    found = balance_time(loss, links)
    best = min(predicted(loss, cuts, links) for cuts in even(loss, num_stages))
    assert predicted(loss, found, links) <= best * (1 + 1e-9)


@pytest.mark.parametrize("name", [*list(MODELS)[::5], "a GPT"])
@pytest.mark.long
def test_with_free_or_nearly_free_links_the_cuts_are_those_for_equal_work(name):
    loss = traced(name)
    for num_stages in range(2, min(4, len(loss.spine)) + 1):
        cuts = balance(loss, num_stages)
        zeros = (0.0,) * (num_stages - 1)
        assert balance_time(loss, Links(zeros, zeros, 1.0, 8)) == cuts
        tiny = (1e-12 * sum(loss.costs) / max(loss.boundary_bytes),) * (num_stages - 1)
        near = Links(zeros, tiny, 1.0, 8)
        assert predicted(loss, balance_time(loss, near), near) == pytest.approx(predicted(loss, cuts, near), rel=1e-9)


WIDTHS = [64, 64, 64, 64, 2, 64, 64]  # an even cut has a boundary of 64 values; the narrow place is at two thirds


def test_a_slow_link_moves_the_cut_to_the_narrow_place_even_where_that_is_uneven():
    loss = products(WIDTHS)
    total, wide = sum(loss.costs), 8 * 64 * 4
    crossed = {}
    for cost in (1e-6, 1.0):  # of a wide boundary, in parts of all work
        links = Links((0.0,), (cost * total / wide,), 0.5, 8)
        (cut,) = balance_time(loss, links)
        share = sum(loss.costs[:cut]) / total
        crossed[cost] = loss.boundary_bytes[cut], max(share, 1 - share)
    assert crossed[1e-6][0] == wide
    assert crossed[1e-6][1] <= 0.5 * (1 + 2 * SLACK) + 0.2
    assert crossed[1.0][0] == wide // 32
    assert crossed[1.0][1] > 0.65


def test_what_a_schedule_waits_for_is_what_the_clock_says():
    for name in ("gpipe", "1f1b", "zb-h1"):
        schedule = make(name, num_ranks=4, num_microbatches=32)
        free, slow = (simulate(schedule, forward=1, input_grad=1, weight_grad=1, transfer=hop).makespan for hop in (0, 0.01))
        said = (2 * 32 * waiting(schedule) + 6) * 0.01
        assert said == pytest.approx(slow - free, rel=0.01)
    assert waiting(make("gpipe", num_ranks=4, num_microbatches=32)) == 0
    assert waiting(make("1f1b", num_ranks=4, num_microbatches=32)) > 0.5


def test_links_are_measured_and_stages_on_one_device_need_none():
    one, two = jax.devices()[:2]
    per_send, per_byte = link_times([OneDevice(one), OneDevice(two), OneDevice(two)])
    assert per_send[0] > 0
    assert per_byte[0] >= 0
    assert (per_send[1], per_byte[1]) == (0, 0)


def test_a_pipeline_cuts_by_the_links_that_it_measures(monkeypatch):
    def loss_fn(params, x):
        for w in params:
            x = x @ w
        return jnp.mean(x**2)

    params = [jnp.ones(shape) / 8 for shape in itertools.pairwise(WIDTHS)]
    batch = jnp.ones((8, 64))
    owned = []
    for per_byte in (0.0, 1.0):
        monkeypatch.setattr(layout, "stage_times", lambda *_: [1.0, 1.0])
        monkeypatch.setattr(layout, "link_times", lambda _, rate=per_byte: ((0.0,), (rate,)))
        pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=2, balance="time")
        state = pipe.init(params, batch)
        pipe.verify(state, batch)
        owned.append(pipe.engine.owner.count(0))
    assert owned == [2, 4]
