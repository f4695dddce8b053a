"""Megatron's .bin/.idx datasets: the format and its manifest; how they are made of text, merged, verified and read."""
