"""Does it work on any model, unedited? Each model of ``models/`` trained a little on real data, then verified. See README.md."""

import dataclasses
import json
import platform
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import jax
import tyro

from experiments.devices import ensure_devices
from experiments.results import ConfigError, check_writable, report
from experiments.zoo import images, language
from experiments.zoo.train import Row, train
from jaxpp.errors import JaxppError
from jaxpp.runtime.progress import progress
from jaxpp.schedule.registry import make_for_stages

__all__ = ["CASES", "Config", "ConfigError", "Result", "main", "run", "table"]

DESCRIPTION = "Train each model a little on real data, pipelined over several devices, and verify its step."
PACKAGES = ("jaxpp", "jax", "jaxlib", "flax", "optax", "scikit-learn")

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
        unknown = [name for name in self.models if name not in CASES]
        if unknown:
            raise ConfigError(f"--models {' '.join(unknown)}: there is no such model. Fix: pass some of {', '.join(CASES)}.")
        low = [f"--{name} {value}" for name in ("stages", "microbatches", "batch", "steps") if (value := getattr(self, name)) < 1]
        if low:
            raise ConfigError(f"{', '.join(low)}: counts start at 1. Fix: pass 1 or more.")
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed}: seeds start at 0. Fix: pass 0 or more.")
        if self.batch < self.microbatches:
            raise ConfigError(
                f"--batch {self.batch} --microbatches {self.microbatches}: each microbatch needs an example. "
                f"Fix: pass a --batch of at least {self.microbatches}."
            )


@dataclass(frozen=True)
class Result:
    """What a run found.

    Attributes:
        config: what was asked for.
        rows: one a model.
        seconds: the whole run.
        devices: all there are.
        versions: of Python and what was imported.
    """

    config: Config
    rows: tuple[Row, ...]
    seconds: float
    devices: tuple[str, ...]
    versions: dict[str, str]

    def to_json(self) -> str:
        """One line: everything."""
        return json.dumps(dataclasses.asdict(self), default=str)


def run(config: Config) -> Result:
    """Train and verify every model.

    Raises:
        ConfigError: a results file that cannot be written.
        JaxppError: a schedule that does not exist at these sizes, a model that cannot be cut into so many stages, or a step that
            does not equal the plain one; a note names the model.
    """
    began = time.perf_counter()
    check_writable("--json", config.json)
    schedule = make_for_stages(config.schedule, num_stages=config.stages, num_microbatches=config.microbatches)
    ensure_devices(schedule.num_ranks)
    names = config.models or tuple(CASES)
    rows = []
    with progress(total=len(names) * config.steps, unit="step") as bar:
        for name in names:
            bar.set_description(name)
            try:
                rows.append(train(name, CASES[name](config.batch, config.seed), schedule, config.steps, config.seed, bar))
            except JaxppError as error:
                error.add_note(f"This was the model {name}.")
                raise
    return Result(
        config=config,
        rows=tuple(rows),
        seconds=time.perf_counter() - began,
        devices=tuple(f"{device} {device.device_kind}" for device in jax.devices()),
        versions={name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
    )


def table(result: Result) -> str:
    """The result as text: a row a model."""
    cells = [["model", "learns", "params", "stages", "held-out loss", "equals the oracle", "kept", "what crosses, from > to"]]
    for row in result.rows:
        losses = f"{row.before:.3f} -> {row.after:.3f}"
        kept = f"{row.kept / KIB:,.0f} of {row.keepable / KIB:,.0f} KiB"
        cells.append([row.model, row.task, f"{row.num_params:,}", str(row.num_stages), losses, "yes", kept, row.crossings])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


def main() -> None:
    """Read the command line, run, print the table, and write the line of JSON."""
    try:
        result = run(tyro.cli(Config, prog="python -m experiments.zoo", description=DESCRIPTION))
    except (ConfigError, JaxppError) as error:
        raise SystemExit("\n".join([f"zoo: {error}", *getattr(error, "__notes__", ())])) from None
    report(table(result), result.to_json(), result.config.json)
