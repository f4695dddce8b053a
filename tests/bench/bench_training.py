"""Training speed on GPUs: plain torch, our fused kernels, NeMo with Transformer Engine, in one run on the same cards.

    python tests/bench/bench_training.py [--model 1b] [--paths plain,fused,te] [--rounds 3] [--steps 10]
        [--sequence_length 4096] [--micro_batch_size 4] [--global_batch_size 16] [--gpus 1 --tp 1 --pp 1 --cp 1 --ep 1]
        [--learning_rate 3e-5] [--config configs/model/M.yaml configs/baselines/B.yaml] [--next --model 8b ...]

plain: --layer_spec torch --fused_kernels off; fused: --layer_spec torch --fused_kernels auto; te: --layer_spec te
with the fusions of NeMo's recipes, and te_fp8_* with FP8.
graphed and launched are fused, the one with its layers replayed as CUDA graphs, the other without; fp8* are fused with
--precision fp8; loop is fused with a loop over a model's experts in Megatron's own layer. Each measurement is a run of
the trainer of its own: random weights of the model's shape, Python's manual and library byte by byte (5 MB), no
checkpoints. The paths take turns, `--rounds` times. Prints Markdown; a figure is the median over the rounds of the
median over the steps after the third. The ranks of torch's layers are forks of a process without Transformer Engine,
since importing NeMo takes longer than the steps; what is measured after --next shares it, with options of its own.
--config takes model, sizes and layout from files of pretrain.py; further options change them. --accelerator cpu, with
gloo and the models tiny and tiny-moe, tries a layout and its options, where all ranks share a machine's cores.

The learning rate is low, so that the paths' losses, whose arithmetic differs in rounding alone, stay near each other:
at 3e-4 a few steps from random weights make a large difference of any small one. The largest is said below the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import sys
import sysconfig
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from published_models import CONFIGS

_LAUNCHED = "norm,rotary,swiglu,cross_entropy,weight_gradient"
_GRAPHED = f"{_LAUNCHED},cuda_graphs"
PATHS: dict[str, dict[str, str]] = {
    "plain": {"layer_spec": "torch", "fused_kernels": "off"},
    "fused": {"layer_spec": "torch", "fused_kernels": "auto"},
    "launched": {"layer_spec": "torch", "fused_kernels": _LAUNCHED},
    "graphed": {"layer_spec": "torch", "fused_kernels": _GRAPHED},
    "fp8": {"layer_spec": "torch", "precision": "fp8"},
    "fp8_launched": {"layer_spec": "torch", "precision": "fp8", "fused_kernels": _LAUNCHED},
    "fp8_tensorwise": {"layer_spec": "torch", "precision": "fp8", "fp8_recipe": "tensorwise"},
    "fp8_wgrad_bf16": {"layer_spec": "torch", "precision": "fp8", "fp8_recipe": "rowwise_wgrad_bf16"},
    "loop": {"layer_spec": "torch", "fused_kernels": "auto"},
    "te": {"layer_spec": "te", "fused_kernels": "off"},
    "te_fused": {"layer_spec": "te", "fused_kernels": "auto"},
    "te_fp8_delayed": {"layer_spec": "te", "fused_kernels": "off"},
    "te_fp8_tensorwise": {"layer_spec": "te", "fused_kernels": "off"},
}
TE_FP8 = {
    "te_fp8_delayed": {"fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"},
    "te_fp8_tensorwise": {"fp8_recipe": "tensorwise"},
}
"""NeMo's settings of Transformer Engine's FP8, as its recipes for Hopper have them; e4m3 forward, e5m2 backward."""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "135m": LLAMA
    | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "head_dim": 64, "vocab_size": 49152}
    | {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    "1b": LLAMA
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
    | {"tie_word_embeddings": True},
    "8b": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128}
    | {"tie_word_embeddings": False},
    "qwen3-30b-a3b": CONFIGS["Qwen/Qwen3-30B-A3B-Base"],
    "mixtral-8x7b": CONFIGS["mistralai/Mixtral-8x7B-v0.1"],
    "gpt-oss-20b": CONFIGS["openai/gpt-oss-20b"],
    "tiny": LLAMA
    | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 8, "vocab_size": 320}
    | {"num_attention_heads": 8, "tie_word_embeddings": False},
    "tiny-moe": CONFIGS["Qwen/Qwen3-30B-A3B-Base"]
    | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 8, "vocab_size": 320}
    | {"num_attention_heads": 8, "num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 32},
}
MODULES = Path(sysconfig.get_path("stdlib"))
FIRST_STEPS = 3  # compilation, allocation


@dataclass(frozen=True)
class Measurement:
    """One run of the trainer."""

    tokens_per_s: float
    mfu: float | None
    peak_gib: float
    losses: list[float]
    validation: list[float]


def main() -> int:
    every = [(parse(words), " ".join(words)) for words in split_words(sys.argv[1:])]
    if not torch.cuda.is_available() and any(arguments.accelerator == "gpu" for arguments, _ in every):
        print("bench_training: no GPU on this machine, nothing measured")
        return 0
    for arguments, words in every:
        measured = compare(arguments)
        print(table(measured, arguments, words), end="\n\n", flush=True)
        if arguments.losses:
            first = {path: dataclasses.asdict(runs[0]) for path, runs in measured.items()}
            Path(arguments.losses).write_text(json.dumps(first))
    return 0


def parse(words: list[str]) -> argparse.Namespace:
    """The options of a measurement; those that aren't given are those of --config, if there is one."""
    parser = build_parser()
    if files := parser.parse_args(words).config:
        parser.set_defaults(**options_of(files))
    return parser.parse_args(words)


