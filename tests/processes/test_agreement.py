"""What processes compare: texts that do not depend on the process, and the message that shows where they differ."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxpp.errors import ProcessError
from jaxpp.runtime.not_public import shared_store
from jaxpp.runtime.processes.channel import agreement
from jaxpp.runtime.processes.texts import difference, flags_text, listing, versions_text
from jaxpp.stages.graph import trace

LISTED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxpp.runtime.processes.texts import listing
from jaxpp.stages.graph import trace
@jax.custom_vjp
def square(x):
    return x * x
square.defvjp(lambda x: (square(x), x), lambda x, y: (2 * x * y,))
mesh = Mesh(np.array(jax.devices()).reshape(1, 1, 1), ("alpha", "beta", "gamma"))
table = np.arange(6.0)
def f(x):
    summed = lambda x: jax.lax.psum(x, ("alpha", "beta", "gamma"))
    y = jax.shard_map(summed, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())(x)
    jax.debug.callback(print, x)
    return square(jax.lax.scan(lambda c, z: (jnp.sin(c) + z, c), y, x)[0] + table)
print(listing(trace(f, jnp.ones(6))[0]))
"""


@pytest.mark.long
def test_a_listing_is_the_same_in_every_process():
    found = [
        subprocess.run(
            [sys.executable, "-c", LISTED], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1]
    assert "scan" in found[0]
    assert "constant" in found[0]


@pytest.mark.parametrize(
    "other",
    [
        lambda x: jnp.cos(x) * 2,
        lambda x: jnp.sin(x) * 3,
        lambda x: jnp.sin(x[:2]) * 2,
        lambda x: (jnp.sin(x) * 2).astype(jnp.bfloat16),
        lambda x: 2 * jnp.sin(x) + jnp.asarray([1.0, 2.0, 3.0]),
        lambda x: jax.lax.scan(lambda c, y: (c, jnp.sin(y)), 0.0, x)[1] * 2,
    ],
)
def test_other_equations_have_another_listing(other):
    one = lambda x: jnp.sin(x) * 2  # noqa: E731
    x = jnp.ones(3)
    assert listing(trace(one, x)[0]) == listing(trace(lambda x: jnp.sin(x) * 2, x)[0])
    assert listing(trace(one, x)[0]) != listing(trace(other, x)[0])


def test_constants_that_differ_have_another_listing():
    made = [listing(trace(functools.partial(jnp.add, jnp.arange(3.0) + k), jnp.ones(3))[0]) for k in (0, 0, 1)]
    assert made[0] == made[1] != made[2]


def test_the_message_shows_the_first_difference_of_each_cause_and_who_says_what():
    texts = {
        "flags": {0: "a = 1\nb = 2", 1: "a = 1\nb = 3", 2: "a = 1\nb = 2", 3: "a = 1\nb = 2"},
        "batch": {0: "x f32[8]\ny f32[8]", 1: "x f32[8]", 2: "x f32[8]\ny f32[8]", 3: "x f32[8]\ny f32[8]"},
        "loss": {0: "1", 1: "2", 2: "1", 3: "1"},
    }
    error = difference("pipe.init", texts)
    assert isinstance(error, ProcessError)
    assert str(error) == (
        "pipe.init: all processes run the same pipeline, made by the same code.\n"
        "  Got: flags, line 2: processes 0, 2 and 3: b = 2\n"
        "       flags, line 2: process 1: b = 3\n"
        "       batch, line 2: processes 0, 2 and 3: y f32[8]\n"
        "       batch, line 2: process 1: (nothing).\n"
        "  Fix: set the same options of JAX, and the same XLA_FLAGS, in every process."
    )


def test_a_long_line_is_shown_where_it_differs():
    line = "word " * 100
    error = str(difference("pipe.step", {"lines": {0: f"{line} this {line}", 1: f"{line} that {line}"}}))
    assert "word  this word" in error
    assert "word  that word" in error
    assert max(map(len, error.splitlines())) < 200


def test_one_process_compares_nothing():
    def parts():
        raise AssertionError

    assert shared_store() is None
    with agreement("pipe.init", jax.devices()) as agree:
        agree(parts)
    assert agree.again(lambda: 1) == 1


def test_flags_that_change_results_are_compared_and_folders_are_not(monkeypatch):
    before = flags_text()
    with jax.enable_x64(not jax.config.jax_enable_x64):
        assert flags_text() != before
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_dump_to=/tmp/here")
    assert flags_text() == before
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_cpu_enable_fast_math=true")
    assert flags_text() != before
    assert f"jax {jax.__version__}" in versions_text()
