"""What each process of the program is doing, as files that the diagnosis reads."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

IMPORTED, MEASURED, SECOND, NO_OPTIMIZER = "imported torch", "measured", "second of its rank", "no optimizer"


@dataclass(frozen=True)
class State:
    """Of one process."""

    name: str
    words: str
    """Its command line."""


def write(folder: Path, name: str) -> None:
    """Note this process's state."""
    path = folder / f"process_{os.getpid()}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(State(name, " ".join(sys.orig_argv)[:200]))), encoding="utf-8")
    temporary.replace(path)


def claim(folder: Path, rank: int) -> bool:
    """Become the one process that is measured as this rank; False where another one is."""
    try:
        os.close(os.open(folder / f"claimed_{rank}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def read(folder: Path) -> dict[int, State]:
    """Process id -> state."""
    paths = folder.glob("process_*.json")
    return {int(path.stem.rpartition("_")[2]): State(**json.loads(path.read_text())) for path in paths}
