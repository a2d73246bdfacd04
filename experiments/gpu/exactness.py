"""Pipelined equals plain on this device: loss and every gradient leaf, for each schedule; and equal bits where they are claimed.

The schedules of a model share cuts and compiled programs. Matrix products of float32 are computed with full precision, since both
sides may otherwise round to TF32, each in its own way; the models in bfloat16 have the bound that ``pipe.verify`` gives them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu.rows import Job, Row, first_line
from experiments.remat.problems import PROBLEMS
from jaxpp.engine.engine import Engine, open_engine
from jaxpp.errors import VerifyError
from jaxpp.options import Options
from jaxpp.schedule import SCHEDULES, make
from jaxpp.verify import COARSE_FLOOR, GRAD_FLOOR, compare, oracle, tolerance, verify_grads

__all__ = ["distance", "rows"]

NAMES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
SAME_BITS = (("1f1b", "naive", "interleaved"), ("gpipe", "1f1b, fuse=False"), ("zb-h1", "zb-v"))
"""Schedules that add in the same order with the same programs, so their results have the same bits."""


class Found(NamedTuple):
    """What one schedule came to: the loss, and the gradients as the user's tree."""

    loss: Any
    grads: Any


def rows(job: Job) -> Iterator[Row]:
    """One row a schedule and type, then the bits; the case is the model."""
    before = getattr(jax.config, "jax_default_matmul_precision", None)
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        for compute in ("float32", "bfloat16"):
            yield from _rows(job, compute)
    finally:
        jax.config.update("jax_default_matmul_precision", before)


def _rows(job: Job, compute: str) -> Iterator[Row]:
    sizes, key = job.sizes.exact, jax.random.key(0)
    problem = PROBLEMS[job.case](sizes, compute)
    params, batch = jax.jit(problem.init)(key), jax.tree.map(jnp.asarray, problem.batch)
    loss, _, grads = oracle(problem.loss_fn, params, batch, key, sizes.microbatches)
    wanted = Found(*jax.device_get((loss, grads)))
    options: dict[str, Any] = {"num_stages": sizes.stages, "num_microbatches": sizes.microbatches, "has_aux": False}
    first = open_engine(Options.of(problem.loss_fn, schedule="naive", **options), None, (params,), batch, key)
    found: dict[str, Found] = {}
    for name in NAMES:
        made = make(name, num_ranks=sizes.stages // SCHEDULES[name].stages_per_rank, num_microbatches=sizes.microbatches)
        engine = first.with_schedule(made)
        try:
            found[name] = _run(engine, params, batch, key)
            yield _compared(job, f"{name}, {compute}", compute, found[name], wanted, lambda e=engine: _noise(e, params, batch, key))
        except Exception as error:  # noqa: BLE001  (one schedule that fails does not stop the others)
            yield job.row(f"{name}, {compute}", "failed", note=first_line(error))
    made = make("1f1b", num_ranks=sizes.stages, num_microbatches=sizes.microbatches)
    try:
        apart = open_engine(Options.of(problem.loss_fn, schedule=made, fuse=False, **options), None, (params,), batch, key)
        found["1f1b, fuse=False"] = _run(apart, params, batch, key)
    except Exception as error:  # noqa: BLE001
        yield job.row(f"1f1b, fuse=False, {compute}", "failed", note=first_line(error))
    for same in SAME_BITS:
        yield from _bits(job, compute, {name: found[name] for name in same if name in found})
    if "1f1b" in found:
        again = _run(first.with_schedule(made), params, batch, key)
        yield from _bits(job, compute, {"1f1b": found["1f1b"], "1f1b again": again})


def _run(engine: Engine, params: Any, batch: Any, key: Any) -> Found:
    outcome = engine.run("grads", engine.bring(params), batch, key)
    return Found(*jax.device_get((outcome.loss, jax.tree.structure(params).unflatten(outcome.grads))))


def _noise(engine: Engine, params: Any, batch: Any, key: Any) -> None:
    """Compare again as ``pipe.verify`` does, which measures how far rounding moves each leaf; raises a VerifyError."""
    leaves = engine.bring(params)
    verify_grads(engine, leaves, batch, key, engine.run("grads", leaves, batch, key))


def _compared(job: Job, what: str, compute: str, found: Found, wanted: Found, noise: Any) -> Row:
    exact = compute == "float32"
    floor, allowed = (GRAD_FLOOR if exact else COARSE_FLOOR), tolerance(compute)
    apart, most = distance(found.grads, wanted.grads, floor)
    verdict = "equal"
    try:
        compare("loss", found.loss, wanted.loss, coarsest=compute)
        compare("grads", found.grads, wanted.grads, floor=floor, coarsest=compute)
    except VerifyError:
        try:
            noise()
            verdict = "equal within the noise of rounding, as pipe.verify measures it"
        except VerifyError as error:
            verdict = f"DIFFERS: {first_line(error)}"
    loss = abs(float(found.loss) - float(wanted.loss)) / abs(float(wanted.loss))
    note = f"{verdict}; largest difference {most:.1e}; loss {loss:.1e}"
    numbers = {"relative": apart, "absolute": most, "loss": loss, "allowed": allowed, "equal": not verdict.startswith("DIFFERS")}
    return job.row(what, f"{apart:.1e}", f"at most {allowed:.1e}", note, **numbers)


def distance(found: Any, wanted: Any, floor: float) -> tuple[float, float]:
    """The largest difference of any leaf, relative to its size (at least ``floor`` of the largest leaf's), and absolute."""
    pairs = [
        (np.asarray(a, "float64"), np.asarray(b, "float64")) for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True)
    ]
    largest = max(np.abs(b).max(initial=0.0) for _, b in pairs)
    absolute = [np.abs(a - b).max(initial=0.0) for a, b in pairs]
    sizes = [max(np.abs(b).max(initial=0.0), floor * largest) for _, b in pairs]
    return max(gap / size if size else gap for gap, size in zip(absolute, sizes, strict=True)), float(max(absolute))


def _bits(job: Job, compute: str, found: Mapping[str, Found]) -> Iterator[Row]:
    """Whether all have the bits of the first; otherwise the leaves that do not."""
    (first, wanted), *others = found.items() or [("", None)]
    if not others:
        return
    wrong = {name: _different(each, wanted) for name, each in others}
    wrong = {name: paths for name, paths in wrong.items() if paths}
    note = "; ".join(f"{name}: {len(paths)} leaves, first {paths[0]}" for name, paths in wrong.items())
    yield job.row(f"bits of {', '.join(found)}, {compute}", "differ" if wrong else "equal", "equal", note, first=first, wrong=wrong)


def _different(found: Any, wanted: Any) -> Sequence[str]:
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
    return [jax.tree_util.keystr(path) for (path, a), b in pairs if np.asarray(a).tobytes() != np.asarray(b).tobytes()]
