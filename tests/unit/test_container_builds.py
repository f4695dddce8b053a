"""Where builds of images write, and that an image appears whole or not at all.

The builders are stubs that record how they are called; images themselves are built by hand (docs/containers.md).
"""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from pretrainkit.jobs.scripts import CACHES, HOME_CACHES

CONTAINERS = Path(__file__).parents[2] / "containers"
SETTINGS = dict(
    line.split("=", 1)
    for line in (CONTAINERS / "versions.env").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)
STUB = """#!/bin/bash
[ "$2" != --help ] || exec echo "${STUB_HELP---build-arg}"
printf '%s\\037' "$(basename "$0")" "$@" >> "$STUB_LOG"; printf '\\036' >> "$STUB_LOG"
env | grep -a '^\\(APPTAINER\\|ENROOT\\|TMPDIR\\|HF_TOKEN\\)' >> "$STUB_LOG.env" || true
name=$(basename "$0")
[ "$1" != --root ] || shift 2
case "$name $1" in
    "docker info") echo "$STUB_STORE"; exit ;;
    "podman info") echo "$STUB_STORE"; exit ;;
    "apptainer build") output=${@: -2:1} ;;
    "docker save" | "podman save") output=$3 ;;
    "enroot import" | "enroot export") output=$3 ;;
esac
case "${STUB_MODE:-}" in
    hang) echo half > "$output"; mkdir "${APPTAINER_TMPDIR:-$ENROOT_TEMP_PATH}/build-temp-1"
        echo "$$" > "$STUB_LOG.pid"; exec sleep 60 ;;
    fail) echo half > "$output"; exit 7 ;;
    empty) exit 0 ;;
esac
case "$*" in
    *--sandbox*) mkdir "$output" && echo whole > "$output/file" ;;
    *) [ -z "${output:-}" ] || echo "hsqs whole" > "$output" ;;
esac
"""


