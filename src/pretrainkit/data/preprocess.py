"""From text to .bin/.idx pairs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import orjson

from pretrainkit.data.indexed import IndexedDatasetWriter, bin_path, optimal_dtype
from pretrainkit.data.manifest import Manifest, TokenizerRecord, write_manifest
from pretrainkit.data.tokenizer import load_tokenizer
from pretrainkit.errors import DataError, RequestError


@dataclass(frozen=True)
class Request:
    """What to preprocess, and how."""

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer_model: str
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1


def preprocess(request: Request) -> list[Manifest]:
    """Write `<output_prefix>_<key>_document` pairs and their manifests."""
    import tokenizers

    tokenizer = load_tokenizer(request.tokenizer_model)
    if request.append_eod and tokenizer.eod_id is None:
        raise RequestError("--append-eod, but the tokenizer has no EOS token", where=request.tokenizer_model)
    for path in request.inputs:
        if not Path(path).is_file():
            raise RequestError("input file not found", where=path)
    encoder = tokenizers.Tokenizer.from_file(str(tokenizer.json_path))
    encoder.encode_special_tokens = True
    dtype = optimal_dtype(tokenizer.num_ids)
    manifests = []
    for key in request.json_keys:
        prefix = f"{request.output_prefix}_{key}_document"
        num_records = num_documents = num_tokens = 0
        with IndexedDatasetWriter(prefix, dtype) as writer:
            for text in _texts(request.inputs, key):
                num_records += 1
                ids = encoder.encode(text, add_special_tokens=False).ids
                if not ids:
                    continue
                ids += [tokenizer.eod_id] if request.append_eod else []
                writer.add_document(ids)
                num_documents, num_tokens = num_documents + 1, num_tokens + len(ids)
        record = TokenizerRecord(
            request.tokenizer_model,
            tokenizer.sha256,
            tokenizer.largest_id,
            tokenizer.eod_id,
            tokenizer.bos_id,
            "tokenizers",
            {"tokenizers": tokenizers.__version__},
        )
        data = bin_path(prefix).read_bytes()
        manifest = Manifest(
            key=key,
            dtype=dtype.name,
            num_documents=num_documents,
            num_tokens=num_tokens,
            num_records=num_records,
            num_empty=num_records - num_documents,
            num_rejected=0,
            num_blank_lines=0,
            num_text_bytes=0,
            bin_bytes=len(data),
            bin_crc32=zlib.crc32(data),
            append_eod=request.append_eod,
            add_bos=False,
            special_tokens_in_text="plain",
            tokenizer=record,
            inputs=(),
            finished_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        write_manifest(prefix, manifest)
        manifests.append(manifest)
    return manifests


def _texts(paths: tuple[str, ...], key: str) -> Iterator[str]:
    for path in paths:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    yield orjson.loads(line)[key]
                except (orjson.JSONDecodeError, KeyError) as error:
                    raise DataError(f"bad record: {error!r}", where=f"{path}:{number}") from error
