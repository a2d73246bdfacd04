"""Saves or restores a state that waits in host memory, and prints what memory of the process that took beyond the state."""

import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import jaxpp

WIDTH, LAYERS = 1024, 12


class Peak:
    """The resident bytes of the process: before, at most, and after the block."""

    def __enter__(self):
        self.before = self.most = self.now()
        self.watching = True
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.watching = False
        self.thread.join()
        self.after = self.now()

    def watch(self):
        while self.watching:
            self.most = max(self.most, self.now())
            time.sleep(0.001)

    @staticmethod
    def now():
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def loss_fn(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def run(path: Path, *, saves: bool):
    order = jaxpp.schedule.make("looped-bfs", num_ranks=1, num_microbatches=2, stages_per_rank=LAYERS)
    pipe = jaxpp.Pipeline(loss_fn, optax.adam(1e-2), num_stages=LAYERS, num_microbatches=2, schedule=order, host="params")
    given = lambda key: list(jax.random.normal(key, (LAYERS, WIDTH, WIDTH)) / 32), jax.random.key(0), jnp.ones((2, WIDTH))
    with ocp.StandardCheckpointer() as checkpointer:
        if saves:
            state = pipe.init(*given)
            with Peak() as peak:
                checkpointer.save(path, state)
                checkpointer.wait_until_finished()
        else:
            target = pipe.abstract_state(*given)
            with Peak() as peak:
                state = checkpointer.restore(path, target)
        beyond = peak.most - (peak.before if saves else peak.after)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves((state.params, state.opt_state)) if leaf.size > 1}
    print(beyond, sum(leaf.nbytes for leaf in jax.tree.leaves((state.params, state.opt_state))), *kinds)


if __name__ == "__main__":
    run(Path(sys.argv[1]), saves="save" in sys.argv)
