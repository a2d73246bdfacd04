"""Whether all processes of a run do the same: asked before anything is compiled, so that a difference is an error and no hang.

Problem: a process whose code, settings or shapes differ sends what nobody waits for, and waits for what nobody sends. Idea: all
processes meet where a plan is made, and compare digests of what decides it. Mechanism: each writes digests of named texts to the
store that the processes share (``store``); only if they differ are the texts exchanged, and every process raises the same error.
A process that raises before it has got so far says so there, and the others raise at once.

What this finds, and when: a difference, as soon as the last process has come; a failure at that point, at once; a process whose
script has ended, at once (``leaving``); a process that has gone on with another call, after some seconds (``watching``). A process
that does not come may be slow, for it compiles or loads data: the others say whom they wait for, and go on waiting. A plan on which
all have agreed is not compared again: its calls are counted, and the counts are compared at the next meeting.
"""

import abc
import base64
import collections
import functools
import hashlib
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from jaxpp.errors import ProcessError
from jaxpp.runtime.agreement.differences import difference, listed
from jaxpp.runtime.agreement.leaving import FAILED, left, named, watcher
from jaxpp.runtime.agreement.store import Store, shared_store
from jaxpp.runtime.agreement.watching import alarm
from jaxpp.runtime.processes.here import processes_of
from jaxpp.types import Device

__all__ = ["Agreement", "agreement", "transfers"]

_ALARMED = 2.0
"""Seconds after which those who do not come are asked whether they have gone on with something else."""

_PATIENCE = 5.0
"""Seconds after which a process says for whom it waits; each further time it has waited twice as long."""

_LIMIT = 1800.0
"""Seconds after which it waits no longer."""

_REMEMBERED = 10
"""Calls that are shown if processes did not do the same calls."""

_LARGEST = 1 << 21
"""Letters of a text that are exchanged; what differs only behind them is not shown."""

_RULE = "all processes do the same calls"
_Parts = Callable[[], Mapping[str, str]]


class Agreement(abc.ABC):
    """A call on which the processes of a run agree; called with a function of named texts."""

    @abc.abstractmethod
    def __call__(self, parts: _Parts) -> None:
        """Compare texts; what is tried again after it has succeeded is not compared again.

        Raises:
            ProcessError: they differ; or another process failed, has ended, or does not come.
        """

    @abc.abstractmethod
    def again(self) -> None:
        """Count another call on which all have agreed.

        Raises:
            ProcessError: this process has broken off an earlier one.
        """

    @abc.abstractmethod
    def give_up(self, error: BaseException) -> None:
        """Tell the others that this process raised before it had agreed."""


@contextmanager
def agreement(where: str, devices: Sequence[Device]) -> Iterator[Agreement]:
    """A block in which all processes of the run agree on what they do with these devices.

    If the block raises before it has agreed, the others raise too. Nothing is compared if one process has all the devices. A
    process that has none of them takes part, for every process calls every transfer.

    Args:
        where: the call, as the user wrote it.
        devices: of the pipeline.

    Raises:
        ProcessError: the texts differ; or another process raised, has ended, or does not come.
    """
    meeting = _company().next(where) if len(processes_of(devices)) > 1 else _Alone()
    try:
        yield meeting
    except BaseException as error:
        meeting.give_up(error)
        raise


@contextmanager
def transfers(where: str) -> Iterator[None]:
    """A block in which this process sends and receives; after one that was broken off it makes no later call with the others.

    JAX finds a transfer by its number, and each process counts its own. A process that has left out some would take what it
    receives later for what it has missed.
    """
    try:
        yield
    except BaseException as error:
        _company().broken_off = f"{where} was broken off here by {named(error)}"
        raise


class _Alone(Agreement):
    """A process alone agrees with itself."""

    def __call__(self, parts: _Parts) -> None:
        """Nothing."""

    def again(self) -> None:
        """Nothing."""

    def give_up(self, error: BaseException) -> None:
        """Nothing."""


@functools.cache
def _company() -> "_Company":
    return _Company(range(jax.process_count()))


