"""What was found as tables: of text for the screen, and of Markdown for README.md."""

from collections.abc import Sequence
from typing import NamedTuple

from experiments.results import columns
from experiments.speed.host import GrowthRow, HostRow, Lowering
from experiments.speed.one_thread import OneThread
from experiments.speed.steps import StepRow
from experiments.speed.synchronous import Synchronous

__all__ = ["in_markdown", "in_text"]


class _Table(NamedTuple):
    """A table: what it is of, its cells with a row of headings first, and how many columns are words."""

    title: str
    cells: list[list[str]]
    words: int


Head = tuple[str, Sequence[HostRow]]
"""What the host's time was measured of, and the rows."""


def in_text(
    steps: Sequence[StepRow],
    host: Head,
    growth: Sequence[GrowthRow],
    lowering: Sequence[Lowering],
    one: OneThread | None,
    synchronous: Synchronous | None,
) -> str:
    """All that was measured, for the screen."""
    found = [
        "\n".join([f"{table.title}:", *columns(table.cells, left=range(table.words))])
        for table in _tables(steps, host, growth, lowering, one, synchronous)
    ]
    return "\n\n".join(found)


def in_markdown(
    steps: Sequence[StepRow],
    host: Head,
    growth: Sequence[GrowthRow],
    lowering: Sequence[Lowering],
    one: OneThread | None,
    synchronous: Synchronous | None,
) -> str:
    """All that was measured, to be pasted into README.md."""
    found = []
    for table in _tables(steps, host, growth, lowering, one, synchronous):
        head, *rows = (f"| {' | '.join(cells)} |" for cells in table.cells)
        rule = "|" + "---|" * table.words + "---:|" * (len(table.cells[0]) - table.words)
        found.append("\n".join([f"{table.title}:", "", head, rule, *rows]))
    return "\n\n".join(found)


def _tables(
    steps: Sequence[StepRow],
    host: Head,
    growth: Sequence[GrowthRow],
    lowering: Sequence[Lowering],
    one: OneThread | None,
    synchronous: Synchronous | None,
) -> list[_Table]:
    found = []
    if steps:
        found += [_step_table(steps), _compile_table(steps), _memory_table(steps)]
    if host[1]:
        found.append(_host_table(*host))
    if growth:
        found.append(_growth_table(growth))
    if lowering:
        found.append(_lowering_table(lowering))
    if one is not None:
        found.append(_one_thread_table(one))
    if synchronous is not None:
        found.append(_synchronous_table(synchronous))
    return found


def _step_table(rows: Sequence[StepRow]) -> _Table:
    cells = [["problem", "schedule", "stages", "microbatches", "step, ms", "fastest plain", "ratio", "quartiles"]]
    cells[0] += ["plain loop", "ratio", "quartiles", "instructions", "host, us each"]
    for row in rows:
        sizes = [row.problem, row.schedule, str(row.stages), str(row.microbatches)]
        plain = [f"{1e3 * row.plain:.1f} ({row.plain_kind})", f"{row.ratio:.2f}", _span(row.quartiles)]
        loop = [f"{1e3 * row.loop:.1f} ({row.loop_kind})", f"{row.loop_ratio:.2f}", _span(row.loop_quartiles)]
        cells.append([*sizes, f"{1e3 * row.seconds:.1f}", *plain, *loop, str(row.instructions), f"{row.host:.1f}"])
    return _Table("A step, over the fastest plain step, and over the fastest that splits its batch", cells, 2)


def _compile_table(rows: Sequence[StepRow]) -> _Table:
    cells = [["problem", "schedule", "microbatches", "first step, s", "programs", "again, s", "plain, s", "programs", "ratio"]]
    for row in rows:
        if (made := row.compiling) is not None:
            took = [f"{made.seconds:.2f}", str(made.programs), f"{made.again:.2f}", f"{made.plain:.2f}", str(made.plain_programs)]
            cells.append([row.problem, row.schedule, str(row.microbatches), *took, f"{made.seconds / made.plain:.2f}"])
    return _Table("The first step: tracing, compiling, init and the step itself", cells, 2)


def _memory_table(rows: Sequence[StepRow]) -> _Table:
    cells = [["problem", "schedule", "microbatches", "fullest device", "all devices", "fastest plain step"]]
    for row in rows:
        peaks = [f"{size:.1f}" for size in (row.peak, row.peak_sum, row.plain_peak)]
        cells.append([row.problem, row.schedule, str(row.microbatches), *peaks])
    return _Table("Peak memory, MiB", cells, 2)


def _host_table(head: str, rows: Sequence[HostRow]) -> _Table:
    whole = rows[-1].total
    cells = [["instruction", "count", "us each", "us a step", "of the call"]]
    for row in rows:
        each = [str(row.count), f"{row.each:.1f}"] if row.count else ["", ""]
        cells.append([row.what, *each, f"{row.total:.0f}", f"{row.total / whole:.0%}"])
    return _Table(f"Where the host's time goes ({head})", cells, 1)


def _growth_table(rows: Sequence[GrowthRow]) -> _Table:
    cells = [["stages", "microbatches", "instructions", "host, us each", "of which running"]]
    cells += [[*map(str, (r.stages, r.microbatches, r.instructions)), f"{r.host:.1f}", f"{r.cpu:.1f}"] for r in rows]
    return _Table("Host time an instruction, as a plan of tiny stages grows", cells, 0)


def _lowering_table(rows: Sequence[Lowering]) -> _Table:
    cells = [["stages", "microbatches", "instructions", "lines, s", "slots, s", "together, s"]]
    for row in rows:
        counts = map(str, (row.stages, row.microbatches, row.instructions))
        cells.append([*counts, f"{row.lines:.2f}", f"{row.slots:.2f}", f"{row.seconds:.2f}"])
    return _Table("Lowering a schedule to a plan, compiling not included", cells, 0)


def _one_thread_table(one: OneThread) -> _Table:
    cells = [["step", "ms", "cores busy", "times as fast as naive", "quartiles", "m p / (m + p - 1)"]]
    for name, seconds in one.seconds.items():
        formula = f"{one.ideal:.2f}" if name in ("1f1b", "gpipe") else ""
        cells.append(
            [name, f"{1e3 * seconds:.0f}", f"{one.cores[name]:.2f}", f"{one.faster[name]:.2f}", _span(one.quartiles[name]), formula]
        )
    return _Table(f"Stages that are one thread wide: {one.stages} stages, {one.microbatches} microbatches", cells, 1)


def _synchronous_table(found: Synchronous) -> _Table:
    *ways, last = found.rows[0].seconds
    cells = [["schedule", *[f"{way}, ms (fastest)" for way in (*ways, last)]]]
    cells[0] += [heading for way in ways for heading in (f"{way} / {last.split()[0]}", "quartiles")]
    for row in found.rows:
        taken = [f"{1e3 * row.seconds[way]:.0f} ({1e3 * row.least[way]:.0f})" for way in row.seconds]
        ratios = [cell for way in ways for cell in (f"{row.ratio[way]:.2f}", _span(row.quartiles[way]))]
        cells.append([f"{row.schedule}{'' if row.same_bits else ' (BITS DIFFER)'}", *taken, *ratios])
    title = f"Devices that run a program in the thread that calls it: {found.stages} stages, {found.microbatches} microbatches"
    return _Table(title, cells, 1)


def _span(quartiles: tuple[float, float]) -> str:
    return f"{quartiles[0]:.2f} to {quartiles[1]:.2f}"
