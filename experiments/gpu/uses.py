"""Whether every way to use jaxpp runs on this device and stays exact: each a small model, each checked against plain JAX.

A use that trains is checked by ``pipe.verify``; a use that has other bits than the resident pipeline by no bit; one that makes
outputs or tokens by the same function on one device. All stages share the device if there is only one. Matrix products of float32
are computed with full precision, as in the part ``exactness``.
"""

import gc
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.dynamic_scale import DynamicScale
from jax.sharding import Mesh

import jaxpp
from experiments.gpu.rows import Job, Row, first_line
from models.gpt import GPT

__all__ = ["CASES", "rows"]

WIDTH, STAGES, COUNT, STEPS = 64, 4, 8, 3
KEY = jax.random.key(7)
OPTIMIZER = optax.adamw(1e-3)
VOCABULARY, LENGTH = 96, 32


class Layers(nn.Module):
    """Eight dense layers, with dropout or batch normalisation if asked for; smooth, so that no sign hangs on rounding."""

    rate: float = 0.0
    norm: bool = False
    dtype: Any = jnp.float32
    activation: Callable[[jax.Array], jax.Array] = nn.gelu

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = True) -> jax.Array:
        """Features to features."""
        for _ in range(8):
            x = self.activation(nn.Dense(WIDTH, dtype=self.dtype)(x))
            x = nn.Dropout(self.rate, deterministic=not train)(x) if self.rate else x
            x = nn.BatchNorm(use_running_average=not train)(x) if self.norm else x
        return nn.Dense(10, dtype=self.dtype)(x)


def _batch(size: int = 32) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(size, WIDTH)).astype("float32"), "y": rng.integers(0, 10, size, "int32")}


def _loss(model: nn.Module) -> Callable[..., jax.Array]:
    def loss_fn(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, batch["x"], rngs={"dropout": key})
        logits = jnp.asarray(logits, jnp.promote_types(jnp.float32, logits.dtype))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return loss_fn


def _init(model: nn.Module) -> Callable[[jax.Array], Any]:
    return lambda key: model.init(key, jnp.ones((1, WIDTH)))["params"]


def _trained(job: Job, model: nn.Module | None = None, optimizer: Any = OPTIMIZER, **options: Any) -> str:
    """Steps of a pipeline, then ``verify``."""
    del job
    model = model or Layers(rate=0.1)
    pipe = _pipe(model, optimizer, **options)
    state = pipe.init(_init(model), KEY, _batch())
    for _ in range(STEPS):
        state, _ = pipe.step(state, _batch(), KEY)
    return f"{pipe.verify(state, _batch(), KEY)}; loss {float(pipe.evaluate(state, _batch(), KEY).loss):.4f}"


def _pipe(model: nn.Module, optimizer: Any = OPTIMIZER, **options: Any) -> jaxpp.Pipeline:
    given: dict[str, Any] = {"num_stages": STAGES, "num_microbatches": COUNT} | options
    return jaxpp.Pipeline(_loss(model), optimizer, **given)


def _steps(batch: Any, **options: Any) -> tuple[Any, str]:
    """Everything that some steps made, on the host, and the pipeline in words."""
    model = Layers(rate=0.1)
    pipe = _pipe(model, optax.chain(optax.clip_by_global_norm(0.1), OPTIMIZER), **options)
    state = pipe.init(_init(model), KEY, batch)
    losses = []
    for _ in range(STEPS):
        state, metrics = pipe.step(state, batch, KEY)
        losses.append(metrics.loss)
    kinds = sorted({str(leaf.sharding.memory_kind) for leaf in jax.tree.leaves((state.params, state.opt_state))})
    return jax.device_get((losses, state.params, state.opt_state)), f"the state is in {', '.join(kinds)}"


def _same_bits(job: Job, *, exact: bool = True, **options: Any) -> str:
    """The steps with an option against those without it; not ``exact``: up to rounding, where a program is another."""
    del job
    options = {"schedule": jaxpp.schedule.make("looped-bfs", STAGES, COUNT, stages_per_rank=2), "num_stages": 2 * STAGES} | options
    plain = {name: value for name, value in options.items() if name not in ("host", "remat")}
    (found, where), (wanted, _) = _steps(_batch(), **options), _steps(_batch(), **plain)
    if exact:
        _check_bits(found, wanted)
    return f"{'equal bits' if exact else _close(found, wanted)} after {STEPS} steps; {where}"


def _check_bits(found: Any, wanted: Any) -> None:
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
    wrong = [jax.tree_util.keystr(path) for (path, a), b in pairs if np.asarray(a).tobytes() != np.asarray(b).tobytes()]
    if wrong:
        raise AssertionError(f"{len(wrong)} leaves have other bits, first {wrong[0]}")


