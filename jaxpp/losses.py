"""The cross entropy of a language model without its logits: a loop over slices of the vocabulary.

The logits of 50,257 tokens take more memory than anything else in a step, and their product is one equation, which no cut can
divide. Here each iteration makes the logits ``z[k]`` of one slice of the table, and carries two numbers for each token: the
logarithm of the sum of exponentials so far, ``L[k]``, and the logit of the label. ::

    z[k] = hidden @ table[rows of slice k].T        L[k] = log(exp(L[k - 1]) + sum(exp(z[k])))
    dL[k] / dz[k] = exp(z[k] - L[k])                dL[k] / dL[k - 1] = exp(L[k - 1] - L[k])

So the derivative of an iteration keeps ``L`` and makes the logits of its slice again. Every iteration has a derivative of its own,
and the loop runs over rows of a parameter; therefore it is cut between two iterations, as a loop over layers is.
"""

import functools
import math
import numbers

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from jaxpp.errors import ArgumentError, shown
from jaxpp.errors.tracebacks import entry
from jaxpp.stages.jaxpr import describe
from jaxpp.types import DType

__all__ = ["linear_cross_entropy"]

_ROWS = 768  # of a slice, unless the user says how many slices there are
_SCOPE = functools.partial(jax.named_scope, "linear_cross_entropy")  # What tables of stages call the loop
_Carry = tuple[jax.Array, ...]  # of each token: the log of the sum of exponentials, the label's logit, and the sum of logits if asked


