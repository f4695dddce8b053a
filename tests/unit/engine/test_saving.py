from __future__ import annotations

import errno
import os

import pytest

from pretrainkit.engine.saving import failure_of


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number), "/checkpoints/step_1")


@pytest.mark.parametrize(
    ("number", "is_full", "is_permanent"),
    [
        (errno.EIO, False, False),
        (errno.ESTALE, False, False),
        (errno.ETIMEDOUT, False, False),
        (errno.ENOSPC, True, True),
        (errno.EDQUOT, True, True),
        (errno.EACCES, False, True),
        (errno.EROFS, False, True),
    ],
    ids=lambda value: errno.errorcode.get(value, "") if isinstance(value, int) and value > 1 else str(value),
)
def test_transient_errors_are_distinguished_from_permanent_ones(number: int, is_full: bool, is_permanent: bool) -> None:
    failure = failure_of(os_error(number))
    assert (failure.errno, failure.is_disk_full, failure.is_permanent) == (number, is_full, is_permanent)
    assert failure.message.startswith(errno.errorcode[number])


def test_the_system_error_is_found_behind_others_and_in_their_text() -> None:
    wrapped = RuntimeError("Worker failure")
    wrapped.__cause__ = os_error(errno.ENOSPC)
    told = RuntimeError("Worker failure: [Errno 28] No space left on device")
    assert failure_of(wrapped).is_disk_full and failure_of(told).is_disk_full
    assert failure_of(RuntimeError("something else")).errno is None


def test_an_error_without_a_name_on_a_full_disk_is_that_disk() -> None:
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")
    assert failure_of(error, free_bytes=500_000).is_disk_full and failure_of(error, free_bytes=2**40).errno is None
    assert failure_of(os_error(errno.EIO), free_bytes=0).errno == errno.EIO


def test_advice_for_a_full_disk_has_the_numbers() -> None:
    advice = failure_of(os_error(errno.ENOSPC)).advice(free_bytes=2**30, checkpoint_bytes=3 * 2**30)
    assert "1.0 GiB are free, a checkpoint takes 3.0 GiB" in advice and "--keep_last" in advice