def _close(found: Any, wanted: Any) -> str:
    found, wanted = jax.device_get((found, wanted))
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
    for (path, a), b in pairs:
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=jax.tree_util.keystr(path))
    return f"{len(jax.tree.leaves(wanted))} leaves are close"


def _relu(job: Job) -> str:
    """A model whose signs may hang on rounding, in float64, where that tells no error: its backward is another program."""
    del job
    model = Layers(dtype=jnp.float64, activation=nn.relu)
    jax.config.update("jax_enable_x64", True)
    try:
        batch = _batch(4096)
        batch["x"] = batch["x"].astype("float64")
        pipe = _pipe(model, remat="recompute")
        made = pipe.init(lambda key: jax.tree.map(lambda leaf: leaf.astype("float64"), _init(model)(key)), KEY, batch)
        state, _ = pipe.step(made, batch, KEY)
        return str(pipe.verify(state, batch, KEY))
    finally:
        jax.config.update("jax_enable_x64", False)


def _delay(job: Job) -> str:
    """``delay=1`` against the loop that its documentation promises."""
    del job
    model, batch = Layers(), _batch()
    pipe = _pipe(model, delay=1)
    state = pipe.init(_init(model), KEY, batch)
    grad = jax.jit(jax.grad(_loss(model)))
    params = before = jax.jit(_init(model))(KEY)
    opt_state = OPTIMIZER.init(params)
    for _ in range(STEPS):
        state, _ = pipe.step(state, batch, KEY)
        updates, opt_state = OPTIMIZER.update(grad(before, batch, KEY), opt_state, params)
        before, params = params, optax.apply_updates(params, updates)
    return _close(state.params, params)


def _model_state(job: Job) -> str:
    """BatchNorm's statistics as model state."""
    del job
    model = Layers(norm=True)

    def loss_fn(params: Any, stats: Any, batch: Any) -> Any:
        found, new = model.apply({"params": params, "batch_stats": stats}, batch["x"], mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(found, batch["y"]).mean(), (new["batch_stats"], {})

    made = model.init(KEY, jnp.ones((1, WIDTH)))
    pipe = jaxpp.Pipeline(loss_fn, OPTIMIZER, num_stages=STAGES, num_microbatches=COUNT, has_state=True, has_aux=True)
    state = pipe.init((made["params"], made["batch_stats"]), _batch())
    state, _ = pipe.step(state, _batch())
    return str(pipe.verify(state, _batch()))


def _value_and_grad(job: Job) -> str:
    """``jaxpp.value_and_grad`` against that of JAX."""
    del job
    model, batch = Layers(), _batch()
    params = jax.jit(_init(model))(KEY)
    found = jaxpp.value_and_grad(_loss(model), num_stages=STAGES, num_microbatches=COUNT)(params, batch, KEY)
    return _close(found, jax.value_and_grad(_loss(model))(params, batch, KEY))


def _from_stages(job: Job) -> str:
    """Stages by hand."""
    del job
    rng = np.random.default_rng(1)
    params = [{"w": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 8, jnp.float32)} for _ in range(STAGES)]
    stages = [lambda p, x: jnp.tanh(x @ p["w"])] * STAGES
    pipe = jaxpp.Pipeline.from_stages(stages, loss=lambda y, wanted: jnp.mean((y - wanted) ** 2), optimizer=OPTIMIZER)
    batch = (_batch()["x"], np.zeros((32, WIDTH), "float32"))
    state = pipe.init(params, batch)
    state, _ = pipe.step(state, batch)
    return str(pipe.verify(state, batch))


def _bank(job: Job) -> str:
    """Two tasks with parameters of their own, which wait in host memory."""
    del job
    trunk, head = nn.Dense(WIDTH), nn.Dense(10)

    def loss_fn(params: Any, own: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for layer in params:
            x = nn.gelu(jnp.asarray(trunk.apply({"params": layer}, x)))
        return optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(head.apply({"params": own}, x)), batch["y"]).mean()

    params = [trunk.init(jax.random.fold_in(KEY, k), jnp.ones((1, WIDTH)))["params"] for k in range(STAGES)]
    own = {name: head.init(jax.random.fold_in(KEY, k), jnp.ones((1, WIDTH)))["params"] for k, name in enumerate("ab")}
    bank = jaxpp.Bank(own, OPTIMIZER)
    pipe = jaxpp.Pipeline(loss_fn, OPTIMIZER, num_stages=STAGES, num_microbatches=COUNT, bank=bank)
    state = pipe.init(params, _batch())
    for step in range(2 * STEPS):
        state, _ = pipe.step(state, _batch(), task="ab"[step % 2])
    return str(pipe.verify(state, _batch(), task="b"))


