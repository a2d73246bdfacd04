"""Schedules made to measure: an order found for given costs and room."""
