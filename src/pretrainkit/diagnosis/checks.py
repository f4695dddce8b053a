"""What can be checked without measuring: the tokenizer, the special tokens of batches, debug settings, the machine."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrainkit.files import read_object

WARN, FINE, NOTED = "warn", "fine", "noted"

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
LEFT_BY_DEFAULT = ("Llama", "CodeLlama", "Cohere", "Gemma", "XLNet", "CpmAnt")
"""Tokenizer classes of transformers that pad at the left where their files don't say."""
ENOUGH_ROWS = 4
PAD_RIGHT = 'tokenizer.padding_side = "right"'
LOW_CLOCK = 0.9
"""A GPU at work below this share of its highest clock is held back."""
BUSY_MACHINE = 0.15
"""Share of the machine's cores that others may use without a warning."""
_SPECIAL_COUNTS = ("ended_rows", "unended_rows", "ends", "masked_ends", "double_bos")
_CUDA_ONLY = ("CUDA_", "NCCL_", "NVIDIA_", "TORCH_NCCL_", "PYTORCH_NO_CUDA_")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    what: str
    state: str
    """warn: costs time or spoils training; fine; noted: a fact to know."""
    found: str
    change: str = ""


def warning(what: str, found: str, change: str = "") -> Check:
    """What costs time or spoils training."""
    return Check(what, WARN, found, change)


def rated(what: str, is_bad: object, found: str, change: str = "") -> Check:
    """A warning with its change where something is bad; fine otherwise."""
    return Check(what, WARN, found, change) if is_bad else Check(what, FINE, found)


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
    return [
        warning("debug variable", f"{name}={value}: {DEBUG_VARIABLES[name][1]}", f"unset {name}")
        for name, value in found.items()
    ] or [Check("debug variables", FINE, "none is set")]


def check_tokenizer(folder: Path) -> list[Check]:
    """A Hugging Face tokenizer's files: padding and the special tokens of documents."""
    config = read_object(folder / "tokenizer_config.json")
    roles = {**read_object(folder / "special_tokens_map.json"), **config}
    pad, eos, bos = (_content(roles.get(role)) for role in ("pad_token", "eos_token", "bos_token"))
    if not config and not (folder / "tokenizer.json").is_file():
        return [Check("tokenizer", NOTED, f"no files of one in {folder}")]
    checks = [_padding_side(config, pad), _padding_token(pad, eos)]
    if eos is None:
        change = "--eod-token of tools/preprocess_data.py"
        checks.append(warning("end of documents", "the tokenizer has no EOS token", change))
    post = json.dumps(read_object(folder / "tokenizer.json").get("post_processor"))
    if (bos and json.dumps(bos)[1:-1] in post) or config.get("add_bos_token"):
        checks.append(Check("BOS", NOTED, f"the tokenizer puts {bos} before each text: a text that holds it has two"))
    return checks


def _padding_side(config: dict[str, Any], pad: str | None) -> Check:
    by_default = str(config.get("tokenizer_class", "")).startswith(LEFT_BY_DEFAULT)
    if config.get("padding_side", "left" if by_default else "right") == "right":
        return Check("padding side", FINE, "right")
    if pad is None:
        return Check("padding side", NOTED, "left, but it has no padding token")
    return warning("padding side", "left: a model in training sees padding first", PAD_RIGHT)


def _padding_token(pad: str | None, eos: str | None) -> Check:
    if pad is None:
        return Check("padding token", NOTED, "none: packed data needs none")
    if pad != eos:
        return Check("padding token", FINE, f"{pad}, not EOS")
    return warning(
        "padding token",
        f"PAD = EOS ({pad}): a collator that masks padding by its id (DataCollatorForLanguageModeling) takes "
        "every end of a document out of the loss, and the model never learns to stop",
        "mask by attention_mask, or add a padding token of its own; packed data needs none",
    )


def check_batches(batches: list[Any], tokenizer: dict[str, Any] | None) -> list[Check]:
    """What the batches that were trained on show of padding and special tokens, by the program's own tokenizer."""
    if not tokenizer:
        return []
    count = Counter[str]()
    for batch in batches:
        count.update({name: batch.get(name, 0) for name in _SPECIAL_COUNTS})
    checks = []
    if tokenizer.get("padding_side") == "left":
        checks.append(warning("padding side", "left, in the program", PAD_RIGHT))
    pad, eos = tokenizer.get("pad_token_id"), tokenizer.get("eos_token_id")
    if pad is not None and pad == eos:
        found = f"PAD = EOS (id {pad}) in the program: ends of documents may be masked"
        if count["ends"]:
            found = f"PAD = EOS (id {pad}) in the program: {count['masked_ends']} of {count['ends']} EOS are masked"
        is_harmless = count["ends"] and not count["masked_ends"]
        checks.append(rated("padding token", not is_harmless, found, "mask by attention_mask, not by id"))
    elif count["masked_ends"]:
        found = f"{count['masked_ends']} of {count['ends']} EOS are masked: the model doesn't learn to stop there"
        checks.append(warning("EOS in the loss", found, "labels of EOS = its id"))
    rows = count["ended_rows"] + count["unended_rows"]
    if rows:
        found = f"{count['unended_rows']} of {rows} padded rows don't end with EOS"
        many = rows >= ENOUGH_ROWS and count["unended_rows"] > rows / 2
        change = "append tokenizer.eos_token_id to each document"
        checks.append(rated("ends of documents in batches", many, found, change))
    if count["double_bos"]:
        found = f"{count['double_bos']} rows begin with two BOS"
        checks.append(warning("BOS in batches", found, "take BOS out of the text, or add_special_tokens=False"))
    return checks


def check_machine(machine: dict[str, Any]) -> list[Check]:
    """Clocks of the GPUs at work, and who else used GPUs and cores meanwhile."""
    found = [] if machine["gpus"] else [Check("GPU clock and sharing", NOTED, "no GPU is seen")]
    for gpu in machine["gpus"]:
        if gpu["clock_mhz"] is None or not gpu["highest_clock_mhz"]:
            continue
        text = f"GPU {gpu['index']} at {gpu['clock_mhz']:.0f} of {gpu['highest_clock_mhz']:.0f} MHz while at work"
        text += f", {gpu['power_w']:.0f} of {gpu['power_limit_w']:.0f} W, {gpu['temperature_c']:.0f} C"
        held_back = gpu["clock_mhz"] < LOW_CLOCK * gpu["highest_clock_mhz"]
        change = "look at power limit, cooling and nvidia-smi -q -d PERFORMANCE"
        found.append(rated("GPU clock", held_back, text, change))
    if machine["gpu_processes_of_others"]:
        names = ", ".join(item.get("name", "?") for item in machine["gpu_processes_of_others"])
        text = f"other processes compute on it: {names}"
        found.append(warning("sharing of the GPU", text, "take a GPU of its own"))
    others = machine["cpu_used_by_others"]
    if others is not None:
        text = f"others used {others:.0%} of the machine's {machine['cores']} cores"
        change = "diagnose on a quiet machine for narrow intervals"
        found.append(rated("sharing of the CPU", others > BUSY_MACHINE, text, change))
    return found


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
