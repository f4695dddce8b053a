"""pack_dataset.py as people run it, read by plain datasets; and many processes that start it at once."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pytest

from pretrainkit.data.indexed.format import IndexedDataset
from pretrainkit.data.packed.format import PackedDataset

pytestmark = pytest.mark.integration
REPOSITORY = Path(__file__).parents[2]
LENGTH = 128


def command(*words: object) -> list[str]:
    return [sys.executable, "tools/pack_dataset.py", *map(str, words)]


def pack_dataset(*words: object, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*words), cwd=REPOSITORY, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    return done


def stream(folder: Path) -> np.ndarray:
    """The tokens of all sequences in order, without padding."""
    ours = PackedDataset(folder)
    return np.concatenate([ours.input_ids(i)[: ours.document_lengths(i).sum()] for i in range(len(ours))])


@pytest.fixture(scope="module")
def common(tokenizer_folder: Path) -> list[object]:
    return ["--tokenizer_model", tokenizer_folder, "--sequence_length", LENGTH, "--num_proc", 2]


def test_a_packed_set_is_the_stream_of_the_pair_and_read_by_datasets(
    common: list[object], jsonl_file: Path, dataset_prefix: Path, tmp_path: Path
) -> None:
    done = pack_dataset("--input", jsonl_file, "--output_dir", tmp_path / "set", "--batch_size", 7, *common)
    assert "40 records in = 40 documents" in done.stdout and "DATASET_BATCH_SIZE=7 (flag)" in done.stderr
    pair = IndexedDataset(dataset_prefix)
    loaded = datasets.load_from_disk(str(tmp_path / "set"))
    assert len(loaded) == pair.num_tokens // LENGTH
    rows = np.array(loaded["input_ids"])
    assert rows.shape == (len(loaded), LENGTH)
    assert np.array_equal(rows.flatten(), pair.tokens[: rows.size])
    ours = PackedDataset(tmp_path / "set")
    assert np.array_equal(stream(tmp_path / "set"), rows.flatten())
    assert loaded[3]["document_lengths"] == ours.document_lengths(3).tolist()
    positions = np.concatenate([ours[number]["position_ids"] for number in range(len(ours))])
    ends = np.flatnonzero(rows.flatten()[:-1] == 1) + 1  # after an EOD a document begins
    assert not positions[ends].any()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set", "set.lock"], "nothing else is left"


def test_a_damaged_set_is_found_and_built_again(common: list[object], jsonl_file: Path, tmp_path: Path) -> None:
    words = ["--input", jsonl_file, "--output_dir", tmp_path / "set", *common]
    pack_dataset(*words)
    arrow, lengths = tmp_path / "set/data-00000-of-00001.arrow", tmp_path / "set/documents.npy"
    whole = arrow.read_bytes()
    verify = [sys.executable, "tools/inspect_data.py", "verify", str(tmp_path / "set")]
    for damaged, flags in ((whole[:-8], []), (whole[:5000] + b"damage" + whole[5006:], ["--verify"])):
        arrow.write_bytes(damaged)
        found = subprocess.run(verify, cwd=REPOSITORY, capture_output=True, text=True)
        assert found.returncode == 1 and "BAD" in found.stdout and arrow.name in found.stdout
        assert "the set is built again" in pack_dataset(*words, *flags).stderr
        assert arrow.read_bytes() == whole
    lengths.unlink()
    assert "documents.npy is missing: the set is built again" in pack_dataset(*words).stderr
    assert "was ready" in pack_dataset(*words, "--verify").stdout
    assert "good" in subprocess.run(verify, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout


def test_bestfit_rows_hold_whole_documents_and_padding_has_no_label(
    common: list[object], tmp_path: Path, jsonl_file: Path
) -> None:
    source = tmp_path / "short.jsonl"
    texts = [
        text[:150] for line in jsonl_file.read_text().splitlines() for text in json.loads(line)["text"].split("\n")
    ]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["--input", source, "--packing", "bestfit", "--writer_batch_size", 5, *common]
    pack_dataset(*words, "--output_dir", tmp_path / "set")
    ours = PackedDataset(tmp_path / "set")
    assert ours.manifest.num_dropped == 0
    assert ours.manifest.num_padding < 0.1 * ours.manifest.num_tokens
    for number in range(len(ours)):
        row, lengths = ours[number], ours.document_lengths(number)
        assert all(row["input_ids"][np.cumsum(lengths) - 1] == 1), "every document here is whole: it ends with EOD"
        assert (row["labels"][lengths.sum() :] == -100).all()
        assert np.array_equal(row["labels"][: lengths.sum()], row["input_ids"][: lengths.sum()])


def test_a_saved_dataset_and_parquet_give_the_same_set(common: list[object], jsonl_file: Path, tmp_path: Path) -> None:
    texts = [json.loads(line)["text"] for line in jsonl_file.read_text().splitlines()]
    source = datasets.Dataset.from_dict({"text": [*texts, ""], "other": list(range(41))})
    source.save_to_disk(str(tmp_path / "saved"))
    source.to_parquet(str(tmp_path / "data.parquet"))
    found = []
    for name in ("saved", "data.parquet"):
        done = pack_dataset("--input", tmp_path / name, "--output_dir", tmp_path / f"set-{name}", *common)
        assert "41 records in = 40 documents + 1 empty" in done.stdout
        found.append(stream(tmp_path / f"set-{name}"))
    assert np.array_equal(*found)


def test_a_ready_set_is_not_made_again_and_a_changed_request_is_refused(
    common: list[object], jsonl_file: Path, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(jsonl_file.read_bytes())
    words = ["--input", source, "--output_dir", tmp_path / "set", *common]
    pack_dataset(*words)
    before = (tmp_path / "set").stat().st_ino
    assert "was ready" in pack_dataset(*words, PYTHONHASHSEED="77").stdout
    assert (tmp_path / "set").stat().st_ino == before
    assert "other packing" in pack_dataset(*words, "--packing", "bestfit", code=2).stderr
    source.write_text(source.read_text() + '{"text": "one more"}\n')
    assert "other inputs" in pack_dataset(*words, code=2).stderr
    assert "41 records" in pack_dataset(*words, "--overwrite").stdout


@pytest.mark.parametrize("form", ["jsonl", "gz", "parquet", "saved"])
def test_touched_inputs_are_read_and_known_again(
    form: str, common: list[object], jsonl_file: Path, tmp_path: Path
) -> None:
    source = tmp_path / f"in.{form}"
    data = jsonl_file.read_bytes()
    if form in ("parquet", "saved"):
        rows = datasets.Dataset.from_dict({"text": [json.loads(line)["text"] for line in data.splitlines()]})
        rows.to_parquet(str(source)) if form == "parquet" else rows.save_to_disk(str(source))
    else:
        source.write_bytes(gzip.compress(data) if form == "gz" else data)
    words = ["--input", source, "--output_dir", tmp_path / "set", *common]
    pack_dataset(*words)
    before = json.loads((tmp_path / "set" / "packed.json").read_text())
    file = next(source.glob("*.arrow")) if form == "saved" else source
    copy = file.with_name("copy")
    copy.write_bytes(file.read_bytes())
    copy.replace(file)  # another inode and time, the same content
    done = pack_dataset(*words)
    assert "was ready" in done.stdout and "same content" in done.stderr
    after = json.loads((tmp_path / "set" / "packed.json").read_text())
    assert after["fingerprint"] == before["fingerprint"] and after["inputs"] != before["inputs"]
    assert "same content" not in pack_dataset(*words).stderr, "now it is known without reading"
    content, times = bytearray(file.read_bytes()), file.stat()
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # now only the kernel knows that it changed
    refused = pack_dataset(*words, code=2).stderr
    assert "other inputs (" in refused and f"{file.name} changed since" in refused


def test_a_bad_record_is_named_or_set_aside(common: list[object], tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "' + "long " * 200 + '"}\n{"text": null}\n')
    words = ["--input", source, "--output_dir", tmp_path / "set", *common]
    assert "in.jsonl:2" in pack_dataset(*words, code=1).stderr
    assert not (tmp_path / "set").exists()
    assert "1 documents + 0 empty + 1 rejected" in pack_dataset(*words, "--on_error", "skip").stdout
    assert json.loads((tmp_path / "set" / "rejects.jsonl").read_text())["line"]


RACE = """
import os, sys, time
from pathlib import Path
from pretrainkit import logs
from pretrainkit.data.packed import build as pack_writer
from pretrainkit.data.packed.request import machine_settings
from pretrainkit.data.packed.request import PackRequest, make_pack_plan
from pretrainkit.data.packed.format import PackedDataset
logs.configure()
source, out, tokenizer, count = sys.argv[1:]
request = PackRequest((source,), Path(out), tokenizer, 128, verify_tokens="off")
prepare = pack_writer._prepare
def slowly(plan, pool):
    Path(f"{count}.{os.getpid()}").touch()
    time.sleep(0.3)
    return prepare(plan, pool)
