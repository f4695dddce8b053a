"""The model card of a release: a new one from the records, or the user's, of which only marked sections are filled.

A section is marked by two comments, `<!-- pretrainkit:data -->` and `<!-- /pretrainkit:data -->`; what stands between
them is replaced. SECTIONS lists the names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pretrainkit.config.schema import InitialWeights
from pretrainkit.data.indexed.manifest import read_manifest
from pretrainkit.data.shards.urls import is_url
from pretrainkit.errors import DataError, RequestError
from pretrainkit.models.registry import read_shape
from pretrainkit.release.report import ReleaseReport
from pretrainkit.release.training_record import TrainingRecord, rank_hours
from pretrainkit.run.history import losses_of
from pretrainkit.run.lr_schedule import describe_schedule
from pretrainkit.units import format_bytes, format_count

SHOWN_INPUTS = 20
"""Input files of a dataset that are listed."""
_MARK = re.compile(r"<!-- (?P<end>/?)pretrainkit:(?P<name>[\w-]+) -->")
_FRONT_MATTER = re.compile(r"\A---\n(?P<yaml>.*?)\n---\n", re.DOTALL)
_LICENCE_FIELDS = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class CardFacts:
    """All that a card is written from."""

    title: str
    released: Path
    report: ReleaseReport
    trainings: Sequence[TrainingRecord]
    """Of the checkpoints that the release was made from; an average may be of several experiments."""
    base_model: str | None
    """Hub id; None: trained from random weights."""
    licence: Mapping[str, str]
    """The fields of a card's metadata that name the licence."""

    @property
    def training(self) -> TrainingRecord:
        """The last one: of what all have in common, as model and data."""
        return self.trainings[-1]


def metadata_of(text: str) -> dict[str, Any]:
    """The metadata at the head of a card; empty where there is none. Raises RequestError when it isn't YAML."""
    match = _FRONT_MATTER.match(text)
    try:
        found = yaml.safe_load(match["yaml"]) if match else {}
    except yaml.YAMLError as error:
        raise RequestError(f"its metadata is not YAML: {error}", where="README.md") from error
    return found if isinstance(found, dict) else {}


def licence_of(card: str) -> dict[str, str]:
    """The fields of a card that name the licence."""
    fields = metadata_of(card)
    return {name: str(fields[name]) for name in _LICENCE_FIELDS if fields.get(name)}


def sections_in(text: str) -> list[str]:
    """The marked sections of a card, in order. Raises RequestError for unknown, unbalanced or repeated marks."""
    names, opened = list[str](), None
    for match in _MARK.finditer(text):
        name, is_end = match["name"], bool(match["end"])
        if name not in SECTIONS or (opened != name if is_end else opened is not None or name in names):
            raise RequestError(
                f"the mark {match[0]} in line {text.count(chr(10), 0, match.start()) + 1}",
                needed=f"pairs of marks, each once, of {', '.join(SECTIONS)}",
                where="README.md",
            )
        opened = None if is_end else name
        names += [] if is_end else [name]
    if opened:
        raise RequestError(f"<!-- pretrainkit:{opened} --> without its end", where="README.md")
    return names


def fill(text: str, facts: CardFacts) -> str:
    """A card with its marked sections filled; all else stays."""
    for name in sections_in(text):
        begin, end = f"<!-- pretrainkit:{name} -->", f"<!-- /pretrainkit:{name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{SECTIONS[name](facts)}\n{end}{rest.partition(end)[2]}"
    return text


def new_card(facts: CardFacts) -> str:
    """A card with all sections."""
    metadata: dict[str, Any] = {**facts.licence, "library_name": "transformers", "pipeline_tag": "text-generation"}
    if facts.base_model:
        metadata |= {"base_model": facts.base_model, "base_model_relation": "finetune"}
    head = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    marked = [f"## {_TITLES[name]}\n\n<!-- pretrainkit:{name} -->\n<!-- /pretrainkit:{name} -->\n" for name in SECTIONS]
    return fill(f"---\n{head}---\n\n# {facts.title}\n\n" + "\n".join(marked), facts)


