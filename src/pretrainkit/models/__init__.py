"""Model families as data: how a Hugging Face config.json is read, and the table of weights. No torch.

One module per family; `registry` finds the family of a folder, `decoder` has what families share, `megatron_fields`
translates a shape for Megatron-core, NeMo and Megatron-LM, `flops` counts the operations of a step.
"""
