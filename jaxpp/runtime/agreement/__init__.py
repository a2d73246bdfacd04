"""Several Python processes with one pipeline: that they do the same, and what happens if they do not, or if one fails."""
