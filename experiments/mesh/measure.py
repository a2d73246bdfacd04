"""One model on one mesh: trained beside the oracle, verified, and every byte that its devices communicate counted."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

import jaxpp
from experiments.mesh.plain import Trained, furthest
from experiments.mesh.problems import Problem
from jaxpp.errors import VerifyError
from jaxpp.lowering.plan import Instruction
from jaxpp.observe.collectives import Collectives
from jaxpp.stages.program import Role

__all__ = ["AXES", "Row", "Sent", "Shape", "Told", "measure"]

AXES = ("pipe", "data", "model")


class Shape(NamedTuple):
    """How many devices there are along each axis."""

    pipe: int
    data: int
    model: int

    def __str__(self) -> str:
        return "x".join(map(str, self))

    @property
    def mesh(self) -> Mesh:
        """Such a mesh, of the first devices."""
        return Mesh(np.array(jax.devices()[: int(np.prod(self))]).reshape(self), AXES)


class Sent(NamedTuple):
    """What crosses between stages in a step, in bytes that arrive, summed over all devices.

    Attributes:
        activations: forward.
        cotangents: and back.
        tied: parameters that a later stage uses too, and their gradients.
        scalars: for the optimizer and the gradient's norm.
    """

    activations: int = 0
    cotangents: int = 0
    tied: int = 0
    scalars: int = 0


class Told(NamedTuple):
    """The collectives over an axis in a step.

    Attributes:
        times: how many, over all ranks.
        num_bytes: of their operands, summed over all devices.
    """

    times: int
    num_bytes: int


@dataclass(frozen=True)
class Row:
    """What one model did on one mesh.

    Attributes:
        model: which.
        shape: of the mesh.
        microbatches: of a replica.
        losses: of each step.
        loss_apart: the largest relative difference of a loss from the oracle's.
        params_apart: that of the parameters after the last step.
        equal: whether ``pipe.verify`` then found that the next step equals the plain one.
        reason: what it said if not.
        params: bytes on each device.
        optimizer: bytes of the optimizer state on each device.
        sent: between stages.
        data: the collectives over ``data``.
        model_axis: the collectives over ``model``.
        reduces: all-reduces in the forward of one microbatch, of each stage.
        ratio: time of a step over that of the plain one.
        sums: the collectives by axes and kind, in bytes on one device of each rank.
        table: all of them, as printed.
        shard: what the replicas divide between them; empty if each holds all.
    """

    model: str
    shape: Shape
    microbatches: int
    losses: tuple[float, ...]
    loss_apart: float
    params_apart: float
    equal: bool
    reason: str
    params: tuple[int, ...]
    optimizer: tuple[int, ...]
    sent: Sent
    data: Told
    model_axis: Told
    reduces: tuple[int, ...]
    ratio: float
    sums: Any
    table: str
    shard: str = ""

    @property
    def beyond(self) -> int:
        """Bytes over ``data`` that are not gradients of the parameters that the devices hold."""
        return self.data.num_bytes - sum(self.params) if self.shape.data > 1 else 0

    @property
    def around(self) -> int:
        """Bytes that all devices together send over ``data`` alone, if its collectives go around a ring."""
        replicas, devices = self.shape.data, self.shape.data * self.shape.model
        share = (replicas - 1) / replicas
        rounds = {"all-reduce": 2 * share, "reduce-scatter": share, "all-gather": replicas - 1}
        return round(devices * sum(rounds[each["kind"]] * each["num_bytes"] for each in self.sums if each["axes"] == ["data"]))

    @property
    def around_at_least(self) -> int:
        """What of it is gradients that are summed and parameters that are gathered, by the formula of the guide."""
        replicas = self.shape.data
        times = self.microbatches + 1 if self.shard == "gradients" else 2
        whole = sum(self.params) * (replicas if self.shard == "parameters" else 1)
        return round(times * (replicas - 1) / replicas * whole)

    @property
    def by_axis(self) -> tuple[int, int, int]:
        """Bytes along each of ``AXES``."""
        return sum(self.sent), self.data.num_bytes, self.model_axis.num_bytes


def measure(  # noqa: PLR0913, PLR0917  (what a row is of)
    model: str,
    problem: Problem,
    shape: Shape,
    optimizer: optax.GradientTransformation,
    num_microbatches: int,
    keys: tuple[jax.Array, jax.Array],
    oracle: Trained,
    plain: Callable[..., Any],
    rounds: int,
    shard: str = "",
) -> Row:
    """Train as the oracle was, compare, and count.

    Args:
        model: its name.
        problem: what it learns.
        shape: of the mesh.
        optimizer: the same as the oracle's.
        num_microbatches: of all replicas together.
        keys: of the parameters and of the training.
        oracle: what one device came to.
        plain: its step.
        rounds: how often a step of each kind is timed, by turns.
        shard: what the replicas divide between them, if anything.
    """
    pipe = jaxpp.Pipeline(
        problem.loss_fn,
        optimizer,
        num_stages=shape.pipe,
        num_microbatches=num_microbatches // shape.data,
        mesh=shape.mesh,
        shardings=problem.shardings,
        shard=shard or None,
    )
    steps, losses = len(oracle.losses), []
    state = pipe.init(problem.init, keys[0], problem.batch(0))
    for k in range(steps):
        state, metrics = pipe.step(state, problem.batch(k), jax.random.fold_in(keys[1], k))
        losses.append(float(metrics.loss))
    params_apart = furthest(jax.device_get(state.params), oracle.params)
    batch, key = problem.batch(steps), jax.random.fold_in(keys[1], steps)
    reason = differs(pipe, state, batch, key)
    collectives, each = pipe.collectives(batch, key), shape.data * shape.model
    forwards = [collectives.count("all-reduce", program=f"F of stage {stage.index}") for stage in pipe.stages]
    held = bytes_on_devices(state.params, shape), bytes_on_devices(state.opt_state, shape)
    sent = bytes_sent(pipe, state, batch, key)
    return Row(
        model=model,
        shape=shape,
        microbatches=num_microbatches // shape.data,
        losses=tuple(losses),
        loss_apart=furthest(losses, list(oracle.losses)),
        params_apart=params_apart,
        equal=not reason,
        reason=reason,
        params=held[0],
        optimizer=held[1],
        sent=sent,
        data=_over(collectives, "data", each),
        model_axis=_over(collectives, ("model",), each),
        reduces=tuple(count * shape.data // num_microbatches for count in forwards),
        ratio=_ratio(pipe, state, plain, (jax.device_put(oracle.params), optimizer), (batch, key), rounds),
        sums=json.loads(collectives.to_json())["sums"],
        table=str(collectives),
        shard=shard,
    )


def differs(pipe: jaxpp.Pipeline, state: jaxpp.State, batch: Any, key: jax.Array) -> str:
    """What ``pipe.verify`` has to say, nothing if the next step equals the plain one."""
    try:
        pipe.verify(state, batch, key)
    except VerifyError as error:
        return str(error)
    return ""


def bytes_on_devices(tree: Any, shape: Shape) -> tuple[int, ...]:
    """Bytes that each device of the mesh holds of a tree."""
    found = dict.fromkeys(shape.mesh.devices.flat, 0)
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            found[shard.device] += shard.data.nbytes
    return tuple(found.values())


def bytes_sent(pipe: jaxpp.Pipeline, state: jaxpp.State, batch: Any, key: jax.Array) -> Sent:
    """Run a step, and look at what arrives by each send from one stage to another; the state is left as it is."""
    engine = pipe.engine
    _, lowered = engine.plan("update", batch, key, donate=False)
    lines, found = iter(lowered.bound.lines), dict.fromkeys(Sent._fields, 0)

    def look(instruction: Instruction, slots: Sequence[Any]) -> None:
        line = next(lines)
        if instruction.about.sends and line.inputs[0].stage >= 0:  # the batch and the key come from the host
            arrived = slots[instruction.outputs[0]]
            found[_KINDS.get(line.inputs[0].ref.role, "scalars")] += sum(s.data.nbytes for s in arrived.addressable_shards)

    engine.run("update", pipe.engine.leaves(state.held), batch, key, donate=False, observer=look)
    return Sent(**found)


_KINDS = {Role.ACTIVATION: "activations", Role.COTANGENT: "cotangents", Role.PARAM: "tied", Role.GRAD: "tied"}


def _over(collectives: Collectives, axes: Any, devices: int) -> Told:
    """The collectives over an axis; of ``num_bytes`` there are as many as devices in a rank."""
    return Told(collectives.count(axes=axes), devices * collectives.num_bytes(axes=axes))


def _ratio(pipe: Any, state: Any, plain: Callable[..., Any], start: tuple[Any, Any], rest: tuple[Any, Any], rounds: int) -> float:
    """The median of the rounds' ratios; the first round does not count."""
    params, optimizer = start
    states: list[Any] = [state, (params, optimizer.init(params))]
    ratios = []
    for _ in range(rounds + 1):
        seconds = []
        for k, step in enumerate((pipe.step, plain)):
            began = time.perf_counter()
            states[k], reported = step(states[k], *rest)
            jax.block_until_ready((states[k], reported))
            seconds.append(time.perf_counter() - began)
        ratios.append(seconds[0] / seconds[1])
    return float(np.median(ratios[1:]))
