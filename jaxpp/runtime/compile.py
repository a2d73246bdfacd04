"""Compiled programs, each compiled once for each device it runs on, side by side in threads.

On devices that only compile, equal stages share what is compiled (``Place.compiled_at``).

Programs are known by what they do, not by the Python function: by their equations (``stages.fingerprint``) or lowered text, and by
their names. Equal stages, an update at another batch shape, and a notebook cell that is run twice share what is compiled. XLA for
CPU would make all weight gradients of a stage first and add them afterwards; a ``lean`` program is ordered for little memory, each
gradient added before the next. XLA for CPU drops ``optimization_barrier`` before it orders (JAX 0.10).
"""

import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from queue import SimpleQueue
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.stages import Compiled, Lowered

from jaxpp.errors import ArgumentError
from jaxpp.lowering.builder import Constant
from jaxpp.runtime.edges import put, put_at
from jaxpp.runtime.interrupts import held
from jaxpp.runtime.lru import LRU
from jaxpp.runtime.place import Place
from jaxpp.runtime.progress import progress
from jaxpp.stages.program import Program, Ref, Role
from jaxpp.targets import compiles_only
from jaxpp.types import Array

Shardings = tuple[Sharding, ...]

_MODULE = re.compile(r"^module @\S+", re.MULTILINE)

_UNREGISTERED = re.compile(r"(?:No FFI handler registered for|untyped custom call to) (?P<name>\S+)")
_PATIENCE = 2.0  # seconds of compiling after which a progress bar is shown
_LEAN: dict[str, dict[str, Any]] = {"cpu": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}}
"""By platform, XLA's options that order a program's operations for little memory."""


@dataclass(frozen=True, eq=False)
class Executable:
    """What was compiled; shared by the programs that are the same."""

    call: Compiled
    name: str  # in a trace: that of the first program that is the same


class ExecutableCache:
    """Executables by what they do, for threads too: the ``limit`` names used last, and none after ``jax.clear_caches``."""

    def __init__(self, limit: int):
        self._known, self._lock = LRU[Executable](limit), Lock()
        self._probe = jax.jit(self._forget)  # a trace of it forgets, and JAX traces it again after ``jax.clear_caches``

    def get(self, name: Hashable) -> Executable | None:
        """The executable of this name, if there is one."""
        with self._lock:
            return self._known.find(name)

    def add(self, name: Hashable, executable: Executable) -> None:
        """Remember an executable."""
        with self._lock:
            self._known.put(name, executable)

    def __len__(self) -> int:
        return len(self._known)

    def follow_jax(self) -> None:
        """Forget everything if ``jax.clear_caches`` was called."""
        self._probe.lower()

    def _forget(self) -> None:
        with self._lock:
            self._known.clear()


EXECUTABLES = ExecutableCache(1024)  # what was compiled in this process


def settings() -> Hashable:
    """All settings of JAX as they are now, any of which may decide what a program is compiled to."""
    config: Any = jax.config  # whose flags checkers of types do not know
    names = getattr(config, "values", None)  # where JAX does not list them, nothing is taken for the same
    return object() if names is None else tuple(repr(getattr(config, name, None)) for name in sorted(names))


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Settled:
    mark: object


@functools.cache
def _mark_of(settled: Hashable) -> object:
    """What stands for settings, and is compared at once."""
    del settled
    return object()


_SETTLED = jax.jit(lambda: _Settled(_mark_of(settings())))  # JAX traces it again under other options, as it does a user's function


