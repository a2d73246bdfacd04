"""The devices as a machine for the search: what they say of families and candidates, and what they remember."""

import dataclasses
import functools
import itertools
import json
import math
import os
import secrets

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.engine.engine import Engine
from jaxpp.errors import ArgumentError, JaxppError
from jaxpp.observe.evaluate import step_seconds
from jaxpp.runtime.compile import Programs
from jaxpp.schedule import make
from jaxpp.schedule.action import Kind
from jaxpp.tuner.machine import (
    Devices,
    _Pace,
    _Results,
    _Steps,
    fitted,
    one_at_a_time,
    plain_schedule,
)
from jaxpp.tuner.search import Candidate, Family
from tests.models import gpt_case, mlp_case

CASE = mlp_case(batch_size=12, width=8, depth=7)
ADAM = optax.adam(1e-2)


def devices(keep, case=CASE, made=None, optimizer=ADAM, **more):
    """A machine of four ranks; of the model's own initial parameters unless others are given."""
    given = {"devices": jax.devices()[:4], "options": {"has_aux": True}, "keep": keep, **more}
    return Devices(case.loss_fn, optimizer, case.init if made is None else made, case.batch, case.key, **given)


@pytest.fixture(autouse=True)
def _briefly(monkeypatch):
    """No test looks at how exact the times are."""
    for name in ("_MEASURED", "_TIMED"):
        monkeypatch.setattr(f"jaxpp.tuner.machine.{name}", 0.01)


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return devices(tmp_path_factory.mktemp("kept"))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(Family(4, 4, "least", "flops", False), id="full backwards"),
        pytest.param(Family(4, 4, "least", "flops", True), id="split backwards", marks=pytest.mark.long),
        pytest.param(Family(8, 4, "recompute", "flops", False), id="two stages a rank, recomputed", marks=pytest.mark.long),
    ],
)
def test_costs_have_a_number_for_each_stage(machine, family):
    costs = machine.costs(family)
    kinds = {Kind.F, Kind.I, Kind.W} if family.splits else {Kind.F, Kind.B}
    for table in (costs.actions, costs.dispatch):
        assert set(table) == kinds
        assert {len(stages) for stages in table.values()} == {family.num_stages}
    assert all(seconds > 0 for seconds in (*costs.dispatch[Kind.F], costs.before, costs.after_dispatch))
    assert all(seconds >= 0 for stages in costs.actions.values() for seconds in stages)
    assert len(costs.transfer) == family.num_stages - 1
    assert min(costs.transfer) > 0
    assert len(costs.after) == len(costs.offload) == len(costs.offload_dispatch) == family.num_stages
    assert (min(costs.offload_dispatch) > 0) == (family.remat == "least")
    assert 1 <= costs.capacity <= 4


SMALL_GPT = functools.partial(gpt_case, batch_size=8, depth=1)
PEAKS = {
    "zb-h2": (CASE, 4, 8, "least"),
    "gpipe": (CASE, 4, 8, "least"),
    "gpipe, offload": (CASE, 4, 8, "offload"),
    "looped-bfs": (CASE, 4, 8, "least"),
    "v-min": (CASE, 4, 8, "least"),
    "zb-h1, keys and dropout": (None, 2, 4, "recompute"),
}


@pytest.mark.parametrize("name", PEAKS)
@pytest.mark.long
def test_peaks_are_those_of_the_forecast(machine, name, tmp_path):
    case, num_ranks, num_microbatches, remat = PEAKS[name]
    ours, case = (machine, case) if case else (devices(tmp_path, SMALL_GPT(), devices=jax.devices()[:2]), SMALL_GPT())
    schedule = make(name.partition(",")[0], num_ranks=num_ranks, num_microbatches=num_microbatches)
    candidate = Candidate(schedule, remat=remat)
    pipe = jaxpp.Pipeline(case.loss_fn, ADAM, has_aux=True, devices=jax.devices()[:num_ranks], **candidate.options)
    peaks = pipe.forecast(jax.eval_shape(lambda: case.params), case.batch, case.key).peaks
    assert ours.peaks(candidate) == tuple(peaks[device] for device in jax.devices()[:num_ranks])
    if remat == "offload":
        assert sum(ours.peaks(candidate)) < sum(ours.peaks(Candidate(schedule)))
        assert min(*ours.steps([candidate])) > 0


