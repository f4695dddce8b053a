"""Several processes append to one file of records, and none loses a line of another's."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

from pretrainkit.run.json_lines import JsonLinesWriter, read_records


def test_a_full_disk_cuts_off_no_record_of_another_writer(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    training, evaluation = JsonLinesWriter(path), JsonLinesWriter(path)
    training.append({"step": 1})
    meanwhile = threading.Thread(target=evaluation.append, args=({"event": "evaluation"},))

    class FullAfterAPart:
        """The training's file on a disk that is full after 5 bytes, while the evaluation writes to another part."""

        def __init__(self, file: Any) -> None:
            self.fileno, self._write, self.is_full = file.fileno, file.write, False

        def write(self, data: Any) -> int:
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.is_full = True
            count: int = self._write(data[:5])
            meanwhile.start()
            meanwhile.join(0.3)
            return count

    usual = training._file
    training._file = FullAfterAPart(usual)  # type: ignore[assignment]
    error = training.append({"step": 2})
    assert error is not None and error.errno == errno.ENOSPC
    meanwhile.join()
    training._file = usual
    assert read_records(path) == [{"step": 1}, {"event": "evaluation"}]
    assert training.append({"step": 3}) is None
    assert read_records(path) == [{"step": 1}, {"event": "evaluation"}, {"step": 2}, {"step": 3}]


def test_a_torn_line_is_taken_away_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    JsonLinesWriter(path).append({"step": 2})
    assert read_records(path) == [{"step": 1}, {"step": 2}]
