"""What a caller of an encoder gets back. Plain data with vLLM's names where it has them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "FillMaskCandidate",
    "FillMaskRequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
    "TokenClassificationOutput",
    "TokenClassificationRequestOutput",
]


@dataclass(slots=True)
class EmbeddingOutput:
    """A text's vector."""

    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """One text of :meth:`shoal.LLM.embed`."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True


@dataclass(slots=True)
class ClassificationOutput:
    """A text's classes."""

    probs: list[float]  # by class; of several independent classes each its own
    label: str  # the most likely class, as the model's config calls it


@dataclass(slots=True)
class ClassificationRequestOutput:
    """One text of :meth:`shoal.LLM.classify`."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ClassificationOutput
    finished: bool = True


@dataclass(slots=True)
class TokenClassificationOutput:
    """The classes of each of a text's tokens."""

    probs: list[list[float]]  # by token, special ones included, and class
    labels: list[str]  # each token's most likely class


@dataclass(slots=True)
class TokenClassificationRequestOutput:
    """One text of :meth:`shoal.LLM.classify`, where the model classifies tokens."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: TokenClassificationOutput
    finished: bool = True


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """One pair of :meth:`shoal.LLM.score`."""

    request_id: str
    prompt_token_ids: list[int]  # of both texts
    outputs: ScoringOutput
    finished: bool = True


@dataclass(slots=True)
class FillMaskCandidate:
    """A word for one mask."""

    score: float  # its probability
    token: int
    token_str: str


@dataclass(slots=True)
class FillMaskRequestOutput:
    """One text of :meth:`shoal.LLM.fill_mask`."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[list[FillMaskCandidate]]  # of each mask in order, the most likely word first
    finished: bool = True
