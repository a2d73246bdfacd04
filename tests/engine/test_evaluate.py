"""Evaluation takes any number of examples and any loss; a batch of another size compiles what depends on its shape alone."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp
from jaxpp.errors import BatchError, LossError
from jaxpp.verify import compare, oracle

RNG = np.random.default_rng(0)
PARAMS = {name: RNG.normal(size=(4, 4)).astype("f") for name in "ab"}
X = RNG.normal(size=(19, 4)).astype("f")


def outputs(params, x):
    return jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"])


def plain(params, x):
    return jnp.mean((outputs(params, x) - 0.3) ** 2)


def with_aux(params, x):
    y = outputs(params, x)
    return jnp.mean((y - 0.3) ** 2), {"rows": y, "positive": (y > 0).sum(), "mean": y.mean(), "most": y.max()}


REDUCERS = {"positive": "sum", "most": "max"}


def pipeline(loss=with_aux, **options):
    given = {"num_stages": 2, "num_microbatches": 4, "has_aux": loss is with_aux} | options
    return jaxpp.Pipeline(loss, optax.adam(1e-2), **given, reduce_aux=REDUCERS if loss is with_aux else None)


def check(metrics, x):
    """All of it is that of the whole batch: means of means of equal parts, rows, sums, maxima."""
    loss, aux = with_aux(PARAMS, x)
    compare("loss", metrics.loss, loss)
    for name, value in aux.items():
        np.testing.assert_allclose(metrics.aux[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_an_evaluation_takes_fewer_examples_than_microbatches():
    pipe = pipeline()
    state = pipe.init(PARAMS, X[:8])
    for count in (1, 3, 5):
        check(pipe.evaluate(state, X[:count]), X[:count])
    with pytest.raises(BatchError, match="3 examples for 4 microbatches"):
        pipe.step(state, X[:3])
    with pytest.raises(BatchError, match="a batch has at least one example"):
        pipe.evaluate(state, X[:0])


def test_an_evaluation_of_few_examples_folds_the_key_as_a_step_of_as_many_microbatches():
    def noisy(params, x, key):
        return plain(params, x * jax.random.bernoulli(key, 0.5, x.shape))

    pipe, key = pipeline(noisy), jax.random.key(1)
    state = pipe.init(PARAMS, X[:8])
    compare("loss", pipe.evaluate(state, X[:2], key).loss, oracle(noisy, PARAMS, X[:2], key, 2)[0])


@pytest.mark.parametrize("microbatches", [1, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.long
def test_replicas_evaluate_any_number_of_examples(microbatches):
    pipe = pipeline(num_stages=1 if microbatches == 1 else 2, num_microbatches=microbatches, data_parallel=4)
    state = pipe.init(PARAMS, X[:12])
    for count in (1, 3, 6, 8, 19):
        check(pipe.evaluate(state, jnp.asarray(X[:count]) if count == 6 else X[:count]), X[:count])
    with pytest.raises(BatchError, match="each replica gets as many examples"):
        pipe.step(state, X[:19])


@pytest.mark.long
def test_replicas_weigh_an_uneven_evaluation_as_the_user_says():
    weight = lambda x: jnp.abs(x).sum()  # noqa: E731
    pipe = pipeline(plain, num_microbatches=2, data_parallel=2, weight=weight)
    state = pipe.init(PARAMS, X[:4])
    weights = np.abs(X[:3]).sum(1)
    want = sum(w * plain(PARAMS, x[None]) for w, x in zip(weights / weights.sum(), X[:3], strict=True))
    compare("loss", pipe.evaluate(state, X[:3]).loss, want)


@pytest.mark.filterwarnings("ignore::jaxpp.MicrobatchWarning")  # this loss is one that microbatches change
def test_what_is_copied_for_a_replica_without_an_example_counts_nothing_even_if_it_is_alone_not_finite():
    # The copy is of an example that another replica evaluates alone too, so it is finite if the batch's mean is.
    def spread(params, x):  # not a number for the first example alone
        return jnp.mean(outputs(params, x) ** 2) + jnp.where(jnp.all(x == X[0]), jnp.nan, 0.0)

    pipe = pipeline(spread, num_microbatches=2, data_parallel=2)
    state = pipe.init(PARAMS, X[:4])
    assert jnp.isfinite(pipe.evaluate(state, X[:5]).loss)


def test_another_loss_may_have_aux_or_none_whatever_the_pipeline_has():
    for loss, other in ((plain, with_aux), (with_aux, plain)):
        pipe = pipeline(loss)
        state = pipe.init(PARAMS, X[:8])
        metrics = pipe.evaluate(state, X[:8], loss_fn=other)
        compare("loss", metrics.loss, plain(PARAMS, X[:8]))
        assert set(metrics.aux) == (set(with_aux(PARAMS, X[:8])[1]) if other is with_aux else set())
    with pytest.raises(LossError, match=r"a loss with aux returns a pair \(loss, aux\)\.\n  Got: a tuple of 3"):
        pipe.evaluate(state, X[:8], loss_fn=lambda p, x: (plain(p, x), 1, 2))


def summed(params, x):
    return ((outputs(params, x) - 0.3) ** 2).sum()


def per_count(params, x):
    return summed(params, x) / (x > 0).sum()


def with_both(params, x):
    return plain(params, x), {"sum": summed(params, x), "count": (x > 0).sum()}


def logarithm(params, x):
    return jnp.log(plain(params, x))


def aux_logarithm(params, x):
    return plain(params, x), {"log": logarithm(params, x)}


NO_MEAN = {
    summed: 'return the mean, or the sum as aux, which is added over the microbatches: return loss, {"sum": sum}',
    per_count: 'return both as aux, {"sum": sum, "count": (batch > 0.0).sum()}, which are added over the microbatches, and divide',
    logarithm: "pass jaxpp.Microbatches([batch]), which is not split, or filter",
    aux_logarithm: "pass jaxpp.Microbatches([batch]), which is not split, or filter",
}


@pytest.mark.parametrize("loss", NO_MEAN)
def test_what_is_told_of_another_loss_that_is_no_mean_can_be_done_there(loss):
    pipe = pipeline(plain)
    state = pipe.init(PARAMS, X[:8])
    with pytest.warns(jaxpp.MicrobatchWarning) as caught:
        pipe.evaluate(state, X[:8], loss_fn=loss)
    (told,) = [str(each.message) for each in caught]
    assert f"Fix: {NO_MEAN[loss]}" in told and "gradients" not in told, told
    aux = pipe.evaluate(state, X[:8], loss_fn=with_both).aux
    compare("sum", aux["sum"], summed(PARAMS, X[:8]))
    compare("quotient", aux["sum"] / aux["count"], per_count(PARAMS, X[:8]))
    metrics = pipe.evaluate(state, jaxpp.Microbatches([X[:8]]), loss_fn=loss)  # and nothing is told of one microbatch
    wanted = loss(PARAMS, X[:8])
    compare("whole", (metrics.loss, metrics.aux) if metrics.aux else metrics.loss, wanted)
    pipe.evaluate(state, X[:1], loss_fn=loss)


def test_a_loss_that_counts_is_told_what_to_return_where_nobody_wants_its_gradient():
    pipe = pipeline(plain)
    state = pipe.init(PARAMS, X[:8])
    with pytest.raises(LossError, match=r"such as \(logits.argmax\(-1\).*or the count as aux.*return loss, \{\"correct\": count\}"):
        pipe.evaluate(state, X[:8], loss_fn=lambda params, x: (outputs(params, x) > 0).sum())
    metrics = pipe.evaluate(state, X[:8], loss_fn=with_both)
    assert metrics.aux["count"] == (X[:8] > 0).sum()
    with pytest.raises(LossError, match="has no gradient"):
        pipeline(lambda params, x: (outputs(params, x) > 0).sum()).init(PARAMS, X[:8])


def test_another_loss_of_a_pipeline_with_model_state_may_return_the_loss_alone():
    pipe = pipeline(lambda p, s, x: (plain(p, x), (s, {})), has_state=True)
    state = pipe.init((PARAMS, {"n": np.zeros(3, "f")}), X[:8])
    compare("loss", pipe.evaluate(state, X[:8], loss_fn=lambda p, s, x: plain(p, x) + s["n"].sum()).loss, plain(PARAMS, X[:8]))


def test_a_batch_of_another_size_compiles_what_depends_on_it_alone():
    def biased(params, x):
        h = jnp.tanh(x @ params["a"] + params["p"] + params["q"])
        return jnp.mean((h @ params["b"] + params["r"] - 0.3) ** 2)

    pipe = pipeline(biased)
    state = pipe.init(PARAMS | dict.fromkeys("pqr", np.zeros(4, "f")), X[:16])

    def fresh(size, known):
        """What a step of this size runs that is not known."""
        before = len(pipe.engine.programs)
        pipe.step(state, X[:size], donate=False)
        _, lowered = pipe.engine.plan("update", X[:size], None, donate=False)
        programs = {id(line.program): line.label for line in lowered.bound.lines if line.program}
        new = sorted({label for program, label in programs.items() if program not in known})
        assert not known or len(pipe.engine.programs) - before == len(programs.keys() - known)
        known.update(programs)
        return new

    known = set()
    assert {"update stage 0", "update stage 1"} <= set(fresh(16, known))
    assert not [label for label in fresh(12, known) if label.split()[0] in ("unpack", "update")]
    assert {label.split()[0] for label in fresh(14, known)} == {"begin"}  # microbatches of 4 and 3 are known


def test_the_progress_bar_says_for_what_batch_it_compiles(monkeypatch, capsys):
    monkeypatch.setattr("jaxpp.runtime.compile._PATIENCE", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    held = optax.GradientTransformation(lambda params: jax.tree.map(lambda leaf: 0.123 * leaf, params), lambda *given: given[:2])
    pipe = jaxpp.Pipeline(lambda params, x: 0.123 * plain(params, x), held, num_stages=2, num_microbatches=4)
    state = pipe.init(  # of programs that no other test has compiled
        lambda key: jax.tree.map(lambda leaf: 0.123 * jax.random.normal(key, leaf.shape), PARAMS), jax.random.key(0), X[:8]
    )
    said = capsys.readouterr().err
    assert "compiling for a batch of 8" in said and "compiling init" in said and "compiling the optimizer's init" in said
    pipe.evaluate(state, X[:3])
    assert "compiling for a batch of 3" in capsys.readouterr().err
