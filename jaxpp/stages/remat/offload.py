"""``remat="offload"``: residuals that wait in host memory while their backward is far away."""

import numbers
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpp.errors import ArgumentError
from jaxpp.types import Policy

__all__ = ["Offload", "Remat", "each_stage", "offload_of"]


@dataclass(frozen=True)
class Offload:
    """Keep the least, and let it wait in host memory: the value of ``remat`` that ``"offload"`` stands for.

    A stage keeps what it keeps with ``remat="least"``, and runs the same programs, so results are the same bit by bit. When the
    forward of a microbatch has run, its residuals are copied to pinned host memory beside the device; while the last action before
    their backward runs, they are copied back. The device computes meanwhile: copies that are shorter than an action delay nothing.
    Residuals stay on the device where leaving would free nothing: if fewer than three actions of the rank lie between forward and
    backward; if the rank holds as many at another time anyway, as the last three stages of 1F1B do; and if another stage on the
    same device needs them too.

    Args:
        except_last: of how many microbatches at a time the residuals of the stage stay on the device: those whose backward is next.
            With 0, residuals leave even if no other backward of the stage runs before theirs; a larger number moves fewer bytes
            and frees less memory.

    Raises:
        ArgumentError: ``except_last`` is no whole number of at least 0.

    Example:
        >>> import jaxpp
        >>> jaxpp.Offload() == jaxpp.Offload(except_last=1)
        True
    """

    except_last: int = 1

    def __post_init__(self):
        value = self.except_last
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or int(value) < 0:
            rule = "except_last says of how many microbatches the residuals stay on the device, a whole number of at least 0"
            raise ArgumentError(f"Offload(except_last={value!r})", rule, repr(value), "pass except_last=1, or leave it out")


Remat = str | Policy | Offload | None
"""What a stage keeps: ``"least"``, ``"keep"`` (or None; everything), ``"recompute"`` (its inputs), what a policy says, or
(``"offload"``, an ``Offload``) the least, in host memory.
"""


def each_stage(remat: Remat | Sequence[Remat], num_stages: int) -> tuple[Remat, ...]:
    """The value of each stage, of one value for all or a list."""
    return tuple(remat) if isinstance(remat, Sequence) and not isinstance(remat, str) else (remat,) * num_stages


def offload_of(remat: Remat | Sequence[Remat], num_stages: int) -> tuple[int | None, ...]:
    """``except_last`` of each stage, from what the user passed as ``remat``; None for a stage whose residuals stay."""
    found = (Offload() if item == "offload" else item for item in each_stage(remat, num_stages))
    return tuple(int(item.except_last) if isinstance(item, Offload) else None for item in found)
