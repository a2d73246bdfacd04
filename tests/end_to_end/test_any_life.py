"""A random life of a pipeline under any options: after each event its state is that of the plain loop after as many steps.

A case of ``test_any_options.py`` is trained by a sequence of events, drawn from its number too: steps that are interrupted, that
fail, that other threads look at; states that are pickled, saved, opened in other pipelines; pipelines that are deleted. A step has
happened or has not. Nothing hangs, and nothing that was let go stays in memory. A failing life is made as short as it can be, and
printed as a line that runs it again.
"""

import collections
import contextlib
import copy
import dataclasses
import gc
import os
import pathlib
import pickle
import signal
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxpp
from jaxpp.engine import engine as engines
from jaxpp.errors import JaxppError, StateError
from jaxpp.schedule import SCHEDULES
from tests.end_to_end.test_any_options import (
    OPTIONS,
    VERBS,
    Case,
    Given,
    Outcome,
    Plain,
    Refused,
    Rng,
    Stand,
    Trained,
    WrongError,
    batch_of,
    configured,
    differing,
    drawn,
    key_of,
    kind_of,
    limited,
    model_of,
    noise_of,
    numbers,
    precision_of,
    tasks_of,
)

EVENTS = 12
WIDE = {"replicas", "mesh", "renamed mesh", "wide"}
"""Options that give a rank several devices: where one of them raises in a callback, the others wait, and the process ends."""
SECONDS = 120  # in which a life is over, or it hangs
Event = tuple[str, int]  # what happens, and the seed of how


@dataclasses.dataclass(frozen=True)
class Life:
    """A case, and what happens to it."""

    case: Case
    events: tuple[Event, ...]

    def __str__(self) -> str:
        case = f"Case({self.case.seed}, {self.case.given!r}{f', {self.case.without!r}' if self.case.without else ''})"
        run = f"from tests.end_to_end.test_any_life import *; check(Life({case}, {self.events!r}))"
        return f"JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 python -c {run!r}"


def lived(seed: int) -> Life:
    """The life of a seed."""
    rng, case = np.random.default_rng((seed, 4)), drawn(seed)
    given = {name: value for name, value in case.given.items() if name not in VERBS}
    given |= {"watched": True} if rng.random() < 0.2 and not WIDE & set(given) else {}
    weights = np.asarray(list(LIKELY.values()), "float64")
    names = rng.choice(list(LIKELY), EVENTS, p=weights / weights.sum())
    events = tuple((str(name), int(rng.integers(1 << 30))) for name in names)
    return Life(dataclasses.replace(case, given=given), (("step", 0), *events, ("step", 1)))


# --- what the loop makes ---


def with_nan(batch: Any) -> Any:
    """The batch with one number that is none."""
    parts = [{**part, "x": np.where(np.arange(part["x"].size).reshape(part["x"].shape) == 1, np.nan, part["x"])} for part in (
        batch if isinstance(batch, jaxpp.Microbatches) else [batch]
    )]  # fmt: skip
    return jaxpp.Microbatches(parts, batch.weights) if isinstance(batch, jaxpp.Microbatches) else parts[0]


class Turn(NamedTuple):
    """A step that was taken: its number, whether its gradients are of the newest parameters, whether its loss scale skipped it."""

    number: int
    fresh: bool
    skipped: bool


class Loop:
    """The plain loop beside a pipeline, and where it stood after each step."""

    def __init__(self, case: Case, *, counts: bool):
        self.plain = Plain(dataclasses.replace(case, given=case.given | {"delay": 1}), model_of(case), counts=counts)
        self.turns, self.stands, self.last = list[Turn](), [self.plain.begun()], Given()
        self.fresh = False  # whether the state has no parameters before the last step, for it comes from a pipeline without delay

    def turn(self, at: Stand, turn: Turn) -> tuple[Stand, Given]:
        if turn.skipped:
            return dataclasses.replace(at, before=at.params, scale=at.scale / 2, fine=0), {}
        return self.plain.stepped(dataclasses.replace(at, before=at.params) if turn.fresh else at, turn.number)

    def step(self, *, delay: bool, skipped: bool) -> None:
        turn = Turn(len(self.turns), not delay or self.fresh, skipped)
        at, self.last = self.turn(self.stands[-1], turn)
        self.fresh = False
        self.turns.append(turn)
        self.stands.append(at)

    def again(self, shake: float, seed: int, steps: int | None = None) -> tuple[Stand, Given]:
        """Where the loop stands after so many steps from parameters that differ in their last digits."""
        at, last = self.plain.begun(shake, seed), Given()
        for turn in self.turns[:steps]:
            at, last = self.turn(at, turn)
        return at, last


