"""Ctrl-C between two bytecodes of JAX's own tracing: what is computed afterwards, by jaxpp or by anybody else, is right."""

import os

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.errors import ArgumentError
from tests.end_to_end.test_bugs import PARAMS, X, pipeline
from tests.runtime.test_interrupts import AtBytecode

EAGER = jax.extend.core.find_top_trace(())
"""JAX's trace where nothing is traced."""

# Python cannot raise what comes while it runs a finalizer; it prints that and goes on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class InContexts(AtBytecode):
    """Sends SIGINT before the n-th bytecode with which JAX enters or leaves another trace, in the main thread."""

    root = os.path.dirname(jax.__file__)

    def __call__(self, frame, event, given):
        code = frame.f_code
        contexts = code.co_filename.startswith(self.root) and "CurrentTrace" in code.co_qualname
        if contexts and code.co_name in ("__enter__", "__exit__"):
            return super().__call__(frame, event, given)
        return self


def interrupted(work, most):
    """Do ``work`` under Ctrl-C at up to ``most`` places, anew each time; returns how often it was interrupted."""
    for _ in range(2):  # some of it is done once a process
        jax.clear_caches()
        with InContexts(-1) as counter:
            work()
    hits = 0
    for number in range(1, counter.seen, max(1, counter.seen // most)):
        jax.clear_caches()
        try:
            with InContexts(number):
                work()
        except KeyboardInterrupt:
            hits += 1
        left = jax.extend.core.find_top_trace(())
        if left is not EAGER:
            jax.extend.core.set_current_trace(EAGER).__enter__()  # for the tests after this one
        assert left is EAGER, number
    return hits


def test_ctrl_c_while_a_pipeline_traces_leaves_no_trace_open(ctrl_c):
    # `TracerArrayConversionError: traced array with shape float32[40,12]` in 21 tests after one with Ctrl-C: JAX still traced a
    # program of ours, for ever, for whatever was computed in this process.
    pipe = pipeline()

    def work():
        pipe.step(pipe.init(PARAMS, X), X)

    assert interrupted(work, 40) > 20
    np.testing.assert_array_equal(np.asarray(jnp.ones(3) + 1), 2 * np.ones(3))


def test_ctrl_c_while_a_stream_or_a_generation_traces_leaves_no_trace_open(ctrl_c):
    pipe = pipeline()
    state = pipe.init(PARAMS, X)

    def stream():
        for _ in pipe.stream(state, [X, X[:5]], lambda params, x: jnp.tanh(x @ params["a"]) @ params["b"]):
            pass

    def next_token(params, carry, tokens):
        carry = carry + jnp.cumsum(tokens, 1)[:, -1:] * 0
        return carry, jax.nn.one_hot((tokens * 3 + 1) % 6, 6) @ params["b"]

    def generate():
        pipe.generate(state, next_token, jnp.zeros((1, 1), jnp.int32), [[1, 2], [3]], 3).collect()

    assert interrupted(stream, 6) > 3
    assert interrupted(generate, 6) > 3


def test_what_jax_makes_of_ctrl_c_within_a_cache_is_ctrl_c_again():
    # JAX 0.12: `ValueError: Cache keys should be comparable using __eq__`, which a stream took for the failure of a batch.
    pipe, pressed = pipeline(), [True]
    state = pipe.init(PARAMS, X)

    def outputs(params, x):
        if pressed:
            raise ValueError("Cache keys should be comparable using __eq__. (...)\nTraceback (...)\nKeyboardInterrupt: ")
        return jnp.tanh(x @ params["a"])

    with pytest.raises(KeyboardInterrupt):
        pipe.apply(state, X, outputs)
    stream = pipe.stream(state, [X, X], outputs)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    pressed.clear()
    assert len(list(stream)) == 2, "no batch is lost"


def test_within_a_trace_of_the_user_s_that_trace_goes_on(ctrl_c):
    # A step within jax.jit is refused; that must not end the trace of the caller.
    pipe = pipeline()
    state = pipe.init(PARAMS, X)

    @jax.jit
    def caller(x):
        with pytest.raises(ArgumentError):
            pipe.step(state, x)
        return x + 1

    np.testing.assert_array_equal(caller(X), X + 1)
