"""From the command line to the table and the line of JSON: what every experiment does around its question."""

import dataclasses
import importlib
import json
import platform
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import jax

from experiments.options import ConfigError, Saved, check_writable
from jaxpp.errors import JaxppError

__all__ = ["Findings", "columns", "command", "device_names", "noted", "report", "versions"]

PACKAGES = ("jaxpp", "jax", "jaxlib", "flax", "optax", "scikit-learn", "matplotlib")


def device_names() -> tuple[str, ...]:
    """All devices, each with its kind."""
    return tuple(f"{device} {device.device_kind}" for device in jax.devices())


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What a run found; each experiment adds its own numbers.

    Attributes:
        devices: what it ran on; all devices unless said.
        versions: of Python and the packages.
    """

    devices: tuple[str, ...] = field(default_factory=device_names)
    versions: dict[str, str] = field(default_factory=versions)

    @property
    def figures(self) -> str:
        """Where the figures are; empty if none were drawn."""
        return str(getattr(self, "figure", None) or "")

    def to_json(self) -> str:
        """One line: everything."""
        return json.dumps(dataclasses.asdict(self), default=str)


C = TypeVar("C", bound=Saved)
F = TypeVar("F", bound=Findings)


def command(name: str, config_type: type[C], description: str, run: Callable[[C], F], show: Callable[[F], str]) -> F:
    """Read the command line, run, print what was found, and write the line of JSON.

    Args:
        name: of the experiment's module, below ``experiments``.
        config_type: the dataclass of its options.
        description: for ``--help``.
        run: the experiment.
        show: its findings as text.

    Returns:
        what was found.

    Raises:
        SystemExit: the options make no run, or jaxpp refuses it; with the message alone.
    """
    try:
        tyro: Any = importlib.import_module("tyro")
    except ImportError:
        raise SystemExit(
            f'{name}: tyro reads the options, and is not installed. Fix: pip install -e ".[experiments]" in the checkout of jaxpp'
        ) from None
    try:
        config = tyro.cli(config_type, prog=f"python -m experiments.{name}", description=description)
        check_writable("--json", config.json)
        found = run(config)
    except (ConfigError, JaxppError) as error:
        raise SystemExit("\n".join([f"{name.rsplit('.', maxsplit=1)[-1]}: {error}", *getattr(error, "__notes__", ())])) from None
    report(show(found), found.to_json(), config.json if jax.process_index() == 0 else None, found.figures)
    return found


def report(summary: str, line: str, path: Path | None, figures: str = "") -> None:
    """Print what a run found, and add its line of JSON to the file of results, if there is one.

    Args:
        summary: for the screen.
        line: all that is to be kept.
        path: of the file.
        figures: where the figures are, if any were drawn.
    """
    print(summary)
    if figures:
        print(f"figures: {figures}")
    if path is not None:
        with path.open("a") as file:
            file.write(line + "\n")
        print(f"all numbers: {path}")


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Add a note to what jaxpp refuses in the block, such as the name of the model."""
    try:
        yield
    except JaxppError as error:
        error.add_note(note)
        raise


def columns(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """The lines of a table of cells, every column as wide as its widest; flush right but for the columns ``left``."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join((str.ljust if k in left else str.rjust)(cell, widths[k]) for k, cell in enumerate(row)).rstrip() for row in rows
    ]