pack_writer._prepare = slowly
_, prepared = pack_writer.pack_dataset(make_pack_plan(request, machine_settings({}, num_proc=1)))
print(int(prepared), len(PackedDataset(out)))
"""


def race(
    source: Path, out: Path, tokenizer: Path, count: Path, kill: random.Random | None
) -> list[tuple[int, str, str]]:
    """Start eight processes at once; kill the first preparer at a random moment, if asked to."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(source), str(out), str(tokenizer), str(count)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "8"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(8)
    ]
    if kill is not None:
        while not (preparers := list(count.parent.glob(f"{count.name}.*"))):
            time.sleep(0.01)
        time.sleep(kill.uniform(0, 0.8))
        os.kill(int(preparers[0].suffix[1:]), signal.SIGKILL)
    ended = [process.communicate(timeout=120) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, ended, strict=True)]


@pytest.mark.parametrize("is_killed", [False, True], ids=["undisturbed", "preparer-killed"])
def test_of_eight_processes_one_prepares_and_all_load(
    jsonl_file: Path, tokenizer_folder: Path, tmp_path: Path, is_killed: bool
) -> None:
    rounds = int(os.environ.get("PRETRAINKIT_RACES", "1"))
    for number in range(rounds):
        out, count = tmp_path / f"set{number}", tmp_path / f"count{number}"
        ended = race(jsonl_file, out, tokenizer_folder, count, random.Random(number) if is_killed else None)
        killed = [text for code, text, _ in ended if code == -signal.SIGKILL]
        done = [text.split() for code, text, _ in ended if code == 0]
        assert len(killed) <= is_killed and len(killed) + len(done) == 8, ended
        assert len({rows for _, rows in done}) == 1
        preparers = len(list(tmp_path.glob(f"{count.name}.*")))
        assert sum(int(prepared) for prepared, _ in done) == (1 if preparers == 1 + len(killed) else 0), ended
        assert not list(tmp_path.glob(f"{out.name}.staging*")) and not list(tmp_path.glob(f"{out.name}.tmp*"))


