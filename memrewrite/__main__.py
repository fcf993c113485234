"""``python -m memrewrite`` is the command ``memrewrite``."""

from memrewrite.cli import entry_point

if __name__ == "__main__":
    entry_point()
