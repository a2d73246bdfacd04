"""Lowering: a schedule and a cut loss become the lines of a plan.

A step is written in five passes over one ``Draft``:

1. *feed*: batch leaves, the key, and tied parameters go to the stages that read them;
2. *begin*: one program a stage splits its batch leaves, folds its keys, computes its statics, and zeroes the sums
   that no first action makes;
3. *actions*: each action of the schedule, in the order of the unit clock, and right after it the sends that it feeds;
4. *unpack* and *tie*: small gradients become leaves again, those of tied parameters go home and are summed;
5. *join*: aux rows are joined.

The optimizer's lines follow (``runtime.optimizer``).
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.runtime.draft import HOST, Draft, Name
from jaxpp.runtime.placement import Placement
from jaxpp.runtime.transfer import put
from jaxpp.schedule.action import Action, Kind
from jaxpp.stages.cut import CutLoss
from jaxpp.stages.microbatch import fold_key, scale_dtype, slice_batch
from jaxpp.stages.program import ACCUMULATED, PER_MICROBATCH, Program, Ref, Role, shapes_of
from jaxpp.stages.stage import StageCode

__all__ = ["Job", "draft_zeros", "forward_actions", "grad_name", "lower", "param_name"]


@dataclass(frozen=True)
class Job:
    """What is to be lowered.

    Attributes:
        cuts: the cut loss, once for each different microbatch size.
        variants: ``cuts[variants[i]]`` is the one for microbatch i.
        sizes: examples in each microbatch.
        owner: the stage that owns each parameter leaf.
        placement: the device of each stage.
        params: shape of each parameter leaf.
        batch: shape of each leaf of the whole batch.
        key: shape of the raw key, or None.
        implementation: of the key, if it was typed.
        weigh: computes the vector of scales from batch leaves; None when sizes decide.
    """

    cuts: tuple[CutLoss, ...]
    variants: tuple[int, ...]
    sizes: tuple[int, ...]
    owner: tuple[int, ...]
    placement: Placement
    params: tuple[Any, ...]
    batch: tuple[Any, ...]
    key: Any
    implementation: str | None
    weigh: Program | None

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.placement.devices)

    @cached_property
    def loss_stage(self) -> int:
        """The stage that computes the loss."""
        places = {code.index for cut in self.cuts for code in cut.stages if Ref(Role.LOSS) in code.forward.outputs}
        assert len(places) == 1, "microbatches of different sizes end on different stages"
        return places.pop()

    def codes(self, stage: int) -> list[StageCode]:
        """The stage's programs, once a variant."""
        return [cut.stages[stage] for cut in self.cuts]

    def read(self, stage: int, role: Role) -> list[int]:
        """The numbers of the values of ``role`` that any program of the stage reads."""
        refs = [ref for code in self.codes(stage) for program in _programs(code) for ref in program.inputs]
        if self.weigh is not None and stage == self.loss_stage:
            refs += self.weigh.inputs
        return sorted({ref.index for ref in refs if ref.role == role})

    def accumulators(self, stage: int) -> dict[Ref, Any]:
        """The sums the stage keeps, and their shapes."""
        found: dict[Ref, Any] = {}
        for code in self.codes(stage):
            for program in _programs(code):
                found |= {ref: aval for ref, aval in zip(program.inputs, program.avals, strict=True) if ref.role in ACCUMULATED}
        if not self.trains:
            return found
        packs = self.codes(stage)[0].packs
        owned = {Ref(Role.GRAD, leaf): self.params[leaf] for leaf in self.trained if self.owner[leaf] == stage}
        unpacked = {ref: aval for ref, aval in owned.items() if ref not in self.packed}
        return found | {pack.ref: pack.aval for pack in packs} | unpacked

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
    def packed(self) -> frozenset[Ref]:
        """The gradients that are summed as parts of vectors."""
        return frozenset(ref for code in self.cuts[0].stages for pack in code.packs for ref in pack.members)

    def choose(self, actions: Sequence[Action]) -> tuple[list[tuple[Action, Program]], list[dict[Ref, Any]]]:
        """The program of each action, and for each stage the sums that must be zero before: those that no first backward makes.

        An action with nothing to do (I of a stage whose input wants no cotangent) is left out.
        """
        begun: list[set[Ref]] = [set() for _ in range(self.num_stages)]
        late: list[set[Ref]] = [set(self.accumulators(stage)) for stage in range(self.num_stages)]
        chosen = []
        for action in actions:
            stage, kind, microbatch = action
            code = self.cuts[self.variants[microbatch]].stages[stage]
            if kind == Kind.F:
                chosen.append((action, code.forward))
            elif kind in code.backward:
                backward = code.backward[kind]
                fresh = backward.made.isdisjoint(begun[stage])
                chosen.append((action, backward.first if fresh else backward.then))
                begun[stage] |= backward.made
                late[stage] -= backward.made if fresh else set()
        zeros = [{ref: aval for ref, aval in self.accumulators(s).items() if ref in late[s]} for s in range(self.num_stages)]
        return chosen, zeros


