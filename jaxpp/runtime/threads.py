"""A thread for each rank: the lanes of a plan are handed over side by side, and no device waits for the host to serve another.

A call of a program releases Python's lock while the driver launches its kernels, so what one thread does for all devices one after
another, threads do at once. What a lane must wait for is said by the turns of its instructions (``plan.lanes``): results have the
same bits.

The caller's thread hands nothing over. It waits, and takes Ctrl-C, which stops all lanes before the first of them takes over the
buffer of an argument: from then on signals wait, as they do with one thread. What a lane raises stops the others too.

Ctrl-C may come between any two bytecodes, and a lock of Python's that is being taken then stays taken. So the caller's thread takes
none while signals come, and lanes that wait look now and then whether they are to stop, should nobody have woken them.
"""

import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from queue import SimpleQueue

import jax

from jaxpp.errors.user_mesh import set_aside
from jaxpp.lowering.lanes import Turn
from jaxpp.lowering.plan import Execution, Instruction, Plan
from jaxpp.runtime.interrupts import held

_x64 = operator.attrgetter("jax_enable_x64")  # of JAX's options, as they are in this thread
_LOOKS = 0.5  # seconds after which a lane that waits looks whether it is to stop


class _Here(threading.local):
    busy = False  # whether this thread waits for lanes, or is one
    is_lane = False


_HERE = _Here()


def in_lane() -> bool:
    """Whether this thread hands over a lane, and somebody waits for it."""
    return _HERE.is_lane


_Queue = SimpleQueue[Callable[[], None] | None]


class Threads:
    """The threads of a pipeline, kept from step to step; they end with it.

    They are no pool of Python's: that one takes nothing more once the main thread has ended, though a step or a state may still be
    asked for, and Ctrl-C may leave its locks taken. A ``SimpleQueue`` has none that Ctrl-C could.
    """

    def __init__(self, count: int):
        self._queues: list[_Queue] = [SimpleQueue() for _ in range(count)]
        weakref.finalize(self, _end, self._queues).atexit = False
        with held():
            for number, queue in enumerate(self._queues):
                threading.Thread(target=_serve, args=(queue,), name=f"jaxpp-rank_{number}", daemon=True).start()
        self._process = os.getpid()
        self._lock = threading.Lock()  # all lanes of a step run at once, so two steps do not

    def dispatch(self, parts: Iterable[tuple[Execution, Iterable[int]]], hold: Callable[[], None] | None = None) -> None:
        """Hand over instructions of runs, each lane its own in the order in which they stand here.

        ``hold`` is called in this thread before any takes over the buffer of an argument. Of what lanes raise, the first is raised,
        and its run has failed; all lanes have ended then, and ``left`` of each run is what they have left.
        """
        with self._lock:
            _HERE.busy = True
            try:
                _Handover(parts).run(self._queues, hold)
            finally:
                _HERE.busy = False

    @property
    def may_begin(self) -> bool:
        """Whether a step may be handed over in them.

        Not where this thread waits for them (a handler of signals), or is one, nor in a fork of their process, which has none.
        """
        return not _HERE.busy and self._process == os.getpid()


def _serve(queue: "_Queue") -> None:
    _HERE.busy = _HERE.is_lane = True
    while (job := queue.get()) is not None:
        job()
        del job  # or what it holds would stay until the next one


def _end(queues: "Sequence[_Queue]") -> None:
    for queue in queues:
        queue.put(None)


_Item = tuple[Execution, list[int], Instruction, Turn]
"""A run, how many instructions of each of its lanes were handed over, and one to be handed over."""


