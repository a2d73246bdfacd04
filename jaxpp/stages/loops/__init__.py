"""Loops over layers, and parameters stacked over layers, taken apart so that a stage can begin between two layers."""
