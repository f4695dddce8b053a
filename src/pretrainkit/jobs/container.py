"""The container of a job: its image, its mounts, and the options of the runtime."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pretrainkit.config.launch import DEFAULT_PYXIS_IMAGE, LaunchConfig
from pretrainkit.errors import RequestError

_SCHEME = re.compile(r"[a-z][a-z-]*://")
_SEPARATORS = re.compile("[:,]")
"""What separates the parts of a mount, and mounts, in the options of Apptainer and pyxis, which have no escapes."""
_NO_SEPARATORS = "no ':' or ',' in the paths of a container's mounts"


@dataclass(frozen=True)
class Container:
    """The container that a job runs in."""

    runtime: str
    """pyxis or apptainer."""
    image: str
    """An absolute path, or a name in a registry as the runtime spells it."""
    mounts: tuple[str, ...]
    """SOURCE:TARGET[:ro]: host folders or files, and where they are in the container."""
    nv: bool
    """Whether Apptainer makes the host's NVIDIA driver available."""

    @property
    def is_local(self) -> bool:
        """Whether the image is a file or folder."""
        return self.image.startswith("/")

    def apptainer_options(self) -> list[str]:
        """Options of `apptainer exec`. The home and the caller's environment aren't passed in, so neither packages in
        ~/.local nor a PYTHONPATH of the host can replace the image's packages; what the job needs is exported."""
        binds = [word for mount in self.mounts for word in ("--bind", mount)]
        return ["--cleanenv", "--no-home", *(["--nv"] if self.nv else []), *binds]

    def pyxis_options(self) -> list[str]:
        """Options of `srun`."""
        mounts = ["--container-mounts", ",".join(self.mounts)]
        return ["--container-image", self.image, *mounts, "--no-container-mount-home"]


def container_of(config: LaunchConfig, *, needs: Iterable[Path], on_gpu: bool) -> Container | None:
    """The container that a job requests; None: it runs on the host.

    Args:
        needs: folders and files that the job reads or writes; they are mounted at the same path.

    Raises:
        RequestError: lists every missing mount and unusable path; or the image is missing.
    """
    runtime = config.runtime
    if runtime == "none":
        return None
    image = config.container_image
    if image is None and runtime == "pyxis":
        image = DEFAULT_PYXIS_IMAGE
    if not image:
        raise RequestError(f"none for {runtime}", needed="a file, folder or registry name", where="--container_image")
    nv = on_gpu if config.nv is None else config.nv
    return Container(runtime, _image(image, runtime), _mounts(config.container_mounts, needs), nv)


def _image(image: str, runtime: str) -> str:
    """The image as the runtime spells it: an absolute path, or the name in a registry."""
    path = Path(image).expanduser()
    if path.exists():
        if path.is_dir() and runtime == "pyxis":
            raise RequestError(
                f"{image} is a folder", needed="a .sqsh file or a registry name for pyxis", where="--container_image"
            )
        return str(path.absolute())
    looks_like_path = image.startswith(("/", "./", "../", "~")) or path.suffix in (".sif", ".sqsh", ".sqfs", ".img")
    if looks_like_path and not _SCHEME.match(image):
        raise RequestError(f"no image {path.absolute()}", needed="an existing file", where="--container_image")
    if runtime == "apptainer":
        return image if _SCHEME.match(image) else f"docker://{image.replace('#', '/', 1)}"
    name = _SCHEME.sub("", image)
    registry, slash, rest = name.partition("/")
    # Without '#', some versions of enroot look for every name at Docker Hub.
    is_registry = slash and "#" not in name and ("." in registry or ":" in registry or registry == "localhost")
    return f"{registry}#{rest}" if is_registry else name


def _mounts(texts: Iterable[str], needs: Iterable[Path]) -> tuple[str, ...]:
    """The requested mounts, and mounts of what the job needs and they don't cover. Raises RequestError."""
    by_target: dict[str, str] = {}
    problems: list[RequestError] = []
    for text in texts:
        with RequestError.collected(problems):
            target, mount = parse_mount(text)
            by_target[target] = mount
    for path in needs:
        # Both a symbolic link and its target must exist inside, under the same name.
        for need in dict.fromkeys([path.absolute(), path.resolve()]):
            same_names = (target for target, mount in by_target.items() if mount.startswith(f"{target}:"))
            if any(need.is_relative_to(name) for name in same_names):
                continue
            if _SEPARATORS.search(str(need)):
                action = "rename it, or mount a folder above it with --container_mounts"
                problems.append(RequestError("can't be mounted", needed=_NO_SEPARATORS, action=action, where=str(need)))
            by_target[str(need)] = f"{need}:{need}"
    RequestError.raise_all(problems)
    return tuple(by_target.values())


def parse_mount(text: str) -> tuple[str, str]:
    """Target and text of a mount, with absolute paths, from SOURCE[:TARGET[:ro]].

    Raises RequestError for another form or a missing source.
    """
    source, *rest = text.split(":")
    path = Path(source).expanduser().absolute()
    target, mode = rest[0] if rest and rest[0] else str(path), rest[1] if len(rest) > 1 else "rw"
    if len(rest) > 2 or mode not in ("ro", "rw") or not target.startswith("/") or "," in f"{path}{target}":
        needed = f"SOURCE[:TARGET[:ro]] with an absolute TARGET; {_NO_SEPARATORS}"
        raise RequestError(f"{text!r}", needed=needed, where="--container_mounts")
    if not path.exists():
        raise RequestError(f"no {path} here to mount", needed="an existing folder or file", where="--container_mounts")
    target = os.path.normpath(target)
    return target, f"{path}:{target}" + (":ro" if mode == "ro" else "")
