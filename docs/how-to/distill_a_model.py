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
# # Distill a model
#
# A small model, the student, learns from the probabilities that a large one, the teacher, gives to every class. Both run in one
# loss, and the teacher does not change. It may be too large for one device: it is cut into stages as the student is. Nothing goes
# backward through it, it keeps nothing for a backward, and it has neither gradients nor optimizer state.

# %%
import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import jaxpp

jax.config.update("jax_num_cpu_devices", 4)  # for a laptop; GPUs are used where there are any

# %%
images, labels = load_digits(return_X_y=True)
digits = {"x": images.astype("f4") / 16, "y": labels}
test = {name: leaf[1280:] for name, leaf in digits.items()}


def batch_of(step, num_examples=1280):
    rows = np.random.default_rng(step).choice(num_examples, 128)
    return {name: leaf[rows] for name, leaf in digits.items()}


def network(width, depth):
    return nn.Sequential([*(layer for _ in range(depth) for layer in (nn.Dense(width), nn.relu)), nn.Dense(10)])


teacher, student = network(128, 7), network(64, 2)

# %% [markdown]
# ## A teacher
#
# Any parameters will do, such as those of a checkpoint. Here the teacher is trained first.


# %%
def teacher_loss(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(teacher.apply(params, batch["x"]), batch["y"]).mean()


teaching = jaxpp.Pipeline(teacher_loss, optax.adam(1e-3), num_stages=2)
taught = teaching.init(lambda key: teacher.init(key, digits["x"][:1]), jax.random.key(0), batch_of(0))
for step in range(100):
    taught, metrics = teaching.step(taught, batch_of(step))

# %% [markdown]
# ## Both in one loss
#
# The student sees no label; the loss compares its distribution with the teacher's, both at a temperature. `optax.set_to_zero` says
# that the teacher does not change. `optax.multi_transform` gives each model its optimizer.

# %%
TEMPERATURE = 3.0


def distillation_loss(params, batch):
    wanted = nn.softmax(teacher.apply(params["teacher"], batch["x"]) / TEMPERATURE)
    logits = student.apply(params["student"], batch["x"])
    return TEMPERATURE**2 * optax.softmax_cross_entropy(logits / TEMPERATURE, wanted).mean()


optimizer = optax.multi_transform(
    {"student": optax.adam(3e-3), "teacher": optax.set_to_zero()}, lambda params: {name: name for name in params}
)
pipe = jaxpp.Pipeline(distillation_loss, optimizer, num_stages=4, num_microbatches=8)
teacher_params = jaxpp.gather(taught.params)
student_params = jax.jit(student.init)(jax.random.key(1), batch_of(0)["x"])
state = pipe.init({"student": student_params, "teacher": teacher_params}, batch_of(0))
print(pipe.stages)

# %% [markdown]
# The teacher's stages have no backward (B is 0) and keep nothing from forward to backward. The cut goes by what a step costs:
# a layer of the teacher costs a third of a layer of that size that learns.

# %%
for step in range(300):
    state, metrics = pipe.step(state, batch_of(step))
print(f"loss {metrics.loss:.3f}")


def errors(params, batch):
    models = {"teacher": teacher, "student": student}
    return {name: model.apply(params[name], batch["x"]).argmax(-1) != batch["y"] for name, model in models.items()}


wrong = {name: float(np.mean(rows)) for name, rows in pipe.apply(state, test, fn=errors).items()}
print("wrong on test images:", wrong)
assert wrong["student"] < 0.2

# %% [markdown]
# ## Check it
#
# A step equals the plain step on one device. The teacher has the bits that it came with, and the optimizer holds nothing for it:

# %%
print(pipe.verify(state, batch_of(300)))
jax.tree.map(np.testing.assert_array_equal, jaxpp.gather(state.params["teacher"]), teacher_params)
count = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))  # noqa: E731
print(f"numbers: teacher {count(teacher_params):,}, student {count(student_params):,}, optimizer {count(state.opt_state):,}")
assert count(state.opt_state) == 2 * count(student_params) + 1  # two moments, and the number of steps

# %% [markdown]
# The forecast says the same of every device: gradients and optimizer state are the student's alone.

# %%
print(pipe.forecast(state.params, batch_of(0)))

# %% [markdown]
# ## What to look out for
#
# - A teacher that never changes and is asked for the same examples again can be asked once: `jaxpp.Forward` and its
#   `stream` write the teacher's logits of a whole data set, and the student then learns from these as from labels.
# - The teacher runs before the student here. What it sends to the student's stage are the logits alone; a loss that compares hidden
#   states sends these too.
# - A dropout in the teacher needs no key of its own: leave it out of the teacher's call (`deterministic=True`).
