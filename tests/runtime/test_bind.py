"""Lines over stages get places: what moves nothing is left out, what is there already is known by another name."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.lowering.builder import CALLER, Builder, Constant, Name
from jaxpp.lowering.passes.donate import donate
from jaxpp.runtime.bind import Shapes, bind_lines, compile_plan
from jaxpp.runtime.compile import Programs
from jaxpp.runtime.execute import execute
from jaxpp.runtime.place import OneDevice, Placement
from jaxpp.runtime.replica_groups import ReplicaGroups
from jaxpp.stages.program import Program, Ref, Role

X = Ref(Role.VALUE, shared=True)
AVAL = jax.ShapeDtypeStruct((3,), jnp.float32)


def placement(*devices):
    places = tuple(OneDevice(jax.devices()[k]) for k in devices)
    return Placement(places, places)


def doubled(stage):
    return Program(lambda x: [2 * x], (X,), (Ref(Role.VALUE, 1),), (AVAL,), name=f"double_{stage}")


def results(*stages):
    return [Name(stage, Ref(Role.VALUE, 1)) for stage in stages]


def fanned_out(stages):
    """The caller's value is sent to each stage and doubled there."""
    builder = Builder()
    for stage in range(stages):
        builder.send(f"send to {stage}", Name(CALLER, X), Name(stage, X))
        builder.compute(f"double {stage}", doubled(stage), stage, [Name(stage, X)], [Name(stage, Ref(Role.VALUE, 1))])
    return builder


def test_a_value_is_sent_to_a_device_once_however_many_stages_read_it():
    lines = fanned_out(4).finish([Name(CALLER, X)], [Name(2, X), *results(0, 1, 2, 3)])
    bound = bind_lines(lines, placement(0, 1, 0, 1))
    assert [line.label for line in bound.lines if line.is_send] == ["send to 0", "send to 1"]
    assert bound.outputs == (Name(0, X), *results(0, 1, 2, 3))
    plan, _ = compile_plan(bound, Programs(), ReplicaGroups())
    found = execute(plan, [jnp.arange(3.0)])[1:]
    assert [value.devices() for value in found] == [{jax.devices()[k]} for k in (0, 1, 0, 1)]
    for value in found:
        np.testing.assert_array_equal(value, [0, 2, 4])


def test_a_send_within_a_device_is_another_name_for_the_value():
    builder = Builder()
    builder.send("send", Name(0, X), Name(1, X))
    builder.compute("double 1", doubled(1), 1, [Name(1, X)], [Name(1, Ref(Role.VALUE, 1))])
    assert [line.is_send for line in bind_lines(builder.finish([Name(0, X)], []), placement(3, 3)).lines] == [False]
    assert [line.is_send for line in bind_lines(builder.finish([Name(0, X)], []), placement(3, 4)).lines] == [True, False]


def test_a_value_that_changes_is_sent_again():
    builder = Builder()
    for _ in range(2):
        builder.compute("double 0", doubled(0), 0, [Name(0, X)], [Name(0, X)])
        builder.send("send", Name(0, X), Name(1, X))
    builder.compute("double 1", doubled(1), 1, [Name(1, X)], [Name(1, Ref(Role.VALUE, 1))])
    assert sum(line.is_send for line in bind_lines(builder.finish([Name(0, X)], []), placement(0, 1)).lines) == 2


def test_a_constant_is_put_on_its_device_once_for_all_plans():
    builder, programs = Builder(), Programs()
    builder.constants[Name(0, X)] = Constant(np.arange(3.0, dtype="f"))
    builder.compute("double 0", doubled(0), 0, [Name(0, X)], [Name(0, Ref(Role.VALUE, 1))])
    bound = bind_lines(builder.finish([], results(0)), placement(5))
    made = [compile_plan(bound, programs, ReplicaGroups())[1] for _ in range(2)]
    assert made[0].placed[Name(0, X)] is made[1].placed[Name(0, X)]
    assert made[0].placed[Name(0, X)].devices() == {jax.devices()[5]}
    assert not bound.placed


def test_places_of_the_same_devices_are_equal():
    assert OneDevice(jax.devices()[2]) == OneDevice(jax.devices()[2])
    assert len({OneDevice(jax.devices()[2]), OneDevice(jax.devices()[2]), OneDevice(jax.devices()[3])}) == 2


def test_what_a_program_may_take_over_is_copied_before_it_crosses_to_another_process():
    builder, source, kept = Builder(), Name(0, Ref(Role.VALUE, 1)), Name(0, X)
    builder.compute("double", doubled(0), 0, [kept], [source])
    builder.send("send", source, Name(1, X))
    builder.compute("double again", doubled(0), 0, [source], [source])
    lines = donate(bind_lines(builder.finish([kept], [source]), placement(0, 1)), ())
    shapes = Shapes(lines.lines, placement(0, 1), {})
    assert shapes.may_be_taken(source)
    assert not shapes.may_be_taken(kept)
    assert all(shapes.may_be_taken(Name(0, Ref(role))) for role in (Role.PARAM, Role.OPT, Role.STATE, Role.LOSS_SCALE))


def test_a_process_runs_nothing_of_what_other_processes_do_among_themselves(monkeypatch):
    builder, result = fanned_out(1), Name(0, Ref(Role.VALUE, 1))
    builder.send("send to 1", result, Name(1, X))
    bound = bind_lines(builder.finish([Name(CALLER, X)], []), placement(0, 1))
    assert [line.is_send for line in bound.lines] == [True, False, True]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert bound.here({})[0].lines == bound.lines
    monkeypatch.setattr(jax, "process_index", lambda: 1)  # all devices are of process 0
    assert bound.here({})[0].lines == ()