def trace_context() -> Hashable:
    """A value that two moments have in common only if JAX traces functions to the same equations at both.

    Which options decide that is JAX's to say: those under which ``jax.jit`` traces a function again, and the default kind of keys,
    which ``jax.jit`` does not look at.
    """
    return jax.eval_shape(_SETTLED).mark, getattr(jax.config, "jax_default_prng_impl", None)


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
    """One pipeline's compiled programs, each compiled once for each device it runs on, and held for as long as a plan has it."""

    def __init__(self):
        self._compiled: WeakKeyDictionary[Program, dict[tuple[Place, tuple[int, ...], Shardings], Executable]] = WeakKeyDictionary()
        self._same: WeakValueDictionary[Hashable, Executable] = WeakValueDictionary()
        self._tokened: WeakValueDictionary[int, Program] = WeakValueDictionary()
        self._constants: WeakKeyDictionary[Constant, dict[tuple[Place, Ref], Array]] = WeakKeyDictionary()

    def with_token(self, program: Program) -> Program:
        """The same program with one more result, a byte that is there when the program is done."""
        tokened = self._tokened.get(id(program))
        if tokened is None:  # it holds the program, whose id is therefore that of no other
            outputs = (*program.outputs, Ref(Role.TOKEN, shared=True))
            tokened = replace(program, function=lambda *args: [*program.function(*args), jnp.zeros((), jnp.int8)], outputs=outputs)
            self._tokened[id(program)] = tokened
        return tokened

    def compile(self, jobs: Iterable[PlacedProgram], given: Iterable[Shardings] | None = None, what: str = "") -> None:
        """Compile what is not compiled yet, on as many threads as there are cores, while the next is lowered."""
        pairs = zip(jobs, repeat(()) if given is None else given)  # noqa: B905  (one of them is endless)
        asked = dict.fromkeys((job, own) for job, own in pairs if (*job[1:], own) not in self._compiled.get(job.program, ()))
        if not asked:
            return
        EXECUTABLES.follow_jax()
        settled = settings()
        fresh = [pair for pair in asked if not self._is_compiled(*pair, settled)]
        if not fresh:
            return
        pool, ready = ThreadPoolExecutor(os.cpu_count()), SimpleQueue[Future[Compiled]]()
        waiting: dict[Future[Compiled], tuple[tuple[Hashable, ...], Shardings]] = {}
        wanted: dict[tuple[Hashable, ...], list[PlacedProgram]] = {}
        try:
            with progress(total=len(fresh), desc=f"compiling {what}".strip(), unit="program", after=_PATIENCE) as bar:
                for job, chosen in fresh:
                    lowered = _lower(job, chosen)
                    text = _text(job, chosen, lowered, settled)
                    known = self._same.get(text) or EXECUTABLES.get((job.program.name, *text))
                    if known is not None:
                        self._same[text] = known
                        self._keep(job, chosen, known, settled)
                        bar.update()
                    elif text in wanted:
                        wanted[text].append(job)
                    else:
                        wanted[text] = [job]
                        with held():  # Python's pools are not made for Ctrl-C: a lock could stay taken, and threads wait for ever
                            future = pool.submit(compile_lowered, lowered, job.place.devices[0].platform, lean=job.program.lean)
                            waiting[future] = text, chosen
                            future.add_done_callback(ready.put)
                for _ in range(len(waiting)):
                    text, chosen = waiting[done := ready.get()]
                    made = self._same[text] = Executable(done.result(), wanted[text][0][0].name)
                    if isinstance(text[0], bytes):
                        EXECUTABLES.add((made.name, *text), made)
                    for job in wanted[text]:
                        self._keep(job, chosen, made, settled)
                        bar.update()
        finally:
            _end(pool)

    def _is_compiled(self, job: PlacedProgram, given: Shardings, settled: Hashable) -> bool:
        name = _does(job, given, settled)
        known = None if name is None else EXECUTABLES.get(name)
        if known is not None:
            self._same[name] = known
            self._keep(job, given, known, settled)
        return known is not None

    def _keep(self, job: PlacedProgram, given: Shardings, executable: Executable, settled: Hashable) -> None:
        self._compiled.setdefault(job.program, {})[*job[1:], given] = executable
        name = _does(job, given, settled)
        if name is not None:
            EXECUTABLES.add(name, executable)

    def get(self, job: PlacedProgram, given: Shardings = ()) -> Executable:
        """The compiled program, for arguments sharded so."""
        return self._compiled[job.program][*job[1:], given]

    def constant(self, constant: Constant, place: Place, ref: Ref) -> Array | jax.ShapeDtypeStruct:
        """The array of a constant at a place, put there at the first call and kept for as long as there is the constant.

        Devices that only compile hold no array: there it is a shape.
        """
        if compiles_only(place.devices[0]):
            return place.aval(ref, constant.aval)
        known = self._constants.setdefault(constant, {})
        if (place, ref) not in known:
            known[place, ref] = put(constant.value, place.home(ref)) if constant.split else put_at(place, ref, constant.value)
        return known[place, ref]

    def __getitem__(self, job: PlacedProgram) -> Compiled:
        """The compiled program, however its arguments are sharded."""
        executables = self._compiled.get(job.program) or self._compiled[self._tokened[id(job.program)]]
        return next(executable.call for key, executable in executables.items() if key[:2] == job[1:])

    def __len__(self) -> int:
        return sum(map(len, list(self._compiled.values())))

    @property
    def num_compiled(self) -> int:
        """How many different ones were compiled; ``len`` counts each program by itself."""
        return len({id(made) for made in list(self._same.values())})


