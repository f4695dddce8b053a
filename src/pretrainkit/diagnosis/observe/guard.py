"""Keeps a diagnosed program from changing files that were there before, and from sending anything.

What it writes goes to a scratch folder, trackers are offline, and nothing is committed to a model hub.
Devices, caches, and what is new in temporary folders are left alone. A file that was redirected is read, asked for and
changed where it went, by every process of the program that has torch.
"""

# Every file that the program opens comes through here; pathlib would cost it more.
# ruff: noqa: PTH100, PTH114, PTH118
from __future__ import annotations

import atexit
import builtins
import contextlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from pretrainkit.logs import get_logger

log = get_logger(__name__)

_CACHES = ("HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_HOME")
_COMPILERS = ("torchinductor_", "triton_", "torch_compile_debug")
"""Folders in a temporary folder that outlive programs and hold nothing but what can be made again."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC


def temporary_folders() -> list[str]:
    """Real paths of this machine's, the innermost first."""
    found = {os.path.realpath(place) for place in (tempfile.gettempdir(), "/tmp", "/var/tmp")}
    return sorted(found, key=len, reverse=True)


def old_temporary_entries() -> tuple[str, ...]:
    """What temporary folders hold now: outputs of a run may be among it."""
    found: list[str] = []
    for folder in temporary_folders():
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            found += [entry.path for entry in entries if not entry.name.startswith(_COMPILERS)]
    return tuple(found)


