"""Running steps under watch, and what the stamps say: spans in time."""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax

from jaxpp.observe.ledger import sample_step
from jaxpp.observe.profile import Profile, Span
from jaxpp.observe.watch import Stamp, Watch
from jaxpp.runtime.engine import Engine
from jaxpp.runtime.plan import Plan
from jaxpp.runtime.transfer import put

__all__ = ["record"]

_WARM_UP = 3  # pairs of steps that do not count: the first find the caches of other programs


def record(engine: Engine, leaves: Sequence[Any], batch: Any, key: Any, num_steps: int) -> Profile:
    """Run steps, by turns one that is watched and one that is not, then one whose memory is looked at.

    Args:
        engine: whose steps.
        leaves: of the state; they are copied, and stay as they are.
        batch: for every step.
        key: likewise.
        num_steps: how many to watch, after some pairs that do not count.

    Returns:
        the profile of the watched step of median length.
    """
    plan, _ = engine.plan("update", batch, key, watched=True)
    own = [put(leaf, device) for leaf, device in zip(leaves, engine.homes, strict=True)]
    steps: list[list[Stamp]] = []
    watched: list[float] = []
    plain: list[float] = []
    for _ in range(_WARM_UP + num_steps):
        begun = time.perf_counter()
        own = engine.run("update", own, batch, key).leaves
        jax.block_until_ready(own)
        plain.append(time.perf_counter() - begun)
        begun, watch = time.perf_counter(), Watch(plan)
        own = engine.run("update", own, batch, key, observer=watch, watched=True).leaves
        steps.append(watch.stamps())
        jax.block_until_ready(own)
        watched.append(time.perf_counter() - begun)
    ledger, _ = sample_step(engine, own, batch, key)
    lengths = [max(s.done for s in stamps) - stamps[0].begun for stamps in steps[_WARM_UP:]]
    median = sorted(range(num_steps), key=lengths.__getitem__)[num_steps // 2]
    spans, beside = _spans(plan, steps[_WARM_UP + median], engine)
    cost = statistics.median(w / p for w, p in zip(watched[_WARM_UP:], plain[_WARM_UP:], strict=True))
    return Profile(engine.settings.schedule, engine.placement.by_rank, spans, tuple(lengths), beside, cost, ledger)


def _spans(plan: Plan, stamps: Sequence[Stamp], engine: Engine) -> tuple[tuple[Span, ...], int]:
    """When each instruction ran, and how many programs ended before one that their device was given earlier."""
    schedule = engine.settings.schedule
    there: dict[int, float] = {}
    last: dict[Any, float] = {}
    spans, beside, zero = [], 0, stamps[0].begun
    for line, stamp in zip(plan.instructions, stamps, strict=True):
        begun, handed, done = (at - zero for at in stamp)
        action: Any = line.about.action
        start = max([begun, *(there.get(slot, 0.0) for slot in line.inputs)])
        if not line.about.sends:
            before = last.get(line.about.device, 0.0)
            beside += before > done
            start = max(start, before) if before <= done else start
            last[line.about.device] = max(before, done, start)
        end = max(start, done)
        there.update((slot, end) for slot in line.outputs)
        spans.append(
            Span(line.label, action, schedule.stage_to_rank[line.about.stage], line.about.sends, start, end, begun, handed)
        )
    return tuple(spans), beside
