"""What a search tells: its table, one sentence for each choice, and the figure of time against memory."""

import re

import numpy as np
import pytest

from jaxpp.observe.evaluate import alone, parts, step_seconds
from jaxpp.schedule import SCHEDULES
from jaxpp.schedule.draw.canvas import group_colour
from jaxpp.tables import time_in_words
from jaxpp.tuner.search import Limits, Space, search
from jaxpp.tuning import Tuning
from tests.tuner.virtual_machine import MIB, Virtual

CHOICES = ["Schedule", "Microbatches", "Stages a rank", "Remat"]


def findings(machine=None, space=None, hbm=None, **limits):
    machine = machine or Virtual()
    found = search(machine, space or Space(64, (4,)), Limits(hbm and hbm * MIB, **limits), saves=True)
    return Tuning(found, {"has_aux": False}, hbm and hbm * MIB, {}, machine.peaks, machine.remark, None, None)


def choices(told):
    """The sentences about single choices, by what they are about."""
    return {line.partition(":")[0]: line for line in told.why if re.match(r"[A-Z][a-z ]+: ", line)}


def test_every_choice_is_explained_in_one_sentence():
    for told in (findings(), findings(hbm=60), findings(Virtual(seed=2, dispatch=0.1), hbm=45), findings(space=Space(64, (2, 4)))):
        said = choices(told)
        assert list(said)[:4] == CHOICES
        best = told.found.best.candidate
        values = (best.schedule.name, best.schedule.num_microbatches, best.stages_per_rank, repr(best.remat))
        for line, value in zip(said.values(), values, strict=False):
            assert line.endswith(".") and ". " not in line and line.partition(": ")[2].startswith(str(value))


def test_a_neighbour_that_takes_longer_is_told_with_the_part_that_grows_most():
    told = findings(Virtual(dispatch=0.05, transfer=0.0))
    best = told.found.best
    above = [row for row in told.rows if row.candidate.schedule.name == best.candidate.schedule.name]
    row = next(row for row in above if row.candidate.schedule.num_microbatches == 2 * best.candidate.schedule.num_microbatches)
    costs = Virtual(dispatch=0.05, transfer=0.0).costs
    now, then = (parts(each.candidate.schedule, costs(each.candidate.family)) for each in (best, row))
    assert then.dispatch - now.dispatch == max(b - a for a, b in zip(now, then, strict=True))
    dispatch = f"waiting for dispatch: {time_in_words(then.dispatch)} instead of {time_in_words(now.dispatch)}"
    more = row.predicted / best.predicted - 1
    assert f"with {row.candidate.schedule.num_microbatches} a step would take {100 * more:.0f}% more ({dispatch})" in told.why[2]


@pytest.mark.long
def test_the_parts_of_a_step_sum_to_it():
    for machine in (Virtual(seed=1), Virtual(seed=2, capacity=2.0, after=0.0), Virtual(seed=3, dispatch=0.2, copy=1.0)):
        for row in search(machine, Space(16, (4,), remat=("least", "offload"))).rows:
            costs = machine.costs(row.candidate.family)
            found = parts(row.candidate.schedule, costs, row.candidate.offload)
            assert sum(found) == pytest.approx(row.predicted) and min(found) >= 0
            assert row.predicted == step_seconds(row.candidate.schedule, costs, row.candidate.offload)
            assert (found.sharing == 0) or machine.capacity
            assert (found.copies == 0) or row.candidate.remat == "offload"


def test_what_does_not_fit_is_told_with_its_bytes():
    told = findings(Virtual(transfer=0.0), Space(64, (4,), num_microbatches=(4, 8)), hbm=60)
    assert told.found.best.candidate.remat != "least"
    (line,) = [line for line in told.why if line.startswith("Remat: ")]
    assert re.search(r"with 'least' a step would take .*, but a device would hold [\d.]+ MiB of 60 MiB", line)
    assert "nothing needs to be saved" in choices(findings(hbm=500))["Remat"]
    assert "no hbm" in choices(findings())["Remat"]


def test_one_device_alone_is_told_where_it_would_be_faster():
    slow = Virtual(transfer=20.0, residuals=0)
    told = findings(slow)
    best = told.found.best
    seconds = alone(best.candidate.schedule, slow.costs(best.candidate.family))
    assert seconds < best.predicted
    assert told.why[-1] == (
        f"One device alone would be faster by the same costs ({time_in_words(seconds)} a step): pass num_ranks=(1, 4) to have it "
        "looked at."
    )
    assert re.fullmatch(r"One device alone would take 3.\d times as long, by the same costs.", findings().why[-1])
    both = findings(Virtual(transfer=20.0), Space(64, (1, 4)))
    assert both.found.best.candidate.schedule.num_ranks == 1
    assert re.search(r"Ranks: 1; with 4 \(.*\) a step would take .* times as long \(transfers", " ".join(both.why))


