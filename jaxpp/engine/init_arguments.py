"""What ``init`` is given: a function, a key and a batch, or parameters (maybe callable) and a batch, told apart by number."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp.engine.compared import init_texts
from jaxpp.engine.engine import Engine
from jaxpp.engine.state import State
from jaxpp.engine.tracing import check_key
from jaxpp.errors import ArgumentError, InitError
from jaxpp.lowering.builder import Name
from jaxpp.lowering.lower import trace_init
from jaxpp.lowering.step import Leaves
from jaxpp.options import Options
from jaxpp.runtime.edges import put
from jaxpp.runtime.processes.channel import agreement
from jaxpp.stages.axes import RankAxes
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.loss.microbatch import first_of, inputs_in
from jaxpp.stages.loss.traced_loss import check_trainable
from jaxpp.types import Array, Batch, Home, Key, Leaf, Tree

_FUNCTION, _KEY = "a function", "a key"


class InitArguments(NamedTuple):
    """What ``init`` was given; with ``has_state``, ``made`` is a pair, or makes one."""

    made: Tree  # parameters, or a function that makes them
    batch: Batch  # of the step, or its shapes
    key: Key | None = None  # for the function; None with parameters
    where: str = "pipe.init"
    line: str = ""  # what the function is, as a function of the key, if inputs from the batch were added

    @property
    def makes(self) -> bool:
        """Whether a function makes the parameters."""
        return self.key is not None

    def shapes(self, axes: RankAxes) -> Tree:
        """The parameters, or what the function would make, which may name these axes; what it raises has a note."""
        if self.key is None:
            return self.made
        try:
            return trace_init(self.made, self.key, axes)[1]
        except Exception as error:
            unsaid = not (_inputs_of(self.made) if _is_of_model(self.made) else _required(self.made))
            if isinstance(error, TypeError) and "required positional argument" in str(error) and unsaid:
                line = _line(self.made, inputs_in(self.batch))
                error.add_note(f"jaxpp: {self.where} calls its function with the key alone; if it takes inputs too, pass {line}")
            if any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(self.made)):
                got = f"init was given {_kind(self.made)} as its function"
                error.add_note(f"jaxpp: {got}; if these are the parameters, leave the key out: {self.where}(params, batch)")
            raise


def first_leaves(engine: Engine, given: InitArguments, names: Leaves[Name], homes: Leaves[Home]) -> Leaves[Array]:
    """The parameters (and the model state) that init was given or makes, each leaf on its owner: those called ``names``."""
    made, key = given.made, given.key
    if key is None:
        held, homes = jax.tree.leaves(engine.sliced(made)), homes.variables
        leading = [engine.placement[name.stage].leading(name.ref) for name in names.variables.flat()]
        held = [np.broadcast_to(leaf, (*axes, *leaf.shape)) if axes else leaf for leaf, axes in zip(held, leading, strict=True)]
        return homes.fill([put(leaf, home) for leaf, home in zip(held, homes.flat(), strict=True)])
    slices = engine.layout.slicing.any or engine.layout.state_slicing.any
    graph, _ = trace_init((lambda key: engine.sliced(made(key))) if slices else made, key, engine.options.axes)
    with agreement(given.where, engine.options.devices) as agree:
        agree(lambda: init_texts(graph, key))
    return engine.make_params(graph, key, names.variables)


def read_given(where: str, init_or_params: Tree, args: Sequence[Tree]) -> InitArguments:
    """The arguments of ``pipe.init``, or of another method ``where`` that takes the same, by their meaning."""
    if isinstance(init_or_params, State):
        owner, _, name = where.rpartition(".")
        if owner != "pipe":
            raise ArgumentError(where, f"{name} takes parameters", "a jaxpp.State", f"call {where}(state.params, batch)")
        rule = f"{name} takes parameters, and step takes a state"
        anew = f"{where}({'(state.params, state.model_state)' if init_or_params.held[2] else 'state.params'}, batch)"
        fix = f"continue with pipe.step(state, ...), in a new pipeline after pipe.abstract_state(...); or begin anew with {anew}"
        raise ArgumentError(where, rule, f"a jaxpp.State, step={init_or_params.step}", fix)
    refuse_containers(where, init_or_params, first_of(args[-1]) if args else None)
    kinds = [_kind(value) for value in (init_or_params, *args)]
    if len(args) == 1 and {_FUNCTION, _KEY}.isdisjoint(kinds):
        return InitArguments(init_or_params, args[0], where=where)
    if len(args) == 2 and callable(init_or_params) and _may_be_key(args[0]) and kinds[2] not in (_FUNCTION, _KEY):
        check_key(args[0])
        made, line = with_inputs(where, init_or_params, first_of(args[1]))
        return InitArguments(made, args[1], args[0], where, line)
    first = "init_fn, key" if kinds[:2] == [_FUNCTION, _KEY] else "params"
    batches = kinds[2 if first != "params" else 1 :]
    if len(batches) > 1 and {_FUNCTION, _KEY, "None"}.isdisjoint(batches + kinds[:1] * (first == "params")):
        fix = f"put the inputs and the labels into one batch, which the loss takes as one argument: {where}({first}, (x, y))"
        raise _wrong_init(where, ", ".join(kinds), fix)
    raise _wrong_init(where, ", ".join(kinds))


def refuse_containers(where: str, given: Tree, batch: Batch) -> None:
    """Refuse what holds the parameters, or makes them by a method: a state of training, as Flax has it, and a model."""
    name = where.rpartition(".")[2]
    if hasattr(given, "opt_state") and hasattr(given, "params"):
        rule = f"{name} takes parameters; the optimizer is given to jaxpp.Pipeline, which makes its state anew"
        raise ArgumentError(where, rule, f"a {type(given).__name__}, with params and opt_state", "pass state.params in its place")
    has_arrays = any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(given))
    if callable(getattr(given, "init", None)) and callable(getattr(given, "apply", None)) and not has_arrays:
        rule = f"{name} takes the function that makes the parameters, or the parameters, and not the model"
        got = f"a model, {getattr(given, '__name__', None) or type(given).__name__}"
        raise ArgumentError(where, rule, got, f"pass lambda key: model.init(key, {inputs_in(batch)}) in its place")


def check_order(where: str, made: Tree, batch: Batch, key: Key | None) -> None:
    """Refuse the order of ``init``, with the key before the batch, where the key comes last."""
    if key is not None and _may_be_key(batch) and not _may_be_key(key):
        rule, kinds = f"{where.rpartition('.')[2]} takes the batch before the key", ", ".join(map(_kind, (made, batch, key)))
        raise ArgumentError(where, rule, kinds, f"call {where}(..., init_fn, batch, key), or leave the key out")


def with_inputs(where: str, init: Tree, batch: Batch) -> tuple[Tree, str]:
    """``init``, if a function, as one of the key alone, and that as a line of code if it takes inputs too, as Flax's does.

    The inputs are those of the batch that have the names of what ``init`` takes; or the batch, if it is one array and ``init``
    is a model's or calls it ``x``, ``inputs`` or ``batch``.
    """
    wanted = _inputs_of(init) if _kind(init) == _FUNCTION else []
    if not wanted:
        return init, ""
    given = batch if isinstance(batch, Mapping) else {}
    alone = len(wanted) == 1 and jax.tree_util.all_leaves([batch]) and (_is_of_model(init) or wanted[0] in ("x", "inputs"))
    if alone or wanted == ["batch"]:
        found, names = [batch], ["batch"]
    else:
        found, names = [given[name] for name in wanted if name in given], [f'batch["{name}"]' for name in wanted]
    takes = f"{_name_of(init)}, which takes {', '.join(wanted)} beside the key"
    if len(found) != len(wanted):
        rule = "init calls its function with the key, and with items of the batch that have the names of what else it takes"
        raise InitError(where, rule, f"{takes}, and {_kind(batch)}", f"pass {_line(init, inputs_in(batch))}")
    if where.endswith(".init") and any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(found)):
        rule = "a function that takes inputs makes parameters from arrays"
        raise InitError(where, rule, f"{takes}, and a batch of shapes", f"pass arrays, or {_line(init, 'jnp.zeros(...)')}")
    return functools.partial(_made_with, init, found), _line(init, *names)


def _made_with(init: Callable[..., Tree], inputs: Sequence[Tree], key: Key) -> Tree:
    def array(leaf: Leaf) -> Leaf:
        return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    return init(key, *jax.tree.map(array, inputs))


def _inputs_of(init: Callable[..., Tree]) -> list[str]:
    """What a function cannot be called without, beside the key, by position: of Flax's ``model.init`` what the model takes."""
    if not _is_of_model(init):
        return _required(init)[1:]
    bound = getattr(init, "keywords", {})
    unsure = "method" in bound or getattr(init, "args", ())
    return [] if unsure else [name for name in _required(_method_of(init).__self__) if name not in bound]


