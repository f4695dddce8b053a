"""From raw text to a released language model."""
