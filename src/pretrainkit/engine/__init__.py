"""One rank of a training run: the only package that knows NeMo and Lightning."""
