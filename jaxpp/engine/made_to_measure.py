"""``schedule="auto"``: the schedule made for the stages of this pipeline, when they are known.

The order is found by ``jaxpp.schedule.synthesise`` on the virtual clock, from what each stage takes and what its residuals need.
Memory is that of 1f1b: no rank holds more bytes of residuals than its first rank might, those of as many microbatches as there are
ranks. Every process of several finds the same schedule, as all know the same costs.
"""

from jaxpp.engine.layout import links_of
from jaxpp.options import Options
from jaxpp.runtime.compile import Programs
from jaxpp.runtime.measure import action_times, link_times
from jaxpp.schedule.action import Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.synthesis.synthesise import synthesise
from jaxpp.schedule.synthesis.work import StageCosts
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.cuts.cut_loss import CutLoss


def made_for(options: Options, cut: CutLoss, programs: Programs, num_microbatches: int | None = None) -> Schedule:
    """The schedule of a pipeline whose loss was cut so, of as many microbatches as its options say unless given."""
    before, costs = options.schedule, stage_costs(options, cut, programs)
    ranks, microbatches, kept = before.num_ranks, num_microbatches or before.num_microbatches, costs.residuals
    own = [sum(size for size, owner in zip(kept, before.stage_to_rank, strict=True) if owner == rank) for rank in range(ranks)]
    return synthesise(
        ranks,
        microbatches,
        stages_per_rank=before.num_stages // ranks,
        room=min(ranks, microbatches) * max(own),
        **costs._asdict(),
    )


def stage_costs(options: Options, cut: CutLoss, programs: Programs) -> StageCosts:
    """Seconds: measured with ``balance="time"``, otherwise estimated."""
    kept = tuple(code.kept for code in cut.stages)
    if options.balance == "time":
        places = options.placement.places
        kinds = {Kind.F, *(kind for code in cut.stages for kind in (Kind.I, Kind.W) if kind in code.backward)}
        times = action_times(cut, kinds, places, programs, 'Pipeline(schedule="auto", balance="time")')
        none = [0.0] * len(cut.stages)
        per_send, per_byte = link_times(places)
        moved = zip(per_send, per_byte, boundary_bytes(cut), strict=True)
        transfer = [send + byte * size for send, byte, size in moved]
        forward, inner, weight = (tuple(times.get(kind, none)) for kind in (Kind.F, Kind.I, Kind.W))
        return StageCosts(forward, inner, weight, tuple(transfer), kept)
    forward, inner, weight = (tuple(code.costs[kind] for code in cut.stages) for kind in "FIW")
    sends = zip(links_of(options.placement).per_byte, boundary_bytes(cut), strict=True)
    return StageCosts(forward, inner, weight, tuple(seconds * size for seconds, size in sends), kept)


def boundary_bytes(cut: CutLoss) -> list[int]:
    """What crosses each boundary between two stages, for one microbatch."""
    spans = [(aval, made, max(readers)) for aval, made, readers in zip(cut.activations, cut.producer, cut.consumers, strict=True)]
    return [sum(count_bytes(aval) for aval, made, last in spans if made <= s < last) for s in range(len(cut.stages) - 1)]