@entry
def linear_cross_entropy(  # noqa: PLR0913  (the terms of the loss)
    hidden: Float[Array, "*tokens width"],
    table: Float[Array, "vocab width"],
    labels: Integer[Array, "*tokens"],
    *,
    num_slices: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = None,
) -> Float[Array, "*tokens"]:
    """The cross entropy of each token with logits ``hidden @ table.T``, which are never all in memory.

    It is the same number as ``optax.softmax_cross_entropy_with_integer_labels(hidden @ table.T, labels)``. That product and its
    logits cannot be divided among stages; here a loop over slices of the vocabulary makes the logits of one slice at a time, forward
    and again backward. A pipeline cuts the loop between two slices, and each stage owns the rows of its slices. ``table`` has one row
    for each word of the vocabulary, as the embedding of ``flax.linen.Embed`` has; the kernel of a ``Dense`` layer is the transpose,
    so keep a head that is not tied as an ``Embed``, too. The function also works without a pipeline. It has no forward-mode
    derivative (``jax.jvp``).

    The table is cast to the type of ``hidden``, products are summed in float32 (float64 for float64), and the result has that type.

    Args:
        hidden: what the model makes of each token, after its last normalisation. Any number of axes before the last.
        table: the weights of the projection. They may be those of the embedding (tied), for which nothing need be written.
        labels: the word that is right for each token, from 0 to ``vocab - 1``. Any other label makes the loss NaN.
        num_slices: into how many slices of ``ceil(vocab / num_slices)`` rows the vocabulary is divided; the last may have fewer rows.
            By default slices have 768 rows. More slices take less memory and can be cut more evenly; fewer have larger
            products.
        label_smoothing: the share of the label's weight that is spread evenly over the whole vocabulary.
        z_loss: what the square of the logarithm of the sum of exponentials is multiplied by and added to the loss.
        ignore_index: the label of tokens that do not count: their loss is 0, and they have no gradient.

    Returns:
        The loss of each token: ``L - (1 - label_smoothing) * logit[label] - label_smoothing * mean(logits) + z_loss * L**2``, where
        ``L`` is the logarithm of the sum of the exponentials of all logits. The mean over the tokens that count is yours to take.

    Raises:
        ArgumentError: shapes that do not fit, labels that are no integers, or an option outside what it may be.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpp
        >>> table = jax.random.normal(jax.random.key(0), (1000, 16))
        >>> def loss_fn(params, batch):
        ...     hidden = jnp.tanh(params["table"][batch["tokens"]] @ params["layer"])
        ...     return jaxpp.linear_cross_entropy(hidden, params["table"], batch["labels"], num_slices=8).mean()
        >>> params = {"layer": jnp.eye(16), "table": table}
        >>> batch = {"tokens": jnp.arange(32).reshape(4, 8), "labels": jnp.arange(1, 33).reshape(4, 8)}
        >>> grad_fn = jaxpp.value_and_grad(loss_fn, num_stages=2, num_microbatches=2)
        >>> loss, grads = grad_fn(params, batch)
        >>> grads["table"].shape
        (1000, 16)

    References:
        Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867; Wijmans et al., Cut Your Losses in
        Large-Vocabulary Language Models, arXiv:2411.09009.
    """
    _check_arrays(hidden, table, labels)
    _check_options(num_slices, label_smoothing, z_loss, ignore_index)
    vocab, width = table.shape
    rows = min(_ROWS, vocab) if num_slices is None else -(-vocab // int(num_slices))
    length = vocab // rows
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    with _SCOPE():
        features, weights = hidden.astype(dtype), table.astype(hidden.dtype)  # cotangents of features are summed over slices
        at, zeros = labels.astype(jnp.int32), jnp.zeros(labels.shape, dtype)
        carry: _Carry = (jnp.full_like(zeros, -jnp.inf), zeros, *([zeros] if label_smoothing else []))
        parts, starts = weights[: length * rows].reshape(length, rows, width), rows * jnp.arange(length, dtype=at.dtype)

    def step(carry: _Carry, of_slice: tuple[jax.Array, jax.Array]) -> tuple[_Carry, None]:
        with _SCOPE():
            return _with_slice(carry, features, of_slice[0], at, of_slice[1]), None

    carry, _ = jax.lax.scan(step, carry, (parts, starts))
    with _SCOPE():
        if length * rows < vocab:
            carry = _with_slice(carry, features, weights[length * rows :], at, jnp.int32(length * rows))
        log_sum, picked, *total = carry
        loss = log_sum - (1 - label_smoothing) * picked
        if label_smoothing:
            loss -= label_smoothing / vocab * total[0]
        if z_loss:
            loss += z_loss * log_sum**2
        loss = jnp.where((labels >= 0) & (labels < vocab), loss, jnp.nan)
        return loss if ignore_index is None else jnp.where(labels == ignore_index, 0.0, loss)


def _check_arrays(hidden: jax.Array, table: jax.Array, labels: jax.Array) -> None:
    """Refuse arrays whose types or shapes do not fit, with all that is wrong."""
    where = "linear_cross_entropy(hidden, table, labels)"
    given = {"hidden": hidden, "table": table, "labels": labels}
    rule = "hidden is floating [*tokens, width], table floating [vocab, width], and labels integers [*tokens]"
    if wrong := [f"{name}: {type(value).__name__}" for name, value in given.items() if not isinstance(value, (jax.Array, np.ndarray))]:
        raise ArgumentError(where, rule, wrong, "pass arrays")
    shapes = [f"{name}: {describe(value)}" for name, value in given.items()]
    kinds = [jnp.floating, jnp.floating, jnp.integer]
    if any(not jnp.issubdtype(value.dtype, kind) for value, kind in zip(given.values(), kinds, strict=True)):
        fix = "pass the number of the right word for each token as labels, and floating numbers as hidden and table"
        raise ArgumentError(where, rule, shapes, fix)
    if not hidden.ndim or table.ndim != 2 or not len(table) or table.shape[1:] != hidden.shape[-1:]:
        fix = "pass what the model makes of each token before its head, and the table of the head with one row for each word"
        if table.ndim == 2 and hidden.shape[-1:] == table.shape[:1]:
            fix = "pass table.T; to have its rows divided among stages, keep the head as nn.Embed does, one row for each word"
        raise ArgumentError(where, rule, shapes, fix)
    if labels.shape != hidden.shape[:-1]:
        raise ArgumentError(where, rule, shapes, "pass one label for each token of hidden, such as hidden[:, :-1] and tokens[:, 1:]")


def _check_options(num_slices: int | None, label_smoothing: float, z_loss: float, ignore_index: int | None) -> None:
    """Refuse options outside what they may be, all of them at once."""
    options = {"num_slices": num_slices, "label_smoothing": label_smoothing, "z_loss": z_loss, "ignore_index": ignore_index}
    fixes = {
        "num_slices": "pass num_slices=8 or another whole number of at least 1, or leave it out",
        "label_smoothing": "pass a label_smoothing of at least 0 and below 1, such as 0.1",
        "z_loss": "pass a z_loss of at least 0, such as 1e-4",
        "ignore_index": "pass the whole number that labels tokens which do not count, such as ignore_index=-100",
    }
    allowed = {
        "num_slices": num_slices is None or (_is_whole(num_slices) and num_slices >= 1),
        "label_smoothing": _is_real(label_smoothing) and 0 <= label_smoothing < 1,
        "z_loss": _is_real(z_loss) and 0 <= z_loss < math.inf,
        "ignore_index": ignore_index is None or _is_whole(ignore_index),
    }
    if wrong := [name for name, fine in allowed.items() if not fine]:
        where = f"linear_cross_entropy({', '.join(f'{name}={shown(options[name])}' for name in wrong)})"
        rule = "the terms of the loss are numbers that are known when it is traced"
        got = [f"{name}={shown(options[name])}" for name in wrong]
        raise ArgumentError(where, rule, got, "; ".join(fixes[name] for name in wrong))


def _is_whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, (bool, np.bool_))


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


