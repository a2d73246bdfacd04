"""One walk for all interpreters: what it makes of calls, loops, branches and custom rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.stages.interpreter import Interpreter, until_settled
from jaxpp.stages.jaxpr import all_equations, inner_of, kind_of, needed_of, work_of

X = jax.ShapeDtypeStruct((3,), jnp.float32)


class Origins(Interpreter[frozenset]):
    """Of each value the arguments of which it is made, also by way of conditions."""

    enters = Interpreter.enters | {"scan", "while", "cond", "custom_linear_solve"}

    def number(self, atom):
        return frozenset()

    def constant(self, var, value):
        return frozenset("c")

    def either(self, a, b):
        return a | b

    def plain(self, eqn, values):
        return [frozenset().union(*values)] * len(eqn.outvars)

    def decided(self, eqn, condition, values):
        return [value | condition for value in values]


def origins(function, interpreter=Origins):
    closed = jax.make_jaxpr(function)(X, X, X)
    return ["".join(sorted(value)) for value in interpreter().call(closed, list(map(frozenset, "xyz")))]


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


@jax.custom_jvp
def tripled(x):
    return 3 * x


@tripled.defjvp
def _(primals, tangents):
    return tripled(primals[0]), 3 * tangents[0]


def rotated(x, y, z):
    """Carries that take three iterations until each is made of all arguments."""
    return jax.lax.scan(lambda carry, _: ((carry[1], carry[2], carry[0] + carry[1]), None), (x, y, z), None, length=5)[0]


def counted(x, y, z):
    return jax.lax.while_loop(lambda carry: carry[0].sum() < z.sum(), lambda carry: (carry[0] + 1, carry[1] * y), (x, x))


CASES = {
    "a call": (lambda x, y, z: (*jax.jit(lambda a, b: (b, a + b))(x, z), y), ["z", "xz", "y"]),
    "a checkpoint": (lambda x, y, _: jax.checkpoint(lambda a, b: jnp.sin(a) * b)(x, y), ["xy"]),
    "a custom vjp": (lambda x, y, _: (doubled(x), doubled(y)), ["x", "y"]),
    "a custom jvp": (lambda x, y, _: (tripled(x), tripled(y)), ["x", "y"]),
    "a scan": (rotated, ["xyz"] * 3),
    "what a scan stacks": (lambda x, y, z: jax.lax.scan(lambda c, r: (c, r * z), y, x)[1], ["xz"]),
    "a while loop": (counted, ["xz", "xyz"]),
    "branches": (lambda x, y, z: jax.lax.cond(x[0] > 0, lambda: (y + 1, y), lambda: (y, z)), ["xy", "xyz"]),
    "a linear solve": (
        lambda x, y, _: jax.lax.custom_linear_solve(lambda v: v * y, x, lambda _, b: b / y, lambda _, b: b / y),
        ["xy"],
    ),
    "an array closed over": (lambda x, _, __: x * np.arange(3.0, dtype=np.float32), ["cx"]),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_followed_through(name):
    function, expected = CASES[name]
    assert origins(function) == expected


def test_an_interpreter_enters_the_kinds_that_it_names_and_no_other():
    class Outside(Origins):
        enters = frozenset({"jit"})

    assert origins(jax.jit(lambda a, b, _: a), Outside) == ["x"]
    assert origins(lambda x, y, z: jax.lax.cond(x[0] > 0, lambda: (y + 1, y), lambda: (y, z)), Outside) == ["xyz"] * 2


def test_a_loop_is_followed_until_what_it_carries_stays_or_the_rounds_are_over():
    run, either = (lambda carry: [carry[0] + 1]), max
    assert until_settled(lambda carry: [min(carry[0] + 1, 7)], [0], either) == [7]
    assert until_settled(run, [0], either, rounds=4) == [4]
    assert until_settled(run, [0], either, rounds=4, unsettled=lambda _: -1) == [-1]

    class Twice(Origins):
        rounds = 1

        def unsettled(self, value):
            return value | {"?"}

    assert origins(rotated, Twice) == ["?xy", "?yz", "?xyz"]


def test_what_is_inside_an_equation_is_seen_once_and_costs_as_often_as_it_runs():
    (eqn,) = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (jnp.sin(jnp.cos(c)), None), x, None, length=5)[0])(X).eqns
    assert [kind_of(each) for each in all_equations([eqn])] == ["scan", "cos", "sin"]
    assert work_of(eqn, lambda body: len(body.eqns)) == 10
    (plain,) = jax.make_jaxpr(jnp.sin)(X).eqns
    assert work_of(plain, lambda body: len(body.eqns)) is None
    assert inner_of(plain, {"sin"}) is None
    assert inner_of(eqn, {"while"}) is None


def test_equations_whose_results_nobody_reads_are_not_needed_unless_they_stay():
    jaxpr = jax.make_jaxpr(lambda x: (jnp.sin(x), jnp.cos(x), jnp.tan(x))[1])(X).jaxpr
    kinds = [kind_of(eqn) for eqn in jaxpr.eqns]
    assert [kinds[i] for i in needed_of(jaxpr.eqns, jaxpr.outvars, lambda _: False)] == ["cos"]
    assert [kinds[i] for i in needed_of(jaxpr.eqns, jaxpr.outvars, lambda eqn: kind_of(eqn) == "tan")] == ["cos", "tan"]
