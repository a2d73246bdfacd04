"""theta[t]: parameter sets that live on the host, and what a pipeline does with them."""
