"""The cross entropy of a language model without its logits: a loop over slices of the vocabulary.

The logits of 50,257 tokens take more memory than anything else in a step, and their product is one equation, which no cut can
divide. Here each iteration makes the logits ``z[k]`` of one slice of the table, and carries two numbers for each token: the
logarithm of the sum of exponentials so far, ``L[k]``, and the logit of the label. ::

    z[k] = hidden @ table[rows of slice k].T        L[k] = log(exp(L[k - 1]) + sum(exp(z[k])))
    dL[k] / dz[k] = exp(z[k] - L[k])                dL[k] / dL[k - 1] = exp(L[k - 1] - L[k])

So the derivative of an iteration keeps ``L`` and makes the logits of its slice again. Every iteration has a derivative of its own,
and the loop runs over rows of a parameter; therefore it is cut between two iterations, as a loop over layers is.
"""

import math
import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from jaxpp.errors import ArgumentError, is_count, shown
from jaxpp.errors.checks import is_real
from jaxpp.errors.tracebacks import entry
from jaxpp.stages.cuts.head import ROWS, SCOPE
from jaxpp.stages.jaxpr import describe
from jaxpp.types import DType

__all__ = ["linear_cross_entropy"]

_ARRAYS = jax.Array, np.ndarray, np.generic
_Weights = tuple[jax.Array, jax.Array | None]  # rows of the table, and of the bias if there is one
_Kept = tuple[jax.Array, jax.Array, jax.Array, _Weights, jax.Array, jax.Array]
_Carry = tuple[jax.Array, ...]  # of each token: the logarithm of the sum of exponentials, the label's logit, the sum of logits


