"""What follows from a request is computed, never asked for."""

from __future__ import annotations

import dataclasses

import pytest
from changed_config import changed

from pretrainkit.config.resolve import RunFacts, padded_vocab_size, resolve, warnings_of
from pretrainkit.config.schema import InitialWeights, RopeScaling, RunConfig
from pretrainkit.machine import MachineFacts


def test_one_epoch_is_whole_batches_of_the_training_split(config: RunConfig, facts: RunFacts) -> None:
    run = resolve(config, facts)
    assert run.max_steps == ((969_000 - 1) // 1024) // 64 == 14
    assert resolve(changed(config, training__max_steps=100), facts).max_steps == 100


def test_samples_do_not_cross_prefixes(config: RunConfig, facts: RunFacts) -> None:
    two = dataclasses.replace(facts, split_tokens=((1024 * 64, 9000, 0), (1024 * 64 + 1, 9000, 0)))
    assert resolve(config, two).max_steps == (63 + 64) // 64


def test_sizes_follow_from_ranks(config: RunConfig, facts: RunFacts) -> None:
    run = resolve(changed(config, parallel__tensor_model_parallel_size=2, parallel__context_parallel_size=2), facts)
    assert (run.world_size, run.data_parallel_size, run.sequence_parallel) == (8, 2, True)
    assert resolve(config, facts).sequence_parallel is False


@pytest.mark.parametrize(
    ("asked", "gpus", "accelerator", "precision"),
    [("auto", 8, "gpu", "bf16"), ("auto", 0, "cpu", "fp32"), ("cpu", 8, "cpu", "fp32"), ("gpu", 8, "gpu", "bf16")],
)
def test_auto_takes_gpus_where_there_are_any(
    config: RunConfig, facts: RunFacts, asked: str, gpus: int, accelerator: str, precision: str
) -> None:
    facts = dataclasses.replace(facts, machine=MachineFacts(num_gpus=gpus, num_cpus=8))
    run = resolve(changed(config, launch__accelerator=asked), facts)
    assert (run.accelerator, run.precision) == (accelerator, precision)


@pytest.mark.parametrize(
    ("max_steps", "decay", "warmup", "expected"),
    [
        (100, None, None, (1, 100)),
        (4, None, None, (0, 4)),
        (1_000_000, None, None, (2000, 1_000_000)),
        (100, 50, None, (0, 50)),
        (100, 5000, 7, (7, 5000)),
        (100, None, 0, (0, 100)),
    ],
)
def test_the_schedule_follows_from_the_steps(
    config: RunConfig,
    facts: RunFacts,
    max_steps: int,
    decay: int | None,
    warmup: int | None,
    expected: tuple[int, int],
) -> None:
    run = resolve(
        changed(
            config, training__max_steps=max_steps, optimizer__lr_decay_steps=decay, optimizer__lr_warmup_steps=warmup
        ),
        facts,
    )
    assert (run.lr_warmup_steps, run.lr_decay_steps) == expected


@pytest.mark.parametrize(("cooldown", "steps"), [("10%", 10), ("25", 25), ("0", 0), ("100%", 100)])
def test_the_decay_is_a_number_of_steps_or_a_share_of_the_schedule(
    config: RunConfig, facts: RunFacts, cooldown: str, steps: int
) -> None:
    asked = {"training__max_steps": 300, "optimizer__lr_rewarm_step": 200, "optimizer__lr_cooldown": cooldown}
    wsd, cosine = (resolve(changed(config, **asked, optimizer__lr_schedule=name), facts) for name in ("wsd", "cosine"))
    assert (wsd.lr_cooldown_steps, cosine.lr_cooldown_steps) == (steps, 0)
    assert wsd.lr_warmup_steps == 1, "1% of the 100 steps from where the schedule starts again"


def test_min_lr_is_a_tenth_unless_given(config: RunConfig, facts: RunFacts) -> None:
    assert resolve(config, facts).min_lr == pytest.approx(3e-5)
    assert resolve(changed(config, optimizer__min_lr=0.0), facts).min_lr == 0.0


@pytest.mark.parametrize(
    ("vocabulary", "tensor", "padded"),
    [(320, 1, 384), (320, 2, 384), (320, 8, 384), (128256, 8, 128256), (49152, 4, 49152), (320, 3, 384), (400, 3, 768)],
)
def test_the_vocabulary_is_padded_to_one_size_at_every_power_of_two(vocabulary: int, tensor: int, padded: int) -> None:
    assert padded_vocab_size(vocabulary, tensor) == padded


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"training__max_steps": 100}, "6.8 epochs of"),
        ({"training__val_interval": 500}, "one evaluation"),
        ({"optimizer__lr_schedule": "constant", "optimizer__min_lr": 0.0}, "no effect with the constant schedule"),
        ({"optimizer__lr_cooldown": "5"}, "no effect with the cosine schedule"),
        ({"optimizer__lr_schedule": "wsd", "optimizer__lr_power_a": 4.6}, "no effect with the wsd schedule"),
        ({"optimizer__lr_decay_steps": 1000}, "the run ends at 14"),
        ({"parallel__sequence_parallel": True}, "no effect with one tensor-parallel rank"),
        ({"launch__accelerator": "cpu", "launch__num_gpus": 64}, "64 processes share 8 CPU cores"),
        (
            {"parallel__pipeline_model_parallel_size": 8, "training__micro_batch_size": 16},
            "4 micro batches per step in 8 pipeline stages",
        ),
        ({"training__fp8_first_last_bf16": 1}, "only --precision fp8 uses --fp8_first_last_bf16"),
        ({"training__fused_kernels": "norm,launches"}, "launches is now --fused_kernels cuda_graphs"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_what_may_surprise_is_noted(config: RunConfig, facts: RunFacts, changes: dict, expected: str) -> None:
    facts = dataclasses.replace(facts, machine=MachineFacts(num_gpus=8, num_cpus=8))
    quiet = changed(config, training__val_interval=2)
    assert warnings_of(resolve(quiet, facts), facts) == []
    asked = changed(quiet, **changes)
    assert expected in " ".join(warnings_of(resolve(asked, facts), facts))


def test_trained_weights_at_the_rate_of_random_ones_are_noted(config: RunConfig, facts: RunFacts) -> None:
    facts = dataclasses.replace(facts, initial_weights=InitialWeights("/w", "/w", None))
    notes = [" ".join(warnings_of(resolve(changed(config, optimizer__lr=lr), facts), facts)) for lr in (3e-4, 3e-5)]
    assert "--lr 0.0003, the default, suits random weights" in notes[0] and "random weights" not in notes[1]


def test_sequences_that_do_not_reach_the_longer_context_are_noted(config: RunConfig, facts: RunFacts) -> None:
    assert facts.model
    scaling = RopeScaling(2.0, original_max_position_embeddings=65536, kind="yarn")
    facts = dataclasses.replace(facts, model=dataclasses.replace(facts.model, rope_scaling=scaling))
    config = changed(config, rope_scaling="yarn factor=2", training__max_steps=2)
    configs = [changed(config, data__sequence_length=length) for length in (65536, 65544)]
    notes = [" ".join(warnings_of(resolve(each, facts), facts)) for each in configs]
    assert "no sample is longer than the 65536 tokens" in notes[0] and "no sample" not in notes[1]


def test_cpu_by_default_and_data_without_a_manifest_are_noted(config: RunConfig, facts: RunFacts) -> None:
    assert facts.dataset
    facts = dataclasses.replace(
        facts,
        machine=MachineFacts(num_gpus=0, num_cpus=8),
        dataset=dataclasses.replace(facts.dataset, max_token_id=None),
        without_eod=("/data/a", "/data/b"),
    )
    notes = " ".join(warnings_of(resolve(config, facts), facts))
    assert "documents end without an EOD token in /data/a, /data/b" in notes
    assert "no GPU found: 8 processes train on the CPU" in notes and "no manifest" in notes
