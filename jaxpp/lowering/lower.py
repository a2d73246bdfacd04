"""Lowering: a schedule and a cut loss become the lines of a plan, in five passes by one ``Builder``; and so does ``init``.

*feed* sends batch leaves, the key and tied parameters to the stages that read them. *begin* is one program a stage for all that is
done once (statics, keys, weights, zeroed sums). *actions* follow the unit clock, each with the sends that it feeds after it, and
model state before it. *sums* brings tied gradients home, and sums gradients, loss and aux over the
replicas, once. *reduce* finishes the other aux values. ``init`` is traced once and divided by owner, so the whole model is never on
one device, nor on the host, and every leaf has the bits that ``jax.jit(init)(key)`` gives it.
"""

import functools
import operator
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var
from jaxtyping import Float

from jaxpp.errors import CutError, InitError
from jaxpp.lowering.builder import CALLER, Builder, Constant, FusedAction, GroupMean, Name
from jaxpp.lowering.step import GradientSums, Step, param_name, scale_name, state_name, total_name
from jaxpp.schedule.action import Action
from jaxpp.schedule.forward import forward
from jaxpp.stages.axes import RankAxes
from jaxpp.stages.fingerprint import ComparableFunction, fingerprint
from jaxpp.stages.floating import has_gradient
from jaxpp.stages.graph import Graph, Piece, partition, trace
from jaxpp.stages.jaxpr import Atom, shapes_of, variables
from jaxpp.stages.loss.aux import REDUCERS, Join, Reducer, average_of_examples
from jaxpp.stages.loss.microbatch import fold_keys, scale_dtype, slice_batch
from jaxpp.stages.program import Pack, Program, Ref, Role
from jaxpp.types import Array, Aval, Key, Tree

INIT_KEY = Name(CALLER, Ref(Role.KEY, shared=True))  # that parameters are made from


def forward_actions(num_stages: int, num_microbatches: int, *, visits: bool = False) -> tuple[Action, ...]:
    """The order without backwards, each stage as on a rank of its own: microbatch i reaches stage s in slot i + s.

    Where parameters are on devices only while a stage works, each stage runs all microbatches at a time.
    """
    order = forward(num_stages, num_microbatches).order
    return tuple(sorted(order)) if visits else order


def lower(
    step: Step,
    actions: Sequence[Action],
    lasting: Builder | None = None,
    pairs: Mapping[Action, Action] = MappingProxyType({}),
) -> Builder:
    """Write the lines of one step up to its gradients, of actions in the order in which they are dispatched.

    Of ``pairs``, a forward and the backward right behind it, those become one line that their stage can run as one program.
    ``lasting`` takes the lines that depend on parameters alone, for many steps with the same parameters. The model state after the
    step is on its owners, under the names that a further microbatch would read.
    """
    builder = Builder()
    lasting = builder if lasting is None and step.visits else lasting
    _feed(builder, lasting or builder, step)
    chosen, zeros = step.choose(actions, pairs)
    for stage in sorted(range(step.num_stages), key=lambda s: s != step.loss_stage):
        _begin(builder, step, stage, zeros[stage], lasting)
    passing, scattering = _ModelState(builder, step), _Scattering(builder, step)
    for action in filter(chosen.__contains__, actions):
        program, fused = chosen[action]
        program = scattering.within(action, program)
        passing.supply(action, program)
        _act(builder, step, action, program, fused)
        passing.note(action, program)
        scattering.behind(action, program)
    for stage, sums in enumerate(step.sums):
        if not sums.stays_packed:
            _unpack(builder, step, stage, sums.packs)
    for stage, sums in enumerate(step.sums):
        _add_tied(builder, step, stage, sums)
    for stage, sums in enumerate(step.sums):
        _sum_replicas(builder, step, stage, sums)
    _reduce(builder, step)
    passing.go_home()
    return builder


