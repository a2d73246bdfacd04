"""What a step costs at least on GPUs that are not here: each model is compiled for them, and nothing runs.

A pipeline of the model is planned on devices that only compile (``jaxpp.target``), and beside it the step that a user without a
pipeline writes: the gradients of one microbatch, added to a sum that is donated, as one program. All times are bounds, which no run
can beat; memory is a forecast; kernels and bytes are read from the compiled programs.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jax.stages import Compiled

import jaxpp
from experiments.gpu.models import MODELS, count_of
from experiments.gpu.pipelines import Ready
from experiments.gpu.rows import Job, Row
from experiments.problems import Problem
from jaxpp.lowering.builder import CALLER
from jaxpp.observe.bound import StepBound, bound_of
from jaxpp.observe.memory.forecast import Forecast, forecast
from jaxpp.runtime.hlo import Kernel, read_kernels
from jaxpp.runtime.roofline import program_roofline
from jaxpp.tables import bytes_in_words
from jaxpp.targets import GPU, device_name, target_of
from jaxpp.types import Device

__all__ = ["Planned", "case_of", "rows", "summary"]

GIGA, GIB = 1e9, 2**30
SCHEDULE, COMPUTE = "1f1b", "bfloat16"


class Work(NamedTuple):
    """What programs run on their devices."""

    kernels: int
    num_bytes: int  # read and written, in device memory

    def __add__(self, other: Any) -> "Work":
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def __mul__(self, times: Any) -> "Work":
        return Work(*(each * times for each in self))


@dataclass(frozen=True)
class Planned:
    """A step of a model on some target, in numbers.

    Attributes:
        model: its name.
        target: name of the GPU.
        num_devices: how many of them.
        seconds: the least that a step takes.
        plain: the least of the forwards and backwards of all microbatches in the plain step, on one device.
        bubble: idle time of the ranks on the virtual clock, of all time; None where ranks share devices.
        most: of the peak that the matrix products reach at most (MFU).
        count: tokens or examples of a step.
        unit: which of the two.
        work: of F and B, all microbatches.
        plain_work: of the plain step.
        peak: bytes of the fullest device.
        link_bytes: that cross between devices in a step.
        host: seconds to hand over a step.
    """

    model: str
    target: str
    num_devices: int
    seconds: float
    plain: float
    bubble: float | None
    most: float
    count: int
    unit: str
    work: Work
    plain_work: Work
    peak: int
    link_bytes: int
    host: float


def case_of(model: str, num_devices: int, name: str) -> str:
    """How a case is called: ``gpt, 4 x h100``."""
    return f"{model}, {num_devices} x {name}"


def rows(job: Job) -> Iterator[Row]:
    """A row for each number; the first has all of them, for the JSON."""
    model, on = job.case.split(", ")
    count, name = on.split(" x ")
    devices = jaxpp.target(name, int(count))
    numbers = cast("GPU", target_of(devices[0]))
    models = dataclasses.replace(job.sizes.models, stages=max(job.sizes.models.stages, len(devices)))
    problem, key = MODELS[model](job.sizes, COMPUTE), jax.random.key(0)
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), problem.batch)
    it = Ready(problem._replace(batch=None), batch, key, models)
    pipe = it.pipe(SCHEDULE, devices=devices)
    shapes = jax.eval_shape(it.problem.init, key)
    pipe.abstract_state(shapes, batch)
    held = forecast(pipe.engine, batch, key, advise=False)
    bound = cast("StepBound", bound_of(pipe.engine, batch, key))
    plan, lowered = pipe.engine.plan("update", batch, key)
    pairs = list(zip(lowered.bound.lines, plan.instructions, strict=True))
    calls = [instruction.call for line, instruction in pairs if line.program is not None and line.action is not None]
    sizes = {life.name: life.num_bytes for life in held.liveness.lives}
    sends = [sizes.get(line.outputs[0], 0) for line, _ in pairs if line.is_send and line.inputs[0].stage != CALLER]
    kernels = _plain_kernels(it.problem, shapes, batch, key, models.microbatches, devices[0])
    shared = len(devices) < pipe.schedule.num_ranks
    found = Planned(
        model,
        name,
        len(devices),
        bound.seconds,
        models.microbatches * program_roofline(kernels, numbers).seconds,
        None if shared else bound.bubble_fraction,
        bound.peak_fraction,
        *count_of(model, batch),
        _work(calls),
        _work_of(kernels) * models.microbatches,
        max(held.peaks.values()),
        sum(sends),
        bound.host.seconds,
    )
    yield from _rows(job, found, bound, held, len(sends))


def _work(calls: Sequence[Any]) -> Work:
    known: dict[int, Work] = {}
    for call in calls:
        if id(call) not in known:
            known[id(call)] = _work_of(read_kernels(cast("Compiled", call).as_text() or ""))
    return sum((known[id(call)] for call in calls), Work(0, 0))


def _work_of(kernels: Sequence[Kernel]) -> Work:
    return Work(
        sum(kernel.runs for kernel in kernels), sum(kernel.runs * (kernel.bytes_read + kernel.bytes_written) for kernel in kernels)
    )


def _plain_kernels(problem: Problem, shapes: Any, batch: Any, key: Any, microbatches: int, device: Device) -> tuple[Kernel, ...]:
    """The kernels of one microbatch of the plain step: its loss and gradients, added to a sum that is donated."""
    sharding = SingleDeviceSharding(device)

    def on_device(tree: Any, parts: int = 1) -> Any:
        def leaf(x: Any) -> Any:
            shape = x.shape if parts == 1 else (x.shape[0] // parts, *x.shape[1:])
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

        return jax.tree.map(leaf, tree)

    def step(total: Any, params: Any, batch: Any, key: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(problem.loss_fn)(params, batch, key))

    params, part = on_device(shapes), on_device(batch, microbatches)
    total = on_device(jax.eval_shape(jax.value_and_grad(problem.loss_fn), params, part, key))
    compiled = jax.jit(step, donate_argnums=0).lower(total, params, part, on_device(key)).compile()
    return read_kernels(compiled.as_text() or "")


def _rows(job: Job, found: Planned, bound: StepBound, held: Forecast, num_sends: int) -> Iterator[Row]:
    first, *others = bound.lines()
    hands = next(k for k, line in enumerate(others) if " kernels of a step in " in line)  # what is told of the host
    yield job.row("a step", f"at least {1e3 * found.seconds:.3g} ms", note=first.partition(": ")[2], **dataclasses.asdict(found))
    rate = found.count / found.seconds
    yield job.row(f"{found.unit} a second", f"at most {rate:,.0f}", note=f"{found.count:,} {found.unit} in a step")
    yield job.row("of the peak (MFU)", f"at most {found.most:.1%}", note="; ".join(others[:hands]))
    if found.bubble is None:
        yield job.row("bubble", "none", note=f"the {bound.schedule.num_ranks} ranks share devices")
    else:
        note = f"{bound.schedule.name}, {bound.schedule.num_microbatches} microbatches, with the least times of this step"
        yield job.row("bubble", f"{found.bubble:.1%}", note=note)
    note = f"the plain step on one {found.target}, without the update, of which the pipeline's step has one"
    yield job.row("plain: forwards and backwards", f"at least {1e3 * found.plain:.3g} ms", note=note)
    ours, plain = found.work, found.plain_work
    note = f"{ours.kernels:,} and {plain.kernels:,} in the forwards and backwards of a step"
    yield job.row("kernels / plain", f"{ours.kernels / plain.kernels:.3f}", note=note)
    note = f"{ours.num_bytes / GIGA:.3g} GB and {plain.num_bytes / GIGA:.3g} GB, read and written, in the same"
    yield job.row("bytes / plain", f"{ours.num_bytes / plain.num_bytes:.3f}", note=note)
    worst, room = max(held.peaks, key=held.peaks.__getitem__), held.hbm or 0
    note = f"{device_name(worst)}, at {held.moments[worst]}; {'it fits' if held.fits else 'IT DOES NOT FIT'}: "
    note += f"JAX takes {bytes_in_words(room)} of that GPU; {_temporaries(held, worst)}"
    yield job.row("memory of the fullest device", bytes_in_words(found.peak), note=note)
    note = "; ".join([f"{num_sends} sends between devices", *others[hands + 1 :]])
    yield job.row("over the links", bytes_in_words(found.link_bytes), note=note)
    yield job.row("time of the host", f"{1e3 * found.host:.2f} ms", note=others[hands])


def _temporaries(held: Forecast, device: Any) -> str:
    size = sum(row.temporaries for row in held.stages if row.device == device)
    return f"{bytes_in_words(size)} are temporaries of what runs then"


HEADING: tuple[str, ...] = (
    "model",
    "devices",
    "a step, ms",
    "bubble",
    "MFU",
    "a second",
    "peak, GiB",
    "kernels / plain",
    "bytes / plain",
)


def summary(found: Sequence[Row]) -> list[tuple[str, ...]]:
    """A line for each case, under a heading: least time of a step, bubble, MFU at most, rate at most, memory, work over plain."""
    lines = [HEADING]
    for row in found:
        if "plain_work" not in row.numbers:
            continue
        it = row.numbers
        ratios = [f"{a / b:.3f}" for a, b in zip(it["work"], it["plain_work"], strict=True)]
        bubble, rate = "-" if it["bubble"] is None else f"{it['bubble']:.0%}", f"{it['count'] / it['seconds']:,.0f} {it['unit']}"
        cells = [f"{1e3 * it['seconds']:.3g}", bubble, f"{it['most']:.0%}", rate, f"{it['peak'] / GIB:.2f}", *ratios]
        lines.append((it["model"], f"{it['num_devices']} x {it['target']}", *cells))
    return lines
