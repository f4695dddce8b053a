"""How long from the command to the first step, and for how long does a save stop training? One GPU, or a CPU.

    python tests/bench/bench_start.py [--starts 2] [--rounds 2] [--checksums on]
    python tests/bench/bench_start.py --device cpu --model 135m --layers 2 --sequence_length 64 --steps 6 [...]

Each start is `pretraining/pretrain.py` with random weights of the model's shape, timed by the lines of its log as they
arrive; the first one compiles what the later ones find. Then runs that save, with checksums of the files and without in
turn: the time between the lines of two steps, less that of a usual step, is the stall. Saves must be further apart than
their writing takes. Three checkpoints must fit on the disk: 49 GiB for 1B.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench_training import MODELS, write_inputs

ROOT = Path(__file__).resolve().parents[2]
PHASES = {
    "pretrain.py itself": r"starting \d+ rank",
    "a rank's start": "importing NeMo and Megatron-core$",
    "importing NeMo": "importing NeMo and Megatron-core took",
    "dataset, model": "starting at step",
    "first step": r"step 1/\d+  loss",
}
"""Phase -> the line that ends it."""


def without_checksums(folder: Path) -> Path:
    """A copy of the sources whose saves have none."""
    copy = folder / "src"
    shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
    module = copy / "pretrainkit/megatron/save_checksums.py"
    text = module.read_text()
    definition = "def summing(write_item: Callable[..., WriteResult]) -> Callable[..., SummedResult]:\n"
    assert definition in text
    module.write_text(text.replace(definition, f"{definition}    return write_item\n"))
    return copy


def train(folder: Path, arguments: argparse.Namespace, steps: int, *sources: Path) -> list[tuple[float, str]]:
    """Train from random weights; the lines of the log, each with the seconds since the command."""
    experiment = folder / "experiments/bench"
    shutil.rmtree(experiment, ignore_errors=True)
    options = {
        "hf_model_id": folder / "model",
        "dataset_path": folder / "text",
        "split": "95,5,0",
        "experiment": "bench",
        "experiments_dir": folder / "experiments",
        "num_gpus": 1,
        "sequence_length": arguments.sequence_length,
        "micro_batch_size": arguments.micro_batch_size,
        "global_batch_size": arguments.global_batch_size,
        "max_steps": steps,
        "val_interval": 0,
        "save_interval": arguments.save_interval,
        "keep_last": 1,
        "log_interval": 1,
        "layer_spec": "torch",
        "async_save": "on",
        **({"accelerator": "cpu"} if arguments.device == "cpu" else {}),
    }
    command = [sys.executable, str(ROOT / "pretraining/pretrain.py")]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    path = os.pathsep.join([*map(str, sources), os.environ.get("PYTHONPATH", ""), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    lines: list[tuple[float, str]] = []
    begin_s = time.monotonic()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout
    for line in process.stdout:
        lines.append((time.monotonic() - begin_s, line))
    if process.wait():
        raise SystemExit("".join(line for _, line in lines[-40:]))
    return lines


def phases(lines: list[tuple[float, str]]) -> str:
    """Seconds of each phase of a start."""
    times, before_s = [], 0.0
    for name, mark in PHASES.items():
        at_s = next(at_s for at_s, line in lines if re.search(mark, line.rstrip()))
        times.append(f"{name} {at_s - before_s:.1f}")
        before_s = at_s
    return f"{before_s:.1f} s to the first step: {', '.join(times)}"


def recorded(folder: Path) -> str:
    """What the run itself has recorded: seconds of each save, of its copying, and of the slowest step after it."""
    metrics = folder / "experiments/bench/metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = {record["step"]: record["step_time_s"] for record in records if "step_time_s" in record}
    saves = [record for record in records if record.get("event") == "checkpoint"]
    found = []
    for save in saves:
        after_s = [steps[step] for step in range(save["step"] + 1, save["step"] + 11) if step in steps]
        slowest = f", slowest of {len(after_s)} steps after it {max(after_s):.2f}" if after_s else ""
        found.append(f"step {save['step']}: {save['seconds']:.1f} s, waited {save['waited_s']:.2f}{slowest}")
    return "; ".join(found)


def stalls(lines: list[tuple[float, str]], interval: int) -> str:
    """For how long each save has stopped training by the lines of the log, and how long its writing took."""
    at_s = {int(found[1]): at for at, line in lines if (found := re.search(r"step (\d+)/\d+  loss", line))}
    gaps_s = {step: at - at_s[step - 1] for step, at in at_s.items() if step - 1 in at_s}
    usual_s = statistics.median(gaps_s.values())
    # The line of a saved step comes before its save.
    stopped = [
        f"step {step}: {gaps_s[step + 1] - usual_s:.2f} s"
        for step in at_s
        if not step % interval and step + 1 in gaps_s
    ]
    written = [found[1] for _, line in lines if (found := re.search(r"saved step (\d+ in .*)", line))]
    memory = [line.strip().partition("INFO ")[2] for _, line in lines if "host memory" in line]
    return (
        f"usual step {usual_s:.3f} s; stalls {', '.join(stopped)}; saved step {', '.join(written)}; {' '.join(memory)}"
    )


def main() -> None:
    """Measure starts, then saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--model", default="1b", choices=MODELS)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    for name, default in (
        *(("starts", 2), ("rounds", 1), ("steps", 26), ("save_interval", 12)),
        *(("sequence_length", 4096), ("micro_batch_size", 4), ("global_batch_size", 32)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--checksums", choices=["on", "off", "both"], default="both")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured (default: a temporary one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        write_inputs(folder, arguments)
        for number in range(arguments.starts):
            print(f"start {number + 1}: {phases(train(folder, arguments, 2))}", flush=True)
        sources = {"on": (), "off": (without_checksums(folder),)}
        for _ in range(arguments.rounds):
            for what in sources if arguments.checksums == "both" else [arguments.checksums]:
                lines = train(folder, arguments, arguments.steps, *sources[what])
                print(f"checksums {what}: {phases(lines)}\n    {stalls(lines, arguments.save_interval)}", flush=True)
                print(f"    by its records: {recorded(folder)}", flush=True)


if __name__ == "__main__":
    main()
