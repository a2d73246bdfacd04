"""What a generation runs: a ring of groups of sequences that go through the stages again and again, on the same parameters.

One token is little work, so what depends on parameters alone (a cast of all weights, a tied embedding that is sent) outlives the
pass: its lines are run once for all passes of all shapes, and the values are arguments of the others. A cache changes in place.

A prompt is prefilled in passes of one sequence; then its carry enters a place of its group, whose passes take a token of each.

Where parameters wait in host memory, nothing outlives a pass. Each stage's come to its devices once for several passes, which run
side by side: a stage works for all of them before the next one does, and what depends on its parameters is made again.

Where a thread for each rank hands over what its rank runs, the passes of all groups are handed over at once: the thread of one rank
goes on to the next group, while that of the next rank takes the one before.
"""

import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.engine.engine import Engine
from jaxpp.engine.outcome import aux_names
from jaxpp.engine.tracing import avals_of
from jaxpp.errors import ArgumentError, StateError
from jaxpp.forward.capacity import capacity
from jaxpp.forward.functions import Functions
from jaxpp.forward.prompts import Continuation, chunk_sizes
from jaxpp.forward.sampling import NextToken, NextTokenFn, NextTokensFn, SequenceCarry, takes_history
from jaxpp.lowering.builder import Builder, Line, LineList, Name
from jaxpp.lowering.lower import forward_actions, lower
from jaxpp.lowering.plan import Execution, Plan
from jaxpp.lowering.step import Leaves, Step, state_name
from jaxpp.runtime.bind import Bound, Shapes, compile_plan
from jaxpp.runtime.edges import put, to_homes
from jaxpp.runtime.execute import Observer, execute, hand_over
from jaxpp.runtime.interrupts import despite_ctrl_c
from jaxpp.stages.axes import RankAxes
from jaxpp.stages.graph import Graph, trace
from jaxpp.stages.program import Ref, Role
from jaxpp.stages.stacked import Slices, concatenated, is_slices, joined, split_like
from jaxpp.types import Array, Aval, Batch, ForwardFn, Key, Leaf, Tree

AHEAD = 2  # turns that are begun before the tokens of the first of them are read


def check_unstepped(where: str, what: str, leaves: Leaves[Array]) -> None:
    """Refuse to go on with a "stream" or a "generation" whose state, which has these leaves, a step has consumed."""
    held = leaves.flat()
    if gone := sum(leaf.is_deleted() for leaf in held):
        rule = f"a {what} reads the state that it was given until it ends, and a step reuses the buffers of that state"
        got = f"{gone} of {len(held)} arrays were consumed by a step while the {what} was open"
        fix = f"read the {what} to its end before the step, or call step(..., donate=False)"
        raise StateError(where, rule, got, fix)


@dataclass(frozen=True)
class CompiledPass:
    """What runs for inputs of one shape."""

    plan: Plan
    bound: Bound  # of parameters, what depends on parameters alone, the carry of each sequence, and the batch of each
    step: Step
    lasting: tuple[Leaf, ...]  # the first arguments, which are the same for every pass


class Lasting:
    """Values that depend on parameters alone, made once for the passes of all shapes; if nothing ``computes``, they are shapes."""

    def __init__(self, leaves: Leaves[Leaf], *, computes: bool = True):
        self.leaves, self._computes = leaves, computes
        self._values: dict[Hashable, Leaf] = {}

    def values(self, engine: Engine, builder: Builder, wanted: Sequence[Name]) -> list[Leaf]:
        """The values of these names; the builder's lines make those that no pass has made yet, under this name or another."""
        params = engine.placed.names_on_devices.all_params
        keys: dict[Name, Hashable] = {name: name for name in params}
        for line in builder.lines:
            does = object() if line.program is None or line.program.does is None else line.program.does
            inputs = tuple(keys.get(name, name) for name in line.inputs)
            made = "send" if line.is_send else does, line.stage, inputs
            keys.update((name, (made, k)) for k, name in enumerate(line.outputs))
        there = dict(zip(params, self.leaves.all_params, strict=True))
        there |= {name: self._values[key] for name, key in keys.items() if key in self._values}
        if missing := [name for name in wanted if name not in there]:
            needed, lines = set(missing), list[Line]()
            for line in reversed(builder.lines):
                if not needed.isdisjoint(line.outputs):
                    needed |= {name for name in line.inputs if name not in there}
                    lines.insert(0, line)
            draft = LineList(lines, builder.constants, tuple(there), tuple(missing))
            plan, bound = _compile(engine, engine.bind(draft), there, "for what depends on parameters alone")
            shapes = Shapes(bound.lines, bound.placement, engine.placed.shapes_by_role, there, bound.chosen)
            one = functools.cache(shapes.__getitem__)  # object for a value that has two names, because two stages share a device
            values = execute(plan, list(there.values())) if self._computes else map(one, bound.outputs)
            self._values.update(zip((keys[name] for name in missing), values, strict=True))
        return [self._values[keys[name]] for name in wanted]


