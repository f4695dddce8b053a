"""NeMo's data module for a run: its datasets, in the run's order of samples, and the samples of an evaluation."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.datasets.blended_dataset import BlendedDataset

from pretrainkit.config.batch_size import samples_after
from pretrainkit.config.blend_schedule import blend_segments
from pretrainkit.config.schema import ResolvedRun
from pretrainkit.data.shards.urls import names_shards
from pretrainkit.engine.nemo import AutoTokenizer, llm
from pretrainkit.megatron import patches
from pretrainkit.megatron.blend import apply_schedule
from pretrainkit.megatron.dataset import EpochDataset, local_prefixes
from pretrainkit.megatron.held_out import HeldOutSamples, build_sets
from pretrainkit.run.folder import RunFolder
from pretrainkit.run.resume_plan import StartPlan
from pretrainkit.run.skipped_samples import SkippedSamples


def local_paths(run: ResolvedRun) -> list[tuple[str, ...]]:
    """Paths on disk of the run's dataset and of each validation set (`local_prefixes`)."""
    return [local_prefixes(run, dataset) for dataset in run.datasets]


def data_module(
    run: ResolvedRun, plan: StartPlan, paths: list[tuple[str, ...]], tokenizer: AutoTokenizer
) -> llm.PreTrainingDataModule:
    """NeMo's data module for the datasets at these `local_paths`, in the run's order of samples."""
    prefixes, *set_prefixes = paths
    dataset, gpu = run.dataset, run.accelerator == "gpu"
    patches.apply(patches.INDEX_FILES)
    # NeMo checks that its paths exist, as .bin/.idx files or folders; names of shards are set below.
    known = [run.experiment_dir if names_shards(prefix) else prefix for prefix in prefixes]
    data = llm.PreTrainingDataModule(
        paths=_blend(known, dataset.weights),
        seq_length=run.config.data.sequence_length,
        global_batch_size=run.config.training.global_batch_size,
        micro_batch_size=run.config.training.micro_batch_size,
        num_workers=run.config.data.num_workers,
        pin_memory=gpu,
        persistent_workers=run.config.data.num_workers > 0,
        tokenizer=tokenizer,
        split=run.config.data.split,
        # NeMo refuses fewer than steps x batch size, which are too few after steps with a larger batch.
        num_train_samples=max(run.max_steps * run.config.training.global_batch_size, plan.last_sample(run))
        + plan.skipped.count,
        seed=run.config.training.seed,
        dataset_cls=EpochDataset,
        reset_attention_mask=run.config.data.reset_attention_mask,
        eod_mask_loss=run.config.data.eod_mask_loss,
        # Megatron names its index after the settings, not the data: each dataset gets its own folder.
        index_mapping_dir=str(RunFolder.of(run).dataset_index / dataset.data_hash[:16]),
    )
    # NeMo's own warm-up stops the trainer at each growth and counts only the samples since the last one.
    data.data_sampler.compute_consumed_samples = functools.partial(_consumed_samples, run, plan)
    build, create = data.build, data._create_dataloader

    def build_all(**settings: Any) -> None:
        build(**settings)
        if dataset.schedule:
            apply_schedule(data._train_ds, blend_segments(run.config.training, dataset))
        if run.config.training.val_interval:
            sets = build_sets(run, set_prefixes, data.gpt_dataset_config, RunFolder.of(run).dataset_index)
            data._validation_ds = HeldOutSamples(run, data._validation_ds, sets)

    data.build = build_all
    if plan.skipped.count:
        data._create_dataloader = lambda dataset, mode, **settings: create(
            WithoutSamples(dataset, plan.skipped) if mode == "train" else dataset, mode, **settings
        )
    if known != list(prefixes):
        data.build_kwargs["blend"] = [list(prefixes), list(dataset.weights) or None]
    data.create_attention_mask = False  # without Transformer Engine NeMo adds a mask of S x S to every sample
    return data


def _consumed_samples(run: ResolvedRun, plan: StartPlan, steps_since_resume: int = 0) -> int:
    return samples_after(run.config.training, steps_since_resume, plan.consumed_samples)


class WithoutSamples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A run's samples without those that rollbacks leave out."""

    def __init__(self, dataset: EpochDataset | BlendedDataset, skipped: SkippedSamples) -> None:
        self._dataset, self._skipped = dataset, skipped

    def __len__(self) -> int:
        return len(self._dataset) - self._skipped.count

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        sample: dict[str, torch.Tensor] = self._dataset[None if idx is None else self._skipped.place(int(idx))]
        return sample


def _blend(prefixes: list[str], weights: tuple[float, ...]) -> list[str]:
    return [word for pair in zip(map(str, weights), prefixes, strict=True) for word in pair] if weights else prefixes
