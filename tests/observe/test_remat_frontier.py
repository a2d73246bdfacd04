"""The frontier of memory and time: a row for each way to keep residuals, and their picture."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpp
from jaxpp.errors import ArgumentError
from jaxpp.observe.memory.forecast import Frontier, Way
from jaxpp.schedule import simulate
from tests.figures import assert_apart


def loss_fn(params, x):
    for w in params:
        x = jnp.tanh(x @ w) @ w
    return (x**2).mean()


PARAMS, BATCH = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 4, jax.ShapeDtypeStruct((32, 16), jnp.float32)


def forecast(**options):
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=4, **options)
    return pipe, pipe.forecast(PARAMS, BATCH)


def test_each_way_has_a_row_and_less_memory_takes_no_less_time():
    found = forecast(schedule="gpipe")[1]
    frontier = found.frontier()
    ways = {way.remat: way for way in frontier.ways}
    assert set(ways) == {"keep", "least", 0.8, 0.6, 0.4, 0.2, 0.05, "recompute", "offload"}
    assert found.frontier() is frontier
    keep, *line = (way for way in frontier.ways if not way.hosted)
    assert keep.remat == "keep" and keep.slowdown > 1, "what is kept is written and read"
    for more, less in itertools.pairwise(line):
        assert (more.peak >= less.peak, more.slowdown <= less.slowdown, more.repeated <= less.repeated) == (True, True, True)
    # Of 8 equal products, one is not repeated: no backward reads what the first stage sends on.
    assert frontier.products == 3 * 8 * (2 * 32 * 16 * 16)
    assert ways["recompute"].repeated == (8 - 1) * (2 * 32 * 16 * 16)
    assert ways["recompute"].slowdown > 1.1
    lines = str(frontier).splitlines()
    assert [line.split()[0] for line in lines[1:10]] == [repr(way.remat) for way in frontier.ways]


def test_the_rows_are_those_of_pipelines_made_with_each_way():
    ways = {way.remat: way for way in forecast(schedule="gpipe")[1].frontier().ways}
    base = seconds(forecast(schedule="gpipe")[0])
    for remat in ("keep", "recompute", 0.4):
        pipe, found = forecast(schedule="gpipe", remat=remat)
        arrays = max(int(levels.sum(axis=1).max()) for levels in found.liveness.levels.values())
        assert ways[remat].peak == arrays
        codes = pipe.engine.preparer.step(BATCH, None).cuts[0].stages
        assert ways[remat].repeated == 4 * sum(code.repeated for code in codes)
        assert ways[remat].slowdown == pytest.approx(seconds(pipe) / base)


def seconds(pipe):
    """A step on the clock of the schedule lab, by the costs that the stage table has, which count FLOPs and bytes."""
    costs = {"forward": "F", "input_grad": "I", "weight_grad": "W"}
    return simulate(pipe.schedule, **{name: [stage.costs[kind] for stage in pipe.stages] for name, kind in costs.items()}).makespan


def test_what_is_kept_takes_time_to_write_and_to_read():
    """Elementwise work on large arrays takes its bytes: to keep it all is slower than to compute it again."""

    def elementwise(params, x):
        for scale in params:
            x = jnp.tanh(x * scale) + 0.5 * jnp.cos(x)
        return (x**2).mean()

    given = [jax.ShapeDtypeStruct((4096,), jnp.float32)] * 8, jax.ShapeDtypeStruct((256, 4096), jnp.float32)
    pipe = jaxpp.Pipeline(elementwise, optax.sgd(0.1), num_stages=2, num_microbatches=4)
    ways = {way.remat: way for way in pipe.forecast(*given).frontier().ways}
    assert ways["keep"].peak > ways["least"].peak
    assert ways["keep"].slowdown > 1.1 and ways["keep"].repeated == 0


def test_where_the_forward_and_the_backward_are_one_program_nothing_is_repeated():
    alone = {way.remat: way.repeated for way in forecast(fuse=True)[1].frontier().ways}
    apart = {way.remat: way.repeated for way in forecast(fuse=False)[1].frontier().ways}
    assert 0 < alone["recompute"] < apart["recompute"]


def test_forwards_have_no_frontier():
    lm = jaxpp.Forward(lambda params, x: x @ params, num_stages=1)
    found = lm.forecast(jnp.ones((4, 4)), jnp.ones((2, 4)))
    with pytest.raises(ArgumentError, match=r"forecast\.frontier\(\): a step has a frontier"):
        found.frontier()


def test_the_figure_has_a_dot_for_each_way_and_a_line_through_the_shares():
    ways = (
        *(Way("keep", 200 << 20, 1.0, 0, 0), Way("least", 70 << 20, 1.0, 0, 0), Way(0.6, 45 << 20, 1.07, 1e9, 0)),
        *(Way("offload", 22 << 20, 1.0, 0, 55 << 20), Way(0.2, 20 << 20, 1.2, 3e9, 0), Way("recompute", 9 << 20, 1.32, 5e9, 0)),
    )
    figure = Frontier(ways, 1e11).figure()
    axes = figure.axes[0]
    (line,) = axes.lines
    assert line.get_xydata().tolist() == [[70.0, 1.0], [45.0, 1.07], [20.0, 1.2]]
    dots = {dots.get_label(): dots.get_offsets().tolist() for dots in axes.collections}
    assert dots == {str(way.remat): [[way.peak / 2**20, way.slowdown]] for way in ways}
    assert [text.get_text() for text in axes.texts] == [str(way.remat) for way in ways]
    assert axes.get_xlabel() == "arrays of the fullest device at its peak, MiB"
    assert_apart(figure)
