"""Figures: every action drawn once, every live residual a pebble, a GIF that can be read, a clear word without matplotlib."""

import importlib
import importlib.util
import io
import itertools
import subprocess
import sys
import traceback
from collections import Counter

import numpy as np
import pytest
from matplotlib.text import Text
from PIL import Image

from jaxpp.schedule import SCHEDULES, Action, Kind, make, simulate
from jaxpp.schedule.clock import Bar
from jaxpp.schedule.draw import canvas
from jaxpp.schedule.draw.canvas import has_matplotlib
from jaxpp.schedule.draw.pebbles import Lane, lanes, pebble_gif, pebbles
from jaxpp.schedule.draw.timeline import Timeline, timeline
from jaxpp.schedule.residual_counts import Residual, counts, lifetimes, peak, places
from tests.figures import assert_apart, drawn_bars, key_words, numbers, spans_of

SMALL = make("1f1b", num_ranks=2, num_microbatches=4)
LARGE = [pytest.mark.long]
EVERY = [pytest.param(name, marks=LARGE * (name not in ("1f1b", "zb-v", "dualpipe-v"))) for name in SCHEDULES]
"""All schedules; three of them, of one stage a rank and of two, with B, with I and W, and with all, in the short tier."""


def drawn(bars, owners, heading="", width=None):
    return timeline(Timeline("", bars), owners, heading, width)


def pictured(name, ranks=4, microbatches=8, **costs):
    """A simulation, its bars and owners."""
    run = simulate(make(name, num_ranks=ranks, num_microbatches=microbatches), **costs)
    drawing = run.drawing()
    return run, drawing.bars, drawing.stage_to_rank


def dots(figure):
    """Centres of the pebbles."""
    return [at for c in figure.axes[0].collections if c.get_label() == "pebbles" for at in c.get_offsets().tolist()]


def brute(residuals, at):
    return sum(residual.start <= at < residual.end for residual in residuals)


def test_every_copy_to_the_host_and_back_is_a_line_at_its_time_in_the_row_of_its_rank():
    schedule = make("gpipe", num_ranks=4, num_microbatches=8)
    run = simulate(schedule, offload=1, copy=[0.75, 0.5, 0.25, 0.5])
    axes = run.figure().axes[0]
    for label, times in (("copies to the host", [c.out for c in run.copies]), ("copies back", [c.back for c in run.copies])):
        boxes = [path.get_extents() for c in axes.collections if c.get_label() == label for path in c.get_paths()]
        assert all(int(box.y0) + 0.06 < box.y0 < box.y1 <= int(box.y0) + 0.94 for box in boxes)
        stages = [each.offloaded.forward.stage for each in run.copies]
        assert Counter((int(box.y0), round(box.x0, 6), round(box.x1, 6)) for box in boxes) == Counter(
            (stage, *time) for stage, time in zip(stages, times, strict=True)
        )
    assert not [c for c in simulate(schedule).figure().axes[0].collections if "copies" in c.get_label()]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("make_figure", [drawn, pebbles])
def test_every_action_is_one_bar_at_its_time(name, make_figure):
    _, bars, owners = pictured(name, forward=1.5, input_grad=1, weight_grad=0.5, transfer=0.25)
    assert drawn_bars(make_figure(bars, owners, "heading").axes[0]) == spans_of(bars)


def test_a_timeline_has_a_row_a_rank_with_rank_0_on_top():
    _, bars, owners = pictured("zb-v")
    axes = drawn(bars, owners).axes[0]
    boxes = [path.get_extents() for c in axes.collections if c.get_label()[0] in "FIW" for path in c.get_paths()]
    assert Counter((round(box.x0, 6), int(box.y0)) for box in boxes) == Counter((bar.start, bar.rank) for bar in bars)
    low, high = axes.get_ylim()
    assert low > high


DRAWN = [
    pytest.param(name, size, kind, marks=LARGE * (max(size) >= 32 or name in ("naive", "gpipe")))
    for name, size, kind in itertools.product(
        ["naive", "gpipe", "1f1b", "interleaved", "zb-v"], [(2, 2), (4, 8), (8, 32)], ["figure", "pebble_figure"]
    )
]


