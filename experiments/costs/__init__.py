"""What does a step cost, and is that what jaxpp says?"""
