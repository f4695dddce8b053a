"""Preprocessing side by side, on the same cores and text: the way Megatron-LM does it, and ours.

    python tests/bench/bench_preprocess.py                                  # all of it: over an hour
    python tests/bench/bench_preprocess.py --vocabularies llama-3 --inputs mix300 --cores 1 --rounds 1
    python tests/bench/bench_preprocess.py --report                         # the table of all that was measured

Commands alternate within a round, so that a busy machine is as busy for both. Each is timed as a whole, from its
start to its exit code, on the first cores of the machine. Every measurement is appended to results.jsonl in
--folder at once, so rounds can be run in pieces; the table is made from all of them. Text and vocabularies come
out of installed packages (see corpus.py and vocabularies.py for what is needed).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import corpus
import preprocess_report
import vocabularies

ROOT = Path(__file__).parents[2]
OURS = ROOT / "tools/preprocess_data.py"
STRIPPED = Path(__file__).with_name("without_safety.py")
VOCABULARIES = {"llama-3": vocabularies.llama_3_folder, "qwen": vocabularies.qwen_folder}
INPUTS = {"mix30": 30_000_000, "mix300": 300_000_000, "mix1200": 1_200_000_000}
USUAL_INPUTS = ["mix30", "mix300"]


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
    """Of all its processes together, resident, 10^6 bytes; pages that they share count once each."""
    others_cpu_s: float
    """CPU time that the machine spent on anything else meanwhile."""
    digest: str
    megabytes: float
    """Of text, uncompressed."""


class Bench:
    """Commands on one text with one vocabulary."""

    def __init__(self, folder: Path, vocabulary: str, source: Path, cores: int) -> None:
        self.folder, self.vocabulary, self.source, self.cores = folder, vocabulary, source, cores
        self.tokenizer = VOCABULARIES[vocabulary](folder / vocabulary)

    def ours(self, what: str = "ours", script: Path = OURS, source: Path | None = None) -> None:
        """Our command, or it without its safety."""
        command: list[object] = [sys.executable, script, "--input", source or self.source]
        command += ["--tokenizer-model", self.tokenizer, "--output-prefix", self.folder / "ours", "--append-eod"]
        command += ["--workers", self.cores, "--quiet", "--special-tokens-in-text", "encode"]  # as Megatron does
        self._measure(what, command, self.folder / "ours")

    def theirs(self, what: str = "Megatron's way") -> None:
        """Megatron's way."""
        script = Path(__file__).with_name("megatron_way.py")
        command: list[object] = [sys.executable, script, self.source, self.folder / "theirs", self.tokenizer]
        command += [self.cores, *(["direct"] if "directly" in what else [])]
        self._measure(what, command, self.folder / "theirs")

    def verify(self) -> None:
        """inspect_data.py verify of our last output."""
        command = [sys.executable, ROOT / "tools/inspect_data.py", "verify", self.folder / "ours_text_document"]
        self._measure("verify", command, self.folder / "ours", keep=True)

    def at_once(self) -> None:
        """As many runs on one core each as there are cores, at once: what the machine itself gives for more cores."""
        commands = []
        for core in range(self.cores):
            command: list[object] = ["taskset", "-c", sorted(os.sched_getaffinity(0))[core], sys.executable, OURS]
            command += ["--input", self.source, "--tokenizer-model", self.tokenizer, "--append-eod", "--workers", 1]
            command += ["--output-prefix", self.folder / f"ours-{core}", "--quiet", "--overwrite", "--no-resume"]
            commands.append(" ".join(map(str, command)))
        script = " & ".join([*commands, "wait"])
        self._measure("ours, a run a core", ["bash", "-c", script], self.folder / "ours-0", keep=True)

    def _measure(self, what: str, command: list[object], prefix: Path, *, keep: bool = False) -> None:
        """Run a command on the first `cores` cores, and write down what it took."""
        if not keep:
            for old in prefix.parent.glob(f"{prefix.name}_*"):
                old.unlink()
        os.sync()  # what an earlier command left to write is not this one's
        peak = [0]
        before, busy_before = os.times(), _busy_s()
        began = time.monotonic()
        process = subprocess.Popen(
            [str(word) for word in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: self.cores])),
        )

        def watch() -> None:
            while process.poll() is None:
                peak[0] = max(peak[0], _tree_bytes(process.pid))
                time.sleep(0.5)  # looking costs the kernel a walk through all pages

        watcher = threading.Thread(target=watch)
        watcher.start()
        _, errors = process.communicate()
        wall_s = time.monotonic() - began
        watcher.join()
        after, busy_after = os.times(), _busy_s()
        if process.returncode:
            raise SystemExit(f"{what} failed:\n{errors.decode()}")
        cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
        watching_s = after.user + after.system - before.user - before.system
        digest = hashlib.sha256()
        for kind in ("bin", "idx"):
            digest.update(Path(f"{prefix}_text_document.{kind}").read_bytes())
        measurement = Measurement(
            what,
            self.vocabulary,
            self.source.stem,
            self.cores,
            round(wall_s, 3),
            round(cpu_s, 2),
            round(peak[0] / 1e6, 1),
            round(max(0.0, busy_after - busy_before - cpu_s - watching_s), 2),
            digest.hexdigest(),
            self.source.stat().st_size / 1e6,
        )
        with (self.folder / "results.jsonl").open("a") as results:
            results.write(json.dumps(asdict(measurement)) + "\n")
        shown = f"{what}, {self.vocabulary}, {self.source.stem}, {self.cores} cores: {wall_s:.2f} s"
        print(f"{shown}, {cpu_s:.1f} CPU s, others {measurement.others_cpu_s:.1f} CPU s", file=sys.stderr)


