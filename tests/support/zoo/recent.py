"""Families that are new in transformers, most of them of 2026. Data only."""

from __future__ import annotations

from typing import Any

from support.zoo.decoders import GROUPED, LLAMA, MOE, decoder
from support.zoo.family import HEADS, HIDDEN, LAYERS, NEURONS, VOCABULARY, Family, named
from support.zoo.unlisted_decoders import DEEPSEEK3, EXPERTS, GROUPS, HEAD_DIM, IDS, LINEAR, MIXED

__all__ = ["RECENT"]

SHARED = {**EXPERTS, "shared_expert_intermediate_size": 72}
SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
INDEXED = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 4}  # so many that no scores are equal
LATENT_SPARSE = {**DEEPSEEK3, **SPARSE}
INKLING: dict[str, Any] = {
    **{key: value for key, value in HEAD_DIM.items() if key != "intermediate_size"},
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 5,
    "d_rel": 4,
    "rel_extent": 16,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "moe_intermediate_size": 40,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
LOOP = {
    **INKLING,
    "unpadded_vocab_size": 101,
    "num_hidden_layers": 3,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid"],
    "n_layers_per_attn_res_block": 1,
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 2,
}

GEMMA4 = {
    **HEAD_DIM,
    **MIXED,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "global_head_dim": 16,
}
_BLT = {
    "num_hidden_layers": 1,
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "intermediate_size": NEURONS,
    "max_position_embeddings": 64,
}
BLT = {
    "num_hidden_layers": 1,  # only transformers' cache asks for it
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "encoder_hash_byte_group_size": [3, 4],
    "encoder_hash_byte_group_vocab": 50,
    "patcher_config": _BLT,
    "encoder_config": {**_BLT, "hidden_size_global": 2 * HIDDEN},
    "decoder_config": {**_BLT, "hidden_size_global": 2 * HIDDEN},
    "global_config": {**_BLT, "hidden_size": 2 * HIDDEN},
    **IDS,
}
V4 = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 20,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "hc_mult": 2,
    "hc_sinkhorn_iters": 2,  # each is many operations to measure
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 5,
    "max_position_embeddings": 64,
    **INDEXED,
    **IDS,
}
DOTS3 = {
    **LATENT_SPARSE,
    **INDEXED,
    "head_dim": 24,
    "shared_experts_intermediate_size": 40,
    "layer_types": ["indexed_attention", "sliding_attention"],
    "sliding_window": 5,
    **{
        f"swa_{name}": value
        for name, value in {
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "q_lora_rank": 20,
            "kv_lora_rank": 24,
            "head_dim": 24,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
        }.items()
    },
}
QWEN4 = {
    **{key: value for key, value in HEAD_DIM.items() if key != "intermediate_size"},
    **LINEAR,
    **SHARED,
    "layer_types": ["linear_attention", "indexed_attention"],
    "hc_count": 2,
    "hc_lowrank": 8,
    "ple_layer_ids": [1],
    "ngram_vocab_size_base": 50,
    "heads_per_ngram": 2,
    "make_ngram_vocab_size_divisible_by": 2,
    "split_ngram_parts": 2,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}


def as_llama(name: str, config: str) -> Family:
    """A family whose config class has a Llama for its model."""
    return Family(name, "LlamaForCausalLM", config, GROUPED, "decoder")