@pytest.mark.long
def test_a_second_machine_measures_nothing(tmp_path, monkeypatch):
    candidates = [Candidate(make(name, num_ranks=2, num_microbatches=2)) for name in ("1f1b", "gpipe")]
    first = devices(tmp_path, devices=jax.devices()[:2])
    found = [(first.costs(each.family), first.peaks(each)) for each in candidates], first.steps(candidates)
    assert first.num_measured == 3  # one family, two candidates
    assert [len(seconds) >= 9 and min(seconds) > 0 for seconds in found[1]] == [True, True]

    def opened(*args):
        raise AssertionError("nothing is run")

    monkeypatch.setattr("jaxpp.tuner.machine._Steps.step", opened)
    monkeypatch.setattr(Programs, "compile", opened)
    second = devices(tmp_path, devices=jax.devices()[:2])
    assert ([(second.costs(each.family), second.peaks(each)) for each in candidates], second.steps(candidates)) == found
    assert (second.num_measured, second.remark) == (0, "")


@pytest.mark.long
def test_another_problem_has_another_file(tmp_path):
    def other_loss(params, batch):
        loss, aux = CASE.loss_fn(params, batch)
        return 2 * loss, aux

    machines = [
        devices(tmp_path),
        devices(tmp_path, devices=jax.devices()[:2]),
        devices(tmp_path, dataclasses.replace(CASE, loss_fn=other_loss)),
        devices(tmp_path, dataclasses.replace(CASE, batch=jax.tree.map(lambda leaf: leaf[:8], CASE.batch))),
        devices(tmp_path, optimizer=optax.sgd(1e-2)),
    ]
    for machine in machines:
        machine.peaks(Candidate(make("1f1b", num_ranks=2, num_microbatches=2)))
    assert len(list(tmp_path.glob("*.json"))) == len(machines)
    assert devices(tmp_path).remark == ""


OTHER_TEXTS = ["", "{", "[]", '{"kind": "something else", "found": {}}']


@pytest.mark.parametrize(
    "text", ['{"kind": "jaxpp tune 9", "found": 3}', *(pytest.param(text, marks=pytest.mark.long) for text in OTHER_TEXTS)]
)
@pytest.mark.long
def test_a_damaged_or_foreign_file_is_ignored_and_written_anew(tmp_path, text):
    candidate = Candidate(make("1f1b", num_ranks=2, num_microbatches=2))
    peaks = devices(tmp_path).peaks(candidate)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    machine = devices(tmp_path)
    assert machine.remark.startswith(f"{file} is ignored, and will be written anew: ")
    assert machine.peaks(candidate) == peaks
    assert json.loads(file.read_text())["kind"] == "jaxpp tune 9"
    assert list(tmp_path.iterdir()) == [file]
    assert devices(tmp_path).remark == ""


def test_a_file_in_which_a_number_is_another_is_measured_anew(tmp_path):
    file = tmp_path / "results.json"
    _Results(tmp_path, file.name, several=False).put("steps", "name", [[0.1, math.inf], [0.3]])
    kept = _Results(tmp_path, file.name, several=False)
    assert kept.known("steps", "name", lambda: 1 / 0) == [[0.1, math.inf], [0.3]] and kept.remark == ""
    text = file.read_text()
    for bad in ("NaN", "null", "-1", '"x"', "[]", "0.2"):
        file.write_text(text.replace("0.3", bad))
        changed = _Results(tmp_path, file.name, several=False)
        assert changed.remark == f"{file} is ignored, and will be written anew: it was changed since it was written"
        assert changed.known("steps", "name", lambda: [[1.0], [2.0]]) == [[1.0], [2.0]]
    again = _Results(tmp_path, file.name, several=False)
    assert again.known("steps", "name", lambda: 1 / 0) == [[1.0], [2.0]] and again.remark == ""


