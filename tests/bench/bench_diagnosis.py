"""Does diagnose_speed.py rank the planted mistake first? One line for each plant, and the clean loop again and again.

    python tests/bench/bench_diagnosis.py                       # what shows on a CPU
    python tests/bench/bench_diagnosis.py --device cuda         # what shows on a GPU; needs torch and numpy alone
    python tests/bench/bench_diagnosis.py --plants clean --repeats 10

Reports go to --output. Exit code 1 if a plant isn't found, or a clean loop gets a cause over 5%.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from planted_slowdowns import EXPECTED, PLANTS

ROOT = Path(__file__).resolve().parents[2]
FALSE_CAUSE = 0.05
"""Share from which a cause of a clean loop is a false one."""


def diagnose(plant: str, device: str, output: Path, more: list[str]) -> dict[str, object]:
    """The report on a planted loop."""
    here = Path(__file__).with_name("planted_slowdowns.py")
    scale = "gpu" if device == "cuda" else "cpu"
    words = [sys.executable, str(here), "--plant", plant, "--device", device, "--scale", scale]
    if plant == "slow_rank":
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", *words[1:]]
    command = [sys.executable, str(ROOT / "tools" / "diagnose_speed.py"), "--script", shlex.join(words)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    output.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [*command, "--output", str(output), *more], env=environment, capture_output=True, text=True, cwd=output
    )
    (output / "output.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise RuntimeError(f"{plant}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    report: dict[str, object] = json.loads((output / "report.json").read_text())
    return report


def main() -> int:
    """Diagnose the plants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--plants", default="", help="names, divided by commas (default: all that show on the device)")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("build/diagnosis"))
    parser.add_argument("options", nargs="*", help="after --: options for diagnose_speed.py")
    arguments = parser.parse_args()
    where = "gpu" if arguments.device == "cuda" else "cpu"
    plants = arguments.plants.split(",") if arguments.plants else [name for name in PLANTS if where in PLANTS[name]]
    failures = 0
    print(
        f"{'plant':<18}{'expected':<18}{'first cause':<18}{'share':<28}{'step':<12}{'took':<8}ok",
        flush=True,
    )
    for plant in plants:
        for repeat in range(arguments.repeats):
            begin_s = time.monotonic()
            output = (arguments.output / f"{plant}_{repeat}").resolve()
            try:
                report = diagnose(plant, arguments.device, output, arguments.options)
            except RuntimeError as error:
                failures += 1
                print(error, flush=True)
                continue
            causes, expected = report["causes"], EXPECTED.get(plant, "none")
            first = causes[0] if causes else None  # type: ignore[index]
            share = first["share"] if first else {"value": 0.0, "low": 0.0, "high": 0.0}
            ok = (
                (first is None or share["value"] < FALSE_CAUSE)
                if expected == "none"
                else bool(first) and first["name"] == expected
            )
            failures += not ok
            interval = f"{share['value']:.1%} [{share['low']:.1%} to {share['high']:.1%}]"
            step_s = report["speed"]["step_time_s"]["value"]  # type: ignore[index]
            print(
                f"{plant:<18}{expected:<18}{first['name'] if first else 'none':<18}{interval:<28}{step_s:<12.4g}"
                f"{time.monotonic() - begin_s:<8.0f}{'yes' if ok else 'NO'}",
                flush=True,
            )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
