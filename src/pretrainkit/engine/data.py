"""NeMo's data module for a run."""

from __future__ import annotations

from nemo.collections import llm
from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer

from pretrainkit.config.schema import ResolvedRun
from pretrainkit.data.shards.urls import names_shards
from pretrainkit.megatron import patches
from pretrainkit.megatron.dataset import EpochDataset
from pretrainkit.run.folder import RunFolder
from pretrainkit.run.resume_plan import StartPlan


def data_module(
    run: ResolvedRun, plan: StartPlan, prefixes: tuple[str, ...], tokenizer: AutoTokenizer
) -> llm.PreTrainingDataModule:
    """NeMo's data module for the datasets with these prefixes, in the run's order of samples."""
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
        num_train_samples=max(run.max_steps * run.config.training.global_batch_size, plan.last_sample(run)),
        seed=run.config.training.seed,
        dataset_cls=EpochDataset,
        reset_attention_mask=run.config.data.reset_attention_mask,
        eod_mask_loss=run.config.data.eod_mask_loss,
        # Megatron names its index after the settings, not the data: each dataset gets its own folder.
        index_mapping_dir=str(RunFolder.of(run).dataset_index / dataset.data_hash[:16]),
    )
    if known != list(prefixes):
        data.build_kwargs["blend"] = [list(prefixes), list(dataset.weights) or None]
    data.create_attention_mask = False  # without Transformer Engine NeMo adds a mask of S x S to every sample
    return data


def _blend(prefixes: list[str], weights: tuple[float, ...]) -> list[str]:
    return [word for pair in zip(map(str, weights), prefixes, strict=True) for word in pair] if weights else prefixes
