"""Images in every form, mounts that are there, and nothing of the host that nobody asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrainkit.config.launch import LaunchConfig
from pretrainkit.errors import RequestError
from pretrainkit.jobs.container import Container, container_of, parse_mount


def container(*needs: Path, on_gpu: bool = True, **settings: object) -> Container | None:
    return container_of(LaunchConfig(**settings), needs=needs, on_gpu=on_gpu)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("image", "pyxis", "apptainer"),
    [
        ("nvcr.io/nvidia/nemo:25.09", "nvcr.io#nvidia/nemo:25.09", "docker://nvcr.io/nvidia/nemo:25.09"),
        ("nvcr.io#nvidia/nemo:25.09", "nvcr.io#nvidia/nemo:25.09", "docker://nvcr.io/nvidia/nemo:25.09"),
        ("docker://ubuntu:24.04", "ubuntu:24.04", "docker://ubuntu:24.04"),
        ("library/ubuntu", "library/ubuntu", "docker://library/ubuntu"),
        ("localhost:5000/a/b", "localhost:5000#a/b", "docker://localhost:5000/a/b"),
    ],
)
def test_a_registry_name_is_spelled_as_the_runtime_wants_it(image: str, pyxis: str, apptainer: str) -> None:
    made = container(executor="slurm", container_runtime="pyxis", container_image=image)
    assert made and made.image == pyxis and not made.is_local
    made = container(executor="sge", container_runtime="apptainer", container_image=image)
    assert made and made.image == apptainer and not made.is_local


def test_a_file_or_sandbox_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "img.sqsh").touch()
    (tmp_path / "box").mkdir()
    made = container(executor="slurm", container_image="img.sqsh")
    assert made and (made.runtime, made.image) == ("pyxis", f"{tmp_path}/img.sqsh")
    made = container(executor="pbs", container_image="box")
    assert made and (made.runtime, made.image, made.is_local) == ("apptainer", f"{tmp_path}/box", True)
    with pytest.raises(RequestError, match="is a folder"):
        container(executor="slurm", container_image="box")


@pytest.mark.parametrize("image", ["gone.sif", "./gone", "/gone", "gone.sqsh", "~/gone"])
def test_a_missing_image_is_not_taken_for_a_registry_name(image: str) -> None:
    with pytest.raises(RequestError, match="--container_image: no image"):
        container(executor="slurm", container_image=image)


@pytest.mark.parametrize("executor", ["local", "sge", "pbs"])
def test_an_image_is_entered_with_apptainer_unless_slurm_starts_it(executor: str) -> None:
    made = container(executor=executor, container_image="library/ubuntu")
    assert made and made.runtime == "apptainer"
    assert container(executor=executor, container_image="library/ubuntu", container_runtime="none") is None


@pytest.mark.parametrize("executor", ["local", "sge", "pbs"])
def test_without_an_image_there_is_a_container_only_with_pyxis(executor: str) -> None:
    assert container(executor=executor) is None
    made = container(executor="slurm")
    assert made and made.image == "nvcr.io#nvidia/nemo:dev"
    assert container(executor="slurm", container_image="") is None
    assert container(executor="slurm", container_runtime="none") is None


def test_all_missing_mounts_are_told(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as error:
        container(executor="slurm", container_mounts=(f"{tmp_path}/a:/x", str(tmp_path), f"{tmp_path}/b"))
    assert f"no {tmp_path}/a here" in str(error.value) and f"no {tmp_path}/b here" in str(error.value)


def test_what_a_job_needs_is_mounted_once_and_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "data" / "x").mkdir(parents=True)
    made = container(
        tmp_path / "link", tmp_path / "data" / "x", executor="slurm", container_mounts=(f"{tmp_path}/data",)
    )
    assert made
    assert list(made.mounts) == [
        f"{tmp_path}/data:{tmp_path}/data",
        f"{tmp_path}/link:{tmp_path}/link",
        f"{tmp_path}/real:{tmp_path}/real",
    ]


def test_a_path_that_no_mount_can_name_is_refused_unless_a_folder_above_it_is_mounted(tmp_path: Path) -> None:
    needs = [tmp_path / "a,b", tmp_path / "c:d" / "x", tmp_path / "link"]
    for path in needs[:2]:
        path.mkdir(parents=True)
    needs[2].symlink_to("a,b")
    for executor, image in (("slurm", None), ("pbs", "library/ubuntu")):
        with pytest.raises(RequestError) as error:
            container(*needs, executor=executor, container_image=image)
        assert f"{tmp_path}/a,b: can't be mounted" in str(error.value) and f"{tmp_path}/c:d/x" in str(error.value)
        made = container(*needs, executor=executor, container_image=image, container_mounts=(str(tmp_path),))
        assert made and made.mounts == (f"{tmp_path}:{tmp_path}",)
    assert container(*needs, executor="pbs") is None


def test_a_read_only_mount_stays_read_only(tmp_path: Path) -> None:
    assert parse_mount(f"{tmp_path}:/data:ro") == ("/data", f"{tmp_path}:/data:ro")
    for wrong in (f"{tmp_path}:/data:x", f"{tmp_path}:data", f"{tmp_path}:/a:ro:b", f"{tmp_path}:/a,b"):
        with pytest.raises(RequestError, match="--container_mounts"):
            parse_mount(wrong)


def test_the_home_and_the_environment_stay_outside() -> None:
    made = container(executor="sge", container_image="docker://a/b")
    assert made and made.apptainer_options()[:3] == ["--cleanenv", "--no-home", "--nv"]
    made = container(executor="sge", container_image="docker://a/b", on_gpu=False)
    assert made and "--nv" not in made.apptainer_options()
    assert "--no-container-mount-home" in made.pyxis_options()
