"""The trainer: init, steps, evaluation, verification, stages by hand."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import CutError, PullbackError, StateError, VerifyError
from jaxpp.verify import GRAD_FLOOR, compare, oracle
from tests.models import gpt_case, mlp_case

MODELS = [pytest.param(mlp_case, id="mlp"), pytest.param(gpt_case, id="gpt", marks=pytest.mark.long)]


@functools.cache
def trained(make, stages=3, microbatches=2, **options):
    case = make()
    pipe = jaxpp.Pipeline(
        case.loss_fn, optax.adamw(1e-2), num_stages=stages, num_microbatches=microbatches, has_aux=True, **options
    )
    return case, pipe, pipe.init(case.init, jax.random.key(0), case.batch)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jax.device_get(tree))]


@pytest.mark.parametrize("make_case", MODELS)
def test_init_gives_the_bits_of_jit_init_and_puts_each_leaf_on_its_owner(make_case):
    case, pipe, state = trained(make_case)
    assert bits(state.params) == bits(jax.jit(case.init)(jax.random.key(0)))
    assert bits(state.opt_state) == bits(optax.adamw(1e-2).init(case.params))
    homes = {path: stage.device for stage in pipe.stages for path in stage.params}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        assert leaf.devices() == {homes[jax.tree_util.keystr(path, simple=True, separator="/")]}


def test_the_whole_model_is_never_on_one_device_nor_on_the_host(monkeypatch):
    case = mlp_case(depth=11)
    pipe = jaxpp.Pipeline(case.loss_fn, optax.adam(1e-3), num_stages=4, has_aux=True)
    from_host = []
    monkeypatch.setattr(np, "asarray", lambda *args, real=np.asarray, **kw: from_host.append(args) or real(*args, **kw))
    before = {id(array) for array in jax.live_arrays()}
    state = pipe.init(case.init, jax.random.key(0), case.batch)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(state.held))
    for device in {stage.device for stage in pipe.stages}:
        here = [a for a in jax.live_arrays() if id(a) not in before and a.devices() == {device}]
        assert sum(array.nbytes for array in here) < 0.4 * total
    assert not [args for args in from_host if isinstance(args[0], jax.Array) and args[0].size > 2]


def test_init_from_parameters_copies_them_to_their_owners_and_leaves_the_originals_alone():
    case, _, _ = trained(mlp_case)
    pipe = jaxpp.Pipeline(case.loss_fn, optax.sgd(0.1), num_stages=3, has_aux=True)
    mine = jax.tree.map(jnp.copy, case.params)
    state = pipe.init(mine, case.batch)
    assert bits(state.params) == bits(mine)
    pipe.step(state, case.batch)
    assert bits(mine) == bits(case.params)
    on_host = jax.device_get(mine)
    state = pipe.init(on_host, case.batch)
    pipe.step(state, case.batch)
    assert bits(on_host) == bits(case.params)


@pytest.mark.long
def test_a_checkpoint_opens_at_any_number_of_stages():
    case, pipe, state = trained(mlp_case)
    saved = jax.device_get(pipe.step(state, case.batch, donate=False)[0])
    other = jaxpp.Pipeline(case.loss_fn, optax.adamw(1e-2), num_stages=2, num_microbatches=2, has_aux=True)
    fresh = other.init(case.init, jax.random.key(1), case.batch)
    restored = jax.tree.unflatten(jax.tree.structure(fresh), jax.tree.leaves(saved))
    compare("state", other.step(restored, case.batch)[0].params, pipe.step(saved, case.batch)[0].params)


@pytest.mark.parametrize("options", [{}, pytest.param({"schedule": "gpipe"}, marks=pytest.mark.long)], ids=["1f1b", "gpipe"])
@pytest.mark.parametrize("make_case", MODELS)
def test_verify_passes_on_a_right_pipeline_and_leaves_the_state_as_it_was(make_case, options):
    case, pipe, state = trained(make_case, **options)
    before = bits(state)
    pipe.verify(state, case.batch, case.key)
    assert bits(state) == before


def test_verify_names_the_first_leaf_that_differs_and_both_values_when_a_stage_was_tampered_with(monkeypatch):
    case = mlp_case()
    pipe = jaxpp.Pipeline(case.loss_fn, optax.sgd(0.1), num_stages=3, num_microbatches=2, has_aux=True)
    state = pipe.init(case.init, jax.random.key(0), case.batch)
    plan, lowered = pipe.engine.plan("grads", case.batch, None)
    lines = [line._replace(call=doubled(line.call)) if line.label == "1B0" else line for line in plan.instructions]
    tampered = dataclasses.replace(plan, instructions=tuple(lines)), lowered
    monkeypatch.setattr(pipe.engine, "plan", lambda *_, **__: tampered)
    with pytest.raises(VerifyError) as error:
        pipe.verify(state, case.batch)
    first = min(path for path in pipe.stages[0].params + pipe.stages[1].params)
    assert f"grads['{first.split('/')[0]}']['{first.split('/')[1]}']" in str(error.value)
    assert "pipelined " in str(error.value)
    assert "single device " in str(error.value)


@pytest.mark.parametrize(("activation", "hint"), [(jax.nn.relu, True), (jnp.tanh, False)], ids=["relu", "tanh"])
def test_what_to_do_about_a_difference_tells_of_rounding_where_numbers_are_compared(activation, hint, monkeypatch):
    params = {name: jnp.eye(4) for name in "ab"}
    pipe = jaxpp.Pipeline(
        lambda p, batch: jnp.mean((activation(batch @ p["a"]) @ p["b"]) ** 2), optax.sgd(0.1), num_stages=2, cuts=["b"]
    )
    state, run = pipe.init(params, jnp.ones((4, 4))), pipe.engine.run
    monkeypatch.setattr(pipe.engine, "run", lambda *args, **options: twice(run(*args, **options)))
    with pytest.raises(VerifyError, match=r"if .*, please report it\.$") as caught:
        pipe.verify(state, jnp.ones((4, 4)))
    assert ("a relu or another comparison" in " ".join(str(caught.value).split())) == hint


def twice(outcome):
    return outcome._replace(grads=[2 * grad for grad in outcome.grads])


def advantages(params, batch, key=None):
    """A loss whose terms cancel: 1, -1, 1, ... times ratios that are all 1."""
    scores = jnp.tanh(batch["x"] @ params["a"]) @ params["b"]
    return (jnp.exp(scores - jax.lax.stop_gradient(scores)) * batch["advantage"]).mean(), {"mean": scores.mean()}


def differences(params, batch):
    """The same as the difference of two sums that are weighed, with a scale."""
    scores, more = jnp.tanh(batch["x"] @ params["a"]) @ params["b"], batch["advantage"] > 0
    ones = jnp.exp(scores - jax.lax.stop_gradient(scores))
    return -2 * (jnp.dot(ones, more.astype("f")) - jnp.where(more, 0, ones).sum()) / 4, {}


@pytest.mark.parametrize("loss_fn", [advantages, pytest.param(differences, marks=pytest.mark.long)])
def test_a_loss_whose_terms_cancel_is_compared_relative_to_its_terms(loss_fn, monkeypatch):
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(8, 5)).astype("f4"), "advantage": np.tile([1, -1], 4).astype("f4")}
    params = {"a": rng.normal(size=(5, 6)).astype("f4"), "b": rng.normal(size=6).astype("f4")}
    options = {"num_stages": 2, "num_microbatches": 2, "has_aux": True}
    options |= {"reduction": "sum"} if loss_fn is differences else {}
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), **options)
    state, run = pipe.init(params, batch), pipe.engine.run

    def verify(error):
        monkeypatch.setattr(pipe.engine, "run", lambda *args, **kwargs: moved(run(*args, **kwargs), error))
        return pipe.verify(state, batch)

    def moved(outcome, error):
        return outcome._replace(loss=outcome.loss + error)

    verify(3e-7)  # a rounding or two of numbers of size 1
    with pytest.raises(VerifyError, match="loss does not"):
        verify(3e-4)
    # What has terms of one sign is compared relative to its own size, as ever.
    batch["advantage"] = np.full(8, 1e-3, "f4")
    state = pipe.state
    verify(0.0)
    if loss_fn is advantages:
        with pytest.raises(VerifyError, match="loss does not"):
            verify(3e-7)


def doubled(call):
    return lambda *args: [2 * value for value in call(*args)]


def test_step_reports_loss_aux_and_gradient_norm_by_attribute_and_by_name():
    case, pipe, state = trained(gpt_case)
    _, metrics = pipe.step(state, case.batch, case.key, donate=False)
    loss, aux, grads = oracle(case.loss_fn, case.params, case.batch, case.key, 2, has_aux=True, reducers=case.reducers)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-5)
    np.testing.assert_allclose(metrics.aux["top"], aux["top"], rtol=1e-5)


def test_evaluate_gives_the_loss_without_changing_anything_and_takes_another_loss():
    case, pipe, state = trained(gpt_case)
    before = bits(state)
    loss, aux, _ = oracle(case.loss_fn, case.params, case.batch, case.key, 2, has_aux=True, reducers=case.reducers)
    found = pipe.evaluate(state, case.batch, case.key)
    compare("loss", (found.loss, found.aux), (loss, aux))

    def without_dropout(params, batch):
        logits = case.model.apply({"params": params}, batch[:, :-1], deterministic=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean(), ()

    want, _ = without_dropout(case.params, case.batch)
    np.testing.assert_allclose(pipe.evaluate(state, case.batch, loss_fn=without_dropout).loss, want, rtol=1e-5)
    assert bits(state) == before


def test_a_batch_of_another_size_works_and_is_compiled_once():
    case, pipe, state = trained(mlp_case)
    for size in (19, 7, 2, 12):
        batch = jax.tree.map(lambda leaf, size=size: jnp.resize(leaf, (size, *leaf.shape[1:])), case.batch)
        _, metrics = pipe.step(state, batch, donate=False)
        programs = len(pipe.engine.programs)
        _, again = pipe.step(state, batch, donate=False)
        assert len(pipe.engine.programs) == programs
        loss, aux, _ = oracle(case.loss_fn, case.params, batch, None, 2, has_aux=True, reducers=case.reducers)
        compare("loss", (metrics.loss, metrics.aux), (loss, aux))
        assert bits(metrics) == bits(again), "two calls in a row do not leak into one another"


def test_weight_makes_a_token_mean_over_padded_microbatches_the_mean_over_the_whole_batch():
    rng = np.random.default_rng(0)
    x, lengths = rng.normal(size=(8, 6, 4)).astype(np.float32), np.array([6, 5, 4, 1, 1, 2, 3, 6])
    batch = {"x": x, "mask": (np.arange(6) < lengths[:, None]).astype(np.float32)}
    params = {"a": jnp.asarray(rng.normal(size=(4, 4)), jnp.float32), "b": jnp.asarray(rng.normal(size=(4, 1)), jnp.float32)}

    def loss_fn(params, batch):
        each = (jnp.tanh(batch["x"] @ params["a"]) @ params["b"])[..., 0] ** 2
        return (each * batch["mask"]).sum() / batch["mask"].sum()

    want = jax.value_and_grad(loss_fn)(params, batch)
    options = {"num_stages": 2, "num_microbatches": 3}
    weighted = jaxpp.value_and_grad(loss_fn, weight=lambda batch: batch["mask"].sum(), **options)(params, batch)
    compare("weighted", weighted, want)
    with pytest.warns(jaxpp.MicrobatchWarning, match="weight=lambda batch: batch\\['mask'\\].sum()"):
        unweighted = jaxpp.value_and_grad(loss_fn, **options)(params, batch)
    with pytest.raises(VerifyError):
        compare("unweighted", unweighted, want)


def test_a_step_reuses_the_buffers_of_its_state_unless_told_to_keep_them():
    case = mlp_case()
    pipe = jaxpp.Pipeline(case.loss_fn, optax.adam(1e-3), num_stages=2, has_aux=True)
    state = pipe.init(case.init, jax.random.key(0), case.batch)
    kept, _ = pipe.step(state, case.batch, donate=False)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.held))
    used, _ = pipe.step(state, case.batch)
    assert bits(kept) == bits(used)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    with pytest.raises(StateError, match="consumed by an earlier step"):
        pipe.step(state, case.batch)
    with pytest.raises(StateError, match=r"donate=False"):
        pipe.evaluate(state, case.batch)


def test_an_error_before_the_update_leaves_the_state_usable():
    case = mlp_case()
    pipe = jaxpp.Pipeline(case.loss_fn, optax.adam(1e-3), num_stages=2, has_aux=True)
    state = pipe.init(case.init, jax.random.key(0), case.batch)
    wrong = {"x": case.batch["x"][:, :3], "y": case.batch["y"]}
    with pytest.raises(Exception, match="dense_0") as error:
        pipe.step(state, wrong)
    assert type(error.value).__module__.startswith("flax"), "the user's own exception, unchanged"
    assert any("jaxpp: raised while tracing the loss" in note for note in error.value.__notes__)
    new, _ = pipe.step(state, case.batch)
    assert jax.tree.leaves(new)


def test_an_exception_while_a_stage_runs_names_the_action():
    case = mlp_case()
    pipe = jaxpp.Pipeline(case.loss_fn, optax.adam(1e-3), num_stages=2, has_aux=True)
    state = pipe.init(case.init, jax.random.key(0), case.batch)

    def broken(instruction, slots):
        if instruction.label == "1F1":
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck") as error:
        pipe.engine.run("update", pipe.engine.leaves(state.held), case.batch, None, observer=broken)
    assert error.value.args == ("out of luck",)
    assert error.value.__notes__ == ["jaxpp: raised while dispatching 1F1"]
    pipe.step(state, case.batch)


WIDTHS = ((1024, 1024, 512), (512, 256, 128))


def dense(params, x):
    for w, b in params:
        x = jnp.tanh(x @ w + b)
    return x


def widths_init(key):
    keys = jax.random.split(key, 4)
    pairs = [list(itertools.pairwise(widths)) for widths in WIDTHS]
    return tuple(
        tuple((jax.random.normal(keys[2 * s + k], (a, b)) / a**0.5, jnp.zeros(b)) for k, (a, b) in enumerate(layers))
        for s, layers in enumerate(pairs)
    )


def square(y, targets):
    return jnp.mean((y - targets) ** 2)


def test_hand_written_stages_of_different_widths_train_and_equal_their_oracle():
    pipe = jaxpp.Pipeline.from_stages([dense, dense], loss=square, optimizer=optax.sgd(0.5), num_microbatches=3)
    rng = np.random.default_rng(0)
    batch = (rng.normal(size=(8, 1024)).astype(np.float32), rng.normal(size=(8, 128)).astype(np.float32))
    state = pipe.init(widths_init, jax.random.key(0), batch)
    assert [stage.sends for stage in pipe.stages] == [("f32[3,512] to 1",), ()]
    assert [leaf.devices() for leaf in jax.tree.leaves(state.params)] == [{pipe.stages[s].device} for s in (0, 0, 0, 0, 1, 1, 1, 1)]
    pipe.verify(state, batch)
    losses = []
    for _ in range(5):
        state, metrics = pipe.step(state, batch)
        losses.append(float(metrics.loss))
    assert losses == sorted(losses, reverse=True)
    with pytest.raises(ValueError, match="pair"):
        pipe.step(state, batch[0])


def test_a_pipeline_of_a_class_of_ones_own_begins_as_that_class_does():
    class Named(jaxpp.Pipeline):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.name = "mine"

    pipe = Named.from_stages([dense, dense], loss=square, optimizer=optax.sgd(0.5), hbm="1 GiB")
    assert pipe.name == "mine" and type(pipe) is Named


@pytest.mark.long
def test_stages_run_by_hand_give_the_gradients_of_the_whole_step():
    pipe = jaxpp.Pipeline.from_stages([dense, dense], loss=square, optimizer=optax.sgd(0.5), num_microbatches=1)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 1024)).astype(np.float32), rng.normal(size=(4, 128)).astype(np.float32)
    state = pipe.init(widths_init, jax.random.key(0), (x, y))
    activation, pullback_0 = pipe.stages[0].forward(state.params[0], x)
    assert activation.devices() == {pipe.stages[0].device}
    output, pullback_1 = pipe.stages[1].forward(state.params[1], activation)
    cotangent = jax.grad(square)(output, jax.device_put(y, pipe.stages[1].device))
    grads_1, cotangent = pullback_1(cotangent)
    grads_0, _ = pullback_0(cotangent)  # it comes from stage 1
    assert jax.tree.leaves(grads_0)[0].devices() == {pipe.stages[0].device}
    _, _, want = oracle(pipe.engine.options.loss_fn, jaxpp.gather(state.params), (x, y), None, 1)
    compare("grads", (grads_0, grads_1), want)
    with pytest.raises(PullbackError, match="a pullback runs once"):
        pullback_1(cotangent)


@pytest.mark.long
def test_the_stages_of_a_cut_model_can_be_run_by_hand_too():
    case, pipe, state = trained(gpt_case)
    batch, key = case.batch[:6], jax.random.fold_in(case.key, 0)
    x, pullbacks = {}, []
    for stage in pipe.stages:
        x, pullback = stage.forward(state.params, x, batch, key)
        pullbacks.append(pullback)
    (want, _), want_grads = jax.value_and_grad(case.loss_fn, has_aux=True)(case.params, batch, key)
    np.testing.assert_allclose(x, want, rtol=1e-5)
    cotangent, total = jnp.ones(()), None
    for pullback in reversed(pullbacks):
        grads, cotangent = pullback(cotangent)
        grads = jaxpp.gather(grads)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    compare("grads", total, want_grads, floor=GRAD_FLOOR)


def test_the_stage_table_shows_where_everything_is(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, pipe, _ = trained(gpt_case)
    lines = str(pipe.stages).splitlines()
    assert lines[0].split() == ["stage", "device", "modules", "params", "bytes", "F", "B", "share", "kept", "sends"]
    assert len(lines) == 6
    assert "(+1 tied)" in lines[3]
    assert lines[4].startswith("F, B: FLOPs of a microbatch, forward and backward; share: of the time; kept: bytes from F to B")
    share = pipe.stages[0].seconds / sum(stage.seconds for stage in pipe.stages)
    speed = f"1f1b is about {pipe.stages.speed_up:.3g} times as fast as one device"
    assert lines[5] == f"7,232 parameters; largest share {share:.1%}, on cpu:0; {speed}"
    assert 1 < pipe.stages.speed_up < 1 / share, "the pipeline fills and drains"
    assert all(1.5 < stage.backward_flops / stage.flops < 2.5 for stage in pipe.stages)
    assert "f32[6,8,16] to 1" in lines[1]
    monkeypatch.setenv("COLUMNS", "60")
    folded = str(pipe.stages).splitlines()
    assert max(map(len, folded)) <= 60
    assert set(re.split(r"[ ;',]+", str(folded))) >= set(lines[0].split()) | set(re.split("[ ,]+", lines[1]))
    assert [line.split()[0] for line in folded if not line.startswith(" ")][:4] == ["stage", "0", "1", "2"], (
        "no row is in two blocks"
    )
    page = pipe.stages._repr_html_()
    assert page.count("<tr>") == 4 and "7,232 parameters" in page
    assert str(pipe.schedule).startswith("1f1b: 3 ranks")


def test_stages_and_schedule_printed_together_stand_on_lines_of_their_own(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, pipe, _ = trained(gpt_case)
    print(pipe.stages, pipe.schedule, pipe.stages)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert [k for k, line in enumerate(lines) if line.startswith("stage  device")] == [0, len(lines) - 7]
    assert lines[6].startswith("1f1b: 3 ranks")


def test_value_and_grad_brings_the_gradients_to_the_parameters():
    case = mlp_case()
    away = jax.device_put(case.params, jax.devices()[5])
    grad_fn = jaxpp.value_and_grad(case.loss_fn, num_stages=2, has_aux=True)
    (loss, aux), grads = grad_fn(away, case.batch)
    assert {device for leaf in jax.tree.leaves(grads) for device in leaf.devices()} == {jax.devices()[5]}
    assert jax.tree.structure(grads) == jax.tree.structure(case.params)
    assert loss.shape == ()
    assert aux["logits"].shape == (19, 2)


def test_gather_brings_a_spread_tree_together():
    _, _, state = trained(mlp_case)
    assert float(optax.tree.norm(jaxpp.gather(state.params))) > 0
    assert {d for leaf in jax.tree.leaves(jaxpp.gather(state, jax.devices()[2])) for d in leaf.devices()} == {jax.devices()[2]}


def test_a_stage_by_hand_that_computes_nothing_is_named():
    def dense(params, x):
        return jnp.tanh(x @ params["w"])

    def nothing(params, x):
        return x

    for stages, words in (([dense, nothing, dense], "stage 1 does not"), ([nothing, dense], "one that returns what it is given")):
        pipe = jaxpp.Pipeline.from_stages(stages, loss=lambda x, y: ((x - y) ** 2).mean(), optimizer=optax.sgd(0.1))
        params = [{"w": jnp.eye(4)} if stage is dense else {} for stage in stages]
        with pytest.raises(CutError) as error:
            pipe.init(params, (jnp.ones((4, 4)), jnp.ones((4, 4))))
        assert words in str(error.value)
        assert "by_hand" not in str(error.value)


@pytest.mark.slow
def test_verify_allows_a_bf16_model_the_digits_of_bf16():
    case = gpt_case("float32", compute="bfloat16", depth=2)
    options = {"num_stages": 2, "num_microbatches": 3, "schedule": "zb-h1", "has_aux": True}
    pipe = jaxpp.Pipeline(case.loss_fn, optax.adam(1e-3), **options)
    pipe.verify(pipe.init(case.init, jax.random.key(0), case.batch), case.batch, case.key)
