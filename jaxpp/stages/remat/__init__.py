"""What a stage keeps for its backward, and what it computes again."""