def _outputs(job: Job) -> str:
    """``Forward.apply`` and ``stream``, with parameters on the device and in host memory, against the function itself."""
    del job
    model, batches = Layers(), [_batch(size)["x"] for size in (32, 32, 8, 5)]
    fn = lambda params, x: model.apply({"params": params}, x, train=False)  # noqa: E731
    plain = jax.jit(_init(model))(KEY)
    for host in (None, "params"):
        forward = jaxpp.Forward(fn, num_stages=STAGES, host=host)
        params = forward.init(plain, batches[0])
        _close(forward.apply(params, batches[0]), fn(plain, batches[0]))
        for found, x in zip(forward.stream(params, batches), batches, strict=True):
            _close(found, fn(plain, x))
    return "apply and stream, also with parameters in host memory"


def _tokens(job: Job) -> str:
    """``generate`` over the stages against one stage, and with parameters in host memory."""
    del job
    model = GPT(vocab_size=VOCABULARY, max_length=LENGTH, width=WIDTH, depth=4, num_heads=4, dropout=0.0)
    plain = jax.jit(lambda key: model.init(key, jnp.ones((1, LENGTH), int))["params"])(KEY)
    prompts = [np.random.default_rng(k).integers(0, VOCABULARY, size) for k, size in enumerate((1, 3, 8, 17, 5, 9))]
    made = {}
    for name, options in {"1": {"num_stages": 1}, "4": {"num_stages": 4}, "host": {"num_stages": 4, "host": "params"}}.items():
        forward = jaxpp.Forward(lambda params, tokens: model.apply({"params": params}, tokens), **options)
        params = forward.init(plain, jnp.ones((2, LENGTH), int))
        going = forward.generate(params, *jaxpp.decoder(model, LENGTH), prompts, 12, group_size=2, chunk=8, progress=False)
        made[name] = going.collect()
    wanted = _greedy(model, plain, prompts[3], 12)
    _check_bits(made["4"], made["1"])
    _check_bits(made["host"], made["4"])
    np.testing.assert_array_equal(made["4"][3], wanted)
    return f"{sum(map(len, made['4']))} tokens, the same with 1 and 4 stages and with parameters in host memory"


def _greedy(model: GPT, params: Any, prompt: np.ndarray, count: int) -> list[int]:
    """The most likely tokens by whole forwards."""
    apply = jax.jit(lambda tokens: model.apply({"params": params}, tokens))
    tokens = np.zeros((1, LENGTH), "int32")
    tokens[0, : len(prompt)] = prompt
    for end in range(len(prompt), len(prompt) + count):
        tokens[0, end] = int(np.argmax(np.asarray(apply(tokens), "float32")[0, end - 1]))
    return tokens[0, len(prompt) : len(prompt) + count].tolist()


def _mesh(job: Job, **options: Any) -> str:
    """A mesh of one device: its shardings name axes, and every rank is a sub-mesh."""
    del job
    model = Layers(rate=0.1)
    devices = np.array(jax.devices()[:1]).reshape(1, 1, 1)
    pipe = _pipe(model, num_stages=1, mesh=Mesh(devices, ("pipe", "data", "model")), **options)
    state = pipe.init(_init(model), KEY, _batch())
    state, _ = pipe.step(state, _batch(), KEY)
    return f"{pipe.verify(state, _batch(), KEY)}; {pipe.collectives(_batch(), KEY)}".replace("\n", "; ")


def _checkpoint(job: Job, **options: Any) -> str:
    """Orbax saves a state and opens it again, and training goes on with the same bits."""
    del job
    model, batch = Layers(rate=0.1), _batch()
    pipe = _pipe(model, **options)
    state = pipe.init(_init(model), KEY, batch)
    state, _ = pipe.step(state, batch, KEY)
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "state", state)
        checkpointer.wait_until_finished()
        opened = checkpointer.restore(Path(folder) / "state", pipe.abstract_state(_init(model), KEY, batch))
    after = [pipe.step(each, batch, KEY)[0] for each in (state, opened)]
    _check_bits(*(jax.device_get((each.params, each.opt_state)) for each in after))
    return "the step after it has the same bits"


def _looked_at(job: Job) -> str:
    """What shows a pipeline: its table, forecast, profiles, programs."""
    model, batch = Layers(rate=0.1), _batch()
    pipe = _pipe(model)
    state = pipe.init(_init(model), KEY, batch)
    state, _ = pipe.step(state, batch, KEY)
    found = [
        str(pipe.stages),
        str(pipe.forecast(state.params, batch, KEY)),
        str(pipe.programs(state.params, batch, KEY)),
        repr(pipe),
    ]
    found += [str(pipe.profile(state, batch, KEY, num_steps=2, clock=clock)) for clock in ("isolated", "trace")]
    (job.out / "looked_at.txt").write_text("\n\n".join(found) + "\n")
    return "looked_at.txt"


