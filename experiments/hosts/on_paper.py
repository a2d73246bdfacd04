"""What would a step cost on 1 to 64 hosts of 8 GPUs? On the virtual clock, under assumptions that are options and are printed.

``python -m experiments.hosts.on_paper``

No device is needed and nothing is measured. The model grows with the hosts: every GPU has the same number of layers. Two layouts
are compared, with the same layers on each GPU and the same batch:

- *a rank a GPU*: each GPU is a rank. Most ranks send to the next GPU of their host, and the last rank of a host to the next host.
- *a rank a host*: the GPUs of a host share each layer (the axis ``model``), and pipe crosses hosts only.
"""

import functools
import gc
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from experiments.hosts.paper_figure import Line, paper_figure
from experiments.options import ConfigError, Flag, check_figure, check_names, check_numbers, figure_file, flag
from experiments.results import Findings, columns, command
from jaxpp.errors import ScheduleError
from jaxpp.runtime.progress import progress
from jaxpp.schedule import SCHEDULES, make, simulate

__all__ = ["LAYOUTS", "Config", "Costs", "Result", "Row", "assumptions", "costs_of", "crossing", "main", "run", "table"]

DESCRIPTION = "Forecast a step on many hosts: its time, its bubble and what crosses hosts, from stated assumptions."
LAYOUTS = ("a rank a GPU", "a rank a host")
_REDUCED = 2
"""All-reduces of an activation in a layer's forward, and as many in its backward: after the attention, and after the MLP."""
_RATES = ("teraflops", "utilisation", "host_link", "gpu_link")
_DELAYS = ("host_latency", "gpu_latency", "dispatch", "passing")
_GIB = 2**30


@dataclass(frozen=True)
class Config:
    """The hosts, the model and the links. Nothing of these is measured.

    Attributes:
        hosts: how many; each number is a row of the table.
        gpus: on each host.
        schedules: by name.
        microbatches: of a step.
        sequences: in a microbatch.
        hidden: width of the model's residual stream; 4096 as in models of 7 billion parameters.
        length: tokens of a sequence.
        layers: on each GPU, each of 12 x hidden x hidden parameters.
        teraflops: of a GPU at most, in 1e12 operations a second.
        utilisation: the part of it that a stage reaches while it computes.
        host_link: between hosts, in 1e9 bits a second, for each host and direction.
        gpu_link: between the GPUs of a host, in 1e9 bytes a second, for each GPU and direction.
        host_latency: of a transfer between hosts, in microseconds.
        gpu_latency: of a transfer between GPUs of a host, in microseconds.
        dispatch: what a process takes to hand over an action and its sends, in microseconds.
        passing: what it takes for a transfer between two other hosts, in microseconds: JAX counts the transfers in each process.
        figure: file for the figure; its folder is made if there is none.
        no_figure: draw none.
        json: file to add the line of results to.
    """

    hosts: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    gpus: int = 8
    schedules: tuple[str, ...] = ("1f1b", "interleaved", "zb-h1", "zb-v")
    microbatches: tuple[int, ...] = (64, 256)
    sequences: int = 1
    hidden: int = 4096
    length: int = 2048
    layers: int = 4
    teraflops: float = 989.0
    utilisation: float = 0.4
    host_link: float = 400.0
    gpu_link: float = 450.0
    host_latency: float = 20.0
    gpu_latency: float = 5.0
    dispatch: float = 100.0
    passing: float = 35.0
    figure: Path = Path("experiments/hosts/out/on_paper.png")
    no_figure: Flag = False
    json: Path | None = None

    def __post_init__(self):
        check_numbers(self)
        check_names("schedules", self.schedules, SCHEDULES, none=False)
        check_figure(self)
        low = [f"{flag(name)} {getattr(self, name):g}" for name in _RATES if not getattr(self, name) > 0]
        low += [f"{flag(name)} {getattr(self, name):g}" for name in _DELAYS if not getattr(self, name) >= 0]
        if low:
            raise ConfigError(f"{', '.join(low)}: a rate is above 0, and a delay at least 0. Fix: pass such numbers.")

    @property
    def activation(self) -> int:
        """Bytes of what crosses a stage boundary for a microbatch, in bfloat16."""
        return 2 * self.sequences * self.length * self.hidden


