"""Uneven shards with several ranks that meet in a collective every step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
REPOSITORY = Path(__file__).parents[2]
RANK = """
import sys
import torch, torch.distributed as dist
from pretrainkit.data.shards.loader import make_loader
rank, world_size, folder, store, split = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
ranks = dict(rank=rank, world_size=world_size, split=split)
loader = make_loader(folder, sequence_length=32, batch_size=2, num_workers=2, **ranks)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
steps = tokens = 0
for batch in loader:
    total = batch["input_ids"].sum()
    dist.all_reduce(total)
    steps, tokens = steps + 1, tokens + batch["input_ids"].numel()
dist.barrier()
print(steps, tokens)
"""


def run_ranks(folder: Path, tmp_path: Path, world_size: int, split: str) -> list[tuple[int, str, str]]:
    words = [str(world_size), str(folder), str(tmp_path / "store"), split]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    ended = [process.communicate(timeout=120) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, ended, strict=True)]


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path, jsonl_file: Path) -> Path:
    """Three shards of 30, 9 and 1 documents."""
    folder = tmp_path_factory.mktemp("uneven")
    lines = jsonl_file.read_text().splitlines(keepends=True)
    for name, some in (("a", lines[:30]), ("b", lines[30:39]), ("c", lines[39:])):
        (folder / f"{name}.jsonl").write_text("".join(some))
    command = [sys.executable, "tools/make_shards.py", "--input_dir", folder, "--output_dir", folder / "out", "--all"]
    subprocess.run([*command, "--model_id", tokenizer_folder, "--verify_tokens", "off"], check=True, cwd=REPOSITORY)
    return folder / "out"


@pytest.mark.parametrize("split", ["tokens", "shards"])
def test_two_ranks_finish_together(uneven: Path, tmp_path: Path, split: str) -> None:
    ended = run_ranks(uneven, tmp_path, 2, split)
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert ended[0][1] == ended[1][1]
    assert int(ended[0][1].split()[0]) > 0
