"""A restored state: where its leaves come, what is said of states that cannot be used, and how states and metrics print."""

import contextlib
import gc
import re
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from IPython.core.formatters import DisplayFormatter
from IPython.lib.pretty import pretty

import jaxpp
from jaxpp.engine.state import States
from jaxpp.errors import ArgumentError, StateError
from jaxpp.observe.memory.ledger import live_bytes
from jaxpp.runtime.edges import HOST_MEMORY
from tests.engine.test_state import LAYERS, looped
from tests.models import X, pipeline

DEVICES = jax.devices()[:3]
WIDTH = 128
WIDE = {"w": jnp.stack([jnp.eye(WIDTH)] * 7), "first": jnp.eye(WIDTH), "last": jnp.eye(WIDTH)}
ROWS = jnp.ones((6, WIDTH))


def wide(params, x):
    x = jnp.tanh(x @ params["first"])
    x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])
    return jnp.mean((x @ params["last"]) ** 2)


class Watch:
    """Live bytes of each device beyond those of the beginning, at their most: sampled beside, and after every ``device_put``."""

    def __init__(self, monkeypatch):
        self.before, self.most = {device: live_bytes(device) for device in DEVICES}, dict.fromkeys(DEVICES, 0)
        self._done, self._put = threading.Event(), jax.device_put
        monkeypatch.setattr(jax, "device_put", self._watched)

    def _watched(self, *args, **kwargs):
        found = self._put(*args, **kwargs)
        self.look()
        return found

    def look(self):
        for device in DEVICES:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # it was donated while its address was asked for
                self.most[device] = max(self.most[device], live_bytes(device) - self.before[device])

    def _sample(self):
        while not self._done.wait(1e-3):
            self.look()

    @contextlib.contextmanager
    def sampled(self):
        self.most, self._done = dict.fromkeys(DEVICES, 0), threading.Event()
        thread = threading.Thread(target=self._sample)
        thread.start()
        try:
            yield self.most
        finally:
            self._done.set()
            thread.join()
            self.look()


@pytest.mark.long
def test_restoring_allocates_each_leaf_on_its_owner_only(tmp_path, monkeypatch):
    def made():
        return jaxpp.Pipeline(wide, optax.adam(1e-3), num_stages=3, num_microbatches=3)

    pipe = made()
    state, _ = pipe.step(pipe.init(WIDE, ROWS), ROWS)
    assert len({part.shape[0] for part in state.held[0]["w"].parts}) > 1  # the slices are unequal
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "wide", state)
    own = dict.fromkeys(DEVICES, 0)
    for leaf in jax.tree.leaves(state.held):
        (device,) = leaf.devices()
        own[device] += leaf.nbytes
    wanted, metrics = pipe.step(state, ROWS)
    wanted, expected = jax.device_get((wanted, metrics))
    del state, pipe, metrics
    gc.collect()  # what other tests have left would be missing from what is alive afterwards

    a_matrix = WIDTH * WIDTH * 4
    watch, pipe, shapes = Watch(monkeypatch), made(), jax.eval_shape(lambda: WIDE)
    with watch.sampled() as most:
        target = pipe.abstract_state(shapes, ROWS)
    assert max(most.values()) < a_matrix, most
    with watch.sampled() as most, ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(tmp_path / "wide", target)
    whole = [leaf for leaf in jax.tree.leaves(state)[:-1] if leaf.sharding.memory_kind == HOST_MEMORY]
    assert [leaf.shape for leaf in whole] == [(7, WIDTH, WIDTH)] * 3  # and each of them is larger than what a stage owns of it
    placed = {device: most[device] for device in DEVICES}
    assert all(placed[device] <= own[device] for device in DEVICES) and placed[DEVICES[0]] >= 3 * a_matrix

    unwrap, seen = States.unwrap, {}

    def unwrapped(self, *args, **kwargs):
        found = unwrap(self, *args, **kwargs)
        watch.look()
        seen.update(watch.most)
        return found

    monkeypatch.setattr(States, "unwrap", unwrapped)
    with watch.sampled() as most:
        new, metrics = pipe.step(state, ROWS)
        jax.block_until_ready((new, metrics))
    slack = 1024  # scalars, and the batch
    assert all(own[device] <= seen[device] + slack <= own[device] + 2 * slack for device in DEVICES), (seen, own)
    assert all(leaf.is_deleted() == (leaf.sharding.memory_kind != HOST_MEMORY) for leaf in jax.tree.leaves(state.params))
    chex.assert_trees_all_equal((jax.device_get(new), metrics.loss), (wanted, expected.loss))
    room = [row.num_bytes + slack for row in pipe.forecast(shapes, ROWS).stages]  # what any step takes, without a second state
    assert all(most[device] <= size for device, size in zip(DEVICES, room, strict=True)), (most, room)


