"""Does tune choose the fastest pipeline? Its choice beside every candidate, run on this machine. See README.md beside this file."""

import time
from dataclasses import dataclass
from pathlib import Path

import jax

import jaxpp
from experiments.devices import ensure_devices
from experiments.options import Flag, check_figure, check_names, check_numbers, figure_file
from experiments.results import Findings, columns, command, noted
from experiments.speed.problems import PROBLEMS as MADE
from experiments.speed.problems import Sizes
from experiments.tune.figure import tune_figure
from experiments.tune.measure import Row, exhaustive, tuned
from jaxpp.runtime.progress import progress

__all__ = ["PROBLEMS", "Config", "Result", "main", "run", "summary"]

DESCRIPTION = "Run every candidate that tune considers, and compare its choice and its predictions with what was measured."
PROBLEMS = {
    "mlp": ("tiny", Sizes(width=256, depth=16, batch=256, length=1, ranks=4)),
    "gpt": ("gpt-small", Sizes(width=128, depth=4, batch=16, length=32, ranks=2)),
    "resnet": ("resnet", Sizes(width=16, depth=3, batch=32, length=16, ranks=2)),
}
"""How each model is made (in ``experiments.speed``), and its sizes here."""


@dataclass(frozen=True)
class Config:
    """The model, what is looked at, and how long. A size of 0 is the problem's own.

    Attributes:
        problem: mlp, gpt or resnet.
        schedules: names; all unless given.
        microbatches: numbers of microbatches.
        stages_per_rank: numbers of stages on each rank.
        remat: least, keep, recompute, offload.
        tried: candidates that tune runs itself.
        rounds: in which every candidate has its turn.
        steps: of a turn.
        width: features of a layer, or channels of the ResNet's first group.
        depth: layers or blocks.
        batch: examples of a step.
        length: tokens of a sequence, or pixels of an image's side.
        ranks: devices.
        markdown: print the table as Markdown, for README.md.
        figure: file for the figure; its folder is made if there is none.
        no_figure: draw none.
        json: file to add the line of results to.
    """

    problem: str = "mlp"
    schedules: tuple[str, ...] = ("gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved", "looped-bfs", "zb-v", "v-half", "v-min")
    microbatches: tuple[int, ...] = (4, 8)
    stages_per_rank: tuple[int, ...] = (1, 2)
    remat: tuple[str, ...] = ("least",)
    tried: int = 5
    rounds: int = 8
    steps: int = 3
    width: int = 0
    depth: int = 0
    batch: int = 0
    length: int = 0
    ranks: int = 0
    markdown: Flag = False
    figure: Path = Path("experiments/tune/out/tune.png")
    no_figure: Flag = False
    json: Path | None = None

    def __post_init__(self):
        check_names("problem", (self.problem,), PROBLEMS)
        check_names("schedules", self.schedules, jaxpp.schedule.SCHEDULES, none=False)
        check_names("remat", self.remat, ("least", "keep", "recompute", "offload"), none=False)
        check_numbers(self, zero=("width", "depth", "batch", "length", "ranks"))
        check_figure(self)

    @property
    def sizes(self) -> Sizes:
        """The problem's own sizes, unless others were given."""
        given = {name: getattr(self, name) for name in Sizes._fields}
        return PROBLEMS[self.problem][1]._replace(**{name: size for name, size in given.items() if size})


@dataclass(frozen=True)
class Result(Findings):
    """What a run found.

    Attributes:
        config: what was asked for.
        rows: the candidates, the fastest by prediction first.
        searched: seconds that tune took, compiling included.
        why: the sentences with which tune explains its choice.
        left_out: candidates or families that could not be used, and the reason.
        figure: the file, if one was drawn.
    """

    config: Config
    rows: tuple[Row, ...]
    searched: float
    why: tuple[str, ...]
    left_out: tuple[str, ...]
    figure: Path | None

    @property
    def choice(self) -> Row:
        """What tune chose."""
        return next(row for row in self.rows if row.chosen)

    @property
    def best(self) -> Row:
        """The candidate that was measured as the fastest, by its ratio to the choice: both ran in every round."""
        return min(self.rows, key=lambda row: row.ratio)


