"""How Megatron-LM's tools/preprocess_data.py works, for comparison: a pool, a line a task, one writer.

The same mechanism (Pool.imap over lines, chunks of 32, megatron-core's HuggingFaceTokenizer with its defaults,
IndexedDatasetBuilder of megatron-core) without its command line. `direct` calls transformers' tokenizer for the
ids instead, as Megatron's older tokenizer class does. Template tokens are not added, so that the bytes can be
compared. Prints the seconds of its parts as JSON.

    python megatron_way.py INPUT PREFIX TOKENIZER WORKERS [direct]
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time

BEGAN = time.monotonic()

from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder  # noqa: E402
from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer  # noqa: E402


class Encoder:
    """Megatron's: the tokenizer is a class attribute, made once per process."""

    tokenizer: HuggingFaceTokenizer

    def __init__(self, name: str, direct: bool) -> None:
        self.name, self.direct = name, direct

    def initializer(self) -> None:
        """Load the tokenizer in a worker."""
        Encoder.tokenizer = HuggingFaceTokenizer(self.name, use_fast=True)

    def encode(self, line: str) -> tuple[dict[str, list[int]], dict[str, list[int]], int]:
        """Ids and lengths of a JSON line."""
        text = json.loads(line)["text"]
        if self.direct:
            ids = Encoder.tokenizer.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = Encoder.tokenizer.text_to_ids(text)
        if ids:
            ids.append(Encoder.tokenizer.tokenizer.eos_token_id)
        return {"text": ids}, {"text": [len(ids)]}, len(line)


def main(source: str, prefix: str, tokenizer: str, workers: int, direct: bool) -> None:
    """Tokenise one file."""
    imported = time.monotonic()
    encoder = Encoder(tokenizer, direct)
    vocab_size = len(HuggingFaceTokenizer(tokenizer, use_fast=True).tokenizer)
    with open(source, encoding="utf-8") as lines:  # noqa: PTH123
        pool = multiprocessing.Pool(workers, initializer=encoder.initializer)
        documents = pool.imap(encoder.encode, lines, 32)
        builder = IndexedDatasetBuilder(f"{prefix}_text_document.bin", dtype=DType.optimal_dtype(vocab_size))
        for ids, lengths, _ in documents:
            builder.add_document(ids["text"], lengths["text"])
        builder.finalize(f"{prefix}_text_document.idx")
    print(json.dumps({"import_s": imported - BEGAN, "work_s": time.monotonic() - imported}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), "direct" in sys.argv[5:])
