"""Time: what ran when, why ranks idled, and how that looks."""
