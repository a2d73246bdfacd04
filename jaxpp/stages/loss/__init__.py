"""The loss: how it is called, traced and checked, what it is given for each microbatch, and what becomes of what it returns."""
