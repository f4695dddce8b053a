"""Scores of checkpoints and Hugging Face folders on tasks of lm-evaluation-harness."""
