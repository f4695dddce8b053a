"""Token shards and packed datasets side by side with the notes' own ways, in one run, on the same cores and text.

    python tests/bench/bench_shards.py [--folder build/bench] [--megabytes 60 300] [--baseline_megabytes 6] [--rounds 3]

Note 1's loop: a call of the tokenizer, a json.dumps and a TarWriter.write for every line. Note 2's way: datasets.map
with the tokenizer (batches of 1000), group_texts (batches of 1000), save_to_disk. Their rate doesn't depend on how much
text there is, so they get less of it; what they take for as much as ours is their start, and the text at that rate.
Ours is timed as a whole command. Each is run in turn, round after round; medians, and the range of the ratios.
Prints Markdown. Text and vocabulary come out of installed packages (see corpus.py and vocabularies.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import bench_conversion
import bench_preprocess
import corpus
import vocabularies

ROOT = Path(__file__).parents[2]
SEQUENCE_LENGTH = 4096
LOOP = """
import json, sys, time
import webdataset
from transformers import AutoTokenizer
source, target, model = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(model)
began, began_cpu = time.monotonic(), time.process_time()
with open(source, encoding="utf-8") as lines, webdataset.TarWriter(target) as writer:
    for number, line in enumerate(lines):
        line = line.rstrip("\\n")
        if line.strip():
            ids = tokenizer.encode(line, add_special_tokens=True)
            sample = {"__key__": f"sample_0_{number:08d}", "token_ids.json": json.dumps(ids).encode(), "text.txt": line}
            writer.write(sample)
print(time.monotonic() - began, time.process_time() - began_cpu)
"""
MAP = """
import sys, time
from datasets import load_dataset
from transformers import AutoTokenizer
source, target, model, cores, length = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
tokenizer = AutoTokenizer.from_pretrained(model)
began = time.monotonic()
data = load_dataset("json", data_files=source, split="train", cache_dir=target + ".cache")
data = data.remove_columns([name for name in data.column_names if name != "text"])
data = data.filter(lambda row: bool(row["text"]))
data = data.map(lambda rows: {"input_ids": [ids + [tokenizer.eos_token_id] for ids in tokenizer(rows["text"],
    add_special_tokens=False)["input_ids"]]}, batched=True, batch_size=1000, num_proc=cores, remove_columns=["text"])
def group(rows):
    stream = sum(rows["input_ids"], [])
    total = len(stream) // length * length
    return {"input_ids": [stream[i:i + length] for i in range(0, total, length)]}
data = data.map(group, batched=True, batch_size=1000, num_proc=cores)
data.save_to_disk(target)
print(time.monotonic() - began)
"""
LOAD = """
import sys, time, os, resource
from pretrainkit.data.packed.format import PackedDataset
import pyarrow
before = int(open("/proc/self/statm").read().split()[1]) - int(open("/proc/self/statm").read().split()[2])
began = time.monotonic()
data = PackedDataset(sys.argv[1])
seconds = time.monotonic() - began
total = sum(int(data.input_ids(i).sum()) for i in range(len(data)))
after = int(open("/proc/self/statm").read().split()[1]) - int(open("/proc/self/statm").read().split()[2])
print(seconds, (after - before) * os.sysconf("SC_PAGE_SIZE"), len(data))
"""
READ = """
import sys, time, torch
from pretrainkit.data.shards.loader import make_loader
workers = int(sys.argv[2])
loader = make_loader(sys.argv[1], sequence_length=4096, batch_size=8, num_workers=workers, rank=0, world_size=1)
began, tokens = time.monotonic(), 0
for batch in loader:
    tokens += batch["input_ids"].numel()
