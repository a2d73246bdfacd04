"""A ``Step``, a cut loss at every microbatch size of a batch with the owners of all leaves; ``Leaves``; and the names of values."""

import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

from jax.sharding import PartitionSpec

from jaxpp.lowering.builder import CALLER, Constant, FusedAction, Name
from jaxpp.lowering.microbatch_weights import Weights
from jaxpp.schedule.action import Action, Kind
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.cuts.cut_loss import CutLoss
from jaxpp.stages.loss.microbatch import Split
from jaxpp.stages.program import ACCUMULATED, PER_MICROBATCH, Pack, Program, Ref, Role
from jaxpp.stages.stage import StageCode
from jaxpp.types import Array, Aval

_T = TypeVar("_T")
_S = TypeVar("_S")

WHOLE = PartitionSpec()


@dataclass(frozen=True)
class StateLeaf:
    """A leaf of a state as a pipeline holds it: what it is, whose it is, and how the devices of its stage hold it.

    Everything that asks about a leaf, where it lives, what it is called or whether a step changes it, asks this.
    """

    role: Role
    index: int  # among the leaves of its role
    aval: Aval  # as one replica has it
    stage: int  # the one that owns it
    spec: PartitionSpec = WHOLE  # how its devices divide it while programs compute with it
    part: PartitionSpec = WHOLE  # the same with replicas that divide it: a parameter's summed gradients
    divided: bool = False  # whether it is held as ``part`` says between steps
    scattered: bool = False  # of a parameter: whether each replica sums a part of its gradients
    frozen: bool = False  # of a parameter: whether nobody wants its gradient
    own: bool = False  # whether each replica, if there are several, has one of its own
    changes: bool = True  # whether a step gives it a new value
    late: bool = False  # of a parameter: whether the state has it as it was before the last step too

    def name(self, num_replicas: int) -> Name:
        """What it is called on the devices of its stage between steps."""
        if self.role == Role.STATE:
            return state_name(self.stage, self.index, shared=num_replicas > 1)
        return Name(self.stage, Ref(self.role, self.index, shared=self.divided))


class Leaves(NamedTuple, Generic[_T]):
    """Something for each leaf of a state: an array, a name, a shape, a home. A plan takes and gives the groups in this order."""

    params: Sequence[_T] = ()  # the parameters that all replicas share
    own_params: Sequence[_T] = ()  # the parameters of which each replica has its own (those of a task)
    opt: Sequence[_T] = ()  # the optimizer state of ``params``
    own_opt: Sequence[_T] = ()  # the optimizer state of ``own_params``
    model_state: Sequence[_T] = ()  # what the loss hands on from microbatch to microbatch
    loss_scale: Sequence[_T] = ()
    previous: Sequence[_T] = ()  # with ``delay``, the parameters that any loss trains, as they were before the last step

    @property
    def all_params(self) -> list[_T]:
        """In the order in which they are numbered."""
        return [*self.params, *self.own_params]

    @property
    def all_opt(self) -> list[_T]:
        """In the order in which they are numbered."""
        return [*self.opt, *self.own_opt]

    @property
    def own(self) -> list[_T]:
        """What each replica has of its own."""
        return [*self.own_params, *self.own_opt]

    @property
    def variables(self) -> "Leaves[_T]":
        """What the loss is given: the parameters and the model state."""
        return Leaves(self.params, self.own_params, model_state=self.model_state)

    @property
    def shared(self) -> "Leaves[_T]":
        """Without what each replica has of its own."""
        return self._replace(own_params=(), own_opt=())

    def flat(self) -> list[_T]:
        """All groups, one after another."""
        return list(itertools.chain.from_iterable(self))

    def map(self, function: Callable[[_T], _S]) -> "Leaves[_S]":
        """The same groups with what a function makes of each."""
        return Leaves(*(list(map(function, group)) for group in self))

    def fill(self, values: Sequence[_S]) -> "Leaves[_S]":
        """The same groups with other values, given one after another."""
        supply: Iterator[_S] = iter(values)
        return Leaves(*(list(itertools.islice(supply, len(group))) for group in self))

    def with_own(self, values: Sequence[_T], like: "Leaves[_S]") -> "Leaves[_T]":
        """The same with ``values`` as what each replica has of its own, divided as in ``like``."""
        count = len(like.own_params)
        return self._replace(own_params=values[:count], own_opt=values[count:])


