"""A profile as text for files: a trace for Perfetto (ui.perfetto.dev), JSON, an HTML page."""

import html
import json
from collections.abc import Iterable

from jaxpp.observe.memory.liveness import MEMORY_KINDS
from jaxpp.observe.profile.profile import Profile
from jaxpp.observe.profile.spans import Span

_COMPUTE, _ARRIVALS, _HOST, _COPIES = 0, 1, 2, 3
_NUMBERS = (
    "seconds step_seconds bubble_fraction simulated_seconds simulated_bubble_fraction trace_cost beside clock missing "
    "host_seconds lanes latencies num_processes clock_error"
).split()

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 }
main { max-width: 960px; margin: 0 auto; padding: 1rem }
svg, img { display: block; background: white; border-radius: 6px; margin-bottom: 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px }
th, td { border-bottom: 1px solid color-mix(in srgb, currentColor 18%, transparent) }
summary { cursor: pointer }
"""


def to_perfetto(profile: Profile) -> str:
    """The trace as JSON text in the trace event format, with times in microseconds, and the bytes of each device as counters.

    Each rank has a lane for what it computes, one for what arrives there and, where residuals wait in host memory, one for their
    copies; each host has a lane too.
    """
    ranks = profile.schedule.num_ranks
    events: list[dict[str, object]] = []
    for rank in range(ranks):
        events.append(_name("process_name", rank, 0, f"rank {rank}"))
        events += [_name("thread_name", rank, lane, text) for lane, text in ((_COMPUTE, "computes"), (_ARRIVALS, "receives"))]
        if any(span.copies and span.rank == rank for span in profile.spans):
            events.append(_name("thread_name", rank, _COPIES, "copies to host memory and back"))
    for process in sorted({span.process for span in profile.spans}):
        called = f"host of process {process}" if profile.num_processes > 1 else "host"
        events += [_name("process_name", ranks + process, 0, called), _name("thread_name", ranks + process, _HOST, "hands over")]
    for span in profile.spans:
        kind = "rest" if span.action is None else str(span.action.kind)
        lane, kind = (_ARRIVALS, "send") if span.sends else (_COPIES, "copy") if span.copies else (_COMPUTE, kind)
        events.append(_slice(span.label, kind, span.rank, lane, span.start, span.end))
        events.append(_slice(span.label, "host", ranks + span.process, _HOST, span.begun, span.handed))
    for rank, curve in enumerate(profile.memory):
        for time, level in zip(curve.times, curve.levels, strict=True):
            bytes_of = dict(zip(MEMORY_KINDS, level, strict=True))
            events.append({"ph": "C", "name": f"bytes on {curve.label}", "pid": rank, "tid": 0, "ts": 1e3 * time, "args": bytes_of})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def to_json(profile: Profile) -> str:
    """All numbers of a profile as JSON text, in seconds and bytes."""
    schedule, ledger = profile.schedule, profile.ledger
    return json.dumps(
        {
            "schedule": {"name": schedule.name, "rows": [list(map(str, row)) for row in schedule.rows]},
            "stage_to_rank": list(schedule.stage_to_rank),
            "devices": list(map(str, profile.devices)),
            **{name: getattr(profile, name) for name in _NUMBERS},
            "ranks": [
                {"busy": busy, "idle": idle, "causes": causes._asdict()}
                for busy, idle, causes in zip(profile.busy, profile.idle, profile.causes, strict=True)
            ],
            **({"passes": [each._asdict() for each in profile.passes]} if profile.passes else {}),
            "spans": _spans(profile.spans),
            "isolated": _spans(profile.isolated),
            "memory": [each._asdict() | {"device": str(each.device), "kinds": each.by_kind} for each in ledger.samples],
        }
    )


def to_html(profile: Profile) -> str:
    """The profile as a page of its own, for screens of any width: figure, causes of idle time, memory."""
    title = html.escape(profile.heading)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
    body = f"<main>{profile._repr_html_()}</main>"
    return f'<!DOCTYPE html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body>{body}</body></html>'


def _spans(spans: Iterable[Span]) -> list[object]:
    return [span._asdict() | {"action": span.action and str(span.action)} for span in spans]


def _name(what: str, pid: int, tid: int, text: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": text}}


def _slice(name: str, category: str, pid: int, tid: int, start: float, end: float) -> dict[str, object]:
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": 1e6 * start, "dur": 1e6 * (end - start)}
