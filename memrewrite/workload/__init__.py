"""What is to be run: a model, its inputs, the step, and the loop it runs in."""
