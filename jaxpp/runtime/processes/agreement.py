"""Whether all processes of a run do the same: asked before anything is compiled, so that a difference is an error and no hang.

Problem: a process whose code, settings or shapes differ sends what nobody waits for, and waits for what nobody sends. Idea: all
processes meet where a plan is made, and compare digests of what decides it. Mechanism: each writes digests of named texts to the
store that the processes share (``store``); only if they differ are the texts exchanged, and every process raises the same error.
A process that raises before it has got so far says so there, and the others raise at once.

What this finds, and when: a difference, as soon as the last process has come; a failure at that point, at once; a process whose
script has ended, at once (``leaving``). A process that does not come may be slow, for it compiles or loads data: the others say
whom they wait for, and go on waiting. While steps run nothing is compared, and nothing costs time.
"""

import base64
import functools
import hashlib
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from jaxpp.errors import ProcessError
from jaxpp.runtime.processes.differences import difference, listed
from jaxpp.runtime.processes.here import processes_of
from jaxpp.runtime.processes.leaving import left, named
from jaxpp.runtime.processes.store import Store, shared_store
from jaxpp.types import Device

__all__ = ["Agree", "agreement"]

_PATIENCE = 5.0
"""Seconds after which a process says for whom it waits; each further time it has waited twice as long."""

_LIMIT = 1800.0
"""Seconds after which it waits no longer."""

_LARGEST = 1 << 21
"""Bytes of a text that are exchanged; what differs only behind them is not shown."""

_RULE = "all processes do the same calls"
_Parts = Callable[[], Mapping[str, str]]
Agree = Callable[[_Parts], None]
"""Compares named texts, which it calls for, over all processes."""


@contextmanager
def agreement(where: str, devices: Sequence[Device]) -> Iterator[Agree]:
    """A block in which the processes that have these devices agree on what they do.

    The block calls what it is given with a function of named texts. If the block raises before that, the others raise too. It does
    nothing if one process has all the devices, or if this one has none of them.

    Args:
        where: the call, as the user wrote it.
        devices: of the pipeline.

    Raises:
        ProcessError: the texts differ; or another process raised, has ended, or does not come.
    """
    processes = processes_of(devices)
    if len(processes) < 2 or jax.process_index() not in processes:
        yield lambda _: None
        return
    meeting = _meetings(processes).next(where)
    try:
        yield meeting.agree
    except BaseException as error:
        meeting.give_up(error)
        raise


@functools.cache
def _meetings(processes: tuple[int, ...]) -> "_Meetings":
    return _Meetings(processes)


class _Meetings:
    """The meetings of some processes, which each of them counts."""

    def __init__(self, processes: tuple[int, ...]):
        self._processes, self._count = processes, 0

    def next(self, where: str) -> "_Meeting | _Collective":
        """The meeting at which all are next."""
        self._count += 1
        store = shared_store()
        return _Collective(where) if store is None else _Meeting(where, self._processes, self._count, store)


