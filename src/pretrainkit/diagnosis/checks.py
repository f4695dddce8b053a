"""What can be checked without running anything: the tokenizer, the data and where it lies, debug settings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrainkit.errors import DataError, RequestError
from pretrainkit.units import format_bytes, format_count

WARN, FINE, TOLD = "warn", "fine", "told"
LOOKED_AT_DOCUMENTS = 2000
SMALL_FILE_BYTES, MANY_FILES = 1 << 20, 1000
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p")
PARALLEL_FILE_SYSTEMS = ("lustre", "gpfs", "beegfs", "ceph", "fuse.ceph")

DEBUG_VARIABLES: dict[str, tuple[str, str]] = {
    # name: values that cost nothing; what the others do
    "CUDA_LAUNCH_BLOCKING": ("0", "every GPU kernel is waited for"),
    "MALLOC_CHECK_": ("0", "every memory block is checked"),
    "MALLOC_PERTURB_": ("0", "every memory block is filled"),
    "NCCL_DEBUG": ("WARN VERSION", "NCCL writes much"),
    "NCCL_IB_DISABLE": ("0", "InfiniBand is not used"),
    "NCCL_P2P_DISABLE": ("0", "GPUs don't talk to each other directly"),
    "NCCL_SHM_DISABLE": ("0", "ranks of a node talk through the network"),
    "NVIDIA_TF32_OVERRIDE": ("1", "TF32 is off whatever the program says"),
    "PYTHONASYNCIODEBUG": ("0", "asyncio checks everything"),
    "PYTHONDEVMODE": ("0", "Python checks everything"),
    "PYTHONMALLOC": ("malloc mimalloc pymalloc", "Python checks every memory block"),
    "PYTORCH_JIT": ("1", "torch's compiled functions run as Python"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("0", "every tensor is allocated by the driver"),
    "TORCHDYNAMO_DISABLE": ("0", "torch.compile does nothing"),
    "TORCH_COMPILE_DEBUG": ("0", "torch.compile writes all it does"),
    "TORCH_CPP_LOG_LEVEL": ("ERROR WARNING FATAL", "torch logs much"),
    "TORCH_DISTRIBUTED_DEBUG": ("OFF", "collectives are checked"),
    "TORCH_LOGS": ("", "torch logs much"),
    "TORCH_NCCL_BLOCKING_WAIT": ("0", "collectives are waited for"),
    "TORCH_SHOW_CPP_STACKTRACES": ("0", "stacks are kept for errors"),
}
_CUDA_ONLY = ("CUDA_", "NCCL_", "NVIDIA_", "TORCH_NCCL_", "PYTORCH_NO_CUDA_")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    what: str
    state: str
    """warn: costs time or spoils training; fine; told: a fact to know."""
    found: str
    change: str = ""

    def to_json(self) -> dict[str, str]:
        """All fields."""
        return asdict(self)


def debug_variables(variables: dict[str, str], *, on_gpu: bool) -> dict[str, str]:
    """Of an environment the variables that are set for finding faults and that cost time."""
    return {
        name: variables[name]
        for name, (harmless, _) in DEBUG_VARIABLES.items()
        if variables.get(name)
        and variables[name] not in harmless.split()
        and (on_gpu or not name.startswith(_CUDA_ONLY))
    }


def check_environment(variables: dict[str, str], *, on_gpu: bool) -> list[Check]:
    """Debug settings in the environment."""
    found = debug_variables(variables, on_gpu=on_gpu)
    if not found:
        return [Check("debug variables", FINE, "none is set")]
    return [
        Check("debug variable", WARN, f"{name}={value}: {DEBUG_VARIABLES[name][1]}", f"unset {name}")
        for name, value in found.items()
    ]


def check_tokenizer(folder: Path) -> list[Check]:
    """A Hugging Face tokenizer's files: padding and the special tokens of documents."""
    config = _json(folder / "tokenizer_config.json")
    roles = {**_json(folder / "special_tokens_map.json"), **config}
    names = {role: _content(roles.get(role)) for role in ("pad_token", "eos_token", "bos_token")}
    if not config and not (folder / "tokenizer.json").is_file():
        return [Check("tokenizer", TOLD, f"no files of one in {folder}")]
    checks = []
    side = config.get("padding_side", "right")
    if side == "left":
        checks.append(
            Check(
                "padding side", WARN, "left: a model in training sees padding first", 'tokenizer.padding_side = "right"'
            )
        )
    else:
        checks.append(Check("padding side", FINE, "right"))
    checks += _padding_token(names)
    if names["eos_token"] is None:
        checks.append(
            Check("end of documents", WARN, "the tokenizer has no EOS token", "--eod-token of tools/preprocess_data.py")
        )
    post = json.dumps(_json(folder / "tokenizer.json").get("post_processor"))
    adds_bos = bool(names["bos_token"]) and json.dumps(names["bos_token"])[1:-1] in post
    if adds_bos or config.get("add_bos_token"):
        checks.append(
            Check(
                "BOS", TOLD, f"the tokenizer puts {names['bos_token']} before each text: a text that holds it has two"
            )
        )
    return checks


