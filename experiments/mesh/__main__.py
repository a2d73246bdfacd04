"""``python -m experiments.mesh``."""

from experiments.mesh.main import main

main()
