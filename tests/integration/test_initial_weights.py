"""A Hugging Face folder is converted once, however many runs start with it, and whatever was killed before."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pretrainkit.errors import CheckpointError
from pretrainkit.models.registry import read_shape
from pretrainkit.run import initial_weights

pytestmark = pytest.mark.integration
PROVIDE = """
import sys
from pathlib import Path
from pretrainkit import logs
from pretrainkit.run import initial_weights as weights
from pretrainkit.models.registry import read_shape
logs.configure()
initial = weights.locate(sys.argv[1], Path(sys.argv[2]))
weights.provide(initial, read_shape(Path(initial.source)))
print(initial.checkpoint)
"""


def test_starts_at_the_same_time_share_one_conversion(tmp_path: Path, make_hf_llama) -> None:  # type: ignore[no-untyped-def]
    folder = make_hf_llama()
    killed = Path(initial_weights.locate(str(folder), tmp_path).checkpoint)
    killed.with_name(f"{killed.name}.tmp-1").mkdir(parents=True)
    command = [sys.executable, "-c", PROVIDE, str(folder), str(tmp_path)]
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    outputs = [start.communicate(timeout=120) for start in starts]
    assert [start.returncode for start in starts] == [0, 0, 0], outputs
    (checkpoint,) = {Path(out.strip()) for out, _ in outputs}
    assert (checkpoint / "weights" / ".metadata").is_file()
    assert sum("once; later starts" in err for _, err in outputs) == 1
    assert {path.name for path in checkpoint.parent.iterdir()} == {checkpoint.name, f"{checkpoint.name}.lock"}


def test_a_checkpoint_without_all_tensors_is_refused_before_the_ranks_start(
    tmp_path: Path, make_hf_llama: Callable[..., Path]
) -> None:
    from pretrainkit.checkpoint.convert import convert

    folder = make_hf_llama()
    convert(folder, tmp_path / "nemo")
    metadata_path = tmp_path / "nemo" / "weights" / ".metadata"
    metadata = pickle.loads(metadata_path.read_bytes())
    del metadata.state_dict_metadata["module.decoder.layers.mlp.linear_fc2.weight"]
    metadata_path.write_bytes(pickle.dumps(metadata))
    initial = initial_weights.locate(str(tmp_path / "nemo"), tmp_path)
    with pytest.raises(CheckpointError, match="linear_fc2"):
        initial_weights.provide(initial, read_shape(folder))
