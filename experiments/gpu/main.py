"""What does jaxpp do on a GPU? Every claim that needs an accelerator, measured in one command of under nine minutes. See README.md.

This process measures nothing and leaves the device alone: each case is measured by a process of its own (``parts``). What has been
found is printed as it comes, and the table and the JSON are written again after every case.
"""

import argparse
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments.gpu.parts import PARTS, TURNS, Part, perform, run_process, saved_rows
from experiments.gpu.rows import Row, markdown, text
from experiments.options import ConfigError, check_names, check_writable
from experiments.results import Findings

__all__ = ["Config", "Result", "main", "run", "table"]

DESCRIPTION = "Measure on this machine's accelerator all that jaxpp claims of accelerators."
_LEAST = 15.0  # seconds that must be left for a case to begin
_CORES = 3  # cores for each process, where several run side by side


@dataclass(frozen=True)
class Config:
    """What is measured, and for how long.

    Attributes:
        parts: names; all unless given. The environment is always measured.
        small: small models; None asks the environment, and takes small ones on a CPU.
        minutes: for everything; None is 8.5, or 25 for small models, which two cores may take that long to compile.
        out: folder for the table, the JSON and the traces; a temporary one unless given.
    """

    parts: tuple[str, ...] = tuple(PARTS)
    small: bool | None = None
    minutes: float | None = None
    out: Path | None = None

    def __post_init__(self):
        check_names("parts", self.parts, PARTS, none=False)
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"--minutes {self.minutes}: there is no time. Fix: pass for example 8.5.")


@dataclass(frozen=True)
class Result(Findings):
    """What a run found.

    Attributes:
        config: what was asked for.
        out: folder of the files.
        small: whether the models were small.
        rows: of all parts.
        seconds: that every case took, by part and case.
        whole: whether every part has ended.
    """

    config: Config
    out: Path
    small: bool
    rows: tuple[Row, ...]
    seconds: Mapping[str, float]
    whole: bool


