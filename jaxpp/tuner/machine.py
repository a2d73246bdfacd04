"""``Devices``: the devices themselves say what families cost, what candidates hold, and how long their steps take.

A family is traced, cut and compiled once, with a plain schedule. Some of its steps run at full speed, and in some each instruction
waits for the one before. Everything else about the family's candidates follows from that: their times by the virtual clock, their
memory by counting. What was measured is remembered in a file.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from jaxpp.engine.init_arguments import variables_of
from jaxpp.errors import ArgumentError
from jaxpp.observe.memory.forecast import room_of
from jaxpp.runtime.measure import copy_times
from jaxpp.runtime.place import Placement
from jaxpp.runtime.processes.here import processes_of
from jaxpp.schedule.action import Kind
from jaxpp.schedule.registry import make
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.stage_table import bytes_in_words
from jaxpp.tuner.candidate import Candidate, Family
from jaxpp.tuner.costs import FamilyCosts
from jaxpp.tuner.measure.decides import deciding_texts
from jaxpp.tuner.measure.fitted import fitted, stretched
from jaxpp.tuner.measure.opened import Opened, Problem, lowest
from jaxpp.tuner.measure.pace import Pace
from jaxpp.tuner.measure.peak_bytes import Needs, needs_of, peak_bytes
from jaxpp.tuner.measure.plain import one_at_a_time, plain_schedule
from jaxpp.tuner.measure.remembered import Remembered, folder_of, names_digest
from jaxpp.tuner.measure.step_costs import step_costs
from jaxpp.types import Batch, Device, Key, LossFn, Tree

__all__ = ["Devices"]

_MEASURED = 2.5
"""Seconds for the steps of a family, beside a few that are looked at; twice as many for the first, which tells the pace."""

_TIMED = 2.0
"""Seconds for the steps of a candidate."""


class Devices:
    """A ``Machine`` that runs steps on copies of the parameters; nothing that belongs to the caller is changed.

    Args:
        loss_fn: as ``Pipeline`` takes it.
        optimizer: of all parameters.
        init_or_params: a function of a key that makes the parameters, or the parameters; with ``has_state`` the pair.
        batch: of a step.
        key: of the function, and of the loss if that takes one; ``jax.random.key(0)`` unless given.
        devices: for the ranks, in order; all devices unless given.
        num_ranks: how many ranks candidates have; as many as devices unless given.
        options: other arguments of ``Pipeline``, the same for all candidates.
        keep: whether results are kept, in the user's cache folder (True) or in a folder of this name.

    Raises:
        JaxppError: for a loss, parameters, options or a batch that cannot be run.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation,
        init_or_params: Tree,
        batch: Batch,
        key: Key | None = None,
        *,
        devices: Sequence[Device] | None = None,
        num_ranks: int | None = None,
        options: Mapping[str, Any] | None = None,
        keep: bool | str | os.PathLike[str] = True,
    ):
        given = None if devices is None else tuple(devices)
        self._problem = Problem(loss_fn, optimizer, init_or_params, batch, key, given, dict(options or {}))
        everywhere = self._problem.options_of(make("naive", 1, 1), "least", "flops").devices if given is None else given
        self._num_ranks = len(everywhere) if num_ranks is None else num_ranks
        several = len(processes_of(everywhere)) > 1
        folder = folder_of(keep)
        path = None if folder is None else folder / f"{names_digest(deciding_texts(self._problem))}.json"
        self._remembered = Remembered(path, several=several)
        self._opened: dict[Family, tuple[Opened, Needs]] = {}
        self._pace = Pace()
        self.num_measured = 0

    @property
    def remark(self) -> str:
        """What is wrong with the file of results; empty if nothing is."""
        return self._remembered.remark

    @property
    def param_bytes(self) -> int:
        """The bytes of all parameters."""
        options = self._problem.options_of(make("naive", 1, 1), "least", "flops")
        return sum(map(count_bytes, jax.tree.leaves(variables_of(options, self._problem.shapes)[0])))

    def costs(self, family: Family) -> FamilyCosts:
        """Measure a family, unless it was measured before.

        Raises:
            JaxppError: the model cannot be cut so, or the batch not be split so.
        """
        known = _from_json(self._remembered.get("costs", _family_name(family)))
        if known is None:
            known = self._measured(family)
            self._remembered.put("costs", _family_name(family), _as_json(known))
        return known

    def peaks(self, candidate: Candidate) -> tuple[int, ...]:
        """The bytes that each device holds at its peak, of each rank in order."""
        known = self._remembered.get("peaks", _name(candidate))
        if known is None:
            opened, needs = self._family(candidate.family)
            engine = opened.ordered(candidate).engine
            known = peak_bytes(engine, self._problem.batch, opened.key, needs)
            self._remembered.put("peaks", _name(candidate), known)
        return tuple(known)

    def step(self, candidate: Candidate) -> float:
        """The median of the seconds of some steps, each from the call until all its results are there.

        Where devices share the cores of the machine, seconds are those at the speed that it had at first (``Pace``).
        """
        known = self._remembered.get("steps", _name(candidate))
        if known is None:
            self.num_measured += 1
            self._open_reference()
            opened = self._family(candidate.family)[0].ordered(candidate)
            known = self._pace.timed(opened, _TIMED).seconds
            self._remembered.put("steps", _name(candidate), known)
        return known

    def _family(self, family: Family) -> tuple[Opened, Needs]:
        """A family that is compiled."""
        if family not in self._opened:
            schedule = plain_schedule(family, self._num_ranks)
            opened = self._problem.open(schedule, family.remat, family.balance)
            self._opened[family] = opened, needs_of(opened.engine, self._problem.batch, opened.key)
        return self._opened[family]

    def _measured(self, family: Family) -> FamilyCosts:
        self.num_measured += 1
        opened, plain = self._runnable(family)
        self._open_reference()
        engine = opened.engine
        found = self._pace.timed(opened, _MEASURED if self._pace.known else 2 * _MEASURED, looks=True)
        costs = step_costs(opened.plan, family.num_stages, found.free, found.apart)
        if family.remat == "least":
            cut = engine.preparer.step(self._problem.batch, opened.key).cuts[0]
            seconds, handed = copy_times(cut, engine.placement.places)
            costs = dataclasses.replace(costs, offload=tuple(seconds), offload_dispatch=tuple(handed))
        if self._pace.known or not _shares_cores(engine.placement):
            opened.release()
        else:
            self._pace.begin(opened, found.seconds)
            self._remembered.put("reference", "of the pace", [list(family), found.seconds])
        processes = tuple(place.devices[0].process_index for place in engine.placement.by_rank)
        shared = _shares_cores(engine.placement) or len(set(engine.placement.by_rank)) < len(processes)
        return fitted(stretched(costs, 1 / found.factor), plain, found.seconds, shared=shared, processes=processes)

    def _open_reference(self) -> None:
        """Open the family that told the pace when the file was written."""
        known = self._remembered.get("reference", "of the pace")
        if known is not None and not self._pace.known:
            family, seconds = known
            self._pace.begin(self._runnable(Family(*family))[0], seconds)

    def _runnable(self, family: Family) -> tuple[Opened, Candidate]:
        """A candidate of a family for which there is room on the devices, as far as these say how much they have.

        Raises:
            ArgumentError: there is none.
        """
        opened, needs = self._family(family)
        engine = opened.engine
        room = lowest(room_of(engine, None), alone=engine.alone)
        plain = engine.options.schedule
        for schedule in (plain, one_at_a_time(family, plain)):
            candidate = Candidate(schedule, family.remat, balance=family.balance)
            tried = opened if schedule is plain else opened.ordered(candidate)
            peak = max(peak_bytes(tried.engine, self._problem.batch, opened.key, needs))
            if room is None or peak <= room:
                return tried, candidate
        rule = "programs are measured on the devices, which must have room for one microbatch at a time"
        got = f"{family.words}: {bytes_in_words(peak)}, and devices of {bytes_in_words(room)}"
        raise ArgumentError("jaxpp.tune(...)", rule, got, "allow more stages or microbatches, or a smaller batch")


