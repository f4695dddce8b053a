"""The flags of `pretrain.py`: one table of flags and the schema fields that hold their types and defaults."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrainkit.config.fields import FIELDS
from pretrainkit.errors import RequestError


@dataclass(frozen=True)
class Flag:
    """A command-line option that sets one field of RunConfig."""

    name: str
    """With underscores; the parser also takes dashes."""
    field: str
    """Dotted name in RunConfig."""
    help: str
    short: str | None = None
    default_word: str | None = None
    """What stands for an unset default in the help text."""
    required: bool = False
    """Whether a run must have it, by flag or by YAML."""


GROUPS: dict[str, tuple[Flag, ...]] = {
    "where it runs": (
        Flag("--executor", "launch.executor", "local, slurm, pbs or sge (Grid Engine)"),
        Flag("--site", "launch.site", "a file of configs/site by name, or any by path", default_word="none"),
        Flag("--account", "launch.account", "account or group that pays", "-a", "root for Slurm, else none"),
        Flag("--partition", "launch.partition", "partition or queue", "-p", "defq for Slurm, else the site's"),
        Flag("--num_nodes", "launch.num_nodes", "number of nodes", "-N"),
        Flag("--num_gpus", "launch.num_gpus", "GPUs per node, or processes per node on CPU", "-G"),
        Flag("--cpus_per_task", "launch.cpus_per_task", "CPU cores per node", default_word="the site's"),
        Flag("--accelerator", "launch.accelerator", "auto, cpu or gpu; auto takes GPUs where there are any"),
        Flag(
            "--gpu_name", "launch.gpu_name", "model of the GPUs, such as H100, for estimates", default_word="found out"
        ),
        Flag("--gpu_memory_gib", "launch.gpu_memory_gib", "memory of a GPU, in GiB", default_word="by --gpu_name"),
        Flag("--chain", "launch.chain", "jobs in a row; each continues where its predecessor's time was over"),
        Flag("--requeue", "launch.requeue", "put the job back into the queue as often as its time is over"),
    ),
    "container": (
        Flag("--container_runtime", "launch.container_runtime", "pyxis (Slurm), apptainer, none or auto"),
        Flag(
            "--container_image",
            "launch.container_image",
            ".sqsh, .sif, sandbox folder or registry name",
            "-i",
            "nvcr.io/nvidia/nemo:dev with pyxis",
        ),
        Flag("--container_mounts", "launch.container_mounts", "SOURCE[:TARGET[:ro]], further ones; may be repeated"),
        Flag("--nv", "launch.nv", "give an Apptainer container the host's NVIDIA driver", default_word="on GPU"),
        Flag("--env", "launch.environment", "NAME=VALUE for the ranks; may be repeated"),
    ),
    "output": (
        Flag("--experiment", "experiment", "name of the experiment and of its output folder", "-E"),
        Flag("--experiments_dir", "experiments_dir", "folder that holds the experiments"),
    ),
    "model": (
        Flag("--hf_model_id", "hf_model_id", "Hugging Face model id or local folder", required=True),
        Flag(
            "--nemo_model",
            "nemo_model",
            "weights to start from: a NeMo checkpoint or Hugging Face folder",
            "-n",
            "random weights",
        ),
    ),
    "data": (
        Flag(
            "--dataset_path",
            "data.dataset_path",
            "folder of .bin/.idx, a prefix, 'weight prefix ...', or a blend file",
            required=True,
        ),
        Flag("--sequence_length", "data.sequence_length", "tokens per sample"),
        Flag("--split", "data.split", "shares of training, validation and test, by documents"),
        Flag("--num_workers", "data.num_workers", "data loading processes per rank"),
        Flag("--shard_cache", "data.shard_cache", "folder for copies of shards behind URLs", default_word="one"),
        Flag("--reset_attention_mask", "data.reset_attention_mask", "attention and positions within documents only"),
        Flag("--eod_mask_loss", "data.eod_mask_loss", "leave what follows a document's end out of the loss"),
        Flag("--allow_data_change", "data.allow_data_change", "continue with other data or another blend"),
    ),
    "batch and parallelism": (
        Flag(
            "--global_batch_size",
            "training.global_batch_size",
            "samples per step, a multiple of -m x data-parallel size",
            "-g",
        ),
        Flag("--micro_batch_size", "training.micro_batch_size", "samples per forward pass of one rank", "-m"),
        Flag(
            "--tensor_model_parallel_size",
            "parallel.tensor_model_parallel_size",
            "ranks that share each layer's matrices",
            "-T",
        ),
        Flag(
            "--pipeline_model_parallel_size",
            "parallel.pipeline_model_parallel_size",
            "ranks that share the layers",
            "-P",
        ),
        Flag(
            "--context_parallel_size",
            "parallel.context_parallel_size",
            "ranks that share each sequence",
            "-C",
        ),
    ),
    "training": (
        Flag("--max_steps", "training.max_steps", "optimizer steps", default_word="one epoch"),
        Flag("--save_interval", "training.save_interval", "steps between checkpoints"),
        Flag("--keep_last", "training.keep_last", "newest checkpoints to keep, 2 or more", default_word="all"),
        Flag("--keep_every", "training.keep_every", "keep multiples of this step for ever", default_word="none"),
        Flag(
            "--keep_optimizer_last",
            "training.keep_optimizer_last",
            "newest checkpoints with optimizer state, 2 or more",
            default_word="all",
        ),
        Flag("--async_save", "training.async_save", "auto, on or off: write checkpoints while training goes on"),
        Flag("--save_retries", "training.save_retries", "how often a failed save is tried again"),
        Flag("--max_missed_saves", "training.max_missed_saves", "failed saves in a row that don't end the run"),
        Flag("--save_timeout", "training.save_timeout", "time that writing one checkpoint may take"),
        Flag(
            "--val_interval", "training.val_interval", "steps between evaluations; the last step has one too; 0: none"
        ),
        Flag("--val_steps", "training.val_steps", "batches per evaluation"),
        Flag("--log_interval", "training.log_interval", "steps between records"),
        Flag("--precision", "training.precision", "auto, bf16 or fp32; auto: bf16 on GPU, fp32 on CPU"),
        Flag("--layer_spec", "training.layer_spec", "auto, te or torch: whose transformer layers"),
        Flag("--fused_kernels", "training.fused_kernels", "auto, off, or rotary,swiglu,cross_entropy,..."),
        Flag("--recompute", "training.recompute", "auto, none, selective or full: activations to compute again"),
        Flag(
            "--recompute_layers",
            "training.recompute_layers",
            "layers a stage of --recompute full",
            default_word="all",
        ),
        Flag("--time_limit", "training.time_limit", "[D-]HH:MM:SS; save and end before it", default_word="none"),
        Flag("--time_margin", "training.time_margin", "how long before --time_limit to begin to end"),
        Flag("--seed", "training.seed", "seed of weights, data order and dropout"),
        Flag("--allow_batch_change", "training.allow_batch_change", "continue with another --global_batch_size"),
        Flag("--reset_optimizer", "training.reset_optimizer", "continue without the optimizer's moments, once"),
        Flag("--on_bad_loss", "training.on_bad_loss", "stop or skip: steps with a NaN, infinite or spiking loss"),
        Flag("--max_loss_spike", "training.max_loss_spike", "bound, times the mean of 32 steps", default_word="none"),
        Flag(
            "--start_parity", "training.start_parity", "auto, off or require: the start's loss against Hugging Face's"
        ),
        Flag("--restart_limit", "training.restart_limit", "restarts in a row without a new step; 0: no limit"),
    ),
    "records": (
        Flag("--wandb_project", "tracking.wandb_project", "log to this W&B project too", default_word="none"),
        Flag("--mlflow", "tracking.mlflow", "log to MLflow too"),
    ),
    "optimizer": (
        Flag("--lr", "optimizer.lr", "highest learning rate"),
        Flag("--min_lr", "optimizer.min_lr", "learning rate after the decay", default_word="a tenth of --lr"),
        Flag("--lr_schedule", "optimizer.lr_schedule", "cosine, linear or constant after the warm-up"),
        Flag(
            "--lr_warmup_steps",
            "optimizer.lr_warmup_steps",
            "steps of linear warm-up",
            default_word="1%% of --lr_decay_steps, at most 2000",
        ),
        Flag(
            "--lr_decay_steps",
            "optimizer.lr_decay_steps",
            "step at which --min_lr is reached",
            default_word="--max_steps",
        ),
        Flag("--weight_decay", "optimizer.weight_decay", "AdamW weight decay"),
        Flag("--clip_grad", "optimizer.clip_grad", "largest gradient norm"),
    ),
}

FLAGS: tuple[Flag, ...] = tuple(flag for group in GROUPS.values() for flag in group)


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag of the table, and those that are no part of a run, to a parser.

    Flags that were not given are absent from the parsed namespace, so that YAML can tell them from the rest.
    """
    for title, flags in GROUPS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            add_flag(group, flag)
    # Defaults that would only be noise in the help text.
    parser.set_defaults(
        config_files=[], assignments=[], dry_run=False, plan=False, json=False, follow=False, hf_token=None
    )
    request = parser.add_argument_group("how it is asked for")
    request.add_argument(
        "--config",
        dest="config_files",
        action="append",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="YAML",
        help="file with any fields of a run; repeatable, later files win; flags and --set win over all files",
    )
    request.add_argument(
        "--set",
        dest="assignments",
        action="append",
        default=argparse.SUPPRESS,
        metavar="FIELD=VALUE",
        help="set any field by its dotted name, e.g. optimizer.adam_beta2=0.99; may be repeated",
    )
    request.add_argument(
        "--dry_run",
        action="store_true",
        default=argparse.SUPPRESS,
        help="check everything, write run.json, print the resolved run and the command or job script, start nothing",
    )
    request.add_argument(
        "--follow",
        action="store_true",
        default=argparse.SUPPRESS,
        help="show the log of a scheduled job until it ends, and end with its exit code",
    )
    request.add_argument(
        "--plan",
        action="store_true",
        default=argparse.SUPPRESS,
        help="print what a start would load, where it would go on, and what changed; start nothing",
    )
    request.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the --plan as JSON")
    request.add_argument(
        "--hf_token",
        metavar="TOKEN",
        default=argparse.SUPPRESS,
        help="hub token, never written anywhere; better given by the environment variable HF_TOKEN",
    )