class Passes:
    """Runs the function of an engine, ``fn(params, carry, batch) -> (carry, outputs)``, through the stages once at each call.

    Attributes:
        engine: of the function.
        beside: whether parameters wait in host memory, and passes run side by side.
    """

    def __init__(self, engine: Engine, lasting: Lasting, base: Engine):
        self.engine, self._lasting, self._base = engine, lasting, base
        self.beside = Role.PARAM in engine.options.waiting
        self._compiled: dict[Hashable, CompiledPass] = {}

    @property
    def at_once(self) -> bool:
        """Whether several passes are quicker together than one after another: side by side, or handed over in threads."""
        return self.beside or any(compiled.plan.turns for compiled in self._compiled.values())

    def most_prompts(self, group_size: int) -> int:
        """How many prompts for one group are prefilled at once, each on a carry beside those of the groups.

        As many as there are ranks keep all threads busy; parameters that visit come once for all prompts.
        """
        return group_size if self.beside else min(group_size, len(set(self.engine.placement.places))) if self.at_once else 1

    def prepare(self, batch: Batch, count: int = 1) -> CompiledPass:
        """What runs for so many inputs of these shapes, compiled at the first call."""
        leaves, tree = jax.tree.flatten(batch)
        key = tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves), count
        if key not in self._compiled:
            self._compiled[key] = despite_ctrl_c(self._prepare, batch, count)
        return self._compiled[key]

    def __call__(
        self, carries: Sequence[Sequence[Array]], batches: Sequence[Batch], observer: Observer | None = None
    ) -> list[tuple[list[Array], Tree]]:
        """Run a pass of each carry, which is consumed, and batch, all of one shape: the new carries and the outputs.

        It waits for nothing.
        """
        if not carries:
            return []
        if self.beside:  # the runtime's own copy would crash
            check_unstepped("next(generation)", "generation", self._lasting.leaves)
        count = len(carries) if self.beside else 1  # that one plan runs
        runs = list[Execution]()
        try:
            compiled = self.prepare(batches[0], count)
            for first in range(0, len(carries), count):
                given = *carries[first : first + count], *batches[first : first + count]
                runs.append(Execution(compiled.plan, [*compiled.lasting, *jax.tree.leaves(given)]))
            in_threads = compiled.plan.turns and len(runs) > 1  # in a pass alone, each rank waits for the one before it
            hand_over([(run, run.left) for run in runs], observer, self._base.threads if in_threads else None)
        except BaseException as error:
            for run in runs:
                run.slots.clear()  # as in ``execute``
            if isinstance(error, Exception):
                check_unstepped("next(generation)", "generation", self._lasting.leaves)
            raise
        results = iter([result for run in runs for result in run.results()])
        tree = compiled.step.cuts[0].loss.aux_tree
        made = []
        for carry in carries:
            outputs = tree.unflatten(itertools.islice(results, tree.num_leaves))
            made.append((list(itertools.islice(results, len(carry))), outputs))
        return made

    def _prepare(self, batch: Batch, count: int) -> CompiledPass:
        engine, lasting = self.engine, Builder()
        step = engine.preparer.step(batch, None, train=False)
        builder = lower(step, forward_actions(step.num_stages, 1), lasting)
        carry = list(engine.placed.names_on_devices.model_state)
        outputs = [*aux_names(step), *(state_name(name.stage, leaf, 1) for leaf, name in enumerate(carry))]
        draft = builder.finish(engine.placed.names_on_devices.all_params, outputs)
        made = {name for line in lasting.lines for name in line.outputs}
        wanted = [name for name in dict.fromkeys(name for line in draft.lines for name in line.inputs) if name in made]
        what, values = f"for a pass of {', '.join(str(tuple(leaf.shape)) for leaf in jax.tree.leaves(batch))}", []
        if self.beside:
            there = {*engine.placed.names_on_devices.all_params, *made, *builder.constants}
            of_each = [functools.partial(_of_sequence, k, there) for k in range(count)]
            lines = (*lasting.lines, *_side_by_side(draft.lines, of_each))
            carry, given, outputs = (
                tuple(name_of(name) for name_of in of_each for name in names) for names in (carry, step.given, draft.outputs)
            )
            constants, inputs = {**lasting.constants, **builder.constants}, (*draft.inputs, *carry, *given)
            draft = LineList(lines, constants, inputs, outputs)
        else:
            values = self._lasting.values(engine, lasting, wanted)
            draft = dataclasses.replace(draft, inputs=(*draft.inputs, *wanted, *carry, *step.given))
        bound, in_threads = engine.bind(draft, gives=carry), not self.beside and engine.in_threads("forward", step)
        plan, bound = _compile(engine, bound, dict(zip(wanted, values, strict=False)), what, in_threads=in_threads)
        return CompiledPass(plan, bound, step, (*self._lasting.leaves.all_params, *values))


