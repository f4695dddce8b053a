"""Conversion side by side, on the same disk and cores: copying the files, ours, NeMo's own, mbridge.

    python tests/bench/bench_conversion.py [--folder build/bench] [--layers 8] [--rounds 3] [--without nemo mbridge]

The model is random, with the shape of Llama 3 8B cut to some layers. Each command is timed as a whole, from its
start to the moment when all it wrote is flushed to disk; commands alternate, so that a busy machine is as busy for
all. Prints a Markdown table of medians (smallest to largest), and writes all measurements as JSON; with --continue
those of an earlier call count too. NeMo and mbridge (`pip install --no-deps mbridge`) hold the whole model, NeMo
several times over: give them fewer layers where memory is short.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from pretrainkit.files import fsync_path

ROOT = Path(__file__).parents[2]
CONVERT = ROOT / "tools/convert_checkpoint.py"
GIB = 2**30
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
COPY = """
import os, shutil, sys
source, target = sys.argv[1:]
shutil.copytree(source, target)
for folder, _, names in os.walk(target):
    for name in names:
        os.fsync(os.open(os.path.join(folder, name), os.O_RDONLY))
"""
NEMO = """
import sys
from pathlib import Path
from pretrainkit.megatron import cpu
cpu.bridge()
# What NeMo's connectors need on a machine without CUDA and Transformer Engine.
from megatron.core.transformer.transformer_config import TransformerConfig
prepare = TransformerConfig.__post_init__
def without_fused_rope(self):
    self.apply_rope_fusion = False
    prepare(self)
TransformerConfig.__post_init__ = without_fused_rope
import nemo.lightning.io.pl
nemo.lightning.io.pl._fix_tensors_device = lambda state: state
import nemo.collections.llm.gpt.model.base as base
from pretrainkit.megatron.layer_spec import torch_layer_spec
base.local_layer_spec = torch_layer_spec
from nemo.collections import llm
what, source, target = sys.argv[1:]
if what == "import":
    model = llm.LlamaModel(llm.LlamaConfig(num_layers=1, hidden_size=64, num_attention_heads=1))
    llm.import_ckpt(model=model, source=f"hf://{source}", output_path=Path(target))
else:
    llm.export_ckpt(path=Path(source), target="hf", output_path=Path(target))
"""


MBRIDGE = """
import os, sys
from pathlib import Path
from pretrainkit.megatron import cpu
cpu.bridge()
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
import mbridge.core.llm_bridge
from mbridge import AutoBridge
from pretrainkit.megatron.layer_spec import torch_layer_spec
# What mbridge needs on a machine without CUDA and Transformer Engine.
mbridge.core.llm_bridge.get_gpt_decoder_block_spec = lambda config, **_: torch_layer_spec(config)
what, source, target, original = sys.argv[1:]
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(0)
bridge = AutoBridge.from_pretrained(original)
bridge.set_extra_args(apply_rope_fusion=False, masked_softmax_fusion=False)
with torch.no_grad():
    models = bridge.get_model(weight_path=source if what == "import" else None, use_cpu_initialization=True)
    state = models[0].sharded_state_dict()
    if what == "import":
        Path(target).mkdir()
        dist_checkpointing.save(state, target)
    else:
        models[0].load_state_dict(dist_checkpointing.load(state, source))
        bridge.safetensor_io = bridge._get_safetensor_io(original)
        bridge.save_weights(models, target)
"""


@dataclass
class Measurement:
    """One run of one command."""

    what: str
    wall_s: float
    cpu_s: float
    peak_gib: float
    """Of the process, resident, with file pages that it maps."""
    gib: float
    """Size of the output."""


READY_BYTES = 8 * GIB
"""Memory that is touched and freed before each command, more than any writes. A virtual machine gives memory that lies
free back to its host. To write to it then takes several times as long, which would hit some and spare others."""


def measure(what: str, command: list[object], target: Path) -> Measurement:
    """Run a command that writes the folder `target`, alone on a clean start; flushing what it left unflushed counts."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    make_memory_ready()
    before, began = os.times(), time.monotonic()
    process = subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        cwd=ROOT,
    )
    peak = [0.0]
    watcher = threading.Thread(target=_watch, args=(process, peak))
    watcher.start()
    _, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{what} failed ({process.returncode}), at {peak[0] / GIB:.1f} GiB\n{errors.decode()[-2000:]}")
    for path in target.rglob("*"):
        fsync_path(path)
    wall_s, after = time.monotonic() - began, os.times()
    watcher.join()
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    return Measurement(what, wall_s, cpu_s, peak[0] / GIB, size / GIB)


def make_memory_ready() -> None:
    """Touch and free much memory."""
    with mmap.mmap(-1, READY_BYTES) as memory:
        for page in range(0, READY_BYTES, mmap.PAGESIZE):
            memory[page] = 1


def _watch(process: subprocess.Popen[bytes], peak: list[float]) -> None:
    """Keep the largest resident size that Linux tells about a process."""
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            return
        for line in status.splitlines():
            if line.startswith("VmHWM"):
                peak[0] = max(peak[0], int(line.split()[1]) * 1024)
        time.sleep(0.05)


