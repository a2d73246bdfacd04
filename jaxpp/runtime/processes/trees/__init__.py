"""Whole trees of which each process holds a part: gathered, saved and restored."""
