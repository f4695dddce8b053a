"""What tests ask of transformers, in this process or (`python -m hf_in_process`) in one with another version of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import hf_models


def save_models(names: list[str], folder: str, tokenizer_json: str) -> str:
    """Save random models with a tokenizer, each into a folder of its name; gives the version of transformers."""
    import transformers

    for name in names:
        target = Path(folder, name)
        hf_models.save_random_model(
            name, target, seed=0, dtype="float32", max_shard_size="5GB", vocab_size=320, pad_token_id=2
        )
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=tokenizer_json,
            bos_token="<|begin|>",
            eos_token="<|end|>",
            pad_token="<|pad|>",
            additional_special_tokens=["<|pad|>"],
        )
        tokenizer.save_pretrained(target)
    return str(transformers.__version__)


def outputs(folders: list[str], ids: list[int], texts: list[str]) -> dict[str, Any]:
    """By folder: the logits at the last of the input ids, the most likely token of each, and what texts are as ids."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found = {}
    for folder in folders:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        with torch.no_grad():
            logits = model.eval()(torch.tensor([ids])).logits[0]
        found[folder] = {
            "last": logits[-1].tolist(),
            "argmax": logits.argmax(-1).tolist(),
            "not_loaded": {key: sorted(map(str, names)) for key, names in info.items() if names},
            "texts": [tokenizer(text)["input_ids"] for text in texts],
            "back": [tokenizer.decode(tokenizer(text)["input_ids"]) for text in texts],
            "eos": tokenizer.eos_token_id,
            "special": sorted(tokenizer.all_special_ids),
            "chat": tokenizer.chat_template,
        }
    return found


def class_defaults(names: list[str]) -> dict[str, Any]:
    """By model type: the fields of its config class without arguments."""
    from transformers import AutoConfig

    return {name: json.loads(AutoConfig.for_model(name).to_json_string(use_diff=False)) for name in names}


if __name__ == "__main__":
    function, arguments = json.load(sys.stdin)
    print(json.dumps(globals()[function](*arguments)))
