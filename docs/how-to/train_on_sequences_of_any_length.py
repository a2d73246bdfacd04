# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # Train on sequences of any length
#
# Sentences, functions, proteins: sequences have different lengths, and one batch is an array with one. Padding all of them to the
# longest wastes most of the work. `jaxpp.Microbatches` takes a list of batches, each with a length of its own. Each item is one
# microbatch of the step, in your order and with your weights; nothing is padded to the length of another.
#
# The data are the functions of Python's standard library, as bytes.

# %%
import ast
import itertools
import pathlib

import jax
import numpy as np
import optax

import jaxpp
from models.gpt import GPT

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %%
files = sorted(pathlib.Path(ast.__file__).parent.glob("*.py"))[:60]
sources = [file.read_text(errors="ignore").split("\n") for file in files]
functions = [
    np.frombuffer("\n".join(lines[node.lineno - 1 : node.end_lineno]).encode()[:250], np.uint8).astype(np.int32)
    for lines in sources
    for node in ast.walk(ast.parse("\n".join(lines)))
    if isinstance(node, ast.FunctionDef)
]
lengths = np.array([len(tokens) for tokens in functions])
print(f"{len(functions):,} functions of {lengths.min()} to {lengths.max()} bytes, {lengths.mean():.0f} on average")

# %% [markdown]
# ## A few lengths
#
# Programs are compiled once for each shape, so lengths are put into a few groups: each function is padded to the end of its group,
# with zeros that do not count. Every microbatch has 512 tokens, so that none takes much longer than another: a pipeline runs at
# the pace of its slowest microbatch.

# %%
EDGES = (64, 128, 256)
TOKENS = 512
rng = np.random.default_rng(0)


def microbatches():
    """One epoch, in random order; functions that do not fill the last microbatch of their length are left out."""
    groups = {edge: [] for edge in EDGES}
    for k in rng.permutation(len(functions)):
        edge = next(edge for edge in EDGES if lengths[k] < edge)  # at least one zero ends each
        groups[edge].append(np.pad(functions[k], (0, edge - lengths[k])))
        if len(groups[edge]) == TOKENS // edge:
            yield {"tokens": np.stack(groups[edge])}
            groups[edge] = []


# %%
padded, longest = sum(next(edge for edge in EDGES if n < edge) for n in lengths), EDGES[-1] * len(lengths)
print(f"tokens for each that counts: {padded / lengths.sum():.2f}; if all had one length: {longest / lengths.sum():.2f}")

# %% [markdown]
# ## The loss, and what a microbatch counts
#
# The loss of a microbatch is the mean over its tokens that count. With the numbers of these tokens as weights, the loss of the step
# is the mean over all tokens of the step, however they are grouped.

# %%
model = GPT(max_length=256, width=32, depth=1, num_heads=2, dropout=0.0)


def counted(batch):
    return (batch["tokens"][:, 1:] > 0).sum()


def loss_fn(params, batch):
    tokens = batch["tokens"]
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model.apply({"params": params}, tokens, deterministic=True)[:, :-1], tokens[:, 1:]
    )
    return (losses * (tokens[:, 1:] > 0)).sum() / counted(batch)


def given(items):
    items = list(items)
    return jaxpp.Microbatches(items, weights=[counted(batch) for batch in items])


pipe = jaxpp.Pipeline(loss_fn, optax.adamw(1e-2), num_stages=2, num_microbatches=6)
first = given(itertools.islice(microbatches(), 6))
first

# %%
params = jax.jit(model.init)(jax.random.key(0), first[0]["tokens"])["params"]
state = pipe.init(params, first)
print(pipe.verify(state, first))

# %% [markdown]
# ## Train
#
# A list may come from a generator, which is read to its end before the step. `pipe.step` returns while the devices still compute,
# so the host prepares the next list meanwhile.

# %%
losses, epoch = [], microbatches()
for _ in range(20):
    state, metrics = pipe.step(state, given(itertools.islice(epoch, 6)))
    losses.append(metrics.loss)
before, after = (np.mean(jax.device_get(some)) for some in (losses[:3], losses[-3:]))
print(f"loss of the first three steps {before:.2f}, of the last three {after:.2f}")
assert after < before - 1

# %% [markdown]
# There are three shapes, so after the first few steps nothing is compiled, whatever the order of the lengths. A step may also have
# more or fewer microbatches; the schedule is made for as many as there are.

# %%
print(pipe.evaluate(state, given(itertools.islice(epoch, 3))))
