"""What is seen of functions that are only run forward: their stages, the memory that they take, and how they ran."""

import dataclasses
import gc
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matplotlib.text import Text

import jaxpp
from jaxpp.errors import ArgumentError, ParamsError, StateError
from jaxpp.observe.memory.ledger import live_bytes
from jaxpp.observe.memory.liveness import MEMORY_KINDS
from jaxpp.observe.profile.profile import ForwardCauses, RingCauses
from tests.decoders import loop, plain, prompts_of
from tests.models import mlp_case


def network(params, x):
    """Four layers; ``counts`` has no gradient. One output has a row for each example, one has none."""
    for k in range(4):
        x = jnp.tanh(x @ params[f"w{k}"])
    return {"y": x * params["counts"], "mean": x.mean()}


def network_params():
    keys = jax.random.split(jax.random.key(0), 4)
    return {f"w{k}": jax.random.normal(keys[k], (16, 16)) / 4 for k in range(4)} | {"counts": jnp.arange(16)}


@pytest.fixture(scope="module")
def forward():
    found = jaxpp.Forward(network, num_stages=4, num_microbatches=3)
    return found, found.init(network_params(), jnp.ones((6, 16)))


def test_the_table_of_a_forward_keeps_nothing_and_says_what_the_last_stage_returns(forward):
    found, _ = forward
    assert "schedule: forward, 4 stages, 3 microbatches" in repr(found)
    head, *_ = str(found.stages).splitlines()
    assert head.split() == ["stage", "device", "modules", "params", "bytes", "F", "share", "sends"]
    assert [stage.sends for stage in found.stages[:3]] == [(f"f32[2,16] to {k}",) for k in (1, 2, 3)]
    assert found.stages[3].sends == ("f32[] as output", "f32[2,16] as output")
    assert "loss" not in str(found.stages) and "kept" not in found.stages._repr_html_()


def test_the_stages_of_a_forward_run_by_hand_return_plain_values(forward):
    found, _ = forward
    params, x, value = network_params(), jax.random.normal(jax.random.key(1), (2, 16)), {}
    for stage in found.stages:
        value = stage.forward(params, value, x)
        assert {leaf.device for leaf in jax.tree.leaves(value)} == {stage.device}
    expected = network(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), value, expected)


