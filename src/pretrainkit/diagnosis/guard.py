"""Keeps a diagnosed program from changing files that it had written before: what it writes goes to a scratch folder.

Temporary folders, caches and devices are left alone. A file that was redirected is read from where it went.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Redirection:
    """Where files that the program wants to write really go."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        home = Path.home()
        caches = [
            os.environ.get(name) for name in ("HF_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_HOME")
        ]
        places = [tempfile.gettempdir(), "/tmp", "/dev", "/proc", "/sys", "/var/tmp", home / ".cache", home / ".triton"]
        self._free = tuple(
            os.path.realpath(place) + "/" for place in [*map(str, places), *caches, str(folder.parent)] if place
        )
        self._moved: dict[str, str] = {}
        self.new_folders: list[str] = []
        """Folders that the program has made in places where its files don't go."""
        self.remove_folder: Callable[[str], None] = os.rmdir

    def target(self, path: Any, *, keep: bool) -> Any:
        """The path to write to; with `keep` it holds what is in the file now."""
        if not isinstance(path, (str, os.PathLike)):
            return path
        real = os.path.realpath(os.fspath(path))
        if not isinstance(real, str) or real.startswith(self._free):
            return path
        moved = self._folder + real
        if real not in self._moved:
            Path(moved).parent.mkdir(parents=True, exist_ok=True)
            if keep and Path(real).is_file():
                shutil.copyfile(real, moved)
            self._moved[real] = moved
        return moved

    def place(self, path: Any) -> Any:
        """Where a file is read from."""
        if self._moved and isinstance(path, (str, os.PathLike)):
            return self._moved.get(os.path.realpath(os.fspath(path)), path)
        return path

    def remove_new_folders(self) -> None:
        """Take away the folders that the program has made and that hold nothing."""
        while self.new_folders:
            with contextlib.suppress(OSError):
                self.remove_folder(self.new_folders.pop())

    def is_protected(self, path: Any) -> bool:
        """Whether a file or folder is neither redirected nor in a free place."""
        try:
            real = os.path.realpath(os.fspath(path))
        except TypeError:
            return False
        return real not in self._moved and not real.startswith(self._free)


SAVE_TO_FOLDERS = (
    ("transformers.modeling_utils", "PreTrainedModel"),
    ("transformers.tokenization_utils_base", "PreTrainedTokenizerBase"),
    ("transformers.processing_utils", "ProcessorMixin"),
)
"""Classes whose save_pretrained writes by compiled code, too."""


def install_late(moved: Redirection) -> None:
    """Redirect the savers of packages that the program has imported by now; harmless when called again."""
    for module_name, class_name in SAVE_TO_FOLDERS:
        owner: Any = getattr(sys.modules.get(module_name), class_name, None)
        save = getattr(owner, "save_pretrained", None)
        if save is None or hasattr(save, "is_guarded"):
            continue

        def guarded(self: Any, save_directory: Any, *args: Any, _save: Any = save, **kwargs: Any) -> Any:
            return _save(self, moved.target(save_directory, keep=False), *args, **kwargs)

        guarded.is_guarded = True  # type: ignore[attr-defined]
        owner.save_pretrained = guarded


def install(folder: Path) -> Redirection:
    """Redirect what this process writes from now on to `folder`."""
    moved = Redirection(folder)
    _redirect_open(moved)
    _note_new_folders(moved)
    _redirect_renames(moved)
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


def _note_new_folders(moved: Redirection) -> None:
    system: Any = os
    make, moved.remove_folder = system.mkdir, system.rmdir

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        make(path, *args, **kwargs)
        if kwargs.get("dir_fd") is None and moved.is_protected(path):
            moved.new_folders.append(os.path.realpath(os.fspath(path)))

    system.mkdir = mkdir


def _redirect_open(moved: Redirection) -> None:
    plain_open: Any = io.open

    def guarded_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(mode, str) and set(mode) & set("wax+"):
            file = moved.target(file, keep="w" not in mode)
            mode = mode.replace("x", "w")
        else:
            file = moved.place(file)
        return plain_open(file, mode, *args, **kwargs)

    builtins.open = io.open = guarded_open


def _redirect_renames(moved: Redirection) -> None:
    def redirected(call: Callable[..., Any]) -> Callable[..., Any]:
        def rename(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if moved.is_protected(source):
                return None  # the file stays where it is
            return call(moved.place(source), moved.target(target, keep=False), *args, **kwargs)

        return rename

    def ignored(call: Callable[..., Any]) -> Callable[..., Any]:
        def remove(path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is not None:  # from within rmtree, whose own path was looked at
                return call(path, *args, **kwargs)
            if moved.is_protected(path):
                return None
            return call(moved.place(path), *args, **kwargs)

        return remove

    system: Any = os
    for name in ("rename", "replace"):
        setattr(system, name, redirected(getattr(system, name)))
    for name in ("remove", "unlink", "rmdir"):
        setattr(system, name, ignored(getattr(system, name)))
    shutil.rmtree = ignored(shutil.rmtree)  # type: ignore[assignment]
