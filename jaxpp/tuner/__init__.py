"""Which pipeline is the fastest that fits: candidates, what they cost, and the search among them."""