class _Company:
    """The processes of a run, which do the same calls.

    Args:
        processes: in order.

    Attributes:
        num_meetings: at which this process has been, or is.
        num_calls: on which this process has agreed.
        last: the last of them, for people.
        broken_off: which call has sent and received only a part of what the others do, or nothing.
    """

    def __init__(self, processes: Sequence[int]):
        self.processes, self.num_meetings, self.num_calls = processes, 0, 0
        self.last = collections.deque[str](maxlen=_REMEMBERED)
        self.broken_off = ""
        self._digest = 0

    @property
    def history(self) -> str:
        """What this process has done: a digest of all its calls, and the last of them."""
        return "\n".join([*self.last, f"and {self.num_calls} calls in all, with the digest {self._digest}"])

    def check(self, where: str) -> None:
        """Refuse a call after one that was broken off.

        Raises:
            ProcessError: there was one.
        """
        if self.broken_off:
            rule = "a process that was interrupted while it sent and received does not know any more what belongs together"
            fix = "start the script again in all processes, from the last checkpoint"
            raise ProcessError(where, rule, self.broken_off, fix)

    def next(self, where: str) -> Agreement:
        """The meeting at which all are next."""
        self.check(where)
        self.num_meetings += 1
        store, found = shared_store(), watcher()
        if store is None or found is None:
            return _Collective(where, self)
        if self.num_meetings == 1:
            found.add(functools.partial(self._look, store))
        return _Meeting(where, self, store)

    def count(self, what: str, number: int) -> None:
        """Count a call on which all have agreed, at the meeting of this number."""
        self.num_calls += 1
        self._digest = (1_000_003 * self._digest + number) % (1 << 61)
        self.last.append(what)

    def folder(self, number: int, what: str = "digests") -> str:
        """Where the store has what was said at a meeting."""
        return f"jaxpp/meetings/{number}/{what}"

    def _look(self, store: Store) -> None:
        """If others wait at the next meeting, and this process has gone on without it, say so."""
        folder = self.folder(self.num_meetings + 1)
        waiting = {int(name): json.loads(text) for name, text in store.folder(folder).items()}
        for process, said in waiting.items():
            if "calls" in said and said["calls"] < self.num_calls and store.process not in waiting:
                store.put(f"{folder}/{store.process}", json.dumps({"passed": self.last[-1]}))
                here = f"while process {store.process} has gone on with {self.last[-1]}"
                print(f"jaxpp: process {process} waits in {said['what']}, {here}; it gives up", file=sys.stderr, flush=True)
                return