COPIES = ("previous",)  # the groups whose leaves are of a parameter each, and copies of it in a first state
ZEROED = 1 << 25  # bytes of a stage's sums up to which they are zeroed when a step begins


@dataclass(frozen=True)
class GradientSums:
    """How the gradients of a stage's own parameters are summed after the last backward."""

    packs: tuple[Pack, ...]  # the small ones, which the backwards sum as vectors
    stays_packed: bool  # whether nothing before the update reads a packed one: no other stage, no replica
    leaves: tuple[Ref, ...]  # those that are leaves when they are summed over the replicas, once they are summed
    coming_home: tuple[tuple[int, Ref], ...]  # those that other stages sum, with these stages


@dataclass(frozen=True)
class Step:
    """What is to be lowered: all that decides the lines of a step, but for the order of its actions."""

    cuts: tuple[CutLoss, ...]  # the cut loss, once for each different microbatch size
    variants: tuple[int, ...]  # ``cuts[variants[i]]`` is the one for microbatch i
    split: Split  # examples of a replica in each microbatch, and the replicas that have one fewer
    leaves: Leaves[StateLeaf]  # the parameters and the model state
    num_replicas: int  # how many replicas share the work of a microbatch
    num_shards: int  # how many devices share the parameters of a replica's stage
    batch: tuple[Aval, ...]  # shape of each leaf of a replica's part of the batch
    given: tuple[Name, ...]  # what each of them is called, before it is sent to the stages
    shared: frozenset[int]  # the leaves that every microbatch of a whole batch gets as they are, and every replica
    one_by_one: bool  # whether the microbatches are given one by one
    key: Aval | None  # shape of the raw key, or None
    implementation: str | None  # of the key, if it was typed
    weights: Weights | None  # of the microbatches, computed from batch leaves; None when sizes decide
    summed: bool  # whether the loss of the step is the sum over microbatches, not their mean
    visits: bool  # whether parameters and gradients are on devices only while a stage works
    programs: MutableMapping[Hashable, Program]  # those that are the same for batches of all sizes, by what they do
    constants: MutableMapping[int, Constant]  # what the loss closed over, at any size, by ``id``

    @cached_property
    def owner(self) -> tuple[int, ...]:
        """The stage that owns each parameter leaf."""
        return tuple(leaf.stage for leaf in self.leaves.all_params)

    @cached_property
    def params(self) -> tuple[Aval, ...]:
        """The shape of each parameter leaf."""
        return tuple(leaf.aval for leaf in self.leaves.all_params)

    @cached_property
    def scattered(self) -> frozenset[int]:
        """The parameters of whose gradients each replica sums a part."""
        return frozenset(leaf.index for leaf in self.leaves.all_params if leaf.scattered and self.trains)

    @cached_property
    def state_owner(self) -> tuple[int, ...]:
        """The stage that keeps each model state leaf between steps."""
        return tuple(leaf.stage for leaf in self.leaves.model_state)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Examples of a replica in each microbatch."""
        return self.split.sizes

    def once(self, key: Hashable, make: Callable[[], Program]) -> Program:
        """A program that does not depend on the size of the batch: made at the first one, so that it is compiled once."""
        program = self.programs.get(key)
        if program is None:
            program = self.programs[key] = make()
        return program

    def constant(self, value: Array) -> Constant:
        """An array that the loss closed over, which is put on a device once for the batches of all sizes."""
        return self.constants.setdefault(id(value), Constant(value))

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.cuts[0].stages)

    @property
    def loss_stage(self) -> int:
        """The stage that returns the loss, and keeps its scale."""
        return self.num_stages - 1

    @property
    def whole(self) -> frozenset[int]:
        """The places, among all leaves that are given, of those that every replica gets as they are."""
        return frozenset(place for place, name in enumerate(self.given) if name.ref.shared)

    def local_name(self, stage: int, ref: Ref, microbatch: int, variant: int | None = None) -> Name:
        """What a program of a stage calls ``ref``, for a microbatch of a variant, which is that of the microbatch unless given."""
        if ref.role in (Role.STATIC, Role.CONSTANT):
            return self._lasting[stage, self.variants[microbatch] if variant is None else variant, ref]
        own = ref.role in PER_MICROBATCH and (not ref.shared or (self.one_by_one and ref.role == Role.BATCH))
        return Name(stage, ref, microbatch if own else -1)

    @cached_property
    def _lasting(self) -> dict[tuple[int, int, Ref], Name]:
        """What each stage calls the constants and statics of each variant; those that are the same have the name of the first."""
        names, known = dict[tuple[int, int, Ref], Name](), dict[Hashable, Name]()
        for stage, variant in itertools.product(range(self.num_stages), range(len(self.cuts))):
            code = self.cuts[variant].stages[stage]
            constants = {Ref(Role.CONSTANT, k): id(value) for k, value in enumerate(code.constants)}
            for ref in (*constants, *code.statics.outputs):
                name, does = Name(stage, ref._replace(variant=variant)), constants.get(ref)
                if ref in code.static_does:
                    made, inputs = code.static_does[ref]
                    does = made, tuple(constants.get(given, given) for given in inputs)
                names[stage, variant, ref] = name if does is None else known.setdefault((stage, does), name)
        return names

    def codes(self, stage: int) -> list[StageCode]:
        """The stage's programs, once a variant."""
        return [cut.stages[stage] for cut in self.cuts]

    def read(self, stage: int, role: Role) -> list[int]:
        """The numbers of the values of ``role`` that any program of the stage reads."""
        refs = [ref for code in self.codes(stage) for ref in code.reads]
        if self.weights is not None and stage == self.loss_stage:
            refs += self.weights.program.inputs
        return sorted({ref.index for ref in refs if ref.role == role})

    def accumulators(self, stage: int) -> dict[Ref, Aval]:
        """The sums the stage keeps, and their shapes."""
        sums = {ref: aval for code in self.codes(stage) for ref, aval in code.reads.items() if ref.role in ACCUMULATED}
        if not self.trains:
            return sums
        packs = self.codes(stage)[0].packs
        owned = {Ref(Role.GRAD, leaf): self.params[leaf] for leaf in self.trained if self.owner[leaf] == stage}
        unpacked = {ref: aval for ref, aval in owned.items() if ref not in self.packed}
        return sums | {pack.ref: pack.aval for pack in packs} | unpacked

    @cached_property
    def calls_host(self) -> bool:
        """Whether any program calls a Python function on the host."""
        return any(code.calls_host for cut in self.cuts for code in cut.stages)

    @cached_property
    def trains(self) -> bool:
        """Whether any backward is run."""
        return any(code.backward for cut in self.cuts for code in cut.stages)

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """The parameter leaves that have a gradient, at any of the microbatches' sizes."""
        losses = [cut.loss for cut in self.cuts]
        return tuple(leaf for leaf in range(len(self.params)) if any(loss.params[leaf] in loss.carries for loss in losses))

    @cached_property
    def sums(self) -> tuple[GradientSums, ...]:
        """How each stage sums the gradients of the parameters that it owns."""
        accumulated = [(stage, ref) for stage in range(self.num_stages) for ref in self.accumulators(stage)]
        away = [(s, ref) for s, ref in accumulated if ref.role == Role.GRAD and ref.index >= 0 and self.owner[ref.index] != s]
        sums = []
        for stage in range(self.num_stages):
            coming_home = tuple((peer, ref) for peer, ref in away if self.owner[ref.index] == stage)
            packs = self.codes(stage)[0].packs
            members = {ref for pack in packs for ref in pack.members}
            stays_packed = self.num_replicas == 1 and members.isdisjoint(ref for _, ref in coming_home)
            leaves = [Ref(Role.GRAD, leaf) for leaf in self.trained if self.trains and self.owner[leaf] == stage]
            leaves = [ref for ref in leaves if not (stays_packed and ref in self.packed) and ref.index not in self.scattered]
            sums.append(GradientSums(packs, stays_packed, tuple(leaves), coming_home))
        return tuple(sums)

    @cached_property
    def packed(self) -> frozenset[Ref]:
        """The gradients that are summed as parts of vectors."""
        return frozenset(ref for code in self.cuts[0].stages for pack in code.packs for ref in pack.members)

    def sum_of(self, ref: Ref) -> Ref:
        """What a sum over microbatches is called, which replicas hold together if it is that of scattered gradients."""
        return ref._replace(shared=True) if ref.role == Role.GRAD and ref.index in self.scattered else ref

    @property
    def own_sums(self) -> list[Name]:
        """The gradients that each replica sums by itself before they are added, if the total takes as many bytes on a device."""
        leaves, numbered = self.leaves.all_params, enumerate(self.sums if self.num_replicas > 1 else ())
        pairs = ((Name(stage, ref), leaves[ref.index]) for stage, sums in numbered for ref in sums.leaves)
        return [name for name, leaf in pairs if leaf.own or leaf.part == leaf.spec]

    @property
    def packed_sums(self) -> dict[int, tuple[Name, Pack]]:
        """The gradients that stay parts of vectors after the last backward: for each leaf, its vector, and what is where in it."""
        packs = [(stage, pack) for stage, sums in enumerate(self.sums) if sums.stays_packed for pack in sums.packs]
        return {ref.index: (Name(stage, pack.ref), pack) for stage, pack in packs for ref in pack.members}

    def choose(
        self, actions: Sequence[Action], pairs: Mapping[Action, Action] = MappingProxyType({})
    ) -> tuple[dict[Action, tuple[Program, FusedAction | None]], list[dict[Ref, Aval]]]:
        """The program of each action with anything to do, and each stage's sums that must be zero before.

        Of ``pairs``, a forward and the backward right behind it, those become one program that their stage can run as one.

        A stage with small gradients adds those of every microbatch to zeros, so that each backward is compiled once. A stage with
        large gradients, which take longer to zero and to read again, or with gradients that visit, has two: the first microbatch's
        makes the sums. Where replicas sum a part each, every microbatch's makes gradients of its own.
        """
        sums = [self.accumulators(stage) for stage in range(self.num_stages)]
        small = [sum(map(count_bytes, own.values())) <= ZEROED and not self.visits for own in sums]
        begun, late = [set[Ref]() for _ in sums], [set(own) for own in sums]
        chosen: dict[Action, tuple[Program, FusedAction | None]] = {}
        done = set[Action]()
        for action in actions:
            stage, kind, microbatch = action
            code = self.cuts[self.variants[microbatch]].stages[stage]
            pair = pairs.get(action) if code.fused is not None else None
            if action in done:
                continue
            if kind == Kind.F and pair is None:
                chosen[action] = code.forward, None
                continue
            backward = code.backward.get(kind if pair is None else pair.kind)
            if backward is None:
                continue
            fresh = bool(self.scattered) or (not small[stage] and backward.made.isdisjoint(begun[stage]))
            begun[stage] |= backward.made
            late[stage] -= backward.made if fresh else set()
            whole = backward if pair is None or code.fused is None else code.fused
            fused = None if pair is None or code.fused is None else FusedAction(pair, code.fused.share)
            chosen[action] = whole.first if fresh else whole.then, fused
            done |= set() if pair is None else {pair}
        return chosen, [
            {self.sum_of(ref): aval for ref, aval in own.items() if ref in late[stage]} for stage, own in enumerate(sums)
        ]