def test_where_nothing_differs_in_one_choice_alone_the_others_are_told_with_what_else_differs():
    said = choices(findings(space=Space(64, (4,), ("naive", "v-min"))))
    assert said["Schedule"].startswith("Schedule: v-min; with naive (1 microbatch) a step would take ")
    assert said["Stages a rank"].startswith("Stages a rank: 2; with 1 (naive, 1 microbatch) a step would take ")


def test_a_prediction_that_was_wrong_is_told():
    class Biased(Virtual):
        def step(self, candidate):
            return super().step(candidate) * (1.5 if len(self.ran) == 1 else 1.1)

    told = findings(Biased())
    best = told.found.best
    assert best == told.rows[1]
    assert f"{time_in_words(best.measured)} when it ran (the prediction is 9.1% off), the fastest of 3" in told.why[0]
    row = told.rows[0]
    times = f"{time_in_words(row.measured)} instead of {time_in_words(best.measured)}"
    assert f"when it ran ({times}), though by prediction it would take less" in " ".join(told.why)


def test_where_both_ran_the_sentences_say_what_the_column_says():
    class Slower(Virtual):
        def step(self, candidate):
            return super().step(candidate) * (1.25 if len(self.ran) > 1 else 1.0)

    told = findings(Slower(), Space(64, (4,), ("1f1b", "gpipe"), (1,), (8,)))
    best, other = told.measured
    assert f"{best.measured / best.predicted:.3f} {other.measured / other.predicted:.3f}" == "1.000 1.250"
    more = f"{100 * (other.measured / best.measured - 1):.0f}% more"
    times = f"{time_in_words(other.measured)} instead of {time_in_words(best.measured)}"
    assert f"with 1f1b a step took {more} when it ran ({times})." in choices(told)["Schedule"]
    assert "cannot tell" not in told.why[0]
    assert f"{time_in_words(best.measured)} ±0%" in str(told) and "the median of its steps, ± the middle half" in str(told)


def test_what_differs_by_less_than_steps_do_is_not_told_apart():
    space = Space(64, (4,), ("1f1b", "gpipe"), (1,), (8,))
    told = findings(Virtual(noise=(0.9, 0.95, 1.0, 1.05, 1.1, 2.0)), space)
    best, other = told.measured
    assert best.middle == pytest.approx((best.measured * 0.9625 / 1.025, best.measured * 1.0875 / 1.025))
    assert told.why[0].endswith(f", too near to the one with {other.candidate.schedule.name} to tell them apart.")
    assert f"{time_in_words(best.measured)} ±6%" in str(told)
    times = f"{time_in_words(other.measured)} instead of {time_in_words(best.measured)}"
    assert f"a step took {times} when it ran, which is too near to tell them apart" in choices(told)["Schedule"]


@pytest.mark.parametrize(("ratio", "words"), [(1.0002, "as long"), (1.04, "4% more"), (3.0, "3 times as long")])
def test_ratios_are_told_as_people_say_them(ratio, words, monkeypatch):
    best = findings().found.best.predicted
    monkeypatch.setattr("jaxpp.tuner.findings.alone", lambda *_: ratio * best)
    assert findings().why[-1] == f"One device alone would take {words}, by the same costs."


def test_the_table_of_many_has_the_best_of_each_schedule_and_says_so():
    told = findings()
    lines = str(told).splitlines()
    head, rows = lines[0], lines[1 : lines.index("")]
    names = [row.removeprefix(">").split()[0] for row in rows]
    assert head.split() == "schedule microbatches stages a rank balance remat predicted measured peak of each device".split()
    assert set(names) == set(SCHEDULES) and rows[0].startswith(">")
    assert [name for name, row in zip(names, rows, strict=True) if row.startswith(">")] == [told.best["schedule"]]
    assert f"{len(told.rows)} candidates of {len(told.found.costs)} families, 3 of them run" in str(told)
    assert "tuning.rows has all" in str(told)
    few = findings(space=Space(64, (4,), ("1f1b", "gpipe")))
    assert len(few.rows) == 10 and "tuning.rows has all" not in str(few)
    assert str(few).splitlines()[1].split()[-5:] == [*str(few).splitlines()[1].split()[-5:-1], "MiB"]


