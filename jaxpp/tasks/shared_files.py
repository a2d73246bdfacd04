"""Files of sets that several processes write together: each the leaves that it holds, into one folder."""

import secrets
from typing import Any

import jax
import numpy as np

from jaxpp.runtime.processes.channel import rows_of_all
from jaxpp.runtime.processes.trees import array_handler

__all__ = ["fresh_tokens", "open_writer"]


def fresh_tokens(count: int) -> list[str]:
    """Texts for the names of new folders, as good as never drawn twice; the same in all processes, which all call it."""
    if jax.process_count() == 1 or not count:
        return [secrets.token_hex(8) for _ in range(count)]
    drawn = np.frombuffer(secrets.token_bytes(8 * count), np.uint32)
    return [row.tobytes().hex() for row in rows_of_all(drawn)[0].reshape(count, 2)]


def open_writer(ocp: Any) -> tuple[Any, Any]:
    """Orbax's checkpointer for sets, and what makes its argument of a tree; of several processes each writes what it holds."""
    if jax.process_count() == 1:
        return ocp.Checkpointer(ocp.StandardCheckpointHandler()), ocp.args.StandardSave
    numpy = np.ndarray, ocp.type_handlers.NumpyHandler()
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, array_handler()), numpy)
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)), ocp.args.PyTreeSave
