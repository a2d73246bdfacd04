"""A step of torch.distributed.pipelining with one process per stage, and the same step of plain torch in one process.

The pipeline runs over gloo on CPUs, as its documentation shows: ``PipelineStage`` around each rank's own modules, and a schedule
that calls the loss on the last rank. Nothing here is about JAX.
"""

import importlib
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["SCHEDULES", "Sizes", "time_pipeline", "time_plain"]

SCHEDULES = {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe"}
"""Our names of the schedules, and torch's."""


class Sizes(NamedTuple):
    """An MLP and how it is run.

    Attributes:
        width: features of each hidden layer, and of the input.
        depth: hidden layers, a multiple of the stages.
        batch: examples per step, a multiple of the microbatches.
        stages: processes.
        microbatches: parts of the batch.
        schedule: a key of ``SCHEDULES``.
        threads: of torch, in each process.
        steps: timed together.
    """

    width: int
    depth: int
    batch: int
    stages: int
    microbatches: int
    schedule: str
    threads: int
    steps: int


def time_plain(sizes: Sizes) -> float:
    """Microseconds of one step: gradient accumulation over the microbatches, then adam."""
    torch = _torch(sizes)
    model = torch.nn.Sequential(*(module for stage in range(sizes.stages) for module in _modules(torch, sizes, stage)))
    optimizer, (x, y) = torch.optim.Adam(model.parameters(), 1e-3), _batch(torch, sizes)

    def step() -> None:
        optimizer.zero_grad()
        for part, labels in zip(x.chunk(sizes.microbatches), y.chunk(sizes.microbatches), strict=True):
            loss = torch.nn.functional.cross_entropy(model(part), labels)
            (loss / sizes.microbatches).backward()
        optimizer.step()

    return _time(step, sizes, lambda: None)


def time_pipeline(sizes: Sizes) -> float:
    """Microseconds of one step, on the first rank; the ranks meet at a barrier before and after the steps."""
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [context.Process(target=_work, args=(rank, sizes, folder, found)) for rank in range(sizes.stages)]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        finally:
            for worker in workers:
                worker.kill()
    if found.empty():
        raise RuntimeError(f"a torch process ended early; exit codes {[worker.exitcode for worker in workers]}")
    return found.get()


def _work(rank: int, sizes: Sizes, folder: str, found: Any) -> None:
    torch = _torch(sizes)
    distributed, pipelining = torch.distributed, importlib.import_module("torch.distributed.pipelining")
    rendezvous = (Path(folder) / "rendezvous").as_uri()
    distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=sizes.stages)
    module = torch.nn.Sequential(*_modules(torch, sizes, rank))
    stage = pipelining.PipelineStage(module, rank, sizes.stages, torch.device("cpu"))
    loss = torch.nn.functional.cross_entropy
    schedule = getattr(pipelining, SCHEDULES[sizes.schedule])(stage, n_microbatches=sizes.microbatches, loss_fn=loss)
    optimizer, (x, y) = torch.optim.Adam(module.parameters(), 1e-3), _batch(torch, sizes)
    args, options = ((x,) if rank == 0 else ()), ({"target": y, "losses": []} if rank == sizes.stages - 1 else {})

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*args, **options)
        optimizer.step()

    time_of_step = _time(step, sizes, distributed.barrier)
    if rank == 0:
        found.put(time_of_step)
    distributed.destroy_process_group()


def _time(step: Callable[[], None], sizes: Sizes, barrier: Callable[[], Any]) -> float:
    for _ in range(sizes.steps):  # not timed
        step()
    barrier()
    start = time.perf_counter()
    for _ in range(sizes.steps):
        step()
    barrier()
    return (time.perf_counter() - start) / sizes.steps * 1e6


def _torch(sizes: Sizes) -> Any:
    torch = importlib.import_module("torch")
    torch.set_num_threads(sizes.threads)
    return torch


def _modules(torch: Any, sizes: Sizes, stage: int) -> list[Any]:
    """The modules of a stage: its share of the hidden layers, and the head on the last."""
    hidden: list[Any] = []
    for _ in range(sizes.depth // sizes.stages):
        hidden += [torch.nn.Linear(sizes.width, sizes.width), torch.nn.ReLU()]
    return hidden + [torch.nn.Linear(sizes.width, 2)] * (stage == sizes.stages - 1)


def _batch(torch: Any, sizes: Sizes) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return torch.randn(sizes.batch, sizes.width), torch.randint(0, 2, (sizes.batch,))
