"""What a step costs decides cuts, schedules and memory: how well, in tables and pictures."""
