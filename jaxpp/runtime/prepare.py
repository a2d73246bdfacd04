"""From shapes to plans, each made once.

The first batch decides the *layout*: where the loss is cut and which stage owns each parameter. Everything later (a smaller last
batch, an evaluation loss) is traced again at its own shapes and cut so that the owners stay. Traces, programs and plans are kept
by shape, so a shape is compiled once.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp

from jaxpp.errors import ArgumentError
from jaxpp.options import Settings
from jaxpp.plan.step import Job
from jaxpp.plan.weights import weigh
from jaxpp.runtime.compile import Programs
from jaxpp.runtime.measure import clock_of, stage_times
from jaxpp.runtime.placement import Placement
from jaxpp.runtime.sharding_rules import specs_of
from jaxpp.runtime.slicing import Permit, slicing_at
from jaxpp.stages.cuts.balance import Cuts, align, balance, owners
from jaxpp.stages.cuts.by_name import resolve
from jaxpp.stages.cuts.cut import CutLoss, cut
from jaxpp.stages.cuts.uneven import check_giant, uneven
from jaxpp.stages.jaxpr import aval_of
from jaxpp.stages.joint import Joint
from jaxpp.stages.loops.stacked import Slicing, concatenated, joined, slicing_of
from jaxpp.stages.loss.aux import Reducer, check_aux, reducers_of
from jaxpp.stages.loss.key import KeyArgument, key_argument, name_of
from jaxpp.stages.loss.microbatch import (
    Split,
    batch_avals,
    check_batch,
    check_shared,
    num_examples,
    resized,
    shared_leaves,
    sizes,
    split_any,
)
from jaxpp.stages.loss.trace import key_implementation, trace_loss
from jaxpp.stages.loss.traced_loss import TracedLoss
from jaxpp.stages.packing import Pack
from jaxpp.stages.program import Program, Role
from jaxpp.tasks.replica_groups import Groups
from jaxpp.types import LossFn

__all__ = ["Layout", "Preparer", "avals_of", "check_key", "same_shapes"]


def avals_of(tree: Any) -> Any:
    """The tree of shapes and dtypes, as a traced function sees them (Python scalars and 64-bit NumPy included)."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, _canonical(leaf.dtype)), tree)


def same_shapes(known: Any, tree: Any) -> bool:
    """Whether a tree has the structure, shapes and dtypes of a known one."""
    try:
        return jax.tree.structure(known) == jax.tree.structure(tree) and jax.tree.leaves(known) == jax.tree.leaves(avals_of(tree))
    except AttributeError:  # a leaf that is no array
        return False


def _canonical(dtype: Any) -> Any:
    return dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(dtype)


def check_key(key: Any) -> None:
    """Refuse what is no PRNG key.

    Raises:
        ArgumentError: a key that is not an array.
    """
    if key is not None and not hasattr(key, "dtype"):
        got = f"{type(key).__name__} {key!r}"
        raise ArgumentError("key", "a key is an array made by jax.random.key", got, "pass jax.random.key(seed)")


@dataclass(frozen=True)
class Layout:
    """What the first batch decided.

    Attributes:
        given: the tree of parameter shapes, and after it that of model state shapes, if the loss has any.
        slicing: which parameter leaves are held as slices.
        variables: the trees as they are held.
        owner: the stage of each parameter leaf.
        spine: the primitives of the spine it was cut on.
        cuts: where.
        reducers: of the aux leaves that are not averaged.
        packs: the small gradients that each stage sums as one vector.
        state_owner: the stage of each model state leaf.
        known: what sub-meshes are told of the values that live there.
        unevenness: what to warn of, where the cut that was found is uneven.
    """

    given: tuple[Any, ...]
    slicing: Slicing
    variables: tuple[Any, ...]
    owner: tuple[int, ...]
    spine: tuple[str, ...]
    cuts: Cuts
    reducers: Mapping[int, Reducer]
    packs: tuple[tuple[Pack, ...], ...]
    state_owner: tuple[int, ...]
    known: Mapping[str, Any] = field(default_factory=dict)
    unevenness: str | None = None

    @property
    def params(self) -> Any:
        """The tree of parameter shapes, as it is held."""
        return self.variables[0]

    @property
    def state_shapes(self) -> list[Any]:
        """The shape of each model state leaf."""
        return jax.tree.leaves(self.variables[1:])


