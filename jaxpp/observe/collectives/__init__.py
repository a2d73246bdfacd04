"""Communication: what the compiled programs of a step send between the devices of a sub-mesh."""
