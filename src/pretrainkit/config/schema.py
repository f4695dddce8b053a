"""The one schema of a run: frozen dataclasses that YAML, flags and run.json all map to.

A field's unit stands in the line under it. Derived values (data-parallel size, steps of one epoch)
are not asked for: `resolve.py` computes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pretrainkit.config.launch import LaunchConfig


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency-dependent scaling of rotary position embeddings (Hugging Face: rope_type 'llama3')."""

    factor: float = 8.0
    """How many times the context grows."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    """Context length before the scaling, tokens."""


@dataclass(frozen=True)
class ModelShape:
    """The architecture of a decoder-only transformer, as read from a Hugging Face config.json."""

    family: str
    """Name of the model family: the module in `pretrainkit.models` that read the config."""
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads (grouped-query attention); equal to num_attention_heads without grouping."""
    head_dim: int
    vocab_size: int
    """Rows of the embedding in the Hugging Face checkpoint, before Megatron's padding."""
    max_position_embeddings: int
    """Longest sequence the model was made for, tokens."""
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    qk_norm: bool = False
    """RMSNorm on each query and key head (Qwen3)."""
    num_experts: int = 0
    """Experts per layer; 0 for a dense model."""
    experts_per_token: int = 0
    expert_ffn_hidden_size: int = 0
    shared_expert_ffn_hidden_size: int = 0
    """Of the expert that every token uses, with a sigmoid gate (Qwen2-MoE); 0 for none."""
    norm_topk_prob: bool = True
    """Router weights of the chosen experts add up to 1."""
    router_aux_loss_coef: float = 0.0
    """Weight of the load balancing loss."""
    initializer_range: float = 0.02


@dataclass(frozen=True)
class DataConfig:
    """What to train on."""

    dataset_path: str = ""
    """A .bin/.idx prefix, a folder of them, several with weights ('weight prefix weight prefix ...'), or a file
    that `inspect_data.py blend` wrote."""
    sequence_length: int = 8192
    """Tokens per sample."""
    split: str = "969,30,1"
    """Shares of training, validation and test, by documents; any positive scale."""
    num_workers: int = 2
    """DataLoader worker processes per rank."""
    shard_cache: str | None = None
    """Folder for copies of the shards that URLs name, best on a node's own disk; unset: .shard_cache in
    experiments_dir."""
    reset_attention_mask: bool = False
    """Attention and positions begin anew with every document of a sample, and the loss leaves out the step from one
    document to the next. Sets packed by bestfit are always read so."""
    eod_mask_loss: bool = False
    """Leave what follows an EOD token out of the loss."""
    allow_data_change: bool = False
    """Let a run that has checkpoints go on with other data or another blend, from the same number of samples."""


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread over ranks; what is left over is data parallel."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool | None = None
    """Split activations along the sequence between tensor-parallel ranks; unset: on when TP > 1."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = 3e-4
    """Highest learning rate."""
    min_lr: float | None = None
    """Learning rate at the end of the decay; unset: a tenth of lr."""
    lr_schedule: str = "cosine"
    """cosine, linear or constant after the warm-up."""
    lr_warmup_steps: int | None = None
    """Steps of linear warm-up; unset: 1% of lr_decay_steps, at most 2000."""
    lr_decay_steps: int | None = None
    """Step at which min_lr is reached; unset: max_steps."""
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    """Largest global gradient norm."""
    distributed: bool = True
    """Shard optimizer state over data-parallel ranks."""


@dataclass(frozen=True)
class TrainingConfig:
    """The course of a run."""

    max_steps: int | None = None
    """Optimizer steps in all; unset: one epoch of the dataset."""
    global_batch_size: int = 2048
    """Samples per optimizer step."""
    micro_batch_size: int = 1
    """Samples per forward pass of one data-parallel rank."""
    save_interval: int = 500
    """Steps between checkpoints; the last step is always saved."""
    keep_last: int | None = None
    """Newest checkpoints to keep, at least 2; unset: all."""
    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this are kept for ever, whatever keep_last says."""
    keep_optimizer_last: int | None = None
    """Newest checkpoints that keep their optimizer state, at least 2; older ones that are kept lose it; unset: all."""
    async_save: str = "auto"
    """on: checkpoints are written while training goes on; off: training waits; auto: on for GPU, off for CPU."""
    save_retries: int = 3
    """How often a failed save is tried again, after 1, 4, 16, ... seconds; a full disk is not tried again."""
    max_missed_saves: int = 0
    """Failed saves in a row, retries included, after which the run goes on; one more ends it. The last one counts."""
    save_timeout: str = "01:00:00"
    """Time that writing one checkpoint may take, as [D-]HH:MM:SS; a save that takes longer has failed."""
    time_limit: str | None = None
    """Time this attempt may take, as [D-]HH:MM:SS; before it is over the run saves and ends with exit code 85."""
    time_margin: str = "00:05:00"
    """How long before time_limit the run begins to end: enough for one step, one evaluation and one save."""
    val_interval: int = 500
    """Steps between evaluations on held-out data; 0: none."""
    val_steps: int = 16
    """Batches per evaluation."""
    log_interval: int = 1
    """Steps between records."""
    allow_batch_change: bool = False
    """Let a run that has checkpoints go on with another global_batch_size; steps and samples count on."""
    reset_optimizer: bool = False
    """Continue with weights, step and data position, but without the optimizer's moments; done once."""
    on_bad_loss: str = "stop"
    """stop or skip: what to do in a step whose loss or gradient is NaN or infinite, or whose loss is a spike; a
    skipped step updates nothing."""
    max_loss_spike: float | None = None
    """Largest loss of a step, as a multiple of the mean of the last 32 steps; unset: no bound."""
    start_parity: str = "auto"
    """auto, off or require: before the first step from trained weights, compare the loss with that of the Hugging Face
    model they were made from. auto: where that is at hand and fits into memory."""
    restart_limit: int = 3
    """Restarts in a row without a new step, after which a start is refused; 0: no limit."""
    precision: str = "auto"
    """bf16 (weights and gradients in bf16 with fp32 masters) or fp32; auto: bf16 on GPU, fp32 on CPU."""
    recompute: str = "auto"
    """Activations that the backward pass computes again instead of keeping them: none, selective (the MLPs), full
    (layers), or auto: the cheapest that fits into the GPU's memory by the estimate, none where that isn't known."""
    recompute_layers: int | None = None
    """Layers of each pipeline stage that recompute full is about; unset: all."""
    layer_spec: str = "auto"
    """te (Transformer Engine's layers) or torch (plain torch and Triton); auto: the faster of what is installed."""
    fused_kernels: str = "auto"
    """auto (all that the installed packages allow), off, or a list with commas of rotary, swiglu,
    cross_entropy and weight_gradient; on GPU only."""
    seed: int = 1234


