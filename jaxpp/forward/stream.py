"""The outputs of many batches, one after another, with the devices kept busy and the host kept near them.

Waiting for each output before the next batch lets the pipeline run empty; never waiting fills the devices' memory. So when the
consumer asks for an output, ``Stream`` dispatches until as many batches are in flight as allowed, then waits for the oldest. An
output that the consumer holds counts as in flight until the consumer asks for the next one.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import count, islice, repeat
from typing import Any

import jax

from jaxpp.errors import ArgumentError, BatchError, is_count, shown
from jaxpp.errors.tracebacks import current_trace, entries, is_ctrl_c, leave
from jaxpp.errors.user_mesh import set_aside
from jaxpp.types import Batch, Tree

_PULLED, _DISPATCHED, _FAILED = "pulled", "dispatched", "failed"  # in flight: a batch, its outputs, the exception in their place


@entries
class Stream(Iterator[Tree], AbstractContextManager["Stream"]):
    """The outputs of batches, in their order, as an iterator that looks ahead by a bounded number of batches.

    ``next`` returns the outputs of the next batch when the devices have computed them, while later batches are under way. An
    exception of the iterator, the model or a device comes out in the place of its batch's outputs, with a note that says which
    batch it was; the ``next`` after it goes on with the batch after it, unless the iterator has ended (a generator that has raised
    has ended). After Ctrl-C, ``next`` goes on where it was. A stream can be run through once. ``close``, the end of a ``with``
    block, or letting go of it drops the batches and outputs that it holds.

    Args:
        batches: any iterable; each batch is taken just before it is dispatched (``max_in_flight=1`` if it depends on outputs).
        run: ``run(k, batch)`` dispatches batch k and returns its outputs without waiting; after Ctrl-C it may be called again.
        max_in_flight: batches whose outputs may exist at a time, those that the consumer was last given among them. At least 2,
            if the devices are to have work while the consumer looks at outputs.
        where: what messages call the stream.

    Raises:
        ArgumentError: ``max_in_flight`` is no whole number of at least 1, or ``batches`` is a single batch.

    Example:
        >>> stream = Stream([1, 2, 3], lambda k, batch: 10 * k + batch, max_in_flight=2)
        >>> list(stream)
        [1, 12, 23]
    """

    def __init__(self, batches: Iterable[Batch], run: Callable[[int, Batch], Tree], max_in_flight: int, where: str = "pipe.stream"):
        if not is_count(max_in_flight, least=1):
            rule = "max_in_flight says how many batches are under way at a time, a whole number of at least 1"
            raise ArgumentError(f"{where}(..., max_in_flight={shown(max_in_flight)})", rule, shown(max_in_flight), "pass 2")
        self._length = _length_of(batches)
        self._work: tuple[Iterator[Batch], Callable[[int, Batch], Tree]] | None = (_iterator_of(batches, where), run)
        self._max_in_flight, self._where = int(max_in_flight), where
        self._next, self._numbers, self._flight = 0, count(), deque[tuple[Tree, int, str]]()

    def __next__(self) -> Tree:
        trace = current_trace()
        try:
            self._fill()
            if not self._flight:
                raise StopIteration
            value, number, status = self._flight[0]
            failure = value if status == _FAILED else self._failure_of(value, number)
            if failure is not None:
                self._next = number + 1
                del self._flight[0]
                raise failure
        except BaseException as error:
            leave(error, trace)
            raise
        self._next = number + 1  # from here on nothing is called, so no signal is handled before the outputs are given
        del self._flight[0]
        return value

    def _fill(self) -> None:
        """Dispatch until enough are in flight or one failed. After Ctrl-C, what was not dispatched for certain comes again."""
        flight = self._flight
        while self._work is not None and not (flight and flight[-1][2] == _FAILED):
            source, run = self._work
            if flight and flight[-1][2] == _PULLED:
                batch, number, _ = flight[-1]
                try:
                    with set_aside():
                        flight[-1] = (run(number, batch), number, _DISPATCHED)
                except Exception as error:  # noqa: BLE001  (raised when it is its turn)
                    if is_ctrl_c(error):
                        raise KeyboardInterrupt from None
                    flight[-1] = (self._noted(error, number), number, _FAILED)
                del batch
            elif len(flight) < self._max_in_flight:
                self._pull(source)
            else:
                return

    def _pull(self, source: Iterator[Batch]) -> None:
        before = len(self._flight)
        try:
            self._flight.extend(zip(islice(source, 1), self._numbers, repeat(_PULLED)))  # in C: no Ctrl-C between batch and flight
        except Exception as error:  # noqa: BLE001  (raised when it is its turn)
            number = next(self._numbers)
            note = f"jaxpp: {self._where}: the iterator of batches raised this when it was asked for batch {number}"
            self._flight.append((_with_note(error, note), number, _FAILED))
            return
        if len(self._flight) == before:
            self._work = None
            if next(self._numbers) == 0:
                where, rule = f"{self._where}(..., batches, ...)", "there is at least one batch"
                fix = "pass a list or a fresh iterator of batches (an iterator that was run through before is empty)"
                self._flight.append((BatchError(where, rule, "an iterator that ended before its first batch", fix), 0, _FAILED))

    def _failure_of(self, outputs: Tree, number: int) -> Exception | None:
        try:
            jax.block_until_ready(outputs)
        except Exception as error:  # noqa: BLE001  (raised by who asked)
            return self._noted(error, number)
        return None

    def _noted(self, error: Exception, number: int) -> Exception:
        return _with_note(error, f"jaxpp: {self._where}: this was batch {number}, counted from 0")

    def close(self) -> None:
        """Drop everything: the batches, and the outputs that nobody has taken. The stream has ended then."""
        self._work = None
        self._flight.clear()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        """The number of batches in all, taken or not, if ``batches`` has a length."""
        if self._length is None:
            raise TypeError("the batches of this stream have no length")
        return self._length

    def __bool__(self) -> bool:
        return True  # not the length, which may be unknown

    def __repr__(self) -> str:
        if self._work is None and not self._flight:
            return f"<{self._where}: ended after {self._next} batches>"
        return f"<{self._where}: batch {self._next} is next; {len(self._flight)} of at most {self._max_in_flight} in flight>"


def _with_note(error: Exception, note: str) -> Exception:
    error.add_note(note)
    if isinstance(error, StopIteration):  # which would look like the end of the stream
        raised = RuntimeError("StopIteration was raised inside a stream")
        raised.__cause__ = error
        return raised
    return error


def _length_of(batches: Any) -> int | None:
    try:
        return len(batches)
    except (TypeError, NotImplementedError):
        return None


def _iterator_of(batches: Any, where: str) -> Iterator[Batch]:
    single = isinstance(batches, (Mapping, str, bytes)) or hasattr(batches, "dtype") or hasattr(batches, "_fields")
    if single or not (isinstance(batches, Iterable) or hasattr(batches, "__getitem__")):
        rule = "batches is an iterable of batches: a list, a generator, a data loader"
        got = f"a single {type(batches).__name__}: {shown(batches)}"
        fix = f"pass [batch] for one batch, or call {where.rpartition('.')[0] or 'pipe'}.apply(...)"
        raise ArgumentError(f"{where}(..., batches, ...)", rule, got, fix)
    return iter(batches)
