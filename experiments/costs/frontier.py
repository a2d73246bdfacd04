"""How many bytes does each repeated FLOP buy? The frontier of memory and time of some models, for each way to keep residuals.

Nothing is compiled and nothing runs: the stages are built with each way, and their arrays are counted, and the products and
convolutions that their backwards run again. ``tests/stages/test_frontier.py`` counts these in compiled programs too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax

import jaxpp
from experiments.devices import ensure_devices
from experiments.options import check_names, check_numbers, check_writable
from experiments.remat.main import Config as Sizes
from experiments.remat.problems import PROBLEMS
from experiments.results import Findings, columns, command, noted
from jaxpp.observe import Frontier
from jaxpp.observe.memory.forecast import frontier_of

__all__ = ["Config", "Result", "Row", "main", "run", "table"]

DESCRIPTION = "Count what each way to keep residuals holds and repeats."
MIB = 2**20


@dataclass(frozen=True)
class Config:
    """The models and how they are cut.

    Attributes:
        models: gpt, resnet, mlp.
        compute: type to compute in; parameters are float32.
        stages: pipeline stages, each on a device.
        microbatches: parts of a batch.
        schedule: order of the actions.
        gpt_width: features of the GPT's residual stream.
        gpt_depth: its blocks.
        gpt_length: tokens of a sequence.
        gpt_batch: sequences a step.
        resnet_width: channels of the ResNet's first group.
        resnet_batch: images a step.
        figure: file to draw the first model's frontier into.
        json: file to add the line of results to.
    """

    models: tuple[str, ...] = ("gpt", "resnet")
    compute: str = "float32"
    stages: int = 4
    microbatches: int = 8
    schedule: str = "gpipe"
    gpt_width: int = 128
    gpt_depth: int = 8
    gpt_length: int = 128
    gpt_batch: int = 32
    resnet_width: int = 16
    resnet_batch: int = 64
    figure: Path | None = None
    json: Path | None = None

    def __post_init__(self):
        check_names("models", self.models, PROBLEMS, none=False)
        check_numbers(self)


@dataclass(frozen=True)
class Row:
    """What one way to keep residuals does to one model.

    Attributes:
        model: which.
        remat: what is passed as remat.
        peak: bytes of the arrays on the fullest device when it holds most; temporaries are not known.
        slowdown: the time of a step over that with the least, by products alone.
        again: FLOPs of the products that a step repeats, over those of a step that repeats none.
        hosted: bytes that wait in host memory beside a device, at most.
    """

    model: str
    remat: str
    peak: int
    slowdown: float
    again: float
    hosted: int


@dataclass(frozen=True)
class Result(Findings):
    """What a run found.

    Attributes:
        config: what was asked for.
        rows: one a model and way.
    """

    config: Config
    rows: tuple[Row, ...]


def run(config: Config) -> Result:
    """The frontier of every model, as rows.

    Raises:
        ConfigError: a file that cannot be written.
        JaxppError: a schedule that does not exist at these sizes, or a model that cannot be cut into so many stages.
    """
    check_writable("--json", config.json)
    check_writable("--figure", config.figure)
    ensure_devices(config.stages)
    found = frontiers(config)
    if config.figure is not None:
        found[config.models[0]].figure().savefig(config.figure, dpi=120)
    rows = [
        Row(model, str(way.remat), way.peak, way.slowdown, way.repeated / (frontier.products or 1.0), way.hosted)
        for model, frontier in found.items()
        for way in frontier.ways
    ]
    return Result(config, tuple(rows))


def frontiers(config: Config) -> Mapping[str, Frontier]:
    """The frontier of each model."""
    of_gpt: dict[str, Any] = {"gpt_width": config.gpt_width, "gpt_depth": config.gpt_depth, "gpt_length": config.gpt_length}
    others: dict[str, Any] = {
        "gpt_batch": config.gpt_batch,
        "resnet_width": config.resnet_width,
        "resnet_batch": config.resnet_batch,
    }
    sizes, found = Sizes(models=config.models, microbatches=config.microbatches, **of_gpt, **others), {}
    schedule = jaxpp.schedule.make(config.schedule, num_ranks=config.stages, num_microbatches=config.microbatches)
    for model in config.models:
        problem, key = PROBLEMS[model](sizes, config.compute), jax.random.key(0)
        counts: dict[str, Any] = {"num_stages": schedule.num_stages, "num_microbatches": config.microbatches}
        with noted(f"This was the model {model}."):
            pipe = jaxpp.Pipeline(problem.loss_fn, optax.adamw(1e-3), schedule=schedule, **counts)
            pipe.abstract_state(jax.eval_shape(problem.init, key), problem.batch)
            found[model] = frontier_of(pipe.engine, problem.batch, key)
    return found


def table(result: Result) -> str:
    """The result as text: a row a model and way."""
    cells = [["model", "remat", "peak, MiB", "time", "repeated", "host, MiB"]]
    for row in result.rows:
        sizes = [f"{row.peak / MIB:.1f}", f"{row.slowdown:.3f}", f"{row.again:.1%}", f"{row.hosted / MIB:.1f}"]
        cells.append([row.model, row.remat, *sizes])
    notes = [
        "peak: of the arrays on the fullest device, parameters, gradients and optimizer included, temporaries not",
        "time: over that of the least, on the virtual clock, by the FLOPs and bytes of all operations; copies delay nothing",
        "repeated: FLOPs of products and convolutions that a step runs again, over those of a step that repeats none",
    ]
    return "\n".join([*columns(cells, left=()), "", *notes])


def main() -> None:
    """Read the command line, run, print the table, and write the line of JSON."""
    command("costs.frontier", Config, DESCRIPTION, run, table)


if __name__ == "__main__":
    main()
