"""What ``init`` is given: a function, a key and a batch, or parameters (maybe callable) and a batch, told apart by number."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpp.engine.compared import init_texts
from jaxpp.engine.engine import Engine
from jaxpp.engine.state import State
from jaxpp.errors import ArgumentError
from jaxpp.options import Options
from jaxpp.plan.builder import Name
from jaxpp.plan.lower import trace_init
from jaxpp.plan.step import Leaves
from jaxpp.runtime.edges import put
from jaxpp.runtime.processes.channel import agreement
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.loss.traced_loss import check_floating
from jaxpp.types import Array, Batch, Home, Key, Tree

_FUNCTION, _KEY = "a function", "a key"


class InitArguments(NamedTuple):
    """What ``init`` was given; with ``has_state``, ``made`` is a pair, or makes one."""

    made: Tree  # parameters, or a function that makes them
    batch: Batch  # of the step, or its shapes
    key: Key | None = None  # for the function; None with parameters
    where: str = "pipe.init"

    @property
    def makes(self) -> bool:
        """Whether a function makes the parameters."""
        return self.key is not None

    @property
    def shapes(self) -> Tree:
        """The parameters, or what the function would make; what it raises has a note."""
        if self.key is None:
            return self.made
        try:
            return trace_init(self.made, self.key)[1]
        except Exception as error:
            if any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(self.made)):
                got = f"init was given {_kind(self.made)} as its function"
                error.add_note(f"jaxpp: {got}; if these are the parameters, leave the key out: {self.where}(params, batch)")
            raise


def first_leaves(engine: Engine, given: InitArguments, names: Leaves[Name], homes: Leaves[Home]) -> Leaves[Array]:
    """The parameters (and the model state) that init was given or makes, each leaf on its owner: those called ``names``."""
    unmade = {"opt": (), "own_opt": (), "loss_scale": ()}
    made, key = given.made, given.key
    if key is None:
        held, homes = jax.tree.leaves(engine.sliced(made)), homes._replace(**unmade)
        return homes.fill([put(leaf, home) for leaf, home in zip(held, homes.flat(), strict=True)])
    graph, _ = trace_init((lambda key: engine.sliced(made(key))) if engine.slicing.any else made, key)
    with agreement(given.where, engine.options.devices) as agree:
        agree(lambda: init_texts(graph, key))
    return engine.make_params(graph, key, names._replace(**unmade))


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
    kinds = [_kind(value) for value in (init_or_params, *args)]
    if len(args) == 1 and {_FUNCTION, _KEY}.isdisjoint(kinds):
        return InitArguments(init_or_params, args[0], where=where)
    if len(args) == 2 and callable(init_or_params) and _may_be_key(args[0]) and kinds[2] not in (_FUNCTION, _KEY):
        return InitArguments(init_or_params, args[1], args[0], where)
    raise _wrong_init(where, ", ".join(kinds))


def are_swapped(options: Options, given: InitArguments, joined: Callable[[tuple[Tree, ...]], tuple[Tree, ...]]) -> bool:
    """Whether the loss fails on the arguments as given and takes them swapped; ``joined`` makes its arguments."""
    try:
        variables = joined(variables_of(options, given.batch))
        if options.is_loss:
            check_floating(jax.tree_util.tree_leaves_with_path(variables[0]))
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
            return (jax.eval_shape(options.loss_fn, *args, *keys),)
        except Exception:  # noqa: BLE001, S112  (it cannot)
            continue
    return None


def swapped(given: InitArguments) -> ArgumentError:
    """The error for a batch where the parameters should be."""
    who = "the loss" if given.where.startswith("pipe.") else "the function"
    kinds = f"a batch, {_kind(given.made)}, then parameters, {_kind(given.batch)}"
    return _wrong_init(given.where, f"{kinds}: {who} takes them the other way round")


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


def _wrong_init(where: str, got: str) -> ArgumentError:
    pair = ", with has_state=True a pair (params, model_state)" * where.startswith("pipe.")
    rule = f"{where.rpartition('.')[2]} takes a function, a key and a batch, or parameters and a batch, in this order"
    return ArgumentError(where, rule, got, f"call {where}(init_fn, jax.random.key(0), batch) or {where}(params, batch){pair}")
