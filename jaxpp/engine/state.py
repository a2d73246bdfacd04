"""What a step takes and gives: the state that training changes, and the metrics; made of the flat leaves that a pipeline steps."""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding
from jaxtyping import Bool, Float

from jaxpp.engine.engine import Engine
from jaxpp.engine.outcome import Outcome
from jaxpp.engine.tail import Tail
from jaxpp.errors import CutError, ParamsError, StateError, is_count, shown
from jaxpp.errors.checks import refuse_tracers
from jaxpp.lowering.step import COPIES, Leaves
from jaxpp.runtime.edges import HOST_MEMORY, join_slices, joined_home, put, split_slices, to_homes
from jaxpp.runtime.processes.here import is_addressable
from jaxpp.runtime.processes.trees import are_across, slices_of, stand_in_for
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.loss.microbatch import raw_key
from jaxpp.stages.loss.traced_loss import differences, wrong_leaves
from jaxpp.stages.stacked import Slices, assembled, is_slices, joined, on_host, whole_shape
from jaxpp.tables import bytes_in_words, html_remarks, html_table, table_lines
from jaxpp.targets import compiles_only, device_name
from jaxpp.types import Array, Aval, Device, Home, Leaf, Params, Tree

_T = TypeVar("_T", bound="State | Metrics")

_Read = Callable[[Outcome[Array]], Mapping[str, Tree]]

_RESTORE = "checkpointer.restore(path, pipe.abstract_state(...))"


class _Field:
    """A field of a dataclass that is seen otherwise than it is kept: as ``see`` finds it by its name."""

    def __init__(self, see: Callable[[Any, str], Tree], *default: Tree):
        self._see, self._default = see, default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __set__(self, of: object, value: Tree) -> None:
        object.__setattr__(of, f"_{self._name}", value)  # the dataclass is frozen

    def __get__(self, of: object, owner: type | None = None) -> Tree:
        if of is not None:
            return self._see(of, self._name)
        if not self._default:
            raise AttributeError(self._name)  # a field without a default, for dataclass
        return self._default[0]


class _OfStep:
    """What a step makes; some of its fields may be left to the rest of the step until somebody looks at one of them."""

    _unfinished: ClassVar[tuple[Tail, _Read] | None] = None  # what makes them, if that is left to do

    def _kept(self, name: str) -> Tree:
        """A field as it is kept; the rest of the step that makes it is handed over if that is left to do."""
        if (rest := self._unfinished) is not None:  # another thread may hand it over at the same time
            with rest[0].looking():
                self._take(rest[0].outcome())
        return getattr(self, f"_{name}" if hasattr(self, f"_{name}") else name)

    def _take(self, outcome: Outcome[Array]) -> None:
        if (rest := self._unfinished) is not None:
            for each, value in rest[1](outcome).items():
                object.__setattr__(self, f"_{each}", value)
            object.__setattr__(self, "_unfinished", None)  # the rest of the step is held no longer

    def __reduce__(self) -> tuple[type, tuple[Tree, ...]]:  # for pickle and copy
        return type(self), tuple(self._kept(each.name) for each in fields(cast("State", self)))


def left_to(tail: Tail, read: _Read, made: _T, *, at_once: bool = False) -> _T:
    """A new state, or metrics, some of whose fields the rest of a step makes; ``read`` finds them in what the step returns.

    They are there when somebody looks at one of them; ``at_once``: as soon as the rest has been handed over, even if nobody looks,
    since what is kept then holds no state.
    """
    object.__setattr__(made, "_unfinished", (tail, read))
    if at_once:
        known = weakref.ref(made)  # or the two would hold one another, and all arrays of the step until a garbage collection
        tail.then.append(lambda outcome: None if (there := known()) is None else there._take(outcome))
    return made


def _whole(state: "State", name: str) -> Tree:
    """A part of a state, which is kept as the pipeline holds it, with whole leaves; stand-ins for those of several processes."""
    return assembled(state._kept(name), stand_in_for if are_across(state.held) else None)


