"""``Pipeline(hbm=...)``: what each stage does with its residuals so that a step fits, chosen when shapes are first seen.

A stage keeps the least, which costs no time; or lets it wait in host memory (offload), which costs what the copies do not hide; or
keeps its inputs only (recompute), which costs one more forward for each microbatch. What a device holds depends on its own stages
alone. So each device that is too full is asked for itself which choices of its stages fit, by the forecast, exactly; and of the
choices of all devices that are left, the one with the shortest step on the virtual clock is taken.

Nothing is measured, and no stage changed, if the step fits as it is. If nothing fits, no parameter has been made yet.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from jaxpp.engine.engine import Engine, open_engine
from jaxpp.errors import FitError
from jaxpp.observe.memory.forecast import Forecast, forecast, forecast_of
from jaxpp.observe.memory.liveness import MEMORY_KINDS, step_liveness
from jaxpp.options import Options
from jaxpp.plan.builder import Name
from jaxpp.runtime.measure import action_times, copy_times
from jaxpp.runtime.processes.exchange import texts_of_all
from jaxpp.schedule.action import Kind
from jaxpp.schedule.clock import Number
from jaxpp.schedule.offload import offloads
from jaxpp.schedule.simulate import simulate
from jaxpp.stages.remat import RECOMPUTE, policies_of
from jaxpp.stages.stage_table import bytes_in_words
from jaxpp.types import Batch, Device, Key

__all__ = ["Fitted", "fit"]

_Choice = tuple[str, ...]
"""For each stage ``"least"``, ``"offload"`` or ``"recompute"``."""

_MOST_STAGES = 2  # on one device, for which all combinations are tried
_MOST_COMBINED = 1000  # combinations of what fits on each device, that are put on the clock
_MOST_CHECKED = 8  # of these, that are forecast as a whole
_RULE = "a step fits into the memory that each device has"


@dataclass(frozen=True)
class Fitted:
    """An engine whose step fits, and what was chosen for that, a sentence for each stage that changed."""

    engine: Engine
    remarks: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        """All of it in one line, as it is printed once."""
        return f"jaxpp: hbm={bytes_in_words(self.engine.options.hbm or 0)}: {'; '.join(self.remarks)}"


def fit(engine: Engine, batch: Batch, key: Key | None, waiting: Sequence[Name] = ()) -> Fitted:
    """The engine, or one whose stages keep less, with a step that fits into ``options.hbm``.

    Every process of several calls it; all choose alike. ``waiting`` is as for ``forecast``.

    Raises:
        FitError: nothing fits, or what the stages keep was not left to jaxpp; with the forecast, and what would make it fit.
    """
    room = engine.options.hbm
    if room is None:
        return Fitted(engine)
    _check_params(engine, batch, key, room)
    search = _Search(engine, batch, key, tuple(waiting), room)
    full = search.too_full(search.asked)
    if not full:
        return Fitted(engine)
    if not _is_free(engine.options):
        raise search.refusal(full, {})
    best = search.best(full)
    return Fitted(search.engine(best), search.remarks(best))


def _is_free(options: Options) -> bool:
    """Whether it is left to jaxpp what the stages keep: remat is the default, and each stage can be measured on one device."""
    platform = options.devices[0].platform
    least = policies_of("least", options.schedule.num_stages, platform)
    return options.remat == least and not options.offloaded and options.placement.num_shards == 1


def _check_params(engine: Engine, batch: Batch, key: Key | None, room: int) -> None:
    """Check that each device has room for its parameters; nothing is compiled for that.

    Raises:
        FitError: naming the devices and the bytes of their parameters.
    """
    liveness = step_liveness(engine, engine.lower("update", batch, key))
    held = {device: int(levels[0][MEMORY_KINDS.index("parameters")]) for device, levels in liveness.levels.items()}
    if got := [f"{device}: parameters of {bytes_in_words(size)}" for device, size in held.items() if size > room]:
        fix = "cut the model into more stages on more devices, or give each device more memory"
        picture = f"{forecast_of(liveness, engine.placement, None)}\ntemporaries are not known: nothing was compiled"
        raise FitError(_where(room), "the parameters of each device fit into its memory", got, fix, picture)


def _where(room: int) -> str:
    return f"Pipeline(hbm={bytes_in_words(room)})"


@dataclass(frozen=True, eq=False)
class _Search:
    """What was tried so far.

    Attributes:
        first: the engine whose stages all keep the least.
        batch: or its shapes.
        key: or its shape, or None.
        waiting: as for ``forecast``.
        room: the bytes that each device has.
    """

    first: Engine
    batch: Batch
    key: Key | None
    waiting: tuple[Name, ...]
    room: int
    _engines: dict[_Choice, Engine] = dataclasses.field(default_factory=dict)
    _peaks: dict[_Choice, Mapping[Device, int]] = dataclasses.field(default_factory=dict)
    _prices: dict[_Choice, Number] = dataclasses.field(default_factory=dict)

    @property
    def asked(self) -> _Choice:
        """All stages as they are."""
        return ("least",) * self.first.options.schedule.num_stages

    @cached_property
    def device_of(self) -> tuple[Device, ...]:
        """The device of each stage."""
        return tuple(place.shown for place in self.first.placement.places)

    def engine(self, choice: _Choice) -> Engine:
        """The engine of a choice; stages that keep the least and are not recomputed share their programs."""
        if choice == self.asked:
            return self.first
        if choice not in self._engines:
            first, options = self.first, self.first.options
            offload = tuple(1 if way == "offload" else None for way in choice)
            if "recompute" not in choice:
                found = first.with_schedule(options.schedule, offload)
            else:
                assert options.remat is not None, "the stages keep the least"
                remat = tuple(RECOMPUTE if way == "recompute" else kept for way, kept in zip(choice, options.remat, strict=True))
                options = dataclasses.replace(options, remat=remat, offload=offload)
                found = open_engine(options, first.optimizer, first.layout.given, self.batch, self.key, like=first.layout)
                found = dataclasses.replace(found, programs=first.programs)
            self._engines[choice] = found
        return self._engines[choice]

    def peaks(self, choice: _Choice) -> Mapping[Device, int]:
        """The bytes of each device at its peak; what all processes know of it together."""
        if choice not in self._peaks:
            engine = self.engine(choice)
            peaks = forecast(engine, self.batch, self.key, self.room, self.waiting, advise=False).peaks
            if not engine.alone:
                told = [json.loads(text) for text in texts_of_all(json.dumps(list(peaks.values())))]
                peaks = dict(zip(peaks, map(max, zip(*told, strict=True)), strict=True))
            self._peaks[choice] = peaks
        return self._peaks[choice]

    def too_full(self, choice: _Choice) -> list[Device]:
        """The devices that have too little room for a choice."""
        return [device for device, peak in self.peaks(choice).items() if peak > self.room]

    def best(self, full: Sequence[Device]) -> _Choice:
        """The cheapest choice that fits; ``full`` are the devices that have too little room for the least.

        Raises:
            FitError: none does.
        """
        found = self._cheapest(self._fitting(full, ("offload",)))
        if found is None or self.price(found) > self.price(self.asked):
            tried = self._fitting(full, ("offload", "recompute"))
            found = self._cheapest(tried)
            if found is None:
                raise self.refusal(full, self._least_peaks(full))
        return found

    def _fitting(self, full: Sequence[Device], ways: Sequence[str]) -> dict[Device, list[_Choice]]:
        """The choices with which each of the devices fits, where no other device changes anything.

        All devices are tried at once, each with the next choice for its own stages.
        """
        own = {device: list(self._choices(device, ways)) for device in full}
        found: dict[Device, list[_Choice]] = {device: [] for device in full}
        for row in itertools.zip_longest(*own.values()):
            peaks = self.peaks(self._joined([choice for choice in row if choice is not None]))
            for device, choice in zip(full, row, strict=True):
                if choice is not None and peaks[device] <= self.room:
                    found[device].append(choice)
        return found

    def _choices(self, device: Device, ways: Sequence[str]) -> Iterator[_Choice]:
        """The choices for the stages of a device, but that of changing nothing; of many stages, the first change."""
        schedule = self.first.options.schedule
        moves = {each.forward.stage for each in offloads(schedule.rows, (1,) * schedule.num_stages)}
        stages = [stage for stage, home in enumerate(self.device_of) if home == device]
        for own in itertools.product(("least", *ways), repeat=len(stages)):
            changed = [way for way in own if way != "least"]
            in_order = list(own) == sorted(own, key=("recompute", "offload", "least").index)
            if not changed or (len(stages) > _MOST_STAGES and not in_order):
                continue
            if all(stage in moves for stage, way in zip(stages, own, strict=True) if way == "offload"):
                choice = dict(zip(stages, own, strict=True))
                yield tuple(choice.get(stage, "least") for stage in range(schedule.num_stages))

    def _joined(self, choices: Sequence[_Choice]) -> _Choice:
        """The choices of several devices as one."""
        return tuple(next((way for way in ways if way != "least"), "least") for ways in zip(self.asked, *choices, strict=True))

    def _cheapest(self, offers: Mapping[Device, Sequence[_Choice]]) -> _Choice | None:
        """The cheapest of all combinations of what fits on each device; None if on one of them nothing does."""
        if not all(offers.values()):
            return None
        count = 1
        for each in offers.values():
            count *= len(each)
        if count > _MOST_COMBINED:
            offers = {device: [min(each, key=self._rank)] for device, each in offers.items()}
        combined = sorted(map(self._joined, itertools.product(*offers.values())), key=self._rank)
        return next((choice for choice in combined[:_MOST_CHECKED] if not self.too_full(choice)), None)

    def _rank(self, choice: _Choice) -> tuple[float, int, int]:
        """What is better is less: a shorter step, fewer stages that compute again, fewer that change."""
        slower = round(float(self.price(choice) / self.price(self.asked)), 6)
        return slower, choice.count("recompute"), len(choice) - choice.count("least")

    def price(self, choice: _Choice) -> Number:
        """A step on the virtual clock."""
        if choice not in self._prices:
            forward, backward, weight_grad, copy = self._costs
            again = [way == "recompute" for way in choice]
            input_grad = [own + f * more for own, f, more in zip(backward, forward, again, strict=True)]
            offload = [1 if way == "offload" else None for way in choice]
            self._prices[choice] = simulate(
                self.first.options.schedule,
                forward=forward,
                input_grad=input_grad,
                weight_grad=weight_grad,
                offload=offload,
                copy=copy,
            ).makespan
        return self._prices[choice]

    @cached_property
    def _costs(self) -> tuple[list[float], list[float], list[float], list[float]]:
        """Seconds of F, of I (or of B), of W, and of a copy of the residuals of a microbatch, for each stage; measured once."""
        engine, where = self.first, _where(self.room)
        cut, places = engine.preparer.step(self.batch, self.key).cuts[0], engine.placement.places
        kinds = {action.kind for action in engine.options.schedule.order}
        times = action_times(cut, kinds, places, engine.programs, where)
        none = [0.0] * len(places)
        backward = [own or full for own, full in zip(times.get(Kind.I, none), times.get(Kind.B, none), strict=True)]
        return times[Kind.F], backward, times.get(Kind.W, none), copy_times(cut, places)[0]

    def remarks(self, choice: _Choice) -> tuple[str, ...]:
        """What was chosen for each stage that changed, and what it costs."""
        before, after, changed = self.peaks(self.asked), self.peaks(choice), []
        for stage, way in enumerate(choice):
            if way != "least":
                alone = tuple(way if s == stage else "least" for s in range(len(choice)))
                device = self.device_of[stage]
                sizes = f"peak {bytes_in_words(before[device])} -> {bytes_in_words(after[device])}"
                changed.append(f"stage {stage}: {way} ({sizes}, step {self._slower(alone)})")
        return (*changed, f"all of it: step {self._slower(choice)}") if len(changed) > 1 else tuple(changed)

    def _slower(self, choice: _Choice) -> str:
        return f"{float(self.price(choice) / self.price(self.asked)) - 1:+.0%}"

    def _least_peaks(self, full: Sequence[Device]) -> dict[Device, int]:
        """The least that each of the devices needs, of all that was tried."""
        return {device: min(peaks[device] for peaks in self._peaks.values()) for device in full}

    def refusal(self, full: Sequence[Device], least: Mapping[Device, int]) -> FitError:
        """What to raise: ``least`` is what each device needs if its stages keep less, where that was tried."""
        found: Forecast = forecast(self.first, self.batch, self.key, self.room, self.waiting)
        needs, room = self.peaks(self.asked), bytes_in_words(self.room)
        got = [f"{device} needs {bytes_in_words(needs[device])} of {room}" for device in full]
        if least:
            got = [
                f"{line}, and still {bytes_in_words(least[device])} where its stages offload or recompute"
                for line, device in zip(got, full, strict=True)
            ]
        fixes = [f"pass {found.changes[0].what}"] if found.changes else ["use more devices"]
        if not least and self.first.options.placement.num_shards == 1:
            fixes.append("leave remat out, so that jaxpp chooses what each stage keeps")
        return FitError(_where(self.room), _RULE, got, ", or ".join(fixes), str(found))
