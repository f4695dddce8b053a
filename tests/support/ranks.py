"""Runs functions in forked ranks: NeMo is imported once (7 s of CPU), then each rank is a fork of that process."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from pretrainkit.errors import EXIT_STOPPED_AFTER_SAVING

RANK_TIMEOUT_S = 240


def run_ranks(target: Callable[..., None], world_size: int, folder: Path, **arguments: Any) -> None:
    """Call `target(rank, world_size, **arguments)` on every rank, with gloo's and torchrun's environment.

    Output goes to `folder`; raises with the end of it when a rank fails or hangs.
    """
    outputs = [folder / f"rank{rank}.log" for rank in range(world_size)]
    ranks = start_ranks(target, world_size, outputs, **arguments)
    for process in ranks:
        process.join(RANK_TIMEOUT_S)
    failed = [rank for rank, process in enumerate(ranks) if process.exitcode != 0]
    kill_with_children(ranks)
    if failed:
        tails = "\n".join(f"--- rank {rank}\n{outputs[rank].read_text()[-3000:]}" for rank in failed)
        raise AssertionError(f"ranks {failed} of {world_size} failed or hung\n{tails}")


def start_ranks(target: Callable[..., None], world_size: int, outputs: list[Path], **arguments: Any) -> list[Any]:
    """Start ranks as `run_ranks` does, and get their processes at once."""
    context = fork_server()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        context.Process(target=_rank, args=(target, rank, world_size, port, output, arguments))
        for rank, output in enumerate(outputs)
    ]
    for process in ranks:
        process.start()
    return ranks


def fork_server() -> Any:
    """The context of the process that has NeMo imported; each test process starts one, for all that forks ranks."""
    # The fork server looks for modules to preload on PYTHONPATH alone.
    os.environ["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranks_preload"])
    multiprocessing.forkserver.ensure_running()
    return context


def kill_with_children(processes: list[Any]) -> None:
    """SIGKILL for ranks and the processes that write for them, as when a node dies."""
    family: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            family += [rank := psutil.Process(process.pid), *rank.children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    for process in processes:
        process.join()
    psutil.wait_procs(family, timeout=10)


def _rank(target: Any, rank: int, world_size: int, port: int, output: Path, arguments: dict[str, Any]) -> None:
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test",
        "WANDB_MODE": "offline",
    }
    # A fork server's children start theirs by fork servers of their own; a rank forks the workers of its loader.
    multiprocessing.set_start_method("fork", force=True)
    import torch

    from pretrainkit import logs
    from pretrainkit.megatron import cpu

    cpu.bridge()
    torch.set_num_threads(1)
    logs.configure()
    target(rank, world_size, **arguments)


def look_at_imports(rank: int, world_size: int) -> None:
    """NeMo warns, and goes on with less, where one of its modules can't be imported."""
    from nemo.collections import llm

    from pretrainkit.imports import LEFT_OUT

    assert callable(llm.pretrain)
    assert not [name for name in LEFT_OUT if name in sys.modules]
    for name in LEFT_OUT:
        __import__(name)


def train_rank(rank: int, world_size: int, *, run_file: Path) -> None:
    """What train.py does for one rank; stopping early is a failure."""
    assert _train(rank, world_size, run_file)


def train_until_stopped(rank: int, world_size: int, *, run_file: Path, largest_file: int | None = None) -> None:
    """The same with train.py's exit code; files can't grow beyond `largest_file` bytes, as on a full disk."""
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    if not _train(rank, world_size, run_file):
        sys.exit(EXIT_STOPPED_AFTER_SAVING)


def train_rank_whose_forks_stand_still(rank: int, world_size: int, *, run_file: Path) -> None:
    """The same where each first try of a fork, the rank's or one of its processes', never comes back in the child."""
    from pretrainkit.engine import child_processes

    tries = itertools.count(1)
    stands_still = False

    def begin() -> None:
        nonlocal stands_still
        stands_still = next(tries) % 2 == 1

    os.register_at_fork(before=begin, after_in_child=lambda: time.sleep(3600) if stands_still else None)
    child_processes.START_TIMEOUT_S = 1.0
    train_rank(rank, world_size, run_file=run_file)


def train_rank_until_rollback(rank: int, world_size: int, *, run_file: Path) -> None:
    """The same; where a rank would replace its process by a new one after a bad step, it ends."""
    from pretrainkit.engine.callbacks import rollback

    rollback.start_again = lambda: os._exit(0)
    train_rank(rank, world_size, run_file=run_file)