def _padding_token(names: dict[str, str | None]) -> list[Check]:
    pad, eos = names["pad_token"], names["eos_token"]
    if pad is not None and pad == eos:
        return [
            Check(
                "padding token",
                WARN,
                f"PAD = EOS ({pad}): a collator that masks padding by its id (DataCollatorForLanguageModeling) takes "
                "every end of a document out of the loss, and the model never learns to stop",
                "mask by attention_mask, or add a padding token of its own; packed data needs none",
            )
        ]
    return [Check("padding token", FINE if pad else TOLD, f"{pad}, not EOS" if pad else "none: packed data needs none")]


def check_batches(batches: list[Any], tokenizer: dict[str, Any] | None) -> list[Check]:
    """What the batches that were trained on show of the special tokens (ids of the first rows, if they were kept)."""
    if not tokenizer or tokenizer.get("pad_token_id") is None:
        return []
    if tokenizer["pad_token_id"] == tokenizer.get("eos_token_id"):
        return [
            Check(
                "padding token",
                WARN,
                f"PAD = EOS (id {tokenizer['pad_token_id']}) in the program: ends of documents may be masked",
                "mask by attention_mask, not by id",
            )
        ]
    return []


def check_data(path: str) -> list[Check]:
    """A dataset: its format, how much there is, how documents begin and end, and where it lies."""
    place = Path(path).expanduser()
    try:
        checks = _format_checks(place)
    except (DataError, RequestError) as error:
        checks = [Check("data", WARN, str(error))]
    return [*checks, *check_place(place if place.exists() else place.parent)]


def _format_checks(place: Path) -> list[Check]:
    from pretrainkit.data.packed import is_packed_folder, read_packed_manifest
    from pretrainkit.data.shard_set import is_shard_folder, open_shards

    if is_packed_folder(place):
        record = read_packed_manifest(place)
        assert record
        padding = record.num_padding / max(record.num_tokens + record.num_padding, 1)
        return [
            _amount("packed Arrow", record.num_sequences, "sequences", record.num_tokens),
            Check("padding in the data", FINE if padding < 0.05 else WARN, f"{padding:.1%} of the tokens"),
        ]
    if is_shard_folder(place):
        shards = open_shards(place)
        return [_amount("WebDataset token shards", shards.num_samples, "samples", shards.num_tokens)]
    if place.is_dir() and not any(place.glob("*.idx")):
        return [_raw_folder(place)]
    if place.is_file() and place.suffix not in (".bin", ".idx"):
        return [
            Check(
                "data format",
                WARN,
                f"{place.name}: text, {format_bytes(place.stat().st_size)}; it must be tokenized while training",
                "tools/preprocess_data.py makes .bin/.idx of it once",
            )
        ]
    return _pair_checks(place)


def _raw_folder(folder: Path) -> Check:
    endings = sorted({path.suffix or "no ending" for path in folder.rglob("*") if path.is_file()})
    return Check(
        "data format",
        WARN,
        f"a folder of {', '.join(endings) or 'nothing'}: no prepared token ids",
        "tools/preprocess_data.py or tools/pack_dataset.py prepares them once",
    )


