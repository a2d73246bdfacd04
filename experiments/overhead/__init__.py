"""What does the Python scheduler cost?"""
