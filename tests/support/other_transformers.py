"""The other generation of transformers, in processes of its own: 5 where 4 is installed, and the other way round.

pip installs it once, without dependencies, into a folder of the environment that runs the tests.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hf_in_process
import pytest

PACKAGES = {
    4: ("transformers==4.57.6", "tokenizers==0.22.2", "huggingface-hub==0.36.2"),
    5: ("transformers==5.24.0", "tokenizers==0.23.3", "huggingface-hub==1.33.0"),
}
"""The releases of each generation that models must open in."""
ONLY_IN_5 = ("gemma4_text", "ministral3", "qwen3_5_moe_text", "qwen3_5_text")
"""Model types that transformers 4 has no class for."""
INSTALLED = int(version("transformers").split(".")[0])
OTHER = 4 if INSTALLED == 5 else 5
_INSTALL_LIMIT_S = 600


def packages_folder() -> Path:
    """The folder with the packages of the other generation; skips the test where pip can't get them."""
    folder = Path(sys.prefix) / "other-transformers" / "-".join(PACKAGES[OTHER]).replace("==", "-")
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            made = Path(tempfile.mkdtemp(dir=folder.parent))
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", made]
            done = subprocess.run(
                [*map(str, command), *PACKAGES[OTHER]], capture_output=True, text=True, timeout=_INSTALL_LIMIT_S
            )
            if done.returncode:
                shutil.rmtree(made)
                pytest.skip(f"pip can't install {' '.join(PACKAGES[OTHER])}: {done.stderr.strip()[-300:]}")
            made.rename(folder)
    return folder


def call(generation: int, function: str, *arguments: Any) -> Any:
    """Call a function of `hf_in_process` with JSON arguments and a generation, here or in a process with the other."""
    if generation == INSTALLED:
        return getattr(hf_in_process, function)(*arguments)
    paths = [str(packages_folder()), str(Path(__file__).parent)]
    request = json.dumps([function, arguments], default=str)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "hf_in_process"],
        input=request,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
