"""Figures of a profile: bars and bytes as they were measured, one scale of time, nothing over anything else."""

import importlib
import itertools
import re

import numpy as np
import pytest

from jaxpp.observe.memory.liveness import MEMORY_KINDS
from jaxpp.observe.profile.profile import Curve, profile_figure
from jaxpp.schedule import Action, Kind, make
from jaxpp.schedule.clock import Bar, Timing, bars, replay
from jaxpp.schedule.draw.pebbles import pebble_pair
from jaxpp.schedule.draw.timeline import Timeline
from jaxpp.schedule.residual_counts import lifetimes, peak
from tests.figures import assert_apart, drawn_bars, key_words, numbers, spans_of, words

MIB = 2**20
LAYERS = (64, 1, 128, 64, 0, 2, 1, 3, 1, 1, 1)
KINDS = len(MEMORY_KINDS)


def titled(measured, simulated):
    return [Timeline("watched, starts inferred", measured), Timeline("each program alone, on devices of its own", simulated)]


def synthetic(name, ranks, microbatches, seed=0):
    """A schedule, its bars as they might be measured, and those of the virtual clock with the same durations."""
    schedule, rng = make(name, num_ranks=ranks, num_microbatches=microbatches), np.random.default_rng(seed)
    usual = {Kind.F: 1.0, Kind.B: 2.1, Kind.I: 1.1, Kind.W: 0.9}
    durations = {a: usual[a.kind] * rng.lognormal(0, 0.15) for a in schedule.order}
    handed = {action: 0.3 + 0.07 * k for k, action in enumerate(schedule.order)}
    hops = [0.1] * (schedule.num_stages - 1)
    timings = Timing(durations, hops, handed), Timing(durations, hops)
    return schedule, *(tuple(bars(schedule.rows, replay(schedule.rows, schedule.stage_to_rank, timing))) for timing in timings)


def curves(schedule, measured, labels=None):
    """Memory in which every residual takes 5 MiB, and all else what ``LAYERS`` says."""
    found, end = [], 1.05 * max(bar.end for bar in measured)
    for rank in range(schedule.num_ranks):
        own = [r for r in lifetimes(measured) if schedule.stage_to_rank[r.stage] == rank]
        times = sorted({0.0, end, *(time for r in own for time in (r.start, r.end))})
        alive = [sum(r.start <= time < r.end for r in own) for time in times]
        levels = tuple(tuple((5 * count if k == 4 else each) * MIB for k, each in enumerate(LAYERS)) for count in alive)
        found.append(Curve(labels[rank] if labels else f"cuda:{rank} (rank {rank})", tuple(times), levels))
    return found


def area(axes, kind, row):
    """How many units of x and y what is drawn of a kind of memory covers in a row, and its lowest and highest y."""
    total, heights = 0.0, [row + 1.0]
    for path in (path for c in axes.collections if c.get_label() == kind for path in c.get_paths()):
        (x, y), (u, v) = path.vertices.T, np.roll(path.vertices, -1, axis=0).T
        if row < y.mean() < row + 1:
            total += abs(float(np.sum(x * v - u * y))) / 2
            heights += y.tolist()
    return total, min(heights), max(heights)


SIZES = [("1f1b", 2, 4), pytest.param("zb-v", 4, 8, marks=pytest.mark.long), pytest.param("1f1b", 8, 32, marks=pytest.mark.long)]
LARGE = [pytest.param(*size, marks=pytest.mark.long) for size in (("gpipe", 2, 24), ("1f1b", 16, 16))]


@pytest.mark.parametrize(("name", "ranks", "microbatches"), SIZES)
def test_measured_above_and_simulated_below_every_action_is_one_bar_at_its_time(name, ranks, microbatches):
    schedule, measured, simulated = synthetic(name, ranks, microbatches)
    for figure in (
        profile_figure("", titled(measured, simulated), curves(schedule, measured), schedule.stage_to_rank),
        pebble_pair("", titled(measured, simulated), schedule.stage_to_rank),
    ):
        for axes, ran in zip(figure.axes, (measured, simulated), strict=False):
            assert drawn_bars(axes) == spans_of(ran)


