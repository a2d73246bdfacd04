"""Any options beside one another on any model: a case is drawn from a number, and trains as a plain optax loop on one device does.

A case is right if it is equal to that loop, or refused by an error of jaxpp's before a step runs. A failing case is made as small
as it can be, and printed as a line that runs it again.
"""

import collections
import contextlib
import dataclasses
import faulthandler
import functools
import inspect
import itertools
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import PartitionSpec

import jaxpp
from jaxpp.errors import JaxppError, VerifyError
from jaxpp.schedule import SCHEDULES, make
from tests.random_models import LAYERS, MORE, RANDOM, STATEFUL, Model, half, random_model, single, spectrum

STEPS = 3
SEEDS = 1500
AS_USERS = "JAXPP_TESTS_COMPILE_AS_USERS_DO"
CROWDED = 244  # from this seed, where the slow tier begins, every second one draws many options
SECONDS = 120  # in which a case is done, or it hangs
WIDTH = 4
Rng = np.random.Generator
Given = dict[str, Any]


# --- what is drawn ---


def by_name(params):
    """Every second layer is frozen, by a tree of labels."""
    names = [str(path[0].key) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    labels = ["frozen" if name[-1] in "024" else "free" for name in names]
    return jax.tree.structure(params).unflatten(labels)


def wide(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def adam(rate=1e-2):
    return optax.adam(rate, eps=1e-3)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": adam,
    "masked adamw": lambda: optax.adamw(1e-2, eps=1e-3, mask=wide),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "muon": lambda: optax.contrib.muon(1e-2),
    "MultiSteps": lambda: optax.MultiSteps(adam(), 2),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 1e-3, 4), eps=1e-3),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), adam()),
    "clipped by value": lambda: optax.chain(optax.clip(0.05), optax.trace(0.9), optax.scale(-0.1)),
    "frozen": lambda: optax.multi_transform({"free": adam(), "frozen": optax.set_to_zero()}, by_name),
    "two rates": lambda: optax.multi_transform({"free": adam(), "frozen": optax.sgd(0.1, momentum=0.9)}, by_name),
    "rmsprop": lambda: optax.rmsprop(1e-2, eps=1e-3),
    "adagrad": lambda: optax.adagrad(0.1),
    "lamb": lambda: optax.lamb(1e-2, eps=1e-3),
    "amsgrad": lambda: optax.amsgrad(1e-2, eps=1e-3),
    "novograd": lambda: optax.novograd(1e-2, eps=1e-3),
    "schedule": lambda: optax.sgd(optax.cosine_decay_schedule(0.1, 5), momentum=0.5),
    "if finite": lambda: optax.apply_if_finite(adam(), 2),
    "schedule free": lambda: optax.contrib.schedule_free_sgd(0.1),
    "polyak": lambda: optax.polyak_sgd(0.1),
    "plateau": lambda: optax.chain(adam(), optax.contrib.reduce_on_plateau(patience=1)),
    "noisy": lambda: optax.noisy_sgd(0.1, key=0),
}
HEADS = {"keep": "keep", "recompute": "recompute", "offload": "offload", "half": 0.5}
REMATS: dict[str, Callable[[int], Any]] = {
    **{name: lambda stages, value=value: value for name, value in HEADS.items()},
    "inputs": lambda stages: jaxpp.Offload(except_last=0, recompute=True),
    "policy": lambda stages: jax.checkpoint_policies.dots_saveable,
    "mixed": lambda stages: [("recompute", "least", "offload", "keep")[k % 4] for k in range(stages)],
}


def one_of(*values: Any) -> Callable[[Rng], Any]:
    return lambda rng: values[rng.integers(len(values))]


OPTIONS: dict[str, Callable[[Rng], Any]] = {
    "remat": one_of(*REMATS),
    "fuse": one_of(True, False),
    "balance": one_of("flops", "memory", "flops", "memory", "time"),
    "cuts": one_of(1, 2, 3),  # from which layers they are drawn
    "replicas": one_of(2),
    "mesh": one_of((1, 2), (2, 1), (2, 2)),
    "renamed mesh": one_of((1, 2), (2, 2)),
    "wide": one_of(0, 1, 2),  # the rank of two devices
    "shard": one_of("optimizer", "gradients", "parameters", ("gradients", "parameters")),
    "bank": one_of("one task", "tasks"),
    "loss_scale": one_of(1024.0),
    "state": one_of(True),
    "aux": one_of("mean", "sum", "max", "min", "last", "stack"),
    "trains": one_of(0, 1),  # which of every two
    "other": one_of(True),
    "pieces": one_of("sizes", "weights", "lengths"),
    "weight": one_of("function", "auto"),
    "reduction": one_of("sum"),
    "shared": one_of(True),
    "host": one_of("optimizer", "params"),
    "delay": one_of(1),
    "donate": one_of(False),
    "threads": one_of("one", "ranks", "ranks"),
    "key": one_of("threefry2x32", "raw", "rbg"),
    "hbm": one_of("1GiB"),
    "uneven": one_of(1, 2),  # how many examples are left over
    "init": one_of("function"),  # that makes the parameters, in place of these
    "sizes": one_of(True),  # a second size of batches, which takes the place of the first
}
VERBS = "evaluate", "evaluate other", "apply", "stream", "forecast", "pickle", "orbax", "verify", "value_and_grad", "forward"
REPLICAS = {"replicas", "mesh", "renamed mesh"}
ALONE = (REPLICAS, REPLICAS - {"replicas"} | {"wide"}, {"weight", "reduction"}, {"pieces", "uneven"}, {"pieces", "sizes"})
"""Options of which a case has one: nothing but a mistake asks for two."""
ORDER: Given = {"schedule": "1f1b", "ranks": 2, "per_rank": 2, "microbatches": 2, "optimizer": "momentum"}
"""What every pipeline has, and the plainest of each."""


