"""One pipeline from the user's options to compiled plans: cut, placed, lowered and run."""
