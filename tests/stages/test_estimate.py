"""What equations take on a device, by hand: arithmetic at the peak, or bytes at the bandwidth; fused ones read and write once."""

import types
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from jaxpp.efficiency import moved_share, product_seconds
from jaxpp.runtime.not_public import cudnn_of
from jaxpp.stages.cuts.by_step import step_costs
from jaxpp.stages.estimate import CPU_RATES, Rates, rates_of, seconds_of, temporary_bytes
from jaxpp.stages.loss.traced_loss import trace_loss
from jaxpp.stages.remat import RECOMPUTE, Least, RematPolicy
from jaxpp.targets import TARGETS

H100 = next(each for each in TARGETS if each.name == "h100")
RATES = Rates(H100.peaks, H100.bandwidth, H100.links.peer, H100.links.network, H100.links.host)


def seconds(function, *shapes, dtype=jnp.float32, rates=RATES):
    jaxpr = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)).jaxpr
    return sum(seconds_of(jaxpr.eqns, jaxpr.outvars, rates))


def test_a_large_product_takes_its_flops_at_the_peak_of_its_type():
    large = (4096, 4096)
    flops = 2 * 4096**3
    assert seconds(jnp.matmul, large, large) == pytest.approx(flops / H100.peaks.tensorfloat32)
    assert seconds(lambda a, b: jnp.matmul(a, b, precision="highest"), large, large) == pytest.approx(flops / H100.peaks.float32)
    assert seconds(jnp.matmul, large, large, dtype=jnp.bfloat16) == pytest.approx(flops / H100.peaks.bfloat16)


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_by_cudnn_takes_its_products_and_a_causal_mask_halves_them(is_causal):
    def attend(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation="cudnn")

    def with_gradients(*given):
        return jax.vjp(attend, *given)[1](given[0])

    given, fewer = (2, 8192, 8, 128), (2, 8192, 2, 128)  # heads of queries, and of keys
    product = 2 * 2 * 8 * 8192 * 8192 * 128 / (1 + is_causal) / H100.peaks.bfloat16
    device = mock.Mock(spec=jax.Device, platform="gpu", addressable_memories=list, device_kind=H100.kind)
    with cudnn_of([device]):
        taken = seconds(attend, given, fewer, fewer, dtype=jnp.bfloat16)
        both = seconds(with_gradients, given, fewer, fewer, dtype=jnp.bfloat16)
    assert taken == pytest.approx(2 * product)
    assert both == pytest.approx((2 + 5) * product, rel=0.01)


def test_a_thin_product_takes_its_bytes():
    num_bytes = 4 * (8 * 4096 + 4096 * 4096 + 8 * 4096)
    assert seconds(jnp.matmul, (8, 4096), (4096, 4096)) == pytest.approx(num_bytes / H100.bandwidth)


def test_fused_arithmetic_reads_and_writes_once():
    shape = (1024, 1024)
    chain = seconds(lambda x, y: jnp.tanh(x * y + 1) * x, shape, shape)
    assert chain == pytest.approx(3 * 4 * 1024 * 1024 / H100.bandwidth, rel=0.1)
    softmax = seconds(jax.nn.softmax, shape)
    assert softmax == pytest.approx(2 * 4 * 1024 * 1024 / H100.bandwidth, rel=0.2)


def test_what_a_product_reads_is_written_and_views_are_free():
    shape, num_bytes = (1024, 1024), 4 * 1024 * 1024

    def both(x, w):
        return jnp.reshape(jnp.tanh(x).T, shape) @ w

    product = 3 * num_bytes / H100.bandwidth
    assert seconds(both, shape, shape) == pytest.approx(2 * num_bytes / H100.bandwidth + product, rel=0.15)


def test_each_kernel_takes_some_time_of_its_own():
    shape, rates = (64, 64), RATES._replace(kernel=1.0)

    def kernels(function, *shapes):
        return seconds(function, *shapes, rates=rates) - seconds(function, *shapes)

    assert kernels(jnp.matmul, shape, shape) == pytest.approx(1)
    assert kernels(lambda x, y: jnp.tanh(x * y + 1) * x, shape, shape) == pytest.approx(1), (
        "a fusion is one kernel, where it writes"
    )
    assert kernels(lambda x, w: (jnp.tanh(x @ w) @ w).T, shape, shape) == pytest.approx(3), "and views are none"
    assert kernels(lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, length=7)[0], shape) == pytest.approx(7)


def test_a_loop_takes_all_its_iterations_and_rows_are_read_not_tables():
    shape = (256, 256)
    once = seconds(lambda x: jnp.tanh(x @ x), shape)
    loop = seconds(lambda x: jax.lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, length=7)[0], shape)
    assert loop == pytest.approx(7 * once)
    ids = jnp.zeros(8, int)
    rows = seconds(lambda table: table.at[ids].get(mode="clip"), (50_000, 64))
    assert rows < 100 * 8 * 64 * 4 / H100.bandwidth


def test_every_device_has_rates():
    assert rates_of(jax.devices()[0]) is CPU_RATES
    gpu = rates_of(types.SimpleNamespace(platform="gpu", device_kind="a GPU that jaxpp does not know"))
    assert (gpu.bandwidth, CPU_RATES.kernel) == (H100.bandwidth, 0.0) and gpu.kernel > 0.0


