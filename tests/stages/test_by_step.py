"""Cuts for the shortest step: as short as that of the best of all cuts, by costs and links that are estimated or measured."""

import itertools
import math
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.engine import layout
from jaxpp.engine.layout import lengths_of
from jaxpp.options import Options
from jaxpp.runtime.compile import Programs
from jaxpp.runtime.measure import link_times
from jaxpp.runtime.place import OneDevice
from jaxpp.schedule.registry import make_for_stages
from jaxpp.schedule.simulate import simulate
from jaxpp.stages.cuts import by_step
from jaxpp.stages.cuts.balance import REAL_WORK, SLACK, UNEVEN, balance, least_largest, prefix_sums
from jaxpp.stages.cuts.by_step import Links, balance_step, step_costs
from jaxpp.stages.estimate import CPU_RATES, SpineCosts
from jaxpp.stages.loss.traced_loss import trace_loss
from jaxpp.stages.remat import Least
from tests.grids import covering
from tests.stages.test_balance import MODELS, traced


def products(widths):
    """Matrix products alone, so that no stage can be without real work."""

    def loss_fn(params, x):
        for w in params:
            x = x @ w
        return x.sum()

    params = [jax.ShapeDtypeStruct(shape, "float32") for shape in itertools.pairwise(widths)]
    return trace_loss(loss_fn, params, jax.ShapeDtypeStruct((8, widths[0]), "float32"), None, has_aux=False)


def randomly(rng, size):
    """A loss whose equations have random costs and random bytes between them, some of the first without any backward."""
    loss = products([8, *rng.integers(2, 96, size - 1).tolist()])
    size = len(loss.spine)
    forward, input_grad, weight_grad = rng.gamma(1.0, 1.0, (3, size)) * rng.choice([1.0, 1.0, 6.0], (3, size))
    first = int(rng.integers(0, size // 2)) * int(rng.integers(0, 2))
    weight_grad[:first] = input_grad[: first + 1] = 0.0
    return replace(loss, step=SpineCosts(tuple(forward), tuple(input_grad), tuple(weight_grad), first))


def simulated(loss, cuts, links, schedule):
    """The step with these cuts, on the clock that people use."""
    spans = list(itertools.pairwise([0, *cuts, len(loss.spine)]))
    forward, input_grad, weight_grad = ([sum(costs[a:b]) for a, b in spans] for costs in loss.step[:3])
    none = [a <= loss.step.first for a, _ in spans]
    weight_grad = [w + i * skip for w, i, skip in zip(weight_grad, input_grad, none, strict=True)]
    input_grad = [i * (not skip) for i, skip in zip(input_grad, none, strict=True)]
    moved = [loss.boundary_bytes[at] for at in cuts]
    transfer = [s + b * n for s, b, n in zip(links.per_send, links.per_byte, moved, strict=True)]
    return simulate(schedule, forward=forward, input_grad=input_grad, weight_grad=weight_grad, transfer=transfer).makespan


def lacks(loss, cuts):
    """How many stages have too little work, no matrix product, or no parameter."""
    found, total = 0, sum(loss.costs)
    for a, b in itertools.pairwise([0, *cuts, len(loss.spine)]):
        share = sum(loss.costs[a:b]) / total * (len(cuts) + 1)
        found += max(0, math.ceil(math.log(REAL_WORK / max(share, 1e-14), 100)))
        found += not any(loss.primitives[k] == "dot_general" for k in range(a, b))
        found += not any(loss.param_uses[k] for k in range(a, b))
    return found


def is_even(loss, cuts):
    """Whether no stage is larger than ``UNEVEN`` times the mean, or than ``SLACK`` more than one has to be."""
    total, num_stages = prefix_sums(loss), len(cuts) + 1
    largest = np.diff(total[[0, *cuts, len(loss.spine)]]).max()
    return largest <= max(UNEVEN * total[-1] / num_stages, (1 + SLACK) * least_largest(loss, num_stages)) * (1 + 1e-9)


KINDS = {"1f1b": (2, 3, 4), "interleaved": (2, 4), "zb-v": (2, 4), "zb-h1": (3,)}


@pytest.mark.parametrize(
    ("few", "kind"), covering([4096, 40], [(name, count) for name, counts in KINDS.items() for count in counts])
)
def test_the_step_is_as_short_as_the_shortest_of_all_cuts(kind, few, monkeypatch):
    name, num_stages = kind
    monkeypatch.setattr(by_step, "_FEW", few)
    for seed in range(13):
        rng = np.random.default_rng(seed)
        loss = randomly(rng, int(rng.integers(6, 15)))
        schedule = make_for_stages(name, num_stages=num_stages, num_microbatches=8)
        rates = tuple((rng.uniform(0, 2, num_stages - 1) / max(loss.boundary_bytes)).tolist())
        links = Links((0.01,) * (num_stages - 1), rates)
        plain = [balance(loss, num_stages), balance(replace(loss, step=None), num_stages)]
        search = by_step._Search(loss, links, lengths_of(schedule), plain[0])
        lacking = {cuts: lacks(loss, cuts) for cuts in itertools.combinations(range(1, len(loss.spine)), num_stages - 1)}
        every = [cuts for cuts, lack in lacking.items() if lack <= lacking[plain[0]] and is_even(loss, cuts)]
        times = {cuts: simulated(loss, cuts, links, schedule) for cuts in every}
        assert search.times(np.asarray(list(times))) == pytest.approx(list(times.values()), rel=1e-9)
        best, found = min(times.values()), search.shortest(plain)
        assert times[found] <= best * (1 + (1e-9 if few == 4096 else 0.03))
        chosen = times[balance_step(loss, num_stages, links, lengths_of(schedule))]
        assert chosen <= times[found] * (1 + SLACK) * (1 + 1e-9)
        assert chosen <= min(times[cuts] for cuts in plain if cuts in times) * (1 + 1e-9), "never worse than the most even cuts"


QUICK = {"Flax's MNIST MLP", "a funnel", "a large head", "LeNet"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name not in QUICK)) for name in MODELS])
def test_whole_models_are_cut_by_what_a_step_costs_as_well_as_by_equal_flops_or_better(name):
    flat = traced(name)
    loss = replace(flat, step=step_costs(flat, Least(transcendental=1.0), CPU_RATES))
    assert min(loss.step.total) >= 0 < max(loss.step.total)
    for num_stages in range(2, min(4, len(loss.spine)) + 1):
        links = Links((0.0,) * (num_stages - 1), (1 / CPU_RATES.peer,) * (num_stages - 1))
        schedule = make_for_stages("1f1b", num_stages=num_stages, num_microbatches=8)
        by_flops = balance(flat, num_stages)
        chosen = balance_step(loss, num_stages, links, lengths_of(schedule))
        search = by_step._Search(loss, links, lengths_of(schedule), balance(loss, num_stages))
        places = range(1, len(loss.spine))
        if math.comb(len(places), num_stages - 1) > 20_000:  # of many, those with as much work between any two
            total, count = prefix_sums(loss), 100 if num_stages == 3 else 30
            spread = np.searchsorted(total, np.linspace(0, total[-1], count + 2)[1:-1]).clip(1, len(places))
            places = sorted({*spread.tolist(), *balance(loss, num_stages)})
        every = np.asarray(list(itertools.combinations(places, num_stages - 1)))
        best = min(search.times(every[at : at + 4096]).min() for at in range(0, len(every), 4096))
        time = simulated(loss, chosen, links, schedule)
        assert np.isfinite(best)
        assert time <= simulated(loss, by_flops, links, schedule) * (1 + 1e-9), "equal FLOPs were better"
        assert time <= best * (1 + SLACK) * (1 + 1e-9)


