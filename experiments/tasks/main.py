"""Many tasks, one trunk: what does ``jaxpp.Bank`` cost and save? See README.md.

Every theta[t] on the device; in a bank, with and without prefetch; in a bank with a pipeline. The same tasks, the same batches.
"""

import dataclasses
import json
import platform
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import jax
import numpy as np
import optax
import tyro

from experiments.devices import ensure_devices
from experiments.results import ConfigError, check_writable, report
from experiments.tasks.compare import WAYS, Group, Plan, compare
from experiments.tasks.figure import tasks_figure
from experiments.tasks.problem import CLASSES, make_problem
from experiments.tasks.ways import Stages
from jaxpp.errors import JaxppError
from jaxpp.runtime.progress import progress
from jaxpp.schedule.draw.panel import has_matplotlib
from jaxpp.schedule.draw.text import table_lines
from jaxpp.schedule.registry import make_for_stages
from jaxpp.stages.table import bytes_in_words
from models.adapters import AdaptedMLP

__all__ = ["Config", "ConfigError", "Result", "main", "run", "table"]

DESCRIPTION = "Train many tasks with one trunk: every theta[t] on the device, or in a bank on the host."
PACKAGES = ("jaxpp", "jax", "jaxlib", "flax", "optax", "scikit-learn")
FORMATS = (".pdf", ".png", ".svg")


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
    wait: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    seed: int = 0
    figure: Path = Path("experiments/tasks/out/tasks.png")
    no_figure: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    json: Path | None = None

    def __post_init__(self):
        numbers = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.type is int}
        del numbers["seed"]
        low = [f"--{name.replace('_', '-')} {value}" for name, value in numbers.items() if value < 1]
        if min(self.tasks, default=0) < 1:
            low.insert(0, f"--tasks {' '.join(map(str, self.tasks))}".rstrip())
        if low:
            raise ConfigError(f"{', '.join(low)}: counts start at 1. Fix: pass 1 or more.")
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed}: seeds start at 0. Fix: pass 0 or more.")
        if not self.rate > 0:
            raise ConfigError(f"--rate {self.rate}: nothing is learned without a rate above 0. Fix: pass for example 0.003.")
        if self.batch < self.microbatches:
            raise ConfigError(
                f"--batch {self.batch} --microbatches {self.microbatches}: each microbatch needs an example. "
                f"Fix: pass a --batch of at least {self.microbatches}."
            )
        if not self.no_figure and self.figure.suffix not in FORMATS:
            raise ConfigError(f"--figure {self.figure}: it ends in none of {', '.join(FORMATS)}. Fix: pass for example tasks.png.")


@dataclass(frozen=True)
class Result:
    """What a run found.

    Attributes:
        config: what was asked for.
        groups: one a number of tasks.
        seconds: the whole run.
        figure: the file, if one was drawn.
        devices: all there are.
        versions: of Python and what was imported.
    """

    config: Config
    groups: tuple[Group, ...]
    seconds: float
    figure: Path | None
    devices: tuple[str, ...]
    versions: dict[str, str]

    def to_json(self) -> str:
        """One line: everything."""
        return json.dumps(dataclasses.asdict(self), default=str)


def run(config: Config) -> Result:
    """Train and compare all ways at every number of tasks, then draw.

    Raises:
        ConfigError: a file that cannot be written.
        JaxppError: a schedule that does not exist at these sizes, a model that cannot be cut into so many stages, or a bank that
            ends with other bits than training without one.
    """
    began = time.perf_counter()
    drawn = not config.no_figure and has_matplotlib()
    if not (drawn or config.no_figure):
        print('tasks: no figure, as matplotlib is not installed. Fix: pip install "jaxpp[figures]"', file=sys.stderr)
    check_writable("--figure", config.figure if drawn else None)
    check_writable("--json", config.json)
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
    if drawn:
        tasks_figure(groups).savefig(config.figure)
    return Result(
        config=config,
        groups=tuple(groups),
        seconds=time.perf_counter() - began,
        figure=config.figure if drawn else None,
        devices=tuple(f"{device} {device.device_kind}" for device in jax.devices()),
        versions={name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
    )


def table(result: Result) -> str:
    """The result as text: a row a way and number of tasks; and what moving a set costs."""
    width = max(map(len, WAYS))
    head = [
        "T",
        "way".ljust(width),
        "device KiB",
        "host KiB",
        "step ms",
        "host ms",
        "ratio",
        "accuracy",
        "worst",
        "best",
        "programs",
        "bits",
    ]
    cells = [head]
    notes = []
    for group in result.groups:
        for row in group.rows:
            sizes = " + ".join(f"{size / 1024:,.0f}" for size in row.device_bytes if size)
            times = f"{1e3 * row.seconds:.2f}", f"{1e3 * row.host:.2f}", f"{row.ratio:.2f}"
            right = (f"{100 * f(row.accuracies):.1f}%" for f in (np.mean, min, max))
            equal = {None: "", True: "equal"}[row.equal]
            programs = " + ".join(map(str, row.compiled))
            name = row.way.ljust(width)
            cells.append([str(group.num_tasks), name, sizes, f"{row.host_bytes / 1024:,.0f}", *times, *right, programs, equal])
        step = group.rows[0].seconds
        notes.append(
            f"T={group.num_tasks}: a set is {bytes_in_words(group.set_bytes)}; to the device {1e3 * group.load:.2f} ms "
            f"({group.load / step:.2f} of a resident step), back {1e3 * group.store:.2f} ms ({group.store / step:.2f}); "
            f"virtual clock with prefetch: {group.clock:.3f}"
        )
    return "\n".join([*table_lines(cells), "", *notes])


def main() -> None:
    """Read the command line, run, print the table, and write the line of JSON."""
    try:
        result = run(tyro.cli(Config, prog="python -m experiments.tasks", description=DESCRIPTION))
    except (ConfigError, JaxppError) as error:
        raise SystemExit("\n".join([f"tasks: {error}", *getattr(error, "__notes__", ())])) from None
    report(table(result), result.to_json(), result.config.json, str(result.figure or ""))
