"""Text to tokens on disk, and back."""
