"""A profile as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

A lane a rank for what it computes and one for what arrives there; one for the host. Times are microseconds, as the format has them.
"""

import json
from typing import Any

from jaxpp.observe.profile import Profile

__all__ = ["to_perfetto"]

_COMPUTE, _ARRIVALS, _HOST = 0, 1, 2


def to_perfetto(profile: Profile) -> str:
    """The trace as JSON text.

    Args:
        profile: of a step.
    """
    ranks = profile.schedule.num_ranks
    events: list[dict[str, Any]] = []
    for rank in range(ranks):
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        events += [_name("thread_name", rank, lane, text) for lane, text in ((_COMPUTE, "computes"), (_ARRIVALS, "receives"))]
    events += [_name("process_name", ranks, 0, "host"), _name("thread_name", ranks, _HOST, "hands over")]
    for span in profile.spans:
        kind = "rest" if span.action is None else str(span.action.kind)
        lane = _ARRIVALS if span.sends else _COMPUTE
        events.append(_slice(span.label, "send" if span.sends else kind, span.rank, lane, span.start, span.end))
        events.append(_slice(span.label, "host", ranks, _HOST, span.begun, span.handed))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _name(what: str, pid: int, tid: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": text}}


def _slice(name: str, category: str, pid: int, tid: int, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": 1e6 * start, "dur": 1e6 * (end - start)}
