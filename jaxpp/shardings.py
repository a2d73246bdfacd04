"""``jaxpp.propose_shardings``: which axes of parameters to shard over ``model``, so that shards exchange little.

Axes of values that are one axis, seen through the equations of a loss, are one *feature axis*: the hidden units of two dense
layers, the heads of attention, the experts of a layer, the words of a vocabulary. If all of a feature axis is sharded, each device
computes its part of the products that make it without a word to others; what is summed over it (by the next product, or a softmax)
is summed over devices, too. An axis that something takes apart (a slice, a sort, the second factor of a reshape) is left whole,
and so are those of the batch and of what the loss returns.
"""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec

from jaxpp.engine.init_arguments import InitArguments, check_order, refuse_containers, variables_of, with_inputs
from jaxpp.engine.tracing import Tracing, check_key
from jaxpp.errors import ArgumentError, is_count, shown
from jaxpp.errors.checks import refuse_tracers
from jaxpp.errors.tracebacks import entry
from jaxpp.options import Options
from jaxpp.stages import jaxpr
from jaxpp.stages.axes import MODEL, axis_names
from jaxpp.stages.cost import count_bytes, count_flops
from jaxpp.stages.estimate import Rates, seconds_of
from jaxpp.stages.graph import Graph
from jaxpp.stages.interpreter import Interpreter
from jaxpp.stages.loss.microbatch import first_of
from jaxpp.stages.loss.rng_key import positional_key
from jaxpp.stages.loss.traced_loss import TracedLoss
from jaxpp.stages.own_params import Joint, join_losses
from jaxpp.types import Batch, Device, Key, Leaf, LossFn, Params, Tree

__all__ = ["propose_shardings"]

_EXCHANGE = 1e3  # FLOPs for which there is time while a byte goes to another device: of an A100, in bfloat16 and by NVLink
_Axes = tuple[int, ...]  # the number of each axis of a value, among those of ``_Features``
_SAME = jaxpr.ELEMENTWISE | frozenset(
    "sharding_constraint reshard optimization_barrier bitcast_convert_type real imag conj".split()
)
_NEW = frozenset(
    "iota random_bits random_seed random_split random_wrap random_unwrap random_fold_in random_clone rng_bit_generator".split()
)  # what they make has axes of its own, of which each device can make its part


class _Product(NamedTuple):
    """A product, or a sum over an axis: what it computes, over which axes it sums, and the bytes of what it makes."""

    number: int  # of the equation of the loss that it is, or that it is in
    flops: float
    parallel: frozenset[int]  # axes that its result has
    summed: frozenset[int]
    num_bytes: float


class _Work(NamedTuple):
    """What an equation takes, and the axes of its operands and results."""

    number: int  # of the equation of the loss that it is, or that it is in
    seconds: float
    axes: _Axes


@dataclass
class _Features:
    """The axes that are one: a forest, each tree of which is a feature axis."""

    parents: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    whole: set[int] = field(default_factory=set)  # those that must not be sharded

    def new(self, shape: Iterable[int]) -> _Axes:
        """Axes of a value of its own."""
        sizes, first = list(shape), len(self.parents)
        self.parents += range(first, first + len(sizes))
        self.sizes += sizes
        return tuple(range(first, first + len(sizes)))

    def root(self, axis: int) -> int:
        """The first of the axes that are the same as this one."""
        while self.parents[axis] != axis:
            self.parents[axis] = axis = self.parents[self.parents[axis]]
        return axis

    def join(self, a: int, b: int) -> None:
        """Two axes are one, and so are an axis and its first factor; one that is repeated along the other is not."""
        if (self.sizes[a] == 1) == (self.sizes[b] == 1):
            self.parents[self.root(b)] = self.root(a)

    def keep(self, axes: Iterable[int]) -> None:
        """These must stay whole."""
        self.whole.update(axes)


