"""What a thread for each rank gains where whoever calls a program also runs it, as a GPU's kernels are launched by whoever calls.

With ``jax.config.update("jax_cpu_enable_async_dispatch", False)`` before the first array, a CPU device runs a program in the thread
that calls it, without Python's lock. One thread then keeps one device busy at a time, whatever the schedule says. That is decided
once for a process. So two processes time the steps, one of them with asynchronous dispatch, and this one says whose turn it is.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from experiments.speed.worker import Told

__all__ = ["SCHEDULES", "WAYS", "Synchronous", "SynchronousRow", "Worker", "measure_synchronous", "row_of"]

SCHEDULES = ("naive", "gpipe", "1f1b", "zb-h1")
WAYS = {"one thread": ("sync", "one"), "a thread for each rank": ("sync", "ranks"), "asynchronous dispatch": ("async", "one")}
"""How a step is handed over: the dispatch of the process, and ``Pipeline(threads=...)``; the last is what the others go by."""

_ONE_WIDE = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"  # each program runs in one thread
_ROOT = Path(__file__).parent.parent.parent
_RANKS, _LAYERS, _WIDTH, _ROWS = 2, 8, 64, 128
_LIMIT = 1800.0  # seconds after which a process is ended, whatever it does


@dataclass(frozen=True)
class SynchronousRow:
    """A schedule, handed over in each way.

    Attributes:
        schedule: its name.
        seconds: the median step of each way.
        least: the fastest step of each way, which what else the machine does disturbs least.
        ratio: of each way to asynchronous dispatch: the median of the rounds' ratios.
        quartiles: of these ratios.
        same_bits: whether all ways have trained the same parameters.
        times: seconds of each step, round by round, of which these are made.
    """

    schedule: str
    seconds: dict[str, float]
    least: dict[str, float]
    ratio: dict[str, float]
    quartiles: dict[str, tuple[float, float]]
    same_bits: bool
    times: dict[str, list[float]]


@dataclass(frozen=True)
class Synchronous:
    """Stages that are one thread wide, on devices that run a program in the thread that calls it.

    Attributes:
        stages: one on each device.
        microbatches: parts of the batch.
        rows: one a schedule.
    """

    stages: int
    microbatches: int
    rows: tuple[SynchronousRow, ...]


class Worker:
    """A process that times steps, and what it answers; ``log`` is the file of what else it writes."""

    def __init__(self, process: subprocess.Popen[str], log: IO[Any]):
        self.process, self._log = process, log

    def answer(self) -> Any:
        """Wait for the next answer.

        Raises:
            RuntimeError: there is none, as the process has ended; with the last lines that it wrote.
        """
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"a process that times steps ended with status {self.process.wait()}: {self._log.read()[-3000:]}")
        return json.loads(line)

    def ask(self, *asked: str) -> Any:
        """Ask for something, and wait for it."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):  # it has ended, which the missing answer will say
                os.write(self.process.stdin.fileno(), f"{json.dumps(asked)}\n".encode())
        return self.answer()


def _start(told: Told, log: IO[Any]) -> Worker:
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(  # noqa: S603  (our own module)
        [sys.executable, "-m", "experiments.speed.worker", json.dumps(dataclasses.asdict(told))],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": _ONE_WIDE, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    return Worker(process, log)


@contextmanager
def _workers(told: dict[str, Told]) -> Iterator[dict[str, Worker]]:
    """The processes by name, compiled one after the other; none is left at the end."""
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, each in told.items():
            workers[name] = _start(each, stack.enter_context(tempfile.TemporaryFile("w+", errors="replace")))
            process = stack.enter_context(workers[name].process)
            stack.callback(process.kill)
            timer = threading.Timer(_LIMIT, process.kill)
            timer.daemon = True
            stack.callback(timer.cancel)
            timer.start()
            workers[name].answer()
        yield workers


def measure_synchronous(num_microbatches: int, num_loops: int, rounds: int, bar: Any) -> Synchronous:
    """Time each schedule in each way, in interleaved rounds, every second of them backwards.

    Args:
        num_microbatches: parts of the batch.
        num_loops: products of a layer, of which a stage has four.
        rounds: interleaved rounds.
        bar: counts the rounds.

    Raises:
        RuntimeError: a process that times steps has failed.
    """
    sizes: dict[str, Any] = {"ranks": _RANKS, "microbatches": num_microbatches, "layers": _LAYERS, "loops": num_loops}
    sizes |= {"schedules": SCHEDULES, "width": _WIDTH, "rows": _ROWS}
    told = {
        name: Told(name == "async", tuple(threads for kind, threads in WAYS.values() if kind == name), **sizes)
        for name in ("sync", "async")
    }
    turns = [(schedule, way) for schedule in SCHEDULES for way in WAYS]
    times: dict[tuple[str, str], list[float]] = {turn: [] for turn in turns}
    with _workers(told) as workers:
        for number in range(rounds):
            for schedule, way in turns[:: 1 - 2 * (number % 2)]:
                kind, threads = WAYS[way]
                times[schedule, way].append(workers[kind].ask("time", schedule, threads))
            bar.update()
        bits = {kind: worker.ask("bits") for kind, worker in workers.items()}
    return Synchronous(_RANKS, num_microbatches, tuple(row_of(schedule, times, bits) for schedule in SCHEDULES))


def row_of(schedule: str, times: dict[tuple[str, str], list[float]], bits: dict[str, dict[str, str]]) -> SynchronousRow:
    """What the seconds of a schedule's steps, by way and round, and the digests of its states, by process, come to."""
    last = list(WAYS)[-1]
    ratios = {way: np.divide(times[schedule, way], times[schedule, last]) for way in WAYS}
    return SynchronousRow(
        schedule,
        seconds={way: float(np.median(times[schedule, way])) for way in WAYS},
        least={way: min(times[schedule, way]) for way in WAYS},
        ratio={way: float(np.median(found)) for way, found in ratios.items()},
        quartiles={way: _quartiles(found.tolist()) for way, found in ratios.items()},
        same_bits=len({bits[kind][f"{schedule} {threads}"] for kind, threads in WAYS.values()}) == 1,
        times={way: times[schedule, way] for way in WAYS},
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.quantile(np.asarray(values), (0.25, 0.75))
    return float(low), float(high)
