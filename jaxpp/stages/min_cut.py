"""The minimum cut of a network, by SciPy's maximum flow.

What to keep and what to compute again is a choice with two sides for every value, in which each choice has a price and some choices
force others. Such a problem is a minimum cut: a node is on the source's side or on the sink's, and every edge that leads from the
source's side to the sink's is paid for (Picard, Management Science 22(11), 1976).
"""

import math
from collections.abc import Hashable

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

SOURCE, SINK = "source", "sink"
_FINITE = 1 << 29  # SciPy counts flow in 32 bits; all prices together take this much, and an edge of no price twice as much


class Network:
    """A directed network whose edges have prices."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {SOURCE: 0, SINK: 1}
        self._prices: dict[tuple[int, int], float] = {}

    def edge(self, tail: Hashable, head: Hashable, price: float = math.inf) -> None:
        """Demand ``price`` where ``tail`` is on the source's side and ``head`` on the sink's; infinite unless given."""
        ends = self._numbers.setdefault(tail, len(self._numbers)), self._numbers.setdefault(head, len(self._numbers))
        if price > 0:
            self._prices[ends] = self._prices.get(ends, 0.0) + price

    def sink_side(self) -> set[Hashable]:
        """The nodes on the sink's side of a cheapest cut: if several cuts are cheapest, of the cut with the fewest such nodes."""
        if not self._prices:
            return {SINK}
        ends = np.array(list(self._prices), dtype=np.int32)
        prices = np.array(list(self._prices.values()))
        finite = np.isfinite(prices)
        scale = _FINITE / max(prices[finite].sum() + finite.sum(), 1.0)
        whole = np.where(finite, np.ceil(np.where(finite, prices, 0.0) * scale), 2 * _FINITE).astype(np.int32)
        size = len(self._numbers)
        capacity = csr_array((whole, (ends[:, 0], ends[:, 1])), shape=(size, size))
        left = capacity - maximum_flow(capacity, 0, 1).flow
        left.data = np.maximum(left.data, 0)
        left.eliminate_zeros()
        reaching = set(breadth_first_order(csr_array(left.T), 1, return_predecessors=False).tolist())
        return {node for node, number in self._numbers.items() if number in reaching}