def _of_sequence(number: int, there: Collection[Name], name: Name) -> Name:
    """What a value is called in the pass of one of several sequences, unless all of them read it."""
    return name if name in there else name._replace(run=number)


def _side_by_side(lines: Sequence[Line], names_of: Sequence[Callable[[Name], Name]]) -> Iterator[Line]:
    """The lines of a pass, once for each of several sequences: each action, and what follows on it, of all before the next one."""
    begins = [k for k, line in enumerate(lines) if line.program is not None and line.action is not None]
    for begin, end in itertools.pairwise((0, *begins, len(lines))):
        for number, name_of in enumerate(names_of):
            for line in lines[begin:end]:
                inputs, outputs = (tuple(map(name_of, names)) for names in (line.inputs, line.outputs))
                action = line.action and line.action._replace(microbatch=number)
                label = line.label if line.action is None else line.label.replace(str(line.action), str(action))
                yield dataclasses.replace(line, label=label, inputs=inputs, outputs=outputs, action=action)


def _compile(
    engine: Engine, bound: Bound, values: Mapping[Name, Leaf], what: str, *, in_threads: bool = False
) -> tuple[Plan, Bound]:
    """A plan of lines, which takes those values as they are that the compiler has sharded as it likes."""
    given = {name: value.sharding for name, value in values.items() if engine.placement[name.stage].is_free(name.ref)}
    leaves, groups = engine.placed.shapes_by_role, engine.preparer.groups
    return compile_plan(bound, engine.programs, groups, leaves=leaves, given=given, what=what, in_threads=in_threads)


class Request(NamedTuple):
    """What ``where`` asks for; the carry is of a sequence without tokens. To compile, shapes of the carry and the key will do."""

    where: str
    engine: Engine
    functions: Functions
    sequence: NextTokenFn
    carry: Tree
    key: Key
    max_length: int | None
    num_groups: int
    group_size: int
    chunk: int

    def begin(self, raw_key: Leaf) -> SequenceCarry:
        """What a sequence without tokens carries."""
        there = num_prompt = None
        if takes_history(self.sequence.sampler):
            if self.max_length is None:
                rule = "a rule that reads what a sequence has had is told how long a sequence may be"
                got = "no max_length, and a carry that does not say for how many tokens it has room"
                raise ArgumentError(f"{self.where}(..., sample)", rule, got, "pass max_length, for example max_length=1024")
            there, num_prompt = jnp.full(self.max_length, -1, jnp.int32), jnp.int32(0)
        return SequenceCarry(self.carry, there, num_prompt, raw_key, jnp.int32(0))


