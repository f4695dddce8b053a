"""The release gate looks at every file of a release or names it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrainkit.checkpoint.convert import convert
from pretrainkit.checkpoint.plan import CheckpointFormat, Options
from pretrainkit.errors import RequestError
from pretrainkit.release.files import verify_files
from pretrainkit.release.report import Check

ADDED = [
    "chat_template.jinja",
    "generation_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "preprocessor_config.json",
    "modeling_llama.py",
    "notes",
    ".env",
    "additional_chat_templates/tool_use.jinja",
    "original/model.safetensors",
    ".git/config",
    "wandb/run-1/files/output.log",
    ".ipynb_checkpoints/README-checkpoint.md",
]


@pytest.fixture(scope="module")
def made(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Megatron checkpoint without tokenizer, and the release made from it."""
    folder = tmp_path_factory.mktemp("release")
    source = shutil.copytree(make_model("llama"), folder / "hf")
    (source / "generation_config.json").unlink(missing_ok=True)
    convert(source, folder / "megatron")
    convert(folder / "megatron", folder / "released")
    return folder / "megatron", folder / "released"


def check(source: Path, released: Path, name: str = "every file is one that the source has") -> Check:
    return next(check for check in verify_files(source, released).checks if check.name == name)


@pytest.mark.parametrize("name", ADDED)
def test_a_file_that_the_source_does_not_have_is_named(made: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    released = shutil.copytree(made[1], tmp_path / "released")
    (released / name).parent.mkdir(parents=True, exist_ok=True)
    (released / name).write_text("{}")
    found = check(made[0], released)
    assert not found.passed and name.partition("/")[0] in found.found and "move them away" in found.found


def test_a_link_to_a_folder_is_named(made: tuple[Path, Path], tmp_path: Path) -> None:
    released = shutil.copytree(made[1], tmp_path / "released")
    (released / "more").symlink_to(tmp_path)
    assert "more" in check(made[0], released).found


def test_a_release_has_a_card_and_a_licence_of_its_own(made: tuple[Path, Path], tmp_path: Path) -> None:
    released = shutil.copytree(made[1], tmp_path / "released")
    for name in ("README.md", "LICENSE", ".gitattributes"):
        (released / name).write_text("ours")
    assert check(made[0], released).passed


def test_chat_templates_by_name_go_along_and_are_compared(make_model: Callable[..., Path], tmp_path: Path) -> None:
    source = shutil.copytree(make_model("llama"), tmp_path / "hf")
    template = "additional_chat_templates/tool_use.jinja"
    (source / template).parent.mkdir()
    (source / template).write_text("{{ messages }}")
    for kind in list(CheckpointFormat)[1:]:
        convert(source, tmp_path / kind, Options(to=kind))
        convert(tmp_path / kind, tmp_path / "back", Options(overwrite=True))
        assert (tmp_path / "back" / template).read_text() == "{{ messages }}"
    assert check(tmp_path / "nemo", tmp_path / "back").passed
    same = "tokenizer, template and generation files are the source's"
    assert template in check(tmp_path / "nemo", tmp_path / "back", same).found
    (tmp_path / "back" / template).write_text("{{ changed }}")
    assert f"{template} differs" in check(tmp_path / "nemo", tmp_path / "back", same).found


def test_what_a_conversion_leaves_out_is_reported(make_model: Callable[..., Path], tmp_path: Path) -> None:
    source = shutil.copytree(make_model("llama"), tmp_path / "hf")
    for name in ("pytorch_model.bin", "original/params.bin", ".gitattributes", "LICENSE"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("x")
    assert "left out: .gitattributes, original/, pytorch_model.bin" in convert(source, tmp_path / "m").notes


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_is_refused_wherever_a_model_folder_is_given(
    made: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    megatron, clean = made
    with_adapter = shutil.copytree(clean, tmp_path / "with-adapter")
    (with_adapter / name).write_text("{}")
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / name).write_text("{}")
    for attempt in (
        lambda: convert(with_adapter, tmp_path / "out"),
        lambda: convert(alone, tmp_path / "out"),
        lambda: convert(megatron, tmp_path / "out", Options(hf_folder=with_adapter)),
        lambda: verify_files(megatron, with_adapter),
    ):
        with pytest.raises(RequestError, match=f"{name}.*\n.*\n.*merge_and_unload"):
            attempt()
    assert not (tmp_path / "out").exists()
