"""Tiny random decoders, one per family, saved as ordinary checkpoint folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as T
from tokenizers import Tokenizer, models, pre_tokenizers

VOCABULARY = 101  # prime: no rank count divides it
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: T.LlamaConfig(**_SHAPE, num_key_value_heads=2),
    "llama_9_3": lambda: T.LlamaConfig(
        **{**_SHAPE, "hidden_size": 72, "num_attention_heads": 9},
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
    "qwen2": lambda: T.Qwen2Config(**_SHAPE, num_key_value_heads=2),
    "qwen3": lambda: T.Qwen3Config(**_SHAPE, num_key_value_heads=2, head_dim=16),
    "mistral": lambda: T.MistralConfig(**_SHAPE, num_key_value_heads=2, sliding_window=12),
    "gpt2": lambda: T.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2
    ),
    "gpt_neox": lambda: T.GPTNeoXConfig(**_SHAPE),
    "opt": lambda: T.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        word_embed_proj_dim=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "bloom": lambda: T.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    ),
}


def build(family: str, seed: int = 0) -> T.PreTrainedModel:
    """A seeded float32 model whose every weight matters.

    Zero biases, unit norms and near-zero weights would hide faults, so biases and norms are random too
    and matrices are three times as wide as transformers' default.
    """
    config = CONFIGS[family]()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = T.AutoModelForCausalLM.from_config(config).eval()
        for name, parameter in model.named_parameters():
            with torch.no_grad():
                if parameter.dim() <= 1:
                    is_norm = name.endswith("weight")
                    parameter.copy_(is_norm + 0.2 * torch.randn(parameter.shape))
                else:
                    parameter.mul_(3.0)
    return model


def save(family: str, folder: Path, seed: int = 0) -> Path:
    """The family's model as a checkpoint folder (no tokenizer)."""
    path = folder / family
    if not path.exists():
        build(family, seed).save_pretrained(path)
    return path


def save_with_words(family: str, folder: Path) -> Path:
    """The same with a tokenizer: words between spaces, ``w7`` is id 7, whatever it does not know is id 3."""
    path = save(family, folder / "words")
    raw = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w3"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    T.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="w2", unk_token="w3").save_pretrained(path)
    return path


def prompts(count: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    """Random prompts of 1 to ``longest`` token ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def reference(model: T.PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """transformers' own greedy continuation, end of sequence ignored."""
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()
