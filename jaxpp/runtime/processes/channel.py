"""The one channel between the processes of a run: an exchange of texts, and all that is made of it.

A process whose code, settings or shapes differ sends what nobody waits for. So all processes compare what decides a plan before it
is compiled: each puts a digest of named texts (where they differ, the texts) into the store that ``jax.distributed`` keeps, or
sends them. At every later call they meet there too, and compare on what they agreed then: JAX finds transfers by their number
alone, so two calls in another order would each take the other's values. While the main thread waits for a device, another looks
into the store once a second: it says that the process lives, and prints which others have failed. The next call then raises. As JAX
waits at the end of a script for all, also after an exception, each process leaves a note there; after an exception it ends within
five seconds.
"""

import atexit
import base64
import contextlib
import faulthandler
import functools
import hashlib
import itertools
import json
import math
import operator
import os
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxpp.errors import JaxppError, ProcessError
from jaxpp.runtime.not_public import Store, is_known_alone, shared_store
from jaxpp.runtime.processes.here import processes_of, spread
from jaxpp.runtime.processes.texts import difference, listed
from jaxpp.runtime.send import Send
from jaxpp.types import Array, Device, DType

_LOOKS = 1.0  # seconds between two looks of the thread into the store
_LIVES = 3.0  # seconds in which a process that lives says so again
_GRACE = 5  # seconds that a process which has failed waits for the others
_PATIENCE = 5.0  # seconds after which a process says for whom it waits; each further time it has waited twice as long
_PATIENCE_AGAIN = 60.0  # the same in a call that all have made before: one of them may write a checkpoint between two steps
_LIMIT = 1800.0  # seconds after which it waits no longer in a new call
_LARGEST = 1 << 16  # letters of a text that goes through the store; a longer one is sent
_FOLDER = 100  # exchanges whose texts the store forgets at once, when all have been read
_COMPARED = 1 << 21  # letters of a text that are exchanged to be compared; what differs only behind them is not shown
_FAILED = "raised"  # of a process: whose script has ended with an exception
_ENDED = "has come to the end of its script"
_NEW = "for the first time"
_ROUNDS = 20  # how often ``align_clocks`` asks each process what time it is
_RULE = "all processes do the same calls"
_ALIVE, _LEFT = "jaxpp/alive", "jaxpp/left"  # folders: how often each process has looked; ``_Left`` of those that have ended

_T = TypeVar("_T")
_Said = Mapping[str, Any]  # what a process says in an exchange


class _Left(NamedTuple):
    failed: bool
    how: str


def _left(store: Store) -> dict[int, _Left]:
    return {process: _Left(*json.loads(text)) for process, text in store.folder(_LEFT).items() if process != store.process}


@functools.cache
def _channel() -> "_Channel":
    return _Channel(shared_store(), range(jax.process_count()))