def _is_of_model(init: Callable[..., Tree]) -> bool:
    """Whether a function is the ``init`` of a Flax model, or that with some arguments bound."""
    method = _method_of(init)
    model = getattr(method, "__self__", None)
    return getattr(method, "__name__", "") == "init" and callable(model) and hasattr(model, "apply")


def _required(function: Callable[..., object]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]


def _line(init: Callable[..., Tree], *inputs: str) -> str:
    return f"lambda key: {_name_of(init)}(key, {', '.join(inputs)})"


def _name_of(init: Callable[..., Tree]) -> str:
    method = _method_of(init)
    name = getattr(method, "__name__", "init_fn").replace("<lambda>", "init_fn")
    return f"model.{name}" if hasattr(getattr(method, "__self__", None), "apply") else name


def _method_of(init: Callable[..., Tree]) -> Any:
    return init.func if isinstance(init, functools.partial) else init


def are_swapped(options: Options, given: InitArguments, joined: Callable[[tuple[Tree, ...]], tuple[Tree, ...]]) -> bool:
    """Whether the loss fails on the arguments as given and takes them swapped; ``joined`` makes its arguments."""
    try:
        variables = joined(variables_of(options, given.batch))
        if options.is_loss:
            check_trainable(jax.tree_util.tree_leaves_with_path(variables[0]), allow_int=options.allow_int)
    except Exception:  # noqa: BLE001  (they are not)
        return False
    found = _called(options, *variables, given.made)
    if found is None or not options.is_loss:
        return found is not None and _called(options, *joined(variables_of(options, given.made)), given.batch) is None
    loss = next(iter(jax.tree.leaves(found)), None)
    return loss is not None and loss.shape == () and jnp.issubdtype(loss.dtype, jnp.floating)


