"""The traceback of what leaves jaxpp ends at the user's own line; ``jax_traceback_filtering`` says how, as for JAX's frames."""

import gc
import inspect
import pathlib
import traceback
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpp
from jaxpp.errors import BankError, OptimizerError
from jaxpp.errors.tracebacks import entry

PARAMS = {"w1": jnp.full((4, 4), 0.1), "w2": jnp.ones((4, 2))}
X = jnp.ones((8, 4))
ROOTS = [str(pathlib.Path(module.__file__).parent) for module in (jaxpp, jax)]


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"]) ** 2)


def lost(params):
    return params["lost"]


def broken(params, x):
    return lost(params)


def init(key):
    return lost({})


def update(updates, state, params=None):
    return lost(params)


def reduce(values, weights):
    return lost(values)


def with_aux(params, x):
    return loss_fn(params, x), x.sum()


def pipeline(loss=loss_fn, optimizer=None, **options):
    return jaxpp.Pipeline(loss, optimizer or optax.sgd(0.1), **{"num_stages": 2} | options)


@pytest.fixture(scope="module")
def started():
    pipe = pipeline()
    return pipe, pipe.init(PARAMS, X), jaxpp.Bank({"cat": PARAMS}, optax.sgd(0.1))


def enter(bank):
    with bank.use("dog"):
        pass


def leave(bank):
    with bank.use("cat") as task:
        task.params = 3


OURS = {
    "Pipeline": lambda pipe, state, bank: pipeline(3),
    "Pipeline.from_stages": lambda pipe, state, bank: jaxpp.Pipeline.from_stages(3, loss=3, optimizer=3),
    "init": lambda pipe, state, bank: pipeline(lambda params, x: jnp.argmax(x @ params["w1"])).init(PARAMS, X),
    "step": lambda pipe, state, bank: pipe.step(state, X[:1]),
    "step without a batch": lambda pipe, state, bank: pipe.step(state),
    "step of another name": lambda pipe, state, bank: pipe.step(state, X, donat=False),
    "jax.jit of step": lambda pipe, state, bank: jax.jit(pipe.step)(state, X),
    "evaluate": lambda pipe, state, bank: pipe.evaluate(state, {}),
    "verify": lambda pipe, state, bank: pipe.verify(state, {}),
    "profile": lambda pipe, state, bank: pipe.profile(state, {}),
    "forecast": lambda pipe, state, bank: pipe.forecast(PARAMS, X, hbm="much"),
    "stages": lambda pipe, state, bank: pipeline().stages,
    "value_and_grad": lambda pipe, state, bank: jaxpp.value_and_grad(3, num_stages=2),
    "grad_fn": lambda pipe, state, bank: jaxpp.value_and_grad(loss_fn, num_stages=2)(PARAMS, {}),
    "Bank": lambda pipe, state, bank: jaxpp.Bank({"cat": {}}, optax.sgd(0.1)),
    "bank.params": lambda pipe, state, bank: bank.params("dog"),
    "bank.use, entered": lambda pipe, state, bank: enter(bank),
    "bank.use, left": lambda pipe, state, bank: leave(bank),
    "make": lambda pipe, state, bank: jaxpp.schedule.make("gpip", 2),
    "Schedule": lambda pipe, state, bank: jaxpp.schedule.Schedule("mine", [["0F0", "0F1", "0B0"]]),
    "from_csv": lambda pipe, state, bank: jaxpp.schedule.from_csv("sched.csv"),
    "simulate": lambda pipe, state, bank: jaxpp.schedule.simulate(jaxpp.schedule.make("gpipe", 2), forward=-1),
}
USERS = {
    "the loss": lambda pipe, state, bank: pipeline(broken).init(PARAMS, X),
    "the loss of value_and_grad": lambda pipe, state, bank: jaxpp.value_and_grad(broken, num_stages=2)(PARAMS, X),
    "the loss of an evaluation": lambda pipe, state, bank: pipe.evaluate(state, X, loss_fn=broken),
    "a stage": lambda pipe, state, bank: jaxpp.Pipeline.from_stages(
        [broken], loss=lambda x, y: x.sum(), optimizer=optax.sgd(0.1)
    ).init([PARAMS], (X, X)),
    "init": lambda pipe, state, bank: pipeline().init(init, jax.random.key(0), X),
    "the optimizer": lambda pipe, state, bank: pipeline(
        optimizer=optax.GradientTransformationExtraArgs(lambda params: (), lambda *args, **extra: update(*args))
    ).init(PARAMS, X),
}


def raised(call, *args):
    with pytest.raises(Exception, match=r".") as error:
        call(*args)
    return error.value


def files(error):
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def ours(error):
    return [file for file in files(error) if any(file.startswith(root) for root in ROOTS)]


@pytest.mark.parametrize("name", OURS)
def test_the_last_line_before_the_message_is_the_users(name, started):
    error = raised(OURS[name], *started)
    assert isinstance(error, jaxpp.errors.JaxppError)
    assert not ours(error)
    assert files(error)[-1] == __file__
    if not name.startswith("jax.jit"):  # JAX's own note says that JAX's frames are left out; here it is JAX that is called
        printed = traceback.format_exception(error)
        assert "".join(printed).endswith(f"{error}\n")


@pytest.mark.parametrize("name", USERS)
def test_an_exception_of_the_users_function_shows_their_own_frames_alone(name, started):
    error = raised(USERS[name], *started)
    assert isinstance(error, (KeyError, TypeError))
    assert not ours(error)
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]
    assert names[-1] == "lost"
    assert names[:2] == ["raised", "<lambda>"]
    assert any(note.startswith("jaxpp: raised while") for note in error.__notes__)


