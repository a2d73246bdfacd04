"""Lanes: the lines of each rank, and what of other lanes each must follow."""

import jax
import jax.numpy as jnp

from jaxpp.lowering.builder import CALLER, Builder, Name
from jaxpp.lowering.lanes import Turn, in_lanes
from jaxpp.stages.program import Program, Ref, Role

X, Y, Z = (Ref(Role.VALUE, k) for k in range(3))
BATCH = Name(CALLER, Ref(Role.BATCH))


def run(builder, label, stage, reads, writes):
    avals = (jax.ShapeDtypeStruct((), jnp.float32),) * len(reads)
    refs = (tuple(name.ref for name in names) for names in (reads, writes))
    builder.compute(label, Program(lambda *args: list(args), *refs, avals), stage, reads, writes)


def two_stages():
    """A stage that sends what it makes to another, which sends something back; then both take over the buffers of arguments."""
    builder = Builder()
    builder.send("batch", BATCH, Name(0, X))
    run(builder, "0F", 0, [Name(0, X)], [Name(0, Y)])
    builder.send("forth", Name(0, Y), Name(1, Y))
    run(builder, "more of 0", 0, [Name(0, Y)], [Name(0, Z)])
    run(builder, "1F", 1, [Name(1, Y)], [Name(1, Z)])
    builder.send("back", Name(1, Z), Name(0, Ref(Role.VALUE, 3)))
    run(builder, "0B", 0, [Name(0, Ref(Role.VALUE, 3))], [Name(0, Ref(Role.VALUE, 4))])
    run(builder, "update 1", 1, [Name(1, Z)], [Name(1, Ref(Role.VALUE, 5))])
    run(builder, "update 0", 0, [Name(0, Z)], [Name(0, Ref(Role.VALUE, 5))])
    return builder


def test_a_line_waits_for_what_was_sent_to_it_and_all_wait_before_the_first_buffer_is_taken_over():
    builder = two_stages()
    lanes = in_lanes(builder.lines, ["a", "b"], consumes=7)
    turns = {line.label: turn for line, turn in zip(builder.lines, lanes.turns, strict=True)}
    assert [label for label, turn in turns.items() if turn.lane == 1] == ["1F", "back", "update 1"]
    assert {label: turn.after for label, turn in turns.items() if turn.after} == {
        "1F": ((0, 3),),  # the batch, the forward, the send
        "0B": ((1, 2),),
        "update 1": ((0, 5),),  # all that comes before it in the other lane
    }
    assert [label for label, turn in turns.items() if turn.is_awaited] == ["forth", "back", "0B"]
    assert [label for label, turn in turns.items() if turn.asks] == ["update 1", "update 0"]
    assert lanes.count == 2 and not lanes.several


def test_stages_of_one_place_are_one_lane():
    builder = two_stages()
    assert in_lanes(builder.lines, ["a", "a"], consumes=7).turns == (Turn(0), *[Turn(0)] * 6, *[Turn(0, asks=True), Turn(0)])


def test_what_changes_a_value_follows_all_that_read_it_before_and_comes_before_all_that_read_it_later():
    builder = Builder()
    builder.send("to 0", BATCH, Name(0, X))
    builder.send("to 1", BATCH, Name(1, X))
    run(builder, "0F", 0, [Name(0, X)], [Name(0, Y)])
    run(builder, "1F", 1, [Name(1, X)], [Name(1, Y)])
    assert in_lanes(builder.lines, ["a", "b"], 4).several == {BATCH}
    run(builder, "changes it", 0, [BATCH], [BATCH])
    builder.send("again to 1", BATCH, Name(1, Z))
    run(builder, "changes it again", 0, [BATCH], [BATCH])
    lanes = in_lanes(builder.lines, ["a", "b"], 7)
    turns = {line.label: turn for line, turn in zip(builder.lines, lanes.turns, strict=True)}
    assert lanes.several == {BATCH}, "which has a slot of its own to the end"
    assert {label: turn.after for label, turn in turns.items() if turn.after} == {
        "changes it": ((1, 1),),
        "again to 1": ((0, 3),),
        "changes it again": ((1, 3),),
    }


def test_the_host_that_waits_for_values_of_several_stages_does_so_in_one_lane():
    builder = two_stages()
    builder.call("the wait", lambda *values: values[:1], 0, [Name(0, Y), Name(1, Y)], [Name(0, Y)])
    assert in_lanes(builder.lines, ["a", "b"], 10).count == 1