class _Channel:
    """The processes of a run, which make the same exchanges and calls in the same order."""

    def __init__(self, store: Store | None, processes: Sequence[int]):
        self.store, self.processes, self.num_exchanges = store, processes, 0
        self.broken_off = ""  # which call has sent and received only a part of what the others do, or nothing
        self._left: Mapping[int, _Left] = {}  # the others whose script has ended, at the last look of the thread
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, name="jaxpp channel", daemon=True)

    def check(self, where: str) -> None:
        """Refuse another call if a process has failed, or if this one has broken a call off."""
        if gone := {process: left for process, left in self._left.items() if left.failed}:
            _check_all_well(where, {}, gone)
        if self.broken_off:
            rule = "a process that was interrupted while it sent and received does not know any more what belongs together"
            fix = "start the script again in all processes, from the last checkpoint"
            raise ProcessError(where, rule, self.broken_off, fix)

    def exchange(self, text: str, where: str, what: str = "", meets: str = "") -> tuple[str, ...]:
        """The text of each process; ``where`` is the call for an error, ``what`` with its batch; ``meets`` is the same in all."""
        self.num_exchanges += 1
        if len(self.processes) == 1:
            return (text,)
        said = {"text": text, "what": what or where, "meets": meets}
        if self.store is None:
            told = dict(enumerate(map(json.loads, _texts_by_sends(json.dumps(said)))))
            _check_all_well(where, told, {})
            return tuple(told[process]["text"] for process in self.processes)
        if self._thread.ident is None:
            self._thread.start()
        packed = base64.b64encode(zlib.compress(text.encode())).decode()
        said["text"] = packed if len(packed) <= _LARGEST else ""  # the store answers with the texts of all processes at once
        self.say(self.num_exchanges, **said)
        told = self._wait_for_all(where, said, again=meets not in ("", _NEW))
        if self.num_exchanges % _FOLDER == 0 and self.store.process == 0:  # all have begun this one, so they have read those before
            self.store.drop(os.path.dirname(_folder(self.num_exchanges - 1)))
        if not all(told[process]["text"] for process in self.processes):
            return _texts_by_sends(text)
        return tuple(zlib.decompress(base64.b64decode(told[process]["text"])).decode() for process in self.processes)

    def say(self, number: int, **said: object) -> None:
        if self.store is not None:
            self.store.put(f"{_folder(number)}/{self.store.process}", json.dumps(said))

    def _wait_for_all(self, where: str, mine: _Said, *, again: bool) -> Mapping[int, _Said]:
        assert self.store, "who waits has a store"
        folder, me, told = _folder(self.num_exchanges), self.store.process, {self.store.process: mine}
        begun, patience = time.monotonic(), _PATIENCE_AGAIN if again else _PATIENCE
        while away := [process for process in self.processes if process not in told]:
            left = self._left  # first, for a process may take part in its last exchange and end
            if text := self.store.wait(f"{folder}/{away[0]}", 0.5):
                told[away[0]] = json.loads(text)
            if len(away) > 1:
                told |= {process: json.loads(text) for process, text in self.store.folder(folder).items()}
            _check_all_well(where, told, left)
            waited, away = time.monotonic() - begun, [process for process in away if process not in told]
            if away and waited > patience:
                it = f"jaxpp: process {me} has waited in {mine['what']} for {waited:.0f} seconds"
                print(f"{it}, because {listed(away)} did not come to it yet", file=sys.stderr, flush=True)
                patience *= 2
            if away and waited > _LIMIT and not again:
                got = f"{listed(away)} did not come within {_LIMIT / 60:.0f} minutes"
                raise ProcessError(where, _RULE, got, "look into the log of that process: it is stuck, or makes other calls")
        return told

    def _look(self) -> None:
        store, looks, reported = self.store, 0, set[int]()
        with contextlib.suppress(Exception):  # the store ends with process 0, and with ``jax.distributed.shutdown``
            while store is not None and not self._ends.wait(_LOOKS if looks else 0):
                looks += 1
                store.put(f"{_ALIVE}/{store.process}", str(looks))
                self._left = _left(store)
                for process, left in sorted(self._left.items()):
                    if left.failed and process not in reported:
                        reported.add(process)
                        here = f"process {store.process} cannot go on without it"
                        ends = "and ends too: by an error, or by JAX when no heartbeats come"
                        print(f"jaxpp: process {process} {left.how}; {here}, {ends}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """End the thread: it must not be in C++ code when Python ends."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2)


def _check_all_well(where: str, said: Mapping[int, _Said], left: Mapping[int, _Left]) -> None:
    errors = {process: str(entry["failed"]) for process, entry in said.items() if "failed" in entry}
    first = {process: error for process, error in errors.items() if not error.startswith(ProcessError.__name__)}
    gone = {process: one.how for process, one in left.items() if process not in said}
    meeting = {process: entry for process, entry in said.items() if "meets" in entry}
    apart = len({entry["meets"] for entry in meeting.values()}) > 1
    if not errors and not gone and not apart:
        return
    fix = "give every process the same batches, as many and of the same shapes, and let all make the same calls"
    if errors or any(left[process].failed for process in gone):
        fix = "mend that error, whose traceback is in the log of its process"
    got = [f"process {process} {_FAILED} {error}" for process, error in (first or errors).items()]
    got += [f"process {process} {how}" for process, how in gone.items()]
    if apart:
        got += [f"process {process} is in {entry['what']} {entry['meets']}".rstrip() for process, entry in sorted(meeting.items())]
    raise ProcessError(where, _RULE, got, fix)


def _folder(number: int) -> str:
    return f"jaxpp/exchanges/{number // _FOLDER}/{number}"


def _in_one_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


@atexit.register  # so it runs before what JAX registered earlier, which waits for the other processes
def _leave() -> None:
    """Tell the others that this process ends; after an exception, do not wait for them for long."""
    error = getattr(sys, "last_value", None)  # Python has printed its traceback
    channel = _channel() if _channel.cache_info().currsize else None
    failed = error is not None
    with contextlib.suppress(Exception):  # the store ends with process 0
        if (store := shared_store()) is not None:
            failed = _say_how(store, channel, error)
    if channel is not None:
        channel.stop()
    if failed and jax.distributed.is_initialized() and not is_known_alone():
        sys.stdout.flush()
        sys.stderr.flush()
        with open(os.devnull, "w") as nowhere:  # a thread cannot be started any more; this timer is none of Python's
            faulthandler.dump_traceback_later(_GRACE, exit=True, file=os.fdopen(os.dup(nowhere.fileno()), "w"))


def _say_how(store: Store, channel: _Channel | None, error: BaseException | None) -> bool:
    """Leave the note, and return whether the script has ended as it should not: by an exception, or in the middle of a call."""
    broken_off = channel.broken_off if channel is not None and error is None else ""
    how = f"{_FAILED} {_in_one_line(error)}" if error is not None else f"{_ENDED} after {broken_off}" if broken_off else _ENDED
    failed = how != _ENDED
    store.put(f"{_LEFT}/{store.process}", json.dumps(_Left(failed, how)))
    if failed:
        _say_who_is_lost(store, "failed" if error is not None else how)
    return failed


def _say_who_is_lost(store: Store, why: str) -> None:
    ends = f"it ends within {_GRACE} seconds, also if the others have not ended by then"
    print(f"jaxpp: process {store.process} {why}; {ends}", file=sys.stderr, flush=True)
    said = store.folder(_ALIVE)
    asked = {*said} - {store.process, *store.folder(_LEFT)}
    limit = time.monotonic() + _LIVES
    while asked and time.monotonic() < limit:
        time.sleep(0.1)
        asked -= {process for process, number in store.folder(_ALIVE).items() if number != said.get(process)}
    if asked:
        what = f"{listed(sorted(asked))} does not answer: killed (out of memory?), or its host is lost"
        print(f"jaxpp: {what}; resume from the last checkpoint", file=sys.stderr, flush=True)


class Agreement:
    """A call on which the processes of a run agree; called with a function of named texts. One process agrees without a channel."""

    def __init__(self, where: str, channel: _Channel | None):
        self._where, self._channel, self._what = where, channel, where
        self._number, self._over = 0, channel is None

    def __call__(self, parts: Callable[[], Mapping[str, str]]) -> None:
        """Compare texts; what is tried again after it has succeeded is not compared again."""
        if self._over or self._channel is None:
            return
        channel = self._channel
        texts = {"call": self._where, **parts()}
        if leaves := texts.get("batch", "").splitlines():
            self._what = f"{self._where} with a batch of {', '.join([*leaves[:4], *['...'] * (len(leaves) > 4)])}"
        self._number = channel.num_exchanges + 1
        tell = functools.partial(channel.exchange, where=self._where, what=self._what, meets=_NEW)
        digests = {part: hashlib.sha256(text.encode()).hexdigest() for part, text in texts.items()}
        told = [json.loads(text) for text in tell(json.dumps(digests))]
        self._over = True
        differ = [part for part in dict.fromkeys(itertools.chain(*told)) if len({one.get(part) for one in told}) > 1]
        if differ:
            mine = {part: texts.get(part, "")[:_COMPARED] for part in differ}
            theirs = [json.loads(text) for text in tell(json.dumps(mine))]
            raise difference(self._where, {part: {k: text[part] for k, text in enumerate(theirs)} for part in differ})

    def again(self, prepare: Callable[[], _T], about: str = "") -> _T:
        """What ``prepare`` returns, when all have prepared another call on which they have agreed; if one raises first, all do.

        ``about`` is what else must be the same in all processes, at every call anew.
        """
        channel = self._channel
        if channel is None:
            return prepare()
        channel.check(self._where)
        try:
            prepared = prepare()
        except BaseException as error:
            channel.num_exchanges += 1
            channel.say(channel.num_exchanges, failed=_in_one_line(error))
            raise
        with transfers(self._where):  # who is interrupted while it waits does not know whether the others go on
            channel.exchange("", self._where, self._what, f"{about}as agreed in exchange {self._number}")
        return prepared

    def give_up(self, error: BaseException) -> None:
        """Tell the others that this process raised before it had agreed."""
        if self._over or self._channel is None:
            return
        self._over = True
        if self._number and isinstance(error, ProcessError):  # the others find the same in what this process has said
            return
        if not self._number:  # it has not begun: this is what it has to say in the exchange that it owes the others
            self._channel.num_exchanges += 1
            self._number = self._channel.num_exchanges
        self._channel.say(self._number, failed=_in_one_line(error))


@contextmanager
def agreement(where: str, devices: Sequence[Device]) -> Iterator[Agreement]:
    """A block in which all processes of the run agree on what they do with these devices; if one raises first, all do.

    Nothing is compared if one process has all the devices. One that has none of them takes part too, in every transfer.
    """
    channel = _channel() if len(processes_of(devices)) > 1 else None
    if channel is not None:
        channel.check(where)
    meeting = Agreement(where, channel)
    try:
        yield meeting
    except BaseException as error:
        meeting.give_up(error)
        raise


@contextmanager
def transfers(where: str) -> Iterator[None]:
    """A block of sends and receives; JAX finds these by number, so after one that broke off no call with others is made."""
    try:
        yield
    except ProcessError:  # which all raise, before the first of them sends
        raise
    except BaseException as error:
        _channel().broken_off = f"{where} was broken off by {_in_one_line(error)}"
        raise


def texts_of_all(text: str) -> tuple[str, ...]:
    """The text of each process; every process calls this, in the same order."""
    return _channel().exchange(text, "an exchange between processes")


def told_by_all(said: object) -> list[Any]:
    """What each process says, as JSON has it, NumPy's numbers too; every process calls this, in the same order."""
    return [json.loads(text) for text in texts_of_all(json.dumps(said, default=operator.methodcaller("item")))]


def rows_of_all(values: np.ndarray) -> np.ndarray:
    """What each process passes, a row each, of equal shapes and types; every process calls this, in the same order."""
    return np.stack([np.array(told, values.dtype).reshape(values.shape) for told in told_by_all(values.tolist())])


def begin_together() -> None:
    """Wait for all processes by sends, after which they go on within the time of a send; at the store the last one leaves first."""
    _texts_by_sends("")


def raise_alike(where: str, check: Callable[[], None], kind: type[JaxppError]) -> None:
    """Make a check, and raise in every process if it fails in one; every process calls this.

    Of errors of this ``kind`` all raise that of the first process; of others the process itself, and the rest a ``ProcessError``.
    """
    error, said = None, {}
    try:
        check()
    except Exception as raised:  # noqa: BLE001  (the others must not wait for this process)
        error, said = raised, {"parts": raised.parts} if isinstance(raised, kind) else {"failed": _in_one_line(raised)}
    told = told_by_all(said)
    first = next((process for process, other in enumerate(told) if "parts" in other), None)
    if error is not None and (not isinstance(error, kind) or first == jax.process_index()):
        raise error
    for process, other in enumerate(told):
        if "parts" in other:
            raise kind(*other["parts"])
        if "failed" in other:
            rule, fix = "all processes check the same", "mend that error, whose traceback is in the log of its process"
            raise ProcessError(where, rule, f"process {process} {_FAILED} {other['failed']}", fix)


@functools.cache
def first_devices() -> dict[int, Device]:
    """The first device of each process."""
    last_to_first = sorted(jax.devices(), key=lambda device: -device.id)
    return {device.process_index: device for device in last_to_first}


def _sent(values: np.ndarray, source: int, target: int) -> np.ndarray | None:
    """What the process ``source`` passes, in ``target``; all call this, with one shape and type known without 64 bits."""
    me, move = jax.process_index(), _between(values.shape, values.dtype, source, target)
    arrived = move(spread(np.array(values), first_devices()[source])) if me == source else move()
    return np.asarray(arrived[0]) if me == target else None


@functools.cache
def _between(shape: tuple[int, ...], dtype: DType, source: int, target: int) -> Callable[..., Sequence[Array]]:
    devices = first_devices()
    return Send(devices[target], devices[source], jax.ShapeDtypeStruct(shape, dtype)).bind()


def _texts_by_sends(text: str) -> tuple[str, ...]:
    data, me, count = np.frombuffer(zlib.compress(text.encode()), np.uint8), jax.process_index(), jax.process_count()

    def rows(values: np.ndarray) -> list[np.ndarray]:
        arrived = {me: values}
        for source, target in itertools.permutations(range(count), 2):
            if (row := _sent(values, source, target)) is not None:
                arrived[source] = row
        return [arrived[process] for process in range(count)]

    sizes = [int(row[0]) for row in rows(np.array([len(data)], np.int32))]
    padded = rows(np.pad(data, (0, max(sizes) - len(data))))
    return tuple(zlib.decompress(row[:size].tobytes()).decode() for row, size in zip(padded, sizes, strict=True))


class Alignment(NamedTuple):
    """How the clock of this process stands to that of process 0."""

    offset: float = 0.0  # seconds to add to ``time.perf_counter()``
    error: float = 0.0  # seconds by which the sum may be wrong: half of the quickest way there and back


def align_clocks() -> Alignment:
    """Align the clock with that of process 0, by the quickest of many trips each way (Cristian, 1989); all processes call it."""
    least, most = -math.inf, math.inf
    for process in range(1, jax.process_count()):
        for _ in range(_ROUNDS):
            asked = time.perf_counter()
            _sent(np.zeros(2, np.uint32), process, 0)
            words = np.array([time.perf_counter()]).view(np.uint32)  # which JAX sends as they are, with or without 64 bits
            answer = _sent(words, 0, process)
            if answer is not None:
                seconds = float(np.ascontiguousarray(answer).view(np.float64)[0])
                least, most = max(least, seconds - time.perf_counter()), min(most, seconds - asked)
    return Alignment((least + most) / 2, (most - least) / 2) if jax.process_index() else Alignment()