def test_results_are_written_to_files_of_their_own_and_pipes_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(secrets, "token_hex", lambda number: "known")
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "a.known").symlink_to(tmp_path / "precious")
    os.mkfifo(tmp_path / "a.json")
    results = _Results(tmp_path, "a.json", several=False)
    results.put("peaks", "name", [1])
    assert "results are not kept: [Errno 17] File exists" in results.remark
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.long
def test_nothing_is_kept_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    devices(keep=False).peaks(Candidate(make("1f1b", num_ranks=2, num_microbatches=2)))
    assert not list(tmp_path.iterdir())
    devices(keep=True).peaks(Candidate(make("1f1b", num_ranks=2, num_microbatches=2)))
    assert len(list((tmp_path / "jaxpp" / "tune").iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_a_remark(tmp_path):
    (tmp_path / "file").write_text("")
    machine = devices(tmp_path / "file" / "folder")
    assert machine.peaks(Candidate(make("1f1b", num_ranks=2, num_microbatches=2)))
    assert machine.remark.startswith("results are not kept: ")


@pytest.mark.long
def test_candidates_run_by_turns_and_only_the_one_that_runs_has_its_state_on_the_devices(tmp_path, monkeypatch):
    candidates = [Candidate(make(name, num_ranks=2, num_microbatches=2)) for name in ("1f1b", "gpipe")]
    machine, ran = devices(tmp_path, devices=jax.devices()[:2]), []
    machine.costs(candidates[0].family)
    step = _Steps.step

    def noted(self, *given):
        if self is not machine._pace.reference:
            if not ran or ran[-1] is not self:
                ran.append(self)
            assert all(other.leaves is None for other in ran if other is not self)
        return step(self, *given)

    monkeypatch.setattr("jaxpp.tuner.machine._Steps.step", noted)
    machine.steps(candidates)
    assert len(ran) == 6 and ran[0] is ran[2] is ran[4] and ran[1] is ran[3] is ran[5]
    assert all(steps.leaves is None for steps in ran)


@pytest.mark.long
def test_parameters_that_were_given_stay_as_they_are(tmp_path):
    params = jax.tree.map(jnp.array, CASE.params)
    before = jax.tree.map(np.array, params)
    machine = devices(tmp_path, made=params, devices=jax.devices()[:2])
    machine.costs(Family(2, 2, "least", "flops", splits=False))
    assert min(*machine.steps([Candidate(make("1f1b", num_ranks=2, num_microbatches=2))])) > 0
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((np.asarray(a) == b).all()), params, before))


def test_what_cannot_be_cut_is_refused(tmp_path):
    with pytest.raises(JaxppError):
        devices(tmp_path).costs(Family(64, 2, "least", "flops", splits=False))
    with pytest.raises(JaxppError):
        devices(tmp_path).costs(Family(2, 100, "least", "flops", splits=False))


def test_families_are_measured_on_as_many_ranks_as_their_candidates_have():
    names = {
        Family(4, 8, "least", "flops", False): ("1f1b", 4),
        Family(4, 8, "least", "flops", True): ("zb-h1", 4),
        Family(8, 8, "least", "flops", False): ("interleaved", 4),
        Family(8, 7, "least", "flops", False): ("interleaved", 4),
        Family(8, 10, "least", "flops", False): ("interleaved", 4),
        Family(8, 9, "least", "flops", False): ("looped-bfs", 4),
        Family(8, 8, "least", "flops", True): ("zb-v", 4),
        Family(6, 8, "least", "flops", False): ("1f1b", 6),
    }
    for family, expected in names.items():
        schedule = plain_schedule(family, num_ranks=4)
        assert (schedule.name, schedule.num_ranks) == expected
        assert Candidate(schedule).family == family


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "v-half", "dualpipe-v", "interleaved", "looped-bfs"])
def test_where_ranks_are_of_unequal_width_a_family_has_its_stages_where_its_candidates_have_them(name):
    schedule = make(name, 3, 6, 1 if name in ("1f1b", "zb-h1") else 2)
    family = Candidate(schedule, unequal=True).family
    plain = plain_schedule(family, num_ranks=5)
    assert plain.stage_to_rank == schedule.stage_to_rank == family.homes
    assert Candidate(plain, unequal=True).family == family
    assert Candidate(schedule).family == family._replace(homes=())


