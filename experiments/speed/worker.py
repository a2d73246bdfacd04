"""A process that times steps when it is told to: how CPU devices run their programs is decided once, before JAX makes an array.

``experiments.speed.synchronous`` starts it with a line of JSON. It says ``[]`` when its pipelines are compiled, and then answers
each line of its standard input by a line of JSON: ``["time", schedule, threads]`` by the seconds of one step, ``["bits"]`` by a
digest of each state.
"""

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxpp
from experiments.plain import Runner
from experiments.speed.problems import looped

__all__ = ["Told", "main"]

_WARM = 2  # steps of each pipeline before any is timed


@dataclasses.dataclass(frozen=True)
class Told:
    """What a process is told.

    Attributes:
        asynchronous: whether a CPU device has a thread of its own that runs programs, or whoever calls a program runs it.
        threads: each way to hand over steps, as ``Pipeline(threads=...)`` takes it.
        schedules: the order of the actions, each with all ways.
        ranks: devices, with a stage each.
        microbatches: parts of the batch.
        layers: of the model.
        loops: products of a layer.
        width: features.
        rows: examples of a microbatch.
    """

    asynchronous: bool
    threads: tuple[str, ...]
    schedules: tuple[str, ...]
    ranks: int
    microbatches: int
    layers: int
    loops: int
    width: int
    rows: int


class _Pipelined:
    """A pipeline with its state, of which a digest can be taken."""

    def __init__(self, told: Told, schedule: str, threads: str):
        problem = looped(told.layers, told.loops, told.width, told.rows * told.microbatches)
        batch = jax.tree.map(jnp.asarray, problem.batch)
        counts: dict[str, Any] = {"num_stages": told.ranks, "num_microbatches": told.microbatches, "threads": threads}
        pipe = jaxpp.Pipeline(problem.loss_fn, optax.sgd(1e-3), schedule=schedule, **counts)
        self.state: Any = pipe.init(problem.init, jax.random.key(0), batch)
        self._pipe, self._batch = pipe, batch
        self._runner = Runner(self._step, self.state)

    def _step(self, state: Any) -> Any:
        self.state, metrics = self._pipe.step(state, self._batch)
        return self.state, metrics

    def time(self) -> float:
        """Seconds of a step, until it is done."""
        return self._runner.time(1)[0] / 1e6

    def digest(self) -> str:
        """What the bits of the parameters come to."""
        leaves = jax.device_get(jax.tree.leaves(self.state.params))
        return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()


def main() -> None:
    """Compile, then answer until nobody asks any more."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr  # what else is printed is no answer
    told, config = Told(**json.loads(sys.argv[1])), jax.config
    options: Mapping[str, Any] = {"jax_num_cpu_devices": told.ranks, "jax_cpu_enable_async_dispatch": told.asynchronous}
    for name, value in {"jax_platforms": "cpu", **options}.items():
        config.update(name, value)
    pipes = {(schedule, threads): _Pipelined(told, schedule, threads) for schedule in told.schedules for threads in told.threads}
    for pipe in pipes.values():
        for _ in range(_WARM):
            pipe.time()
    print("[]", file=answers, flush=True)
    for line in sys.stdin:
        what, *of = json.loads(line)
        found = pipes[tuple(of)].time() if what == "time" else {" ".join(name): pipe.digest() for name, pipe in pipes.items()}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
