"""A pipeline that is built again compiles nothing, one that differs in anything does what it says; W holds little at once."""

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import ArgumentError
from jaxpp.observe.memory.liveness import temporaries
from jaxpp.runtime import compile as compiling
from jaxpp.runtime.compile import EXECUTABLES, Executable, ExecutableCache, PlacedProgram, Programs, compile_lowered, settings
from jaxpp.runtime.place import OneDevice
from jaxpp.stages.cost import count_bytes
from jaxpp.stages.fingerprint import fingerprint
from jaxpp.stages.graph import trace
from jaxpp.stages.program import Program, Ref, Role
from models.resnet import ResNet
from tests.models import gpt_case, mlp_case

COMPILED: list[str] = []


@pytest.fixture(autouse=True, scope="module")
def listener():
    def note(event, _, **__):
        if event.endswith("backend_compile_duration"):
            COMPILED.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)


def make(scale=1.0, constant=(1.0, 2.0), activation=jnp.tanh, rate=0.1, host=None):
    """A pipeline of three layers, made of new functions each time."""
    constant = jnp.asarray(constant)

    def loss_fn(params, batch):
        for w in params:
            batch = activation(batch @ w) * scale + constant
        if host is not None:
            batch = jax.pure_callback(host, jax.ShapeDtypeStruct(batch.shape, batch.dtype), jax.lax.stop_gradient(batch)) + batch
        return jnp.mean(batch**2)

    pipe = jaxpp.Pipeline(loss_fn, optax.adam(rate), num_stages=3, num_microbatches=2)
    init = lambda key: [jax.random.normal(k, (2, 2)) for k in jax.random.split(key, 3)]  # noqa: E731
    return pipe, loss_fn, init


def losses(**options):
    pipe, _, init = make(**options)
    batch = jnp.linspace(-1, 1, 8).reshape(4, 2)
    state = pipe.init(init, jax.random.key(0), batch)
    found = []
    for _ in range(2):
        state, metrics = pipe.step(state, batch)
        found.append(float(metrics.loss))
    return found


def plain_losses(**options):
    _, loss_fn, init = make(**options)
    optimizer, batch = optax.adam(options.get("rate", 0.1)), jnp.linspace(-1, 1, 8).reshape(4, 2)
    params, found = init(jax.random.key(0)), []
    state = optimizer.init(params)
    for _ in range(2):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        found.append(float(loss))
    return found


def test_an_identical_pipeline_compiles_nothing():
    expected = losses()
    before = len(COMPILED)
    assert losses() == expected
    assert len(COMPILED) == before


def test_after_clear_caches_everything_is_compiled_again():
    expected = losses()
    jax.clear_caches()
    before = len(COMPILED)
    assert losses() == expected
    assert len(COMPILED) >= before + 9, "three stages have a forward, a backward and an update each"


@pytest.mark.parametrize(
    "options",
    [{"scale": 0.5}, {"constant": (1.0, 3.0)}, {"activation": jnp.sin}, {"activation": jax.nn.softplus}, {"rate": 0.2}],
    ids=["a number", "an array", "a function", "a function with a derivative of its own", "the optimizer"],
)
def test_pipelines_that_differ_in(options):
    losses()
    np.testing.assert_allclose(losses(**options), plain_losses(**options), rtol=1e-5)


def test_derivative_rules_that_differ_are_told_apart():
    def with_slope(slope):
        @jax.custom_vjp
        def same(x):
            return jnp.tanh(x)

        same.defvjp(lambda x: (same(x), None), lambda _, cotangent: (slope * cotangent,))
        return same

    for slope in (1.0, 2.0, 1.0):
        np.testing.assert_allclose(losses(activation=with_slope(slope)), plain_losses(activation=with_slope(slope)), rtol=1e-5)


@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")  # nobody knows what a callback does with the examples
def test_functions_on_the_host_are_told_apart():
    for add in (0.0, 1.0):
        host = lambda x, add=add: np.asarray(x) + np.float32(add)  # noqa: E731
        np.testing.assert_allclose(losses(host=host), plain_losses(host=host), rtol=1e-5)


def test_a_setting_that_may_change_what_is_compiled_compiles_again():
    losses()
    before = len(COMPILED)
    with jax.default_matmul_precision("highest"):
        losses()
    assert len(COMPILED) > before
    with jax.numpy_rank_promotion("warn"):
        changed = settings()
    assert changed != settings()


