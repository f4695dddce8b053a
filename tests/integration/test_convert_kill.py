"""kill -9 at any moment of a conversion leaves a complete folder or none."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrainkit.checkpoint.convert import convert
from pretrainkit.checkpoint.parallel import Parallelism
from pretrainkit.checkpoint.plan import CheckpointFormat, Options

pytestmark = pytest.mark.integration

KILLS = int(os.environ.get("PRETRAINKIT_KILLS", "5"))
"""Kills per format; set it to 50 for a release."""


@pytest.mark.parametrize("kind", CheckpointFormat, ids=str)
def test_killed_conversion_leaves_no_folder_that_looks_complete(
    make_model: Callable[..., Path], assert_same: Callable[[Path, Path], None], tmp_path: Path, kind: CheckpointFormat
) -> None:
    # About 60 MB, so that the writing takes most of the time.
    source = released = make_model("llama", hidden_size=512, intermediate_size=2048, vocab_size=2000)
    if kind is CheckpointFormat.HF:
        convert(source, tmp_path / "nemo")
        source = tmp_path / "nemo"
    options = Options(to=kind, parallelism=Parallelism(2, 2), workers=2, max_shard_bytes=10_000_000, overwrite=True)
    target = tmp_path / "out"
    convert(source, target, options)  # imports what conversions import, so that the forks needn't
    started = time.monotonic()
    convert(source, target, options)
    duration_s = time.monotonic() - started
    moments = random.Random(0)
    whole = killed = attempt = 0
    while attempt < KILLS or not killed:
        attempt += 1
        if attempt % 2:  # every other time there is nothing to replace
            shutil.rmtree(target, ignore_errors=True)
        elif not target.exists():
            convert(source, target, options)
        process = multiprocessing.get_context("fork").Process(target=convert, args=(source, target, options))
        process.start()
        time.sleep(moments.uniform(0, duration_s))
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        if process.exitcode == -signal.SIGKILL:
            killed += 1
        else:
            duration_s /= 2  # the machine is faster now than when this was measured
        # The old folder, the new one, or none; whatever has the name must be whole.
        if target.exists():
            whole += 1
            convert(target, tmp_path / "back", Options(to=CheckpointFormat.HF, overwrite=True))
            assert_same(released, tmp_path / "back")
    convert(source, target, options)
    assert [path for path in tmp_path.iterdir() if path.name.startswith("out")] == [target]
    print(f"{kind}: {killed} killed of {attempt}, {whole} times a whole folder")
