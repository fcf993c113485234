"""From observed graphs to the numbers that are planned with."""
