"""preprocess_data.py without what makes it safe to kill: no flush to disk, no journal, no checksums.

Only for measuring what safety costs. Takes the same arguments.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    """Run the command, stripped."""
    from pretrainkit.data.indexed import chunk, state_folder

    def nothing(*_: Any) -> int:
        return 0

    os.fsync = os.fdatasync = nothing  # type: ignore[assignment]
    state_folder.StateFolder._append = nothing  # type: ignore[method-assign,assignment]
    chunk.crc32 = chunk.crc32_combine = nothing  # type: ignore[assignment]
    path = Path(__file__).parents[2] / "tools/preprocess_data.py"
    spec = importlib.util.spec_from_file_location("preprocess_data", path)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
