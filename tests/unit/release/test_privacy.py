"""Secrets and local paths are found in every file of a release, and vocabularies and examples raise no alarm."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pretrainkit.release.privacy import check_privacy
from pretrainkit.release.report import Check

HOME, ROOT = (f"/{folder}" for folder in ("home", "root"))
HEX = "0123456789abcdef" * 2 + "01234567"
LETTERS = "aB3" * 12
PLANTED = {
    "README.md": f"Weights: {HOME}/alice/runs/step_9\n",
    "LICENSE": "made on C:\\Users\\alice\\models\n",
    "notes.txt": "see file:///Users/alice/notes\n",
    "setup.sh": f"cp -r {ROOT}/project/weights .\n",
    "args.json": json.dumps({"wandb_api_key": HEX}),
    "run.json": json.dumps({"wandb_key": HEX}),
    ".env": f"HF_TOKEN=hf_{LETTERS}\n",
    "notes.yaml": f"token: hf_{LETTERS}\n",
    "train.log": f"logged in with hf_{LETTERS}.\n",
    "run.sh": "export AWS_ACCESS_KEY_ID=AKIA" + "Q7" * 8 + "\n",
    ".git/config": f"url = https://x:ghp_{LETTERS}@github.com/a/b\n",
    ".netrc": f"machine api.wandb.ai login user password {HEX}\n",
    "wandb/debug.log": f"key github_pat_{LETTERS}\n",
    "id_rsa": "-----BEGIN OPENSSH PRIVATE KEY-----\n",
    "conf.toml": f'db_password = "{LETTERS}"\n',
    "url.md": f"git clone https://bot:{LETTERS}@host.example/repo\n",
    "tokenizer.json": json.dumps({"model": {"vocab": {f"hf_{LETTERS}": 1}}}),
    "tokenizer_config.json": json.dumps({"tokenizer_file": "/lustre/team/tokenizer.json"}),
    "special_tokens_map.json": json.dumps({"name_or_path": "./mine"}),
    "data.dat": f"\0\1hf_{LETTERS}\0",
}
HARMLESS = {
    "README.md": 'client = OpenAI(api_key="EMPTY", base_url="http://localhost:8000/home/v1")\n'
    "export WANDB_API_KEY=YOUR_WANDB_API_KEY\n"
    "docker run -v ~/.cache/huggingface:/root/.cache/huggingface image\n"
    f"python run.py --model {HOME}/user/model --password <your password>\n"
    f"Trained at commit {HEX}; the secret: more data.\n",
    "generation_config.json": '{"eos_token_id": [1, 2], "_from": "org/model"}',
    "modeling.py": 'api_key = os.environ["MODEL_API_KEY_1"]\n',
    "chat_template.jinja": "{{ '</s>' if password else '/n/' }}",
}


def check(folder: Path) -> tuple[Check, list[str]]:
    notes: list[str] = []
    (found,) = check_privacy(folder, notes)
    return found, notes


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(PLANTED[name])
    found, _ = check(tmp_path)
    assert not found.passed and name in found.found
    assert HEX not in found.found and LETTERS not in found.found


def test_examples_and_vocabularies_raise_no_alarm(tmp_path: Path) -> None:
    for name, text in HARMLESS.items():
        (tmp_path / name).write_text(text)
    generator = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-/+=:"
    words = ["".join(generator.choices(letters, k=generator.randint(1, 48))) for _ in range(20_000)]
    words += ["-----BEGIN RSA PRIVATE KEY-----", "password", '"api_key": "', "sk-", "hf_", "AKIA", "://a:b@"]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = {"vocab": vocabulary, "merges": [f"{a} {b}" for a, b in itertools.pairwise(words)]}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}, indent=1))
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    found, notes = check(tmp_path)
    assert found.passed and not notes, found.found


def test_what_weight_files_say_of_themselves_is_searched(make_model: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(make_model("llama"), tmp_path / "hf")
    path = folder / "model.safetensors"
    save_file(load_file(path), path, metadata={"format": "pt", "made_by": f"{HOME}/alice/merge.py"})
    found, _ = check(folder)
    assert found.found == "model.safetensors (metadata): local path /home/alice"


def test_paths_in_a_binary_file_are_noted(tmp_path: Path) -> None:
    """SentencePiece keeps the paths of its training data in tokenizer.model, which must stay as it is."""
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\0\x12/home/alice/corpus.txt\0")
    found, notes = check(tmp_path)
    assert found.passed and notes == ["tokenizer.model holds the local path /home/alice"]
