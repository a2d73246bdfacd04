"""``python -m experiments.plan``: see README.md beside this."""
