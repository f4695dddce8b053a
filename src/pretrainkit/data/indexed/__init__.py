"""Megatron's .bin/.idx datasets: format, manifest, writing, merging, checking."""
