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
# # Compile once
#
# A pipeline compiles some small programs for each stage, and most of the time of the first `pipe.init` goes there. A notebook cell
# that is run twice, and a script that is started again, need not compile anything: jaxpp remembers what it compiled in a process,
# and JAX's persistent cache keeps it on disk for the next process.

# %%
import tempfile
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %% [markdown]
# Three settings switch the persistent cache on. Use a folder that stays, such as `~/.cache/jax`. Without the last two lines JAX
# keeps only programs that took longer than a second to compile, which few programs of a pipeline do.

# %%
jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# %% [markdown]
# JAX reports what it does to whoever listens. This listener counts the programs that no cache had:

# %%
compiled = []
missed = "/jax/compilation_cache/cache_misses"
jax.monitoring.register_event_listener(lambda event, **_: compiled.append(event) if event == missed else None)

# %% [markdown]
# A cell as one might run it several times. The model, the loss and the pipeline are new objects each time.


# %%
def run_the_cell():
    start, before = time.perf_counter(), len(compiled)
    layers = [layer for _ in range(8) for layer in (nn.Dense(64), nn.relu)]
    model, batch = nn.Sequential([*layers, nn.Dense(1)]), jnp.ones((32, 64))

    def loss_fn(params, batch):
        return jnp.mean(model.apply(params, batch) ** 2)

    pipe = jaxpp.Pipeline(loss_fn, optax.adam(1e-3), num_stages=4, num_microbatches=8)
    state = pipe.init(lambda key: model.init(key, batch), jax.random.key(0), batch)
    _, metrics = pipe.step(state, batch)
    print(f"{time.perf_counter() - start:.1f} s, {len(compiled) - before} programs compiled, loss {metrics.loss:.4f}")
    return len(compiled) - before


# %% [markdown]
# The first time, everything is compiled. The second time, jaxpp finds that each program does what an earlier one did:

# %%
first = run_the_cell()
second = run_the_cell()
assert first > 0 and second == 0

# %% [markdown]
# `jax.clear_caches` makes JAX and jaxpp forget what they compiled, as the end of the process does. What is on disk stays, and is
# read instead of compiled:

# %%
jax.clear_caches()
from_disk = run_the_cell()
assert from_disk == 0

# %% [markdown]
# ## What to look out for
#
# - A program that calls Python on the host (`jax.debug.print`, `jax.pure_callback`) is compiled each time.
# - Programs are compiled for the shapes of a batch. Another batch size, a change of the model or another setting of JAX (such as
#   `jax_default_matmul_precision`) compiles again.
# - The cache on disk is for one version of JAX and one kind of device. It can be deleted at any time.
