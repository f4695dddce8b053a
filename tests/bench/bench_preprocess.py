"""Preprocessing side by side, in one run, on the same cores and text: the way Megatron-LM does it, and ours.

    python tests/bench/bench_preprocess.py [--folder build/bench] [--rounds 5] [--quick]

Commands alternate, so that a busy machine is as busy for both. Each is timed as a whole, from its start to its
exit code. Prints a Markdown table of medians (smallest to largest), and writes all measurements as JSON.
Text and vocabularies come out of installed packages (see corpus.py and vocabularies.py for what is needed).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import corpus
import vocabularies

ROOT = Path(__file__).parents[2]
OURS = ROOT / "tools/preprocess_data.py"
STRIPPED = Path(__file__).with_name("without_safety.py")
VOCABULARIES = {"Llama 3": vocabularies.llama_3_folder, "Qwen": vocabularies.qwen_folder}


@dataclass
class Measurement:
    """One run of one command."""

    what: str
    vocabulary: str
    input: str
    cores: int
    wall_s: float
    cpu_s: float
    peak_mb: float
    """Of all its processes together, resident, 10^6 bytes."""
    digest: str
    work_s: float = 0.0
    """Without imports, where the command tells."""


def measure(what: str, vocabulary: str, source: Path, cores: int, command: list[object], prefix: Path) -> Measurement:
    """Run a command on the first `cores` cores."""
    for old in prefix.parent.glob(f"{prefix.name}*"):
        old.unlink()
    peak = [0]
    before = os.times()
    began = time.monotonic()
    process = subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:cores])),
    )

    def watch() -> None:
        while process.poll() is None:
            peak[0] = max(peak[0], _tree_bytes(process.pid))
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, errors = process.communicate()
    wall_s = time.monotonic() - began
    watcher.join()
    after = os.times()
    if process.returncode:
        raise SystemExit(f"{what} failed:\n{errors.decode()}")
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    digest = hashlib.sha256()
    for kind in ("bin", "idx"):
        digest.update(Path(f"{prefix}_text_document.{kind}").read_bytes())
    work_s = json.loads(output)["work_s"] if output.startswith(b"{") else 0.0
    return Measurement(what, vocabulary, source.name, cores, wall_s, cpu_s, peak[0] / 1e6, digest.hexdigest(), work_s)


def _tree_bytes(root: int) -> int:
    total, queue = 0, [root]
    while queue:
        process = queue.pop()
        try:
            total += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            queue += map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
        except (OSError, IndexError):
            continue
    return total


def ours(
    folder: Path, tokenizer: Path, name: str, source: Path, cores: int, what: str = "ours", script: Path = OURS
) -> Measurement:
    """Our command."""
    command: list[object] = [sys.executable, script, "--input", source, "--tokenizer-model", tokenizer]
    command += ["--output-prefix", folder / "ours", "--append-eod", "--workers", cores, "--quiet"]
    command += ["--special-tokens-in-text", "encode"]  # as Megatron does
    return measure(what, name, source, cores, command, folder / "ours")


def theirs(folder: Path, tokenizer: Path, name: str, source: Path, cores: int, direct: bool = False) -> Measurement:
    """Megatron's way."""
    script = Path(__file__).with_name("megatron_way.py")
    command: list[object] = [sys.executable, script, source, folder / "theirs", tokenizer, cores]
    command += ["direct"] * direct
    return measure("Megatron's way" + ", ids directly" * direct, name, source, cores, command, folder / "theirs")