# --- what happens ---


class Strike:
    """Called in the middle of the work: the first call does something."""

    def __init__(self, what: Callable[[], object]):
        self.what, self.done = what, False

    def __call__(self) -> None:
        if not self.done:
            self.done = True
            self.what()


@contextlib.contextmanager
def at_an_instruction(rng: Rng, strike: Callable[[], None]) -> Iterator[None]:
    """Plans that call something before one of their instructions."""
    made = engines.Engine.plan

    def plan(self: Any, *args: Any, **kwargs: Any) -> Any:
        found, lowered = made(self, *args, **kwargs)
        number = int(rng.integers(len(found.instructions)))
        call = found.instructions[number].call

        def struck(*given: Any) -> Any:
            strike()
            return call(*given)

        lines = [each._replace(call=struck) if k == number else each for k, each in enumerate(found.instructions)]
        return dataclasses.replace(found, instructions=tuple(lines)), lowered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines.Engine, "plan", plan)
        yield


@contextlib.contextmanager
def after_a_while(seconds: float, strike: Callable[[], None]) -> Iterator[None]:
    """Something is called when this process has worked for so long."""
    before = signal.signal(signal.SIGPROF, lambda *_: strike())
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def press() -> None:
    """Ctrl-C."""
    signal.raise_signal(signal.SIGINT)


class Broken:
    """A callback of the loss that raises when it is told to."""

    def __init__(self) -> None:
        self.left: int | None = None

    def __call__(self, value: Any) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise LookupError("the callback raises")


def is_gone(error: BaseException) -> bool:
    """Whether an error says that a step has consumed what was read."""
    return isinstance(error, StateError) or any(word in str(error) for word in ("deleted", "donated"))


def host(tree: Any) -> list[np.ndarray]:
    """The numbers of a tree, in memory of their own."""
    return [np.array(leaf) for leaf in numbers(tree)]