class _Follower(Interpreter[_Axes]):
    """Joins axes, equation by equation."""

    enters = jaxpr.CALLS | jaxpr.CHECKPOINTS | jaxpr.CUSTOM_RULES | {"scan", "while", "cond"}

    def __init__(self) -> None:
        super().__init__()
        self.features, self.products = _Features(), list[_Product]()
        self.equation, self.times = 0, 1  # the number of the equation that is followed, and how often it runs
        self.rates: Rates | None = None
        self.seconds, self.works = dict[int, float](), list[_Work]()

    @classmethod
    def along(cls, graph: Graph, rates: Rates | None = None) -> "_Follower":
        """What there is to know of the equations of a function; with ``rates`` also what they take."""
        found = cls()
        found.rates = rates
        found.weigh(graph.eqns, graph.outputs)
        found.values = {var: found.features.new(jaxpr.aval_of(var).shape) for var in graph.inputs}
        found.values |= {var: found.constant(var, value) for var, value in graph.constants.items()}
        for found.equation, eqn in enumerate(graph.eqns):
            found.step(eqn)
        return found

    def sharded(self, inputs: Iterable[Var], specs: Iterable[PartitionSpec]) -> set[int]:
        """The feature axes that are sharded where these inputs are."""
        return {
            self.features.root(axis)
            for var, spec in zip(inputs, specs, strict=True)
            for axis, entry in zip(self.values[var], spec, strict=False)
            if MODEL in axis_names(entry)
        }

    def weigh(self, eqns: Sequence[JaxprEqn], results: Sequence[jaxpr.Atom]) -> None:
        """Keep what equations take."""
        if self.rates is not None:
            self.seconds.update(zip(map(id, eqns), seconds_of(eqns, results, self.rates), strict=True))

    def call(self, body: ClosedJaxpr, values: Sequence[_Axes]) -> list[_Axes]:
        self.weigh(body.jaxpr.eqns, body.jaxpr.outvars)
        return super().call(body, values)

    def number(self, atom: Literal) -> _Axes:
        return self.features.new(jaxpr.aval_of(atom).shape)

    def constant(self, var: object, value: Leaf) -> _Axes:  # noqa: ARG002
        return self.features.new(value.shape)

    def either(self, a: _Axes, b: _Axes) -> _Axes:
        self.join(a, b)
        return a

    def scanned(self, eqn: JaxprEqn, loop: jaxpr.Scan, values: list[_Axes]) -> Sequence[_Axes]:  # noqa: ARG002
        fixed, carry, rows = loop.split(values)
        around, self.times = self.times, self.times * loop.length
        results = self.call(loop.body, [*fixed, *carry, *(axes[1:] for axes in rows)])
        self.times = around
        carry = list(map(self.either, carry, results))
        made = [(*self.features.new([loop.length]), *axes) for axes in results[loop.num_carry :]]
        self.features.keep(axes[0] for axes in (*rows, *made))  # each device has all iterations
        return [*carry, *made]

    def join(self, a: Sequence[int], b: Sequence[int]) -> None:
        """Axes that are the same, one after the other."""
        for one, other in zip(a, b, strict=True):
            self.features.join(one, other)

    def plain(self, eqn: JaxprEqn, values: list[_Axes]) -> Sequence[_Axes]:
        outs = [self.features.new(getattr(jaxpr.aval_of(var), "shape", ())) for var in eqn.outvars]
        kind = jaxpr.kind_of(eqn)
        if kind in _SAME or jaxpr.only_names(eqn):
            for axes, out in zip(values, outs if len(outs) > 1 else outs * len(values), strict=True):
                if len(axes) == len(out):  # others are numbers
                    self.join(axes, out)
        elif kind in _FORMS:
            _FORMS[kind](self, eqn, values, outs)
        elif jaxpr.attention_sizes(eqn) is not None:
            heads = jaxpr.axes_of_attention(eqn)[1]
            sizes = [self._sizes(axes) for axes in values[:3]]
            others = [axes for axes in (*values[3:], *outs) if self._sizes(axes) in sizes]  # the result, and what is a gradient
            self._along(eqn, [*values[:3], *others], {0, heads})
            self.features.keep(axis for axes in (*values[3:], *outs) if axes not in others for axis in axes)
        elif kind not in _NEW:
            self.features.keep(axis for axes in (*values, *outs) for axis in axes)
        if self.seconds.get(id(eqn)):
            self.works.append(_Work(self.equation, self.times * self.seconds[id(eqn)], tuple(itertools.chain(*values, *outs))))
        return outs

    def _sizes(self, axes: _Axes) -> list[int]:
        return [self.features.sizes[axis] for axis in axes]

    # ------------------------------------------------------------------------------------------------ kinds of equations

    def _along(self, eqn: JaxprEqn, values: Sequence[_Axes], joined: Iterable[int]) -> None:  # noqa: ARG002
        """Values that share these axes; their others are taken apart."""
        kept = set(joined)
        for axes in values:
            for k, axis in enumerate(axes):
                if k in kept and k < len(values[0]):
                    self.features.join(values[0][k], axis)
                else:
                    self.features.keep([axis])

    def _where_equal(self, eqn: JaxprEqn, values: list[_Axes], outs: list[_Axes]) -> None:  # noqa: ARG002
        """An axis along which everything is as long as the result is the result's (slices, writes into an array)."""
        arrays = [axes for axes in values if len(axes) == len(outs[0])] + outs[1:]
        sizes = self.features.sizes
        for k, axis in enumerate(outs[0]):
            for axes in arrays:
                self.features.join(axis, axes[k])
            if any(sizes[axes[k]] != sizes[axis] for axes in arrays):
                self.features.keep([axis, *(axes[k] for axes in arrays)])  # a single element is not joined with what it is of

    def _but_along(self, eqn: JaxprEqn, values: list[_Axes], outs: list[_Axes]) -> None:
        """What works along one axis (a sort, a cumulative sum, parts put end to end), and leaves the others."""
        along = eqn.params[jaxpr.ALONG[jaxpr.kind_of(eqn)]]
        shapes = [*values, *outs]
        along = len(outs[0]) - 1 if along < 0 else along
        self._along(eqn, [axes for axes in shapes if len(axes) == len(outs[0])], set(range(len(outs[0]))) - {along})

    def _transpose(self, eqn: JaxprEqn, values: list[_Axes], outs: list[_Axes]) -> None:
        self.join([values[0][k] for k in eqn.params["permutation"]], outs[0])

    def _broadcast(self, eqn: JaxprEqn, values: list[_Axes], outs: list[_Axes]) -> None:
        for axis, k in zip(values[0], eqn.params["broadcast_dimensions"], strict=True):
            self.features.join(axis, outs[0][k])

    def _reshape(self, eqn: JaxprEqn, values: list[_Axes], outs: list[_Axes]) -> None:  # noqa: ARG002
        """Axes that become one, or one that becomes several: the first of them is the one, in larger or smaller parts."""
        sizes = self.features.sizes
        sides = [[axis for axis in axes if sizes[axis] != 1] for axes in (values[0], outs[0])]
        while all(sides):
            (first, *ours), (other, *theirs) = sides
            self.features.join(first, other)
            a, b = sizes[first], sizes[other]
            while a != b:
                rest = ours if a < b else theirs
                axis = rest.pop(0)
                self.features.keep([axis])
                a, b = (a * sizes[axis], b) if rest is ours else (a, b * sizes[axis])
            sides = [ours, theirs]

    def _squeeze(self, eqn: JaxprEqn, values: list[_Axes], outs: list[_Axes]) -> None:
        gone = {k % len(values[0]) for k in eqn.params["dimensions"]}
        self.join([axis for k, axis in enumerate(values[0]) if k not in gone], outs[0])

    def _reduce(self, eqn: JaxprEqn, values: list[_Axes], outs: list[_Axes]) -> None:
        gone = set(eqn.params["axes"])
        for axes in values:
            self.join([axis for k, axis in enumerate(axes) if k not in gone], outs[0])
        self._add(eqn, 0.0, outs[0], [axes[k] for axes in values for k in gone])

    def _dot(self, eqn: JaxprEqn, values: list[_Axes], outs: list[_Axes]) -> None:
        contracted, batch = eqn.params["dimension_numbers"]
        free = list[int]()
        for pair in (contracted, batch):
            self.join(*([axes[k] for k in own] for axes, own in zip(values, pair, strict=True)))
        for axes, summed, shared in zip(values, contracted, batch, strict=True):
            free += [axis for k, axis in enumerate(axes) if k not in (*summed, *shared)]
        self.join([*(values[0][k] for k in batch[0]), *free], outs[0])
        self._add(eqn, count_flops(eqn), outs[0], [values[0][k] for k in contracted[0]])

    def _convolution(self, eqn: JaxprEqn, values: list[_Axes], outs: list[_Axes]) -> None:
        numbers = eqn.params["dimension_numbers"]
        image, kernel, out = ([axes[k] for k in spec] for axes, spec in zip((*values, outs[0]), numbers, strict=True))
        self.features.join(image[0], out[0])
        self.features.join(kernel[0], out[1])
        self.features.keep([*image[2:], *kernel[2:], *out[2:]])
        if eqn.params["feature_group_count"] != 1 or eqn.params["batch_group_count"] != 1:
            self.features.keep([image[1], kernel[1], out[1]])
        else:
            self.features.join(image[1], kernel[1])
        self._add(eqn, count_flops(eqn), outs[0], [image[1]])

    def _gather(self, eqn: JaxprEqn, values: list[_Axes], outs: list[_Axes]) -> None:
        """Rows that indices choose: each device gives those that it has, and their sum is all of them."""
        numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
        gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        kept = [(axis, sizes[k]) for k, axis in enumerate(values[0]) if k not in gone]
        for (axis, size), k in zip(kept, numbers.offset_dims, strict=True):
            self.features.join(axis, outs[0][k])
            if size != self.features.sizes[axis]:
                self.features.keep([axis])
        rest = [axis for k, axis in enumerate(outs[0]) if k not in numbers.offset_dims]
        self.join(values[1][:-1], rest)
        for k, other in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
            self.features.join(values[0][k], values[1][other])
        self._add(eqn, 0.0, outs[0], [values[0][k] for k in numbers.collapsed_slice_dims])

    def _add(self, eqn: JaxprEqn, flops: float, out: _Axes, summed: Iterable[int]) -> None:
        num_bytes = self.times * count_bytes(jaxpr.aval_of(eqn.outvars[0]))
        self.products.append(_Product(self.equation, self.times * flops, frozenset(out), frozenset(summed), num_bytes))


