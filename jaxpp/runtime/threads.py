"""A thread for each rank: the lanes of a plan are handed over side by side, and no device waits for the host to serve another.

A call of a program releases Python's lock while the driver launches its kernels, so what one thread does for all devices one after
another, threads do at once. What a lane must wait for is said by the turns of its instructions (``plan.lanes``): results have the
same bits.

The caller's thread hands nothing over. It waits, and takes Ctrl-C, which stops all lanes before the first of them takes over the
buffer of an argument: from then on signals wait, as they do with one thread. What a lane raises stops the others too.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from jaxpp.errors.user_mesh import set_aside
from jaxpp.plan.lanes import Turn
from jaxpp.plan.plan import Execution, Instruction, Plan


class Threads:
    """The threads of a pipeline, kept from step to step; they end with it."""

    def __init__(self, count: int):
        self._pool = ThreadPoolExecutor(count, "jaxpp-rank")
        self._lock = threading.Lock()  # all lanes of a step run at once, so two steps do not

    def dispatch(self, parts: Iterable[tuple[Execution, Iterable[int]]], hold: Callable[[], None] | None = None) -> None:
        """Hand over instructions of runs, each lane its own in the order in which they stand here.

        ``hold`` is called in this thread before any takes over the buffer of an argument. Of what lanes raise, the first is raised,
        and its run has failed; all lanes have ended then, and ``left`` of each run is what they have left.
        """
        with self._lock:
            _Handover(parts).run(self._pool, hold)


_Item = tuple[Execution, list[int], int, Instruction, Turn]
"""A run, how many instructions of each of its lanes were handed over, and one to be handed over, with its number."""


class _Handover:
    def __init__(self, parts: Iterable[tuple[Execution, Iterable[int]]]):
        self._items: dict[int, list[_Item]] = {}
        self._done: dict[Execution, list[int]] = {}
        self._numbers: dict[Execution, list[int]] = {}
        self._before: dict[Execution, list[int]] = {}
        for run, part in parts:
            for number in part:
                if run not in self._done:
                    run.done = run.done or _handed_over(run.plan, number)
                    self._done[run], self._numbers[run] = run.done, []
                    self._before[run] = list(run.done)
                turn = run.plan.turns[number]
                self._numbers[run].append(number)
                self._items.setdefault(turn.lane, []).append((run, self._done[run], number, run.plan.instructions[number], turn))
        self._heard = {lane: threading.Condition() for lane in self._items}  # that a lane has handed over what others wait for
        self._caller = threading.Condition()
        self._asked = self._granted = self._stopped = False
        self._left, self._working = len(self._items), 0  # lanes that have not ended; of these, those that have begun
        self._error: BaseException | None = None

    def run(self, pool: ThreadPoolExecutor, hold: Callable[[], None] | None) -> None:
        try:
            for items in self._items.values():
                pool.submit(self._lane, items)
            with self._caller:
                while self._left:
                    self._caller.wait_for(lambda: not self._left or self._is_asked)
                    if self._is_asked:
                        if hold is not None:
                            hold()
                        self._granted = True
                        self._caller.notify_all()
        except BaseException:
            self._stop()
            with self._caller:  # a lane that has not begun does nothing any more
                self._caller.wait_for(lambda: not self._working)
            self._put_back()
            raise
        if self._error is not None:
            self._put_back()
            raise self._error

    @property
    def _is_asked(self) -> bool:
        return self._asked and not self._granted and not self._stopped

    def _put_back(self) -> None:
        """Note of each run what is left to be handed over."""
        for run, numbers in self._numbers.items():
            done, seen = self._done[run], self._before[run]
            left = list[int]()
            for number in numbers:
                lane = run.plan.turns[number].lane
                seen[lane] += 1
                left += [number] * (seen[lane] > done[lane])
            run.left = iter(left)

    def _lane(self, items: Sequence[_Item]) -> None:
        run = instruction = value = None
        with self._caller:
            if self._stopped:
                self._left -= 1
                self._caller.notify_all()
                return
            self._working += 1
        try:
            with set_aside():
                for run, done, _, instruction, turn in items:
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
                self._caller.notify_all()

    def _wait(self, done: Sequence[int], lane: int, count: int) -> bool:
        """Wait until so many instructions of a lane were handed over; False if the lanes have stopped."""
        if done[lane] < count and lane in self._heard:
            with self._heard[lane]:
                self._heard[lane].wait_for(lambda: done[lane] >= count or self._stopped)
        return not self._stopped

    def _ask(self) -> bool:
        """Wait until the caller holds signals back; False if the lanes have stopped."""
        with self._caller:
            self._asked = True
            self._caller.notify_all()
            self._caller.wait_for(lambda: self._granted or self._stopped)
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
