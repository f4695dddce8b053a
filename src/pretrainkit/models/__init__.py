"""Model families: a Hugging Face config and its weights, described as data."""