def shapes_of(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def most_live_bytes(run, devices, before):
    """The most bytes that each device held while ``run(observer)`` ran, less those that it held before."""
    most = dict.fromkeys(devices, 0)

    def look(*_):
        most.update({device: max(most[device], live_bytes(device) - before[device]) for device in devices})

    result = run(look)
    jax.block_until_ready(result)
    look()
    return most


@pytest.mark.parametrize("examples", [2, pytest.param(7, marks=pytest.mark.long), pytest.param(48, marks=pytest.mark.long)])
def test_a_forecast_of_a_forward_is_what_apply_holds_to_the_byte(forward, examples):
    found, params = forward
    x = np.ones((examples, 16), np.float32)
    forecast = found.forecast(shapes_of(params), shapes_of(x))
    devices = forecast.liveness.devices
    leaves, engine = found.engine.bring(params), found.engine
    jax.block_until_ready(engine.run("forward", leaves, x, None))
    gc.collect()
    own = {device: sum(leaf.nbytes for leaf in jax.tree.leaves(params) if leaf.device == device) for device in devices}
    constants = {device: forecast.liveness.levels[device][0].sum() - own[device] for device in devices}
    before = {device: live_bytes(device) - own[device] - constants[device] for device in devices}
    measured = most_live_bytes(lambda look: engine.run("forward", leaves, x, None, observer=look), devices, before)
    assert measured == {device: forecast.liveness.levels[device].sum(axis=1).max() for device in devices}
    last = forecast.stages[-1]
    of_one_microbatch = examples // min(3, examples) * 16 * 4
    assert last.kinds[MEMORY_KINDS.index("outputs")] >= of_one_microbatch, "while the next one's activation is there"
    assert last.kinds[MEMORY_KINDS.index("parameters")] == own[devices[-1]]
    assert "in brackets" not in str(forecast) and "outputs" in str(forecast)


def test_a_forward_is_forecast_before_there_are_parameters_and_init_compiles_nothing_more():
    found = jaxpp.Forward(network, num_stages=2)
    batch = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    forecast = found.forecast(jax.eval_shape(network_params), batch)
    assert forecast.fits and len(forecast.stages) == 2
    programs = len(found.engine.programs)
    found.init(network_params(), batch)
    assert len(found.engine.programs) == programs


@pytest.mark.long
def test_forwards_that_do_not_fit_are_run_on_smaller_batches():
    found = jaxpp.Forward(network, num_stages=2, num_microbatches=2)
    shapes, batch = jax.eval_shape(network_params), jax.ShapeDtypeStruct((512, 16), jnp.float32)
    worst = max(found.forecast(shapes, batch).peaks.values())
    tight = found.forecast(shapes, batch, hbm=0.7 * worst)
    assert not tight.fits
    changes = {change.what: change for change in tight.changes}
    assert changes["batches of 256"].slowdown == 1 and changes["batches of 256"].peak <= 0.7 * worst
    assert max(found.forecast(shapes, jax.ShapeDtypeStruct((256, 16), jnp.float32)).peaks.values()) <= 0.7 * worst
    text = str(found.forecast(shapes, batch, hbm="100B"))
    assert "nothing that was looked at fits (smaller batches, microbatches, twice the stages): use more devices" in text


def test_a_pipeline_forecasts_what_apply_holds_beside_the_optimizer():
    case = mlp_case()
    pipe = jaxpp.Pipeline(case.loss_fn, optax.adam(1e-3), num_stages=2, num_microbatches=2, has_aux=True)
    shapes, x = jax.eval_shape(lambda: case.params), jax.ShapeDtypeStruct((8, 16), jnp.float32)

    def predict(params, x):
        return case.model.apply({"params": params}, x)

    with pytest.raises(StateError, match="is cut by init or abstract_state"):
        pipe.forecast(shapes, x, fn=predict)
    pipe.abstract_state(shapes, case.batch)
    forecast = pipe.forecast(shapes, x, fn=predict)
    state = pipe.init(case.params, case.batch)
    for kind, trees in (("parameters", state.params), ("optimizer", state.opt_state)):
        sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(trees) if leaf.device == row.device) for row in forecast.stages]
        assert [row.kinds[MEMORY_KINDS.index(kind)] for row in forecast.stages] == sizes
    assert pipe.apply(state, np.ones((8, 16), "f"), predict).nbytes <= forecast.stages[-1].kinds[MEMORY_KINDS.index("outputs")]
    with pytest.raises(ParamsError, match="the parameters are those of the model"):
        pipe.forecast({"other": jnp.ones(3)}, x, fn=predict)


@pytest.mark.parametrize(
    ("num_stages", "num_groups", "group_size", "dtype", "threads"),
    [
        (2, 2, 1, "float32", "one"),
        pytest.param(2, 3, 2, "bfloat16", "one", marks=pytest.mark.long),
        pytest.param(2, 2, 5, "float32", "ranks", marks=pytest.mark.long),
        pytest.param(4, 3, 2, "bfloat16", "one", marks=pytest.mark.slow),
        pytest.param(4, 1, 3, "float32", "one", marks=pytest.mark.slow),
    ],
)
@pytest.mark.long
def test_a_forecast_of_a_generation_is_what_it_holds_to_a_few_tokens(num_stages, num_groups, group_size, dtype, threads):
    decoder = plain(dtype=dtype, num_layers=num_stages)
    found, params = decoder.forward(num_stages, threads=threads)
    options = {"num_groups": num_groups, "group_size": group_size, "chunk": 8}
    forecast = found.generate(shapes_of(params), decoder.fn, shapes_of(decoder.carry), [], 6, **options).forecast()
    programs, liveness = len(found.engine.programs), forecast.liveness
    gc.collect()
    own = {device: sum(leaf.nbytes for leaf in jax.tree.leaves(params) if leaf.device == device) for device in liveness.devices}
    before = {device: live_bytes(device) - own[device] for device in liveness.devices}
    prompts = prompts_of(*[9, 3, 17, 1, 2] * 2 * (1 + (threads == "ranks")))

    def run(look):
        with found.generate(params, decoder.fn, decoder.carry, prompts, 6, progress=False, **options) as generation:
            generation.observer = look
            return len(list(generation))

    measured = most_live_bytes(run, liveness.devices, before)
    assert len(found.engine.programs) == programs, "what the forecast has compiled is what runs"
    for row in forecast.stages:
        foreseen = liveness.levels[row.device].sum(axis=1).max()
        assert abs(foreseen - measured[row.device]) <= 64 * num_groups * group_size, "tokens on their way to the host"
        assert row.kinds[MEMORY_KINDS.index("parameters")] == own[row.device] or row is forecast.stages[-1]
    one = sum(leaf.nbytes for leaf in jax.tree.leaves(decoder.carry))
    held = sum(row.kinds[MEMORY_KINDS.index("carries")] for row in forecast.stages)
    least = num_groups * group_size + 1
    most = least + (group_size > 1) * (num_stages if threads == "ranks" else 1)
    assert least * one <= held <= 1.02 * most * one, "of all places, the empty one, and those that are prefilled beside them"
    assert "of a prompt" in str(forecast) or "a group" in str(forecast)


