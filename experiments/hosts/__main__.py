"""``python -m experiments.hosts``."""

from experiments.hosts.main import main

main()
