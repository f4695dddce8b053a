"""Variables that move caches, which would fill a home, to a group's disk."""

from __future__ import annotations

CACHES = {
    "HF_HOME": "huggingface",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "WANDB_CACHE_DIR": "wandb",
    "WANDB_DATA_DIR": "wandb",
    "WANDB_CONFIG_DIR": "wandb",
    "MPLCONFIGDIR": "matplotlib",
    "XDG_CACHE_HOME": "xdg",
}
"""Variable -> folder in cache_dir."""
HOME_CACHES = {
    "HF_HOME": ".cache/huggingface",
    "TRITON_CACHE_DIR": ".triton",
    "WANDB_CACHE_DIR": ".cache/wandb",
}
"""Variables of caches that grow by gigabytes -> their default folder in the home."""
