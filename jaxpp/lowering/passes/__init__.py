"""Passes over lines; ``transform`` runs them."""
