"""What is really alive on each device during a step, beside what the shapes say (``liveness``).

When a step begins, when each device holds most, and when it ends, every array that JAX knows of is looked up; a buffer that two
arrays share counts once. Arrays that are not the step's belong to the caller, to other plans, or to other code. The compiler says
what programs need besides while they run. What a backend counts for itself (``device.memory_stats()``, on GPUs) is shown beside: it
includes all of these, padding, and the programs themselves.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax

from jaxpp.engine.engine import Engine, Purpose
from jaxpp.engine.outcome import LoweredStep
from jaxpp.lowering.builder import CALLER, Name
from jaxpp.lowering.plan import Instruction, Plan
from jaxpp.lowering.step import Leaves
from jaxpp.observe.memory.liveness import MEMORY_KINDS, Liveness, memory_kind, step_liveness
from jaxpp.runtime.place import devices_of
from jaxpp.runtime.processes.here import is_here
from jaxpp.schedule.action import Kind
from jaxpp.stages.program import Role
from jaxpp.tables import bytes_in_words, fold_lines, html_remarks, html_table, in_bytes, table_lines
from jaxpp.types import Array, Batch, Device, Key, Leaf


class Sample(NamedTuple):
    """What one device held at one moment, in bytes."""

    when: str  # ``begins``, the label of the line that had been handed over, or ``ends``
    moment: int  # the same as a number, as ``Liveness`` counts them
    device: Device
    kinds: tuple[int, ...]  # of the step's arrays, one number for each of ``MEMORY_KINDS``
    total: int  # of all arrays there
    temporaries: int  # that the program running then needs besides

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind."""
        return dict(zip(MEMORY_KINDS, self.kinds, strict=True))

    @property
    def elsewhere(self) -> int:
        """Bytes of arrays that are not the step's: the caller's own, other plans' constants, other code's."""
        return self.total - sum(self.kinds)


