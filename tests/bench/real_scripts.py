"""Three training scripts as people have them, each with a mistake, and with what diagnose_speed.py advises applied.

    python tests/bench/real_scripts.py padding [--applied]     # transformers.Trainer, skewed lengths, padded
    python tests/bench/real_scripts.py decoding [--applied]    # a vision loop that decodes its images itself
    python tests/bench/real_scripts.py ranks [--applied]       # DDP by mp.spawn, one rank's files on a slow disk

With --seconds it trains for so long and prints the useful work a second: tokens without padding, or samples.
--device cuda trains larger models, the first two scripts alone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 2000
WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Size:
    """Of the padded rows and the model that they are for."""

    longest: int
    typical: int
    batch: int
    hidden: int
    layers: int


SIZES = {"cpu": Size(512, 40, 8, 128, 2), "cuda": Size(1024, 80, 32, 2048, 8)}


class Meter:
    """Useful work a second, without the first steps; ends the program after its time."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self.clock, self.steps, self.work, self.begin_s = seconds, clock, 0, 0.0, 0.0

    def step(self, work: float) -> bool:
        """Count a step; False when the time is over."""
        self.steps += 1
        if self.steps <= WARM_UP_STEPS:
            self.begin_s = self.clock()
            return True
        self.work += work
        elapsed_s = self.clock() - self.begin_s
        if self.seconds and elapsed_s > self.seconds:
            print(f"work per second: {self.work / elapsed_s:.6g}", flush=True)
            return False
        return True


class Texts(Dataset):
    """Rows of token ids; most are short, a few are long. With `packed` the same text in full rows."""

    def __init__(self, packed: bool, size: Size) -> None:
        lengths = np.random.default_rng(0).lognormal(np.log(size.typical), 1.0, 20_000)
        self.lengths = np.clip(lengths, 8, size.longest).astype(int)
        self.packed, self.longest = packed, size.longest

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = self.longest if self.packed else self.lengths[index]
        return {"input_ids": torch.from_numpy(np.random.default_rng(index).integers(3, VOCABULARY, length))}


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad to the longest row of the batch."""
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    mask = (torch.arange(ids.shape[1]) < torch.tensor([len(row["input_ids"]) for row in rows])[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def padding(applied: bool, meter: Meter, device: str) -> None:
    """transformers.Trainer on a tiny Llama; packed, a step has as many real tokens in fewer rows."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    size, tokens = SIZES[device], [0]
    rows = Texts(applied, size)
    batch = max(1, round(float(rows.lengths.mean()) * size.batch / size.longest)) if applied else size.batch

    def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        tokens[0] = sum(len(sample["input_ids"]) for sample in samples)
        return pad(samples)

    class Count(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not meter.step(tokens[0])

    config = LlamaConfig(
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 43 // 16,
        num_hidden_layers=size.layers,
        num_attention_heads=max(4, size.hidden // 128),
        vocab_size=VOCABULARY,
        max_position_embeddings=size.longest,
    )
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=batch,
        max_steps=100_000,
        save_strategy="no",
        report_to=[],
        use_cpu=device == "cpu",
        bf16=device == "cuda",
    )
    with torch.device(device):
        model = LlamaForCausalLM(config)
    Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=collate,
        callbacks=[Count()] if meter.seconds else [],
    ).train()


class Images(Dataset):
    """Compressed pictures; reading one waits for a disk of the network, too."""

    def __init__(self, size: int = 96, wait_s: float = 0.004) -> None:
        self.size, self.wait_s = size, wait_s
        picture = np.random.default_rng(0).integers(0, 255, (4 * size, 4 * size, 3), np.uint8)
        self.file = zlib.compress(picture.tobytes(), 1)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.wait_s)
        pixels = np.frombuffer(zlib.decompress(self.file), np.uint8).reshape(4 * self.size, 4 * self.size, 3)
        left = index % (3 * self.size)
        crop = pixels[left : left + self.size, left : left + self.size] / np.float32(255)
        return torch.from_numpy(crop.transpose(2, 0, 1).copy()), index % 10


def decoding(applied: bool, meter: Meter, workers: int, device: str) -> None:
    """A plain loop over pictures."""
    width = 256 if device == "cuda" else 16
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, width, 3, 2),
        torch.nn.ReLU(),
        torch.nn.Conv2d(width, 2 * width, 3, 2),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(2 * width, 10),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Images(), 16, shuffle=True, num_workers=workers if applied else 0)
    for pictures, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(pictures.to(device)), labels.to(device)).backward()
        optimizer.step()
        if not meter.step(len(labels)):
            return


class Vectors(Dataset):
    """Samples of one rank; those on a slow disk wait for each of them."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.wait_s)
        return torch.full((256,), index % 7, dtype=torch.float32)


def train_rank(rank: int, applied: bool, seconds: float, address: str) -> None:
    """One rank of two."""
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    torch.set_num_threads(1)
    layers = [torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    meter = Meter(seconds)
    for batch in DataLoader(Vectors(0.002 if rank == 1 and not applied else 0.0), 32):
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        is_going_on = torch.tensor(float(rank or meter.step(2 * len(batch))))
        if seconds:
            torch.distributed.broadcast(is_going_on, 0)
            if not is_going_on:
                return


def main() -> None:
    """Train until the time is over, or for ever."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", choices=["padding", "decoding", "ranks"])
    parser.add_argument("--applied", action="store_true", help="with what the diagnosis advises")
    parser.add_argument("--workers", type=int, default=2, help="of the loader, where they are advised")
    parser.add_argument("--cpu_time", action="store_true", help="of padding: seconds are those of the process")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--device", choices=SIZES, default="cpu")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.script == "padding":
        clock = time.process_time if arguments.cpu_time else time.perf_counter
        padding(arguments.applied, Meter(arguments.seconds, clock), arguments.device)
    elif arguments.script == "decoding":
        decoding(arguments.applied, Meter(arguments.seconds), arguments.workers, arguments.device)
    else:
        with tempfile.TemporaryDirectory() as folder:
            address = f"file://{folder}/meeting"
            torch.multiprocessing.spawn(train_rank, (arguments.applied, arguments.seconds, address), 2)


if __name__ == "__main__":
    main()
