"""How Megatron-LM's tools/preprocess_data.py works, for comparison: a pool, a line a task, one writer.

The same mechanism (Pool.imap over lines, chunks of 32, transformers' AutoTokenizer called on each text,
IndexedDatasetBuilder of megatron-core) without its command line. Special tokens of the template are not added,
so that the bytes can be compared. Prints the seconds of its parts as JSON.

    python megatron_way.py INPUT PREFIX TOKENIZER WORKERS
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time

BEGAN = time.monotonic()

from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402


class Encoder:
    """Megatron's: the tokenizer is a class attribute, made once per process."""

    tokenizer = None

    def __init__(self, name: str) -> None:
        self.name = name

    def initializer(self) -> None:
        """Load the tokenizer in a worker."""
        Encoder.tokenizer = AutoTokenizer.from_pretrained(self.name)

    def encode(self, line: str) -> tuple[dict[str, list[int]], dict[str, list[int]], int]:
        """Ids and lengths of a JSON line."""
        text = json.loads(line)["text"]
        ids = Encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
        if ids:
            ids.append(Encoder.tokenizer.eos_token_id)
        return {"text": ids}, {"text": [len(ids)]}, len(line)


def main(source: str, prefix: str, tokenizer: str, workers: int) -> None:
    """Tokenise one file."""
    imported = time.monotonic()
    encoder = Encoder(tokenizer)
    vocab_size = len(AutoTokenizer.from_pretrained(tokenizer))
    with open(source, encoding="utf-8") as lines:  # noqa: PTH123
        pool = multiprocessing.Pool(workers, initializer=encoder.initializer)
        documents = pool.imap(encoder.encode, lines, 32)
        builder = IndexedDatasetBuilder(f"{prefix}_text_document.bin", dtype=DType.optimal_dtype(vocab_size))
        for ids, lengths, _ in documents:
            builder.add_document(ids["text"], lengths["text"])
        builder.finalize(f"{prefix}_text_document.idx")
    print(json.dumps({"import_s": imported - BEGAN, "work_s": time.monotonic() - imported}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