def add_flag(group: argparse._ActionsContainer, flag: Flag, *, with_short: bool = True) -> None:
    """Add one flag to a parser or one of its groups."""
    field = FIELDS[flag.field]
    names = (flag.short, flag.name) if flag.short and with_short else (flag.name,)
    if field.type is bool:
        group.add_argument(*names, dest=flag.field, action="store_true", default=argparse.SUPPRESS, help=flag.help)
    elif field.type in (tuple, dict):
        group.add_argument(
            *names,
            dest=flag.field,
            action="append",
            default=argparse.SUPPRESS,
            metavar="TEXT" if field.type is tuple else "NAME=VALUE",
            help=flag.help,
        )
    else:
        default = "required" if flag.required else f"default: {flag.default_word or field.default}"
        group.add_argument(
            *names,
            dest=flag.field,
            type=field.type,
            default=argparse.SUPPRESS,
            metavar=field.type.__name__.upper(),
            help=f"{flag.help} ({default})",
        )


def given_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags of the table that were given: dotted field -> value. Raises RequestError for one without its '='."""
    given = {flag.field: vars(arguments)[flag.field] for flag in FLAGS if flag.field in vars(arguments)}
    return {name: _by_name(name, value) if FIELDS[name].type is dict else value for name, value in given.items()}


def _by_name(dotted: str, words: list[str]) -> dict[str, str]:
    wrong = [word for word in words if not word.partition("=")[0] or "=" not in word]
    if wrong:
        flag = next(flag.name for flag in FLAGS if flag.field == dotted)
        raise RequestError(f"{wrong[0]!r}", needed="NAME=VALUE", where=flag)
    return {name: value for name, _, value in (word.partition("=") for word in words)}