@pytest.fixture(scope="module")
def sliced():
    """A pipeline whose state holds unequal slices, and that state after one step."""
    pipe = pipeline(lambda p, x: (looped(p, x), {"mean": x.mean(), "rows": x, "half": jnp.bfloat16(2.5)}), has_aux=True)
    state, metrics = pipe.step(pipe.init(LAYERS, X), X)
    return pipe, state, metrics


STATES = {
    "opt_state: a list of 2 instead of a tuple of 2": lambda s: s._replace(opt_state=[*s.opt_state]),
    "state.params['out'] is missing": lambda s: s._replace(params={"w": s.params["w"]}),
    "state.params['v'] is not expected": lambda s: s._replace(params={**s.params, "v": s.params["out"]}),
    "state.params: none instead of a dict of 2": lambda s: s._replace(params=None),
    "state.params['out']: float": lambda s: s._replace(params={**s.params, "out": 3.0}),
    "state.params['out']: f32[4,3] instead of f32[4,2]": lambda s: s._replace(params={**s.params, "out": jnp.ones((4, 3))}),
    "state.params['w']: f32[4,4,4] instead of f32[5,4,4]": lambda s: s._replace(params={**s.params, "w": s.params["w"][:4]}),
    "state.params['w']: f32[] instead of f32[5,4,4]": lambda s: s._replace(params={**s.params, "w": jnp.float32(1)}),
    "state.model_state: a dict of 1 instead of a tuple of 0": lambda s: s._replace(model_state={"seen": jnp.int32(1)}),
    "5 of 7 leaves are shapes without arrays": lambda s: s._replace(opt_state=jax.eval_shape(lambda: s.opt_state)),
    "Got: dict.": lambda s: dict(vars(s)),
    "Got: 1.5.": lambda s: s._replace(step=1.5),
    "Got: array([1, 2]).": lambda s: s._replace(step=np.array([1, 2])),
    "Got: -1.": lambda s: s._replace(step=-1),
    "Got: True.": lambda s: s._replace(step=True),
    "Got: np.True_.": lambda s: s._replace(step=np.True_),
    "Got: Array(True, dtype=bool).": lambda s: s._replace(step=jnp.asarray(True)),
    "Got: None.": lambda s: s._replace(step=None),
}


@pytest.mark.parametrize("line", STATES)
def test_a_state_that_is_not_of_this_pipeline_is_refused_with_what_differs(sliced, line):
    pipe, state, _ = sliced
    for call in (pipe.step, pipe.evaluate):
        with pytest.raises(StateError, match=re.escape(line)) as caught:
            call(STATES[line](jax.device_get(state)), X)
        assert re.match(r"state[^\n]*: [^\n]+\.\n  Got: .*\n  Fix: ", str(caught.value), re.DOTALL), caught.value
    assert pipe.state is state and not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.held))


@pytest.mark.parametrize("step", [4, np.int64(4), np.array(4), jnp.int32(4)])
def test_the_number_of_steps_may_come_as_an_array(sliced, step):
    pipe, state, _ = sliced
    new, metrics = pipe.step(state._replace(step=step), X, donate=False)
    assert new.step == metrics.step == 5 and type(new.step) is type(metrics.step) is int
    assert repr(state._replace(step=step)).startswith("State after 4 steps\n")


