"""What was asked for and what came of it: plain data and errors, no renderer and no torch."""
