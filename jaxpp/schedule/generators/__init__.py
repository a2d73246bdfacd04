"""The schedules by name, one kind a file."""