class _Handover:
    def __init__(self, parts: Iterable[tuple[Execution, Iterable[int]]]):
        self._items: dict[int, list[_Item]] = {}
        self._numbers: dict[Execution, list[int]] = {}
        self._before: dict[Execution, list[int]] = {}
        for run, part in parts:
            for number in part:
                if run not in self._numbers:
                    run.done = run.done or _handed_over(run.plan, number)
                    self._numbers[run], self._before[run] = [], list(run.done)
                turn = run.plan.turns[number]
                self._numbers[run].append(number)
                self._items.setdefault(turn.lane, []).append((run, run.done, run.plan.instructions[number], turn))
        self._heard = {lane: threading.Condition() for lane in self._items}  # that a lane has handed over what others wait for
        self._caller = threading.Condition()
        self._news: SimpleQueue[None] = SimpleQueue()  # something for each change that the caller waits for
        self._x64 = _x64(jax.config)  # of the caller's thread: puts in another have the types of that one
        self._asked = self._granted = self._stopped = False
        self._left, self._working = len(self._items), 0  # lanes that have not ended; of these, those that have begun
        self._error: BaseException | None = None

    def run(self, queues: Sequence[_Queue], hold: Callable[[], None] | None) -> None:
        try:
            for lane, items in self._items.items():
                queues[lane].put(partial(self._lane, items))
            while self._left:
                self._news.get()
                if self._asked and not self._granted and not self._stopped:
                    if hold is not None:
                        hold()
                    self._granted = True
                    with self._caller:
                        self._caller.notify_all()
        except BaseException:
            self._stopped = True  # at once, whatever comes next
            with held():
                self._stop()
                while self._working:  # a lane that has not begun does nothing any more
                    self._news.get()
                self._put_back()
            raise
        if self._error is not None:
            self._put_back()
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # its traceback has this frame: the two would hold one another, and what the frames hold

    def _put_back(self) -> None:
        """Note of each run what is left to be handed over."""
        for run, numbers in self._numbers.items():
            seen, left = self._before[run], list[int]()
            for number in numbers:
                lane = run.plan.turns[number].lane
                seen[lane] += 1
                left += [number] * (seen[lane] > run.done[lane])
            run.left = iter(left)

    def _lane(self, items: Sequence[_Item]) -> None:
        run = instruction = value = None
        with self._caller:
            if self._stopped:
                self._left -= 1
                self._news.put(None)
                return
            self._working += 1
        try:
            with set_aside(warns=False), nullcontext() if self._x64 == _x64(jax.config) else jax.enable_x64(self._x64):
                for run, done, instruction, turn in items:
                    value = None if turn.after else value  # what was sent may be let go while this lane waits
                    if not all(self._wait(done, other, count) for other, count in turn.after):
                        return
                    if (turn.asks and not self._ask()) or self._stopped:
                        return
                    _, call, inputs, outputs, free, _ = instruction
                    slots = run.slots
                    for slot, value in zip(outputs, call(*[slots[i] for i in inputs])):  # noqa: B905  (checked when lowered)
                        slots[slot] = value
                    for slot in free:
                        slots[slot] = value = None
                    done[turn.lane] += 1
                    if turn.is_awaited:
                        with self._heard[turn.lane]:
                            self._heard[turn.lane].notify_all()
        except BaseException as error:  # noqa: BLE001  (it is raised in the caller's thread)
            value = None
            self._fail(error, run, instruction)
        finally:
            with self._caller:
                self._working -= 1
                self._left -= 1
                self._news.put(None)

    def _wait(self, done: Sequence[int], lane: int, count: int) -> bool:
        """Wait until so many instructions of a lane were handed over; False if the lanes have stopped."""
        if done[lane] < count and lane in self._heard:
            with self._heard[lane]:
                while not self._heard[lane].wait_for(lambda: done[lane] >= count or self._stopped, _LOOKS):
                    pass
        return not self._stopped

    def _ask(self) -> bool:
        """Wait until the caller holds signals back; False if the lanes have stopped."""
        with self._caller:
            self._asked = True
            self._news.put(None)
            while not self._caller.wait_for(lambda: self._granted or self._stopped, _LOOKS):
                pass
            return not self._stopped

    def _fail(self, error: BaseException, run: Execution | None, instruction: Instruction | None) -> None:
        with self._caller:
            if self._error is None:
                self._error = error
                if run is not None and instruction is not None:
                    run.failed = True
                    error.add_note(f"jaxpp: raised while dispatching {instruction.label}")
        self._stop()

    def _stop(self) -> None:
        self._stopped = True
        for heard in (self._caller, *self._heard.values()):
            with heard:
                heard.notify_all()


def _handed_over(plan: Plan, number: int) -> list[int]:
    """How many instructions of each lane come before one of them."""
    counts = [0] * (1 + max(turn.lane for turn in plan.turns))
    for turn in plan.turns[:number]:
        counts[turn.lane] += 1
    return counts