def test_what_was_left_out_or_not_looked_at_is_told():
    told = findings(Virtual(most_stages=4))
    assert "left out: 8 stages, 2 microbatches; 8 stages, 4 microbatches; " in str(told)
    assert "...: Pipeline(...): too many stages." in " ".join(str(told).split())
    assert "the file of results cannot be read" in str(findings(Virtual(remark="the file of results cannot be read")))
    clock = iter(range(1000))
    told = findings(seconds=3.0, clock=lambda: next(clock))
    assert told.found.unseen and "not looked at, because the budget was spent: " in str(told)


def test_the_best_options_are_those_of_a_pipeline_with_what_all_candidates_share():
    told = findings()
    row = told.found.best.candidate
    sizes = {"num_stages": row.schedule.num_stages, "num_microbatches": row.schedule.num_microbatches}
    assert told.best == {"has_aux": False, **sizes, "schedule": row.schedule.name, "remat": "least", "balance": "flops"}


@pytest.mark.long
def test_the_page_has_the_table_the_reasons_and_the_picture():
    told = findings(hbm=60)
    page = told._repr_html_()
    assert page.count("<svg") == 1 and page.count("<table>") == 1 and "Microbatches: " in page and "remat" in page


def collection(axes, label):
    return [made for made in axes.collections if made.get_label() == label]


def lines(axes, label):
    return [line for line in axes.lines if line.get_label() == label]


@pytest.mark.long
def test_the_figure_has_a_mark_for_each_candidate_the_frontier_what_ran_and_the_memory():
    told = findings(Virtual(seed=4), hbm=40)
    figure = told.figure()
    axes, rows = figure.axes[0], told.with_memory
    assert all(row.peaks for row in rows) and len(rows) == len(told.rows)
    places = {row.candidate: (row.peak / MIB, row.predicted) for row in rows}
    kinds = {(row.candidate.schedule.name, row.candidate.remat) for row in rows}
    assert len({remat for _, remat in kinds}) == 3
    for name, remat in kinds:
        own = [place for each, place in places.items() if (each.schedule.name, each.remat) == (name, remat)]
        (marks,) = collection(axes, f"{name}, {remat}")
        np.testing.assert_allclose(sorted(map(tuple, marks.get_offsets().tolist())), sorted(own))
        colour = bytes.fromhex(group_colour(list(SCHEDULES).index(name))[1:])
        assert tuple(round(255 * part) for part in marks.get_facecolor()[0][:3]) == tuple(colour)
    drawn = sum(len(made.get_offsets()) for made in axes.collections if ", " in str(made.get_label()))
    assert drawn == len(rows)
    (line,) = lines(axes, "frontier")
    corners = sorted(places.values())
    undominated = [(x, y) for x, y in corners if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in corners)]
    np.testing.assert_allclose(list(zip(*line.get_data(), strict=True)), sorted(set(undominated)))
    assert sorted(float(mark.get_ydata()[0]) for mark in lines(axes, "ran")) == pytest.approx(
        sorted(r.measured for r in told.measured)
    )
    (room,) = lines(axes, "hbm")
    assert room.get_xdata()[0] == 40
    (ring,) = collection(axes, "the choice")
    assert tuple(ring.get_offsets()[0]) == pytest.approx(places[told.found.best.candidate])
    assert axes.get_xlabel() == "peak of the fullest device, MiB" and axes.get_ylabel() == "a step, s"


@pytest.mark.parametrize(
    ("hbm", "work"), [(60, 8.0), *(pytest.param(*case, marks=pytest.mark.long) for case in ((None, 8.0), (45, 0.05)))]
)
def test_everything_that_is_written_in_the_figure_lies_on_the_page_and_apart(hbm, work):
    told = findings(Virtual(seed=4, work=work), hbm=hbm)
    figure = told.figure()
    figure.canvas.draw()
    axes = figure.axes[0]
    (low, high), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    ticks = [tick for tick in axes.get_xticklabels() if low <= tick.get_position()[0] <= high]
    ticks += [tick for tick in axes.get_yticklabels() if bottom <= tick.get_position()[1] <= top]
    texts = [*ticks, *figure.texts, *(text for each in figure.axes for text in each.texts), axes.xaxis.label, axes.yaxis.label]
    spans = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    for k, (name, one) in enumerate(spans):
        assert figure.bbox.x0 <= one.x0 and one.x1 <= figure.bbox.x1 and figure.bbox.y0 <= one.y0 and one.y1 <= figure.bbox.y1, name
        assert not [(name, other) for other, span in spans[:k] if one.overlaps(span)]
    assert len(ticks) >= 4


def test_a_time_is_written_with_three_digits():
    assert [time_in_words(t) for t in (0.0000123, 0.00123, 0.0123, 0.123, 1.234, 123.4, 12345)] == [
        *("0.0123 ms", "1.23 ms", "12.3 ms", "123 ms", "1.23 s", "123 s", "12,345 s"),
    ]
