"""What ``init`` is given: a function, a key and a batch, or parameters and a batch; told apart by their number.

(Parameters may be callable: an Equinox module is. So whether something can be called does not tell.)
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpp.engine.state import State
from jaxpp.errors import ArgumentError
from jaxpp.options import Options
from jaxpp.plan.init_params import trace_init
from jaxpp.stages.jaxpr import describe
from jaxpp.stages.loss.trace import check_floating
from jaxpp.types import Batch, Key, Tree

__all__ = ["Given", "are_swapped", "read_given", "swapped", "variables_of"]

_FUNCTION, _KEY = "a function", "a key"


class Given(NamedTuple):
    """What ``init`` was given.

    Attributes:
        made: parameters, or a function that makes them; with ``has_state`` a pair.
        batch: of the step, or its shapes.
        key: for the function; None with parameters.
    """

    made: Tree
    batch: Batch
    key: Key | None = None

    @property
    def makes(self) -> bool:
        """Whether a function makes the parameters."""
        return self.key is not None

    @property
    def shapes(self) -> Tree:
        """The parameters, or what the function would make.

        Raises:
            Exception: what the function raises, unchanged, with a note.
        """
        if self.key is None:
            return self.made
        try:
            return trace_init(self.made, self.key)[1]
        except Exception as error:
            if any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(self.made)):
                got = f"init was given {_kind(self.made)} as its function"
                error.add_note(f"jaxpp: {got}; if these are the parameters, leave the key out: pipe.init(params, batch)")
            raise


def read_given(where: str, init_or_params: Tree, args: Sequence[Tree]) -> Given:
    """The arguments of ``init``, or of another method ``where`` that takes the same, by their meaning.

    Raises:
        ArgumentError: too few or too many, or in another order.
    """
    everything = (init_or_params, *args)
    if isinstance(init_or_params, State):
        rule = f"{where} takes parameters, and step takes a state"
        anew = f"pipe.{where}({'(state.params, state.model_state)' if init_or_params.held[2] else 'state.params'}, batch)"
        fix = f"continue with pipe.step(state, ...), in a new pipeline after pipe.abstract_state(...); or begin anew with {anew}"
        raise ArgumentError(f"pipe.{where}", rule, f"a jaxpp.State, step={init_or_params.step}", fix)
    kinds = [_kind(value) for value in everything]
    got = ", ".join(kinds)
    if len(everything) == 2:
        if not {_FUNCTION, _KEY}.isdisjoint(kinds):
            raise _wrong_init(where, got)
        return Given(*everything)
    if len(everything) != 3:
        raise _wrong_init(where, got)
    made, key, batch = everything
    if not callable(made) or not _may_be_key(key) or kinds[2] in (_FUNCTION, _KEY):
        raise _wrong_init(where, got)
    return Given(made, batch, key)


def are_swapped(options: Options, given: Given, joined: Callable[[tuple[Tree, ...]], tuple[Tree, ...]]) -> bool:
    """Whether the loss takes the batch for the parameters and the parameters for the batch, where it fails as they were given.

    ``joined`` makes of parameters (and model state) what the loss is called with.
    """
    try:
        variables = joined(variables_of(options, given.batch))
        check_floating(jax.tree_util.tree_leaves_with_path(variables[0]))
    except Exception:  # noqa: BLE001  (they are not)
        return False
    key = jax.random.key(0)
    for keys in ((), (key,)):
        try:
            loss = jax.tree.leaves(jax.eval_shape(options.loss_fn, *variables, given.made, *keys))[0]
        except Exception:  # noqa: BLE001, S112  (they are not)
            continue
        return loss.shape == () and jnp.issubdtype(loss.dtype, jnp.floating)
    return False


def swapped(where: str, given: Given) -> ArgumentError:
    """The error for a batch where the parameters should be."""
    return _wrong_init(
        where, f"a batch, {_kind(given.made)}, then parameters, {_kind(given.batch)}: the loss takes them the other way round"
    )


def variables_of(options: Options, made: Tree) -> tuple[Tree, ...]:
    """The parameters, and with ``has_state`` the model state, of what init was given or made.

    Raises:
        ArgumentError: not a pair, with ``has_state``.
    """
    if not options.has_state:
        return (made,)
    if not isinstance(made, tuple) or len(made) != 2:
        raise _wrong_init("init", f"{type(made).__name__} instead of a pair (params, model_state), with has_state=True")
    if made[1] is None:
        raise _wrong_init("init", "None as the model state, with has_state=True; an empty one is {}")
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
    """Whether it may be one key, typed or raw."""
    if not (hasattr(value, "dtype") and hasattr(value, "shape")):
        return False
    typed = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return value.shape == () if typed else value.dtype == jnp.uint32 and len(value.shape) == 1


def _wrong_init(where: str, got: str) -> ArgumentError:
    return ArgumentError(
        f"pipe.{where}",
        f"{where} takes a function, a key and a batch, or parameters and a batch, in this order",
        got,
        f"call pipe.{where}(init_fn, jax.random.key(0), batch) or pipe.{where}(params, batch), with has_state=True a pair "
        "(params, model_state)",
    )
