"""What a generation will hold, and how it ran."""