def train_rank_without_samples(rank: int, world_size: int, *, run_file: Path, left_out: list[int]) -> None:
    """The same on data whose order never had some samples."""
    from pretrainkit.megatron.dataset import EpochDataset

    read = EpochDataset.__getitem__
    order = [sample for sample in range(500) if sample not in left_out]
    EpochDataset.__getitem__ = lambda dataset, index: read(dataset, order[index])
    train_rank(rank, world_size, run_file=run_file)


DELAY_S = 8.0
SAMPLES_READ = 2


def train_rank_with_delays(rank: int, world_size: int, *, run_file: Path) -> None:
    """The same where the Hugging Face model, and the processes that read held-out data, take long to come."""
    from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop

    from pretrainkit.engine.callbacks.initial_loss_check import InitialLossCheck

    share, reset = InitialLossCheck.share_reference, _EvaluationLoop.reset

    def after_a_while(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            print(f"{function.__name__} comes later", flush=True)
            time.sleep(DELAY_S)
            return function(*arguments)

        return call

    InitialLossCheck.share_reference, _EvaluationLoop.reset = after_a_while(share), after_a_while(reset)
    train_until_stopped(rank, world_size, run_file=run_file)


def train_rank_without_data(rank: int, world_size: int, *, run_file: Path) -> None:
    """The same where reading stands still with all threads of its process, as in a mapped file that is away.

    It does so when a sample was announced and the rank hasn't asked for its memory.
    """
    from pretrainkit.engine.callbacks import loader_watchdog
    from pretrainkit.megatron.dataset import EpochDataset

    read, watched, calls = EpochDataset.__getitem__, loader_watchdog.DataLoaderWatchdog.watched, itertools.count(1)

    def stand_still(dataset: EpochDataset, index: int | None) -> Any:
        if next(calls) == SAMPLES_READ + 1:
            time.sleep(1.0)
            ctypes.PyDLL(None).sleep(3600)
        return read(dataset, index)

    def late(watchdog: loader_watchdog.DataLoaderWatchdog, function: Callable[..., Any]) -> Callable[..., Any]:
        take = watched(watchdog, function)

        def take_late(*arguments: Any) -> Any:
            time.sleep(2.0)
            return take(*arguments)

        return take_late

    EpochDataset.__getitem__, loader_watchdog.DataLoaderWatchdog.watched = stand_still, late
    loader_watchdog.wait_limit_s = lambda run: 2.0
    train_rank(rank, world_size, run_file=run_file)


def _train(rank: int, world_size: int, run_file: Path) -> bool:
    from pretrainkit.config.run_file import read_run
    from pretrainkit.engine import train
    from pretrainkit.engine.intact import intact_plan
    from pretrainkit.run import resume_plan

    run = read_run(run_file)
    plan = intact_plan(run, resume_plan.plan_start(run), rank=rank, world_size=world_size)
    if rank == 0:
        resume_plan.prepare(run, plan)
    return train.train(run, plan, rank=rank, local_world_size=world_size)


def norm_gradients_rank(rank: int, world_size: int) -> None:
    """Loss and gradients with the norm in Triton (its interpreter) are torch's, whatever is recomputed."""
    import torch

    from pretrainkit.config.schema import Kernels, ModelShape
    from pretrainkit.megatron import model as megatron_model

    shape = ModelShape(
        family="llama",
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        head_dim=8,
        vocab_size=64,
        max_position_embeddings=64,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world_size)
    megatron_model.initialize()
    tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))

    def gradients(norm: str, recompute: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model: Any = megatron_model.build_model(
            shape, padded_vocab_size=64, sequence_length=16, kernels=Kernels("torch", norm, *6 * ["torch"])
        )
        if recompute == "full":
            config = model.decoder.config
            config.recompute_granularity, config.recompute_method, config.recompute_num_layers = "full", "block", 1
        for layer in model.decoder.layers:
            layer.recompute_mlp = recompute == "mlp"
        generator = torch.Generator().manual_seed(2)
        for _, parameter in sorted(model.named_parameters()):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 4)
        loss = model(tokens[:, :-1], torch.arange(16).expand(2, 16), None, labels=tokens[:, 1:]).mean()
        loss.backward()
        return {"loss": loss.detach(), **{name: parameter.grad for name, parameter in model.named_parameters()}}

    expected = gradients("torch", "none")
    assert min(gradient.abs().max() for gradient in expected.values()) > 1e-5
    for recompute in ("none", "full", "mlp"):
        found = gradients("triton", recompute)
        print(f"recomputed: {recompute}")
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def logits_rank(rank: int, world_size: int, *, hf_folder: Path, checkpoint: Path, tokens_file: Path) -> None:
    """Write the Megatron model's logits for saved tokens beside them, at tensor parallel size `world_size`."""
    import torch

    from pretrainkit.megatron import model as megatron_model
    from pretrainkit.models.registry import read_shape

    torch.distributed.init_process_group("gloo")
    megatron_model.initialize(tensor_parallel_size=world_size)
    shape, tokens = read_shape(hf_folder), torch.load(tokens_file)
    model = megatron_model.load_model(
        checkpoint / "weights", shape, padded_vocab_size=shape.vocab_size, sequence_length=tokens.size(1)
    )
    logits = megatron_model.logits(model, tokens, vocab_size=shape.vocab_size)
    if rank == 0:
        torch.save(logits, tokens_file.with_name("logits.pt"))