def passes_of(request: Request, lasting: Lasting) -> tuple[Passes, Passes]:
    """The passes of one sequence and of a group, the same if a group is one sequence; compiled for one token."""
    engine, functions, sequence, group_size = request.engine, request.functions, request.sequence, request.group_size
    state = request.begin(jax.eval_shape(jax.random.key_data, request.key))
    shapes = avals_of(jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf), state))
    token = np.zeros((1, 1), np.int32)
    alone = Passes(functions.engine(engine, sequence, token, None, carry=shapes, reduce_aux="last"), lasting, engine)
    together = alone
    if group_size > 1:
        axes = tuple(axis for axis, _ in _group_axes(alone.engine.layout.variables[1][0]))
        leaves = zip(jax.tree.leaves(shapes), axes, strict=True)
        stacked = [jax.ShapeDtypeStruct((*x.shape[:axis], group_size, *x.shape[axis:]), x.dtype) for x, axis in leaves]
        shapes, tokens = jax.tree.structure(shapes).unflatten(stacked), np.zeros((group_size, 1, 1), np.int32)
        fn = NextTokensFn(sequence, axes)
        group = functions.engine(engine, fn, tokens, None, carry=shapes, reduce_aux="last", like=alone.engine)
        together = Passes(group, lasting, engine)
        together.prepare(tokens)
    alone.prepare(token)
    return alone, together


def _group_axes(carry: Tree) -> list[tuple[int, int]]:
    """The axis along which a group stacks each leaf, behind the layers that a loop runs over, and in how many slices it is held."""
    nodes = jax.tree.leaves(carry, is_leaf=is_slices)
    return [(1, len(node.sizes)) if isinstance(node, Slices) else (0, 1) for node in nodes]


@dataclass
class Group:
    """Sequences that go through the stages together; nothing before the first has entered."""

    carry: list[Array] | None = None  # its leaves, each on its stage
    tokens: Array | None = None  # what the next pass takes, on the last stage


Admitted = tuple[int, Continuation]
"""A prompt, and its place in a group."""