@dataclasses.dataclass(frozen=True)
class Case:
    """The seed of a model, the layers that are left out of it, and what is asked for."""

    seed: int
    given: Given
    without: tuple[int, ...] = ()

    def __str__(self) -> str:
        more = f", {self.without!r}" if self.without else ""
        run = f"from tests.end_to_end.test_any_options import *; check(Case({self.seed}, {self.given!r}{more}))"
        return f"JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 python -c {run!r}"

    def get(self, name: str) -> Any:
        return self.given.get(name, ORDER.get(name))

    def at_front(self, door: str) -> bool:
        """Whether another front door is asked for; they have neither banks nor model states."""
        return bool(self.get(door)) and not (self.get("bank") or self.get("state"))

    @property
    def per_rank(self) -> int:
        recipe = SCHEDULES.get(self.get("schedule"))
        return self.get("per_rank") if recipe is None or recipe.varies else recipe.stages_per_rank

    @property
    def stages(self) -> int:
        return self.get("ranks") * self.per_rank

    @property
    def replicas(self) -> int:
        return self.get("replicas") or (self.get("mesh") or self.get("renamed mesh") or (1, 1))[0]


def drawn(seed: int) -> Case:
    """The case of a seed: a model, an order of work, an optimizer, some options and some verbs; more of them if it is crowded."""
    rng, crowded = np.random.default_rng((seed, 1)), seed >= CROWDED and seed % 2 == 1
    names = set[str]()
    for name in rng.permutation(list(OPTIONS))[: rng.integers(5, 10) if crowded else rng.integers(2, 5)]:
        if not any(name in group and group & names for group in ALONE):
            names.add(str(name))
    if "shard" in names and not names & REPLICAS:
        names.add("replicas")
    given = {name: OPTIONS[name](rng) for name in sorted(names)}
    schedule = str(rng.choice([*SCHEDULES, "1f1b", "auto"]))
    recipe = SCHEDULES.get(schedule, SCHEDULES["1f1b"])
    least = 2 if names & {"wide", "delay"} else 1
    ranks = int(rng.integers(least, 4 if recipe.stages_per_rank == 1 else 3))
    ranks = min(ranks, 2) if names & {"cuts", "mesh", "renamed mesh"} else ranks
    able = [m for m in (2, 3, 4, 5, 1) if recipe.allows(ranks, m)]
    order = {"schedule": schedule, "ranks": ranks, "microbatches": int(able[rng.integers(min(3, len(able)))])}
    order |= {"per_rank": int(rng.integers(1, 4))} if recipe.varies else {}
    given = order | {"optimizer": str(rng.choice(list(OPTIMIZERS)))} | given
    given |= dict.fromkeys(rng.permutation(VERBS)[: rng.integers(2, 5) if crowded else rng.integers(1, 3)], True)
    return Case(seed, {str(name): value for name, value in given.items()})


# --- the model, and what the loss is ---


@functools.cache
def takes_complex(optimizer: str) -> bool:
    """Whether an optimizer can do with complex parameters; optax refuses some."""
    made, params = OPTIMIZERS[optimizer](), {"head": jnp.ones((4, 4), "complex64")}
    try:
        jax.eval_shape(lambda: optax.with_extra_args_support(made).update(params, made.init(params), params, value=1.0))
    except (TypeError, ValueError):
        return False
    return True


def model_of(case: Case) -> Model:
    kinds = [kind for kind in (*LAYERS, *MORE) if kind is not half and (case.get("key") or kind not in RANDOM)]
    kinds = [kind for kind in kinds if kind is not spectrum or takes_complex(case.get("optimizer"))]
    kinds += [*STATEFUL, *STATEFUL, *STATEFUL] if case.get("state") else []
    model = random_model(case.seed, "float64", tuple(kinds), 2, WIDTH, 5, frozenset(case.without))
    model_state = model.model_state | ({"steps": jnp.asarray(0)} if case.get("state") else {})
    return dataclasses.replace(model, model_state=model_state)


def batch_of(case: Case, number: int) -> Any:
    """The batch of a step."""
    rng, count, length = np.random.default_rng((case.seed, 2, number)), case.get("microbatches"), 4

    def batch(rows: int, length: int) -> Any:
        mask = rng.random((rows, length)) < 0.7
        mask[:, 0] = True
        made = {"tokens": rng.integers(0, 7, (rows, length)), "x": rng.normal(size=(rows, length, WIDTH)), "mask": mask}
        return made | ({"ramp": rng.normal(size=length) + 1, "gain": 0.5} if case.get("shared") else {})

    if (kind := case.get("pieces")) is None:
        each = 2 + (number % 2 if case.get("sizes") else 0)
        return batch(case.replicas * (count * each + (case.get("uneven") or 0) % count), length)
    parts = [batch(case.replicas * (1 + k % 3), 3 + k % 2 if kind == "lengths" else length) for k in range(count)]
    return jaxpp.Microbatches(parts, [1 + k % 3 for k in range(count)] if kind == "weights" else None)


def key_of(case: Case, number: int) -> Any:
    kind = case.get("key")
    if kind is None:
        return None
    key = jax.random.PRNGKey(case.seed) if kind == "raw" else jax.random.key(case.seed, impl=kind)
    return jax.random.fold_in(key, number)


def weight(batch: Any) -> Any:
    return batch["mask"].sum() * 1.0


def parted(case: Case, params: Any) -> tuple[Any, Any]:
    """The parameters that all tasks share, and those of a task."""
    if case.get("bank") is None:
        return params, None
    able = [name for name in params if all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(params[name]))]
    own = {name: params[name] for name in able[1::2]}
    return {name: part for name, part in params.items() if name not in own}, own


def rest_of(case: Case, rest: tuple[Any, ...]) -> tuple[Any, Any, Any, Any]:
    """Of what stands behind the parameters: a task's own, the model state, the batch, the key."""
    supply = list(rest)
    own = supply.pop(0) if case.get("bank") else {}
    states = supply.pop(0) if case.get("state") else {}
    return own, states, supply[0], supply[1] if supply[1:] else None


def outputs_of(case: Case, model: Model) -> Callable[..., Any]:
    def outputs(params, *rest):
        own, states, batch, key = rest_of(case, rest)
        if case.get("shared"):
            batch = batch | {"x": batch["x"] * batch["ramp"][: batch["x"].shape[1], None] * batch["gain"]}
        logits, new, early = model.outputs(params | own, states, batch, key)
        logits = logits * batch["gain"] if case.get("shared") else logits
        return logits, new | ({"steps": states["steps"] + 1} if states else {}), early, batch

    return outputs


