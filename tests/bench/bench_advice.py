"""Does the change that diagnose_speed.py advises give the gain that it states? Three real scripts, changed by hand.

    python tests/bench/bench_advice.py [--scripts padding,decoding,ranks] [--rounds 4]
    python tests/bench/bench_advice.py --device cuda --rounds 2 -- --budget_s 40

Each script is diagnosed; then it runs as it is and with the change in turn, without instrumentation, and the share of
the time that the change saved is compared with the interval of the first cause. Exit code 1 if one lies outside.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = [sys.executable, str(Path(__file__).with_name("real_scripts.py"))]
EXPECTED = {"padding": "packing", "decoding": "workers", "ranks": "slow_rank"}


def work_per_second(words: list[str], folder: Path) -> float:
    """What a script prints at its end."""
    found = re.search(r"work per second: (\S+)", run(words, folder))
    assert found
    return float(found[1])


def run(words: list[str], folder: Path) -> str:
    """What a command prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment)
    if done.returncode:
        raise SystemExit(f"{shlex.join(words)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def main() -> int:
    """Diagnose, apply, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--scripts", default="", help="names, divided by commas (default: all that the device has)")
    parser.add_argument("--rounds", type=int, default=4, help="runs of each kind, in turn")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--cpu_time", action="store_true", help="compare padding by CPU time: the machine is busy")
    parser.add_argument("--output", type=Path, default=Path("build/advice"))
    parser.add_argument("options", nargs="*", help="after --: options for diagnose_speed.py")
    arguments = parser.parse_args()
    scripts = arguments.scripts.split(",") if arguments.scripts else ["padding", "decoding"]
    if not arguments.scripts and arguments.device == "cpu":
        scripts.append("ranks")
    outside = 0
    for name in scripts:
        folder = (arguments.output / name).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        tool = [sys.executable, str(ROOT / "tools" / "diagnose_speed.py"), "--output", str(folder / "report")]
        script = [*SCRIPT, name, "--device", arguments.device]
        run([*tool, *arguments.options, "--script", shlex.join(script)], folder)
        report = json.loads((folder / "report" / "report.json").read_text())
        cause = (report["causes"] or [{"name": "none", "share": {"value": 0, "low": 0, "high": 0}, "change": ""}])[0]
        workers = re.search(r"num_workers=(\d+)", cause["change"])
        seconds = ["--seconds", str(arguments.seconds), *(["--cpu_time"] if arguments.cpu_time else [])]
        applied = ["--applied", *(["--workers", workers[1]] if workers else [])]
        saved = []
        for _ in range(arguments.rounds):
            rates = [work_per_second([*script, *seconds, *more], folder) for more in ([], applied)]
            saved.append(1 - rates[0] / rates[1])
        share, middle = cause["share"], statistics.median(saved)
        is_in = cause["name"] == EXPECTED[name] and share["low"] <= middle <= share["high"]
        outside += not is_in
        print(
            f"{name:<10}{cause['name']:<12}stated {share['value']:.1%} [{share['low']:.1%} to {share['high']:.1%}]  "
            f"by hand {middle:.1%} ({', '.join(f'{item:.1%}' for item in saved)})  {'yes' if is_in else 'NO'}",
            flush=True,
        )
    return int(outside > 0)


if __name__ == "__main__":
    sys.exit(main())