PARTS = ("params", "opt_state", "model_state", "loss_scale")


@pytest.mark.long
def test_a_checkpoint_without_a_number_of_steps_opens_and_a_restored_state_is_asked_all_there_is(sliced, tmp_path):
    pipe, state, _ = sliced
    target = pipe.abstract_state(LAYERS, X)
    old = {name: getattr(state, name) for name in PARTS}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "old", old)
    with ocp.StandardCheckpointer() as checkpointer:
        with pytest.raises(ValueError, match="step:"):  # in Orbax's words
            checkpointer.restore(tmp_path / "old", target)
        parts = {name: getattr(target, name) for name in PARTS}
        restored = jaxpp.State(**checkpointer.restore(tmp_path / "old", parts), step=1)
    chex.assert_trees_all_equal(restored, state)
    pipe.verify(restored, X)
    chex.assert_trees_all_equal(pipe.evaluate(restored, X), pipe.evaluate(state, X))
    pipe.profile(restored, X, num_steps=1)
    chex.assert_trees_all_equal(pipe.step(restored, X), pipe.step(state, X, donate=False))


def test_shapes_belong_to_the_caller_and_a_state_goes_on_after_they_were_asked_for():
    pipe = pipeline(looped)
    state = pipe.init(LAYERS, X)
    target = pipe.abstract_state(LAYERS, X)
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(target))
    target.params.clear()
    pipe.evaluate(jax.device_get(state), X)  # which is compared with the pipeline's own shapes
    state, metrics = pipe.step(state, X)
    assert state.step == metrics.step == 1 and pipe.state is state


@pytest.mark.parametrize("arguments", [(LAYERS,), (X, LAYERS), (LAYERS, X, X), (lambda key: LAYERS, X), (jax.random.key(0), X)])
def test_arguments_of_abstract_state_are_checked_as_those_of_init_are(sliced, arguments):
    for name in ("init", "abstract_state"):
        with pytest.raises(ArgumentError, match=rf"^pipe.{name}: {name} takes a function, a key and a batch, or parameters"):
            getattr(pipeline(looped), name)(*arguments)


def test_a_dictionary_is_no_state_for_a_pipeline_that_has_only_made_shapes():
    pipe = pipeline(looped)
    with pytest.raises(StateError, match=r"^pipe.step: a pipeline is cut by init or abstract_state") as caught:
        pipe.step({}, X)
    assert "for a checkpoint, target = pipe.abstract_state(...)" in str(caught.value)
    target = pipe.abstract_state(LAYERS, X)
    for odd in ({"params": target.params}, {}, None):  # what a checkpoint that is restored without a target gives
        for call in (pipe.step, pipe.evaluate):
            with pytest.raises(StateError, match=rf"a state is a jaxpp.State.\n  Got: {type(odd).__name__}\."):
                call(odd, X)
    with pytest.raises(StateError, match="a state has the trees of parameters"):
        pipe.step(jaxpp.State({}, ()), X)


def test_a_state_where_parameters_belong_is_refused_and_the_remedy_works(sliced):
    _, state, _ = sliced
    for name in ("init", "abstract_state"):
        with pytest.raises(ArgumentError, match=rf"^pipe.{name}: {name} takes parameters, and step takes a state.") as caught:
            getattr(pipeline(looped), name)(state, X)
        assert "Got: a jaxpp.State, step=1." in str(caught.value) and f"pipe.{name}(state.params, batch)" in str(caught.value)
    other = pipeline(looped)
    other.abstract_state(state.params, X)
    assert other.step(state, X, donate=False)[0].step == 2
    with pytest.raises(ArgumentError, match=r"pipe.init\(\(state.params, state.model_state\), batch\)"):
        pipeline(looped).init(state._replace(model_state={"n": 1.0}), X)


