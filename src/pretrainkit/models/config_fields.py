"""Fields of config.json that decoder-only families share: read, supported at some values only, or ignored.

Private fields (`_name_or_path`) and ids of special tokens (`eos_token_id`) are ignored by their form.
"""

from __future__ import annotations

from pretrainkit.models.family import ConfigFields, names

REQUIRED_FIELDS = names("""
    hidden_size intermediate_size max_position_embeddings num_attention_heads num_hidden_layers rms_norm_eps vocab_size
""")
_OPTIONAL_FIELDS = names("""
    head_dim initializer_range num_key_value_heads rope_parameters rope_scaling rope_theta tie_word_embeddings
""")
_METADATA = names("""
    architectures auto_map dtype is_llama_config model_type torch_dtype transformers.js_config transformers_version
    unsloth_fixed unsloth_version
""")
_GENERATION = names("""
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_scores prefix remove_invalid_values repetition_penalty return_dict_in_generate
    suppress_tokens temperature tokenizer_class top_k top_p typical_p
""")
_OTHER_TASKS = names("""
    cross_attention_hidden_size finetuning_task id2label label2id output_attentions output_hidden_states problem_type
    return_dict task_specific_params tf_legacy_loss tie_encoder_decoder torchscript use_bfloat16 use_cache
""")
_DROPOUT = names("attention_dropout hidden_dropout embd_pdrop resid_pdrop")

DECODER_FIELDS = ConfigFields(
    read=REQUIRED_FIELDS | _OPTIONAL_FIELDS,
    fixed={
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
    },
    ignored=_METADATA | _GENERATION | _OTHER_TASKS | _DROPOUT,
)
"""Fields of every family: `read_decoder` reads them, or they don't affect a forward pass without dropout."""

QWEN_FIELDS = ConfigFields(
    fixed={"use_sliding_window": (False, None)},
    ignored=names("sliding_window max_window_layers layer_types use_mrope"),  # no effect without use_sliding_window
)
"""Fields of Qwen2 and Qwen3 in addition to those of every decoder."""

QWEN_MOE_FIELDS = QWEN_FIELDS | ConfigFields(
    read=names("num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob router_aux_loss_coef"),
    fixed={"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},  # experts in every layer
    ignored=names("output_router_logits"),
)
"""Fields of Qwen's mixtures of experts in addition to those of every decoder."""
