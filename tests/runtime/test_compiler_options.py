"""What a program holds while it runs: W and a large update make and use one large value after the other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.observe.memory.liveness import temporaries
from jaxpp.runtime import compile as compiling
from jaxpp.runtime.compile import PlacedProgram, Programs, compile_lowered
from jaxpp.runtime.place import OneDevice
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.program import Program, Ref, Role
from models.resnet import ResNet
from tests.conftest import gpt_case, mlp_case


def squares(params, batch):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)) + batch.mean()


def large_mlp():
    case = mlp_case(batch_size=64, width=256, depth=8)
    return lambda params, batch: case.loss_fn(params, batch)[0], case.params, case.batch, None


def deep_gpt():
    case = gpt_case(batch_size=8, depth=4, width=64)
    return lambda *args: case.loss_fn(*args)[0], case.params, case.batch, case.key


def resnet():
    model, images = ResNet(width=32), jax.ShapeDtypeStruct((8, 8, 8, 3), jnp.float32)
    batch = {"x": images, "y": jax.ShapeDtypeStruct((8,), jnp.int32)}

    def loss_fn(variables, batch):
        logits: Any = model.apply(variables, batch["x"], train=False)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    init = jax.eval_shape(lambda key: model.init(key, jnp.zeros(images.shape), train=False), jax.random.key(0))
    return loss_fn, init, batch, None


def lines_of(model, schedule):
    """Each program of a step by its label, with the bytes of its temporaries."""
    loss_fn, params, batch, key = model
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=2, schedule=schedule)
    pipe.forecast(params, batch, key)
    bound = pipe.engine.lower("update", batch, key).bound
    pairs = zip(bound.lines, temporaries(bound, pipe.engine.programs), strict=True)
    return {line.label: (line.placed, size) for line, size in pairs if line.placed is not None}


@pytest.mark.parametrize("make", [large_mlp, deep_gpt, resnet])
def test_w_holds_at_most_one_gradient_more_than_b(make):
    model = make()
    whole, split = lines_of(model, "1f1b"), lines_of(model, "zb-h1")
    for stage in (0, 1):
        placed, size = split[f"{stage}W1"]
        outputs = zip(placed.program.outputs, placed.program.results, strict=True)
        gradient = max(count_bytes(aval) for ref, aval in outputs if ref.role == Role.GRAD)
        assert size <= whole[f"{stage}B1"][1] + gradient


def test_a_lean_program_gives_the_same_bits():
    placed, _ = lines_of(large_mlp(), "zb-h1")["1W1"]
    assert placed.program.lean
    rng = np.random.default_rng(0)
    values = [np.asarray(rng.normal(size=aval.shape), aval.dtype) for aval in placed.program.avals]
    lowered = jax.jit(placed.program.function).lower(*placed.program.avals)
    found = [compile_lowered(lowered, "cpu", lean=lean)(*values) for lean in (True, False)]
    for lean, usual in zip(*found, strict=True):
        np.testing.assert_array_equal(lean, usual)


def test_a_large_update_holds_less_than_its_gradients():
    params = {f"w{k}": jax.ShapeDtypeStruct((2048, 2048), jnp.float32) for k in range(6)}
    pipe = jaxpp.Pipeline(squares, optax.adam(0.1), num_stages=1, num_microbatches=1)
    batch = jax.ShapeDtypeStruct((4,), jnp.float32)
    pipe.forecast(params, batch)
    bound = pipe.engine.lower("update", batch, None).bound
    sizes = {line.label: size for line, size in zip(bound.lines, temporaries(bound, pipe.engine.programs), strict=True)}
    assert sizes["update stage 0"] <= 2 * count_bytes(params["w0"])


def test_programs_of_one_text_are_two_if_one_of_them_is_lean():
    refs, shape = ((Ref(Role.ACTIVATION, 0),), (Ref(Role.ACTIVATION, 1),)), jax.ShapeDtypeStruct((3,), jnp.float32)
    place, programs = OneDevice(jax.devices()[0]), Programs()
    made = [Program(lambda x: [x + 1], *refs, (shape,), lean=lean) for lean in (True, False, True)]
    jobs = [PlacedProgram(program, place, ()) for program in made]
    programs.compile(jobs)
    assert programs.num_compiled == 2
    assert programs.get(jobs[0]) is programs.get(jobs[2]) is not programs.get(jobs[1])


@pytest.mark.parametrize("options", [{"xla_no_such_option": 1}, {"xla_cpu_scheduler_type": "NO_SUCH_ORDER"}])
def test_a_compiler_that_does_not_know_the_option_compiles_without_it(monkeypatch, options):
    lowered = jax.jit(lambda x: x + 1).lower(jnp.zeros(3))
    monkeypatch.setattr(compiling, "_LEAN", {"cpu": options})
    with pytest.raises(jax.errors.JaxRuntimeError, match=next(iter(options))):
        lowered.compile(options)
    np.testing.assert_array_equal(compile_lowered(lowered, "cpu", lean=True)(jnp.zeros(3)), jnp.ones(3))
