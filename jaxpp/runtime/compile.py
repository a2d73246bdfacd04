"""Compiled programs, each compiled once for each device it runs on, side by side in threads.

A program is known by its object, and what was compiled for it is let go with it. Programs that are lowered to the same text (equal
stages on one device, an update at another batch shape) share what is compiled.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from itertools import repeat
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax
import jax.numpy as jnp

from jaxpp.runtime.place import Place
from jaxpp.runtime.progress import progress
from jaxpp.stages.program import Program, Ref, Role

__all__ = ["Job", "Programs", "free_inputs"]

Job = tuple[Program, Place, tuple[int, ...]]
"""A program, where it runs, and the arguments whose buffers it takes over."""

Shardings = tuple[Any, ...]

_MODULE = re.compile(r"^module @\S+", re.MULTILINE)

_PATIENCE = 2.0
"""Seconds of compiling after which a progress bar is shown."""


class _Executable:
    """What was compiled; shared by the programs that are the same."""

    __slots__ = ("__weakref__", "call", "name")

    def __init__(self, call: Any, name: str):
        self.call = call
        self.name = name


class Programs:
    """Compiled programs, each compiled once for each device it runs on.

    Holds one pipeline's programs for as long as its plans do; what a second batch shape needs besides adds to them.
    """

    def __init__(self):
        self._compiled: WeakKeyDictionary[Program, dict[Any, _Executable]] = WeakKeyDictionary()
        self._same: WeakValueDictionary[Any, _Executable] = WeakValueDictionary()
        self._tokened: WeakValueDictionary[int, Program] = WeakValueDictionary()

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

    def compile(self, jobs: Iterable[Job], given: Iterable[Shardings] | None = None, what: str = "") -> None:
        """Compile what is not compiled yet, on as many threads as there are cores, while the next is lowered.

        Args:
            jobs: what to compile.
            given: for each how the arguments are sharded whose sharding the compiler chose when it made them.
            what: what for, for the progress bar.
        """
        fresh: dict[Any, tuple[Job, Shardings]] = {}
        for job, chosen in zip(jobs, repeat(()) if given is None else given):  # noqa: B905  (one of them is endless)
            program, place, donated = job
            if (place, donated, chosen) not in self._compiled.get(program, ()):
                fresh[program, place, donated, chosen] = job, chosen
        if not fresh:
            return
        with (
            ThreadPoolExecutor(os.cpu_count()) as pool,
            progress(total=len(fresh), desc=f"compiling {what}".strip(), unit="program", after=_PATIENCE) as bar,
        ):
            waiting: dict[Any, Any] = {}
            wanted: dict[Any, list[Job]] = {}
            for job, chosen in fresh.values():
                lowered = _lower(job, chosen)
                text = _text(job, chosen, lowered)
                known = self._same.get(text)
                if known is not None:
                    self._keep(job, chosen, known)
                    bar.update()
                elif text in wanted:
                    wanted[text].append(job)
                else:
                    wanted[text] = [job]
                    waiting[pool.submit(lowered.compile)] = text, chosen
            for done in as_completed(waiting):
                text, chosen = waiting[done]
                made = self._same[text] = _Executable(done.result(), wanted[text][0][0].name)
                for job in wanted[text]:
                    self._keep(job, chosen, made)
                    bar.update()

    def _keep(self, job: Job, given: Shardings, executable: _Executable) -> None:
        program, place, donated = job
        self._compiled.setdefault(program, {})[place, donated, given] = executable

    def get(self, job: Job, given: Shardings = ()) -> Any:
        """The compiled program, for arguments sharded so."""
        program, place, donated = job
        return self._compiled[program][place, donated, given].call

    def name(self, job: Job, given: Shardings = ()) -> str:
        """What the compiled program is called in a trace: its own name, or that of the first that is the same."""
        program, place, donated = job
        return self._compiled[program][place, donated, given].name

    def __getitem__(self, job: Job) -> Any:
        """The compiled program, however its arguments are sharded."""
        program, place, donated = job
        found = self._compiled[program]
        return next(made.call for key, made in found.items() if key[:2] == (place, donated))

    def __len__(self) -> int:
        return sum(map(len, list(self._compiled.values())))

    @property
    def num_compiled(self) -> int:
        """How many different ones were compiled; ``len`` counts each program by itself."""
        return len(self._same)


def free_inputs(job: Job) -> list[int]:
    """The arguments of a program whose sharding the compiler chose when it made them."""
    program, place, _ = job
    return [k for k, ref in enumerate(program.inputs) if place.is_free(ref)]


def _lower(job: Job, given: Shardings) -> Any:
    program, place, donated = job
    chosen = dict(zip(free_inputs(job), given, strict=True))
    pairs = enumerate(zip(program.inputs, program.avals, strict=True))
    avals = [place.aval(ref, aval, chosen.get(k), lead=not program.spans) for k, (ref, aval) in pairs]
    return place.jit(program, donated).lower(*avals)


def _text(job: Job, given: Shardings, lowered: Any) -> Any:
    """What programs that are the same have in common: all they do (arguments that they do not read included), and where.

    They may be called otherwise. A function on the host is known to a text by a number alone, so a program that calls one is
    like no other. (What stands for it is not the program, which its own executable would then keep alive.) To a text a key is
    an array of integers, so the types of arguments and results are compared too.
    """
    text = lowered.as_text()
    unnamed = _MODULE.sub("module", text, count=1)
    same = object() if "callback" in text else hashlib.sha256(unnamed.encode()).digest()
    types = tuple(leaf.dtype for leaf in jax.tree.leaves((lowered.in_avals, lowered.out_info)))
    return same, types, *job[1:], given