class Ring:
    """Runs the passes of groups of sequences, whose carries stay on their stages.

    In ``prefix`` is, of a prompt that comes again, the carry before its last token, of whichever of several rings was given it.
    """

    def __init__(self, alone: Passes, together: Passes, request: Request, num_kept: int, prefix: list[Array]):
        self.alone, self.together, self.num_groups, self.group_size = alone, together, request.num_groups, request.group_size
        layout, self._key = alone.engine.layout, request.key
        held = layout.variables[1][0]
        carry = request.begin(jax.random.key_data(request.key))
        self._max_length = None if carry.tokens is None else request.max_length
        empty = split_like(jax.tree.leaves(carry), held)
        axes = [axis for axis, num_slices in _group_axes(held) for _ in range(num_slices)]
        self._key_leaf = len(empty) - 2  # a SequenceCarry ends with its key and its length, and before them are its tokens
        empty += [empty[leaf] for leaf, _ in layout.copies]
        axes += [axes[leaf] for leaf, _ in layout.copies]
        self._homes = alone.engine.placed.homes.model_state
        self._empty = [put(leaf, home) for leaf, home in zip(empty, self._homes, strict=True)]
        owners = layout.state_owner
        by_stage = [[k for k, owner in enumerate(owners) if owner == stage] for stage in sorted(set(owners))]
        self._by_stage = [(mine, tuple(axes[k] for k in mine)) for mine in by_stage]
        self.num_kept = num_kept  # carries beside those of the groups
        self.most_prompts = alone.most_prompts(request.group_size)  # that are prefilled at once
        self._prefix = prefix
        self._tokens_home = alone.engine.placement.places[-1].home(Ref(Role.AUX, shared=True))

    @property
    def communicates(self) -> bool:
        """Whether the function has collectives between replicas."""
        compiled = self.alone.prepare(np.zeros((1, 1), np.int32))
        return any(cut.loss.graph.communicates for cut in compiled.step.cuts)

    def at_once(self, admitted: Iterable[Admitted | Exception]) -> Iterator[list[Admitted] | Exception]:
        """The prompts that are prefilled at once: at most ``most_prompts``, which do not wait for what comes again of another."""
        part: list[Admitted] = []
        for one in admitted:
            waits = isinstance(one, Exception) or (part and one[1].again and not part[-1][1].again)
            if part and (waits or len(part) == self.most_prompts):
                yield part
                part = []
            if isinstance(one, Exception):
                yield one
            else:
                part.append(one)
        if part:
            yield part

    def prefill(
        self, prompts: Sequence[Continuation], observer: Observer | None, note: Callable[[int, Sequence[bool]], None]
    ) -> list[tuple[list[Array], NextToken]]:
        """Run prompts through the stages in chunks, each in a carry of its own: the carry, and the first token.

        Of chunks that have begun ``note`` is told their size, and for the prompt of each whether it was the last.
        """
        carries, drawn = list(map(self._begun, prompts)), list[NextToken | None]([None] * len(prompts))
        starts = [len(prompt.tokens) - sum(prompt.chunks) for prompt in prompts]
        left = [deque(prompt.chunks) for prompt in prompts]
        while any(left):
            size = max(chunks[0] for chunks in left if chunks)
            now = [k for k, chunks in enumerate(left) if chunks and chunks[0] == size]
            for k in now:
                left[k].popleft()
                last = starts[k] == len(prompts[k].tokens) - 1
                if last and prompts[k].repeated != prompts[k].again:  # the first of equal prompts, or the last
                    self._prefix[:] = self._on_each_stage(_copies, carries[k]) if prompts[k].repeated else []
            tokens = [np.array(prompts[k].tokens[None, starts[k] : starts[k] + size], np.int32) for k in now]
            for k, made in zip(now, self.alone([carries[k] for k in now], tokens, observer), strict=True):
                carries[k], drawn[k] = made
                starts[k] += size
            note(size, [not left[k] for k in now])
        return [(carry, cast("NextToken", token)) for carry, token in zip(carries, drawn, strict=True)]  # a prompt has a token

    def _begun(self, prompt: Continuation) -> list[Array]:
        """The carry of a sequence before the passes of its prompt."""
        if prompt.again:
            self._prefix[:] = to_homes(self._prefix, self._homes)  # from the ring that had the prompt before
        carry = self._on_each_stage(_copies, self._prefix if prompt.again else self._empty)
        carry[self._key_leaf] = put(_sequence_key(self._key, np.uint32(prompt.prompt)), self._homes[self._key_leaf])
        if self._max_length is not None and not prompt.again:
            there = np.full(self._max_length, -1, np.int32)
            there[: len(prompt.tokens)] = prompt.tokens
            for leaf, value in ((self._key_leaf - 2, there), (self._key_leaf - 1, np.int32(len(prompt.tokens)))):
                carry[leaf] = put(value, self._homes[leaf])
        return carry

    def enter(self, group: Group, row: int, carry: list[Array], token: Array) -> None:
        """Put a sequence that was prefilled alone into a place of a group, with the token that was drawn for it."""
        if self.group_size == 1:
            group.carry, group.tokens = carry, token
            return
        if group.carry is None or group.tokens is None:
            group.carry = self._on_each_stage(functools.partial(_stacked, self.group_size), self._empty)
            group.tokens = put(np.zeros((self.group_size, 1, 1), np.int32), self._tokens_home)
        group.carry = self._on_each_stage(functools.partial(_inserted, np.int32(row)), group.carry, carry)
        group.tokens = _replaced(np.int32(row), group.tokens, token)  # the host has yet to read the old ones

    def turn(self, groups: Sequence[Group], observer: Observer | None) -> list[NextToken]:
        """One token for every sequence of some groups."""
        carries = [group.carry for group in groups if group.carry is not None]
        assert len(carries) == len(groups), "a sequence has entered each group"
        made = self.together(carries, [group.tokens for group in groups], observer)
        for group, (carry, drawn) in zip(groups, made, strict=True):
            group.carry, group.tokens = carry, drawn.token
        return [drawn for _, drawn in made]

    def _on_each_stage(self, function: ForwardFn, *carries: Sequence[Array]) -> list[Array]:
        """Run ``function(axes, leaves, ...)`` on the leaves of each stage, where they live."""
        results: list[Array] = list(carries[0])
        for mine, axes in self._by_stage:
            leaves = function(axes, *([carry[k] for k in mine] for carry in carries))
            for k, leaf in zip(mine, leaves, strict=True):
                results[k] = leaf
        return results


