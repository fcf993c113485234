"""What a pass is, and what holds of a graph before and after it."""
