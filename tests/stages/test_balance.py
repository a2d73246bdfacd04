"""Where the automatic cut lies: the largest stage near the least possible, no stage empty, then the fewest bytes."""

import itertools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import CutError
from jaxpp.stages.cuts.balance import REAL_WORK, SLACK, balance, least_largest, resolve
from jaxpp.stages.loss.traced_loss import trace_loss
from models.gpt import GPT

SIZE = 4


class Dense(nn.Module):
    """Dense layers of these widths."""

    widths: tuple

    @nn.compact
    def __call__(self, x):
        x = x.reshape(x.shape[0], -1)
        for k, width in enumerate(self.widths):
            x = nn.Dense(width)(nn.relu(x) if k else x)
        return x


class Convolutional(nn.Module):
    """Convolutions, each followed by a pooling where ``pool`` says so, then dense layers."""

    features: tuple
    widths: tuple = (10,)
    pool: tuple = ()

    @nn.compact
    def __call__(self, x):
        for k, features in enumerate(self.features):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.avg_pool(x, (2, 2), strides=(2, 2)) if k in self.pool else x
        return Dense(self.widths)(x)


class Mobile(nn.Module):
    """Depthwise separable convolutions."""

    features: tuple

    @nn.compact
    def __call__(self, x):
        for features in self.features:
            x = nn.relu(nn.Conv(x.shape[-1], (3, 3), feature_group_count=x.shape[-1])(x))
            x = nn.relu(nn.Conv(features, (1, 1), strides=(2, 2))(x))
        return nn.Dense(10)(x.mean((1, 2)))


class Towers(nn.Module):
    """Two towers of unequal depth and width that meet in a product."""

    left: tuple
    right: tuple

    @nn.compact
    def __call__(self, x):
        return Dense((*self.left, 16), name="left")(x) * Dense((*self.right, 16), name="right")(x)


def classifier(model, *shape):
    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    x = jnp.zeros((SIZE, *shape))
    return loss_fn, jax.eval_shape(model.init, jax.random.key(0), x)["params"], (x, jnp.zeros(SIZE, int))


def autoencoder(*widths):
    model = Dense((*widths, 64))

    def loss_fn(params, x):
        return jnp.mean((model.apply({"params": params}, x) - x) ** 2)

    x = jnp.zeros((SIZE, 64))
    return loss_fn, jax.eval_shape(model.init, jax.random.key(0), x)["params"], x


