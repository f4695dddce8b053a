"""The schema of a run: what a user can ask for (RunConfig) and what follows from it (ResolvedRun).

The sections of a request are declared in `training.py` and `launch.py`. Derived values (data-parallel size, steps of
one epoch) are not asked for: `resolve.py` computes them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from pretrainkit.config.launch import LaunchConfig
from pretrainkit.config.layer_features import LLAMA, LayerFeatures
from pretrainkit.config.option import option, options_of
from pretrainkit.config.rope_change import FORM, parse_rope_scaling
from pretrainkit.config.split import parse_split
from pretrainkit.config.training import (
    ROUTER_BIAS_UPDATE_RATE,
    DataConfig,
    OptimizerConfig,
    ParallelConfig,
    TrackingConfig,
    TrainingConfig,
)
from pretrainkit.errors import RequestError


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary position embeddings, in Hugging Face's terms; a kind ignores the fields of the others."""

    factor: float = 8.0
    """How many times the context grows."""
    low_freq_factor: float = 1.0
    """Of llama3, as the next."""
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    """Context length before the scaling, tokens."""
    kind: str = "llama3"
    """Its rope_type: llama3, linear, yarn, dynamic, which changes nothing within the context length, or longrope."""
    beta_fast: float = 32.0
    """Of yarn, as the next and `truncate`."""
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Of yarn and longrope: factor of rotated queries and of rotated keys."""
    truncate: bool = True
    """Whether frequencies are blended between whole numbers of a dimension."""
    short_factor: tuple[float, ...] = ()
    """Of longrope: by what each frequency is divided in sequences of up to original_max_position_embeddings tokens."""
    long_factor: tuple[float, ...] = ()
    """The same in longer ones."""


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
    """Of queries and keys, and without latent attention of values."""
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
    """Of the expert that every token uses; several are one of their joint size. 0 for none."""
    norm_topk_prob: bool = True
    """Router weights of the chosen experts add up to 1."""
    router_aux_loss_coef: float = 0.0
    """Weight of the load balancing loss."""
    initializer_range: float = 0.02
    features: LayerFeatures = field(default_factory=LayerFeatures)
    """What its layers have beyond Llama's."""

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers with experts, numbered from 0."""
        layers = range(self.num_layers if self.num_experts else 0)
        return tuple(layer for layer in layers if layer not in self.features.dense_layers)

    @property
    def global_layers(self) -> tuple[int, ...]:
        """The layers that aren't local."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.features.local_layers)

    @property
    def has_dense_layers(self) -> bool:
        """Whether any layer has no experts."""
        return len(self.expert_layers) < self.num_layers

    @property
    def needs_our_layers(self) -> bool:
        """Whether a model is computed by this project's layers alone: features, and scalings of rotary embeddings for
        which NeMo has no class.
        """
        return self.features != LLAMA or (self.rope_scaling is not None and self.rope_scaling.kind != "llama3")


def check_folder_name(name: str) -> None:
    """Raise RequestError for an --experiment that can't be the name of a folder."""
    if not name or name.startswith(".") or "/" in name or not name.isprintable():
        needed = "a folder name: not empty, no '/', no leading '.'"
        raise RequestError(f"{name!r}", needed=needed, where="--experiment")


@dataclass(frozen=True)
class RunConfig:
    """Everything a user can ask of `pretrain.py`."""

    experiment: str = option(
        "llama31_pretraining", "name of the experiment and of its output folder", short="-E", parse=check_folder_name
    )
    experiments_dir: str = option("experiments", "parent folder of the experiments")
    hf_model_id: str = option(
        "", "Hugging Face model id or local folder: the architecture and the tokenizer", required=True
    )
    nemo_model: str | None = option(
        None,
        "pretrained weights to start from: a NeMo checkpoint or a Hugging Face folder",
        short="-n",
        unset="random weights",
    )
    branch_from: str | None = option(
        None,
        "EXPERIMENT or EXPERIMENT:STEP: the new experiment starts from that one's newest checkpoint, or that of the "
        "step, with optimizer state and data position",
    )
    rope_theta: float | None = option(
        None, "another rotary base than config.json's, to extend the context", unset="config.json's", range="> 0"
    )
    rope_scaling: str | None = option(
        None,
        "another rotary scaling than config.json's, to extend the context, such as 'yarn factor=4'; none: without",
        unset="config.json's",
        form=FORM,
        parse=parse_rope_scaling,
    )
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)


