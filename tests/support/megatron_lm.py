"""Megatron-LM's own code, from a checkout, on the CPU: loads a checkpoint at TP=2 PP=2, runs it and saves it.

    PYTHONPATH=CHECKOUT:tests/support python -m megatron_lm CHECKPOINT SAVED TOKENS FLAGS...

Writes the logits of the token ids in TOKENS (torch.save) to logits.pt in the same folder. What a machine without
CUDA and Transformer Engine needs is done here: the bridge to the CPU, no compilation of kernels, and for the format
torch the names of Megatron-LM's local layers, whose norms are modules of their own.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

TENSOR, PIPELINE = 2, 2
FLAGS = """
    --use-checkpoint-args --exit-on-missing-checkpoint --no-load-optim --no-load-rng --no-save-optim --no-save-rng
    --transformer-impl local --distributed-backend gloo --micro-batch-size 1 --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --save-interval 1 --no-bias-swiglu-fusion --no-rope-fusion --no-persist-layer-norm
"""


def run_rank(rank: int, port: int, load: Path, save: Path, tokens_file: Path, flags: list[str]) -> None:
    """One of the ranks, in a process that has imported Megatron-LM."""
    import torch
    from gpt_builders import gpt_builder
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.training import arguments, checkpointing, get_args, initialize
    from megatron.training.training import get_model
    from model_provider import model_provider

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(TENSOR * PIPELINE)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    torch.set_num_threads(1)
    sizes = ["--tensor-model-parallel-size", str(TENSOR), "--pipeline-model-parallel-size", str(PIPELINE)]
    sys.argv = ["megatron_lm", *FLAGS.split(), *sizes, "--load", str(load), "--save", str(save), *flags]
    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
    arguments.get_device_arch_version = lambda: 9
    initialize._compile_dependencies = lambda: None
    initialize.initialize_megatron()
    model = get_model(lambda *args, **kwargs: model_provider(gpt_builder, *args, **kwargs), wrap_with_ddp=False)
    for parameter in model[0].parameters():
        torch.nn.init.constant_(parameter, float("nan"))  # what isn't loaded shows
    for module in model[0].modules():
        if hasattr(module, "input_layernorm"):
            module._register_load_state_dict_pre_hook(_local_norms)
    checkpointing.load_checkpoint(model, None, None)

    tokens = torch.load(tokens_file)
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)

    def step(_: Any, part: Any) -> Any:
        logits = part(tokens, torch.arange(length)[None], mask)
        return logits, lambda output, non_loss_data: output

    with torch.no_grad():
        (local, *_) = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=None,
            model=[part.eval() for part in model],
            num_microbatches=1,
            seq_length=length,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        ) or [None]
        if parallel_state.is_pipeline_last_stage():
            logits = tensor_parallel.gather_from_tensor_model_parallel_region(local).float()
            if parallel_state.get_tensor_model_parallel_rank() == 0:
                torch.save(logits, tokens_file.with_name("logits.pt"))
    checkpointing.save_checkpoint(get_args().iteration or 1, model, None, None, 0)
    torch.distributed.barrier()


def _local_norms(state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the norms that Transformer Engine keeps inside its linear layers, as Megatron-LM's own mapping does."""
    names = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    }
    for fused, own in names.items():
        if prefix + fused in state:
            state[prefix + own] = state.pop(prefix + fused)


def main() -> int:
    """Import once, fork a process per rank."""
    load, save, tokens_file = map(Path, sys.argv[1:4])
    from pretrainkit.imports import heavy_imports

    with heavy_imports():
        from pretrainkit.megatron import cpu

        cpu.bridge()
        import gpt_builders  # noqa: F401  Megatron-LM's, imported before the fork
        import megatron.training  # noqa: F401
        import torch.multiprocessing

    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    context = torch.multiprocessing.get_context("fork")
    arguments = (port, load, save, tokens_file, sys.argv[4:])
    ranks = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(TENSOR * PIPELINE)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
