"""Compiled programs, each compiled once for each device it runs on, side by side in threads.

A pipeline knows a program by its object, and forgets it with its last plan. Programs that do the same (equal stages on one device,
an update at another batch shape, a pipeline built again) share what is compiled: see ``runtime.compiled_before``.
"""

import hashlib
import os
import re
from collections.abc import Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat
from queue import SimpleQueue
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.stages import Compiled, Lowered

from jaxpp.plan.builder import Constant
from jaxpp.runtime.compiled_before import BEFORE, Executable, settings
from jaxpp.runtime.compiler_options import compile_lowered
from jaxpp.runtime.interrupts import Hold
from jaxpp.runtime.place import Place
from jaxpp.runtime.progress import progress
from jaxpp.runtime.transfer import put, put_at
from jaxpp.stages.program import Program, Ref, Role
from jaxpp.types import Array

__all__ = ["Executable", "PlacedProgram", "Programs"]

Shardings = tuple[Sharding, ...]

_MODULE = re.compile(r"^module @\S+", re.MULTILINE)

_PATIENCE = 2.0
"""Seconds of compiling after which a progress bar is shown."""


class PlacedProgram(NamedTuple):
    """A program, where it runs, and the arguments whose buffers its results take over."""

    program: Program
    place: Place
    donated: tuple[int, ...]

    @property
    def free_inputs(self) -> list[int]:
        """The arguments whose sharding the compiler chose when it made them."""
        return [k for k, ref in enumerate(self.program.inputs) if self.place.is_free(ref)]


class Programs:
    """Compiled programs, each compiled once for each device it runs on.

    Holds one pipeline's programs for as long as its plans do; what a second batch shape needs besides adds to them.
    """

    def __init__(self):
        self._compiled: WeakKeyDictionary[Program, dict[tuple[Place, tuple[int, ...], Shardings], Executable]] = WeakKeyDictionary()
        self._same: WeakValueDictionary[Hashable, Executable] = WeakValueDictionary()
        self._tokened: WeakValueDictionary[int, Program] = WeakValueDictionary()
        self._constants: WeakKeyDictionary[Constant, dict[tuple[Place, Ref], Array]] = WeakKeyDictionary()

    def with_token(self, program: Program) -> Program:
        """The same program with one more result, a byte that is there when the program is done."""
        found = self._tokened.get(id(program))
        if found is None:  # what is found holds the program, so its id is that of no other
            found = self._tokened[id(program)] = replace(
                program,
                function=lambda *args: [*program.function(*args), jnp.zeros((), jnp.int8)],
                outputs=(*program.outputs, Ref(Role.VALUE, shared=True)),
            )
        return found

    def compile(self, jobs: Iterable[PlacedProgram], given: Iterable[Shardings] | None = None, what: str = "") -> None:
        """Compile what is not compiled yet, on as many threads as there are cores, while the next is lowered."""
        fresh: dict[Hashable, tuple[PlacedProgram, Shardings]] = {}
        for job, chosen in zip(jobs, repeat(()) if given is None else given):  # noqa: B905  (one of them is endless)
            program, place, donated = job
            if (place, donated, chosen) not in self._compiled.get(program, ()):
                fresh[program, place, donated, chosen] = job, chosen
        if not fresh:
            return
        BEFORE.follow_jax()
        settled = settings()
        fresh = {key: found for key, found in fresh.items() if not self._found_before(*found, settled)}
        if not fresh:
            return
        pool, ready = ThreadPoolExecutor(os.cpu_count()), SimpleQueue[Future[Compiled]]()
        waiting: dict[Future[Compiled], tuple[tuple[Hashable, ...], Shardings]] = {}
        wanted: dict[tuple[Hashable, ...], list[PlacedProgram]] = {}
        try:
            with progress(total=len(fresh), desc=f"compiling {what}".strip(), unit="program", after=_PATIENCE) as bar:
                for job, chosen in fresh.values():
                    lowered = _lower(job, chosen)
                    text = _text(job, chosen, lowered, settled)
                    known = self._same.get(text) or BEFORE.get((job.program.name, *text))
                    if known is not None:
                        self._same[text] = known
                        self._keep(job, chosen, known, settled)
                        bar.update()
                    elif text in wanted:
                        wanted[text].append(job)
                    else:
                        wanted[text] = [job]
                        waiting[_submit(pool, ready, job, lowered)] = text, chosen
                for _ in range(len(waiting)):
                    done = ready.get()
                    text, chosen = waiting[done]
                    made = self._same[text] = Executable(done.result(), wanted[text][0][0].name)
                    if isinstance(text[0], bytes):
                        BEFORE.add((made.name, *text), made)
                    for job in wanted[text]:
                        self._keep(job, chosen, made, settled)
                        bar.update()
        finally:
            _leave(pool)

    def _found_before(self, job: PlacedProgram, given: Shardings, settled: Hashable) -> bool:
        """Whether the same was compiled before in this process, as far as can be seen without lowering it."""
        name = _does(job, given, settled)
        known = None if name is None else BEFORE.get(name)
        if known is None:
            return False
        self._same[name] = known
        self._keep(job, given, known, settled)
        return True

    def _keep(self, job: PlacedProgram, given: Shardings, executable: Executable, settled: Hashable) -> None:
        program, place, donated = job
        self._compiled.setdefault(program, {})[place, donated, given] = executable
        name = _does(job, given, settled)
        if name is not None:
            BEFORE.add(name, executable)

    def get(self, job: PlacedProgram, given: Shardings = ()) -> Executable:
        """The compiled program, for arguments sharded so."""
        program, place, donated = job
        return self._compiled[program][place, donated, given]

    def constant(self, constant: Constant, place: Place, ref: Ref) -> Array:
        """The array of a constant at a place: put there at the first call, and kept for as long as there is the constant."""
        known = self._constants.setdefault(constant, {})
        if (place, ref) not in known:
            known[place, ref] = put(constant.value, place.home(ref)) if constant.split else put_at(place, ref, constant.value)
        return known[place, ref]

    def __getitem__(self, job: PlacedProgram) -> Compiled:
        """The compiled program, however its arguments are sharded."""
        program, place, donated = job
        found = self._compiled.get(program) or self._compiled[self._tokened[id(program)]]
        return next(made.call for key, made in found.items() if key[:2] == (place, donated))

    def __len__(self) -> int:
        return sum(map(len, list(self._compiled.values())))

    @property
    def num_compiled(self) -> int:
        """How many different ones were compiled; ``len`` counts each program by itself."""
        return len({id(made) for made in list(self._same.values())})