_Form = Callable[[_Follower, JaxprEqn, list[_Axes], list[_Axes]], None]
_FORMS: dict[str, _Form] = {
    **dict.fromkeys(("slice", "dynamic_slice", "dynamic_update_slice", "pad"), _Follower._where_equal),
    **dict.fromkeys(jaxpr.ALONG, _Follower._but_along),
    "squeeze": _Follower._squeeze,
    **dict.fromkeys(("reshape", "expand_dims"), _Follower._reshape),
    **dict.fromkeys(jaxpr.REDUCTIONS, _Follower._reduce),
    "transpose": _Follower._transpose,
    "broadcast_in_dim": _Follower._broadcast,
    "dot_general": _Follower._dot,
    "conv_general_dilated": _Follower._convolution,
    "gather": _Follower._gather,
}


class _Candidate(NamedTuple):
    """A feature axis that may be sharded."""

    root: int
    products: frozenset[int]  # in which it is
    is_between: bool  # whether one product makes it and another one sums over it, so both are divided
    saved: float  # FLOPs of each of these, without those for which there is time while what is summed is exchanged


def _candidates(found: _Follower, width: int) -> list[_Candidate]:
    """The feature axes that can be divided by the number of devices: first those between products, of these what saves most."""
    features = found.features
    whole, sizes = {features.root(axis) for axis in features.whole}, defaultdict[int, set[int]](set)
    for axis, size in enumerate(features.sizes):
        sizes[features.root(axis)].add(size)
    flops, moved, members = defaultdict[int, float](float), defaultdict[int, float](float), defaultdict[int, set[int]](set)
    made, used = set[int](), set[int]()
    for number, product in enumerate(found.products):
        parallel, summed = ({features.root(axis) for axis in axes} for axes in (product.parallel, product.summed))
        whole |= parallel & summed  # it is the same axis twice
        if product.flops:
            made, used = made | parallel, used | summed
        for root in parallel | summed:
            flops[root] += product.flops
            members[root] |= {number} if product.flops else set()
        for root in summed:
            moved[root] += product.num_bytes
    able = [root for root in flops if root in made - whole and not any(size % width for size in sizes[root])]
    saved = {root: (flops[root] - _EXCHANGE * moved[root]) / len(members[root]) for root in able}
    known = (_Candidate(root, frozenset(members[root]), root in used, saved[root]) for root in able)
    return sorted(known, key=lambda each: (not each.is_between, -each.saved, each.root))