class Host:
    """A machine with stub builders."""

    def __init__(self, folder: Path) -> None:
        self.home, self.group, self.log = folder / "home", folder / "group", folder / "log"
        bin_folder = folder / "bin"
        for made in (self.home, self.group, bin_folder):
            made.mkdir()
        for name in ("apptainer", "docker", "podman", "enroot"):
            self.stub(name, STUB)
        self.environment = {
            "PATH": f"{bin_folder}:/usr/bin:/bin",
            "HOME": str(self.home),
            "STUB_LOG": str(self.log),
            "STUB_STORE": str(self.home / "store"),
            "TMPDIR": str(self.group / "tmp"),
        }

    def stub(self, name: str, text: str) -> None:
        """Put a program on PATH."""
        path = self.home.parent / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """Start a script of containers/ with its options."""
        command = [str(CONTAINERS / words[0]), *words[1:]]
        return subprocess.Popen(
            command,
            env=self.environment | environment,
            cwd=self.group,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A test run that a shell began in the background ignores it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, *words: str, **environment: str) -> tuple[int, str, str]:
        """Its exit code, stdout and stderr."""
        process = self.start(*words, **environment)
        output, errors = process.communicate(timeout=60)
        return process.returncode, output.strip(), errors

    def calls(self) -> list[list[str]]:
        """How the stubs were called, in order."""
        text = self.log.read_text() if self.log.exists() else ""
        return [call.rstrip("\x1f").split("\x1f") for call in text.split("\x1e")[:-1]]

    def files(self) -> set[str]:
        """What lies in the group's folder, beside caches."""
        return {path.name for path in self.group.iterdir()} - {"cache", "tmp"}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A machine of its own."""
    return Host(tmp_path)


def test_apptainer_writes_to_the_group_disk_and_the_image_appears_whole(host: Host) -> None:
    code, output, errors = host.run("build.sh", "apptainer", "--output", "a.sif", "--cache-dir", f"{host.group}/cache")
    assert (code, output) == (0, f"{host.group}/a.sif"), errors
    [call] = host.calls()
    assert call[:2] == ["apptainer", "build"] and call[-1] == "containers/pretrainkit.def"
    assert f"BASE_IMAGE={SETTINGS['NGC_IMAGE']}" in call and "BOOTSTRAP=docker" in call
    assert ("--fakeroot" in call) == (os.getuid() != 0)
    assert "--force" in call, "help and labels of a base that was made here would stay"
    caches = (host.log.parent / "log.env").read_text()
    assert f"APPTAINER_CACHEDIR={host.group}/cache/apptainer\n" in caches
    assert f"APPTAINER_TMPDIR={host.group}/cache/tmp/" in caches
    assert host.files() == {"a.sif"} and list((host.group / "cache" / "tmp").iterdir()) == []
    assert list(host.home.iterdir()) == []


def test_a_sandbox_replaces_another_only_if_told_to(host: Host) -> None:
    words = ["build.sh", "apptainer", "--sandbox", "--output", "box", "--cache-dir", f"{host.group}/cache"]
    assert host.run(*words)[0] == 0
    (host.group / "box" / "mine").touch()
    code, _, errors = host.run(*words)
    assert code == 2 and "box exists" in errors and "--overwrite" in errors and (host.group / "box" / "mine").exists()
    assert host.run(*words, "--overwrite")[0] == 0
    assert {path.name for path in (host.group / "box").iterdir()} == {"file"} and host.files() == {"box"}


@pytest.mark.parametrize(
    ("script", "words"),
    [("build.sh", ["apptainer"]), ("build.sh", ["docker"]), ("build.sh", ["podman"]), ("enroot.sh", ["--import-only"])],
    ids=["apptainer", "docker", "podman", "enroot"],
)
@pytest.mark.parametrize("mode", ["fail", "empty"])
def test_a_builder_that_fails_leaves_nothing(host: Host, script: str, words: list[str], mode: str) -> None:
    name = "a.sqsh" if script == "enroot.sh" else "a.img"
    code, output, errors = host.run(
        script, *words, "--output", name, "--cache-dir", f"{host.group}/cache", STUB_MODE=mode
    )
    assert (code, output) == (1, "") and "error: " in errors, errors
    assert host.files() == set()


@pytest.mark.parametrize("script", [["build.sh", "apptainer"], ["enroot.sh"]], ids=["apptainer", "enroot"])
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=["TERM", "INT", "KILL"])
def test_a_killed_build_leaves_no_image_and_the_next_one_cleans_up(
    host: Host, script: list[str], signal_number: int
) -> None:
    words = [*script, "--output", "a.sif", "--cache-dir", f"{host.group}/cache"]
    process = host.start(*words, STUB_MODE="hang")
    pid_file = host.log.parent / "log.pid"
    while not (pid_file.exists() and pid_file.read_text().strip()):
        assert process.poll() is None
        time.sleep(0.02)
    builder = int(pid_file.read_text())
    process.send_signal(signal_number)
    if signal_number == signal.SIGKILL:
        process.wait()
        os.kill(builder, signal.SIGKILL)
        assert not (host.group / "a.sif").exists()
    else:
        assert process.wait(timeout=20) == 128 + signal_number
        assert host.files() == set()
        assert not Path(f"/proc/{builder}").exists(), "the builder goes on"
    assert host.run(*words)[0] == 0
    assert host.files() == {"a.sif"} and list((host.group / "cache" / "tmp").iterdir()) == []


def test_only_what_dead_processes_of_this_host_left_is_removed(host: Host) -> None:
    host.stub("hostname", "#!/bin/bash\necho login\n")
    names = {"dead": "login-999999999", "old": "login-999999999.old", "other host": "login-2-999999999"}
    names["running"] = f"login-{os.getpid()}"
    for name in names.values():
        (host.group / f".a.sif.partial-{name}").mkdir()
    assert (
        host.run("build.sh", "apptainer", "--output", "a.sif", "--cache-dir", f"{host.group}/cache", "--dry-run")[0]
        == 0
    )
    assert len(host.files()) == 4
    assert host.run("build.sh", "apptainer", "--output", "a.sif", "--cache-dir", f"{host.group}/cache")[0] == 0
    kept = {f".a.sif.partial-{names[name]}" for name in ("other host", "running")}
    assert host.files() == {"a.sif", *kept}


def test_files_of_an_image_s_other_users_are_removed_by_apptainer(host: Host) -> None:
    """/bin/rm may not: they have numbers of the user's range, which only a namespace makes the user's own."""
    host.stub("rm", '#!/bin/bash\n[ ! -e "${@: -1}/of_apt" ] || exit 1\nexec /bin/rm "$@"\n')
    words = [
        "build.sh",
        "apptainer",
        "--sandbox",
        "--output",
        "box",
        "--cache-dir",
        f"{host.group}/cache",
        "--overwrite",
    ]
    assert host.run(*words)[0] == 0
    (host.group / "box" / "of_apt").touch()
    deletes = '[ "$2 $3 $4" != "--fakeroot --sandbox --force" ] || { /bin/rm -r "$5"; grep -q scratch "$6"; exit; }\n'
    host.stub("apptainer", STUB.replace("#!/bin/bash\n", f"#!/bin/bash\n{deletes}"))
    code, output, errors = host.run(*words)
    assert (code, output) == (0, f"{host.group}/box"), errors
    assert host.files() == {"box"}


@pytest.mark.parametrize("script", [["build.sh", "apptainer"], ["enroot.sh"]], ids=["apptainer", "enroot"])
def test_folders_are_meant_as_seen_from_where_the_script_starts(host: Host, script: list[str]) -> None:
    assert host.run(*script, "--output", "a.sif", "--cache-dir", "cache")[0] == 0
    caches = (host.log.parent / "log.env").read_text()
    assert all(
        line.partition("=")[2].startswith(f"{host.group}/") for line in caches.splitlines() if "_SQUASH_" not in line
    )
    assert host.files() == {"a.sif"} and list((host.group / "cache" / "tmp").iterdir()) == []


def test_a_dry_run_shows_commands_and_does_nothing(host: Host) -> None:
    code, _, errors = host.run("build.sh", "apptainer", "--output", "b c.sif", "--cache-dir", "cache", "--dry-run")
    assert code == 0 and "+ apptainer build --force --build-arg BOOTSTRAP=docker" in errors and "b\\ c.sif" in errors
    code, _, errors = host.run("enroot.sh", "--output", "b.sqsh", "--cache-dir", "cache", "--dry-run")
    assert code == 0 and errors.count("+ enroot ") == 4
    assert host.calls() == [] and host.files() == set() and not (host.group / "cache").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no builder named"),
        (["apptainer", "--what"], "unknown: --what"),
        (["apptainer", "--output"], "--output without a value"),
        (["docker", "--sandbox"], "--sandbox with docker"),
        (["docker", "--target", "tpu"], "--target tpu"),
        (["apptainer", "--pip-conf", "none.conf"], "no file none.conf"),
        (["apptainer", "--cache-dir", "a,b"], "without commas"),
    ],
    ids=["builder", "unknown", "no value", "sandbox", "target", "pip", "comma"],
)
def test_wrong_requests_are_refused(host: Host, words: list[str], said: str) -> None:
    code, _, errors = host.run("build.sh", *words)
    assert code == 2 and said in errors and host.calls() == [], errors


def test_a_missing_builder_is_said(host: Host) -> None:
    tools = host.home.parent / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "env"):
        (tools / name).symlink_to(f"/usr/bin/{name}")
    code, _, errors = host.run("build.sh", "apptainer", PATH=str(tools))
    assert code == 2 and "apptainer isn't installed here" in errors


def test_an_old_apptainer_is_refused(host: Host) -> None:
    code, _, errors = host.run("build.sh", "apptainer", STUB_HELP="--sandbox")
    assert code == 2 and "1.2 or newer" in errors and host.calls() == [], errors


def test_the_store_of_podman_is_in_the_cache(host: Host) -> None:
    cache = f"{host.group}/cache"
    assert host.run("build.sh", "podman", "--target", "cpu", "--cache-dir", cache)[1] == "pretrainkit:cpu"
    call = host.calls()[-1]
    assert call[:4] == ["podman", "--root", f"{cache}/containers", "build"]
    assert f"CPU_IMAGE={SETTINGS['CPU_IMAGE']}" in call and call[-1] == "."


def test_temporary_files_of_podman_are_in_the_tmp_dir(host: Host) -> None:
    """Each new layer is written there before it goes to the store; without the variable that is /var/tmp."""
    assert host.run("build.sh", "podman", "--target", "cpu", "--tmp-dir", f"{host.group}/fast")[0] == 0
    assert f"TMPDIR={host.group}/fast/pretrainkit-build-" in (host.log.parent / "log.env").read_text()
    assert list((host.group / "fast").iterdir()) == []


def test_what_a_build_takes_is_said_first(host: Host) -> None:
    words = ["build.sh", "apptainer", "--output", "a.sif", "--cache-dir", f"{host.group}/cache", "--no-room-check"]
    code, _, errors = host.run(*words)
    assert code == 0 and "warning: --no-room-check has no effect" in errors
    assert f"about {SETTINGS['NGC_DOWNLOAD_GB']} GB of downloads in {host.group}/cache/apptainer" in errors


def test_pip_settings_are_a_secret_of_the_build(host: Host) -> None:
    settings = host.group / "pip.conf"
    settings.write_text("[global]\nindex-url = https://me:password@mirror.example/simple\n")
    words = ["--pip-conf", str(settings), "--cache-dir", f"{host.group}/cache"]
    for builder, said in (("docker", "id=pip_conf,src="), ("apptainer", ":/mnt:ro")):
        assert host.run("build.sh", builder, "--output", f"{builder}.img", *words)[0] == 0
        assert any(said in word for word in host.calls()[-1 if builder == "apptainer" else -2])
    assert "password" not in host.log.read_text()


def test_enroot_imports_installs_checks_and_exports(host: Host) -> None:
    code, output, errors = host.run("enroot.sh", "--output", "a.sqsh", "--cache-dir", f"{host.group}/cache")
    assert (code, output) == (0, f"{host.group}/a.sqsh"), errors
    assert [call[1] for call in host.calls()] == ["import", "create", "start", "export"]
    assert host.calls()[0][-1] == "docker://" + SETTINGS["NGC_IMAGE"].replace("/", "#", 1)
    start = host.calls()[2]
    assert {"--root", "--rw"} <= set(start) and "install_packages.py" in start[-1] and "check.sh" in start[-1]
    variables = (host.log.parent / "log.env").read_text()
    for name in ("CACHE", "DATA", "TEMP", "RUNTIME"):
        assert f"ENROOT_{name}_PATH={host.group}/cache/" in variables
    assert host.files() == {"a.sqsh"} and list((host.group / "cache" / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("given", "imported"),
    [
        ("nvcr.io/nvidia/nemo:1", "docker://nvcr.io#nvidia/nemo:1"),
        ("nvcr.io#nvidia/nemo:1", "docker://nvcr.io#nvidia/nemo:1"),
        ("localhost:5000/a/b:1", "docker://localhost:5000#a/b:1"),
        ("ubuntu:24.04", "docker://ubuntu:24.04"),
        ("library/ubuntu", "docker://library/ubuntu"),
        ("podman://pretrainkit:gpu", "podman://pretrainkit:gpu"),
    ],
)
def test_enroot_gets_names_as_it_spells_them(host: Host, given: str, imported: str) -> None:
    words = ["--from", given, "--import-only", "--output", "a.sqsh", "--cache-dir", f"{host.group}/cache"]
    assert host.run("enroot.sh", *words)[0] == 0
    assert [call[-1] for call in host.calls()] == [imported]


def test_check_is_the_node_check_with_what_the_image_was_made_with(tmp_path: Path) -> None:
    (tmp_path / "containers").mkdir()
    script = tmp_path / "containers" / "check.sh"
    script.write_text((CONTAINERS / "check.sh").read_text(encoding="utf-8"))
    environment = {"PATH": os.environ["PATH"], "PYTHON": "/bin/echo", "TMPDIR": str(tmp_path)}

    def words(*options: str) -> str:
        return subprocess.check_output(["bash", str(script), *options], env=environment, text=True)

    node_check = f"{tmp_path}/tools/check_node.py --software --timeout 300 --output_dir {tmp_path} -G 4\n"
    assert words("-G", "4") == f"{node_check}{tmp_path}/containers/check_kernels.py\n"
    assert "--quick --accelerator cpu" in words("--build") and "check_kernels" not in words("--build")
    assert words("--cache_dir", "/group/cache", "-G", "4") == words("-G", "4")
    assert [path.name for path in tmp_path.iterdir()] == ["containers"], "a build's caches are gone"
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "kept.txt").touch()
    image = tmp_path / "image"
    assert f"--constraints {image}/constraints.txt --kept {image}/kept.txt" in words()


def test_check_looks_at_the_caches_that_jobs_get(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\nenv\n")
    python.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python), "TMPDIR": str(tmp_path)}
    words = ["bash", str(CONTAINERS / "check.sh"), "--cache_dir", "/group/cache"]
    found = dict(line.split("=", 1) for line in subprocess.check_output(words, env=environment, text=True).splitlines())
    for name in (*HOME_CACHES, "XDG_CACHE_HOME"):
        assert found[name] == f"/group/cache/{getpass.getuser()}/{CACHES[name]}"