def _submit(
    pool: ThreadPoolExecutor, ready: SimpleQueue[Future[Compiled]], job: PlacedProgram, lowered: Lowered
) -> Future[Compiled]:
    """Have a program compiled; ``ready`` is given the future when that is done.

    Python's pools are not made for interrupts: Ctrl-C could leave a lock taken for which the threads would wait for ever.
    """
    with Hold(waited="") as hold:
        hold.begin()
        future = pool.submit(compile_lowered, lowered, job.place.devices[0].platform, lean=job.program.lean)
        future.add_done_callback(ready.put)
        return future


def _leave(pool: ThreadPoolExecutor) -> None:
    """Let the threads end; after Ctrl-C nobody waits for what nobody will use. Another Ctrl-C could leave them waiting for ever."""
    with Hold(waited="") as hold:
        hold.begin()
        pool.shutdown(wait=False, cancel_futures=True)


def _lower(job: PlacedProgram, given: Shardings) -> Lowered:
    program, place, donated = job
    chosen = dict(zip(job.free_inputs, given, strict=True))
    pairs = enumerate(zip(program.inputs, program.avals, strict=True))
    avals = [place.aval(ref, aval, chosen.get(k), lead=not program.spans) for k, (ref, aval) in pairs]
    with Hold(waited="", broke_off="") as hold:  # Ctrl-C while a cache of JAX's compares its entries becomes a ValueError there
        hold.begin()
        return place.jit(program, donated).lower(*avals)


def _does(job: PlacedProgram, given: Shardings, settled: Hashable) -> Hashable:
    """What a program does and where, and its name in a trace, without lowering it; None if that cannot be said."""
    does = job.program.does
    return None if does is None else (job.program.name, does, *job[1:], given, settled)


def _text(job: PlacedProgram, given: Shardings, lowered: Lowered, settled: Hashable) -> tuple[Hashable, ...]:
    """What programs that are the same have in common: all they do (arguments that they do not read included), and where.

    They may be called otherwise. A function on the host is known to a text by a number alone, so a program that calls one is
    like no other. (What stands for it is not the program, which its own executable would then keep alive.) To a text a key is
    an array of integers, so the types of arguments and results are compared too. A text does not say how it is to be compiled.
    """
    text = lowered.as_text()
    unnamed = _MODULE.sub("module", text, count=1)
    same = object() if "callback" in text else hashlib.sha256(unnamed.encode()).digest()
    types = tuple(leaf.dtype for leaf in jax.tree.leaves((lowered.in_avals, lowered.out_info)))
    return same, types, job.program.lean, *job[1:], given, settled
