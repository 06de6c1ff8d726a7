"""Beam searches drawn at random, and transformers' answers to them."""

from __future__ import annotations

import random
from typing import Any

import torch

from shoal import SamplingParams
from shoal.engine.outputs import RequestOutput

__all__ = ["SearchCase", "assert_same_search", "draw_case"]

_CLOSE = 1e-4  # of scores: relative, above 1


class SearchCase:
    """One search, in the words of both sides.

    Args:
        stop_ids: tokens that end a sequence.
        options: as ``generate`` of transformers takes them, but for ``max_new_tokens``.
    """

    def __init__(self, max_tokens: int, stop_ids: list[int], **options: Any) -> None:
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.options = options

    def params(self) -> SamplingParams:
        """As an engine takes it."""
        renamed = {"num_return_sequences": "n", "min_new_tokens": "min_tokens"}
        fields = {renamed.get(name, name): value for name, value in self.options.items()}
        return SamplingParams(
            ignore_eos=True,
            stop_token_ids=self.stop_ids,
            max_tokens=self.max_tokens,
            logprobs=0,
            **fields,
        )

    @torch.no_grad()
    def answers(self, model: Any, prompt: list[int]) -> tuple[list[list[int]], list[float]]:
        """transformers' output ids, each up to what ended it, and their scores, the best first."""
        model.generation_config.eos_token_id = self.stop_ids or None
        ids = torch.tensor([prompt])
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.max_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **self.options,
        )
        first = 1 if model.config.is_encoder_decoder else len(prompt)
        rows = [self._cut(row) for row in found.sequences[:, first:].tolist()]
        return rows, found.sequences_scores.tolist()

    def _cut(self, row: list[int]) -> list[int]:
        ends = [place for place, token in enumerate(row) if token in self.stop_ids]
        return row[: ends[0] + 1] if ends else row


def draw_case(number: int, vocabulary: int, has_encoder: bool) -> SearchCase:
    """A search with every option there is, by its number."""
    draw = random.Random(number)
    num_beams = draw.choice([2, 3, 4, 5, 8])
    max_tokens = draw.choice([1, 2, 5, 12, 20])
    options: dict[str, Any] = {
        "num_beams": num_beams,
        "num_return_sequences": draw.randint(1, num_beams),
        "length_penalty": draw.choice([1.0, 0.0, -0.5, 0.6, 2.0, -2.0, 1.5]),
        "early_stopping": draw.choice([True, False, "never"]),
        "no_repeat_ngram_size": draw.choice([0, 0, 1, 2, 3]),
        "repetition_penalty": draw.choice([1.0, 1.0, 1.3]),
        "min_new_tokens": draw.choice([0, 0, 0, min(3, max_tokens)]),
    }
    if has_encoder and draw.random() < 0.3:
        options["forced_bos_token_id"] = draw.randrange(3, vocabulary)
    stop_ids = sorted(draw.sample(range(3, vocabulary), draw.choice([0, 1, 3, 8, 14])))
    return SearchCase(max_tokens, stop_ids, **options)


def assert_same_search(
    case: SearchCase, model: Any, prompt: list[int], output: RequestOutput, may_tie: bool = False
) -> None:
    """The engine's sequences and their scores are transformers'.

    Args:
        may_tie: there are others of the same scores, of which each side may find its own.
    """
    expected, scores = case.answers(model, prompt)
    assert len(output.outputs) == len(expected)
    penalty = case.options.get("length_penalty", 1.0)
    for branch, ids, score in zip(output.outputs, expected, scores, strict=True):
        is_stopped = branch.token_ids[-1] in case.stop_ids
        assert branch.finish_reason == ("stop" if is_stopped else "length")
        if score < -1e8:  # transformers fills up with anything where fewer could end
            continue
        assert branch.cumulative_logprob is not None
        own = branch.cumulative_logprob / len(branch.token_ids) ** penalty
        told = case.options, prompt, branch.token_ids, ids, own, score
        assert abs(own - score) <= _CLOSE * max(1.0, abs(score)), told
        assert may_tie or branch.token_ids == ids, told
