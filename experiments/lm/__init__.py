"""Does a language model trained through the pipeline learn as it does on one device? See README.md beside this file."""
