"""Does it work on any model, unedited? See README.md beside this file."""
