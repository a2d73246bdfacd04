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
# # Test your pipeline with pytest
#
# A pipeline runs on several devices, and a CPU can pretend to be several devices. Your model can therefore be tested against
# plain JAX on a laptop, or on a CI machine without accelerators. This recipe writes three files and runs `pytest` on them.

# %%
import pathlib
import subprocess
import sys
import tempfile

folder = pathlib.Path(tempfile.mkdtemp())

# %% [markdown]
# ## conftest.py
#
# The number of CPU devices must be set before JAX is used for the first time. pytest imports `conftest.py` before all tests, so
# that is the right place. The second line makes the tests run on the CPU also where there is an accelerator.

# %%
conftest = """
import jax

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_platforms", "cpu")
"""
_ = (folder / "conftest.py").write_text(conftest)

# %% [markdown]
# ## my_model.py
#
# What is to be tested, as small as possible: compiling takes most of the time of such tests.

# %%
my_model = """
import flax.linen as nn
import optax

model = nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(16), nn.tanh, nn.Dense(10)])


def loss_fn(params, batch):
    logits = model.apply(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
"""
_ = (folder / "my_model.py").write_text(my_model)

# %% [markdown]
# ## test_my_model.py
#
# The first test compares a step with gradient accumulation on one device: loss, gradients, and updated parameters, leaf by leaf.
# `verify` raises an error that names the first leaf that differs. The second test checks that the split into microbatches changes
# nothing, which is a property of your loss: it holds if the loss is a mean over examples.

# %%
setup = """
import jax
import jaxpp
import numpy as np
import optax
from my_model import loss_fn, model
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
batch = {"x": images[:32].astype("f4") / 16, "y": labels[:32]}
params = model.init(jax.random.key(0), batch["x"])
"""

# %%
tests = """
def test_a_step_equals_the_step_on_one_device():
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=2)
    pipe.verify(pipe.init(params, batch), batch)


def test_the_gradient_is_that_of_the_whole_batch():
    grad_fn = jaxpp.value_and_grad(loss_fn, num_stages=2, num_microbatches=4)
    loss, grads = grad_fn(params, batch)
    wanted = jax.grad(loss_fn)(params, batch)
    for found, leaf in zip(jax.tree.leaves(grads), jax.tree.leaves(wanted)):
        np.testing.assert_allclose(found, leaf, rtol=1e-5, atol=1e-6)
"""
_ = (folder / "test_my_model.py").write_text(setup + "\n\n" + tests.lstrip())


# %%
def run_pytest(*options):
    command = [sys.executable, "-m", "pytest", "-v", "--tb=line", "--no-header", *options]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout.strip()


code, report = run_pytest()
print(report)
assert code == 0

# %% [markdown]
# A test is worth something if it can fail. With a loss that *sums* over the examples, the mean over four microbatches is a
# quarter of the sum over the batch, and the second test finds that:

# %%
_ = (folder / "my_model.py").write_text(my_model.replace(".mean()", ".sum()"))
code, report = run_pytest("-k", "whole_batch")
print(report.splitlines()[-2])
assert code == 1

# %% [markdown]
# ## What to look out for
#
# - If anything touches a JAX device before `conftest.py` sets their number (a pytest plugin, a `conftest.py` further up), JAX
#   raises an error that says so. The environment variable `XLA_FLAGS=--xla_force_host_platform_device_count=4` is the way out.
# - float32 has seven digits, and sums in another order differ in the last ones. For a strict test, compute in float64: set
#   `jax.config.update("jax_enable_x64", True)` in `conftest.py`, and give the layers `param_dtype="float64"`.
# - Test with the numbers of stages and microbatches that you train with, and a much smaller model. What is exact does not depend
#   on the width.
