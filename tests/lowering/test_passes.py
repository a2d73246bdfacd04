"""Passes over lines: what may take over a buffer, and what the check between two passes finds."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxpp.lowering.builder import Builder, Name
from jaxpp.lowering.passes import transform as passes
from jaxpp.lowering.passes.donate import donate
from jaxpp.lowering.passes.transform import check_lines, transform
from jaxpp.stages.program import Program, Ref, Role

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
OLD, NEW = (Name(0, Ref(Role.PARAM, new=new)) for new in (False, True))
BEFORE, SUM, OTHER = Name(0, Ref(Role.PREVIOUS)), Name(0, Ref(Role.GRAD)), Name(0, Ref(Role.VALUE))


def run(builder, label, inputs, outputs):
    refs = (tuple(name.ref for name in names) for names in (inputs, outputs))
    builder.compute(label, Program(lambda *args: list(args), *refs, (SCALAR,) * len(inputs)), 0, inputs, outputs)


def updated(*reads, given=(OLD, SUM), results=(NEW,), then=()):
    """An update that reads these, and what reads others behind it."""
    builder = Builder()
    run(builder, "update", reads, [NEW])
    for name in then:
        run(builder, "reads it again", [name], [OTHER])
    return builder.finish(given, results)


@pytest.mark.parametrize(
    ("lines", "gives", "taken"),
    [
        (updated(OLD, SUM), [OLD], {OLD}),
        (updated(OLD, SUM), [], set()),
        (updated(OLD, SUM, then=[OLD]), [OLD], set()),
        (updated(OLD, SUM, results=(NEW, OLD)), [OLD], set()),
        (updated(BEFORE, OLD, SUM, results=(NEW, OLD)), [OLD, BEFORE], {BEFORE}),
        (updated(OLD._replace(visit=3), SUM, given=(OLD._replace(visit=3), SUM)), [], set()),
    ],
    ids=["given up", "not given up", "read again", "a result", "with delay", "another visit"],
)
def test_a_parameter_takes_over_the_one_before_if_nobody_reads_that_again(lines, gives, taken):
    assert donate(lines, gives).lines[0].taken == taken


def test_a_copy_that_came_for_a_visit_is_taken_over_whoever_keeps_the_state():
    old, new = OLD._replace(visit=3), NEW._replace(visit=3)
    builder = Builder()
    run(builder, "update", [old, SUM], [new])
    assert donate(builder.finish([old, SUM], [new]), []).lines[0].taken == {old}


def test_a_sum_is_changed_in_place_though_others_read_it_later():
    builder = Builder()
    run(builder, "makes it", [OLD], [SUM])
    for label in ("adds to it", "adds to it again"):
        run(builder, label, [OLD, SUM], [SUM])
    assert [line.taken for line in donate(builder.finish([OLD], [SUM]), []).lines] == [set(), {SUM}, {SUM}]


def faulty(kind):
    if kind == "reads .* no line before has made":
        return updated(OLD, OTHER)
    if kind == "result .* is made by no line":
        return updated(OLD, results=(OTHER,))
    if kind == "writes .* which is there and which it does not read":
        return updated(SUM, given=(OLD, SUM, NEW))
    lines = updated(OLD, then=[OLD])
    return replace(lines, lines=(replace(lines.lines[0], donated=(0,)), *lines.lines[1:]))


@pytest.mark.parametrize(
    "kind",
    [
        "reads .* no line before has made",
        "result .* is made by no line",
        "writes .* which is there and which it does not read",
        "reads .* which update has taken over",
    ],
)
def test_the_check_between_two_passes_finds(kind, monkeypatch):
    lines = faulty(kind)
    with pytest.raises(AssertionError, match=kind):
        check_lines(lines)
    monkeypatch.setattr(passes, "always_check", True)
    with pytest.raises(AssertionError, match=r"behind .*_broken"):
        transform(updated(OLD), [lambda given: given, _broken(lines)])
    monkeypatch.setattr(passes, "always_check", False)
    assert transform(updated(OLD), [_broken(lines)]) is lines


def _broken(lines):
    return lambda given: lines


def test_every_test_checks_the_lines_between_all_passes():
    assert passes.always_check