def test_what_a_generation_cannot_be_is_refused_by_its_forecast_too():
    decoder = plain()
    found = jaxpp.Forward(network, num_stages=2)
    given = shapes_of(decoder.params), decoder.fn, decoder.carry, [], 6
    with pytest.raises(StateError, match="is cut by init"):
        found.generate(*given)
    found, params = decoder.forward(2)
    for wrong in ({"num_groups": 0}, {"group_size": -1}, {"chunk": 0}):
        with pytest.raises(ArgumentError, match="counts are whole numbers of at least 1"):
            found.generate(*given, **wrong)
    generation = found.generate(*given)
    with pytest.raises(ArgumentError, match="Fix: pass for example"):
        generation.forecast(hbm="much")
    assert "nothing that was looked at fits (fewer groups;" in str(generation.forecast(hbm="1000B"))
    worst, some = (max(found.generate(*given, num_groups=k).forecast().peaks.values()) for k in (6, 3))
    (change,) = found.generate(*given, num_groups=6).forecast(hbm=some + 100).changes
    assert change[:4] == ("num_groups=3", some, 1, 0) and some < worst
    with found.generate(params, decoder.fn, decoder.carry, prompts_of(3), 2, num_groups=3) as begun:
        assert max(begun.forecast().peaks.values()) == some and len(begun.collect()[0]) == 2


def test_a_generation_of_shapes_says_that_it_cannot_be_run():
    decoder = plain()
    found, params = decoder.forward(2)
    for carry in (decoder.carry, shapes_of(decoder.carry)):
        generation = found.generate(shapes_of(params), decoder.fn, carry, [[1]], 6)
        for run in (generation.profile, lambda made=generation: next(made), generation.collect):
            with pytest.raises(StateError):
                run()
    with pytest.raises(StateError, match=r"a generation of shapes says what it would hold.*\n.*\n  Fix: pass the arrays"):
        found.generate(shapes_of(params), decoder.fn, decoder.carry, [], 6).collect()
    with pytest.raises(ParamsError, match="the parameters are those of the model"):
        found.generate({"w": jax.ShapeDtypeStruct((3,), "float32")}, decoder.fn, decoder.carry, [], 6)


@pytest.fixture(scope="module")
def profiles(forward):
    """Profiles of a batch, and of three batches in a stream."""
    found, params = forward
    batch = np.ones((7, 16), np.float32)
    return {count: found.profile(params, batch, num_batches=count, num_steps=1) for count in (1, 3)}


@pytest.mark.parametrize("clock", ["trace", "isolated"])
@pytest.mark.parametrize("num_batches", [1, 3])
def test_a_profile_of_forwards_obeys_their_order(profiles, num_batches, clock):
    assert not profiles[num_batches].missing, "every forward has its run in the trace"
    profile = dataclasses.replace(profiles[num_batches], clock=clock)
    assert profile.schedule == jaxpp.schedule.forward(4, 3 * num_batches)
    assert set(profile.actions) == set(profile.schedule.order)
    present = frozenset(profile.schedule.order)
    for action, span in profile.actions.items():
        assert span.start < span.end and span.begun <= span.handed
        for need in jaxpp.schedule.dependencies(action, 4, present):
            assert profile.actions[need].end <= span.start + 1e-5
    assert len(profile.transfers) == 3 * 3 * num_batches
    for idle, causes in zip(profile.idle, profile.causes, strict=True):
        assert isinstance(causes, ForwardCauses) and sum(causes) == pytest.approx(idle) and min(causes) >= -1e-9
    assert len(profile.memory) == 4 and sum(profile.shares) == pytest.approx(1)


def test_the_batches_of_a_stream_fill_and_drain_the_stages_once(profiles):
    one, three = profiles[1], profiles[3]
    assert [jaxpp.schedule.simulate(profile.schedule).makespan for profile in (one, three)] == [3 + 3, 9 + 3]
    held = three.ledger.liveness.levels[three.devices[3]][-1][MEMORY_KINDS.index("outputs")]
    assert held == 3 * one.ledger.liveness.levels[one.devices[3]][-1][MEMORY_KINDS.index("outputs")]