def _previous(state: "State", name: str) -> Tree:
    """The parameters before the last step, of which those are kept that steps change, with the others, which are the same."""
    previous = _whole(state, name)
    if _is_nothing(previous) or not any(leaf is None for leaf in _leaves(previous)[0]):
        return previous
    (olds, tree), (news, same) = _leaves(previous), _leaves(state.params)
    if tree != same:
        return previous
    return tree.unflatten(new if old is None else old for old, new in zip(olds, news, strict=True))


_LATE = ("previous_scale", *COPIES)  # the parts that a state may lack: what was before the last step
_PARTS = ("params", "opt_state", "model_state", "loss_scale", *_LATE)


@dataclass(frozen=True, repr=False, eq=False)
class State(_OfStep):
    """What training changes: ordinary trees whose leaves live on the stages that own them, and how many steps were taken.

    It is a frozen dataclass and a pytree: ``state.replace(params=...)`` makes another with one part replaced.

    Where a loop over layers is cut, or stages read rows of one leaf, such leaves are arrays sharded over the stages' devices. If
    the slices differ in size or share a device, the pipeline holds the slices, and whoever looks at the state, also in
    ``jax.tree.map`` and Orbax, finds whole leaves, put together on the host; if the slices live in several processes, arrays
    without local shards, which ``gather`` and Orbax read. So a state has the same trees whatever the cuts. ``print(state)`` says
    what it holds, and where.

    Attributes:
        params: the user's parameter tree.
        opt_state: the optax state for the whole of it.
        model_state: what the loss hands on from microbatch to microbatch (running statistics); ``()`` without ``has_state``.
        loss_scale: the object passed as ``loss_scale``, as the steps have changed it; ``()`` without one.
        step: how many steps were taken, those that ``loss_scale`` skipped included; counted on the host: reading it does not wait.
        previous: with ``delay=1``, the parameters before the last step, of which the next step's gradients are; a tree like
            ``params``. What no step changes is held once: it is the array of ``params``, and no leaf of the state besides, which
            has None there. ``()`` without ``delay``.
        previous_scale: with ``delay=1`` and a loss scale, the scale before the last step, from which the next step's backwards
            start; ``()`` without.
    """

    params: Params = _Field(_whole)
    opt_state: Tree = _Field(_whole)
    model_state: Tree = _Field(_whole, ())
    loss_scale: Tree = _Field(_whole, ())
    step: int = 0
    previous_scale: Tree = _Field(_whole, ())
    previous: Params = _Field(_previous, ())

    def __post_init__(self):
        _make_serializable()

    @property
    def held(self) -> tuple[Tree, ...]:
        """Parameters, optimizer state, model state, loss scale, and the last two as they were, as held, with slices: for tools."""
        return tuple(self._kept(name) for name in _PARTS)

    def replace(self, **parts: Tree) -> "State":
        """The state with other parts, the rest as it is held; a part that a state does not have raises a ``TypeError``."""
        kept = {each.name: self._kept(each.name) for each in fields(self)}
        if unknown := [name for name in parts if name not in kept]:
            raise TypeError(f"a State has the parts {', '.join(kept)}, not {', '.join(unknown)}")
        return State(**{**kept, **parts})

    _replace = replace  # as of the tuple that a state was

    def __getitem__(self, index: object) -> Tree:  # iteration and unpacking end here too
        got, fix = f"state[{index!r}], or a state that is unpacked", "write state.params, state.opt_state, state.step"
        raise StateError("state", "the parts of a state have names", got, fix)

    def __repr__(self) -> str:
        return "\n".join([_title(self), *table_lines(_cells(self))])

    def _repr_html_(self) -> str:
        return html_remarks([_title(self)]) + html_table(_cells(self))


def _of_parts(parts: Sequence[Tree], step: int | None = 0) -> State:
    """The state with these parts, in the order of ``_PARTS``."""
    return State(**dict(zip(_PARTS, parts, strict=True)), step=step)  # pyright: ignore[reportArgumentType]


def _names(state: State) -> tuple[str, ...]:
    """The parts of a state as a tree, of which it may lack what was before the last step: there is none without ``delay``."""
    return tuple(each.name for each in fields(state) if each.name not in _LATE or not _is_nothing(state._kept(each.name)))


