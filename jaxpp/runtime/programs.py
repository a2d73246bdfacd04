"""Compiled programs, each compiled once for each device it runs on, side by side in threads."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from itertools import repeat
from typing import Any

import jax.numpy as jnp

from jaxpp.runtime.progress import progress
from jaxpp.runtime.submesh import Place, Submesh, aval_on, jitted
from jaxpp.stages.program import Program, Ref, Role

__all__ = ["Job", "Programs", "free_inputs"]

Job = tuple[Program, Place, tuple[int, ...]]
"""A program, where it runs, and the arguments whose buffers it takes over."""

Shardings = tuple[Any, ...]

_PATIENCE = 2.0
"""Seconds of compiling after which a progress bar is shown."""


class Programs:
    """Compiled programs, each compiled once for each device it runs on.

    Holds one pipeline's programs; a program that is compiled for a second batch shape adds to it.
    """

    def __init__(self):
        self._compiled: dict[Any, Any] = {}
        self._tokened: dict[int, Program] = {}
        self._alive: list[Program] = []

    def with_token(self, program: Program) -> Program:
        """The same program with one more result, a byte that is there when the program is done."""
        if id(program) not in self._tokened:
            self._tokened[id(program)] = replace(
                program,
                function=lambda *args: [*program.function(*args), jnp.zeros((), jnp.int8)],
                outputs=(*program.outputs, Ref(Role.VALUE, shared=True)),
            )
            self._alive.append(program)
        return self._tokened[id(program)]

    def compile(self, jobs: Iterable[Job], given: Iterable[Shardings] | None = None, what: str = "") -> None:
        """Compile what is not compiled yet, on as many threads as there are cores, while the next is lowered.

        Args:
            jobs: what to compile.
            given: for each how the arguments are sharded whose sharding the compiler chose when it made them.
            what: what for, for the progress bar.
        """
        fresh = {}
        for job, chosen in zip(jobs, repeat(()) if given is None else given):  # noqa: B905  (one of them is endless)
            found = self._key(job, chosen)
            if found not in self._compiled:
                fresh[found] = job, chosen
        if not fresh:
            return
        self._alive += (job[0] for job, _ in fresh.values())
        with (
            ThreadPoolExecutor(os.cpu_count()) as pool,
            progress(total=len(fresh), desc=f"compiling {what}".strip(), unit="program", after=_PATIENCE) as bar,
        ):
            waiting = {pool.submit(_lower(job, chosen).compile): found for found, (job, chosen) in fresh.items()}
            for done in as_completed(waiting):
                self._compiled[waiting[done]] = done.result()
                bar.update()

    @staticmethod
    def _key(job: Job, given: Shardings) -> Any:
        program, place, donated = job
        return id(program), place, donated, given

    def get(self, job: Job, given: Shardings = ()) -> Any:
        """The compiled program, for arguments sharded so."""
        return self._compiled[self._key(job, given)]

    def __getitem__(self, job: Job) -> Any:
        """The compiled program, however its arguments are sharded."""
        found = self._compiled.get(self._key(job, ()))
        return found or next(made for key, made in self._compiled.items() if key[:3] == self._key(job, ())[:3])

    def __len__(self) -> int:
        return len(self._compiled)


def free_inputs(job: Job) -> list[int]:
    """The arguments of a program whose sharding the compiler chose when it made them."""
    program, place, _ = job
    return [k for k, ref in enumerate(program.inputs) if place.is_free(ref)] if isinstance(place, Submesh) else []


def _lower(job: Job, given: Shardings) -> Any:
    program, place, donated = job
    chosen = dict(zip(free_inputs(job), given, strict=True))
    pairs = enumerate(zip(program.inputs, program.avals, strict=True))
    avals = [aval_on(place, ref, aval, chosen.get(k), lead=not program.spans) for k, (ref, aval) in pairs]
    return jitted(program, place, donated).lower(*avals)