def gpt(depth, width, vocab, length=16):
    model = GPT(vocab_size=vocab, max_length=length, width=width, depth=depth, num_heads=2, dropout=0.0)
    tokens = jnp.zeros((2, length + 1), int)

    def loss_fn(params, tokens):
        logits = model.apply({"params": params}, tokens[:, :-1], True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss_fn, jax.eval_shape(lambda key: model.init(key, tokens[:1, :-1], True)["params"], jax.random.key(0)), tokens


MODELS = {
    "Flax's MNIST MLP": lambda: classifier(Dense((512, 256, 10)), 784),
    "a deep MLP": lambda: classifier(Dense((128,) * 12 + (10,)), 128),
    "a funnel": lambda: classifier(Dense((1024, 512, 256, 128, 64, 10)), 784),
    "a funnel turned round": lambda: classifier(Dense((64, 128, 256, 512, 1024, 10)), 32),
    "an hourglass": lambda: classifier(Dense((512, 256, 32, 256, 512, 10)), 512),
    "wide and narrow by turns": lambda: classifier(Dense((64, 2048, 64, 2048, 64, 10)), 64),
    "a linear model": lambda: classifier(Dense((10,)), 64),
    "two layers": lambda: classifier(Dense((256, 10)), 64),
    "a large head": lambda: classifier(Dense((64, 64, 64, 5000)), 64),
    "a large first layer": lambda: classifier(Dense((64, 64, 64, 10)), 5000),
    "five equal layers": lambda: classifier(Dense((64,) * 5), 64),
    "seven layers": lambda: classifier(Dense((96,) * 7), 96),
    "one giant in the middle": lambda: classifier(Dense((64, 64, 1024, 1024, 64, 64, 10)), 64),
    "Flax's MNIST CNN": lambda: classifier(Convolutional((32, 64), (256, 10), (0, 1)), 28, 28, 1),
    "four convolutions": lambda: classifier(Convolutional((32, 64, 128, 256), pool=(0, 1, 2, 3)), 32, 32, 3),
    "four convolutions without pooling": lambda: classifier(Convolutional((16, 16, 32, 32), (64, 10)), 16, 16, 3),
    "a falling CNN": lambda: classifier(Convolutional((64, 32, 16, 8), (10,), (0, 2)), 32, 32, 3),
    "LeNet": lambda: classifier(Convolutional((6, 16), (120, 84, 10), (0, 1)), 32, 32, 1),
    "VGG": lambda: classifier(Convolutional((64, 64, 128, 128, 256, 256), (512, 10), (1, 3, 5)), 32, 32, 3),
    "VGG with large dense layers": lambda: classifier(Convolutional((16, 32, 64), (1024, 1024, 10), (0, 1, 2)), 16, 16, 3),
    "a CNN on large images": lambda: classifier(Convolutional((8, 16, 32), (32, 10), (0, 1, 2)), 96, 96, 3),
    "MobileNet": lambda: classifier(Mobile((32, 64, 128, 256)), 64, 64, 3),
    "a thin MobileNet": lambda: classifier(Mobile((8, 8, 16, 16, 32)), 64, 64, 3),
    "an autoencoder": lambda: autoencoder(32, 16, 4, 16, 32),
    "a deep autoencoder": lambda: autoencoder(256, 128, 64, 8, 64, 128, 256),
    "an overcomplete autoencoder": lambda: autoencoder(512, 512),
    "even towers": lambda: classifier(Towers((64, 64), (64, 64)), 64),
    "uneven towers": lambda: classifier(Towers((256, 256, 256), (16,)), 64),
    "uneven towers, the large one last": lambda: classifier(Towers((16,), (256, 256, 256)), 64),
    "a tower of two widths": lambda: classifier(Towers((512, 32, 512), (32, 512, 32)), 64),
    "a GPT": lambda: gpt(4, 64, 32),
    "a GPT with a large head": lambda: gpt(4, 32, 5000),
    "a GPT with a head as large as a block": lambda: gpt(6, 32, 192),
    "a GPT of five blocks": lambda: gpt(5, 64, 32),
    "a GPT of one block": lambda: gpt(1, 64, 64),
    "a GPT of seven blocks": lambda: gpt(7, 32, 64),
    "a long GPT": lambda: gpt(3, 16, 64, 128),
    "a wide GPT": lambda: gpt(2, 256, 256),
    "a GPT of eight blocks": lambda: gpt(8, 32, 32),
    "a GPT of three blocks": lambda: gpt(3, 128, 512),
}


def traced(name):
    loss_fn, params, batch = MODELS[name]()
    return trace_loss(loss_fn, params, jax.eval_shape(lambda: batch), None, has_aux=False)


def shares(loss, cuts):
    costs = np.asarray(loss.costs)
    return np.asarray([costs[a:b].sum() for a, b in itertools.pairwise([0, *cuts, len(costs)])]) / costs.sum()


def least_by_brute_force(costs, num_stages):
    """The least that the largest stage can cost: every cut of every stage is looked at."""
    total = np.concatenate([[0.0], np.cumsum(costs)])
    best = total.copy()
    for stage in range(1, num_stages):
        best = np.asarray(
            [min((max(best[k], total[end] - total[k]) for k in range(stage, end)), default=np.inf) for end in range(len(total))]
        )
    return best[-1]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * ("GPT" in name)) for name in MODELS])
def test_the_largest_stage_is_within_five_percent_of_the_least_possible_over_all_cuts(name):
    loss = traced(name)
    for num_stages in range(2, min(6, len(loss.spine)) + 1):
        least = least_by_brute_force(loss.costs, num_stages) / sum(loss.costs)
        assert max(shares(loss, balance(loss, num_stages))) <= 1.05 * least
        assert least_largest(loss, num_stages) == pytest.approx(least * sum(loss.costs), rel=1e-6)


