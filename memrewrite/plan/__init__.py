"""What to recompute: pure planning over numbers, nothing is run."""