def proposed(loss: TracedLoss, width: int) -> dict[str, PartitionSpec]:
    """The shardings of a traced loss, as ``propose_shardings`` gives them."""
    found, graph = _Follower.along(loss.graph), loss.graph
    params = set(loss.params)
    ends = [found.values[var] for var in graph.inputs if var not in params]
    ends += [found.read(atom) for atom in graph.outputs]
    found.features.keep(axis for axes in ends for axis in axes)
    taken, sharded = set[int](), set[int]()
    for each in _candidates(found, width):
        if taken.isdisjoint(each.products):
            taken |= each.products
            sharded.add(each.root)
    specs = dict[str, PartitionSpec]()
    for path, var in zip(loss.param_paths, loss.params, strict=True):
        entries = [MODEL if found.features.root(axis) in sharded else None for axis in found.values[var]]
        if MODEL in entries:
            specs[path] = PartitionSpec(*entries)
    return specs


class SharedStage(NamedTuple):
    """A stage that several devices share."""

    exchanged: float  # bytes that its forward sums over them, of a microbatch; the backward does as many
    part: float  # of its work that each of them does: all of what has no sharded axis


def shared_stages(
    loss: TracedLoss, specs: Sequence[PartitionSpec], cuts: Sequence[int], rates: Rates, width: int
) -> list[SharedStage]:
    """What so many devices that share each stage exchange, and what they do; ``specs`` are those of the parameters."""
    found = _Follower.along(loss.graph, rates)
    root, count = found.features.root, len(cuts) + 1
    sharded = found.sharded(loss.params, specs)

    def stage_of(number: int) -> int:
        return bisect.bisect_right(cuts, bisect.bisect_right(loss.spine, number) - 1)

    sums, whole, done = ([0.0] * count for _ in range(3))
    for product in found.products:
        if not sharded.isdisjoint(map(root, product.summed)):
            sums[stage_of(product.number)] += product.num_bytes
    for work in found.works:
        whole[stage_of(work.number)] += work.seconds
        done[stage_of(work.number)] += work.seconds / (1 if sharded.isdisjoint(map(root, work.axes)) else width)
    return [
        SharedStage(size, own / all_of_it if all_of_it else 1.0) for size, own, all_of_it in zip(sums, done, whole, strict=True)
    ]


