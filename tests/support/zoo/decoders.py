"""Decoders of the zoo, at tiny widths. Data only."""

from __future__ import annotations

from typing import Any

from support.zoo.family import HEADS, HIDDEN, LAYERS, NEURONS, VOCABULARY, Family, named

__all__ = ["DECODERS", "LLAMA"]

_IDS = {"bos_token_id": 1, "eos_token_id": 2}
LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": NEURONS,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    **_IDS,
}
GROUPED = {**LLAMA, "num_key_value_heads": 2}
GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_positions": 64,
    **_IDS,
}
FALCON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "ffn_hidden_size": NEURONS,
    **_IDS,
}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN2_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 72,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],
}


def decoder(
    name: str,
    stem: str,
    settings: dict[str, Any],
    head: str = "ForCausalLM",
    config: str = "Config",
    **fields: Any,
) -> Family:
    """A family whose classes are named ``<stem>ForCausalLM`` and ``<stem>Config``."""
    return Family(name, stem + head, stem + config, settings, "decoder", **fields)


def custom(name: str, model_class: str, folder: str, **settings: Any) -> Family:
    """A decoder whose code comes with its checkpoint."""
    return Family(name, model_class, folder, settings, "decoder")


DECODERS = named(
    custom("arctic", "ArcticForCausalLM", "arctic"),
    custom("arctic:every second", "ArcticForCausalLM", "arctic", moe_layer_frequency=2),
    custom("baichuan", "BaichuanForCausalLM", "baichuan"),
    custom("baichuan:13b alibi", "BaichuanForCausalLM", "baichuan", position="alibi"),
    decoder("bloom", "Bloom", {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "n_layer": LAYERS,
                               "n_head": HEADS, **_IDS}, attention=("eager",)),
    custom("chatglm2", "ChatGLMForConditionalGeneration", "chatglm2"),
    custom("chatglm2:mha", "ChatGLMForConditionalGeneration", "chatglm2", multi_query_attention=False,
           multi_query_group_num=4),
    custom("chatglm3", "ChatGLMForConditionalGeneration", "chatglm3"),
    decoder("codegen", "CodeGen", {**GPT, "n_head": 8, "rotary_dim": 4, "n_inner": NEURONS}),
    decoder("codellama", "Llama", {**GROUPED, "tie_word_embeddings": True}),
    decoder("falcon", "Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    decoder("falcon:7b multi-query", "Falcon", {**FALCON, "multi_query": True, "parallel_attn": True,
                                                "new_decoder_architecture": False}),
    decoder("falcon:rw alibi", "Falcon", {**FALCON, "multi_query": False, "alibi": True, "bias": True,
                                          "parallel_attn": False, "new_decoder_architecture": False}),
    decoder("glm", "Glm", {**GROUPED, "head_dim": 16}),
    decoder("gpt-j", "GPTJ", {**GPT, "rotary_dim": 8, "n_inner": NEURONS}),
    decoder("gpt-neo", "GPTNeo", {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_layers": LAYERS,
                                  "num_heads": HEADS, "attention_types": [[["global", "local"], 1]],
                                  "window_size": 5, "intermediate_size": NEURONS,
                                  "max_position_embeddings": 64, **_IDS}, attention=("eager",)),
    decoder("gpt-neox", "GPTNeoX", {**LLAMA, "rotary_pct": 0.5}),
    decoder("gpt-neox:sequential", "GPTNeoX", {**LLAMA, "use_parallel_residual": False,
                                               "attention_bias": False}),
    decoder("gpt2", "GPT2", {**GPT, "n_inner": NEURONS}, "LMHeadModel"),
    decoder("gpt_oss", "GptOss", {**GROUPED, **MOE, "head_dim": 16, "sliding_window": 5,
                                  "rope_scaling": None}, attention=("eager",)),
    decoder("llama", "Llama", LLAMA),
    decoder("llama:9q3kv", "Llama", {**LLAMA, "hidden_size": 72, "num_attention_heads": 9,
                                     "num_key_value_heads": 3}),
    decoder("llama:biased", "Llama", {**GROUPED, "attention_bias": True, "mlp_bias": True}),
    decoder("llama:heads equal head_dim", "Llama", {**LLAMA, "num_attention_heads": 8,
                                                    "num_key_value_heads": 4}),
    decoder("llama:multi-query", "Llama", {**LLAMA, "num_key_value_heads": 1}),
    decoder("llama2", "Llama", GROUPED),
    decoder("mistral", "Mistral", {**GROUPED, "sliding_window": 5}),
    decoder("mixtral", "Mixtral", {**GROUPED, **MOE}),
    decoder("mpt", "Mpt", {"vocab_size": VOCABULARY, "d_model": HIDDEN, "n_layers": LAYERS,
                           "n_heads": HEADS, "max_seq_len": 64, "expansion_ratio": 4}, attention=("eager",)),
    decoder("openai", "OpenAIGPT", {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": LAYERS,
                                    "n_head": HEADS, "n_positions": 64}, "LMHeadModel",
            attention=("eager",)),
    decoder("opt", "OPT", {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
                           "num_attention_heads": HEADS, "ffn_dim": NEURONS, "max_position_embeddings": 64,
                           "word_embed_proj_dim": HIDDEN, "pad_token_id": 0, **_IDS}),
    decoder("opt:350m", "OPT", {"vocab_size": VOCABULARY, "hidden_size": HIDDEN,
                                "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
                                "ffn_dim": NEURONS, "max_position_embeddings": 64,
                                "word_embed_proj_dim": 32, "do_layer_norm_before": False,
                                "pad_token_id": 0, **_IDS}),
    decoder("phi", "Phi", {**GROUPED, "partial_rotary_factor": 0.5}),
    decoder("phi3", "Phi3", GROUPED),
    custom("qwen", "QWenLMHeadModel", "qwen"),
    decoder("qwen2", "Qwen2", GROUPED),
    decoder("qwen2-moe", "Qwen2Moe", {**GROUPED, **QWEN2_MOE}),
    decoder("qwen2.5", "Qwen2", {**GROUPED, "tie_word_embeddings": True}),
    decoder("qwen3", "Qwen3", {**GROUPED, "head_dim": 24}),
    decoder("starcode", "GPTBigCode", {**GPT, "n_inner": NEURONS, "multi_query": True}),
    decoder("starcode:mha", "GPTBigCode", {**GPT, "n_inner": NEURONS, "multi_query": False}),
    decoder("starcoder2", "Starcoder2", GROUPED),
    decoder("xglm", "XGLM", {"vocab_size": VOCABULARY, "d_model": HIDDEN, "num_layers": LAYERS,
                             "attention_heads": HEADS, "ffn_dim": NEURONS, "max_position_embeddings": 64,
                             "pad_token_id": 0, **_IDS}, attention=("eager",)),
    decoder("reformer", "Reformer", {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "attention_head_size": 16,
        "num_attention_heads": HEADS, "feed_forward_size": NEURONS, "attn_layers": ["local", "lsh"],
        "axial_pos_embds": True, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 48],
        "is_decoder": True, "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 8, "num_buckets": 2,
        "num_hashes": 1, "hash_seed": 11, "max_position_embeddings": 64, "pad_token_id": 0,
        "chunk_size_lm_head": 0,
    }, "ModelWithLMHead", tokens=24, attention=("eager",), seeds=True),
    custom("yuan", "YuanForCausalLM", "yuan"),
)  # fmt: skip