def _feed(builder: Builder, lasting: Builder, step: Step) -> None:
    read = {leaf for stage in range(step.num_stages) for leaf in step.read(stage, Role.PARAM)}
    divided = [leaf for leaf in step.leaves.all_params if leaf.divided and leaf.index in read]
    for stage in range(step.num_stages):
        _gather(lasting, step, stage, [leaf.index for leaf in divided if leaf.stage == stage])
    for stage in range(step.num_stages):
        read_here = set(step.read(stage, Role.BATCH))
        names = [name._replace(stage=stage) for name in step.given if name.ref.index in read_here]
        names += [Name(stage, Ref(Role.KEY, k)) for k in step.read(stage, Role.KEY)]
        for name in sorted(names, key=lambda name: name.microbatch):
            what = f"{name.ref.role} {name.ref.index}" + f" of microbatch {name.microbatch}" * (name.microbatch >= 0)
            builder.send(f"send {what} to stage {stage}", name._replace(stage=CALLER), name)
        for k in step.read(stage, Role.LOSS_SCALE):
            builder.send(f"send loss scale to stage {stage}", scale_name(step.loss_stage, k), scale_name(stage, k))
        for leaf in step.read(stage, Role.PARAM):
            if step.owner[leaf] != stage:
                path = step.cuts[0].loss.param_paths[leaf]
                lasting.send(f"send {path} to stage {stage}", param_name(step.owner[leaf], leaf), param_name(stage, leaf))


def _gather(builder: Builder, step: Step, stage: int, leaves: Sequence[int]) -> None:
    """Give each replica the whole of the parameters of which it holds a part, once a step."""
    if leaves:
        parts, whole = ([param_name(stage, leaf, shared=shared) for leaf in leaves] for shared in (True, False))
        reads, writes = (tuple(name.ref for name in names) for names in (parts, whole))
        avals = shapes_of(step.params[leaf] for leaf in leaves)
        make = functools.partial(Program, _same, reads, writes, avals, name=f"stage_{stage}_gather")
        builder.compute(f"gather stage {stage}", step.once(("gather", reads), make), stage, parts, whole)


_same = ComparableFunction(lambda *values: list(values), "same")


class _Part(NamedTuple):
    function: Callable[..., Sequence[Array]]
    does: Hashable  # equal for functions that do the same; None if that cannot be said
    inputs: Sequence[Name]
    avals: Sequence[Aval]
    outputs: Sequence[Name]


def _begin(builder: Builder, step: Step, stage: int, totals: dict[Ref, Aval], lasting: Builder | None) -> None:
    """One program for all that a stage does once per step; with ``lasting``, what depends on parameters alone is another."""
    statics, made = [], set[Name]()
    for variant, code in enumerate(step.codes(stage)):
        values = enumerate(code.constants)
        constants = {step.local_name(stage, Ref(Role.CONSTANT, k), -1, variant): step.constant(value) for k, value in values}
        for target in (builder, lasting or builder):
            target.constants |= constants
        inputs = [step.local_name(stage, ref, -1, variant) for ref in code.statics.inputs]
        outputs = [step.local_name(stage, ref, -1, variant) for ref in code.statics.outputs]
        if lasting is None and variant == 0:
            statics.append(_Part(code.statics.function, code.statics.does, inputs, code.statics.avals, outputs))
        elif fresh := tuple(k for k, name in enumerate(outputs) if name not in made):
            program = step.once(("statics", code.statics, fresh), functools.partial(_returning, code.statics, fresh))
            names = [outputs[k] for k in fresh]
            (lasting or builder).compute(f"parameters of stage {stage}", program, stage, inputs, names)
        made |= set(outputs)
    shapes = tuple(totals.values())
    zeros = _Part(functools.partial(_zeros, shapes), ("zeros", *shapes), [], [], [Name(stage, ref) for ref in totals])
    parts = [*statics, *_batch(builder, step, stage), *_keys(builder, step, stage), *_scales(builder, step, stage), zeros]
    parts = [part for part in parts if part.outputs]
    if not parts:
        return

    def begin(*args: Array) -> list[Array]:
        supply, results = iter(args), []
        for part in parts:
            results += part.function(*(next(supply) for _ in part.inputs))
        return results

    names_in = [name for part in parts for name in part.inputs]
    names_out = [name for part in parts for name in part.outputs]
    avals = shapes_of(aval for part in parts for aval in part.avals)
    refs = tuple(n.ref for n in names_in), tuple(n.ref for n in names_out)
    does = None if any(part.does is None for part in parts) else tuple((part.does, len(part.inputs)) for part in parts)
    program = Program(ComparableFunction(begin, does), *refs, avals, name=f"begin_stage_{stage}")
    builder.compute(f"begin stage {stage}", program, stage, names_in, names_out)