@entry
def linear_cross_entropy(
    hidden: Float[Array, "*tokens width"],
    table: Float[Array, "vocab width"],
    labels: Integer[Array, "*tokens"],
    *,
    bias: Float[Array, " vocab"] | None = None,
    num_slices: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
) -> Float[Array, "*tokens"]:
    """The cross entropy of each token with the logits ``hidden @ table.T + bias``, which are never all in memory.

    It is the same number as ``optax.softmax_cross_entropy_with_integer_labels(hidden @ table.T + bias, labels)``. That product and
    its logits cannot be divided among stages. Here a loop makes the logits of one slice of the vocabulary at a time, and the
    backward makes them again. A pipeline cuts this loop between two slices; each stage owns the rows of its slices, or, where the
    table is the embedding too (tied), receives only these rows once a step. Without a pipeline the function saves memory only.

    ``table`` has one row for each word, as the embedding of ``flax.linen.Embed`` has. The kernel of a ``Dense`` layer is the
    transpose: its product works, but is not cut. So keep a head that is not tied as ``self.param("head", init, (vocab, width))``.
    The optimizer must treat rows by themselves where the loop is cut, as ``optax.adamw`` does and ``optax.adafactor`` does not.

    The table is cast to the type of ``hidden``, and logits are summed in float32 (float64 for float64). There is no derivative in
    forward mode (``jax.jvp``).

    Args:
        hidden: what the model makes of each token before its head. Any number of axes before the last.
        table: the weights of the projection.
        labels: the word that is right for each token, from 0 to ``vocab - 1``. With any other label the loss is NaN.
        bias: what is added to the logit of each word, if anything.
        num_slices: the vocabulary is divided into at most so many slices of ``ceil(vocab / num_slices)`` rows; the last may have
            fewer. By default slices have 768 rows. More slices take less memory and can be cut more evenly; fewer make larger
            products.
        label_smoothing: the part of a label's weight that is spread over the whole vocabulary.
        z_loss: the factor of the squared logarithm of the sum of exponentials, which is added to the loss.
        ignore_index: the label of tokens that do not count: their loss is 0, and so is its gradient.

    Returns:
        The loss of each token, ``L - (1 - label_smoothing) * logit[label] - label_smoothing * mean(logits) + z_loss * L**2``, where
        ``L`` is the logarithm of the sum of the exponentials of all logits; float32, or float64 for float64.

    Raises:
        ArgumentError: types or shapes that do not fit, or an option outside what it may be.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> def loss_fn(params, batch):
        ...     hidden = jnp.tanh(params["table"][batch["tokens"]] @ params["layer"])
        ...     return jaxpp.linear_cross_entropy(hidden, params["table"], batch["labels"], num_slices=8).mean()
        >>> params = {"layer": jnp.eye(16), "table": jax.random.normal(jax.random.key(0), (1000, 16))}
        >>> batch = {"tokens": jnp.arange(32).reshape(4, 8), "labels": jnp.arange(1, 33).reshape(4, 8)}
        >>> grad_fn = jaxpp.value_and_grad(loss_fn, num_stages=2, num_microbatches=2)
        >>> loss, grads = grad_fn(params, batch)
        >>> grads["table"].shape
        (1000, 16)

    References:
        Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867; Wijmans et al., Cut Your Losses in
        Large-Vocabulary Language Models, arXiv:2411.09009.
    """
    _check_arrays(hidden, table, labels, bias)
    _check_options(num_slices, label_smoothing, z_loss, ignore_index)
    vocab = len(table)
    rows = min(ROWS, vocab) if num_slices is None else -(-vocab // int(num_slices))
    length = vocab // rows
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    with jax.named_scope(SCOPE):
        features = hidden.astype(dtype)  # so that its cotangents are summed over slices in this type
        weights = table.astype(hidden.dtype), None if bias is None else bias.astype(dtype)
        right, zeros = labels.astype(jnp.int32), jnp.zeros(labels.shape, dtype)
        carry: _Carry = (jnp.full_like(zeros, -jnp.inf), zeros, *([zeros] if label_smoothing else []))
        slices = jax.tree.map(lambda leaf: leaf[: length * rows].reshape(length, rows, *leaf.shape[1:]), weights)
        starts = rows * jnp.arange(length, dtype=right.dtype)

    def step(carry: _Carry, of_slice: tuple[_Weights, jax.Array]) -> tuple[_Carry, None]:
        with jax.named_scope(SCOPE):
            return _with_slice(carry, features, of_slice[0], right, of_slice[1]), None

    carry, _ = jax.lax.scan(step, carry, (slices, starts))
    with jax.named_scope(SCOPE):
        if length * rows < vocab:
            rest = jax.tree.map(lambda leaf: leaf[length * rows :], weights)
            carry = _with_slice(carry, features, rest, right, jnp.int32(length * rows))
        log_sum, picked, *total = carry
        loss = log_sum - (1 - label_smoothing) * picked
        if label_smoothing:
            loss -= label_smoothing / vocab * total[0]
        if z_loss:
            loss += z_loss * log_sum**2
        loss = jnp.where((labels >= 0) & (labels < vocab), loss, jnp.nan)
        return loss if ignore_index is None else jnp.where(labels == ignore_index, 0.0, loss)


@jax.custom_vjp
def _with_slice(carry: _Carry, features: jax.Array, weights: _Weights, labels: jax.Array, start: jax.Array) -> _Carry:
    """What is carried after one more slice of the table, whose first row is row ``start``."""
    return _forward(carry, features, weights, labels, start)[0]


def _forward(carry: _Carry, features: jax.Array, weights: _Weights, labels: jax.Array, start: jax.Array) -> tuple[_Carry, _Kept]:
    log_sum, picked, *total = carry
    logits = _logits(features, weights)
    largest = jnp.maximum(log_sum, logits.max(-1))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)  # if all words so far are ruled out, with a bias of minus infinity
    terms = jnp.exp(log_sum - largest) + jnp.exp(logits - largest[..., None]).sum(-1)
    after = largest + jnp.log(terms)
    picked += jnp.where(_is_label(logits, labels, start), logits, 0).sum(-1)
    return (after, picked, *(each + logits.sum(-1) for each in total)), (log_sum, after, features, weights, labels, start)


def _backward(kept: _Kept, cotangents: _Carry) -> tuple[_Carry, jax.Array, _Weights, None, None]:
    (before, after, features, weights, labels, start), (of_log_sum, of_picked, *of_total) = kept, cotangents
    part, bias = weights
    late, of_log_sum = jax.lax.optimization_barrier((features, of_log_sum))  # else the logits of the forward are kept for this
    logits, after = _logits(late, weights), jnp.where(jnp.isfinite(after), after, 0)
    of_logits = of_log_sum[..., None] * jnp.exp(logits - after[..., None])
    of_logits += jnp.where(_is_label(logits, labels, start), of_picked[..., None], 0)
    for each in of_total:
        of_logits += each[..., None]
    tokens = tuple(range(features.ndim - 1))
    of_bias = None if bias is None else of_logits.sum(tokens).astype(bias.dtype)
    of_logits = of_logits.astype(part.dtype)
    of_features = _product(of_logits, part, ((len(tokens),), (0,)), features.dtype)
    of_part = _product(of_logits, features.astype(part.dtype), (tokens, tokens), features.dtype).astype(part.dtype)
    return (of_log_sum * jnp.exp(before - after), of_picked, *of_total), of_features, (of_part, of_bias), None, None


