"""What does tracing cost? A traced step over one that is not, for a large model and a small one; both in one run.

``python -m experiments.bubble.tracing``
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import tyro

from experiments.bubble.main import Config as Bubble
from experiments.bubble.main import make_pipe
from experiments.devices import ensure_devices
from experiments.results import ConfigError, check_writable, report

__all__ = ["Config", "main", "run"]


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


MODELS = {
    "MLP 2048 x 8, 2 stages, 8 microbatches": Bubble(ranks=2, microbatches=8, examples=128, width=2048, depth=8),
    "MLP 128 x 16, 4 stages, 8 microbatches": Bubble(ranks=4, microbatches=8, examples=4, width=128, depth=16),
}


def run(config: Config, models: dict[str, Bubble] = MODELS) -> dict[str, float]:
    """The ratio of each model."""
    found = {}
    for name, sizes in models.items():
        pipe, init, batch = make_pipe(sizes, config.schedule)
        profile = pipe.profile(pipe.init(init, jax.random.key(0), batch), batch, num_steps=config.steps)
        found[name] = profile.trace_cost
        print(f"{name}: a traced step takes {profile.trace_cost:.3f} times as long as another ({1e3 * profile.seconds:.2f} ms)")
    return found


def to_json(config: Config, ratios: dict[str, float]) -> str:
    """One line: everything."""
    return json.dumps(asdict(config) | {"ratios": ratios}, default=str)


def main() -> None:
    """Run from the command line."""
    config = tyro.cli(Config, prog="python -m experiments.bubble.tracing", description="What does tracing cost?")
    ensure_devices(4)
    try:
        check_writable("--json", config.json)
    except ConfigError as error:
        raise SystemExit(f"tracing: {error}") from None
    ratios = run(config)
    report(f"{len(ratios)} models, {config.steps} steps of each kind", to_json(config, ratios), config.json)


if __name__ == "__main__":
    main()
