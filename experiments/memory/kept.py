"""What does a stage keep for its backward? Bytes for one microbatch, with ``remat="least"`` and with ``remat="keep"``.

Nothing runs: the bytes are those of ``pipe.stages`` after ``pipe.forecast``, which sees shapes only. See README.md.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax

import jaxpp
from experiments.devices import ensure_devices
from experiments.memory.pairs import gpt
from experiments.options import ConfigError, check_names, check_numbers
from experiments.results import Findings, columns, command, noted
from experiments.zoo.main import CASES
from jaxpp.runtime.progress import progress

__all__ = ["BLOCKS", "Config", "ConfigError", "Line", "Result", "main", "run", "table"]

DESCRIPTION = "Count the bytes that a microbatch holds between forward and backward: the least, and everything."
MICROBATCHES, HEADS = 4, 4
KIB = 2**10

BLOCKS = {
    "gpt-blocks": ("float32", 0.0),
    "gpt-blocks-dropout": ("float32", 0.1),
    "gpt-blocks-bf16": ("bfloat16", 0.0),
    "gpt-blocks-bf16-dropout": ("bfloat16", 0.1),
}
"""A stage of two GPT blocks: the type it computes in, and its dropout."""


@dataclass(frozen=True)
class Config:
    """What is counted, and the sizes of the GPT blocks; the zoo's models have the sizes of ``experiments.zoo``.

    Attributes:
        models: names, such as resnet or gpt-blocks-bf16; all unless given.
        stages: pipeline stages of a zoo model.
        width: features of the GPT blocks.
        length: tokens of a sequence.
        microbatch: sequences of a microbatch.
        json: file to add the line of results to.
    """

    models: tuple[str, ...] = ()
    stages: int = 4
    width: int = 256
    length: int = 64
    microbatch: int = 4
    json: Path | None = None

    def __post_init__(self):
        check_names("models", self.models, (*BLOCKS, *CASES))
        check_numbers(self)
        if self.width % HEADS:
            raise ConfigError(f"--width {self.width}: {HEADS} heads share the width equally. Fix: pass a multiple of {HEADS}.")


@dataclass(frozen=True)
class Line:
    """What one model keeps of a microbatch.

    Attributes:
        model: its name.
        least: bytes with ``remat="least"``; of the stage of two blocks, or of all stages of a zoo model together.
        keep: the same with ``remat="keep"``.
        activation: bytes of one block's activation; 0 for a zoo model.
    """

    model: str
    least: int
    keep: int
    activation: int = 0

    def a_block(self, num_bytes: int) -> float:
        """Activations that each of the two blocks keeps, where the stage keeps so many bytes."""
        return num_bytes / 2 / self.activation


@dataclass(frozen=True)
class Result(Findings):
    """What a run found.

    Attributes:
        config: what was asked for.
        lines: one a model.
    """

    config: Config
    lines: tuple[Line, ...]


def run(config: Config) -> Result:
    """Cut every model, and read what its stages keep.

    Raises:
        JaxppError: a model that cannot be cut into so many stages.
    """
    ensure_devices(config.stages)
    lines = []
    with progress(config.models or (*BLOCKS, *CASES), unit="model") as bar:
        for name in bar:
            bar.set_description(name)
            with noted(f"This was the model {name}."):
                lines.append(_blocks(name, config) if name in BLOCKS else _case(name, config))
    return Result(config, tuple(lines))


def _blocks(name: str, config: Config) -> Line:
    """The middle one of three stages of a GPT: two blocks, nothing else."""
    compute, dropout = BLOCKS[name]
    sizes = config.width, 6, HEADS, config.length, MICROBATCHES * config.microbatch
    problem, key = gpt(*sizes, dropout, compute), jax.random.key(0)
    counts: dict[str, Any] = {"num_stages": 3, "num_microbatches": MICROBATCHES, "cuts": ["h_2", "h_4"]}
    pipe = jaxpp.Pipeline(problem.loss_fn, optax.sgd(1e-3), remat="least", **counts)
    pipe.forecast(jax.eval_shape(problem.init, key), problem.batch, key)
    middle = pipe.stages[1]
    activation = config.microbatch * config.length * config.width * jax.numpy.dtype(compute).itemsize
    return Line(name, middle.kept, middle.keepable, activation)


def _case(name: str, config: Config) -> Line:
    """A model of the zoo, as the zoo trains it."""
    case: Any = CASES[name](8 * MICROBATCHES, 0)
    key = jax.random.key(0)
    counts: dict[str, Any] = {"num_stages": config.stages, "num_microbatches": MICROBATCHES}
    pipe = jaxpp.Pipeline(case.loss_fn, optax.sgd(1e-3), has_state=case.has_state, weight=case.weight, remat="least", **counts)
    pipe.forecast(jax.eval_shape(case.init, key), case.batch(0), key if case.takes_key else None)
    return Line(name, sum(stage.kept for stage in pipe.stages), sum(stage.keepable for stage in pipe.stages))


def table(result: Result) -> str:
    """The lines as text."""
    cells = [["model", "least, KiB", "keep, KiB", "least / keep", "activations a block: least", "keep"]]
    for line in result.lines:
        sizes = [f"{line.least / KIB:,.0f}", f"{line.keep / KIB:,.0f}", f"{line.least / line.keep:.0%}"]
        blocks = [f"{line.a_block(size):.1f}" for size in (line.least, line.keep)] if line.activation else ["", ""]
        cells.append([line.model, *sizes, *blocks])
    return "\n".join(columns(cells))


def main() -> None:
    """Read the command line, run, print the table, and write the line of JSON."""
    command("memory.kept", Config, DESCRIPTION, run, table)


if __name__ == "__main__":
    main()
