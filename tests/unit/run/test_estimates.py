"""Estimates against peaks that were measured on H100 80GB and H200, and how a run is made to fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pretrainkit.config.launch import LaunchConfig
from pretrainkit.config.layer_features import GlobalAttention, LayerFeatures
from pretrainkit.config.schema import (
    DataConfig,
    DatasetFacts,
    Estimates,
    Kernels,
    ModelShape,
    ParallelConfig,
    Recompute,
    ResolvedRun,
    RunConfig,
    TrainingConfig,
)
from pretrainkit.errors import RequestError
from pretrainkit.launch.start import summarize_estimates
from pretrainkit.models.flops import active_parameters, parameters
from pretrainkit.run import gpu_specs
from pretrainkit.run.estimates import cheapest_recompute, estimate, fits
from pretrainkit.run.resource_plan import plan_memory

LLAMA_1B = ModelShape("llama", 16, 2048, 8192, 32, 8, 64, 128256, 131072, 5e5, 1e-5, True)
LLAMA_8B = ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072, 5e5, 1e-5, False)
EXPERTS: dict[str, Any] = {"max_position_embeddings": 131072, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
QWEN3_30B_A3B = ModelShape(
    "qwen3_moe",
    48,
    2048,
    6144,
    32,
    4,
    128,
    151936,
    tie_word_embeddings=False,
    qk_norm=True,
    num_experts=128,
    experts_per_token=8,
    expert_ffn_hidden_size=768,
    norm_topk_prob=True,
    **EXPERTS,
)
MIXTRAL_8X7B = ModelShape(
    "mixtral",
    32,
    4096,
    14336,
    32,
    8,
    128,
    32000,
    tie_word_embeddings=False,
    num_experts=8,
    experts_per_token=2,
    expert_ffn_hidden_size=14336,
    **EXPERTS,
)
GPT_OSS_20B = ModelShape(
    "gpt_oss", 24, 2880, 2880, 64, 8, 64, 201088, tie_word_embeddings=False, qkv_bias=True, num_experts=32,
    experts_per_token=4, expert_ffn_hidden_size=2880, **EXPERTS,
    features=LayerFeatures(mlp_bias=True, output_bias=True),
)  # fmt: skip
PLAIN = Kernels(*8 * ["torch"])
FP32_LOGITS = dataclasses.replace(PLAIN, swiglu="triton")
FUSED = dataclasses.replace(FP32_LOGITS, cross_entropy="triton")


def run_of(
    shape: ModelShape,
    kernels: Kernels = FUSED,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
    data_parallel: int = 1,
    expert: int = 1,
    layers: int = 0,
    sequence_length: int = 4096,
    **settings: Any,
) -> ResolvedRun:
    shape = dataclasses.replace(shape, num_layers=layers or shape.num_layers)
    training = TrainingConfig(**{"global_batch_size": 32 * data_parallel, "micro_batch_size": 1, **settings})
    return ResolvedRun(
        config=RunConfig(
            data=DataConfig(sequence_length=sequence_length),
            parallel=ParallelConfig(tensor, pipeline, context, expert_model_parallel_size=expert),
            training=training,
        ),
        model=shape,
        dataset=DatasetFacts(("/a",), (), 1, 1, None, "h"),
        experiment_dir="/x",
        hf_folder="/h",
        initial_weights=None,
        accelerator="gpu",
        precision="bf16",
        world_size=tensor * pipeline * context * data_parallel,
        data_parallel_size=data_parallel,
        sequence_parallel=tensor > 1,
        max_steps=1000,
        lr_warmup_steps=1,
        lr_decay_steps=2,
        min_lr=0.0,
        samples_per_epoch=1,
        padded_vocab_size=-(-shape.vocab_size // 128) * 128,
        gpu_name="NVIDIA H100 80GB HBM3",
        kernels=kernels,
    )


def test_experts_are_shared_by_the_ranks_of_expert_parallelism() -> None:
    """48 layers of 128 experts with 3 x 2048 x 768 parameters, 18 bytes each; the rest has DP=8."""
    experts = 48 * 128 * 3 * 2048 * 768 * 18 / 2**30
    others = (parameters(QWEN3_30B_A3B) - 48 * 128 * 3 * 2048 * 768) * (6 + 12 / 8) / 2**30
    for expert, share in ((8, 1 / 8), (4, 1 / 4 * (6 + 12 / 2) / 18), (1, (6 + 12 / 8) / 18)):
        found = estimate(run_of(QWEN3_30B_A3B, data_parallel=8, expert=expert))
        assert found.weights_gib == pytest.approx(experts * share + others, rel=1e-3)


@pytest.mark.parametrize("expert", [1, 2, 8])
def test_copies_in_fp8_are_two_bytes_more_of_experts_too(expert: int) -> None:
    of_experts, attention = 128 * 3 * 2048 * 768 // expert, 2048 * 128 * (2 * 32 + 2 * 4)
    bf16, fp8, inner = (
        estimate(run_of(QWEN3_30B_A3B, data_parallel=8, expert=expert, **more)).weights_gib
        for more in ({}, {"precision": "fp8"}, {"precision": "fp8", "fp8_first_last_bf16": 12})
    )
    assert (fp8 - bf16) * 2**30 == pytest.approx(2 * 48 * (of_experts + attention), rel=0.01)
    assert inner - bf16 == pytest.approx((fp8 - bf16) / 2, abs=0.02)


def test_a_token_is_sent_once_to_each_rank_of_its_experts() -> None:
    """Of random routing at EP=8: tokens and probabilities forward, tokens back, and the same of gradients."""
    found = estimate(run_of(QWEN3_30B_A3B, data_parallel=8, expert=8))
    scores = torch.rand((20_000, 128), generator=torch.Generator().manual_seed(0))
    ranks = torch.zeros((20_000, 8)).scatter_(1, scores.topk(8).indices // 16, 1.0)
    visited = ranks[:, 1:].sum(1).mean().item()
    bytes_per_token = visited * (4 * 2048 * 2 + 2 * 16 * 4)
    assert found.exchange_gib * 2**30 == pytest.approx(32 * 4096 * 48 * bytes_per_token, rel=0.01)
    assert "GiB a step from each GPU to others' experts" in summarize_estimates(
        dataclasses.replace(run_of(QWEN3_30B_A3B, data_parallel=8, expert=8), estimates=found)
    )
    assert estimate(run_of(QWEN3_30B_A3B, data_parallel=8)).exchange_gib == 0


def test_a_model_with_experts_is_offered_more_expert_parallelism() -> None:
    run = run_of(QWEN3_30B_A3B, data_parallel=8, expert=1)
    with pytest.raises(RequestError, match=r"use --expert_model_parallel_size 8 \(78.0 GiB\), or -T 2"):
        plan_memory(dataclasses.replace(run, kernels=None))
    lines = summarize_estimates(dataclasses.replace(run, estimates=estimate(run)))
    assert "30.53 G, 3.35 G active" in lines and "MFU" in lines


def test_parameters_are_those_of_the_published_models() -> None:
    assert parameters(LLAMA_1B, 128256) == 1_235_814_400
    assert parameters(LLAMA_8B, 128256) == 8_030_261_248
    for shape, total, idle in (  # experts that a token doesn't visit
        (QWEN3_30B_A3B, 30_532_122_624, 48 * 120 * 3 * 2048 * 768),
        (MIXTRAL_8X7B, 46_702_792_704, 32 * 6 * 3 * 4096 * 14336),
        (GPT_OSS_20B, 20_914_757_184, 24 * 28 * (3 * 2880 * 2880 + 3 * 2880)),
    ):
        assert (parameters(shape), parameters(shape) - active_parameters(shape)) == (total, idle), shape.family


MEASURED = {
    "8 layers of Qwen3-30B-A3B": (run_of(QWEN3_30B_A3B, layers=8, micro_batch_size=2), 104.6),
    "8 layers of Qwen3-30B-A3B, EP=2": (
        run_of(QWEN3_30B_A3B, layers=8, micro_batch_size=2, data_parallel=2, expert=2),
        59.7,
    ),
    "4 layers of Mixtral 8x7B": (run_of(MIXTRAL_8X7B, layers=4, micro_batch_size=2), 112.4),
    "1B, 2 sequences, fp32 logits": (run_of(LLAMA_1B, FP32_LOGITS, micro_batch_size=2), 38.2),
    "1B, 2 sequences, all fused": (run_of(LLAMA_1B, micro_batch_size=2), 30.9),
    "1B, 1 sequence, layers replayed": (run_of(LLAMA_1B), 27.1),
    "1B, 1 sequence, DP=2, layers replayed": (run_of(LLAMA_1B, data_parallel=2), 20.2),
    "8B, TP=2 with SP, all fused": (run_of(LLAMA_8B, tensor=2), 74.9),
    "8B with 12 layers, FP8": (run_of(LLAMA_8B, layers=12, precision="fp8"), 74.7),
    "8B with 12 layers, FP8 but weight gradients": (
        run_of(LLAMA_8B, layers=12, precision="fp8", fp8_recipe="rowwise_wgrad_bf16"),
        75.8,
    ),
    "1B, 4 sequences, FP8": (run_of(LLAMA_1B, micro_batch_size=4, precision="fp8"), 44.2),
    "1B, CP=2, 32,768 tokens": (run_of(LLAMA_1B, context=2, sequence_length=32768), 37.5),
}


@pytest.mark.parametrize(("run", "peak_gib"), MEASURED.values(), ids=MEASURED.keys())
def test_memory_is_near_the_measured_peak(run: ResolvedRun, peak_gib: float) -> None:
    assert estimate(run).memory_gib == pytest.approx(peak_gib, rel=0.06)


@pytest.mark.parametrize("context", [2, 4, 8])
@pytest.mark.parametrize("recompute", [Recompute(), Recompute("full", 32)], ids=["kept", "recomputed"])
def test_a_rank_of_context_parallelism_has_its_part_of_all_but_the_keys(context: int, recompute: Recompute) -> None:
    """Of 131,072 tokens in bf16; what a rank keeps is counted by tests/integration/test_activation_counts.py."""
    long, short = (
        estimate(dataclasses.replace(run_of(LLAMA_8B, context=size, sequence_length=length), recompute=recompute))
        for size, length in ((context, 131072), (1, 131072 // context))
    )
    kept_layers = 32 - recompute.num_layers
    keys = kept_layers * 2 * 8 * 128 * (131072 - 131072 // context) * 2 / 2**30
    assert long.activations_gib == pytest.approx(short.activations_gib + keys, abs=0.02)
    if not recompute.num_layers:
        assert long.logits_gib == short.logits_gib


def test_a_long_sequence_is_offered_context_parallelism() -> None:
    with pytest.raises(RequestError) as refused:
        plan_memory(run_of(LLAMA_8B, sequence_length=131072))
    assert "use -T 2 -P 1 -C 2 on 4 GPUs (" in str(refused.value), refused.value
    with pytest.raises(RequestError) as refused:
        plan_memory(run_of(LLAMA_8B, sequence_length=8192))
    assert "-C" not in str(refused.value)


@pytest.mark.parametrize(("layers", "fit"), [(12, True), (16, False)])
def test_what_fitted_fits_and_what_did_not_does_not(layers: int, fit: bool) -> None:
    run = run_of(LLAMA_8B, layers=layers)
    assert fits(run, estimate(run)) is fit


def test_other_heads_of_layers_without_a_window_are_counted() -> None:
    def of(head_dim: int) -> Estimates:
        features = LayerFeatures(local_layers=tuple(range(16)), global_attention=GlobalAttention(head_dim, 8, 1.0))
        return estimate(run_of(dataclasses.replace(LLAMA_8B, features=features)))

    plain, same, larger = estimate(run_of(LLAMA_8B)), of(128), of(256)
    assert same == plain
    more = 16 * 128 * (32 + 8) * 2  # sizes of the heads of half the layers
    assert larger.weights_gib - plain.weights_gib == pytest.approx(more * 4096 * 18 / 2**30, rel=0.01)
    assert larger.activations_gib > plain.activations_gib


def test_optimizer_state_is_shared_by_data_parallel_ranks_and_activations_are_not() -> None:
    one, four = (estimate(run_of(LLAMA_8B, data_parallel=copies)) for copies in (1, 4))
    assert four.weights_gib == pytest.approx(one.weights_gib * (6 + 12 / 4) / 18, rel=0.01)
    assert (four.activations_gib, four.logits_gib) == (one.activations_gib, one.logits_gib)


def test_the_first_pipeline_stage_holds_a_microbatch_of_each_stage() -> None:
    whole, first = (estimate(run_of(LLAMA_8B, pipeline=stages)) for stages in (1, 4))
    assert first.activations_gib == pytest.approx(whole.activations_gib, rel=0.01)
    assert first.weights_gib < whole.weights_gib / 3


def test_recomputation_takes_as_few_layers_as_fit() -> None:
    run = cheapest_recompute(run_of(LLAMA_8B, data_parallel=8, micro_batch_size=2))
    count = run.recompute.num_layers
    assert run.recompute.granularity == "full" and 0 < count < 32 and fits(run, estimate(run))
    less = dataclasses.replace(run, recompute=Recompute("full", count - 1))
    assert not fits(less, estimate(less))
    assert cheapest_recompute(run_of(LLAMA_1B)).recompute == Recompute()


@pytest.mark.parametrize("recompute", [Recompute("selective"), Recompute("full", 16)], ids=["selective", "full"])
def test_recomputation_trades_memory_for_time(recompute: Recompute) -> None:
    run = run_of(LLAMA_1B, PLAIN, micro_batch_size=4)
    kept, again = (estimate(each) for each in (run, dataclasses.replace(run, recompute=recompute)))
    assert again.activations_gib < kept.activations_gib / 1.5
    assert (
        again.step_time_s and kept.step_time_s and kept.step_time_s < again.step_time_s <= kept.step_time_s * 4.01 / 3
    )


def test_time_follows_from_flops_peak_and_the_assumed_share() -> None:
    found = estimate(run_of(LLAMA_1B, micro_batch_size=4))
    assert found.mfu == 0.53 and found.step_time_s and found.gpu_hours
    assert 32 * 4096 / found.step_time_s == pytest.approx(63_500, rel=0.02)
    assert found.gpu_hours == pytest.approx(found.step_time_s * 1000 / 3600, abs=0.1)


def test_a_tiny_model_takes_a_time_too() -> None:
    shape = dataclasses.replace(LLAMA_1B, num_layers=1, hidden_size=32, ffn_hidden_size=64, vocab_size=64)
    run = dataclasses.replace(run_of(shape), padded_vocab_size=64)
    found = estimate(run)
    assert found.step_time_s
    assert "tokens/s" in summarize_estimates(dataclasses.replace(run, estimates=found))


def test_an_unknown_card_has_no_limit_and_no_time() -> None:
    run = dataclasses.replace(run_of(LLAMA_8B, micro_batch_size=16), gpu_name="Some Card")
    found = estimate(run)
    assert fits(run, found) and (found.gpu_memory_gib, found.step_time_s, found.gpu_hours) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "memory_gib", "peak_flops"),
    [
        ("h100", 79.6, 989e12),
        ("nvidia h100 pcie", 79.6, 756e12),
        ("a100-sxm4-80gb", 79.3, 312e12),
        ("L40S 48GB", 45.0, 362e12),
        ("NVIDIA H100 80GB HBM3", 79.6, 989e12),
        ("H100 64GB", None, 989e12),
        ("A100", None, 312e12),
        ("NVIDIA GH200 480GB", None, 989e12),
        ("FOO", None, None),
    ],
)
def test_a_card_is_known_by_its_name(name: str, memory_gib: float | None, peak_flops: float | None) -> None:
    assert (gpu_specs.memory_gib(name), gpu_specs.peak_flops(name)) == (memory_gib, peak_flops)


def asked_for(name: str, gpu_memory_gib: float | None = None) -> ResolvedRun:
    run = run_of(LLAMA_8B)
    config = dataclasses.replace(run.config, launch=LaunchConfig(gpu_name=name, gpu_memory_gib=gpu_memory_gib))
    return dataclasses.replace(run, config=config, gpu_name=name, gpu_memory_gib=gpu_memory_gib)


@pytest.mark.parametrize("name", ["FOO", "a100", "GH200", "H100 64GB"])
def test_a_named_card_whose_memory_is_not_known_is_refused_unless_it_is_told(name: str) -> None:
    with pytest.raises(RequestError, match=f"--gpu_name: '{name}': unknown(.|\n)*A100 40GB(.|\n)*--gpu_memory_gib"):
        plan_memory(asked_for(name))
    assert plan_memory(asked_for(name, 300.0)).estimates
    assert "--gpu_memory_gib says what it has" in summarize_estimates(plan_memory(asked_for(name), refuse=False))
    found = dataclasses.replace(run_of(LLAMA_8B), gpu_name=name)
    assert plan_memory(found).estimates, "found on this machine"
    cpu = dataclasses.replace(asked_for(name), accelerator="cpu")
    assert plan_memory(cpu).estimates is None


def test_a_named_card_counts_however_it_is_written() -> None:
    with pytest.raises(RequestError, match=r"less than its 79\.6 GiB"):
        plan_memory(asked_for("h100"))


def test_a_run_that_can_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(RequestError, match=r"GiB on the fullest GPU(.|\n)*use -T 2 -P 1 on 2 GPUs \(\d") as refused:
        plan_memory(run_of(LLAMA_8B))
    assert "79.6 GiB" in str(refused.value)


def test_a_fixed_recomputation_that_is_too_little_is_refused_with_auto() -> None:
    with pytest.raises(RequestError, match="--recompute auto"):
        plan_memory(run_of(LLAMA_8B, tensor=4, micro_batch_size=16, recompute="none"))


def test_the_chosen_recomputation_is_in_the_run() -> None:
    run = plan_memory(run_of(LLAMA_8B, tensor=2, micro_batch_size=4))
    assert run.recompute.granularity == "full" and run.estimates and run.estimates.memory_gib < 79.6


def test_kernels_that_recomputation_rules_out_are_refused_where_it_is_chosen() -> None:
    with pytest.raises(RequestError, match=r"fused cuda_graphs can't be used(.|\n)*no recomputation"):
        plan_memory(run_of(LLAMA_1B, micro_batch_size=16, fused_kernels="cuda_graphs"))
    assert plan_memory(run_of(LLAMA_1B, fused_kernels="cuda_graphs")).recompute.granularity == "none"


def test_a_run_on_cpu_has_no_estimates() -> None:
    run = dataclasses.replace(run_of(LLAMA_8B), accelerator="cpu", gpu_name=None)
    assert plan_memory(run) == dataclasses.replace(run, kernels=Kernels(*8 * ["torch"]))
