"""What a step holds on each device: as forecast, and as found.

It is found twice. The ledger looks at each device at the moment when the forecast says it holds most, and tells arrays apart by
kind. A second step is looked at after every instruction, whatever the forecast says; the highest of that is what counts as
measured. Each array that JAX knows of is in it, the step's or not, except what was there before the pipeline was made.

Both go through ``pipe.engine``. ``pipe.profile(...).ledger`` has the ledger too, but compiles most programs a second time, to
watch them.
"""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

import jaxpp
from jaxpp.lowering.plan import Instruction
from jaxpp.lowering.step import Leaves
from jaxpp.observe import Forecast
from jaxpp.observe.memory.ledger import live_bytes, sample_step
from jaxpp.observe.memory.liveness import MEMORY_KINDS, Liveness, temporaries
from jaxpp.types import Array, Device

__all__ = ["PARTS", "Holding", "arrays_now", "measure"]

PARTS = (*MEMORY_KINDS, "temporaries")
"""What the bytes on a device are for: arrays by kind, and what compiled programs need while they run."""


@dataclass(frozen=True)
class Holding:
    """What one device holds when it holds most.

    Attributes:
        device: its name.
        forecast: bytes, one for each of ``PARTS``.
        found: the same by the ledger, at the moment that the forecast names.
        measured: bytes of all arrays and temporaries at the worst of all moments, less the arrays that were there before.
        microbatches: how many are then between their forward and the last of their backward, by the forecast; one is of a whole
            rank, all its stages together.
        counted: the peak that the device itself counts, since the process began; None where it does not.
    """

    device: str
    forecast: tuple[int, ...]
    found: tuple[int, ...]
    measured: int
    microbatches: float
    counted: int | None

    @property
    def ratio(self) -> float:
        """The forecast peak over the measured one."""
        return sum(self.forecast) / self.measured


def arrays_now() -> dict[Device, int]:
    """Bytes of all arrays on each device, those that nothing refers to any more let go first."""
    gc.collect()
    return {device: live_bytes(device) for device in jax.devices()}


def measure(
    pipe: jaxpp.Pipeline, forecast: Forecast, state: jaxpp.State, batch: Any, key: jax.Array, before: Mapping[Device, int]
) -> tuple[Holding, ...]:
    """Run two steps and look at what is alive.

    Args:
        pipe: whose steps.
        forecast: its forecast for them.
        state: from ``init`` or a step; it is consumed, as by ``pipe.step``.
        batch: of both steps.
        key: of both steps.
        before: bytes of the arrays that were there before the pipeline was made.

    Returns:
        one holding a device, in the order of the ranks.
    """
    ledger, leaves = sample_step(pipe.engine, pipe.engine.leaves(state.held), batch, key)
    highest = _highest(pipe, leaves, batch, key)
    stages_per_rank = pipe.schedule.num_stages // pipe.schedule.num_ranks
    holdings = []
    for device in ledger.liveness.devices:
        sample, stages = ledger.peaks[device], [row for row in forecast.stages if row.device == device]
        foreseen = zip(*((*row.kinds, row.temporaries) for row in stages), strict=True)
        holdings.append(
            Holding(
                device=str(device),
                forecast=tuple(map(sum, foreseen)),
                found=(*sample.kinds, sample.temporaries),
                measured=highest[device] - before[device],
                microbatches=_in_flight(forecast.liveness, device, sample.moment) / stages_per_rank,
                counted=ledger.stats.get(device, {}).get("peak_bytes_in_use"),
            )
        )
    return tuple(holdings)


def _highest(pipe: jaxpp.Pipeline, leaves: Leaves[Array], batch: Any, key: jax.Array) -> dict[Device, int]:
    """The most that each device holds after any instruction of a step, in bytes; the leaves are consumed."""
    engine = pipe.engine
    _, lowered = engine.plan("update", batch, key)
    extras = iter(temporaries(lowered.bound, engine.programs))
    highest = dict.fromkeys(engine.options.placement.ranks_shown, 0)

    def look(instruction: Instruction, slots: Sequence[Any]) -> None:
        del slots
        extra = next(extras)
        for device in highest:
            now = live_bytes(device) + extra * (instruction.about.device == device)
            highest[device] = max(highest[device], now)

    engine.run("update", leaves, batch, key, observer=look)
    return highest


def _in_flight(liveness: Liveness, device: Device, moment: int) -> int:
    """How many forwards have run on a device of which the last of the backward has not, or does at that moment."""
    spans: dict[tuple[int, int], list[int]] = {}
    for number, line in enumerate(liveness.lines):
        if line.program is not None and line.action is not None and line.device == device:
            spans.setdefault((line.action.stage, line.action.microbatch), []).append(number + 1)
    return sum(span[0] <= moment <= span[-1] for span in spans.values())
