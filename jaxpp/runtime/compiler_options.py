"""How a program is compiled, where the compiler has a choice: for speed side by side, or for little memory.

Operations of a program that do not depend on each other may run in any order. XLA for CPU starts them as early as it can, so that
they run side by side. The weight gradients of a stage (W) are such operations: all of them would be made first, each in a buffer of
its own, and added to the sums afterwards. So much memory at once costs time too, because the host gets it anew at every call, page
by page. A program that is ``lean`` is ordered for little memory instead: each gradient is added before the next is made, and all
use one buffer. ``jax.lax.optimization_barrier`` does not order anything here, since XLA for CPU drops barriers before it orders the
operations (JAX 0.10). Other platforms are left as they are.
"""

from typing import Any

import jax
from jax.stages import Compiled, Lowered

__all__ = ["compile_lowered"]

_LEAN: dict[str, dict[str, Any]] = {"cpu": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}}
"""By platform, the options of XLA that order the operations of a program for little memory."""


def compile_lowered(lowered: Lowered, platform: str, *, lean: bool) -> Compiled:
    """Compile a lowered program; a ``lean`` program so that it holds little at once.

    A compiler that does not know the option compiles the program without it. The results are the same.
    """
    options = _LEAN.get(platform) if lean else None
    if options is None:
        return lowered.compile()
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError:  # an unknown option, or an error that is raised again without the option
        return lowered.compile()