print(tokens / (time.monotonic() - began))
"""
RESUME = """
import sys, time
from pretrainkit.data.shards.loader import make_loader
settings = dict(sequence_length=64, batch_size=8, num_workers=0, rank=0, world_size=1)
loader = make_loader(sys.argv[1], **settings)
loader.next_batch = len(loader.batches) * 2 // 3
state = loader.state_dict()
began = time.monotonic()
again = make_loader(sys.argv[1], **settings)
again.load_state_dict(state)
next(iter(again))
print(time.monotonic() - began, again.batches._set.num_samples)
"""


@dataclass
class Run:
    """One run of one command."""

    wall_s: float
    """The whole command."""
    cpu_s: float
    peak_mb: float
    work_s: float
    """What the command says of itself, without imports and loading the tokenizer."""
    output: str = ""


def run(words: list[object], cores: int, work_s: float | None = None) -> Run:
    """Run a command on the first `cores` cores, alone on a clean start."""
    os.sync()
    bench_conversion.make_memory_ready()
    before, began, peak = os.times(), time.monotonic(), 0
    process = subprocess.Popen(
        [str(word) for word in words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false" if cores == 1 else "true", "HF_HUB_OFFLINE": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:cores])),
    )
    while process.poll() is None:
        peak = max(peak, bench_preprocess._tree_bytes(process.pid))
        time.sleep(0.1)  # looking costs the kernel a walk through all pages
    output = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise SystemExit(f"failed: {words}")
    after = os.times()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    wall_s = time.monotonic() - began
    return Run(wall_s, cpu_s, peak / 1e6, work_s or wall_s, output)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/bench")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[60, 300], help="that ours get")
    parser.add_argument("--baseline_megabytes", type=int, default=6, help="that the notes' ways get")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["shards", "packed", "reading"], nargs="+", help="some of the parts")
    parser.add_argument("--samples", type=int, default=1_000_000, help="of the resume trial")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    model = vocabularies.llama_3_folder(folder / "Llama-3")
    sources = {}
    for megabytes in (arguments.baseline_megabytes, *arguments.megabytes):
        jsonl = folder / f"mix{megabytes}.jsonl"
        corpus.write_corpus(jsonl, megabytes * 1_000_000)
        lines = jsonl.with_suffix(".txt")
        if not lines.exists():
            records = (json.loads(line)["text"] for line in jsonl.open(encoding="utf-8"))
            lines.write_text("".join(text.replace("\n", " ").replace("\r", " ") + "\n" for text in records))
        sources[megabytes] = jsonl, lines
    processor = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    print(f"{processor.partition(': ')[2]}. Llama 3's vocabulary, five languages.\n")
    parts = arguments.only or ["shards", "packed", "reading"]
    if "shards" in parts:
        _shards(arguments, folder, model, sources)
    if "packed" in parts:
        _packed(arguments, folder, model, sources)
    if "reading" in parts:
        if missing := [name for name in ("shards", "packed") if not (folder / name).exists()]:
            raise SystemExit(
                f"there is nothing to read: measure {' and '.join(missing)} first, by --only or without it"
            )
        _loading(folder)
        _resume(arguments, folder, model)
    return 0


def _shards(arguments: argparse.Namespace, folder: Path, model: Path, sources: dict[int, tuple[Path, Path]]) -> None:
    small = sources[arguments.baseline_megabytes][1]

    def theirs() -> Run:
        done = run([sys.executable, "-c", LOOP, small, folder / "note1.tar", model], 1)
        done.work_s = float(done.output.split()[0])
        return done

    def ours(lines: Path, *flags: str) -> Run:
        shutil.rmtree(folder / "shards", ignore_errors=True)
        words = [sys.executable, "tools/make_shards.py", "--input_dir", lines, "--model_id", model, "--quiet"]
        words += ["--output_dir", folder / "shards", "--shard_id", 0, "--workers", 1, "--json", *flags]
        done = run(words, 1)
        done.work_s = json.loads(done.output)[0]["elapsed_s"]
        return done

    forms = [("make_shards.py, .npy without text", arguments.megabytes[-1], ("--ids_format", "npy", "--no-text"))]
    forms = [*forms, *(("make_shards.py, as the note has them", megabytes, ()) for megabytes in arguments.megabytes)]
    candidates = [
        (f"{name}, {megabytes} MB", sources[megabytes][1], lambda m=megabytes, f=flags: ours(sources[m][1], *f))
        for name, megabytes, flags in forms
    ]
    _compare("note 1's loop", small, theirs, candidates, rounds=arguments.rounds, cores=1)


def _packed(arguments: argparse.Namespace, folder: Path, model: Path, sources: dict[int, tuple[Path, Path]]) -> None:
    small = sources[arguments.baseline_megabytes][0]

    def theirs() -> Run:
        for leftover in ("note2", "note2.cache"):
            shutil.rmtree(folder / leftover, ignore_errors=True)
        done = run([sys.executable, "-c", MAP, small, folder / "note2", model, 2, SEQUENCE_LENGTH], 2)
        done.work_s = float(done.output.split()[-1])
        return done

    def ours(jsonl: Path) -> Run:
        shutil.rmtree(folder / "packed", ignore_errors=True)
        words = [sys.executable, "tools/pack_dataset.py", "--input", jsonl, "--tokenizer_model", model, "--quiet"]
        words += ["--output_dir", folder / "packed", "--sequence_length", SEQUENCE_LENGTH, "--num_proc", 2, "--json"]
        done = run(words, 2)
        done.work_s = json.loads(done.output)["elapsed_s"]
        return done

    candidates = [
        (f"pack_dataset.py, {megabytes} MB", sources[megabytes][0], lambda m=megabytes: ours(sources[m][0]))
        for megabytes in arguments.megabytes
    ]
    _compare("note 2's way", small, theirs, candidates, rounds=arguments.rounds, cores=2)


def _compare(
    name: str,
    small: Path,
    theirs: Callable[[], Run],
    candidates: list[tuple[str, Path, Callable[[], Run]]],
    *,
    rounds: int,
    cores: int,
) -> None:
    """Run theirs and ours in turn; print a table."""
    base: list[Run] = []
    found: list[list[Run]] = [[] for _ in candidates]
    for _ in range(rounds):
        base.append(theirs())
        for runs, (_, _, run_ours) in zip(found, candidates, strict=True):
            runs.append(run_ours())
    size = small.stat().st_size / 1e6
    head = (
        "whole command, s",
        "work, s",
        "MB/s of the work",
        "peak MB",
        "the note's way on as much, s",
        "ratio of whole",
    )
    print(f"| on {cores} core{'s' * (cores > 1)} | {' | '.join(head)} |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    median = statistics.median
    wall_s, work_s, peak_mb = (median(getattr(one, field) for one in base) for field in ("wall_s", "work_s", "peak_mb"))
    print(f"| {name}, {size:.0f} MB | {wall_s:.1f} | {work_s:.1f} | {size / work_s:.2f} | {peak_mb:.0f} | | |")
    for runs, (title, source, _) in zip(found, candidates, strict=True):
        ours_size = source.stat().st_size / 1e6
        theirs_s = [one.wall_s - one.work_s + one.work_s * ours_size / size for one in base]
        ratios = sorted(a / b.wall_s for a, b in zip(theirs_s, runs, strict=True))
        wall_s, work_s, peak = (
            median(getattr(one, field) for one in runs) for field in ("wall_s", "work_s", "peak_mb")
        )
        print(
            f"| {title} | {wall_s:.1f} | {work_s:.1f} | {ours_size / work_s:.1f} | {peak:.0f} | {median(theirs_s):.0f}"
            f" | {median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f}) |"
        )
    print(flush=True)


def _loading(folder: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", LOAD, str(folder / "packed")], stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    found = [process.communicate()[0].split() for process in processes]
    slowest = max(float(seconds) for seconds, _, _ in found)
    private = max(int(num_bytes) for _, num_bytes, _ in found)
    size = sum(path.stat().st_size for path in (folder / "packed").glob("*.arrow"))
    print(f"8 processes load {size / 1e6:.0f} MB at once: slowest {slowest:.3f} s;", end=" ")
    print(f"after reading all of it, private memory grew by at most {private / 1e6:.1f} MB each")
    for workers in (0, 2):
        rate = float(run([sys.executable, "-c", READ, folder / "shards", workers], 2).output)
        print(f"shard loader, {workers} workers: {rate / 1e6:.2f} M tokens/s")


def _resume(arguments: argparse.Namespace, folder: Path, model: Path) -> None:
    lines = folder / "short.txt"
    lines.write_text("".join(f"sample {number} of many\n" for number in range(arguments.samples)))
    shutil.rmtree(folder / "short", ignore_errors=True)
    words = [sys.executable, "tools/make_shards.py", "--input_dir", lines, "--model_id", model, "--num_shards", 8]
    run([*words, "--output_dir", folder / "short", "--all", "--ids_format", "npy", "--no-text", "--quiet"], 2)
    seconds, samples = run([sys.executable, "-c", RESUME, folder / "short"], 2).output.split()
    print(f"resume in the middle of {samples} samples to the first batch: {float(seconds):.2f} s")


if __name__ == "__main__":
    sys.exit(main())
