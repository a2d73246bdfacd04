"""Compiled programs, each compiled once for each device it runs on, side by side in threads."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from tqdm import tqdm

from jaxpp.stages.program import Program, Ref, Role
from jaxpp.types import Device

__all__ = ["Job", "Programs"]

Job = tuple[Program, Device, tuple[int, ...]]
"""A program, where it runs, and the arguments whose buffers it takes over."""

_PATIENCE = 2.0
"""Seconds of compiling after which a progress bar is shown."""


class Programs:
    """Compiled programs, each compiled once for each device it runs on.

    Holds one pipeline's programs; a program that is compiled for a second batch shape adds to it.
    """

    def __init__(self):
        self._compiled: dict[tuple[int, Device, tuple[int, ...]], Any] = {}
        self._tokened: dict[int, Program] = {}
        self._alive: list[Program] = []

    def with_token(self, program: Program) -> Program:
        """The same program with one more result, a byte that is there when the program is done."""
        if id(program) not in self._tokened:
            self._tokened[id(program)] = replace(
                program,
                function=lambda *args: [*program.function(*args), jnp.zeros((), jnp.int8)],
                outputs=(*program.outputs, Ref(Role.VALUE)),
            )
            self._alive.append(program)
        return self._tokened[id(program)]

    def compile(self, jobs: Iterable[Job]) -> None:
        """Compile what is not compiled yet, on as many threads as there are cores, while the next is lowered."""
        fresh = {(id(program), device, donated): program for program, device, donated in jobs}
        fresh = {job: program for job, program in fresh.items() if job not in self._compiled}
        if not fresh:
            return
        self._alive += fresh.values()
        with (
            ThreadPoolExecutor(os.cpu_count()) as pool,
            tqdm(total=len(fresh), desc="compiling", unit="program", delay=_PATIENCE, leave=False) as bar,
        ):
            waiting = {pool.submit(_lower(program, job[1], job[2]).compile): job for job, program in fresh.items()}
            for done in as_completed(waiting):
                self._compiled[waiting[done]] = done.result()
                bar.update()

    def __getitem__(self, job: Job) -> Any:
        program, device, donated = job
        return self._compiled[id(program), device, donated]

    def __len__(self) -> int:
        return len(self._compiled)


def _lower(program: Program, device: Device, donated: tuple[int, ...]) -> Any:
    here = SingleDeviceSharding(device)
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=here) for aval in program.avals]
    return jax.jit(program.function, donate_argnums=donated, out_shardings=here).lower(*avals)