def test_what_is_remembered_holds_neither_the_loss_nor_its_arrays():
    pipe, loss_fn, init = make(constant=np.ones(2))
    pipe.init(init, jax.random.key(0), jnp.ones((4, 2)))
    (constant,) = [cell.cell_contents for cell in loss_fn.__closure__ if isinstance(cell.cell_contents, jax.Array)]
    held = [weakref.ref(part) for part in (pipe, pipe.engine, loss_fn, constant, *pipe.engine.programs._compiled)]
    del pipe, loss_fn, init, constant
    gc.collect()
    assert not [ref() for ref in held if ref() is not None]
    assert len(EXECUTABLES) > 0


def test_the_least_recently_used_is_forgotten():
    compiled = jax.jit(jnp.sin).lower(1.0).compile()
    known, made = ExecutableCache(2), [Executable(compiled, name) for name in "abc"]
    for executable in made[:2]:
        known.add(executable.name, executable)
    assert known.get("a") is made[0]
    known.add("c", made[2])
    assert [known.get(name) for name in "abc"] == [made[0], None, made[2]]
    assert len(known) == 2


def _fingerprint(function, *args):
    graph, _ = trace(function, *args)
    return fingerprint(graph.eqns, graph.inputs, graph.outputs, graph.constants)


def _loop(length, factor):
    return lambda x: jax.lax.scan(lambda c, _: (c * factor, None), x, length=length)[0]


def _kept(function):
    """The gradient of a function that keeps what a policy says, which is another object each time."""
    kept = jax.checkpoint(function, policy=lambda primitive, *_, **__: primitive.name == "sin")
    return jax.grad(lambda x: kept(x).sum())


_ONE = jnp.ones(3)
_DIFFERENT = {
    "sin": (jnp.sin, _ONE),
    "cos": (jnp.cos, _ONE),
    "another shape": (jnp.sin, jnp.ones(4)),
    "another dtype": (jnp.sin, _ONE.astype("bfloat16")),
    "a sum": (lambda x: x + 1.0, _ONE),
    "another number": (lambda x: x + 2.0, _ONE),
    "another order": (lambda x, y: x - y, _ONE, _ONE),
    "one order": (lambda x, y: y - x, _ONE, _ONE),
    "twice": (lambda x: (x, x), _ONE),
    "an array": (lambda x: x * np.arange(3.0, dtype="f4"), _ONE),
    "another array": (lambda x: x * np.arange(1.0, 4.0, dtype="f4"), _ONE),
    "a loop": (_loop(3, 2.0), _ONE),
    "a longer loop": (_loop(4, 2.0), _ONE),
    "a loop with another body": (_loop(3, 3.0), _ONE),
    "a checkpoint": (_kept(lambda x: jnp.sin(jnp.sin(x))), _ONE),
    "another checkpoint": (_kept(lambda x: jnp.sin(jnp.cos(x))), _ONE),
    "random": (lambda key: jax.random.normal(key, (2,)), jax.random.key(0)),
    "random by another algorithm": (lambda key: jax.random.normal(key, (2,)), jax.random.key(0, impl="rbg")),
    "a precision": (lambda x: jnp.dot(x, x, precision="highest"), _ONE),
    "another precision": (lambda x: jnp.dot(x, x), _ONE),
}


def test_fingerprints_are_equal_for_the_same_and_differ_for_all_else():
    first, second = ({name: _fingerprint(*what) for name, what in _DIFFERENT.items()} for _ in range(2))
    assert None not in first.values()
    assert first == second
    assert len(set(first.values())) == len(first)


def test_what_cannot_be_compared_has_no_fingerprint():
    host = jax.ShapeDtypeStruct((3,), "float32")
    assert _fingerprint(lambda x: jax.pure_callback(np.sin, host, x), _ONE) is None
    assert _fingerprint(lambda x: (jax.debug.print("{}", x), x)[1], _ONE) is None
    assert _fingerprint(lambda x: x + np.ones(1 << 15, "f4"), jnp.ones(1 << 15)) is None