def _returning(program: Program, chosen: Sequence[int]) -> Program:
    """A program that returns some of the results of another one."""

    def run(*args: Array) -> list[Array]:
        results = program.function(*args)
        return [results[k] for k in chosen]

    function = ComparableFunction(run, program.does and (program.does, *chosen))
    return replace(program, function=function, outputs=tuple(program.outputs[k] for k in chosen))


def _batch(builder: Builder, step: Step, stage: int) -> list[_Part]:
    leaves = [k for k in step.read(stage, Role.BATCH) if k not in step.shared]
    if step.one_by_one:
        return []
    names, count = [Name(stage, Ref(Role.BATCH, k)) for k in leaves], len(step.sizes)
    if count == 1:
        for whole in names:
            builder.rename(whole, whole._replace(microbatch=0))
        return []

    def split(*batch: Array) -> list[Array]:
        return [piece for row in slice_batch(batch, step.sizes) for piece in row]

    made = [name._replace(microbatch=i) for i in range(count) for name in names]
    return [_Part(split, ("split", step.sizes, len(names)), names, [step.batch[k] for k in leaves], made)]


def _keys(builder: Builder, step: Step, stage: int) -> list[_Part]:
    """The key of each microbatch; the microbatches of replica r are numbered from r times their number."""
    if step.key is None or not step.read(stage, Role.KEY):
        return []
    names, avals, count = [Name(stage, Ref(Role.KEY))], [step.key], len(step.sizes)
    if step.num_replicas > 1:
        replica = Name(stage, Ref(Role.REPLICA))
        builder.constants[replica] = Constant(np.arange(step.num_replicas), split=True)
        names, avals = [*names, replica], [*avals, builder.constants[replica].aval]

    def fold(key: Array, replica: Array | int = 0) -> list[Array]:
        return fold_keys(key, step.implementation, replica * count, count)

    does = "fold", step.implementation, count, step.num_replicas
    return [_Part(fold, does, names, avals, [Name(stage, Ref(Role.KEY), i) for i in range(count)])]


def _scales(builder: Builder, step: Step, stage: int) -> list[_Part]:
    names = [Name(stage, Ref(Role.SCALE), i) for i in range(len(step.sizes))]
    if step.weights is None:
        builder.constants |= dict(zip(names, _shares(step), strict=True))
        return []
    source, here = Name(step.loss_stage, Ref(Role.SCALE)), Name(stage, Ref(Role.SCALE))
    if stage == step.loss_stage:
        names_in = [step.given[place]._replace(stage=stage) for place in step.weights.places]
        builder.compute("weigh", step.weights.program, stage, names_in, [source])
    else:
        builder.send(f"send scales to stage {stage}", source, here)

    def divided(scales: Float[Array, " microbatches"]) -> list[Float[Array, ""]]:
        return [scales[i] for i in range(len(names))]

    return [_Part(divided, ("divide", len(names)), [here], [jax.ShapeDtypeStruct((len(names),), scale_dtype())], names)]


def _shares(step: Step) -> list[Constant]:
    """Each microbatch's share of the examples, 1 if the loss is summed; the last microbatch of an idle replica has none."""
    total = step.split.num_examples(step.num_replicas)
    values = {size: 1.0 if step.summed else size / total for size in step.sizes}
    by_size = {size: Constant(np.asarray(value, scale_dtype())) for size, value in values.items()}
    shares = [by_size[size] for size in step.sizes]
    if step.split.num_idle:
        last = np.full(step.num_replicas, values[step.sizes[-1]], scale_dtype())
        last[step.num_replicas - step.split.num_idle :] = 0
        shares[-1] = Constant(last, split=True)
    return shares


