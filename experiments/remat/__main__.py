"""``python -m experiments.remat``."""

from experiments.remat.main import main

main()
