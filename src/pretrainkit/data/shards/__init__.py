"""WebDataset token shards: format, writing, and reading them in an order that can be resumed."""
