"""One rank of a training run."""