def _act(builder: Builder, step: Step, action: Action, program: Program, fused: FusedAction | None) -> None:
    stage, _, i = action
    last = action if fused is None else fused.action
    label, cut = str(last), step.cuts[step.variants[i]]
    inputs = [step.local_name(stage, ref, i) for ref in program.inputs]
    outputs = [step.local_name(stage, ref, i + (ref.role == Role.STATE), step.variants[i]) for ref in program.outputs]
    builder.compute(label if fused is None else f"{action} {last}", program, stage, inputs, outputs, action=action, fused=fused)
    for ref in program.outputs:
        peers = cut.consumers[ref.index] if ref.role == Role.ACTIVATION else ()
        for peer in (cut.producer[ref.index],) if ref.role == Role.COTANGENT else peers:
            builder.send(f"send {label} to stage {peer}", Name(stage, ref, i), Name(peer, ref, i), last)


class _ModelState:
    """Where each model state leaf is, as every microbatch finds it; the stage that makes its new value keeps it.

    A stage further on that reads the old one is sent it once a microbatch, or once a step if nobody changes it. Each replica has
    its own from the first microbatch to the last; after these all have the mean.
    """

    def __init__(self, builder: Builder, step: Step):
        self._builder, self._step = builder, step
        self._made = {(leaf, 0): state_name(stage, leaf) for leaf, stage in enumerate(step.state_owner)}
        self._there = set(self._made.values())
        self._sent: dict[tuple[Name, int], Name] = {}
        self._rows(0, list(range(len(step.state_owner))))

    def supply(self, action: Action, program: Program) -> None:
        for ref in program.inputs:
            if ref.role == Role.STATE:
                self._bring(ref.index, action.microbatch, action.stage, str(action))

    def note(self, action: Action, program: Program) -> None:
        stage, _, i = action
        made = {(ref.index, i + 1): state_name(stage, ref.index, i + 1) for ref in program.outputs if ref.role == Role.STATE}
        self._made |= made
        self._there |= set(made.values())

    def go_home(self) -> None:
        for leaf, stage in enumerate(self._step.state_owner):
            self._bring(leaf, len(self._step.sizes), stage, "the step")
        self._rows(len(self._step.sizes), [leaf for leaf in range(len(self._step.state_owner)) if leaf not in self._fixed])
        for leaf in self._fixed if self._step.num_replicas > 1 else ():
            stage, last = self._step.state_owner[leaf], len(self._step.sizes)
            old, new = (state_name(stage, leaf, i, shared=True) for i in (0, last))
            self._builder.rename(old, new)

    @property
    def _fixed(self) -> frozenset[int]:
        """The leaves that nobody changes."""
        return frozenset.intersection(*(cut.loss.unchanged for cut in self._step.cuts))

    def _rows(self, microbatch: int, leaves: Sequence[int]) -> None:
        """Give each replica its own of what all have, before the first microbatch; or all the mean, after the last."""
        step, loss = self._step, self._step.cuts[0].loss
        for stage in range(step.num_stages if step.num_replicas > 1 else 0):
            mine = [leaf for leaf in leaves if step.state_owner[leaf] == stage]
            if not mine:
                continue
            own, shared = ([state_name(stage, leaf, microbatch, shared=shared) for leaf in mine] for shared in (False, True))
            avals = shapes_of(loss.state[leaf] for leaf in mine)
            if microbatch == 0:
                run, names, what = functools.partial(_to_rows, step.num_replicas), (shared, own), "spread"
            else:
                run, names, what = _mean_of_rows, (own, shared), "average"
                avals = tuple(jax.ShapeDtypeStruct((step.num_replicas, *aval.shape), aval.dtype) for aval in avals)
            refs = [tuple(name.ref for name in each) for each in names]
            make = functools.partial(Program, run, *refs, avals, spans=True, name=f"stage_{stage}_{what}_model_state")
            program = step.once((what, refs[0], avals), make)
            self._builder.compute(f"{what} model state of stage {stage}", program, stage, *names)

    def _bring(self, leaf: int, microbatch: int, stage: int, reader: str) -> None:
        source, target = self._find(leaf, microbatch), state_name(stage, leaf, microbatch)
        if target not in self._there:
            self._there.add(target)
            near = source if source.stage == stage else self._sent.setdefault((source, stage), target)
            if near != target:  # what a stage was sent serves as long as nobody changes it
                self._builder.rename(near, target)
                return
            path = self._step.cuts[0].loss.state_paths[leaf]
            self._builder.send(f"send {path} to stage {stage} for {reader}", source, target)

    def _find(self, leaf: int, microbatch: int) -> Name:
        while (leaf, microbatch) not in self._made:
            microbatch -= 1
            loss = self._step.cuts[self._step.variants[microbatch]].loss
            if leaf not in loss.unchanged:
                where = f"model_state {loss.state_paths[leaf]}"
                rule = "a stage reads what a later stage makes of the microbatch before, and does not wait for it"
                got = f"microbatch {microbatch + 1} of {len(self._step.sizes)} reads it before {microbatch} has made it"
                raise CutError(where, rule, got, "update the state where it is read, or pass fewer stages")
        return self._made[leaf, microbatch]