OPTIONS = options_of(RunConfig)
"""Every option of a run by its dotted name ('training.max_steps')."""
SECTIONS = tuple(dict.fromkeys(name.rpartition(".")[0] for name in OPTIONS if "." in name))
"""The schema's nested parts: data, parallel, ..."""


@dataclass(frozen=True)
class BlendChange:
    """Weights that a blend has from a step on."""

    step: int
    """Optimizer steps done before."""
    weights: tuple[float, ...]
    """One per prefix, on any scale; 0: nothing is drawn from it."""


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
    """Changes when the content of the dataset does, not its place (`pretrainkit.data.dataset`): a hash of its records,
    and after `+` one of samples of its tokens, which older versions lack. Compared by `files.same_fingerprint`."""
    row_length: int | None = None
    """Tokens of a row, where a part of the dataset is a set packed by bestfit, whose rows are the samples."""
    labels: tuple[str, ...] = ()
    """Labels of its documents, such as languages or inputs, by which the loss is shown; empty if there is only one."""
    label_bytes_per_token: dict[str, float] = field(default_factory=dict)
    """Bytes of text that a token of each label stands for, by the manifests, and under "" of all without labels; 0
    where manifests don't say it."""
    part_names: tuple[str, ...] = ()
    """One per prefix: the part of the blend it belongs to."""
    schedule: tuple[BlendChange, ...] = ()
    """By which the weights of training change; those above hold until its first change, and for validation."""

    def bytes_per_token(self, label: str) -> float:
        """Bytes of text that a token of a label stands for; 0 where that isn't known."""
        return self.label_bytes_per_token.get(label, self.label_bytes_per_token.get("", 0.0))


@dataclass(frozen=True)
class ValidationSet:
    """A dataset of --valid_path, all of whose documents are held out."""

    name: str
    dataset: DatasetFacts
    num_samples: int
    """Samples of an evaluation: those of --val_steps batches, or all there are, each once."""


@dataclass(frozen=True)
class Fp8:
    """How the layers' matrix products are computed in FP8 (`pretrainkit.megatron.fp8`)."""

    recipe: str = "rowwise"
    """rowwise, tensorwise or rowwise_wgrad_bf16."""
    first_last_bf16: int = 0
    """Layers at each end of the model that stay in bf16."""


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
    """Of the whole model, all experts included."""
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
    active_parameters: int = 0
    """Those that a token meets; 0: not recorded."""
    exchange_gib: float = 0.0
    """What a GPU sends to the experts of others, and back, in a step."""


@dataclass(frozen=True)
class Kernels:
    """Which implementation each part of a layer uses, the same on every rank (`pretrainkit.megatron.kernels`)."""

    layer_spec: str
    """te (Transformer Engine's layers) or torch (this project's)."""
    norm: str
    rotary: str
    swiglu: str
    cross_entropy: str
    weight_gradient: str
    tp_comm_overlap: str
    cuda_graphs: str

    def __str__(self) -> str:
        parts = dataclasses.asdict(self)
        return f"{parts.pop('layer_spec')} layers; {', '.join(f'{part} {choice}' for part, choice in parts.items())}"

    def describe(self, accelerator: str) -> str:
        """The choice in words."""
        if accelerator == "cpu":
            return "on the CPU: plain torch"
        layers = "Transformer Engine's layers" if self.layer_spec == "te" else "torch's layers"
        parts = {name: choice for name, choice in dataclasses.asdict(self).items() if name != "layer_spec"}
        fused = [name for name, choice in parts.items() if choice not in ("torch", "te")]
        return f"{layers}, {'fused: ' + ', '.join(fused) if fused else 'nothing fused'}"


