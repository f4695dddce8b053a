"""The loss of every token in a Hugging Face model, on CPU in fp32, with one layer in memory at a time.

It runs in a separate process (`python -m pretrainkit.release.hf_reference`, request on stdin, result on stdout), so
that all of its memory is freed at the end, and it shares neither random state nor threads with the training. The
computation is that of transformers; weights are read with the safetensors package, as transformers does.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pretrainkit import logs
from pretrainkit.checkpoint.formats import mxfp4
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import CheckpointError, PretrainkitError
from pretrainkit.imports import heavy_imports
from pretrainkit.models.flops import with_global_heads
from pretrainkit.models.multimodal import is_multimodal, text_tensors
from pretrainkit.models.registry import read_whole_config
from pretrainkit.signals import die_with_parent

PROCESS_BYTES = 1_500_000_000
"""Memory of Python, torch and transformers; assumed (0.7 GB were measured)."""
PROGRESS_INTERVAL_S = 30.0
_STACKED = {
    "experts.gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "experts.down_proj": (("down_proj",), ("w2",)),
}
"""Parameters of transformers 5 that hold all experts of a layer, and what is stored of each expert."""
_RENAMED = {
    "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
    "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}
"""Parameters of transformers 5's GraniteMoe, and what is stored."""
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

log = logs.get_logger(__name__)


@dataclass(frozen=True)
class Request:
    """A sequence, and the model that predicts it."""

    folder: str
    """Hugging Face folder."""
    tokens: list[int]
    """Input ids and one more, so that every input has a next token."""
    precision: str
    """Weights are rounded to this precision ('bf16' or 'fp32') and then used in fp32."""
    padding_rows: int
    """Zero rows of Megatron's output layer beyond the vocabulary; each adds a logit of 0."""


def needed_bytes(shape: ModelShape, num_tokens: int) -> int:
    """Peak memory of the process: its largest block of weights in fp32 and as stored, and the logits."""
    wide = with_global_heads(shape)
    attention = shape.hidden_size * wide.head_dim * 2 * (shape.num_attention_heads + shape.num_query_groups)
    experts = shape.num_experts * shape.expert_ffn_hidden_size or shape.ffn_hidden_size
    layer = attention + 3 * shape.hidden_size * (experts + shape.shared_expert_ffn_hidden_size)
    block = max(layer, shape.vocab_size * shape.hidden_size)
    return PROCESS_BYTES + block * 8 + num_tokens * shape.vocab_size * 3 * 4


class Process:
    """The process that computes a request while the training is set up."""

    def __init__(self, request: Request) -> None:
        self._started_s = time.monotonic()
        environment = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
        # torchrun gives each rank one thread, but the ranks hardly use the CPU while this process runs.
        threads = str(len(os.sched_getaffinity(0)))
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        assert self._process.stdin
        self._process.stdin.write(json.dumps(asdict(request)))
        self._process.stdin.close()

    def losses(self) -> list[float]:
        """Wait for the loss of the next token at every input, nats.

        Raises CheckpointError when the process failed, with its message, and MemoryError when the system killed it.
        """
        assert self._process.stdout
        output = self._process.stdout.read()
        code = self._process.wait()
        if code == -signal.SIGKILL:
            raise MemoryError("the process that ran the Hugging Face model was killed, as happens when memory is short")
        if code:
            raise CheckpointError(f"the Hugging Face model could not be run: {output.strip() or f'exit code {code}'}")
        log.info("initial loss check: the Hugging Face model took %.0f s", time.monotonic() - self._started_s)
        return [float(loss) for loss in json.loads(output)]


def token_losses(request: Request) -> list[float]:
    """The loss of the next token at every input, nats.

    Raises CheckpointError when the folder's tensors are not exactly those of the model that config.json describes.
    """
    import torch

    tokens = torch.tensor([request.tokens])
    rounded = torch.bfloat16 if request.precision == "bf16" else torch.float32
    with ExitStack() as stack, torch.inference_mode():
        model = _streaming_model(Path(request.folder), rounded, stack)
        # Llama 4 takes token ids to the device of the embedding, which has none between calls.
        embedded = model.get_input_embeddings()(tokens[:, :-1])
        logits = model(inputs_embeds=embedded, use_cache=False).logits[0].float()  # [S, V]
        total = torch.logsumexp(logits, -1)
        if request.padding_rows:
            total = torch.logaddexp(total, torch.tensor(math.log(request.padding_rows)))
        losses = total - logits.gather(1, tokens[0, 1:, None])[:, 0]
    return losses.tolist()


