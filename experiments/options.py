"""Options checked before anything runs: each check refuses what makes no run in one line, with the flag as it was typed."""

import dataclasses
import difflib
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Protocol

from jaxpp.schedule.draw.canvas import has_matplotlib

try:
    from tyro.conf import FlagCreatePairsOff
except ImportError:  # only a command line needs tyro; ``experiments.gpu`` runs where it is not installed
    FlagCreatePairsOff = None

__all__ = [
    "ConfigError",
    "Figured",
    "Flag",
    "Saved",
    "Split",
    "check_batch",
    "check_figure",
    "check_folder",
    "check_multiple",
    "check_names",
    "check_numbers",
    "check_writable",
    "figure_file",
    "flag",
]

FORMATS = (".pdf", ".png", ".svg")
Flag = Annotated[bool, FlagCreatePairsOff]
"""An option that is on if it is given, without a counterpart that turns it off."""


class ConfigError(ValueError):
    """Sizes or names that make no run, in one line: what was got, the rule, what to do."""


class Saved(Protocol):
    """Options of an experiment, which name the file of results."""

    @property
    def json(self) -> Path | None:
        """The file to add the line of results to."""
        ...


class Figured(Saved, Protocol):
    """Options of an experiment that draws one figure."""

    @property
    def figure(self) -> Path:
        """The file for the figure."""
        ...

    @property
    def no_figure(self) -> bool:
        """Whether to draw none."""
        ...


class Split(Protocol):
    """Options of an experiment that splits a batch."""

    @property
    def batch(self) -> int:
        """Examples of a step."""
        ...

    @property
    def microbatches(self) -> int:
        """Parts of a batch."""
        ...


def flag(name: str) -> str:
    """The option of a field, as it is typed."""
    return "--" + name.replace("_", "-")


def check_numbers(config: object, zero: Collection[str] = ()) -> None:
    """Refuse integers below 1, a seed below 0, and a dropout that is not a rate.

    Args:
        config: a dataclass of options.
        zero: counts that may be 0.

    Raises:
        ConfigError: all such counts are named; then the seed; then the dropout.
    """
    low = []
    for field in dataclasses.fields(config):  # pyright: ignore[reportArgumentType]
        if field.name != "seed" and field.type in (int, tuple[int, ...]):
            given = getattr(config, field.name)
            values = [given] if field.type is int else given
            if min(values, default=0) < (field.name not in zero):
                low.append(" ".join([flag(field.name), *map(str, values)]))
    if low:
        raise ConfigError(f"{', '.join(low)}: counts start at 1. Fix: pass 1 or more.")
    if (seed := getattr(config, "seed", 0)) < 0:
        raise ConfigError(f"--seed {seed}: seeds start at 0. Fix: pass 0 or more.")
    if not 0 <= (dropout := getattr(config, "dropout", 0.0)) < 1:
        raise ConfigError(f"--dropout {dropout}: a rate is at least 0 and below 1. Fix: pass for example 0.1.")


def check_names(name: str, given: Sequence[str], known: Collection[str], *, none: bool = True) -> None:
    """Refuse names of nothing.

    Args:
        name: of the option, a plural such as ``models``.
        given: the names that were passed.
        known: the names there are.
        none: whether none at all may be passed.

    Raises:
        ConfigError: the unknown names are named, or that there is none.
    """
    if not given and not none:
        raise ConfigError(f"{flag(name)}: there is none. Fix: pass some of {', '.join(known)}.")
    unknown = [each for each in given if each not in known]
    if unknown:
        rule = f"there is no such {name.removesuffix('s')}"
        longer = [each for each in known if each.startswith(unknown[0])]
        near = " or ".join(longer or difflib.get_close_matches(unknown[0], known, n=1))
        fix = f"{near}, or some of" if near else "some of"
        raise ConfigError(f"{flag(name)} {' '.join(unknown)}: {rule}. Fix: pass {fix} {', '.join(known)}.")


def check_multiple(config: object, name: str, factor: str, rule: str) -> None:
    """Refuse a number that is no multiple of another.

    Args:
        config: the options.
        name: field of the number.
        factor: field of the other.
        rule: why it must be one.

    Raises:
        ConfigError: it is none.
    """
    number, by = getattr(config, name), getattr(config, factor)
    if number % by:
        fix = f"pass a {flag(name)} that is a multiple of {by}"
        raise ConfigError(f"{flag(name)} {number} {flag(factor)} {by}: {rule}. Fix: {fix}.")


def check_batch(config: Split) -> None:
    """Refuse a batch of fewer examples than microbatches.

    Raises:
        ConfigError: it has fewer.
    """
    if config.batch < config.microbatches:
        raise ConfigError(
            f"--batch {config.batch} --microbatches {config.microbatches}: each microbatch needs an example. "
            f"Fix: pass a --batch of at least {config.microbatches}."
        )


def check_figure(config: Figured) -> None:
    """Refuse a figure of a format that is not drawn.

    Raises:
        ConfigError: the file's name ends in none of the formats.
    """
    if not config.no_figure and config.figure.suffix not in FORMATS:
        example = type(config).figure.name  # pyright: ignore[reportAttributeAccessIssue]
        raise ConfigError(f"--figure {config.figure}: it ends in none of {', '.join(FORMATS)}. Fix: pass for example {example}.")


def check_writable(option: str, path: Path | None) -> None:
    """Refuse a file before the run, not after it; a file that was not there is not left behind.

    Raises:
        ConfigError: it cannot be written.
    """
    if path is None:
        return
    there = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()  # touch is content with a folder
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written ({error.strerror}). Fix: name another file.") from error
    if not there:
        path.unlink(missing_ok=True)


def check_folder(option: str, path: Path) -> None:
    """Make a folder if it is not there, and refuse one in which no file can be made.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        reason = "it is a file" if path.is_file() else error.strerror
        raise ConfigError(f"{option} {path}: cannot be written ({reason}). Fix: name another folder.") from error


def figure_file(name: str, config: Figured) -> Path | None:
    """Where to draw; None if no figure is wanted or matplotlib is missing, which is then said on stderr.

    Args:
        name: of the experiment.
        config: its options.

    Raises:
        ConfigError: the figure, or the file of results, cannot be written.
    """
    drawn = not config.no_figure and has_matplotlib()
    if not (drawn or config.no_figure):
        print(
            f'{name}: no figure, as matplotlib is not installed. Fix: pip install -e ".[figures]" in the checkout of jaxpp',
            file=sys.stderr,
        )
    figure = config.figure if drawn else None
    check_writable("--figure", figure)
    check_writable("--json", config.json)
    return figure
