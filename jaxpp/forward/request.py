"""What a user asks of a generation, checked before anything is traced; and the forecast of its memory."""

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxpp.engine.engine import Engine
from jaxpp.engine.tracing import check_key
from jaxpp.errors import ArgumentError, ParamsError
from jaxpp.errors.checks import check_function, refuse_tracers
from jaxpp.forward.functions import Functions
from jaxpp.forward.generate import Generation
from jaxpp.forward.observed import forecast_ring
from jaxpp.forward.prompts import Places, Prompts
from jaxpp.forward.ring import Lasting, LastingShapes, Ring, passes_of, prompts_of
from jaxpp.forward.sampling import Sampler, SampleRule, sampler_of
from jaxpp.observe.memory.forecast import Forecast, parse_bytes, room_of
from jaxpp.plan.step import Leaves
from jaxpp.schedule.validate import is_count
from jaxpp.stages.jaxpr import describe
from jaxpp.types import Array, ForwardFn, Key, Tree

__all__ = ["generation"]


def generation(  # noqa: PLR0913  (what a generation is asked for)
    where: str,
    engine: Engine,
    leaves: Leaves[Array] | None,
    functions: Functions,
    fn: ForwardFn,
    carry: Tree,
    prompts: Prompts,
    num_tokens: int | Sequence[int],
    *,
    sample: SampleRule,
    key: Key | None,
    stop: int | Iterable[int],
    num_groups: int | None,
    group_size: int,
    chunk: int,
    max_length: int | None,
    progress: bool,
) -> Generation:
    """The tokens of prompts, as ``Forward.generate`` documents it; ``where`` is the method that was called.

    Without ``leaves``, where the parameters are only shapes, nothing is made: the generation forecasts its memory, and
    refuses to be run.
    """
    refuse_tracers(f"{where}(...)", carry, key)
    key = _one_key(key)
    num_groups = engine.options.schedule.num_stages if num_groups is None else num_groups
    counts = {"num_groups": num_groups, "group_size": group_size, "chunk": chunk}
    _check_asked(where, fn, counts | ({} if max_length is None else {"max_length": max_length}))
    _check_carry(carry, shapes=leaves is None)
    _check_engine(where, engine)
    sampler, chunk = sampler_of(sample), int(chunk)
    size: dict[str, int] = {"num_groups": int(num_groups), "group_size": int(group_size)}
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), carry)
    foresee = functools.partial(_forecast, engine, functions, fn, shapes, sampler=sampler, key=key, chunk=chunk, **size)
    if leaves is None:
        places = Places(iter(prompts), num_tokens, sizes=(1,), stop=stop, where=where, **size)
        return Generation(None, places, shown=False, foresee=foresee)
    taken = prompts_of(engine, functions, fn, carry, chunk)
    limit = None if max_length is None else int(max_length)
    if limit is None and taken.room is not None:
        limit = taken.room + 1  # the last token does not enter the carry

    def places_of() -> Places:
        known = {"vocab": taken.vocab, "max_length": limit}
        return Places(prompts, num_tokens, sizes=taken.sizes, stop=stop, where=where, **known, **size)

    first = places_of()
    options = {"sampler": sampler, "key": key, "group_size": size["group_size"]}
    alone, together = passes_of(engine, Lasting(leaves), functions, fn, carry, **options)
    ring = Ring(alone, together, carry, key, **size)
    again = None if isinstance(prompts, Iterator) else places_of
    return Generation(ring, first, shown=progress, again=again, foresee=foresee)


def _forecast(  # noqa: PLR0913  (what a generation is asked for)
    engine: Engine,
    functions: Functions,
    fn: ForwardFn,
    carry: Tree,
    hbm: float | str | None,
    *,
    sampler: Sampler,
    key: Key,
    chunk: int,
    num_groups: int,
    group_size: int,
) -> Forecast:
    """The memory of a generation from the shapes of its carry: its passes are compiled, and not run."""
    room = room_of(engine, engine.options.hbm if hbm is None else parse_bytes(hbm))
    read = Leaves(engine.placed.shapes.params, engine.placed.shapes.own_params)
    options = {"sampler": sampler, "key": key, "group_size": group_size}
    alone, together = passes_of(engine, LastingShapes(read), functions, fn, carry, **options)
    sizes = prompts_of(engine, functions, fn, carry, chunk).sizes
    return forecast_ring(engine, alone, together, sizes, num_groups=num_groups, group_size=group_size, room=room)


def _check_asked(where: str, fn: ForwardFn, counts: Mapping[str, int]) -> None:
    check_function(f"{where}(..., fn, ...)", "fn is a function of (params, carry, tokens) that returns (new_carry, logits)", fn)
    if low := [f"{name}={value!r}" for name, value in counts.items() if not is_count(value, least=1)]:
        raise ArgumentError(f"{where}(...)", "counts are whole numbers of at least 1", low, "pass 1 or more")


def _one_key(key: Key | None) -> Key:
    """The key, as ``jax.random.key`` makes it.

    Raises:
        ArgumentError: it is no key, or there are several.
    """
    check_key(key)
    key = jax.random.key(0) if key is None else key
    found = None
    with contextlib.suppress(TypeError):  # a raw key has the shape and the type of JAX's default
        found = key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
    if found is None or found.shape:
        rule, fix = "a generation has one key, from which the keys of its sequences are folded", "pass jax.random.key(seed)"
        raise ArgumentError("key", rule, describe(key), fix)
    return found


def _check_carry(carry: Tree, *, shapes: bool) -> None:
    """Refuse what is no tree of arrays, or, where shapes will do, of shapes."""
    wrong = [
        f"carry{jax.tree_util.keystr(path)}: {type(leaf).__name__}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(carry)
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or (isinstance(leaf, jax.ShapeDtypeStruct) and not shapes)
    ]
    if wrong:
        rule = "the carry is a tree of arrays, as the model makes it for one sequence that has had no token"
        fix = "make the shapes arrays, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), and numbers too"
        raise ParamsError("carry", rule, wrong, fix)


def _check_engine(where: str, engine: Engine) -> None:
    """Refuse what a generation does not do yet."""
    if engine.options.has_state and engine.options.is_loss:
        rule = "a generation has one carry, and the pipeline's loss has a model state besides"
        raise ArgumentError(where, rule, "has_state=True", "close over the model state: lambda params, carry, tokens: ...")
    if engine.placement.num_replicas > 1:
        rule, got = "the groups of a generation share one replica", f"{engine.placement.num_replicas} replicas"
        raise ArgumentError(where, rule, got, "make a jaxpp.Forward without data_parallel over the devices of one replica")
    if not engine.alone:
        rule = "one process reads the tokens and decides what runs next"
        raise ArgumentError(where, rule, "devices of several processes", "make a jaxpp.Forward over the devices of one process")