def _streaming_model(folder: Path, rounded: Any, stack: ExitStack) -> Any:
    """The model of a folder; a layer holds its weights, rounded and then in fp32, only while it runs."""
    with heavy_imports():
        import torch
        from accelerate import init_empty_weights
        from accelerate.hooks import attach_align_device_hook
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from pretrainkit.checkpoint.formats.hf import open_by_package
    from pretrainkit.checkpoint.formats.hf_files import readable_folder

    read, names = open_by_package(folder, stack)
    config = AutoConfig.from_pretrained(readable_folder(folder), local_files_only=True, trust_remote_code=False)
    stored_names = {name: name for name in names}
    if is_multimodal(read_whole_config(folder)):  # of which the text model runs alone
        config = config.get_text_config()
        stored_names = text_tensors(stored_names)[0]
        names = set(stored_names)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    aliases = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}
    stored = {name: _stored_parts(aliases.get(name, name), shape, names) for name, shape in shapes.items()}
    used = {part for parts in stored.values() for expert in parts for part in expert}
    missing = used - names
    extra = {name for name in names - used - shapes.keys() if not name.endswith("rotary_emb.inv_freq")}
    if missing or extra:
        raise CheckpointError(
            f"not the tensors of the model that config.json describes: missing {sorted(missing)[:8]}, "
            f"left over {sorted(extra)[:8]}",
            where=str(folder),
        )

    def load(name: str) -> Any:
        if stored[name] == [(name + mxfp4.BLOCKS, name + mxfp4.SCALES)]:
            packed = (read(stored_names[part]) for part in stored[name][0])
            return convert_moe_packed_tensors(*packed, dtype=torch.bfloat16).float()
        experts = [[read(stored_names[part]).to(rounded).float() for part in expert] for expert in stored[name]]
        first = experts[0][0]
        return first if first.shape == shapes[name] else torch.stack([torch.cat(parts) for parts in experts])

    # Buffers (a router's biases of experts) are few, and never rounded.
    for name, buffer in model.named_buffers():
        if name in shapes:
            buffer.copy_(read(stored_names[stored[name][0][0]]))
    weights = _Weights(load, len(shapes))
    attach_align_device_hook(
        model, "cpu", offload=True, weights_map=weights, preload_module_classes=model._no_split_modules
    )
    return model.eval()


def _stored_parts(name: str, shape: Sequence[int], names: Collection[str]) -> list[tuple[str, ...]]:
    """The stored tensors of a parameter: itself, or those of each expert, concatenated, which transformers 5 stacks.

    transformers 5 also calls Mixtral's `block_sparse_moe` in memory `mlp`, as other families do.
    """
    if name + mxfp4.BLOCKS in names:
        return [(name + mxfp4.BLOCKS, name + mxfp4.SCALES)]
    for part, stored in _RENAMED.items():
        if name.endswith(part) and name.replace(part, stored) in names:
            return [(name.replace(part, stored),)]
    layer, _, rest = name.partition(".mlp.")
    blocks = [f"{layer}.mlp", f"{layer}.block_sparse_moe"]
    for whole in (name, f"{blocks[1]}.{rest}"):
        if whole in names:
            return [(whole,)]
    for block in blocks:
        for parts in _STACKED.get(rest, ()):
            experts = [tuple(f"{block}.experts.{i}.{part}.weight" for part in parts) for i in range(shape[0])]
            if any(part in names for expert in experts for part in expert):
                return experts
    return [(name,)]


class _Weights:
    """The tensors by name that accelerate loads; logs the progress every PROGRESS_INTERVAL_S."""

    def __init__(self, read: Callable[[str], Any], total: int) -> None:
        self._read, self._done, self._total, self._logged_s = read, 0, total, time.monotonic()

    def __getitem__(self, name: str) -> Any:
        self._done += 1
        if time.monotonic() - self._logged_s > PROGRESS_INTERVAL_S:
            self._logged_s = time.monotonic()
            log.info("initial loss check: Hugging Face model, tensor %d of %d", self._done, self._total)
        return self._read(name)


def main() -> int:
    """Answer the request on stdin; an error message goes to stdout too, with exit code 1."""
    die_with_parent()
    logs.configure()
    result, sys.stdout = sys.stdout, sys.stderr  # keeps what libraries print out of the result
    try:
        losses = token_losses(Request(**json.load(sys.stdin)))
    except (PretrainkitError, OSError, KeyError, ValueError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=result)
        return 1
    json.dump(losses, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