@pytest.mark.long
def test_all_parts_have_one_scale_of_time_and_begin_below_one_another():
    schedule, measured, simulated = synthetic("1f1b", 4, 8)
    memory = curves(schedule, measured)
    figure = profile_figure("", titled(measured, simulated), memory, schedule.stage_to_rank)
    parts, (end,) = figure.axes[:3], {curve.times[-1] for curve in memory}
    assert {axes.get_xlim() for axes in parts} == {(0, end)}
    assert len({(axes.get_position().x0, axes.get_position().x1) for axes in parts}) == 1
    assert sorted((axes.get_position().y0 for axes in parts), reverse=True) == [axes.get_position().y0 for axes in parts]
    assert [axes.get_xlabel().partition("  (")[0] for axes in parts] == ["", "", "time, ms"]
    slow = [bar._replace(start=1.5 * bar.start, end=1.5 * bar.end) for bar in simulated]
    wider = pebble_pair("", titled(measured, slow), schedule.stage_to_rank)
    assert {axes.get_xlim() for axes in wider.axes[:2]} == {(0, max(bar.end for bar in slow))}


@pytest.mark.parametrize(("factor", "said"), [(0.1, "stretched"), pytest.param(8, "compressed", marks=pytest.mark.long)])
@pytest.mark.long
def test_a_timeline_that_is_far_shorter_or_longer_has_a_scale_of_its_own_which_its_title_says(factor, said):
    schedule, measured, simulated = synthetic("zb-v", 4, 8)
    other = [bar._replace(start=factor * bar.start, end=factor * bar.end) for bar in simulated]
    end, memory = max(bar.end for bar in other), curves(schedule, measured)
    for draw, *more in ((profile_figure, memory), (pebble_pair,)):
        figure = draw("", titled(measured, other), *more, schedule.stage_to_rank)
        first, second, *rest = figure.axes[: 2 + bool(more)]
        assert second.get_xlim() == (0, end) and all(axes.get_xlim() == first.get_xlim() for axes in rest)
        ratio = max(first.get_xlim()[1] / end, end / first.get_xlim()[1])
        assert f"each program alone, on devices of its own (time {said} {ratio:.2g} times)" in words(second)
        assert all(len(axes.get_xticks()) > 1 for axes in (first, second, *rest))
        assert_apart(figure)


def test_each_kind_of_memory_has_the_area_of_its_bytes_over_time_and_lies_on_the_one_before():
    rng, memory = np.random.default_rng(1), []
    for device in range(3):
        times = tuple(sorted([0.0, 4.5, 4.5, *rng.uniform(0, 9, 20).tolist()]))
        levels = tuple(map(tuple, (rng.integers(MIB, size=(23, KINDS)) * rng.integers(2, size=(23, KINDS))).tolist()))
        memory.append(Curve(f"cpu:{device} (rank {device})", times, levels))
    run = [Bar(0, Action(0, Kind.F, 0), 0.0, 10.0)]
    axes = profile_figure("", titled(run, [run[0]._replace(end=12.0)]), memory, [0]).axes[2]
    scale = 0.88 / max(sum(level) for curve in memory for level in curve.levels)
    for row, curve in enumerate(memory):
        ends = (*curve.times[1:], 10.0)
        tops = []
        for k, kind in enumerate(MEMORY_KINDS):
            bytes_over_time = sum((b - a) * level[k] for a, b, level in zip(curve.times, ends, curve.levels, strict=True))
            covered, top, _ = area(axes, kind, row)
            assert covered == pytest.approx(scale * bytes_over_time)
            tops.append(top)
        assert row + 1 - min(tops) == pytest.approx(scale * max(map(sum, curve.levels)))


