"""Text to token ids: the tokenizer, the two libraries that encode and whether they agree, and the pool of workers."""