def _end(pool: ThreadPoolExecutor) -> None:
    """End the threads of a pool without waiting: after Ctrl-C nobody waits for what nobody will use."""
    try:
        with held():
            pool.shutdown(wait=False, cancel_futures=True)
    except KeyboardInterrupt:  # it came before signals were held, and the threads would live as long as the pool
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _lower(job: PlacedProgram, given: Shardings) -> Lowered:
    program, place, donated = job
    chosen = dict(zip(job.free_inputs, given, strict=True))
    pairs = enumerate(zip(program.inputs, program.avals, strict=True))
    avals = [place.aval(ref, aval, chosen.get(k), lead=not program.spans) for k, (ref, aval) in pairs]
    with held():  # Ctrl-C while a cache of JAX's compares its entries becomes a ValueError there
        return place.jit(program, donated).lower(*avals)


def _does(job: PlacedProgram, given: Shardings, settled: Hashable) -> Hashable:
    """What a program does and where, and its name in a trace, without lowering it; None if that cannot be said."""
    does = job.program.does
    return None if does is None else (job.program.name, does, *job[1:], given, settled)


def _text(job: PlacedProgram, given: Shardings, lowered: Lowered, settled: Hashable) -> tuple[Hashable, ...]:
    """What programs that are the same have in common: all they do, and where; their names may differ.

    A text knows a host function by a number alone, so a program that calls one is like no other: an object stands for it, not the
    executable, which would keep it alive. To a text a key is an array of integers, so types are compared too.
    """
    text = lowered.as_text()
    unnamed = _MODULE.sub("module", text, count=1)
    same = object() if "callback" in text else hashlib.sha256(unnamed.encode()).digest()
    types = tuple(leaf.dtype for leaf in jax.tree.leaves((lowered.in_avals, lowered.out_info)))
    return same, types, job.program.lean, *job[1:], given, settled


def compile_lowered(lowered: Lowered, platform: str, *, lean: bool) -> Compiled:
    """Compile a lowered program; a ``lean`` program so that it holds little at once, if the compiler knows how."""
    if lean and platform in _LEAN:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # an unknown option, or an error that is raised again without it
            return lowered.compile(_LEAN[platform])
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if unknown := _UNREGISTERED.search(str(error)):
            where, rule = "the model", "a custom call is of a function that is registered for the platform of its devices"
            named, on = unknown["name"], "CUDA" if platform == "gpu" else platform
            got = f"{named}, of which this process knows none for {on}"
            fix = f'call jax.ffi.register_ffi_target("{named}", ..., platform="{on}") first, or plan for devices that have it'
            raise ArgumentError(where, rule, got, fix) from error
        if "custom_partitioner" in str(error) and "'spec'" in str(error):
            where, rule = "mesh", "a function that says how it is divided asks for the names of axes, as attention by cuDNN does"
            got = "a rank with replicas of stages that several devices share, where XLA knows no names"
            fix = 'pass a mesh with one of "data" and "model" alone, or attention that is not cuDNN\'s (implementation="xla")'
            raise ArgumentError(where, rule, got, fix) from error
        if "No PTX compilation provider" not in str(error):
            raise
        where, rule = "devices", "to compile for a GPU, XLA needs NVIDIA's assembler, a program called ptxas"
        fix = 'pip install -e ".[targets]" in the checkout of jaxpp, or put the folder of ptxas on PATH'
        raise ArgumentError(where, rule, "XLA found none on this machine", fix) from error
