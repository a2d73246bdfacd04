"""Several processes give what one process gives on the same devices, bit by bit, and each does and holds its own part alone.

``main`` is what ``experiments.hosts.worker`` calls in every process. It writes what this process holds of every result; the tests
put the parts of all processes together and compare them with what one process finds. (conftest.py is not imported in the processes:
it chooses the devices of the test process.)
"""

import dataclasses
import gc
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxpp
from jaxpp.errors import ArgumentError
from jaxpp.observe.memory.ledger import live_bytes
from jaxpp.observe.memory.liveness import step_liveness
from jaxpp.runtime.place import devices_of
from models.gpt import GPT
from tests.processes.processes import launch

pytestmark = pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")  # a model state has means over a microbatch

STEPS = 3
DEPTH = 8


@dataclasses.dataclass(frozen=True)
class Model:
    """A loss and what it is given; ``batch(step)`` is made of numpy arrays."""

    loss_fn: Callable[..., Any]
    init: Callable[..., Any]
    batch: Callable[[int], Any]
    options: Mapping[str, Any]
    keyed: bool = False


def gpt(batch_size: int = 11) -> Model:
    """Dropout, and an embedding tied to the head, so that the first and the last stage share a parameter."""
    model = GPT(vocab_size=16, max_length=4, width=8, depth=2, num_heads=2, dropout=0.2)

    def batch(step):
        return np.random.default_rng((2, step)).integers(0, 16, (batch_size, 5), "int32")

    def loss_fn(params, batch, key):
        logits = model.apply({"params": params}, batch[:, :-1], rngs={"dropout": key})
        aux = {"top": logits.max(), "sums": logits.sum((1, 2))}
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean(), aux

    def init(key):
        return model.init({"params": key, "dropout": key}, jnp.asarray(batch(0)[:1, :-1]))["params"]

    return Model(loss_fn, init, batch, {"has_aux": True}, keyed=True)


def tied(batch_size: int = 11) -> Model:
    """The same in a few equations: dropout, and an embedding that the first and the last stage share."""

    def batch(step):
        return np.random.default_rng((2, step)).integers(0, 16, (batch_size, 5), "int32")

    def loss_fn(params, batch, key):
        x = params["embed"][batch[:, :-1]]
        for k in range(DEPTH):
            kept = jax.random.bernoulli(jax.random.fold_in(key, k), 0.8, x.shape)
            x = x + jnp.where(kept, jnp.tanh(x @ params[f"w{k}"]), 0)
        logits = x @ params["embed"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean(), {"sums": logits.sum((1, 2))}

    def init(key):
        return {"embed": jax.random.normal(key, (16, 8)), **layers(key)}

    return Model(loss_fn, init, batch, {"has_aux": True}, keyed=True)


def norms(batch_size: int = 10) -> Model:
    """Layers in half precision with running means, and a loss scale; in the second step a gradient overflows."""

    def batch(step):
        rng = np.random.default_rng((3, step))
        scale = np.full((batch_size, 1), 6e4 if step == 1 else 1.0, "float32")
        return {"x": rng.normal(size=(batch_size, 8)).astype("f"), "y": rng.integers(0, 3, batch_size, "int32"), "scale": scale}

    def loss_fn(params, model_state, batch):
        x, means = batch["x"].astype("float16"), {}
        for k in range(DEPTH):
            x = x @ params[f"w{k}"].astype("float16")
            mean = x.mean(0)
            means[f"mean{k}"] = 0.8 * model_state[f"mean{k}"] + 0.2 * jax.lax.stop_gradient(mean)
            x = jax.nn.relu(x - mean)
        logits = (x @ params["head"].astype("float16")).astype("float32")
        losses = optax.softmax_cross_entropy_with_integer_labels(logits * batch["scale"], batch["y"])
        return losses.mean(), (means, {"accuracy": (logits.argmax(-1) == batch["y"]).mean()})

    def init(key):
        params = layers(key) | {"head": jax.random.normal(key, (8, 3))}
        return params, {f"mean{k}": jnp.zeros(8) for k in range(DEPTH)}

    scale = DynamicScale(scale=2.0**12, growth_interval=2)
    return Model(loss_fn, init, batch, {"has_state": True, "loss_scale": scale})


def mlp(batch_size: int = 16) -> Model:
    """Layers; aux has one row an example."""

    def batch(step):
        rng = np.random.default_rng((4, step))
        return {"x": rng.normal(size=(batch_size, 8)).astype("f"), "y": rng.integers(0, 2, batch_size, "int32")}

    def loss_fn(params, batch):
        x = batch["x"]
        for k in range(DEPTH):
            x = jnp.tanh(x @ params[f"w{k}"])
        logits = x @ params["head"]
        aux = {"accuracy": (logits.argmax(-1) == batch["y"]).mean(), "logits": logits}
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), aux

    def init(key):
        return layers(key) | {"head": jax.random.normal(key, (8, 2))}

    return Model(loss_fn, init, batch, {"has_aux": True})