def _programs(code: StageCode) -> list[Program]:
    return [code.statics, code.forward, *(backward.then for backward in code.backward.values())]


def param_name(stage: int, leaf: int) -> Name:
    """A parameter leaf, as the stage holds it."""
    return Name(stage, Ref(Role.PARAM, leaf))


def grad_name(stage: int, leaf: int) -> Name:
    """The gradient of a parameter leaf, as the stage sums it."""
    return Name(stage, Ref(Role.GRAD, leaf))


def forward_actions(num_stages: int, num_microbatches: int) -> list[Action]:
    """Forwards only, as a pipeline: microbatch i reaches stage s in slot i + s."""
    pairs = [(s, i) for s in range(num_stages) for i in range(num_microbatches)]
    return [Action(s, Kind.F, i) for s, i in sorted(pairs, key=lambda pair: (sum(pair), -pair[0]))]


def lower(job: Job, actions: Sequence[Action]) -> Draft:
    """Write the lines of one step up to its gradients.

    Args:
        job: what to run.
        actions: in dispatch order.
    """
    draft = Draft()
    draft.homes.update({param_name(stage, leaf): job.placement[stage] for leaf, stage in enumerate(job.owner)})
    _feed(draft, job)
    chosen, zeros = job.choose(actions)
    for stage in sorted(range(job.num_stages), key=lambda s: s != job.loss_stage):
        _begin(draft, job, stage, zeros[stage])
    for action, program in chosen:
        _act(draft, job, action, program)
    _unpack(draft, job)
    _tie(draft, job)
    _join(draft, job)
    return draft


def _feed(draft: Draft, job: Job) -> None:
    sent: dict[Any, Name] = {}

    def feed(label: str, source: Name, target: Name) -> None:
        device = job.placement[target.stage]
        draft.send(label, sent.get((source, device), source), target, device)
        sent.setdefault((source, device), target)

    for stage in range(job.num_stages):
        for role in (Role.BATCH, Role.KEY):
            for k in job.read(stage, role):
                feed(f"send {role} {k} to stage {stage}", Name(HOST, Ref(role, k)), Name(stage, Ref(role, k)))
        for leaf in job.read(stage, Role.PARAM):
            if job.owner[leaf] != stage:
                path = job.cuts[0].loss.param_paths[leaf]
                feed(f"send {path} to stage {stage}", param_name(job.owner[leaf], leaf), param_name(stage, leaf))


