"""Encoders and encoder-decoders that the project never promised by name. Data only."""

from __future__ import annotations

from typing import Any

from support.zoo.encoders import BERT, encoder
from support.zoo.family import HEADS, HIDDEN, LAYERS, NEURONS, VOCABULARY, named
from support.zoo.seq2seq import BART, T5, seq2seq

__all__ = ["UNLISTED_ENCODERS"]

EAGER: dict[str, Any] = {"attention": ("eager",)}
FUNNEL = {
    "vocab_size": VOCABULARY,
    "block_sizes": [1, 1],
    "num_decoder_layers": 1,
    "d_model": HIDDEN,
    "n_head": HEADS,
    "d_head": 16,
    "d_inner": NEURONS,
    "pad_token_id": 0,
}
DISTIL = {
    "vocab_size": VOCABULARY,
    "dim": HIDDEN,
    "hidden_dim": NEURONS,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SQUEEZE = {f"{part}_groups": 2 for part in ("q", "k", "v", "post_attention", "intermediate", "output")}
CANINE = {
    **{key: value for key, value in BERT.items() if key != "vocab_size"},
    "downsampling_rate": 2,
    "num_hash_functions": 4,
    "num_hash_buckets": 64,
    "local_transformer_stride": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODERN = {
    **BERT,
    "local_attention": 6,
    "global_attn_every_n_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
GEMMA_PART = {
    **BERT,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SWITCH = {
    **T5,
    "num_experts": 4,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "expert_capacity": 64,
}
NLLB_MOE = {
    **BART,
    "num_experts": 4,
    "encoder_sparse_step": 2,
    "decoder_sparse_step": 2,
    "expert_capacity": 64,
}
SEAMLESS = {
    **{key: value for key, value in BART.items() if key != "d_model"},
    "hidden_size": HIDDEN,
    "t2u_max_position_embeddings": 64,
}
BERT_TO_BERT = {
    "encoder": {"model_type": "bert", **BERT},
    "decoder": {"model_type": "bert", **BERT, "is_decoder": True, "add_cross_attention": True},
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "eos_token_id": 2,
}
NEOMME = {
    **BERT,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "embedding_rank": 24,
    "embedding_dim": 20,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "patch_size": 4,
}
ULTRA = {
    **BERT,
    "num_key_value_heads": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 3,
    "prediction_head_size": 40,
}
REFORMER = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "attention_head_size": 16,
    "num_attention_heads": HEADS,
    "feed_forward_size": NEURONS,
    "attn_layers": ["local", "lsh"],
    "axial_pos_shape": [8, 8],
    "axial_pos_embds_dim": [16, 48],
    "local_attn_chunk_length": 4,
    "lsh_attn_chunk_length": 8,
    "num_buckets": 2,
    "hash_seed": 11,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
PROPHET = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "encoder_ffn_dim": NEURONS,
    "num_encoder_layers": LAYERS,
    "num_encoder_attention_heads": HEADS,
    "decoder_ffn_dim": NEURONS,
    "num_decoder_layers": LAYERS,
    "num_decoder_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "ngram": 2,
    "num_buckets": 8,
    "relative_max_distance": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}

UNLISTED_ENCODERS = named(
    seq2seq("bart", "Bart", BART),
    seq2seq("blenderbot", "Blenderbot", BART),
    seq2seq("blenderbot_small", "BlenderbotSmall", BART),
    seq2seq("encoder_decoder", "EncoderDecoder", BERT_TO_BERT, "Model", **EAGER),
    seq2seq("mbart", "MBart", BART),
    seq2seq("mt5", "MT5", {**T5, "feed_forward_proj": "gated-gelu"}),
    seq2seq("nllb_moe", "NllbMoe", NLLB_MOE, **EAGER),
    seq2seq("pegasus_x", "PegasusX", {**BART, "block_size": 4, "num_global_tokens": 3}, tokens=16, **EAGER),
    seq2seq("prophetnet", "ProphetNet", PROPHET, **EAGER),
    seq2seq("seamless_m4t", "SeamlessM4T", SEAMLESS, "ForTextToText", **EAGER),
    seq2seq("seamless_m4t_v2", "SeamlessM4Tv2", SEAMLESS, "ForTextToText", **EAGER),
    seq2seq("switch_transformers", "SwitchTransformers", SWITCH, **EAGER),
    seq2seq("t5gemma", "T5Gemma", {"encoder": GEMMA_PART, "decoder": {**GEMMA_PART},
                                   "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1,
                                   "eos_token_id": 2}, **EAGER),
    seq2seq("umt5", "UMT5", {**T5, "feed_forward_proj": "gated-gelu"}),
    encoder("bert_generation", "BertGeneration", BERT, "Encoder"),
    encoder("big_bird", "BigBird", {**BERT, "attention_type": "block_sparse", "block_size": 2,
                                    "num_random_blocks": 1}, tokens=24, **EAGER),
    encoder("canine", "Canine", CANINE, "ForQuestionAnswering", tokens=32, **EAGER),
    encoder("convbert", "ConvBert", {**BERT, "embedding_size": 32, "head_ratio": 2, "conv_kernel_size": 3},
            **EAGER),
    encoder("data2vec_text", "Data2VecText", BERT),
    encoder("distilbert", "DistilBert", DISTIL),
    encoder("dpr", "DPR", {**BERT, "projection_dim": 24}, "QuestionEncoder"),
    encoder("esmc", "Esmc", {**BERT, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 4}),
    encoder("eurobert", "EuroBert", {**BERT, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2,
                                     "mask_token_id": 4}),
    encoder("fnet", "FNet", {key: value for key, value in BERT.items() if key != "num_attention_heads"},
            **EAGER),
    encoder("funnel", "Funnel", FUNNEL, **EAGER),
    encoder("gte", "Gte", BERT),
    encoder("ibert", "IBert", BERT, **EAGER),
    encoder("jina_embeddings_v3", "JinaEmbeddingsV3", BERT),
    encoder("layoutlm", "LayoutLM", {**BERT, "max_2d_position_embeddings": 64}),
    encoder("lilt", "Lilt", {**BERT, "hidden_size": 96, "channel_shrink_ratio": 2}, "Model", **EAGER),
    encoder("markuplm", "MarkupLM", {**BERT, "max_xpath_tag_unit_embeddings": 8,
                                     "max_xpath_subs_unit_embeddings": 8, "xpath_unit_hidden_size": 4,
                                     "max_depth": 4, "tag_pad_id": 7, "subs_pad_id": 7},
            "Model", **EAGER),
    encoder("megatron_bert", "MegatronBert", BERT, **EAGER),
    encoder("mobilebert", "MobileBert", {**BERT, "embedding_size": 32, "intra_bottleneck_size": 32,
                                         "num_feedforward_networks": 2, "true_hidden_size": 32}),
    encoder("modernbert", "ModernBert", MODERN),
    encoder("mpnet", "MPNet", {**BERT, "relative_attention_num_buckets": 32}, **EAGER),
    encoder("mra", "Mra", {**BERT, "block_per_row": 2}, tokens=32, **EAGER),
    encoder("neomme", "NeoMME", NEOMME),
    encoder("nomic_bert", "NomicBert", BERT),
    encoder("nystromformer", "Nystromformer", {**BERT, "num_landmarks": 12, "segment_means_seq_len": 12},
            **EAGER),
    encoder("reformer:words", "Reformer", REFORMER, tokens=24, seeds=True, **EAGER),
    encoder("rembert", "RemBert", {**BERT, "input_embedding_size": 32, "output_embedding_size": 40}, **EAGER),
    encoder("roberta_prelayernorm", "RobertaPreLayerNorm", BERT),
    encoder("roc_bert", "RoCBert", {**BERT, "pronunciation_vocab_size": 31, "pronunciation_embed_dim": 12,
                                    "shape_vocab_size": 37, "shape_embed_dim": 20}),
    encoder("squeezebert", "SqueezeBert", {**BERT, **SQUEEZE, "embedding_size": HIDDEN,
                                           "intermediate_size": 252}, **EAGER),
    encoder("tapas", "Tapas", {**BERT, "type_vocab_sizes": [3, 9, 9, 2, 9, 9, 4]}, **EAGER),
    encoder("ultrabert", "Ultrabert", ULTRA),
    encoder("xlm_roberta_xl", "XLMRobertaXL", BERT),
    encoder("xmod", "Xmod", {**BERT, "languages": ["en_XX"], "default_language": "en_XX",
                             "adapter_reduction_factor": 2}),
)  # fmt: skip
