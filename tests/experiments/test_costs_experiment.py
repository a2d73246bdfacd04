"""Schedules made to measure on random cost tables: no longer than the best with a name, within the same room, and far less idle."""

import itertools
import json
import statistics

import pytest
from PIL import Image

from experiments.costs import schedules
from experiments.costs.main import Config, run, show
from jaxpp.schedule import simulate


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return run(Config(tables=2, small=True, out=tmp_path_factory.mktemp("out") / "figures"))


@pytest.mark.long
def test_a_small_run_prints_its_table_draws_and_is_a_line_of_json(small):
    lines = show(small).splitlines()
    assert lines[0].split("  ")[0] == "stages on each rank"
    assert lines[-1].split() == ["longer", "than", "the", "named", "2", "0", "0", "0"]
    assert len(small.files) == 4
    for file in small.files:
        with Image.open(file) as image:
            image.verify()
    assert [row[0] for row in json.loads(small.to_json())["found"]] == [0, 1]


def test_a_table_is_known_by_its_number_and_some_named_schedule_fits():
    for seed in range(20):
        costs = schedules.random_table(seed)
        assert costs == schedules.random_table(seed)
        fitting = schedules.named_that_fit(costs)
        assert fitting
        assert all(max(schedules.most_held(schedule, costs.residuals)) <= costs.room for schedule in fitting.values())
        best = schedules.best_named(costs)[1]
        assert costs.idle(best) >= schedules.unavoidable(costs) - 1e-9
        assert costs.idle(best) == pytest.approx(sum(costs.simulated(best).idle))


def test_what_is_held_is_counted_as_the_clock_counts_it():
    for seed in range(8):
        for _, schedule in schedules.named(schedules.random_table(seed)):
            ones = [1] * schedule.num_stages
            assert schedules.most_held(schedule, ones) == simulate(schedule).peak_residuals


@pytest.mark.slow
def test_of_many_tables_none_is_longer_and_the_mean_idle_time_is_a_fifth_less():
    found = [schedules.compare_one(seed) for seed in range(40)]  # small tables leave less to gain
    for meaning in range(len(schedules.MEANINGS)):
        ratios = schedules.ratios(found, meaning)
        assert max(ratios) <= 1 + 1e-9
        assert statistics.mean(ratios) < 0.8, schedules.MEANINGS[meaning]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 25))
def test_of_all_tables_none_is_longer_and_what_is_made_stays_within_its_room(first):
    for seed in range(first, first + 25):
        costs = schedules.random_table(seed)
        best = schedules.best_named(costs)[1]
        held = schedules.most_held(best, costs.residuals)
        for room in (costs.room, max(held), held):
            made = costs.synthesised(room)
            rooms = room if isinstance(room, tuple) else itertools.repeat(room, costs.ranks)
            assert all(peak <= own + 1e-6 for peak, own in zip(schedules.most_held(made, costs.residuals), rooms, strict=True))
            assert costs.idle(made) <= costs.idle(best) + 1e-9 * costs.busy
