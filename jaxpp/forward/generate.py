"""Generation: tokens of many sequences, while the stages are kept busy.

Problem: the next token of a sequence needs the whole model, so one sequence alone keeps one stage busy at a time. Idea: a ring.
Groups of sequences follow one another through the stages; when the last group has left the first stage, the token of the first
group has come back to it. Mechanism: each pass of a group is a plan of its own. The host hands passes over ahead of the devices,
whose queues make the ring; a token goes from the last stage to the first without passing through the host, which reads it later to
yield it, to look for stop tokens and to give the place of a finished sequence to the next prompt.
"""

import collections
import contextlib
import inspect
import itertools
import math
import signal
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from jaxpp.errors import ArgumentError, StateError
from jaxpp.errors.tracebacks import current_trace, entries, leave
from jaxpp.forward.groups import Group
from jaxpp.forward.observed.profile import Begun, RingRuns
from jaxpp.forward.places import Admitted, Pass, Places, Token
from jaxpp.forward.ring import AHEAD, Ring
from jaxpp.forward.sequences import NextToken
from jaxpp.observe.memory.forecast import Forecast
from jaxpp.observe.profile.profile import Clock, Profile
from jaxpp.observe.profile.record import check_profile, record
from jaxpp.runtime.execute import Observer
from jaxpp.runtime.interrupts import Hold
from jaxpp.runtime.progress import progress

__all__ = ["Generation"]


_WAITED = "jaxpp: the generation goes on with its next token: next(generation), or generation.collect()"
_BROKE_OFF = "jaxpp: Ctrl-C, pressed again, broke off the generation; the parameters are as they were"


class _Read(NamedTuple):
    """Tokens on their way to the host: what a pass has drawn, and for which sequences."""

    drawn: NextToken
    made: Pass


_Found = _Read | Exception
"""What comes of a prompt or of a pass: tokens, or what was wrong with the prompt."""


