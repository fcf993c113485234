"""Where a framework holds the model and writes the loop: the step it takes, found out from the framework itself.

A plain loop needs none of this. Nothing here is imported unless it is asked for by name.
"""
