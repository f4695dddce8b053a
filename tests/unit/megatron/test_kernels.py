"""The choice of kernels: by what is installed, the device, and what was asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from pretrainkit.config.schema import Kernels, ParallelConfig, Recompute, ResolvedRun
from pretrainkit.errors import RequestError
from pretrainkit.megatron.kernels import LIBRARIES, choose, choose_for, config_fields

ALL = frozenset(LIBRARIES)
OURS = frozenset(("triton", "liger_kernel"))
PLAIN = Kernels(*8 * ["torch"])
FUSED = Kernels("torch", "triton", "triton", "liger", "triton", "gemm", "torch", "torch")


def chosen(
    *installed: str,
    layers: str = "auto",
    fused: str = "auto",
    accelerator: str = "gpu",
    precision: str = "bf16",
    chunk_tokens: int = 0,
    layer_work: float = 0,
    fp8: bool = False,
) -> Kernels:
    return choose(
        layer_spec=layers,
        fused_kernels=fused,
        accelerator=accelerator,
        precision=precision,
        installed=frozenset(installed),
        chunk_tokens=chunk_tokens,
        layer_work=layer_work,
        fp8=fp8,
    )


def test_on_gpu_everything_installed_is_used() -> None:
    assert chosen("triton", "liger_kernel") == FUSED


def test_ranks_that_exchange_parts_of_a_layer_have_them_copied() -> None:
    assert chosen("triton", "liger_kernel", chunk_tokens=8192) == dataclasses.replace(FUSED, tp_comm_overlap="copies")
    assert chosen("triton", "liger_kernel", chunk_tokens=8192, fused="rotary").tp_comm_overlap == "torch"
    with pytest.raises(RequestError, match=r"fused tp_comm_overlap can't be used(.|\n)*sequence parallelism"):
        chosen("triton", "liger_kernel", fused="tp_comm_overlap")


def test_small_parts_are_copied_only_if_asked() -> None:
    assert chosen("triton", "liger_kernel", chunk_tokens=8191) == FUSED
    assert chosen("triton", "liger_kernel", chunk_tokens=8191, fused="tp_comm_overlap").tp_comm_overlap == "copies"


@pytest.mark.parametrize(("old", "new"), [("exchange", "tp_comm_overlap"), ("launches", "cuda_graphs")])
def test_old_names_of_kernels_are_accepted(old: str, new: str) -> None:
    work = {"chunk_tokens": 8192, "layer_work": 0.7e12}
    both = [chosen("triton", "liger_kernel", fused=f"norm,{name}", **work) for name in (old, new)]
    assert both[0] == both[1] != chosen("triton", "liger_kernel", fused="norm", **work)


def test_layers_of_little_work_are_replayed() -> None:
    assert chosen("triton", "liger_kernel", layer_work=0.7e12) == dataclasses.replace(FUSED, cuda_graphs="graphs")
    assert chosen("triton", "liger_kernel", layer_work=0.71e12) == FUSED
    assert chosen("triton", "liger_kernel", layer_work=0.71e12, fused="cuda_graphs").cuda_graphs == "graphs"
    assert chosen("triton", "liger_kernel", layer_work=0.1e12, accelerator="cpu") == PLAIN
    assert chosen(layer_work=0.1e12, precision="fp32") == dataclasses.replace(PLAIN, cuda_graphs="graphs")


def test_fp8_takes_our_layers_and_replays_larger_ones(make_run: Callable[..., ResolvedRun]) -> None:
    assert chosen("triton", "liger_kernel", layer_work=1.1e12, fp8=True).cuda_graphs == "graphs"
    assert chosen("triton", "liger_kernel", layer_work=1.11e12, fp8=True).cuda_graphs == "torch"
    run = dataclasses.replace(make_run(), accelerator="gpu", precision="bf16")
    training = dataclasses.replace(run.config.training, precision="fp8")
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, training=training))
    assert choose_for(run, frozenset({"transformer_engine"})).layer_spec == "torch"


def test_layers_that_cant_be_replayed_are_not() -> None:
    assert chosen("transformer_engine", layer_work=0.1e12).cuda_graphs == "torch"
    with pytest.raises(RequestError, match=r"fused cuda_graphs can't be used(.|\n)*torch's layers, TP, PP and CP of 1"):
        chosen("transformer_engine", layer_work=0.1e12, layers="te", fused="cuda_graphs")
    with pytest.raises(RequestError, match=r"fused cuda_graphs can't be used(.|\n)*torch's layers, TP, PP and CP of 1"):
        chosen("triton", fused="cuda_graphs", layer_work=0)


@pytest.mark.parametrize(
    ("changes", "cuda_graphs"),
    [
        ({}, "graphs"),
        ({"data_parallel_size": 2}, "graphs"),
        ({"parallel": ParallelConfig(2)}, "torch"),
        ({"parallel": ParallelConfig(1, 2)}, "torch"),
        ({"parallel": ParallelConfig(1, 1, 2)}, "torch"),
        ({"recompute": Recompute("selective")}, "torch"),
        ({"recompute": Recompute("full", 1)}, "torch"),
        ({"reset_attention_mask": True}, "torch"),
    ],
)
def test_replays_are_for_whole_models_whose_microbatches_are_alike(
    make_run: Callable[..., ResolvedRun], changes: dict[str, Any], cuda_graphs: str
) -> None:
    run = dataclasses.replace(make_run(), accelerator="gpu", precision="bf16")
    if "parallel" in changes:
        changes = {"config": dataclasses.replace(run.config, **changes)}
    assert choose_for(dataclasses.replace(run, **changes), OURS).cuda_graphs == cuda_graphs


@pytest.mark.parametrize(("num_gpus", "exchange"), [(8, "copies"), (4, "copies"), (2, "torch"), (6, "torch")])
def test_ranks_of_several_nodes_exchange_parts_by_nccl(
    make_run: Callable[..., ResolvedRun], num_gpus: int, exchange: str
) -> None:
    run = make_run()
    change = dataclasses.replace
    config = change(
        run.config,
        parallel=ParallelConfig(4),
        launch=change(run.config.launch, num_gpus=num_gpus),
        training=change(run.config.training, micro_batch_size=8),
        data=change(run.config.data, sequence_length=4096),
    )
    run = dataclasses.replace(run, config=config, accelerator="gpu", precision="bf16", sequence_parallel=True)
    assert choose_for(run, OURS).tp_comm_overlap == exchange


def test_on_cpu_nothing_is_fused() -> None:
    assert chosen(*ALL, accelerator="cpu") == PLAIN


def test_in_fp32_the_cross_entropy_and_the_weight_gradient_stay_plain() -> None:
    assert chosen("triton", "liger_kernel", precision="fp32") == Kernels(
        "torch", "triton", "triton", "liger", "torch", "torch", "torch", "torch"
    )
    assert chosen(*ALL, precision="fp32").layer_spec == "torch"


def test_without_liger_its_parts_stay_plain() -> None:
    assert chosen("triton") == Kernels("torch", "triton", "triton", "torch", "triton", "gemm", "torch", "torch")


def test_off_is_plain_torch() -> None:
    assert chosen("triton", "liger_kernel", fused="off") == PLAIN


def test_named_parts_alone_are_fused() -> None:
    assert chosen("triton", "liger_kernel", fused="rotary,swiglu") == Kernels(
        "torch", "torch", "triton", "liger", "torch", "torch", "torch", "torch"
    )


@pytest.mark.parametrize(
    ("installed", "layers"),
    [(ALL, "torch"), ({"transformer_engine", "triton"}, "te"), ({"transformer_engine"}, "te"), ({"triton"}, "torch")],
)
def test_the_faster_layers_of_those_installed_are_taken(installed: frozenset[str], layers: str) -> None:
    assert chosen(*installed).layer_spec == layers


def test_transformer_engines_layers_keep_their_own_rotation() -> None:
    choice = chosen(*ALL, layers="te")
    assert choice == Kernels("te", "te", "te", "liger", "triton", "gemm", "te", "torch")
    assert config_fields(choice, qk_norm=False) == {
        "apply_rope_fusion": True,
        "fused_single_qkv_rope": False,
        "bias_activation_fusion": True,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": True,
    }


def test_norms_of_queries_and_keys_keep_the_projection_apart() -> None:
    assert not config_fields(FUSED, qk_norm=True)["fused_single_qkv_rope"]
    assert config_fields(FUSED, qk_norm=False)["fused_single_qkv_rope"]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"layers": "te"}, ["transformer_engine is not installed", "auto or torch"]),
        ({"fused": "swiglu"}, ["fused swiglu", "liger_kernel and triton"]),
        ({"fused": "rotary", "accelerator": "cpu"}, ["(cpu, bf16)", "a GPU"]),
        ({"fused": "weight_gradient", "precision": "fp32"}, ["(gpu, fp32)", "bf16"]),
        ({"fused": "cross_entropy", "precision": "fp32"}, ["(gpu, fp32)", "bf16"]),
    ],
    ids=["te", "package", "device", "weight gradient in fp32", "cross entropy in fp32"],
)
def test_what_is_asked_by_name_and_missing_is_refused(request_: dict[str, str], words: list[str]) -> None:
    with pytest.raises(RequestError) as error:
        chosen(**request_)
    assert all(word in str(error.value) for word in words)
