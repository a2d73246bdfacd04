"""What keeping fewer residuals costs and saves: the experiment ``remat`` with the GPT. Peaks as counted are the part ``memory``."""

import dataclasses
from collections.abc import Iterator

from experiments.gpu.rows import Job, Row
from experiments.remat.main import run

__all__ = ["rows"]

MIB = 2**20


def rows(job: Job) -> Iterator[Row]:
    """A row for each way to keep residuals."""
    result = run(dataclasses.replace(job.sizes.models, models=("gpt",), computes=("bfloat16",)))
    for row in result.rows:
        low, high = row.spread
        note = f"{1e3 * row.seconds:.2f} ms, {row.ratio:.3f} of the plain step ({low:.3f} to {high:.3f}); "
        note += f"kept {row.kept / MIB:,.1f} MiB a microbatch, {row.kept / row.keepable:.0%} of keep; "
        note += f"forecast peak {row.peak / MIB:,.1f} MiB"
        keep = result.rows[0]
        yield job.row(f"{row.way} / {keep.way}", f"{row.seconds / keep.seconds:.3f}", note=note, found=dataclasses.asdict(row))