def document_losses_rank(rank: int, world_size: int, *, hf_folder: Path, checkpoint: Path, batch_file: Path) -> None:
    """Write the losses [b, s] of a batch of rows beside it, and of each of its documents alone."""
    import torch

    from pretrainkit.megatron import model as megatron_model
    from pretrainkit.megatron.document_attention import segment_bounds
    from pretrainkit.models.registry import read_shape

    torch.distributed.init_process_group("gloo")
    megatron_model.initialize(tensor_parallel_size=world_size)
    shape, batch = read_shape(hf_folder), torch.load(batch_file)
    model = megatron_model.load_model(
        checkpoint / "weights", shape, padded_vocab_size=shape.vocab_size, sequence_length=batch["tokens"].size(1)
    )
    bounds = segment_bounds(batch["position_ids"])
    with torch.no_grad():
        together = model(batch["tokens"], batch["position_ids"], bounds, labels=batch["labels"])
        alone = []
        for begin, end in itertools.pairwise(bounds[0]):
            parts = (batch[name].flatten()[begin:end][None] for name in ("tokens", "position_ids", "labels"))
            tokens, positions, labels = parts
            alone.append(model(tokens, positions, None, labels=labels)[0])
    if rank == 0:
        torch.save((together, torch.cat(alone).view_as(together)), batch_file.with_name("losses.pt"))


def train_rank_without_a_weight(rank: int, world_size: int, *, run_file: Path) -> None:
    """What train.py does for one rank, with an engine that leaves weights of one kind as they were built."""
    from nemo.lightning import MegatronStrategy
    from nemo.lightning.megatron_parallel import MegatronParallel

    describe, restore = MegatronParallel.sharded_state_dict, MegatronStrategy.load_model_state_dict

    def describe_some(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = describe(self, *args, **kwargs)
        return {name: value for name, value in state.items() if "mlp.linear_fc2.weight" not in name}

    MegatronParallel.sharded_state_dict = describe_some
    MegatronStrategy.load_model_state_dict = lambda self, checkpoint, strict=True: restore(
        self, checkpoint, strict=False
    )
    _train(rank, world_size, run_file)


def nemo_export_rank(rank: int, world_size: int, *, checkpoint: Path, output: Path) -> None:
    """NeMo's own export of a checkpoint to Hugging Face's format, with what it needs on a machine without CUDA."""
    import nemo.collections.llm.gpt.model.base as nemo_base
    import nemo.lightning.io.pl as nemo_checkpoint_io
    import transformers.modeling_utils as transformers_modeling
    from nemo.collections import llm
    from transformers.initialization import no_init_weights

    from pretrainkit.megatron.layer_spec import torch_layer_spec

    nemo_checkpoint_io._fix_tensors_device = lambda checkpoint: checkpoint
    nemo_base.local_layer_spec = torch_layer_spec
    # NeMo's exporters import it from where transformers 4 had it.
    transformers_modeling.no_init_weights = no_init_weights
    llm.export_ckpt(path=checkpoint, target="hf", output_path=output)


def train_rank_noting_copies(rank: int, world_size: int, *, run_file: Path) -> None:
    """The same; copiesR.json has the sizes that a save was expected to copy after a step, and those that it did."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    from pretrainkit.engine import host_memory

    expected: list[int] = []
    copy = FileSystemWriterAsync.preload_tensors

    def expect(self: Any, trainer: Any) -> None:
        expected[:] = expected or host_memory.copied_bytes(self._run, trainer)

    def noted(write_buckets: Any, *arguments: Any) -> Any:
        copied = [tensor.nbytes for _, _, (_, tensors) in write_buckets for _, tensor in tensors]
        path = run_file.parent / f"copies{rank}.json"
        path.write_text(json.dumps({"expected": sorted(expected), "copied": sorted(copied)}))
        return copy(write_buckets, *arguments)

    host_memory.HostMemory.begin = expect  # type: ignore[method-assign]
    FileSystemWriterAsync.preload_tensors = staticmethod(noted)
    train_rank(rank, world_size, run_file=run_file)
