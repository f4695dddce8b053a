"""Whether llama.cpp can have a model's tokenizer: its converter to GGUF knows pre-tokenizers by a hash of ids.

For a byte-level BPE vocabulary `convert_hf_to_gguf.py` encodes a fixed text, and refuses a tokenizer for which the
SHA-256 of the ids is none that it knows: it could not write which rules split a text into words. Text and hashes are
those of llama.cpp's conversion/base.py (get_vocab_base_pre) as of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import orjson

from pretrainkit.data.tokens.encoder import Encoder
from pretrainkit.data.tokens.template import template_ids

CHECK_TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶\u200d🌫️ (multiple emojis concatenated)"
    " ✅ 🦙🦙 3 33 333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天"
    "～ ------======= нещо на Български ''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's "
    "there, 'RE you sure? 'M not sure I'll make it, 'D you like some tea? We'Ve a'lL"
)
_DIGITS = 16
"""Of a hash, that are compared."""
_KNOWN = {
    "a.x-4.0": "b0a6b1c0bd5998eb",
    "afmoe": "49fc0303c9e0d2c2",
    "bailingmoe": "96a5f08be6259352",
    "bailingmoe2": "9b1be57e70d20d95",
    "bert-bge": "0876d13b50744004",
    "bert-bge-large": "8e62295832751ca1",
    "bloom": "3c30d3ad1d6b6420",
    "chameleon": "60824e3c0d9401f8",
    "chatglm-bpe": "b6e8e1518dc4305b 81d72c7348a9f0eb",
    "codeshell": "7b3e7548e4308f52",
    "cohere2moe": "52df12b4c8d4176e",
    "command-r": "9c2227e4dd922002",
    "dbrx": "a8594e3edff7c29c",
    "deepseek-coder": "347715f544604f91",
    "deepseek-llm": "049ecf7629871e30",
    "deepseek-r1-qwen": "b3f499bb4255f8ca",
    "deepseek-v3": "877081d19cf6996e",
    "exaone": "4e2b24cc4770243d",
    "exaone-moe": "6c81ce329e080288",
    "exaone4": "2085e1638f6c377a",
    "f2llmv2": "862f827721df9560",
    "falcon": "8aeee3860c56296a",
    "falcon-h1": "a6b57017d60e6edb 60476e1243776c4f 3eda48b4c4dc7de7 48f8e02c0359c0bb",
    "falcon3": "9d032fcbd5501f4a",
    "gemma4": "846deafc5b0fa786",
    "gigachat": "ad851be1dba641f2",
    "glm4": "a1336059768a55c9 9ca2dd618e8afaf0 cdf5f35325780597",
    "gpt-2": "0fe1cf6eda062318 3ce83efda5659b07",
    "gpt-4o": "ccc2ef013c104be7",
    "gpt3-finnish": "bc01ce58980e1db4",
    "granite-docling": "53e325976a6e1423",
    "granite-embed-multi-311m": "789696f5946cc0fc",
    "granite-embed-multi-97m": "f241072145675bf8",
    "grok-2": "66b8d4e19ab16c3b",
    "hunyuan": "7e57df22b1fe23a7",
    "hunyuan-dense": "bba3b3366b646dbd",
    "hy_v4": "e6ddf9c6686791c1",
    "jais": "b53802fb28e26d64",
    "jais-2": "bc5108ee1eb6a3d6",
    "jina-v1-en": "c7699093ba4255a9",
    "jina-v2-code": "7967bfa498ade6b7",
    "jina-v2-de": "b3d1dd861f1d4c5c 27949a2493fc4a9f",
    "jina-v2-en": "0876d13b50744004",
    "jina-v2-es": "171aeeedd6fb548d",
    "jina-v5-nano": "a023e9fdc5a11f03",
    "joyai-llm": "b4b8ca1f9769494f",
    "kanana2": "e4d54df1ebc1f2b9",
    "kimi-k2": "81212dc7cdb7e0c1",
    "kormo": "4a2e2abae11ca2b8",
    "laguna": "972da7b59cec44d1",
    "lfm2": "9e454714343b69b9 169bf0296a13c4d9",
    "llama-bpe": "0ef9807a4087ebef",
    "llama4": "d353350c764d8c3b",
    "megrez": "d4c8f286ea6b520b",
    "mellum": "a1e163ecab2e718a",
    "mellum2": "9dcf830ee9990cdb",
    "midm-2.0": "f6791d196f87ce6b",
    "minerva-7b": "1431a23e583c9743",
    "minicpm5": "36f3066e97b7f399",
    "minimax-m2": "f4f37b6c8eb9ea29",
    "modern-bert": "a0b64b4385f12366",
    "mpt": "b6dc8df998e1cfbd",
    "olmo": "b6dc8df998e1cfbd",
    "phi-2": "fcace8b9cac38ce8",
    "pixtral": "0e9433cbbb161f89",
    "poro-chat": "c7ea5862a53e4272",
    "qwen2": "d4540891389ea895 e636dc30a262dcc0",
    "qwen35": "1444df51289cfa80 d30d75d9059f1aa2",
    "refact": "6221ad2852e85ce9",
    "roberta-bpe": "8b5a93ed70405748",
    "sarvam-moe": "62f6fb0a6fd5098c",
    "seed-coder": "d5f1dd6f980fec56",
    "smaug-bpe": "c136ed14d01c2745",
    "smollm": "855059429035d75a",
    "solar-open": "16389f0a1f51ee53",
    "spark2_5": "0a766d034107bc73",
    "stablelm2": "32d85c31273f8019",
    "starcoder": "35d91631860c815f",
    "superbpe": "7dec86086fcc38b6",
    "talkie": "f728162c1315c26e",
    "tekken": "63b97e4253352e6f",
    "tiny_aya": "d772b220ace2baec",
    "trillion": "1994ffd01900cfb3",
    "ufakzeka": "653660222fb704f6",
    "viking": "7fc505bd3104ca10",
    "youtu": "9d70134b369a70e5",
}  # fmt: skip
"""Name of the rules in llama.cpp -> the hashes that have them, each by its first digits."""


def pre_tokenizer(ids: Sequence[int]) -> str | None:
    """llama.cpp's name of the rules of a tokenizer that gives these ids for CHECK_TEXT, its template included."""
    digest = hashlib.sha256(str(list(ids)).encode()).hexdigest()[:_DIGITS]
    return next((name for name, hashes in _KNOWN.items() if digest in hashes.split()), None)


def ids_with_template(encoder: Encoder, tokenizer_json: Path) -> list[int] | None:
    """The ids of CHECK_TEXT with those that the tokenizer's template puts around it.

    None where the converter doesn't look for a hash: of another model than byte-level BPE, such as SentencePiece's.
    """
    described = orjson.loads(tokenizer_json.read_bytes())
    model = described.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        return None
    before, after = template_ids(described.get("post_processor"))
    return [*before, *encoder.encode([CHECK_TEXT])[0].tolist(), *after]


def unknown_note(ids: Sequence[int] | None) -> str:
    """What is to be said of a tokenizer with these ids that llama.cpp doesn't know; empty for others."""
    if ids is None or pre_tokenizer(ids):
        return ""
    digest = hashlib.sha256(str(list(ids)).encode()).hexdigest()
    return (
        f"llama.cpp's converter to GGUF doesn't know this tokenizer's pre-tokenizer (hash {digest[:_DIGITS]}): models "
        "with it can't be converted until it is added there (convert_hf_to_gguf_update.py)"
    )
