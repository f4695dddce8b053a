"""What the release gate runs both models on: short prompts in several languages, a long one, held-out text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pretrainkit.checkpoint.formats.hf_files import readable_folder
from pretrainkit.config.schema import ModelShape
from pretrainkit.errors import RequestError
from pretrainkit.imports import heavy_imports
from pretrainkit.machine import available_memory_bytes
from pretrainkit.release.report import Check

SEQUENCE_TOKENS = 512
"""Tokens of a held-out sequence, and of the end of the long prompt whose logits are compared, by default."""
LONG_TOKENS = 16_384
"""Most tokens that the long prompt has by default: on a CPU attention takes seconds to minutes for them."""
PAST_BOUNDARY = 64
"""Tokens of the long prompt after the last boundary."""

SHORT = {
    "English": "The quick brown fox jumps over the lazy dog. In 1969, people first walked on the Moon, and",
    "Japanese": "吾輩は猫である。名前はまだ無い。どこで生れたか頓と見当がつかぬ。東京の天気は",
    "Chinese": "人工智慧的發展改變了許多產業。今天天气很好，我们一起去公园散步，然后",
    "Korean": "대한민국의 수도는 서울이다. 기계 학습 모델을 훈련하려면 많은 데이터가 필요하며,",
    "code": "def fibonacci(n: int) -> int:\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n",
    "numbers": "3.14159 26535 89793 23846; 2 + 2 = 4; 7 * 8 = 56; 0x1F600 \U0001f600 \t\n\n  £€¥ ©",
}
"""Name -> prompt."""


def long_text() -> str:
    """About 400,000 characters of English: the chapters of the language reference that ship with Python."""
    import pydoc_data.topics

    return "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))


def short_texts(count: int) -> list[str]:
    """The short prompts, and beginnings of chapters of the language reference, evenly spread."""
    import pydoc_data.topics

    texts, chapters = list(SHORT.values())[:count], [text for _, text in sorted(pydoc_data.topics.topics.items())]
    places = range(count - len(texts))
    return texts + [" ".join(chapters[len(chapters) * i // len(places)].split()[:30]) for i in places]


def write_tokens(
    released: Path,
    shape: ModelShape,
    boundaries: Mapping[str, int],
    folder: Path,
    *,
    long_tokens: int | None,
    num_sequences: int,
    text: Path | None,
) -> tuple[list[str], Check]:
    """Tokenise the prompts and the held-out text into `tokens.pt`; the prompts' names, and what the long one reaches.

    The long prompt and each held-out sequence have `long_tokens`, or the model's context where that is shorter. By
    default they have SEQUENCE_TOKENS, and the prompt goes past every one of `boundaries` (`hf_config`) that LONG_TOKENS
    and half of the available memory allow. `compared` is how many logits of a prompt's end are kept.
    """
    with heavy_imports():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401  both need most of transformers

    tokenizer = AutoTokenizer.from_pretrained(readable_folder(released), local_files_only=True, trust_remote_code=False)
    length = min(long_tokens or SEQUENCE_TOKENS, shape.max_position_embeddings)
    long = length if long_tokens else _past_boundaries(length, boundaries, shape)
    content = text.read_text(encoding="utf-8") if text else long_text()
    # No tokenizer here packs more than 16 characters into a token on average.
    ids = tokenizer(content[: 16 * (long + length * num_sequences)], add_special_tokens=False)["input_ids"]
    long = max(length, min(long, len(ids) - length))
    count = min(num_sequences, (len(ids) - long) // length)
    if count < 1:
        raise RequestError(
            f"{len(ids)} tokens of held-out text", needed=f"at least {2 * length}", action="give a longer text"
        )
    held_out = torch.tensor(ids[long : long + length * count]).reshape(count, length)
    texts = {name: tokenizer(prompt)["input_ids"][:length] for name, prompt in SHORT.items()}
    texts["long"] = ids[:long]
    tokens = [torch.tensor([prompt]) for prompt in texts.values()]
    torch.save({"prompts": tokens, "held_out": held_out, "compared": length}, folder / "tokens.pt")
    return list(texts), _reached(long, boundaries)


def _past_boundaries(length: int, boundaries: Mapping[str, int], shape: ModelShape) -> int:
    """Tokens of the long prompt so that it passes each boundary that time and memory allow."""
    for boundary in sorted(boundaries.values()):
        past = min(boundary + PAST_BOUNDARY, shape.max_position_embeddings)
        num_bytes = 4 * past * (shape.vocab_size + 4 * (shape.hidden_size + shape.ffn_hidden_size))
        if past <= LONG_TOKENS and 2 * num_bytes < available_memory_bytes():
            length = max(length, past)
    return length


def _reached(length: int, boundaries: Mapping[str, int]) -> Check:
    """What the report says of the long prompt."""
    past = [f"{name} {tokens}" for name, tokens in boundaries.items() if tokens < length]
    missed = [f"{name} {tokens}" for name, tokens in boundaries.items() if tokens >= length]
    parts = [f"{length} tokens", *([f"past {', '.join(past)}"] if past else [])]
    if missed:
        parts.append(
            f"NOT past {', '.join(missed)}: by itself it has up to {LONG_TOKENS} tokens and half of the "
            f"memory; to pass all: --long-tokens {max(boundaries.values()) + PAST_BOUNDARY}"
        )
    return Check("long prompt", True, "; ".join(parts))
