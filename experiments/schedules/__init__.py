"""Which schedule, and what does it cost in memory?"""
