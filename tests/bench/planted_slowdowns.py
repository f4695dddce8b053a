"""A small training loop in plain torch with one mistake in it, chosen by --plant: what diagnose_speed.py must find.

python tests/bench/planted_slowdowns.py --plant longest_padding [--device cuda] [--scale gpu]
"""

from __future__ import annotations

import argparse
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

PLANTS = {
    # name: where it shows
    "clean": "cpu gpu",
    "longest_padding": "cpu gpu",
    "slow_decode": "cpu gpu",
    "tokenizing": "cpu gpu",
    "one_thread": "cpu",
    "logging": "cpu gpu",
    "tiny_micro_batch": "cpu gpu",
    "slow_rank": "cpu",
    "anomaly_detection": "cpu gpu",
    "math_attention": "gpu",
    "no_tf32": "gpu",
    "launch_blocking": "gpu",
}
EXPECTED = {
    "longest_padding": "packing",
    "slow_decode": "workers",
    "tokenizing": "tokenizing",
    "one_thread": "threads",
    "logging": "logging",
    "tiny_micro_batch": "larger_micro_batch",
    "slow_rank": "slow_rank",
    "anomaly_detection": "anomaly_detection",
    "math_attention": "attention",
    "no_tf32": "tf32",
    "launch_blocking": "debug_variables",
}
"""Plant -> the cause that has to be ranked first."""
VOCABULARY = 512


class Shape:
    """Sizes of model and batches."""

    def __init__(self, scale: str, plant: str) -> None:
        gpu = scale == "gpu"
        self.hidden, self.heads, self.layers = (1024, 16, 6) if gpu else (96, 4, 1)
        self.length, self.batch = (1024, 16) if gpu else (64, 16)
        if plant == "launch_blocking":
            self.batch = 2  # short kernels
        if plant == "one_thread":
            self.hidden, self.heads, self.length = 256, 4, 128
        if plant == "tiny_micro_batch":
            self.batch = 1


class Rows(Dataset):
    """Rows of random ids, in the form that the plant makes slow."""

    def __init__(self, plant: str, shape: Shape, rank: int) -> None:
        self.plant, self.length, self.rank = plant, shape.length, rank
        generator = np.random.default_rng(0)
        self.ids = generator.integers(3, VOCABULARY, (256, shape.length))
        # Most documents are short, a few are long.
        skewed = np.clip(generator.lognormal(np.log(shape.length / 8), 0.9, 256), 4, shape.length).astype(int)
        self.lengths = skewed if plant == "longest_padding" else np.full(256, shape.length)
        self.packed = zlib.compress(self.ids[0].tobytes() * (600 if shape.length > 500 else 1000))
        # Long documents, of which a row is the beginning.
        repeated = max(1, 1024 // shape.length)
        self.texts = [" ".join(f"word{number}" for number in row) + " " for row in self.ids]
        self.texts = [text * repeated for text in self.texts]

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> Any:
        row = self.ids[index % 256][: self.lengths[index % 256]]
        if self.plant == "slow_decode":
            decode(self.packed)
        if self.plant == "tokenizing":
            row = np.asarray(tokenize(self.texts[index % 256]))[: self.length]
        return torch.from_numpy(row)


def decode(packed: bytes) -> int:
    """What a file of a shared disk and a slow archive format costs.

    It waits and computes, so that other processes help also where the model keeps every core busy.
    """
    time.sleep(0.001)
    return len(zlib.decompress(packed))


def tokenize(text: str) -> list[int]:
    """A tokenizer in pure Python."""
    ids = []
    for word in text.split():
        ids.append(3 + sum(map(ord, word)) % (VOCABULARY - 3))
    return ids


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pad to the longest row of the batch."""
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = (torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Layer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, shape: Shape, plant: str) -> None:
        super().__init__()
        self.heads, self.plant = shape.heads, plant
        self.norms = nn.ModuleList([nn.LayerNorm(shape.hidden) for _ in range(2)])
        self.qkv, self.out = nn.Linear(shape.hidden, 3 * shape.hidden), nn.Linear(shape.hidden, shape.hidden)
        self.up, self.down = nn.Linear(shape.hidden, 4 * shape.hidden), nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h] -> [b, s, h]"""
        b, s, h = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        if self.plant == "math_attention":
            from torch.nn.attention import SDPBackend, sdpa_kernel

            with sdpa_kernel(SDPBackend.MATH):
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """A decoder whose loss is that of the next token."""

    def __init__(self, shape: Shape, plant: str, rank: int) -> None:
        super().__init__()
        self.plant, self.rank = plant, rank
        self.embedding = nn.Embedding(VOCABULARY, shape.hidden)
        self.layers = nn.ModuleList([Layer(shape, plant) for _ in range(shape.layers)])
        self.head = nn.Linear(shape.hidden, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[b, s] ids -> loss. Padding is at the right, so a causal model needs no mask."""
        if self.plant == "slow_rank" and self.rank == 1:
            wait_for_a_disk()
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)


def wait_for_a_disk() -> None:
    """What makes one rank slow."""
    time.sleep(0.05)


def log_step(step: int, model: nn.Module, loss: torch.Tensor, file: Any) -> None:
    """Norms and histograms of all parameters, read one by one and flushed to disk."""
    record: dict[str, Any] = {"step": step, "loss": loss.item()}
    for name, parameter in model.named_parameters():
        record[f"norm/{name}"] = parameter.detach().norm().item()
        values = parameter.detach().flatten()[:20_000].float().cpu().numpy()
        record[f"histogram/{name}"] = np.histogram(values, 64)[0].tolist()
    file.write(json.dumps(record) + "\n")
    file.flush()


def main() -> None:
    """Train for ever."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plant", choices=PLANTS, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scale", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--log", type=Path, default=Path("planted_log.jsonl"))
    arguments = parser.parse_args()
    plant, shape = arguments.plant, Shape(arguments.scale, arguments.plant)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(arguments.device)
    if plant == "launch_blocking":
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    if plant == "one_thread":
        torch.set_num_threads(1)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest" if plant == "no_tf32" else "high")
    if plant == "anomaly_detection":
        torch.autograd.set_detect_anomaly(True)
    torch.manual_seed(0)
    model: nn.Module = Model(shape, plant, rank).to(device)
    if world_size > 1:
        torch.distributed.init_process_group("gloo" if device.type == "cpu" else "nccl")
        model = nn.parallel.DistributedDataParallel(model)
    accumulate = 16 if plant == "tiny_micro_batch" else 1
    loader = DataLoader(
        Rows(plant, shape, rank),
        batch_size=shape.batch,
        shuffle=True,
        num_workers=0,
        collate_fn=collate,
        pin_memory=device.type == "cuda",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with arguments.log.open("w") as file:
        for number, batch in enumerate(loader):
            moved = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda" and plant != "no_tf32"):
                loss = model(**moved) / accumulate
            loss.backward()
            if (number + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                if plant == "logging":
                    log_step(number, model, loss, file)


if __name__ == "__main__":
    main()
