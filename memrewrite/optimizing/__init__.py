"""``optimize`` from a request to its outcome: the one place where all rooms below are put in a row."""
