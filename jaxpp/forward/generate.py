"""Generation: tokens of many sequences, while the stages are kept busy.

One sequence alone keeps one stage busy at a time, as its next token needs the whole model. So groups of sequences follow one
another in a ring. Each pass of a group is a plan of its own; the host hands passes over ahead of the devices, and reads later.

Ctrl-C waits while a token is made. A made token stands in a queue: from the bytecode that takes it out to the one that returns it
nothing is called, and Python handles signals after calls and at jumps only.
"""

import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import signal
import weakref
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxpp.engine.engine import Engine
from jaxpp.engine.tracing import check_key
from jaxpp.errors import ArgumentError, ParamsError, StateError
from jaxpp.errors.checks import check_function
from jaxpp.errors.tracebacks import current_trace, entries, leave
from jaxpp.errors.user_mesh import set_aside
from jaxpp.forward.prompts import Places, Prompts, Rows, Token
from jaxpp.forward.ring import AHEAD, Admitted, CompiledPass, Group, Lasting, Passes, Request, Ring, passes_of, prompts_of
from jaxpp.forward.sampling import NextToken
from jaxpp.lowering.step import Leaves
from jaxpp.observe.memory.forecast import Change, Forecast, forecast_of, parse_bytes, room_of, with_optimizer
from jaxpp.observe.memory.ledger import Ledger
from jaxpp.observe.memory.liveness import Life, Liveness, line_liveness, shapes_of_lines
from jaxpp.observe.profile.profile import Clock, Profile
from jaxpp.observe.profile.record import RingPass, Work, check_profile, join_liveness, join_plans, record, schedule_of
from jaxpp.runtime.bind import Shapes
from jaxpp.runtime.execute import Observer
from jaxpp.runtime.interrupts import Hold
from jaxpp.runtime.progress import progress
from jaxpp.schedule.validate import check_counts
from jaxpp.stages.loss.traced_loss import wrong_leaves
from jaxpp.stages.program import Role
from jaxpp.types import Array, Aval, ForwardFn, Key, Tree

_WAITED = "jaxpp: the generation goes on with its next token: next(generation), or generation.collect()"
_BROKE_OFF = "jaxpp: Ctrl-C, pressed again, broke off the generation; the parameters are as they were"

_Outcome = tuple[NextToken, Rows] | Exception
"""What comes of a pass: tokens on their way to the host, and whose they are; or of a prompt that is refused."""