def signed(case: Case, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of whatever there is, as one that says so."""
    there = {"params": True, "own": case.get("bank"), "states": case.get("state"), "batch": True, "key": case.get("key")}
    given = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name, is_there in there.items() if is_there]
    function.__signature__ = inspect.Signature(given)
    return function


def loss_of(case: Case, model: Model, kind: str, watch: Callable[[Any], None] | None = None) -> Callable[..., Any]:
    """The loss, or the one that takes turns with it; ``watch`` is called with the loss of each microbatch."""
    outputs = outputs_of(case, model)

    def loss_fn(params, *rest):
        logits, new, early, batch = outputs(params, *rest)
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["tokens"][..., None], -1)[..., 0]
        if kind == "other":
            loss = jnp.square(logits).mean() / 10
        elif case.get("reduction"):
            loss = losses.sum() / 7
        else:
            mask = batch["mask"]
            loss = jnp.where(mask, losses, 0).sum() / mask.sum() if case.get("weight") else losses.mean()
        if watch is not None:
            jax.debug.callback(watch, loss)
        hits = (logits.argmax(-1) == batch["tokens"]).sum()
        aux = {"rows": logits.mean((1, 2)), "early": early.mean((0, 1)), "hits": hits} if has_aux(case, kind) else ()
        return (loss, (new, aux)) if case.get("state") else (loss, aux) if has_aux(case, kind) else loss

    return signed(case, loss_fn)


def has_aux(case: Case, kind: str) -> bool:
    return kind == "loss" and case.get("aux") is not None


def kind_of(case: Case, number: int) -> str:
    return "other" if case.get("other") and number % 2 else "loss"


def tasks_of(case: Case, number: int) -> list[str]:
    """The task of each replica in a step."""
    return ["ab"[(number + r * (case.get("bank") == "tasks")) % 2] for r in range(case.replicas)]


def trained_by(case: Case, params: Any, kind: str) -> set[str]:
    """The names of the parameters that a step changes."""
    names, which = sorted(params), case.get("trains")
    if which is None:
        return set(names)
    mine = set(names[which::2])
    return mine if kind == "loss" else set(names) - mine


def trains_sets(case: Case, kind: str) -> bool:
    """Whether a step trains the sets of a bank: where losses train a part each, those of one do."""
    return case.get("trains") is None or (case.get("trains") == 0) == (kind == "loss")


def trains_of(case: Case, params: Any, kind: str) -> list[str]:
    """What a loss is told to train."""
    return sorted(trained_by(case, params, kind)) + ["task/*"] * (bool(case.get("bank")) and trains_sets(case, kind))


def optimizer_of(case: Case, params: Any) -> Any:
    """The optimizer; where steps train a part of the parameters, it holds what it does for each part apart, as these have to."""
    made = OPTIMIZERS[case.get("optimizer")]()
    if case.get("trains") is None:
        return made
    mine = trained_by(case, params, "loss")
    each = {"loss": made.gradient_transformation() if isinstance(made, optax.MultiSteps) else made, "other": adam()}
    labels = lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: "loss" if path[0].key in mine else "other", tree)  # noqa: E731
    return optax.multi_transform(each, labels)


# --- the plain loop ---


def has_gradient(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def floats_of(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf if has_gradient(leaf) else optax.MaskedNode(), params)


def filled(floats: Any, params: Any) -> Any:
    masked = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    return jax.tree.map(lambda new, old: old if masked(new) else new, floats, params, is_leaf=masked)


def weighted(shares: Any, trees: Any) -> Any:
    return jax.tree.map(lambda *leaves: sum((s * leaf).astype(leaf.dtype) for s, leaf in zip(shares, leaves, strict=True)), *trees)


def pieces_of(case: Case, batch: Any, kind: str = "loss") -> tuple[list[list[Any]], Any]:
    """The microbatches of each replica, and what each of all weighs, those of the first replica first."""

    def cut(batch, first, last):
        return {name: leaf if name in ("ramp", "gain") else leaf[first:last] for name, leaf in batch.items()}

    d, count = case.replicas, case.get("microbatches")
    if isinstance(batch, jaxpp.Microbatches):
        sizes = [len(part["x"]) // d for part in batch]
        pieces = [[cut(part, r * n, (r + 1) * n) for part, n in zip(batch, sizes, strict=True)] for r in range(d)]
    else:
        each = len(batch["x"]) // d
        sizes = [each // count + (i < each % count) for i in range(count)]
        ends = np.cumsum([0, *sizes])
        pieces = [[cut(batch, r * each + ends[i], r * each + ends[i + 1]) for i in range(count)] for r in range(d)]
    weighs = case.get("weight") == "function" or (case.get("weight") and kind == "loss")
    given = [weight(piece) for own in pieces for piece in own] if weighs else sizes * d
    if isinstance(batch, jaxpp.Microbatches) and batch.weights is not None:
        given = [*batch.weights] * d
    given = np.asarray(given, "float64")
    return pieces, given / given.sum()


@dataclasses.dataclass(frozen=True)
class Stand:
    """What training has made of all that it changes."""

    params: Any
    before: Any  # the parameters before the last step
    opt_state: Any
    owns: Any  # of each task
    own_states: Any
    states: Any
    scale: float = 1024.0
    fine: int = 0  # steps since the scale was changed

    def named(self, case: Case) -> Given:
        """What there is of it to be compared."""
        made: Given = {"params": self.params, "opt_state": self.opt_state, "own": self.owns, "own_states": self.own_states}
        made |= {"states": self.states if case.get("state") else None, "previous": self.before if case.get("delay") else None}
        return made | {"scale": np.float32(self.scale) if case.get("loss_scale") else None}


class Plain:
    """What a case is to make, by a loop over microbatches with optax, on one device."""

    def __init__(self, case: Case, model: Model, *, counts: bool = True):
        self.case, self.model, self.optimizer = case, model, optimizer_of(case, parted(case, model.params)[0])
        self.counts = counts  # whether weight="auto" finds a count
        self.steps = {kind: jax.jit(functools.partial(self.differentiated, kind)) for kind in ("loss", "other")}
        self.outputs = jax.jit(lambda *args: outputs_of(case, model)(*args)[0].mean(1))
        self.init = jax.jit(self.optimizer.init)
        self.update = jax.jit(self.updated, static_argnums=4)

    def differentiated(self, kind: str, params: Any, own: Any, rest: tuple[Any, ...]) -> Any:
        def loss(floats):
            tree = filled(floats, (params, own))
            found = loss_of(self.case, self.model, kind)(tree[0], *([] if own is None else [tree[1]]), *rest)
            return found if isinstance(found, tuple) else (found, ())

        (value, extra), grads = jax.value_and_grad(loss, has_aux=True)(floats_of((params, own)))
        new, aux = extra if self.case.get("state") else ({}, extra)
        return value, new, aux, grads

    def updated(self, params: Any, grads: Any, state: Any, loss: Any, kind: str) -> Any:
        """Parameters and optimizer state after an update of the parameters that a step trains."""
        floats, names = floats_of(params), trained_by(self.case, params, kind)
        trained = jax.tree_util.tree_map_with_path(lambda path, _: path[0].key in names, floats)
        grads = jax.tree.map(lambda grad, mine: grad if mine else jnp.zeros_like(grad), grads, trained)
        whole = optax.with_extra_args_support(self.optimizer)
        updates, new = whole.update(grads, state, floats, value=loss)
        after = jax.tree.map(lambda new, old, mine: new if mine else old, optax.apply_updates(floats, updates), floats, trained)
        if self.case.get("trains") is not None:
            new = state._replace(inner_states=state.inner_states | {kind: new.inner_states[kind]})
        return filled(after, params), new

    def gradients(
        self, kind: str, params: Any, owns: Any, states: Any, number: int, *, alike: bool = False, batch: Any = None
    ) -> dict[str, Any]:
        """The loss, aux, gradients and model state of a step; ``alike``: of another loss in the pipeline of the first."""
        case, found = self.case, list[Any]()
        pieces, shares = pieces_of(case, batch_of(case, number) if batch is None else batch, kind if self.counts else "other")
        key, tasks, count = key_of(case, number), tasks_of(case, number), case.get("microbatches")
        after = []
        for r, own in enumerate(pieces):
            mine = states
            for i, piece in enumerate(own):
                rest = ([mine] if case.get("state") else []) + [piece]
                rest += [] if key is None else [jax.random.fold_in(key, r * count + i)]
                value, mine, aux, grads = self.steps[kind](params, owns and owns[tasks[r]], tuple(rest))
                found.append((value, aux, grads))
            after.append(mine)
        summed = bool(case.get("reduction")) and (alike or kind == "loss")
        scales = np.ones_like(shares) if summed else shares
        losses, auxes, grads = zip(*found, strict=True)
        own_grads = {}
        for task in set(tasks) if owns else ():
            mine = [k for k in range(len(found)) if tasks[k // count] == task]
            each = scales[mine] if summed else scales[mine] / scales[mine].sum()
            own_grads[task] = weighted(each, [grads[k][1] for k in mine])
        order = sorted(range(len(found)), key=lambda k: k % count if case.get("pieces") else k)
        return {
            "loss": weighted(scales, losses),
            "aux": self.merged([auxes[k] for k in order], shares[order]) if has_aux(case, kind) else (),
            "grads": weighted(scales, [each[0] for each in grads]),
            "own": own_grads,
            "states": jax.tree.map(
                lambda first, *more: np.mean([first, *more], 0) if more and has_gradient(first) else first, *after
            ),
        }

    def merged(self, auxes: Any, shares: Any) -> Any:
        columns = {name: [aux[name] for aux in auxes] for name in auxes[0]}
        early = np.stack(columns["early"])
        reducers = {"sum": lambda x: x.sum(0), "max": lambda x: x.max(0), "min": lambda x: x.min(0), "last": lambda x: x[-1]}
        reducers |= {"stack": lambda x: x, "mean": lambda x: np.tensordot(shares, x, 1)}
        made = {"rows": np.concatenate(columns["rows"]), "hits": np.sum(columns["hits"])}
        return made | {"early": reducers[self.case.get("aux")](early)}

    def applied(self, params: Any, own: Any, states: Any, number: int, key: Any) -> Any:
        """The outputs for the batch of a step."""
        case, count = self.case, self.case.get("microbatches")
        found = list[Any]()
        for piece in (piece for own in pieces_of(case, batch_of(case, number))[0] for piece in own):
            rest = ([own] if case.get("bank") else []) + ([states] if case.get("state") else []) + [piece]
            rest += [] if key is None else [jax.random.fold_in(key, len(found))]
            found.append(self.outputs(params, *rest))
        return np.concatenate(sorted_by(found, lambda k: k % count if case.get("pieces") else k))

    def begun(self, shake: float = 0.0, seed: int = 0) -> Stand:
        """Where training begins; with ``shake`` at parameters that differ in their last digits."""
        rng = np.random.default_rng(seed)
        turn = lambda leaf: (leaf * (1 + shake * rng.choice([-1, 1], leaf.shape))).astype(leaf.dtype)  # noqa: E731
        first = jax.tree.map(lambda leaf: turn(leaf) if shake and has_gradient(leaf) else leaf, self.model.params)
        params, own = parted(self.case, first)
        owns = own and {"a": own, "b": jax.tree.map(lambda leaf: 1.25 * leaf, own)}
        own_states = owns and {task: self.bank_init(own) for task, own in owns.items()}
        return Stand(params, params, self.init(floats_of(params)), owns, own_states, self.model.model_state)

    def stepped(self, at: Stand, number: int) -> tuple[Stand, Given]:
        """What a step makes, and its loss, aux and gradients."""
        kind = kind_of(self.case, number)
        found = self.gradients(kind, at.before if self.case.get("delay") else at.params, at.owns, at.states, number)
        after, opt_state = self.update(at.params, found["grads"], at.opt_state, found["loss"], kind)
        owns, own_states = at.owns and {**at.owns}, at.own_states and {**at.own_states}
        for task, grads in found["own"].items() if trains_sets(self.case, kind) else ():
            owns[task], own_states[task] = self.bank_update(owns[task], grads, own_states[task])
        scale, fine = (2 * at.scale, 0) if at.fine == 2 else (at.scale, at.fine + 1)
        return Stand(after, at.params, opt_state, owns, own_states, found["states"], scale, fine), found

    def run(self, shake: float = 0.0, seed: int = 0) -> Given:
        """All that training makes; with ``shake`` from parameters that differ in their last digits."""
        at, made = self.begun(shake, seed), collections.defaultdict[str, list[Any]](list)
        for number in range(STEPS):
            before = at
            at, found = self.stepped(at, number)
            if number == 0:
                made |= self.at_first(found, before.params, before.owns, before.states)
            made["losses"].append(found["loss"])
            made["aux"].append(found["aux"])
            made["norms"].append(optax.global_norm(found["grads"]))
            if number == 1:
                made |= self.between(at.params, at.owns, at.states, number)
        return dict(made) | at.named(self.case)

    def at_first(self, found: Given, params: Any, owns: Any, states: Any) -> Given:
        """What other front doors than a pipeline make of the first parameters and batch."""
        case = self.case
        made: Given = {"value_and_grad": (found["loss"], found["grads"])} if case.at_front("value_and_grad") else {}
        if case.at_front("forward"):
            made["forwarded"] = self.applied(params, None, states, 0, key_of(case, 0))
        return made

    def between(self, params: Any, owns: Any, states: Any, number: int) -> Given:
        """What is asked for between two steps."""
        case, key, made = self.case, key_of(self.case, number), Given()
        own = owns and owns[tasks_of(case, number)[0]]
        if case.get("evaluate"):
            made["evaluated"] = self.gradients("loss", params, owns, states, number)["loss"]
        if case.get("evaluate other"):
            made["other"] = self.gradients("other", params, owns, states, number, alike=True)["loss"]
        if case.get("apply"):
            made["outputs"] = self.applied(params, own, states, number, key)
        if case.get("stream"):
            keys = [key if key is None else jax.random.fold_in(key, k) for k in range(2)]
            made["stream"] = [self.applied(params, own, states, number + k, keys[k]) for k in range(2)]
        return made

    def bank_init(self, own: Any) -> Any:
        return bank_optimizer().init(own)

    def bank_update(self, own: Any, grads: Any, state: Any) -> Any:
        updates, state = bank_optimizer().update(grads, state, own)
        return optax.apply_updates(own, updates), state


def sorted_by(items: list[Any], key: Callable[[int], int]) -> list[Any]:
    return [items[k] for k in sorted(range(len(items)), key=key)]


def bank_optimizer() -> Any:
    return optax.sgd(0.1, momentum=0.5)


# --- the pipeline ---


def over_model(path, shape):
    """The last axis of each parameter over the shards."""
    return PartitionSpec(*[None] * (len(shape) - 1), "model") if shape and shape[-1] % 2 == 0 else PartitionSpec()


def over_tensor(path, shape):
    return PartitionSpec(*["tensor" if name else None for name in over_model(path, shape)])


def where_of(case: Case) -> Given:
    devices, ranks, replicas = jax.devices(), case.get("ranks"), {"data_parallel": case.get("replicas") or 1}
    for name, axes, rule in (
        ("mesh", ("pipe", "data", "model"), over_model),
        ("renamed mesh", ("stage", "batch", "tensor"), over_tensor),
    ):
        if sizes := case.get(name):
            mesh = jax.make_mesh((ranks, *sizes), axes, devices=devices[: ranks * sizes[0] * sizes[1]])
            return {"mesh": mesh} | ({"shardings": rule} if sizes[1] > 1 else {})
    if (wide := case.get("wide")) is not None:
        supply, widths = iter(devices), [case.replicas * (1 + (k == wide % ranks)) for k in range(ranks)]
        return {"devices": [[*itertools.islice(supply, width)] for width in widths], "shardings": over_model} | replicas
    return replicas if case.get("replicas") else {}


def schedule_of(case: Case) -> Any:
    name = case.get("schedule")
    if name == "auto":
        return name
    sizes = {"stages_per_rank": case.per_rank} if SCHEDULES[name].varies else {}
    return make(name, num_ranks=case.get("ranks"), num_microbatches=case.get("microbatches"), **sizes)


def cuts_of(case: Case, model: Model) -> list[str]:
    """The names of as many layers behind the first as stages begin at, and of the head."""
    numbers = [k for k in range(len(model.layers) + len(case.without)) if k not in case.without]
    able, rng = [*(f"layer_{k}" for k in numbers[1:]), "head"], np.random.default_rng((case.seed, 3, case.get("cuts")))
    return [able[k] for k in sorted(rng.permutation(len(able))[: case.stages - 1])]


def options_of(case: Case, model: Model, params: Any) -> Given:
    plainly = {
        name: case.given[name] for name in ("balance", "shard", "fuse", "host", "delay", "threads", "hbm") if name in case.given
    }
    options = where_of(case) | plainly | {"schedule": schedule_of(case), "num_stages": case.stages}
    options |= {"num_microbatches": case.get("microbatches"), "has_state": bool(case.get("state"))}
    if case.get("remat"):
        options["remat"] = REMATS[case.get("remat")](case.stages)
    if case.get("cuts"):
        options["cuts"] = cuts_of(case, model)
    if case.get("loss_scale"):
        options["loss_scale"] = DynamicScale(scale=case.get("loss_scale"), growth_interval=2)
    if case.get("aux"):
        options |= {"has_aux": True, "reduce_aux": {"early": case.get("aux"), "hits": "sum", "rows": "join"}}
    if case.get("trains") is not None:
        options["trains"] = trains_of(case, params, "loss")
    if kind := case.get("weight"):
        options["weight"] = weight if kind == "function" else kind
    if case.get("reduction"):
        options["reduction"] = "sum"
    if case.get("shared"):
        options["broadcast"] = ("ramp",)
    if case.get("sizes"):
        options["max_shapes"] = 1
    return options


class Refused(Exception):  # noqa: N818  (no error)
    """jaxpp has said that a case cannot be, before a step."""


class WrongError(AssertionError):
    """A case is wrong."""


class Void(Exception):  # noqa: N818  (no error)
    """The plain loop makes NaN, with which nothing can be compared.

    XLA may compute what a maximum is taken of twice, each time rounded otherwise: then no element equals the maximum, and its
    gradient is 0 / 0. Or a step makes a loss that overflows in the next.
    """


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    try:
        yield
    except VerifyError:
        raise
    except JaxppError as error:
        raise Refused(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error


FRONT = set(inspect.signature(jaxpp.value_and_grad).parameters)


class Trained:
    """What a case makes, by a pipeline."""

    def __init__(self, case: Case, model: Model, watch: Callable[[Any], None] | None = None, *, begin: str = "init"):
        self.case, self.model, self.params = case, model, parted(case, model.params)
        self.losses = {kind: loss_of(case, model, kind, watch) for kind in ("loss", "other")}
        self.optimizer = optimizer_of(case, self.params[0])
        self.batches = [batch_of(case, number) for number in range(STEPS)]
        self.fn = signed(case, lambda *args: outputs_of(case, model)(*args)[0].mean(1))
        self.made = collections.defaultdict[str, list[Any]](list)
        with refusing():
            own = self.params[1]
            sets = own and {"a": own, "b": jax.tree.map(lambda leaf: 1.25 * leaf, own)}
            self.bank = sets and jaxpp.Bank(sets, bank_optimizer())
            self.pipes, self.first = self.opened(begin)
            if case.at_front("value_and_grad"):
                given = {name: value for name, value in options_of(case, model, self.params[0]).items() if name in FRONT}
                self.drop_in = jaxpp.value_and_grad(self.losses["loss"], allow_int=True, **given)
            if case.at_front("forward"):
                names = set(inspect.signature(jaxpp.Forward).parameters)
                given = {name: value for name, value in options_of(case, model, self.params[0]).items() if name in names}
                given |= {name: None for name in ("host", "shard") if given.get(name) not in ("params", "parameters")}
                self.forward = jaxpp.Forward(self.fn, **given | {"reduce_aux": "join"})
                self.brought = self.forward.init(self.params[0], self.batches[0])

    def opened(self, begin: str = "init") -> tuple[dict[str, Any], Any]:
        """A pipeline for each loss, and the first state, or its shapes if they begin with ``abstract_state``."""
        case, params = self.case, self.params[0]
        options = options_of(case, self.model, params)
        pipes = {"loss": jaxpp.Pipeline(self.losses["loss"], self.optimizer, bank=self.bank, **options)}
        if case.get("other"):
            trains = {"trains": trains_of(case, params, "other")} if case.get("trains") is not None else {}
            more = {name: options[name] for name in ("broadcast", "weight") if options.get(name, "auto") != "auto"}
            pipes["other"] = pipes["loss"].other(self.losses["other"], **trains, **more)
        first = (params, self.model.model_state) if case.get("state") else params
        made = (lambda key: first, jax.random.key(0)) if case.get("init") else (first,)
        state = getattr(pipes["loss"], begin)(*made, self.batches[0])
        if "other" in pipes:
            getattr(pipes["other"], begin)(state, self.batches[0])
        return pipes, state

    def rest(self, number: int) -> tuple[Any, ...]:
        key = key_of(self.case, number)
        return (self.batches[number],) if key is None else (self.batches[number], key)

    def task(self, number: int) -> Given:
        tasks = tasks_of(self.case, number)
        return {"task": tasks if self.case.get("bank") == "tasks" else tasks[0]} if self.bank else {}

    def run(self) -> Given:
        case, made, state = self.case, self.made, self.first
        if case.at_front("value_and_grad"):
            value, grads = self.drop_in(self.params[0], *self.rest(0))
            made["value_and_grad"] = value[0] if case.get("aux") else value, without_float0(grads)
        if case.at_front("forward"):
            made["forwarded"] = self.forward.apply(self.brought, *self.rest(0))
        for number in range(STEPS):
            pipe = self.pipes[kind_of(case, number)]
            held = jax.device_get(numbers(state)) if case.get("donate") is False else None
            new, metrics = pipe.step(state, *self.rest(number), **self.task(number), **({} if held is None else {"donate": False}))
            if held is not None and (found := differing({"kept": numbers(state)}, {"kept": held})):
                raise WrongError(f"donate=False has changed the state that it keeps: {found}")
            state = self.between(new, number) if number == 1 else new
            made["losses"].append(metrics.loss)
            made["aux"].append(metrics.aux)
            made["norms"].append(metrics.grad_norm)
        if unseen := list(self.unseen(state)):
            raise WrongError(f"an option has changed nothing, and nobody was told: {unseen}")
        return dict(made) | self.named(state)

    def named(self, state: Any) -> Given:
        """What there is to be compared of a state and of the sets."""
        case, bank = self.case, self.bank
        owns = bank and {task: bank.params(task) for task in "ab"}
        own_states = bank and {task: bank.opt_state(task) for task in "ab"}
        made: Given = {"params": state.params, "opt_state": state.opt_state, "own": owns, "own_states": own_states}
        made |= {
            "states": state.model_state if case.get("state") else None,
            "previous": state.previous if case.get("delay") else None,
        }
        return made | {"scale": state.loss_scale.scale if case.get("loss_scale") else None}

    def between(self, state: Any, number: int) -> Any:
        """What is asked for between two steps, and the state to go on with."""
        case, pipe, args, task = self.case, self.pipes["loss"], self.rest(number), self.task(number)
        if case.get("evaluate"):
            self.made["evaluated"] = pipe.evaluate(state, *args, **task).loss
        if case.get("evaluate other"):
            self.made["other"] = pipe.evaluate(state, *args, **task, loss_fn=self.losses["other"]).loss
        batch, *key = args
        alone = {"reduce_aux": "join"} | ({"task": tasks_of(case, number)[0]} if self.bank else {})
        if case.get("apply"):
            self.made["outputs"] = pipe.apply(state, batch, self.fn, *key, **alone)
        if case.get("stream"):
            self.made["stream"] = list(pipe.stream(state, self.batches[number:], self.fn, *key, **alone))
        if case.get("forecast"):
            first = (self.params[0], self.model.model_state) if case.get("state") else self.params[0]
            forecast = pipe.forecast(first, *args)
            if not all(peak > 0 for peak in forecast.peaks.values()):
                raise WrongError("a forecast of nothing")
            if not (str(forecast) and str(pipe.stages) and repr(state) and repr(pipe)):
                raise WrongError("nothing to print")
        if case.get("verify"):
            for each in self.pipes.values():
                each.verify(state, *args, **task)
        return self.kept(state, number)

    def kept(self, state: Any, number: int) -> Any:
        """A state that was written and is read again."""
        case = self.case
        if case.get("pickle"):
            state = pickle.loads(pickle.dumps(state))  # noqa: S301  (of this test's own)
        if case.get("orbax"):
            with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(f"{folder}/state", state)
                checkpointer.wait_until_finished()
                if not self.bank:
                    self.pipes, _ = self.opened()
                first = (self.params[0], self.model.model_state) if case.get("state") else self.params[0]
                state = checkpointer.restore(f"{folder}/state", self.pipes["loss"].abstract_state(first, self.batches[0]))
                state = dataclasses.replace(state, step=number + 1)
        return state

    def unseen(self, state: Any) -> Iterator[str]:
        """The options of which nothing is to be seen."""
        case = self.case
        arrays = [leaf for leaf in jax.tree.leaves(state.opt_state) if isinstance(leaf, jax.Array) and leaf.ndim]
        kinds = {leaf.sharding.memory_kind for leaf in arrays}
        if case.get("host") and arrays and "pinned_host" not in kinds:
            yield f"host={case.get('host')!r}, and the optimizer's state is in {sorted(map(str, kinds))} memory"
        shapes = {leaf.shape for leaf in jax.tree.leaves(state.params)}  # factored moments stay whole
        wide = [leaf for leaf in arrays if leaf.shape in shapes and leaf.shape[0] % case.replicas == 0]
        if case.get("shard") and case.replicas > 1 and wide and all(leaf.sharding.is_fully_replicated for leaf in wide):
            yield f"shard={case.get('shard')!r}, and each replica has all of the optimizer's state"
        if case.get("schedule") != "auto" and self.pipes["loss"].schedule.name != case.get("schedule"):
            yield f"the schedule is {self.pipes['loss'].schedule.name}"


def without_float0(grads: Any) -> Any:
    return jax.tree.map(lambda leaf: optax.MaskedNode() if leaf.dtype == jax.dtypes.float0 else leaf, grads)


def numbers(tree: Any) -> Any:
    """The leaves that are arrays of numbers, keys as what they are made of."""
    return [number_of(leaf) for leaf in jax.tree.leaves(tree)]


def number_of(leaf: Any) -> Any:
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.device_get(jax.random.key_data(leaf) if is_key else leaf))


# --- whether they are equal ---


def differing(found: Given, wanted: Given, noise: dict[str, list[float]] | None = None, digits: float = 1e-12) -> list[str]:
    """The leaves that differ by more than their scale allows, or rounding does."""
    lines = []
    for part, want in wanted.items():
        pairs = jax.tree_util.tree_leaves_with_path(want)
        got = jax.tree.leaves(found[part])
        if len(got) != len(pairs):
            lines.append(f"{part}: {len(got)} leaves instead of {len(pairs)}")
            continue
        for k, ((path, b), a) in enumerate(zip(pairs, got, strict=True)):
            x, y = number_of(a), number_of(b)
            name = f"{part}{jax.tree_util.keystr(path)}"
            if x.shape != y.shape:
                lines.append(f"{name}: of shape {x.shape} instead of {y.shape}")
                continue
            if not np.issubdtype(y.dtype, np.inexact):
                lines += [] if np.array_equal(x, y) else [f"{name}: {x.tolist()} instead of {y.tolist()}"]
                continue
            allowed = max(digits, 1e-5 if y.dtype == np.float32 else 0) * float(np.max(np.abs(y), initial=0, where=np.isfinite(y)))
            allowed = max(allowed, noise[part][k]) if noise is not None else allowed
            with np.errstate(invalid="ignore"):
                error = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0, np.abs(x - y))
            if not (error <= allowed).all():
                lines.append(f"{name}: off by {np.max(error):.3g}, allowed {allowed:.3g}, of {np.max(np.abs(y)):.3g}")
    return lines


def noise_of(run: Callable[[float, int], Given], wanted: Given, eps: float) -> dict[str, list[float]]:
    """How far rounding may move each leaf: several times what other last digits of the parameters do."""
    found = collections.defaultdict[str, list[float]](list)
    for seed in range(3):
        shaken = run(eps, seed)
        for part, want in wanted.items():
            sizes = []
            for a, b in zip(numbers(shaken[part]), numbers(want), strict=True):
                is_float = np.issubdtype(b.dtype, np.inexact)
                sizes.append(8 * float(np.max(np.abs(a - b), initial=0, where=np.isfinite(a - b))) if is_float else 0.0)
            found[part] = [max(pair) for pair in zip(sizes, found[part] or sizes, strict=True)]
    return found


def precision_of(model: Model) -> tuple[float, float]:
    """The share of a leaf by which results may differ, and the rounding of a number."""
    is_coarse = any(layer.kind is single for layer in model.layers)
    return (1e-5, float(np.finfo("float32").eps)) if is_coarse else (1e-12, float(np.finfo("float64").eps))


def judged(case: Case) -> str:
    """What became of a case: ``equal``, or what rounding was asked for; an exception if it was refused, is void, or is wrong."""
    model = model_of(case)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            found = Trained(case, model).run()
        except VerifyError as error:
            found = error
    plain = Plain(case, model, counts=not any("finds no count" in str(warning.message) for warning in told))
    wanted = plain.run()
    proves_nothing = isinstance(found, VerifyError) and "NaN compared with NaN" in str(found)
    if proves_nothing or not np.isfinite([*wanted["losses"], *wanted["norms"]]).all():
        raise Void("the plain loop makes NaN or infinity")
    if isinstance(found, VerifyError):
        raise found
    if case.get("optimizer") == "frozen" or case.get("trains") is not None or case.get("bank"):
        del wanted["norms"]  # of which some have no gradient, or another's
    digits, eps = precision_of(model)
    if not differing(found, wanted, digits=digits):
        return "equal"
    noise = noise_of(plain.run, wanted, eps)
    if lines := differing(found, wanted, noise, digits):
        raise WrongError("\n  ".join(["", *lines[:8], f"{len(lines)} leaves differ"]))
    return "equal but for rounding"


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """An exception after so many seconds; and the end of the process soon after, if it does not come."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_):
        raise WrongError(f"nothing for {seconds} seconds: a hang")

    old = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(2 * seconds, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def configured() -> Iterator[None]:
    """Double precision in every thread, also that of callbacks; and a compiler that is quick, of whose work nearly all is."""
    wanted = ["jax_enable_x64", *["jax_disable_most_optimizations"] * (AS_USERS not in os.environ)]
    try:
        for name in wanted:
            jax.config.update(name, True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name in wanted:
            jax.config.update(name, False)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """``equal``, ``refused``, ``void`` or ``failed``, and what was said."""

    status: str
    said: str
    kind: str = ""


def outcome(case: Case) -> Outcome:
    with configured():
        try:
            with limited(SECONDS):
                return Outcome("equal", judged(case))
        except Refused as error:
            return Outcome("refused", str(error))
        except Void as error:
            return Outcome("void", str(error))
        except Exception as error:  # noqa: BLE001  (whatever it is, the case is wrong)
            return Outcome("failed", "".join(traceback.format_exception(error))[-4000:], type(error).__name__)


def smallest(case: Case, failed: Outcome, seconds: float = 300) -> Case:
    """The case without options and layers that it fails without, in the same way."""
    end, names = time.monotonic() + seconds, list(case.given)

    def fails(smaller: Case) -> bool:
        found = outcome(smaller)
        return found.status == "failed" and found.kind == failed.kind

    for name in names:
        smaller = dataclasses.replace(case, given={each: value for each, value in case.given.items() if each != name})
        if smaller.get(name) == case.get(name) or (time.monotonic() < end and fails(smaller)):
            case = smaller
    with configured():
        number = len(model_of(case).layers)
    for k in range(number):
        smaller = dataclasses.replace(case, without=(*case.without, k))
        if time.monotonic() < end and fails(smaller):
            case = smaller
    return case


def tally(seeds: Iterable[int]) -> collections.Counter[str]:
    """How many cases are equal, are refused and why, and are wrong."""
    counts = collections.Counter[str]()
    for seed in seeds:
        found = outcome(drawn(seed))
        counts[f"{found.status}: {found.said.split('=')[0].splitlines()[0]}"] += 1
    return counts


def compiled_as_users_do(case: Case) -> str:
    """The status of a case in a process of its own, in which XLA does what it does for users."""
    run = f"from tests.end_to_end.test_any_options import *; print(outcome({case!r}).status)"
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", AS_USERS: "1"}
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", run], cwd=root, env=environment, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def check(case: Case) -> str:
    """Judge a case; if it is wrong, an AssertionError with the smallest like it.

    Without its optimisations XLA may compute one value twice in a program, and otherwise the second time, so that a maximum is none
    of its operands. A case whose numbers differ, by the same each time, is void if it is equal where XLA compiles as for users.
    """
    found = outcome(case)
    differs = found.kind in ("WrongError", "VerifyError") and outcome(case) == found  # what two runs make otherwise is a race
    if differs and compiled_as_users_do(case) == "equal":
        return f"void: equal where XLA optimises; here {found.said.splitlines()[-1]}"
    if found.status == "failed":
        small = smallest(case, found)
        raise AssertionError(
            f"seed {case.seed} is wrong\n{case}\nand smaller\n{small}\n{outcome(small).said}\nat first\n{found.said}"
        )
    return f"{found.status}: {found.said}"


SHORT = 211, 228
KEPT = 401276, 400781, 401369
"""Of the cases of long runs, those that told something: a norm with the digits of float32, a sum beside another loss's mean, a
parameter that waits in host memory beside a rank of another width."""


def seeds() -> Iterator[Any]:
    """A few that are quick, of which none is refused; then more, of which a sixth is in the long tier."""
    yield from SHORT
    yield from (pytest.param(seed, marks=pytest.mark.long) for seed in KEPT)
    more = [seed for seed in range(SEEDS) if seed not in SHORT]
    for k, seed in enumerate(more):
        yield pytest.param(seed, marks=pytest.mark.long if k < 240 else pytest.mark.slow)


@pytest.mark.parametrize("seed", list(seeds()))
def test_any_options_on_any_model_train_as_on_one_device_or_are_refused(seed):
    said = check(drawn(seed))
    assert seed not in SHORT or "equal" in said


@pytest.mark.long
def test_a_state_passes_between_microbatches_of_both_sizes_of_another_loss():
    given = {"microbatches": 4, "balance": "cost", "state": True, "uneven": 2, "evaluate other": True}
    assert check(Case(500435, given, (1,))) == "equal: equal"  # cut at other places, one size reads before the other has made


@pytest.mark.slow  # in two processes
def test_a_maximum_that_is_none_of_its_operands_without_optimisations_is_told_from_a_fault():
    assert check(drawn(500157)).startswith(("equal", "void: equal where XLA optimises"))


def test_every_option_occurs_often_and_beside_every_other():
    cases = [drawn(seed).given for seed in range(SEEDS)]
    counts = collections.Counter(name for given in cases for name in given)
    assert all(counts[name] > 60 for name in (*OPTIONS, *VERBS))
    found = {frozenset((a, b)) for given in cases for a in given for b in given if a < b}
    apart = {frozenset((a, b)) for group in ALONE for a in group for b in group if a < b}
    assert found >= {frozenset((a, b)) for a in OPTIONS for b in OPTIONS if a < b} - apart
    assert {given["optimizer"] for given in cases} == {*OPTIMIZERS}
    assert {given["schedule"] for given in cases} == {*SCHEDULES, "auto"}