def _shares_cores(placement: Placement) -> bool:
    """Whether the devices share the cores of the machine with one another and with whatever else runs there."""
    return placement.by_rank[0].devices[0].platform == "cpu"


def _family_name(family: Family) -> str:
    return " ".join(f"{name}={value}" for name, value in family._asdict().items())


def _name(candidate: Candidate) -> str:
    schedule = candidate.schedule
    sizes = f"{schedule.num_ranks} ranks {schedule.num_stages} stages {schedule.num_microbatches} microbatches"
    rows = names_digest({"rows": schedule.to_csv()})
    kept = f"{candidate.remat} {candidate.except_last}" if candidate.remat == "offload" else candidate.remat
    return f"{schedule.name} {sizes} {kept} {candidate.balance} {rows}"


def _as_json(costs: FamilyCosts) -> dict[str, Any]:
    found = {field.name: getattr(costs, field.name) for field in dataclasses.fields(costs)}
    tables = {name: {str(kind): each for kind, each in found[name].items()} for name in ("actions", "dispatch")}
    return found | tables


def _from_json(found: Mapping[str, Any] | None) -> FamilyCosts | None:
    """The costs that were written; None for anything else."""
    try:
        given = dict(found or {})
        for name in ("actions", "dispatch"):
            given[name] = {Kind(kind): tuple(each) for kind, each in given[name].items()}
        made: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        return FamilyCosts(**made)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