class Living:
    """A case as it lives; each event is a method of that name."""

    def __init__(self, case: Case):
        self.case, self.model, self.broken = case, model_of(case), Broken()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            self.trained = self.opened(case)
        self.state = self.trained.first
        self.trained.first = None
        counts = not any("finds no count" in str(warning.message) for warning in told)
        self.loop = Loop(case, counts=counts)
        self.digits, self.eps = precision_of(self.model)
        self.said = collections.Counter[str]()
        self.seconds = 0.01  # that a step has taken
        self.more = 0  # steps beyond the loop's

    def opened(self, case: Case, begin: str = "init") -> Trained:
        return Trained(case, self.model, self.broken if case.get("watched") else None, begin=begin)

    # what a notebook has

    @property
    def number(self) -> int:
        """The number of the next step."""
        return len(self.loop.turns) + self.more

    @property
    def pipe(self) -> Any:
        return self.trained.pipes[kind_of(self.case, self.number)]

    @property
    def args(self) -> tuple[Any, ...]:
        batch, key = batch_of(self.case, self.number), key_of(self.case, self.number)
        return (batch,) if key is None else (batch, key)

    @property
    def task(self) -> Given:
        return self.trained.task(self.number)

    @property
    def delay(self) -> bool:
        return bool(self.case.get("delay"))

    def took(self, state: Any, metrics: Any = None, *, skipped: bool = False) -> None:
        """A step has been taken."""
        self.state = state
        self.loop.step(delay=self.delay, skipped=skipped)
        if metrics is not None and not skipped:
            self.same({"loss": metrics.loss}, lambda _, last: {"loss": last["loss"]})

    def same(self, found: Given, read: Callable[[Stand, Given], Given], steps: int | None = None) -> None:
        """Raise if what was found differs, by more than rounding does, from what is read of the loop after so many steps."""
        wanted = read(self.loop.stands[-1 if steps is None else steps], self.loop.last)
        if not differing(found, wanted, digits=self.digits):
            return
        noise = noise_of(lambda shake, seed: read(*self.loop.again(shake, seed, steps)), wanted, self.eps)
        if lines := differing(found, wanted, noise, self.digits):
            raise WrongError("\n  ".join(["", *lines[:8], f"{len(lines)} leaves differ"]))

    def holds(self) -> None:
        """The state is that of the loop."""
        if self.state.step != self.number:
            raise WrongError(f"the state is after {self.state.step!r} steps, and the loop after {self.number}")
        without = {"previous": None} if self.loop.fresh else {}  # which such a state has not
        self.same(self.trained.named(self.state) | without, lambda at, _: at.named(self.case) | without)

    def settled(self) -> None:
        """After a step that may have been taken or not: the state of the pipeline is that before it or after it."""
        try:
            found = self.trained.pipes["loss"].state
        except StateError:  # no step of this pipeline has begun with a state that came from elsewhere: it is as it was
            found = self.state
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(found.held) if isinstance(leaf, jax.Array)):
                raise
        if found.step == self.number:
            self.state = found
            self.said["before"] += 1
        elif found.step == self.number + 1:
            self.took(found)
            self.said["after"] += 1
        else:
            raise WrongError(f"a state after {found.step} steps, and the loop is after {self.number}")

    # steps

    def step(self, rng: Rng, **options: Any) -> None:
        began = time.process_time()
        state, metrics = self.pipe.step(self.state, *self.args, **self.task, **options)
        self.seconds = time.process_time() - began
        self.took(state, metrics)

    def kept(self, rng: Rng) -> None:
        """A step that leaves the state before it as it is."""
        old, before = self.state, host(self.state)
        self.step(rng, donate=False)
        if differing({"old": host(old)}, {"old": before}):
            raise WrongError("donate=False has changed the state that it keeps")

    def interrupted(self, rng: Rng) -> None:
        """Ctrl-C at a moment of a step, or before one of its instructions."""
        strike = Strike(press)
        within = (
            at_an_instruction(rng, strike) if rng.random() < 0.5 else after_a_while(rng.uniform(1e-4, 1.2 * self.seconds), strike)
        )
        try:
            with within:
                state, metrics = self.pipe.step(self.state, *self.args, **self.task)
                strike.done = True  # too late
            self.took(state, metrics)
            self.said["late"] += 1
        except (KeyboardInterrupt, jax.errors.JaxRuntimeError) as error:
            strike.done = True
            self.is_pressed(error)
            self.settled()

    def is_pressed(self, error: BaseException) -> None:
        """Raise an error that is not Ctrl-C; what comes while a callback of the loss runs, JAX makes an error of its own."""
        if not isinstance(error, KeyboardInterrupt) and "KeyboardInterrupt" not in str(error):
            raise error

    def interrupted_look(self, rng: Rng) -> None:
        """Ctrl-C while the state is evaluated or verified, or pickled."""
        strike = Strike(press)
        pipe, what = self.trained.pipes["loss"], rng.integers(3)
        try:
            with after_a_while(rng.uniform(1e-4, 2 * self.seconds), strike):
                if what == 0:
                    pipe.evaluate(self.state, *self.args, **self.task)
                elif what == 1:
                    pipe.verify(self.state, *self.args, **self.task)
                else:
                    pickle.dumps(self.state)
                strike.done = True
        except (KeyboardInterrupt, jax.errors.JaxRuntimeError) as error:
            strike.done = True
            self.is_pressed(error)
            self.said["look broken off"] += 1

    def fault(self, rng: Rng) -> None:
        """An instruction fails: the state is as it was, or consumed, and the error says so."""

        def fail() -> None:
            raise RuntimeError("a device fails")

        saved = pickle.dumps(self.state)
        sets = self.saved_sets()
        strike = Strike(fail)
        try:
            with at_an_instruction(rng, strike):
                state, metrics = self.pipe.step(self.state, *self.args, **self.task)
                str(state), str(metrics)  # with delay the rest of the step is handed over
        except RuntimeError as error:
            if "a device fails" not in str(error):
                raise
            lost = any("part of the state is consumed" in note for note in getattr(error, "__notes__", ()))
        else:
            raise WrongError("an instruction has failed, and nobody was told")
        if lost:
            self.said["lost"] += 1
            try:
                found = self.trained.pipes["loss"].state
                str(found)
            except StateError:
                pass
            else:
                raise WrongError(f"a state that was consumed is there: {found!r}")
            del self.trained.pipes["loss"].state
            self.state = pickle.loads(saved)  # noqa: S301  (our own)
            if differing({"sets": self.saved_sets()}, {"sets": sets}):
                raise WrongError("a step that has failed has changed a set of the bank")
        else:
            self.settled()

    def bad_batch(self, rng: Rng) -> None:
        """A step that its batch, its key or its task does not allow."""
        batch, *key = self.args
        parts = batch if isinstance(batch, jaxpp.Microbatches) else [batch]
        wrong: list[Any] = [
            ([{**part, "tokens": part["tokens"][1:]} for part in parts], key, self.task),
            ([{**part, "tokens": part["tokens"] * 0.5} for part in parts], key, self.task),
            ([{name: leaf for name, leaf in part.items() if name != "tokens"} for part in parts], key, self.task),
            ([{name: leaf[:0] if np.ndim(leaf) > 1 else leaf for name, leaf in part.items()} for part in parts], key, self.task),
            (parts, [] if key else [jax.random.key(0)], self.task),
            (parts, key, {} if self.task else {"task": "nobody"}),
            (parts, key, {"task": "nobody"}),
        ]
        parts, key, task = wrong[rng.integers(len(wrong))]
        try:
            batch = jaxpp.Microbatches(parts) if isinstance(batch, jaxpp.Microbatches) else parts[0]
            self.pipe.step(self.state, batch, *key, **task)
        except (JaxppError, TypeError, ValueError, IndexError, AttributeError, KeyError) as error:
            self.said[f"bad: {type(error).__name__}"] += 1
        else:
            raise WrongError("a step of a batch that cannot be")
        self.unchanged()

    def nan(self, rng: Rng) -> None:
        """A batch with a NaN: with a loss scale the step is skipped; with ``jax_debug_nans`` it raises."""
        batch, *key = self.args
        batch, at = with_nan(batch), self.loop.stands[-1]
        before = at.before if self.delay and not self.loop.fresh else at.params
        found = self.loop.plain.gradients(kind_of(self.case, self.number), before, at.owns, at.states, self.number, batch=batch)
        if all(np.isfinite(leaf).all() for leaf in numbers((found["grads"], found["own"]))):
            return  # the model does not read it
        if self.case.get("loss_scale"):
            state, metrics = self.pipe.step(self.state, batch, *key, **self.task)
            self.took(state, skipped=True)
            if bool(metrics.finite):
                raise WrongError("a step of NaN is said to be finite")
            return
        with jax.debug_nans(True), pytest.raises(FloatingPointError):
            self.pipe.step(self.state, batch, *key, **self.task, donate=bool(rng.integers(2)))
        self.unchanged()

    def unchanged(self) -> None:
        """What was refused, or has raised, is not counted."""
        before = self.number
        self.settled()
        if self.number != before:
            raise WrongError("a step that has raised was taken")

    def callback(self, rng: Rng) -> None:
        """A callback of the loss raises at one of the microbatches."""
        if not self.case.get("watched"):
            return
        self.broken.left = int(rng.integers(self.case.get("microbatches")))
        try:
            self.pipe.step(self.state, *self.args, **self.task)
        except jax.errors.JaxRuntimeError as error:
            if "the callback raises" not in str(error):
                raise
        else:
            raise WrongError("a callback has raised, and nobody was told")
        finally:
            self.broken.left = None
        self.unchanged()

    # other threads

    def looked_at(self, rng: Rng) -> None:
        """Another thread reads the newest state while steps run, or steps run in another thread while this one reads it."""
        stop, seen, errors = threading.Event(), list[tuple[int, Given]](), list[BaseException]()
        told = list[Any]()

        def steps() -> None:
            try:
                for _ in range(2):
                    state, metrics = self.pipe.step(self.state, *self.args, **self.task)
                    told.append(metrics)
                    self.took(state, metrics)
            except Exception as error:  # noqa: BLE001  (raised below)
                errors.append(error)
            finally:
                stop.set()

        def look() -> None:
            while not stop.is_set():
                try:
                    seen.append(self.look())
                    str(told[-1:])
                except (StateError, RuntimeError, ValueError) as error:
                    if not is_gone(error):
                        errors.append(error)
                        return
                time.sleep(1e-4)

        beside, here = (look, steps) if rng.integers(2) else (steps, look)
        thread = threading.Thread(target=beside)
        thread.start()
        here()
        thread.join()
        if errors:
            raise errors[0]
        self.said["looks"] += len(seen)
        for step, found in seen:
            self.same(found, lambda at, _: {"params": at.params, "opt_state": at.opt_state}, step)

    def look(self) -> tuple[int, Given]:
        """The newest state, as another thread sees it."""
        state = self.trained.pipes["loss"].state
        return state.step, {"params": host(state.params), "opt_state": host(state.opt_state)}

    # what is read of a state

    def evaluated(self, rng: Rng) -> None:
        plain, number, args = self.loop.plain, self.number, (*self.args,)
        found = self.trained.pipes["loss"].evaluate(self.state, *args, **self.task).loss
        self.same({"loss": found}, lambda at, _: {"loss": plain.gradients("loss", at.params, at.owns, at.states, number)["loss"]})

    def streamed(self, rng: Rng) -> None:
        """Outputs of some batches; their iterator may raise."""
        batch, *key = self.args
        fails = rng.integers(2)

        def batches() -> Iterator[Any]:
            yield batch
            yield batch
            if fails:
                raise LookupError("no more")

        alone = {"reduce_aux": "join"} | ({"task": tasks_of(self.case, self.number)[0]} if self.task else {})
        outputs = self.trained.pipes["loss"].stream(self.state, batches(), self.trained.fn, *key, **alone)
        with pytest.raises(LookupError, match="no more") if fails else contextlib.nullcontext():
            for _ in outputs:
                pass

    def verified(self, rng: Rng) -> None:
        for pipe in self.trained.pipes.values():
            pipe.verify(self.state, *self.args, **self.task)

    def printed(self, rng: Rng) -> None:
        if not all(map(str, (self.state, self.pipe, self.pipe.stages, self.trained.bank))):
            raise WrongError("nothing to print")

    # states and pipelines that come and go

    def pickled(self, rng: Rng) -> None:
        self.state = pickle.loads(pickle.dumps(self.state))  # noqa: S301  (our own)

    def copied(self, rng: Rng) -> None:
        old, self.state = self.state, copy.deepcopy(self.state)
        if rng.integers(2):
            self.pipe.step(old, *self.args, **self.task) if not self.task else None

    def dropped(self, rng: Rng) -> None:
        """The pipeline does not keep the state."""
        del self.trained.pipes["loss"].state

    def forgotten(self, rng: Rng) -> None:
        """What JAX and jaxpp have compiled."""
        jax.clear_caches()

    def rebuilt(self, rng: Rng) -> None:
        """The pipeline is deleted, and made anew, before the state comes to it."""
        self.moved(self.case, rng)

    def handed_over(self, rng: Rng) -> None:
        """The state comes to another pipeline as it is."""
        self.moved(self.changed(rng), rng)

    def saved(self, rng: Rng) -> None:
        """The state is saved, and opened in the same pipeline or another."""
        self.moved(self.changed(rng) if rng.integers(3) else self.case, rng, saves=True)

    def changed(self, rng: Rng) -> Case:
        """The case with other options, of those that leave the results as they are."""
        given = dict(self.case.given)
        order, names = ("schedule", "ranks", "per_rank", "cuts"), ["order", "remat", "fuse", "host", "delay", "threads", "balance"]
        names += [] if self.case.get("watched") else ["where", "shard"]
        for name in rng.permutation(names)[: rng.integers(1, 4)]:
            if name == "order":
                able = [
                    (each, ranks)
                    for each, recipe in SCHEDULES.items()
                    for ranks in (1, 2, 3)
                    if recipe.allows(ranks, self.case.get("microbatches"))
                ]
                schedule, ranks = able[rng.integers(len(able))]
                given = {each: value for each, value in given.items() if each not in order}
                given |= {"schedule": schedule, "ranks": ranks, "per_rank": int(rng.integers(1, 4))}
            elif name == "where":
                given = {each: value for each, value in given.items() if each not in WIDE}
                forms = [{"replicas": 2}, {"mesh": (2, 1)}, {"mesh": (2, 2)}, {"renamed mesh": (2, 2)}]
                forms = (
                    forms if self.case.replicas > 1 else [{}, {"mesh": (1, 2)}, {"renamed mesh": (1, 2)}, {"wide": 0}, {"wide": 1}]
                )
                given |= forms[rng.integers(len(forms))]
            elif name in given and rng.integers(2):
                del given[name]
            else:
                given[str(name)] = OPTIONS[str(name)](rng)
        if given.get("balance") == "time" and self.case.get("balance") != "time":
            del given["balance"]  # which takes long
        return dataclasses.replace(self.case, given=given)

    def moved(self, case: Case, rng: Rng, *, saves: bool = False) -> None:
        """Go on in another pipeline; the old one is deleted before that is made, or after, or stays if that is refused."""
        before, late = self.case, bool(self.case.get("delay"))
        early = case is before and bool(rng.integers(2))  # it will not be refused
        way = str(rng.choice(["orbax", "pickle"])) if saves else ""
        begin = str(rng.choice(["init", "abstract_state"]))
        with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
            if way == "orbax":
                checkpointer.save(f"{folder}/state", self.state)
                checkpointer.wait_until_finished()
            text, sets = pickle.dumps(self.state if way == "pickle" else None), self.saved_sets(folder if way == "orbax" else "")
            if early:
                del self.trained
            try:
                new = self.opened(case, begin)
            except Refused as error:
                if early:
                    raise WrongError(f"what was taken is refused now: {error}") from error
                self.said["refused elsewhere"] += 1
                return
            pipe, first = new.pipes["loss"], (new.params[0], self.model.model_state) if case.get("state") else new.params[0]
            target, new.first = new.first if begin == "abstract_state" else pipe.abstract_state(first, batch_of(case, 0)), None
            if way == "orbax":
                if begin == "init":
                    del pipe.state  # to make room
                self.state = checkpointer.restore(f"{folder}/state", as_saved(target, late=late))
            elif way == "pickle":
                self.state = pickle.loads(text)  # noqa: S301  (our own)
            self.trained, self.case = new, case
            self.set_back(sets, folder)
        self.loop.fresh = (self.loop.fresh and bool(case.get("delay"))) or (bool(case.get("delay")) and not late)
        self.said["moved"] += 1

    def saved_sets(self, folder: str = "") -> Any:
        """The sets of the bank, or the manifest of what was written."""
        bank = self.trained.bank
        if bank is None or folder:
            return bank and bank.save(f"{folder}/sets")
        copied = lambda tree: jax.tree.map(np.array, tree)  # noqa: E731
        return {task: (copied(bank.params(task)), copied(bank.opt_state(task))) for task in "ab"}

    def set_back(self, saved: Any, folder: str = "") -> None:
        """The sets of the bank as they were."""
        if saved is None:
            return
        bank = self.trained.bank
        if set(saved) == set("ab"):
            for task, (params, opt_state) in saved.items():
                bank.remove(task)
                bank.add(task, params, opt_state)
        else:
            bank.restore(f"{folder}/sets", saved)

    # what stays in memory

    def held(self) -> list[weakref.ref[Any]]:
        return [weakref.ref(leaf) for leaf in jax.tree.leaves(self.state.held) if isinstance(leaf, jax.Array)]

    def lets_go(self, refs: list[weakref.ref[Any]]) -> None:
        """Of an earlier state nothing is left that is not of this one, or of the newest one of the pipeline."""
        states = [self.state]
        with contextlib.suppress(StateError):
            states.append(self.trained.pipes["loss"].state)
        kept = {id(leaf) for state in states for leaf in jax.tree.leaves(state.held)}
        left = [leaf for ref in refs if (leaf := ref()) is not None and not leaf.is_deleted() and id(leaf) not in kept]
        if left:
            raise WrongError(f"{len(left)} of {len(refs)} leaves of an earlier state are still there: {[x.shape for x in left]}")

    def cycles(self, rng: Rng) -> None:
        """The same again and again leaves as many bytes as there were."""
        sizes = list[int]()
        for number in range(5):
            for _ in range(2):
                self.state, _ = self.pipe.step(self.state, *self.args, **self.task)
                self.more += 1
            strike = Strike(press)
            strike.done = self.trained.bank is not None  # which decides what a bank keeps on the devices
            with contextlib.suppress(KeyboardInterrupt), at_an_instruction(rng, strike):
                self.pipe.step(self.state, *self.args, **self.task)
                strike.done = True
            self.state = self.trained.pipes["loss"].state
            with contextlib.suppress(Exception):
                self.pipe.step(self.state, None)
            self.trained.pipes["loss"].evaluate(self.state, *self.args, **self.task)
            copy.deepcopy(self.state)
            jax.block_until_ready(self.state)
            if self.trained.bank is not None:
                self.trained.bank.wait()
            gc.collect()
            if number > 1:
                sizes.append(bytes_alive())
        if len(set(sizes)) > 1:
            raise WrongError(f"the bytes of all arrays after each cycle: {sizes}")

    def ends(self) -> None:
        """A state that nobody holds is gone, without a garbage collection."""
        refs = self.held()
        gc.collect()
        gc.disable()
        try:
            self.state = None
            del self.trained.pipes["loss"].state
            left = [leaf.shape for ref in refs if (leaf := ref()) is not None and not leaf.is_deleted()]
        finally:
            gc.enable()
        if left:
            raise WrongError(f"{len(left)} of {len(refs)} leaves stay when the state is deleted: {left}")