@entries
class Generation(Iterator[Token], contextlib.AbstractContextManager["Generation"]):
    """The tokens of many sequences, as they are made: an iterator of ``Token``.

    Tokens of different prompts come mixed, those of one prompt in order. ``close()``, the end of a ``with`` block, or letting go of
    it stops the generation and drops the carries. After Ctrl-C it goes on with the next token: Ctrl-C takes effect when the token
    is finished; pressed again a second later, it breaks off the generation, as other signals do whose handlers raise.

    Attributes:
        num_passes: how many passes through the stages were begun.
        observer: for tools: sees every instruction of the passes that are begun from now on.
    """

    def __init__(
        self,
        rings: Sequence[Ring],
        places: Places,
        *,
        shown: bool,
        again: Callable[[], Places] | None = None,
        foresee: Callable[[float | str | None], Forecast] | None = None,
        most_passes: float = math.inf,
    ):
        self.num_passes = 0
        self.observer: Observer | None = None
        self._rings, self._places, self._again, self._foresee = tuple(rings), places, again, foresee
        self._most_passes, self._passes = most_passes, list[RingPass]()
        self._tokens = Generation._run(weakref.proxy(self), self._rings, places, shown)  # no cycle holds the carries
        self._ended = False
        self._made, self._collected = collections.deque[Token | Exception](), list[Token]()

    def __next__(self) -> Token:
        trace = current_trace()
        try:
            if not self._made:
                with set_aside(), Hold(_WAITED, _BROKE_OFF, (signal.SIGINT,)) as hold:
                    hold.begin()
                    self._made.extend(itertools.islice(self._tokens, 1))
            if not self._made and not self._ended:  # it must not look as if it had made all its tokens
                rule, got = "a generation goes on until an exception breaks it off", "one that was broken off before its end"
                raise StateError("next(generation)", rule, got, "call generate again; the parameters are as they were")
            if not self._made:
                self.close()
                raise StopIteration
            token = self._made[0]
            if isinstance(token, Exception):
                del self._made[0]
                raise token
        except BaseException as error:
            leave(error, trace)
            raise
        del self._made[0]
        return token

    def __repr__(self) -> str:
        places = self._places
        prompts = f"{places.num_ended} of {places.num_prompts} prompts" if places.num_prompts else f"{places.num_ended} prompts"
        return f"Generation: {places.num_made} tokens made, {prompts} ended, {self.num_passes} passes through the stages"

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop, and drop the carries of all sequences."""
        under_way = inspect.getgeneratorstate(self._tokens) != inspect.GEN_CLOSED
        self._tokens.close()
        self._ended = self._ended or under_way
        self._made.clear()
        self._rings, self._again = (), None

    def forecast(self, *, hbm: float | str | None = None) -> Forecast:
        """Memory of the generation before it runs, from shapes alone.

        The passes are compiled and not run. With parameters that are shapes, the carry may be shapes and the prompts ``[]``. What
        ``hbm`` is, ``Pipeline.forecast`` says.

        Returns:
            the forecast: what each stage holds at its device's peak (of several replicas, on the devices of the first): parameters,
            what is computed from them alone, carries, messages, tokens, temporaries of the compiled programs, and the optimizer's
            state, which stays where it is.

        Raises:
            JaxppError: as ``generate``; and for an ``hbm`` that is no size.
        """
        assert self._foresee, "whoever generates says how to foresee it"
        return self._foresee(hbm)

    def profile(self, *, num_passes: int = 48, num_runs: int = 3, clock: Clock | None = None) -> Profile:
        """What really ran, when, and why ranks idled: the ring as it runs, under JAX's profiler.

        The same prompts are generated from their beginning a few times; no token of this generation is lost. Copies that put a
        prefilled carry into its group are not among what is timed. Of several replicas, which do the same side by side, one is
        profiled.

        Args:
            num_passes: after how many passes through the stages no further one is begun.
            num_runs: how many such runs to trace.
            clock: as for ``Pipeline.profile``.

        Returns:
            the profile of the most typical of these runs: every pass on every stage, tokens on their way, idle time by cause
            (waiting for a token among them), memory from shapes. ``print`` it; ``profile.figure()`` draws it, a colour for each
            group.

        Raises:
            ArgumentError: counts below 1, an unknown clock, prompts that are an iterator; or another trace is running.
            StateError: the generation has ended.
            BatchError: a prompt is none, or too long.
        """
        check_profile(clock, "generation.profile", num_passes=num_passes, num_runs=num_runs)
        rings, again = self._rings[:1], self._again
        if not rings and not self._ended:
            raise _only_shapes("generation.profile()")
        if not rings:
            rule, fix = "a generation that has ended has let go of what it ran", "make another: pipe.generate(...).profile()"
            raise StateError("generation.profile()", rule, repr(self), fix)
        if again is None:
            rule, fix = "the prompts are generated several times", "pass them as a list: pipe.generate(..., list(prompts), ...)"
            raise ArgumentError("generation.profile()", rule, "prompts in an iterator, which gives each of them once", fix)

        def generate(observer: Observer | None) -> list[RingPass]:
            generation = Generation(rings, again(), shown=False, most_passes=num_passes)
            generation.observer = observer
            collections.deque(generation, maxlen=0)
            return generation._passes

        return record(_RingRuns(rings[0], generate), num_runs, clock)

    def collect(self) -> list[np.ndarray]:
        """The tokens of each prompt, those that were not taken from the iterator yet: int32 arrays, in the order of the prompts.

        If Ctrl-C or a prompt that is refused interrupts it, another call goes on, and gives those too that the first had collected.
        """
        self._collected.extend(self)  # in C: what was made is kept
        tokens: dict[int, list[int]] = collections.defaultdict(list)
        for token in self._collected:
            tokens[token.prompt].append(token.token)
        count = self._places.num_prompts or max(self._places.num_ended, 1 + max(tokens, default=-1))
        arrays = [np.array(tokens[prompt], np.int32) for prompt in range(count)]
        self._collected = []
        return arrays

    def _run(self, rings: Sequence[Ring], places: Places, shown: bool) -> Generator[Token | Exception, None, None]:
        """Begin the passes of the groups in turn, and read what comes of each when as many were begun as may be ahead of it.

        Replicas have a ring each; neighbouring groups are of different replicas.
        """
        if not rings:
            raise _only_shapes("next(generation)")
        groups = [Group() for _ in range(rings[0].num_groups) for _ in rings]
        numbers = range(len(groups))
        turns = [numbers[k :: len(rings)] for k in range(len(rings))] if rings[0].together.at_once else [(k,) for k in numbers]
        ahead = collections.deque[list[_Outcome]]()
        bar = progress(desc="generate", unit=" tokens", total=places.most_tokens, after=1.0) if shown else None
        with contextlib.nullcontext() if bar is None else bar:  # a bar without a total has no truth value
            while True:
                for turn in turns:
                    ahead.append(
                        self._begin(rings[turn[0] % len(rings)], places, groups, turn)
                        if self.num_passes < self._most_passes
                        else []
                    )
                    for outcome in ahead.popleft() if len(ahead) > AHEAD * len(turns) else ():
                        yield from [outcome] if isinstance(outcome, Exception) else _read(*outcome, places, bar)
                if not any(ahead):
                    self._ended = True
                    return

    def _begin(self, ring: Ring, places: Places, groups: Sequence[Group], turn: Sequence[int]) -> list[_Outcome]:
        """Give free places of groups to the next prompts, and begin the next passes of the groups.

        Right after a prompt, a pass would hold up all other groups, unless they run at once.
        """
        outcomes, rows = list[_Outcome](), dict[int, Rows]()
        for number in turn:
            entered = self._fill(ring, places, groups[number], number, outcomes)
            if not entered or ring.together.at_once:
                rows[number] = places.decode(number)
        going = [number for number, its in rows.items() if its]
        for k, drawn in enumerate(ring.turn([groups[number] for number in going], self.observer)):
            outcomes.append((drawn.to_host(), rows[going[k]]))
            self._note(going[k], 1, len(rows[going[k]]), is_prompt=False, beside=k)
        return outcomes

    def _fill(self, ring: Ring, places: Places, group: Group, number: int, outcomes: list[_Outcome]) -> bool:
        """Give free places of a group to the next prompts, and prefill them; returns whether one has entered the group."""
        entered = False
        for part in ring.at_once(_admitted(places, number, ring.group_size)):
            if isinstance(part, Exception):
                outcomes.append(part)
                continue
            if ring.group_size == 1:
                group.carry = None  # of the sequence whose place it takes
            prompts = [prompt for _, prompt in part]
            made = ring.prefill(prompts, self.observer, functools.partial(self._note_prompts, number, len(prompts)))
            for row, prompt in part:
                carry, drawn = made.pop(0)
                if prompt.goes_on:
                    ring.enter(group, row, carry, drawn.token)
                    entered = True
                outcomes.append((drawn.to_host(), ((0, prompt),)))
                del carry  # it is gone when the next prompt is prefilled
        return entered

    def _note_prompts(self, group: int, num_prompts: int, size: int, ends: Sequence[bool]) -> None:
        for k, each in enumerate(ends):
            self._note(group, size, int(each), is_prompt=True, beside=k, num_prompts=num_prompts)

    def _note(self, group: int, num_tokens: int, num_made: int, *, is_prompt: bool, beside: int, num_prompts: int = 0) -> None:
        self.num_passes += 1
        if self._most_passes < math.inf:  # it is profiled
            before = [number for number, begun in enumerate(self._passes) if begun.group == group]
            awaits = -1 if is_prompt else before[-1]
            beside *= any(ring.together.beside for ring in self._rings)  # or it has a plan of its own
            self._passes.append(RingPass(group, len(before), num_tokens, num_made, is_prompt, awaits, beside, num_prompts))


def _admitted(places: Places, group: int, most: int) -> Iterator[Admitted | Exception]:
    """The prompts that get free places of a group; one that is refused, or none, comes out at its place, and others go on."""
    for _ in range(most):
        try:
            admitted = places.admit(group)
        except Exception as error:  # noqa: BLE001  (whatever an iterator of prompts raises)
            yield error
            continue
        if admitted is None:
            return
        yield admitted


def _only_shapes(where: str) -> StateError:
    rule = "a generation of shapes says what it would hold, generation.forecast(), and makes no tokens"
    fix = "pass the arrays: the state or the parameters that init returned, and a carry of arrays"
    return StateError(where, rule, "parameters that are shapes without values", fix)


def _read(drawn: NextToken, rows: Rows, places: Places, bar: tqdm | None) -> tuple[Token | Exception, ...]:
    tokens = places.read(rows, *map(np.asarray, drawn))
    if bar is not None:
        bar.total = places.most_tokens
        bar.update(len(tokens))
    return tokens


def generation(
    request: Request, leaves: Leaves[Array] | None, prompts: Prompts, num_tokens: int | Sequence[int], stop: Tree, *, shown: bool
) -> Generation:
    """The tokens of prompts, as ``Forward.generate`` says; without ``leaves`` (the parameters are shapes) only its forecast."""
    (sizes, room, vocab), limit = prompts_of(request), request.max_length
    if room is not None:
        most = room + 1  # the last token does not enter the carry
        if limit is not None and limit > most:
            rule = "a sequence is at most as long as its carry has room for"
            got = f"a carry with room for {room} tokens, and one more"
            fix = "leave max_length out, and the carry says it; or make a carry with more room"
            raise ArgumentError(f"{request.where}(..., max_length={limit})", rule, got, fix)
        limit = most if limit is None else limit
    request = request._replace(max_length=limit)
    size = {"num_groups": request.num_groups * len(request.engine.replicas), "group_size": request.group_size}
    make = functools.partial(Places, num_tokens=num_tokens, stop=stop, where=request.where, **size)
    places_of = functools.partial(make, prompts, sizes=sizes, vocab=vocab, max_length=limit)
    places = make(iter(prompts)) if leaves is None else places_of()
    num_kept = 1 + places.repeats
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), request.carry)
    key = jax.ShapeDtypeStruct(request.key.shape, request.key.dtype)
    foresee = functools.partial(_forecast, request._replace(carry=shapes, key=key), num_kept)
    if leaves is None:
        return Generation((), places, shown=False, foresee=foresee)
    rings, prefix = list[Ring](), list[Array]()  # one of each replica; and what they hand on to one another
    try:
        for engine in request.engine.replicas:
            held, own = leaves if engine is request.engine else engine.at_replica(leaves), request._replace(engine=engine)
            rings.append(Ring(*passes_of(own, Lasting(held)), own, num_kept, prefix))
    except Exception as error:
        lengths = {leaf.shape[0] for leaf in jax.tree.leaves(request.carry) if leaf.shape}
        if len(lengths) == 1 and (length := lengths.pop()) > 1:
            each = f"tokens [1, length]; each array of the carry is {length} long along its first axis"
            error.add_note(f"jaxpp: {request.where} calls fn with {each}: if these are sequences, make the carry for one")
        raise
    if len(rings) > 1 and rings[0].communicates:
        rule = "a replica continues its own sequences, whatever the others do"
        got = 'collectives between replicas, such as jax.lax.pmean(x, "data")'
        raise ArgumentError(f"{request.where}(..., fn, ...)", rule, got, "pass a function without them, as for one device")
    again = None if isinstance(prompts, Iterator) else places_of
    return Generation(rings, places, shown=shown, again=again, foresee=foresee)


def check_asked(where: str, engine: Engine, fn: ForwardFn, carry: Tree, counts: Mapping[str, int | None], *, shapes: bool) -> None:
    """Refuse what cannot be generated with: a carry of shapes unless parameters are ``shapes``, and what is not done yet."""
    check_function(f"{where}(..., fn, ...)", "fn is a function of (params, carry, tokens) that returns (new_carry, logits)", fn)
    check_counts(f"{where}(...)", counts, ArgumentError)
    leaves = jax.tree_util.tree_leaves_with_path(carry)
    rule = "the carry is a tree of arrays, as the model makes it for one sequence that has had no token"
    fix = "make the shapes arrays, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), and numbers too"
    if wrong := wrong_leaves("carry", leaves, fix):
        raise ParamsError("carry", rule, wrong.lines, wrong.fix)
    empty = [path for path, leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    if empty and not shapes:
        raise ParamsError("carry", rule, [f"carry{jax.tree_util.keystr(path)}: ShapeDtypeStruct" for path in empty], fix)
    if engine.options.has_state and engine.options.is_loss:
        rule = "a generation has one carry, and the pipeline's loss has a model state besides"
        raise ArgumentError(where, rule, "has_state=True", "close over the model state: lambda params, carry, tokens: ...")
    if not engine.alone:
        rule = "one process reads the tokens and decides what runs next"
        raise ArgumentError(where, rule, "devices of several processes", "make a jaxpp.Forward over the devices of one process")


def one_key(key: Key | None) -> Key:
    """The key, as ``jax.random.key`` makes it; refuses what is no key, or several."""
    check_key(key)
    key = jax.random.key(0) if key is None else key
    return key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)


def _forecast(request: Request, num_kept: int, hbm: float | str | None) -> Forecast:
    """The memory of a generation from shapes alone: what stays is counted once, and one pass at a time comes on top of it."""
    several, num_groups, group_size = request.engine, request.num_groups, request.group_size
    base = several.replicas[0]  # the others hold as much
    request = request._replace(engine=base)
    room = room_of(base, base.options.hbm if hbm is None else parse_bytes(hbm))
    read = Leaves(base.placed.shapes.params, base.placed.shapes.own_params)
    shapes = read.fill([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in read.flat()])
    alone, together = passes_of(request, Lasting(shapes, computes=False))
    sizes, _, _ = prompts_of(request)

    def with_groups(count: int) -> Forecast:
        waiting = count - (group_size == 1)  # the place of one sequence is empty when the next is prefilled
        num_prompts = alone.most_prompts(group_size)
        at_once, turn = (num_prompts, count) if alone.beside else (1, 1)
        others = num_prompts - at_once
        kinds = [_PassKind(f"{size} of a prompt", alone, _prompt_aval(size), waiting, at_once, others) for size in sizes]
        kinds.append(_PassKind("a group", together, _group_aval(group_size), count - turn, turn, 0))
        liveness = _ring_liveness(kinds, alone, together, AHEAD * count, num_kept)
        return forecast_of(liveness if base.optimizer is None else with_optimizer(base, liveness), base.placement, room)

    forecast, num_ranks = with_groups(num_groups), base.options.schedule.num_ranks
    changes: list[Change] = []
    for count in () if forecast.fits else range(num_groups - 1, 0, -1):
        fewer = with_groups(count)
        if fewer.fits:
            slowdown = (max(count, num_ranks) / count) / (max(num_groups, num_ranks) / num_groups)
            changes.append(Change(f"num_groups={count}", max(fewer.peaks.values()), slowdown))
            break
    tried = "fewer groups; smaller groups and shorter carries hold less, too"
    return dataclasses.replace(forecast, changes=tuple(changes), tried=tried)


class _RingRuns(Work):
    def __init__(self, ring: Ring, generate: Callable[[Observer | None], Sequence[RingPass]]):
        self.engine, self._ring, self._generate = ring.alone.engine, ring, generate
        self.passes = generate(None)
        awaits = {number: begun.awaits for number, begun in enumerate(self.passes) if begun.awaits >= 0}
        kinds = self._kinds()
        compiled = [kind.passes.prepare(kind.batch, kind.num_beside) for kind in kinds]
        parts = [(each.plan, each.bound, kind.num_beside) for each, kind in zip(compiled, kinds, strict=True)]
        self.plan = join_plans(parts, awaits)
        self.schedule = schedule_of(self.plan, self.engine.options.schedule.stage_to_rank, "ring")

    def run(self, observer: Observer | None = None, *, watched: bool = False) -> Tree:
        del watched
        self._generate(observer)
        return ()

    def watched_plan(self) -> None:
        """The passes are compiled for a generation, which asks none of them whether it is done."""

    def ledger(self) -> Ledger:
        ring = self._ring
        num_unread = AHEAD * ring.num_groups
        return Ledger(_ring_liveness(self._kinds(), ring.alone, ring.together, num_unread, ring.num_kept), (), {})

    def _kinds(self) -> list["_PassKind"]:
        ring, kinds, holding = self._ring, list[_PassKind](), set[int]()
        for number, begun in enumerate(self.passes):
            if begun.beside:
                continue
            behind = itertools.takewhile(lambda each: each.beside, self.passes[number + 1 :])
            groups = [begun.group, *(each.group for each in behind)]
            beside = begun.is_prompt and ring.group_size > 1  # it runs on a carry beside that of its group
            waiting = len(holding if beside else holding - set(groups))
            passes, batch, others = ring.together, _group_aval(ring.group_size), 0
            if begun.is_prompt:
                passes, batch, others = ring.alone, _prompt_aval(begun.num_tokens), begun.num_prompts - len(groups)
            kinds.append(_PassKind(f"group {begun.group}", passes, batch, waiting, len(groups), others))
            holding.update(groups)
        return kinds


class _PassKind(NamedTuple):
    """A kind of pass: what it is called, which passes run it, and on what."""

    what: str
    passes: Passes
    batch: Aval
    waiting: int  # how many carries of groups wait meanwhile
    num_beside: int  # how many run side by side
    others: int  # how many carries of other prompts wait that are prefilled at once with it


def _prompt_aval(size: int) -> Aval:
    return jax.ShapeDtypeStruct((1, size), np.int32)


def _group_aval(group_size: int) -> Aval:
    return jax.ShapeDtypeStruct((group_size, 1, 1) if group_size > 1 else (1, 1), np.int32)


def _ring_liveness(kinds: Sequence[_PassKind], alone: Passes, together: Passes, num_unread: int, num_kept: int) -> Liveness:
    """What is alive while passes run one after another, and so many have tokens still to be read, as the last of a group.

    Beside the carries of groups, ``num_kept`` are kept: the empty one, and that of a prompt that comes again.
    """
    parts: list[Liveness] = []
    stay: dict[Hashable, Life] = {}
    by_pass: dict[int, Liveness] = {}
    for kind in kinds:
        compiled = kind.passes.prepare(kind.batch, kind.num_beside)
        if id(compiled) not in by_pass:
            shapes, programs = _shapes_of(kind.passes, compiled, kind.num_beside), kind.passes.engine.programs
            by_pass[id(compiled)] = line_liveness(compiled.bound, shapes, None, programs)
        part = by_pass[id(compiled)]
        count = len(part.lines)
        shared = {name: id(value) for name, value in zip(compiled.bound.inputs, compiled.lasting, strict=False)}
        waiting = (*_carries(together, kind.waiting), *_carries(alone, kind.others))
        lives = [life._replace(begins=1, ends=count, donated=True) for life in waiting]
        for life in part.lives:
            is_carry = life.name.ref.role == Role.STATE
            if life.name in shared:
                stay[shared[life.name]] = life
            elif life.begins == 0 and life.ends > count and not is_carry:
                stay[id(compiled), life.name] = life  # a constant of this pass
            else:
                begins, ends = max(life.begins, 1), min(life.ends, count)
                donated = life.donated or (life.ends > count and is_carry)
                lives.append(life._replace(kind="carries" if is_carry else life.kind, begins=begins, ends=ends, donated=donated))
        lines = tuple(dataclasses.replace(line, label=f"{line.label}, {kind.what}") for line in part.lines)
        parts.append(dataclasses.replace(part, lines=lines, lives=tuple(lives)))
    whole = join_liveness(parts)
    last = [kind for kind in kinds if kind.passes is together][-1:] or kinds[-1:]  # a run that is broken off may have prompts only
    tokens = _tokens(last[0].passes, last[0].passes.prepare(last[0].batch), num_unread)
    end, kept = len(whole.lines) + 1, (*stay.values(), *_carries(alone, num_kept), *tokens)
    lasting = [life._replace(begins=0, ends=end) for life in kept]
    hosted = [life._replace(begins=0, ends=end) for life in next(iter(by_pass.values())).hosted]  # parameters, of all passes alike
    return dataclasses.replace(whole, lives=(*whole.lives, *lasting), hosted=tuple(hosted))


def _shapes_of(passes: Passes, compiled: CompiledPass, count: int) -> Shapes:
    """The shapes of the values of so many passes side by side."""
    avals = [*compiled.lasting, *[*passes.engine.placed.shapes.model_state] * count, *[*compiled.step.batch] * count]
    return shapes_of_lines(passes.engine, compiled.bound, dict(zip(compiled.bound.inputs, avals, strict=True)))


def _carries(passes: Passes, count: int) -> Iterator[Life]:
    placed, placement = passes.engine.placed, passes.engine.placement
    for name, aval in zip(placed.names.model_state, placed.shapes.model_state, strict=True):
        place = placement[name.stage]
        yield from [Life(name, place.shown, place.num_bytes(name.ref, aval), "carries", 0, 0)] * count


def _tokens(passes: Passes, compiled: CompiledPass, count: int) -> Iterator[Life]:
    shapes, place_of = _shapes_of(passes, compiled, 1), passes.engine.placement
    made = {name for line in compiled.bound.lines if line.program is not None for name in line.outputs}
    for name in compiled.bound.outputs:
        if name.ref.role != Role.STATE and name in made:
            yield from [Life(name, place_of[name.stage].shown, shapes.num_bytes(name), "outputs", 0, 0)] * count