@pytest.mark.parametrize("seconds", [0.03, 0.05, 0.1, 0.2])
def test_fitted_costs_predict_the_step_that_was_run(machine, seconds):
    plain = Candidate(make("1f1b", num_ranks=4, num_microbatches=4))
    costs = dataclasses.replace(
        machine.costs(plain.family),
        actions={Kind.F: (0.004,) * 4, Kind.B: (0.008,) * 4},
        dispatch={Kind.F: (1e-5,) * 4, Kind.B: (1e-5,) * 4},
        transfer=(1e-5,) * 3,
        before=1e-4,
        after=(1e-4,) * 4,
        after_dispatch=1e-5,
    )
    found = fitted(costs, plain, seconds, shared=True)
    assert math.isclose(step_seconds(plain.schedule, found), seconds, rel_tol=0.02)
    assert 1 <= found.capacity <= 4
    own = fitted(costs, plain, seconds, shared=False)
    assert own.capacity == 4
    assert math.isclose(step_seconds(plain.schedule, own), seconds, rel_tol=0.02)


@pytest.mark.long
def test_families_that_hardly_fit_are_measured_one_microbatch_at_a_time(tmp_path, monkeypatch):
    machine, family = devices(tmp_path, devices=jax.devices()[:2]), Family(2, 6, "least", "flops", splits=False)
    usual = plain_schedule(family, 2)
    single = one_at_a_time(usual)
    most, least = (max(machine.peaks(Candidate(schedule))) for schedule in (usual, single))
    assert least < most
    ran = []
    monkeypatch.setattr("jaxpp.tuner.machine.fitted", lambda costs, plain, seconds, **_: ran.append(plain.schedule) or costs)
    for room, schedule in ((most, usual), (most - 1, single), (least, single)):
        monkeypatch.setattr("jaxpp.tuner.machine.room_of", lambda engine, _, room=room: room)
        devices(False, devices=jax.devices()[:2]).costs(family)
        assert ran.pop() == schedule
    monkeypatch.setattr("jaxpp.tuner.machine.room_of", lambda engine, _: least - 1)
    with pytest.raises(ArgumentError, match="which must have room for one microbatch at a time"):
        devices(False, devices=jax.devices()[:2]).costs(family)


@pytest.mark.long
def test_an_interrupt_leaves_the_machine_as_it_was(tmp_path, monkeypatch):
    machine, family = devices(tmp_path, devices=jax.devices()[:2]), Family(2, 2, "least", "flops", splits=False)
    calls, run = [], Engine.run

    def interrupted(*args, **options):
        calls.append(None)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return run(*args, **options)

    monkeypatch.setattr(Engine, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        machine.costs(family)
    assert not list(tmp_path.iterdir())
    assert machine.costs(family).actions
    assert len(list(tmp_path.iterdir())) == 1


def test_seconds_are_those_at_the_speed_that_the_machine_had_at_first():
    class Steps:
        """Stands for steps: each takes so many seconds, on a machine that is as fast as ``speed`` says."""

        def __init__(self, seconds):
            self.seconds = seconds

        def timed(self):
            return self.seconds * next(speed)

        def told(self, steps):
            return list(steps)

    pace, reference, other = _Pace(), Steps(0.2), Steps(0.3)
    speed = itertools.repeat(1.0)
    found = pace.timed(reference, budget=1.0)
    assert (found.seconds, found.factor) == (0.2, 1.0)
    pace = _Pace(reference, found.seconds)
    speed = itertools.repeat(1.6)
    found = pace.timed(other, budget=5.0)
    assert math.isclose(found.seconds, 0.3)
    assert math.isclose(found.factor, 1.6)
    speed = (1.0 + 0.05 * k for k in itertools.count())  # slower all the time
    assert math.isclose(pace.timed(other, budget=5.0).seconds, 0.3)


@pytest.mark.long
def test_what_is_measured_later_is_told_the_same_pace(tmp_path):
    first = devices(tmp_path, devices=jax.devices()[:2])
    first.costs(Family(2, 2, "least", "flops", splits=False))
    (file,) = tmp_path.iterdir()
    before = json.loads(file.read_text())["found"]["reference"]
    second = devices(tmp_path, devices=jax.devices()[:2])
    second.costs(Family(2, 4, "least", "flops", splits=False))
    assert json.loads(file.read_text())["found"]["reference"] == before
    assert before["of the pace"][0] == [2, 2, "least", "flops", False, 1, [], []]
