"""From a batch's shapes to what is lowered: the loss traced and cut at the shapes of each of its microbatches, each once."""

from collections.abc import Collection, Hashable
from weakref import WeakValueDictionary

import jax

from jaxpp.engine.layout import Layout
from jaxpp.engine.tracing import Tracing, raw_key
from jaxpp.options import Options
from jaxpp.plan.microbatch_weights import weigh
from jaxpp.plan.step import Step
from jaxpp.runtime.place import Placement
from jaxpp.runtime.replica_groups import ReplicaGroups
from jaxpp.stages.cuts.balance import align
from jaxpp.stages.cuts.cut_loss import CutLoss, with_copies
from jaxpp.stages.loss.aux import check_aux
from jaxpp.stages.loss.microbatch import Split, batch_avals, check_batch, resized, sizes, split_any
from jaxpp.stages.loss.traced_loss import key_implementation
from jaxpp.stages.program import Program
from jaxpp.types import Batch, Key, LossFn

__all__ = ["Preparer"]


class Preparer:
    """Keeps the cut losses of one pipeline, by shape; ``first`` is the loss cut at the shapes of the first microbatch."""

    def __init__(self, options: Options, layout: Layout, placement: Placement, first: CutLoss, microbatch: Batch, key: Key | None):
        self.options, self.layout, self.placement = options, layout, placement
        self.groups = ReplicaGroups()
        self.tracing = Tracing(options, layout.frozen)
        self._cuts: dict[Hashable, CutLoss] = {_cache_key(options.loss_fn, microbatch, key, options.is_loss): first}
        self._known_programs: WeakValueDictionary[Hashable, Program] = WeakValueDictionary()

    def for_schedule(self, options: Options, placement: Placement) -> "Preparer":
        """The same cuts and groups, for another schedule of the same stages."""
        other = object.__new__(Preparer)
        other.__dict__.update(self.__dict__, options=options, placement=placement, tracing=Tracing(options, self.layout.frozen))
        return other

    def cut_for(self, loss_fn: LossFn, microbatch: Batch, key: Key | None, *, train: bool) -> CutLoss:
        """The loss cut at one microbatch's shapes, with every parameter where its owner is."""
        layout, options = self.layout, self.options
        cache_key = _cache_key(loss_fn, microbatch, key, train)
        if cache_key not in self._cuts:
            loss = self.tracing.trace(loss_fn, layout.variables, microbatch, key, train=train)
            same = loss.primitives == layout.spine
            cuts = layout.cuts if same else align(loss, options.schedule.num_stages, layout.owner, layout.state_owner, train=train)
            loss, reducers = with_copies(loss, cuts, layout.copies), layout.reducers
            if loss_fn != options.loss_fn:
                reducers = self.tracing.reducers(loss, loss_fn, layout.variables, microbatch, key)
            known = {"packs": layout.packs, "state_owner": layout.state_owner}
            self._cuts[cache_key] = self.tracing.cut(loss, cuts, layout.owner, reducers, train=train, **known)
            if len(self._cuts) > 4 * options.max_shapes:  # a shape has microbatches of two sizes, to train and to evaluate
                del self._cuts[next(iter(self._cuts))]
        return self._cuts[cache_key]

    @property
    def num_cuts(self) -> int:
        """How many cut losses are kept."""
        return len(self._cuts)

    def forget(self, used: Collection[int]) -> None:
        """Let go of the cuts that are not among those used, by ``id``."""
        for name in [name for name, found in self._cuts.items() if id(found) not in used]:
            del self._cuts[name]

    def _split(self, batch: Batch, *, train: bool) -> Split:
        """How a batch is divided; for a step so that each replica's microbatches have as many examples as another's."""
        options = self.options
        counts = options.schedule.num_microbatches, options.placement.num_replicas
        if not train:
            return split_any(check_batch(batch, 1, shared=options.shared), *counts)
        return Split(sizes(check_batch(batch, *counts, options.shared), counts[0]))

    def step(self, batch: Batch, key: Key | None, *, loss_fn: LossFn | None = None, train: bool = True) -> Step:
        """What to lower for a batch of these shapes.

        Raises:
            BatchError: the batch cannot be split.
            Exception: what the user's loss raises at these shapes.
        """
        options, layout = self.options, self.layout
        chosen = loss_fn or options.loss_fn
        self.tracing.check_key_taken(chosen, key)
        split, shared = self._split(batch, train=train), self.tracing.shared(batch)
        parts = split.sizes
        batch = resized(batch_avals(batch), sum(parts), shared)
        different = tuple(dict.fromkeys(parts))
        cuts = tuple(self.cut_for(chosen, resized(batch, size, shared), key, train=train) for size in different)
        check_aux([cut.loss for cut in cuts], cuts[0].reducers)
        weights = None if options.weight is None else weigh(options.weight, batch, shared, split, self.placement.num_replicas)
        return Step(
            cuts=cuts,
            variants=tuple(different.index(size) for size in parts),
            split=split,
            owner=layout.owner,
            num_replicas=self.placement.num_replicas,
            own=self.placement.own,
            params=tuple(jax.tree.leaves(layout.params)),
            state=tuple(layout.state_shapes),
            state_owner=layout.state_owner,
            batch=tuple(jax.tree.leaves(batch)),
            shared=shared,
            key=None if key is None else jax.eval_shape(raw_key, key),
            implementation=key_implementation(key),
            known=self._known_programs,
            weights=weights,
        )


def _cache_key(loss_fn: LossFn, microbatch: Batch, key: Key | None, train: bool) -> Hashable:
    leaves, tree = jax.tree.flatten(microbatch)
    kind = None if key is None else (key.shape, key.dtype)
    return loss_fn, tree, tuple((leaf.shape, leaf.dtype, leaf.weak_type) for leaf in leaves), kind, train
