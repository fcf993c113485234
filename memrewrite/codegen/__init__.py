"""A rewritten graph as Python source."""
