"""How right are plans? See README.md beside this file."""
