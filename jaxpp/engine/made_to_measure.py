"""``schedule="auto"``: the schedule made for the stages of this pipeline, when they are known.

The order is found by ``jaxpp.schedule.synthesise`` on the virtual clock, from what each stage takes and what its residuals need.
Memory is that of 1f1b: no rank holds more bytes of residuals than its first rank might, those of as many microbatches as there are
ranks. Every process of several finds the same schedule, as all know the same costs.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxpp.options import Options
from jaxpp.runtime.compile import Programs
from jaxpp.runtime.measure import action_times, link_times
from jaxpp.schedule.action import Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.synthesis.synthesise import synthesise
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.cuts.cut_loss import CutLoss


class Costs(NamedTuple):
    """What stages take for one microbatch, and transfers between them, in one unit of time."""

    forward: Sequence[float]
    input_grad: Sequence[float]
    weight_grad: Sequence[float]
    transfer: Sequence[float]


def made_for(options: Options, cut: CutLoss, programs: Programs) -> Schedule:
    """The schedule of a pipeline whose loss was cut so."""
    before, kept = options.schedule, [code.kept for code in cut.stages]
    ranks, microbatches = before.num_ranks, before.num_microbatches
    own = [sum(size for size, owner in zip(kept, before.stage_to_rank, strict=True) if owner == rank) for rank in range(ranks)]
    costs = stage_costs(options, cut, programs)
    return synthesise(
        ranks,
        microbatches,
        stages_per_rank=before.num_stages // ranks,
        residuals=kept,
        room=min(ranks, microbatches) * max(own),
        **costs._asdict(),
    )


def stage_costs(options: Options, cut: CutLoss, programs: Programs) -> Costs:
    """Seconds by measurement with ``balance="time"``, and otherwise FLOPs, where I and W take as many as F, and transfers nothing.

    A stage whose backward runs its forward again does so in I.
    """
    if options.balance == "time":
        places = options.placement.places
        kinds = {Kind.F, *(kind for code in cut.stages for kind in (Kind.I, Kind.W) if kind in code.backward)}
        times = action_times(cut, kinds, places, programs, 'Pipeline(schedule="auto", balance="time")')
        none = [0.0] * len(cut.stages)
        per_send, per_byte = link_times(places)
        moved = zip(per_send, per_byte, boundary_bytes(cut), strict=True)
        transfer = [send + byte * size for send, byte, size in moved]
        return Costs(times[Kind.F], times.get(Kind.I, none), times.get(Kind.W, none), transfer)
    again = [kept.recomputes for kept in options.remat or ()] or [False] * len(cut.stages)
    flops = [code.flops for code in cut.stages]
    inner = [
        work * ((Kind.I in code.backward) + recomputes) for work, code, recomputes in zip(flops, cut.stages, again, strict=True)
    ]
    weight = [work * (Kind.W in code.backward) for work, code in zip(flops, cut.stages, strict=True)]
    return Costs(flops, inner, weight, [0.0] * (len(flops) - 1))


def boundary_bytes(cut: CutLoss) -> list[int]:
    """What crosses each boundary between two stages, for one microbatch."""
    spans = [(aval, made, max(readers)) for aval, made, readers in zip(cut.activations, cut.producer, cut.consumers, strict=True)]
    return [sum(count_bytes(aval) for aval, made, last in spans if made <= s < last) for s in range(len(cut.stages) - 1)]