@jax.custom_vjp
def _with_slice(carry: _Carry, features: jax.Array, part: jax.Array, labels: jax.Array, start: jax.Array) -> _Carry:
    """What is carried after the slice ``part`` of the table, whose first row is row ``start``."""
    return _forward(carry, features, part, labels, start)[0]


def _forward(carry: _Carry, features: jax.Array, part: jax.Array, *at: jax.Array) -> tuple[_Carry, tuple[jax.Array, ...]]:
    log_sum, picked, *total = carry
    logits = _logits(features, part)
    largest = jnp.maximum(log_sum, logits.max(-1))
    terms = jnp.exp(log_sum - largest) + jnp.exp(logits - largest[..., None]).sum(-1)
    after = largest + jnp.log(terms)
    picked += jnp.where(_is_label(logits, *at), logits, 0).sum(-1)
    return (after, picked, *(each + logits.sum(-1) for each in total)), (log_sum, after, features, part, *at)


def _backward(kept: tuple[jax.Array, ...], cotangents: _Carry) -> tuple[_Carry, jax.Array, jax.Array, None, None]:
    (before, after, features, part, *at), (of_log_sum, of_picked, *of_total) = kept, cotangents
    late, of_log_sum = jax.lax.optimization_barrier((features, of_log_sum))  # or the logits of the forward would be kept for this
    logits = _logits(late, part)
    of_logits = of_log_sum[..., None] * jnp.exp(logits - after[..., None])
    of_logits += jnp.where(_is_label(logits, *at), of_picked[..., None], 0)
    for each in of_total:
        of_logits += each[..., None]
    of_logits, tokens = of_logits.astype(part.dtype), tuple(range(features.ndim - 1))
    of_features = _product(of_logits, part, ((len(tokens),), (0,)), features.dtype)
    of_part = _product(of_logits, features.astype(part.dtype), (tokens, tokens), features.dtype).astype(part.dtype)
    return (of_log_sum * jnp.exp(before - after), of_picked, *of_total), of_features, of_part, None, None


_with_slice.defvjp(_forward, _backward)


def _logits(features: jax.Array, part: jax.Array) -> jax.Array:
    return _product(features.astype(part.dtype), part, ((features.ndim - 1,), (1,)), features.dtype)


def _product(a: jax.Array, b: jax.Array, contracted: tuple[tuple[int, ...], tuple[int, ...]], dtype: DType) -> jax.Array:
    return jax.lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=dtype)


def _is_label(logits: jax.Array, labels: jax.Array, start: jax.Array) -> jax.Array:
    return labels[..., None] - start == jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
