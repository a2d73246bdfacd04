"""What can a card train that is smaller than the model? See README.md beside this file."""