def make_model(folder: Path, num_layers: int) -> None:
    """Write the random model, and a tokenizer that NeMo needs to see."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from pretrainkit.checkpoint.formats.hf import HfWriter
    from pretrainkit.checkpoint.lazy_tensor import LazyTensor
    from pretrainkit.checkpoint.mapping import tensor_mappings
    from pretrainkit.checkpoint.plan import CheckpointFormat, ConversionPlan
    from pretrainkit.models.registry import read_shape

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": num_layers}, indent=2))
    vocabulary = {f"<{i}>": i for i in range(CONFIG["vocab_size"])}  # type: ignore[call-overload]
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<128001>").save_pretrained(folder)
    shape = read_shape(folder)
    mappings = tensor_mappings(shape)
    dtypes = dict.fromkeys(mappings, torch.bfloat16)
    target = HfWriter(folder, ConversionPlan(CheckpointFormat.HF, shape, mappings, dtypes, folder))
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2**26 + 2**20, generator=generator).to(torch.bfloat16)

    def random_rows(shape: tuple[int, ...]) -> LazyTensor:
        first = int(torch.randint(2**20, (), generator=generator))
        count = torch.Size(shape).numel()
        return LazyTensor.of(noise[first:].repeat(-(-count // 2**26))[:count].reshape(shape))

    for part, of_part in enumerate(target.parts):
        target.write_part(part, ((mapping, [random_rows(shape) for shape in mapping.shapes]) for mapping in of_part))
    target.finish()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "build/bench")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without", nargs="+", choices=["nemo", "mbridge"], default=[])
    parser.add_argument("--continue", dest="continued", action="store_true", help="add to the measurements there are")
    arguments = parser.parse_args()
    work = arguments.folder.absolute() / f"conversion-{arguments.layers}"
    model = work / "hf"
    if not (model / "model.safetensors.index.json").exists() and not (model / "model.safetensors").exists():
        shutil.rmtree(work, ignore_errors=True)
        make_model(model, arguments.layers)
    python, workers = sys.executable, len(os.sched_getaffinity(0))

    def ours(source: Path, target: Path, *more: object) -> list[object]:
        return [python, CONVERT, source, target, "--workers", workers, "--quiet", *more]

    tp2 = ("--target-format", "torch", "--target-tensor-parallel-size", 2)
    steps: list[tuple[str, Callable[[], list[object]], Path]] = [
        ("copy of the files, flushed", lambda: [python, "-c", COPY, model, work / "copy"], work / "copy"),
        ("Hugging Face to NeMo", lambda: ours(model, work / "nemo"), work / "nemo"),
        ("NeMo to Hugging Face", lambda: ours(work / "nemo", work / "back"), work / "back"),
        ("Hugging Face to torch, TP=2", lambda: ours(model, work / "torch", *tp2), work / "torch"),
        ("torch, TP=2, to Hugging Face", lambda: ours(work / "torch", work / "back"), work / "back"),
    ]
    if "nemo" not in arguments.without:
        imported, exported = work / "nemo-own", work / "back-own"
        nemo = [python, "-c", NEMO]
        steps.append(("NeMo's import_ckpt", lambda: [*nemo, "import", model, imported], imported))
        steps.append(("NeMo's export_ckpt", lambda: [*nemo, "export", imported, exported], exported))
    if "mbridge" not in arguments.without:
        loaded, saved = work / "mbridge", work / "back-mbridge"
        mbridge = [python, "-c", MBRIDGE]
        steps.append(("mbridge to torch_dist", lambda: [*mbridge, "import", model, loaded, model], loaded))
        steps.append(("mbridge to Hugging Face", lambda: [*mbridge, "export", loaded, saved, model], saved))
    record = arguments.folder / f"conversion-{arguments.layers}.json"
    done = [Measurement(**one) for one in json.loads(record.read_text())] if arguments.continued else []
    for _ in range(arguments.rounds):
        for what, command, target in steps:
            done.append(measure(what, command(), target))
            print(f"{what}: {done[-1].wall_s:.1f} s", file=sys.stderr)
            record.write_text(json.dumps([asdict(one) for one in done], indent=2))
            if target.name.startswith(("copy", "back")):  # nothing is made of it, nor of what it was made of
                for name in (target.name, "nemo", "torch", "nemo-own", "mbridge"):
                    shutil.rmtree(work / name, ignore_errors=True)
    _print_table(done, list(dict.fromkeys(one.what for one in done)), workers)
    return 0


def _print_table(done: list[Measurement], order: list[str], workers: int) -> None:
    by_name = {what: [one for one in done if one.what == what] for what in order}
    base = statistics.median(one.wall_s for one in by_name[order[0]])
    size = by_name[order[0]][0].gib
    print(
        f"{size:.1f} GiB of bf16 weights; {workers} cores, {platform.machine()}, Python {platform.python_version()}\n"
    )
    print("| what | wall, s | times the copy | CPU, s | peak memory, GiB |")
    print("|---|--:|--:|--:|--:|")
    for what, runs in by_name.items():
        if not runs:
            continue
        walls = sorted(one.wall_s for one in runs)
        median = statistics.median(walls)
        cpu_s, peak = statistics.median(one.cpu_s for one in runs), max(one.peak_gib for one in runs)
        spread = f"{median:.1f} ({walls[0]:.1f} to {walls[-1]:.1f})"
        print(f"| {what} | {spread} | {median / base:.2f} | {cpu_s:.1f} | {peak:.2f} |")


if __name__ == "__main__":
    sys.exit(main())
