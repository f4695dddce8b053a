"""Every line of a growing file arrives once, whole, in order."""

from __future__ import annotations

import io
import time
from pathlib import Path

from pretrainkit.jobs.watch import Follower


def test_a_log_that_was_put_aside_is_followed_by_the_new_one(tmp_path: Path) -> None:
    stream, path = io.BytesIO(), tmp_path / "slurm-7.log"
    path.write_bytes(b"first start\n")
    with Follower([path], stream):
        while b"first" not in stream.getvalue():
            time.sleep(0.01)
        with path.open("ab") as file:
            file.write(b"its last word\n")
        path.rename(tmp_path / "slurm-7.1.log")
        path.write_bytes(b"second start\n")
        while b"second" not in stream.getvalue():
            time.sleep(0.01)
    assert stream.getvalue() == b"first start\nits last word\nsecond start\n"


def test_files_that_appear_and_grow_are_copied_whole(tmp_path: Path) -> None:
    stream = io.BytesIO()
    paths = [tmp_path / "early", tmp_path / "late", tmp_path / "never"]
    paths[0].write_bytes(b"before\n")
    with Follower(paths, stream):
        with paths[0].open("ab") as file:
            for number in range(200):
                file.write(f"line {number}".encode())
                file.flush()
                file.write(b"\n")
                file.flush()
        paths[1].write_bytes("最後の行".encode())
    lines = stream.getvalue().decode().splitlines()
    assert lines == ["before", *(f"line {number}" for number in range(200)), "最後の行"]
