"""Is the forecast right, and which schedule holds what?"""