def test_a_consumed_state_is_refused_by_whoever_looks_at_it(tmp_path):
    pipe = pipeline(looped)
    old = pipe.init(LAYERS, X)
    pipe.step(old, X)
    looks = (lambda: jax.tree.leaves(old), lambda: old.params, lambda: ocp.StandardCheckpointer().save(tmp_path / "old", old))
    for look in looks:
        with pytest.raises(StateError, match="Got: a leaf held as slices, 2 of 2 of which a later step has consumed") as caught:
            look()
        assert "Fix: go on with pipe.state" in str(caught.value)
    assert "consumed by a later step" in repr(old)


def test_a_state_prints_what_it_holds_whatever_it_holds(sliced):
    pipe, state, _ = sliced
    target = pipe.abstract_state(LAYERS, X)
    assert repr(state) == (
        "State after 1 step\n"
        "           leaves  numbers  bytes         where\n"
        "   params       2       88  352 B  cpu:0, cpu:1\n"
        "opt_state       5      177  708 B  cpu:0, cpu:1"
    )
    title, _, *rows = repr(target).splitlines()
    assert title == "State after 0 steps: shapes and shardings, no arrays"
    assert [row.split()[:4] for row in rows] == [row.split()[:4] for row in repr(state).splitlines()[2:]]
    assert rows[0].endswith("host, cpu:1")  # where the whole loop is restored to, and the head
    traced, shaped = [], jax.eval_shape(lambda: state)
    jax.eval_shape(lambda state: traced.append(repr(state)), state)
    assert traced[0].startswith("State of a pipeline: traced, no arrays\n") and "cpu" not in traced[0] and "host" not in traced[0]
    assert repr(shaped).startswith("State of a pipeline: shapes, no arrays\n") and "cpu" not in repr(shaped)
    here = repr(jax.device_get(state)).splitlines()
    assert here[0] == "State after 1 step" and all(row.endswith(" B   host") for row in here[2:])
    odd = jaxpp.State({"a": {}, "b": optax.MaskedNode()}, (optax.EmptyState(), jax.random.key(0)), {"n": 1}, None, "soon")
    assert repr(odd).splitlines()[0] == "State of a pipeline" and "opt_state       1        1    8 B  cpu:0" in repr(odd)
    assert repr(jaxpp.State({}, ())).splitlines()[0] == "State after 0 steps"
    for each in (state, target, shaped, odd, jax.tree.map(lambda leaf: None, state), jaxpp.State({}, ())):
        title, *table = repr(each).splitlines()
        assert all(len(line) <= 80 for line in table)
        assert title in each._repr_html_() and each._repr_html_().count("<tr>") == len(table)


def test_the_last_line_of_a_cell_shows_a_state_and_metrics_as_they_print(sliced):
    _, state, metrics = sliced
    shown, _ = DisplayFormatter().format(state)
    assert shown == {"text/plain": repr(state), "text/html": state._repr_html_()}
    shown, _ = DisplayFormatter().format(metrics)
    assert shown == {"text/plain": repr(metrics)}
    assert pretty([state]).startswith("[State after 1 step\n") and pretty({"metrics": metrics}) == f"{{'metrics': {metrics!r}}}"


def test_metrics_print_their_numbers_and_the_shapes_of_their_arrays(sliced):
    pipe, state, metrics = sliced
    loss, norm, mean = (f"{float(value):.6g}" for value in (metrics.loss, metrics.grad_norm, metrics.aux["mean"]))
    aux = f"aux={{'half': 2.5, 'mean': {mean}, 'rows': f32[8,4]}}"
    assert repr(metrics) == f"Metrics(loss={loss}, {aux}, grad_norm={norm}, step=1)"
    assert repr(pipe.evaluate(state, X)).endswith("'rows': f32[8,4]}, step=1)")
    traced = []
    jax.eval_shape(lambda metrics: traced.append(repr(metrics)), metrics)
    assert traced[0].startswith("Metrics(loss=f32[], aux={'half': bf16[], ") and traced[0].endswith("grad_norm=f32[], step=i32[])")
    assert repr(jaxpp.Metrics(jnp.float32(np.nan), finite=np.bool_(False))) == "Metrics(loss=nan, finite=False)"
