"""What does a gradient that is late by one step cost? Each optimizer without delay, with it, and with a correction.

``python -m experiments.lm.delay``
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.lm.main import Config as Training
from experiments.lm.main import run as train
from experiments.lm.optimizers import RATES, OptimizerName
from experiments.options import ConfigError, Flag, check_figure, check_numbers, figure_file
from experiments.results import Findings, columns, command
from jaxpp.schedule.draw.canvas import group_colour, new_figure

__all__ = ["Config", "Result", "Row", "main", "run", "table"]

MODEL = Training(width=64, depth=2, heads=2, microbatches=4, eval_batches=32, sample=1)
"""A model small enough to be trained until it hardly gains any more."""
SMOOTHED = 50
"""Steps whose mean loss is one point of the figure."""


@dataclass(frozen=True)
class Config:
    """What is trained, and how often.

    Attributes:
        optimizers: to compare; each at its own learning rate.
        feedback: the correction of late gradients: this much of the difference between two updates is added to the later one.
        steps: of each training.
        seeds: each optimizer is trained once for each.
        stages: pipeline stages.
        plain: train on one device; the losses are the same to rounding.
        figure: file for the figure; its folder is made if there is none.
        no_figure: draw none.
        json: file to add the line of results to.
    """

    optimizers: tuple[OptimizerName, ...] = tuple(RATES)
    feedback: float = 1.0
    steps: int = 2000
    seeds: tuple[int, ...] = (0,)
    stages: int = 2
    plain: Flag = False
    figure: Path = Path("experiments/lm/out/delay.png")
    no_figure: Flag = False
    json: Path | None = None

    def __post_init__(self):
        check_numbers(self, zero=("seeds",))
        check_figure(self)
        if not 0 < self.feedback < math.inf:
            raise ConfigError(f"--feedback {self.feedback}: a correction adds something. Fix: pass a number above 0, such as 1.")


@dataclass(frozen=True)
class Row:
    """One training.

    Attributes:
        optimizer: its name.
        delay: by how many steps its gradients are late.
        feedback: the correction; 0 for none.
        seed: of the parameters, the batches and the dropout.
        held_out: the loss on the held-out text after the last step, in nats a byte.
        losses: the training loss of every step.
    """

    optimizer: OptimizerName
    delay: int
    feedback: float
    seed: int
    held_out: float
    losses: tuple[float, ...]

    @property
    def how(self) -> str:
        """Delay and correction, in words."""
        return f"delay, feedback {self.feedback:g}" if self.feedback else "delay" if self.delay else "no delay"


@dataclass(frozen=True)
class Result(Findings):
    """What came of the trainings.

    Attributes:
        config: what was asked for.
        rows: one a training.
        figure: the file, if one was drawn.
    """

    config: Config
    rows: tuple[Row, ...]
    figure: Path | None


def run(config: Config, training: Training = MODEL) -> Result:
    """Train with every optimizer and seed: without delay, with it, and with the correction.

    Args:
        config: what to compare.
        training: the model and its batches; all else is taken from ``config``.
    """
    figure, rows = figure_file("lm.delay", config), []
    for seed in config.seeds:
        for optimizer in config.optimizers:
            for delay, feedback in ((0, 0.0), (1, 0.0), (1, config.feedback)):
                options: dict[str, Any] = {"optimizer": optimizer, "delay": delay, "feedback": feedback, "seed": seed}
                options |= {"steps": config.steps, "stages": config.stages, "plain": config.plain}
                found = train(dataclasses.replace(training, eval_every=config.steps, **options))
                rows.append(Row(optimizer, delay, feedback, seed, found.val_losses[-1][1], found.losses))
                tqdm.write(f"{optimizer}, {rows[-1].how}, seed {seed}: held-out loss {rows[-1].held_out:.4f}")
    result = Result(config, tuple(rows), figure)
    if figure:
        _figure(result).savefig(figure)
    return result


def table(result: Result) -> str:
    """The held-out loss of each optimizer, mean over the seeds, and what delay adds to it, with and without the correction."""
    feedback = f"feedback {result.config.feedback:g}"
    lines = [["optimizer", "no delay", "delay", "it adds", f"delay, {feedback}", "it adds"]]
    for optimizer in result.config.optimizers:
        synchronous, late, corrected = (np.mean([row.held_out for row in rows]) for rows in _by_how(result, optimizer).values())
        added = [f"{loss:.4f}  {loss - synchronous:+.4f}".split() for loss in (late, corrected)]
        lines.append([optimizer, f"{synchronous:.4f}", *added[0], *added[1]])
    return "\n".join(columns(lines))


def _by_how(result: Result, optimizer: OptimizerName) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in result.rows:
        if row.optimizer == optimizer:
            found.setdefault(row.how, []).append(row)
    return found


def _figure(result: Result) -> Any:
    """The training losses, a panel for each optimizer."""
    names = result.config.optimizers
    figure = new_figure((3.0 * len(names) + 0.6, 3.0), "constrained")
    panels = np.atleast_1d(figure.subplots(1, len(names)))
    for axes, name in zip(panels, names, strict=True):
        for k, (how, rows) in enumerate(_by_how(result, name).items()):
            losses = np.mean([row.losses for row in rows], axis=0)
            width = min(SMOOTHED, len(losses))
            smooth = np.convolve(losses, np.ones(width) / width, "valid")
            axes.plot(np.arange(width, len(losses) + 1), smooth, label=how, color=group_colour(k), linewidth=1.4)
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"training loss, mean of {SMOOTHED} steps\n(nats a byte)")
    panels[-1].legend(frameon=False)
    return figure


def main() -> None:
    """Read the command line, run, print the table, and write the line of JSON."""
    command("lm.delay", Config, "What does a gradient that is late by one step cost?", run, table)


if __name__ == "__main__":
    main()