def run(config: Config) -> Result:
    """Tune, and run every candidate.

    Raises:
        ConfigError: a file that cannot be written.
        JaxppError: no candidate at these sizes.
    """
    figure, sizes = figure_file("tune", config), config.sizes
    ensure_devices(sizes.ranks)
    problem = MADE[PROBLEMS[config.problem][0]][0](sizes)
    params = jax.device_get(jax.jit(problem.init)(jax.random.key(0)))
    names = {"schedules": "schedules", "num_microbatches": "microbatches", "stages_per_rank": "stages_per_rank", "remat": "remat"}
    options = {name: getattr(config, own) for name, own in names.items()}
    options |= {"num_ranks": min(sizes.ranks, len(jax.devices())), "num_measured": config.tried, "keep": False}
    with noted(f"This was the problem {config.problem}."):
        begun = time.perf_counter()
        tuning = tuned(problem, params, **options)
        searched = time.perf_counter() - begun
        with progress(total=len(tuning.rows) * config.rounds, unit="turn", desc="all candidates") as bar:
            rows = exhaustive(problem, params, tuning, rounds=config.rounds, steps=config.steps, bar=bar)
    left_out = tuple(f"{what.words}: {str(error).splitlines()[0]}" for what, error in tuning.found.left_out.items())
    result = Result(config, tuple(rows), searched, tuple(tuning.why), left_out, figure)
    if figure:
        tune_figure(config.problem, rows).savefig(figure)
    return result


def summary(result: Result) -> str:
    """The candidates as a table, and the choice beside the best."""
    choice, best = result.choice, result.best
    head = ["schedule", "microbatches", "stages", "remat", "predicted", "measured", "error", "to the choice", "as predicted", ""]
    lines = [head]
    for row in sorted(result.rows, key=lambda row: row.ratio):
        times = [f"{1e3 * seconds:.1f} ms" for seconds in (row.predicted, row.measured)]
        mark = "chosen" if row.chosen else "" if row.tried is None else "tried"
        sizes = [str(row.microbatches), str(row.stages), row.remat]
        ratios = [f"{row.ratio:.3f}", f"{row.predicted / choice.predicted:.3f}"]
        lines.append([row.schedule, *sizes, *times, f"{row.error:+.1%}", *ratios, mark])
    errors = sorted(abs(row.error) for row in result.rows)
    apart = sorted(abs(row.predicted / choice.predicted / row.ratio - 1) for row in result.rows if not row.chosen) or [0.0]
    found = choice.tried or choice.measured
    said = [
        f"{result.config.problem}: tune chose {choice.name}: {1e3 * choice.measured:.1f} ms, predicted {choice.error:+.1%} off; "
        f"the fastest was {best.name}: {1e3 * best.measured:.1f} ms, {best.ratio:.3f} of the choice",
        f"during the search the choice took {1e3 * found:.1f} ms: its prediction was {choice.predicted / found - 1:+.1%} off",
        f"errors of all predictions: median {errors[len(errors) // 2]:.1%}, largest {errors[-1]:.1%}; "
        f"of their ratios to the choice: median {apart[len(apart) // 2]:.1%}, largest {apart[-1]:.1%}; "
        f"tune took {result.searched:.0f} s",
        *result.why,
        *result.left_out,
    ]
    if result.config.markdown:
        cells = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
        return "\n".join([*("| " + " | ".join(each) + " |" for each in cells), "", *said])
    return "\n".join([*columns(lines, left=(0, 3, 9)), "", *said])


def main() -> None:
    """Read the command line, run, print the table, and write the line of JSON."""
    command("tune", Config, DESCRIPTION, run, summary)