@pytest.mark.long
def test_a_long_loss_is_cut_into_many_stages_in_seconds():
    rng = np.random.default_rng(0)
    loss = randomly(rng, 400)
    schedule = make_for_stages("1f1b", num_stages=16, num_microbatches=64)
    links = Links((0.0,) * 15, (1 / max(loss.boundary_bytes),) * 15)
    begun = time.process_time()
    found = balance_step(loss, 16, links, lengths_of(schedule))
    assert time.process_time() - begun < 30
    assert simulated(loss, found, links, schedule) <= simulated(loss, balance(loss, 16), links, schedule)


WIDTHS = [64, 64, 64, 64, 2, 64, 64]  # an even cut has a boundary of 64 values; the narrow place is at two thirds


def test_a_slow_link_moves_the_cut_to_the_narrow_place_even_where_that_is_uneven():
    loss = products(WIDTHS)
    loss = replace(loss, step=SpineCosts(loss.flops, loss.flops, loss.flops, 0))
    total, wide, lengths = sum(loss.costs), 8 * 64 * 4, lengths_of(make_for_stages("1f1b", num_stages=2, num_microbatches=8))
    crossed = {}
    for cost in (1e-6, 1.0):  # of a wide boundary, in parts of all work
        (cut,) = balance_step(loss, 2, Links((0.0,), (cost * total / wide,)), lengths)
        share = sum(loss.costs[:cut]) / total
        crossed[cost] = loss.boundary_bytes[cut], max(share, 1 - share)
    assert crossed[1e-6][0] == wide
    assert crossed[1e-6][1] <= 0.5 * (1 + 2 * SLACK) + 0.2
    assert crossed[1.0][0] == wide // 32
    assert crossed[1.0][1] > 0.65