_with_slice.defvjp(_forward, _backward)


def _logits(features: jax.Array, weights: _Weights) -> jax.Array:
    part, bias = weights
    logits = _product(features.astype(part.dtype), part, ((features.ndim - 1,), (1,)), features.dtype)
    return logits if bias is None else logits + bias


def _product(a: jax.Array, b: jax.Array, contracted: tuple[tuple[int, ...], tuple[int, ...]], dtype: DType) -> jax.Array:
    return jax.lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=dtype)


def _is_label(logits: jax.Array, labels: jax.Array, start: jax.Array) -> jax.Array:
    return labels[..., None] - start == jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)


def _check_arrays(hidden: jax.Array, table: jax.Array, labels: jax.Array, bias: jax.Array | None) -> None:
    """Refuse arrays whose types or shapes do not fit, with all of them."""
    given = {"hidden": hidden, "table": table, "labels": labels} | ({} if bias is None else {"bias": bias})
    where = f"linear_cross_entropy({', '.join(given)})"
    rule = "hidden is floating [*tokens, width], table floating [vocab, width], and labels are integers [*tokens]"
    rule = rule if bias is None else rule.replace(", and labels", ", bias floating [vocab], and labels")
    if wrong := [f"{name}: {type(value).__name__}" for name, value in given.items() if not isinstance(value, _ARRAYS)]:
        raise ArgumentError(where, rule, wrong, "pass arrays")
    fix, shapes = "", [f"{name}: {describe(value)}" for name, value in given.items()]
    if any(not jnp.issubdtype(value.dtype, jnp.integer if name == "labels" else jnp.floating) for name, value in given.items()):
        fix = "pass floating numbers as hidden and table, and as labels the number of the right word for each token"
    elif table.ndim == 2 and hidden.shape[-1:] == table.shape[:1] != table.shape[1:]:
        fix = "pass table.T; for rows that are divided among stages, keep the head as nn.Embed does, with one row for each word"
    elif not hidden.ndim or table.ndim != 2 or not table.size or table.shape[1:] != hidden.shape[-1:]:
        fix = "pass what the model makes of each token before its head, and the table of the head, with one row for each word"
    elif labels.shape != hidden.shape[:-1]:
        fix = "pass one label for each token of hidden: labels=tokens[:, 1:] for what the model makes of tokens[:, :-1]"
    elif bias is not None and bias.shape != table.shape[:1]:
        fix = "pass one number for each word as bias, or leave it out"
    if fix:
        raise ArgumentError(where, rule, shapes, fix)


def _check_options(num_slices: int | None, label_smoothing: float, z_loss: float, ignore_index: int | None) -> None:
    """Refuse options outside what they may be, all of them at once."""
    given = {"num_slices": num_slices, "label_smoothing": label_smoothing, "z_loss": z_loss, "ignore_index": ignore_index}
    positive = num_slices is None or is_count(num_slices, least=1)
    part = is_real(label_smoothing) and 0 <= label_smoothing < 1
    factor = is_real(z_loss) and 0 <= z_loss < math.inf
    label = ignore_index is None or (isinstance(ignore_index, numbers.Integral) and not isinstance(ignore_index, bool))
    fixes = {
        "num_slices": "" if positive else "pass num_slices=8 or another whole number of at least 1, or leave it out",
        "label_smoothing": "" if part else "pass a label_smoothing of at least 0 and below 1, such as 0.1",
        "z_loss": "" if factor else "pass a z_loss of at least 0, such as 1e-4",
        "ignore_index": "" if label else "pass the whole number that labels tokens which do not count, such as ignore_index=-100",
    }
    if any(fixes.values()):
        got = [f"{name}={shown(given[name])}" for name, fix in fixes.items() if fix]
        rule = "the terms of the loss are numbers that are known when it is traced"
        raise ArgumentError(f"linear_cross_entropy({', '.join(got)})", rule, got, "; ".join(filter(None, fixes.values())))