def _called(options: Options, *args: Tree) -> Tree | None:
    for keys in ((), (jax.random.key(0),)):
        try:
            return (options.axes.shapes(options.loss_fn, *args, *keys),)
        except Exception:  # noqa: BLE001, S112  (it cannot)
            continue
    return None


def swapped(given: InitArguments) -> ArgumentError:
    """The error for a batch where the parameters should be."""
    who = "the loss" if given.where.startswith("pipe.") else "the function"
    got = f"a batch, {_kind(given.made)}, then parameters, {_kind(given.batch)}: {who} takes them the other way round"
    name = given.where.rpartition(".")[2]
    if name == "init" or name.startswith("abstract"):
        return _wrong_init(given.where, got)
    rule = f"{name} takes parameters and a batch, in this order"
    return ArgumentError(given.where, rule, got, f"call {given.where}(params, batch)")


def variables_of(options: Options, made: Tree) -> tuple[Tree, ...]:
    """The parameters, and with ``has_state`` the model state, of what init was given or made."""
    if not options.has_state:
        return (made,)
    if not isinstance(made, tuple) or len(made) != 2:
        raise _wrong_init("pipe.init", f"{type(made).__name__} instead of a pair (params, model_state), with has_state=True")
    if made[1] is None:
        raise _wrong_init("pipe.init", "None as the model state, with has_state=True; an empty one is {}")
    return made


def _kind(value: Tree) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        one_key = value.shape == () and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)  # an array of keys may be a batch
        return _KEY if one_key else f"an array {describe(value)}"
    leaves = jax.tree.leaves(value)
    if callable(value) and len(leaves) == 1 and leaves[0] is value:
        return _FUNCTION
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return f"a {type(value).__name__} of {len(leaves)} leaves"


def _may_be_key(value: Tree) -> bool:
    if not (hasattr(value, "dtype") and hasattr(value, "shape")):
        return False
    typed = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return value.shape == () if typed else value.dtype == jnp.uint32 and len(value.shape) == 1


def _wrong_init(where: str, got: str, fix: str = "") -> ArgumentError:
    pair = ", with has_state=True a pair (params, model_state)" * where.startswith("pipe.")
    rule = f"{where.rpartition('.')[2]} takes a function, a key and a batch, or parameters and a batch, in this order"
    fix = fix or f"call {where}(init_fn, jax.random.key(0), batch) or {where}(params, batch){pair}"
    return ArgumentError(where, rule, got, fix)