def bytes_alive() -> int:
    """The bytes of the buffers of arrays, each counted once; without scalars: the detector of dead stages keeps the last."""
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731  (its words are an array of their own)
    arrays = [leaf for leaf in jax.live_arrays() if leaf.ndim > 0 and leaf.size and not is_key(leaf)]
    shards = [(shard.device, shard.data) for leaf in arrays for shard in leaf.addressable_shards]
    return sum({(device, data.unsafe_buffer_pointer()): data.nbytes for device, data in shards}.values())


def as_saved(target: Any, *, late: bool) -> Any:
    """The target for a state that was saved with ``delay``, or without, as the guide says."""
    scale = getattr(target.loss_scale, "scale", ())
    has = not (isinstance(target.previous, tuple) and not target.previous)
    if has == late:
        return target
    return target.replace(previous=target.params, previous_scale=scale) if late else target.replace(previous=(), previous_scale=())


PLAIN = {"step", "kept", "pickled"}
"""Events without an error, of which a traceback would hold what its frames do until a garbage collection."""
OTHERS = "tqdm", "Dummy"
"""Threads of a bar, and of XLA, that Python has met."""
LIKELY = {
    "step": 5,
    "kept": 0.6,
    "interrupted": 3.5,
    "interrupted_look": 0.7,
    "fault": 1.5,
    "bad_batch": 1,
    "nan": 0.7,
    "callback": 1,
    "looked_at": 1,
    "evaluated": 0.7,
    "streamed": 0.6,
    "verified": 0.3,
    "printed": 0.3,
    "pickled": 0.7,
    "copied": 0.5,
    "dropped": 0.4,
    "forgotten": 0.1,
    "rebuilt": 0.4,
    "handed_over": 0.6,
    "saved": 0.8,
}
"""How often each event occurs."""


