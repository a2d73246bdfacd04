"""Where a loss is cut into stages, and what crosses."""