@dataclass(frozen=True)
class Ledger:
    """Live bytes of a step, by device and kind. ``print`` it for a table.

    Attributes:
        liveness: what the shapes say.
        samples: what was there, on each device at the beginning, at its peak, and at the end.
        stats: what the backend counts for itself on each device; empty where it does not.
    """

    liveness: Liveness
    samples: tuple[Sample, ...]
    stats: Mapping[Device, Mapping[str, int]]

    @property
    def peaks(self) -> dict[Device, Sample]:
        """The sample of each device at its peak: most arrays and temporaries together."""
        return {sample.device: sample for sample in self.samples if sample.when not in ("begins", "ends")}

    def _cells(self) -> list[list[str]]:
        shown = [k for k in range(len(MEMORY_KINDS)) if any(sample.kinds[k] for sample in self.samples)]
        kinds = {action.kind for line in self.liveness.lines for action in line.actions}
        noun = "run" if kinds == {Kind.F} else "step"
        rows = [["device", "at", *(MEMORY_KINDS[k] for k in shown), f"the {noun}'s", "temporaries", "other arrays"]]
        for sample in sorted(self.samples, key=lambda sample: (self.liveness.devices.index(sample.device), sample.moment)):
            sizes = [*(sample.kinds[k] for k in shown), sum(sample.kinds), sample.temporaries, sample.elsewhere]
            rows.append([str(sample.device), sample.when, *map(in_bytes, sizes)])
        return rows

    def __str__(self) -> str:
        return "\n".join([*table_lines(self._cells(), keep=2), *fold_lines(self._remarks())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"{html_table(self._cells())}{html_remarks(self._remarks())}"

    def _remarks(self) -> list[str]:
        found = []
        for device, stats in self.stats.items():
            sample, used = self.peaks[device], stats.get("peak_bytes_in_use", 0)
            rest = used - sample.total - sample.temporaries
            parts = f"{bytes_in_words(sample.total)} of arrays and {bytes_in_words(sample.temporaries)} of temporaries"
            why = "more: padding, compiled programs, and what this process held before"
            if rest < 0:
                why = "less: its peak was at another moment, or some temporaries are not needed at once"
            counts = f"{device} itself counts {bytes_in_words(used)} at most since the process began, beside {parts}"
            found.append(f"{counts} at {sample.when}: {bytes_in_words(abs(rest))} {why}")
        return found


def live_bytes(device: Device) -> int:
    """Bytes of all arrays in a device's own memory, each buffer once; of a rank's devices, on the first of this process."""
    return sum(_buffers(jax.live_arrays(), device).values())


def _buffers(arrays: Iterable[Leaf], device: Device) -> dict[int, int]:
    device = _looked_at(device)
    kinds = (None, device.default_memory().kind)
    known = (array for array in arrays if isinstance(array, jax.Array) and not array.is_deleted())
    known = (array for array in known if array.sharding.memory_kind in kinds)
    here = (shard.data for array in known for shard in array.addressable_shards if shard.device == device)
    # To ask for an address waits with Python's lock held, which a host callback of the program may be waiting for.
    return {data.block_until_ready().unsafe_buffer_pointer(): data.nbytes for data in here if data.nbytes}


def _looked_at(device: Device) -> Device:
    return next(filter(is_here, devices_of(device)))


def sample_step(
    engine: Engine, leaves: Leaves[Array], batch: Batch, key: Key | None, purpose: Purpose = "update"
) -> tuple[Ledger, Leaves[Array]]:
    """Run one step, which consumes its state, or forwards, and look at what is alive on the devices here; waits at each look."""
    plan, lowered = engine.plan(purpose, batch, key)
    liveness = step_liveness(engine, lowered, homes_of(lowered, batch, key), compiled=True)
    foreign = [*jax.tree.leaves(batch), *([] if key is None else [jax.random.key_data(key)])]
    state = dict(zip(lowered.bound.inputs, leaves.flat(), strict=False))
    kept = {name: leaf for name, leaf in state.items() if purpose == "forward" or name.ref.role == Role.STATE}
    sampler = _Sampler(plan, lowered, liveness, foreign, kept)
    sampler.look(0, state, liveness.devices)
    outcome = engine.run(purpose, leaves, batch, key, observer=sampler)
    values = dict(zip(lowered.bound.outputs, jax.tree.leaves(outcome), strict=True))
    sampler.look(len(liveness.lines) + 1, state | values, liveness.devices)
    stats = {device: found for device in liveness.devices if (found := _looked_at(device).memory_stats())}
    return Ledger(liveness, tuple(sampler.samples), stats), outcome.state


def homes_of(lowered: LoweredStep, batch: Batch, key: Key | None) -> dict[Name, Device]:
    """The devices of the caller's batch leaves and key, of each that is on one device."""
    names = [name for name in lowered.bound.inputs if name.stage == CALLER]
    given = [*jax.tree.leaves(batch), *([] if key is None else [key])]
    arrays = [(name, leaf.devices()) for name, leaf in zip(names, given, strict=True) if isinstance(leaf, jax.Array)]
    return {name: next(iter(devices)) for name, devices in arrays if len(devices) == 1}


class _Sampler:
    """Observes a step: follows which slot holds which value, and looks at each device when it holds most."""

    def __init__(self, plan: Plan, lowered: LoweredStep, liveness: Liveness, foreign: Sequence[Leaf], kept: Mapping[Name, Leaf]):
        self.samples: list[Sample] = []
        self._lines, self._liveness, self._foreign = liveness.lines, liveness, foreign
        self._peaks = {device: liveness.peak(device) for device in liveness.devices}
        self._moment = 0
        self._always = [*lowered.bound.placed.items(), *kept.items()]  # what no step consumes is the caller's until it ends
        self._holds = dict(zip(plan.inputs, lowered.bound.inputs, strict=True))

    def __call__(self, instruction: Instruction, slots: Sequence[Leaf]) -> None:
        self._holds.update(zip(instruction.outputs, self._lines[self._moment].outputs, strict=False))  # a token more
        self._moment += 1
        devices = [device for device, moment in self._peaks.items() if moment == self._moment]
        if devices:
            self.look(self._moment, {name: slots[slot] for slot, name in self._holds.items()}, devices)
        for slot in instruction.free:
            self._holds.pop(slot, None)

    def look(self, moment: int, values: Mapping[Name, Leaf], devices: Iterable[Device]) -> None:
        inside = 0 < moment <= len(self._lines)
        label = self._lines[moment - 1].label if inside else "ends" if moment else "begins"
        kinds = {life.name: life.kind for life in self._liveness.lives if life.begins <= moment <= life.ends}
        for device in devices:
            seen = _buffers(self._foreign, device)
            sums: dict[str, int] = dict.fromkeys(MEMORY_KINDS, 0)
            for name, value in (*self._always, *values.items()):
                fresh = {at: size for at, size in _buffers([value], device).items() if at not in seen}
                sums[kinds.get(name) or memory_kind(name)] += sum(fresh.values())
                seen |= fresh
            extra = self._liveness.temporary(device, moment)
            self.samples.append(Sample(label, moment, device, tuple(sums.values()), live_bytes(device), extra))