@pytest.mark.parametrize(
    ("width", "per_byte", "cut"),
    [
        pytest.param(24, 0.0, 10, id="a send costs nothing"),
        pytest.param(24, 7e-4, 11, id="the sends take what the stages gain"),
        pytest.param(40, 0.0, 11, id="more than twice the bytes"),
    ],
)
def test_more_bytes_cross_for_more_even_stages_if_that_pays(width, per_byte, cut):
    # Cut at 10 the stages take 9.6 and 9.4, at 11 they take 10 and 9, and there fewer bytes cross.
    costs = np.asarray([*[1.0] * 9, 0.6, 0.4, *[1.0] * 9, 0.0, 0.0, 0.0]) / 3
    loss = products([48] * 10 + [width, 16] + [48] * 11)
    assert len(loss.spine) == len(costs)
    each = tuple(costs.tolist())
    loss = replace(loss, step=SpineCosts(each, each, each, 0))
    schedule = make_for_stages("gpipe", num_stages=2, num_microbatches=32)
    links = Links((0.0,), (per_byte,))
    assert simulated(loss, [10], links, schedule) < simulated(loss, [11], links, schedule)
    assert balance_step(loss, 2, links, lengths_of(schedule)) == (cut,)


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

    params = [jnp.ones(shape) / 8 for shape in itertools.pairwise([64, 64, 64, 2, 64, 64, 64])]
    batch = jnp.ones((64, 64))
    owned = []
    for per_byte in (0.0, 1.0):
        monkeypatch.setattr(layout, "stage_times", lambda *_: [2.0, 1.0])
        monkeypatch.setattr(layout, "link_times", lambda _, rate=per_byte: ((0.0,), (rate,)))
        pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=16, balance="time")
        state = pipe.init(params, batch)
        pipe.verify(state, batch)
        owned.append(pipe.engine.layout.owner.count(0))
    assert owned[0] < owned[1] == 3


def cut_of(loss_fn, params, batch, **options):
    """How many layers each stage owns, without compiling anything."""
    given = Options.of(loss_fn, **{"num_stages": 4, "num_microbatches": 4, "devices": jax.devices()[:4]} | options)
    found, _, cut = layout.lay_out(given, optax.sgd(0.1), (params,), batch, None, Programs())
    return found, cut


def scanned(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)
    return jnp.mean(x**2)


LAYERS, ROWS = jax.ShapeDtypeStruct((16, 64, 64), "float32"), jax.ShapeDtypeStruct((128, 64), "float32")


@pytest.mark.parametrize("rate", [1e-12, 1e-9, 1e-7])
def test_a_loop_over_layers_is_cut_however_slow_the_links_and_no_stage_is_one_and_a_half_times_the_mean(rate, monkeypatch):
    monkeypatch.setattr(layout, "links_of", lambda _: Links((0.0,) * 3, (rate, rate / 9, rate)))
    found, cut = cut_of(scanned, LAYERS, ROWS)
    assert len(cut.stages) == 4
    assert max(found.slicing.sizes[0]) <= 1.5 * 16 / 4


def test_a_loop_over_time_between_many_layers_is_no_giant_by_its_flops():
    def loss(params, x):
        state, _ = jax.lax.scan(lambda s, row: (jnp.tanh(s @ params["time"] + row), None), x[0], jnp.stack([x] * 16)[:, 0])
        for w in params["layers"]:
            x = jnp.tanh(x @ w + state)
        return jnp.mean(x**2)

    square = jax.ShapeDtypeStruct((64, 64), "float32")
    _, cut = cut_of(loss, {"time": square, "layers": [square] * 12}, ROWS)
    assert len(cut.stages) == 4


def test_a_checkpoint_around_the_whole_loss_costs_what_it_computes_again():
    def loss(params, x):
        for w in params:
            x = x @ w
        return x.sum()

    params, x = [jax.ShapeDtypeStruct((64, 64), "float32")] * 4, jax.ShapeDtypeStruct((64, 64), "float32")
    plain, again = (trace_loss(each, params, x, None, has_aux=False) for each in (loss, jax.checkpoint(loss)))
    costs = [step_costs(each, Least(), CPU_RATES) for each in (plain, again)]
    assert again.remat is not None
    assert sum(costs[1].total) > 1.2 * sum(costs[0].total)


def test_before_a_boundary_without_gradient_there_may_be_no_derivative():
    def loss(params, x):
        x = jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1] @ params[0])), (0, x))[1]
        for w in params[1:]:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    params = [jax.ShapeDtypeStruct((64, 64), "float32")] * 6
    _, cut = cut_of(loss, params, ROWS, num_stages=2, cut_gradient=[0], devices=jax.devices()[:2])
    assert len(cut.stages) == 2