class Costs(NamedTuple):
    """What a rank takes for a microbatch, all its stages together, in seconds; and a transfer to the next rank.

    Attributes:
        forward: of F.
        input_grad: of I.
        weight_grad: of W.
        inside: a transfer between ranks of a host.
        between: a transfer between ranks of two hosts.
        crossing: bytes that a transfer between hosts puts on the link.
        useful: what F, I and W would take if the GPUs of a rank never waited for one another.
    """

    forward: float
    input_grad: float
    weight_grad: float
    inside: float
    between: float
    crossing: int
    useful: float


@dataclass(frozen=True)
class Row:
    """A step on so many hosts.

    Attributes:
        layout: one of ``LAYOUTS``.
        hosts: how many.
        ranks: of the schedule.
        schedule: its name.
        microbatches: of the step.
        seconds: of the step, without the optimizer's update.
        bubble: the part of ranks x seconds in which ranks do not compute.
        sending: seconds that transfers and the host's work add to the step; None where ``in_flight`` is.
        efficiency: the part of the GPUs' assumed speed that is used: ``useful`` over ``seconds``.
        link: the part of the step in which the busiest host is sending to another host.
        in_flight: microbatches whose residuals the fullest rank holds at once; all its stages together are one. It takes as
            long to find as the step itself, and is None but for the most hosts.
        own_dispatch: seconds of host time for a step, in the process that hands over most.
        all_dispatch: the same if one process handed over everything.
    """

    layout: str
    hosts: int
    ranks: int
    schedule: str
    microbatches: int
    seconds: float
    bubble: float
    sending: float | None
    efficiency: float
    link: float
    in_flight: float | None
    own_dispatch: float
    all_dispatch: float


@dataclass(frozen=True)
class Result(Findings):
    """What a run found.

    Attributes:
        config: what was assumed.
        rows: one a layout, number of hosts, schedule and number of microbatches.
        refused: the schedules that there are none of for some sizes, with the sizes that are near.
        took: seconds that all of it took.
        figure: the file, if one was drawn.
    """

    config: Config
    rows: tuple[Row, ...]
    refused: tuple[str, ...]
    took: float
    figure: Path | None
    devices: tuple[str, ...] = field(default=(), kw_only=True)


def costs_of(layout: str, config: Config) -> Costs:
    """What a rank takes, from operations, bytes and rates.

    A layer's forward has ``24 t h^2 + 4 t s h`` operations for t tokens in sequences of s, of width h: the products with its
    parameters, and those of the attention, which have no parameters and so cost nothing in W and twice as much in I. Where g GPUs
    share a layer, each does a g-th of it, and two all-reduces of the activation in F and two in I wait for the links of the host;
    each GPU sends ``2 (g - 1) / g`` of an activation for an all-reduce. Activations are not divided along ``model``, so each of
    the g GPUs sends a whole copy to the next host.
    """
    tokens, speed = config.sequences * config.length, 1e12 * config.teraflops * config.utilisation
    weights, attention = 24 * tokens * config.hidden**2, 4 * tokens * config.length * config.hidden
    forward, input_grad, weight_grad = (
        config.layers * flops / speed for flops in (weights + attention, weights + 2 * attention, weights)
    )
    host_rate, gpu_rate = config.host_link * 1e9 / 8, config.gpu_link * 1e9
    shared = config.gpus if layout == LAYOUTS[1] else 1
    reduce = 2 * (shared - 1) / shared * config.activation / gpu_rate + 1e-6 * config.gpu_latency * (shared > 1)
    waits = _REDUCED * reduce * config.layers * shared
    copies = shared * config.activation
    return Costs(
        forward=forward + waits,
        input_grad=input_grad + waits,
        weight_grad=weight_grad,
        inside=1e-6 * config.gpu_latency + config.activation / gpu_rate,
        between=1e-6 * config.host_latency + copies / host_rate,
        crossing=copies,
        useful=forward + input_grad + weight_grad,
    )