def test_the_last_bytes_stay_to_the_end_of_the_step_and_no_longer():
    run = [Bar(0, Action(0, Kind.F, 0), 0.0, 3.0)]
    memory = [Curve("cpu:0 (rank 0)", (0.0, 1.0), ((0,) * KINDS, (*(MIB,) * 8, *(0,) * (KINDS - 8))))]
    axes = profile_figure("", titled(run, [run[0]._replace(end=4.0)]), memory, [0]).axes[2]
    (collection,) = (c for c in axes.collections if c.get_label() == "parameters")
    (box,) = (path.get_extents() for path in collection.get_paths())
    assert (box.x0, box.x1) == (1.0, 3.0) and axes.get_xlim() == (0, 4.0)


def test_the_peak_of_each_device_stands_beside_it_even_if_it_lasted_for_no_time():
    run = [Bar(0, Action(0, Kind.F, 0), 0.0, 3.0)]
    short = Curve("cpu:0 (rank 0)", (0.0, 1.0, 1.0), tuple((*(size,) * 8, *(0,) * (KINDS - 8)) for size in (MIB, 3 * MIB // 2, 0)))
    long = Curve("cpu:1 (ranks 1, 2)", (0.0,), ((2**30, *(0,) * (KINDS - 2), 2**29),))
    axes = profile_figure("", titled(run, run), [short, long], [0]).axes[2]
    beside = {text.get_text(): text.get_position()[1] for text in axes.texts}
    assert beside["12 MiB"] < 1 < beside["1.5 GiB"] and beside["peak"] < 0
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cpu:0 (rank 0)", "cpu:1 (ranks 1, 2)"]


def test_the_key_of_the_memory_names_the_kinds_that_there_are_in_the_order_of_the_stack():
    schedule, measured, simulated = synthetic("1f1b", 2, 4)
    memory = [c._replace(levels=tuple((*level[:2], 0, *level[3:]) for level in c.levels)) for c in curves(schedule, measured)]
    figure = profile_figure("", titled(measured, simulated), memory, schedule.stage_to_rank)
    below = {text.get_text() for text in figure.legends[1].get_texts()}
    assert below == {kind for kind in MEMORY_KINDS if kind != "optimizer"}
    assert {"memory of arrays", "peak"} <= set(words(figure.axes[2]))


def test_without_memory_there_is_none_of_it():
    schedule, measured, simulated = synthetic("1f1b", 2, 4)
    figure = profile_figure("heading", titled(measured, simulated), (), schedule.stage_to_rank)
    assert len(figure.axes) == 2
    assert not {"memory of arrays", "peak", *MEMORY_KINDS} & {*key_words(figure), *(w for axes in figure.axes for w in words(axes))}
    assert figure.axes[1].get_xlabel().startswith("time, ms") and figure.legends[0].get_title().get_text() == "heading"
    assert_apart(figure)


def test_each_timeline_has_its_title_and_the_end_of_its_last_action():
    schedule, measured, simulated = synthetic("1f1b", 2, 4)
    ends = [max(bar.end for bar in ran) for ran in (measured, simulated)]
    figure = profile_figure("", titled(measured, simulated), (), schedule.stage_to_rank)
    for axes, end, title in zip(
        figure.axes, ends, ("watched, starts inferred", "each program alone, on devices of its own"), strict=True
    ):
        assert {title, f"{end:.3g} ms"} == set(words(axes)) - {number.get_text() for number in numbers(axes)}


@pytest.mark.parametrize(("name", "ranks", "microbatches"), SIZES)
def test_both_pebble_graphs_say_the_most_residuals_of_each_stage(name, ranks, microbatches):
    schedule, measured, simulated = synthetic(name, ranks, microbatches)
    figure = pebble_pair("", titled(measured, simulated), schedule.stage_to_rank)
    for axes, ran, title in zip(figure.axes, (measured, simulated), ("watched", "each program alone"), strict=False):
        peaks = [str(peak(r for r in lifetimes(ran) if r.stage == stage)) for stage in range(schedule.num_stages)]
        inside = numbers(axes)
        assert [text.get_text().split()[0] for text in axes.texts if text not in inside and text.get_text() != "peak"] == peaks
        assert any(word.startswith(title) for word in words(axes))


@pytest.mark.parametrize(("name", "ranks", "microbatches"), SIZES)
def test_a_pebble_stands_only_where_its_residual_is_alive_and_wherever_one_is(name, ranks, microbatches):
    schedule, measured, simulated = synthetic(name, ranks, microbatches)
    figure = pebble_pair("", titled(measured, simulated), schedule.stage_to_rank)
    for axes, ran in zip(figure.axes, (measured, simulated), strict=False):
        dots = [c.get_offsets().tolist() for c in axes.collections if c.get_label() == "pebbles"]
        assert len(dots) == schedule.num_stages
        residuals, shortest = lifetimes(ran), min(bar.end - bar.start for bar in ran)
        for stage, at in enumerate(dots):
            own = [r for r in residuals if r.stage == stage]
            assert all(sum(r.start <= x < r.end for r in own) for x, _ in at)
            assert all(sum(r.start <= x < r.end for x, _ in at) for r in own if r.end - r.start > 2 * shortest)
            assert len({(round(x, 6), round(y, 6)) for x, y in at}) == len(at)


@pytest.mark.parametrize("draw", [profile_figure, pebble_pair], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("name", "ranks", "microbatches"), [*SIZES, ("zb-v", 1, 1), *LARGE])
def test_all_that_is_written_lies_on_the_page_and_apart(name, ranks, microbatches, draw):
    schedule, measured, simulated = synthetic(name, ranks, microbatches)
    memory = [curves(schedule, measured)] if draw == profile_figure else []
    assert_apart(
        draw(f"{schedule.heading}; measured: 12.3 ms, bubble 20.1%", titled(measured, simulated), *memory, schedule.stage_to_rank)
    )


@pytest.mark.parametrize("draw", [profile_figure, pebble_pair], ids=lambda f: f.__name__)
def test_long_titles_of_narrow_figures_are_folded(draw):
    schedule, measured, simulated = synthetic("1f1b", 2, 4)
    shorter = [bar._replace(start=0.1 * bar.start, end=0.1 * bar.end) for bar in simulated]
    memory = [[]] if draw == profile_figure else []
    assert_apart(draw("", titled(measured, shorter), *memory, schedule.stage_to_rank, width=4))


def test_a_device_of_many_ranks_has_its_name_on_as_many_lines_as_it_takes():
    schedule, measured, simulated = synthetic("1f1b", 2, 4)
    names = [f"cpu:{k} (ranks {', '.join(map(str, range(k, 40, 2)))})" for k in (0, 1)]
    figure = profile_figure("", titled(measured, simulated), curves(schedule, measured, names), schedule.stage_to_rank)
    shown = [label.get_text() for label in figure.axes[2].get_yticklabels()]
    assert [re.sub(r"\s", " ", label) for label in shown] == names
    assert max(len(line) for label in shown for line in label.split("\n")) <= 20
    assert_apart(figure)


@pytest.mark.long
def test_actions_that_take_no_time_on_the_virtual_clock_make_no_figure_wider():
    schedule, measured, simulated = synthetic("zb-h1", 2, 4)
    free = [bar._replace(end=bar.start) if bar.action[:2] == (0, Kind.I) else bar for bar in simulated]
    for draw, *memory in ((profile_figure, ()), (pebble_pair,)):
        wide, wider = (draw("", titled(measured, ran), *memory, schedule.stage_to_rank).get_figwidth() for ran in (simulated, free))
        assert wider <= 1.1 * wide


def test_the_kinds_that_can_be_large_differ_in_grey():
    colours = importlib.import_module("jaxpp.observe.profile.profile").COLOURS
    to_rgb = importlib.import_module("matplotlib.colors").to_rgb
    greys = {
        kind: sum(w * c for w, c in zip((0.299, 0.587, 0.114), to_rgb(colours[k]), strict=True))
        for k, kind in enumerate(MEMORY_KINDS)
    }
    large = sorted(greys[kind] for kind in ("parameters", "optimizer", "gradients", "residuals", "rest"))
    assert all(lighter - darker > 0.1 for darker, lighter in itertools.pairwise(large))
    assert len(set(colours)) == len(MEMORY_KINDS)