def _base(facts: CardFacts) -> str:
    root = facts.training.first_run
    shape, weights = read_shape(facts.released), root.initial_weights
    licence = ", ".join(facts.licence.values()) or "see the card's metadata"
    asked = facts.training.run.config
    changed = {"rope_theta": asked.rope_theta, "rope_scaling": asked.rope_scaling}
    lines = [
        ("architecture", f"{shape.family}, {shape.num_layers} layers, hidden size {shape.hidden_size}"),
        ("vocabulary, context", f"{shape.vocab_size} tokens, {shape.max_position_embeddings} tokens"),
        ("rotary settings changed to", ", ".join(f"{name} {value}" for name, value in changed.items() if value)),
        ("base model", f"[{facts.base_model}](https://huggingface.co/{facts.base_model})" if facts.base_model else ""),
        ("initial weights", "random" if weights is None and not root.branch else _fingerprint(weights)),
        ("licence", licence),
    ]
    return _table(("", ""), [line for line in lines if line[1]])


def _fingerprint(weights: InitialWeights | None) -> str:
    found = weights.fingerprint if weights else None
    return f"fingerprint `{found[:16]}`" if found else ""


def _data(facts: CardFacts) -> str:
    run = facts.training.run
    dataset, tokens = run.dataset, _tokens_seen(facts.training)
    total = sum(dataset.weights)
    weights = [weight / total for weight in dataset.weights] if dataset.weights else [1.0]
    rows, notes = list[tuple[str, ...]](), list[str]()
    for prefix, share in zip(dataset.prefixes, weights, strict=True):
        try:
            manifest = None if is_url(prefix) else read_manifest(prefix)
        except DataError:
            manifest = None
        name = Path(prefix).name
        if manifest is None:
            rows.append((name, f"{share:.2%}", "", "", ""))
            continue
        checksum = f"CRC-32 {manifest.bin_crc32:08x}"
        rows.append((name, f"{share:.2%}", str(manifest.num_documents), str(manifest.num_tokens), checksum))
        shown = manifest.inputs[:SHOWN_INPUTS]
        notes += [
            f"- {name}: {Path(each.path).name}, {each.num_records} records, {format_bytes(each.num_bytes)}"
            + (f", XXH3-128 `{each.xxh3_128}`" if each.xxh3_128 else "")
            for each in shown
        ]
        if more := len(manifest.inputs) - len(shown):
            notes.append(f"- {name}: {more} further files")
        if manifest.decontamination:
            overlaps = manifest.decontamination.get("overlaps", {})
            done = "left out" if manifest.decontamination.get("action") != "report" else "kept"
            found = ", ".join(f"{count} with {task}" for task, count in overlaps.items() if count) or "none"
            notes.append(f"- {name}: documents that overlap with evaluation sets: {found} ({done})")
    epochs = tokens / max(run.samples_per_epoch * run.config.data.sequence_length, 1)
    summary = (
        f"{tokens} tokens were trained on, {epochs:.2f} epochs of {dataset.num_documents} documents with "
        f"{dataset.num_tokens} tokens (SHA-256 `{dataset.data_hash.partition('+')[0]}`)."
    )
    table = _table(("dataset", "weight", "documents", "tokens", "checksum"), rows)
    return "\n\n".join([summary, table, *(["\n".join(notes)] if notes else [])])


def _each(facts: CardFacts, section: Callable[[TrainingRecord], str]) -> str:
    """A section of every experiment that the release was made from, below its name where there are several."""
    if len(facts.trainings) == 1:
        return section(facts.training)
    names = ", ".join(f"{each.folder.name} at step {each.step}" for each in facts.trainings)
    parts = [f"### {each.folder.name}\n\n{section(each)}" for each in facts.trainings]
    return "\n\n".join([f"The average of {names}.", *parts])


def _training(facts: CardFacts) -> str:
    return _each(facts, _settings)


def _settings(record: TrainingRecord) -> str:
    run = record.run
    training, optimizer, parallel = run.config.training, run.config.optimizer, run.config.parallel
    branch = run.branch
    packages = ("torch", "megatron-core", "nemo_toolkit", "transformers")
    found = record.packages
    lines = [
        ("steps", f"{record.step} of {run.max_steps}"),
        ("branch", f"of {Path(branch.experiment).name} at step {branch.step}" if branch else ""),
        ("batch", f"{training.global_batch_size} sequences of {run.config.data.sequence_length} tokens"),
        ("batch size warm-up", training.rampup_batch_size or ""),
        ("schedule", describe_schedule(run)),
        ("optimizer", f"AdamW, beta {optimizer.adam_beta1} and {optimizer.adam_beta2}, epsilon {optimizer.adam_eps}, "
         f"weight decay {optimizer.weight_decay}, gradient clipping {optimizer.clip_grad}"),
        ("precision", run.precision_text),
        ("parallelism", f"TP {parallel.tensor_model_parallel_size}, PP {parallel.pipeline_model_parallel_size}, "
         f"CP {parallel.context_parallel_size}, DP {run.data_parallel_size}"),
        ("seed", str(training.seed)),
        ("software", ", ".join(f"{name} {found[name]}" for name in packages if name in found)),
    ]  # fmt: skip
    return _table(("", ""), [line for line in lines if line[1]])


