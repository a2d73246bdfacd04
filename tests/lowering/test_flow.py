"""A step in flow: its lines are divided into what the next step's forwards wait for, and the rest."""

import jax
import jax.numpy as jnp
import pytest

from jaxpp.lowering.builder import Builder, Name
from jaxpp.lowering.passes.flow import in_flow
from jaxpp.schedule import dependencies, flow, make
from jaxpp.schedule.action import Action, Kind
from jaxpp.stages.program import Program, Ref, Role

PARAM, NEW, LOSS = Name(0, Ref(Role.PARAM)), Name(0, Ref(Role.PARAM, 1)), Name(0, Ref(Role.VALUE, 9))
PROGRAM = Program(lambda x: [x], (Ref(Role.VALUE),), (Ref(Role.VALUE, 1),), (jax.ShapeDtypeStruct((), jnp.float32),), name="any")


def kept(microbatch):
    return Name(0, Ref(Role.RESIDUAL), microbatch)


def grad(microbatch):
    return Name(0, Ref(Role.GRAD), microbatch)


def lines():
    """Two forwards, two backwards of which the second gives the loss, and an update."""
    builder = Builder()
    for k in range(2):
        builder.compute(f"F{k}", PROGRAM, 0, [PARAM], [kept(k)], Action(0, Kind.F, k))
    for k, more in enumerate([[], [LOSS]]):
        builder.compute(f"B{k}", PROGRAM, 0, [kept(k)], [grad(k), *more], Action(0, Kind.B, k))
    builder.compute("update", PROGRAM, 0, [PARAM, grad(0), grad(1)], [NEW])
    return builder.finish([PARAM], [])


SCHEDULE = make("gpipe", num_ranks=1, num_microbatches=2)


@pytest.mark.parametrize(("results", "body"), [([], ["F0", "F1"]), ([LOSS], ["F0", "F1", "B1"]), ([grad(0)], ["F0", "F1", "B0"])])
def test_the_body_is_all_up_to_the_last_forward_with_what_the_caller_is_told_and_nothing_else(results, body):
    made = in_flow(lines(), ["device"], SCHEDULE, {}, results)
    found, parted = made.lines, made.flow
    labels = [line.label for line in found]
    assert sorted(labels[: parted.body]) == sorted(body)
    assert sorted(labels) == ["B0", "B1", "F0", "F1", "update"] and labels[-1] == "update"
    assert parted.late == {name for line in found[parted.body :] for name in line.outputs}


def test_a_step_whose_forwards_read_what_its_update_makes_is_not_in_flow():
    given = lines()
    assert in_flow(given, ["device"], SCHEDULE, {PARAM: NEW}, []) is given


def test_every_line_of_every_step_is_handed_over_once_and_in_its_order():
    made = in_flow(lines(), ["device"], SCHEDULE, {}, [])
    found = made.lines
    handed = list(made.flow.lines(3))
    assert sorted(handed) == [(step, line) for step in range(3) for line in range(len(found))]
    for step in range(3):
        assert [line for number, line in handed if number == step] == list(range(len(found)))
    starts = [handed.index((step, 0)) for step in range(3)]
    ends = [handed.index((step, len(found) - 1)) for step in range(3)]
    assert starts == sorted(starts) and ends == sorted(ends)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1"])
def test_the_lines_of_a_step_between_those_of_the_next_have_the_order_of_the_schedule_in_flow(name):
    schedule, builder = make(name, num_ranks=4, num_microbatches=8), Builder()
    made = {action: Name(action.stage, Ref(Role.VALUE, k)) for k, action in enumerate(schedule.order)}
    for action in schedule.order:
        needs = [made[need] for need in dependencies(action, schedule.num_stages, frozenset(made))]
        builder.compute(str(action), PROGRAM, action.stage, needs, [made[action]], action)
    found, count = in_flow(builder.finish([], []), schedule.stage_to_rank, schedule, {}, []), schedule.num_microbatches
    handed = [
        found.lines[k].action._replace(microbatch=found.lines[k].action.microbatch + step * count)
        for step, k in found.flow.lines(3)
        if (step == 1 and k >= found.flow.body) or (step == 2 and k < found.flow.body)
    ]
    assert handed == [action for action in flow(schedule, 3).order if action in set(handed)]