def layers(learns):
    def loss(params, x):
        for w in params:
            x = x @ w
        return x.sum()

    params = [jax.ShapeDtypeStruct((64, 64), "float32") for _ in learns]
    frozen = frozenset(k for k, learn in enumerate(learns) if not learn)
    return trace_loss(loss, params, jax.ShapeDtypeStruct((64, 64), "float32"), None, has_aux=False, frozen=frozen)


def products(costs):
    """How many products each of F, I and W has, from their times, of the layers alone."""
    one = costs.forward[0]
    return [[round(seconds / one) for seconds in row[:-1]] for row in costs[:3]]


def test_the_costs_of_a_step_are_products_counted_by_hand():
    found = step_costs(layers([True] * 4), RematPolicy(), RATES)
    assert products(found) == [[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]]
    found = step_costs(layers([False, False, True, True]), RematPolicy(), RATES)
    assert products(found) == [[1, 1, 1, 1], [0, 0, 0, 1], [0, 0, 1, 1]]
    found = step_costs(layers([True, False, False, True]), RematPolicy(), RATES)
    assert products(found) == [[1, 1, 1, 1], [0, 1, 1, 1], [1, 0, 0, 1]]
    assert found.first == 0
    assert step_costs(layers([False, False, True, True]), RematPolicy(), RATES).first == 2


def test_what_is_computed_again_counts_in_the_backward():
    kept, again = (step_costs(layers([True] * 4), policy, RATES) for policy in (Least(), RECOMPUTE))
    assert kept.forward == again.forward
    extra = sum(again.total) - sum(kept.total)
    assert extra == pytest.approx(3 * kept.forward[0], rel=0.1), "all forwards but the last, whose result nobody needs"


def test_a_function_that_only_runs_forward_has_no_backward():
    def fn(params, x):
        return x @ params

    loss = trace_loss(
        fn,
        jax.ShapeDtypeStruct((8, 8), "float32"),
        jax.ShapeDtypeStruct((4, 8), "float32"),
        None,
        has_aux=False,
        is_loss=False,
        differentiable=False,
    )
    found = step_costs(loss, RematPolicy(), RATES)
    assert sum(found.input_grad) == sum(found.weight_grad) == 0 < sum(found.forward)


ON_H100 = rates_of(types.SimpleNamespace(platform="gpu", device_kind=H100.kind))


def test_of_a_gpu_products_take_what_those_of_their_size_reach():
    def seconds(function, *shapes):
        jaxpr = jax.make_jaxpr(function)(*(jnp.zeros(shape, "bfloat16") for shape in shapes)).jaxpr
        (found,) = seconds_of(jaxpr.eqns, jaxpr.outvars, ON_H100)
        return found - ON_H100.kernel

    def expected(*sizes):
        return product_seconds(H100, H100.peaks.bfloat16, "bfloat16", sizes)

    assert seconds(jnp.matmul, (4096, 1024), (1024, 4096)) == pytest.approx(expected(1, 4096, 4096, 1024))
    assert seconds(
        partial(jax.lax.dot_general, dimension_numbers=(((2,), (1,)), ((0,), (0,)))), (8, 2048, 1024), (8, 1024, 2048)
    ) == (pytest.approx(expected(8, 2048, 2048, 1024)))
    convolve = partial(jax.lax.conv, window_strides=(1, 1), padding="SAME")
    assert seconds(convolve, (8, 512, 32, 32), (512, 512, 3, 3)) == pytest.approx(expected(1, 8 * 32 * 32, 512, 9 * 512))
    half, whole = (seconds(jnp.matmul, (rows, 4096), (4096, 4096)) for rows in (128, 1024))
    assert whole < 0.6 * 8 * half, "a small microbatch leaves cores idle"


def test_of_a_gpu_bytes_take_what_kernels_of_their_kind_reach():
    x = jnp.zeros((4096, 4096), "float32")
    for function, kind, moved in ((jnp.negative, "elementwise", 2), (lambda x: x.max(), "reduction", 1)):
        jaxpr = jax.make_jaxpr(function)(x).jaxpr
        found = sum(seconds_of(jaxpr.eqns, jaxpr.outvars, ON_H100)) - ON_H100.kernel
        assert found == pytest.approx(moved * x.nbytes / H100.bandwidth / moved_share(kind), rel=1e-3)


def test_of_a_cpu_rates_are_reached_whatever_the_size():
    assert CPU_RATES.target is None
    jaxpr = jax.make_jaxpr(jnp.matmul)(jnp.zeros((3, 512)), jnp.zeros((512, 3))).jaxpr
    (found,) = seconds_of(jaxpr.eqns, jaxpr.outvars, CPU_RATES)
    assert found == pytest.approx(max(2 * 9 * 512 / CPU_RATES.peaks.tensorfloat32, 4 * (2 * 3 * 512 + 9) / CPU_RATES.bandwidth))


def test_a_gradient_that_is_scaled_or_added_to_another_is_made_in_the_buffer_of_its_result():
    x, scale = jnp.zeros((64, 64), "float32"), jnp.float32(2)

    def held(function, *arguments):
        jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
        return temporary_bytes(jaxpr.eqns, jaxpr.outvars)

    assert held(lambda x, scale: [scale * (x @ x).T, scale * (x.T @ x)], x, scale) == 0
    assert held(lambda x, scale: [scale * (x @ x) + x, scale * (x.T @ x) + x], x, scale) == 0
    assert held(lambda x, scale: scale * ((x @ x) @ x), x, scale) == x.nbytes
