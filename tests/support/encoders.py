"""Tiny random encoders with tokenizers of whole words, saved as ordinary checkpoint folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers as T
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = [*SPECIAL, *(one + other for one in LETTERS[:10] for other in LETTERS[:9])]
TEXTS = [
    "aa bc de",
    "ab",
    "ca cb cc cd ce cf cg ch ci da db dc",
    "ba bb bc bd be bf bg bh",
    "ia ib ic id",
    "aa aa ab ab ac ac ad ad ae ae af af ag ag ah ah ai ai ba",
]

SHAPE: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


def build(
    model_class: type[T.PreTrainedModel], config: T.PreTrainedConfig, seed: int = 0
) -> T.PreTrainedModel:
    """A seeded float32 model whose every weight matters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if parameter.dim() <= 1:
                parameter.copy_(name.endswith("weight") + 0.2 * torch.randn(parameter.shape))
            else:
                parameter.mul_(3.0)
    return model


def save(
    folder: Path,
    model_class: type[T.PreTrainedModel] = T.BertModel,
    config: T.PreTrainedConfig | None = None,
    sentence: dict[str, Any] | None = None,
) -> Path:
    """A model's folder with a tokenizer.

    Args:
        sentence: sentence-transformers' pooling config, written with a norm behind it; None: no such files.
    """
    build(model_class, config or T.BertConfig(**SHAPE)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    if sentence is not None:
        write_modules(folder, sentence)
    return folder


def write_modules(folder: Path, pooling: dict[str, Any], *, norm: bool = True, max_length: int = 40) -> None:
    """sentence-transformers' files."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if norm else [])]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_length}))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def tokenizer() -> T.PreTrainedTokenizerFast:
    """Words between spaces; BERT's frame around one text and two."""
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return T.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


@torch.inference_mode()
def reference_vectors(folder: Path, texts: list[str], pooling: str = "mean") -> torch.Tensor:
    """transformers' own hidden states of one text after the other, pooled and normalised, [N, W]."""
    model = T.AutoModel.from_pretrained(folder).eval()
    backend = T.AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in texts:
        hidden = model(**backend(text, return_tensors="pt")).last_hidden_state[0]
        rows.append({"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling])
    return torch.nn.functional.normalize(torch.stack(rows), dim=1)
