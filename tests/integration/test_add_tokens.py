"""convert_checkpoint.py --add-tokens as a user types it: rows, tokenizer files, and what the release gate says."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import other_transformers
import pytest
import ranks
import torch
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.integration

REPOSITORY = Path(__file__).parents[2]
LINES = (
    {"token": "<|user|>", "special": True, "init": "copy:<|end|>"},
    {"token": "日本語", "init": "pieces"},
    {"token": " spaced", "init": "pieces"},
    {"token": "<|tool|>", "special": True},
)
TEXT = "a <|user|>日本語 b spaced c<|tool|>"
QWEN_2 = {
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {
                    "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
                },
                "behavior": "Isolated",
                "invert": False,
            },
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        ],
    },
}
"""What transformers 5 sets for this type of model, whatever its tokenizer.json says."""
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
MakeModel = Callable[..., Path]


def run(tool: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command in this process: its imports take longer than its work here."""
    main = runpy.run_path(str(REPOSITORY / "tools" / f"{tool}.py"))["main"]
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = main([str(word) for word in arguments])
    return subprocess.CompletedProcess(arguments, code, stdout.getvalue(), stderr.getvalue())


def gate(*arguments: object) -> tuple[int, str]:
    done = run("verify_release", *arguments, "--files-only")
    return done.returncode, done.stdout + done.stderr


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def model(make_model: MakeModel, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """A model folder with a tokenizer of 320 ids; further arguments change its config.json."""

    def make(name: str, *, dtype: str = "float32", vocab_size: int = 320) -> Path:
        source = make_model(name, dtype=dtype, vocab_size=vocab_size, num_hidden_layers=2, pad_token_id=2)
        folder = tmp_path_factory.mktemp("source") / "model"
        shutil.copytree(source, folder)
        for path in tokenizer_folder.iterdir():
            shutil.copy(path, folder)
        if name == "qwen2":
            file = folder / "tokenizer.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | QWEN_2))
        return folder

    return make


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def expected_rows(old: torch.Tensor, folder: Path) -> torch.Tensor:
    """The new rows that LINES ask for, by transformers' tokenizer and float64."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    wide = old[:320].double()
    pieces = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("日本語", " spaced")]
    rows = [wide[1], *(wide[ids].mean(0) for ids in pieces), wide.mean(0)]
    return torch.stack(rows).to(old.dtype)


@pytest.mark.parametrize(
    ("name", "dtype", "vocab_size", "flags"),
    [
        ("llama", "float32", 320, ("--target-format", "torch", "--target-tensor-parallel-size", 2)),
        ("llama-tied", "bfloat16", 320, ("--target-format", "nemo")),
        ("qwen2", "bfloat16", 322, ("--target-format", "torch_dist")),
        ("mixtral", "float32", 340, ("--target-format", "hf")),
    ],
)
def test_old_rows_stay_and_new_rows_begin_as_asked(
    model: MakeModel, tokens: Path, tmp_path: Path, name: str, dtype: str, vocab_size: int, flags: tuple[object, ...]
) -> None:
    source = model(name, dtype=dtype, vocab_size=vocab_size)
    done = run("convert_checkpoint", source, tmp_path / "out", "--add-tokens", tokens, *flags)
    assert done.returncode == 0, done.stderr
    new_size = max(vocab_size, 324)
    assert f"4 tokens added, ids 320 to 323{', 2 of them in rows' * (vocab_size == 322)}" in done.stdout
    assert f"vocab_size {vocab_size} -> {new_size}" in done.stdout
    released = tmp_path / "out"
    if "hf" not in flags:
        released = tmp_path / "released"
        assert run("convert_checkpoint", tmp_path / "out", released).returncode == 0
    old, new = weights(source), weights(released)
    assert old.keys() == new.keys() and (OUTPUT in new) == (name != "llama-tied")
    for tensor_name, tensor in old.items():
        if tensor_name not in (EMBEDDING, OUTPUT):
            assert torch.equal(new[tensor_name], tensor)
            continue
        assert new[tensor_name].shape == (new_size, 64)
        assert torch.equal(new[tensor_name][:320], tensor[:320])
        assert torch.equal(new[tensor_name][324:], tensor[324:])
        wanted = expected_rows(tensor, source)
        assert torch.equal(new[tensor_name][320], wanted[0])
        torch.testing.assert_close(new[tensor_name][320:324], wanted, rtol=torch.finfo(tensor.dtype).eps, atol=1e-12)
    assert json.loads((released / "config.json").read_text())["vocab_size"] == new_size
    for origin in {source, tmp_path / "out"} - {released}:
        code, text = gate(origin, released)
        assert code == 0, text
        assert "4 tokens added, ids 320 to 323" in text
        assert ("rows of new tokens begin as stated" in text) == (origin == source)


def test_both_generations_of_transformers_open_the_tokenizer(model: MakeModel, tokens: Path, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("llama", "qwen2")}
    flags = ("--add-tokens", tokens, "--target-format", "hf", "--quiet")
    command = [sys.executable, "-W", "ignore", "tools/convert_checkpoint.py", model("llama"), folders["llama"], *flags]
    subprocess.run(list(map(str, command)), cwd=REPOSITORY, check=True)
    assert run("convert_checkpoint", model("qwen2"), folders["qwen2"], *flags).returncode == 0
    request = ([str(folder) for folder in folders.values()], [5, 320, 323, 9], [TEXT, "plain text"])
    found = {generation: other_transformers.call(generation, "outputs", *request) for generation in (4, 5)}
    for folder in map(str, folders.values()):
        one, other = found[4][folder], found[5][folder]
        assert one["texts"] == other["texts"] and one["back"] == other["back"]
        assert [id for id in one["texts"][0] if id >= 320] == [320, 321, 322, 323]
        assert one["back"][0] == TEXT
        assert {320, 323} <= set(one["special"]) & set(other["special"])
        assert not {321, 322} & (set(one["special"]) | set(other["special"]))
        assert one["not_loaded"] == other["not_loaded"] == {}
        torch.testing.assert_close(torch.tensor(one["last"]), torch.tensor(other["last"]), rtol=0, atol=1e-5)


def test_gate_knows_which_rows_were_added(model: MakeModel, tokens: Path, tmp_path: Path) -> None:
    source, released = model("llama"), tmp_path / "released"
    flags = ("--add-tokens", tokens, "--target-format", "hf")
    assert run("convert_checkpoint", source, released, *flags).returncode == 0
    ranks.fork_server()  # models are compared in forks of it
    whole = run("verify_release", source, released, "--long-tokens", 48, "--num-sequences", 1)
    assert whole.returncode == 0, whole.stdout
    assert "logits at TP=2" in whole.stdout
    good = {path.name: path.read_bytes() for path in released.iterdir()}

    def changed(tensor: str, row: int) -> tuple[int, str]:
        tensors = weights(released)
        tensors[tensor][row, 5] *= 1.5
        save_file(tensors, released / "model.safetensors", {"format": "pt"})
        return after("model.safetensors")

    def after(name: str) -> tuple[int, str]:
        result = gate(source, released)
        (released / name).write_bytes(good[name])
        return result

    for tensor in (EMBEDDING, OUTPUT):
        code, text = changed(tensor, 321)
        assert code == 1 and f"{tensor}: '日本語' (row 321, pieces)" in text
        code, text = changed(tensor, 319)
        assert code == 1 and f"{tensor} (1 of " in text
    for name, old, new in (
        ("pretrainkit_origin.json", '"init": "pieces"', '"init": "mean"'),
        ("pretrainkit_origin.json", '"id": 323', '"id": 324'),
        ("tokenizer.json", '"content": "<|tool|>"', '"content": "<|fool|>"'),
        ("config.json", '"vocab_size": 324', '"vocab_size": 323'),
    ):
        text = (released / name).read_text()
        assert old in text, name
        (released / name).write_text(text.replace(old, new))
        assert after(name)[0] == 1, (name, new)
    (released / "pretrainkit_origin.json").unlink()
    code, text = gate(source, released)
    assert code == 1 and "vocab_size" in text


@pytest.mark.parametrize(
    ("name", "text", "flags", "words"),
    [
        ("t.txt", "one\none\n", (), ("t.txt:2", "a second time")),
        ("t.txt", "one\n\n two\n", (), ("t.txt:2", "t.txt:3", "without white space")),
        ("t.txt", "<|end|>\n", (), ("'<|end|>' (id 1)", "take them out of the file")),
        ("t.txt", "", (), ("no tokens in it",)),
        ("t.txt", "one\n", ("--new-token-init", "zero"), ("--new-token-init", "mean, pieces or copy:TOKEN")),
        ("t.txt", "one\n", ("--new-token-init", "copy:two"), ("'two', of which 'one' should be a copy",)),
        ("t.txt", "one\n", ("--keep-config", "--target-format", "hf"), ("--keep-config", "--add-tokens")),
        ("t.txt", "one\n", ("--test-precision",), ("--test-precision", "verify_release.py")),
        ("t.jsonl", "one\n", (), ("t.jsonl:1", "not JSON")),
        ("t.jsonl", '{"tokn": "one"}\n["a"]\n', (), ("t.jsonl:1", "t.jsonl:2", "has no token")),
        ("t.jsonl", '{"token": "one", "kind": 1}\n', (), ("unknown fields kind",)),
        ("t.jsonl", '{"token": "one", "special": "yes"}\n', (), ("special of another type",)),
        ("t.jsonl", '{"token": "one", "init": "none"}\n', (), ("t.jsonl:1", "initialisation 'none'")),
        ("absent", None, (), ("No such file",)),
    ],
)
def test_wrong_files_are_refused_before_anything_is_written(
    model: MakeModel, tmp_path: Path, name: str, text: str | None, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    done = run("convert_checkpoint", model("llama"), tmp_path / "out", "--add-tokens", tmp_path / name, *flags)
    assert done.returncode == 2, done.stdout
    assert all(word in done.stderr for word in words), done.stderr
    assert not (tmp_path / "out").exists()


def test_a_model_whose_tokenizer_cannot_take_them_is_refused(model: MakeModel, tokens: Path, tmp_path: Path) -> None:
    source = model("llama")
    (source / "tokenizer.json").unlink()
    done = run("convert_checkpoint", source, tmp_path / "out", "--add-tokens", tokens)
    assert done.returncode == 2 and "tokenizer" in done.stderr
    shutil.copytree(model("llama", vocab_size=310), tmp_path / "short")
    done = run("convert_checkpoint", tmp_path / "short", tmp_path / "out", "--add-tokens", tokens)
    assert done.returncode == 2 and "token id 319 is out of range for vocab_size 310" in done.stderr
