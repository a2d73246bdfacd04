"""What does jaxpp do on a GPU? Every claim that needs an accelerator, measured in one command. See README.md.

This process measures nothing and leaves the device alone: each case is measured by a process of its own (``parts``). What has been
found is printed as it comes, and the table and the JSON are written again after every case.
"""

import argparse
import dataclasses
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jaxpp
from experiments.gpu.models import MODELS
from experiments.gpu.parts import PARTS, PLAN, TURNS, Part, command_of, perform, run_process, saved_rows
from experiments.gpu.plan import case_of, summary
from experiments.gpu.rows import Row, markdown, markdown_table, text
from experiments.options import ConfigError, check_names, check_numbers, check_writable
from experiments.results import Findings, columns
from jaxpp.errors import JaxppError
from jaxpp.targets import target_of

__all__ = ["Config", "Result", "main", "run", "table"]

DESCRIPTION = "Measure on this machine's accelerator all that jaxpp claims of accelerators."
PLANNED = tuple(MODELS)
_CASES = tuple(f"{name}/{case}" for name, part in PARTS.items() for case in part.cases if len(part.cases) > 1)
_LEAST = 15.0  # seconds that must be left for a case to begin
_CORES = 3  # cores for each process, where several run side by side


@dataclass(frozen=True)
class Config:
    """What is measured, and for how long.

    Attributes:
        parts: names, or a name with one of its cases, such as ``speed/mlp``; all unless given. The environment is always measured.
        small: small models; None asks the environment, and takes small ones on a CPU.
        minutes: for everything; None is 30, or 40 for small models, which two cores may take that long to compile; 60 for plans.
        out: folder for the table, the JSON and the traces; a temporary one unless given.
        plan: names of GPUs as ``jaxpp.target`` takes them. Then nothing is measured: models are compiled for these GPUs.
        devices: how many of them, for a plan.
        models: those that are planned.
    """

    parts: tuple[str, ...] = tuple(PARTS)
    small: bool | None = None
    minutes: float | None = None
    out: Path | None = None
    plan: tuple[str, ...] = ()
    devices: int = 4
    models: tuple[str, ...] = PLANNED

    def __post_init__(self):
        check_names("parts", self.parts, (*PARTS, *_CASES), none=False)
        check_names("models", self.models, PLANNED, none=False)
        check_numbers(self)
        if self.plan and self.parts != tuple(PARTS):
            raise ConfigError("--plan with --parts: a plan has models instead of parts. Fix: pass --models, or leave out --plan.")
        if not self.plan and (self.models, self.devices) != (PLANNED, 4):
            raise ConfigError("--models and --devices: only a plan has them. Fix: pass for example --plan h100.")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"--minutes {self.minutes}: there is no time. Fix: pass for example 15.")


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
        self.small, self.whole = bool(config.small) if config.plan else config.small is not False, False
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
        return self.config.minutes or (60.0 if self.config.plan else 40.0 if self.small else 30.0)

    def measure(self, name: str, cases: Sequence[str]) -> None:
        """Measure cases of a part, side by side where no times are measured and there are cores, then write what was found."""
        part = PLAN if name == "plan" else PARTS[name]
        workers = 1 if part.timed else min(len(cases), max(1, (os.cpu_count() or 1) // _CORES))
        with ThreadPoolExecutor(workers) as pool:
            for rows in pool.map(partial(self._case, name, part), cases):
                self.rows += rows
                self.write()

    def _case(self, name: str, part: Part, case: str) -> list[Row]:
        seconds, results = min(part.seconds * (1 + self.small), self.left), self.work / f"{name}-{re.sub(r'[, ]+', '-', case)}.json"
        if seconds < _LEAST:
            return [Row(name, case, "left out", "left out", note=f"{self.left:.0f} of {60 * self.minutes:.0f} seconds were left")]
        _say(f"{name}, {case}: begins, with {seconds:.0f} s at most")
        begun, log = time.perf_counter(), results.with_suffix(".log")
        command = command_of(name, case, self.out, results, small=self.small, seconds=seconds)
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
        """Compiled programs are kept for the next process, except where their memory counts: they may not tell their own then.

        There only the kernels that XLA chose by trying are kept, as trying takes memory and most of the time.
        """
        if name == "memory":
            return {"JAX_COMPILATION_CACHE_DIR": str(self.work / "tried"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}
        if name == "plan":
            return {"JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_PLATFORMS": "cpu"}
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
        if self.config.plan:
            devices = f"Planned, not measured: {self.config.devices} x {', '.join(self.config.plan)}"
        fields = self.config, self.out, self.small, tuple(self._ordered()), dict(self.seconds), self.whole
        return Result(*fields, devices=(devices,))

    def _ordered(self) -> list[Row]:
        order = [*PARTS, "plan"]
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
        JaxppError: a target that jaxpp does not know, or that cannot be compiled for here.
    """
    if config.plan:
        config = dataclasses.replace(config, plan=_known(config.plan, config.devices))
    out = (config.out or Path(tempfile.mkdtemp(prefix="jaxpp-gpu-"))).absolute()
    check_writable("--out", out / "results.json")
    _say(f"gpu: the table, the JSON and the traces go to {out}")
    with tempfile.TemporaryDirectory() as work:
        running = _Run(config, out, Path(work))
        if config.plan:
            running.measure("plan", [case_of(model, config.devices, name) for model in config.models for name in config.plan])
        for name, cases in TURNS if not config.plan else ():
            asked = [case for case in cases if {name, f"{name}/{case}"} & {*config.parts, "environment"}]
            if asked:
                running.measure(name, asked)
            running.settle()
        running.whole = True
        running.write()
        return running.result


def _known(names: Sequence[str], count: int) -> tuple[str, ...]:
    """The targets by the names that jaxpp gives to them, each once; whatever it says of a target, it says before any work."""
    found = [target_of(jaxpp.target(name, count)[0]) for name in names]
    return tuple(dict.fromkeys(each.name for each in found if each is not None))


def table(result: Result) -> str:
    """The rows as text; of a plan also a line for each case."""
    lines = summary(result.rows) if result.config.plan else []
    return "\n\n".join([text(result.rows, _said(result)), *["\n".join(columns(lines, left=(0, 1)))] * bool(lines)])


def _said(result: Result) -> str:
    """What the rows say."""
    return "bound" if result.config.plan else "measured"


def _made(result: Result) -> str:
    """What makes the page of a plan again, and with which versions it was made."""
    config = result.config
    words = ["--plan", *config.plan, *["--small"] * result.small]
    words += ["--devices", str(config.devices)] * (config.devices != 4)
    words += ["--models", *config.models] * (config.models != PLANNED)
    packages = ", ".join(f"{name} {result.versions[name]}" for name in ("jax", "flax", "optax") if name in result.versions)
    return f"Made by `python -m experiments.gpu {' '.join(words)}`, with {packages}."


def _page(result: Result) -> str:
    """The table in Markdown, under the name of the device."""
    sizes = "small models" if result.small else "large models"
    state = "" if result.whole else "\n\nThis run had not ended when this was written."
    taken = "\n".join(f"- {name}: {seconds:.1f} s" for name, seconds in result.seconds.items())
    beside = f"{_made(result)}\n\n{markdown_table(summary(result.rows))}\n\n" if result.config.plan else ""
    rows = markdown(result.rows, _said(result))
    return f"# {result.devices[0]}, {sizes}{state}\n\n{beside}{rows}\n\nSeconds of each process:\n\n{taken}\n"


def _say(line: str) -> None:
    print(line, flush=True)


def read(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; argparse reads it, since tyro is seldom installed beside a GPU's JAX."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu", description=DESCRIPTION)
    parser.add_argument(
        "--parts",
        nargs="+",
        default=list(PARTS),
        metavar="PART",
        help=f"some of {', '.join(PARTS)}, or a case, such as speed/mlp; all by default",
    )
    parser.add_argument("--out", type=Path, help="folder for table.md, results.json and the traces; a temporary one by default")
    parser.add_argument("--small", action="store_true", default=None, help="small models, as by default on a CPU")
    parser.add_argument("--large", dest="small", action="store_false", help="large models, as by default elsewhere")
    parser.add_argument("--minutes", type=float, help="for everything (default: 30, or 40 for small models)")
    parser.add_argument(
        "--plan",
        nargs="+",
        default=[],
        metavar="GPU",
        help="measure nothing, but compile for these GPUs, say h100: bounds of a step",
    )
    parser.add_argument("--devices", type=int, default=4, help="how many of them (default: 4)")
    parser.add_argument(
        "--models", nargs="+", default=list(PLANNED), metavar="MODEL", help=f"to plan: some of {', '.join(PLANNED)}; all by default"
    )
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
    parts, plan, models = (
        tuple(name for each in names for name in re.split(",(?! )", each) if name)
        for names in (given.parts, given.plan, given.models)
    )
    try:
        found = run(Config(parts, given.small, given.minutes, given.out, plan, given.devices, models))
    except (ConfigError, JaxppError) as error:
        raise SystemExit(f"gpu: {error}") from None
    print(f"\n{table(found)}\n\nall of this: {found.out}")