def param_name(stage: int, leaf: int, *, shared: bool = False) -> Name:
    """A parameter leaf, whole on each replica; ``shared``: as the replicas of a stage hold it between steps, each a part."""
    return Name(stage, Ref(Role.PARAM, leaf, shared=shared))


def total_name(stage: int, role: Role, index: int = 0) -> Name:
    """A gradient, the loss or an aux leaf after the step, summed over the replicas."""
    return Name(stage, Ref(role, index, shared=True))


def state_name(stage: int, leaf: int, microbatch: int = 0, *, shared: bool = False) -> Name:
    """A model state leaf as a microbatch finds it; ``shared``: the one that all replicas of a stage have before or after a step."""
    return Name(stage, Ref(Role.STATE, leaf, shared=shared), microbatch)


def scale_name(stage: int, leaf: int) -> Name:
    """A leaf of the loss scale."""
    return Name(stage, Ref(Role.LOSS_SCALE, leaf))


def given_names(num_leaves: int, shared: Collection[int], count: int | None = None) -> Iterator[Name]:
    """What the leaves of a batch are called when they are given; ``count``: of so many microbatches, one after another."""
    for microbatch in range(-1, 0) if count is None else range(count):
        yield from (Name(CALLER, Ref(Role.BATCH, k, shared=k in shared), microbatch) for k in range(num_leaves))
