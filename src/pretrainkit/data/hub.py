"""From a Hugging Face model id or folder to a local folder with its config and tokenizer."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pretrainkit.errors import RequestError
from pretrainkit.logs import masked

CONFIG_AND_TOKENIZER = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "*.model",
    "*.tiktoken",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
)
"""Files of a model repository that are not weights."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(?<!\.json)")
"""The form of a model's name on the hub; one that ends like a file is none."""


def local_folder(hf_model_id: str, *, where: str = "--hf_model_id") -> Path:
    """The absolute folder of a model: the folder itself, or its config and tokenizer from the hub's cache.

    Only what is missing in the cache is downloaded, never weights; a hub that can't be reached is tried once.
    HF_TOKEN and HF_HUB_OFFLINE are respected.
    Raises RequestError when there is no such folder or repository, or it can't be reached.
    """
    folder = Path(hf_model_id).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if not HUB_ID.fullmatch(hf_model_id):
        raise RequestError(
            f"no folder {hf_model_id}, and it can't be a model id of the hub",
            needed="a local folder, or an id of the form owner/name",
            where=where,
        )
    return _snapshot(hf_model_id, where)


def _snapshot(model_id: str, where: str) -> Path:
    from huggingface_hub import snapshot_download

    with hub_errors(model_id, where=where):
        return Path(
            snapshot_download(model_id, allow_patterns=list(CONFIG_AND_TOKENIZER), token=os.environ.get("HF_TOKEN"))
        )


@contextmanager
def hub_errors(model_id: str, *, where: str) -> Iterator[None]:
    """Turns what goes wrong with the hub into a RequestError that says what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", "")
        raise RequestError(
            f"{model_id} is no local folder and not in the hub's cache"
            + (", and HF_HUB_OFFLINE is set" if offline else ", and the hub can't be reached"),
            action=f"fetch it on a machine with network: scripts/prefetch.sh --dir FOLDER --model {model_id}, then use "
            f"FOLDER/models/{model_id}",
            where=where,
        ) from error
    except GatedRepoError as error:
        raise RequestError(
            f"{model_id} is gated and this account has no access to it",
            action="ask for access on its page on the hub, and set HF_TOKEN to a token of that account",
            where=where,
        ) from error
    except RepositoryNotFoundError as error:
        raise RequestError(
            f"no model {model_id} on the hub, or it is private",
            action="check the spelling; for a private model set HF_TOKEN; for a folder check the path",
            where=where,
        ) from error
    except RevisionNotFoundError as error:
        raise RequestError(f"{model_id} has no such revision", needed="a branch, tag or commit", where=where) from error
    except (OSError, ValueError) as error:
        raise RequestError(masked(f"{model_id} can't be had: {error}"), where=where) from error