@entries
class Generation(Iterator[Token]):
    """The tokens of many sequences, as they are made: an iterator of ``Token``.

    Tokens of different prompts come mixed, those of one prompt in order. ``collect()`` waits for all that are left, and gives one
    array for each prompt. ``close()``, the end of a ``with`` block, or letting go of it stops the generation and drops the carries.

    After Ctrl-C it goes on with the next token. While a token is made, Ctrl-C takes effect when the token is finished; pressed
    again a second later, it breaks off the generation, as other signals do whose handlers raise.

    Attributes:
        num_passes: how many passes through the stages were begun.
        observer: for tools: sees every instruction of the passes that are begun from now on.
    """

    def __init__(
        self,
        ring: Ring | None,
        places: Places,
        *,
        shown: bool,
        again: Callable[[], Places] | None = None,
        foresee: Callable[[float | str | None], Forecast] | None = None,
        most_passes: float = math.inf,
    ):
        self.num_passes = 0
        self.observer: Observer | None = None
        self._places, self._begun, self._most_passes = places, list[Begun](), most_passes
        self._ring, self._again, self._foresee = ring, again, foresee
        self._tokens, self._ended = Generation._run(weakref.proxy(self), ring, places, shown), False  # no cycle holds the carries
        self._made, self._collected = collections.deque[Token | Exception](), list[Token]()

    def __iter__(self) -> "Generation":
        return self

    def __next__(self) -> Token:
        taken, trace = None, current_trace()
        try:
            if not self._made:
                with Hold(_WAITED, _BROKE_OFF, (signal.SIGINT,)) as hold:
                    hold.begin()
                    self._made.extend(itertools.islice(self._tokens, 1))  # in C: no Ctrl-C between what was made and where it is
            if not self._made:
                self._check_ended()
                self.close()
                raise StopIteration
            taken = self._made[0]
            del self._made[0]
            if isinstance(taken, Exception):
                raise taken
            return taken
        except BaseException as error:
            if taken is not None and error is not taken and not self._made:
                self._made.append(taken)  # Ctrl-C, when all but the return was done
            leave(error, trace)
            raise

    def _check_ended(self) -> None:
        """Refuse to end like a generation that has made all its tokens where an exception has broken it off."""
        if not self._ended:
            rule, got = "a generation goes on until an exception breaks it off", "one that was broken off before its end"
            raise StateError("next(generation)", rule, got, "call generate again; the parameters are as they were")

    def __repr__(self) -> str:
        places = self._places
        prompts = f"{places.num_ended} of {places.num_prompts} prompts" if places.num_prompts else f"{places.num_ended} prompts"
        return f"Generation: {places.num_made} tokens made, {prompts} ended, {self.num_passes} passes through the stages"

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop, and drop the carries of all sequences."""
        under_way = inspect.getgeneratorstate(self._tokens) != inspect.GEN_CLOSED
        self._tokens.close()
        self._ended = self._ended or under_way
        self._made.clear()
        self._ring = self._again = None

    def forecast(self, *, hbm: float | str | None = None) -> Forecast:
        """Memory of the generation before it runs, from shapes alone.

        The passes are compiled and not run. Parameters that are shapes (``pipe.abstract_state(...)``), the shapes of a carry and no
        prompts will do: ``pipe.generate(shapes, fn, carry_shapes, [], num_tokens).forecast()``.

        Args:
            hbm: bytes that each device has: ``"80GiB"``, or a number. Default: the pipeline's ``hbm``, or else what the devices
                report (CPUs report nothing).

        Returns:
            the forecast: what each stage holds when its device holds most: parameters, what is computed from them alone, the
            carries of all groups, that of the prompt being prefilled and the empty one, values in flight, tokens, temporaries of
            the compiled programs, and the optimizer's state, which stays where it is.

        Raises:
            JaxppError: as ``generate``; and for an ``hbm`` that is no size.
        """
        assert self._foresee, "whoever generates says how to foresee it"
        return self._foresee(hbm)

    def profile(self, *, num_passes: int = 48, num_runs: int = 3, clock: Clock | None = None) -> Profile:
        """What really ran, when, and why ranks idled: the ring as it runs, under JAX's profiler.

        The same prompts are generated from their beginning a few times: to warm up, as they are, under the profiler, and one
        program at a time. No token of this generation is lost; it goes on where it was. Copies that put a prefilled carry into its
        group are not among what is timed.

        Args:
            num_passes: after how many passes through the stages no further one is begun.
            num_runs: how many such runs to trace.
            clock: as for ``Pipeline.profile``.

        Returns:
            the profile of the run of median length: every pass on every stage, tokens on their way, idle time by cause (waiting for
            a token among them), memory from shapes. ``print`` it; ``profile.figure()`` draws it, a colour for each group.

        Raises:
            ArgumentError: counts below 1, an unknown clock, prompts that are an iterator, which gives each of them once; or another
                trace of JAX's profiler is running.
            StateError: the generation has ended.
            BatchError: a prompt is none, or too long.
        """
        check_profile(clock, "generation.profile", num_passes=num_passes, num_runs=num_runs)
        ring, again = self._ring, self._again
        if ring is None and not self._ended:
            raise _only_shapes("generation.profile()")
        if ring is None:
            rule, fix = "a generation that has ended has let go of what it ran", "make another: pipe.generate(...).profile()"
            raise StateError("generation.profile()", rule, repr(self), fix)
        if again is None:
            rule, fix = "the prompts are generated several times", "pass them as a list: pipe.generate(..., list(prompts), ...)"
            raise ArgumentError("generation.profile()", rule, "prompts in an iterator, which gives each of them once", fix)

        def generate(observer: Observer | None) -> list[Begun]:
            found = Generation(ring, again(), shown=False, most_passes=num_passes)
            found.observer = observer
            for _ in found:
                pass
            return found._begun

        return record(RingRuns(ring, generate), num_runs, clock)

    def collect(self) -> list[np.ndarray]:
        """The tokens of each prompt, those that were not taken from the iterator yet: int32 arrays, in the order of the prompts.

        If Ctrl-C or a prompt that is refused interrupts it, another call goes on, and gives those too that the first had collected.
        """
        self._collected.extend(self)  # in C: what was made is kept
        found: dict[int, list[int]] = collections.defaultdict(list)
        for token in self._collected:
            found[token.prompt].append(token.token)
        count = self._places.num_prompts or max(self._places.num_ended, 1 + max(found, default=-1))
        made = [np.array(found[k], np.int32) for k in range(count)]
        self._collected = []
        return made

    def _run(self, ring: Ring | None, places: Places, shown: bool) -> Generator[Token | Exception, None, None]:
        if ring is None:
            raise _only_shapes("next(generation)")
        groups = [Group() for _ in range(ring.num_groups)]
        waiting: collections.deque[tuple[tuple[int, int], _Found]] = collections.deque()
        bar = progress(desc="generate", unit=" tokens", total=places.most_tokens, after=1.0) if shown else None
        with contextlib.nullcontext() if bar is None else bar:  # a bar without a total has no truth value
            for turn in itertools.count():
                begun = False
                for number, group in enumerate(groups):
                    for found in self._advance(ring, places, group, number) if self.num_passes < self._most_passes else ():
                        begun = True
                        waiting.append(((turn, number), found))
                    while waiting and waiting[0][0] <= (turn - AHEAD, number):
                        yield from self._take(places, waiting.popleft()[1], bar)
                if not begun and not waiting:
                    self._ended = True
                    return

    def _advance(self, ring: Ring, places: Places, group: Group, number: int) -> Iterator[_Found]:
        """Give the free places of a group to the next prompts; if there is none, begin its next pass.

        A pass right after a prompt would hold up the first stage, and with it all groups, until the prompt has left the last stage.
        """
        entered = False
        for _ in range(ring.carries.size):
            try:
                prompt = places.admit(number)
            except Exception as error:  # noqa: BLE001  (a prompt that is none comes out at its place; those after it go on)
                yield error
                continue
            if prompt is None:
                break
            yield self._enter(ring, prompt, group, number)
            entered = entered or prompt.num_tokens > 1
        made = None if entered else places.decode(number)
        if made is not None:
            self._note(Begun(number, 1, len(made), is_prompt=False))
            yield _begun(ring.turn(group, self.observer), made)

    def _note(self, begun: Begun) -> None:
        self.num_passes += 1
        if self._most_passes < math.inf:  # somebody wants to know
            self._begun.append(begun)

    def _enter(self, ring: Ring, prompt: Admitted, group: Group, number: int) -> _Read:
        """Prefill a prompt, and put it into its place; its own carry is gone when the next prompt is prefilled."""
        if ring.carries.size == 1:
            group.carry = None  # of the sequence whose place it takes
        carry, drawn = ring.prefill(prompt, self.observer)
        for size in prompt.chunks[:-1]:
            self._note(Begun(number, size, 0, is_prompt=True))
        self._note(Begun(number, prompt.chunks[-1], 1, is_prompt=True))
        if prompt.num_tokens > 1:
            ring.carries.enter(group, prompt.row, carry, drawn.token)
        return _begun(drawn, prompt.first)

    @staticmethod
    def _take(places: Places, read: _Found, bar: tqdm | None) -> Iterator[Token | Exception]:
        """The tokens of a pass, when they are there."""
        if isinstance(read, Exception):
            yield read
            return
        tokens = places.read(read.made, *map(np.asarray, read.drawn))
        if bar is not None:
            bar.total = places.most_tokens
            bar.update(len(tokens))
        yield from tokens


def _only_shapes(where: str) -> StateError:
    """The error for a generation that is run where it can only be forecast."""
    rule = "a generation of shapes says what it would hold, generation.forecast(), and makes no tokens"
    fix = "pass the arrays: the state or the parameters that init returned, and a carry of arrays"
    return StateError(where, rule, "parameters that are shapes without values", fix)


def _begun(drawn: NextToken, made: Pass) -> _Read:
    """Begin to copy the tokens to the host."""
    for each in drawn:
        each.copy_to_host_async()
    return _Read(drawn, made)