def _begin(draft: Draft, job: Job, stage: int, totals: dict[Ref, Any]) -> None:
    """One program for all that a stage does once per step before its first forward."""
    names_in: list[Name] = []
    avals: list[Any] = []
    names_out: list[Name] = []
    parts: list[Any] = []

    def part(function: Any, inputs: Sequence[Name], shapes: Sequence[Any], outputs: Sequence[Name]) -> None:
        if outputs:
            parts.append((function, len(inputs)))
            names_in.extend(inputs)
            avals.extend(shapes)
            names_out.extend(outputs)

    for variant, code in enumerate(job.codes(stage)):
        _place_constants(draft, job, stage, variant, code)
        statics = code.statics
        outputs = [_name(stage, ref, -1, variant) for ref in statics.outputs]
        part(statics.function, [_name(stage, ref, -1, variant) for ref in statics.inputs], statics.avals, outputs)
    leaves = job.read(stage, Role.BATCH)
    steps = range(len(job.sizes))
    part(
        lambda *batch: [piece for row in slice_batch(batch, job.sizes) for piece in row],
        [Name(stage, Ref(Role.BATCH, k)) for k in leaves],
        [job.batch[k] for k in leaves],
        [Name(stage, Ref(Role.BATCH, k), i) for i in steps for k in leaves],
    )
    keys = [Name(stage, Ref(Role.KEY))] if job.read(stage, Role.KEY) else []
    part(
        lambda key=None: [fold_key(key, job.implementation, i) for i in steps],
        keys,
        [job.key] * len(keys),
        [Name(stage, Ref(Role.KEY), i) for i in steps] if keys else [],
    )
    _scales(draft, job, stage, part)
    part(
        lambda: [jnp.zeros(aval.shape, aval.dtype) for aval in totals.values()],
        [],
        [],
        [Name(stage, ref) for ref in totals],
    )
    if not parts:
        return

    def begin(*args: Any) -> list[Any]:
        results: list[Any] = []
        at = 0
        for function, count in parts:
            results += function(*args[at : at + count])
            at += count
        return results

    refs_in, refs_out = tuple(n.ref for n in names_in), tuple(n.ref for n in names_out)
    program = Program(begin, refs_in, refs_out, shapes_of(avals))
    draft.compute(f"begin stage {stage}", program, job.placement[stage], names_in, names_out, ())


def _place_constants(draft: Draft, job: Job, stage: int, variant: int, code: StageCode) -> None:
    for k, value in enumerate(code.constants):
        draft.constants[_name(stage, Ref(Role.CONSTANT, k), -1, variant)] = put(value, job.placement[stage])


def _scales(draft: Draft, job: Job, stage: int, part: Any) -> None:
    """The weight of each microbatch on this stage's device: a constant, or a share of what ``weigh`` found."""
    device, count = job.placement[stage], len(job.sizes)
    if job.weigh is None:
        known: dict[int, Any] = {}
        for i, size in enumerate(job.sizes):
            if size not in known:
                known[size] = put(np.asarray(size / sum(job.sizes), scale_dtype()), device)
            draft.constants[Name(stage, Ref(Role.SCALE), i)] = known[size]
        return
    source = Name(job.loss_stage, Ref(Role.SCALE))
    if stage == job.loss_stage:
        inputs = [Name(stage, ref) for ref in job.weigh.inputs]
        draft.compute("weigh", job.weigh, device, inputs, [source], ())
    else:
        draft.send(f"send scales to stage {stage}", source, Name(stage, Ref(Role.SCALE)), device)
    part(
        lambda scales: [scales[i] for i in range(count)],
        [Name(stage, Ref(Role.SCALE))],
        [jax.ShapeDtypeStruct((count,), scale_dtype())],
        [Name(stage, Ref(Role.SCALE), i) for i in range(count)],
    )


def _name(stage: int, ref: Ref, microbatch: int, variant: int) -> Name:
    if ref.role in (Role.STATIC, Role.CONSTANT):
        return Name(stage, Ref(ref.role, ref.index, variant))
    return Name(stage, ref, microbatch if ref.role in PER_MICROBATCH else -1)


def _act(draft: Draft, job: Job, action: Action, program: Program) -> None:
    """Write one action and the sends it feeds."""
    stage, _, i = action
    variant = job.variants[i]
    cut = job.cuts[variant]
    label = str(action)
    inputs = [_name(stage, ref, i, variant) for ref in program.inputs]
    outputs = [_name(stage, ref, i, variant) for ref in program.outputs]
    draft.compute(label, program, job.placement[stage], inputs, outputs, action=action)
    for ref in program.outputs:
        if ref.role == Role.ACTIVATION:
            for peer in cut.consumers[ref.index]:
                draft.send(f"send {label} to stage {peer}", Name(stage, ref, i), Name(peer, ref, i), job.placement[peer], action)
        elif ref.role == Role.COTANGENT:
            peer = cut.producer[ref.index]
            draft.send(f"send {label} to stage {peer}", Name(stage, ref, i), Name(peer, ref, i), job.placement[peer], action)


