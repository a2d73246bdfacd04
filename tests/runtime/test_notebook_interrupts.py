"""A notebook whose cell is interrupted and run again, as people train: nothing is lost, kept alive, or left on the page."""

import os
import re
import signal
import threading

import numpy as np
import pytest

from jaxpp.errors.tracebacks import entry
from tests.docs.test_notebook import Notebook

SETUP = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import gc, jax.numpy as jnp, numpy as np, optax, jaxpp

params = {"a": jnp.full((64, 96), 0.01), "b": jnp.eye(96) / 2, "c": jnp.full((96, 32), 0.1)}
batches = [np.random.default_rng(k).normal(size=(128, 64)).astype("f") for k in range(8)]

def loss_fn(params, x, key):
    h = jnp.tanh(x @ params["a"])
    h = jnp.tanh(h * jax.random.bernoulli(key, 0.8, h.shape) @ params["b"])
    return jnp.mean(jnp.tanh(h @ params["c"]) ** 2)

def large():
    return sorted(leaf.shape for leaf in jax.live_arrays() if leaf.size > 32)

pipe = jaxpp.Pipeline(loss_fn, optax.adam(1e-3), num_stages=2, num_microbatches=4)
first = jax.tree.map(np.asarray, params)
del params
state = pipe.init(first, batches[0])
for number in range(300):
    state, metrics = pipe.step(state, batches[number % 8], jax.random.fold_in(jax.random.key(0), number))
wanted = jax.tree.map(np.asarray, tuple(state))
state = pipe.init(first, batches[0])
alone = large()
"""
TRAIN = """
state = pipe.state
while state.step < 300:
    state, metrics = pipe.step(state, batches[state.step % 8], jax.random.fold_in(jax.random.key(0), state.step))
metrics.loss
"""


@pytest.fixture(scope="module")
def notebook():
    made = Notebook()
    try:
        assert not errors(made.run(SETUP))
        made.process = int(printed(made, "import os; print(os.getpid())"))
        yield made
    finally:
        made.close()


def interrupted(notebook, code, seconds):
    """What a cell sends to the page if the kernel is interrupted after some time."""
    timer = threading.Timer(seconds, os.kill, (notebook.process, signal.SIGINT))
    timer.start()
    try:
        return notebook.run(code)
    finally:
        timer.cancel()
        timer.join()


def frames_of_jaxpp(error):
    """The lines of jaxpp in a traceback on the page."""
    return re.findall(r"/jaxpp/((?:\w+/)*\w+\.py:\d+)", re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error["traceback"])))


# Ctrl-C at the first bytecode of a function comes before any line of it can catch it (Python looks for signals there).
FIRST_BYTECODE = f"errors/tracebacks.py:{entry(print).__code__.co_firstlineno}"


def printed(notebook, code):
    """What a cell prints."""
    found = notebook.run(code)
    assert {kind for kind, _ in found} == {"stream"}, found
    return "".join(content["text"] for _, content in found).strip()  # what is printed may come in parts


def errors(messages):
    return [content for kind, content in messages if kind == "error"]


FURTHER = """
number = pipe.state.step
state, metrics = pipe.step(pipe.state, batches[number % 8], jax.random.fold_in(jax.random.key(0), number))
print(state.step == number + 1 == int(optax.tree.get(state.opt_state, "count")), large() == alone or large())
"""
LEFT = "print(pipe.state.step < 300)"
CHECK = """
jax.tree.map(np.testing.assert_array_equal, tuple(pipe.state), wanted)
state = pipe.init(first, batches[0])
print("the same bits")
"""


def test_a_cell_that_is_interrupted_and_run_again_goes_on_where_it_stopped(notebook):
    rng, hits, runs = np.random.default_rng(0), 0, 0
    while hits < 12 or not runs:
        found = errors(interrupted(notebook, TRAIN, rng.uniform(0.01, 0.25)))
        for error in found:
            assert error["ename"] == "KeyboardInterrupt"
            assert frames_of_jaxpp(error) in ([], [FIRST_BYTECODE]), "the user's own line says it all"
            # What IPython keeps of the cell keeps nothing on the devices once a further step is done (of those that are left).
            assert printed(notebook, LEFT) == "False" or printed(notebook, FURTHER) == "True True"
        hits += len(found)
        if not found:
            assert printed(notebook, CHECK) == "the same bits"
            runs += 1


def test_after_a_step_that_raised_no_array_of_it_is_kept(notebook):
    wrong = "pipe.step(pipe.state, batches[0][:2], jax.random.key(0))"
    assert [error["ename"] for error in errors(notebook.run(wrong))] == ["BatchError"]
    assert printed(notebook, FURTHER) == "True True"


def test_a_bar_of_what_is_interrupted_is_taken_away_and_the_next_is_whole(notebook):
    work = "from jaxpp.runtime.progress import progress\nimport time\n"
    work += "with progress(range(N), mininterval=0) as bar:\n    for _ in bar: time.sleep(0.001)"
    for seconds in (0.05, 0.1, 0.15):
        found = interrupted(notebook, work.replace("N", "10000"), seconds)
        assert len(errors(found)) == 1
        bars = {}
        for kind, content in found:
            if kind.endswith("display_data"):
                bars[content["transient"]["display_id"]] = content["data"]
        assert list(bars.values()) in ([{}], [])
        again = notebook.run(work.replace("N", "20"))
        assert not errors(again) and [content["data"] for kind, content in again if kind.endswith("display_data")][-1] == {}
