"""Where and how a plan runs: places, compiled programs, transfers, and one loop."""
