"""A machine of numbers: what a search asks, answered from costs that a test injects, by clocks that are not the tuner's own."""

import dataclasses
import functools
import itertools

import numpy as np

from jaxpp.errors import CutError
from jaxpp.schedule import Kind, make, simulate
from jaxpp.schedule.costs import StepCosts
from jaxpp.schedule.registry import SCHEDULES

MIB = 2**20
made = functools.cache(make)


@dataclasses.dataclass
class Virtual:
    """Costs of a model of ``work`` seconds of forward, and the memory of its stages.

    ``stretch`` is drawn anew for each family, so that no cost follows from that of another family.
    """

    num_ranks: int = 4
    work: float = 8.0
    fixed: float = 0.0
    dispatch: float = 1e-3
    transfer: float = 0.01
    copy: float = 0.02
    before: float = 0.02
    after: float = 0.1
    after_dispatch: float = 0.01
    capacity: float | None = None
    params: int = 30 * MIB
    residuals: int = 400 * MIB
    seed: int | None = None
    layers: tuple[float, ...] = ()  # what each layer takes of the work; all stages take as much if there are none
    most_stages: int = 64
    wrong: float = 1.0
    noise: tuple[float, ...] = (1.0,)
    remark: str = ""
    param_bytes: int = 4 * MIB
    asked: list = dataclasses.field(default_factory=list)
    weighed: list = dataclasses.field(default_factory=list)
    ran: list = dataclasses.field(default_factory=list)
    known: dict = dataclasses.field(default_factory=dict)

    def stretch(self, family, what):
        if self.seed is None:
            return (1.0,) * family.num_stages
        drawn = [self.seed, family.num_stages, family.num_microbatches, family.splits, "FIW".index(what)]
        return tuple(np.random.default_rng(drawn).lognormal(0, 0.3, family.num_stages).tolist())

    def kinds(self, family):
        """Seconds of F, I and W for each stage; B is I and W, and recomputing one more F."""
        each = [self.work * share / family.num_microbatches + self.fixed for share in self.shares(family)]
        f, i, w = ([own * x for own, x in zip(each, self.stretch(family, what), strict=True)] for what in "FIW")
        return f, [a + b * (family.remat == "recompute") for a, b in zip(i, f, strict=True)], w

    def cuts(self, candidate):
        """Even ones, or those of all cuts into whole layers with the shortest step under the candidate's schedule."""
        stages, layers = candidate.schedule.num_stages, self.layers or (1.0,) * 4 * candidate.schedule.num_stages
        if candidate.balance == "flops" or not self.layers:
            return tuple(len(layers) * s // stages for s in range(1, stages))

        def step(cuts):
            return self.seconds(dataclasses.replace(candidate, cuts=cuts))

        return min(itertools.combinations(range(1, len(layers)), stages - 1), key=step)

    def kept(self, family):
        each = self.residuals * (0.25 if family.remat == "recompute" else 1.0) / family.num_stages / family.num_microbatches
        return (int(each),) * family.num_stages

    def shares(self, family):
        """What part of the model each stage has."""
        if not self.layers:
            return (1 / family.num_stages,) * family.num_stages
        count = len(self.layers)
        cuts = family.cuts or tuple(count * s // family.num_stages for s in range(1, family.num_stages))
        return [sum(self.layers[a:b]) / sum(self.layers) for a, b in itertools.pairwise([0, *cuts, count])]

    def costs(self, family):
        self.asked.append(family)
        if family.num_stages > self.most_stages:
            raise CutError("Pipeline(...)", "too many stages", f"{family.num_stages}", "use fewer")
        f, i, w = map(tuple, self.kinds(family))
        actions = {Kind.F: f, Kind.B: tuple(a + b for a, b in zip(i, w, strict=True))}
        actions |= {Kind.I: i, Kind.W: w} if family.splits else {}
        n = family.num_stages
        return StepCosts(
            actions=actions,
            dispatch=dict.fromkeys(actions, (self.dispatch,) * n),
            transfer=(self.transfer,) * (n - 1),
            offload=(self.copy,) * n,
            offload_dispatch=(0.0,) * n,
            before=self.before,
            after=(self.after / n,) * n,
            after_dispatch=self.after_dispatch,
            capacity=self.num_ranks if self.capacity is None else self.capacity,
        )

    def simulated(self, candidate):
        if candidate not in self.known:
            self.known[candidate] = self.simulation(candidate)
        return self.known[candidate]

    def simulation(self, candidate):
        schedule = candidate.schedule
        f, i, w = self.kinds(candidate.family)
        given = {"forward": f, "input_grad": i, "weight_grad": w, "transfer": self.transfer, "dispatch": self.dispatch}
        kept = {"offload": 1, "copy": self.copy} if candidate.remat == "offload" else {}
        return simulate(schedule, **given, capacity=self.capacity, **kept)

    def seconds(self, candidate):
        """A step by ``jaxpp.schedule.simulate``, with what comes before and after added to the end of each rank.

        Ranks that share cores must have nothing to do after the last action.
        """
        found, schedule = self.simulated(candidate), candidate.schedule
        assert self.capacity is None or self.after == 0
        handed = len(schedule.order) * self.dispatch + self.after_dispatch
        of_rank = self.after / schedule.num_ranks  # every rank has as many stages
        return self.before + max(max(ends[-1], handed) for ends in found.times.ends) + of_rank

    def peaks(self, candidate):
        self.weighed.append(candidate)
        return self.bytes(candidate)

    def bytes(self, candidate):
        schedule = candidate.schedule
        each = self.residuals * (0.25 if candidate.remat == "recompute" else 1.0) / schedule.num_stages / schedule.num_microbatches
        held = self.simulated(candidate).peak_residuals
        return tuple(int(self.params + rank * MIB + count * each) for rank, count in enumerate(held))

    def step(self, candidate):
        self.ran.append(candidate)
        return self.wrong * self.seconds(candidate)

    def steps(self, candidates):
        return [tuple(time * part for part in self.noise) for time in map(self.step, candidates)]


def everything(num_ranks, counts, remat=("least",)):
    """Names, sizes and remat of all candidates, listed by hand."""
    for name, recipe in SCHEDULES.items():
        for count in counts:
            if recipe.allows(num_ranks, count):
                for kept in remat:
                    yield made(name, num_ranks, count), kept
