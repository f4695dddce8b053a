"""Text to token ids: tokenizers, encoders, and the processes that run them."""
