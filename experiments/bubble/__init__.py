"""Where is the bubble? Measured beside simulated, per schedule."""
