"""The optimizer: any optax transformation, run where the parameters live."""
