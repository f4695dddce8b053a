"""Every wrong request is told with what was found, what is needed and what to do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from changed_config import changed

from pretrainkit.config.layer_features import DeltaNet, GlobalAttention, LayerFeatures, Routing
from pretrainkit.config.resolve import RunFacts
from pretrainkit.config.schema import InitialWeights, RopeScaling, RunConfig
from pretrainkit.config.validate import problems_of
from pretrainkit.machine import MachineFacts


def messages_of(config: RunConfig, facts: RunFacts) -> str:
    return "\n".join(str(problem) for problem in problems_of(config, facts))


def test_a_right_request_has_no_problem(config: RunConfig, facts: RunFacts) -> None:
    assert problems_of(config, facts) == []


OF_THE_REQUEST: dict[str, tuple[dict[str, Any], list[str]]] = {
    "time limit no duration": (
        {"training__time_limit": "12 hours"},
        ["--time_limit: '12 hours' is no duration like 23:30:00", "[D-]HH:MM:SS"],
    ),
    "time limit within its margin": (
        {"training__time_limit": "00:04:00"},
        ["--time_limit: 00:04:00 leaves no time to train before its margin of 00:05:00"],
    ),
    "global batch size no multiple": (
        {"training__global_batch_size": 10, "training__micro_batch_size": 2, "launch__num_gpus": 4},
        ["--global_batch_size: 10 is not a multiple of micro batch size 2 x data-parallel size 4 = 8", "use 8 or 16"],
    ),
    "global batch size too small": ({"training__global_batch_size": 3}, ["a multiple of 8", "use 8\n", "= 8"]),
    "ranks not divisible": (
        {"parallel__tensor_model_parallel_size": 2, "parallel__pipeline_model_parallel_size": 3},
        ["8 ranks (1 nodes x 8) are not divisible by TP 2 x PP 3 x CP 1 = 6", "use 6 or 12 ranks"],
    ),
    "fewer ranks than one model": (
        {"parallel__tensor_model_parallel_size": 16},
        ["are not divisible by TP 16", "use 16 ranks"],
    ),
    "key/value heads": (
        {"parallel__tensor_model_parallel_size": 16, "launch__num_gpus": 16},
        ["--tensor_model_parallel_size: 8 key/value heads of the model are not divisible by 16", "1, 2, 4, 8"],
    ),
    "attention heads": (
        {"parallel__tensor_model_parallel_size": 3, "launch__num_gpus": 3},
        [
            "32 attention heads of the model are not divisible by 3",
            "14336 MLP rows of the model are not divisible by 3",
        ],
    ),
    "layers": (
        {"parallel__pipeline_model_parallel_size": 5, "launch__num_gpus": 5},
        ["--pipeline_model_parallel_size: 32 layers of the model are not divisible by 5"],
    ),
    "sequence under context parallelism": (
        {"parallel__context_parallel_size": 2, "data__sequence_length": 1022},
        ["--sequence_length: 1022 is not divisible by 4", "2*CP", "use 1020 or 1024"],
    ),
    "sequence under sequence parallelism": (
        {"parallel__tensor_model_parallel_size": 8, "data__sequence_length": 1020},
        ["1020 is not divisible by 8", "use 1016 or 1024"],
    ),
    "sequence under both": (
        {
            "parallel__tensor_model_parallel_size": 4,
            "parallel__context_parallel_size": 2,
            "data__sequence_length": 1020,
        },
        ["1020 is not divisible by 8", "CP*TP"],
    ),
    "sequence beyond the model": (
        {"data__sequence_length": 131073},
        ["131073 tokens, but the model's context length is 131072", "--rope_scaling"],
    ),
    "executor": ({"launch__executor": "slrum"}, ["--executor: unknown value 'slrum'", "did you mean slurm?"]),
    "accelerator": ({"launch__accelerator": "cuda"}, ["--accelerator: unknown value 'cuda'", "auto or cpu or gpu"]),
    "precision": (
        {"training__precision": "fp16"},
        ["--precision: unknown value 'fp16'", "auto or bf16 or fp32 or fp8"],
    ),
    "FP8 on a CPU": (
        {"training__precision": "fp8", "launch__accelerator": "cpu"},
        ["--precision fp8: CPUs have no FP8 products", "--set training.fp8_emulation=true"],
    ),
    "FP8 in Transformer Engine's layers": (
        {"training__precision": "fp8", "training__layer_spec": "te"},
        ["--layer_spec with --precision fp8: Transformer Engine's layers", "auto or torch"],
    ),
    "no layer left for FP8": (
        {"training__precision": "fp8", "training__fp8_first_last_bf16": 16},
        ["--fp8_first_last_bf16: 16 layers at each end of 32 stay in bf16", "at least one layer in FP8"],
    ),
    "sizes that FP8 products don't have": (
        {"training__precision": "fp8", "data__sequence_length": 1000},
        ["--precision fp8: the tokens of a microbatch on a rank: 1000", "multiples of 16"],
    ),
    "schedule": ({"optimizer__lr_schedule": "cosin"}, ["--lr_schedule", "did you mean cosine?"]),
    "split": ({"data__split": "1,2"}, ["--split: 2 shares in '1,2'", "969,30,1"]),
    "nodes on one machine": ({"launch__num_nodes": 2}, ["--num_nodes: 2 nodes with --executor local"]),
    "more GPUs than there are": (
        {"launch__num_gpus": 16},
        ["--num_gpus: 16 GPUs requested, 8 found", "use --num_gpus 8, or --accelerator cpu"],
    ),
    "learning rates the wrong way round": ({"optimizer__min_lr": 1.0}, ["--min_lr: 1.0", "at most --lr 0.0003"]),
    "warmup beyond the decay": (
        {"optimizer__lr_warmup_steps": 10, "training__max_steps": 10},
        ["--lr_warmup_steps: 10 warmup steps, but the decay ends at step 10", "less than 10"],
    ),
    "warmup beyond an epoch": (
        {"optimizer__lr_warmup_steps": 100},
        ["100 warmup steps, but the decay ends at step 14"],
    ),
    "decay longer than the schedule": (
        {"optimizer__lr_schedule": "wsd", "optimizer__lr_cooldown": "14", "optimizer__lr_warmup_steps": 2},
        ["--lr_cooldown: a decay of 14 steps after 2 warmup steps in a schedule of 14", "at most 12"],
    ),
    "decay that is no number": ({"optimizer__lr_cooldown": "half"}, ["--lr_cooldown", "such as 10%"]),
    "decay of a part of a step": ({"optimizer__lr_cooldown": "0.1"}, ["--lr_cooldown: '0.1'", "such as 10%"]),
    "schedule that starts again at its end": (
        {"optimizer__lr_rewarm_step": 14},
        ["--lr_rewarm_step: the schedule starts again at step 14, but the decay ends at step 14"],
    ),
    "batch size warm-up past the batch": (
        {"training__rampup_batch_size": "16 32 1000"},
        ["--rampup_batch_size: from 16 by 32 doesn't lead to 64"],
    ),
    "batch size warm-up in other units": (
        {"training__rampup_batch_size": "4 4 1000"},
        ["--rampup_batch_size: 4 or 4 is not a multiple of micro batch size 1 x data-parallel size 8 = 8"],
    ),
    "batch size warm-up of two numbers": ({"training__rampup_batch_size": "4,4"}, ["'START INCREMENT SAMPLES'"]),
    "pyxis without Slurm": (
        {"launch__executor": "sge", "launch__container_runtime": "pyxis"},
        ["--container_runtime with sge: pyxis is a part of Slurm", "apptainer or none"],
    ),
    "experiment with a slash": ({"experiment": "a/b"}, ["--experiment: 'a/b'"]),
    "experiment that goes up": ({"experiment": ".."}, ["--experiment: '..'"]),
    "no experiment": ({"experiment": ""}, ["--experiment: ''"]),
    "no model": ({"hf_model_id": ""}, ["--hf_model_id: missing"]),
    "no data": ({"data__dataset_path": ""}, ["--dataset_path: missing"]),
    "seed": ({"training__seed": 2**32}, ["--seed: 4294967296", "<= 4294967295"]),
    "less than one step in an epoch": (
        {"training__global_batch_size": 1024},
        ["--max_steps: one epoch has 946 samples, a step takes 1024", "at least one step"],
    ),
}


@pytest.mark.parametrize("case", OF_THE_REQUEST)
def test_a_wrong_request_is_told(config: RunConfig, facts: RunFacts, case: str) -> None:
    changes, expected = OF_THE_REQUEST[case]
    message = messages_of(changed(config, **changes), facts) + "\n"
    assert [part for part in expected if part not in message] == []


@pytest.mark.parametrize(
    ("field", "value", "needed"),
    [
        ("launch__num_nodes", 0, "an integer > 0"),
        ("launch__num_gpus", -1, "an integer > 0"),
        ("parallel__tensor_model_parallel_size", 0, "an integer > 0"),
        ("parallel__pipeline_model_parallel_size", 0, "an integer > 0"),
        ("parallel__context_parallel_size", 0, "an integer > 0"),
        ("data__sequence_length", 0, "an integer > 0"),
        ("data__num_workers", -1, "an integer >= 0"),
        ("training__max_steps", 0, "an integer > 0"),
        ("training__global_batch_size", 0, "an integer > 0"),
        ("training__micro_batch_size", 0, "an integer > 0"),
        ("training__save_interval", 0, "an integer > 0"),
        ("training__val_interval", -1, "an integer >= 0"),
        ("training__val_steps", 0, "an integer > 0"),
        ("training__log_interval", 0, "an integer > 0"),
        ("training__seed", -1, "an integer >= 0"),
        ("optimizer__lr", 0.0, "a number > 0"),
        ("optimizer__lr", float("nan"), "a number > 0"),
        ("optimizer__lr", float("inf"), "a number > 0"),
        ("optimizer__min_lr", -1.0, "a number >= 0"),
        ("optimizer__lr_warmup_steps", -1, "an integer >= 0"),
        ("optimizer__lr_decay_steps", 0, "an integer > 0"),
        ("optimizer__weight_decay", -0.1, "a number >= 0"),
        ("optimizer__adam_beta1", 1.0, "a number >= 0 and < 1"),
        ("optimizer__adam_beta2", -0.1, "a number >= 0"),
        ("optimizer__adam_eps", 0.0, "a number > 0"),
        ("optimizer__clip_grad", -1.0, "a number >= 0"),
    ],
)
def test_a_value_out_of_range_is_told(
    config: RunConfig, facts: RunFacts, field: str, value: float, needed: str
) -> None:
    message = messages_of(changed(config, **{field: value}), facts)
    assert f"{value}\n  Needed: {needed}" in message and field.rpartition("__")[2] in message


OF_THE_FACTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "ids beyond the model": (
        {"dataset__max_token_id": 128256},
        ["--dataset_path: token id 128256 of the data's tokenizer is out of range for vocab size 128256"],
    ),
    "tokenizer beyond the model": (
        {"tokenizer_largest_id": 128260},
        ["--hf_model_id: token id 128260 of the tokenizer is out of range"],
    ),
    "another tokenizer": (
        {"dataset_tokenizers": ("bb",)},
        ["tokenized with another tokenizer than the model's: /data/a"],
    ),
    "no training sample": (
        {"split_tokens": ((1024, 30_000, 0),)},
        ["--dataset_path: fewer tokens than one training sample: /data/a has 1024", "1025 tokens"],
    ),
    "no validation document": (
        {"split_tokens": ((969_000, 0, 0),)},
        ["--split: fewer tokens than one validation sample: /data/a has 0", "--val_interval 0", "90,10,0"],
    ),
    "a CPU build of torch": (
        {"machine": MachineFacts(num_gpus=0, num_cpus=2, torch_has_cuda=False)},
        ["--accelerator: the installed torch can't use GPUs", "--accelerator cpu"],
    ),
    "no GPU": (
        {"machine": MachineFacts(num_gpus=0, num_cpus=2)},
        ["8 GPUs requested, 0 found", "use --accelerator cpu"],
    ),
    "no shared memory": (
        {"machine": MachineFacts(num_gpus=8, num_cpus=8, shared_memory_bytes=0)},
        ["0 B of shared memory can be used in /dev/shm", "for 8 ranks", "--ipc=host"],
    ),
}


def test_dockers_shared_memory_is_enough_for_usual_batches_alone(config: RunConfig, facts: RunFacts) -> None:
    machine = MachineFacts(num_gpus=8, num_cpus=64, shared_memory_bytes=64 * 2**20)
    facts = dataclasses.replace(facts, machine=machine)
    assert problems_of(config, facts) == []
    assert "shared memory" in messages_of(changed(config, data__num_workers=16, training__micro_batch_size=8), facts)


@pytest.mark.parametrize("case", OF_THE_FACTS)
def test_a_request_against_the_facts_is_told(config: RunConfig, facts: RunFacts, case: str) -> None:
    changes, expected = OF_THE_FACTS[case]
    for name, value in changes.items():
        section, _, field = name.rpartition("__")
        if section:
            assert facts.dataset
            field, value = "dataset", dataclasses.replace(facts.dataset, **{field: value})
        facts = dataclasses.replace(facts, **{field: value})
    message = messages_of(changed(config, launch__accelerator="gpu"), facts)
    assert [part for part in expected if part not in message] == []


def test_every_prefix_of_a_blend_needs_a_sample(config: RunConfig, facts: RunFacts) -> None:
    assert facts.dataset
    prefixes = tuple(f"/data/{name}" for name in "abcdef")
    facts = dataclasses.replace(
        facts,
        dataset=dataclasses.replace(facts.dataset, prefixes=prefixes, weights=(1.0,) * 6),
        split_tokens=((9000, 9000, 0), *[(9000, 3, 0)] * 5),
        dataset_tokenizers=(None,) * 6,
    )
    message = messages_of(config, facts)
    assert "/data/b has 3 validation tokens" in message and "and 2 more" in message and "/data/a" not in message
    assert messages_of(changed(config, training__val_interval=0, training__global_batch_size=8), facts) == ""


def test_all_problems_are_found_at_once_and_unknown_facts_are_left_out(facts: RunFacts, config: RunConfig) -> None:
    wrong = changed(config, training__global_batch_size=3, optimizer__min_lr=1.0, data__sequence_length=131073)
    assert len(problems_of(wrong, facts)) == 4
    unknown = dataclasses.replace(facts, model=None, dataset=None, split_tokens=None)
    assert len(problems_of(wrong, unknown)) == 2


def test_sequence_parallel_can_be_switched_off_for_odd_lengths(config: RunConfig, facts: RunFacts) -> None:
    odd = changed(config, parallel__tensor_model_parallel_size=8, data__sequence_length=1020)
    assert messages_of(odd, facts)
    assert not messages_of(changed(odd, parallel__sequence_parallel=False), facts)


EXPERTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "experts not divisible": (
        {"parallel__expert_model_parallel_size": 3, "launch__num_gpus": 3},
        ["--expert_model_parallel_size: 8 experts of the model are not divisible by 3", "1, 2, 4, 8"],
    ),
    "rows of an expert": (
        {"parallel__expert_tensor_parallel_size": 3, "launch__num_gpus": 3},
        ["--expert_tensor_parallel_size: 128 rows of an expert of the model are not divisible by 3"],
    ),
    "more experts' ranks than ranks": (
        {"parallel__expert_model_parallel_size": 8, "parallel__pipeline_model_parallel_size": 2},
        ["--expert_model_parallel_size: 8 ranks are not divisible by PP 2 x EP 8 x ETP 1 = 16"],
    ),
    "TP without sequence parallelism": (
        {"parallel__tensor_model_parallel_size": 2, "parallel__sequence_parallel": False},
        ["parallel.sequence_parallel: off, for a model with experts"],
    ),
    "selective recomputation": ({"training__recompute": "selective"}, ["--recompute: selective, for a model with"]),
    "sizes that FP8 products don't have": (
        {
            "training__precision": "fp8",
            "training__fp8_emulation": True,
            "parallel__expert_tensor_parallel_size": 16,
            "launch__num_gpus": 16,
        },
        ["--precision fp8: an expert's size on a rank: 8", "multiples of 16: FP8 products have no other sizes"],
    ),
}


def test_biases_of_experts_are_moved_where_there_are_some(config: RunConfig, facts: RunFacts) -> None:
    config = changed(config, launch__accelerator="cpu", training__precision="fp32", training__router_bias_update_rate=0)
    mixture = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 128}
    for routing, is_refused in ((None, True), (Routing("sigmoid"), True), (Routing("sigmoid", True), False)):
        model = dataclasses.replace(facts.model, **mixture, features=LayerFeatures(routing=routing))  # type: ignore[type-var]
        message = messages_of(config, dataclasses.replace(facts, model=model))
        assert ("--router_bias_update_rate: the routers have no biases" in message) == is_refused


def test_dense_layers_and_shared_experts_are_split_too(config: RunConfig, facts: RunFacts) -> None:
    config = changed(
        config, launch__accelerator="cpu", training__precision="fp32", parallel__tensor_model_parallel_size=2
    )
    sizes = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 128, "ffn_hidden_size": 129}
    for more, word in (
        ({}, ""),
        ({"features": LayerFeatures(dense_layers=(0,))}, "129 MLP rows"),
        ({"shared_expert_ffn_hidden_size": 65}, "65 rows of the shared expert"),
    ):
        model = dataclasses.replace(facts.model, **sizes, **more)  # type: ignore[type-var]
        message = messages_of(config, dataclasses.replace(facts, model=model))
        assert word in message and ("129" in message) == ("129" in word)


def test_only_sizes_that_a_model_has_must_fit_fp8(config: RunConfig, facts: RunFacts) -> None:
    config = changed(config, launch__accelerator="cpu", training__precision="fp8", training__fp8_emulation=True)
    mixture = {"family": "mixtral", "num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 128}
    for more, word in (
        ({"ffn_hidden_size": 1000}, "the MLP's size on a rank: 1000"),
        ({"ffn_hidden_size": 1000, **mixture}, ""),
        (mixture | {"expert_ffn_hidden_size": 120}, "an expert's size on a rank: 120"),
    ):
        model = dataclasses.replace(facts.model, **more)  # type: ignore[type-var]
        message = messages_of(config, dataclasses.replace(facts, model=model))
        assert word in message and bool(message) == bool(word)


@pytest.mark.parametrize("case", EXPERTS)
def test_what_experts_need_is_said(config: RunConfig, facts: RunFacts, case: str) -> None:
    changes, expected = EXPERTS[case]
    assert facts.model
    mixture = {"family": "mixtral", "num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 128}
    facts = dataclasses.replace(facts, model=dataclasses.replace(facts.model, **mixture))
    on_cpu = {"launch__accelerator": "cpu", "training__precision": "fp32"}
    assert messages_of(changed(config, **on_cpu), facts) == ""
    message = messages_of(changed(config, **on_cpu | changes), facts)
    assert [part for part in expected if part not in message] == []


FEATURES: dict[str, tuple[dict[str, Any], LayerFeatures, list[str]]] = {
    "context parallelism on GPUs": (
        {"launch__accelerator": "gpu", "parallel__context_parallel_size": 2},
        LayerFeatures(sliding_window=512, local_layers=(0,)),
        ["--context_parallel_size: a model with windows of 512 tokens", "not tried on GPUs yet"],
    ),
    "chunks in documents": (
        {"data__reset_attention_mask": True},
        LayerFeatures(local_layers=(0,), attention_chunk=512),
        ["data.reset_attention_mask: a model with attention within chunks of 512 tokens"],
    ),
    "heads that differ": (
        {"parallel__tensor_model_parallel_size": 2},
        LayerFeatures(global_attention=GlobalAttention(16, 1, 0.25)),
        ["1 key/value heads of layers without a window"],
    ),
    "Transformer Engine": ({"training__layer_spec": "te"}, LayerFeatures(norm_after=True), ["--layer_spec te"]),
    "FP8": (
        {"training__precision": "fp8", "training__fp8_emulation": True},
        LayerFeatures(nope_layers=(3,)),
        ["--precision fp8: a model with layers without rotary embeddings"],
    ),
}


def test_gated_delta_nets_have_whole_sequences(config: RunConfig, facts: RunFacts) -> None:
    features = LayerFeatures(delta_net=DeltaNet(3, 6, 8, 8, 4), delta_net_layers=(0,))
    facts = dataclasses.replace(facts, model=dataclasses.replace(facts.model, features=features))  # type: ignore[type-var]
    on_cpu = {"launch__accelerator": "cpu", "training__precision": "fp32"}
    assert messages_of(changed(config, **on_cpu), facts) == ""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"parallel__context_parallel_size": 2}, "--context_parallel_size: a model with gated delta nets"),
        ({"data__reset_attention_mask": True}, "data.reset_attention_mask: a model with gated delta nets"),
        ({"parallel__tensor_model_parallel_size": 2}, "3 key heads of gated delta nets"),
    ]
    for change, words in cases:
        assert words in messages_of(changed(config, **on_cpu | change), facts), words


@pytest.mark.parametrize("case", FEATURES)
def test_what_features_of_layers_need_is_said(config: RunConfig, facts: RunFacts, case: str) -> None:
    changes, features, expected = FEATURES[case]
    assert facts.model
    facts = dataclasses.replace(facts, model=dataclasses.replace(facts.model, family="olmo2", features=features))
    on_cpu = {"launch__accelerator": "cpu", "training__precision": "fp32"}
    assert messages_of(changed(config, **on_cpu), facts) == ""
    message = messages_of(changed(config, **on_cpu | changes), facts)
    assert [part for part in expected if part not in message] == []


@pytest.mark.parametrize("kind", ["linear", "yarn", "dynamic", "longrope", "llama3"])
def test_scalings_without_a_class_of_nemo_need_our_layers(config: RunConfig, facts: RunFacts, kind: str) -> None:
    assert facts.model
    facts = dataclasses.replace(facts, model=dataclasses.replace(facts.model, rope_scaling=RopeScaling(kind=kind)))
    message = messages_of(changed(config, training__layer_spec="te"), facts)
    refused = f"--layer_spec te: a model with {kind} scaling (llama)"
    assert message == "" if kind == "llama3" else refused in message


def test_documents_of_both_sets_of_longrope_are_refused(config: RunConfig, facts: RunFacts) -> None:
    assert facts.model
    scaling = RopeScaling(32.0, original_max_position_embeddings=512, kind="longrope")
    facts = dataclasses.replace(facts, model=dataclasses.replace(facts.model, rope_scaling=scaling))
    config = changed(config, data__reset_attention_mask=True)
    assert "data.reset_attention_mask: longrope (llama) in sequences of 1024 tokens" in messages_of(config, facts)
    assert messages_of(changed(config, data__reset_attention_mask=False), facts) == ""
    assert messages_of(changed(config, data__sequence_length=512), facts) == ""


def test_a_dense_model_has_no_experts_to_share(config: RunConfig, facts: RunFacts) -> None:
    message = messages_of(changed(config, parallel__expert_model_parallel_size=2), facts)
    assert "--expert_model_parallel_size: the model has no experts" in message


def test_parity_at_start_can_be_required_only_where_there_is_something_to_compare(
    config: RunConfig, facts: RunFacts
) -> None:
    required = changed(config, training__start_parity="require")
    assert "--start_parity: require, for a run from random weights" in messages_of(required, facts)
    from_weights = changed(required, nemo_model="/checkpoint")
    assert "not available" in messages_of(from_weights, facts)
    weights = InitialWeights("/checkpoint", "/checkpoint", None, hf_weights="/models/llama")
    assert not messages_of(from_weights, dataclasses.replace(facts, initial_weights=weights))
