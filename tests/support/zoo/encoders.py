"""Encoders of the zoo, at tiny widths. Data only."""

from __future__ import annotations

from typing import Any

from support.zoo.family import HEADS, HIDDEN, LAYERS, NEURONS, VOCABULARY, Family, named

__all__ = ["BERT", "ENCODERS", "encoder"]

BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": NEURONS,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
DEBERTA = {
    **BERT,
    "relative_attention": True,
    "pos_att_type": "c2p|p2c",
    "max_relative_positions": 16,
    "position_biased_input": False,
    "type_vocab_size": 0,
}
XLM = {
    "vocab_size": VOCABULARY,
    "emb_dim": HIDDEN,
    "n_layers": LAYERS,
    "n_heads": HEADS,
    "max_position_embeddings": 64,
    "pad_index": 0,
    "bos_index": 1,
    "eos_index": 2,
    "unk_index": 3,
    "mask_index": 4,
    "n_langs": 1,
}
PERCEIVER = {
    "vocab_size": VOCABULARY,
    "num_latents": 8,
    "d_latents": HIDDEN,
    "d_model": 48,
    "num_blocks": 1,
    "num_self_attends_per_block": LAYERS,
    "num_self_attention_heads": HEADS,
    "num_cross_attention_heads": HEADS,
    "qk_channels": HIDDEN,
    "v_channels": HIDDEN,
    "max_position_embeddings": 12,
    "cross_attention_widening_factor": 1,
    "self_attention_widening_factor": 2,
}


def encoder(
    name: str, stem: str, settings: dict[str, Any], head: str = "ForMaskedLM", **fields: Any
) -> Family:
    """A family whose classes are named ``<stem>ForMaskedLM`` and ``<stem>Config``."""
    return Family(name, stem + head, f"{stem}Config", settings, "encoder", **fields)


EAGER = {"attention": ("eager",)}

ENCODERS = named(
    encoder("albert", "Albert", {**BERT, "embedding_size": 32, "num_hidden_groups": 1}),
    encoder("bert", "Bert", BERT),
    encoder("camembert", "Camembert", BERT),
    encoder("deberta", "Deberta", DEBERTA, **EAGER),
    encoder("deberta:talking heads", "Deberta", {**DEBERTA, "talking_head": True}, **EAGER),
    encoder("deberta_v2", "DebertaV2", {**DEBERTA, "position_buckets": 8, "share_att_key": True,
                                        "norm_rel_ebd": "layer_norm"}, **EAGER),
    encoder("deberta_v2:own_poskey", "DebertaV2", {**DEBERTA, "share_att_key": False}, **EAGER),
    encoder("deberta_v2:conv", "DebertaV2", {**DEBERTA, "position_buckets": 8, "share_att_key": True,
                                             "norm_rel_ebd": "layer_norm", "conv_kernel_size": 3}, **EAGER),
    encoder("electra", "Electra", {**BERT, "embedding_size": 32}),
    encoder("ernie", "Ernie", {**BERT, "use_task_id": True}),
    encoder("esm", "Esm", {**BERT, "position_embedding_type": "rotary", "mask_token_id": 4,
                           "token_dropout": True}),
    encoder("flaubert", "Flaubert", {**XLM, "pre_norm": False}, "WithLMHeadModel", generates=True, **EAGER),
    encoder("longformer", "Longformer", {**BERT, "attention_window": [4, 4]}, tokens=16,
            extra="global attention", **EAGER),
    encoder("luke", "Luke", {**BERT, "entity_vocab_size": 53, "entity_emb_size": 32,
                             "use_entity_aware_attention": True}, extra="entities", **EAGER),
    Family("nezha", "NezhaForMaskedLM", "nezha", {}, "encoder", **EAGER),
    Family("perceiver", "PerceiverForMaskedLM", "PerceiverConfig", PERCEIVER, "encoder", **EAGER),
    encoder("roberta", "Roberta", BERT),
    encoder("roformer", "RoFormer", {**BERT, "embedding_size": 32, "rotary_value": False}, **EAGER),
    encoder("splinter", "Splinter", {**BERT, "question_token_id": 3}, "ForQuestionAnswering", **EAGER),
    encoder("xlm", "XLM", XLM, "WithLMHeadModel", generates=True, **EAGER),
    encoder("xlm_roberta", "XLMRoberta", BERT),
    encoder("xlnet", "XLNet", {"vocab_size": VOCABULARY, "d_model": HIDDEN, "n_layer": LAYERS,
                               "n_head": HEADS, "d_inner": NEURONS, "pad_token_id": 0}, "LMHeadModel",
            generates=True, **EAGER),
    encoder("yoso", "Yoso", {**BERT, "use_expectation": True, "lsh_backward": False}, **EAGER),
)  # fmt: skip
