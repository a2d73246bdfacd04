"""The parts of the experiment, their cases, and the process that measures one case.

A process for each case: one that fails, runs out of memory or hangs takes nothing else with it, and a device's peak of memory,
which can only grow, begins anew. Every row is written to a file as soon as it is known, so that what a stopped process had found
is kept.
"""

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from experiments.devices import ensure_devices
from experiments.gpu.rows import Job, Row, first_line
from experiments.gpu.sizes import LARGE, SMALL

__all__ = ["PARTS", "PLAN", "TURNS", "Part", "command_of", "perform", "run_beside", "run_process", "saved_rows"]

_ROOT = Path(__file__).parents[2]
_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
"""Memory is taken as it is needed, so that several processes can share a device."""


@dataclass(frozen=True)
class Part:
    """One question.

    Attributes:
        cases: measured apart from each other.
        seconds: that a case may take.
        timed: whether times are measured, so that nothing may run beside a case.
    """

    cases: tuple[str, ...]
    seconds: float
    timed: bool = True


PARTS: Mapping[str, Part] = {
    "environment": Part(("device",), 60),
    "send": Part(("copies",), 40),
    "uses": Part(("training", "ways", "memory", "forward", "looking"), 150, timed=False),
    "exactness": Part(("mlp", "resnet", "gpt"), 120, timed=False),
    "speed": Part(("gpt", "mlp", "resnet"), 150),
    "host": Part(("instructions", "calls", "gaps"), 90),
    "graphs": Part(("gpt",), 600),
    "lanes": Part(("gpt",), 240),
    "memory": Part(("1f1b, least", "1f1b, keep", "zb-h1, least", "zb-h1, keep", "1f1b, recompute"), 240, timed=False),
    "visits": Part(("gpt",), 100),
    "bank": Part(("adapters",), 60),
    "remat": Part(("gpt",), 100),
    "trace": Part(("mlp",), 60),
}
"""Every part by the name of its module, in the order of the table."""

PLAN = Part((), 300)
"""What takes the place of all parts with ``--plan``: a case is a model with the target that it is compiled for."""

TURNS = (
    ("environment", PARTS["environment"].cases),
    ("graphs", PARTS["graphs"].cases),
    ("lanes", PARTS["lanes"].cases),
    ("speed", ("gpt",)),
    ("exactness", PARTS["exactness"].cases),
    ("uses", PARTS["uses"].cases),
    ("memory", PARTS["memory"].cases),
    ("host", PARTS["host"].cases),
    ("visits", PARTS["visits"].cases),
    ("send", PARTS["send"].cases),
    ("bank", PARTS["bank"].cases),
    ("trace", PARTS["trace"].cases),
    ("speed", ("mlp",)),
    ("remat", PARTS["remat"].cases),
    ("speed", ("resnet",)),
)
"""The order in which they run: if there is not time for all, what matters least is left out."""


def perform(part: str, case: str, out: Path, results: Path, *, small: bool, seconds: float) -> None:
    """Measure one case in this process, and write its rows to a file after each of them.

    Args:
        part: its name.
        case: its name.
        out: folder for the files that are to stay.
        results: file for the rows.
        small: whether the sizes are the small ones.
        seconds: after which the process will be stopped.
    """
    sizes = SMALL if small else LARGE
    ensure_devices(sizes.models.stages)
    job, rows = Job(part, case, sizes, out, seconds), list[Row]()
    try:
        for row in importlib.import_module(f"experiments.gpu.{part}").rows(job):
            rows.append(row)
            _save(rows, results)
    except ModuleNotFoundError as error:
        package = {"sklearn": "scikit-learn"}.get(str(error.name), str(error.name))
        rows.append(
            job.row("failed", "left out", note=f"{error.name} is not installed. Fix: {sys.executable} -m pip install {package}")
        )
    except Exception as error:
        rows.append(job.row("failed", "failed", note=first_line(error)))
        _save(rows, results)
        raise
    _save(rows, results)


def _save(rows: Sequence[Row], results: Path) -> None:
    beside = results.with_suffix(".new")  # a process may be stopped while it writes
    beside.write_text(json.dumps([dataclasses.asdict(row) for row in rows], default=str))
    beside.replace(results)


def saved_rows(results: Path) -> list[Row]:
    """What a process wrote; nothing if it came to no row."""
    return [Row(**each) for each in json.loads(results.read_text())] if results.exists() else []


def command_of(part: str, case: str, out: Path, results: Path, *, small: bool, seconds: float) -> list[str]:
    """The command of a process that measures one case; the arguments are those of ``perform``."""
    job = ["--job", part, case, "--results", str(results), "--seconds", f"{seconds:.0f}", "--out", str(out)]
    return [sys.executable, "-m", "experiments.gpu", *job, *["--small"] * small]


def run_beside(job: Job, case: str, seconds: float, log: Path, variables: Mapping[str, str]) -> tuple[list[Row], str]:
    """Measure another case of a part in a process of its own, for a case that compares processes.

    Args:
        job: the case that compares; it must not have used its device, whose memory the other process needs.
        case: the other one; the module of the part knows what it means.
        seconds: after which it is stopped.
        log: file for what it prints.
        variables: of its environment; they go before what the user has set.

    Returns:
        its rows, and what went wrong: nothing, as a rule.
    """
    results = log.with_suffix(".json")
    results.unlink(missing_ok=True)
    command = command_of(job.part, case, job.out, results, small=job.sizes is SMALL, seconds=seconds)
    with log.open("w") as file:
        trouble = run_process(command, seconds, file, {}, variables)
    rows = saved_rows(results)
    failed = [row.note for row in rows if row.what == "failed"]
    if trouble and not failed:
        failed = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
    trouble = ": ".join(filter(None, [trouble, *failed]))[:300]
    return [row for row in rows if row.what != "failed"], trouble


def run_process(
    command: Sequence[str], seconds: float, log: IO[Any], extra: Mapping[str, str], always: Mapping[str, str] | None = None
) -> str:
    """Run a command to its end, and say what went wrong: nothing, as a rule.

    Args:
        command: and its arguments.
        seconds: after which it is stopped, with every process that it began.
        log: gets what it prints.
        extra: variables of its environment, where they are not set.
        always: variables of its environment, whatever is set. With them, what ends this process by its group ends the command too.
    """
    begun = time.perf_counter()
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**_MEMORY, **extra, **os.environ, **(always or {}), "PYTHONPATH": path}  # what the user has set stays
    apart = always is None
    with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=apart) as process:  # noqa: S603
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"stopped after {time.perf_counter() - begun:.0f} s, its limit"
        finally:
            if process.poll() is None and apart:
                os.killpg(process.pid, signal.SIGKILL)
            elif process.poll() is None:
                process.kill()
    return "" if code == 0 else f"ended with {_ending(code)}"


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
