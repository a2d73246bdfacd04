"""Which GPUs for a model that everybody knows? ``jaxpp.plan`` of a model by its name; see README.md beside this.

``python -m experiments.plan --model llama-3-8b --gpus 8xh100``

Nothing runs and nothing is allocated: shapes are all that planning needs.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optax

import jaxpp
from experiments.options import ConfigError, check_names, check_numbers
from experiments.results import Findings, command
from models.named import MODELS, named

__all__ = ["Config", "Result", "main", "run", "table"]

DESCRIPTION = (
    "Plan the training of a model by its name: which GPUs and which mesh, what fits, how long a step takes, what a run costs."
)


@dataclass(frozen=True)
class Config:
    """What is planned.

    Attributes:
        model: its name, such as llama-3-8b, gpt2-124m or mixtral-8x7b.
        gpus: kinds with their counts: 8xh100 4xrtx-4090.
        prices: dollars for an hour of one GPU, as name=dollars: h100=2.5.
        sequences: of a step, on all GPUs together.
        length: tokens of a sequence.
        tokens: of the run, for days and cost; 0 if nobody asks.
        attention: cudnn, or xla.
        shards: how many GPUs share each stage of a replica, one number or several: 1 2 4.
        compiled: how many of the best rows go through the compiler.
        figure: file for a figure of cost against days; none unless given.
        json: file to add the line of results to.
    """

    model: str = "llama-3-8b"
    gpus: tuple[str, ...] = ("8xh100",)
    prices: tuple[str, ...] = ()
    sequences: int = 64
    length: int = 4096
    tokens: float = 0.0
    attention: str = "cudnn"
    shards: tuple[int, ...] = (1,)
    compiled: int = 1
    figure: Path | None = None
    json: Path | None = None

    def __post_init__(self) -> None:
        """Refuse what makes no run.

        Raises:
            ConfigError: an unknown model or attention, a number too small, a price that is none.
        """
        check_names("model", (self.model,), MODELS)
        check_names("attention", (self.attention,), ("cudnn", "xla"))
        check_numbers(self, zero=("compiled",))
        if self.tokens < 0 or not math.isfinite(self.tokens):
            raise ConfigError(f"--tokens {self.tokens:g}: a run has some tokens. Fix: pass --tokens 10e9, or leave it out.")
        self.dollars()

    def dollars(self) -> dict[str, float]:
        """The prices by the names of GPUs.

        Raises:
            ConfigError: a price that is no number.
        """
        found = dict[str, float]()
        for text in self.prices:
            name, _, price = text.partition("=")
            try:
                found[name] = float(price)
            except ValueError:
                raise ConfigError(f"--prices {text}: a price is name=dollars. Fix: pass --prices h100=2.5.") from None
        return found


@dataclass(frozen=True)
class Result(Findings):
    """What was found, as text and as numbers."""

    config: Config
    text: str
    rows: tuple[dict[str, Any], ...]
    figure: Path | None


def run(config: Config) -> Result:
    """Plan the model."""
    model = named(config.model, cross_entropy=jaxpp.linear_cross_entropy, attention=config.attention)
    planning = jaxpp.plan(
        model.loss_fn,
        optax.adamw(3e-4),
        model.init,
        model.batch(config.sequences, config.length),
        gpus=config.gpus,
        price=config.dollars(),
        tokens=config.tokens or None,
        model=config.shards,
        num_compiled=config.compiled,
    )
    if config.figure is not None and planning.rows:
        planning.figure().savefig(config.figure)
    rows = tuple(
        {
            "gpus": row.layout.num_gpus,
            "gpu": row.layout.gpu.name,
            "mesh": row.layout.mesh,
            "fits": row.fits,
            "peak": max(row.peaks),
            "seconds": list(row.seconds),
            "bound": None if row.bound is None else row.bound.seconds,
            "rate": row.rate,
            "mfu": row.mfu,
            "days": row.days,
            "cost": row.cost,
            "line": row.line,
        }
        for row in (*planning.rows, *planning.too_large)
    )
    return Result(config=config, text=str(planning), rows=rows, figure=config.figure if planning.rows else None)


def table(result: Result) -> str:
    """The table of the planning."""
    config = result.config
    said = (
        f"{config.model}, {config.sequences} sequences of {config.length:,} tokens a step, attention by {config.attention}, adamw"
    )
    return f"{said}\n\n{result.text}"


def main() -> None:
    """Read the command line, plan, print the table, and write the line of JSON."""
    command("plan", Config, DESCRIPTION, run, table)
