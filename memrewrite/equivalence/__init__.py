"""Does a rewritten model compute the same training step as the original?"""