def broken_off(case: Case) -> None:
    """Ctrl-C while a pipeline is made and given its first state, of every second case; the same again finds nothing of it."""
    rng, strike = np.random.default_rng((case.seed, 6)), Strike(press)
    if rng.integers(2):
        return
    try:
        with after_a_while(rng.uniform(1e-3, 2.0), strike):
            Trained(case, model_of(case))
            strike.done = True
    except (KeyboardInterrupt, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, KeyboardInterrupt) and "KeyboardInterrupt" not in str(error):
            raise
    gc.collect()


def judged(life: Life) -> str:
    """What became of a life, in words; an exception if it was refused, or is wrong."""
    threads = set(threading.enumerate())
    broken_off(life.case)
    living = Living(life.case)
    refs, since = list[weakref.ref[Any]](), set[str]()
    for number, (name, seed) in enumerate(life.events):
        rng = np.random.default_rng(seed)
        since.add(name)
        try:
            getattr(living, name)(rng)
            if rng.random() < 0.6 or number == len(life.events) - 1:  # otherwise the next event finds a step in flow
                living.holds()
                if not since <= PLAIN:
                    gc.collect()
                living.lets_go(refs)
                refs, since = living.held(), set[str]()
        except BaseException as error:
            error.add_note(
                f"event {number}, {name}, of {[each for each, _ in life.events]}; {dict(living.said)}; {living.case.given}"
            )
            raise
    living.cycles(np.random.default_rng((life.case.seed, 5)))
    living.ends()
    said = dict(living.said)
    del living
    gc.collect()
    for _ in range(100):  # a thread ends a moment after its pipeline
        left = [thread for thread in threading.enumerate() if thread not in threads and not thread.name.startswith(OTHERS)]
        if not left:
            return f"equal: {said}"
        time.sleep(0.02)
    raise WrongError(f"threads that do not end: {left}")


