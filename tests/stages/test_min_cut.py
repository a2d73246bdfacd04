"""The cheapest cut of small random networks is found, by trying all of them."""

import itertools
import math

import numpy as np
import pytest

from jaxpp.stages.repeatable import SINK, SOURCE, Network

ROUNDING = 1e-6
"""Prices are counted in parts of their sum; by so much a cut may cost more than the cheapest."""


def random_edges(rng, prices):
    """Edges among some nodes; none without a price leads from the source, so that a finite cut exists."""
    nodes = [SOURCE, *range(rng.integers(1, 8)), SINK]
    edges = []
    for _ in range(rng.integers(1, 25)):
        tail, head = (nodes[k] for k in rng.integers(len(nodes), size=2))
        if head not in (tail, SOURCE) and tail != SINK:
            price = prices(rng)
            edges.append((tail, head, 1.0 if math.isinf(price) and tail == SOURCE else price))
    return nodes, edges


def cost(edges, sink_side):
    return sum(price for tail, head, price in edges if tail not in sink_side and head in sink_side)


def best(nodes, edges):
    """The cheapest cost of all cuts, and the fewest nodes on the sink's side that have it."""
    inner = nodes[1:-1]
    sides = [{SINK, *chosen} for size in range(len(inner) + 1) for chosen in itertools.combinations(inner, size)]
    found = [(cost(edges, side), len(side)) for side in sides]
    least = min(price for price, _ in found)
    return least, min(size for price, size in found if price <= least * (1 + ROUNDING))


@pytest.mark.parametrize(
    "prices",
    [
        lambda rng: float(rng.integers(0, 9)),
        lambda rng: float(rng.choice([0.0, 1.0, 64.0, math.inf])),
        lambda rng: float(rng.choice([0.0, 1 / 64, 3.1, 4096.0])),
        lambda rng: 1e12 * float(rng.integers(0, 5)),
        lambda rng: float(rng.choice([1e12, 2.5e12, math.inf])),
    ],
    ids=["counts", "infinite", "fractions", "terabytes", "terabytes or infinite"],
)
def test_the_cheapest_of_all_cuts_is_found_with_the_fewest_nodes_on_the_sinks_side(prices):
    for seed in range(100):
        nodes, edges = random_edges(np.random.default_rng(seed), prices)
        network = Network()
        for tail, head, price in edges:
            network.edge(tail, head, price)
        found = network.sink_side()
        assert SINK in found
        assert SOURCE not in found
        price, size = best(nodes, edges)
        if math.isfinite(price):
            assert cost(edges, found) <= price * (1 + ROUNDING), (seed, edges)
            whole = all(price.is_integer() for *_, price in edges if math.isfinite(price))
            assert len(found) == size or not whole, (seed, edges)  # what is rounded is not exactly as cheap


def test_prices_of_parallel_edges_add_up():
    network = Network()
    for _ in range(3):
        network.edge(SOURCE, "a", 1.0)
    network.edge("a", SINK, 2.0)
    assert network.sink_side() == {SINK}
    network.edge("a", SINK, 2.0)
    assert network.sink_side() == {SINK, "a"}


def test_of_two_cuts_that_cost_the_same_the_one_with_fewer_nodes_on_the_sinks_side_is_taken():
    network = Network()
    for tail, head in itertools.pairwise([SOURCE, "a", "b", "c", SINK]):
        network.edge(tail, head, 5.0)
    assert network.sink_side() == {SINK}


def test_a_byte_is_seen_beside_a_gigabyte():
    network = Network()
    network.edge(SOURCE, "large", float(1 << 30))
    network.edge("large", SINK, float(1 << 31))
    network.edge(SOURCE, "small", 4.0)
    network.edge("small", SINK, 8.0)
    assert network.sink_side() == {SINK, "large", "small"}


def test_a_network_without_prices_or_edges_has_the_sink_alone_on_its_side():
    network = Network()
    assert network.sink_side() == {SINK}
    network.edge(SOURCE, "a", 0.0)
    network.edge("a", SINK, 0.0)
    assert network.sink_side() == {SINK}


def test_hundreds_of_thousands_of_edges_overflow_nothing():
    network, size = Network(), 100_000
    for k in range(size):
        network.edge(SOURCE, ("a", k), 1e12)
        network.edge(("a", k), SINK, 2e12 if k % 2 else 0.5e12)
    assert network.sink_side() == {SINK, *(("a", k) for k in range(1, size, 2))}