class _Run:
    """A run under way: what has been found, what time is left, and where files go."""

    def __init__(self, config: Config, out: Path, work: Path):
        self.config, self.out, self.work = config, out, work
        self.small, self.whole = config.small is not False, False
        self.rows: list[Row] = []
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    @property
    def left(self) -> float:
        """Seconds until all must have ended."""
        return 60 * self.minutes - (time.perf_counter() - self._began)

    @property
    def minutes(self) -> float:
        """For everything."""
        return self.config.minutes or (25.0 if self.small else 8.5)

    def measure(self, name: str, cases: Sequence[str]) -> None:
        """Measure cases of a part, side by side where no times are measured and there are cores, then write what was found."""
        part = PARTS[name]
        workers = 1 if part.timed else min(len(cases), max(1, (os.cpu_count() or 1) // _CORES))
        with ThreadPoolExecutor(workers) as pool:
            for rows in pool.map(partial(self._case, name, part), cases):
                self.rows += rows
                self.write()

    def _case(self, name: str, part: Part, case: str) -> list[Row]:
        seconds, results = min(part.seconds * (1 + self.small), self.left), self.work / f"{name}-{case.replace(', ', '-')}.json"
        if seconds < _LEAST:
            return [Row(name, case, "left out", "left out", note=f"{self.left:.0f} of {60 * self.minutes:.0f} seconds were left")]
        _say(f"{name}, {case}: begins, with {seconds:.0f} s at most")
        begun, log = time.perf_counter(), results.with_suffix(".log")
        job = ["--job", name, case, "--results", str(results), "--seconds", f"{seconds:.0f}"]
        command = [sys.executable, "-m", "experiments.gpu", *job, "--out", str(self.out), *["--small"] * self.small]
        with log.open("w") as file:
            trouble = run_process(command, seconds, file, self._variables(name))
        taken = self.seconds[f"{name}, {case}"] = time.perf_counter() - begun
        rows = saved_rows(results)
        if trouble and not any(row.what == "failed" for row in rows):
            last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
            rows.append(Row(name, case, "failed", "failed", note=": ".join([trouble, *last])[:400]))
        _say(f"{name}, {case}: {trouble or 'ends'}, {taken:.1f} s")
        for row in rows:
            _say(f"    {row.what}: {row.measured}" + f" ({row.aim})" * bool(row.aim) + f"  {row.note}" * bool(row.note))
        return rows

    def _variables(self, name: str) -> dict[str, str]:
        """Compiled programs are kept for the next process, except where memory is measured: they may not tell their own then."""
        if name == "memory":
            return {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        return {"JAX_COMPILATION_CACHE_DIR": str(self.work / "compiled"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3"}

    def settle(self) -> None:
        """Read from the environment how large the models are to be; without a device that could be asked they are small."""
        platforms = [row.numbers["platform"] for row in self.rows if "platform" in row.numbers]
        if self.config.small is None:
            self.small = platforms in ([], ["cpu"])

    @property
    def result(self) -> Result:
        """What has been found so far."""
        devices = next((row.measured for row in self.rows if row.what == "device"), "unknown")
        fields = self.config, self.out, self.small, tuple(self._ordered()), dict(self.seconds), self.whole
        return Result(*fields, devices=(devices,))

    def _ordered(self) -> list[Row]:
        order = list(PARTS)
        return sorted(self.rows, key=lambda row: order.index(row.part))

    def write(self) -> None:
        """Write the table and the JSON."""
        result = self.result
        line = json.dumps(dataclasses.asdict(result), default=str, indent=1)
        for name, content in (("results.json", line + "\n"), ("table.md", _page(result))):
            beside = self.out / f"{name}.new"
            beside.write_text(content)
            beside.replace(self.out / name)


def run(config: Config) -> Result:
    """Measure the environment, then every part that was asked for.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    out = (config.out or Path(tempfile.mkdtemp(prefix="jaxpp-gpu-"))).absolute()
    check_writable("--out", out / "results.json")
    _say(f"gpu: the table, the JSON and the traces go to {out}")
    with tempfile.TemporaryDirectory() as work:
        running = _Run(config, out, Path(work))
        for name, cases in TURNS:
            if name == "environment" or name in config.parts:
                running.measure(name, cases)
            running.settle()
        running.whole = True
        running.write()
        return running.result


def table(result: Result) -> str:
    """The rows as text."""
    return text(result.rows)


def _page(result: Result) -> str:
    """The table in Markdown, under the name of the device."""
    sizes = "small models" if result.small else "large models"
    state = "" if result.whole else "\n\nThis run had not ended when this was written."
    taken = "\n".join(f"- {name}: {seconds:.1f} s" for name, seconds in result.seconds.items())
    return f"# {result.devices[0]}, {sizes}{state}\n\n{markdown(result.rows)}\n\nSeconds of each process:\n\n{taken}\n"


def _say(line: str) -> None:
    print(line, flush=True)


def read(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse reads it, since tyro is seldom installed beside a GPU's JAX."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu", description=DESCRIPTION)
    parser.add_argument(
        "--parts", nargs="+", default=list(PARTS), metavar="PART", help=f"some of {', '.join(PARTS)}; all by default"
    )
    parser.add_argument("--out", type=Path, help="folder for table.md, results.json and the traces; a temporary one by default")
    parser.add_argument("--small", action="store_true", default=None, help="small models, as by default on a CPU")
    parser.add_argument("--large", dest="small", action="store_false", help="large models, as by default elsewhere")
    parser.add_argument("--minutes", type=float, help="for everything (default: 8.5, or 25 for small models)")
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)  # what the processes of the cases are told
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    """Read the command line, then run everything and print the table, or measure the one case that this process is for."""
    given = read(sys.argv[1:])
    if given.job:
        part, case = given.job
        perform(part, case, given.out, given.results, small=bool(given.small), seconds=given.seconds)
        return
    parts = tuple(name for each in given.parts for name in each.split(",") if name)
    try:
        found = run(Config(parts, given.small, given.minutes, given.out))
    except ConfigError as error:
        raise SystemExit(f"gpu: {error}") from None
    print(f"\n{table(found)}\n\nall of this: {found.out}")
