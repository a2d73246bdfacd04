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
# # Batch graphs of unequal size
#
# Graphs in a data set have different numbers of nodes and edges, and JAX compiles for fixed shapes. The usual remedy is to pad:
# all graphs get as many nodes and edges as the largest, a mask says which nodes are real, and the padded graphs are stacked along
# a new first axis. A pipeline then splits this axis into microbatches like any other batch. The model is written for one graph,
# and the loss maps it over the batch with `jax.vmap`.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# ## Graphs
#
# A handwritten digit becomes a graph. Its nodes are the pixels with ink, and an edge goes from each node to each neighbour.


# %%
def make_graph(image):
    pixels = np.flatnonzero(image >= 4)
    rows, columns = np.divmod(pixels, 8)
    far = np.maximum(abs(rows[:, None] - rows), abs(columns[:, None] - columns))
    senders, receivers = np.nonzero(far == 1)
    return {"pixels": pixels, "ink": image[pixels] / 16, "senders": senders, "receivers": receivers}


images, labels = load_digits(return_X_y=True)
graphs = [make_graph(image) for image in images[:128]]
num_nodes = 1 + max(len(graph["pixels"]) for graph in graphs)
num_edges = max(len(graph["senders"]) for graph in graphs)
print("nodes of the first graphs:", [len(graph["pixels"]) for graph in graphs[:8]])
print(f"padded: {num_nodes} nodes, {num_edges} edges")

# %% [markdown]
# Every padded graph has at least one node that is padding, the last. Padded edges lead from this node to itself, so their
# messages reach no real node.


# %%
def pad(graph):
    nodes = num_nodes - len(graph["pixels"])
    edges = (0, num_edges - len(graph["senders"]))
    return {
        "pixels": np.pad(graph["pixels"], (0, nodes)),
        "ink": np.pad(graph["ink"], (0, nodes)).astype("f4"),
        "real": np.arange(num_nodes) < len(graph["pixels"]),
        "senders": np.pad(graph["senders"], edges, constant_values=num_nodes - 1),
        "receivers": np.pad(graph["receivers"], edges, constant_values=num_nodes - 1),
    }


stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *map(pad, graphs))

# %% [markdown]
# ## A model of one graph
#
# In each round, every node sums up the messages of its neighbours. `positions` has the coordinates of the 64 pixels, and all
# graphs use the same table.


# %%
class GraphNet(nn.Module):
    @nn.compact
    def __call__(self, graph, positions):
        inputs = jnp.concatenate([graph["ink"][:, None], positions[graph["pixels"]]], axis=1)
        nodes = nn.Dense(32)(inputs)
        for _ in range(3):
            messages = nn.Dense(32)(nodes)[graph["senders"]]
            received = jax.ops.segment_sum(messages, graph["receivers"], len(nodes))
            nodes = nodes + nn.tanh(nn.Dense(32)(received))
        mean = nodes.mean(axis=0, where=graph["real"][:, None])
        return nn.Dense(10)(mean)


model = GraphNet()

# %% [markdown]
# ## The pipeline
#
# `broadcast="positions"` says that this leaf of the batch has no axis of examples: every microbatch gets it whole.


# %%
def logits_of(params, batch):
    return jax.vmap(lambda graph: model.apply(params, graph, batch["positions"]))(batch["graphs"])


def loss_fn(params, batch):
    logits = logits_of(params, batch)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


# %%
positions = jnp.stack(jnp.divmod(jnp.arange(64), 8), axis=1) / 4 - 1.0
batch = {"graphs": stacked, "y": labels[:128], "positions": positions}
params = model.init(jax.random.key(0), pad(graphs[0]), positions)
options = {"num_stages": 2, "num_microbatches": 4, "broadcast": "positions"}
pipe = jaxpp.Pipeline(loss_fn, optax.adam(1e-2), **options)
state = pipe.init(params, batch)
for _ in range(50):
    state, metrics = pipe.step(state, batch)
print(f"loss {metrics.loss:.3f}")

# %% [markdown]
# Padding changes nothing: the model has the same logits for a graph alone, without padding. And the step equals plain JAX on one
# device; otherwise `verify` raises an error.

# %%
trained = jaxpp.gather(state.params)
padded_logits = jax.jit(logits_of)(trained, batch)
for k, graph in enumerate(graphs[:2]):
    everything = np.ones(len(graph["pixels"]), bool)
    alone = jax.jit(model.apply)(trained, {**graph, "real": everything}, positions)
    np.testing.assert_allclose(padded_logits[k], alone, rtol=1e-5, atol=1e-5)
pipe.verify(state, batch)
print(f"accuracy {(padded_logits.argmax(-1) == batch['y']).mean():.1%}")

# %% [markdown]
# ## What to look out for
#
# - Without `broadcast`, the 64 rows of `positions` would count as examples, and jaxpp refuses a batch whose leaves disagree about
#   the number of examples.
# - If a few graphs are much larger than the others, padding to the largest wastes work. Sort the graphs into groups of similar
#   size and pad each group to its own maximum; the pipeline compiles once for each shape (`max_shapes=` says how many it keeps).
# - If the loss is a mean over nodes instead of graphs, weight the microbatches by their real nodes: `weight=` takes a function of
#   the microbatch, here one that returns `batch["graphs"]["real"].sum()`.