def test_a_set_on_two_file_systems_has_two_preparers(jsonl_file: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    words = ["--input", jsonl_file, "--tokenizer_model", tokenizer_folder, "--sequence_length", LENGTH]
    processes = [
        subprocess.Popen(
            command(*words, "--output_dir", tmp_path / f"node{node}" / "set", "--num_proc", 1),
            cwd=REPOSITORY,
            env={**os.environ, "RANK": str(2 * node + local), "WORLD_SIZE": "4"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
        for local in range(2)
    ]
    told = [process.communicate(timeout=120)[0] for process in processes]
    assert sum("prepared in" in text for text in told) == 2 and sum("was ready" in text for text in told) == 2


GROUP = """
import os, sys, time, datetime
from pathlib import Path
import torch, torch.distributed as dist
from pretrainkit import logs
from pretrainkit.data.packed import once as preparer
rank, final, store = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
logs.configure()
preparer.LINE_EVERY_S = 1.0
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=3))
def prepare():
    time.sleep(7)
    final.mkdir()
os.environ["RANK"] = str(rank)
prepared = preparer.build_once(final, final.exists, prepare)
total = torch.tensor(int(prepared))
dist.all_reduce(total)
print(int(total))
"""


def test_a_preparation_longer_than_the_groups_timeout_is_waited_for(tmp_path: Path) -> None:
    words = [str(tmp_path / "set"), str(tmp_path / "store")]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", GROUP, str(rank), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=120) for process in processes]
    assert [output.strip() for output, _ in told] == ["1", "1"], told
    assert sum(errors.count("has waited") for _, errors in told) >= 3
