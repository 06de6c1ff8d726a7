"""What an encoder is asked for, as jobs: embed, classify, score, fill masks. A job is inputs, and what is
made of their results; who runs it is the caller's matter. Knows no executor and no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from shoal.engine.encode_inputs import EncodeInput, InputMaker
from shoal.engine.encode_types import EncodeParams, Encoding
from shoal.engine.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    FillMaskCandidate,
    FillMaskRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    TokenClassificationOutput,
    TokenClassificationRequestOutput,
)
from shoal.engine.pooling_settings import PoolingSettings
from shoal.engine.protocol import Prompt
from shoal.engine.text import Tokenizer
from shoal.errors import RequestError, UnsupportedError
from shoal.model.pooling import end_token

__all__ = ["POOLINGS", "Classified", "EncoderTasks", "Job", "Output"]

POOLINGS = ("mean", "cls", "last")
_MOST_WORDS = 1000  # candidates for a mask

Output = TypeVar("Output")
Classified = ClassificationRequestOutput | TokenClassificationRequestOutput
Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Job(Generic[Output]):
    """Texts, and what becomes of their results."""

    inputs: Sequence[tuple[list[int], EncodeParams]]
    finish: Callable[[Sequence[Encoding]], list[Output]]


class EncoderTasks:
    """Makes jobs for one model.

    Args:
        tasks: that its class answers, see :func:`shoal.model.pooling.tasks_of`.
        settings: of its vectors.
        config: transformers' config of the model: labels, and what their scores mean.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_length: int,
        tasks: frozenset[str],
        settings: PoolingSettings,
        config: Any,
    ) -> None:
        self.tasks = tasks
        self.makes_vectors = True  # until the ranks say otherwise
        self.settings = settings
        self.make = InputMaker(tokenizer, max_length, settings.is_lower)
        self._tokenizer = tokenizer
        self._config = config

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> Job[EmbeddingRequestOutput]:
        """A vector a text. See :meth:`shoal.LLM.embed`."""
        inputs = self.make.texts(prompts, truncate_prompt_tokens)
        params, vectors = self._vectors(pooling, normalize, dimensions)

        def finish(found: Sequence[Encoding]) -> list[EmbeddingRequestOutput]:
            rows = vectors(found).tolist()
            return [
                EmbeddingRequestOutput(str(index), own.token_ids, EmbeddingOutput(row))
                for index, (own, row) in enumerate(zip(inputs, rows, strict=True))
            ]

        return Job([(own.token_ids, _typed(params, own)) for own in inputs], finish)

    def classify(
        self, prompts: Prompt | Sequence[Prompt], truncate_prompt_tokens: int | None = None
    ) -> Job[Classified]:
        """Probabilities of classes. See :meth:`shoal.LLM.classify`."""
        if "token_classify" in self.tasks:
            return self._classify_tokens(self.make.texts(prompts, truncate_prompt_tokens))
        self._require("classify", "classify texts")
        inputs = self._ended(self.make.texts(prompts, truncate_prompt_tokens), "prompt")

        def finish(found: Sequence[Encoding]) -> list[Classified]:
            probs = self._probabilities(np.concatenate([one.rows for one in found]))
            return [
                ClassificationRequestOutput(
                    str(index), own.token_ids, ClassificationOutput(row.tolist(), self._label(row))
                )
                for index, (own, row) in enumerate(zip(inputs, probs, strict=True))
            ]

        return Job([(own.token_ids, _typed(EncodeParams("classes"), own)) for own in inputs], finish)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        truncate_prompt_tokens: int | None = None,
    ) -> Job[ScoringRequestOutput]:
        """How well texts go together. See :meth:`shoal.LLM.score`."""
        first, second = _paired(text_1, text_2)
        if "classify" in self.tasks:
            return self._score_pairs(
                self._ended(self.make.pairs(first, second, truncate_prompt_tokens), "text_1")
            )
        distinct = list(dict.fromkeys((*first, *second)))
        place = {text: index for index, text in enumerate(distinct)}
        inputs = self.make.texts(distinct, truncate_prompt_tokens)
        params, vectors = self._vectors(None, True, None)

        def finish(found: Sequence[Encoding]) -> list[ScoringRequestOutput]:
            rows = vectors(found)
            return [
                ScoringRequestOutput(
                    str(index),
                    inputs[place[one]].token_ids + inputs[place[other]].token_ids,
                    ScoringOutput(float(rows[place[one]] @ rows[place[other]])),
                )
                for index, (one, other) in enumerate(zip(first, second, strict=True))
            ]

        return Job([(own.token_ids, _typed(params, own)) for own in inputs], finish)

    def fill_mask(
        self, prompts: Prompt | Sequence[Prompt], top_k: int = 5, truncate_prompt_tokens: int | None = None
    ) -> Job[FillMaskRequestOutput]:
        """Words for masks. See :meth:`shoal.LLM.fill_mask`."""
        self._require("fill_mask", "fill masks")
        if isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= _MOST_WORDS:
            raise RequestError(f"top_k: must be from 1 to {_MOST_WORDS}, got {top_k!r}", field="top_k")
        mask = self._tokenizer.mask_token_id
        mask = mask if mask is not None else getattr(self._config, "mask_token_id", None)
        if mask is None:
            raise UnsupportedError("prompt: this model's tokenizer has no mask token", field="prompt")
        inputs = self.make.texts(prompts, truncate_prompt_tokens)
        places = [[at for at, token in enumerate(own.token_ids) if token == mask] for own in inputs]
        for index, found in enumerate(places):
            if not found:
                text = self._tokenizer.decode([mask], False) or f"token {mask}"
                raise RequestError(f"prompt: has no mask; write {text} where one is wanted", "prompt", index)

        def finish(found: Sequence[Encoding]) -> list[FillMaskRequestOutput]:
            return [
                FillMaskRequestOutput(str(index), own.token_ids, self._candidates(one))
                for index, (own, one) in enumerate(zip(inputs, found, strict=True))
            ]

        asked = [
            EncodeParams("words", own.type_ids, tuple(at), top_k)
            for own, at in zip(inputs, places, strict=True)
        ]
        return Job([(own.token_ids, params) for own, params in zip(inputs, asked, strict=True)], finish)

    def _vectors(
        self, pooling: str | None, normalize: bool | None, dimensions: int | None
    ) -> tuple[EncodeParams, Callable[[Sequence[Encoding]], Rows]]:
        """What to ask for, and what makes vectors [N, width] of the answers."""
        if not self.makes_vectors:
            raise UnsupportedError(
                f"this model makes no vector of each token; it can: {self._can()}", field="model"
            )
        settings = self.settings
        pooling = pooling or settings.pooling
        if pooling not in POOLINGS:
            raise RequestError(f"pooling: {pooling!r} is none of {', '.join(POOLINGS)}", field="pooling")
        is_normed = settings.normalize if normalize is None else normalize

        def vectors(found: Sequence[Encoding]) -> Rows:
            rows = np.concatenate([one.rows for one in found])
            for dense in settings.dense:
                rows = dense(rows)
            if dimensions is not None:
                if not 1 <= dimensions <= rows.shape[1]:
                    raise RequestError(
                        f"dimensions: must be from 1 to {rows.shape[1]}, got {dimensions}", field="dimensions"
                    )
                rows = rows[:, :dimensions]
            return _normed(rows) if is_normed else rows

        return EncodeParams(pooling), vectors

    def _ended(self, inputs: list[EncodeInput], field: str) -> list[EncodeInput]:
        """The inputs, which have the token that classes are read at, where that is one token of a text."""
        end = end_token(self._config)
        for index, own in enumerate(inputs):
            if end is not None and end not in own.token_ids:
                raise RequestError(
                    f"{field}: this model reads classes at its end token ({end}), which is missing; add it",
                    field,
                    index,
                )
        return inputs

    def _classify_tokens(self, inputs: Sequence[EncodeInput]) -> Job[Classified]:
        def finish(found: Sequence[Encoding]) -> list[Classified]:
            outputs: list[Classified] = []
            for index, (own, one) in enumerate(zip(inputs, found, strict=True)):
                probs = _softmax(one.rows)
                made = TokenClassificationOutput(probs.tolist(), [self._label(row) for row in probs])
                outputs.append(TokenClassificationRequestOutput(str(index), own.token_ids, made))
            return outputs

        return Job([(own.token_ids, _typed(EncodeParams("token_classes"), own)) for own in inputs], finish)

    def _score_pairs(self, inputs: Sequence[EncodeInput]) -> Job[ScoringRequestOutput]:
        if self._config.num_labels != 1:
            raise UnsupportedError(
                f"score: this model tells {self._config.num_labels} classes apart; a score takes a model "
                "with one label, or one that makes vectors",
                field="text_1",
            )

        def finish(found: Sequence[Encoding]) -> list[ScoringRequestOutput]:
            rows = np.concatenate([one.rows for one in found])[:, 0]
            scores = rows if _is_identity(self._config) else _sigmoid(rows)
            return [
                ScoringRequestOutput(str(index), own.token_ids, ScoringOutput(float(score)))
                for index, (own, score) in enumerate(zip(inputs, scores, strict=True))
            ]

        return Job([(own.token_ids, _typed(EncodeParams("classes"), own)) for own in inputs], finish)

    def _candidates(self, found: Encoding) -> list[list[FillMaskCandidate]]:
        assert found.ids is not None
        return [
            [
                FillMaskCandidate(
                    float(np.exp(score)), int(token), self._tokenizer.decode([int(token)], False)
                )
                for score, token in zip(scores, tokens, strict=True)
            ]
            for scores, tokens in zip(found.rows, found.ids, strict=True)
        ]

    def _probabilities(self, logits: Rows) -> Rows:
        """By what the config says its labels are."""
        kind = getattr(self._config, "problem_type", None)
        if kind == "regression":
            return logits
        if kind == "multi_label_classification" or logits.shape[1] == 1:
            return _sigmoid(logits)
        return _softmax(logits)

    def _label(self, probs: Rows) -> str:
        labels: Mapping[int, str] = getattr(self._config, "id2label", None) or {}
        best = int(probs.argmax())
        return labels.get(best, f"LABEL_{best}")

    def _require(self, task: str, what: str) -> None:
        if task not in self.tasks:
            raise UnsupportedError(f"this model does not {what}; it can: {self._can()}", field="model")

    def _can(self) -> str:
        return ", ".join(sorted({*self.tasks, *(("embed",) if self.makes_vectors else ())}))


def _typed(params: EncodeParams, own: EncodeInput) -> EncodeParams:
    return EncodeParams(params.output, own.type_ids) if own.type_ids else params


def _paired(text_1: str | Sequence[str], text_2: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """Pairs: one with each of the others, or each with its own."""
    first = [text_1] if isinstance(text_1, str) else list(text_1)
    second = [text_2] if isinstance(text_2, str) else list(text_2)
    if len(first) == 1:
        first *= len(second)
    if not first or len(first) != len(second):
        raise RequestError(
            f"text_1: {len(first)} texts for {len(second)} of text_2; pass one, or as many", field="text_1"
        )
    return first, second


def _is_identity(config: Any) -> bool:
    """Whether a cross-encoder's score is its logit, as sentence-transformers keeps it."""
    own = getattr(config, "sentence_transformers", None) or {}
    named = own.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None)
    return str(named).endswith("Identity")


def _normed(rows: Rows) -> Rows:
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.maximum(lengths, 1e-12), np.float32)


def _sigmoid(x: Rows) -> Rows:
    return np.asarray(1 / (1 + np.exp(-x)), np.float32)


def _softmax(x: Rows) -> Rows:
    shifted = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True), np.float32)
