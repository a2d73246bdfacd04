"""What do schedules gain that are made for the costs of their stages? See README.md beside this. No device is needed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from experiments.costs.schedules import Found, best_named, compare, random_table, table
from experiments.results import Findings, command
from jaxpp.schedule import Simulation

__all__ = ["Config", "Result", "main", "run", "show"]

DESCRIPTION = "Schedules made to measure, beside the best with a name, on random cost tables."
DRAWN = 2, 17  # the tables that are drawn


@dataclass(frozen=True)
class Config:
    """What to compare.

    Attributes:
        tables: how many random cost tables.
        small: few and small tables, for a quick look.
        split: whether backwards may be split into I and W, those of the schedules with a name too.
        figures: draw two of the schedules beside the best with a name.
        out: folder for the figures; made if there is none.
        json: file to add the line of results to.
    """

    tables: int = 200
    small: bool = False
    split: bool = True
    figures: bool = True
    out: Path = Path("experiments/costs/out")
    json: Path | None = None


@dataclass(frozen=True)
class Result(Findings):
    """What a run found.

    Attributes:
        config: what was asked for.
        found: one for each table.
        files: the figures.
    """

    config: Config
    found: tuple[Found, ...]
    files: tuple[Path, ...]

    @property
    def figures(self) -> str:
        """Where the figures are; empty if none were drawn."""
        return f"{len(self.files)} in {self.config.out}" if self.files else ""


def run(config: Config) -> Result:
    """Compare schedules on every table, then draw two of them."""
    found = compare(min(config.tables, 4) if config.small else config.tables, small=config.small, split=config.split)
    files = []
    if config.figures:
        config.out.mkdir(parents=True, exist_ok=True)
        for path, draw in drawings(config):
            draw(path)
            files.append(path)
    return Result(config, found, tuple(files), devices=())


def drawings(config: Config) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """Each figure with the function that makes it."""
    for number in DRAWN:
        costs = random_table(number, small=config.small, split=config.split)
        name, best = best_named(costs, split=config.split)
        made = costs.synthesised(costs.room, split=config.split)
        for label, schedule in ((name, best), ("auto", made)):
            run_of = costs.simulated(schedule)
            yield config.out / f"table-{number}-{label}.png", lambda path, it=run_of: save(it, path)


def save(simulation: Simulation, path: Path) -> None:
    """Draw the timeline of a simulation."""
    simulation.figure().savefig(path)


def show(result: Result) -> str:
    """All tables as text."""
    return table(result.found)


def main() -> None:
    """Read the command line, run, print the tables, and write the line of JSON."""
    command("costs", Config, DESCRIPTION, run, show)
