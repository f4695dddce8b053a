"""Runs a command where nothing that it writes, changes or deletes stays, by the kernel and not by patches.

The command gets a user and a mount namespace of its own, which an ordinary user may make. Its root is put together from
overlays: it sees every file, and what it changes goes to folders of the scratch folder (overlayfs copies a file
when it is first written). A file system that can't be the lower side of an overlay is mounted read-only, with a copy of
the working folder where that is small. All of its processes are ended with it, daemons, too.

The kernel doesn't hold back what others do for it: servers that it asks by the network, for a container or a job.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import psutil

from pretrainkit import files
from pretrainkit.errors import RequestError

CLONE_NEWNS, CLONE_NEWUSER = 0x0002_0000, 0x1000_0000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC = 0x20, 0x400, 0x800, 0x1000, 0x4000
MS_PRIVATE, MS_RELATIME = 1 << 18, 1 << 21
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
AS_IT_IS = ("/dev", "/proc", "/sys")
"""Devices and the kernel's own files: overlays of them would be empty or without access. /dev/shm is an overlay."""
LARGEST_COPY_BYTES, MOST_ENTRIES = 256 << 20, 20_000
"""What is copied at most, where a working folder, or files of other groups in it, can't be overlaid."""
UNKNOWN_ID = 65534
"""User or group that the namespace doesn't have: an ordinary user's has one user and one group."""
READ_ONLY = "read_only.json"
"""Written before the command is started: places that it can only read."""
GRACE_S = 10.0

_libc = ctypes.CDLL(None, use_errno=True)


def command(words: Sequence[str], scratch: Path, *, keep: Path) -> list[str]:
    """The command line that runs `words` here; what it writes goes to `scratch`, but for the folder `keep`."""
    return [sys.executable, "-m", __name__, str(scratch), str(keep), *words]


def check(keep: Path, output: str) -> None:
    """Raise RequestError where a command that has ended wasn't started, with the end of its output."""
    if not (keep / READ_ONLY).is_file():
        raise RequestError(
            f"the program's files can't be protected here: {(output.strip().splitlines() or ['?'])[-1]}",
            needed="user namespaces and overlayfs for ordinary users (Linux 5.13; sysctl user.max_user_namespaces, "
            "kernel.apparmor_restrict_unprivileged_userns; in Docker --security-opt seccomp=unconfined)",
            action="--in_place runs it with all that it writes and deletes; make a copy of its folders first",
        )


def remove(scratch: Path) -> None:
    """Remove a scratch folder; overlayfs leaves folders in it that nobody may read."""
    shutil.rmtree(scratch, onerror=_make_removable)


def read_only_places(keep: Path) -> list[str]:
    """What the command could only read, or had a copy of, as sentences."""
    path = keep / READ_ONLY
    return list(json.loads(path.read_text())) if path.is_file() else []


def _make_removable(function: object, path: str, _: object) -> None:
    with contextlib.suppress(OSError):
        Path(path).chmod(0o700)
        if Path(path).is_dir() and not Path(path).is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            Path(path).parent.chmod(0o700)
            Path(path).unlink()


def _call(name: str, *arguments: object) -> None:
    """A function of the C library. Raises OSError."""
    words = [os.fsencode(item) if isinstance(item, (str, Path)) else item for item in arguments]
    if getattr(_libc, name)(*words) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _mount(source: object, target: object, kind: str | None, flags: int, options: str | None = None) -> None:
    _call("mount", str(source), str(target), kind, ctypes.c_ulong(flags), options)


def _make_namespaces() -> None:
    """User and mount namespaces, with every user as outside."""
    maps = {
        name: [line.split() for line in Path(f"/proc/self/{name}").read_text().splitlines()]
        for name in ("uid_map", "gid_map")
    }
    own = {"uid_map": os.getuid(), "gid_map": os.getgid()}
    try:
        _call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
    except OSError as error:
        if error.errno == errno.ENOSPC:  # what the kernel says for a limit of 0
            raise OSError(errno.EPERM, "user namespaces are off") from None
        raise
    for name, ranges in maps.items():
        try:  # root may keep all users
            Path(f"/proc/self/{name}").write_text("".join(f"{first} {first} {count}\n" for first, _, count in ranges))
        except OSError:
            Path("/proc/self/setgroups").write_text("deny")
            Path(f"/proc/self/{name}").write_text(f"{own[name]} {own[name]} 1\n")
    _mount("none", "/", None, MS_REC | MS_PRIVATE)


