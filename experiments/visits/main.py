"""What can a card train that is smaller than the model? Plans of steps whose state waits in host memory; see README.md beside this.

``python -m experiments.visits``

Each model is planned on GPUs that only compile (``jaxpp.target``): shapes are traced, every program of the step is compiled, and
nothing runs or is allocated. A block is a stage; ``looped-bfs`` runs all microbatches of a stage before its rank turns to the next.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

import jaxpp
from experiments.options import ConfigError, check_names, check_numbers
from experiments.results import Findings, columns, command
from jaxpp.runtime.progress import progress
from jaxpp.tables import bytes_in_words
from jaxpp.types import Batch, Params
from models.gpt import GPT

__all__ = ["MODELS", "Config", "Result", "Row", "main", "plan", "run", "table"]

DESCRIPTION = "Plan steps of models that are larger than the GPUs: bytes on devices and on the host, and the least time of a step."


class Size(NamedTuple):
    """A decoder: of its blocks, each has 12 x width x width parameters."""

    width: int
    depth: int
    heads: int
    vocabulary: int = 50257


MODELS = {"8b": Size(4096, 40, 32), "32b": Size(6656, 60, 52), "tiny": Size(16, 4, 2, 32)}


@dataclass(frozen=True)
class Config:
    """What is planned.

    Attributes:
        models: by name.
        gpus: how many; each number is a row of the table for each model. They divide the blocks, or the blocks are shared unevenly.
        target: the GPU, as ``jaxpp.target`` calls it; empty for this machine's own devices, of which no times are known.
        microbatches: of a step.
        sequences: in a microbatch.
        length: tokens of a sequence.
        json: file to add the line of results to.
    """

    models: tuple[str, ...] = ("8b", "32b")
    gpus: tuple[int, ...] = (1, 2, 8)
    target: str = "rtx-4090"
    microbatches: int = 8
    sequences: int = 4
    length: int = 1024
    json: Path | None = None

    def __post_init__(self):
        check_numbers(self)
        check_names("models", self.models, MODELS, none=False)
        if wrong := [name for name in self.models if any(MODELS[name].depth < count for count in self.gpus)]:
            raise ConfigError(f"--models {' '.join(wrong)}: each GPU needs a block. Fix: pass fewer --gpus.")

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.microbatches * self.sequences * self.length


@dataclass(frozen=True)
class Row:
    """A model on some GPUs.

    Attributes:
        model: its name.
        gpus: how many.
        params: how many.
        peak: bytes of the fullest GPU.
        hosted: bytes in host memory, at most: the state, the new values of a stage beside it, and inputs that wait.
        brought: bytes that a step copies to all GPUs.
        taken: and back.
        seconds: the least of a step; None if the numbers of the devices are not known.
        link: what the copies take of the busiest half of a link.
        added: what of that no work hides.
        bubble: idle time of the ranks, of all time.
    """

    model: str
    gpus: int
    params: int
    peak: int
    hosted: int
    brought: int
    taken: int
    seconds: float | None = None
    link: float | None = None
    added: float | None = None
    bubble: float | None = None


@dataclass(frozen=True)
class Result(Findings):
    """What was planned, and what came out.

    Attributes:
        config: what was planned.
        rows: one for each model and number of GPUs.
    """

    config: Config
    rows: tuple[Row, ...]


def plan(config: Config, name: str, gpus: int) -> tuple[jaxpp.Pipeline, Params, Batch]:
    """The pipeline of a model, and the shapes of its parameters and of a batch."""
    size = MODELS[name]
    model = GPT(
        vocab_size=size.vocabulary,
        max_length=config.length,
        width=size.width,
        depth=size.depth,
        num_heads=size.heads,
        dropout=0.0,
        dtype="bfloat16",
        head=False,
        attention="cudnn" if config.target else "flax",
        scan=True,
    )

    def loss_fn(params: Params, tokens: Batch) -> jax.Array:
        hidden = cast("jax.Array", model.apply({"params": params}, tokens[:, :-1]))
        return jaxpp.linear_cross_entropy(hidden, params["embed"]["embedding"], tokens[:, 1:]).mean()

    stages = size.depth // gpus * gpus
    order = jaxpp.schedule.make("looped-bfs", gpus, config.microbatches, stages_per_rank=stages // gpus)
    pipe = jaxpp.Pipeline(
        loss_fn,
        optax.adamw(1e-4),
        num_stages=stages,
        num_microbatches=config.microbatches,
        schedule=order,
        cuts=[f"h[{size.depth * k // stages}]" for k in range(1, stages)],
        devices=jaxpp.target(config.target, gpus) if config.target else jax.devices()[:gpus],
        remat=jaxpp.Offload(recompute=True),
        host="params",
    )
    plain = model.clone(attention="flax")  # parameters are made where there is no cuDNN
    shapes = jax.eval_shape(plain.init, jax.random.key(0), jnp.zeros((1, 8), int))["params"]
    return pipe, shapes, jax.ShapeDtypeStruct((config.microbatches * config.sequences, config.length + 1), "int32")


def run(config: Config) -> Result:
    """Plan every model on every number of GPUs."""
    rows = []
    with progress([(name, count) for name in config.models for count in config.gpus], desc="plans") as bar:
        for name, count in bar:
            rows.append(_row(name, count, *plan(config, name, count)))
    return Result(config=config, rows=tuple(rows))


def _row(name: str, gpus: int, pipe: jaxpp.Pipeline, shapes: Params, tokens: Batch) -> Row:
    found = pipe.forecast(shapes, tokens)
    visits, params = found.liveness.visiting.values(), sum(leaf.size for leaf in jax.tree.leaves(shapes))
    moved = sum(each.brought for each in visits), sum(each.taken for each in visits)
    row = Row(name, gpus, params, max(found.peaks.values()), sum(found.hosted.values()), *moved)
    if found.bound is None or found.bound.visits is None:
        return row
    bound, visit = found.bound, found.bound.visits
    return replace(row, seconds=bound.seconds, link=visit.link, added=visit.added, bubble=bound.bubble_fraction)


def table(result: Result) -> str:
    """A row for each plan."""
    head = ["model", "GPUs", "parameters", "on a GPU", "on the host", "in", "out"]
    timed = ["a step, at least", "copies", "not hidden", "tokens/s, at most"]
    known = any(row.seconds is not None for row in result.rows)
    cells = [[*head, *timed * known]]
    for row in result.rows:
        sizes = [bytes_in_words(each) for each in (row.peak, row.hosted, row.brought, row.taken)]
        times = []
        if row.seconds is not None and row.link is not None and row.added is not None:
            times = [f"{each:.3g} s" for each in (row.seconds, row.link, row.added)]
            times.append(f"{result.config.tokens / row.seconds:,.0f}")
        cells.append([row.model, str(row.gpus), f"{row.params / 1e9:.3g} B", *sizes, *times])
    config = result.config
    on = config.target or "this machine's devices"
    said = f'{config.microbatches} microbatches of {config.sequences} x {config.length} tokens a step, on {on}, host="params"'
    return "\n".join([*columns(cells), "", said])


def main() -> None:
    """Read the command line, run, print the table, and write the line of JSON."""
    command("visits", Config, DESCRIPTION, run, table)
