"""The options of what is trained and how: the sections data, parallel, optimizer, training and tracking of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pretrainkit.config.batch_size import parse_rampup
from pretrainkit.config.blend_schedule import parse_blend_schedule
from pretrainkit.config.option import option
from pretrainkit.config.split import parse_split
from pretrainkit.errors import RequestError
from pretrainkit.units import parse_duration

FUSED_KERNELS = ("norm", "rotary", "swiglu", "cross_entropy", "weight_gradient", "tp_comm_overlap", "cuda_graphs")
"""The kernels that --fused_kernels may name."""
_KERNELS_FORM = f"auto, off, or a comma-separated list of {', '.join(FUSED_KERNELS)}"
RENAMED_KERNELS = {"exchange": "tp_comm_overlap", "launches": "cuda_graphs"}
"""Old names, which --fused_kernels accepts with a warning."""
ROUTER_BIAS_UPDATE_RATE = 0.001
"""DeepSeek-V3's (arXiv:2412.19437), for its first 14.3 T tokens."""
MAX_SEED = 2**32 - 1
"""Largest seed that numpy's RandomState, which orders Megatron's samples, takes."""


def duration(default: str | None, help: str) -> Any:
    """An option that is a time as schedulers write it."""
    return option(default, help, form="[D-]HH:MM:SS", parse=parse_duration)


def cooldown_steps(cooldown: str, schedule_steps: int) -> int:
    """The steps that a value of --lr_cooldown means in a schedule of `schedule_steps`. Raises ValueError for others."""
    number = float(cooldown.removesuffix("%"))
    is_share = cooldown.endswith("%")
    if not (0 <= number <= 100 if is_share else number >= 0 and number.is_integer()):
        raise ValueError(f"{cooldown!r}")
    return round(schedule_steps * number / 100) if is_share else int(number)


def kernel_names(fused_kernels: str) -> tuple[str, ...]:
    """The kernels that a value of --fused_kernels names, by their present names. Raises RequestError for others."""
    given = () if fused_kernels in ("auto", "off") else fused_kernels.split(",")
    names = tuple(RENAMED_KERNELS.get(name, name) for name in given)
    if unknown := [name for name in names if name not in FUSED_KERNELS]:
        raise RequestError(f"unknown kernel {unknown[0]!r}", needed=_KERNELS_FORM, where="--fused_kernels")
    return names