class _Scattering:
    """Has replicas sum a part each of the gradients: those of a backward are scattered, and added to the parts of those before.

    The backward's own program does it, if no axis is left to the compiler; otherwise one behind it.
    """

    def __init__(self, builder: Builder, step: Step):
        self._builder, self._step = builder, step
        self._avals = [step.accumulators(stage) for stage in range(step.num_stages if step.scattered else 0)]
        self._begun: set[Name] = set()

    def within(self, action: Action, program: Program) -> Program:
        """The program of an action that adds its gradients to what replicas hold of them."""
        if not self._step.scattered or all(ref.role != Role.GRAD for ref in program.outputs):
            return program
        return self._onto(action.stage, program) if self._step.num_shards == 1 else self._apart(program)

    def behind(self, action: Action, program: Program) -> None:
        """Write the line that adds what an action's program leaves to be added."""
        stage, _, i = action
        made = tuple(ref for ref in program.outputs if ref.role == Role.ADDEND)
        if made:
            totals = tuple(ref._replace(role=Role.GRAD) for ref in made)
            avals = shapes_of(self._avals[stage][ref] for ref in totals)
            make = functools.partial(Program, _same, made, totals, avals, name=f"stage_{stage}_scatter")
            scatter = self._onto(stage, self._step.once(("scatter", stage, made), make))
            reads, writes = ([self._step.local_name(stage, ref, i) for ref in refs] for refs in (scatter.inputs, scatter.outputs))
            self._builder.compute(f"scatter gradients of {action}", scatter, stage, reads, writes)

    def _apart(self, program: Program) -> Program:
        """The program with a name for its own gradients."""
        outputs = tuple(ref._replace(role=Role.ADDEND) if ref.role == Role.GRAD else ref for ref in program.outputs)
        return self._step.once(("apart", program), lambda: replace(program, outputs=outputs))

    def _onto(self, stage: int, program: Program) -> Program:
        """The program that adds gradients to sums, which it is given behind its arguments unless there are none yet."""
        outputs, count = tuple(map(self._step.sum_of, program.outputs)), len(program.inputs)
        avals = {self._step.sum_of(ref): aval for ref, aval in self._avals[stage].items()}
        made = [ref for ref in outputs if ref.role == Role.GRAD]
        onto = tuple(ref for ref in made if Name(stage, ref) in self._begun)
        self._begun |= {Name(stage, ref) for ref in made}

        def run(*args: Array) -> list[Array]:
            return program.function(*args[:count])

        def make() -> Program:
            inputs, shapes = (*program.inputs, *onto), (*program.avals, *shapes_of(avals[ref] for ref in onto))
            return replace(program, function=run, inputs=inputs, outputs=outputs, avals=shapes, sums=True)

        return self._step.once(("onto", program, onto), make)


