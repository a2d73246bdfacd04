"""Schedules as text and as figures."""
