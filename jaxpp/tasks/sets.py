"""The sets of a bank by name: the structure and the shapes of each, and which of its leaves this process holds."""

import difflib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxpp.errors import BankError
from jaxpp.runtime.edges import HOST_MEMORY
from jaxpp.runtime.processes.here import elsewhere, is_here, processes_of, spread
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.loss.traced_loss import differences, unfit
from jaxpp.tasks.host_store import HostStore
from jaxpp.types import Leaf, Params, Tree


class SetLayout(NamedTuple):
    """The structure of a set's two trees, and shape and dtype of its leaves: the parameters, then the optimizer state."""

    params: Tree
    opt_state: Tree
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    def fill(self, leaves: Sequence[Leaf]) -> tuple[Params, Tree]:
        """Leaves as the two trees."""
        cut = self.params.num_leaves
        return self.params.unflatten(leaves[:cut]), self.opt_state.unflatten(leaves[cut:])

    def differences(self, params: Params, opt_state: Tree) -> list[str]:
        """How two trees differ from this layout: a line for each difference."""
        wanted = self.fill(self.shapes)
        return [*differences(params, wanted[0], "params"), *differences(opt_state, wanted[1], "opt_state")]


@dataclass(frozen=True)
class SetHomes:
    """Where the leaves of sets of one layout live: each on the devices of its stage, the same on all replicas."""

    shardings: tuple[Sharding, ...]

    @cached_property
    def here(self) -> tuple[int, ...]:
        """The numbers of the leaves that this process holds."""
        return tuple(k for k, sharding in enumerate(self.shardings) if is_here(sharding))

    @property
    def processes(self) -> tuple[tuple[int, ...], ...]:
        """The processes that hold each leaf."""
        return tuple(processes_of(sharding.device_set) for sharding in self.shardings)


class BankSets:
    """The layouts of the sets, in order, and the store of the leaves here; ``homes`` says where those of several processes live."""

    def __init__(self, store: HostStore):
        self.store = store
        self.layouts: dict[Hashable, SetLayout] = {}
        self.homes: dict[SetLayout, SetHomes] = {}

    def layout(self, name: Hashable, where: str) -> SetLayout:
        """The layout of a set; ``where`` is the user's call, for the error, which names sets of similar names."""
        if not isinstance(name, Hashable):
            raise BankError(where, "a name is a text, a number or a tuple of these", type(name).__name__, "pass the set's name")
        if name not in self.layouts:
            if isinstance(name, tuple) and name and all(part in self.layouts for part in name if isinstance(part, Hashable)):
                rule, got = "a tuple is the name of one set; one set a replica is a list", repr(name)
                raise BankError(where, rule, got, f"pass {list(name)!r}")
            near = difflib.get_close_matches(str(name), map(str, self.layouts))
            got, fix = f"{name!r}; the bank has {few_names(tuple(self.layouts)) or 'no sets'}", f"bank.add({name!r}, params)"
            fix = f"is it {' or '.join(near)}? If it is new, {fix}" if near else f"{fix} first"
            raise BankError(where, "a name is that of a set in the bank", got, fix)
        return self.layouts[name]

    def whole_layout(self, name: Hashable, where: str, fix: str) -> SetLayout:
        """The layout of a set that is whole in this process; ``fix`` is the call that uses a divided set."""
        layout = self.layout(name, where)
        homes = self.homes.get(layout)
        if homes is not None and len(homes.here) < len(homes.shardings):
            rule = "once a pipeline of several processes uses a bank, each of them holds the leaves of its own stages only"
            raise BankError(where, rule, f"{len(homes.here)} of {len(homes.shardings)} leaves are here", f"use it by {fix}")
        return layout

    def divide(self, layout: SetLayout, homes: SetHomes) -> None:
        """From now on, hold of the sets of this layout only the leaves that live in this process of several."""
        before = self.homes.get(layout)
        if before is not None and before.processes != homes.processes:
            got = f"processes {before.processes} by the first pipeline, {homes.processes} by this one"
            fix = "give each pipeline a bank of its own, or the same stages and devices"
            raise BankError("Pipeline(bank=...)", "each leaf of a set stays in the processes whose stages use it", got, fix)
        if before is None and len(homes.here) < len(homes.shardings):
            for name in (name for name, other in self.layouts.items() if other == layout):
                self.store.keep_only(name, homes.here)
        self.homes[layout] = homes

    def here(self, layout: SetLayout, leaves: Sequence[Leaf]) -> Sequence[Leaf]:
        """Of all leaves of a set those that this process holds."""
        return [leaves[k] for k in self.homes[layout].here] if layout in self.homes else leaves

    def everywhere(self, layout: SetLayout, leaves: Sequence[Leaf]) -> list[Leaf]:
        """All leaves of a set whose leaves here are these: NumPy arrays and keys; in several processes arrays beside the stages."""
        if layout not in self.homes:
            return [leaf if is_key(leaf) else np.asarray(leaf) for leaf in leaves]
        held = dict(zip(self.homes[layout].here, leaves, strict=True))
        return [
            spread(np.asarray(held[k]), home, HOST_MEMORY) if k in held else elsewhere(aval, home.with_memory_kind(HOST_MEMORY))
            for k, (aval, home) in enumerate(zip(layout.shapes, self.homes[layout].shardings, strict=True))
        ]


def check_params(where: str, params: Params) -> None:
    """Refuse what cannot be the parameters of a set: a tree without leaves, or with others than floating arrays and scalars."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise BankError(where, "a set has at least one array", "a tree without leaves", "pass the task's parameters")
    wrong = list[str]()
    for path, leaf in leaves:
        why = None if isinstance(leaf, jax.Array) else unfit(leaf, numbers=False)  # what a step has taken over is told elsewhere
        if why is not None or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            what = describe(leaf) if why is None else "a " * ("[" not in why.what) + why.what
            wrong.append(f"params{jax.tree_util.keystr(path)} is {what}")
    if wrong:
        fix = "make a Python number an array with np.float32(number); keep integers with what all tasks share, such as an int8 base"
        raise BankError(where, "the parameters of a set are arrays of floating numbers", wrong, fix)


def few_names(names: Sequence[Hashable]) -> str:
    """A few names, and how many there are if that is not all."""
    few = ", ".join(map(str, names[:4]))
    return few if len(names) <= 4 else f"{few}, ... ({len(names)})"


def is_key(leaf: Leaf) -> bool:
    """Whether an array holds typed PRNG keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
