"""Starts several processes of one JAX program on this machine, as several hosts would, and ends them whatever happens.

Each process runs ``experiments.hosts.worker``: it joins the others by ``jax.distributed.initialize`` and calls one function. All
are ended when the ``with`` block ends, by whatever: an error, Ctrl-C, a test that fails. If this process itself is killed, each of
them sees its standard input end, and ends too.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from experiments.hosts.worker import Job

__all__ = ["Ended", "Process", "Processes", "ProcessesError", "free_ports", "launch"]

ROOT = Path(__file__).parent.parent.parent
_GRACE = 1.0
"""Seconds in which the others may end by themselves after one has failed, and say why."""
_REST = 2.0
"""Seconds for what a process that has ended left in its pipes."""

_THREADS = "16"
"""Threads of XLA's runtime for CPU: a collective keeps one for each device while it waits, and sends need some besides."""


class ProcessesError(RuntimeError):
    """A process failed, or the time limit passed; with the last lines of every process."""


@dataclass(frozen=True)
class Ended:
    """A process that has ended.

    Attributes:
        number: of the process.
        code: its exit status; negative for a signal.
        out: what it printed.
        errors: what it wrote to standard error.
    """

    number: int
    code: int
    out: str
    errors: str


class Process:
    """A process that runs, and what it has written so far."""

    def __init__(self, job: Job, environment: Mapping[str, str], *, echo: bool):
        self.number = job.number
        self.popen = subprocess.Popen(  # noqa: S603  (our own module)
            [sys.executable, "-m", "experiments.hosts.worker", job.to_json()],
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # so that Ctrl-C reaches the one that ends them, and all that it started can be ended
        )
        self._lines: dict[str, list[str]] = {"out": [], "errors": []}
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream, echo), daemon=True)
            for name, stream in (("out", self.popen.stdout), ("errors", self.popen.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, stream: IO[str], echo: bool) -> None:
        with stream:  # closed at its end, which may come after ``close`` where something else holds the pipe open
            for line in stream:
                self._lines[name].append(line)
                if echo:
                    print(f"[{self.number}] {line}", end="", file=sys.stderr, flush=True)

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return "".join(self._lines["out"])

    @property
    def errors(self) -> str:
        """What it has written to standard error so far."""
        return "".join(self._lines["errors"])

    @property
    def code(self) -> int | None:
        """Its exit status; None while it runs."""
        return self.popen.poll()

    def send(self, number: int) -> None:
        """Send a signal to the process alone, such as ``signal.SIGINT``."""
        self.popen.send_signal(number)

    def kill(self) -> None:
        """End it and all that it started, at once; nothing happens if it has ended."""
        if self.code is None:
            with suppress(ProcessLookupError, PermissionError):  # it ends at this moment; macOS says the second
                os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def ended(self) -> Ended:
        """What became of it; it must have ended."""
        for reader in self._readers:
            reader.join(timeout=_REST)
        return Ended(self.number, self.popen.wait(), self.out, self.errors)

    def close(self) -> None:
        """End it, and let go of its pipes, without waiting for something that it started and that holds one open."""
        self.kill()
        if self.popen.stdin is not None:
            self.popen.stdin.close()
        for reader in self._readers:
            reader.join(timeout=_REST)


class Processes(Sequence[Process]):
    """Processes that run one function together; a context manager, at whose end none of them is left.

    Args:
        target: the function that every process calls, as ``module:function``; its module is imported after the processes have met.
        count: of processes.
        arguments: of the function, by name; what JSON can hold.
        devices: CPU devices that each process forces; None where there are accelerators: then no option of JAX is set.
        environment: variables besides those of this process.
        initialize: further arguments of ``jax.distributed.initialize``, such as ``heartbeat_timeout_seconds``.
        together: whether the failure of one ends all. Without it each ends as a user's script would, and ``wait`` waits for that.
        echo: whether to show what they write while they run, on stderr, each line with the number of its process.

    Example:
        ``with Processes("tests.some_cases:main", 2, {"folder": "/tmp/x"}) as processes: first, second = processes.wait(60)``
    """

    def __init__(
        self,
        target: str,
        count: int,
        arguments: Mapping[str, Any] | None = None,
        *,
        devices: int | None = 2,
        environment: Mapping[str, str] | None = None,
        initialize: Mapping[str, Any] | None = None,
        together: bool = True,
        echo: bool = False,
    ):
        coordinator, *ports = free_ports(1 + count)
        self._jobs = [
            Job(target, arguments or {}, number, count, coordinator, port, devices, initialize or {}, together)
            for number, port in enumerate(ports)
        ]
        self._environment = {"NPROC": _THREADS, **os.environ, **(environment or {})}
        self._together, self._echo = together, echo
        self._processes: tuple[Process, ...] = ()
        self._stack = ExitStack()

    def __enter__(self) -> "Processes":
        with ExitStack() as stack:
            for job in self._jobs:
                process = Process(job, self._environment, echo=self._echo)
                stack.callback(process.close)
                self._processes = (*self._processes, process)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(None, None, None)

    def __len__(self) -> int:
        return len(self._processes)

    def __getitem__(self, number: Any) -> Any:
        return self._processes[number]

    def __iter__(self) -> Iterator[Process]:
        return iter(self._processes)

    def wait(self, seconds: float) -> list[Ended]:
        """Wait until all have ended.

        Args:
            seconds: the time limit.

        Raises:
            ProcessesError: the limit has passed, or, with ``together``, one has failed; all are ended then.
        """
        limit = time.monotonic() + seconds
        while any(process.code is None for process in self):
            if self._together and any(process.code for process in self):
                limit = min(limit, time.monotonic() + _GRACE)
            if time.monotonic() > limit:
                break
            time.sleep(0.02)
        left = [process for process in self if process.code is None]
        failed = {process.number: process.code for process in self if process.code}
        for process in left:
            process.kill()
        ended = [process.ended() for process in self]
        if left and not failed:
            raise ProcessesError(f"{len(left)} of {len(self)} processes had not ended after {seconds:g} seconds" + _tails(ended))
        if left or (self._together and failed):
            codes = ", ".join(f"process {number} ended with status {code}" for number, code in failed.items())
            raise ProcessesError(codes + _tails(ended))
        return ended


def launch(target: str, count: int, arguments: Mapping[str, Any] | None = None, *, seconds: float, **options: Any) -> list[Ended]:
    """Run one function in several processes until all have ended.

    Args:
        target: the function, as ``module:function``.
        count: of processes.
        arguments: of the function, by name.
        seconds: the time limit.
        options: those of ``Processes``.

    Raises:
        ProcessesError: the limit has passed, or one has failed.
    """
    with Processes(target, count, arguments, **options) as processes:
        return processes.wait(seconds)


def free_ports(count: int) -> list[int]:
    """Different ports on which nobody listens, below those that systems give to whoever asks for any.

    (Those may be taken by somebody else's connection before they are used.)
    """
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            port, tried = random.randrange(20000, 32000), stack.enter_context(socket.socket())  # noqa: S311
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
    return found


def _tails(ended: Sequence[Ended]) -> str:
    """The last lines of every process, for a message."""
    return "".join(
        f"\n--- process {each.number}, status {each.code}: the last of {name}\n{text[-3000:]}"
        for each in ended
        for name, text in (("its output", each.out), ("its errors", each.errors))
        if text
    )
