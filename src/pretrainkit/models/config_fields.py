"""Fields of config.json that decoder-only families share: read, supported at some values only, or ignored."""

from __future__ import annotations

from typing import Any

from pretrainkit.models.family import ConfigFields

READ_FIELDS = frozenset(
    {
        "head_dim",
        "hidden_size",
        "initializer_range",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "tie_word_embeddings",
        "vocab_size",
    }
)
"""Fields that `read_decoder` turns into a ModelShape."""

REQUIRED_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)

FIXED_FIELDS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "quantization_config": (None,),
    "pretraining_tp": (1, None),
    "is_decoder": (None, True, False),
    "add_cross_attention": (None, False),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({},),
    "is_encoder_decoder": (False,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1.0, 1),
}
"""Fields that all families support at these values only."""

IGNORED_FIELDS = frozenset(
    {
        # Metadata
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "_commit_hash",
        "architectures",
        "auto_map",
        "dtype",
        "is_llama_config",
        "model_type",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        # Token ids and generation
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "pad_token_id",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "temperature",
        "tokenizer_class",
        "top_k",
        "top_p",
        "typical_p",
        "prefix",
        # Other tasks and outputs
        "cross_attention_hidden_size",
        "finetuning_task",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "task_specific_params",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "torchscript",
        "use_bfloat16",
        "use_cache",
        # Training only
        "attention_dropout",
        "hidden_dropout",
        "embd_pdrop",
        "resid_pdrop",
    }
)
"""Fields that don't affect a forward pass without dropout."""


QWEN_FIELDS = ConfigFields(
    fixed={"use_sliding_window": (False, None)},
    # Without use_sliding_window these have no effect.
    ignored=frozenset({"sliding_window", "max_window_layers", "layer_types", "use_mrope"}),
)
"""Fields of Qwen2 and Qwen3 in addition to those of every decoder."""

QWEN_MOE_READ = frozenset(
    {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "router_aux_loss_coef"}
)
QWEN_MOE_FIXED: dict[str, tuple[Any, ...]] = {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}
"""Experts in every layer."""
