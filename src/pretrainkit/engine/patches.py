"""The engine's rows of the register of patches (`pretrainkit.megatron.patches`): NeMo's, and those for saving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pretrainkit.megatron.patches import Patch, value

NEMO = "nemo_toolkit==2.7.3"
_SAVING = "megatron.core.dist_checkpointing"


CPU = (
    Patch(
        "nemo.lightning.io.pl:_fix_tensors_device",
        value(lambda checkpoint: checkpoint),
        "NeMo moves restored tensors to the GPU, and asserts that there is one",
        NEMO,
    ),
)


def keep_errors(keeping: Callable[[Any], Any]) -> tuple[Patch, ...]:
    """Patches by which `keeping` wraps what the first rank alone does for a checkpoint."""
    targets = (
        f"{_SAVING}.strategies.common:TorchCommonSaveStrategy.save_common",
        f"{_SAVING}.strategies.filesystem_async:FileSystemWriterAsync.finish",
        f"{_SAVING}.serialization:save_config",
    )
    reason = "the first rank alone calls it, between collectives: an error there would let the others wait forever"
    return tuple(Patch(target, keeping, reason) for target in targets)