@pytest.mark.long
def test_a_profile_of_forwards_speaks_of_forwards(profiles):
    assert str(profiles[1]).startswith("forward: 4 ranks, 4 stages, 3 microbatches; each program alone")
    assert str(profiles[3]).startswith("stream of 3 batches: 4 ranks, 4 stages, 9 microbatches; each program alone")
    for profile in profiles.values():
        text = str(profile)
        assert "step" not in text and "optimizer" not in text and "loss" not in text and "token" not in text
        figure = profile.figure()
        words = {text.get_text().split(" (")[0] for text in figure.findobj(Text)}
        assert {"F forward", "traced", "outputs", "memory of arrays"} <= words and "B backward" not in words
        assert jaxpp.observe.to_html(profile).count("<svg") == 1
        assert json.loads(jaxpp.observe.to_json(profile))["ranks"][0]["causes"].keys() == set(ForwardCauses._fields)
        assert json.loads(jaxpp.observe.to_perfetto(profile))["traceEvents"]
    for sample in profiles[1].ledger.samples:
        assert sample.kinds == tuple(profiles[1].ledger.liveness.levels[sample.device][sample.moment]), sample
    assert len(profiles[1].ledger.samples) == 12


@pytest.mark.long
def test_a_pipeline_profiles_a_function_of_its_parameters_and_its_state_stays():
    case = mlp_case()
    pipe = jaxpp.Pipeline(case.loss_fn, optax.adam(1e-3), num_stages=2, num_microbatches=4, has_aux=True, schedule="zb-v")
    state = pipe.init(case.params, case.batch)

    def predict(params, x):
        return case.model.apply({"params": params}, x)

    profile = pipe.profile(state, case.batch["x"], fn=predict, num_batches=2, num_steps=1)
    assert [len(row) for row in profile.schedule.rows] == [16] and not profile.transfers
    pipe.step(state, case.batch)
    with pytest.raises(ArgumentError, match=r"counts are whole numbers of at least 1\.\n  Got: num_batches="):
        pipe.profile(pipe.state, case.batch["x"], fn=predict, num_batches=0)
    with pytest.raises(ArgumentError, match="steps follow one another one by one"):
        pipe.profile(pipe.state, case.batch, num_batches=2)


@pytest.fixture(
    scope="module",
    params=[pytest.param((4, 1), id="groups of one", marks=pytest.mark.long), pytest.param((2, 2), id="groups of two")],
)
def ring(request):
    """A generation with its groups, the profile of it, and the tokens that it gives afterwards."""
    num_groups, group_size = request.param
    decoder = plain()
    found, params = decoder.forward(4)
    options = {"num_groups": num_groups, "group_size": group_size, "chunk": 8, "progress": False}
    generation = found.generate(params, decoder.fn, decoder.carry, prompts_of(9, 3, 1, 2, 4, 1), 5, **options)
    profile = generation.profile(num_runs=1)
    return decoder, generation, profile, num_groups


@pytest.mark.parametrize("clock", ["trace", "isolated"])
@pytest.mark.long
def test_a_profile_of_a_ring_obeys_the_order_of_its_tokens(ring, clock):
    _, _, profile, num_groups = ring
    assert not profile.missing, "every pass has its run in the trace"
    profile = dataclasses.replace(profile, clock=clock)
    assert profile.num_groups == num_groups
    assert len(profile.actions) == 4 * len(profile.passes) == len(profile.schedule.order)
    for number, each in enumerate(profile.passes):
        for stage in range(4):
            span = profile.actions[jaxpp.schedule.Action(stage, "F", number)]
            assert span.start < span.end
            if stage:
                assert profile.actions[jaxpp.schedule.Action(stage - 1, "F", number)].end <= span.start + 1e-5
            elif each.awaits >= 0:
                assert profile.actions[jaxpp.schedule.Action(3, "F", each.awaits)].end <= span.start + 1e-5
    for idle, causes in zip(profile.idle, profile.causes, strict=True):
        assert isinstance(causes, RingCauses) and sum(causes) == pytest.approx(idle) and min(causes) >= -1e-9
    assert len(profile.memory) == 4 and profile.simulated_seconds > 0