class _Meeting(Agreement):
    """One meeting: what each process says is a text in a folder of the store.

    Args:
        where: the call.
        company: who meets.
        store: which they share.
    """

    def __init__(self, where: str, company: _Company, store: Store):
        self._where, self._company, self._store = where, company, store
        self._number, self._over, self._what = company.num_meetings, False, where

    def __call__(self, parts: _Parts) -> None:
        """Compare texts."""
        if self._over:
            return
        company, store = self._company, self._store
        texts = {"earlier calls": company.history, "call": self._where, **parts()}
        digests = {part: hashlib.sha256(text.encode()).hexdigest() for part, text in texts.items()}
        self._what = _in_words(self._where, texts.get("batch", ""))
        folder = company.folder(self._number)
        store.put(f"{folder}/{store.process}", json.dumps({"digests": digests, "calls": company.num_calls, "what": self._what}))
        said = self._all(folder)
        self._over = True
        store.drop(f"{company.folder(self._number - 2)}/{store.process}")  # all have read it, for they came to the one after it
        known = list(dict.fromkeys(part for each in said.values() for part in each["digests"]))
        differ = [part for part in known if len({each["digests"].get(part) for each in said.values()}) > 1]
        if differ:
            folder, mine = company.folder(self._number, "texts"), {part: texts.get(part, "")[:_LARGEST] for part in differ}
            store.put(f"{folder}/{store.process}", json.dumps({"texts": _packed(mine)}))
            theirs = {process: _unpacked(each["texts"]) for process, each in self._all(folder).items()}
            raise difference(self._where, {part: {process: text[part] for process, text in theirs.items()} for part in differ})
        self.again()

    def again(self) -> None:
        """Count the call."""
        self._company.check(self._where)
        self._company.count(self._what, self._number)

    def give_up(self, error: BaseException) -> None:
        """Tell the others."""
        if not self._over:
            self._over = True
            said = json.dumps({"failed": named(error)})
            self._store.put(f"{self._company.folder(self._number)}/{self._store.process}", said)

    def _all(self, folder: str) -> Mapping[int, Mapping[str, Any]]:
        """What all processes have written to a folder.

        Raises:
            ProcessError: one failed, has ended, went on with another call, or does not come.
        """
        begun, patience, alarmed = time.monotonic(), _PATIENCE, _ALARMED
        while True:
            found = {int(name): json.loads(text) for name, text in self._store.folder(folder).items()}
            self._check(found)
            away = [process for process in self._company.processes if process not in found]
            if not away:
                return {process: found[process] for process in self._company.processes}
            waited = time.monotonic() - begun
            if waited > alarmed and self._store.process == min(found):
                alarm(self._store, away)
                alarmed = waited + _ALARMED
            if waited > patience:
                self._say(away, waited)
                patience *= 2
            if waited > _LIMIT:
                got = f"{listed(away)} did not come within {_LIMIT / 60:.0f} minutes"
                raise ProcessError(self._where, _RULE, got, "look into the log of that process: it is stuck, or makes other calls")
            self._store.wait(f"{folder}/{away[0]}", 0.5)

    def _check(self, found: Mapping[int, Mapping[str, object]]) -> None:
        """Look for processes that failed, that are gone, or that went on with another call.

        Raises:
            ProcessError: there is one.
        """
        errors = {process: str(said["failed"]) for process, said in found.items() if "failed" in said}
        first = {process: error for process, error in errors.items() if not error.startswith(ProcessError.__name__)}
        gone = {process: how for process, how in left(self._store).items() if process not in found}
        passed = {process: f"went on with {said['passed']}" for process, said in found.items() if "passed" in said}
        if not errors and not gone and not passed:
            return
        fix = "give every process the same batches, as many and of the same shapes, and let all make the same calls"
        if errors or any(how.startswith(FAILED) for how in gone.values()):
            fix = "mend that error, whose traceback is in the log of its process"
        got = [f"process {process} {FAILED} {error}" for process, error in (first or errors).items()]
        got += [f"process {process} {how}" for process, how in (gone | passed).items()]
        if passed:
            got.append(f"process {self._store.process} is in {self._what}")
        raise ProcessError(self._where, _RULE, got, fix)

    def _say(self, away: Sequence[int], waited: float) -> None:
        it = f"jaxpp: process {self._store.process} has waited in {self._what} for {waited:.0f} seconds"
        print(f"{it}, because {listed(away)} did not come to it yet", file=sys.stderr, flush=True)


class _Collective(Agreement):
    """A meeting without a store: what each process says is gathered by a computation on all devices.

    Args:
        where: the call.
        company: who meets.
    """

    def __init__(self, where: str, company: _Company):
        self._where, self._company, self._number, self._over = where, company, company.num_meetings, False

    def __call__(self, parts: _Parts) -> None:
        """Compare texts."""
        if self._over:
            return
        said = {part: text[:_LARGEST] for part, text in parts().items()}
        texts = {"earlier calls": self._company.history, "call": self._where, **said}
        digest = hashlib.sha256(json.dumps(texts).encode()).digest()
        digests = process_allgather(np.frombuffer(digest, np.uint8))
        self._over = True
        if (digests == digests[0]).all():
            self.again()
            return
        mine = np.frombuffer(_packed(texts).encode(), np.uint8)
        lengths = process_allgather(np.array([mine.size], np.int32)).ravel()
        rows = process_allgather(np.pad(mine, (0, int(lengths.max()) - mine.size)))
        theirs = [_unpacked(row[:length].tobytes().decode()) for row, length in zip(rows, lengths, strict=True)]
        known = dict.fromkeys(part for each in theirs for part in each)
        differ = {part: {process: each.get(part, "") for process, each in enumerate(theirs)} for part in known}
        raise difference(self._where, {part: said for part, said in differ.items() if len(set(said.values())) > 1})

    def again(self) -> None:
        """Count the call."""
        self._company.check(self._where)
        self._company.count(self._where, self._number)

    def give_up(self, error: BaseException) -> None:
        """Nothing: the others wait until this process ends."""


def _in_words(where: str, batch: str) -> str:
    """A call and its batch, for people."""
    leaves = [*batch.splitlines()[:4], *(["..."] if batch.count("\n") > 3 else [])]
    return f"{where} with a batch of {', '.join(leaves)}" if leaves else where


def _packed(texts: Mapping[str, str]) -> str:
    return base64.b64encode(zlib.compress(json.dumps(texts).encode())).decode()


def _unpacked(packed: str) -> Mapping[str, str]:
    return json.loads(zlib.decompress(base64.b64decode(packed)))
