"""Completes an output and writes down what it is: its manifest."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from importlib.metadata import version

from pretrainkit.data.indexed.manifest import (
    InputFile,
    Manifest,
    read_manifest,
    tokenizer_record,
    write_manifest_file,
)
from pretrainkit.data.indexed.output import Output, SourceTotals
from pretrainkit.data.indexed.request import Plan
from pretrainkit.data.readers.source import BLOCK_BYTES


class OutputRecorder:
    """Knows what all manifests of a run have in common."""

    def __init__(self, plan: Plan, engine: str) -> None:
        self._plan, self._engine = plan, engine
        self._began = time.monotonic()

    def finish(self, output: Output) -> None:
        """Complete an output's files and write its manifest, all under temporary names."""
        output.finish()
        plan = self._plan
        read = {
            number: output.sources.get(number, SourceTotals(number))
            for number in plan.outputs[output.number].sources
            if plan.request.shard is None or number in output.sources
        }
        totals = list(read.values())
        elapsed_s = time.monotonic() - self._began
        num_input_bytes = sum(source.num_bytes for source in totals)
        for k, key in enumerate(output.keys):
            inputs = tuple(
                InputFile(
                    plan.sources[number].path,
                    plan.sources[number].num_bytes,
                    self._hash(number, source),
                    source.num_records,
                    source.num_tokens[k] if source.num_tokens else 0,
                )
                for number, source in read.items()
            )
            manifest = Manifest(
                key=plan.request.json_keys[k],
                dtype=plan.dtype.name,
                num_documents=key.num_documents,
                num_tokens=key.num_tokens,
                num_records=sum(source.num_records for source in totals),
                num_empty=key.num_empty,
                num_rejected=sum(source.num_rejected for source in totals),
                num_blank_lines=sum(source.num_blank for source in totals),
                num_replaced=sum(source.num_replaced for source in totals),
                num_input_bytes=num_input_bytes,
                bin_bytes=key.tokens_bytes,
                bin_crc32=key.tokens_crc32,
                append_eod=plan.request.append_eod,
                add_bos=plan.request.add_bos,
                special_tokens_in_text=plan.request.special_tokens_in_text,
                tokenizer=tokenizer_record(plan.tokenizer, self._engine, plan.request.verify_tokens),
                inputs=inputs,
                flags=plan.flags(),
                elapsed_s=round(elapsed_s, 3),
                megabytes_per_second=round(num_input_bytes / elapsed_s / 1e6, 3),
                tokens_per_second=round(key.num_tokens / elapsed_s, 1),
                finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
                pretrainkit_version=version("pretrainkit"),
            )
            write_manifest_file(output.path(k, "manifest.json"), manifest)

    def _hash(self, number: int, totals: SourceTotals) -> str:
        """Empty when only a part of the file was read here."""
        num_pieces = -(-self._plan.sources[number].num_bytes // BLOCK_BYTES)
        return totals.digest.hexdigest() if totals.num_pieces == num_pieces else ""

    def manifests(self) -> list[Manifest]:
        """Those of all outputs, as they are on disk."""
        found = [read_manifest(prefix) for output in self._plan.outputs for prefix in output.prefixes]
        return [manifest for manifest in found if manifest is not None]
