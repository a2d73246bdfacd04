"""A bank's copies between pinned host memory and the device: gigabytes a second, and whether computing hides them."""

from collections.abc import Iterator

from experiments.gpu.rows import Job, Row
from experiments.tasks.main import Config, run

__all__ = ["rows"]

AIMS = {"bank, prefetch": "at most 1.05"}


def rows(job: Job) -> Iterator[Row]:
    """The experiment ``tasks`` with sets large enough to fill the link, whose shared trunk computes for as long as copies take."""
    result = run(Config(**job.sizes.bank, no_figure=True))
    for group in result.groups:
        for what, seconds in (("host to device", group.load), ("device to host", group.store)):
            rate, aim = group.set_bytes / seconds / 1e9, "at least 20 GB/s" if what == "host to device" else ""
            note = f"a set of {group.set_bytes / 2**20:,.1f} MiB in {1e3 * seconds:.2f} ms, while nothing else happens"
            yield job.row(what, f"{rate:.2f} GB/s", aim, note, rate=rate, seconds=seconds, bytes=group.set_bytes)
        for row in group.rows:
            note = f"{1e3 * row.seconds:.2f} ms, host {1e3 * row.host:.2f} ms" + "; equal bits" * bool(row.equal)
            yield job.row(f"{row.way} / all resident", f"{row.ratio:.3f}", AIMS.get(row.way, ""), note, seconds=row.seconds)
        yield job.row("virtual clock, prefetch / all resident", f"{group.clock:.3f}", note="with these times")