def _results(facts: CardFacts) -> str:
    gate = [check.found for check in facts.report.checks if check.name == "held-out loss"]
    return "\n\n".join([_each(facts, _losses), *(f"Held-out text of the release check: {found}." for found in gate)])


def _losses(record: TrainingRecord) -> str:
    held_out, steps = record.held_out, record.steps
    rows = list[tuple[str, ...]]()
    for kind, found, field, parts in (
        ("held-out", held_out, "val_loss", losses_of),
        ("training", steps, "loss", lambda record: record.get("loss_by_label") or {}),
    ):
        if not found:
            continue
        first, last = found[0], found[-1]
        rows.append((f"{kind} loss", _loss(first, first.get(field)), _loss(last, last.get(field))))
        before, after = parts(first), parts(last)
        labels = sorted({*before, *after})
        rows += [
            (f"{kind}, {label}", _loss(first, before.get(label)), _loss(last, after.get(label))) for label in labels
        ]
    return _table(("nats per token", "first", "last"), rows) if rows else "No losses were recorded."


def _loss(record: Mapping[str, Any], loss: float | None) -> str:
    return "" if loss is None else f"{loss:.4f} (step {record['step']})"


def _evaluation(facts: CardFacts) -> str:
    return _each(facts, _scores)


def _scores(record: TrainingRecord) -> str:
    found = record.evaluations
    if not found:
        return "No evaluation was recorded."
    shown = [found[0], found[-1]] if found[0]["step"] != found[-1]["step"] else found[-1:]
    rows = [
        (task, metric, *(_score(each["tasks"].get(task, {}).get(metric)) for each in shown))
        for task, metrics in sorted(found[-1]["tasks"].items())
        for metric in sorted(metrics)
    ]
    return _table(("task", "metric", *(f"step {each['step']}" for each in shown)), rows)


def _score(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "" if value is None else str(value)


def _hardware(facts: CardFacts) -> str:
    run, hours = facts.training.run, rank_hours(facts.trainings)
    kind = run.gpu_name or ("CPU ranks" if run.accelerator == "cpu" else "GPU")
    unit = "CPU rank" if run.accelerator == "cpu" else "GPU"
    speed = [each["tokens_per_second"] for each in facts.training.steps if each.get("tokens_per_second")]
    lines = [
        ("hardware", f"{run.world_size} x {kind}"),
        (f"{unit} hours", f"{hours:.3g}"),
        ("speed", f"{format_count(sorted(speed)[len(speed) // 2])} tokens/s" if speed else ""),
    ]
    return _table(("", ""), [line for line in lines if line[1]])


def _release(facts: CardFacts) -> str:
    report = facts.report
    verdict = f"The release check passed: {len(report.checks)} checks of files, weights and both models."
    shown = [each for each in report.checks if each.name.startswith(("bit-equal", "logits", "most likely"))]
    return "\n".join([verdict, "", *(f"- {each.name}: {each.found}" for each in shown)])


def _commands(facts: CardFacts) -> str:
    commands = [command for training in facts.trainings for command in training.commands]
    lines = list(dict.fromkeys(commands)) or ["# no command was recorded"]
    return "\n".join(["```bash", *lines, "```"])


def _tokens_seen(training: TrainingRecord) -> int:
    steps = training.steps
    return int(steps[-1].get("tokens") or 0) if steps else 0


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


SECTIONS: dict[str, Callable[[CardFacts], str]] = {
    "base": _base,
    "data": _data,
    "training": _training,
    "losses": _results,
    "evaluation": _evaluation,
    "hardware": _hardware,
    "release": _release,
    "commands": _commands,
}
"""By the name in a card's marks."""
_TITLES = {
    "base": "Model",
    "data": "Training data",
    "training": "Training",
    "losses": "Losses",
    "evaluation": "Evaluation",
    "hardware": "Hardware",
    "release": "Release check",
    "commands": "Command lines",
}
