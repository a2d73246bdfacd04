"""``python -m experiments.gpu``: first what is installed, as the rest cannot be imported without it."""

import importlib
import importlib.util
import sys

NEEDED = ("jax", "jaxlib", "flax", "optax", "numpy", "scipy", "tqdm", "jaxtyping")


def missing() -> list[str]:
    """The packages that jaxpp imports and that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


if lacking := missing():
    names = " ".join(lacking)
    sys.exit(
        f"gpu: jaxpp imports {', '.join(lacking)}, not installed for {sys.executable}.\n"
        f"  Fix: {sys.executable} -m pip install {names}\n"
        "  Without a network on this machine: on another one, with the same version of Python,\n"
        f"       python -m pip install --no-deps --target packages {names}\n"
        "       then copy the folder packages here, and: PYTHONPATH=packages python -m experiments.gpu"
    )

importlib.import_module("experiments.gpu.main").main()
