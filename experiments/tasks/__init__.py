"""Many tasks, one trunk: what does a bank cost and save? See README.md beside this file."""
