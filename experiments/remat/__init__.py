"""What does keeping less cost, and what does it save?"""
