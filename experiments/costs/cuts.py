"""Where models are cut of which not every layer learns, beside the best cut into whole layers by products counted by hand.

A layer is one matrix product. Its forward costs 1; the cotangent of its input 1, where something before it learns; the gradient of
its weights 1, where they learn. The best cut is found by trying every cut into whole layers, on the clock of the schedule.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.devices import ensure_devices
from experiments.options import check_numbers, check_writable
from experiments.results import Findings, columns, command
from jaxpp.engine.layout import lay_out
from jaxpp.options import Options
from jaxpp.runtime.compile import Programs
from jaxpp.schedule import Schedule, make, simulate
from jaxpp.stages.jaxpr import multiplies

__all__ = ["Config", "Result", "Row", "cases", "main", "run", "table"]

DESCRIPTION = "Cut models of which not every layer learns, beside the best cuts into whole layers."
WIDTH, ROWS = 64, 64  # features of a layer, examples of a microbatch
Costs = tuple[float, float, float]  # products of F, I and W


class Case(NamedTuple):
    """A model, and what its layers cost."""

    name: str
    loss: Callable[..., Any]
    params: Any
    labels: Any  # "train" or "freeze" for each leaf
    layers: tuple[Costs, ...]  # in the order in which they run


@dataclass(frozen=True)
class Row:
    """One case: the largest stage and the step, in products, of a cut by cost, by FLOPs, and of the best cut into whole layers."""

    name: str
    largest: tuple[float, float, float]
    step: tuple[float, float, float]


def cases(count: int = 16) -> list[Case]:
    """The cases, of so many layers."""
    return [
        _chain("all learn", [True] * count),
        _chain("first 12 frozen", [False] * 12 + [True] * (count - 12)),
        _chain("layers 1 to 11 frozen", [True] + [False] * 11 + [True] * (count - 12)),
        _chain("last 12 frozen", [True] * (count - 12) + [False] * 12),
        _chain("linear probe", [False] * (count - 1) + [True]),
        _chain("frozen encoder, decoder", [False] * (count // 2) + [True] * (count // 2)),
        _lora(count),
        _distillation(count // 2),
    ]


@dataclass(frozen=True)
class Config:
    """How the models are cut.

    Attributes:
        stages: pipeline stages.
        microbatches: parts of a batch.
        schedule: order of the actions, with one stage a rank.
        json: file to add the line of results to.
    """

    stages: int = 4
    microbatches: int = 8
    schedule: str = "1f1b"
    json: Path | None = None

    def __post_init__(self):
        check_numbers(self)


@dataclass(frozen=True)
class Result(Findings):
    """What a run found.

    Attributes:
        config: what was asked for.
        rows: one a case.
    """

    config: Config
    rows: tuple[Row, ...]


def run(config: Config) -> Result:
    """A row for each case.

    Raises:
        ConfigError: a file that cannot be written.
        JaxppError: a schedule that does not exist at these sizes.
    """
    check_writable("--json", config.json)
    ensure_devices(config.stages)
    order = make(config.schedule, num_ranks=config.stages, num_microbatches=config.microbatches)
    return Result(config, tuple(_row(case, order) for case in cases()))


def table(result: Result) -> str:
    """The result as text: a row a case."""
    cells = [["layers", "largest stage, by cost", "by FLOPs", "best", "step, by cost", "by FLOPs", "best"]]
    cells += [[row.name, *(f"{number:g}" for number in (*row.largest, *row.step))] for row in result.rows]
    notes = [
        "in products of layers: F 1, I 1 where something before learns, W 1 where the layer learns",
        "best: of all cuts into whole layers, for the largest stage and for the step each its own",
    ]
    return "\n".join([*columns(cells), "", *notes])


def main() -> None:
    """Read the command line, run, print the table, and write the line of JSON."""
    command("costs.cuts", Config, DESCRIPTION, run, table)


def _layer(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ weights)


def _square(width: int = WIDTH, height: int = WIDTH) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((height, width), jnp.float32)


def _products(learns: Sequence[bool]) -> tuple[Costs, ...]:
    return tuple((1, float(any(learns[:k])), float(learn)) for k, learn in enumerate(learns))


def _chain(name: str, learns: Sequence[bool]) -> Case:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        for weights in params:
            x = _layer(weights, x)
        return jnp.mean(x**2)

    return Case(name, loss, [_square() for _ in learns], [_label(each) for each in learns], _products(learns))


def _lora(count: int, rank: int = 1) -> Case:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        for base, down, up in params:
            x = jnp.tanh(x @ base + (x @ down) @ up)
        return jnp.mean(x**2)

    params = [(_square(), _square(rank, WIDTH), _square(WIDTH, rank)) for _ in range(count)]
    labels = [("freeze", "train", "train") for _ in range(count)]
    return Case("LoRA, frozen base", loss, params, labels, tuple((1, float(k > 0), 0) for k in range(count)))


def _distillation(count: int) -> Case:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        teacher = student = x
        for weights in params["teacher"]:
            teacher = _layer(weights, teacher)
        for weights in params["student"]:
            student = _layer(weights, student)
        return jnp.mean((student - teacher) ** 2)

    params = {tower: [_square() for _ in range(count)] for tower in ("teacher", "student")}
    labels = {"teacher": ["freeze"] * count, "student": ["train"] * count}
    layers = ((1, 0, 0),) * count + tuple((1, float(k > 0), 1) for k in range(count))
    return Case("distillation, frozen teacher", loss, params, labels, layers)


def _label(learns: bool) -> str:
    return "train" if learns else "freeze"


def _row(case: Case, schedule: Schedule) -> Row:
    by_cost, by_flops = (_stages(case, schedule, balance) for balance in ("cost", "flops"))
    size = len(case.layers)
    every = itertools.combinations(range(1, size), schedule.num_stages - 1)
    groups = ([case.layers[a:b] for a, b in itertools.pairwise([0, *cuts, size])] for cuts in every)
    wholes = [[_added(layers) for layers in stages] for stages in groups]
    largest = _largest(by_cost), _largest(by_flops), min(map(_largest, wholes))
    step = _step(by_cost, schedule), _step(by_flops, schedule), min(_step(stages, schedule) for stages in wholes)
    return Row(case.name, largest, step)


def _added(layers: Sequence[Costs]) -> Costs:
    forward, input_grad, weight_grad = map(sum, zip(*layers, strict=True))
    return forward, input_grad, weight_grad


def _largest(stages: Sequence[Costs]) -> float:
    return max(map(sum, stages))


def _step(stages: Sequence[Costs], schedule: Schedule) -> float:
    forward, input_grad, weight_grad = zip(*stages, strict=True)
    return float(simulate(schedule, forward=forward, input_grad=input_grad, weight_grad=weight_grad).makespan)


def _stages(case: Case, schedule: Schedule, balance: str) -> list[Costs]:
    """Products of F and of the whole backward of each stage, counted in the equations of its programs; without those of LoRA."""
    optimizer = optax.multi_transform({"train": optax.sgd(0.1), "freeze": optax.set_to_zero()}, case.labels)
    options = Options.of(
        case.loss,
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        schedule=schedule,
        devices=jax.devices()[: schedule.num_ranks],
        balance=balance,
    )
    batch = jax.ShapeDtypeStruct((schedule.num_microbatches * ROWS, WIDTH), jnp.float32)
    _, _, cut = lay_out(options, optimizer, (case.params,), batch, None, Programs())
    found: list[Costs] = []
    for code in cut.stages:
        programs = [code.forward, *([code.backward["B"].then] if "B" in code.backward else [])]
        counts = [_counted(jax.make_jaxpr(program.function)(*program.avals).jaxpr) for program in programs]
        found.append((counts[0], 0.0, sum(counts[1:])))
    return found


def _counted(jaxpr: Any) -> float:
    """Matrix products of two squares or of rows and a square, in a program."""
    sizes = [np.prod(eqn.outvars[0].aval.shape) for eqn in jaxpr.eqns if multiplies(eqn) and _is_large(eqn)]
    return float(len(sizes))


def _is_large(eqn: Any) -> bool:
    return all(min(atom.aval.shape) >= WIDTH for atom in (*eqn.invars, *eqn.outvars))


if __name__ == "__main__":
    main()
