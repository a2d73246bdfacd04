"""What does tracing cost? A traced step over one that is not, for a large model and a small one; both in one run.

``python -m experiments.bubble.tracing``
"""

from dataclasses import dataclass
from pathlib import Path

import jax

from experiments.bubble.main import Config as Bubble
from experiments.bubble.main import make_pipe
from experiments.devices import ensure_devices
from experiments.results import Findings, command

__all__ = ["Config", "Result", "main", "run", "summary"]


@dataclass(frozen=True)
class Config:
    """How much to measure.

    Attributes:
        steps: steps of each kind, traced and not; the ratio of their medians is printed.
        schedule: order of the actions.
        json: file to add the line of results to.
    """

    steps: int = 41
    schedule: str = "1f1b"
    json: Path | None = None


@dataclass(frozen=True)
class Result(Findings):
    """What a run found.

    Attributes:
        config: what was asked for.
        ratios: a traced step over one that is not, of each model.
    """

    config: Config
    ratios: dict[str, float]


MODELS = {
    "MLP 2048 x 8, 2 stages, 8 microbatches": Bubble(ranks=2, microbatches=8, examples=128, width=2048, depth=8),
    "MLP 128 x 16, 4 stages, 8 microbatches": Bubble(ranks=4, microbatches=8, examples=4, width=128, depth=16),
}


def run(config: Config, models: dict[str, Bubble] = MODELS) -> Result:
    """The ratio of each model, printed as soon as it is known."""
    ensure_devices(max(sizes.ranks for sizes in models.values()))
    ratios = {}
    for name, sizes in models.items():
        pipe, problem = make_pipe(sizes, config.schedule)
        state = pipe.init(problem.init, jax.random.key(0), problem.batch)
        profile = pipe.profile(state, problem.batch, num_steps=config.steps)
        ratios[name] = profile.trace_cost
        print(f"{name}: a traced step takes {profile.trace_cost:.3f} times as long as another ({1e3 * profile.seconds:.2f} ms)")
    return Result(config, ratios)


def summary(result: Result) -> str:
    """What was measured; the ratios are printed already."""
    return f"{len(result.ratios)} models, {result.config.steps} steps of each kind"


def main() -> None:
    """Read the command line, run, and write the line of JSON."""
    command("bubble.tracing", Config, "What does tracing cost?", run, summary)


if __name__ == "__main__":
    main()