@pytest.mark.parametrize("layout", [{}, {"data_parallel": 2}], ids=["alone", "replicas"])
def test_a_pipeline_over_a_loop_that_is_built_again_lowers_nothing(monkeypatch, layout):
    def build():
        def loss_fn(params, batch):
            layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None), policy=lambda *_, **__: False)
            return jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)

        pipe = jaxpp.Pipeline(loss_fn, optax.adam(0.1), num_stages=2, num_microbatches=2, **layout)
        state = pipe.init(jnp.ones((4, 3, 3)) / 3, jnp.ones((8, 3)))
        return float(pipe.step(state, jnp.ones((8, 3)))[1].loss)

    lowered, lower = [], compiling._lower
    monkeypatch.setattr(compiling, "_lower", lambda job, given: [lowered.append(job.program.name), lower(job, given)][1])
    first = build()
    assert lowered
    lowered.clear()
    assert build() == first
    assert lowered == []


def test_programs_that_do_the_same_under_other_names_keep_their_names_in_a_trace():
    for schedule, kind, name in (("1f1b", "B", "stage_0_backward"), ("zb-h1", "W", "stage_0_weight_grad")):
        pipe = jaxpp.Pipeline(make()[1], optax.adam(0.1), num_stages=3, num_microbatches=2, schedule=schedule)
        batch = jnp.linspace(-1, 1, 8).reshape(4, 2)
        pipe.init(make()[2], jax.random.key(0), batch)
        plan, _ = pipe.engine.plan("update", batch, None)
        assert {line.about.program for line in plan.instructions if line.label.startswith(f"0{kind}")} == {name}


# What a program holds while it runs: W and a large update make and use one large value after the other.
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


@pytest.mark.parametrize("make", [large_mlp, pytest.param(deep_gpt, marks=pytest.mark.slow), resnet])
@pytest.mark.filterwarnings("ignore::jaxpp.ModelStateWarning")  # the ResNet's statistics are among the parameters
@pytest.mark.long
def test_w_holds_at_most_one_gradient_more_than_b(make):
    model = make()
    whole, split = lines_of(model, "1f1b"), lines_of(model, "zb-h1")
    for stage in (0, 1):
        placed, size = split[f"{stage}W1"]
        outputs = zip(placed.program.outputs, placed.program.results, strict=True)
        gradient = max(count_bytes(aval) for ref, aval in outputs if ref.role == Role.GRAD)
        assert size <= whole[f"{stage}B1"][1] + gradient


@pytest.mark.long
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


def test_a_machine_without_the_assembler_of_gpu_programs_is_told_what_to_install():
    said = {"UNAVAILABLE: No PTX compilation provider is available. Details: ...": ArgumentError, "INTERNAL: ptxas": None}

    class Refused:
        def __init__(self, text):
            self.text = text

        def compile(self):
            raise jax.errors.JaxRuntimeError(self.text)

    for text, kind in said.items():
        with pytest.raises(kind or jax.errors.JaxRuntimeError) as caught:
            compile_lowered(Refused(text), "cuda", lean=True)
        if kind:
            assert str(caught.value).splitlines() == [
                "devices: to compile for a GPU, XLA needs NVIDIA's assembler, a program called ptxas.",
                "  Got: XLA found none on this machine.",
                '  Fix: pip install -e ".[targets]" in the checkout of jaxpp, or put the folder of ptxas on PATH.',
            ]


@pytest.mark.parametrize("version", [2, 4])
def test_a_custom_call_that_nobody_has_registered_is_named(version):
    called = jax.ffi.ffi_call("a_kernel_of_mine", jax.ShapeDtypeStruct((8,), "float32"), custom_call_api_version=version)

    @jax.custom_vjp
    def kernel(x):
        return called(x)

    kernel.defvjp(lambda x: (called(x), None), lambda _, cotangent: (called(cotangent),))
    pipe = jaxpp.Pipeline(lambda p, x: kernel(p["w"] * x.mean(0)).mean(), optax.sgd(0.1), num_stages=1, num_microbatches=1)
    shape = jax.ShapeDtypeStruct((8,), "float32")
    with pytest.raises(ArgumentError) as caught:
        pipe.forecast({"w": shape}, jax.ShapeDtypeStruct((2, 8), "float32"))
    assert str(caught.value).splitlines() == [
        "the model: a custom call is of a function that is registered for the platform of its devices.",
        "  Got: a_kernel_of_mine, of which this process knows none for cpu.",
        '  Fix: call jax.ffi.register_ffi_target("a_kernel_of_mine", ..., platform="cpu") first, or plan for devices that have it.',
    ]
