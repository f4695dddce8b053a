"""Layers, kernels, optimizer and data order on megatron-core, without NeMo."""
