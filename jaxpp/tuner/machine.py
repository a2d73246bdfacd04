"""``Devices``: the devices themselves say what families cost, what candidates hold, and how long their steps take.

A family is traced, cut and compiled once, with a plain schedule. In some of its steps the host waits for each instruction, so that
every program and every send takes what it takes alone; others run at full speed, and say what the host takes to hand an instruction
over. The costs are then made to agree with a whole step (``fitted``), since what ranks that share cores take from one another shows
only when they run together. Memory is counted. What was measured is remembered in a file.
"""

import copy
import dataclasses
import hashlib
import itertools
import json
import math
import os
import secrets
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxpp.engine.compared import opening_texts
from jaxpp.engine.engine import Engine, open_engine
from jaxpp.engine.init_arguments import InitArguments, first_leaves, variables_of
from jaxpp.engine.layout import Layout, Traces
from jaxpp.engine.tracing import Tracing
from jaxpp.errors import ArgumentError
from jaxpp.errors.checks import check_ranks
from jaxpp.lowering.builder import Name
from jaxpp.lowering.plan import Plan
from jaxpp.lowering.step import Leaves
from jaxpp.observe.bound import bound_of, estimated_costs
from jaxpp.observe.evaluate import costs_of_plan, step_seconds
from jaxpp.observe.memory.forecast import Forecast, forecast, room_of, with_waiting
from jaxpp.observe.memory.liveness import Estimates, Needs, brought, estimated_liveness, liveness_of_all, program_needs
from jaxpp.observe.profile.record import AllProcesses, Seen, SeenStep, Stamps, Steps, run_once
from jaxpp.observe.profile.spans import durations_of
from jaxpp.options import Options
from jaxpp.runtime.measure import copy_times, host_times
from jaxpp.runtime.not_public import cudnn_of
from jaxpp.runtime.place import axis_map, mesh_of_ranks, num_places
from jaxpp.runtime.processes.channel import align_clocks, rows_of_all, told_by_all
from jaxpp.runtime.processes.here import processes_of
from jaxpp.schedule.action import Action, Kind
from jaxpp.schedule.base import Schedule
from jaxpp.schedule.costs import StepCosts
from jaxpp.schedule.registry import SCHEDULES, make
from jaxpp.stages.cost import coarsest_dtype, count_bytes
from jaxpp.stages.cuts.cut_loss import CutLoss
from jaxpp.stages.estimate import rates_of
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.loss.rng_key import positional_key
from jaxpp.stages.own_params import Joint, join_losses, join_optimizers
from jaxpp.tables import bytes_in_words
from jaxpp.targets import compiles_only
from jaxpp.tasks.bank import Bank
from jaxpp.tuner.search import KNOBS, Candidate, Family
from jaxpp.types import Array, Batch, Device, Key, LossFn, Tree

_MEASURED = 2.5  # seconds for the steps of a family, beside those that are looked at; twice for the first, which tells the pace
_TIMED = 2.0  # seconds for the steps of a candidate, in all rounds
_ROUNDS = 3  # in each, every candidate runs some steps: what disturbs the machine for a while disturbs all of them
_WARM_UP = 3  # steps that do not count: the first find the caches of other programs
_LEAST = 6  # steps that are timed, however long they take; half as many in a round
_LOOKS = 3  # steps of each kind that are looked at
_HALVINGS = 30
_MOST = 4.0  # how much longer actions may take in a step than alone, or less long
_KIND = "jaxpp tune 9"  # what a file of results says of itself; another number for other contents