RECENT = named(
    decoder("apertus1p5_text", "Apertus1p5Text", GROUPED),
    decoder("aria_text", "AriaText", {**HEAD_DIM, "moe_num_experts": 4, "moe_topk": 2,
                                      "moe_num_shared_experts": 1}),
    decoder("axk1", "AXK1", LATENT_SPARSE),
    decoder("axk2", "AXK2", {**LATENT_SPARSE, **INDEXED, "n_group": None, "topk_group": None}),
    decoder("beam", "Beam", {**HEAD_DIM, **MIXED, **EXPERTS, **SPARSE, "n_group": 2, "topk_group": 1}),
    decoder("cohere2_moe", "Cohere2Moe", {**HEAD_DIM, **MIXED, "num_experts": 4, "num_experts_per_tok": 2,
                                          "num_shared_experts": 1}),
    decoder("cwm", "Cwm", {**HEAD_DIM, "layer_types": ["full_attention", "sliding_attention"],
                           "sliding_window": 5}),
    as_llama("exaone", "ExaoneConfig"),
    decoder("exaone_moe", "ExaoneMoe", {**HEAD_DIM, **MIXED, **EXPERTS, **SPARSE, "num_shared_experts": 1,
                                        "n_group": 1, "topk_group": 1}),
    decoder("flint", "Flint", {**HEAD_DIM, **MIXED, **SHARED, "mlp_only_layers": [0],
                               "decoder_sparse_step": 1}),
    decoder("glm4_moe_lite", "Glm4MoeLite", LATENT_SPARSE),
    decoder("glm_moe_dsa", "GlmMoeDsa", {**LATENT_SPARSE, **INDEXED}),
    decoder("granite_swa", "GraniteSWA", {**GROUPED, "sliding_window": 5}),
    decoder("granitemoe_swa", "GraniteMoeSWA", {**GROUPED, **MOE, "sliding_window": 5}),
    decoder("hrm_text", "HrmText", {**HEAD_DIM, "num_hidden_layers": 4, "num_layers_per_stack": 1,
                                    "H_cycles": 1, "L_cycles": 2}),
    decoder("hy_v3", "HYV3", {**HEAD_DIM, **EXPERTS, **SPARSE, "num_shared_experts": 1}),
    decoder("hy_v4", "HYV4", {**LATENT_SPARSE, **INDEXED}),
    decoder("hyperclovax", "HyperCLOVAX", GROUPED),
    decoder("inkling_text", "Inkling", {**INKLING, **SPARSE, "n_shared_experts": 1,
                                        "intermediate_size": NEURONS}, config="TextConfig"),
    decoder("inkling2_text", "Inkling2", {**INKLING, "unpadded_vocab_size": 101}, config="TextConfig"),
    decoder("inkling2_loop_text", "Inkling2Loop", LOOP, config="TextConfig"),
    as_llama("internlm3", "InternLM3Config"),
    as_llama("iquestcoder", "IQuestCoderConfig"),
    decoder("kolibri1", "Kolibri1", {**HEAD_DIM, **MIXED, "num_local_experts": 4, "num_experts_per_tok": 2,
                                     "moe_intermediate_size": 40, "shared_expert_intermediate_size": 72}),
    decoder("laguna", "Laguna", {**HEAD_DIM, **MIXED, **SHARED, **SPARSE}),
    decoder("lara_mini", "LaraMini", {**HEAD_DIM, **LINEAR, **SHARED,
                                      "layer_types": ["linear_attention", "sliding_attention"],
                                      "sliding_window": 5}),
    decoder("lfm3", "Lfm3", {**HEAD_DIM, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3,
                             "sliding_window": 5}),
    decoder("mellum", "Mellum", {**HEAD_DIM, **MIXED, "num_local_experts": 4, "num_experts_per_tok": 2,
                                 "moe_intermediate_size": 40}),
    decoder("minimax_m3_text", "MiniMaxM3VL", {**HEAD_DIM, **MOE, **SPARSE, "dense_intermediate_size": 72,
                                               "shared_intermediate_size": 40}, config="TextConfig"),
    decoder("qwen3_5_moe_text", "Qwen3_5Moe", {**HEAD_DIM, **LINEAR, **SHARED}, config="TextConfig"),
    Family("sarvam_mla", "DeepseekV3ForCausalLM", "SarvamMLAConfig",
           {**DEEPSEEK3, "q_lora_rank": None, "n_group": 1}, "decoder"),
    Family("sarvam_moe", "Glm4MoeForCausalLM", "SarvamMoEConfig",
           {**HEAD_DIM, **GROUPS, "moe_intermediate_size": 40, "num_experts_per_tok": 2,
            "first_k_dense_replace": 1}, "decoder"),
    decoder("bailing_hybrid", "BailingHybrid", {**DEEPSEEK3, **SPARSE, "layer_types": LINEAR["layer_types"],
                                                "head_dim": 8, "num_local_experts": 4}),
    decoder("blt", "Blt", BLT),
    decoder("cohere_compass_text", "CohereCompass",
            {**GROUPED, **MIXED, "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4}
                                                     for kind in MIXED["layer_types"]}}, config="TextConfig"),
    decoder("deepseek_v4", "DeepseekV4", V4),
    decoder("dory", "Dory", {**HEAD_DIM, "initializer_range": 0.5, "num_hidden_layers": 3,
                             "n_input_layers": 1, "n_output_layers": 1, "sliding_window": 5,
                             "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    decoder("dots3_note_text", "Dots3Note", DOTS3, config="TextConfig"),
    decoder("fuyu", "Fuyu", {"text_config": {**LLAMA, "model_type": "persimmon", "qk_layernorm": True,
                                             "partial_rotary_factor": 0.5}, "image_token_id": 100, **IDS}),
    decoder("gemma4", "Gemma4", {"text_config": GEMMA4, **IDS}, "ForConditionalGeneration"),
    decoder("gemma4_unified", "Gemma4Unified", {"text_config": GEMMA4, **IDS}, "ForConditionalGeneration"),
    decoder("gemma4_unified_text", "Gemma4Unified", GEMMA4, config="TextConfig"),
    decoder("moshi", "Moshi", {**GROUPED, "head_dim": 16, "ffn_dim": 2 * NEURONS}),
    decoder("qwen4_exp_text", "Qwen4Exp", QWEN4, config="TextConfig"),
    decoder("trocr", "TrOCR", {"vocab_size": VOCABULARY, "d_model": HIDDEN, "decoder_layers": LAYERS,
                               "decoder_attention_heads": HEADS, "decoder_ffn_dim": NEURONS,
                               "max_position_embeddings": 64, "is_decoder": True, **IDS}),
)  # fmt: skip