class _Root:
    """The file system that the command sees, put together below a folder."""

    def __init__(self, scratch: Path) -> None:
        self.top = scratch / "root"
        self.read_only: list[str] = []
        self._written, self._work = scratch / "written", scratch / "work"
        fields = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        self._mounts = {Path(field[4].encode().decode("unicode_escape")) for field in fields}
        _mount("tmpfs", self.top, "tmpfs", MS_NOSUID)

    def build(self, place: Path) -> None:
        """Let the command see a folder with all that is below it."""
        target = self._target(place)
        if str(place) in AS_IT_IS:
            target.mkdir(exist_ok=True)
            _mount(place, target, None, MS_BIND | MS_REC)
            if place == Path("/dev") and Path("/dev/shm").is_dir():
                self._overlay(Path("/dev/shm"))
        elif any(mount != place and mount.is_relative_to(place) for mount in self._mounts):
            target.mkdir(exist_ok=True)
            for entry in sorted(place.iterdir()):
                with contextlib.suppress(OSError):  # what this user can't see
                    self._entry(entry)
            with contextlib.suppress(OSError):
                target.chmod(place.stat().st_mode & 0o7777)
        else:
            target.mkdir(exist_ok=True)
            self._overlay(place)

    def show(self, place: Path) -> None:
        """Let the command write to a folder in place."""
        _mount(place, self._target(place), None, MS_BIND)

    def adopt(self, place: Path, *, below: bool) -> None:
        """Make a folder, and what is below it, changeable by the command: overlayfs copies nothing of other groups.

        Called before `build`. Folders of other owners or groups are made in the upper layer, and small files copied.
        """
        left = LARGEST_COPY_BYTES
        inner = islice(place.rglob("*"), MOST_ENTRIES) if below else ()
        for path in (*reversed(place.parents[:-1]), place, *inner):
            with contextlib.suppress(OSError):  # what this user can't see, or what is gone by now
                found, upper = path.lstat(), self._written / path.relative_to("/")
                if UNKNOWN_ID not in (found.st_uid, found.st_gid) or path.is_symlink():
                    continue
                if path.is_dir():
                    upper.mkdir(parents=True, exist_ok=True)
                    shutil.copystat(path, upper)
                elif path.is_file() and found.st_size <= left:
                    left -= found.st_size
                    upper.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(path, upper)

    def copy(self, place: Path) -> None:
        """Give the command a copy of a folder that it could only read, if that is small."""
        if not any(place.is_relative_to(other) for other in self.read_only):
            return
        sizes = [path.lstat().st_size for path in islice(place.rglob("*"), MOST_ENTRIES) if not path.is_dir()]
        if sum(sizes) <= LARGEST_COPY_BYTES and len(sizes) < MOST_ENTRIES:
            copied = self._written / "copy"
            shutil.copytree(place, copied, symlinks=True)
            _mount(copied, self._target(place), None, MS_BIND)
            self.read_only.append(f"{place}: the program had a copy of it")

    def enter(self) -> None:
        """Make it this process's root; nothing of the old one can be reached."""
        os.chdir(self.top)
        _call("pivot_root", ".", ".")
        _call("umount2", ".", MNT_DETACH)

    def _target(self, place: Path) -> Path:
        return self.top / place.relative_to("/")

    def _entry(self, place: Path) -> None:
        target = self._target(place)
        if place.is_symlink():
            target.symlink_to(place.readlink())
        elif place.is_dir():
            self.build(place)
        else:
            target.touch()
            self._bind_read_only(place)

    def _overlay(self, place: Path) -> None:
        upper, work = (top / place.relative_to("/") for top in (self._written, self._work))
        for folder in (upper, work):
            folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            shutil.copystat(place, upper)
        try:
            layers = [f"{name}={_escaped(path)}" for name, path in (("lowerdir", place), ("upperdir", upper))]
            options = ",".join([*layers, f"workdir={_escaped(work)}", "userxattr"])
            _mount("overlay", self._target(place), "overlay", 0, options)
        except OSError:
            self._bind_read_only(place)
            self.read_only.append(str(place))

    def _bind_read_only(self, place: Path) -> None:
        target = self._target(place)
        _mount(place, target, None, MS_BIND)
        # Flags that the mount has must stay, in a namespace of an ordinary user.
        now = os.statvfs(place).f_flag
        kept = now & (MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME)
        relative = MS_RELATIME if now & os.ST_RELATIME else 0
        _mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | kept | relative)


def _escaped(path: Path) -> str:
    """A path among mount options."""
    return "".join(f"\\{letter}" if letter in "\\,:" else letter for letter in str(path))


def _end_children() -> None:
    """End all processes that descend from this one; orphans are its children, too."""
    me = psutil.Process()
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in me.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.send_signal(number)
        files.wait_until(lambda: not _alive(me), timeout_s=GRACE_S, poll_s=0.05)


def _end(number: int, _: object) -> None:
    _end_children()
    os._exit(128 + number)


def _alive(me: psutil.Process) -> bool:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return bool(me.children())


def _named_folders(folder: Path, program: Sequence[str]) -> list[Path]:
    """Folders that the words of a command name: it may write there."""
    words = [word.rpartition("=")[2] for word in program]
    return [(folder / word).resolve() for word in words if "/" in word and (folder / word).is_dir()]


def main(words: Sequence[str]) -> int:
    """Run a command; gives its exit code."""
    scratch, keep, program = Path(words[0]), Path(words[1]), list(words[2:])
    folder = Path.cwd()
    try:
        for name in ("root", "written", "work"):
            (scratch / name).mkdir()
            os.chown(scratch / name, -1, os.getgid())  # in a setgid folder it has a group that the namespace doesn't
            (scratch / name).chmod(0o755)
        _make_namespaces()
        root = _Root(scratch)
        for place in (Path.home(), Path("/var/tmp"), Path(tempfile.gettempdir())):
            root.adopt(place.resolve(), below=False)
        for place in (folder, *_named_folders(folder, program)):
            root.adopt(place, below=True)
        root.build(Path("/"))
        root.show(keep)
        root.copy(folder)
        (keep / READ_ONLY).write_text(json.dumps(root.read_only))
        root.enter()
        os.chdir(folder)
    except OSError as error:
        print(error.strerror or error, file=sys.stderr)
        return 1
    _call("prctl", PR_SET_CHILD_SUBREAPER, 1)
    _call("prctl", PR_SET_PDEATHSIG, int(signal.SIGTERM))
    signal.signal(signal.SIGTERM, _end)
    try:
        process = subprocess.Popen(program)
    except OSError as error:
        print(f"{program[0]}: can't be started: {error.strerror}", file=sys.stderr)
        return 127
    code = process.wait()
    _end_children()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
