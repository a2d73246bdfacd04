"""A profile of steps that were traced elsewhere."""

import os
from pathlib import Path
from typing import Any

from jaxpp.errors import ArgumentError
from jaxpp.observe.memory.ledger import Ledger
from jaxpp.observe.memory.liveness import step_liveness
from jaxpp.observe.profile.profile import Profile
from jaxpp.observe.profile.spans import durations_of, isolated_spans, traced_spans
from jaxpp.observe.profile.trace import TraceError, matched, read_runs
from jaxpp.types import Batch, Key

__all__ = ["from_trace"]

_WHERE = "jaxpp.observe.from_trace"


def from_trace(folder: str | os.PathLike[str], pipe: Any, batch: Batch, key: Key | None = None) -> Profile:
    """The profile of steps that were traced with ``jax.profiler.trace``, here or on another machine.

    Unlike ``pipe.profile`` it runs nothing. So it does not know what the host did or what memory held, and takes a program's median
    time in the trace for the time that the program takes alone.

    Args:
        folder: what was given to ``jax.profiler.trace``; its newest trace is read.
        pipe: a pipeline like the one whose steps were traced, after ``init`` or ``forecast``.
        batch: of the traced steps, or its shapes.
        key: of the traced steps, or its shape.

    Returns:
        the profile of the traced step of median length.

    Raises:
        ArgumentError: there is no trace, or it does not hold whole steps of such a pipeline and nothing else of it.

    Example:
        In ``with jax.profiler.trace("out"):`` call ``state, metrics = pipe.step(state, batch)`` some times, and
        ``jax.block_until_ready((state, metrics.grad_norm))``; then ``jaxpp.observe.from_trace("out", pipe, batch).figure()``.
    """
    engine = pipe.engine
    plan, lowered = engine.plan("update", batch, key)
    try:
        runs = read_runs(Path(folder))
        found = matched(plan, runs, max(1, len(runs.steps)))
    except FileNotFoundError as error:
        rule = "it reads what jax.profiler.trace(folder) has written"
        raise ArgumentError(_WHERE, rule, str(error), "pass the folder that you gave to jax.profiler.trace") from None
    except TraceError as error:
        rule = "the trace has whole steps of a pipeline like this one, with this batch's shapes"
        fix = "call jax.block_until_ready((state, metrics.grad_norm)) before the trace begins, and before it ends"
        raise ArgumentError(_WHERE, rule, str(error), fix) from None
    schedule = engine.options.schedule
    alone = durations_of(plan, [[0.0 if run is None else run.end - run.start for run in step] for step in found])
    steps = [traced_spans(plan, step, (), alone, schedule) for step in found]
    lengths = [max(span.end for span in spans) for spans in steps]
    median = sorted(range(len(steps)), key=lengths.__getitem__)[len(steps) // 2]
    spans = steps[median], isolated_spans(plan, alone, schedule)
    ledger = Ledger(step_liveness(engine, lowered), (), {})
    return Profile(
        schedule, engine.placement.ranks_shown, *spans, "trace", tuple(lengths), 1.0, ledger, offloaded=engine.options.offloaded
    )
