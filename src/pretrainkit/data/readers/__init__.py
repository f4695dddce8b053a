"""Input files: which ones, their formats, and the records in them."""
