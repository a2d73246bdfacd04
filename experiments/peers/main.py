"""What does a step cost in torch.distributed.pipelining, compared with plain torch on the same machine? See README.md."""

import importlib.metadata
import importlib.util
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from experiments.options import ConfigError, check_multiple, check_numbers
from experiments.peers.torch_workers import Sizes, time_pipeline, time_plain
from experiments.results import Findings, command
from jaxpp.runtime.progress import progress

__all__ = ["Config", "Result", "main", "run", "summary"]


@dataclass(frozen=True)
class Config:
    """The problem ``tiny`` of ``experiments.speed`` and how torch runs it.

    Attributes:
        width: features of each hidden layer, and of the input.
        depth: hidden layers; a multiple of the stages.
        batch: examples per step; a multiple of the microbatches.
        stages: pipeline stages, each a process.
        microbatches: parts of the batch.
        schedule: order of the actions.
        threads: of torch in each process of the pipeline; the plain step is tried with one thread and with all cores.
        rounds: alternating rounds; each starts new processes.
        steps: steps of each kind timed in a round.
        json: file to add the line of results to.
    """

    width: int = 128
    depth: int = 16
    batch: int = 32
    stages: int = 4
    microbatches: int = 8
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    threads: int = 1
    rounds: int = 5
    steps: int = 30
    json: Path | None = None


@dataclass(frozen=True)
class Result(Findings):
    """Medians over the rounds, in microseconds.

    Attributes:
        config: what was run.
        torch: its version.
        pipelined: one pipelined step.
        plain: one plain step, the faster of its two numbers of threads.
        ratio: pipelined / plain, the median of the rounds' ratios.
    """

    config: Config
    torch: str
    pipelined: float
    plain: float
    ratio: float


def run(config: Config) -> Result:
    """Measure, in alternating rounds."""
    check_numbers(config)
    check_multiple(config, "depth", "stages", "each stage has the same number of layers")
    check_multiple(config, "batch", "microbatches", "torch cuts the batch into equal parts")
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("this experiment measures torch, which is not installed. Fix: pip install torch")
    sizes = Sizes(**{name: getattr(config, name) for name in Sizes._fields})
    alone = [sizes._replace(threads=count) for count in sorted({1, os.cpu_count() or 1})]  # the plain step may use all cores
    rounds = [(min(map(time_plain, alone)), time_pipeline(sizes)) for _ in progress(range(config.rounds), desc="rounds")]
    plain, pipelined = zip(*rounds, strict=True)
    return Result(
        config=config,
        torch=importlib.metadata.version("torch"),
        pipelined=statistics.median(pipelined),
        plain=statistics.median(plain),
        ratio=statistics.median(after / before for before, after in zip(plain, pipelined, strict=True)),
    )


def summary(result: Result) -> str:
    """The result as three lines."""
    return "\n".join(
        [
            f"pipelined step  {result.pipelined:10.0f} us   ({result.config.stages} processes, torch {result.torch})",
            f"plain step      {result.plain:10.0f} us",
            f"ratio           {result.ratio:10.2f}",
        ]
    )


def main() -> None:
    """Read the command line, run, print a summary, and write the line of JSON."""
    command("peers", Config, "What does a step cost in torch.distributed.pipelining?", run, summary)