@pytest.mark.parametrize("name", [name for name in MODELS if "GPT" not in name])
def test_no_stage_is_empty_where_that_can_be_avoided_and_then_the_fewest_bytes_cross(name):
    loss = traced(name)
    size, products = len(loss.spine), ("dot_general", "conv_general_dilated")
    kinds = (
        np.asarray(loss.costs) / sum(loss.costs),
        np.asarray([bool(uses) for uses in loss.param_uses]),
        np.asarray([loss.graph.eqns[i].primitive.name in products for i in loss.spine]),
    )
    sums = [np.concatenate([[0], np.cumsum(found)]) for found in kinds]
    price = np.asarray(loss.boundary_bytes)
    for num_stages in (2, 3, 4):
        if size < num_stages or size > 45:
            continue
        every = np.asarray(list(itertools.combinations(range(1, size), num_stages - 1)))
        ends = np.concatenate([np.zeros((len(every), 1), int), every, np.full((len(every), 1), size)], 1)
        work, params, multiplied = (np.diff(found[ends], axis=1) for found in sums)
        fair = work.max(1) <= (1 + SLACK) * work.max(1).min() * (1 + 1e-9)
        filled = ((work >= REAL_WORK / num_stages) & (params > 0) & (multiplied > 0)).all(1)
        mine = (every == balance(loss, num_stages)).all(1)
        assert (mine & fair).any()
        if (fair & filled).any():
            assert (mine & filled).any(), "a stage is empty that need not be"
            assert price[every][mine].sum() == price[every][fair & filled].sum(1).min()


def test_the_models_of_a_first_hour_are_cut_where_their_layers_are():
    wanted = {
        ("Flax's MNIST MLP", 2): ([0.75, 0.25], ["Dense_1"]),
        ("four convolutions", 4): ([0.06, 0.31, 0.31, 0.31], ["Conv_1", "Conv_2", "Conv_3"]),
        ("Flax's MNIST CNN", 2): ([0.83, 0.17], ["Dense_0"]),
        ("Flax's MNIST CNN", 4): ([0.05, 0.77, 0.17, 0.0], ["Conv_1", "Dense_0", "Dense_1"]),  # not a bias as a stage of its own
        ("a GPT", 4): ([0.24, 0.24, 0.24, 0.26], ["h_1", "h_2", "h_3"]),
        ("a GPT of eight blocks", 4): ([0.24, 0.24, 0.24, 0.27], ["h_2", "h_4", "h_6"]),
        ("five equal layers", 5): ([0.2] * 5, ["Dense_1", "Dense_2", "Dense_3", "Dense_4"]),
    }
    for (name, num_stages), (parts, starts) in wanted.items():
        loss = traced(name)
        cuts = balance(loss, num_stages)
        np.testing.assert_allclose(shares(loss, cuts), parts, atol=0.02)
        found = [loss.graph.names[loss.spine[k]].split("/") for k in cuts]
        assert all(start in path for start, path in zip(starts, found, strict=True)), (name, found)


def test_an_uneven_cut_is_warned_of_at_init_naming_the_stage_the_module_and_what_helps():
    model = Dense((512, 256, 10))
    loss_fn, params, batch = classifier(model, 784)
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=4, num_microbatches=2)
    with pytest.warns(jaxpp.UnevenStagesWarning) as found:
        pipe.init(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), params), batch)
    (warning,) = found
    text = str(warning.message)
    assert warning.filename == __file__
    assert "num_stages=4: the stages are uneven" in text
    assert "stage 0 does 66% of the work, 2.7 times the mean, so 4 stages are at most 1.50 times as fast as one device" in text
    assert "Dense_0 weighs most in it: 66% of the work, 66% in one dot_general" in text  # no cotangent of the batch is wanted
    assert "shardings=" in text
    assert "category=jaxpp.UnevenStagesWarning" in text


def test_where_model_state_holds_a_stage_together_the_warning_says_which():
    def loss_fn(params, model_state, batch):
        x = batch + model_state["mean"]
        for w in params:
            x = jnp.tanh(x @ w)
        return x.mean(), ({"mean": x.mean(0)}, {})

    params = [jnp.eye(8)] * 4, {"mean": jnp.zeros(8)}
    pipe = jaxpp.Pipeline(loss_fn, optax.sgd(0.1), num_stages=2, num_microbatches=2, has_state=True)
    with pytest.warns(jaxpp.UnevenStagesWarning, match="update model_state mean where it is read"):
        pipe.init(params, jnp.ones((4, 8)))


def test_cuts_of_the_users_own_and_even_ones_are_not_warned_of():
    loss_fn, params, batch = classifier(Dense((64, 64, 10)), 512)
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options = {"num_stages": 3, "num_microbatches": 2}
        jaxpp.Pipeline(loss_fn, optax.sgd(0.1), cuts=["Dense_1", "Dense_2"], **options).init(params, batch)