def outcome(life: Life) -> Outcome:
    with configured():
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with limited(SECONDS):
                return Outcome("equal", judged(life))
        except Refused as error:
            return Outcome("refused", str(error))
        except Exception as error:  # noqa: BLE001  (whatever it is, the life is wrong)
            return Outcome("failed", "".join(traceback.format_exception(error))[-5000:], type(error).__name__)
        finally:
            signal.signal(signal.SIGINT, before)


def smallest(life: Life, failed: Outcome, seconds: float = 300) -> Life:
    """The life without the events and options that it fails without, in the same way."""
    end = time.monotonic() + seconds

    def fails(smaller: Life) -> bool:
        found = outcome(smaller)
        return found.status == "failed" and found.kind == failed.kind

    for event in life.events:
        smaller = dataclasses.replace(life, events=tuple(each for each in life.events if each is not event))
        if time.monotonic() < end and fails(smaller):
            life = smaller
    for name in list(life.case.given):
        given = {each: value for each, value in life.case.given.items() if each != name}
        smaller = dataclasses.replace(life, case=dataclasses.replace(life.case, given=given))
        if smaller.case.get(name) == life.case.get(name) or (time.monotonic() < end and fails(smaller)):
            life = smaller
    return life


def check(life: Life) -> str:
    """Judge a life; if it is wrong, an AssertionError with the smallest like it."""
    found = outcome(life)
    if found.status == "failed":
        small = smallest(life, found)
        raise AssertionError(f"{life}\nand smaller\n{small}\n{outcome(small).said}\nat first\n{found.said}")
    return f"{found.status}: {found.said}"


