"""Several Python processes with one pipeline: what lives in this one, and what crosses to the others."""
