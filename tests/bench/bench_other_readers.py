"""Do other programs read a release? SmolLM2-135M, to NeMo and back, goes through the gate with llama.cpp.

llama-cpp-python has no wheels, and building it takes minutes: so this is no test. Its source has the converter to GGUF.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def install(folder: Path) -> Path:
    """llama-cpp-python, built from its source unless it is there; the folder of llama.cpp's source."""
    pip = [sys.executable, "-m", "pip", "--quiet"]
    pinned = ["--no-deps", "-c", str(REPOSITORY / "constraints.txt")]
    subprocess.run(
        [*pip, "download", *pinned, "--no-binary", ":all:", "-d", str(folder), "llama-cpp-python"], check=True
    )
    (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    if importlib.util.find_spec("llama_cpp") is None:
        subprocess.run([*pip, "install", *pinned, "diskcache"], check=True)
        subprocess.run([*pip, "install", "--no-deps", str(archive)], check=True)
    return next(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))


def run(*words: object, **variables: str) -> None:
    """One of the project's commands, which must succeed."""
    command = [sys.executable, *map(str, words)]
    subprocess.run(command, cwd=REPOSITORY, check=True, env={**os.environ, **variables})


def main() -> None:
    """Install, convert, verify; the gate's table is printed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = install(folder)
        run("scripts/demo/make_inputs.py", "--output", folder)
        model, nemo, released = folder / "smollm2-135m", folder / "nemo", folder / "released"
        run("tools/convert_checkpoint.py", model, nemo)
        run("tools/convert_checkpoint.py", nemo, released)
        run("tools/verify_release.py", nemo, released, "--also", "llama.cpp", LLAMA_CPP=str(source))


if __name__ == "__main__":
    main()