@dataclass(frozen=True)
class TrackingConfig:
    """Where a run's records go besides metrics.jsonl and TensorBoard."""

    wandb_project: str | None = None
    """Weights & Biases project; unset: none. WANDB_MODE=offline keeps it on disk."""
    mlflow: bool = False
    """Log to MLflow, at MLFLOW_TRACKING_URI or in the experiment's folder."""


@dataclass(frozen=True)
class RunConfig:
    """Everything a user can ask of `pretrain.py`."""

    experiment: str = "llama31_pretraining"
    """Names the output folder below experiments_dir."""
    experiments_dir: str = "experiments"
    hf_model_id: str = ""
    """Hugging Face model id or local folder: architecture and tokenizer."""
    nemo_model: str | None = None
    """Pretrained weights to start from: a NeMo checkpoint or a Hugging Face folder; unset: random weights."""
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)


@dataclass(frozen=True)
class DatasetFacts:
    """What the files of a dataset say, read before a run starts."""

    prefixes: tuple[str, ...]
    """Absolute .bin/.idx prefixes."""
    weights: tuple[float, ...]
    """One per prefix, on any scale; empty when the dataset is one prefix."""
    num_tokens: int
    num_documents: int
    max_token_id: int | None
    """Largest id that the tokenizer which made the data can give; None without a manifest."""
    data_hash: str
    """Changes when the content of the dataset does, not its place (`pretrainkit.data.dataset`)."""
    row_length: int | None = None
    """Tokens of a row, where a part of the dataset is a set packed by bestfit, whose rows are the samples."""


@dataclass(frozen=True)
class Recompute:
    """Activations that the backward pass computes again, in Megatron's terms."""

    granularity: str = "none"
    """none, selective (the MLP of every layer) or full (whole layers)."""
    num_layers: int = 0
    """Layers of each pipeline stage, from its first, with granularity full."""


@dataclass(frozen=True)
class Estimates:
    """What a run will take, computed before it starts; `pretrainkit.run.estimates` says from what."""

    parameters: int
    """Of the whole model."""
    weights_gib: float
    """Memory of the fullest GPU in GiB, by part: weights, gradients and optimizer state."""
    activations_gib: float
    logits_gib: float
    memory_gib: float
    """All of them: what torch will report as its peak."""
    gpu_memory_gib: float | None
    """What the GPU has; None where it isn't known."""
    mfu: float | None
    """Model FLOPs use that is assumed; None where there is no figure for such a run."""
    step_time_s: float | None
    gpu_hours: float | None
    """Of all steps of the run."""


@dataclass(frozen=True)
class ResolvedRun:
    """The whole run, as written to run.json and read by every rank: the request and all that follows from it."""

    config: RunConfig
    model: ModelShape
    dataset: DatasetFacts
    experiment_dir: str
    """Absolute folder of this experiment."""
    hf_folder: str
    """Absolute folder with config.json and the tokenizer's files."""
    initial_checkpoint: str | None
    """NeMo checkpoint whose weights the run starts from; None: random weights."""
    accelerator: str
    """cpu or gpu."""
    precision: str
    """bf16 or fp32."""
    world_size: int
    data_parallel_size: int
    sequence_parallel: bool
    max_steps: int
    lr_warmup_steps: int
    lr_decay_steps: int
    min_lr: float
    samples_per_epoch: int
    """Training samples in one pass over the dataset."""
    padded_vocab_size: int
    """Rows of the embedding in Megatron, a multiple of 128 and of TP."""
    async_save: bool = False
    recompute: Recompute = field(default_factory=Recompute)
    gpu_name: str | None = None
    gpu_memory_gib: float | None = None
    """Of each GPU; None where it isn't known."""
    estimates: Estimates | None = None
    """None on CPU."""
    start_mode: str | None = None
    """random, weights or continue: how the newest start began (`pretrainkit.run.resume_plan`)."""
    reset_attention_mask: bool = False
    """Whether attention stays within documents: as asked, or because the dataset has rows of whole documents."""
    hf_weights: str | None = None
    """Hugging Face folder that initial_checkpoint was made from; None: not known, or random weights."""