def _is_nothing(part: Tree) -> bool:
    return isinstance(part, tuple) and not part


def _leaves(tree: Tree) -> tuple[list[Leaf], Tree]:
    """The leaves of parameters: None, which stands for one that is not kept, and a leaf that is held as slices are leaves too."""
    return jax.tree.flatten(tree, is_leaf=lambda node: node is None or is_slices(node))


jax.tree_util.register_pytree_with_keys(
    State,
    lambda state: ([(jax.tree_util.GetAttrKey(name), _whole(state, name)) for name in _names(state)], _names(state)),
    lambda names, parts: State(**dict(zip(names, parts, strict=True))),
)


def settle(state: State) -> None:
    """Hand over the rest of the step that made a state, if that is left to do; whoever looks at a state does so."""
    state._kept("params")


def tail_of(state: object, engine: Engine) -> Tail | None:
    """What is left of the step of this engine that made a state, if anything is."""
    rest = state._unfinished if isinstance(state, State) else None
    tail = None if rest is None else rest[0]
    return tail if tail is not None and tail.engine is engine and not tail.ended else None


@functools.cache
def _make_serializable() -> None:
    from flax import serialization  # noqa: PLC0415  (takes a fifth of a second)

    def write(state: State) -> dict[str, Tree]:
        return {name: serialization.to_state_dict(_whole(state, name)) for name in _names(state)}

    def read(state: State, parts: dict[str, Tree]) -> State:
        names = _names(state)
        if not parts.keys() ^ set(names) <= set(_LATE):
            raise ValueError(f"a State has the parts {', '.join(names)}, not {', '.join(map(str, parts))}")
        common = [name for name in names if name in parts]
        restored = {name: serialization.from_state_dict(_whole(state, name), parts[name], name=name) for name in common}
        return state.replace(**{**dict.fromkeys(_LATE, ()), **restored})

    serialization.register_serialization_state(State, write, read)


