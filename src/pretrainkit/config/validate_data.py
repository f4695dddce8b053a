"""Whether the dataset and its tokenizer fit the model, the sequence length and the batch."""

from __future__ import annotations

from collections.abc import Iterator

from pretrainkit.config import resolve
from pretrainkit.config.resolve import RunFacts, ValidationFacts
from pretrainkit.config.schema import DatasetFacts, RunConfig
from pretrainkit.config.split import SPLIT_NAMES, num_samples, parse_split
from pretrainkit.errors import RequestError


def data_problems(config: RunConfig, facts: RunFacts) -> Iterator[RequestError]:
    """Token ids out of range, another tokenizer, unsupported document masking, too few tokens."""
    dataset, model = facts.dataset, facts.model
    if model:
        for owner, flag, largest_id in (
            ("the data's tokenizer", "--dataset_path", dataset.max_token_id if dataset else None),
            *(
                ("the data's tokenizer", f"--valid_path {each.name}", each.dataset.max_token_id)
                for each in facts.validation_sets
            ),
            ("the tokenizer", "--hf_model_id", facts.tokenizer_largest_id),
        ):
            if largest_id is not None and largest_id >= model.vocab_size:
                yield RequestError(
                    f"token id {largest_id} of {owner} is out of range for vocab size {model.vocab_size}",
                    needed="a vocab size above every token id",
                    action="use the model's own tokenizer, or enlarge the model's embedding",
                    where=flag,
                )
    if dataset is None:
        return
    yield from _other_tokenizer(facts, dataset, facts.dataset_tokenizers, "--dataset_path")
    for each in facts.validation_sets:
        flag = f"--valid_path {each.name}"
        yield from _other_tokenizer(facts, each.dataset, each.tokenizers, flag)
        yield from _validation_set(config, dataset, each, flag)
    yield from _document_masking(config, dataset, resolve.accelerator(config, facts.machine))
    if facts.split_tokens is not None:
        yield from _tokens(config, facts, facts.split_tokens)


def _other_tokenizer(
    facts: RunFacts, dataset: DatasetFacts, tokenizers: tuple[str | None, ...], flag: str
) -> Iterator[RequestError]:
    if not facts.tokenizer_sha256:
        return
    others = [
        prefix
        for prefix, sha256 in zip(dataset.prefixes, tokenizers, strict=False)
        if sha256 and sha256 != facts.tokenizer_sha256
    ]
    if others:
        yield RequestError(
            f"tokenized with another tokenizer than the model's: {', '.join(others)}",
            needed=f"data tokenized with the tokenizer.json of {facts.hf_folder}",
            action="preprocess the data again with it",
            where=flag,
        )


def _validation_set(
    config: RunConfig, dataset: DatasetFacts, each: ValidationFacts, flag: str
) -> Iterator[RequestError]:
    """A name that can't be shown, rows that the run doesn't read as such, or no sample."""
    length, row_length = config.data.sequence_length, each.dataset.row_length
    if not each.name.isprintable() or "/" in each.name:
        yield RequestError(f"{each.name!r}", needed="a name without '/' and line breaks", where="--valid_path")
    if row_length not in (None, length):
        yield RequestError(
            f"packed by bestfit into rows of {row_length} tokens, the run has sequences of {length}",
            needed="rows of the run's --sequence_length, or data that isn't packed",
            where=flag,
        )
    if row_length is not None and not resolve.reset_attention_mask(config, dataset):
        yield RequestError(
            "packed by bestfit, but the run's attention doesn't stay within documents",
            needed="data that isn't packed, or --reset_attention_mask",
            where=flag,
        )
    if each.num_samples(length) < 1:
        yield RequestError(
            f"{each.dataset.num_tokens} tokens, fewer than one sample",
            needed=f"{length + 1} tokens (sequence length + 1)",
            action="use more text, or a shorter --sequence_length",
            where=flag,
        )


def _document_masking(config: RunConfig, dataset: DatasetFacts, accelerator: str) -> Iterator[RequestError]:
    length, row_length = config.data.sequence_length, dataset.row_length
    if row_length is not None and row_length != length:
        yield RequestError(
            f"{length} tokens, but the dataset was packed by bestfit into rows of {row_length}",
            needed=f"{row_length}: rows of complete documents are not split",
            action=f"use --sequence_length {row_length}, or pack again with --sequence_length {length}",
            where="--sequence_length",
        )
    if config.training.layer_spec == "te" and resolve.reset_attention_mask(config, dataset):
        yield RequestError(
            "document masking is not supported with Transformer Engine's layers",
            needed="auto or torch",
            where="--layer_spec",
        )
    context = config.parallel.context_parallel_size
    if context > 1 and accelerator != "cpu" and resolve.reset_attention_mask(config, dataset):
        why = "--reset_attention_mask" if config.data.reset_attention_mask else "a dataset packed by bestfit"
        yield RequestError(
            f"{why} with context parallel size {context}",
            needed="1, or --accelerator cpu: document masking with context parallelism was not tried on GPUs yet",
            action="use -T or -P instead" + (", or pack with concat" if dataset.row_length else ""),
            where="--context_parallel_size",
        )


def _tokens(
    config: RunConfig, facts: RunFacts, split_tokens: tuple[tuple[int, int, int], ...]
) -> Iterator[RequestError]:
    assert facts.dataset
    length = config.data.sequence_length
    shares = parse_split(config.data.split)
    evaluates = config.training.val_interval and (shares[1] or not facts.validation_sets)
    used = [0, 1] if evaluates else [0]
    for split in used:
        name, too_short = SPLIT_NAMES[split], []
        for prefix, tokens in zip(facts.dataset.prefixes, split_tokens, strict=True):
            if num_samples(tokens[split], length) < 1:
                too_short.append(f"{prefix} has {tokens[split]} {name} tokens")
        if too_short:
            shown = "; ".join(too_short[:3]) + (f"; and {len(too_short) - 3} more" if too_short[3:] else "")
            yield RequestError(
                f"fewer tokens than one {name} sample: {shown}",
                needed=f"{length + 1} tokens (sequence length + 1) in the {name} documents of each prefix",
                action=_more_tokens(split, shares),
                where="--split" if split else "--dataset_path",
            )
            return
    samples = resolve.samples_per_epoch(config, split_tokens)
    if config.training.max_steps is None and samples < config.training.global_batch_size:
        yield RequestError(
            f"one epoch has {samples} samples, a step takes {config.training.global_batch_size}",
            needed="at least one step",
            action="use a smaller --global_batch_size or --sequence_length, or set --max_steps to repeat the data",
            where="--max_steps",
        )


def _more_tokens(split: int, shares: tuple[float, float, float]) -> str:
    if split == 0:
        return "use a shorter --sequence_length, or more text; join small files with tools/inspect_data.py merge"
    more = "give validation a larger share, such as --split 90,10,0" if shares[1] else "give validation a share"
    return f"{more}, name other data with --valid_path, or turn evaluation off with --val_interval 0"
