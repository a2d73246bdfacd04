"""A share of what the least keeps: within its bytes, with the fewest products again, and as exact as before."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import ArgumentError
from jaxpp.stages.cuts.balance import balance, owners
from jaxpp.stages.cuts.cut_loss import cut
from jaxpp.stages.loss.traced_loss import trace_loss
from jaxpp.stages.remat import Choice, policies_of, within
from jaxpp.stages.stage import ProgramOptions
from jaxpp.verify import GRAD_FLOOR, compare, oracle
from tests.models import gpt_case, mlp_case
from tests.stages.test_remat import check_random, gpt_loss, work
from tests.stages.test_stage import matmul_flops

SHARES = (1.0, 0.8, 0.4, 0.1, 0.01)


def stages_of(loss, num_stages, way, platform="cpu"):
    cuts = balance(loss, num_stages)
    return cut(loss, cuts, owners(loss, cuts), ProgramOptions(remat=policies_of(way, num_stages, platform))).stages


def case_loss(case, size=4):
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype), case.batch)
    return trace_loss(case.loss_fn, case.params, batch, case.key, has_aux=True)


def points(loss, platform, shares=SHARES):
    """Bytes and repeated FLOPs of the only stage of a loss, by share."""
    return {share: (code.kept, code.repeated) for share in shares for code in stages_of(loss, 1, share, platform)}


@pytest.fixture(scope="module")
def gpt():
    return gpt_loss("float32", 0.1, depth=2, width=32, length=32, heads=4, size=2)[0]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_smaller_share_keeps_less_and_repeats_more_and_what_it_repeats_buys_less_and_less(gpt, platform):
    found = points(gpt, platform)
    (least,) = stages_of(gpt, 1, "least", platform)
    assert found[1.0] == (least.kept, 0.0)
    floor = found[0.01][0]
    for share, (kept, _) in found.items():
        assert kept <= max(floor, floor + share * (least.kept - floor)), share
    line = sorted(set(found.values()), reverse=True)
    assert len(line) == len(SHARES)
    assert [repeated for _, repeated in line] == sorted(repeated for _, repeated in line)
    bought = [(a[0] - b[0]) / (b[1] - a[1]) for a, b in itertools.pairwise(line) if b[1] > a[1]]  # bytes for a FLOP
    if platform == "cpu":  # on accelerators the traffic of repeating counts too
        assert all(b <= 1.1 * a for a, b in itertools.pairwise(bought)), bought


def test_the_scores_of_attention_go_first():
    loss, _ = gpt_loss("float32", 0.0, depth=2, width=32, length=64, heads=4, size=2)
    (least,), (less,) = (stages_of(loss, 1, way) for way in ("least", 0.7))
    shapes = [[aval.shape for aval in code.residuals] for code in (least, less)]
    assert sorted(shapes[0]) == sorted([*shapes[1], *[(2, 4, 64, 64)] * 2])
    assert less.repeated == 2 * 2 * (2 * 64 * 64 * 32)


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3])
@pytest.mark.parametrize("make_case", [mlp_case, pytest.param(gpt_case, marks=pytest.mark.long)], ids=["mlp", "gpt"])
def test_flops_of_the_compiled_programs_are_those_of_everything_kept_and_what_is_said_to_be_repeated(make_case, share):
    loss = case_loss(make_case())
    for plain, code in zip(stages_of(loss, 2, "keep"), stages_of(loss, 2, share), strict=True):
        once, now = (matmul_flops(each.forward) + matmul_flops(each.backward["B"].then) for each in (plain, code))
        assert now == once + code.repeated
        assert matmul_flops(code.forward) == code.products
        split = sum(matmul_flops(code.backward[kind].then) for kind in "IW" if kind in code.backward)
        assert split == matmul_flops(code.backward["B"].then)


def test_recompute_says_what_it_repeats():
    loss = case_loss(mlp_case())
    for plain, code in zip(stages_of(loss, 2, "keep"), stages_of(loss, 2, "recompute"), strict=True):
        once, now = (matmul_flops(each.forward) + matmul_flops(each.backward["B"].then) for each in (plain, code))
        assert now == once + code.repeated > once


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb-h1", marks=pytest.mark.long)])
@pytest.mark.parametrize("remat", [0.3, pytest.param(0.6, marks=pytest.mark.long), pytest.param(0.9, marks=pytest.mark.long)])
@pytest.mark.parametrize("make_case", [mlp_case, pytest.param(gpt_case, marks=pytest.mark.long)], ids=["mlp", "gpt"])
def test_gradients_do_not_depend_on_the_share(make_case, remat, schedule):
    case = make_case()
    options = {"num_stages": 2, "num_microbatches": 3, "schedule": schedule, "has_aux": True, "remat": remat}
    args = (case.params, case.batch, *([] if case.key is None else [case.key]))
    (loss, _), grads = jaxpp.value_and_grad(case.loss_fn, **options)(*args)
    expected, _, expected_grads = oracle(case.loss_fn, case.params, case.batch, case.key, 3, has_aux=True, reducers=case.reducers)
    compare("loss", loss, expected)
    compare("grads", grads, expected_grads, floor=GRAD_FLOOR)


@pytest.mark.long
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_no_random_model_keeps_more_than_everything_within_a_share(platform):
    for seed in range(6):
        (policy,) = policies_of(0.4, 1, platform)
        check_random(seed, policy=policy, count=False)


def scanned(depth=3):
    def loss_fn(params, x):
        def layer(x, w):
            q = jnp.einsum("bti,ij->btj", x, w)
            scores = jax.nn.softmax(jnp.einsum("bti,bsi->bts", q, q))
            return x + jnp.einsum("bts,bsi->bti", scores, q), None

        x, _ = jax.lax.scan(layer, x, params)
        return (x**2).mean()

    params, x = jax.ShapeDtypeStruct((depth, 8, 8), jnp.float32), jax.ShapeDtypeStruct((2, 16, 8), jnp.float32)
    return trace_loss(loss_fn, params, x, None, has_aux=False)


def test_of_a_loop_over_layers_less_is_kept_and_each_layer_repeats():
    loss = scanned()
    found = points(loss, "cpu", (1.0, 0.7, 0.01))
    (keep,) = stages_of(loss, 1, "keep")
    assert keep.kept > found[1.0][0] > found[0.7][0] > found[0.01][0]
    scores = 3 * 2 * (2 * 16 * 16 * 8)  # of all layers
    assert 0 == found[1.0][1] < found[0.7][1] <= 2 * scores + 3 * 2 * (2 * 16 * 8 * 8)
    assert found[0.7][1] <= found[0.01][1]


def test_nothing_is_decided_again_on_a_product_that_is_repeated():
    def loss_fn(params, x):
        for w in params:
            x = jnp.where(x @ w > 0.1, x, 2 * x) @ w
        return (x**2).mean()

    params = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 3
    loss = trace_loss(loss_fn, params, jax.ShapeDtypeStruct((4, 8), jnp.float32), None, has_aux=False)
    (code,) = stages_of(loss, 1, 0.01)
    assert code.repeated > 0
    assert work(code, "B")["gt"] == 3  # those of the forward
    assert sum(aval.dtype == bool for aval in code.residuals) == 2  # of the first layer, the operand of its product says it


@pytest.mark.parametrize("wrong", [0.0, 1.5, -0.5, float("nan"), 1, 0, [0.5, 2.0]])
def test_what_is_no_share_is_refused(wrong):
    with pytest.raises(ArgumentError, match=r"above 0\.0, at most 1\.0") as error:
        jaxpp.Pipeline(lambda p, b: 0.0, optax.sgd(1.0), num_stages=2, remat=wrong)
    assert "Fix: " in str(error.value)


def test_numpys_floats_are_shares_and_a_whole_share_is_the_least():
    assert policies_of(np.float64(0.5), 1, "cpu") == policies_of(0.5, 1, "cpu") == policies_of([np.float32(0.5)], 1, "cpu")
    assert policies_of(1.0, 1, "cpu") == policies_of("least", 1, "cpu")


def random_line(rng):
    """Choices of which any subset may be taken: what each saves, and the work that it costs."""
    saves, works = rng.integers(1, 100, 8).astype(float), rng.integers(1, 100, 8).astype(float)
    total = saves.sum()

    def cheapest(price):
        taken = [k for k in range(8) if saves[k] > price * works[k]]
        size = total - saves[taken].sum()
        return Choice(size, size, works[taken].sum(), frozenset(taken))

    return total, cheapest


def test_within_some_bytes_the_corner_with_the_least_work_is_found():
    for seed in range(50):
        rng = np.random.default_rng(seed)
        total, cheapest = random_line(rng)
        asked = []

        def counted(price, cheapest=cheapest, asked=asked):
            asked.append(price)
            return cheapest(price)

        corners = {cheapest(price) for price in np.geomspace(1e-3, 1e3, 2000)}
        for room in (total, 0.7 * total, 0.2 * total, 0.0):
            found = within(room, cheapest(1e6), cheapest(0.0), counted)
            best = min((corner for corner in corners if corner.num_bytes <= room), key=lambda corner: corner.work)
            assert found.work == best.work, seed
        assert len(asked) <= 4 * 9