def sharded_axes(graph: Graph, specs: Sequence[PartitionSpec], width: int) -> Callable[[jaxpr.Atom], PartitionSpec]:
    """How each value of a function is sharded over so many devices, likely, if its inputs are sharded so."""
    found = _Follower.along(graph)
    sharded, root, sizes = found.sharded(graph.inputs, specs), found.features.root, found.features.sizes

    def spec_of(atom: jaxpr.Atom) -> PartitionSpec:
        axes = () if isinstance(atom, Literal) else found.values.get(atom, ())  # what is in a kernel has none
        at = next((k for k, axis in enumerate(axes) if root(axis) in sharded and sizes[axis] % width == 0), None)
        return PartitionSpec() if at is None else PartitionSpec(*[None] * at, MODEL)

    return spec_of


@entry
def propose_shardings(  # noqa: PLR0913  (the options of the front door)
    loss_fn: LossFn,
    init_or_params: Tree,
    batch: Batch,
    key: Key | None = None,
    *,
    model: int = 2,
    has_state: bool = False,
    has_aux: bool = False,
    broadcast: str | Sequence[str] = (),
    task_params: Params | None = None,
    devices: Sequence[Device] | None = None,
) -> dict[str, PartitionSpec]:
    """Propose how ``model`` devices can share each stage: ``shardings=`` for a ``Pipeline`` on a mesh with a ``model`` axis.

    The equations of the loss are followed; nothing is run. Two products with nothing between them that needs all features (dense
    layers, the projections of attention, experts) are divided along the features between them, and embeddings and heads along the
    vocabulary. Print what is proposed, and change it: ``pipe.collectives`` says what the shards of a pipeline then exchange.

    Args:
        loss_fn: as for ``Pipeline``.
        init_or_params: the parameters, their shapes, or the function of a key that makes them.
        batch: a batch, or its shapes.
        key: as for ``Pipeline.init``.
        model: how many devices are to share a stage; axes that are no multiple of it stay whole.
        has_state: as for ``Pipeline``, and so are ``has_aux`` and ``broadcast``.
        has_aux: whether the loss returns more beside its number.
        broadcast: leaves of the batch that each microbatch gets whole.
        task_params: of a loss for a bank, the parameters of a task, or their shapes; their paths begin with ``task/``.
        devices: the first of those for which the loss is traced; ``jaxpp.target("h100")`` for attention by cuDNN, without a GPU.

    Returns:
        A ``PartitionSpec`` for each parameter that is to be sharded, by path; empty if there is nothing to gain.

    Raises:
        ArgumentError: arguments that are not what they stand for.
        JaxppError: for a loss that cannot be traced.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss_fn(params, batch):
        ...     return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2)
        >>> params = {"up": jnp.ones((8, 32)), "down": jnp.ones((32, 8))}
        >>> found = jaxpp.propose_shardings(loss_fn, params, jnp.ones((4, 8)))
        >>> {path: tuple(spec) for path, spec in found.items()}
        {'down': ('model', None), 'up': (None, 'model')}
    """
    where = "jaxpp.propose_shardings"
    refuse_tracers(f"{where}(loss_fn, ...)", init_or_params, batch, key)
    batch = first_of(batch)
    refuse_containers(where, init_or_params, batch)
    check_order(where, init_or_params, batch, key)
    check_key(key, loss_fn, 2 + has_state + (task_params is not None))
    if not is_count(model, least=2):
        raise ArgumentError(f"{where}(..., model=...)", "at least two devices share a stage", shown(model), "pass model=2")
    made, _ = with_inputs(where, init_or_params, batch)
    loss_fn = loss_fn if task_params is None else join_losses(positional_key(loss_fn, 3 + has_state))
    said = {"has_state": has_state, "has_aux": has_aux, "broadcast": broadcast}
    asked = Options.of(loss_fn, num_stages=1, num_microbatches=1, devices=(devices or jax.devices())[:1], **said)
    is_function = callable(made) and jax.tree.leaves(made) == [made]
    given = InitArguments(made, batch, (jax.random.key(0) if key is None else key) if is_function else None, where)
    variables = variables_of(asked, given.shapes(asked.axes))
    if task_params is not None:
        variables = Joint(variables[0], jax.eval_shape(lambda own: own, task_params)), *variables[1:]
    tracing = Tracing(asked)
    return proposed(tracing.trace(loss_fn, variables, batch, tracing.key_for(variables, batch, key)), int(model))