@pytest.mark.parametrize(("name", "size", "kind_of_figure"), DRAWN)
def test_numbers_have_one_size_lie_in_bars_and_apart_and_no_figure_is_wider_than_a_page(name, size, kind_of_figure):
    figure = getattr(make(name, num_ranks=size[0], num_microbatches=size[1]), kind_of_figure)()
    assert figure.get_figwidth() * 96 <= 900
    axes = figure.axes[0]
    written = numbers(axes)
    assert len({text.get_size() for text in written}) <= 1
    paths = (
        path for c in axes.collections if c.get_label()[0] in "FBIW" or c.get_label().endswith(" pebbles") for path in c.get_paths()
    )
    bars = [axes.transData.transform_bbox(path.get_extents()) for path in paths]
    boxes = [text.get_window_extent() for text in written]
    for k, box in enumerate(boxes):
        middle = (box.y0 + box.y1) / 2  # a box of text is higher than its digits
        assert sum(bar.contains(box.x0, middle) and bar.contains(box.x1, middle) for bar in bars) == 1
        assert not any(box.overlaps(other) for other in boxes[:k])


def test_a_kind_whose_bars_are_too_narrow_has_no_numbers_and_the_axis_says_so():
    def told(figure):
        return len(numbers(figure.axes[0])), figure.axes[0].get_xlabel()

    assert told(SMALL.figure()) == (16, "time  (numbers: microbatches)")
    narrow = make("1f1b", num_ranks=8, num_microbatches=32)
    assert told(narrow.figure()) == (8 * 32, "time  (numbers: microbatches; no room in F)")
    assert told(narrow.figure(width=16)) == (2 * 8 * 32, "time  (numbers: microbatches)")
    assert told(make("naive", num_ranks=8, num_microbatches=64).figure()) == (0, "time")


def test_a_figure_is_as_wide_as_it_is_asked_to_be():
    for width in (7, 22):
        assert SMALL.figure(width=width).get_figwidth() == pytest.approx(width)
        assert SMALL.pebble_figure(width=width).get_figwidth() == pytest.approx(width)


def test_a_long_bar_has_no_larger_number_than_the_usual_ones_and_a_short_one_takes_no_lines_from_the_others():
    bars = [Bar(0, Action(0, Kind.F, 33), k, k + 1) for k in range(50)]
    bars += [Bar(0, Action(0, Kind.F, 33), 50, 60), Bar(0, Action(0, Kind.F, 33), 60, 60)]
    axes = drawn(bars, [0]).axes[0]
    (collection,) = (c for c in axes.collections if c.get_label() == "F 0")
    assert len(numbers(axes)) == 51
    assert set(collection.get_linewidths()[:51]) == {0.7} and collection.get_linewidths()[51] == 0


@pytest.mark.long
def test_bars_of_few_pixels_are_strong_enough_to_be_seen():
    figure = make("zb-v", num_ranks=8, num_microbatches=64).pebble_figure()
    lanes_of = dict(zip([t.get_text() for t in figure.axes[0].get_yticklabels()], figure.axes[0].get_yticks(), strict=True))
    out = io.BytesIO()
    figure.savefig(out, format="png")
    picture = np.asarray(Image.open(out).convert("L"), dtype=int)
    left, right = (round(x) for x in figure.axes[0].get_window_extent().intervalx)
    for name, middle in lanes_of.items():
        y = len(picture) - round(figure.axes[0].transData.transform((0, middle))[1])
        assert picture[y, left:right].min() < 200, name  # idle is 239, the palest yellow 240


def test_bars_that_take_no_time_make_a_timeline_no_wider():
    _, bars, owners = pictured("1f1b", ranks=2, microbatches=6)
    instant = [Bar(0, Action(0, Kind.W, k), 15, 15) for k in range(4)]
    assert drawn([*bars, *instant], owners).get_figwidth() == drawn(bars, owners).get_figwidth()


