"""The mesh that the user has set (``jax.set_mesh``) is not in force while a public function works.

JAX takes it for the devices of every program that is compiled while it is in force, and those of a pipeline run on the devices of
their stage alone. The user's own functions are traced with it all the same (``stages/axes.py``).
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.sharding import Mesh

_SET: ContextVar["Mesh | None"] = ContextVar("the mesh that the user has set", default=None)


def user_mesh() -> "Mesh | None":
    """The mesh that was in force where a public function was called; None without one, or if it has no devices."""
    return _SET.get()


def set_aside() -> AbstractContextManager[None]:
    """Without the mesh that is in force, as long as this lasts."""
    sharding = sys.modules.get("jax.sharding")  # schedules do without JAX
    if sharding is None or sharding.get_abstract_mesh().empty:
        return nullcontext()
    try:
        return _without(sharding.get_mesh())
    except ValueError:  # a function is being traced, and JAX changes no mesh then
        return nullcontext()


@contextmanager
def _without(mesh: "Mesh") -> Iterator[None]:
    import jax  # noqa: PLC0415  (where it is not used yet, there is no mesh)
    import numpy as np  # noqa: PLC0415

    token = _SET.set(None if mesh.empty else mesh)  # one of no devices, jax.sharding.use_abstract_mesh, says where nothing runs
    try:
        with jax.set_mesh(type(mesh)(np.empty((), object), ())):
            yield
    finally:
        _SET.reset(token)
