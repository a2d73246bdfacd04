"""A program: a function compiled as one unit, with the name of every value it reads and writes.

A name (``Ref``) says what a value is for the stage that holds it; the plan turns names into slots. Values of a role in
``PER_MICROBATCH`` exist once a microbatch, all others once a step. A program that reads and writes the same ``GRAD``, ``LOSS`` or
``AUX`` adds to it, and reuses its buffer. A program that writes ``STATE`` makes what the next microbatch reads.
"""

import enum
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property

import jax

from jaxpp.stages.fingerprint import Known

__all__ = ["ACCUMULATED", "PER_MICROBATCH", "SHARED", "Backward", "Program", "Ref", "Role"]


class Role(enum.StrEnum):
    """What a value is to the stage that holds it. ``OFFLOADED``: its copy in host memory; ``FETCHED``: back from there."""

    PARAM = "param"
    CONSTANT = "constant"
    STATIC = "static"
    BATCH = "batch"
    KEY = "key"
    SCALE = "scale"
    ACTIVATION = "activation"
    RESIDUAL = "residual"
    OFFLOADED = "offloaded"
    FETCHED = "fetched"
    COTANGENT = "cotangent"
    GRAD = "grad"
    LOSS = "loss"
    AUX = "aux"
    ROWS = "rows"
    OPT = "opt"
    STATE = "state"
    LOSS_SCALE = "loss_scale"
    REPLICA = "replica"
    VALUE = "value"


PER_MICROBATCH = frozenset(
    {
        *(Role.BATCH, Role.KEY, Role.SCALE, Role.ACTIVATION, Role.RESIDUAL, Role.OFFLOADED, Role.FETCHED, Role.COTANGENT),
        *(Role.ROWS, Role.STATE),
    }
)
ACCUMULATED = frozenset({Role.GRAD, Role.LOSS, Role.AUX})
SHARED = frozenset({Role.PARAM, Role.OPT, Role.CONSTANT, Role.STATE, Role.LOSS_SCALE})
"""Roles whose values are the same on all replicas of a stage."""


@dataclass(frozen=True, slots=True)
class Ref:
    """The name of a value inside one stage: its role, its number, and for a cotangent the stage it comes from.

    ``shared`` says that it is the same on all replicas though others of its role are not: a gradient after it was summed; a batch
    leaf that all microbatches read whole.
    """

    role: Role
    index: int = 0
    peer: int = -1
    shared: bool = False

    @property
    def per_replica(self) -> bool:
        """Whether each replica of a stage has its own (unless the place says otherwise)."""
        return not self.shared and self.role not in SHARED


@dataclass(frozen=True, eq=False)
class Program:
    """A flat function and the names of its arguments and results; the same as itself alone.

    Attributes:
        function: takes one array for each input and returns one for each output.
        inputs: what each argument is.
        outputs: what each result is.
        avals: shape and dtype of each argument, as one replica has it.
        spans: whether the function sees all replicas at once: what each has of its own comes with one more axis, the first.
        name: what it is called where it is compiled, and so in a trace of JAX's profiler: ``stage_2_forward``.
        lean: whether it is compiled to hold little at once, rather than to run independent operations side by side.
    """

    function: Callable[..., list[jax.Array]]
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    spans: bool = False
    name: str = "program"
    lean: bool = False

    @cached_property
    def results(self) -> list[jax.ShapeDtypeStruct]:
        """Shape and dtype of each result."""
        return jax.eval_shape(self.function, *self.avals)

    @property
    def does(self) -> Hashable:
        """Equal for programs that do the same, whatever they are called; None if that takes a trace to see."""
        does = self.function.does if isinstance(self.function, Known) else None
        return None if does is None else (does, self.inputs, self.outputs, self.avals, self.spans, self.lean)

    @property
    def donated(self) -> tuple[int, ...]:
        """The arguments whose buffers the results take over: the accumulators."""
        return tuple(k for k, ref in enumerate(self.inputs) if ref.role in ACCUMULATED)


@dataclass(frozen=True)
class Backward:
    """A program of the backward, twice.

    Attributes:
        first: for the first microbatch that comes back: it makes the gradients.
        then: for all others: it adds to them.
    """

    first: Program
    then: Program

    @property
    def made(self) -> frozenset[Ref]:
        """The sums it makes or adds to."""
        return frozenset(ref for ref in self.then.outputs if ref.role in ACCUMULATED)
