"""The release gate: files, weights and logits of a release against the checkpoint it came from."""