def _pair_checks(place: Path) -> list[Check]:
    from pretrainkit.data.indexed import IndexedDataset
    from pretrainkit.data.manifest import read_manifest
    from pretrainkit.data.pairs import find_pairs

    checks, tokens, documents = [], 0, 0
    for prefix in find_pairs(place):
        dataset, manifest = IndexedDataset(prefix), read_manifest(prefix)
        tokens, documents = tokens + dataset.num_tokens, documents + dataset.num_documents
        eod = manifest.tokenizer.eod_id if manifest else None
        bos = manifest.tokenizer.bos_id if manifest else None
        looked = [dataset.document(int(number)) for number in _spread(dataset.num_documents)]
        checks += _document_ends(prefix.name, looked, eod, bos)
    return [_amount(".bin/.idx token ids", documents, "documents", tokens), *checks]


def _document_ends(name: str, documents: list[Any], eod: int | None, bos: int | None) -> list[Check]:
    """Whether documents end with EOD and begin with one BOS at most."""
    documents = [ids for ids in documents if len(ids)]
    checks = []
    if eod is None:
        last = [int(ids[-1]) for ids in documents]
        eod = (
            max(set(last), key=last.count) if last and last.count(max(set(last), key=last.count)) == len(last) else None
        )
        if eod is None:
            checks.append(
                Check("ends of documents", WARN, f"{name}: documents end with different tokens: no EOD", "--append-eod")
            )
    else:
        missing = sum(int(ids[-1]) != eod for ids in documents)
        found = f"{name}: {missing} of {len(documents)} documents that were looked at don't end with EOD ({eod})"
        checks.append(Check("ends of documents", WARN if missing else FINE, found, "--append-eod" if missing else ""))
    twice = sum(len(ids) > 1 and bos is not None and int(ids[0]) == int(ids[1]) == bos for ids in documents)
    if twice:
        checks.append(
            Check("BOS", WARN, f"{name}: {twice} documents begin with two BOS", "take BOS out of the text, or --no-bos")
        )
    return checks


def _spread(count: int) -> Iterable[int]:
    if not count:
        return []
    return np.unique(np.linspace(0, count - 1, min(count, LOOKED_AT_DOCUMENTS)).astype(int)).tolist()


def _amount(form: str, rows: int, unit: str, tokens: int) -> Check:
    return Check("amount of data", TOLD, f"{form}: {format_count(rows)} {unit}, {format_count(tokens)} tokens")


def check_place(place: Path) -> list[Check]:
    """The file system that data lies on, and whether it is cut into too many small files."""
    kind = file_system(place)
    checks = []
    if kind in NETWORK_FILE_SYSTEMS:
        checks.append(
            Check("file system", WARN, f"{place} lies on {kind}", "copy it to a local or parallel file system")
        )
    elif kind in PARALLEL_FILE_SYSTEMS:
        checks.append(
            Check("file system", TOLD, f"{place} lies on {kind}: large files want striping (lfs setstripe -c 8)")
        )
    else:
        checks.append(Check("file system", FINE, f"{place} lies on {kind}"))
    if place.is_dir():
        sizes = [entry.stat().st_size for entry in _files(place)]
        small = sum(size < SMALL_FILE_BYTES for size in sizes)
        many = small > MANY_FILES
        found = f"{len(sizes)} files, {small} of them under 1 MiB, {format_bytes(sum(sizes))} in all"
        checks.append(
            Check(
                "number of files", WARN if many else FINE, found, "join them: token shards or .bin/.idx" if many else ""
            )
        )
    return checks


def _files(folder: Path, most: int = 200_000) -> Iterable[os.DirEntry[str]]:
    waiting, seen = [str(folder)], 0
    while waiting and seen < most:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif entry.is_file():
                    seen += 1
                    yield entry


def file_system(place: Path) -> str:
    """The type of the file system that a path lies on, such as ext4, lustre or nfs4."""
    best, kind = "", "unknown"
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return kind
    real = str(place.resolve())
    for line in mounts:
        _, point, name, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, name
    return kind


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