def layers(key: jax.Array) -> dict[str, jax.Array]:
    return {f"w{k}": jax.random.normal(jax.random.fold_in(key, k), (8, 8)) / 2 for k in range(DEPTH)}


def stacked(batch_size: int = 8) -> Model:
    """A loop over layers whose parameters are stacked: each stage holds the rows of its own layers."""

    def batch(step):
        return np.random.default_rng((5, step)).normal(size=(batch_size, 8)).astype("f")

    def loss_fn(params, batch, key):
        x, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, params["w"])
        x = x * jax.random.bernoulli(key, 0.9, x.shape)
        return ((x @ params["out"]) ** 2).mean()

    def init(key):
        return {"w": jax.random.normal(key, (8, 8, 8)) / 3, "out": jnp.ones((8, 2))}

    return Model(loss_fn, init, batch, {}, keyed=True)


MODELS = {"gpt": gpt, "tied": tied, "norms": norms, "mlp": mlp, "stacked": stacked}
RULES = {
    "mlp": {"w[0246]": PartitionSpec(None, "model"), "w[1357]": PartitionSpec("model", None)},
    "gpt": {"*/fc": "column", "*/proj": "row", "*/attn": "heads", "embed": "embedding"},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A pipeline.

    Attributes:
        model: a key of ``MODELS``.
        schedule: its name.
        stages: of the pipeline.
        microbatches: parts of the batch.
        grid: sizes of the mesh along pipe, data and model; empty for a device each rank.
        order: the axes of the mesh, that which changes slowest along the devices first; with ``pipe`` later, a rank spans hosts.
        batch_size: examples of a step.
        each: devices that are used of each process.
        local: whether a process is given only the part of the batch that its stages read.
        looked: whether it evaluates too, and live bytes and compiled programs are looked at.
        applied: whether outputs are asked of it too, and of a ``Forward``.
        remat: what stages keep.
        shard: what replicas divide between them.
        host: what waits in host memory.
        delay: how many steps gradients are late.
        lists: the devices of each rank by number, where ranks are of unequal width.
        replicas: of each rank of these.
    """

    model: str
    schedule: str = "1f1b"
    stages: int = 4
    microbatches: int = 4
    grid: tuple[int, ...] = ()
    order: tuple[int, ...] = (0, 1, 2)
    batch_size: int = 0
    each: int = 2
    local: bool = False
    looked: bool = False
    applied: bool = False
    remat: str = "least"
    shard: str | None = None
    host: str | None = None
    delay: int = 0
    lists: tuple[tuple[int, ...], ...] = ()
    replicas: int = 1


def optimizer() -> optax.GradientTransformation:
    """Two moments of each parameter, after clipping by the global norm."""
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))


def pipeline(case: Case, devices: Sequence[jax.Device]) -> tuple[jaxpp.Pipeline, Model]:
    """The pipeline of a case, over these devices."""
    model = MODELS[case.model](**({"batch_size": case.batch_size} if case.batch_size else {}))
    counts = {"num_stages": case.stages, "num_microbatches": case.microbatches, "schedule": case.schedule, "remat": case.remat}
    counts |= {"shard": case.shard, "host": case.host, "delay": case.delay}
    where: dict[str, Any] = {"devices": devices}
    if case.grid:
        sizes = [case.grid[axis] for axis in case.order]
        grid = np.array(devices[: np.prod(sizes)]).reshape(sizes).transpose(np.argsort(case.order))
        where = {"mesh": Mesh(grid, ("pipe", "data", "model"))}
        if case.grid[2] > 1:
            where["shardings"] = RULES[case.model]
    if case.lists:
        ranks = [[devices[number] for number in rank] for rank in case.lists]
        where = {"devices": ranks, "data_parallel": case.replicas, "shardings": RULES[case.model]}
    return jaxpp.Pipeline(model.loss_fn, optimizer(), **counts, **model.options, **where), model


def run(case: Case, devices: Sequence[jax.Device]) -> dict[str, np.ndarray]:
    """Train for a few steps, and say what this process holds of every result after each.

    Returns:
        arrays by ``step path [begin:end of each axis]``; with ``looked`` also what ``look`` returns.
    """
    if case.looked:
        jax.clear_caches()  # equal programs of two names that other cases have compiled would count twice
    pipe, model = pipeline(case, devices)
    found: dict[str, np.ndarray] = {}
    state = pipe.init(model.init, jax.random.key(0), model.batch(0))
    part = own_part(pipe) if case.local else lambda batch: batch
    note(found, "0", state.held)
    for step in range(1, STEPS + 1):
        key = [jax.random.key(step)] * model.keyed
        state, metrics = pipe.step(state, part(model.batch(step - 1)), *key)
        jax.block_until_ready((state, metrics))
        note(found, str(step), {"state": state.held, "metrics": dict(metrics)})
    key = [jax.random.key(7)] * model.keyed
    if case.looked:
        note(found, "evaluate", dict(pipe.evaluate(state, part(model.batch(9)), *key)))
        del metrics
        found |= look(pipe, state, model.batch(8), *key)
    if case.applied:
        note(found, "evaluate", applied(case, pipe, state, model, part(model.batch(9)), key))
    return found


def applied(case: Case, pipe: jaxpp.Pipeline, state: jaxpp.State, model: Model, batch: Any, key: list[jax.Array]) -> Any:
    """Rows of a function of the parameters, also as a stream; and of a ``Forward`` whose parameters each process makes in part."""

    def fn(params, batch, *key):
        return model.loss_fn(params, batch, *key)[1]

    found = {"apply": pipe.apply(state, batch, fn, *key), "stream": list(pipe.stream(state, [batch, batch], fn, *key))}
    whole = model.batch(9)
    forward = jaxpp.Forward(
        fn, num_stages=case.stages, num_microbatches=case.microbatches, devices=list(pipe.engine.options.devices)
    )
    params = forward.init(model.init, jax.random.key(0), whole)
    return found | {"forward": forward.apply(params, jax.tree.map(lambda leaf: leaf[:3], whole), *key)}


def own_part(pipe: jaxpp.Pipeline) -> Callable[[Any], Any]:
    """What takes of a batch what the stages of this process read: shapes for the rest, or global arrays of the rows here."""
    me = jax.process_index()
    first, last = (any(device.process_index == me for device in devices_of(pipe.stages[k].device)) for k in (0, -1))

    def part(batch):
        shapes = jax.eval_shape(lambda: batch)
        return {"x": batch["x"] if first else shapes["x"], "y": batch["y"] if last else shapes["y"]}

    def rows(batch):
        return {name: of_rows(leaf) for name, leaf in batch.items()}

    def of_rows(leaf):
        mesh = pipe.stages[0 if first else -1].device.mesh
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        here = sorted({index[0].indices(len(leaf))[:2] for index in sharding.addressable_devices_indices_map(leaf.shape).values()})
        mine = leaf[here[0][0] : here[-1][1]]
        return jax.make_array_from_process_local_data(sharding, mine, leaf.shape)

    return part if isinstance(pipe.stages[0].device, jax.Device) else rows


def note(found: dict[str, np.ndarray], when: str, tree: Any) -> None:
    """Add what this process holds of a tree."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = f"{when} {jax.tree_util.keystr(path)}"
        if not isinstance(leaf, jax.Array):
            found[f"{name} []"] = np.asarray(leaf)
            continue
        for shard in leaf.addressable_shards:
            ranges = [part.indices(size)[:2] for part, size in zip(shard.index, leaf.shape, strict=True)]
            place = ", ".join(f"{begin}:{end}" for begin, end in ranges)
            data = np.array(shard.data)  # a copy, which keeps no buffer
            known = found.setdefault(f"{name} [{place}]", data)
            assert known.tobytes() == data.tobytes(), f"{name}: the replicas differ"


def look(pipe: jaxpp.Pipeline, state: jaxpp.State, batch: Any, *key: jax.Array) -> dict[str, np.ndarray]:
    """Run a step, and look at every instruction at what is alive.

    Returns:
        ``live <device>``: by how much the bytes of all arrays there exceed what the account of the step says, at the beginning and
        after each instruction; ``kept <device>``: bytes of the state there, which is left as it is, for the step is given a copy;
        ``programs``: how many this process has compiled.
    """
    engine, key = pipe.engine, (*key, None)[0]
    account = step_liveness(engine, engine.lower("update", batch, key))
    plan, local = engine.plan("update", batch, key)
    moments = iter(own_moments(account.lines, local.bound.lines))
    mine = [device for device in account.devices if device.process_index == jax.process_index()]
    own = engine.run("update", engine.copy(engine.leaves(state.held)), batch, key).state  # everything is compiled by now
    jax.block_until_ready(own.flat())
    gc.collect()
    found = {"programs": np.array([engine.programs.num_compiled])}
    if jax.process_count() == 1:
        return found
    samples = [(0, {device: live_bytes(device) for device in mine})]
    engine.run("update", own, batch, key, observer=lambda *_: samples.append((next(moments), {d: live_bytes(d) for d in mine})))
    assert len(samples) == len(plan.instructions) + 1
    for k, device in enumerate(mine):
        held = [account.levels[device][moment].sum() for moment, _ in samples]
        shards = [shard.data for leaf in jax.tree.leaves(state.held) for shard in leaf.addressable_shards]
        found[f"kept {k}"] = np.array([sum(data.nbytes for data in shards if data.devices() == {device})])
        found[f"live {k}"] = np.array([sample[device] for _, sample in samples]) - held
    return found


def own_moments(lines: Sequence[Any], own: Sequence[Any]) -> list[int]:
    """The moments after each of the lines that this process runs, among the lines of all."""
    found, rest = [], iter(enumerate(lines))
    for line in own:
        same = (
            number
            for number, other in rest
            if (line.label, line.place) == (other.label, other.place)
            and set(line.inputs) <= set(other.inputs)
            and set(line.outputs) <= set(other.outputs)
        )
        found.append(next(same) + 1)
    return found


def main(folder: str, cases: Mapping[str, Mapping[str, Any]]) -> None:
    """Run cases in one of several processes, on the first devices of each, and write what it holds of their results."""
    for category in (jaxpp.UnevenStagesWarning, jaxpp.MicrobatchWarning):
        warnings.simplefilter("ignore", category)
    for name, options in cases.items():
        begun, case = time.perf_counter(), from_json(options)
        numbers = range(jax.process_count())
        devices = [device for number in numbers for device in jax.local_devices(process_index=number)[: case.each]]
        found = run(case, devices)
        file = Path(folder) / f"{name}.{jax.process_index()}.npz"
        np.savez(file, names=np.array(list(found)), **{str(number): value for number, value in enumerate(found.values())})
        print(f"{name}: {time.perf_counter() - begun:.1f} seconds", flush=True)
    check_gather()
    check_unequal_ranks()


def check_unequal_ranks() -> None:
    """Where ranks are of unequal width, a replica of one does not span processes."""
    first, second, other = *jax.local_devices(process_index=0)[:2], jax.local_devices(process_index=1)[0]
    with pytest.raises(ArgumentError, match="those of a replica of a rank are of one process"):
        jaxpp.Pipeline(mlp().loss_fn, optimizer(), num_stages=2, devices=[[first, other], second], shardings=RULES["mlp"])


def check_gather() -> None:
    """Every process gets what each of the others holds, also if there are more than two."""
    tree = {}
    for number in range(jax.process_count()):
        home = SingleDeviceSharding(jax.local_devices(process_index=number)[-1])
        here = [jax.device_put(np.full(3, number, np.float32), home)] if number == jax.process_index() else []
        tree[str(number)] = jax.make_array_from_single_device_arrays((3,), home, here, dtype=np.float32)
    for number, leaf in jaxpp.gather(tree).items():
        np.testing.assert_array_equal(leaf, np.full(3, int(number), np.float32))


def load(path: Path) -> dict[str, np.ndarray]:
    """What ``main`` wrote."""
    with np.load(path) as file:
        return {str(name): file[str(number)] for number, name in enumerate(file["names"])}


def as_json(case: Case) -> dict[str, Any]:
    """As an argument of ``main``."""
    return dataclasses.asdict(case)


def from_json(options: Mapping[str, Any]) -> Case:
    """As it was before it was an argument."""
    return Case(**{name: tuple(value) if isinstance(value, list) else value for name, value in options.items()})


FEW = {
    "ties, dropout, clipping and unequal microbatches": Case("tied", applied=True),
    "data across processes, each with its own rows": Case("mlp", "zb-h1", 2, 3, (2, 2, 1), (1, 0, 2), batch_size=24, local=True),
}
TWO = {
    "interleaved, with model state and a loss scale": Case("norms", "interleaved", 8),
    "zb-h1 over stacked layers": Case("stacked", "zb-h1"),
    "zb-v, each process with its own part of the batch": Case(
        "mlp", "zb-v", 8, local=True, looked=True, batch_size=18, applied=True
    ),
    "late gradients": Case("tied", delay=1),
    "a mesh inside each process": Case("mlp", "1f1b", 2, 2, (2, 2, 2), each=4),
    "residuals in host memory": Case("tied", "gpipe", 4, 5, looked=True, remat="offload"),
    "residuals in host memory, data across processes": Case(
        "mlp", "gpipe", 2, 4, (2, 2, 1), (1, 0, 2), batch_size=16, remat="offload"
    ),
}
UNEQUAL = {
    "wide and narrow ranks": Case("gpt", "1f1b", 4, 4, each=4, lists=((0,), (1, 2), (4,), (5, 6)), batch_size=16, applied=True),
    "a wide rank of another process": Case("mlp", "zb-h1", 3, 4, each=4, lists=((0,), (4, 5), (1,)), batch_size=16),
    "interleaved": Case("mlp", "interleaved", 6, 3, each=4, lists=((4, 5), (0,), (1,)), batch_size=12, remat="offload"),
    "replicas of two widths": Case("mlp", "1f1b", 2, 2, each=4, lists=((0, 1, 2, 3), (4, 5)), replicas=2, batch_size=16),
    "replicas of two widths in a process each": Case(
        "mlp", "1f1b", 2, 2, each=4, lists=((0, 1, 4, 5), (2, 6)), replicas=2, batch_size=16, shard="parameters"
    ),
    "late gradients of unequal ranks": Case("mlp", "1f1b", 2, 4, each=4, lists=((0,), (4, 5)), batch_size=16, delay=1),
    "unequal ranks in host memory": Case("mlp", "looped-bfs", 4, 4, each=4, lists=((4, 5), (0,)), batch_size=16, host="params"),
}
DIVIDED = {
    "optimizer state across processes": Case("mlp", "zb-v", 4, 4, (2, 2, 1), (1, 0, 2), batch_size=16, shard="optimizer"),
    "gradients across processes": Case("mlp", "1f1b", 2, 4, (2, 2, 1), (1, 0, 2), batch_size=16, shard="gradients"),
    "parameters across processes": Case("gpt", "1f1b", 2, 4, (2, 2, 1), (1, 0, 2), batch_size=16, shard="parameters"),
    "parameters inside each process": Case("mlp", "zb-h1", 2, 4, (2, 2, 1), batch_size=16, shard="parameters"),
    "parameters in host memory in parts": Case(
        "mlp", "looped-bfs", 4, 4, (2, 2, 1), (1, 0, 2), batch_size=16, shard="parameters", host="params"
    ),
}
FOUR = {
    "eight ranks": Case("mlp", "1f1b", 8, 4, local=True, looked=True),
    "data across processes, pipe too": Case("mlp", "1f1b", 2, 2, (2, 2, 2), (1, 0, 2)),
}
SCHEDULES = {"1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}


def grid(count: int) -> dict[str, Case]:
    """Every model under every schedule, with a device for each rank."""
    found = {}
    for model in ("gpt", "tied", "norms", "stacked", "mlp"):
        for schedule, per_rank in SCHEDULES.items():
            microbatches = 2 * count if schedule == "interleaved" else 2 * count + 1
            stages, batch_size = 2 * count * per_rank, 2 * microbatches + 3
            found[f"{model} {schedule}"] = Case(model, schedule, stages, microbatches, batch_size=batch_size)
    return found


def meshes(shape: tuple[int, ...], order: tuple[int, ...], each: int) -> dict[str, Case]:
    """Models with tensor parallelism under every schedule."""
    return {
        f"{model} {schedule}": Case(model, schedule, 2 * per_rank, 4, shape, order, batch_size=16, each=each)
        for model in ("gpt", "mlp")
        for schedule, per_rank in SCHEDULES.items()
    }


GRIDS = {
    "two processes": (2, grid(2)),
    "four processes": (4, grid(4)),
    "meshes inside two processes": (2, meshes((2, 2, 2), (0, 1, 2), 4)),
    "data across two processes": (2, meshes((2, 2, 1), (1, 0, 2), 2)),
    "data and pipe across four processes": (4, meshes((2, 2, 2), (1, 0, 2), 2)),
}
SEEN = ("live", "kept", "prog")
"""How the names of what ``look`` returns begin."""


class Together:
    """What several processes found, and one."""

    def __init__(self, count: int, cases: dict[str, Case], folder):
        self.count, self.cases, self.folder = count, cases, folder
        arguments = {"folder": str(folder), "cases": {name: as_json(case) for name, case in cases.items()}}
        devices = max(case.each for case in cases.values())
        for ended in launch("tests.processes.test_processes:main", count, arguments, devices=devices, seconds=60 * len(cases)):
            print(ended.out)

    def parts(self, name: str) -> list[dict[str, np.ndarray]]:
        """What each process found."""
        return [load(self.folder / f"{name}.{number}.npz") for number in range(self.count)]

    def alone(self, name: str) -> dict[str, np.ndarray]:
        """What one process finds."""
        return run(self.cases[name], jax.devices()[: self.count * self.cases[name].each])


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return Together(2, FEW, tmp_path_factory.mktemp("few"))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return Together(2, TWO, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    return Together(2, DIVIDED, tmp_path_factory.mktemp("divided"))


@pytest.fixture(scope="module")
def unequal(tmp_path_factory):
    return Together(2, UNEQUAL, tmp_path_factory.mktemp("unequal"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return Together(4, FOUR, tmp_path_factory.mktemp("four"))


def results(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: value for name, value in found.items() if not name.startswith(SEEN)}


def check(together: Together, name: str) -> None:
    """Put together what the processes hold; it is what one process finds, and all of them can read the metrics."""
    parts, alone, found = together.parts(name), together.alone(name), {}
    for part in map(results, parts):
        for leaf, value in part.items():
            known = found.setdefault(leaf, value)
            assert known.tobytes() == value.tobytes(), f"{leaf} differs between processes"
    wanted = results(alone)
    assert sorted(found) == sorted(wanted)
    assert len(wanted) > 50
    for leaf, value in wanted.items():
        assert (found[leaf].dtype, found[leaf].shape, found[leaf].tobytes()) == (value.dtype, value.shape, value.tobytes()), leaf
    metrics = {leaf for leaf in wanted if "'metrics'" in leaf or leaf.startswith("evaluate")}
    assert len(metrics) >= 3 * 3  # loss, norm and step
    held = [set(results(part)) - metrics for part in parts]
    assert all(metrics <= set(part) for part in parts)
    case = together.cases[name]
    if together.count > 2 or (case.order == (0, 1, 2) and case.replicas == 1):  # else every process has replicas of all ranks
        assert all(len(part) < len(wanted) - len(metrics) for part in held)


@pytest.mark.parametrize("name", FEW)
def test_two_processes_give_the_bits_of_one(few, name):
    check(few, name)


@pytest.mark.long
@pytest.mark.parametrize("name", TWO)
def test_more_pipelines_of_two_processes_give_the_bits_of_one(two, name):
    check(two, name)


@pytest.mark.long
@pytest.mark.parametrize("name", DIVIDED)
def test_replicas_of_two_processes_divide_state_with_the_bits_of_one(divided, name):
    check(divided, name)


@pytest.mark.long
@pytest.mark.parametrize("name", UNEQUAL)
def test_ranks_of_unequal_width_in_two_processes_give_the_bits_of_one(unequal, name):
    check(unequal, name)


@pytest.mark.long
def test_the_second_step_overflows(two):
    name = next(name for name, case in TWO.items() if case.model == "norms")
    for part in two.parts(name):
        assert [bool(part[f"{step} ['metrics']['finite'] []"]) for step in (1, 2, 3)] == [True, False, True]


@pytest.mark.long
@pytest.mark.parametrize("name", FOUR)
def test_four_processes_give_the_bits_of_one(four, name):
    check(four, name)


@pytest.mark.long
@pytest.mark.parametrize(
    ("fixture", "name"), [("two", "zb-v, each process with its own part of the batch"), ("four", "eight ranks")]
)
def test_a_process_holds_what_the_account_says_of_its_ranks_and_compiles_their_programs_alone(fixture, name, request):
    together = request.getfixturevalue(fixture)
    alone, parts = together.alone(name), together.parts(name)
    assert sum(int(part["programs"][0]) for part in parts) == alone["programs"][0]
    for part in parts:
        assert 0 < part["programs"][0] < alone["programs"][0]
        assert {device for device in part if device.startswith("live")} == {"live 0", "live 1"}
        for k in range(2):
            above = part[f"live {k}"]
            assert len(above) > 20
            assert above.min() == above.max()
            # The metrics that were read, and the loss that the detector of NaN keeps.
            assert 0 <= above[0] - part[f"kept {k}"][0] <= 16 + 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jaxpp.UnevenStagesWarning")
@pytest.mark.parametrize("name", GRIDS)
def test_the_full_grid_gives_the_bits_of_one(tmp_path, name):
    count, cases = GRIDS[name]
    together = Together(count, cases, tmp_path)
    for case in cases:
        check(together, case)