def test_the_cause_of_an_error_is_kept_and_folded_too():
    error = raised(lambda: pipeline(optimizer=optax.lbfgs()).init(PARAMS, X))
    assert isinstance(error, OptimizerError)
    assert isinstance(error.__cause__, TypeError)
    assert not ours(error)
    assert not ours(error.__cause__)


def test_an_error_that_python_raises_in_a_line_of_jaxpp_says_how_to_see_that_line():
    # A missing key of a dictionary of jaxpp's own came out as one line, ``KeyError: Name(...)``, without a frame to report.
    scope = {"__name__": "jaxpp.broken"}
    exec("def broken(): return {}['lost']\ndef refusing(): raise KeyError('no such metric')", scope)  # noqa: S102
    (note,) = raised(entry(scope["broken"])).__notes__
    assert note.startswith("jaxpp: raised in jaxpp itself; ") and "traceback_filtering" in note
    assert not hasattr(raised(entry(scope["refusing"])), "__notes__")
    assert not hasattr(raised(entry(lambda: {}["the user's"])), "__notes__")
    forward = jaxpp.Forward(loss_fn, num_stages=2)
    params = forward.init(PARAMS, X)
    (note,) = raised(lambda: list(forward.stream(params, map(int, ["one"])))).__notes__
    assert note.endswith("the iterator of batches raised this when it was asked for batch 0")


def test_a_reducer_that_raises_is_named_with_its_own_frames_as_the_cause():
    error = raised(lambda: pipeline(with_aux, has_aux=True, reduce_aux=reduce).init(PARAMS, X))
    assert not ours(error)
    assert [frame.name for frame in traceback.extract_tb(error.__cause__.__traceback__)][-2:] == ["reduce", "lost"]


def test_what_the_users_block_raises_comes_out_of_it_as_it_was(started):
    def block(bank):
        with bank.use("cat"):
            lost({})

    error = raised(block, started[2])
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == ["raised", "block", "lost"]


@pytest.fixture
def filtering():
    before = jax.config.jax_traceback_filtering
    yield lambda mode: jax.config.update("jax_traceback_filtering", mode)
    jax.config.update("jax_traceback_filtering", before)


def test_every_frame_is_shown_where_jax_filters_none(started, filtering):
    filtering("off")
    error = raised(OURS["make"], *started)
    assert len(ours(error)) > 1
    assert len(ours(raised(USERS["the loss"], *started))) > 10


def test_frames_on_the_way_to_the_users_are_marked_for_ipython_rather_than_taken_out(started, filtering):
    # IPython shows the end of a traceback even if it is marked, so what stands behind the user's last line is taken out.
    filtering("tracebackhide")
    for call, marked in ((OURS["step"], False), (USERS["the loss"], True), (OURS["bank.use, left"], False)):
        error = raised(call, *started)
        assert bool(ours(error)) is marked
        steps, shown = error.__traceback__, []
        while steps is not None:
            shown += [] if steps.tb_frame.f_locals.get("__tracebackhide__") else [steps.tb_frame.f_code.co_filename]
            steps = steps.tb_next
        assert set(shown) == {__file__}


def test_under_ipython_that_is_what_auto_means(started, monkeypatch):
    monkeypatch.setattr("builtins.__IPYTHON__", True, raising=False)
    assert ours(raised(USERS["the loss"], *started))


@pytest.mark.parametrize("mode", ["tracebackhide", "quiet_remove_frames"])
def test_a_traceback_that_is_kept_keeps_no_arrays_by_the_variables_of_hidden_frames(started, filtering, mode):
    # A notebook keeps the last traceback.
    filtering(mode)
    pipe, state, _ = started
    batch = jnp.ones((8, 4))
    alive = weakref.ref(batch)
    try:
        pipe.evaluate(state, batch, loss_fn=broken)
    except KeyError as error:
        kept = error
    assert bool(ours(kept)) is (mode == "tracebackhide")
    del batch
    gc.collect()
    assert alive() is None


def test_an_exception_that_the_user_was_handling_keeps_its_frames(started):
    def elsewhere():
        lost({})

    def handling(bank):
        try:
            elsewhere()
        except KeyError:
            bank.params("dog")

    error = raised(handling, started[2])
    assert isinstance(error, BankError)
    names = [frame.name for frame in traceback.extract_tb(error.__context__.__traceback__)]
    assert names == ["handling", "elsewhere", "lost"]


@pytest.mark.parametrize("cls", [jaxpp.Pipeline, jaxpp.Bank, jaxpp.schedule.Schedule])
def test_every_public_method_is_an_entry(cls):
    made = entry(lambda: None).__code__
    for base in cls.__mro__:
        if base.__module__.startswith("jaxpp.") and base.__name__ in ("Pipeline", "Asked", "Bank", "Schedule"):
            for name, value in vars(base).items():
                method = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if (name == "__init__" or not name.startswith("_")) and inspect.isfunction(method):
                    assert method.__code__ is made, f"{base.__name__}.{name}"


def test_a_public_function_says_what_it_is():
    assert inspect.signature(jaxpp.Pipeline.step) == inspect.signature(inspect.unwrap(jaxpp.Pipeline.step))
    assert jaxpp.schedule.make.__doc__.startswith("Build the schedule")
    assert "num_stages" in inspect.signature(jaxpp.Pipeline).parameters


def test_ctrl_c_in_another_library_shows_the_users_own_lines_alone():
    def pressed(*_):
        raise KeyboardInterrupt

    model = nn.Sequential([nn.Dense(4), nn.Dense(4, kernel_init=pressed)])
    with pytest.raises(KeyboardInterrupt) as caught:
        pipeline().init(lambda key: model.init(key, X), jax.random.key(0), X)
    files = [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert files == [__file__] * 3, "the call of init, the function, and where it was pressed"
    assert caught.value.__cause__ is None
