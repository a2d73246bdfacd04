"""Does a pipeline that generates keep all stages busy, and are the tokens those of one device? See README.md beside this file."""
