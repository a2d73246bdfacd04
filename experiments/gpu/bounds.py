"""What was measured over what the device's numbers allow at least (``jaxpp.observe``'s bound of a step)."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from experiments.gpu.rows import Job, Row, first_line
from jaxpp.observe.bound import StepBound, bound_of
from jaxpp.pipeline import Pipeline
from jaxpp.types import Batch, Key

__all__ = ["find_bounds", "over_bounds"]


def find_bounds(pipes: Mapping[str, Pipeline], batch: Batch, key: Key) -> dict[str, StepBound | str | None]:
    """The bound of a step of each pipeline; None on a device whose numbers are not known, or why it could not be found."""
    found: dict[str, StepBound | str | None] = {}
    for name, pipe in pipes.items():
        try:
            found[name] = bound_of(pipe.engine, batch, key)
        except Exception as error:  # noqa: BLE001  (the times stay, even if a program of this device cannot be read)
            found[name] = first_line(error)
    return found


def over_bounds(
    job: Job, device: str, times: Mapping[str, Sequence[float]], bounds: Mapping[str, StepBound | str | None]
) -> Iterator[Row]:
    """The median step over its bound, and the share of the peak that it reaches; one row if the device has no numbers.

    Args:
        job: what is measured.
        device: what it is measured on.
        times: seconds of the steps of each pipeline.
        bounds: as ``find_bounds`` returns them.
    """
    if bounds and all(bound is None for bound in bounds.values()):
        note = f"jaxpp has no numbers of {device}, only of the GPUs in jaxpp.targets.target_table()"
        yield job.row("measured / bound", "not known", "at least 1", note)
        return
    for name, bound in bounds.items():
        if isinstance(bound, str):
            yield job.row(f"{name}, measured / bound", "failed", "at least 1", bound)
        elif bound is not None and times.get(name):
            yield from _over(job, name, float(np.median(times[name])), bound)


def _over(job: Job, name: str, seconds: float, bound: StepBound) -> Iterator[Row]:
    ratio, reached = seconds / bound.seconds, bound.peak_fraction * bound.seconds / seconds
    note = f"{1e3 * seconds:.2f} ms; {bound.lines()[0]}"
    beaten = "BEATEN: a step was faster than its bound, so the bound is wrong and must be mended; " if ratio < 1 else ""
    numbers = {"ratio": ratio, "bound": bound.seconds, "seconds": seconds, "parts": bound.parts._asdict()}
    yield job.row(f"{name}, measured / bound", f"{ratio:.3f}", "at least 1", beaten + note, **numbers)
    most = bound.peak_fraction
    note = f"at most {most:.1%} by the bound; the model's own matrix products, each type at its own peak"
    yield job.row(f"{name}, of the peak (MFU)", f"{reached:.1%}", note=note, reached=reached, most=most)
