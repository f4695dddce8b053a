"""The record of an evaluation: losses of the validation split by part and by label, and of the validation sets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pretrainkit.config.schema import ResolvedRun

METRICS = ("loss", "tokens", "bits_per_byte")
GROUPS = ("part", "label", "set")
_MAX_SHOWN = 8
_FIRST_RANGE = 64


def validation_record(
    run: ResolvedRun, labels: Sequence[str], losses: NDArray[np.float64], tokens: NDArray[np.float64]
) -> dict[str, Any]:
    """The fields `val_loss`, `val_tokens` and `val_bits_per_byte`, and the same by part, label and set; `val_loss` and
    `val_tokens` by position.

    `losses` in nats and `tokens` are sums [sources, labels, positions]: sources are the prefixes of the run's dataset,
    then the validation sets; `labels` name the second dimension, `position_ranges` the third. A value is left out where
    there was no token, or where no manifest says how many bytes the text has.
    """
    parts = run.dataset.part_names or run.dataset.prefixes
    datasets = [*[run.dataset] * len(parts), *run.datasets[1:]]
    text_bytes = np.array([[dataset.bytes_per_token(label) for label in labels] for dataset in datasets])
    sums = np.stack([losses, tokens, text_bytes[..., None] * tokens])
    own = sums[:, : len(parts)]
    found: dict[str, dict[str, NDArray[np.float64]]] = {group: {} for group in GROUPS}
    if len(set(parts)) > 1:
        found["part"] = {name: own[:, [part == name for part in parts]] for name in dict.fromkeys(parts)}
    if run.dataset.labels:
        found["label"] = {label: own[:, :, number] for number, label in enumerate(labels)}
    for number, each in enumerate(run.validation_sets, len(parts)):
        found["set"][each.name] = sums[:, number]
        of_labels = {label: sums[:, number, labels.index(label)] for label in each.dataset.labels}
        found["set"] |= {f"{each.name}/{label}": part for label, part in of_labels.items()}
    whole = own if own[1].any() else sums
    record = {f"val_{name}": value for name, value in _metrics(whole).items()}
    for group, members in found.items():
        values = {member: _metrics(part) for member, part in members.items()}
        for name in METRICS:
            known = {member: each[name] for member, each in values.items() if name in each}
            record |= {f"val_{name}_by_{group}": known} if known else {}
    begins = position_ranges(run.config.data.sequence_length)
    of_positions = {str(begin): _metrics(whole[..., number]) for number, begin in enumerate(begins)}
    if len(of_positions) > 1:
        for name in ("loss", "tokens"):
            record[f"val_{name}_by_position"] = {begin: each[name] for begin, each in of_positions.items() if each}
    return record


def position_ranges(sequence_length: int) -> list[int]:
    """Where the ranges of positions begin whose losses are recorded: at 0, and from _FIRST_RANGE on at its doubles."""
    begins = [0, _FIRST_RANGE]
    while 2 * begins[-1] < sequence_length:
        begins.append(2 * begins[-1])
    return begins if sequence_length > _FIRST_RANGE else [0]


def _metrics(sums: NDArray[np.float64]) -> dict[str, Any]:
    """From sums [3, ...] of losses, tokens and bytes of text: mean loss of a token, tokens, bits per byte."""
    loss, num_tokens, text_bytes = sums.reshape(len(sums), -1).sum(axis=1).tolist()
    if not num_tokens:
        return {}
    is_known = bool((sums[2] > 0)[sums[1] > 0].all())
    bits = {"bits_per_byte": loss / math.log(2) / text_bytes} if is_known else {}
    return {"loss": loss / num_tokens, "tokens": int(num_tokens), **bits}


def describe_losses(record: Mapping[str, Any]) -> str:
    """The losses of an evaluation's record in words: the first, then those of sets, labels or parts."""
    groups: list[dict[str, float]] = [record.get(f"val_loss_by_{group}", {}) for group in reversed(GROUPS)]
    finest = next(filter(None, groups), {})
    shown = [f"{name} {loss:.4f}" for name, loss in finest.items()]
    more = [f"{len(shown) - _MAX_SHOWN} more"] if len(shown) > _MAX_SHOWN else []
    bits = record.get("val_bits_per_byte")
    whole = f"{record['val_loss']:.4f}" + ("" if bits is None else f" ({bits:.4f} bits per byte)")
    return f"{whole}: {', '.join(shown[:_MAX_SHOWN] + more)}" if shown else whole