def _to_rows(count: int, *values: Array) -> list[Array]:
    return [jnp.broadcast_to(value, (count, *value.shape)) for value in values]


def _mean_of_rows(*values: Array) -> list[Array]:
    """The mean over replicas; of what is no floating number (a count, a key) that of the first."""
    return [value.mean(0).astype(value.dtype) if jnp.issubdtype(value.dtype, jnp.inexact) else value[0] for value in values]


def add_wait(builder: Builder, what: str, names: Sequence[Name]) -> None:
    """Wait until these values are there: a host callback that raises does so here, before anything is taken over or returned."""

    def wait(*values: Array) -> Sequence[Array]:
        return jax.block_until_ready(values)[:1]

    builder.call(f"the wait for host callbacks of {what}", wait, names[0].stage, names, names[:1])


def add_gradients(builder: Builder, step: Step) -> None:
    """The gradients of floating leaves for the caller: those that stayed parts of vectors as leaves, and zeros of what has none."""
    for stage, sums in enumerate(step.sums):
        if sums.stays_packed:
            _unpack(builder, step, stage, sums.packs, shared=True)
    add_zero_gradients(builder, step, [leaf for leaf, shape in enumerate(step.params) if has_gradient(shape)])


def add_zero_gradients(builder: Builder, step: Step, wanted: Sequence[int]) -> None:
    """The gradients of those of the leaves that have none: zeros, on their owners."""
    missing = [leaf for leaf in wanted if leaf not in step.trained and Ref(Role.GRAD, leaf) not in step.packed]
    for stage in range(step.num_stages):
        names = [total_name(stage, Role.GRAD, leaf) for leaf in missing if step.owner[leaf] == stage]
        if names:
            zeros = functools.partial(_zeros, [step.params[name.ref.index] for name in names])
            refs = tuple(n.ref for n in names)
            program = step.once(("zeros", refs), functools.partial(Program, zeros, (), refs, ()))
            builder.compute(f"zeros stage {stage}", program, stage, [], names)


def _zeros(avals: Collection[Aval]) -> list[Array]:
    return [jnp.zeros(aval.shape, aval.dtype) for aval in avals]


def _unpack(builder: Builder, step: Step, stage: int, packs: Sequence[Pack], *, shared: bool = False) -> None:
    if not packs:
        return
    members, vectors = tuple(ref for pack in packs for ref in pack.members), tuple(pack.ref for pack in packs)

    def split(*values: Array) -> list[Array]:
        return [part for pack, vector in zip(packs, values, strict=True) for part in pack.split(vector).values()]

    name, avals, unpack = f"stage_{stage}_unpack", tuple(pack.aval for pack in packs), ComparableFunction(split, ("unpack", *packs))
    program = step.once(("unpack", stage, packs), lambda: Program(unpack, vectors, members, avals, name=name))
    names_out = [Name(stage, ref._replace(shared=shared)) for ref in members]
    builder.compute(f"unpack stage {stage}", program, stage, [Name(stage, ref) for ref in vectors], names_out)


def _add_tied(builder: Builder, step: Step, home: int, sums: GradientSums) -> None:
    back: dict[int, list[Name]] = {}
    for stage, grad in sums.coming_home:
        ref = step.sum_of(grad)
        target = Name(home, ref._replace(source=stage))
        path = step.cuts[0].loss.param_paths[ref.index]
        builder.send(f"send grad of {path} to stage {home}", Name(stage, ref), target)
        back.setdefault(ref.index, [Name(home, ref)]).append(target)
    if not back:
        return
    groups = list(back.values())
    names, totals = [name for group in groups for name in group], [group[0] for group in groups]

    def added(*args: Array) -> list[Array]:
        supply = iter(args)
        return [functools.reduce(operator.add, [next(supply) for _ in group]) for group in groups]

    tie = ComparableFunction(added, ("tie", *map(len, groups)))
    refs = tuple(n.ref for n in names), tuple(n.ref for n in totals)
    avals = shapes_of(step.params[name.ref.index] for name in names)
    program = step.once(("tie", refs), lambda: Program(tie, *refs, avals, name=f"stage_{home}_tie"))
    builder.compute(f"tie stage {home}", program, home, names, totals)