class Preparer:
    """Holds the traces, cuts, programs and layout of one pipeline."""

    def __init__(self, settings: Settings, programs: Programs | None = None, like: Layout | None = None):
        """``like`` is a layout to cut at the same places as."""
        self.settings = settings
        self.programs = Programs() if programs is None else programs
        self.layout: Layout | None = None
        self.frozen = frozenset[int]()
        self.groups = Groups()
        self.like = like
        self._cuts: dict[Any, CutLoss] = {}
        self._known_programs: WeakValueDictionary[Any, Program] = WeakValueDictionary()

    @property
    def _scaled_by(self) -> int | None:
        return None if self.settings.scaling is None else self.settings.scaling.scale

    @property
    def _pack(self) -> bool:
        return self.settings.placement.num_shards == 1

    @property
    def placement(self) -> Placement:
        """Where each stage lives, and what is known of the values there."""
        return self.settings.placement.with_values(**(self.layout.known if self.layout else {}))

    def share(self, other: "Preparer") -> None:
        """Take over the layout, the cuts and the compiled programs of another preparer of the same loss."""
        self.programs, self.layout, self.frozen, self._cuts = other.programs, other.layout, other.frozen, other._cuts
        self.groups, self._known_programs = other.groups, other._known_programs

    def takes_key(self, variables: Sequence[Any], batch: Any) -> bool:
        """Whether the loss takes a key; one of ``*args`` is tried.

        Args:
            variables: the parameters, and the model state if the loss has any; arrays or shapes.
            batch: likewise.
        """
        found = self._key_argument(self.settings.loss_fn)
        if found.sure or found.name:
            return found.sure and found.name is not None
        try:
            jax.eval_shape(self.settings.loss_fn, *variables, batch, jax.random.key(0))
        except TypeError:
            return False
        except Exception:  # noqa: BLE001  (whatever is wrong is said when it is traced)
            return True
        return True

    def _key_argument(self, loss_fn: LossFn) -> KeyArgument:
        return key_argument(loss_fn, 2 + self.settings.has_state)

    def check_key_taken(self, loss_fn: LossFn, key: Any) -> None:
        """Refuse a key for a loss that takes none, and none for a loss that needs one.

        Raises:
            ArgumentError: as said.
        """
        found = self._key_argument(loss_fn)
        if key is not None and found.sure and found.name is None:
            raise ArgumentError(
                "key",
                "a key is for a loss that takes one",
                f"a key, and {name_of(loss_fn)}",
                "leave it out, or give the loss one more parameter",
            )
        if key is None and found.needed:
            raise ArgumentError(
                "key",
                "a loss that takes a key is given one at each call",
                f"no key, and {name_of(loss_fn)}",
                f"pass one, such as jax.random.key(0); or write {found.name}=None in the loss, where it can do without",
            )

    def settle(
        self,
        variables: Sequence[Any],
        batch: Any,
        key: Any,
        frozen: frozenset[int] = frozenset(),
        permit: Permit = lambda _, *divisions: slicing_of(*divisions),
    ) -> Layout:
        """Decide the layout at the shapes given.

        Args:
            variables: the parameters, and the model state if the loss has any; arrays or shapes.
            batch: the whole batch, or its shapes.
            key: or None.
            frozen: the parameter leaves whose gradient nobody wants.
            permit: decides which leaves may be held as slices, of the parameters, the slices that cut loops need, and those of what
                is read row by row (``slicing_for``, with an optimizer).

        Returns:
            the layout; where a loop over layers is cut, it has more parameter leaves than were given.

        Raises:
            CutError: too many stages for this loss, or cuts that are not there.
            LossError, BatchError: as for every trace.
        """
        settings = self.settings
        self.check_key_taken(settings.loss_fn, key)
        check_shared(batch, settings.shared)
        size = self._split(batch).sizes[0]
        given = tuple(map(avals_of, variables))
        microbatch = resized(batch_avals(batch), size, self.shared(batch))
        self.frozen = frozen
        layered = self._trace(settings.loss_fn, given, microbatch, key, per_layer=True)
        self.layout, first = self._lay_out(layered, given, microbatch, key, frozen, permit)
        if settings.balance == "time" and settings.cuts is None and settings.schedule.num_stages > 1 and self.like is None:
            clock = clock_of([code.flops for code in first.stages], stage_times(first, settings, self.programs))
            self.layout, first = self._lay_out(replace(layered, clock=clock), given, microbatch, key, frozen, permit)
        self._cuts.clear()
        self._cuts[self._cache_key(settings.loss_fn, microbatch, key, True)] = first
        return self.layout

    def _lay_out(
        self, loss: TracedLoss, given: tuple[Any, ...], microbatch: Any, key: Any, frozen: frozenset[int], permit: Permit
    ) -> tuple[Layout, CutLoss]:
        """Cut a loss whose loops were split into single layers, and say what that decides."""
        settings, clock, spine = self.settings, loss.clock, loss.primitives
        cuts = () if self.like else self._choose(loss)
        slicing, variables = slicing_at(loss, cuts, given[0], settings, permit, self.like and self.like.slicing), given
        if loss.layers or slicing.any:
            variables = (slicing.of(given[0]), *given[1:])
            self.frozen = frozenset(slicing.leaves(frozen))
            loss = replace(self._trace(settings.loss_fn, variables, microbatch, key), clock=clock)
        if self.like or loss.primitives != spine:
            cuts = self._choose(loss)
        reducers = self._reducers(loss, settings.loss_fn, variables, microbatch, key)
        owner = owners(loss, cuts)
        options = {"remat": settings.remat, "cut_gradient": settings.severed, "scaled_by": self._scaled_by, "pack": self._pack}
        first = cut(loss, cuts, owner, reducers=reducers, **options)
        packs = tuple(code.packs for code in first.stages)
        decided = (owner, loss.primitives, cuts, reducers, packs, first.state_home)
        unevenness = uneven(loss, cuts) if settings.cuts is None and self.like is None else None
        return Layout(given, slicing, variables, *decided, self._known(given[0], slicing), unevenness), first

    def _known(self, params: Any, slicing: Slicing) -> dict[str, Any]:
        """How the parameter leaves are sharded inside their stages, and which of them each replica has of its own."""
        specs = specs_of(self.settings.shardings, params, self.settings.placement.num_shards)
        held = tuple(spec for k, spec in enumerate(specs) for _ in slicing.leaves([k]))
        own = frozenset[tuple[Role, int]]()
        if isinstance(params, Joint) and self.settings.placement.num_replicas > 1:
            first, count = len(jax.tree.leaves(params.shared)), len(jax.tree.leaves(params))
            own = frozenset((role, k) for k in slicing.leaves(range(first, count)) for role in (Role.PARAM, Role.GRAD))
        return {"specs": held, "own": own}

    def _split(self, batch: Any, *, train: bool = True) -> Split:
        """How a batch is divided; for a step so that each replica's microbatches have as many examples as another's."""
        settings = self.settings
        counts = settings.schedule.num_microbatches, settings.placement.num_replicas
        if not train:
            return split_any(check_batch(batch, 1, shared=settings.shared), *counts)
        return Split(sizes(check_batch(batch, *counts, settings.shared), counts[0]))

    def shared(self, batch: Any) -> frozenset[int]:
        """The batch leaves that every microbatch gets as they are."""
        return shared_leaves(batch, self.settings.shared)

    def _choose(self, loss: TracedLoss) -> Cuts:
        """Where to cut: where the user says, or for balance."""
        names, count, like = self.settings.cuts, self.settings.schedule.num_stages, self.like
        if like is not None:
            return like.cuts if loss.primitives == like.spine else align(loss, count, like.owner, like.state_owner, train=True)
        if names is not None:
            return resolve(loss, names)
        check_giant(loss, count)
        return balance(loss, count)

    def _trace(
        self,
        loss_fn: LossFn,
        variables: Sequence[Any],
        microbatch: Any,
        key: Any,
        *,
        train: bool = True,
        per_layer: bool = False,
    ) -> TracedLoss:
        params, *state = variables
        has_aux = self.settings.has_aux if loss_fn == self.settings.loss_fn else None
        options = {"has_aux": has_aux, "differentiable": train, "frozen": self.frozen, "per_layer": per_layer}
        options |= {"shared": self.shared(microbatch)}
        return trace_loss(loss_fn, params, microbatch, key, model_state=state[0] if state else None, **options)

    def _reducers(
        self, loss: TracedLoss, loss_fn: LossFn, variables: Sequence[Any], microbatch: Any, key: Any
    ) -> Mapping[int, Reducer]:
        own = loss_fn == self.settings.loss_fn
        return reducers_of(loss, self.settings.reducers, lambda: self._rows(loss, loss_fn, variables, microbatch, key), strict=own)

    @staticmethod
    def _rows(loss: TracedLoss, loss_fn: LossFn, variables: Sequence[Any], microbatch: Any, key: Any) -> frozenset[int]:
        """The aux leaves whose first axis follows the size of the microbatch."""
        size = num_examples(jax.tree.leaves(microbatch), loss.shared)
        shapes = [aval_of(atom).shape for atom in loss.aux]
        rows = {k for k, shape in enumerate(shapes) if shape and shape[0] == size}
        if not rows:
            return frozenset()
        whole = jax.eval_shape(lambda params: joined(params, concatenated), variables[0])
        args = (whole, *variables[1:], resized(microbatch, 2 * size, loss.shared), *([] if key is None else [key]))
        try:
            _, aux = jax.eval_shape(loss_fn, *args)
        except Exception:  # noqa: BLE001  (a model that takes one batch size only: its rows cannot be told apart)
            return frozenset(rows)
        doubled = [leaf.shape for leaf in jax.tree.leaves(aux[1] if len(variables) > 1 else aux)]
        return frozenset(k for k in rows if doubled[k][:1] == (2 * size,))

    @staticmethod
    def _cache_key(loss_fn: LossFn, microbatch: Any, key: Any, train: bool) -> Any:
        leaves, tree = jax.tree.flatten(microbatch)
        kind = None if key is None else (key.shape, key.dtype)
        return loss_fn, tree, tuple((leaf.shape, leaf.dtype, leaf.weak_type) for leaf in leaves), kind, train

    def cut_for(self, loss_fn: LossFn, microbatch: Any, key: Any, *, train: bool) -> CutLoss:
        """The loss cut at one microbatch's shapes, with every parameter where its owner is."""
        layout, settings = self.layout, self.settings
        assert layout is not None
        cache_key = self._cache_key(loss_fn, microbatch, key, train)
        if cache_key not in self._cuts:
            loss = self._trace(loss_fn, layout.variables, microbatch, key, train=train)
            same = loss.primitives == layout.spine
            cuts = layout.cuts if same else align(loss, settings.schedule.num_stages, layout.owner, layout.state_owner, train=train)
            own = loss_fn == settings.loss_fn
            reducers = layout.reducers if own else self._reducers(loss, loss_fn, layout.variables, microbatch, key)
            options = {"packs": layout.packs, "train": train, "remat": settings.remat, "cut_gradient": settings.severed}
            options |= {"state_owner": layout.state_owner, "scaled_by": self._scaled_by, "pack": self._pack}
            self._cuts[cache_key] = cut(loss, cuts, layout.owner, reducers=reducers, **options)
            if len(self._cuts) > 4 * settings.max_shapes:  # a shape has microbatches of two sizes, to train and to evaluate
                del self._cuts[next(iter(self._cuts))]
        return self._cuts[cache_key]

    def forget(self, used: Collection[int]) -> None:
        """Let go of the cuts that are not among those used, by ``id``."""
        for name in [name for name, found in self._cuts.items() if id(found) not in used]:
            del self._cuts[name]

    def job(self, batch: Any, key: Any, *, loss_fn: LossFn | None = None, train: bool = True) -> Job:
        """What to lower for a batch of these shapes.

        Raises:
            BatchError: the batch cannot be split.
            Exception: what the user's loss raises at these shapes.
        """
        settings, layout = self.settings, self.layout
        assert layout is not None
        self.check_key_taken(loss_fn or settings.loss_fn, key)
        split, shared = self._split(batch, train=train), self.shared(batch)
        parts = split.sizes
        batch = resized(batch_avals(batch), sum(parts), shared)
        different = tuple(dict.fromkeys(parts))
        chosen = loss_fn or settings.loss_fn
        cuts = tuple(self.cut_for(chosen, resized(batch, size, shared), key, train=train) for size in different)
        check_aux([cut.loss for cut in cuts], cuts[0].reducers)
        weights = None if settings.weight is None else weigh(settings.weight, batch, shared, split, self.placement)
        return Job(
            cuts=cuts,
            variants=tuple(different.index(size) for size in parts),
            split=split,
            owner=layout.owner,
            placement=self.placement,
            params=tuple(jax.tree.leaves(layout.params)),
            state=tuple(layout.state_shapes),
            state_owner=layout.state_owner,
            batch=tuple(jax.tree.leaves(batch)),
            shared=shared,
            key=None if key is None else jax.eval_shape(_raw, key),
            implementation=key_implementation(key),
            groups=self.groups,
            known=self._known_programs,
            weights=weights,
        )


def _raw(key: Any) -> Any:
    return jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