def _unpack(draft: Draft, job: Job) -> None:
    """Gradients that were summed as one vector become leaves."""
    for stage in range(job.num_stages):
        packs = job.codes(stage)[0].packs
        if packs:
            program = Program(
                lambda *vectors, packs=packs: [v for pack, x in zip(packs, vectors, strict=True) for v in pack.split(x).values()],
                tuple(pack.ref for pack in packs),
                tuple(ref for pack in packs for ref in pack.members),
                tuple(pack.aval for pack in packs),
            )
            names_in = [Name(stage, ref) for ref in program.inputs]
            names_out = [Name(stage, ref) for ref in program.outputs]
            draft.compute(f"unpack stage {stage}", program, job.placement[stage], names_in, names_out, ())


def _tie(draft: Draft, job: Job) -> None:
    """Gradients of parameters used away from home go back, once, and are summed."""
    for home in range(job.num_stages):
        back: dict[int, list[Name]] = {}
        for stage in range(job.num_stages):
            for ref in job.accumulators(stage):
                if ref.role == Role.GRAD and ref.index >= 0 and stage != home and job.owner[ref.index] == home:
                    target = Name(home, Ref(Role.GRAD, ref.index, stage))
                    path = job.cuts[0].loss.param_paths[ref.index]
                    draft.send(f"send grad of {path} to stage {home}", Name(stage, ref), target, job.placement[home])
                    back.setdefault(ref.index, [grad_name(home, ref.index)]).append(target)
        if back:
            _sum(draft, job, home, list(back.values()))


def _sum(draft: Draft, job: Job, stage: int, groups: list[list[Name]]) -> None:
    names = [name for group in groups for name in group]
    avals = [job.params[name.ref.index] for name in names]

    def tie(*args: Any) -> list[Any]:
        supply = iter(args)
        return [functools.reduce(operator.add, [next(supply) for _ in group]) for group in groups]

    totals = [group[0] for group in groups]
    program = Program(tie, tuple(n.ref for n in names), tuple(n.ref for n in totals), shapes_of(avals))
    donated = tuple(k for k, name in enumerate(names) if name in totals)
    draft.compute(f"tie stage {stage}", program, job.placement[stage], names, totals, donated)


def draft_zeros(draft: Draft, job: Job, wanted: Sequence[int]) -> None:
    """The gradients of those of the leaves that have none: zeros, on their owners."""
    missing = [leaf for leaf in wanted if leaf not in job.trained and Ref(Role.GRAD, leaf) not in job.packed]
    for stage in range(job.num_stages):
        names = [grad_name(stage, leaf) for leaf in missing if job.owner[leaf] == stage]
        avals = [job.params[name.ref.index] for name in names]
        if names:
            program = Program(
                lambda avals=avals: [jnp.zeros(aval.shape, aval.dtype) for aval in avals], (), tuple(n.ref for n in names), ()
            )
            draft.compute(f"zeros stage {stage}", program, job.placement[stage], [], names, ())


def _join(draft: Draft, job: Job) -> None:
    for stage in range(job.num_stages):
        forwards = [job.cuts[variant].stages[stage].forward for variant in job.variants]
        for ref in forwards[0].outputs:
            if ref.role != Role.ROWS:
                continue
            names = [Name(stage, ref, i) for i in range(len(job.sizes))]
            avals = [forward.results[forward.outputs.index(ref)] for forward in forwards]
            refs = tuple(Ref(Role.ROWS, ref.index, i) for i in range(len(names)))
            program = Program(lambda *rows: [jnp.concatenate(rows)], refs, (Ref(Role.AUX, ref.index),), shapes_of(avals))
            output = Name(stage, Ref(Role.AUX, ref.index))
            draft.compute(f"join aux {ref.index}", program, job.placement[stage], names, [output], ())
