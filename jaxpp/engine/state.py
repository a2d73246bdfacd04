"""What a step takes and gives: the state that training changes, and the metrics it reports."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding
from jaxtyping import Bool, Float

from jaxpp.runtime.processes.here import is_addressable
from jaxpp.runtime.processes.trees import are_across, stand_in_for
from jaxpp.runtime.transfer import HOST_MEMORY
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.stacked import assembled, is_slices
from jaxpp.stages.stage_table import bytes_in_words
from jaxpp.tables.html import html_remarks, html_table
from jaxpp.tables.text import table_lines
from jaxpp.types import Array, Leaf, Params, Tree

__all__ = ["Metrics", "State"]


class _Parts(NamedTuple):
    params: Params
    opt_state: Tree
    model_state: Tree = ()
    loss_scale: Tree = ()
    step: int = 0


class State(_Parts):
    """What training changes: ordinary trees whose leaves live on the stages that own them, and how many steps were taken.

    Where a loop over layers is cut, or stages read rows of one leaf, such leaves are arrays sharded over the stages' devices. If
    that cannot be (the slices differ in size, or share a device), the pipeline holds the slices, and whoever looks at the state
    finds the whole leaves, put together on the host: by name, index or unpacking, in ``jax.tree.map`` and in Orbax. (If the slices
    live in several processes, the leaf is an array without local shards, which ``gather`` and Orbax read.) So a state has the same
    trees whatever the cuts. ``print(state)`` says what it holds, and where.

    Attributes:
        params: the user's parameter tree.
        opt_state: the optax state for the whole of it.
        model_state: what the loss hands on from microbatch to microbatch (running statistics); ``()`` without ``has_state``.
        loss_scale: the object passed as ``loss_scale``, as the steps have changed it; ``()`` without one.
        step: how many steps were taken, those included that ``loss_scale`` skipped: a number that the host counts, so reading it
            waits for nothing.
    """

    __slots__ = ()

    @property
    def params(self) -> Params:
        """The user's parameter tree."""
        return self[0]

    @property
    def opt_state(self) -> Tree:
        """The optax state for the whole of it."""
        return self[1]

    @property
    def held(self) -> tuple[Tree, Tree, Tree, Tree]:
        """Parameters, optimizer state, model state and loss scale as the pipeline holds them, with slices: for tools."""
        params, opt_state, model_state, loss_scale, _ = super().__iter__()
        return params, opt_state, model_state, loss_scale

    def __getitem__(self, index: SupportsIndex | slice) -> Tree:  # pyright: ignore[reportIncompatibleMethodOverride]
        found = super().__getitem__(index)
        return tuple(map(self._whole, found)) if isinstance(found, tuple) and isinstance(index, slice) else self._whole(found)

    def __iter__(self) -> Iterator[Tree]:
        return map(self._whole, super().__iter__())

    def _whole(self, part: Tree) -> Tree:
        """A part with whole leaves; with stand-ins for those that are slices in several processes."""
        return assembled(part, stand_in_for if are_across(self.held) else None)

    def _asdict(self) -> dict[str, Tree]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The parts by name."""
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **parts: Tree) -> "State":  # pyright: ignore[reportIncompatibleMethodOverride]
        """The state with other parts; those that are not named stay as they are held."""
        if unknown := [name for name in parts if name not in self._fields]:
            raise TypeError(f"a State has the parts {', '.join(self._fields)}, not {', '.join(unknown)}")
        return State(**{**dict(zip(self._fields, super().__iter__(), strict=True)), **parts})

    def __repr__(self) -> str:
        return "\n".join([_title(self), *table_lines(_cells(self))])

    def _repr_html_(self) -> str:
        return html_remarks([_title(self)]) + html_table(_cells(self))


def _with_keys(state: State) -> tuple[list[tuple[object, Tree]], None]:
    return [(jax.tree_util.GetAttrKey(name), part) for name, part in zip(State._fields, state, strict=True)], None


jax.tree_util.register_pytree_with_keys(State, _with_keys, lambda _, parts: State(*parts), lambda state: (list(state), None))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class Metrics(Mapping[str, Tree]):
    """What a step reports, as device scalars; reading one waits for it, and so does ``print(metrics)``.

    It is a mapping too: ``metrics.loss`` and ``metrics["loss"]`` are the same, and ``dict(metrics)`` has what there is: no ``aux``
    without ``has_aux``, no ``grad_norm`` from ``evaluate``, no ``finite`` without ``loss_scale``.

    Attributes:
        loss: the weighted mean over microbatches.
        aux: the loss's aux: scalars averaged like the loss, arrays with one row an example joined; ``()`` without ``has_aux``.
        grad_norm: the global norm of the gradient before the optimizer, without parameters that the optimizer freezes (theirs is
            not computed), and with a bank of Theta alone; None from ``evaluate``.
        finite: with ``loss_scale``, whether all gradients were finite; if not, the step changed nothing but the scale. Else None.
        step: which step this was, counted from 1: ``state.step`` of the new state; from ``evaluate`` that of the state.
    """

    loss: Array
    aux: Tree = ()
    grad_norm: Float[Array, ""] | None = None
    finite: Bool[Array, ""] | None = None
    step: int | None = None

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self) if self._has(field.name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Tree:
        if not self._has(name):
            raise KeyError(f"{name!r}; these metrics are {', '.join(self)}")
        return getattr(self, name)

    def __repr__(self) -> str:
        """Numbers as numbers, arrays as their shapes."""
        return f"Metrics({', '.join(f'{name}={jax.tree.map(_Shown, part)!r}' for name, part in self.items())})"

    def _has(self, name: str) -> bool:
        """Whether it is a metric that the step reports."""
        value = vars(self).get(name)  # a field, or None
        return value is not None and not (name == "aux" and isinstance(value, tuple) and not value)


class _Shown:
    """A leaf of metrics that prints its number, or its shape if it has several numbers or none yet."""

    def __init__(self, leaf: Leaf):
        self._leaf = leaf

    def __repr__(self) -> str:
        leaf = self._leaf
        if not hasattr(leaf, "dtype"):
            return repr(leaf)
        number = _number(leaf)
        return describe(leaf) if number is None else f"{number:.6g}" if isinstance(number, float) else str(number)


def _number(leaf: Leaf) -> int | float | complex | None:
    """The number that a leaf is; None for an array with axes, and for what has no value (here)."""
    if isinstance(leaf, jax.Array):
        known = not isinstance(leaf, Tracer) and leaf.is_fully_addressable and not leaf.is_deleted()
        known = known and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    else:
        known = isinstance(leaf, (int, np.generic, np.ndarray))
    if not known or np.shape(leaf):
        return None
    number = np.asarray(leaf).item()
    return number if isinstance(number, (int, float, complex)) else float(number)  # NumPy does not know bfloat16


def _title(state: State) -> str:
    """What kind of state it is, and after how many steps."""
    leaves = jax.tree.leaves(state.held)
    step = _number(tuple.__getitem__(state, 4))
    title = "State of a pipeline" if step is None else f"State after {step} step{'s' if step != 1 else ''}"
    if gone := sum(_is_deleted(leaf) for leaf in leaves):
        return f"{title}, consumed by a later step ({gone} of {len(leaves)} leaves are gone): go on with pipe.state"
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        return f"{title}: traced, no arrays"
    if not all(map(is_addressable, leaves)):
        title += f"; {_here(leaves)}"
    shapes = [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    shardings = " and shardings" if any(leaf.sharding is not None for leaf in shapes) else ""
    return f"{title}: shapes{shardings}, no arrays" if shapes else title


def _here(leaves: Sequence[Leaf]) -> str:
    """Which part of a state this process holds."""
    found = {device for leaf in leaves if isinstance(leaf, jax.Array) for device in leaf.sharding.addressable_devices}
    names = ", ".join(f"{device.platform}:{device.id}" for device in sorted(found, key=lambda device: device.id))
    return f"process {jax.process_index()} of {jax.process_count()} holds " + (f"what is on {names}" if names else "nothing of it")


def _is_deleted(leaf: Leaf) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()


def _cells(state: State) -> list[list[str]]:
    rows = [["", "leaves", "numbers", "bytes", "where"]]
    for name, part in zip(State._fields, state.held, strict=False):
        if leaves := jax.tree.leaves(part):
            count = len(jax.tree.leaves(part, is_leaf=is_slices))
            numbers, num_bytes = sum(getattr(leaf, "size", 1) for leaf in leaves), sum(map(count_bytes, leaves))
            rows.append([name, str(count), f"{numbers:,}", bytes_in_words(num_bytes), _where(leaves)])
    return rows


def _where(leaves: Sequence[Leaf]) -> str:
    """The devices that hold these leaves, or the host; nothing for shapes without shardings, and for traced leaves."""
    found: set[tuple[int, str]] = set()
    for leaf in leaves:
        sharding = None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
        if isinstance(leaf, (np.ndarray, np.generic, int, float)) or getattr(sharding, "memory_kind", None) == HOST_MEMORY:
            found.add((-1, "host"))
        elif isinstance(sharding, Sharding):
            found |= {(device.id, f"{device.platform}:{device.id}") for device in sharding.device_set}
    names = [name for _, name in sorted(found)]
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]}, ... {names[-1]} ({len(names)})"
