"""Matrix products of the decoder's linear layers in FP8, without Transformer Engine."""
