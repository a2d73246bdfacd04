"""How it runs: stages on devices, a schedule lowered to a plan, one loop, and the optimizer where the parameters live."""
