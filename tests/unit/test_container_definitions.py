"""What the definitions of images may hold; images themselves are built by hand (docs/containers.md)."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

PROJECT = Path(__file__).parents[2]
CONTAINERS = PROJECT / "containers"
DEFINITION = (CONTAINERS / "pretrainkit.def").read_text(encoding="utf-8")
DOCKERFILE = (CONTAINERS / "Dockerfile").read_text(encoding="utf-8")
SCRIPTS = {path.name: path.read_text(encoding="utf-8") for path in CONTAINERS.glob("*.sh")}
SETTINGS = dict(
    line.split("=", 1)
    for line in (CONTAINERS / "versions.env").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)
REGISTRY = re.compile(r"(nvcr\.io|docker\.io|ghcr\.io|quay\.io)/\S+")
SECRET = re.compile(r"TOKEN|API_KEY|PASSWORD|SECRET|[Bb]earer |hf_[A-Za-z0-9]{20}")
CODE = re.compile(r"^\s*#.*$", re.MULTILINE)


def sections() -> dict[str, str]:
    """The definition's header as '' and its sections by name, comments left out."""
    parts = re.split(r"^%(\w+)[^\n]*$", CODE.sub("", DEFINITION), flags=re.MULTILINE)
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def test_pins_are_plain_values_of_fixed_images() -> None:
    for name, value in SETTINGS.items():
        assert re.fullmatch(r"[A-Z_]+", name) and re.fullmatch(r"[\w./:,*-]+", value), (name, value)
    for name in ("NGC_IMAGE", "CPU_IMAGE"):
        tag = SETTINGS[name].rpartition("/")[2].partition(":")[2]
        assert re.match(r"\d+\.\d+", tag), f"{name}: {tag!r} may be another image tomorrow"
    of_torch = SETTINGS["TORCH_PACKAGES"].split(",")
    assert {"torch", "triton", "transformer-engine*", "flash-attn*", "apex"} <= set(of_torch)
    assert "numpy" in SETTINGS["KEEP_PACKAGES"].split(",")


def test_images_are_named_in_one_place() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in CONTAINERS.iterdir() if path.is_file()}
    texts |= {path.name: path.read_text(encoding="utf-8") for path in (PROJECT / "configs" / "site").glob("*.yaml")}
    texts["prefetch.sh"] = (PROJECT / "scripts" / "prefetch.sh").read_text(encoding="utf-8")
    named = {name: REGISTRY.findall(CODE.sub("", text)) for name, text in texts.items()}
    assert {name for name, found in named.items() if found} == {"versions.env"}
    assert "==" not in DEFINITION + DOCKERFILE, "versions of packages stand in constraints.txt"
    used = set(re.findall(r"setting \"?([A-Z_]+)", CODE.sub("", "".join(SCRIPTS.values()))))
    used |= {f"{kind}{name}" for kind in ("NGC", "CPU") for name in ("_DOWNLOAD_GB", "_UNPACKED_GB", "_IMAGE")}
    assert used | {"TORCH_PACKAGES", "KEEP_PACKAGES"} == set(SETTINGS)


def test_the_definition_has_the_sections_that_are_needed() -> None:
    found = sections()
    assert set(found) == {"", "setup", "files", "post", "environment", "test", "runscript", "labels", "help"}
    assert all(text.strip() for text in found.values())
    header = dict(line.split(": ", 1) for line in found[""].split("\n") if line.strip())
    assert header == {"Bootstrap": "{{ BOOTSTRAP }}", "From": "{{ BASE_IMAGE }}"}
    assert "set -euo pipefail" in found["post"] and "install_packages.py" in found["post"]
    assert "export PYTHONNOUSERSITE=1" in found["environment"] and "export PYTHONNOUSERSITE=1" in found["post"]
    assert "containers/check.sh --build" in found["test"]


def test_the_builder_gives_the_definition_what_it_asks_for() -> None:
    asked = set(re.findall(r"\{\{ ?(\w+) ?\}\}", CODE.sub("", DEFINITION)))
    assert asked == set(re.findall(r'--build-arg "(\w+)=', SCRIPTS["build.sh"]))


def test_the_definition_names_nothing_of_a_host_and_no_secret() -> None:
    code = CODE.sub("", DEFINITION)
    paths = set(re.findall(r"(?<![\w./-])/[\w./-]+", code))
    assert {path for path in paths if not path.startswith("/opt/pretrainkit")} == {"/bin/bash"}, paths
    assert not SECRET.search(code) and not re.search(r"https?://|curl|wget|--trusted-host|index-url", code)


def test_all_ways_copy_the_same_project() -> None:
    pairs = [line.split() for line in sections()["files"].strip().splitlines()]
    assert all(target == f"/opt/pretrainkit/{source}" and (PROJECT / source).exists() for source, target in pairs)
    defined = {source for source, _ in pairs}
    source_stage = DOCKERFILE.partition("AS source")[2].partition("FROM")[0]
    copied = {word for line in source_stage.splitlines() if line.startswith("COPY") for word in line.split()[1:-1]}
    taken = re.search(r"--exclude='\*\.egg-info' \\\n(.*?) \| tar", SCRIPTS["steps.sh"])
    assert taken and defined == copied == set(taken[1].split())


def test_another_state_of_the_project_in_the_base_is_removed_first() -> None:
    assert 'rm -rf -- "${APPTAINER_ROOTFS:?}/opt/pretrainkit"' in DEFINITION.partition("%files")[0]
    for stage in ("cpu", "gpu"):
        assert "RUN rm -rf /opt/pretrainkit\n" in DOCKERFILE.partition(f"AS {stage}")[2].partition("COPY")[0]
    assert "rm -rf /opt/pretrainkit && cp -r /mnt/pretrainkit /opt/pretrainkit" in SCRIPTS["enroot.sh"]


def test_the_dockerfile_builds_on_nothing_but_pins_and_its_own_stages() -> None:
    code = CODE.sub("", DOCKERFILE)
    stages = re.findall(r"^FROM (\S+) AS (\w+)$", code, re.MULTILINE)
    assert len(stages) == len(re.findall("^FROM", code, re.MULTILINE))
    assert stages == [("scratch", "source"), ("${CPU_IMAGE}", "cpu"), ("${NGC_IMAGE}", "gpu")]
    assert set(re.findall(r"^ARG (\S+)$", code, re.MULTILINE)) == {"CPU_IMAGE", "NGC_IMAGE"}
    for stage in ("cpu", "gpu"):
        text = code.partition(f"AS {stage}")[2].partition("FROM")[0]
        assert "install_packages.py" in text and "check.sh --build" in text and "ENV PYTHONNOUSERSITE=1" in text
        assert "type=secret,id=pip_conf" in text, "pip's settings may hold a password: they don't stay in the image"
    assert not SECRET.search(code) and not re.search(r"^ADD|https?://|^USER|curl|wget", code, re.MULTILINE)


def test_sites_take_images_that_exist_or_are_left_to_the_user() -> None:
    for path in (PROJECT / "configs" / "site").glob("*.yaml"):
        assert "container_image" not in (yaml.safe_load(path.read_text(encoding="utf-8")) or {}), path