class Devices:
    """A ``Machine`` that runs steps on copies of the parameters; results are kept in the user's cache folder, or in ``keep``.

    One that does not even compile (``compiles=False``) estimates costs and peaks from shapes, of devices whose numbers are known.
    Those of the same loss, optimizer and parameters may share ``traces``.
    """

    def __init__(  # noqa: PLR0913  (the options of the front doors)
        self,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation,
        init_or_params: Tree,
        batch: Batch,
        key: Key | None = None,
        *,
        devices: Sequence[Device | Sequence[Device]] | None = None,
        mesh: Mesh | None = None,
        options: Mapping[str, Any] | None = None,
        keep: bool | str | os.PathLike[str] = True,
        compiles: bool = True,
        traces: Traces | None = None,
    ):
        self._compiles, self._estimates = compiles, Estimates()
        self._ranks, self._options = tuple(jax.devices() if devices is None else devices), dict(options or {})
        bank: Bank | None = self._options.pop("bank", None)
        self._num_waiting = 0 if bank is None else bank.host_store.slots - 1
        leaves = jax.tree.leaves(init_or_params)
        self._makes = callable(init_or_params) and len(leaves) == 1 and leaves[0] is init_or_params  # and no callable parameters
        if bank is not None:  # its first set is there when a step begins, and the steps change a copy
            has_state = bool(self._options.get("has_state"))
            loss_fn = join_losses(positional_key(loss_fn, 3 + has_state))
            optimizer = join_optimizers(optimizer, bank.optimizer)
            own, init = bank.params(bank.tasks[0]), init_or_params

            def join(made: Tree) -> Tree:
                return (Joint(made[0], own), *made[1:]) if has_state else Joint(made, own)

            init_or_params = (lambda key: join(init(key))) if self._makes else join(init)
        self._loss_fn, self._optimizer, self._made, self._batch = loss_fn, optimizer, init_or_params, batch
        self._key = jax.random.key(0) if key is None else key
        self._mesh, self._axes = mesh, axis_map(self._options.get("axes"), mesh)
        self._families: dict[tuple[Family, Hashable], tuple[_Steps, Needs]] = {}  # by what replicas divide and what waits, too
        self._elsewhere: dict[str, _Results] = {}  # what was found where other parts of the state are divided, or wait
        self._layouts: dict[Family, Layout] = {}  # of families with cuts for another schedule than a plain one
        self._pace, self._traces = _Pace(), traces or Traces()
        self.num_measured = 0
        if not compiles:
            self._results = _Results(False, "", several=False)
            return
        whole = self._open(Candidate(make("naive", 1, 1), "keep"))
        self.param_bytes = sum(map(count_bytes, jax.tree.leaves(whole.engine.layout.given[0])))
        engine, kinds = whole.engine, Counter((each.platform, each.device_kind, each.process_index) for each in self._devices)
        texts = {  # all that decides what a search measures
            **opening_texts(engine.options, engine.placed, whole.cut, batch, whole.key),
            "key": "none" if whole.key is None else describe(whole.key),
            "devices": "\n".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())),
            "mesh": f"ranks of {list(map(len, check_ranks(self._ranks)))}" if mesh is None else str(dict(mesh.shape)),
            "cores": str(os.cpu_count()),
            "waiting": str(self._num_waiting),
        }
        name = f"{_digest(json.dumps(texts, sort_keys=True))}.json"
        self._results = _Results(keep, name, several=len(processes_of(self._devices)) > 1)

    @property
    def _devices(self) -> tuple[Device, ...]:
        return tuple(itertools.chain(*check_ranks(self._ranks)))

    @property
    def remark(self) -> str:
        """What is wrong with the file of results; empty if nothing is."""
        return self._results.remark

    def elsewhere(self, devices: Sequence[Device], mesh: Mesh | None, **options: object) -> "Devices":
        """The same where other GPUs are in their places, and where ``shard`` and ``host`` are these, if it compiles nothing.

        What is traced and cut is the same.
        """
        other = copy.copy(self)
        other._ranks, other._mesh, other._options = tuple(devices), mesh, {**self._options, **options}
        other._results = self._elsewhere.setdefault(str(options), _Results(False, "", several=False))
        return other

    def costs(self, family: Family) -> StepCosts:
        """Measure a family, unless it was measured before."""
        if not self._compiles:
            return self._measured(family)
        name = " ".join(f"{name}={value}" for name, value in family._asdict().items())
        found = self._results.known("costs", name, lambda: dataclasses.asdict(self._measured(family)))
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
        for table in ("actions", "dispatch"):
            values[table] = {Kind(kind): tuple(own) for kind, own in values[table].items()}
        return StepCosts(**values)

    def peaks(self, candidate: Candidate) -> tuple[int, ...]:
        """The bytes that each device holds at its peak, of each rank in order."""
        return tuple(self._result("peaks", [candidate], lambda: self._peaks_of(self._steps(candidate), candidate.family)))

    def arithmetic(self, family: Family) -> tuple[float, float]:
        """FLOPs of a microbatch, without what is run again; and FLOP/s of a device at the peak of the type that they are of."""
        cut = self._family(family)[0].cut
        type_ = coarsest_dtype(cut.loss.graph.eqns)
        rates = rates_of(self._devices[0]).peaks
        kind = "tensorfloat32" if type_ is None or type_.name == "float32" else type_.name
        flops = sum(code.flops + code.backward_flops - code.repeated for code in cut.stages)
        return flops, getattr(rates, kind, None) or rates.vector

    def compiled(self, candidate: Candidate, room: int) -> Forecast:
        """The memory of a candidate's own programs, with their bound and the prediction of a step."""
        steps = self._open(candidate)
        found = forecast(steps.engine, self._batch, steps.key, room, self._waiting(steps), advise=False)
        return dataclasses.replace(found, bound=bound_of(steps.engine, self._batch, steps.key))

    def cuts(self, candidate: Candidate) -> tuple[int, ...]:
        """Where the pipeline of a candidate cuts its loss; nothing is compiled for it, unless stages are measured for the cut."""
        if candidate.balance == "flops":  # whatever the schedule
            return self._family(candidate.family)[0].engine.layout.cuts
        layout = self._open(candidate).engine.layout
        self._layouts[candidate.family._replace(splits=False, cuts=layout.cuts)] = layout
        return layout.cuts

    def kept(self, family: Family) -> tuple[int, ...]:
        """The bytes of residuals that each stage keeps of a microbatch."""
        return tuple(code.kept for code in self._family(family)[0].cut.stages)

    def steps(self, candidates: Sequence[Candidate]) -> list[tuple[float, ...]]:
        """The seconds of some steps of each, from call to results, in rounds; on shared cores, at the first pace (``_Pace``).

        Only the candidate that runs has its state on the devices.
        """

        def run() -> list[list[float]]:
            self.num_measured += len(candidates)
            self._open_reference()
            opened, seconds = [self._steps(candidate) for candidate in candidates], [list[float]() for _ in candidates]
            for number in range(_ROUNDS):
                warm_up = 1 if number else _WARM_UP
                for steps, taken in zip(opened, seconds, strict=True):
                    taken.extend(self._pace.timed(steps, _TIMED / _ROUNDS, warm_up=warm_up, least=_LEAST // 2).steps)
                    steps.leaves = None
            return seconds

        return [tuple(taken) for taken in self._result("steps", candidates, run)]

    def _result(self, kind: str, candidates: Sequence[Candidate], ask: Callable[[], Any]) -> Any:
        names: list[str] = []
        for candidate in candidates:
            rows = _digest(candidate.schedule.to_csv())
            names.append(" ".join([*(f"{knob.name}={knob.value(candidate)}" for knob in KNOBS), f"cuts={candidate.cuts}", rows]))
        return self._results.known(kind, ", ".join(names), ask)

    def _options_of(self, candidate: Candidate) -> Options:
        given = {**candidate.options, "schedule": candidate.schedule, **self._options}
        if self._mesh is None:
            options = Options.of(self._loss_fn, devices=self._ranks, **given)
        else:
            options = Options.of(self._loss_fn, mesh=mesh_of_ranks(self._mesh, candidate.schedule.num_ranks, self._axes), **given)
        return dataclasses.replace(options, examined=self._compiles)

    def _num_ranks(self, family: Family) -> int:
        """As many as there can be."""
        return num_places(self._ranks, self._mesh, family.replicas, self._axes)

    def _open(self, candidate: Candidate, like: Layout | None = None) -> "_Steps":
        options = self._options_of(candidate)
        given = InitArguments(self._made, self._batch, self._key if self._makes else None, "jaxpp.tune")
        with cudnn_of(self._devices):
            shapes = given.shapes(options.axes)
        variables = variables_of(options, shapes)
        key = Tracing(options).key_for(variables, self._batch, self._key)
        engine = open_engine(options, self._optimizer, variables, self._batch, key, like=like, traces=self._traces)
        if engine.placed.per_replica:
            engine.preparer.groups.set([0] * engine.placement.num_replicas)  # all of them run the same task
        return _Steps(engine, self._batch, key, self._variables)

    def _variables(self) -> Tree:
        if not self._makes:
            return self._made
        try:
            host = jax.local_devices(backend="cpu")[0]
        except RuntimeError:  # a process without a CPU backend makes them on its first device
            host = jax.local_devices()[0]
        with jax.default_device(host):
            self._made, self._makes = jax.device_get(jax.jit(self._made)(self._key)), False
        return self._made

    def _plain(self, family: Family) -> Candidate:
        visits = not self._compiles and self._options.get("host") == "params"
        schedule = plain_schedule(family, self._num_ranks(family), visits=visits)
        return Candidate(schedule, family.remat, family.balance, family.replicas, unequal=bool(family.homes))

    def _family(self, family: Family) -> tuple["_Steps", Needs]:
        options = self._options_of(self._plain(family))
        name = family, (options.shard, options.host)
        if name not in self._families:
            steps = self._opened(family, options)
            needs = program_needs(steps.engine, self._batch, steps.key) if self._compiles else Needs()
            self._families[name] = steps, needs
        return self._families[name]

    def _opened(self, family: Family, options: Options) -> "_Steps":
        """A family with the cuts of one that differs in what stages keep, in kinds of backwards or in where the state is."""
        plain = family._replace(remat="", splits=False)
        for (other, _), (steps, _) in self._families.items():
            if family.balance == "flops" and other._replace(remat="", splits=False) == plain:
                engine, names = steps.engine, ("schedule", "remat", "offload", "shard", "host")
                changed = {name: getattr(options, name) for name in names}
                engine = engine.with_options(dataclasses.replace(engine.options, made_to_measure=False, **changed))
                return _Steps(engine, self._batch, steps.key, self._variables)
        return self._open(self._plain(family), self._layouts.get(family._replace(splits=False)))

    def _steps(self, candidate: Candidate) -> "_Steps":
        steps, options = self._family(candidate.family)[0], self._options_of(candidate)
        return _Steps(steps.engine.with_schedule(options.schedule, options.offload), self._batch, steps.key, self._variables)

    def _peaks_of(self, steps: "_Steps", family: Family) -> tuple[int, ...]:
        if not self._compiles:
            liveness = with_waiting(estimated_liveness(steps.engine, self._batch, steps.key, self._estimates), self._waiting(steps))
            return tuple(liveness.most(place.shown) for place in steps.engine.placement.by_rank)
        shards = steps.engine.placement.num_shards > 1  # how residuals are sharded only the candidate's own programs say
        liveness = liveness_of_all(steps.engine, self._batch, steps.key, known=None if shards else self._family(family)[1])
        liveness = with_waiting(liveness, self._waiting(steps))
        return tuple(liveness.most(place.shown) for place in steps.engine.placement.by_rank)

    def _waiting(self, steps: "_Steps") -> list[Name]:
        """Of the leaves of a bank's sets, those that wait beside the set in use."""
        return steps.engine.placed.names.own * self._num_waiting

    def _measured(self, family: Family) -> StepCosts:
        self.num_measured += 1
        if not self._compiles:
            steps, _ = self._family(family)
            return estimated_costs(steps.engine, self._batch, steps.key, self._options_of(self._plain(family)))
        if compiles_only(self._devices[0]):
            return self._predicted(family)
        if family.cuts and self._pace.reference is None:  # a reference is cut so that it can be opened in another process, too
            self.costs(family._replace(balance="flops", cuts=()))
        steps, plain = self._runnable(family)
        self._open_reference()
        engine = steps.engine
        pace = self._pace.timed(steps, 2 * _MEASURED if self._pace.reference is None else _MEASURED, looks=True)
        costs = _step_costs(steps.whole_plan, family.num_stages, pace.free, pace.apart)
        if family.remat == "least":
            seconds, handed = copy_times(steps.cut, engine.placement.places)
            costs = dataclasses.replace(costs, offload=tuple(seconds), offload_dispatch=tuple(handed))
        if engine.options.waiting:
            brings = brought(engine, engine.lower("update", self._batch, steps.key))
            costs = costs.visited(brings, host_times(engine.placement.places))
        places = engine.placement.by_rank
        on_cores = places[0].devices[0].platform == "cpu"  # which devices share with one another and with whatever else runs there
        if self._pace.reference is not None or not on_cores:
            steps.leaves = None
        else:
            self._pace = _Pace(steps, pace.seconds)
            self._results.put("reference", "of the pace", [list(family), pace.seconds])
        processes = tuple(place.devices[0].process_index for place in places)
        shared = on_cores or len(set(places)) < len(places)
        return fitted(costs.slowed(1 / pace.factor), plain, pace.seconds, shared=shared, processes=processes)

    def _predicted(self, family: Family) -> StepCosts:
        """What a family is predicted to cost on devices that only compile, by their numbers and what kernels reach of them."""
        steps, _ = self._family(family)
        bound = bound_of(steps.engine, self._batch, steps.key)
        if bound is None:
            rule = "on devices that only compile, candidates are compared by the numbers of the GPU"
            raise ArgumentError("jaxpp.tune(...)", rule, "a GPU whose numbers are not known", "pass devices=jaxpp.target(...)")
        if family.remat != "least":
            return bound.likely
        return dataclasses.replace(bound.likely, offload=tuple(copy_times(steps.cut, steps.engine.placement.places)[0]))

    def _open_reference(self) -> None:
        reference = self._results.get("reference", "of the pace")
        if reference is not None and self._pace.reference is None:
            family, seconds = Family(*reference[0]), reference[1]
            self._pace = _Pace(self._runnable(family._replace(cuts=tuple(family.cuts), homes=tuple(family.homes)))[0], seconds)

    def _runnable(self, family: Family) -> tuple["_Steps", Candidate]:
        """A candidate of a family for which there is room on the devices, as far as these say how much they have."""
        steps, _ = self._family(family)
        rooms = [room_of(steps.engine, None)]
        if not steps.engine.alone:
            rooms = told_by_all(rooms[0])
        room = min((each for each in rooms if each is not None), default=None)
        usual = steps.engine.options.schedule
        for schedule in (usual, one_at_a_time(usual)):
            candidate = Candidate(schedule, family.remat, family.balance, family.replicas, family.cuts, bool(family.homes))
            tried = steps if schedule is usual else self._steps(candidate)
            peak = max(self._peaks_of(tried, family))
            if room is None or peak <= room:
                return tried, candidate
        rule = "programs are measured on the devices, which must have room for one microbatch at a time"
        got = f"{family.words}: {bytes_in_words(peak)}, and devices of {bytes_in_words(room)}"
        raise ArgumentError("jaxpp.tune(...)", rule, got, "allow more stages or microbatches, or a smaller batch")


class _Steps(Steps):
    """An engine and, once it runs, a state: steps that run one after another. ``variables`` makes the first parameters."""

    leaves: Leaves[Array] | None

    def __init__(self, engine: Engine, batch: Batch, key: Key | None, variables: Callable[[], Tree]):
        self.engine, self.batch, self.key, self._variables = engine, batch, key, variables
        self.leaves = None

    @property
    def cut(self) -> CutLoss:
        return self.engine.preparer.step(self.batch, self.key).cuts[0]

    @cached_property
    def own_plan(self) -> Plan:
        """The lines of this process."""
        return self.engine.plan("update", self.batch, self.key)[0]

    @cached_property
    def whole_plan(self) -> Plan:
        return self.own_plan if self.engine.alone else self._all_processes.plan

    @cached_property
    def _all_processes(self) -> AllProcesses:
        self.engine.plan("update", self.batch, self.key)
        return AllProcesses(self.engine, self.batch, self.key, align_clocks())

    def _first(self) -> Leaves[Array]:
        engine, names, homes = self.engine, self.engine.placed.names, self.engine.placed.homes
        leaves = first_leaves(engine, InitArguments(self._variables(), self.batch, None, "jaxpp.tune"), names, homes)
        return engine.first_state(leaves._replace(opt=engine.make_opt_state(leaves.all_params)))

    def step(self, observer: Stamps | None = None) -> SeenStep:
        self.leaves = self._first() if self.leaves is None else self.leaves
        return run_once(self, observer)[0]

    def timed(self) -> float:
        seen = self.step()
        taken = seen.ended - seen.begun
        return taken if self.engine.alone else float(rows_of_all(np.array([taken], np.float32)).max())

    def told(self, steps: Sequence[SeenStep]) -> list[SeenStep]:
        if self.engine.alone or not steps:
            return list(steps)
        return list(self._all_processes.seen(Seen(tuple(steps), "", 0.0)).steps)


class _Paced(NamedTuple):
    """What some turns found."""

    steps: tuple[float, ...]  # seconds of each, at the speed that the machine had at first
    factor: float  # how much longer a step took than at that speed, the median
    free: tuple[SeenStep, ...]  # steps at full speed that were looked at
    apart: tuple[SeenStep, ...]  # steps in which each instruction waited for the one before

    @property
    def seconds(self) -> float:
        """The median of a step."""
        return statistics.median(self.steps)


@dataclasses.dataclass(frozen=True)
class _Pace:
    """How fast the machine is at the moment, told by one step that is run again and again: the reference.

    Forced CPU devices share their cores with whatever else the machine does, and its speed may change by half within seconds. So
    the steps of a family run by turns with the reference, and their seconds are divided by the factor by which the reference takes
    longer than at first. Devices that compute for nobody else have no reference: there the factor is 1.
    """

    reference: _Steps | None = None
    usual: float = 0.0  # seconds of its step at the speed that counts

    def timed(self, steps: _Steps, budget: float, *, looks: bool = False, warm_up: int = _WARM_UP, least: int = _LEAST) -> _Paced:
        """Run steps by turns with the reference, for so many seconds; before that, some are looked at if ``looks``."""
        first = min(steps.timed() for _ in range(warm_up))
        seen = [steps.step(Stamps(waits=waits)).timed(steps.own_plan) for waits in (True, False) * (_LOOKS if looks else 0)]
        count = min(40, max(least, math.ceil(budget / (first + self.usual))))
        seconds, factors = list[float](), [self._factor()]
        for _ in range(count):
            seconds.append(steps.timed())
            factors.append(self._factor())
        between = [(before + after) / 2 for before, after in itertools.pairwise(factors)]
        own = tuple(taken / factor for taken, factor in zip(seconds, between, strict=True))
        seen = steps.told(seen)
        return _Paced(own, statistics.median(between), tuple(seen[1::2]), tuple(seen[::2]))

    def _factor(self) -> float:
        return 1.0 if self.reference is None else self.reference.timed() / self.usual


def plain_schedule(family: Family, num_ranks: int, *, visits: bool = False) -> Schedule:
    """A schedule that holds few residuals, on as many ranks as the candidates of the family have; or has few ``visits``."""
    stages, microbatches = family.num_stages, family.num_microbatches
    if family.homes:
        plain = make("zb-h1" if family.splits else "1f1b", stages, microbatches)
        ranks = range(max(family.homes) + 1)
        rows = (tuple(action for action in plain.order if family.homes[action.stage] == rank) for rank in ranks)
        return Schedule(plain.name, tuple(rows), family.homes)
    per_rank, rest = divmod(stages, num_ranks)
    if per_rank == 2 and not rest and family.splits:
        return make("zb-v", num_ranks, microbatches)
    if per_rank > 1 and not rest and not family.splits:
        name = "interleaved" if not visits and SCHEDULES["interleaved"].allows(num_ranks, microbatches) else "looped-bfs"
        return make(name, num_ranks, microbatches, per_rank)
    return make("zb-h1" if family.splits else "1f1b", stages, microbatches)


def one_at_a_time(like: Schedule) -> Schedule:
    """The same actions on the same ranks, one microbatch after the other: it holds the residuals of one.

    Example:
        >>> [" ".join(map(str, row)) for row in one_at_a_time(make("zb-h1", 2, 2)).rows]
        ['0F0 0I0 0W0 0F1 0I1 0W1', '1F0 1I0 1W0 1F1 1I1 1W1']
    """

    def turn(action: Action) -> tuple[int, bool, int, Kind]:
        backward = action.kind != Kind.F
        return action.microbatch, backward, -action.stage if backward else action.stage, action.kind

    return Schedule("one at a time", tuple(tuple(sorted(row, key=turn)) for row in like.rows), like.stage_to_rank)


def _step_costs(plan: Plan, num_stages: int, free: Sequence[SeenStep], apart: Sequence[SeenStep]) -> StepCosts:
    """The costs of a family, from steps at full speed and steps in which each instruction ran alone; without copies to the host."""
    alone = durations_of(plan, [step.seconds for step in apart])
    handing = durations_of(plan, [[stamp.handed - stamp.begun for stamp in step.stamps] for step in free])
    begun = statistics.median(step.stamps[0].begun - step.begun for step in free)
    return costs_of_plan(plan, num_stages, alone, handing, begun)


def fitted(costs: StepCosts, candidate: Candidate, seconds: float, *, shared: bool, processes: Sequence[int] = ()) -> StepCosts:
    """The costs with which a step of this candidate is predicted as it was measured, if there are any.

    Each program was measured alone. Where ranks share cores, the number of ranks that compute at full speed at once is the one for
    which prediction and step agree; what is left over is how much longer actions take in a step.
    """
    schedule, most = candidate.schedule, float(candidate.schedule.num_ranks)

    def predicted(with_these: StepCosts) -> float:
        return step_seconds(schedule, with_these, candidate.offload, processes)

    def agreeing(changed: Callable[[float], StepCosts], low: float, high: float) -> StepCosts:
        """The costs between two numbers that agree best; the prediction grows with the number."""
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if predicted(changed(middle)) > seconds else (middle, high)
        return changed((low + high) / 2)

    found = dataclasses.replace(costs, capacity=most)
    if shared:
        found = agreeing(lambda inverse: dataclasses.replace(costs, capacity=1 / inverse), 1 / most, 1.0)
    return found if abs(predicted(found) / seconds - 1) < 0.01 else agreeing(found.stretched, 1 / _MOST, _MOST)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class _Results:
    """What was measured, by kind and name, in a file whose name is a digest of all that decides the results, so they hold.

    A file that cannot be read, or that is not as it was written, is written anew: many may write to the folder. The first of
    several processes reads and writes, and tells the others what it read.
    """

    def __init__(self, keep: bool | str | os.PathLike[str], name: str, *, several: bool):
        usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxpp" / "tune"
        folder = usual if isinstance(keep, bool) else Path(keep)
        self._path = folder / name if keep is not False and jax.process_index() == 0 else None
        self._found, self.remark = self._read()
        if several:
            self._found, self.remark = told_by_all([self._found, self.remark])[0]

    def get(self, kind: str, name: str) -> Any:
        """A result; None if there is none."""
        return self._found.get(kind, {}).get(name)

    def known(self, kind: str, name: str, ask: Callable[[], Any]) -> Any:
        value = self.get(kind, name)
        if value is None:
            value = ask()
            self.put(kind, name, value)
        return value

    def put(self, kind: str, name: str, value: Any) -> None:
        """Keep a result, as JSON has it. A file that cannot be written is a remark, and no error."""
        self._found.setdefault(kind, {})[name] = value
        if self._path is None:
            return
        half = self._path.with_suffix(f".{secrets.token_hex(8)}")  # the file is there whole, or as it was before
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with half.open("x", encoding="ascii") as file:  # a new one: what others put there, a link perhaps, is not written to
                file.write(json.dumps({"kind": _KIND, "digest": _digest(json.dumps(self._found)), "found": self._found}))
            half.replace(self._path)
        except OSError as error:
            self.remark, self._path = f"results are not kept: {error}", None
        finally:
            with suppress(OSError):
                half.unlink()

    def _read(self) -> tuple[dict[str, dict[str, Any]], str]:
        if self._path is None or not self._path.is_file():  # reading a pipe would never end
            return {}, ""
        wrong = "it is no file of jaxpp.tune"
        try:
            said = json.loads(self._path.read_text("ascii"))
            if said["kind"] == _KIND and said["digest"] == _digest(json.dumps(said["found"])):
                return said["found"], ""
            wrong = "it was changed since it was written" if said["kind"] == _KIND else wrong
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            wrong = f"{type(error).__name__}: {error}"
        return {}, f"{self._path} is ignored, and will be written anew: {wrong}"
