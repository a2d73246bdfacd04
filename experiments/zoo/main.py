"""Does it work on any model, unedited? Each model of ``models/`` trained a little on real data, then verified. See README.md."""

import time
from dataclasses import dataclass
from pathlib import Path

from experiments.devices import ensure_devices
from experiments.options import ConfigError, check_batch, check_names, check_numbers
from experiments.results import Findings, columns, command, noted
from experiments.zoo import images, language
from experiments.zoo.train import Row, train
from jaxpp.runtime.progress import progress
from jaxpp.schedule.registry import make_for_stages

__all__ = ["CASES", "Config", "ConfigError", "Result", "main", "run", "table"]

DESCRIPTION = "Train each model a little on real data, pipelined over several devices, and verify its step."
KIB = 2**10

CASES = {
    "mlp": images.mlp,
    "resnet": images.resnet,
    "unet": images.unet,
    "gpt": language.gpt,
    "nnx_gpt": language.nnx_gpt,
    "seq2seq": language.seq2seq,
}
"""What each model of ``models/`` learns, by the name of its file."""


@dataclass(frozen=True)
class Config:
    """The models and how they are trained.

    Attributes:
        models: names of files in models/, such as resnet; all unless given.
        stages: pipeline stages.
        microbatches: parts of a batch.
        schedule: order of the actions, such as gpipe, 1f1b or zb-v.
        batch: examples a step.
        steps: optimizer steps of each model.
        seed: of the parameters, the batches and the dropout.
        json: file to add the line of results to.
    """

    models: tuple[str, ...] = ()
    stages: int = 4
    microbatches: int = 4
    schedule: str = "1f1b"
    batch: int = 32
    steps: int = 60
    seed: int = 0
    json: Path | None = None

    def __post_init__(self):
        check_names("models", self.models, CASES)
        check_numbers(self)
        check_batch(self)


@dataclass(frozen=True)
class Result(Findings):
    """What a run found.

    Attributes:
        config: what was asked for.
        rows: one a model.
        seconds: the whole run.
    """

    config: Config
    rows: tuple[Row, ...]
    seconds: float


def run(config: Config) -> Result:
    """Train and verify every model.

    Raises:
        JaxppError: a schedule that does not exist at these sizes, a model that cannot be cut into so many stages, or a step that
            does not equal the plain one; a note names the model.
    """
    began = time.perf_counter()
    schedule = make_for_stages(config.schedule, num_stages=config.stages, num_microbatches=config.microbatches)
    ensure_devices(schedule.num_ranks)
    names = config.models or tuple(CASES)
    rows = []
    with progress(total=len(names) * config.steps, unit="step") as bar:
        for name in names:
            bar.set_description(name)
            with noted(f"This was the model {name}."):
                rows.append(train(name, CASES[name](config.batch, config.seed), schedule, config.steps, config.seed, bar))
    return Result(config, tuple(rows), time.perf_counter() - began)


def table(result: Result) -> str:
    """The result as text: a row a model."""
    cells = [["model", "learns", "params", "stages", "held-out loss", "equals the oracle", "kept", "what crosses, from > to"]]
    for row in result.rows:
        losses = f"{row.before:.3f} -> {row.after:.3f}"
        kept = f"{row.kept / KIB:,.0f} of {row.keepable / KIB:,.0f} KiB"
        cells.append([row.model, row.task, f"{row.num_params:,}", str(row.num_stages), losses, "yes", kept, row.crossings])
    return "\n".join(columns(cells, left=range(len(cells[0]))))


def main() -> None:
    """Read the command line, run, print the table, and write the line of JSON."""
    command("zoo", Config, DESCRIPTION, run, table)