def verify_seconds(folder: Path) -> float:
    """One verification of our last output, as a whole command."""
    began = time.monotonic()
    command = [sys.executable, ROOT / "tools/inspect_data.py", "verify", folder / "ours_text_document"]
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/bench")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each of our commands; Megatron's way: a third")
    parser.add_argument("--quick", action="store_true", help="Llama 3 and 30 MB only")
    parser.add_argument("--long", action="store_true", help="Megatron's way on 300 MB too, on 2 cores: some minutes")
    parser.add_argument("--safety", action="store_true", help="only ours, to see what safety costs")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    small, large = folder / "mix30.jsonl", folder / "mix300.jsonl"
    distinct = corpus.write_corpus(small, 30_000_000)
    corpus.write_corpus(large, 300_000_000)
    packed = folder / "mix300.jsonl.gz"
    if not packed.exists():
        packed.write_bytes(gzip.compress(large.read_bytes(), 6))
    found: list[Measurement] = []
    verifications: list[float] = []
    slow_rounds = max(1, arguments.rounds // 3)
    for name, make in list(VOCABULARIES.items())[: 1 if arguments.quick or arguments.safety else None]:
        tokenizer = make(folder / name.replace(" ", "-"))
        for cores in (1, 2):
            for number in range(arguments.rounds):
                found.append(ours(folder, tokenizer, name, small, cores))
                if number < slow_rounds and not arguments.safety:
                    found += [theirs(folder, tokenizer, name, small, cores, direct) for direct in (False, True)]
                if arguments.quick:
                    continue
                found.append(ours(folder, tokenizer, name, large, cores))
                verifications.append(verify_seconds(folder))
                if name == "Llama 3":
                    found.append(ours(folder, tokenizer, name, packed, cores, "ours, gz"))
                    found.append(ours(folder, tokenizer, name, large, cores, "ours, not safe to kill", STRIPPED))
            print(f"{name}, {cores} cores: measured", file=sys.stderr)
    if arguments.long:
        found.append(theirs(folder, folder / "Llama-3", "Llama 3", large, 2))
    (folder / "preprocess.json").write_text(json.dumps([asdict(one) for one in found], indent=1))
    print(report(found, verifications, distinct, folder))
    return 0


def report(found: list[Measurement], verifications: list[float], distinct: dict[str, int], folder: Path) -> str:
    """Markdown."""
    lines = [
        f"{_processor()}, Python {platform.python_version()}; tokenizers {version('tokenizers')},"
        f" fastokens {version('fastokens')}, transformers {version('transformers')},"
        f" megatron-core {version('megatron-core')}.",
        "Distinct text, MB: " + ", ".join(f"{language} {size / 1e6:.1f}" for language, size in distinct.items()) + ".",
        "",
        "| vocabulary | input | cores | what | runs | seconds, whole command | CPU s | MB/s | peak MB | ratio |",
        "|---|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    keys = dict.fromkeys((one.vocabulary, one.input, one.cores, one.what) for one in found)
    medians = {}
    for key in keys:
        runs = [one for one in found if (one.vocabulary, one.input, one.cores, one.what) == key]
        walls = sorted(one.wall_s for one in runs)
        medians[key] = statistics.median(walls)
        megabytes = (folder / key[1].removesuffix(".gz")).stat().st_size / 1e6
        base, is_estimate = _base(found, folder, key)
        lines.append(
            f"| {key[0]} | {key[1]} | {key[2]} | {key[3]} | {len(runs)} |"
            f" {medians[key]:.2f} ({walls[0]:.2f} to {walls[-1]:.2f}) |"
            f" {statistics.median(one.cpu_s for one in runs):.1f} | {megabytes / medians[key]:.1f} |"
            f" {max(one.peak_mb for one in runs):.0f} |"
            + (f" {base / medians[key]:.1f}{' (estimate)' * is_estimate} |" if base else " |")
        )
    digests = {}
    for one in found:
        digests.setdefault((one.vocabulary, one.input.removesuffix(".gz")), set()).add(one.digest)
    equal = all(len(values) == 1 for values in digests.values())
    lines += ["", f"Same bytes from every command and number of cores: {'yes' if equal else 'NO'}."]
    lines += _slopes(found, folder)
    if verifications:
        lines.append(f"inspect_data.py verify of the 300 MB output: {statistics.median(verifications):.2f} s.")
    return "\n".join(lines)


def _median(found: list[Measurement], key: tuple[str, str, int, str]) -> float | None:
    walls = [one.wall_s for one in found if (one.vocabulary, one.input, one.cores, one.what) == key]
    return statistics.median(walls) if walls else None


def _base(found: list[Measurement], folder: Path, key: tuple[str, str, int, str]) -> tuple[float | None, bool]:
    """Seconds of Megatron's way on the same cores and text; where only 30 MB were measured, its work times the size."""
    measured = _median(found, (key[0], key[1].removesuffix(".gz"), key[2], "Megatron's way"))
    if measured:
        return measured, False
    small = [one for one in found if one.what == "Megatron's way" and (one.vocabulary, one.cores) == (key[0], key[2])]
    if not small:
        return None, False
    factor = (folder / key[1].removesuffix(".gz")).stat().st_size / (folder / small[0].input).stat().st_size
    return statistics.median(one.wall_s + one.work_s * (factor - 1) for one in small), True


def _slopes(found: list[Measurement], folder: Path) -> list[str]:
    """Rates without the start of the commands: what 270 MB more take."""
    more = ((folder / "mix300.jsonl").stat().st_size - (folder / "mix30.jsonl").stat().st_size) / 1e6
    lines = []
    for vocabulary in dict.fromkeys(one.vocabulary for one in found):
        for what in ("Megatron's way", "ours"):
            for cores in (1, 2):
                short = _median(found, (vocabulary, "mix30.jsonl", cores, what))
                long = _median(found, (vocabulary, "mix300.jsonl", cores, what))
                if short and long:
                    rate = more / (long - short)
                    lines.append(f"{vocabulary}, {what}, {cores} cores, from 30 to 300 MB: {rate:.1f} MB/s.")
    return lines


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':')[1].strip()}, {os.cpu_count()} cores"
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