def _busy_s() -> float:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq, *_ = map(int, fields)
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _tree_bytes(root: int) -> int:
    total, queue = 0, [root]
    while queue:
        process = queue.pop()
        try:
            # Proportional: a page that n processes share counts as an n-th in each.
            for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
            queue += map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
        except (OSError, IndexError):
            continue
    return total


def main() -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/bench")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocabularies", nargs="+", choices=list(VOCABULARIES), default=list(VOCABULARIES))
    parser.add_argument("--inputs", nargs="+", choices=list(INPUTS), default=USUAL_INPUTS)
    parser.add_argument("--cores", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--without-megatron", action="store_true", help="only ours: seconds instead of minutes")
    parser.add_argument("--direct", action="store_true", help="also Megatron's way with ids asked directly")
    parser.add_argument("--report", action="store_true", help="only print what was measured before")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    for name in () if arguments.report else arguments.inputs:
        corpus.write_corpus(folder / f"{name}.jsonl", INPUTS[name])
    for vocabulary in () if arguments.report else arguments.vocabularies:
        for number in range(arguments.rounds):
            for name in arguments.inputs:
                for cores in arguments.cores:
                    measure_round(Bench(folder, vocabulary, folder / f"{name}.jsonl", cores), arguments, number)
    print(preprocess_report.report(folder / "results.jsonl"))
    return 0


def measure_round(bench: Bench, arguments: argparse.Namespace, number: int) -> None:
    """Every command once."""
    if not arguments.without_megatron:
        bench.theirs()
        if arguments.direct:
            bench.theirs("Megatron's way, ids directly")
    bench.ours()
    if bench.source.stem != "mix300":
        return
    bench.verify()
    packed = bench.source.with_suffix(".jsonl.gz")
    if not packed.exists():
        packed.write_bytes(gzip.compress(bench.source.read_bytes(), 6))
    bench.ours("ours, gz", source=packed)
    for what in sorted(("ours, not safe to kill", "ours"), reverse=number % 2 == 1):
        bench.ours(what, STRIPPED if "not" in what else OURS)
    if bench.cores > 1:
        bench.at_once()


if __name__ == "__main__":
    sys.exit(main())