def _sum_replicas(builder: Builder, step: Step, stage: int, sums: GradientSums) -> None:
    """What the replicas of a stage have summed, each by itself, is summed: the one reduction over ``data`` of a step."""
    own = [ref for ref in sums.leaves if step.num_replicas > 1 and step.leaves.all_params[ref.index].own]
    if own:  # each over the replicas with the same
        scales = [] if step.weights is None else [Name(stage, Ref(Role.SCALE), i) for i in range(len(step.sizes))]
        mean = GroupMean(tuple(step.params[ref.index] for ref in own), step.summed)
        means = [total_name(stage, Role.GRAD, ref.index) for ref in own]
        builder.call(f"total of tasks stage {stage}", mean, stage, [*(Name(stage, ref) for ref in own), *scales], means)
    totals = [(ref, step.params[ref.index]) for ref in sums.leaves if ref not in own]
    if stage == step.loss_stage:
        forward = step.codes(stage)[0].forward
        results = zip(forward.outputs, forward.results, strict=True)
        totals += [(ref, aval) for ref, aval in results if ref.role in (Role.LOSS, Role.AUX)]
    refs = tuple(ref for ref, _ in totals)
    names = [Name(stage, ref) for ref in refs], [total_name(stage, ref.role, ref.index) for ref in refs]
    if step.num_replicas == 1:
        for source, target in zip(*names, strict=True):
            builder.rename(source, target)
    elif totals:
        avals, outputs = shapes_of(aval for _, aval in totals), tuple(name.ref for name in names[1])
        make = functools.partial(Program, _same, refs, outputs, avals, sums=True, name=f"stage_{stage}_total")
        builder.compute(f"total stage {stage}", step.once(("total", refs, avals), make), stage, *names)


def _reduce(builder: Builder, step: Step) -> None:
    count = len(step.sizes)
    for stage in range(step.num_stages):
        forwards = [step.cuts[variant].stages[stage].forward for variant in step.variants]
        for ref in forwards[0].outputs:
            if ref.role != Role.ROWS:
                continue
            reducer = step.cuts[0].reducers[ref.index]
            names = [*(Name(stage, ref, i) for i in range(count)), *(Name(stage, Ref(Role.SCALE), i) for i in range(count))]
            avals = [forward.results[forward.outputs.index(ref)] for forward in forwards]
            avals += [jax.ShapeDtypeStruct((), scale_dtype())] * count

            def reduced(*args: Array, reducer: Reducer = reducer, sizes: Sequence[int] = step.sizes) -> list[Array]:
                weights = jnp.stack(args[len(sizes) :])
                if step.summed or reducer is average_of_examples:
                    weights = jnp.asarray(sizes, weights.dtype) / sum(sizes)
                return [reducer(args[: len(sizes)], weights)]

            refs = tuple(name.ref for name in names)
            output = total_name(stage, Role.AUX, ref.index)
            if count == 1 and step.num_replicas == 1 and (isinstance(reducer, Join) or reducer is REDUCERS["last"]):
                builder.rename(names[0], output)
                continue
            program = Program(reduced, refs, (output.ref,), shapes_of(avals), name=f"stage_{stage}_reduce_aux_{ref.index}")
            if step.num_replicas > 1:
                program = _across(program, step)
            builder.compute(f"reduce aux {ref.index}", program, stage, names, [output])


