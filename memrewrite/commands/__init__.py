"""One file for each command: what it does once its options are parsed.

``requests`` holds the options of each as frozen data and imports no PyTorch; ``job`` what the commands share. To add a
command: its request there, a file with ``run(request)`` here, and its options in ``memrewrite.cli``.
"""
