"""Many tasks, one trunk: what does ``jaxpp.Bank`` cost and save? See README.md.

Every theta[t] on the device; in a bank, with and without prefetch; in a bank with a pipeline. The same tasks, the same batches.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import optax

from experiments.devices import ensure_devices
from experiments.options import ConfigError, Flag, check_batch, check_figure, check_numbers, figure_file
from experiments.results import Findings, columns, command
from experiments.tasks.compare import WAYS, Group, Plan, compare
from experiments.tasks.figure import tasks_figure
from experiments.tasks.problem import CLASSES, make_problem
from experiments.tasks.ways import Stages
from jaxpp.runtime.progress import progress
from jaxpp.schedule.registry import make_for_stages
from jaxpp.tables import bytes_in_words
from models.adapters import AdaptedMLP

__all__ = ["Config", "ConfigError", "Result", "main", "run", "table"]

DESCRIPTION = "Train many tasks with one trunk: every theta[t] on the device, or in a bank on the host."


@dataclass(frozen=True)
class Config:
    """The tasks, the model, and how long it is trained.

    Attributes:
        tasks: numbers of tasks, each a run of its own.
        order: which task a step is of: by turns, or drawn.
        steps: steps a task; T tasks train T times as many.
        batch: examples a step.
        width: features of the trunk.
        depth: its blocks, with an adapter of the task after each.
        rank: features inside an adapter.
        rate: of adam.
        stages: of the pipeline.
        microbatches: of the pipeline.
        schedule: of the pipeline.
        rounds: timed rounds, the ways by turns.
        timed: steps of each way timed in a round.
        warm_up: steps before those, not timed.
        wait: wait for each timed step before the next, as a loop does that reads the loss.
        seed: of parameters, tasks and batches.
        figure: file for the figure; its folder is made if there is none.
        no_figure: draw none.
        json: file to add the line of results to.
    """

    tasks: tuple[int, ...] = (4, 16, 64)
    order: Literal["round-robin", "random"] = "round-robin"
    steps: int = 30
    batch: int = 256
    width: int = 384
    depth: int = 3
    rank: int = 16
    rate: float = 1e-3
    stages: int = 2
    microbatches: int = 4
    schedule: str = "1f1b"
    rounds: int = 12
    timed: int = 8
    warm_up: int = 4
    wait: Flag = False
    seed: int = 0
    figure: Path = Path("experiments/tasks/out/tasks.png")
    no_figure: Flag = False
    json: Path | None = None

    def __post_init__(self):
        check_numbers(self)
        if not self.rate > 0:
            raise ConfigError(f"--rate {self.rate}: nothing is learned without a rate above 0. Fix: pass for example 0.003.")
        check_batch(self)
        check_figure(self)


@dataclass(frozen=True)
class Result(Findings):
    """What a run found.

    Attributes:
        config: what was asked for.
        groups: one a number of tasks.
        seconds: the whole run.
        figure: the file, if one was drawn.
    """

    config: Config
    groups: tuple[Group, ...]
    seconds: float
    figure: Path | None


def run(config: Config) -> Result:
    """Train and compare all ways at every number of tasks, then draw.

    Raises:
        ConfigError: a file that cannot be written.
        JaxppError: a schedule that does not exist at these sizes, a model that cannot be cut into so many stages, or a bank that
            ends with other bits than training without one.
    """
    began = time.perf_counter()
    figure = figure_file("tasks", config)
    schedule = make_for_stages(config.schedule, num_stages=config.stages, num_microbatches=config.microbatches)
    ensure_devices(schedule.num_ranks)
    model = AdaptedMLP(width=config.width, depth=config.depth, rank=config.rank, num_classes=CLASSES)
    stages = Stages(config.stages, config.microbatches, config.schedule)
    groups = []
    with progress(total=sum(len(WAYS) * config.steps * t + config.rounds for t in config.tasks), unit="step") as bar:
        for num_tasks in config.tasks:
            problem = make_problem(model, num_tasks, config.batch, config.order, config.seed)
            plan = Plan(config.steps * num_tasks, config.rounds, config.timed, config.warm_up, config.wait)
            groups.append(compare(problem, optax.adam(config.rate), stages, plan, bar))
    if figure:
        tasks_figure(groups).savefig(figure)
    return Result(config, tuple(groups), time.perf_counter() - began, figure)


def table(result: Result) -> str:
    """The result as text: a row a way and number of tasks; and what moving a set costs."""
    numbers = ["device KiB", "host KiB", "step ms", "host ms", "ratio", "accuracy", "worst", "best", "programs", "bits"]
    cells, notes = [["T", "way", *numbers]], []
    for group in result.groups:
        for row in group.rows:
            sizes = " + ".join(f"{size / 1024:,.0f}" for size in row.device_bytes if size)
            times = f"{1e3 * row.seconds:.2f}", f"{1e3 * row.host:.2f}", f"{row.ratio:.2f}"
            right = (f"{100 * f(row.accuracies):.1f}%" for f in (np.mean, min, max))
            equal = {None: "", True: "equal"}[row.equal]
            programs = " + ".join(map(str, row.compiled))
            cells.append([str(group.num_tasks), row.way, sizes, f"{row.host_bytes / 1024:,.0f}", *times, *right, programs, equal])
        step = group.rows[0].seconds
        notes.append(
            f"T={group.num_tasks}: a set is {bytes_in_words(group.set_bytes)}; to the device {1e3 * group.load:.2f} ms "
            f"({group.load / step:.2f} of a resident step), back {1e3 * group.store:.2f} ms ({group.store / step:.2f}); "
            f"virtual clock with prefetch: {group.clock:.3f}"
        )
    return "\n".join([*columns(cells, left=(1,)), "", *notes])


def main() -> None:
    """Read the command line, run, print the table, and write the line of JSON."""
    command("tasks", Config, DESCRIPTION, run, table)