def _across(program: Program, step: Step) -> Program:
    """A reduction of the values and weights of a replica's microbatches as one of those of all replicas, in the batch's order."""
    count, num_replicas, split = len(step.sizes), step.num_replicas, step.split
    pairs = [(r, i) for r in range(num_replicas) for i in range(count - (r >= num_replicas - split.num_idle))]
    pairs = sorted(pairs, key=lambda pair: pair[1]) if step.one_by_one else pairs  # of which each replica has its part

    def function(*args: Array) -> list[Array]:
        values, weights = ([parts[i][r] for r, i in pairs] for parts in (args[:count], args[count:]))
        return program.function(*values, *weights, sizes=[split.sizes[i] for _, i in pairs])

    avals = tuple(jax.ShapeDtypeStruct((num_replicas, *aval.shape), aval.dtype) for aval in program.avals)
    return replace(program, function=function, avals=avals, spans=True)


def trace_init(init: Callable[[Key], Tree], key: Key, axes: RankAxes) -> tuple[Graph, Tree]:
    """Trace ``init(key)``, which may name the axes of a rank: its graph, in which each value is whole, and the tree of shapes."""
    trees: list[Tree] = []

    def flat(key: Key) -> list[Array]:
        leaves, tree = jax.tree.flatten(init(key))
        trees.append(tree)
        return [jnp.array(leaf, copy=True) for leaf in leaves]

    try:
        graph, shapes = trace(flat, key, axes=RankAxes(names=axes.names, whole=axes.whole))  # on which no value is divided
    except jax.errors.TracerArrayConversionError as error:
        rule = "init is traced by jax.jit, so that each device makes only its own parameters"
        fix = "use jax.numpy and jax.random inside init, or make the parameters first and call pipe.init(params, batch)"
        raise InitError("Pipeline.init(init, key, batch)", rule, "a conversion to NumPy inside init", fix) from error
    except Exception as error:
        error.add_note("jaxpp: raised while tracing init")
        if isinstance(error, TypeError) and "ShapeDtypeStruct" in str(error):
            error.add_note("jaxpp: shapes hold no numbers; in init put jnp.zeros(leaf.shape, leaf.dtype) in the place of each")
        raise
    return graph, trees[-1].unflatten(shapes)


def closed_function(graph: Graph, piece: Piece, inputs: Sequence[Var], atoms: Sequence[Atom]) -> ComparableFunction:
    """A piece as a function of ``inputs``, its constants put in."""
    constants = {var: graph.constants[var] for var in piece.inputs if var in graph.constants}
    run = graph.function(piece.eqns, [*inputs, *constants], atoms)

    def does() -> Hashable:
        return fingerprint([graph.eqns[i] for i in piece.eqns], inputs, atoms, constants)

    return ComparableFunction(lambda *args: run(*args, *constants.values()), does)


def lower_init(graph: Graph, sources_of: Sequence[Name], made: Sequence[Name], what: str = "init") -> Builder:
    """The lines that make leaves of a state from the key, or from other leaves, each stage its own."""
    builder, sources = Builder(), dict(zip(graph.inputs, sources_of, strict=True))
    for stage in sorted({name.stage for name in made}):
        mine = [k for k, name in enumerate(made) if name.stage == stage]
        atoms = [graph.outputs[k] for k in mine]
        piece = partition(graph, [None] * len(graph.eqns), dict.fromkeys(variables(atoms), stage)).get(stage, Piece())
        inputs = [var for var in piece.inputs if var in sources]
        names_in, names_out = [sources[var]._replace(stage=stage) for var in inputs], [made[k] for k in mine]
        for var, name in zip(inputs, names_in, strict=True):
            builder.send(f"send {name.ref.role} {name.ref.index} to stage {stage}", sources[var], name)
        refs = tuple(n.ref for n in names_in), tuple(n.ref for n in names_out)
        program = Program(closed_function(graph, piece, inputs, atoms), *refs, shapes_of(inputs), name=f"stage_{stage}_{what}")
        builder.compute(f"init stage {stage}", program, stage, names_in, names_out)
    return builder