SEEDS = 600


def seeds() -> Iterator[Any]:
    """A sixth of the first is in the long tier."""
    for seed in range(SEEDS):
        yield pytest.param(seed, marks=pytest.mark.long if seed < 60 else pytest.mark.slow)


# Python cannot raise what comes while it runs a finalizer; it prints that and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("seed", list(seeds()))
def test_after_each_event_of_a_random_life_the_state_is_that_of_one_device(seed):
    check(lived(seed))


def resident_mebibytes() -> float:
    """What this process has in memory."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def five_hundred_steps(case: Case) -> list[tuple[int, int, float]]:
    """What is in memory after 300 steps and after 500: the bytes of arrays, the objects of Python, the process."""
    living, sizes = Living(case), []
    for number in range(1, 501):
        living.state, _ = living.pipe.step(living.state, *living.args, **living.task)
        living.more = number % 6
        if number in (300, 500):
            jax.block_until_ready(living.state)
            if living.trained.bank is not None:
                living.trained.bank.wait()
            gc.collect()
            sizes.append((bytes_alive(), len(gc.get_objects()), resident_mebibytes()))
    return sizes


@pytest.mark.skipif(not pathlib.Path("/proc/self/statm").exists(), reason="asks Linux how much memory the process has")
@pytest.mark.long
@pytest.mark.parametrize("seed", range(8000, 8036))
def test_the_last_of_five_hundred_steps_hold_what_those_before_held(seed):
    case = lived(seed).case
    case = dataclasses.replace(case, given={name: value for name, value in case.given.items() if name != "sizes"})  # compiles
    with configured():
        try:
            (arrays, objects, resident), later = five_hundred_steps(case)
        except Refused as error:
            pytest.skip(str(error))
    assert later[0] == arrays
    assert later[1] - objects < 200 and later[2] - resident < 8


def test_every_event_occurs_often():
    counts = collections.Counter(name for seed in range(SEEDS) for name, _ in lived(seed).events)
    assert all(counts[name] > 20 for name in LIKELY)
    assert sum("watched" in lived(seed).case.given for seed in range(SEEDS)) > 30
