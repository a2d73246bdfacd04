"""Calls that a function cannot take: names that are not there, and the names near them; arguments that are missing or too many."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence

from jaxpp.errors import ArgumentError, shown

__all__ = ["spelt", "unknown_keywords", "wrong_call"]


_ELSEWHERE = {
    "broadcast": "shared static_broadcasted_argnums replicated",
    "cuts": "split_points boundaries partition",
    "data_parallel": "dp num_replicas replicas",
    "hbm": "memory memory_limit device_memory",
    "host": "offload offload_optimizer offload_params cpu_offload",
    "key": "rng rngs rng_key prng_key dropout_rng dropout_key seed",
    "num_microbatches": "chunks accumulation_steps gradient_accumulation_steps accumulate_steps",
    "num_stages": "pp num_partitions",
    "optimizer": "tx",
    "remat": "checkpoint checkpoint_policy policy gradient_checkpointing",
    "shard": "fsdp zero zero_stage",
    "shardings": "partition_rules rules sharding_rules in_shardings",
    "trains": "trainable frozen freeze wrt",
}
"""By our name of an argument those of other libraries and of older jaxpp, which no spelling is near."""
_OURS = {theirs: ours for ours, words in _ELSEWHERE.items() for theirs in words.split()}


def unknown_keywords(
    where: str, given: Mapping[str, object], known: Iterable[str], otherwise: str = "leave {} out"
) -> ArgumentError:
    """The error for arguments ``given`` by names that are not ``known``; says which known names are near.

    What to do with those that no known name is near is said ``otherwise``.

    Example:
        >>> print(unknown_keywords("Pipeline(...)", {"stages": 4}, ["num_stages", "schedule"]))
        Pipeline(...): an argument is passed by a name that the function has.
          Got: stages=4.
          Fix: write num_stages=4.
    """
    names = list(known)
    ours = {name: _OURS[name] for name in given if _OURS.get(name) in names}
    near = {name: [ours[name]] if name in ours else difflib.get_close_matches(name, names, n=1) for name in given}
    fixes = [f"write {word}=... for {name}" for name, word in ours.items()]
    fixes += [f"write {near[name][0]}={shown(value)}" for name, value in given.items() if near[name] and name not in ours]
    if others := [name for name in given if not near[name]]:
        fixes.append(otherwise.format(", ".join(others)) + f"; the names are {', '.join(names)}" * bool(names))
    if ours:
        fixes.append("help(jaxpp.Pipeline) says what each takes")
    got = [f"{name}={shown(value)}" for name, value in given.items()]
    return ArgumentError(where, "an argument is passed by a name that the function has", got, "; ".join(fixes))


def wrong_call(function: Callable[..., object], args: Sequence[object], named: Mapping[str, object]) -> ArgumentError | None:
    """The error for arguments that a public function, which has raised a ``TypeError``, cannot be called with; None if it can.

    Example:
        >>> def step(state, batch, *, donate=True): ...
        >>> print(wrong_call(step, (1,), {}))
        step(...): an argument without a default is passed at each call.
          Got: state: int
               batch: nothing.
          Fix: write step(state, batch).
        >>> print(wrong_call(step, (1, 2, False), {}))
        step(...): the first 2 arguments may be passed by position, and others by name.
          Got: 3 by position.
          Fix: write donate=False.
    """
    whole = inspect.signature(function, follow_wrapped=False).parameters.values()
    skipped = sum(p.name in ("self", "cls") for p in whole)
    called = function.__qualname__.removesuffix(".__init__").rpartition("<locals>.")[2]  # ``Pipeline``, ``Forward.apply``
    known, args = [p for p in whole if p.name not in ("self", "cls")], args[skipped:]
    kinds = {p.kind for p in known}
    positional = [p for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name = [p for p in known if p.kind == p.KEYWORD_ONLY]
    names, where = [p.name for p in (*positional, *by_name)], f"{called}(...)"
    unknown = {name: value for name, value in named.items() if name not in names}
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        if inspect.Parameter.VAR_POSITIONAL in kinds:  # ``init`` and what takes the same
            short = called.rpartition(".")[2]
            otherwise = f"pass {{}} by position, as in {short}(init_fn, key, batch) or {short}(params, batch)"
            return unknown_keywords(where, unknown, [p.name for p in by_name], otherwise)
        return unknown_keywords(where, unknown, names)
    if len(args) > len(positional) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        more, count = args[len(positional) :], len(positional)
        rule = f"the first {count} argument{'s' * (count != 1)} may be passed by position, and others by name"
        fixes = [f"{p.name}={shown(value)}" for p, value in zip(by_name, more, strict=False)]
        fix = f"write {', '.join(fixes)}" if fixes else f"leave the last {len(more)} out"
        return ArgumentError(where, rule, f"{len(args)} by position", fix)
    needed = [p for p in (*positional, *by_name) if p.default is p.empty]
    given = {p.name for p in positional[: len(args)]} | named.keys()
    if missing := [p.name for p in needed if p.name not in given]:
        line = ", ".join(p.name + "=..." * (p.kind == p.KEYWORD_ONLY) for p in needed)
        rule = "an argument without a default is passed at each call"
        got = [f"{p.name}: {type(value).__name__}" for p, value in zip(positional, args, strict=False)]
        got += [f"{name}: nothing" for name in missing]
        return ArgumentError(where, rule, got, f"write {called.rpartition('.')[2]}({line})")
    return None


def spelt(given: Iterable[str], known: Sequence[str], otherwise: str) -> str:
    """What to write for the names ``given``, none of which is ``known``; ``otherwise`` for those that no known name is near.

    Example:
        >>> spelt(["layer_4", "conv"], ["layers_2", "layers_4"], "use one of these")
        "write 'layers_4' for 'layer_4'; for 'conv' use one of these"
        >>> spelt(["layer_4"], ["layers_2", "layers_4"], "use one of these"), spelt(["conv"], ["layers_2"], "use one of these")
        ("write 'layers_4'", 'use one of these')
    """
    names = list(dict.fromkeys(map(str, given)))
    near = {name: difflib.get_close_matches(name, known, n=1) for name in names}
    if len(names) == 1 or not any(near.values()):
        return f"write {near[names[0]][0]!r}" if near[names[0]] else otherwise
    fixes = [f"write {found[0]!r} for {name!r}" for name, found in near.items() if found]
    if others := [repr(name) for name, found in near.items() if not found]:
        fixes.append(f"for {' and '.join(others)} {otherwise}")
    return "; ".join(fixes)
