"""The formats of checkpoints; each has a reader and a writer that give and take Hugging Face tensors.

| module | format |
|---|---|
| `hf`, `hf_files` | Hugging Face folder |
| `nemo` | context of a NeMo 2 checkpoint; its weights are torch_dist |
| `torch_dist`, `torch_dist_writer` | megatron-core's distributed checkpoint |
| `torch_legacy`, `torch_legacy_writer`, `torch_save` | Megatron-LM's checkpoint per rank |
| `megatron_lm` | tracker file and arguments around both of Megatron-LM's formats |
"""