@jax.jit
def _sequence_key(key: Key, number: Array) -> Array:
    return jax.random.key_data(jax.random.fold_in(key, number))


@functools.partial(jax.jit, static_argnums=0)
def _copies(axes: Sequence[int], leaves: Sequence[Array]) -> list[Array]:
    del axes
    return [jnp.array(leaf, copy=True) for leaf in leaves]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _stacked(size: int, axes: Sequence[int], leaves: Sequence[Array]) -> list[Array]:
    return [jnp.stack([leaf] * size, axis) for axis, leaf in zip(axes, leaves, strict=True)]


@functools.partial(jax.jit, static_argnums=1, donate_argnums=2)
def _inserted(row: Array, axes: Sequence[int], group: Sequence[Array], one: Sequence[Array]) -> list[Array]:
    triples = zip(axes, group, one, strict=True)
    return [jax.lax.dynamic_update_index_in_dim(leaf, new, row, axis) for axis, leaf, new in triples]


@jax.jit
def _replaced(row: Array, tokens: Array, token: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(tokens, token, row, 0)


def prompts_of(request: Request) -> tuple[tuple[int, ...], int | None, int | None]:
    """The sizes of chunks that the function takes, the largest first, the room in the carry, and the vocabulary; None if unknown.

    A model that takes one token a call (Flax's attention with ``decode=True``) cannot be traced at more. Nor can a model whose
    cache is shorter than a chunk, so it gets smaller chunks. Of a carry whose counters are 0, shapes will do.
    """
    engine, fn, chunk = request.engine, request.sequence.function, request.chunk
    shapes = avals_of(request.carry)
    params = jax.eval_shape(lambda tree: joined(tree, concatenated), engine.layout.params)

    def look() -> tuple[tuple[int, ...], int, Graph | None, int | None]:
        sizes = tuple(size for size in chunk_sizes(chunk) if size == 1 or _takes(engine.options.axes, fn, params, shapes, size))
        length = sizes[-2:][0]
        try:
            graph, result = trace(fn, params, shapes, jax.ShapeDtypeStruct((1, length), np.int32), axes=engine.options.axes)
        except Exception:  # noqa: BLE001  (said when the function is cut)
            return sizes, length, None, None
        match result:
            case (_, Aval(shape=(_, *_, vocab), dtype=dtype)) if jnp.issubdtype(dtype, jnp.floating):
                return sizes, length, graph, vocab
        return sizes, length, graph, None

    leaves, tree = jax.tree.flatten(shapes)
    name = "prompts", id(engine), fn, tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves), chunk
    sizes, length, graph, vocab = request.functions.remember(name, engine, look)
    first = len(jax.tree.leaves(engine.layout.given[0]))
    room = None if graph is None else capacity(graph, jax.tree.leaves(request.carry), first=first, num_tokens=length)
    return sizes, room, vocab


def _takes(axes: RankAxes, fn: ForwardFn, params: Tree, carry: Tree, length: int) -> bool:
    try:
        axes.shapes(fn, params, carry, jax.ShapeDtypeStruct((1, length), np.int32))
    except Exception:  # noqa: BLE001  (what is wrong at one token too is said when that is traced)
        return False
    return True
