"""What is seen and advised, but not measured: debug variables, settings of the program, its tokenizer, the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LOOK_AT, UNCERTAIN, FINE, NOTED, NOT_APPLICABLE = STATES = ("look at", "uncertain", "fine", "noted", "doesn't apply")
"""Of a check, in the order of the report."""

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
SHORT_EPOCH_STEPS = 200
"""Workers that start again so often are noticed: a start takes about a second."""
MANY_SHAPES = 2
VISIBLE = 0.05
"""Part of the time for the optimizer that is worth a look."""
FUSED_OPTIMIZERS = ("Adam", "AdamW", "SGD")
"""Of torch; they take fused=True."""
BUSY_MACHINE = 0.15
"""Share of the machine's cores that others may use without a warning."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at, or tried."""

    what: str
    state: str
    """One of STATES."""
    found: str
    change: str = ""


@dataclass(frozen=True)
class Setting:
    """One row: what it is, when it costs time, what was found, and the change."""

    what: str
    is_slow: Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], object]
    """By the facts of a rank, its loader's, and what was observed of it."""
    found: str
    change: str


SETTINGS = (
    Setting(
        "pinned memory",
        lambda facts, loader, seen: facts["device"] != "cpu" and loader and not loader["pin_memory"],
        "batches are copied to the GPU from pageable memory",
        "DataLoader(..., pin_memory=True), and .to(device, non_blocking=True)",
    ),
    Setting(
        "prefetching",
        lambda facts, loader, seen: loader.get("num_workers") and (loader.get("prefetch_factor") or 2) < 2,
        "each worker prepares one batch ahead",
        "DataLoader(..., prefetch_factor=4)",
    ),
    Setting(
        "workers of an epoch",
        lambda facts, loader, seen: (
            loader.get("num_workers")
            and not loader["persistent_workers"]
            and (loader["batches"] or SHORT_EPOCH_STEPS) < SHORT_EPOCH_STEPS
        ),
        "workers are started again for every short epoch",
        "DataLoader(..., persistent_workers=True) (Trainer: dataloader_persistent_workers=True)",
    ),
    Setting(
        "fused optimizer",
        lambda facts, loader, seen: (
            seen["phases_s"].get("optimizer", 0.0) > VISIBLE * seen["wall_s"]
            and any(item["class"] in FUSED_OPTIMIZERS and not item["fused"] for item in facts["optimizers"])
        ),
        "the optimizer's step is a visible part of the time, and made of many small ones",
        "fused=True for the optimizer",
    ),
    Setting(
        "precision",
        lambda facts, loader, seen: (
            facts["device"] != "cpu"
            and facts["dtypes"] == ["torch.float32"]
            and facts["attention_dtype"] in ("", "torch.float32")
        ),
        "the model computes in float32",
        'bf16, if the training bears it: torch.autocast("cuda", torch.bfloat16) (Trainer: bf16=True)',
    ),
    Setting(
        "deterministic algorithms",
        lambda facts, loader, seen: facts["deterministic"],
        "torch.use_deterministic_algorithms is on",
        "turn it off where runs needn't be equal bit by bit",
    ),
    Setting(
        "CPU binding",
        lambda facts, loader, seen: facts["affinity"] < facts["cpus"],
        "the process is bound to fewer cores than its part of the machine",
        "taskset, numactl or the scheduler's --cpus-per-task",
    ),
    Setting(
        "new shapes",
        lambda facts, loader, seen: seen["compiled_frames"] > MANY_SHAPES,
        "torch.compile compiles again for new shapes of batches",
        "batches of one shape (packed, or pad_to_multiple_of), or torch.compile(dynamic=True)",
    ),
    Setting(
        "padding side",
        lambda facts, loader, seen: facts["tokenizer"].get("padding_side") == "left",
        "left, in the program's tokenizer: a model in training sees padding first",
        'tokenizer.padding_side = "right"',
    ),
    Setting(
        "padding token",
        lambda facts, loader, seen: (
            facts["tokenizer"].get("pad_token_id") is not None
            and facts["tokenizer"]["pad_token_id"] == facts["tokenizer"]["eos_token_id"]
        ),
        "PAD = EOS in the program's tokenizer: a collator that masks padding by its id (as "
        "DataCollatorForLanguageModeling) masks every end of a document, too, and the model never learns to stop",
        "mask by attention_mask, or add a padding token of its own; packed data needs none",
    ),
)


def check_settings(rank: dict[str, Any]) -> list[Check]:
    """The rows that hold for a rank."""
    facts = rank["facts"]
    return [
        Check(row.what, LOOK_AT, row.found, row.change)
        for row in SETTINGS
        if row.is_slow(facts, facts["loader"], rank["observed"])
    ]


def debug_variables(variables: dict[str, str], *, on_gpu: bool) -> dict[str, str]:
    """Variables for finding faults that cost time, name -> value."""
    return {
        name: variables[name]
        for name, (harmless, _) in DEBUG_VARIABLES.items()
        if variables.get(name)
        and variables[name] not in harmless.split()
        and (on_gpu or not name.startswith(_CUDA_ONLY))
    }


def check_environment(found: dict[str, str]) -> list[Check]:
    """Debug variables that are set."""
    return [
        Check("debug variable", LOOK_AT, f"{name}={value}: {DEBUG_VARIABLES[name][1]}", f"unset {name}")
        for name, value in found.items()
    ] or [Check("debug variables", FINE, "none is set")]


def check_machine(machine: dict[str, Any]) -> list[Check]:
    """Who else used GPUs and cores meanwhile."""
    others, gpus = machine["cpu_used_by_others"], ", ".join(map(str, machine["used_gpus"]))
    text = f"others used {others:.0%} of the machine's {machine['cores']} cores"
    change = "diagnose on a quiet machine for narrow intervals"
    is_busy = others > BUSY_MACHINE
    checks = [Check("sharing of the CPU", LOOK_AT if is_busy else FINE, text, change if is_busy else "")]
    if gpus:
        text = f"others hold memory of GPU {gpus}, and may compute there"
        checks.append(Check("sharing of the GPU", LOOK_AT, text, "take a GPU of its own"))
    return checks
