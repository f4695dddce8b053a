"""Documents that overlap with evaluation sets: which sets (`evaluations`), and how overlaps are found (`overlap`)."""

NUM_WORDS = 13
"""Words in a row that are an overlap: GPT-3's longest n-gram for this, which lm-evaluation-harness also takes."""
