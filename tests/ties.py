"""A model of ties: values that are zero, or equal to their neighbour, up to a last bit that depends on how a program is compiled.

XLA computes ``x * scale + bias`` with one rounding where both operations are in one program, and with two where the product comes
from another; it adds constants to each other first; and it does not round what it converts to bfloat16 and back. If a backward
makes such a value again from a product that was kept, and decides by it, the gradient is another one.

Run as a program, compares the gradients with those of a pipeline that keeps everything, and so decides once, at XLA's default
optimisation. (In the oracle XLA itself may decide twice, where one comparison is part of two fusions.)
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import jaxpp

ROWS, WIDTH = 32, 8
SCALE = np.where(np.arange(WIDTH) % 2, 0.7 * (1 + 2**-21), 0.7).astype(np.float32)


@jax.custom_jvp
def scaled_by_hand(x):
    return x * SCALE


scaled_by_hand.defjvps(lambda t, out, x: t * SCALE)


@jax.custom_vjp
def looping(x):
    return jax.nn.relu(x)


looping.defvjp(
    lambda x: (looping(x), x),
    lambda x, g: (jax.lax.scan(lambda c, row: (c, jnp.where(row[0] > 0, row[1], 0)), 0.0, (x, g))[1],),
)


PRODUCTS = {  # of x[rows, width] and w[width, width]: values that may be kept
    "plain": lambda x, w: (x @ w) * SCALE,
    "named": lambda x, w: checkpoint_name((x @ w) * SCALE, "product"),
    "custom_jvp": lambda x, w: scaled_by_hand(jax.lax.stop_gradient(x @ w)),
    "scan of one": lambda x, w: jax.lax.scan(lambda c, w: ((c @ w) * SCALE, None), x, w[None])[0],
    "window of one": lambda x, w: jax.lax.reduce_window((x @ w) * SCALE, -jnp.inf, jax.lax.max, (1, 1), (1, 1), "VALID"),
    "sum of one": lambda x, w: jnp.cumsum(((x @ w) * SCALE)[:, None], 1)[:, 0],
    "barrier": lambda x, w: jax.lax.optimization_barrier((x @ w) * SCALE),
    "outer": lambda x, w: x[:, 1:2] @ (w[1:2] * SCALE),
    "checkpoint": jax.checkpoint(lambda x, w: (x @ w) * SCALE),
    "gather": lambda x, w: ((x @ w) * SCALE)[jnp.arange(x.shape[0])[::-1]],
}
DECISIONS = {  # of y[rows, width] that is zero in every second row
    "relu": jax.nn.relu,
    "abs": jnp.abs,
    "clip": lambda y: jnp.clip(y, 0, 1),
    "sign": lambda y: jnp.sign(y) * (y + 0.3),
    "floor": lambda y: jnp.floor(y) * (y + 0.3),
    "signbit": lambda y: jnp.where(jnp.signbit(y), 0.1 * y, y),
    "copysign": lambda y: jnp.copysign(y + 0.3, y),
    "atan2": lambda y: jnp.arctan2(y, -1.0) * (y + 0.3),
    "angle": lambda y: jnp.angle(jax.lax.complex(-jnp.ones_like(y), y)) * (y + 0.3),
    "to int": lambda y: (y + 1).astype(jnp.int32) * (y + 0.3),
    "remainder": lambda y: jnp.remainder(y, 0.5) * (y + 0.3),
    "cond": lambda y: jax.lax.cond(y[0, 0] > 0, lambda y: y + 0.3, lambda y: 2 * y, y),
    "checkpointed": jax.checkpoint(jax.nn.relu),
    "looped": lambda y: jax.lax.scan(jax.checkpoint(lambda c, row: (c, jax.nn.relu(row))), 0.0, y)[1],
    "looping": looping,
}
CHOICES = {  # of y whose neighbours are equal, or nearly so
    "maximum": lambda y: jnp.maximum(y, jnp.roll(y, 1, -1)),
    "reduce_max": lambda y: jnp.repeat(y.reshape(len(y), -1, 2).max(-1), 2, -1),
    "argmax": lambda y: y * jax.nn.one_hot(y.argmax(-1), WIDTH),
    "max_pool": lambda y: jnp.repeat(jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2), (1, 2), "VALID"), 2, -1),
    "cummax": lambda y: jax.lax.cummax(y, 1),
    "sort": lambda y: jnp.sort(y, -1),
    "top_k": lambda y: jnp.where(y >= jax.lax.top_k(y, 3)[0][:, -1:], y, 0),
}


def coarse(x, w):
    return (x.astype("bfloat16") @ w.astype("bfloat16")).astype("float32")


CONSTANTS = np.float32(0.3645724058151245), np.float32(0.2941325008869171), np.float32(-0.6587049)
"""Two, and a number that gives another sign if they are added to each other before they are added to it."""


def model(seed):
    """A loss in which each case has a part, with its own parameters; parameters; a batch."""
    rng = np.random.default_rng(seed)

    def coarsely(*shape):  # so that products and their sums are exact
        found = rng.integers(-16, 17, shape).astype(np.float32) / 16
        return np.where(found == 0, np.float32(1 / 16), found)

    x = coarsely(ROWS, WIDTH)
    x[::2] = [1, *x[0, 1:]]
    products = PRODUCTS | {"neighbours": PRODUCTS["plain"], "constants": lambda x, w: x @ w + CONSTANTS[0], "bfloat16": coarse}
    decisions = {f"{name}, then relu": (name, jax.nn.relu) for name in PRODUCTS if name != "plain"}
    decisions |= {name: ("plain", decide) for name, decide in DECISIONS.items()}
    decisions |= {name: ("neighbours", choose) for name, choose in CHOICES.items()}
    decisions |= {"added constants": ("constants", jax.nn.relu), "rounded to bfloat16": ("bfloat16", CHOICES["reduce_max"])}
    w = {name: coarsely(WIDTH, WIDTH) for name in products}
    w["neighbours"][:, 1::2] = w["neighbours"][:, ::2]
    w["bfloat16"][:, 1::2] = w["bfloat16"][:, ::2]
    w["bfloat16"][0, ::2] += 2**-9
    w["constants"][:] = 0
    w["constants"][0, ::2] = CONSTANTS[2]
    bias = {name: -np.asarray(make(x, w[name]))[-2 if name == "gather" else 0] for name, make in products.items()}
    bias["neighbours"] = np.repeat(8 * rng.normal(size=WIDTH // 2).astype(np.float32), 2)
    bias["bfloat16"][:] = 0
    params = {name: {"w": w[name], "v": coarsely(WIDTH, WIDTH)} for name in products}
    params |= {name: {"bias": bias[source], "u": coarsely(WIDTH)} for name, (source, _) in decisions.items()}
    params["first"] = {"w": np.eye(WIDTH, dtype=np.float32)}

    def loss_fn(params, batch):
        x = batch @ params["first"]["w"]
        total = jnp.zeros(())
        with jax.named_scope("ties"):
            made = {name: make(x, params[name]["w"]) for name, make in products.items()}
            for name, product in made.items():
                total += ((product @ params[name]["v"]) ** 2).mean()  # so that the product is kept
            for name, (source, decide) in decisions.items():
                y = made[source] + (CONSTANTS[1] if source == "constants" else params[name]["bias"])
                total += ((decide(y) + 0.3) * params[name]["u"]).mean()
        return total

    return loss_fn, jax.tree.map(jnp.asarray, params), jnp.asarray(x)


def different(got, want):
    """The cases whose gradients differ, and by how much of the largest."""
    errors = {
        name: max(
            float(np.abs(np.asarray(a) - np.asarray(b)).max() / max(np.abs(np.asarray(b)).max(), 1e-3))
            for a, b in zip(jax.tree.leaves(got[name]), jax.tree.leaves(part), strict=True)
        )
        for name, part in want.items()
        if name != "first"
    }
    allowed = {name: 0.005 if "bfloat16" in name else 1e-5 for name in errors}
    return {name: error for name, error in errors.items() if not error <= allowed[name]}


if __name__ == "__main__":
    loss_fn, params, batch = model(0)
    options = {"num_stages": 2, "num_microbatches": 1, "cuts": ["ties"]}
    _, wanted = jaxpp.value_and_grad(loss_fn, **options, remat="keep")(params, batch)
    _, found = jaxpp.value_and_grad(loss_fn, **options, schedule="zb-h1")(params, batch)
    print(different(found, wanted) or "equal")
