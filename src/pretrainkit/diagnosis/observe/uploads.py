"""Keeps a program under diagnosis from publishing: trackers are offline, commits to a Hugging Face hub are left out.

A namespace doesn't hold back the network, which downloads and ranks need.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from pretrainkit.logs import get_logger

log = get_logger(__name__)


def offline(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Variables that make trackers write to `folder` in place of their server; what is off already stays off."""
    variables = {"MLFLOW_TRACKING_URI": (folder / "mlflow").as_uri(), "WANDB_DIR": str(folder)}
    if environment.get("WANDB_MODE") not in ("disabled", "offline", "dryrun"):
        variables["WANDB_MODE"] = "offline"
    return variables


def hold_back_commits() -> None:
    """Let commits to a Hugging Face hub from this process do nothing."""
    hub: Any = importlib.import_module("huggingface_hub.hf_api")

    def create_commit(self: Any, repo_id: str, *_: Any, run_as_future: bool = False, **__: Any) -> Any:
        log.warning("a diagnosis doesn't upload: the commit to %s is left out", repo_id)
        url = f"{self.endpoint}/{repo_id}/commit/0"
        done: Future[Any] = Future()
        done.set_result(hub.CommitInfo(commit_url=url, commit_message="", commit_description="", oid="0"))
        return done if run_as_future else done.result()

    hub.HfApi.create_commit = create_commit
