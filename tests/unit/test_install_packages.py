"""What goes into an image: the project's tested versions, and never a package that the image must keep as its own.

pip is real, on a Python without packages, with wheels that are made here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pip
import pytest

SCRIPT = Path(__file__).parents[2] / "containers" / "install_packages.py"
BACKEND = """import zipfile
METADATA = '''Metadata-Version: 2.1\\nName: pretrainkit\\nVersion: 0.1.0\\n{requires}'''
def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "pretrainkit-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{{folder}}/{{name}}", "w") as wheel:
        wheel.writestr("pretrainkit-0.1.0.dist-info/METADATA", METADATA)
        wheel.writestr("pretrainkit-0.1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr("pretrainkit-0.1.0.dist-info/RECORD", "")
    return name
build_editable = build_wheel
"""


class Image:
    """A Python without packages, an index of wheels, and a project that is to be installed."""

    def __init__(self, folder: Path) -> None:
        self.project, self.wheels = folder / "project", folder / "wheels"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "python")], check=True)
        self.packages = next((folder / "python" / "lib").glob("python3*")) / "site-packages"
        self.python = folder / "python" / "bin" / "python"
        for made in (self.project / "containers", self.wheels, folder / "pip"):
            made.mkdir(parents=True)
        (folder / "pip" / "pip").symlink_to(Path(pip.__file__).parent)
        shutil.copy(SCRIPT, self.project / "containers")
        (self.project / "containers" / "versions.env").write_text(
            "TORCH_PACKAGES=torch,triton,flash-attn*\nKEEP_PACKAGES=numpy\n"
        )
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(folder / "pip"),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_CONFIG_FILE": os.devnull,
            # What NGC's images set: it must not decide about our packages.
            "PIP_CONSTRAINT": str(folder / "no such file"),
        }

    def add_wheel(self, name: str, version: str, *requires: str) -> None:
        """Put a package without code into the index."""
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        metadata += "".join(f"Requires-Dist: {text}\n" for text in requires)
        with zipfile.ZipFile(self.wheels / f"{info.removesuffix('.dist-info')}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{info}/METADATA", metadata)
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")

    def has(self, name: str, version: str) -> None:
        """Make a package part of the image."""
        info = self.packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def needs(self, constraints: str, *requires: str) -> None:
        """Write the project with what it requires."""
        lines = "".join(f"Requires-Dist: {text}\\n" for text in requires)
        (self.project / "backend.py").write_text(BACKEND.format(requires=lines))
        backend = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        (self.project / "pyproject.toml").write_text(backend)
        (self.project / "constraints.txt").write_text(constraints)

    def install(self, *words: str) -> tuple[int, str]:
        """Exit code and output of the script."""
        command = [str(self.python), str(self.project / "containers" / "install_packages.py"), *words]
        done = subprocess.run(
            command, env=self.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        return done.returncode, done.stdout

    def installed(self) -> dict[str, str]:
        """Name -> version of what the image has."""
        names = (path.name.removesuffix(".dist-info") for path in self.packages.glob("*.dist-info"))
        return dict(name.split("-", 1) for name in names)


@pytest.fixture
def image(tmp_path: Path) -> Image:
    """An image with an index that has newer torch, numpy and triton than any image."""
    made = Image(tmp_path)
    for version in ("1.0", "2.0"):
        made.add_wheel("lib", version, "torch>=2.6", "numpy")
    made.add_wheel("compiler", "1.0", "triton")
    for name, version in (("torch", "2.13.0"), ("numpy", "1.26.4"), ("triton", "3.7.1")):
        made.add_wheel(name, version)
    return made


CONSTRAINTS = "# tested\nlib==1.0\ntorch==2.13.0\nnumpy==1.26.4\ntriton==3.7.1 ; python_version < '4'\n"


def test_the_images_own_stay_and_the_rest_is_as_tested(image: Image) -> None:
    image.has("torch", "2.10.0a0+b558c986e8.nv25.11")
    image.has("flash_attn", "2.7.4")
    image.needs(CONSTRAINTS, "lib", "torch")
    code, output = image.install()
    assert code == 0, output
    kept = {"torch": "2.10.0a0+b558c986e8.nv25.11", "flash_attn": "2.7.4"}
    added = {"lib": "1.0", "numpy": "1.26.4", "pretrainkit": "0.1.0"}
    assert image.installed() == kept | added, "what isn't compiled for torch may come"
    lines = [f"{name.replace('_', '-')}=={version}" for name, version in sorted(kept.items())]
    assert (image.project / "image" / "kept.txt").read_text().split() == lines
    merged = (image.project / "image" / "constraints.txt").read_text().splitlines()
    tested = ["# tested", "lib==1.0", "numpy==1.26.4", "triton==3.7.1 ; python_version < '4'"]
    assert merged == [*tested, "# the image's own, which stay", *lines]


def test_an_image_without_torch_gets_the_tested_one(image: Image) -> None:
    image.needs(CONSTRAINTS, "lib", "compiler")
    code, output = image.install("--dry-run")
    assert code == 0 and "stay as they are: none" in output, output
    assert "to be installed: compiler 1.0, lib 1.0, numpy 1.26.4, torch 2.13.0, triton 3.7.1\n" in output
    assert image.installed() == {}


def test_nothing_compiled_for_another_torch_is_added(image: Image) -> None:
    image.has("torch", "2.10.0a0+nv")
    image.has("numpy", "1.26.3")
    image.needs(CONSTRAINTS, "lib", "compiler")
    code, output = image.install()
    assert code == 1 and "has its own torch: triton 3.7.1" in output and "What to do" in output, output
    assert image.installed() == {"torch": "2.10.0a0+nv", "numpy": "1.26.3"}
    image.has("pytorch_triton", "3.5.0")
    (image.packages / "triton").mkdir()
    (image.packages / "triton" / "__init__.py").touch()
    code, output = image.install("--dry-run")
    assert code == 0 and "triton is the image's own" in output, output
    assert "to be installed: compiler 1.0, lib 1.0\n" in output


def test_a_checkout_is_left_alone(image: Image) -> None:
    image.needs(CONSTRAINTS, "lib")
    (image.project / ".git").mkdir()
    code, output = image.install()
    assert code == 1 and "make setup" in output and image.installed() == {}


def test_an_image_whose_own_do_not_fit_is_refused(image: Image) -> None:
    image.has("torch", "2.10.0a0+nv")
    image.has("numpy", "2.1.0")
    image.needs(CONSTRAINTS, "lib", "numpy<2")
    code, output = image.install()
    assert code == 1 and "numpy<2" in output and "choose another image in versions.env" in output, output
    assert image.installed() == {"torch": "2.10.0a0+nv", "numpy": "2.1.0"}


def test_a_version_that_another_package_refuses_is_the_tested_one(image: Image) -> None:
    for version in ("1.26", "2.8"):
        image.add_wheel("urls", version)
    image.add_wheel("asker", "1.0", "urls<2")
    image.needs("asker==1.0\nurls==2.8\n", "asker")
    with (image.project / "pyproject.toml").open("a") as project:
        project.write('[tool.uv]\noverride-dependencies = ["urls>=2"]\n')
    code, output = image.install()
    assert code == 0, output
    assert image.installed() == {"asker": "1.0", "urls": "2.8", "pretrainkit": "0.1.0"}
    assert "asker 1.0 has requirement urls<2, but you have urls 2.8" in output
