"""What pipelines, forwards, sampling and banks refuse when they are made or begun: a call a line, and what is said in the file."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxpp
from tests import messages
from tests.models import PARAMS, X, loss_fn, mlp_case
from tests.models import pipeline as make

P, D, SGD = PartitionSpec, jax.devices(), optax.sgd(0.1)
CASE = mlp_case(batch_size=16)
SET = {"w": np.ones((6, 6), "f")}


class Tensor:
    """As of PyTorch: NumPy makes an array of it, and JAX does not."""

    shape = (8, 4)

    def __array__(self, *args, **kwargs):
        return np.ones(self.shape)


def begun(loss=loss_fn, optimizer=SGD, params=PARAMS, batch=X, **options):
    """A pipeline, begun with these parameters and this batch."""
    pipe = make(loss, optimizer, **options)
    return pipe, pipe.init(params, batch)


def of_task(params, own, x):
    return loss_fn(params | {"b": params["b"] @ own["w"]}, x)


def banked(**options):
    return make(of_task, SGD, bank=jaxpp.Bank({"t": SET}, SGD), **options)


def with_state(params, model_state, x):
    return loss_fn(params, x), (model_state, {})


def stepped(params=PARAMS, state=None):
    pipe, first = begun()
    return pipe.step(first.replace(params=params) if state is None else state, X)


def asked(name):
    pipe, state = begun()
    return getattr(pipe, name)(state, X, task="t")


def by_hand():
    return jaxpp.Pipeline.from_stages([lambda p, x: x * p] * 2, loss=lambda x, y: ((x - y) ** 2).mean(), optimizer=SGD)


def mesh_of(*sizes, names=("pipe", "data", "model")):
    return Mesh(np.array(D[: np.prod(sizes)]).reshape(sizes), names)


def on_mesh(**options):
    return begun(lambda params, batch: CASE.loss_fn(params, batch)[0], params=CASE.params, batch=CASE.batch, **options)


def swapped(loss, *given, **options):
    return make(loss, SGD, **options).init(*given)


def sum_of(params, x):
    return jnp.sum(x * params["w"])


def numpy_init(key):
    return PARAMS | {"a": np.asarray(jax.random.normal(key, (4, 6)))}


two = functools.partial(make, loss_fn, SGD)
meshed = functools.partial(on_mesh, mesh=mesh_of(2, 2, 2))
REFUSED = {
    "no optimizer": lambda: make(loss_fn, 0.1),
    **{f"memory of {each!r}": lambda each=each: two(hbm=each) for each in (24, 80.0, "24")},
    "no shapes": lambda: two(max_shapes=0),
    "fuse in words": lambda: two(fuse="yes"),
    "another balance": lambda: two(balance="seconds"),
    "a balance that is misspelt": lambda: two(balance="flop"),
    "microbatches that make no rounds": lambda: make(loss_fn, SGD, stages=4, microbatches=5, schedule="interleaved"),
    "a cut that nothing is called": lambda: begun(cuts=["layer"]),
    "more stages than equations": lambda: begun(
        lambda p, x: jnp.sum(x * p["w"]), params={"w": jnp.ones(4)}, balance="memory", stages=4
    ),
    "more stages than layers": lambda: begun(stages=40),
    "remat in words": lambda: two(remat=["offloaded", jaxpp.Offload(), "offload"]),
    "replicas of unequal number": lambda: two(data_parallel=[2, 1]),
    "a delay of two": lambda: two(delay=2),
    "a late loss that trains more": lambda: begun(delay=1, trains="a")[0].other(loss_fn, trains="b"),
    "a flush of parameters": lambda: begun(delay=1)[0].flush(PARAMS),
    "gradients in host memory": lambda: two(host="gradients"),
    "an optimizer of a forward": lambda: jaxpp.Forward(lambda p, x: x, num_stages=1, host="optimizer"),
    "what forwards do not divide": lambda: jaxpp.Forward(lambda p, x: x, num_stages=1, shard="optimizer"),
    **{f"a division of {each!r}": lambda each=each: two(shard=each) for each in ("optimiser", ("optimizer", 3), 3, "data")},
    "a spec that does not divide": lambda: begun(data_parallel=4, shardings={"b": P("data")}),
    "nothing to train": lambda: begun(params=jax.tree.map(lambda leaf: leaf.astype("int8"), PARAMS)),
    "numbers below a byte": lambda: begun(params=PARAMS | {"q": jnp.ones(3, "int4")}),
    "another loss by hand": lambda: by_hand().other(loss_fn),
    "adapters and one optimizer for all": lambda: begun(optimizer=optax.adam(0.1), trains="a"),
    "paths that name nothing": lambda: begun(trains=["a", "z"]),
    **{f"what is no path: {each}": lambda each=each: two(trains=each) for each in (3, [], [3])},
    "no pair of parameters and state": lambda: make(with_state, SGD, has_state=True).init({"a": jnp.ones(2)}, X),
    "a number as model state": lambda: make(with_state, SGD, has_state=True).init(({"a": jnp.ones(2)}, {"n": 1}), X),
    "forwards in another order": lambda: make(
        with_state,
        SGD,
        has_state=True,
        schedule=jaxpp.schedule.Schedule("turned", ["0F1 0F0 0B0 0B1", "1F0 1F1 1B1 1B0"]),
    ),
    "a list of labels": lambda: begun(lambda p, b: loss_fn(p, b["x"]), batch={"x": X, "y": [0, 1] * 4}),
    "swapped arguments": lambda: swapped(loss_fn, X, PARAMS),
    "swapped arguments of a forecast": lambda: begun()[0].forecast(X, PARAMS),
    "swapped arguments with a key": lambda: swapped(lambda p, x, key: loss_fn(p, x), X, PARAMS),
    "swapped arguments with a state": lambda: swapped(with_state, X, (PARAMS, {"n": np.zeros(3)}), has_state=True),
    "swapped arguments with a bank": lambda: banked().init(X, PARAMS),
    "functions as parameters": lambda: begun(params=PARAMS | {"f": jnp.tanh}),
    "numpy inside init": lambda: two().init(
        lambda key: PARAMS | {"a": np.asarray(jax.random.normal(key, (4, 6)))}, jax.random.key(0), X
    ),
    "stages before init": lambda: two().stages,
    "a step before init": lambda: two().step(None, X),
    "a state that lacks a leaf": lambda: stepped({"a": PARAMS["a"], "c": PARAMS["c"]}),
    "a state of another shape": lambda: stepped(PARAMS | {"b": jnp.ones((6, 5))}),
    "a tuple for a state": lambda: stepped(state=(PARAMS, ())),
    "axes in a word": lambda: two(mesh=mesh_of(2, 2, names=("pipe", "c")), axes="fsdp"),
    "axes of another name": lambda: two(mesh=mesh_of(2, 2, names=("pipe", "c")), axes={"tensor": "c"}),
    "an axis for two": lambda: two(mesh=mesh_of(2, 2, names=("pipe", "c")), axes={"data": "a", "model": "a"}),
    "axes that nobody names": lambda: two(mesh=mesh_of(2, 2, names=("pipe", "c"))),
    "a mesh of other axes": lambda: two(mesh=mesh_of(2, 4, names=("pipe", "rows"))),
    "a mesh in words": lambda: two(mesh="2x2x2"),
    "a mesh and replicas": lambda: two(mesh=mesh_of(2, 2, 2), data_parallel=2),
    "a mesh of more ranks": lambda: two(mesh=mesh_of(4, 2, 1)),
    "replicas as text": lambda: two(data_parallel="2"),
    "a list for host": lambda: begun(host=["params"]),
    "no replicas": lambda: two(data_parallel=0),
    "more replicas than devices": lambda: two(data_parallel=16),
    "devices named twice for replicas": lambda: two(devices=D[:1] * 2, data_parallel=2),
    "a rule that matches nothing": lambda: meshed(shardings={"dense_9": "column"}),
    "a rule that is none": lambda: meshed(shardings={"dense_0": "columns"}),
    "a rule for another axis": lambda: meshed(shardings={"head": P("pipe")}),
    "a rule that does not divide": lambda: on_mesh(mesh=mesh_of(1, 1, 4), stages=1, shardings={"head": "column"}),
    "a rule for one leaf": lambda: meshed(shardings=[P()]),
    "a rule of more axes": lambda: meshed(shardings={"head": P(None, None, "model")}),
    "a batch that replicas cannot share": lambda: begun(batch=jnp.ones((18, 4)), data_parallel=4),
    "a batch of another library's arrays": lambda: begun(batch=Tensor()),
    "a state and its metrics": lambda: stepped(state=(begun()[1], None)),
    "a function for a key": lambda: begun()[0].evaluate(stepped()[0], X, loss_fn),
    "several transformations": lambda: begun(optimizer=[optax.clip(1.0), SGD]),
    "learning rates for an optimizer": lambda: begun(optimizer=optax.cosine_decay_schedule(0.1, 100)),
    "a made schedule, misspelt": lambda: begun(schedule="Auto"),
    "a batch smaller than microbatches": lambda: begun(batch=jnp.ones((4, 4)), data_parallel=4),
    "wrong samplings": lambda: jaxpp.Sampling(-1, 0, 2),
    "more tokens than the vocabulary": lambda: jax.eval_shape(jaxpp.Sampling(top_k=9), jnp.zeros(8), jax.random.key(0)),
    "logits of several positions": lambda: jaxpp.Sampling()(jnp.zeros((2, 8)), jax.random.key(0)),
    "a bank without slots": lambda: jaxpp.Bank({}, SGD, slots=0),
    "a bank without an optimizer": lambda: jaxpp.Bank({}, SET),
    "sets without names": lambda: jaxpp.Bank([SET], SGD),
    "the earlier name of shapes": lambda: jaxpp.Bank({"t": SET}, SGD).layout("t"),
    "a pipeline with a dict for a bank": lambda: make(of_task, SGD, bank={"t": SET}),
    "a pipeline with a bank without sets": lambda: make(of_task, SGD, bank=jaxpp.Bank({}, SGD)),
    **{f"{ask} of a task without a bank": lambda ask=ask: asked(ask) for ask in ("step", "evaluate", "verify", "profile")},
}


@pytest.mark.filterwarnings("ignore::jaxpp.DevicesWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_made_or_begun_is_refused(name):
    messages.check("pipelines", REFUSED, name, REFUSED[name])