@pytest.mark.long
def test_modules_that_the_equations_do_not_name_have_the_names_of_their_parameters_below_what_all_share():
    # Three recurrent layers: nn.RNN's loops carry names of their own, so most equations that read parameters were not recognised.
    class Recurrent(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            h = nn.Embed(20, 8)(tokens)
            for _ in range(3):
                h = nn.RNN(nn.OptimizedLSTMCell(8))(h)
            return nn.Dense(20)(h)

    model, tokens = Recurrent(), jnp.zeros((4, 6), int)
    variables = model.init(jax.random.key(0), tokens)

    def loss_fn(variables, tokens):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(variables, tokens), tokens).mean()

    loss = trace_loss(loss_fn, variables, jax.eval_shape(lambda: tokens), None, has_aux=False)
    assert {"Embed_0", "OptimizedLSTMCell_0", "OptimizedLSTMCell_2", "Dense_0"} <= set(loss.modules)
    (cut,) = resolve(loss, ["OptimizedLSTMCell_1"])
    assert 0 < cut < len(loss.spine)
    with pytest.raises(CutError, match="OptimizedLSTMCell_1, OptimizedLSTMCell_2"):
        resolve(loss, ["nowhere"])


def looped(kind):
    """A loss of which nearly all work is in one equation of some kind, over ``w`` and ``ws``."""

    def layer(x, w):
        return jnp.tanh(x @ w)

    def body(params, x):
        w = params["w"]
        if kind == "fori_loop":
            return jax.lax.fori_loop(0, 9, lambda _, x: layer(x, w), x)
        if kind == "while":
            return jax.lax.while_loop(lambda s: s[0] < 9, lambda s: (s[0] + 1, layer(s[1], w)), (0, x))[1]
        if kind == "cond":
            return jax.lax.cond(x.sum() > 0, lambda x: layer(layer(x, w), w), lambda x: layer(x, w), x)
        if kind == "checkpoint":
            return jax.checkpoint(lambda x, w: layer(layer(x, w), w))(x, w)
        if kind == "time of embeddings":
            x = x * params["head"][:, 0]
        return jax.lax.scan(lambda h, row: (layer(h + row, w), None), jnp.zeros_like(x), jnp.stack([x] * 9))[0]

    return lambda params, x: jnp.mean(body(params, jnp.sin(x)) @ params["head"])


@pytest.mark.parametrize(
    ("kind", "called", "advice"),
    [
        ("fori_loop", "a loop that counts", "lax.scan over parameters stacked"),
        ("while", "a while loop", "lax.scan over parameters stacked"),
        ("cond", "a cond", "choose the branch outside the loss"),
        ("checkpoint", "a jax.checkpoint", 'remat="recompute"'),
        ("time", "a scan over the data (over time, say)", "give each layer a loop of its own"),
        ("time of embeddings", "a scan over the data (over time, say)", "give each layer a loop of its own"),
    ],
)
def test_one_giant_equation_is_refused_with_advice_for_its_kind(kind, called, advice):
    params = {"w": jnp.eye(64), "head": jnp.ones((64, 1))}
    with pytest.raises(CutError) as error:
        jaxpp.value_and_grad(looped(kind), num_stages=3)(params, jnp.ones((6, 64)))
    text = str(error.value)
    assert called in text
    assert advice in text
    assert "cannot be cut" not in advice


def test_a_network_of_convolutions_is_not_told_to_shard_its_parameters():
    def loss_fn(params, x):
        for each in params:
            x = jax.nn.relu(jax.lax.conv(x, each, (1, 1), "SAME"))
        return x.mean()

    params = [jnp.ones((32, 1, 3, 3)), jnp.ones((32, 32, 3, 3)), jnp.ones((1, 32, 3, 3))]
    with pytest.warns(jaxpp.UnevenStagesWarning, match="use data parallelism alone, which suits convolutions") as told:
        jaxpp.value_and_grad(loss_fn, num_stages=3)(params, jnp.ones((6, 1, 8, 8)))
    assert not any("mesh=" in str(each.message) for each in told)
    assert all(str(each.message).count("data parallelism alone") == 1 for each in told)


@pytest.mark.long
def test_the_number_of_stages_in_the_advice_is_the_largest_that_works():
    def loss_fn(params, x):
        h = jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"])
        h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ params["w"]), None), h, None, length=3)
        return jnp.mean(h)

    params = {name: jnp.eye(32) for name in "abw"}
    with pytest.raises(CutError, match="pass num_stages=3"):
        jaxpp.value_and_grad(loss_fn, num_stages=4)(params, jnp.ones((8, 32)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", jaxpp.UnevenStagesWarning)
        loss, _ = jaxpp.value_and_grad(loss_fn, num_stages=3)(params, jnp.ones((8, 32)))
    assert np.isfinite(float(loss))
