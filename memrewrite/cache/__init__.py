"""What an earlier process planned, kept on disk: where it lies, what it is found by, and how it is written and read.

An entry is found by a digest of everything that a plan depends on (``description``, ``environment``), so a change
anywhere, or anything that cannot be described, is a miss. ``optimizing.remembered`` takes plans from here and puts them
here. An entry holds generated code: whoever may write to the folder may run code in processes that use it.
"""