def run(config: Config) -> Result:
    """Make and simulate every schedule at every size, then draw.

    Raises:
        ConfigError: the figure, or the file of results, cannot be written.
    """
    figure = figure_file("hosts.on_paper", config)
    begun, rows, refused = time.perf_counter(), [], []
    cases = [
        (layout, hosts, name, count)
        for layout in LAYOUTS
        for hosts in config.hosts
        for name in config.schedules
        for count in config.microbatches
    ]
    with _without_collector(), progress(cases, desc="steps") as bar:
        for case in bar:
            try:
                rows.append(_row(case, config))
            except ScheduleError as error:
                fix = str(error).split("Fix: ")[-1].rstrip(".")
                refused.append("{}, {} hosts: {}, {} microbatches".format(*case) + f": {fix}")
    if figure:
        paper_figure([*_lines(config, rows)], _heading(config)).savefig(figure)
    return Result(config, tuple(rows), tuple(refused), time.perf_counter() - begun, figure)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Leave Python's garbage collector off: a million actions have no cycles, and to look for cycles takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _row(case: tuple[str, int, str, int], config: Config) -> Row:
    """A step on the virtual clock, for a layout, hosts, a schedule and microbatches."""
    layout, hosts, name, microbatches = case
    costs, each = costs_of(layout, config), config.gpus if layout == LAYOUTS[0] else 1
    schedule = make(name, num_ranks=hosts * each, num_microbatches=microbatches)
    v, owner = schedule.num_stages // schedule.num_ranks, schedule.stage_to_rank
    host = [rank // each for rank in range(schedule.num_ranks)]
    hops = [(host[a], host[b]) for a, b in itertools.pairwise(owner)]
    on_free_links = functools.partial(
        simulate, schedule, forward=costs.forward / v, input_grad=costs.input_grad / v, weight_grad=costs.weight_grad / v
    )
    transfers = [0] * hosts  # that leave each host
    for a, b in hops:
        if a != b:  # the activation leaves the one host, and its cotangent the other
            transfers[a] += microbatches
            transfers[b] += microbatches
    actions = [sum(len(row) for row in schedule.rows[k : k + each]) for k in range(0, schedule.num_ranks, each)]
    # As many come to a host as leave it; all others pass by.
    dispatch = [
        1e-6 * (config.dispatch * own + config.passing * (sum(transfers) - 2 * crossing))
        for own, crossing in zip(actions, transfers, strict=True)
    ]
    step = on_free_links(
        transfer=[costs.inside if a == b else costs.between for a, b in hops] + [0.0],
        dispatch=max(dispatch) / max(actions),
        rank_to_process=host,
    )
    most = hosts == max(config.hosts)
    return Row(
        layout=layout,
        hosts=hosts,
        ranks=schedule.num_ranks,
        schedule=name,
        microbatches=microbatches,
        seconds=step.makespan,
        bubble=step.bubble_fraction,
        sending=step.makespan - on_free_links().makespan if most else None,
        efficiency=microbatches * costs.useful / step.makespan,
        link=max(transfers) * costs.crossing / (config.host_link * 1e9 / 8) / step.makespan,
        in_flight=max(step.peak_residuals) / v if most else None,
        own_dispatch=max(dispatch),
        all_dispatch=1e-6 * config.dispatch * sum(actions),
    )


def crossing(config: Config) -> list[tuple[str, float, str]]:
    """What leaves a host in a step, by the axis that crosses two hosts: the axis, its bytes, and when they are sent."""
    count, layers = max(config.microbatches), config.layers * config.gpus
    gpu, host = (2 * count * costs_of(layout, config).crossing for layout in LAYOUTS)
    grads = layers * 12 * config.hidden**2 * 4
    reduced = 2 * _REDUCED * layers * count * config.activation
    return [
        (f"pipe, {LAYOUTS[0]}", gpu, "while other microbatches are computed"),
        (f"pipe, {LAYOUTS[1]}", host, "while other microbatches are computed"),
        ("data", grads, "once, after the last backward"),
        ("model", reduced, "in every layer, which waits"),
    ]


def assumptions(config: Config) -> list[str]:
    """What is assumed, in words."""
    parameters = 12 * config.hidden**2 * config.layers
    gpu = costs_of(LAYOUTS[0], config)
    return [
        f"A layer: hidden {config.hidden}, {parameters / config.layers / 1e6:.0f} million parameters; {config.layers} on each GPU; "
        f"a microbatch has {config.sequences} x {config.length} tokens.",
        f"A GPU: {config.teraflops:g} TFLOP/s at most, {config.utilisation:.0%} of them reached: "
        f"F {1e3 * gpu.forward:.2f}, I {1e3 * gpu.input_grad:.2f}, W {1e3 * gpu.weight_grad:.2f} ms a microbatch.",
        f"Links: {config.host_link:g} Gbit/s a host and {config.gpu_link:g} GB/s a GPU, each way, not shared by transfers; "
        f"latencies {config.host_latency:g} and {config.gpu_latency:g} us.",
        f"An activation: {config.activation / 2**20:g} MiB; "
        f"{1e3 * gpu.between:.2f} ms to another host, {1e3 * gpu.inside:.2f} ms inside a host.",
        f"A process for each host, which takes {config.dispatch:g} us for each action of its ranks, "
        f"and {config.passing:g} us for each transfer between others. No optimizer update.",
    ]


def table(result: Result) -> str:
    """The assumptions, seconds and bubbles of each layout, what else is to be known on the most hosts, and what each axis sends."""
    config, lines = result.config, assumptions(result.config)
    for layout in LAYOUTS:
        mine = [row for row in result.rows if row.layout == layout]
        lines += ["", f"{layout}: {_sharing(layout, config)}"]
        for count in config.microbatches:
            lines += ["", f"{layout}, {count} microbatches: seconds of a step and its bubble"]
            lines += _grid([row for row in mine if row.microbatches == count], config)
        most = max(config.hosts)
        lines += ["", f"{layout}, on {most} hosts", *_details([row for row in mine if row.hosts == most], config)]
    link = config.host_link * 1e9 / 8
    told = [["axis across two hosts", "leaves a host", "on its link", "when"]]
    told += [[axis, f"{size / _GIB:,.1f} GiB", f"{size / link:.2f} s", when] for axis, size, when in crossing(config)]
    lines += ["", f"bytes of a step with {max(config.microbatches)} microbatches", *columns(told, left=(0, 3))]
    refused = ["", "not for these sizes:", *result.refused] if result.refused else []
    return "\n".join([*lines, *refused, "", f"simulated in {result.took:.1f} s"])


def main() -> None:
    """Read the command line, run, print the table, and write the line of JSON."""
    command("hosts.on_paper", Config, DESCRIPTION, run, table)


def _sharing(layout: str, config: Config) -> str:
    if layout == LAYOUTS[0]:
        return "pipe inside hosts and across them"
    gpu, host = (costs_of(each, config) for each in LAYOUTS)
    waits = (sum(host[:3]) - sum(gpu[:3])) / sum(host[:3])
    return f"model inside, pipe across; {waits:.0%} of a rank's time are all-reduces, {1e3 * host.between:.2f} ms a transfer"


def _grid(rows: Sequence[Row], config: Config) -> list[str]:
    """A line for each number of hosts, with a pair of columns for each schedule."""
    cells = [["hosts", "ranks", *(cell for name in config.schedules for cell in (name, ""))]]
    for hosts in config.hosts:
        found = {row.schedule: row for row in rows if row.hosts == hosts}
        pairs = (
            (f"{found[name].seconds:.2f}", f"{found[name].bubble:.1%}") if name in found else "--" for name in config.schedules
        )
        ranks = {str(row.ranks) for row in found.values()}
        cells.append([str(hosts), "".join(ranks), *itertools.chain.from_iterable(pairs)])
    return columns(cells)


def _details(rows: Sequence[Row], config: Config) -> list[str]:
    cells = [["schedule", "microbatches", "sending", "FLOP/s", "link", "in flight", "dispatch", "by one process"]]
    for row in rows:
        times = [f"{row.sending:.3f} s", f"{row.efficiency * config.utilisation:.1%}", f"{row.link:.1%}"]
        dispatch = [f"{row.own_dispatch:.2f} s", f"{row.all_dispatch:.2f} s"]
        cells.append([row.schedule, str(row.microbatches), *times, f"{row.in_flight:g}", *dispatch])
    return columns(cells)


def _heading(config: Config) -> str:
    return (
        f"On paper, not measured: {config.gpus} GPUs on a host, {config.layers} layers of width {config.hidden} on each GPU, "
        f"{config.host_link:g} Gbit/s between hosts"
    )


def _lines(config: Config, rows: list[Row]) -> Iterator[Line]:
    """A line for each layout, schedule and number of microbatches."""
    for layout in LAYOUTS:
        for name in config.schedules:
            for count in config.microbatches:
                found = [row for row in rows if (row.layout, row.schedule, row.microbatches) == (layout, name, count)]
                points = tuple((row.hosts, row.seconds, row.bubble) for row in found)
                ideal = count * costs_of(layout, config).useful
                yield Line(layout, name, count, ideal, points)


if __name__ == "__main__":
    main()
