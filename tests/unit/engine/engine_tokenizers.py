"""Small tokenizers of the kinds there are, built in a moment and without any file."""

from __future__ import annotations

from functools import cache
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from shoal.engine.text import Tokenizer

LINES = [
    "The quick brown fox jumps over the lazy dog. Isn't it?  Two  spaces, and\n\nnew lines.",
    "Größe, naïve café, Ελλάδα, Привет мир, שלום עולם",
    "日本語のテキスト、中文文本。한국어 텍스트 ภาษาไทย",
    "emoji 😀😃🎉 family 👨‍👩‍👧 flag 🇫🇷 replacement \ufffd end",
    "def f(x):\n    return x + 1  # 42",
]
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'refuse' %}{{ raise_exception('no such role') }}{% endif %}"
    "<|user|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{{ extra }}"
)
CHAT_SPECIAL = {"eos_token": "<|end|>", "additional_special_tokens": ["<|user|>", "<|assistant|>"]}


class _Stripping(PreTrainedTokenizerFast):
    """Decodes like the tokenizers written in Python that end in ``.strip()``."""

    def _decode(self, *args: Any, **options: Any) -> str:
        text: str = super()._decode(*args, **options)
        return text.strip()


class _Joining(PreTrainedTokenizerFast):
    """Decodes like CTRL's: words in pieces that end in ``@@`` until the last."""

    def _decode(self, *args: Any, **options: Any) -> str:
        text: str = super()._decode(*args, **options)
        return text.replace("@@ ", "")


def backend(kind: str, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A transformers tokenizer.

    Kinds: byte_level, byte_fallback (as Llama 2), metaspace (as T5), word_piece, joined (as CTRL), and
    stripped: one whose decoder takes spaces from both ends, as many written in Python do.
    """
    raw = {
        "byte_level": _byte_level,
        "byte_fallback": _byte_fallback,
        "metaspace": _metaspace,
        "word_piece": _word_piece,
        "stripped": _stripped,
        "joined": _joined,
    }[kind]()
    wrapper = {"stripped": _Stripping, "joined": _Joining}.get(kind, PreTrainedTokenizerFast)
    return wrapper(tokenizer_object=RawTokenizer.from_str(raw), chat_template=chat_template, **CHAT_SPECIAL)


def make(kind: str, chat_template: str | None = None, vocab_size: int | None = None) -> Tokenizer:
    """The same, as shoal wraps it; the model's vocabulary is the tokenizer's unless given."""
    inner = backend(kind, chat_template)
    return Tokenizer(inner, vocab_size=len(inner) if vocab_size is None else vocab_size)


def _finished(raw: RawTokenizer) -> str:
    raw.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return raw.to_str()


@cache
def _byte_level() -> str:
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(LINES, trainer)
    return _finished(raw)


@cache
def _byte_fallback() -> str:
    letters = sorted(set("".join(LINES[:2]).replace(" ", "\u2581")) | {"\u2581"})
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *letters,
        "\u2581t",
        "\u2581th",
        "\u2581\u2581",
    ]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("\u2581", "\u2581")]
    raw = RawTokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return _finished(raw)


@cache
def _metaspace() -> str:
    raw = RawTokenizer(models.Unigram())
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=220, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    raw.train_from_iterator(LINES, trainer)
    return _finished(raw)


@cache
def _word_piece() -> str:
    raw = RawTokenizer(models.WordPiece(unk_token="[UNK]"))
    raw.normalizer = normalizers.BertNormalizer(lowercase=True)
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    raw.train_from_iterator(LINES, trainer)
    return _finished(raw)


@cache
def _stripped() -> str:
    pieces = ["<unk>", *sorted(set("".join(LINES).replace(" ", "\u2581")))]
    raw = RawTokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    raw.normalizer = normalizers.Replace(" ", "\u2581")
    raw.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    return _finished(raw)


@cache
def _joined() -> str:
    words = ["<unk>", "the", "hel@@", "lo", "f@@", "o@@", "x", "dog"]
    raw = RawTokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _finished(raw)
