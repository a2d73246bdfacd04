"""Flax models; they know nothing of pipelines."""