def options_of(files: list[Path]) -> dict[str, Any]:
    """The options that files of pretrain.py say, of which later ones win."""
    from pretrainkit.config.load import load_config

    config = load_config(files)
    name = str(config.hf_model_id)
    MODELS[name] = CONFIGS[name]
    parallel, training = config.parallel, config.training
    return {
        "model": name,
        "sequence_length": config.data.sequence_length,
        "micro_batch_size": training.micro_batch_size,
        "global_batch_size": training.global_batch_size,
        "recompute": training.recompute,
        "gpus": config.launch.num_gpus,
        "tp": parallel.tensor_model_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
        "cp": parallel.context_parallel_size,
        "ep": parallel.expert_model_parallel_size,
    }


def split_words(words: list[str]) -> list[list[str]]:
    """The options of each measurement: those between one --next and another."""
    ends = [*(place for place, word in enumerate(words) if word == "--next"), len(words)]
    return [words[begin:end] for begin, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)]


def compare(arguments: argparse.Namespace) -> dict[str, list[Measurement]]:
    """Measure the paths in turn; a path that fails is left out."""
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), arguments)
        measured: dict[str, list[Measurement]] = {path: [] for path in arguments.paths.split(",")}
        for _ in range(arguments.rounds):
            for path, runs in list(measured.items()):
                try:
                    runs.append(measure(path, arguments, Path(folder)))
                except RuntimeError as error:  # of memory, say: the other paths are measured
                    print(error, file=sys.stderr, flush=True)
                    del measured[path]
                    continue
                print(f"{path}: {runs[-1].tokens_per_s:,.0f} tokens/s", file=sys.stderr, flush=True)
    return measured


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1b", choices=MODELS)
    parser.add_argument("--config", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--accelerator", default="gpu", choices=("gpu", "cpu"))
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--paths", default="plain,fused")
    for name, default in (
        ("rounds", 3),
        ("steps", 10),
        ("sequence_length", 4096),
        ("micro_batch_size", 4),
        ("global_batch_size", 16),
        ("seed", 1234),
        ("val_interval", 0),
        *(("gpus", 1), ("tp", 1), ("pp", 1), ("cp", 1), ("ep", 1)),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--learning_rate", type=float, default=3e-5, help="reached after a quarter of the steps")
    parser.add_argument("--recompute", default="none", help="as in pretrain.py: auto takes what fits the card")
    parser.add_argument("--timeline", help="write the GPU's milliseconds of the last step by kernel to this file")
    parser.add_argument("--balanced", action="store_true", help="let routers send each expert as many tokens")
    parser.add_argument("--losses", help="write every path's first round to this JSON file, with all losses")
    return parser


def write_inputs(folder: Path, arguments: argparse.Namespace) -> None:
    """The model's folder with a tokenizer of bytes, and the text as a pair."""
    import numpy as np
    from indexed_writer import IndexedDatasetWriter
    from tokenizers import Tokenizer, models, pre_tokenizers

    shape = MODELS[arguments.model]
    model = folder / "model"
    model.mkdir()
    layers = arguments.layers or shape["num_hidden_layers"]
    kinds = {"layer_types": shape["layer_types"][:layers]} if "layer_types" in shape else {}
    (model / "config.json").write_text(json.dumps(shape | kinds | {"num_hidden_layers": layers}))
    ids = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=ids | {"<|end|>": 256}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"})
    )
    with IndexedDatasetWriter(folder / "text", np.dtype(np.int32)) as writer:
        for text in (
            *topics.topics.values(),
            *(path.read_text(encoding="utf-8") for path in sorted(MODULES.glob("*.py"))),
        ):
            writer.add_document([*text.encode(), 256])


def measure(path: str, arguments: argparse.Namespace, folder: Path) -> Measurement:
    """Train once on all ranks, and read what the trainer recorded."""
    experiment = folder / "experiment"
    shutil.rmtree(experiment, ignore_errors=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Transformer Engine looks at CUDA when it is imported, after which a process can't be forked.
    method = "spawn" if path.startswith("te") else "forkserver"
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        os.environ["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
        support = str(Path(__file__).parents[1] / "support")
        os.environ["PYTHONPATH"] = os.pathsep.join((support, os.environ["PYTHONPATH"]))
        context.set_forkserver_preload(["trainer_without_te" if arguments.accelerator == "gpu" else "ranks_preload"])
    ranks = [
        context.Process(target=train_rank, args=(path, arguments, str(folder), rank, port))
        for rank in range(arguments.gpus)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        tails = "\n".join(log.read_text(errors="replace")[-3000:] for log in sorted(folder.glob("rank*.log")))
        raise RuntimeError(f"{path}: a rank failed\n{tails}")
    return read_measurement(experiment)


def train_rank(path: str, arguments: argparse.Namespace, folder: str, rank: int, port: int) -> None:
    """One rank of one run."""
    multiprocessing.set_start_method("fork", force=True)  # a rank's DataLoader starts its workers as pretrain.py's do
    log = os.open(f"{folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(arguments.gpus),
        "LOCAL_WORLD_SIZE": str(arguments.gpus),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "HF_HUB_OFFLINE": "1",
    }
    try:
        if arguments.accelerator == "gpu":
            torch.cuda.set_device(rank)
        else:
            torch.set_num_threads(1)
        from pretrainkit.engine import train
        from pretrainkit.run import resume_plan

        train.Checkpoints._save = lambda *_, **__: None  # this measures steps, not the disk
        if arguments.timeline and rank == 0:
            base = train.FreezeGC
            train.FreezeGC = lambda: timeline_of_last_step(base, path, arguments)
        if arguments.balanced:
            balance_routers()
        if path == "loop":
            from expert_loop import use_loop

            use_loop()
        if path.startswith("te") and PATHS[path]["fused_kernels"] == "off":
            use_fields_of_nemo()
        if path in TE_FP8:
            use_te_fp8(TE_FP8[path])
        run = resolve_run(path, arguments, Path(folder))
        plan = resume_plan.plan_start(run)
        if rank == 0:
            resume_plan.prepare(run, plan)
        train.train(run, plan, rank=rank, local_world_size=arguments.gpus)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # what the libraries do at exit is not measured


def timeline_of_last_step(base: Any, path: str, arguments: argparse.Namespace) -> Any:
    """A callback that appends the time of each kernel of the last step to a file."""

    class Timeline(base):  # type: ignore[misc]
        profiler: Any = None

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == arguments.steps - 1:
                torch.cuda.synchronize()
                self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                self.profiler.start()
                self.began_s = time.perf_counter()

        def on_train_batch_end(self, *_: Any) -> None:
            if self.profiler is None:
                return
            torch.cuda.synchronize()
            wall_ms = 1000 * (time.perf_counter() - self.began_s)
            self.profiler.stop()
            spent: dict[str, list[float]] = {}
            for event in self.profiler.events():
                if event.device_type == torch.autograd.DeviceType.CUDA:
                    spent.setdefault(event.name, []).append(event.device_time_total / 1000)
            with Path(arguments.timeline).open("a") as out:
                busy_ms = sum(map(sum, spent.values()))
                print(f"{path}: {wall_ms:.0f} ms, kernels {busy_ms:.0f} ms (streams may overlap)", file=out)
                for name, times in sorted(spent.items(), key=lambda item: -sum(item[1])):
                    print(f"{sum(times):9.2f} ms {len(times):6} x {name}", file=out)

    return Timeline()


def use_fields_of_nemo() -> None:
    """Let TransformerConfig have the fusions of NeMo's recipes, which --fused_kernels off leaves out.

    Weight gradients are added to the fp32 buffer by Transformer Engine, as where apex is installed.
    """
    from pretrainkit.megatron import kernels

    names = "apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion", "gradient_accumulation_fusion"
    kernels.config_fields = lambda *_, **__: dict.fromkeys(names, True)


def balance_routers() -> None:
    """Let NeMo's config have Megatron's field for benchmarks: random routing, with its cost."""
    from pretrainkit.engine import trainer

    fields = trainer.expert_fields
    trainer.expert_fields = lambda *args, **settings: {
        **fields(*args, **settings),
        "moe_router_force_load_balancing": True,
    }


def use_te_fp8(settings: dict[str, Any]) -> None:
    """Let NeMo's precision plugin have Transformer Engine's FP8, which pretrain.py has no option for."""
    from pretrainkit.engine import trainer

    plugin = trainer.nl.MegatronMixedPrecision
    trainer.nl.MegatronMixedPrecision = lambda **usual: plugin(**usual, fp8="hybrid", **settings)


def resolve_run(path: str, arguments: argparse.Namespace, folder: Path) -> Any:
    """The resolved run of one measurement."""
    from pretrainkit.config.resolve import RunFacts, resolve
    from pretrainkit.config.schema import RunConfig
    from pretrainkit.data.dataset import read_dataset
    from pretrainkit.machine import MachineFacts
    from pretrainkit.models.registry import read_shape
    from pretrainkit.run import resource_plan

    default, change = RunConfig(), dataclasses.replace
    config = change(
        default,
        experiment="experiment",
        experiments_dir=str(folder),
        data=change(
            default.data, dataset_path=f"{folder}/text", sequence_length=arguments.sequence_length, split="95,5,0"
        ),
        parallel=change(
            default.parallel,
            tensor_model_parallel_size=arguments.tp,
            pipeline_model_parallel_size=arguments.pp,
            context_parallel_size=arguments.cp,
            expert_model_parallel_size=arguments.ep,
        ),
        optimizer=change(default.optimizer, lr=arguments.learning_rate, lr_warmup_steps=max(2, arguments.steps // 4)),
        training=change(
            default.training,
            max_steps=arguments.steps,
            micro_batch_size=arguments.micro_batch_size,
            global_batch_size=arguments.global_batch_size,
            val_interval=arguments.val_interval,
            seed=arguments.seed,
            recompute=arguments.recompute,
            fp8_check_interval=0,
            **PATHS[path],
        ),
        launch=change(default.launch, num_gpus=arguments.gpus, accelerator=arguments.accelerator),
    )
    dataset = read_dataset(config.data.dataset_path, config.data.split)
    facts = RunFacts(
        machine=MachineFacts(num_gpus=arguments.gpus, num_cpus=os.cpu_count() or 1),
        experiment_dir=str(folder / "experiment"),
        model=read_shape(folder / "model"),
        hf_folder=str(folder / "model"),
        tokenizer_largest_id=256,
        dataset=dataset.facts,
        split_tokens=dataset.split_tokens,
        dataset_tokenizers=dataset.tokenizers,
    )
    run = resolve(config, facts)
    return resource_plan.plan_memory(run, refuse=arguments.recompute == "auto")


def read_measurement(experiment: Path) -> Measurement:
    """The medians over the steps after the first ones."""
    records = [json.loads(line) for line in (experiment / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    counted = steps[FIRST_STEPS:]

    def median(name: str) -> float:
        return statistics.median(record[name] for record in counted)

    return Measurement(
        tokens_per_s=median("tokens_per_second"),
        mfu=median("mfu") if counted[0].get("mfu") else None,
        peak_gib=max(record.get("peak_memory_gib") or 0.0 for record in steps),
        losses=[record["loss"] for record in steps],
        validation=[record["val_loss"] for record in records if "val_loss" in record],
    )


def table(measured: dict[str, list[Measurement]], arguments: argparse.Namespace, words: str) -> str:
    """Markdown: the machine, then a row for each path."""
    device = torch.cuda.get_device_name() if arguments.accelerator == "gpu" else "CPU ranks"
    lines = [
        f"{arguments.gpus} x {device}, torch {torch.__version__}, {arguments.rounds} rounds of "
        f"{arguments.steps} steps: {words}",
        "",
        "| path | tokens/s, median (min to max) | MFU % | peak GiB on rank 0 | first loss | last loss |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for path, runs in measured.items():
        rates = [run.tokens_per_s for run in runs]
        mfus = [100 * run.mfu for run in runs if run.mfu]
        mfu = f"{statistics.median(mfus):.1f}" if mfus else "-"
        lines.append(
            f"| {path} | {statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f}) | {mfu} "
            f"| {max(run.peak_gib for run in runs):.1f} | {runs[0].losses[0]:.4f} | {runs[0].losses[-1]:.4f} |"
        )
    of_paths = zip(*(runs[0].losses for runs in measured.values()), strict=True)
    difference = max((max(losses) - min(losses) for losses in of_paths), default=0.0)
    lines += ["", f"Largest difference between the paths' losses at one step: {difference:.4f}"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