def _figure(job: Job) -> str:
    """A profile as a figure."""
    model, batch = Layers(rate=0.1), _batch()
    pipe = _pipe(model)
    state = pipe.init(_init(model), KEY, batch)
    pipe.profile(state, batch, KEY).figure().savefig(job.out / "step.png", dpi=110)
    return "step.png"


def _tuned(job: Job) -> str:
    """``jaxpp.tune`` measures on the device."""
    model = Layers(rate=0.1)
    found = jaxpp.tune(_loss(model), OPTIMIZER, _init(model), _batch(), KEY, stages_per_rank=(1, 2), num_microbatches=(2, 4))
    (job.out / "tuned.txt").write_text(f"{found}\n")
    return str(found).splitlines()[0]


def _bad_numbers(job: Job) -> str:
    """``jax_debug_nans`` names the first program that made a NaN, and nothing of the state is lost."""
    del job
    model, batch = Layers(), _batch()
    pipe = _pipe(model)
    state = pipe.init(_init(model), KEY, batch)
    jax.config.update("jax_debug_nans", True)
    try:
        pipe.step(state, batch | {"x": np.full_like(batch["x"], np.nan)}, KEY)
    except FloatingPointError as error:
        said = str(error).splitlines()[0]
    else:
        raise AssertionError("nothing was said of the NaN")
    finally:
        jax.config.update("jax_debug_nans", False)
    pipe.step(state, batch, KEY)
    return said


def _fits(job: Job, share: float) -> str:
    """``hbm=`` with less than the step needs: what is chosen, and the same loss."""
    del job
    model, batch = Layers(), _batch(4096)
    pipe = _pipe(model)
    shapes = jax.eval_shape(_init(model), KEY)
    most = max(pipe.forecast(shapes, batch, KEY).peaks.values())
    small = _pipe(model, hbm=int(share * most))
    state = small.init(_init(model), KEY, batch)
    state, _ = small.step(state, batch, KEY)
    small.verify(state, batch, KEY)
    return f"of {most:,} bytes {small.forecast(state.params, batch, KEY).peaks}; " + str(small.stages).splitlines()[-1]


USES: Mapping[str, Mapping[str, Callable[[Job], str]]] = {
    "training": {
        "1f1b with dropout": _trained,
        "schedule auto": lambda job: _trained(job, schedule="auto"),
        'balance="time"': lambda job: _trained(job, balance="time"),
        "fuse=False": lambda job: _trained(job, fuse=False),
        "a loss scale, float16": lambda job: _trained(job, Layers(dtype=jnp.float16), loss_scale=DynamicScale()),
        "clip and MultiSteps": lambda job: _trained(
            job, optimizer=optax.MultiSteps(optax.chain(optax.clip_by_global_norm(0.1), OPTIMIZER), 2).gradient_transformation()
        ),
        "relu, float64, recompute": _relu,
        "muon": lambda job: _trained(job, optimizer=optax.contrib.muon(1e-3)),
        "trains": lambda job: _trained(job, optimizer=optax.sgd(1e-2, momentum=0.9), trains="Dense_[4-8]/*"),
    },
    "ways": {
        "delay=1": _delay,
        "model state": _model_state,
        "value_and_grad": _value_and_grad,
        "from_stages": _from_stages,
        "a bank": _bank,
        "a mesh of one device": _mesh,
        'shard="optimizer"': lambda job: _mesh(job, shard="optimizer"),
        'shard="parameters"': lambda job: _mesh(job, shard="parameters"),
    },
    "memory": {
        'host="optimizer"': lambda job: _same_bits(job, host="optimizer"),
        'host="params"': lambda job: _same_bits(job, exact=False, host="params"),
        'remat="offload"': lambda job: _same_bits(job, remat="offload"),
        "Offload(recompute=True)": lambda job: _trained(job, remat=jaxpp.Offload(recompute=True)),
        "0.9 of the memory": lambda job: _fits(job, 0.9),
        "0.75 of the memory": lambda job: _fits(job, 0.75),
        "a checkpoint": _checkpoint,
        'a checkpoint, host="params"': lambda job: _checkpoint(job, host="params"),
    },
    "forward": {"apply and stream": _outputs, "generate": _tokens},
    "looking": {
        "tables and profiles": _looked_at,
        "a figure": _figure,
        "tune": _tuned,
        "debug_nans": _bad_numbers,
    },
}
"""Every use by its group; a group is a case."""

CASES = tuple(USES)


def rows(job: Job) -> Iterator[Row]:
    """One row a use; one that fails does not stop the others."""
    with jax.default_matmul_precision("highest"):
        for name, use in USES[job.case].items():
            try:
                yield job.row(name, "works", "works", use(job).replace("\n", "; ")[:300])
            except Exception as error:  # noqa: BLE001
                yield job.row(name, "failed", "works", "; ".join([first_line(error), *str(error).splitlines()[1:4]])[:600])
            gc.collect()
