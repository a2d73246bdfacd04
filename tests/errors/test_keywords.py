"""A keyword argument that is misspelt is refused with the name that is near it, and one that is missing with what to write."""

import traceback

import jax.numpy as jnp
import optax
import pytest

import jaxpp
from jaxpp.errors import ArgumentError
from tests import messages

PARAMS = {"w1": jnp.full((4, 4), 0.1), "w2": jnp.ones((4, 2))}
X = jnp.ones((8, 4))


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"]) ** 2)


def pipeline(**options):
    return jaxpp.Pipeline(loss_fn, optax.sgd(0.1), **options)


SGD = optax.sgd(0.1)
CASES = {
    "stages": lambda: pipeline(stages=4),
    "microbatches": lambda: pipeline(num_stages=2, microbatches=8),
    "n_stages": lambda: jaxpp.value_and_grad(loss_fn, n_stages=2),
    "two names": lambda: pipeline(nstages=2, n_microbatches=8),
    "a method": lambda: pipeline(num_stages=2).step(None, X, donat=False),
    "a method of Forward": lambda: pipeline(num_stages=2).stream(None, [X], max_in_fligth=3),
    "stages by hand": lambda: jaxpp.Pipeline.from_stages([], loss=loss_fn, optimiser=SGD),
    "tune": lambda: jaxpp.tune(loss_fn, SGD, PARAMS, X, has_auxx=True),
    "tune's own": lambda: jaxpp.tune(loss_fn, SGD, PARAMS, X, second=9),
    "a rule of sampling": lambda: jaxpp.Sampling(temprature=0.5),
    "offloading": lambda: jaxpp.Offload(except_lst=2),
    "a schedule": lambda: jaxpp.schedule.make("1f1b", ranks=2),
    "its older name": lambda: pipeline(num_stages=2, shared="graph"),
    "names of other libraries": lambda: pipeline(num_stages=2, chunks=8, fsdp=True),
    "a key by its name in Flax": lambda: pipeline(num_stages=2).step(None, X, rng=None),
    "parameters by name": lambda: pipeline(num_stages=2).init(params=PARAMS, batch=X),
    "no optimizer": lambda: jaxpp.Pipeline(loss_fn, num_stages=2),
    "no number of stages": pipeline,
    "numbers by position": lambda: jaxpp.Pipeline(loss_fn, SGD, 2, 4),
    "a step without a state": lambda: pipeline(num_stages=2).step(X),
    "an evaluation of nothing": lambda: pipeline(num_stages=2).evaluate(),
    "an application without parameters": lambda: jaxpp.Forward(loss_fn, num_stages=2).apply(X),
    "gradients without a batch": lambda: jaxpp.value_and_grad(loss_fn, num_stages=2)(PARAMS),
    "too much for a schedule": lambda: jaxpp.schedule.make("1f1b", 2, 4, 1, 1),
    "a forward for a function": lambda: jaxpp.Forward(loss_fn, num_stages=2)(PARAMS, X),
    "a pipeline for a function": lambda: pipeline(num_stages=2)(PARAMS, X),
    "nothing near": lambda: jaxpp.Forward(loss_fn, num_stages=2, xyz=1),
}


@pytest.mark.parametrize("name", CASES)
def test_a_call_that_a_function_cannot_take_is_refused_with_what_to_write(name):
    error = messages.check("keywords", CASES, name, CASES[name])
    assert "another exception" not in "".join(traceback.format_exception(error))  # Python's own words are not shown beside


def test_other_type_errors_come_out_as_they_are():
    def broken(params, x):
        raise TypeError("got an unexpected keyword argument 'mine'")

    with pytest.raises(TypeError, match="'mine'"):
        jaxpp.value_and_grad(broken, num_stages=1)(params=PARAMS, batch=X)


def test_the_function_of_value_and_grad_has_names_of_its_own():
    def loss(weights, data):
        return loss_fn(weights, data)

    grad_fn = jaxpp.value_and_grad(loss, num_stages=2)
    assert grad_fn(params=PARAMS, batch=X)[0] == pytest.approx(float(loss_fn(PARAMS, X)))
    with pytest.raises(ArgumentError, match="the names are params, batch, key"):
        grad_fn(weights=PARAMS, data=X)
