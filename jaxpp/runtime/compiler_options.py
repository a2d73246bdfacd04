"""How a program is compiled, where the compiler has a choice: for speed side by side, or for little memory.

A program may ask for little memory (``Program.lean``). XLA for CPU otherwise starts all independent operations of a program as early
as it can, so that they run side by side. The weight gradients of a stage are independent of each other: all products would be made
first, each in a buffer of its own, and added to the sums afterwards. With the scheduler for little memory, each product is added
before the next is made, and the two share a buffer.
Other platforms are left as they are.
"""

import jax
from jax.stages import Compiled, Lowered

__all__ = ["compile_lowered"]

_LEAN = {"cpu": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}}
"""By platform, the options of XLA that order the operations of a program for little memory."""


def compile_lowered(lowered: Lowered, platform: str, *, lean: bool) -> Compiled:
    """Compile a lowered program; a ``lean`` program so that it holds little at once.

    A compiler that does not know the option compiles the program without it: the results are the same.
    """
    options = _LEAN.get(platform) if lean else None
    if options is None:
        return lowered.compile()
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError:
        return lowered.compile()
