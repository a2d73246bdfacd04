"""``Pipeline(hbm=...)``: what stages keep, and what waits in host memory, so that a step fits; chosen when shapes are first seen.

A stage keeps the least, which costs no time; or lets it wait in host memory (offload), which costs what the copies do not hide; or
keeps a share of it, which costs what is repeated; or its inputs only (recompute), which costs one more forward for each microbatch;
or, where none of these is enough, its inputs in host memory (both). What a device holds depends on its own stages alone, so the
forecast says for each device that is too full which choices of its stages fit; of the choices of all devices, that with the
shortest step on the virtual clock is taken. Nothing is measured if the step fits as it is. If none fits, the optimizer's state
waits in host memory (``host="optimizer"``), then parameters and gradients too, and the stages choose again.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jaxpp.engine.engine import Engine
from jaxpp.errors import FitError
from jaxpp.lowering.builder import Name
from jaxpp.observe.evaluate import CandidateSearch, step_seconds
from jaxpp.observe.memory.forecast import Forecast, again_of, check_room, forecast, forecast_of
from jaxpp.observe.memory.liveness import MEMORY_KINDS, Liveness, liveness_in_flow, step_liveness
from jaxpp.runtime.measure import action_times, copy_times
from jaxpp.runtime.processes.channel import told_by_all
from jaxpp.schedule.costs import StepCosts
from jaxpp.schedule.offload import offloads
from jaxpp.stages.remat import Offload, offload_of, policies_of
from jaxpp.tables import bytes_in_words
from jaxpp.targets import device_name
from jaxpp.types import Batch, Device, Key

_Way = str | float | Offload  # "least", "offload" or "recompute", a share of the least, or ``_BOTH``
_Choice = tuple[_Way, ...]  # for each stage

_SHARES = (0.75, 0.5, 0.25)  # that are tried
_BOTH = Offload(recompute=True)  # the fewest bytes on the device
_IN_PLACE = ("least", "offload")  # ways that repeat nothing costly
_MOST_STAGES = 2  # on one device, for which all combinations are tried
_MOST_COMBINED = 1000  # combinations of what fits on each device, that are put on the clock
_MOST_CHECKED = 8  # of these, that are forecast as a whole
_RULE = "a step fits into the memory that each device has"


@dataclass(frozen=True)
class Fit:
    """An engine whose step fits, and what was chosen for that, a sentence for each stage that changed."""

    engine: Engine
    remarks: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        """All remarks in one line, as they are printed once."""
        return f"jaxpp: hbm={bytes_in_words(self.engine.options.hbm or 0)}: {'; '.join(self.remarks)}"


def fit(engine: Engine, batch: Batch, key: Key | None, waiting: Sequence[Name] = ()) -> Fit:
    """The engine, or one whose stages keep less, with a step that fits into ``options.hbm``; every process of several calls it."""
    room = engine.options.hbm
    if room is None:
        return Fit(engine)
    check_room(engine.options.devices, room)
    search = _Search(engine, batch, key, waiting, room)
    held = search.parameters()
    if max(held.values()) > room:
        found, tried = _with_more_on_the_host(search, f"the parameters alone are {bytes_in_words(max(held.values()))}")
        if found is None:
            raise search.refusal_of_parameters(held, tried)
        return found
    full = search.full()
    if not full:
        return Fit(engine)
    best = search.best(full) if search.chooses else None
    if best is not None:
        return Fit(search.engine(best), search.remarks(best))
    least = search.least()
    most = bytes_in_words(max(least.values()))
    reason = f"offloading, recomputing or both leave {most}" if search.chooses else f"the step needs {most}"
    found, tried = _with_more_on_the_host(search, reason)
    if found is None:
        raise search.refusal(full, least, tried)
    return found


def _with_more_on_the_host(search: "_Search", reason: str) -> tuple[Fit | None, dict[str, int]]:
    """The first that fits of the same pipeline with more of its state in host memory; or what each leaves on the fullest device."""
    first, tried = search.first, dict[str, int]()
    for host in [options.host for options in first.options.hosted()]:
        other = _Search(first.with_host(host), search.batch, search.key, search.waiting, search.room)
        best = other.fitting()
        if best is not None:
            most, visiting = max(other.peaks(best).values()), max(other.arrays(best).visiting.values(), key=sum)
            copied = f"a step copies {bytes_in_words(visiting.brought)} in and {bytes_in_words(visiting.taken)} out"
            copied += " and ends before the next begins" * (host == "params" and bool(first.options.delay))
            remark = f'host="{host}" (peak {bytes_in_words(most)}, {copied}), since {reason}'
            return Fit(other.engine(best), (remark, *other.remarks(best))), tried
        tried[f'host="{host}"'] = max(other.least().values())
    return None, tried


def _where(room: int) -> str:
    return f"Pipeline(hbm={bytes_in_words(room)})"


class _Search:
    """The choices for the stages of an engine whose stages all keep the least, and what was tried of them."""

    def __init__(self, first: Engine, batch: Batch, key: Key | None, waiting: Sequence[Name], room: int):
        self.first, self.batch, self.key, self.waiting, self.room = first, batch, key, waiting, room
        self.schedule, self.devices = first.options.schedule, [place.shown for place in first.placement.places]
        self.asked: _Choice = ("least",) * self.schedule.num_stages
        self.engines: dict[_Choice, Engine] = {self.asked: first}
        self.known: dict[_Way, list[float]] = {}
        self.search = CandidateSearch(self._seconds, self._peaks, room)

    def engine(self, choice: _Choice) -> Engine:
        """The engine of a choice; it shares the programs of stages that run the same."""
        if choice not in self.engines:
            platform = self.first.options.devices[0].platform
            remat = tuple(policy for way in choice for policy in policies_of(way, 1, platform) or ())
            self.engines[choice] = self.first.with_remat(remat, offload_of(choice, len(choice)))
        return self.engines[choice]

    def parameters(self) -> dict[Device, int]:
        """The bytes of the parameters that each device holds all the time; nothing is compiled for that."""
        kind = MEMORY_KINDS.index("parameters")
        return {device: int(levels[0][kind]) for device, levels in self.arrays(self.asked).levels.items()}

    def arrays(self, choice: _Choice) -> Liveness:
        """What is alive in a step; nothing is compiled for that, so temporaries are not known."""
        engine = self.engine(choice)
        lowered = engine.lower("update", self.batch, self.key)
        return liveness_in_flow(step_liveness(engine, lowered), lowered)

    def again(self, choice: _Choice) -> list[float]:
        """How much of its forward each stage runs again in its backward."""
        known = {"least": 0.0, "offload": 0.0, "recompute": 1.0, _BOTH: 1.0}
        return [known[way] if way in known else self._shares(way)[k] for k, way in enumerate(choice)]

    def _shares(self, way: _Way) -> list[float]:
        if way not in self.known:
            self.known[way] = again_of(self.engine((way,) * self.schedule.num_stages), self.first, self.batch, self.key)
        return self.known[way]

    def forecast(self, choice: _Choice, *, advise: bool = False) -> Forecast:
        return forecast(self.engine(choice), self.batch, self.key, self.room, self.waiting, advise=advise)

    def _peaks(self, choice: _Choice) -> tuple[int, ...]:
        """The bytes of each device at its peak, in the order of the ranks; what all processes know of it together."""
        peaks = tuple(self.forecast(choice).peaks.values())
        if self.first.alone:
            return peaks
        return tuple(map(max, zip(*told_by_all(peaks), strict=True)))

    def peaks(self, choice: _Choice) -> dict[Device, int]:
        devices = dict.fromkeys(place.shown for place in self.first.placement.by_rank)
        return dict(zip(devices, self.search.peaks(choice), strict=True))

    @cached_property
    def chooses(self) -> bool:
        """Whether it is left to jaxpp what stages keep, and they can be measured, on one device each."""
        options = self.first.options
        least = policies_of("least", options.schedule.num_stages, options.devices[0].platform)
        return options.remat == least and not options.offloaded and options.placement.num_shards == 1

    def full(self) -> list[Device]:
        """The devices that have too little room for what is asked."""
        return [device for device, peak in self.peaks(self.asked).items() if peak > self.room]

    def fitting(self) -> _Choice | None:
        """The cheapest choice that fits, if any; nothing is compiled where arrays alone are too large whatever stages keep."""
        if max(self.least().values()) > self.room:
            return None
        full = self.full()
        return self.asked if not full else self.best(full) if self.chooses else None

    def best(self, full: Sequence[Device]) -> _Choice | None:
        """The cheapest choice that fits, if any; ``full`` are the devices that have too little room for the least."""
        best = self._cheapest(self._fitting(full, ("offload",)))
        if best is None or self.search.seconds(best) > self.search.seconds(self.asked):
            best = self._cheapest(self._fitting(full, ("offload", *_SHARES, "recompute")))
        if best is None:
            few = max(Counter(self.devices).values()) <= _MOST_STAGES
            best = self._cheapest(self._fitting(full, ("offload", "recompute", _BOTH) if few else ("recompute", _BOTH)))
        return best

    def least(self) -> dict[Device, int]:
        """The fewest bytes of each device at its peak, of what was tried; of arrays alone, if nothing was compiled yet."""
        tried = list(map(self.peaks, self.search.weights))
        if not tried:
            every = [(way,) * self.schedule.num_stages for way in (("offload", "recompute", _BOTH) if self.chooses else ())]
            found = [self.arrays(choice) for choice in (self.asked, *every)]
            tried = [{device: each.most(device) for device in each.devices} for each in found]
        return {device: min(peaks[device] for peaks in tried) for device in tried[0]}

    def _fitting(self, full: Sequence[Device], ways: Sequence[_Way]) -> list[list[_Choice]]:
        """For each of the devices the choices with which it fits, where no other device changes anything."""
        fitting: dict[Device, list[_Choice]] = {device: [] for device in full}
        for row in itertools.zip_longest(*(self._choices(device, ways) for device in full)):  # all devices at once
            peaks = self.peaks(self._joined([choice for choice in row if choice is not None]))
            for device, choice in zip(full, row, strict=True):
                if choice is not None and peaks[device] <= self.room:
                    fitting[device].append(choice)
        return list(fitting.values())

    def _choices(self, device: Device, ways: Sequence[_Way]) -> Iterator[_Choice]:
        """The choices for the stages of a device, but that of changing nothing; of many stages, the first change.

        Several stages have the same share, if any.
        """
        moves = {moved.forward.stage for moved in offloads(self.schedule.rows, (1,) * self.schedule.num_stages)}
        stages = [stage for stage, home in enumerate(self.devices) if home == device]
        whole = [way for way in (_BOTH, "recompute", "offload", "least") if way in ("least", *ways)]
        if len(stages) > _MOST_STAGES:
            every = itertools.combinations_with_replacement(whole, len(stages))
        else:
            every = itertools.product(reversed(whole), repeat=len(stages))
        shared = ((way,) * len(stages) for way in ways if isinstance(way, float))
        for own in itertools.chain(every, shared):
            if set(own) != {"least"} and all(
                stage in moves for stage, way in zip(stages, own, strict=True) if way in ("offload", _BOTH)
            ):
                choice = dict(zip(stages, own, strict=True))
                yield tuple(choice.get(stage, "least") for stage in range(self.schedule.num_stages))

    def _joined(self, choices: Sequence[_Choice]) -> _Choice:
        return tuple(next((way for way in ways if way != "least"), "least") for ways in zip(self.asked, *choices, strict=True))

    def _cheapest(self, offers: Sequence[Sequence[_Choice]]) -> _Choice | None:
        if math.prod(map(len, offers)) > _MOST_COMBINED:
            offers = [[min(choices, key=self._rank)] for choices in offers]
        combined = sorted(map(self._joined, itertools.product(*offers)), key=self._rank)
        return next(filter(self.search.fits, combined[:_MOST_CHECKED]), None)

    def _rank(self, choice: _Choice) -> tuple[float, int, int]:
        """What is better is less: a shorter step, fewer stages that compute again, fewer that change."""
        return round(self._longer(choice), 6), sum(way not in _IN_PLACE for way in choice), len(choice) - choice.count("least")

    def _longer(self, choice: _Choice) -> float:
        return self.search.seconds(choice) / self.search.seconds(self.asked)

    def _seconds(self, choice: _Choice) -> float:
        costs = self._costs.recomputed(self.again(choice))
        if _BOTH in choice:
            pairs = zip(choice, costs.offload, self._copies_of_inputs, strict=True)
            costs = replace(costs, offload=tuple(inputs if way == _BOTH else kept for way, kept, inputs in pairs))
        return step_seconds(self.schedule, costs, offload_of(choice, len(choice)))

    @cached_property
    def _copies_of_inputs(self) -> tuple[float, ...]:
        engine = self.engine((_BOTH,) * self.schedule.num_stages)
        return tuple(copy_times(engine.preparer.step(self.batch, self.key).cuts[0], engine.placement.places)[0])

    @cached_property
    def _costs(self) -> StepCosts:
        engine = self.first
        cut, places = engine.preparer.step(self.batch, self.key).cuts[0], engine.placement.places
        kinds = {action.kind for action in self.schedule.order}
        times = action_times(cut, kinds, places, engine.programs, _where(self.room))
        actions = {kind: tuple(seconds) for kind, seconds in times.items()}
        return StepCosts(actions, offload=tuple(copy_times(cut, places)[0]))

    def remarks(self, choice: _Choice) -> tuple[str, ...]:
        before, after, changed = self.peaks(self.asked), self.peaks(choice), []
        for stage, way in enumerate(choice):
            if way != "least":
                alone = tuple(way if s == stage else "least" for s in range(len(choice)))
                device = self.devices[stage]
                sizes = f"peak {bytes_in_words(before[device])} -> {bytes_in_words(after[device])}"
                named = "offload and recompute" if isinstance(way, Offload) else f"remat={way}" if isinstance(way, float) else way
                changed.append(f"stage {stage}: {named} ({sizes}, step {self._longer(alone) - 1:+.0%})")
        return (*changed, f"all of it: step {self._longer(choice) - 1:+.0%}") if len(changed) > 1 else tuple(changed)

    def refusal(self, full: Sequence[Device], least: Mapping[Device, int], tried: Mapping[str, int]) -> FitError:
        """What to raise: ``least`` is what each device needs at least, ``tried`` what was left with more in host memory."""
        picture = self.forecast(self.asked, advise=True)
        if tried:  # in vain, whatever the estimates of these changes are
            picture = replace(picture, changes=tuple(change for change in picture.changes if not change.what.startswith("host=")))
        needs, room = self.peaks(self.asked), bytes_in_words(self.room)
        got = [f"{device_name(device)} needs {bytes_in_words(needs[device])} of {room}" for device in full]
        if self.chooses:
            still = [f"still {bytes_in_words(least[device])} where its stages offload, recompute, or both" for device in full]
            got = [f"{line}, and {rest}" for line, rest in zip(got, still, strict=True)]
        cheaper = [change for change in picture.changes if change.visiting is None]  # than copies of the state
        hosted = [change for change in picture.changes if change.visiting is not None]
        fixes = [f"pass {change.what}" for change in cheaper[:1]]
        fixes += [f"pass {each.what}, which leaves {bytes_in_words(each.peak)} on the fullest device" for each in hosted[:1]]
        fixes = fixes or ["use more devices"]
        if not self.chooses and self.first.options.placement.num_shards == 1:
            fixes.append("leave remat out, so that jaxpp chooses what each stage keeps")
        return FitError(_where(self.room), _RULE, [*got, *_left(tried)], ", or ".join(fixes), str(picture))

    def refusal_of_parameters(self, held: Mapping[Device, int], tried: Mapping[str, int]) -> FitError:
        """What to raise where parameters alone are too large."""
        got = [f"{device_name(device)}: parameters of {bytes_in_words(size)}" for device, size in held.items() if size > self.room]
        fix = "cut the model into more stages on more devices, or give each device more memory"
        if tried:
            fix = f"cut the model into more stages, many on each device or on more devices, {fix.partition(', ')[2]}"
        picture = (
            f"{forecast_of(self.arrays(self.asked), self.first.placement, None)}\ntemporaries are not known: nothing was compiled"
        )
        return FitError(_where(self.room), "the parameters of each device fit into its memory", [*got, *_left(tried)], fix, picture)


def _left(tried: Mapping[str, int]) -> list[str]:
    """What more of the state in host memory leaves, a line for each word."""
    return [f"{what} leaves at least {bytes_in_words(most)} on the device that holds most" for what, most in tried.items()]