class _Meeting:
    """One meeting: what each process says is a text in a folder of the store.

    Args:
        where: the call.
        processes: who meets.
        number: of the meeting.
        store: which the processes share.
    """

    def __init__(self, where: str, processes: tuple[int, ...], number: int, store: Store):
        self._where, self._processes, self._number, self._store = where, processes, number, store
        self._me, self._over = store.process, False

    def _folder(self, number: int, what: str = "digests") -> str:
        return f"jaxpp/meetings/{'_'.join(map(str, self._processes))}/{number}/{what}"

    def agree(self, parts: _Parts) -> None:
        """Compare texts; what is tried again after it has succeeded is not compared again.

        Raises:
            ProcessError: they differ; or another process failed, has ended, or does not come.
        """
        if self._over:
            return
        texts = {"call": self._where, **parts()}
        digests = {part: hashlib.sha256(text.encode()).hexdigest() for part, text in texts.items()}
        folder = self._folder(self._number)
        self._store.put(f"{folder}/{self._me}", json.dumps({"digests": digests}))
        said = self._all(folder)
        self._over = True
        self._store.drop(f"{self._folder(self._number - 2)}/{self._me}")  # all have read it, for all came to the one after it
        known = list(dict.fromkeys(part for each in said.values() for part in each["digests"]))
        differ = [part for part in known if len({each["digests"].get(part) for each in said.values()}) > 1]
        if not differ:
            return
        differ = ["call"] if "call" in differ else differ
        mine = {part: texts.get(part, "")[:_LARGEST] for part in differ}
        folder = self._folder(self._number, "texts")
        self._store.put(f"{folder}/{self._me}", json.dumps({"texts": _packed(mine)}))
        theirs = {process: _unpacked(each["texts"]) for process, each in self._all(folder).items()}
        raise difference(self._where, {part: {process: text[part] for process, text in theirs.items()} for part in differ})

    def give_up(self, error: BaseException) -> None:
        """Tell the others that this process raised before it had agreed."""
        if not self._over:
            self._over = True
            self._store.put(f"{self._folder(self._number)}/{self._me}", json.dumps({"failed": named(error)}))

    def _all(self, folder: str) -> Mapping[int, Mapping[str, Mapping[str, str]]]:
        """What all processes have written to a folder.

        Raises:
            ProcessError: one failed, has ended, or does not come.
        """
        begun, patience = time.monotonic(), _PATIENCE
        while True:
            found = {int(name): json.loads(text) for name, text in self._store.folder(folder).items() if name.isdigit()}
            self._check(found)
            away = [process for process in self._processes if process not in found]
            if not away:
                return {process: found[process] for process in self._processes}
            waited = time.monotonic() - begun
            if waited > patience:
                self._say(away, waited)
                patience *= 2
            if waited > _LIMIT:
                got = f"{listed(away)} did not come within {_LIMIT / 60:.0f} minutes"
                raise ProcessError(self._where, _RULE, got, "look into the log of that process: it is stuck, or makes other calls")
            self._store.wait(f"{folder}/{away[0]}", min(1.0, max(0.1, patience - waited)))

    def _check(self, found: Mapping[int, Mapping[str, object]]) -> None:
        """Look for processes that failed, or that are gone.

        Raises:
            ProcessError: there is one.
        """
        errors = {process: str(said["failed"]) for process, said in found.items() if "failed" in said}
        first = {process: error for process, error in errors.items() if not error.startswith(ProcessError.__name__)}
        failed = [f"process {process} raised {error}" for process, error in (first or errors).items()]
        gone = [f"process {process} {how}" for process, how in left(self._store).items() if process not in found]
        if failed or gone:
            fix = "mend that error, whose traceback is in the log of its process"
            if not failed and not any("raised" in line for line in gone):
                fix = "give every process the same number of batches, and let all make the same calls to the end"
            raise ProcessError(self._where, _RULE, [*failed, *gone], fix)

    def _say(self, away: Sequence[int], waited: float) -> None:
        print(
            f"jaxpp: process {self._me} has waited in {self._where} for {waited:.0f} seconds, because {listed(away)} did not come to"
            " it: still compiling or loading data, or busy with other calls, or with a batch of other shapes",
            file=sys.stderr,
            flush=True,
        )


class _Collective:
    """A meeting without a store: what each process says is gathered by a computation on all devices.

    Args:
        where: the call.
    """

    def __init__(self, where: str):
        self._where, self._over = where, False

    def agree(self, parts: _Parts) -> None:
        """Compare texts.

        Raises:
            ProcessError: they differ.
        """
        if self._over:
            return
        texts = {"call": self._where, **{part: text[:_LARGEST] for part, text in parts().items()}}
        digest = hashlib.sha256(json.dumps(texts).encode()).digest()
        digests = process_allgather(np.frombuffer(digest, np.uint8))
        self._over = True
        if (digests == digests[0]).all():
            return
        said = np.frombuffer(_packed(texts).encode(), np.uint8)
        lengths = process_allgather(np.array([said.size], np.int32)).ravel()
        rows = process_allgather(np.pad(said, (0, int(lengths.max()) - said.size)))
        theirs = [_unpacked(row[:length].tobytes().decode()) for row, length in zip(rows, lengths, strict=True)]
        known = dict.fromkeys(part for each in theirs for part in each)
        differ = {part: {process: each.get(part, "") for process, each in enumerate(theirs)} for part in known}
        raise difference(self._where, {part: said for part, said in differ.items() if len(set(said.values())) > 1})

    def give_up(self, error: BaseException) -> None:
        """Nothing: the others wait until this process ends."""


def _packed(texts: Mapping[str, str]) -> str:
    return base64.b64encode(zlib.compress(json.dumps(texts).encode())).decode()


def _unpacked(packed: str) -> Mapping[str, str]:
    return json.loads(zlib.decompress(base64.b64decode(packed)))