def _squares(metrics: "Metrics", name: str) -> Tree:
    return metrics._kept(name) or {}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class Metrics(_OfStep, Mapping[str, Tree]):
    """What a step reports, as device scalars; reading one waits for it, and so does ``print(metrics)``.

    It is a mapping too: ``metrics["loss"]``, and ``dict(metrics)`` has what there is: maybe no ``aux``, ``grad_norm``, ``finite``.

    Attributes:
        loss: the weighted mean over microbatches.
        aux: the loss's aux: scalars averaged like the loss, arrays with one row an example joined; ``()`` without ``has_aux``.
        grad_norm: the global norm of the gradient before the optimizer, without frozen parameters, and with a bank of
            Theta alone; None from ``evaluate``.
        finite: with ``loss_scale``, whether all gradients were finite; if not, the step changed nothing but the scale. Else None.
        step: which step this was, counted from 1: ``state.step`` of the new state; from ``evaluate`` that of the state.
        squares: the square of each stage's part of ``grad_norm``, by stage, each on its device; empty from ``evaluate``, and not an
            item of the mapping. See ``by_stage``.
    """

    loss: Array
    aux: Tree = ()
    grad_norm: Float[Array, ""] | None = cast("None", _Field(_OfStep._kept, None))  # noqa: RUF009
    finite: Bool[Array, ""] | None = cast("None", _Field(_OfStep._kept, None))  # noqa: RUF009
    step: int | None = None
    squares: Mapping[int, Float[Array, ""]] = cast("dict[int, Array]", _Field(_squares, None))

    @property
    def by_stage(self) -> dict[int, Float[Array, ""]]:
        """The norm of the gradients of each stage that learns, computed on its device; of several processes, of stages of this one.

        Example:
            >>> import jax.numpy as jnp, jaxpp, optax
            >>> pipe = jaxpp.Pipeline(lambda w, x: ((x * w["a"]) * w["b"]).mean(), optax.sgd(0.1), num_stages=2, num_microbatches=2)
            >>> state = pipe.init({"a": jnp.ones(()), "b": jnp.ones(())}, jnp.ones(4))
            >>> {stage: float(norm) for stage, norm in pipe.step(state, jnp.ones(4))[1].by_stage.items()}
            {0: 1.0, 1: 1.0}
        """
        return {stage: jnp.sqrt(square) for stage, square in self.squares.items() if is_addressable(square)}

    def __iter__(self) -> Iterator[str]:
        return (each.name for each in fields(self) if self._has(each.name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Tree:
        if not self._has(name):
            raise KeyError(f"{name!r}; these metrics are {', '.join(self)}")
        return getattr(self, name)

    if not TYPE_CHECKING:  # which would take every name for an attribute

        def __getattr__(self, name: str) -> Tree:
            """Say where a name that is none of these is in aux; of a step in flow nothing is waited for."""
            there = isinstance(self.aux, Mapping) and name in self.aux
            names = ", ".join("by_stage" if each.name == "squares" else each.name for each in fields(self))
            fix = f"write metrics.aux[{name!r}]" if there else f"the names are {names}"
            raise AttributeError(f"metrics have no {name}; {fix}", name=name, obj=self)

    def to_dict(self) -> dict[str, Tree]:
        """The items as Python numbers, and lists of numbers, in the containers of aux: what ``json`` takes, which takes no mapping.

        Example:
            >>> import json, jax.numpy as jnp, jaxpp, optax
            >>> pipe = jaxpp.Pipeline(lambda w, x: (x * w["a"]).mean(), optax.sgd(0.1), num_stages=1, num_microbatches=2)
            >>> _, metrics = pipe.step(pipe.init({"a": jnp.ones(())}, jnp.ones(4)), jnp.ones(4))
            >>> json.dumps(metrics.to_dict())
            '{"loss": 1.0, "grad_norm": 1.0, "step": 1}'
        """
        return {name: jax.tree.map(_plain, part) for name, part in self.items()}

    def __repr__(self) -> str:
        return f"Metrics({', '.join(f'{name}={jax.tree.map(_Shown, part)!r}' for name, part in self.items())})"

    def _has(self, name: str) -> bool:
        value = getattr(self, name) if name in {each.name for each in fields(self)} else None
        return value is not None and name != "squares" and not (name == "aux" and isinstance(value, tuple) and not value)


def _plain(leaf: Leaf) -> Leaf:
    """A leaf as Python numbers: an array, or a key as the numbers that it is made of; anything else as it is."""
    if not hasattr(leaf, "dtype"):
        return leaf
    return np.asarray(raw_key(leaf)).tolist()


class _Shown:
    def __init__(self, leaf: Leaf):
        self._leaf = leaf

    def __repr__(self) -> str:
        leaf = self._leaf
        if not hasattr(leaf, "dtype"):
            return repr(leaf)
        number = _number(leaf)
        return describe(leaf) if number is None else f"{number:.6g}" if isinstance(number, float) else str(number)


def _number(leaf: Leaf) -> int | float | complex | None:
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
    leaves = jax.tree.leaves(state.held)
    step = _number(state.step)
    title = "State of a pipeline" if step is None else f"State after {step} step{'s' if step != 1 else ''}"
    if gone := num_gone(state):
        return f"{title}, consumed by a later step ({gone} of {len(leaves)} leaves are gone): go on with pipe.state"
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        return f"{title}: traced, no arrays"
    if not all(map(is_addressable, leaves)):
        found = {device for leaf in leaves if isinstance(leaf, jax.Array) for device in leaf.sharding.addressable_devices}
        names = ", ".join(f"{device.platform}:{device.id}" for device in sorted(found, key=lambda device: device.id))
        what = f"what is on {names}" if names else "nothing of it"
        title += f"; process {jax.process_index()} of {jax.process_count()} holds {what}"
    shapes = [leaf for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    shardings = " and shardings" if any(leaf.sharding is not None for leaf in shapes) else ""
    return f"{title}: shapes{shardings}, no arrays" if shapes else title


def num_gone(state: State) -> int:
    """How many of its leaves were consumed."""
    leaves = jax.tree.leaves(state.held)
    return sum(isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted() for leaf in leaves)


def _cells(state: State) -> list[list[str]]:
    rows = [["", "leaves", "numbers", "bytes", "where"]]
    for name, part in zip(_PARTS, state.held, strict=True):
        if leaves := jax.tree.leaves(part):
            count = len(jax.tree.leaves(part, is_leaf=is_slices))
            numbers, num_bytes = sum(getattr(leaf, "size", 1) for leaf in leaves), sum(map(count_bytes, leaves))
            rows.append([name, str(count), f"{numbers:,}", bytes_in_words(num_bytes), _where(leaves)])
    return rows


def _where(leaves: Sequence[Leaf]) -> str:
    found: set[tuple[int, str]] = set()
    for leaf in leaves:
        sharding = None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
        if isinstance(leaf, (np.ndarray, np.generic, int, float)) or getattr(sharding, "memory_kind", None) == HOST_MEMORY:
            found.add((-1, "host"))
        elif isinstance(sharding, Sharding):
            found |= {
                (device.id, device_name(device) if compiles_only(device) else f"{device.platform}:{device.id}")
                for device in sharding.device_set
            }
    names = [name for _, name in sorted(found)]
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]}, ... {names[-1]} ({len(names)})"


class States:
    """Makes states of a pipeline's flat leaves, and takes them apart again; ``trees`` has the structure of each part as held."""

    def __init__(self, trees: Sequence[Tree], shapes: Leaves[Aval], homes: Leaves[Home]):
        self._trees, self._groups, self._homes = tuple(trees), shapes, homes.flat()
        self._shapes = shapes.flat()
        self._sliced = any(isinstance(node, Slices) for node in self._nodes(self._shapes))
        self._last: list[weakref.ref[Array]] = []

    def _fill(self, leaves: Sequence[Leaf]) -> tuple[Tree, ...]:
        supply = iter(leaves)
        return tuple(tree.unflatten([next(supply) for _ in range(tree.num_leaves)]) for tree in self._trees)

    def _nodes(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        return jax.tree.leaves(joined(self._fill(leaves), lambda node: node), is_leaf=is_slices)

    def after(self, tail: Tail, step: int) -> State:
        """The state after a step whose rest is handed over beside the next one, or when somebody looks at the state."""
        held = self._groups.own

        def read(outcome: Outcome[Array]) -> dict[str, Tree]:
            leaves = outcome.state if held else outcome.state.shared
            return dict(zip(_PARTS, self.parts(leaves), strict=True))

        return left_to(tail, read, _of_parts([()] * len(_PARTS), step))

    def wrap(self, groups: Leaves[Array], step: int | None = 0) -> State:
        """The state that has these leaves, each on its owner, after so many steps; None: it is not counted."""
        return _of_parts(self.parts(groups), step)

    def parts(self, groups: Leaves[Array]) -> tuple[Tree, ...]:
        """The parts of the newest state, which has these leaves."""
        leaves = groups.flat()
        held = self._fill(leaves)
        if self._sliced:
            held = joined(held, join_slices)
            leaves = jax.tree.leaves(held)
        self._last = list(map(weakref.ref, leaves))
        return held

    @property
    def abstract(self) -> State:
        """The shape of each leaf, with the sharding of its owner; see ``joined_home`` for what is held as slices."""
        return jax.tree.map(lambda leaf: leaf, self._abstract)  # containers of its own: a caller may change them

    @cached_property
    def _abstract(self) -> State:
        tree = jax.tree.structure(joined(self._fill(self._shapes), whole_shape))
        pairs = zip(map(whole_shape, self._nodes(self._shapes)), self._nodes(self._homes), strict=True)
        leaves = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=joined_home(home)) for aval, home in pairs]
        return _of_parts(tree.unflatten(leaves))

    def check(self, state: State) -> None:
        """Refuse a state, or the shapes of one, that is not of this pipeline's parameters and optimizer."""
        if wrong := _other_parts(_of_parts(joined(state.held, whole_shape)), self._abstract):
            rule = "pipelines of one state have the same parameters, optimizer and model state"
            raise StateError("state", rule, wrong, "pass the state of the first pipeline")

    def check_alike(self, other: "States") -> None:
        """Refuse another pipeline's states if leaves of them live elsewhere."""
        if self._homes != other._homes:
            leaves = jax.tree_util.tree_leaves_with_path(_of_parts(self._fill(self._shapes), step=None))
            paths = [jax.tree_util.keystr(path) for path, _ in leaves]
            pairs = zip(paths, self._homes, other._homes, strict=True)
            got = [f"state{path}: {there} instead of {here}" for path, here, there in pairs if here != there][:8]
            rule = "the steps of pipelines of one state find it on the same devices"
            fix = "pass a schedule that has the stages on the ranks on which the first has them, or make a pipeline of its own"
            raise CutError("other", rule, got, fix)

    def unwrap(self, state: State, where: str = "step", *, consumed: bool = False) -> Leaves[Array]:
        """The leaves of what the user passed to the method ``where`` as a state, each on its owner.

        If any live elsewhere and their buffers will be ``consumed``, all are copies: a step consumes all of a state, or nothing.
        """
        held = jax.tree.leaves(state.held) if isinstance(state, State) else []
        mine = len(held) == len(self._last) and all(ref() is leaf for ref, leaf in zip(self._last, held, strict=True))
        if held and mine and not any(leaf.is_deleted() for leaf in held):
            return self._groups.fill(self._split(state) if self._sliced else held)
        refuse_tracers(f"pipe.{where}(state, batch, key)", held if isinstance(state, State) else state)
        state = self._fitted(state) if isinstance(state, State) else state
        _check_state(state, self._abstract)
        leaves = self._split(state)
        placed, seen = to_homes(leaves, self._homes), set()
        own = {buffer for leaf in held for buffer in _buffers(leaf)}
        stays = [not own.isdisjoint(_buffers(leaf)) or not leaf.addressable_shards for leaf in placed]
        moved = any(isinstance(leaf, jax.Array) and not here for leaf, here in zip(leaves, stays, strict=True))
        copy = consumed and (moved or _regrouped(state, leaves))
        for k, leaf in enumerate(placed):
            buffers = _buffers(leaf)
            if (copy and stays[k]) or not seen.isdisjoint(buffers):  # one array in two places has a buffer for each to give up
                placed[k] = put(leaf, self._homes[k])
            seen.update(buffers)
        return self._groups.fill(placed)

    def _fitted(self, state: State) -> State:
        """The state with the previous parameters and scale that this pipeline keeps: checkpoints cross between all ``delay``s.

        Those that the state lacks are its newest, as in a first state; those that are not kept here are left out.
        """
        if (lacks := _is_nothing(state.previous_scale)) != _is_nothing(self._abstract.previous_scale):
            state = state.replace(previous_scale=getattr(state.loss_scale, "scale", ()) if lacks else ())
        params, *_, previous = state.held
        (news, tree), wanted = _leaves(params), self._abstract.held[-1]
        none = tree.unflatten([None] * len(news))
        (olds, old_tree), (wants, want_tree) = (_leaves(none if _is_nothing(each) else each) for each in (previous, wanted))
        if not tree == old_tree == want_tree:
            return state  # which is refused
        found = [None if want is None else new if old is None else old for want, old, new in zip(wants, olds, news, strict=True)]
        if all(leaf is old for leaf, old in zip(found, olds, strict=True)):
            return state
        return state.replace(previous=() if _is_nothing(wanted) else tree.unflatten(found))

    def bring(self, params: Tree, model_state: Tree = ()) -> Leaves[Array]:
        """The leaves of parameters, and of a model state if there is one, each on its owner: as they are if they live there."""
        self.check_params(params, model_state)
        shapes, homes = self._fill(self._shapes), self._fill(self._homes)
        found = []
        for tree, k in ((params, 0), (model_state, 2)):
            nodes = jax.tree.leaves(joined(shapes[k], lambda node: node), is_leaf=is_slices)
            found.append(to_homes(_parted(tree, nodes), jax.tree.leaves(homes[k])))
        return Leaves(params=found[0], model_state=found[1])

    def check_params(self, params: Tree, model_state: Tree = ()) -> None:
        """Refuse parameters, or their shapes, that are not of this pipeline's model: name each leaf that differs."""
        trained = self._trees[1] != jax.tree.structure(())
        for name, tree, k in (("params", params, 0), ("model_state", model_state, 2)):
            shapes, expected = joined(tree, whole_shape), self._abstract.held[k]
            arrays = [(path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(shapes) if hasattr(leaf, "dtype")]
            if odd := wrong_leaves(name, arrays, "make an array of it with np.asarray"):
                raise ParamsError(name, "every leaf of the parameters is an array as JAX takes it", odd.lines, odd.fix)
            if wrong := differences(shapes, expected, name, as_taken=True):
                rule = "the parameters are those of the model that this was made for, with its tree, shapes and types"
                fix = f"pass {f'state.{name}' if trained else 'what init returned'}, or a tree with the same leaves"
                raise ParamsError(name, rule, wrong, fix)

    def _split(self, state: State) -> list[Leaf]:
        return _parted(state.held, self._nodes(self._shapes))


def states_of(engine: Engine, *, own: bool = True) -> States:
    """What makes the states of an engine's steps; unless the states hold what each replica has of its ``own``, a bank holds it."""
    placed, scaling = engine.placed, engine.options.loss_scale
    params, model_state = map(jax.tree.structure, (*placed.layout.variables, ())[:2])
    opt_state = jax.tree.structure(()) if placed.update is None else placed.update.tree
    scale = jax.tree.structure(() if scaling is None else scaling.example)
    copied = [{leaf.index for leaf in getattr(placed.leaves, group)} for group in COPIES]
    held = [[leaf if leaf in there else None for leaf in range(params.num_leaves)] for there in copied]
    copies = [jax.tree.structure(params.unflatten(each) if there else ()) for each, there in zip(held, copied, strict=True)]
    late = jax.tree.structure(0 if scaling is not None and scaling.is_late else ())
    if own:
        return States((params, opt_state, model_state, scale, late, *copies), placed.shapes, placed.homes)
    shared = [each if each.num_leaves == 0 else each.children()[0] for each in copies]
    trees = params.children()[0], opt_state.children()[0], model_state, scale, late, *shared
    return States(trees, placed.shapes.shared, placed.homes.shared)


def steps_of(state: State) -> int:
    """How many steps led to a state: the number, which may come from a file as an array."""
    step: Any = state.step
    if type(step) is int and step >= 0:
        return step
    try:
        found = np.asarray(step).item()
    except (TypeError, ValueError):
        found = -1
    if not is_count(found):
        fix = "give the number of steps that were taken, state._replace(step=0) for example"
        raise StateError("state.step", "the number of a step is a whole number, 0 or more", shown(step), fix)
    return found


def _regrouped(state: State, leaves: Sequence[Leaf]) -> bool:
    """Whether slices of a state are none of the leaves that were made of it: they are put together, or divided otherwise."""
    there = set(map(id, leaves))
    nodes = [node for node in jax.tree.leaves(state.held, is_leaf=is_slices) if isinstance(node, Slices)]
    return any(id(part) not in there for node in nodes for part in node.parts)


def _buffers(leaf: Leaf) -> list[tuple[Device, int]]:
    """What tells whether two arrays share memory: the addresses of an array's shards; nothing for what is no device array."""
    if not isinstance(leaf, jax.Array):
        return []
    data = jax.block_until_ready(raw_key(leaf))  # asking for an address waits with Python's lock, which a host callback may want
    return [(shard.device, shard.data.unsafe_buffer_pointer()) for shard in data.addressable_shards if shard.data.size]


def _parted(tree: Tree, nodes: Sequence[Leaf]) -> list[Leaf]:
    pairs = zip(jax.tree.leaves(tree, is_leaf=is_slices), nodes, strict=True)  # a leaf may be slices where it comes from alone
    return [part for leaf, node in pairs for part in (_parts(leaf, node) if isinstance(node, Slices) else [assembled(leaf)])]


def _parts(leaf: Leaf, node: Slices) -> Sequence[Leaf]:
    if isinstance(leaf, Slices):
        if leaf.division == node.division:
            return leaf.parts
        leaf = assembled(leaf)
    if isinstance(leaf, jax.Array) and (known := slices_of(leaf)) is not None:
        if known.division == node.division:
            return known.parts
        rule = "a leaf that is cut unequally, and lives in several processes, is stepped by a pipeline that cuts it the same way"
        fix = "save a checkpoint and restore it to the abstract_state of this pipeline"
        raise StateError("state", rule, f"slices of {known.sizes} rows, and the pipeline has {node.sizes}", fix)
    shapes = node.shapes_of(leaf)
    found = split_slices(leaf, node.axis) if isinstance(leaf, jax.Array) else []
    if [part.shape for part in found] == [part.shape for part in shapes]:
        return found
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.addressable_shards:  # nor is any slice here
        return shapes
    if isinstance(leaf, jax.Array) and (len(leaf.sharding.device_set) > 1 or leaf.sharding.memory_kind == HOST_MEMORY):
        leaf = on_host(leaf)  # restored to the host, or divided in another way: no device has room for the whole
    return node.of(leaf)


def _check_state(state: object, expected: State) -> None:
    where, again = "state", "pass the state that init or step returned"
    if not isinstance(state, State):
        fix = f"{again}; a checkpoint comes back as one if it is restored to the shapes of one, {_RESTORE}"
        if isinstance(state, tuple) and state and isinstance(state[0], State):
            fix = "take the two apart: state, metrics = pipe.step(state, batch)"
            raise StateError(where, "a state is a jaxpp.State", "the pair of a state and metrics that step returns", fix)
        raise StateError(where, "a state is a jaxpp.State", type(state).__name__, fix)
    shapes = _of_parts(joined(state.held, whole_shape))
    if odd := _other_parts(shapes, expected):
        rule = "a state has the trees of parameters, optimizer and model state that this pipeline was initialised with"
        raise StateError(where, rule, odd, f"{again}, or restore a checkpoint to its shapes: {_RESTORE}")
    leaves = jax.tree_util.tree_leaves_with_path(shapes.replace(step=None))
    given = [(path, leaf) for path, leaf in leaves if not isinstance(leaf, jax.Array)]  # of these, some may be gone
    if odd := wrong_leaves(where, given, "restore it with its arrays, or convert with jnp.asarray"):
        raise StateError(where, "the leaves of a state are arrays", odd.lines, odd.fix)
    held = jax.tree.leaves(state.held)
    if empty := sum(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in held):
        fix = f"restore a checkpoint to these shapes, {_RESTORE}, or make parameters with pipe.init(...)"
        raise StateError(where, "the leaves of a state are arrays", f"{empty} of {len(held)} leaves are shapes without arrays", fix)
    if gone := num_gone(state):
        rule = "step reuses the buffers of the state it is given, so that state cannot be used again"
        known = isinstance(state.step, int)  # not an array, which may be gone too
        which = f"the state after {state.step} step{'s' * (state.step != 1)}," if known else "a state"
        got = [f"{which} consumed by an earlier step ({gone} of {len(held)} leaves are gone)"]
        if gone <= len(held) / 2 and (lost := wrong_leaves(where, leaves, "")):  # of few leaves it is worth saying which
            got += lost.lines[:4]
        copy = "to keep part of a state, copy it before the step, ema = jax.tree.map(jnp.copy, state.params)"
        fix = f"go on with state = pipe.state, the newest; {copy}, or call step(..., donate=False) to keep all"
        raise StateError(where, rule, got, fix)
    steps_of(state)
    if wrong := _other_parts(shapes, expected, shapes=True):
        fix = f"{again}; a checkpoint of this model has these shapes, and another model needs a pipeline of its own"
        raise StateError(where, "a state's leaves keep their shapes and types", wrong, fix)


def _other_parts(found: State, wanted: State, *, shapes: bool = False) -> list[str]:
    """Where two states differ: in their trees, and with ``shapes`` in their leaves."""
    pairs = zip(_PARTS, found.held, wanted.held, strict=True)
    return [line for part, a, b in pairs for line in differences(a, b, f"state.{part}", shapes=shapes, as_taken=True)]
