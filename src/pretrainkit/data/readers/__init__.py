"""Input files: which ones they are, how they are split into pieces of work, and the records in them.

A format is a class, a `Source`: `jsonl`, `text`, `tables`, and `compressed` around the first two.
"""
