"""Where a step runs, and all that this changes: what is counted, what it costs, what is kept, how it is measured.

A target is chosen once, where a user says it, and travels in the step; whoever needs to know asks it. Nobody else asks
whether something is compiled, or planned for CUDA without it.
"""
