"""Whether rounding explains why a stream differs from what was expected (docs/architecture.md, "What equal
means"). Knows a model's scores and how requests are sampled; no server.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import transformers

from chaos.streams import Branch, Stream
from shoal.bench.coherence import TIE
from shoal.checkpoint.source import resolve
from shoal.messages import SamplingSpec, SequenceStep
from shoal.sampling import noise, processors
from shoal.sampling.sampler import sample

__all__ = ["Judge"]

_SAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_IF_GIVEN = ("presence_penalty", "frequency_penalty", "seed", "min_tokens")


class Judge:
    """Holds streams against a reference's scores.

    At the first difference, the scores of the two competing tokens must be a tie. From there on the stream
    goes its own way, so it is held against the scores on its own ids, to its end: each of its tokens must be
    what they choose, or tie with that.

    Args:
        encode: a prompt's ids.
        logits: the reference's, float32 [tokens, vocabulary]: row i is what follows the first i + 1 ids.
        eos_ids: that end a sequence.
    """

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        logits: Callable[[list[int]], torch.Tensor],
        eos_ids: Sequence[int] = (),
    ) -> None:
        self._encode = encode
        self._logits = logits
        self._eos_ids = tuple(eos_ids)

    @classmethod
    def of_model(cls, name: str) -> Judge:
        """The reference is transformers' own module, in float32."""
        folder = resolve(name)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        eos = model.generation_config.eos_token_id
        return cls(tokenizer.encode, partial(_scores, model), eos if isinstance(eos, list) else [eos])

    def unexplained(self, ask: Mapping[str, Any], want: Stream, have: Stream) -> list[str]:
        """What of a whole stream's differences rounding does not explain."""
        found = []
        for index, branch in sorted(have.branches.items()):
            if branch == want.branches[index]:
                continue
            words = self._of_branch(ask, index, want.branches[index], branch)
            found += [f"choice {index}: {words}"] if words else []
        if have.branches == want.branches and have.usage != want.usage:
            found.append(f"usage {have.usage} instead of {want.usage}")
        return found

    def _of_branch(self, ask: Mapping[str, Any], index: int, want: Branch, have: Branch) -> str | None:
        pairs = zip(want.token_ids, have.token_ids, strict=False)
        first = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
        if first is None:
            return f"the ids agree, and yet {have} instead of {want}"
        chosen, scores = self._choices(ask, index, have.token_ids, first)
        chosen[0] = want.token_ids[first]
        for row, (right, is_there) in enumerate(zip(chosen, have.token_ids[first:], strict=True)):
            gap = abs(float(scores[row, right] - scores[row, is_there]))
            if not gap <= TIE:
                return f"token {first + row} is {is_there} instead of {right}, {gap:.2e} apart"
        return None

    def chosen(self, ask: Mapping[str, Any], index: int, ids: Sequence[int]) -> list[int]:
        """For each of a branch's ids, what the scores choose after those before it."""
        return self._choices(ask, index, ids, 0)[0]

    @torch.inference_mode()
    def _choices(
        self, ask: Mapping[str, Any], index: int, ids: Sequence[int], first: int
    ) -> tuple[list[int], torch.Tensor]:
        """From one of a branch's ids on, what the scores choose, and all scores."""
        prompt = list(self._encode(ask["prompt"]))
        rows = self._logits([*prompt, *ids[:-1]])[len(prompt) - 1 + first :]
        steps = [self._step(ask, index, prompt, ids[:place]) for place in range(first, len(ids))]
        return [token.token_id for token in sample(rows, steps)], _decisive(rows, steps)

    def _step(
        self, ask: Mapping[str, Any], index: int, prompt: list[int], ids: Sequence[int]
    ) -> SequenceStep:
        """What is to be sampled after ``ids``, as the engine says it to ranks."""
        given = {name: ask[name] for name in (*_SAME, *(name for name in _IF_GIVEN if name in ask))}
        history = [*prompt, *ids]
        return SequenceStep(
            sequence_id=0,
            start=len(history) - 1,
            token_ids=array("i", history[-1:]).tobytes(),
            block_ids=b"",
            sampling=SamplingSpec(**given, branch=index, stop_ids=self._eos_ids),
            num_output=len(ids),
            history=array("i", history).tobytes(),
            num_prompt=len(prompt),
        )


def _decisive(logits: torch.Tensor, steps: Sequence[SequenceStep]) -> torch.Tensor:
    """The scores of which the greatest is sampled: edits applied, and noise where there is any."""
    scores = logits.clone()
    processors.apply(scores, steps)
    spec = processors.spec_of(steps[0])
    if spec.temperature == 0:
        return scores
    keys = [noise.row_key(spec.seed, spec.branch, step.start + 1) for step in steps]
    ids = torch.arange(scores.shape[1], dtype=torch.int32)
    return scores / spec.temperature - noise.exponential(torch.tensor(keys, dtype=torch.int32), ids).log()


def _scores(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0].float()
    return logits