def offline(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Variables that make trackers write to `folder` in place of their server; what is off already stays off."""
    variables = {"MLFLOW_TRACKING_URI": (folder / "mlflow").as_uri(), "WANDB_DIR": str(folder)}
    if environment.get("WANDB_MODE") not in ("disabled", "offline", "dryrun"):
        variables["WANDB_MODE"] = "offline"
    return variables


class Redirection:
    """Where files that the program wants to write really go."""

    def __init__(self, folder: Path, old_temporary: Iterable[str] = ()) -> None:
        self._folder = str(folder)
        self._temporary = [place + "/" for place in temporary_folders()]
        self._old_temporary = frozenset(old_temporary)
        home = Path.home()
        places = ["/dev", "/proc", "/sys", home / ".cache", home / ".triton", folder.parent]
        places += [os.environ[name] for name in _CACHES if os.environ.get(name)]
        self._free = tuple(os.path.realpath(str(place)) + "/" for place in places)
        self._real_parents: dict[str, str] = {}
        self.new_folders: list[str] = []
        """Folders that the program has made in places where its files don't go."""
        self.remove_folder: Callable[[str], None] = os.rmdir

    def target(self, path: Any, *, keep: bool) -> Any:
        """The path to write to; with `keep` it holds what is in the file now."""
        real = self._real(path)
        if real is None or self._is_free(real):
            return path
        moved = self._folder + real
        if not os.path.lexists(moved):
            Path(moved).parent.mkdir(parents=True, exist_ok=True)
            if keep and Path(real).is_file():
                shutil.copyfile(real, moved)
        return moved

    def place(self, path: Any) -> Any:
        """Where a file is now."""
        if not os.path.lexists(self._folder):  # nothing was redirected yet
            return path
        real = self._real(path)
        if real is None or self._is_free(real):
            return path
        moved = self._folder + real
        return moved if os.path.lexists(moved) else path

    def remove_new_folders(self) -> None:
        """Take away the folders that the program has made and that hold nothing."""
        while self.new_folders:
            with contextlib.suppress(OSError):
                self.remove_folder(self.new_folders.pop())

    def is_protected(self, path: Any) -> bool:
        """Whether there is a file or folder that is neither redirected nor in a free place."""
        real = self._real(path)
        if real is None or not os.path.lexists(real):
            return False
        return not self._is_free(real) and not os.path.lexists(self._folder + real)

    def _real(self, path: Any) -> str | None:
        """The absolute path without links; None for file descriptors and paths in bytes."""
        if not isinstance(path, (str, os.PathLike)):
            return None
        text = os.fspath(path)
        if not isinstance(text, str):
            return None
        if os.path.islink(text):
            return os.path.realpath(text)
        # Loops open file after file of a folder: one question to a file system of the network is enough.
        parent, name = os.path.split(os.path.abspath(text))
        if parent not in self._real_parents:
            self._real_parents[parent] = os.path.realpath(parent)
        return os.path.join(self._real_parents[parent], name)

    def _is_free(self, real: str) -> bool:
        if real.startswith(self._free):
            return True
        for folder in self._temporary:
            if real.startswith(folder):
                name = real[len(folder) :].partition("/")[0]
                return folder + name not in self._old_temporary
        return False


SAVE_TO_FOLDERS = (
    ("transformers.modeling_utils", "PreTrainedModel"),
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase"),
    ("transformers.processing_utils", "ProcessorMixin"),
)
"""Classes whose save_pretrained writes by compiled code, too."""


def install_late(moved: Redirection) -> None:
    """Redirect the savers of packages that the program has imported by now; harmless when called again."""
    hold_back_commits()
    for module_name, class_name in SAVE_TO_FOLDERS:
        owner: Any = getattr(sys.modules.get(module_name), class_name, None)
        save = getattr(owner, "save_pretrained", None)
        if save is None or hasattr(save, "is_guarded"):
            continue

        def guarded(self: Any, save_directory: Any, *args: Any, _save: Any = save, **kwargs: Any) -> Any:
            return _save(self, moved.target(save_directory, keep=False), *args, **kwargs)

        guarded.is_guarded = True  # type: ignore[attr-defined]
        owner.save_pretrained = guarded


def hold_back_commits() -> None:
    """Let commits to a Hugging Face hub from this process do nothing; harmless when called again."""
    hub: Any = sys.modules.get("huggingface_hub.hf_api")
    if hub is None or hasattr(hub.HfApi.create_commit, "is_held_back"):
        return

    def create_commit(self: Any, repo_id: str, *_: Any, run_as_future: bool = False, **__: Any) -> Any:
        log.warning("a diagnosis doesn't upload: the commit to %s is left out", repo_id)
        url = f"{self.endpoint}/{repo_id}/commit/0"
        info = hub.CommitInfo(commit_url=url, commit_message="", commit_description="", oid="0")
        if not run_as_future:
            return info
        future: Future[Any] = Future()
        future.set_result(info)
        return future

    create_commit.is_held_back = True  # type: ignore[attr-defined]
    hub.HfApi.create_commit = create_commit


def install(folder: Path, old_temporary: Iterable[str] = ()) -> Redirection:
    """Redirect what this process writes from now on to `folder`; `old_temporary` are not free to be written to."""
    moved = Redirection(folder, old_temporary)
    _redirect_open(moved)
    _note_new_folders(moved)
    _redirect_changes(moved)
    _redirect_questions(moved)
    import torch

    save = torch.save
    torch.save = lambda obj, f, *args, **kwargs: save(obj, moved.target(f, keep=False), *args, **kwargs)
    with contextlib.suppress(ImportError):
        import safetensors.torch

        save_file: Any = safetensors.torch.save_file
        safetensors.torch.save_file = lambda tensors, filename, *args, **kwargs: save_file(
            tensors, moved.target(filename, keep=False), *args, **kwargs
        )
    atexit.register(moved.remove_new_folders)
    return moved


def _redirect_open(moved: Redirection) -> None:
    plain_open: Any = io.open
    system: Any = os
    open_descriptor = system.open

    def guarded_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(mode, str) and set(mode) & set("wax+"):
            file = moved.target(file, keep="w" not in mode)
            mode = mode.replace("x", "w")
        else:
            file = moved.place(file)
        return plain_open(file, mode, *args, **kwargs)

    def guarded_descriptor(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is None:
            path = moved.target(path, keep=True) if flags & _WRITING else moved.place(path)
        return open_descriptor(path, flags, *args, **kwargs)

    builtins.open = io.open = guarded_open
    system.open = guarded_descriptor


def _note_new_folders(moved: Redirection) -> None:
    system: Any = os
    make, moved.remove_folder = system.mkdir, system.rmdir

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        make(path, *args, **kwargs)
        if kwargs.get("dir_fd") is None and moved.is_protected(path):
            moved.new_folders.append(os.path.realpath(os.fspath(path)))

    system.mkdir = mkdir


def _redirect_changes(moved: Redirection) -> None:
    """Names and properties of files: changed where a file was redirected, and otherwise left as they are."""

    def of_two(call: Callable[..., Any], *, source_stays: bool) -> Callable[..., Any]:
        def changed(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if not source_stays and moved.is_protected(source):
                return None
            return call(
                source if source_stays else moved.place(source), moved.target(target, keep=False), *args, **kwargs
            )

        return changed

    def of_one(call: Callable[..., Any]) -> Callable[..., Any]:
        def changed(path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is not None:  # from within rmtree, whose own path was looked at
                return call(path, *args, **kwargs)
            if moved.is_protected(path):
                return None
            return call(moved.place(path), *args, **kwargs)

        return changed

    system: Any = os
    for name in ("rename", "replace"):
        setattr(system, name, of_two(getattr(system, name), source_stays=False))
    for name in ("link", "symlink"):
        setattr(system, name, of_two(getattr(system, name), source_stays=True))
    for name in ("remove", "unlink", "rmdir", "chmod", "utime", "truncate", "setxattr"):
        if hasattr(system, name):
            setattr(system, name, of_one(getattr(system, name)))
    shutil.rmtree = of_one(shutil.rmtree)  # type: ignore[assignment]


def _redirect_questions(moved: Redirection) -> None:
    """A redirected file is there, for those who ask."""

    def asked(call: Callable[..., Any]) -> Callable[..., Any]:
        def answer(path: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return call(path, *args, **kwargs)
            except FileNotFoundError:
                place = path if kwargs.get("dir_fd") is not None else moved.place(path)
                if place == path:
                    raise
                return call(place, *args, **kwargs)

        return answer

    system: Any = os
    for name in ("stat", "listxattr", "getxattr"):
        if hasattr(system, name):
            setattr(system, name, asked(getattr(system, name)))