@dataclass(frozen=True)
class InitialWeights:
    """The weights that a run starts from (`pretrainkit.run.initial_weights`)."""

    source: str
    """Absolute path that --nemo_model names: a NeMo checkpoint or a Hugging Face folder."""
    checkpoint: str
    """NeMo checkpoint that is loaded: the source itself, or its conversion, which the first start makes."""
    fingerprint: str | None
    """Hash that identifies the weights at any path, taken when they were located; None where they have none."""
    hf_weights: str | None = None
    """Hugging Face folder with the same weights, for the initial loss check; None where it isn't known."""

    @property
    def needs_conversion(self) -> bool:
        """Whether the source is a Hugging Face folder."""
        return self.source != self.checkpoint


@dataclass(frozen=True)
class BranchPoint:
    """The checkpoint of another experiment that a run starts from (`pretrainkit.run.branch`)."""

    experiment: str
    """Absolute folder of that experiment, where it was when the branch started."""
    step: int
    """Optimizer steps done."""


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
    initial_weights: InitialWeights | None
    """Weights that the run starts from; None: random weights."""
    accelerator: str
    """cpu or gpu."""
    precision: str
    """bf16 or fp32: of weights and activations, which bf16 has with --precision fp8, too."""
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
    kernels: Kernels | None = None
    """None until the machine that trains chooses them: of a job or a container that is its first node."""
    recompute: Recompute = field(default_factory=Recompute)
    """With --recompute auto it is chosen with the kernels, and only expected before."""
    gpu_name: str | None = None
    gpu_memory_gib: float | None = None
    """Of each GPU; None where it isn't known."""
    estimates: Estimates | None = None
    """None on CPU."""
    branch: BranchPoint | None = None
    """Where the run has branched off another experiment; None: it started from its own first step."""
    lr_cooldown_steps: int = 0
    """Steps of the decay that ends the schedules wsd and power, at lr_decay_steps."""
    start_mode: str | None = None
    """random, weights or continue: how the newest start began (`pretrainkit.run.resume_plan`)."""
    reset_attention_mask: bool = False
    """Whether attention stays within documents: as asked, or because the dataset has rows of whole documents."""
    validation_sets: tuple[ValidationSet, ...] = ()

    @property
    def router_aux_loss_coef(self) -> float:
        """Coefficient of the loss that balances the load of experts; 0: none."""
        asked = self.config.training.router_aux_loss_coef
        return self.model.router_aux_loss_coef if asked is None else asked

    @property
    def router_bias_update_rate(self) -> float:
        """By which the biases of experts move each step; 0: they stay, or there are none."""
        asked, routing = self.config.training.router_bias_update_rate, self.model.features.routing
        if routing is None or not routing.expert_bias:
            return 0.0
        return ROUTER_BIAS_UPDATE_RATE if asked is None else asked

    @property
    def fp8(self) -> Fp8 | None:
        """The layers' products in FP8, if they are."""
        training = self.config.training
        return Fp8(training.fp8_recipe, training.fp8_first_last_bf16) if training.precision == "fp8" else None

    @property
    def precision_text(self) -> str:
        """The precision as people read it."""
        return f"{self.precision} with FP8 products ({self.fp8.recipe})" if self.fp8 else self.precision

    @property
    def masks_losses(self) -> bool:
        """Whether the losses of some tokens don't count, so that microbatches may have different numbers of them."""
        return self.reset_attention_mask or self.config.data.eod_mask_loss

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one data-parallel rank in an optimizer step."""
        training = self.config.training
        return training.global_batch_size // (training.micro_batch_size * self.data_parallel_size)

    @property
    def datasets(self) -> tuple[DatasetFacts, ...]:
        """The dataset, and those of the validation sets."""
        return (self.dataset, *(each.dataset for each in self.validation_sets))

    @property
    def has_validation_split(self) -> bool:
        """Whether --split holds out documents of the dataset."""
        return parse_split(self.config.data.split)[1] > 0

    @property
    def evaluation_steps(self) -> int:
        """Batches of an evaluation: --val_steps of the validation split, and the samples of the validation sets."""
        training, more = self.config.training, sum(each.num_samples for each in self.validation_sets)
        return training.val_steps * self.has_validation_split + -(-more // training.global_batch_size)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step."""
        return self.config.training.global_batch_size * self.config.data.sequence_length