@pytest.mark.long
def test_the_passes_of_a_ring_are_those_that_the_prompts_need(ring):
    _, _, profile, num_groups = ring
    chunks = [each.num_tokens for each in profile.passes if each.is_prompt]
    assert sorted(chunks) == sorted([8, 1, *[1] * 3, 1, *[1] * 2, *[1] * 4, 1])
    assert sum(each.num_made for each in profile.passes) == 6 * 5
    for number, each in enumerate(profile.passes):
        assert (each.awaits >= 0) == (not each.is_prompt)
        if not each.is_prompt:
            maker = profile.passes[each.awaits]
            assert maker.group == each.group and each.turn == maker.turn + 1 and each.awaits < number - (num_groups > 2)
    tokens = [span for span in profile.transfers if span.label.startswith("token of")]
    assert len(tokens) == sum(not each.is_prompt for each in profile.passes)
    assert {(span.rank, span.action.stage) for span in tokens} == {(0, 3)}


def test_the_generation_that_was_profiled_gives_all_its_tokens(ring):
    decoder, generation, _, _ = ring
    assert generation.num_passes == 0
    wanted = loop(decoder, prompts_of(9, 3, 1, 2, 4, 1), 5)
    assert [found.tolist() for found in generation.collect()] == [made.tokens for made in wanted]
    with pytest.raises(StateError, match="has let go of what it ran"):
        generation.profile()


@pytest.mark.long
def test_a_profile_of_a_ring_prints_draws_and_exports_itself(ring):
    _, _, profile, num_groups = ring
    text = str(profile)
    assert text.startswith(f"ring: 4 ranks, 4 stages, {num_groups} groups, {len(profile.passes)} passes; each program alone")
    assert "30 tokens were made" in text and "step" not in text and "optimizer" not in text
    assert "fill, drain  token  imbalance" in text
    figure = profile.figure()
    words = {text.get_text().split(" (")[0] for text in figure.findobj(Text)}
    assert {"traced", "group 0", "group 1", "paler: a prompt", "carries", "arrives"} <= words and "F forward" not in words
    labels = {collection.get_label() for axes in figure.axes for collection in axes.collections}
    assert {"group 0", "group 0, prompt", "group 1", "group 1, prompt"} <= labels
    assert "<svg" in jaxpp.observe.to_html(profile) or "<img" in jaxpp.observe.to_html(profile)
    found = json.loads(jaxpp.observe.to_json(profile))
    assert found["passes"][0] == profile.passes[0]._asdict() and "token" in found["ranks"][0]["causes"]
    assert json.loads(jaxpp.observe.to_perfetto(profile))["traceEvents"]
    first, last = (profile.ledger.liveness.levels[profile.devices[0]][moment] for moment in (1, -2))
    assert first[MEMORY_KINDS.index("carries")] < last[MEMORY_KINDS.index("carries")], "more groups have begun"


@pytest.mark.long
@pytest.mark.parametrize(("threads", "num_tokens"), [("one", 5), ("ranks", 1)])
def test_a_profile_of_a_ring_may_end_with_a_prompt(threads, num_tokens):
    decoder = plain(num_layers=2)
    found, params = decoder.forward(2, threads=threads)
    options = {"num_groups": 1, "group_size": 2, "chunk": 8, "progress": False}
    generation = found.generate(params, decoder.fn, decoder.carry, prompts_of(1, 3), num_tokens, **options)
    profile = generation.profile(num_passes=1, num_runs=1)
    assert profile.passes[-1].is_prompt and len(profile.memory) == 2


@pytest.mark.long
def test_only_so_many_passes_are_profiled_and_prompts_that_come_once_are_refused():
    decoder = plain()
    found, params = decoder.forward(2)
    generation = found.generate(params, decoder.fn, decoder.carry, prompts_of(*[2] * 9), 5, progress=False)
    assert 8 <= len(generation.profile(num_passes=8, num_runs=1).passes) <= 10
    for wrong in ({"num_passes": 0}, {"num_runs": 0}, {"clock": "sun"}):
        with pytest.raises(ArgumentError, match=r"generation\.profile"):
            generation.profile(**wrong)
    generation.close()
    with pytest.raises(StateError, match="has let go of what it ran"):
        generation.profile()
    once = found.generate(params, decoder.fn, decoder.carry, iter(prompts_of(2, 3)), 2, progress=False)
    with pytest.raises(ArgumentError, match="Fix: pass them as a list"):
        once.profile()
    assert [len(tokens) for tokens in once.collect()] == [2, 2]
