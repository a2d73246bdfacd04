"""Pipe x data x model on eight devices: equal to one device? And what does each axis communicate? See README.md.

Bytes are counted, and do not depend on the device. Times do: on forced CPU devices they say what eight of them cost on a few cores.
"""

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
import optax

from experiments.devices import ensure_devices
from experiments.mesh.figure import Bar, axes_figure
from experiments.mesh.measure import Row, Shape, measure
from experiments.mesh.plain import train_plainly
from experiments.mesh.problems import Problem, gpt, mlp
from experiments.options import ConfigError, Flag, check_figure, check_multiple, check_names, check_numbers, figure_file, flag
from experiments.plain import plain_step
from experiments.results import Findings, columns, command, noted
from jaxpp.options import SHARDS
from jaxpp.runtime.progress import progress

__all__ = ["MODELS", "Config", "ConfigError", "Result", "every_mesh", "main", "run", "table"]

DESCRIPTION = "Train on meshes of pipe x data x model devices, compare with one device, and count what each axis communicates."
MODELS = ("gpt", "mlp")
RATE, EPSILON = 1e-3, 1e-5
"""Of adamw. A gradient that is rounding alone (an attention key's bias) must not be divided by its own size."""


@dataclass(frozen=True)
class Config:
    """The models, the meshes and the sizes.

    Attributes:
        models: gpt, mlp, or both.
        meshes: pipe x data x model, such as 2x2x2; each of ``devices`` devices.
        shards: what replicas divide between them, on the mesh with the most axes: rows of a further table; none for no table.
        every: all meshes there are instead, each axis a power of two.
        devices: in a mesh.
        steps: trained on each mesh.
        microbatches: of a step, over all replicas; the same on every mesh, so that all compute the same step.
        batch: sequences, or images, a step.
        gpt_width: features of the GPT's residual stream.
        gpt_depth: its blocks.
        gpt_heads: attention heads a block.
        gpt_length: bytes of a sequence.
        dropout: rate, of the GPT; above 0 it takes longer to compile.
        mlp_width: features of each hidden layer of the MLP.
        mlp_depth: its hidden layers; there is one layer more, the head.
        rounds: how often a step is timed.
        seed: of parameters, batches and dropout.
        dtype: of the parameters, and what is computed in. In float64 the differences from one device are those of an error, not of
            rounding: Adam makes steps of what is left of gradients that cancel, such as that of an attention key's bias.
        figure: file for the figure; its folder is made if there is none.
        no_figure: draw none.
        json: file to add the line of results to.
    """

    models: tuple[str, ...] = MODELS
    meshes: tuple[str, ...] = ("4x2x1", "2x4x1", "2x2x2", "1x2x4", "1x8x1")
    shards: tuple[str, ...] = ("optimizer", "gradients", "parameters")
    every: Flag = False
    devices: int = 8
    steps: int = 4
    microbatches: int = 8
    batch: int = 16
    gpt_width: int = 64
    gpt_depth: int = 4
    gpt_heads: int = 8
    gpt_length: int = 32
    dropout: float = 0.0
    mlp_width: int = 128
    mlp_depth: int = 8
    rounds: int = 3
    seed: int = 0
    dtype: Literal["float32", "float64"] = "float32"
    figure: Path = Path("experiments/mesh/out/mesh.png")
    no_figure: Flag = False
    json: Path | None = None

    def __post_init__(self):
        check_names("models", self.models, MODELS, none=False)
        check_names("shards", self.shards, SHARDS)
        check_numbers(self)
        check_multiple(self, "batch", "microbatches", "microbatches are of one size here")
        check_multiple(self, "gpt_width", "gpt_heads", "heads share the width equally")
        _check_shapes(self)
        check_figure(self)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The meshes to run."""
        return every_mesh(self.devices) if self.every else tuple(Shape(*map(int, mesh.split("x"))) for mesh in self.meshes)


@dataclass(frozen=True)
class Result(Findings):
    """What a run found.

    Attributes:
        config: what was asked for.
        oracles: the losses of each model on one device.
        rows: one a model and mesh.
        divided: one a model and what its replicas divide.
        figure: the file, if one was drawn.
    """

    config: Config
    oracles: dict[str, tuple[float, ...]]
    rows: tuple[Row, ...]
    divided: tuple[Row, ...]
    figure: Path | None

    def to_json(self) -> str:
        """One line: everything but the tables of collectives, of which it has the sums."""
        kept = dataclasses.asdict(self)
        for found, row in zip((*kept["rows"], *kept["divided"]), (*self.rows, *self.divided), strict=True):
            del found["table"]
            found["shape"], found["beyond"] = str(row.shape), row.beyond
            found |= {name: getattr(row, name)._asdict() for name in ("sent", "data", "model_axis")}
        return json.dumps(kept, default=str)


def every_mesh(devices: int) -> tuple[Shape, ...]:
    """All ways to write a number as pipe x data x model, each a power of two, the longest pipes first.

    Example:
        >>> [str(shape) for shape in every_mesh(4)]
        ['4x1x1', '2x2x1', '2x1x2', '1x4x1', '1x2x2', '1x1x4']
    """
    sizes = [2**k for k in reversed(range(devices.bit_length())) if devices % 2**k == 0]
    shapes = (Shape(pipe, data, devices // (pipe * data)) for pipe in sizes for data in sizes)
    return tuple(shape for shape in shapes if math.prod(shape) == devices and shape.model.bit_count() == 1)


def run(config: Config) -> Result:
    """Train each model on one device, then on every mesh; compare, count, and draw.

    Raises:
        ConfigError: a file that cannot be written, or fewer devices than a mesh has.
        JaxppError: a model that cannot be cut into so many stages, or not sharded so; a note names model and mesh.
    """
    figure = figure_file("mesh", config)
    ensure_devices(config.devices)
    if len(jax.devices()) < config.devices:
        raise ConfigError(
            f"--devices {config.devices}: a mesh has no device twice, and there are {len(jax.devices())} "
            f"({jax.devices()[0].platform}). Fix: run with JAX_PLATFORMS=cpu and without a number of devices in XLA_FLAGS."
        )
    with jax.enable_x64(True) if config.dtype == "float64" else contextlib.nullcontext():
        oracles, rows = _compare(config)
    whole, divided = ([row for row in rows if bool(row.shard) == shards] for shards in (False, True))
    if figure:
        axes_figure(_panels(config, whole), _heading(config)).savefig(figure)
    return Result(config, oracles, tuple(whole), tuple(divided), figure)


def _compare(config: Config) -> tuple[dict[str, tuple[float, ...]], list[Row]]:
    """Train each model on one device, then on every mesh: the losses of the one, and what the others did."""
    most = _most_axes(config.shapes)
    wanted = [(shape, "") for shape in config.shapes] + [(most, shard) for shard in config.shards if most.data > 1]
    keys = tuple(jax.random.split(jax.random.key(config.seed)))
    optimizer, oracles, rows = optax.adamw(RATE, eps=EPSILON), {}, []
    with progress(total=len(config.models) * len(wanted), unit="mesh") as bar:
        for name in config.models:
            problem = _problem(name, config)
            plain = plain_step(problem.loss_fn, optimizer, config.microbatches)
            oracle = train_plainly(problem, plain, optimizer, keys, config.steps)
            oracles[name] = oracle.losses
            for shape, shard in wanted:
                bar.set_description(f"{name} {shape} {shard}".strip())
                with noted(f"This was {name} on {shape}."):
                    count, rounds = config.microbatches, config.rounds
                    rows.append(measure(name, problem, shape, optimizer, count, keys, oracle, plain, rounds, shard))
                bar.update()
    return oracles, rows


def table(result: Result) -> str:
    """The result as text: a row a model and mesh, then all collectives of the mesh with the most axes."""
    held = [["model", "mesh", "losses", "parameters", "equals the oracle", "params", "optimizer", "step / plain"]]
    told = [["model", "mesh", "pipe", "data", "times", "beyond", "model", "times", "all-reduces in F"]]
    for row in result.rows:
        name = [row.model, str(row.shape)]
        apart = [f"{row.loss_apart:.1e}", f"{row.params_apart:.1e}", "yes" if row.equal else "no"]
        held.append([*name, *apart, _kib(max(row.params)), _kib(max(row.optimizer)), f"{row.ratio:.1f}"])
        pipe, data, model = map(_kib, row.by_axis)
        over = [pipe, data, str(row.data.times), f"{row.beyond} B" if row.shape.data > 1 else "-"]
        told.append([*name, *over, model, str(row.model_axis.times), " ".join(map(str, row.reduces))])
    losses = [
        f"{name}, {len(found)} steps on one device: loss {found[0]:.4f} -> {found[-1]:.4f}"
        for name, found in result.oracles.items()
    ]
    lines = [
        *losses,
        "",
        *columns(held),
        "losses, parameters: the largest relative difference from one device; KiB on the device that holds most",
        "",
        *columns(told),
        "KiB a step, of all devices together; beyond: what is reduced over data but for each device's parameters, once",
    ]
    return "\n".join([*lines, *_divided(result), *_full(result)])


def main() -> None:
    """Read the command line, run, print the tables, and write the line of JSON."""
    result = command("mesh", Config, DESCRIPTION, run, table)
    rows = [row for row in (*result.rows, *result.divided) if not row.equal]
    names = [" ".join(filter(None, (row.model, str(row.shape), row.shard))) for row in rows]
    wrong = [f"mesh: {name} does not equal the oracle. {row.reason}" for name, row in zip(names, rows, strict=True)]
    if wrong:
        raise SystemExit("\n".join(wrong))


def _problem(name: str, config: Config) -> Problem:
    if name == "mlp":
        return mlp(config.mlp_width, config.mlp_depth, config.batch, config.seed, config.dtype)
    sizes = config.gpt_width, config.gpt_depth, config.gpt_heads, config.gpt_length
    return gpt(*sizes, config.batch, config.dropout, config.seed, config.dtype)


def _check_shapes(config: Config) -> None:
    """Refuse meshes that cannot be, all at once."""
    if not config.meshes:
        raise ConfigError("--meshes: there is none. Fix: pass for example 2x2x2, or --every.")
    odd = [mesh for mesh in config.meshes if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", mesh)]
    if odd:
        raise ConfigError(f"--meshes {' '.join(odd)}: a mesh is pipe x data x model. Fix: write it like 2x2x2.")
    if not config.shapes:
        raise ConfigError(f"--every --devices {config.devices}: there is no such mesh. Fix: pass a power of two, such as 8.")
    misfits = [f"{shape} is {math.prod(shape)}" for shape in config.shapes if math.prod(shape) != config.devices]
    if misfits:
        examples = ", ".join(map(str, every_mesh(config.devices)[:3]))
        raise ConfigError(
            f"--meshes, --devices {config.devices}: each mesh has all devices, and {', '.join(misfits)}. "
            f"Fix: pass meshes like {examples}, or another --devices."
        )
    uneven = [str(shape) for shape in config.shapes if config.microbatches % shape.data]
    if uneven:
        raise ConfigError(
            f"--microbatches {config.microbatches} with {', '.join(uneven)}: replicas have equally many microbatches. "
            f"Fix: pass a multiple of {math.lcm(*(shape.data for shape in config.shapes))}."
        )
    widths = {"gpt": (("gpt_heads", config.gpt_heads),), "mlp": (("mlp_width", config.mlp_width),)}
    sharded = [pair for name in config.models for pair in widths[name]]
    shards = math.lcm(*(shape.model for shape in config.shapes))
    rough = [f"{flag(name)} {size}" for name, size in sharded if size % shards]
    if rough:
        raise ConfigError(f"{', '.join(rough)}: shards are equal. Fix: pass a multiple of {shards}.")


def _most_axes(shapes: Sequence[Shape]) -> Shape:
    return max(shapes, key=lambda shape: sum(size > 1 for size in shape))


def _divided(result: Result) -> list[str]:
    """What replicas hold and send that divide their state, beside those that do not."""
    if not result.divided:
        return []
    names = "model,mesh,shard,equals the oracle,params,optimizer,over data,formula,beyond,step / plain"
    rows: list[list[str]] = [[*names.split(",")]]
    shape = result.divided[0].shape
    for row in sorted((*(row for row in result.rows if row.shape == shape), *result.divided), key=lambda row: row.model):
        held = [_kib(max(row.params)), _kib(max(row.optimizer))]
        told = [_kib(row.around), _kib(row.around_at_least), f"{row.around - row.around_at_least} B", f"{row.ratio:.1f}"]
        rows.append([row.model, str(row.shape), row.shard or "-", "yes" if row.equal else "no", *held, *told])
    told = "over data: KiB that all devices send in a step, each collective around a ring; beyond: more than by the formula"
    return ["", *columns(rows), told]


def _full(result: Result) -> list[str]:
    """All collectives of the first model, on the mesh with the most axes."""
    row = next(row for row in result.rows if row.shape == _most_axes(result.config.shapes))
    return ["", f"{row.model} on {row.shape}: the collectives of a step; bytes of operands on one device", row.table]


def _panels(config: Config, rows: list[Row]) -> list[tuple[str, list[Bar]]]:
    return [(name, [Bar(str(row.shape), row.by_axis) for row in rows if row.model == name]) for name in config.models]


def _heading(config: Config) -> str:
    return f"bytes a step on {config.devices} devices, pipe x data x model; {config.microbatches} microbatches"


def _kib(num_bytes: float) -> str:
    return f"{num_bytes / 1024:,.1f}"
