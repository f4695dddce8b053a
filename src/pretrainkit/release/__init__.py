"""The release gate: compares the files, weights and logits of a release with the checkpoint that it was made from."""
