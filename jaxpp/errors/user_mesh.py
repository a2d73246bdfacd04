"""What the user has put in force around a public function, and is not while the function works.

* The *mesh* (``jax.set_mesh``): JAX takes it for the devices of every program that is compiled while it is in force, and those of a
  pipeline run on the devices of their stage alone. The user's own functions are traced with it all the same (``stages/axes.py``).
* The *guard of transfers* (``jax.transfer_guard("disallow")``): it forbids transfers that nobody asked for, and those of a pipeline
  are its work. To JAX, the runtime's own copy (``runtime/send.py``) is not an explicit one as ``jax.device_put`` is.
* ``jax_disable_jit``: programs are compiled ahead of time, which JAX refuses under it. A warning says so.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING

from jaxpp.errors import warn

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

_SET: ContextVar["Mesh | AbstractMesh | None"] = ContextVar("the mesh that the user has set", default=None)


def user_mesh() -> "Mesh | AbstractMesh | None":
    """The mesh that was in force where a public function was called, which may have no devices; None without one."""
    return _SET.get()


_GUARDS = tuple(f"jax_transfer_guard_{way}" for way in ("host_to_device", "device_to_device", "device_to_host"))


class DisableJitWarning(UserWarning):
    """``jax_disable_jit`` is on, and a pipeline compiles its programs all the same."""


def set_aside(*, warns: bool = True) -> AbstractContextManager[object]:
    """Without the mesh, the guard of transfers and ``jax_disable_jit`` (which is told) that are in force, as long as this lasts."""
    jax = sys.modules.get("jax")  # schedules do without JAX
    sharding = sys.modules.get("jax.sharding")
    if jax is None or sharding is None:
        return nullcontext()
    found = list[AbstractContextManager[None]]()
    if any(getattr(jax.config, name, None) in ("log", "disallow") for name in _GUARDS):
        found.append(jax.transfer_guard("allow"))
    if jax.config.jax_disable_jit:
        rule = "a pipeline compiles its programs all the same, so values that a model prints are traced"
        fix = "call the loss itself under jax.disable_jit(), or use jax.debug.print in the model"
        if warns:
            warn(DisableJitWarning(f"jax_disable_jit: {rule}.\n  Got: jax_disable_jit=True.\n  Fix: {fix}."))
        found.append(jax.disable_jit(False))
    if not sharding.get_abstract_mesh().empty:
        with suppress(ValueError):  # a function is being traced, and JAX changes no mesh then
            found.append(_without(sharding.get_mesh()))
    return found[0] if len(found) == 1 else _all(found) if found else nullcontext()


@contextmanager
def _all(contexts: Sequence[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


@contextmanager
def _without(mesh: "Mesh") -> Iterator[None]:
    import jax  # noqa: PLC0415  (where it is not used yet, there is no mesh)
    import numpy as np  # noqa: PLC0415

    abstract = jax.sharding.get_abstract_mesh()  # jax.sharding.use_abstract_mesh puts one in force without devices, or over others
    token = _SET.set(abstract if mesh.empty or mesh.abstract_mesh != abstract else mesh)
    try:
        with jax.set_mesh(type(mesh)(np.empty((), object), ())):
            yield
    finally:
        _SET.reset(token)
