from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from pretrainkit.data.tokens.encoder import FastEncoder, ReferenceEncoder, finish
from pretrainkit.data.tokens.parity import ask, first_difference, hard_strings
from pretrainkit.data.tokens.tokenizer import load_tokenizer
from pretrainkit.errors import RequestError


def changed(folder: Path, tmp_path: Path, name: str = "tokenizer_config.json", **changes: object) -> Path:
    """A copy of a tokenizer folder with some fields of a file changed."""
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return tmp_path / "copy"


def test_a_folder_tells_its_ids(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    assert (tokenizer.num_ids, tokenizer.eod_id, tokenizer.bos_id) == (320, 1, 0)
    assert tokenizer.special_tokens == {"<|begin|>": 0, "<|end|>": 1, "<|pad|>": 2}
    assert tokenizer.json_path == tokenizer_folder / "tokenizer.json"
    assert load_tokenizer(tokenizer_folder, "<|pad|>").eod_id == 2


def test_the_file_alone_names_no_roles(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder / "tokenizer.json")
    assert (tokenizer.eod_id, tokenizer.bos_id) == (None, None)
    assert tokenizer.sha256 == load_tokenizer(tokenizer_folder).sha256


def test_a_config_that_adds_tokens_is_loaded_as_transformers_does(tokenizer_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = changed(tokenizer_folder, tmp_path, additional_special_tokens=["<|extra|>"])
    tokenizer = load_tokenizer(folder)
    assert tokenizer.special_tokens["<|extra|>"] == AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(
        "<|extra|>"
    )
    assert tokenizer.num_ids == 321
    assert tokenizer.eod_id == 1


@pytest.mark.parametrize("name", ["nowhere", "empty", "broken"])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(RequestError, match=name):
        load_tokenizer(tmp_path / name)


@pytest.mark.parametrize("token", ["<nope>", "1", "a"])
def test_an_eod_token_that_a_text_can_give_or_nothing_is_refused(tokenizer_folder: Path, token: str) -> None:
    with pytest.raises(RequestError, match=f"'{token}' is not one of its added tokens"):
        load_tokenizer(tokenizer_folder, token)


@pytest.mark.parametrize("special_tokens", [False, True], ids=["plain", "encode"])
def test_both_engines_agree_on_hard_strings_and_the_proof_sees_a_difference(
    tokenizer_folder: Path, tmp_path: Path, special_tokens: bool
) -> None:
    strings = hard_strings(["<|begin|>", "<|end|>"])
    assert strings == hard_strings(["<|begin|>", "<|end|>"])
    fast = FastEncoder(str(tokenizer_folder / "tokenizer.json"), special_tokens=special_tokens)
    reference = ReferenceEncoder(str(tokenizer_folder / "tokenizer.json"), special_tokens=special_tokens)
    assert first_difference(fast, ask(reference, strings)) == ""
    other = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    other["normalizer"] = {"type": "NFC"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    changed_reference = ReferenceEncoder(str(tmp_path / "tokenizer.json"), special_tokens=special_tokens)
    assert "tokenizers gives" in first_difference(fast, ask(changed_reference, strings))


@pytest.mark.parametrize(("first", "last"), [((), ()), ((0,), ()), ((), (9,)), ((0,), (9,)), ((0, 1), (8, 9))], ids=str)
def test_bos_and_eod_frame_every_document(first: tuple[int, ...], last: tuple[int, ...]) -> None:
    documents = [[5], [6, 7, 8], [5, 5]]
    ids = np.array([5, 6, 7, 8, 5, 5], dtype=np.uint32)
    lengths = np.array([len(document) for document in documents])
    out, new_lengths = finish(ids, lengths, np.dtype(np.uint16), first=first, last=last)
    framed = [[*first, *document, *last] for document in documents]
    assert out.tolist() == [token for document in framed for token in document]
    assert new_lengths.tolist() == [len(document) for document in framed]
    assert (out.dtype, new_lengths.dtype) == (np.uint16, np.int32)


@pytest.mark.parametrize("name", ["/no/such", "./tok", "~/tok", "a/b/c", "folder/tokenizer.json", "tokenizer.json"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it now fails
    with pytest.raises(RequestError, match="it can't be a model id of the hub"):
        load_tokenizer(name)


def test_a_hub_that_cannot_be_reached_is_tried_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        calls: list[object] = []

        def refuse() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    calls.append(connection)
                    connection.close()

        threading.Thread(target=refuse, daemon=True).start()
        code = "from pretrainkit.data.tokens.tokenizer import load_tokenizer; load_tokenizer('owner/name')"
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        server.shutdown(socket.SHUT_RDWR)
    assert "RequestError" in done.stderr and "the hub can't be reached" in done.stderr
    assert len(calls) <= 2, "ours, and the library's own once a day"


GIVEN = Path(__file__).parents[3] / "data" / "generation5"


@pytest.mark.parametrize("name", ["llama-default", "mixtral", "qwen2-bias", "qwen3-moe"])
def test_a_folder_is_read_without_transformers_in_this_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it now fails
    tokenizer = load_tokenizer(GIVEN / name)
    assert (tokenizer.eod_id, tokenizer.bos_id) == (257, None)
    assert tokenizer.special_tokens == {"<|x|>": 256, "<|end|>": 257}
    # Qwen2Tokenizer of transformers 5 builds its own, whatever tokenizer.json says.
    assert (tokenizer.json_path == GIVEN / name / "tokenizer.json") == (name != "qwen2-bias")


@pytest.mark.parametrize("prefix_space", [True, False])
def test_tokens_beyond_tokenizer_json_are_those_of_transformers_5(tmp_path: Path, prefix_space: bool) -> None:
    """Whichever generation is installed: 4 fails on the class and on a list of tokens, and removes a prefix space."""
    folder = changed(GIVEN / "mixtral", tmp_path, extra_special_tokens=["<|x|>", "<|more|>"], pad_token="<|pad|>")
    description = json.loads((folder / "tokenizer.json").read_text())
    description["pre_tokenizer"]["add_prefix_space"] = prefix_space
    (folder / "tokenizer.json").write_text(json.dumps(description))
    tokenizer = load_tokenizer(folder)
    assert set(tokenizer.special_tokens) == {"<|x|>", "<|end|>", "<|more|>", "<|pad|>"}
    assert tokenizer.num_ids == 260
    encoder = ReferenceEncoder(str(tokenizer.json_path), special_tokens=False)
    assert encoder.encode(["a"])[0].tolist() == ([220, 64] if prefix_space else [64])


def test_special_tokens_under_two_names_must_be_the_same(tmp_path: Path) -> None:
    same = changed(GIVEN / "mixtral", tmp_path, additional_special_tokens=["<|x|>"])
    assert load_tokenizer(same).num_ids == 258
    shutil.rmtree(same)
    with pytest.raises(RequestError, match=r"extra_special_tokens \['<\|x\|>'\] and additional_special_tokens"):
        load_tokenizer(changed(GIVEN / "mixtral", tmp_path, additional_special_tokens=["<|y|>"]))


def test_a_prefix_space_that_depends_on_the_version_of_transformers_is_refused(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    folder = changed(tokenizer_folder, tmp_path, add_prefix_space=True, tokenizer_class="PreTrainedTokenizerFast")
    with pytest.raises(RequestError, match=r"add_prefix_space true in tokenizer_config\.json and false in tokenizer"):
        load_tokenizer(folder)


def test_a_config_that_is_no_json_is_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder = changed(tokenizer_folder, tmp_path)
    for text, words in (("{", "not JSON"), ("[]", "not a JSON object")):
        (folder / "tokenizer_config.json").write_text(text)
        with pytest.raises(RequestError, match=words):
            load_tokenizer(folder)