@dataclass(frozen=True)
class DataConfig:
    """What to train on."""

    dataset_path: str = option(
        "",
        "a .bin/.idx prefix or a folder of them, several with weights ('weight prefix weight prefix ...'), a blend "
        "file of inspect_data.py, token shards or a packed dataset",
        required=True,
    )
    sequence_length: int = option(8192, "tokens per sample", range="> 0")
    split: str = option(
        "969,30,1", "relative sizes of the training, validation and test splits, by documents", parse=parse_split
    )
    blend_schedule: str | None = option(
        None,
        "weights of the blend by step: '2000:0.5,0.5 4000:0,1' has those from step 2000 on and others from 4000 on, in "
        "the order of --dataset_path; each part goes on where it is",
        form="'STEP:WEIGHT,WEIGHT,... STEP:...', steps in ascending order, weights >= 0",
        parse=parse_blend_schedule,
    )
    valid_path: dict[str, str] = option(
        {},
        "more validation data, as NAME=PATH: a .bin/.idx prefix, a folder of them, token shards or a packed dataset; "
        "its loss is recorded under that name",
        nargs="+",
    )
    num_workers: int = option(2, "DataLoader worker processes per rank", range=">= 0")
    shard_cache: str | None = option(
        None, "node-local folder for copies of shards from URLs", unset=".shard_cache in --experiments_dir"
    )
    reset_attention_mask: bool = option(
        False, "reset attention mask, position ids and loss at document boundaries; always on for bestfit-packed data"
    )
    eod_mask_loss: bool = option(False, "mask the loss of the token that follows an EOD token")
    allow_data_change: bool = option(
        False, "continue with another dataset, blend or --blend_schedule, from the same sample count"
    )


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is split over ranks; the remaining factor is data parallel."""

    tensor_model_parallel_size: int = option(1, "TP: ranks that share each layer's matrices", short="-T", range="> 0")
    pipeline_model_parallel_size: int = option(1, "PP: pipeline stages that share the layers", short="-P", range="> 0")
    context_parallel_size: int = option(1, "CP: ranks that share each sequence", short="-C", range="> 0")
    sequence_parallel: bool | None = option(
        None, "split activations along the sequence between TP ranks", flag=None, unset="on with TP > 1"
    )
    expert_model_parallel_size: int = option(1, "EP: ranks that share each layer's experts", range="> 0")
    expert_tensor_parallel_size: int | None = option(
        None, "ETP: ranks that share each expert's matrices", unset="TP without, 1 with EP", range="> 0"
    )

    @property
    def expert_tensor_parallel(self) -> int:
        """ETP, as asked or by default."""
        default = self.tensor_model_parallel_size if self.expert_model_parallel_size == 1 else 1
        return self.expert_tensor_parallel_size or default

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model together: TP x PP x CP."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = option(3e-4, "peak learning rate", range="> 0")
    min_lr: float | None = option(None, "learning rate at the end of the decay", unset="a tenth of --lr", range=">= 0")
    lr_schedule: str = option(
        "cosine",
        "schedule after the warmup; wsd: stable, then the decay of --lr_cooldown; power: a power law, then the same",
        choices=("cosine", "linear", "constant", "wsd", "power"),
    )
    lr_warmup_steps: int | None = option(
        None, "steps of linear warmup", unset="1% of the schedule, at most 2000", range=">= 0"
    )
    lr_decay_steps: int | None = option(
        None, "step at which the learning rate reaches --min_lr", unset="--max_steps", range="> 0"
    )
    lr_cooldown: str = option(
        "10%",
        "length of the decay of wsd and power, which ends at --lr_decay_steps: steps, or a share such as 10%",
        form="steps, or a share of the schedule's steps such as 10%",
        parse=lambda text: cooldown_steps(text, 1),
    )
    lr_cooldown_style: str = option(
        "1-sqrt", "shape of the decay of wsd and power", choices=("1-sqrt", "linear", "cosine")
    )
    lr_power_a: float | None = option(
        None,
        "a of the power schedule, min(lr, batch size x a x tokens^b); the paper's is 4.6",
        unset="as the law has --lr at the end of the warmup",
        range="> 0",
    )
    lr_power_b: float = option(-0.51, "b of the power schedule", range="< 0")
    lr_rewarm_step: int | None = option(
        None,
        "step at which the schedule starts again, to continue a finished run: warmup from --min_lr to --lr, then decay",
        range="> 0",
    )
    weight_decay: float = option(0.1, "AdamW weight decay", range=">= 0")
    adam_beta1: float = option(0.9, "AdamW beta1", flag=None, range=">= 0 and < 1")
    adam_beta2: float = option(0.95, "AdamW beta2", flag=None, range=">= 0 and < 1")
    adam_eps: float = option(1e-8, "AdamW epsilon", flag=None, range="> 0")
    clip_grad: float = option(1.0, "maximum global gradient norm; 0: gradients are not clipped", range=">= 0")
    distributed: bool = option(True, "shard the optimizer state over data-parallel ranks", flag=None)


@dataclass(frozen=True)
class TrainingConfig:
    """Batch, length, checkpoints, evaluation, precision and kernels of a run."""

    max_steps: int | None = option(None, "optimizer steps in total", unset="one epoch of the dataset", range="> 0")
    global_batch_size: int = option(
        2048, "samples per step, a multiple of micro batch size x data-parallel size", short="-g", range="> 0"
    )
    rampup_batch_size: str | None = option(
        None,
        "batch size warmup, as 'START INCREMENT SAMPLES': from START by INCREMENT to --global_batch_size, in equal "
        "shares of SAMPLES",
        form="'START INCREMENT SAMPLES', integers > 0",
        parse=parse_rampup,
    )
    micro_batch_size: int = option(1, "samples per forward pass of a data-parallel rank", short="-m", range="> 0")
    save_interval: int = option(500, "save a checkpoint every N steps; the last step is always saved", range="> 0")
    keep_last: int | None = option(None, "keep the newest N checkpoints, at least 2", unset="all", range="> 0")
    keep_every: int | None = option(None, "keep every checkpoint at a multiple of N steps permanently", range="> 0")
    keep_optimizer_last: int | None = option(
        None, "keep the optimizer state of the newest N checkpoints only, at least 2", unset="all", range="> 0"
    )
    async_save: str = option(
        "auto", "save in the background while training; auto: on for GPU, off for CPU", choices=("auto", "on", "off")
    )
    save_retries: int = option(3, "retries of a failed save; a full disk is not retried", range=">= 0")
    max_missed_saves: int = option(
        0, "consecutive failed checkpoints that are tolerated; the last step's must succeed", range=">= 0"
    )
    save_timeout: str = duration("01:00:00", "time limit for writing one checkpoint")
    hang_timeout: str = duration(
        "00:30:00", "exit with code 1 when no step ends for so long; --chain and --requeue start the run again"
    )
    time_limit: str | None = duration(None, "time limit of this attempt: save before it and exit with code 85")
    time_margin: str = duration("00:05:00", "time reserved before --time_limit for a step, an evaluation and a save")
    val_interval: int = option(500, "evaluate every N steps and at the last step; 0: never", range=">= 0")
    val_steps: int = option(16, "batches per evaluation", range="> 0")
    eval_tasks: tuple[str, ...] = option(
        (), "tasks of lm-evaluation-harness, by name or YAML file, on which saved checkpoints are evaluated"
    )
    eval_saves: int = option(1, "evaluate the checkpoint of every N-th save interval, and the last one", range="> 0")
    eval_num_fewshot: int | None = option(
        None, "examples in front of each question of --eval_tasks", unset="the task's", range=">= 0"
    )
    eval_limit: int | None = option(None, "first documents of each task of --eval_tasks", unset="all", range="> 0")
    eval_batch_size: int = option(8, "sequences at a time of --eval_tasks", range="> 0")
    log_interval: int | None = option(
        None,
        "record and log every N steps; auto: all are recorded, and logged every 5% of the steps or 30 s",
        unset="auto",
        range="> 0",
    )
    allow_batch_change: bool = option(False, "continue with another --global_batch_size; samples count on")
    reset_optimizer: bool = option(False, "continue without the optimizer's moments; done once")
    on_bad_loss: str = option(
        "stop",
        "at a non-finite loss or gradient or a loss spike: stop; skip the update; or roll back to the last checkpoint "
        "and leave the step's samples out",
        choices=("stop", "skip", "rollback"),
    )
    max_rollbacks: int = option(5, "rollbacks of the whole run after which a bad loss stops it", range=">= 0")
    router_aux_loss_coef: float | None = option(
        None, "coefficient of the loss that balances the load of experts", unset="the model's own", range=">= 0"
    )
    router_z_loss_coef: float = option(
        0.0, "coefficient of the loss that keeps the routers' logits small (z loss)", range=">= 0"
    )
    router_bias_update_rate: float | None = option(
        None,
        "step by which biases of experts move towards even loads (balancing without a loss); 0: they stay",
        unset=f"{ROUTER_BIAS_UPDATE_RATE} where the model has them",
        range=">= 0",
    )
    max_loss_spike: float | None = option(
        None, "largest loss of a step, as a multiple of the mean of the last 32", unset="no limit", range="> 1"
    )
    start_parity: str = option(
        "auto",
        "compare the initial loss with the HF model; auto: if it is available locally and fits into memory",
        choices=("auto", "off", "require"),
    )
    restart_limit: int = option(
        3, "refuse to start after this many consecutive restarts without a new step; 0: no limit", range=">= 0"
    )
    precision: str = option(
        "auto",
        "auto: bf16 with fp32 master weights on GPU, fp32 on CPU; fp8: bf16 with the layers' matrix products in FP8",
        choices=("auto", "bf16", "fp32", "fp8"),
    )
    fp8_recipe: str = option(
        "rowwise",
        "scales of --precision fp8: one a token (rowwise) or a tensor; rowwise_wgrad_bf16: weight gradients in bf16",
        choices=("rowwise", "tensorwise", "rowwise_wgrad_bf16"),
    )
    fp8_first_last_bf16: int = option(0, "layers at each end of the model that stay in bf16", range=">= 0")
    fp8_check_interval: int = option(
        100, "compare FP8's loss with bf16's every N steps, and stop where they differ too much; 0: never", range=">= 0"
    )
    fp8_emulation: bool = option(
        False, "compute FP8 products in fp32 where the device has none: to try it, much slower", flag=None
    )
    recompute: str = option(
        "auto",
        "activation recomputation: selective (MLPs) or full (layers); auto: as little as GPU memory allows by estimate",
        choices=("auto", "none", "selective", "full"),
    )
    recompute_layers: int | None = option(
        None, "layers per pipeline stage to recompute with --recompute full", unset="all", range="> 0"
    )
    layer_spec: str = option(
        "auto",
        "layers of Transformer Engine, or of plain torch and Triton; auto: the faster ones that are installed",
        choices=("auto", "te", "torch"),
    )
    fused_kernels: str = option("auto", f"{_KERNELS_FORM}; GPU only", parse=kernel_names)
    seed: int = option(1234, "random seed of weights, data order and dropout", range=f">= 0 and <= {MAX_SEED}")


@dataclass(frozen=True)
class TrackingConfig:
    """Where metrics are logged besides metrics.jsonl and TensorBoard."""

    wandb_project: str | None = option(None, "Weights & Biases project to log to (WANDB_MODE=offline: on disk only)")
    mlflow: bool = option(False, "log to MLflow, at MLFLOW_TRACKING_URI or in the experiment's folder")
