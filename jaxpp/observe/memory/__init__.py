"""Memory: what is alive on each device during a step, before it has run and while it runs."""
