"""``schedule="auto"``: the schedule made for the stages of this pipeline, when they are known.

The order is found by ``jaxpp.schedule.synthesise`` on the virtual clock, from what each stage takes and what its residuals need.
Memory is that of 1f1b: no rank holds more bytes of residuals than its first rank might, those of as many microbatches as there are
ranks. Every process of several finds the same schedule, as all know the same costs.

A made schedule turns often from one stage of a rank to another. Where stages visit (``host="params"``), each turn brings their
parameters over the link to host memory, so ``looped-bfs``, which turns least, is taken if it is shorter on the clock with these
copies, and if the residuals that it holds are no more than the state that no longer lives on the device.
"""

from collections.abc import Sequence
from dataclasses import replace

from jaxpp.engine.layout import links_of
from jaxpp.options import Options
from jaxpp.runtime.compile import Programs
from jaxpp.runtime.measure import action_times, link_times
from jaxpp.schedule.action import Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.costs import StepCosts
from jaxpp.schedule.registry import make
from jaxpp.schedule.simulate import Simulation
from jaxpp.schedule.synthesis.synthesise import synthesise
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.cuts.by_step import Links
from jaxpp.stages.cuts.cut_loss import CutLoss
from jaxpp.stages.estimate import rates_of
from jaxpp.stages.program import Role

_STATE = 4  # times the bytes of parameters: they, their gradients, and two moments of an optimizer


def made_for(
    options: Options,
    cut: CutLoss,
    programs: Programs,
    num_microbatches: int | None = None,
    stage_to_rank: Sequence[int] | None = None,
) -> Schedule:
    """The schedule of a pipeline whose loss was cut so, of as many microbatches as its options say unless given.

    Where parameters are on their devices already, ``stage_to_rank`` says where the stages are; else it is chosen too, unless ranks
    are of unequal width: the loss was cut for the width of each.
    """
    before, costs = options.schedule, stage_costs(options, cut, programs)
    stage_to_rank = stage_to_rank or (None if options.placement.is_even else before.stage_to_rank)
    ranks, microbatches, kept = before.num_ranks, num_microbatches or before.num_microbatches, costs.residuals
    owners = stage_to_rank or before.stage_to_rank
    own = [sum(size for size, owner in zip(kept, owners, strict=True) if owner == rank) for rank in range(ranks)]
    found = synthesise(
        ranks,
        microbatches,
        stages_per_rank=before.num_stages // ranks,
        stage_to_rank=stage_to_rank,
        room=min(ranks, microbatches) * max(own),
        forward=costs.actions[Kind.F],
        input_grad=costs.actions[Kind.I],
        weight_grad=costs.actions[Kind.W],
        transfer=costs.transfer,
        residuals=kept,
    )
    return _visiting(options, cut, costs, found) if Role.PARAM in options.waiting else found


def _visiting(options: Options, cut: CutLoss, costs: StepCosts, found: Schedule) -> Schedule:
    ranks, count = found.num_ranks, found.num_microbatches
    other = make("looped-bfs", ranks, count, found.num_stages // ranks)
    if other.stage_to_rank != found.stage_to_rank:
        return found
    sizes = [sum(count_bytes(aval) for ref, aval in code.reads.items() if ref.role == Role.PARAM) for code in cut.stages]
    for rank in range(ranks):
        own = [stage for stage, home in enumerate(found.stage_to_rank) if home == rank]
        gone = sorted(_STATE * sizes[stage] for stage in own)[:-2]  # all but what a device holds of two stages
        if count * sum(costs.residuals[stage] for stage in own) > min(ranks, count) * max(costs.residuals) + sum(gone):
            return found
    per_byte = 1 / rates_of(options.devices[0]).host
    visits = replace(costs, visit=tuple(size * per_byte for size in sizes))
    best = min((found, other), key=lambda order: Simulation(order, visits).makespan)
    return replace(best, name=found.name)


def stage_costs(options: Options, cut: CutLoss, programs: Programs) -> StepCosts:
    """Seconds: measured with ``balance="time"``, otherwise estimated."""
    places, each = options.placement.places, (Kind.F, Kind.I, Kind.W)
    if options.balance == "time":
        kinds = {Kind.F, *(kind for code in cut.stages for kind in (Kind.I, Kind.W) if kind in code.backward)}
        times = action_times(cut, kinds, places, programs, 'Pipeline(schedule="auto", balance="time")')
        actions, links = {kind: tuple(times.get(kind, [0.0] * len(places))) for kind in each}, Links(*link_times(places))
    else:
        rates = rates_of(options.devices[0])
        costs = [code.costs if rates == code.rates else code.costs_at(rates) for code in cut.stages]
        actions, links = {kind: tuple(stage[kind.value] for stage in costs) for kind in each}, links_of(options.placement)
    moved = zip(links.per_send, links.per_byte, boundary_bytes(cut), strict=True)
    kept = tuple(code.kept for code in cut.stages)
    return StepCosts(actions, transfer=tuple(send + byte * size for send, byte, size in moved), residuals=kept)


def boundary_bytes(cut: CutLoss) -> list[int]:
    """What crosses each boundary between two stages, for one microbatch."""
    spans = [(aval, made, max(readers)) for aval, made, readers in zip(cut.activations, cut.producer, cut.consumers, strict=True)]
    return [sum(count_bytes(aval) for aval, made, last in spans if made <= s < last) for s in range(len(cut.stages) - 1)]