def test_later_stages_of_a_rank_are_underlined_once_more_each():
    three = make("interleaved", num_ranks=2, num_microbatches=4, stages_per_rank=3)
    lines = [c for c in three.figure().axes[0].collections if c.get_label() == "underline"]
    assert sum(len(c.get_paths()) for c in lines) == 2 * 2 * 4 * (0 + 1 + 2)


def test_a_residual_lives_from_the_start_of_f_to_the_end_of_the_last_of_its_backward():
    bars = [
        Bar(0, Action(0, Kind.F, 0), 0, 1),
        Bar(0, Action(0, Kind.F, 1), 1, 2),
        Bar(0, Action(0, Kind.I, 0), 5, 6),
        Bar(0, Action(0, Kind.B, 1), 6, 8),
        Bar(0, Action(0, Kind.W, 0), 8, 9.5),
    ]
    assert lifetimes(bars) == (Residual(0, 0, 0, 9.5), Residual(0, 1, 1, 8))


def test_residuals_of_1f1b_are_those_counted_by_hand():
    _, bars, _ = pictured("1f1b", ranks=2, microbatches=4)
    first, last = ([r for r in lifetimes(bars) if r.stage == stage] for stage in (0, 1))
    assert [brute(first, t) for t in range(15)] == [1, *[2] * 11, 1, 1, 1]
    assert [brute(last, t) for t in range(15)] == [0, *[1] * 12, 0, 0]
    assert counts(first) == ((0, 1, 1), (1, 12, 2), (12, 15, 1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_most_residuals_of_each_rank_are_those_of_the_simulation(name):
    run, bars, owners = pictured(name, forward=1, input_grad=1.25, weight_grad=0.75, transfer=0.5)
    residuals = lifetimes(bars)
    assert run.peak_residuals == tuple(peak(r for r in residuals if owners[r.stage] == rank) for rank in range(4))


@pytest.mark.parametrize("name", EVERY)
def test_each_column_of_a_stage_has_as_many_pebbles_as_residuals_are_alive(name):
    run, bars, owners = pictured(name)
    figure = pebbles(bars, owners, "")
    axes, residuals = figure.axes[0], lifetimes(bars)
    names = [label.get_text() for label in axes.get_yticklabels()]
    tops = [tick - 0.5 for tick in axes.get_yticks()]
    assert len({(round(x, 3), round(y, 3)) for x, y in dots(figure)}) == len(dots(figure))
    columns = Counter()
    for x, y in dots(figure):
        row = max(k for k, top in enumerate(tops) if top + 1 <= y)
        assert y < tops[row] + 2 and names[row].startswith("F")
        columns[int(names[row][1:]), int(x)] += 1
    for stage in range(len(owners)):
        own = [r for r in residuals if r.stage == stage]
        for t in range(int(run.makespan)):
            assert columns[stage, t] == brute(own, t + 0.5)


def test_more_pebbles_than_can_be_counted_are_a_number_on_a_darker_ground():
    _, bars, owners = pictured("gpipe", ranks=2, microbatches=12)
    figure = pebbles(bars, owners, "")
    assert not dots(figure)
    grounds = {c.get_label(): c for c in figure.axes[0].collections if c.get_label().endswith(" pebbles")}
    assert len(grounds["12 pebbles"].get_paths()) == 1
    assert grounds["12 pebbles"].get_facecolor()[0].sum() < grounds["1 pebbles"].get_facecolor()[0].sum()


def test_no_two_living_residuals_share_a_place_and_places_are_as_few_as_can_be():
    _, bars, _ = pictured("v-half", ranks=4, microbatches=9)
    placed = places(lifetimes(bars))
    assert 1 + max(place for _, place in placed) == max(brute(lifetimes(bars), r.start) for r in lifetimes(bars))
    for k, (one, place) in enumerate(placed):
        for other, taken in placed[:k]:
            assert place != taken or other.end <= one.start or one.end <= other.start


def test_rows_of_the_pebble_graph_follow_the_data():
    _, bars, _ = pictured("zb-h1", ranks=2)
    blocks = [(Kind.F, 0), (Kind.F, 1), (Kind.I, 1), (Kind.I, 0), (Kind.W, 1), (Kind.W, 0)]
    assert tuple(lanes(bars)) == tuple(Lane((kind,), stage) for kind, stage in blocks)
    _, mixed, owners = pictured("dualpipe-v", ranks=2)
    assert Lane((Kind.B, Kind.I), 3) in lanes(mixed)
    ticks = pebbles(mixed, owners, "").axes[0].get_yticks()
    assert list(ticks) == sorted(set(ticks))


def test_the_part_after_until_is_hidden():
    _, bars, owners = pictured("1f1b", ranks=2)
    (curtain,) = pebbles(bars, owners, "", until=5).axes[0].patches
    assert curtain.get_x() == 5 and curtain.get_facecolor() == (1, 1, 1, 1)
    assert not pebbles(bars, owners, "").axes[0].patches


@pytest.mark.long
def test_the_gif_has_a_frame_a_slot_and_each_shows_more(tmp_path):
    SMALL.pebble_gif(tmp_path / "small.gif")
    with Image.open(tmp_path / "small.gif") as image:
        assert image.n_frames == 15
        inks = []
        for frame in range(image.n_frames):
            image.seek(frame)
            inks.append(sum(image.convert("L").histogram()[:250]))
    assert inks == sorted(set(inks))


def test_the_gif_of_a_long_schedule_has_no_more_than_120_frames(tmp_path, monkeypatch):
    grabbed = []
    writer = importlib.import_module("matplotlib.animation").PillowWriter
    monkeypatch.setattr(writer, "grab_frame", lambda self: grabbed.append(1))
    monkeypatch.setattr(writer, "finish", lambda self: None)
    _, bars, owners = pictured("naive", ranks=8, microbatches=16)
    pebble_gif(bars, owners, "", tmp_path / "long.gif")
    assert 120 <= len(grabbed) <= 120 + 12


def test_costs_that_are_no_multiples_of_anything_and_costs_of_nothing_can_be_drawn():
    for costs in ({"forward": 0.1234567, "input_grad": 3**0.5}, {"forward": 0, "input_grad": 0, "weight_grad": 0}):
        run, *_ = pictured("zb-v", ranks=2, microbatches=4, **costs)
        for figure in (run.figure(), run.pebble_figure()):
            figure.savefig(io.BytesIO(), format="png")


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"),
    [pytest.param("1f1b", 16, 64, marks=LARGE), ("gpipe", 2, 4), ("dualpipe-v", 2, 4), ("zb-v", 1, 1)],
)
def test_all_that_is_written_lies_on_the_page_and_apart(name, ranks, microbatches):
    run, *_ = pictured(name, ranks, microbatches)
    for figure in (run.figure(), run.pebble_figure()):
        assert_apart(figure)
        assert run.heading in " ".join(text.get_text().replace("\n", " ") for text in figure.findobj(Text))
        assert {"F forward", "idle"} <= set(key_words(figure))


def test_a_notebook_shows_svg_with_matplotlib_and_text_without(monkeypatch):
    assert has_matplotlib()
    assert "<svg" in SMALL._repr_html_() and "<svg" in simulate(SMALL)._repr_html_()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert SMALL._repr_html_().startswith("<pre>1f1b: 2 ranks")


def test_without_matplotlib_a_figure_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # it cannot be imported
    canvas._picture_class.cache_clear()
    for draw in (SMALL.figure, simulate(SMALL).figure, SMALL.pebble_figure, lambda: SMALL.pebble_gif(tmp_path / "x.gif")):
        with pytest.raises(
            ImportError, match=r'^figures need matplotlib.*pip install -e "\.\[figures\]" in the checkout of jaxpp$'
        ) as error:
            draw()
        told = "".join(traceback.format_exception(error.value))
        assert (
            "another exception" not in told and "direct cause" not in told and "canvas" not in told
        )  # one error, at the user's line


def test_drawing_leaves_no_pyplot_behind():
    code = "import sys, jaxpp.schedule as s; s.make('gpipe', num_ranks=2).figure(); print('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
