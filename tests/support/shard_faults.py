"""Makes shards or a packed dataset again and again in forked processes, each with a fault at another disk write.

    LD_PRELOAD=faults.so python shard_faults.py shards|packed KIND STEP INPUT TOKENIZER FOLDER

KIND is `full` or `kill`. After each fault outputs must be whole or absent, and a rerun must make what an undisturbed
run makes, and leave nothing else. Prints the number of changes, and one line for each that went wrong.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from pretrainkit.data.packed.build import pack_dataset
from pretrainkit.data.packed.format import PackedDataset, is_packed_folder
from pretrainkit.data.packed.request import PackRequest, machine_settings, make_pack_plan
from pretrainkit.data.shards.build import make_shards
from pretrainkit.data.shards.request import ShardRequest, make_shard_plan
from pretrainkit.data.shards.shard_set import open_shards
from pretrainkit.errors import PretrainkitError

SHIM = ctypes.CDLL(os.environ["LD_PRELOAD"])


def write_shards(source: str, tokenizer: str, out: Path) -> None:
    request = ShardRequest((source,), out, tokenizer, verify_tokens="off", on_error="skip")
    plan = make_shard_plan(request)
    make_shards(plan, list(range(plan.num_shards)))


def write_packed(source: str, tokenizer: str, out: Path) -> None:
    request = PackRequest((source,), out, tokenizer, 64, verify_tokens="off", on_error="skip")
    pack_dataset(make_pack_plan(request, machine_settings({}, num_proc=1)), timeout_s=30)


def check_shards(out: Path) -> None:
    """Every shard that has its record must be whole."""
    for record in out.glob("shard-*.json"):
        shards = open_shards(str(record.with_suffix(".tar")))
        assert hashlib.sha256(record.with_suffix(".tar").read_bytes()).hexdigest() and shards.num_samples


def check_packed(out: Path) -> None:
    if is_packed_folder(out):
        assert len(PackedDataset(out)) == PackedDataset(out).manifest.num_sequences
    else:
        assert not out.exists() or not any(out.iterdir())


def content(out: Path) -> dict[str, str]:
    """Names and hashes; records tell times, too."""
    files = [path for path in sorted(out.parent.rglob("*")) if path.is_file() and path.suffix != ".lock"]
    return {
        str(path.relative_to(out.parent)): ""
        if path.suffix == ".json"
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def in_fork(run: Callable[[], None]) -> int:
    """How a forked process ended that ran it; 1 for an error of ours, 70 for another."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        os.setsid()
        run()
        os._exit(0)
    except PretrainkitError:
        os._exit(1)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(70)


def main() -> None:
    form, kind, step, source, tokenizer, folder = sys.argv[1:]
    write, check = {"shards": (write_shards, check_shards), "packed": (write_packed, check_packed)}[form]
    home = Path(folder)
    out = home / "work" / "out"

    def work(at: int) -> None:
        SHIM.faults_arm(str(home / "work").encode(), at, int(kind == "kill"))
        write(source, tokenizer, out)

    out.parent.mkdir()
    assert in_fork(lambda: work(0)) == 0
    wanted, changes = content(out), SHIM.faults_count()
    for at in range(1, changes + 1, int(step)):
        shutil.rmtree(out.parent)
        out.parent.mkdir()
        code = in_fork(lambda at=at: work(at))
        try:
            assert code in ((-signal.SIGKILL, 0, 1) if kind == "kill" else (0, 1)), f"exit code {code}"
            check(out)
            assert in_fork(lambda: write(source, tokenizer, out)) == 0, "the rerun fails"
            found = content(out)
            assert found == wanted, f"{sorted(set(found.items()) ^ set(wanted.items()))}"
        except (AssertionError, PretrainkitError) as error:
            print(f"change {at} (exit code {code}): {error}")
    print(f"{changes} changes")


if __name__ == "__main__":
    main()
