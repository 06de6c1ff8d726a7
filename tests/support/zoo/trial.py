"""A family through the engine over some ranks: eight requests of different lengths at once, each held against
transformers given it alone. Knows no way by name, and nothing of how a family is split.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file

from shoal.engine.outputs import CompletionOutput
from shoal.errors import UnsupportedError
from support.zoo.encode import encode
from support.zoo.family import Family
from support.zoo.serve import UNCACHED, aligned, options_of, prompts, ranks_of, save, serve

__all__ = [
    "LENGTHS",
    "TOKENS",
    "TOLERANCE",
    "Service",
    "Trial",
    "measure_service",
    "try_encoding",
    "try_generating",
    "wanted",
]

LENGTHS = (1, 2, 3, 4, 5, 9, 17, 38)  # of the prompts

TOLERANCE = 1e-4  # relative, of log probabilities, vectors and scores in float32
TOKENS = 8  # of each request
_SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 40, "max_num_seqs": 8}
"""So few that prompts come in chunks beside others that decode; an encoder's input is never cut, and fits."""

_TOP = 20  # of the likeliest tokens, whose log probabilities are compared


@dataclass(frozen=True)
class Trial:
    """How a family is served over some ranks."""

    way: str = ""
    error: float = 0.0  # the largest relative one
    problem: str = ""  # how its tokens differ, or why it is not served

    @property
    def verdict(self) -> str:
        """``equal``, ``wrong`` or ``not served``."""
        if not self.way:
            return "not served"
        return "wrong" if self.problem or not self.error <= TOLERANCE else "equal"


@dataclass
class Service:
    """What the table says of a family's service, by rank count."""

    generated: dict[str, Trial] = field(default_factory=dict)  # its text, where it makes some
    encoded: dict[str, Trial] = field(default_factory=dict)  # its vectors and scores, of an encoder

    @classmethod
    def from_dict(cls, fields: Mapping[str, Mapping[str, Any]]) -> Service:
        """What :func:`dataclasses.asdict` made a mapping of."""
        return cls(
            **{part: {n: Trial(**trial) for n, trial in found.items()} for part, found in fields.items()}
        )

    @property
    def is_right(self) -> bool:
        return all(t.verdict == "equal" for part in (self.generated, self.encoded) for t in part.values())


@dataclass(frozen=True)
class Wanted:
    """What transformers gives for one prompt."""

    ids: list[int]
    scores: torch.Tensor  # [TOKENS, V]: log probabilities


@torch.no_grad()
def wanted(family: Family, path: Path) -> list[Wanted]:
    """What ``generate`` makes of each prompt alone, from the family's folder."""
    model_class, _ = family.load()
    model: Any = model_class.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    # Again: some classes (Youtu) draw an embedding anew after it was loaded.
    model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    options = UNCACHED.get(family.name, {})
    # A copy each: some models go on in another way once they have seen a short input.
    return [_wanted(copy.deepcopy(model), prompt, options) for prompt in prompts(lengths=LENGTHS)]


def _wanted(model: Any, prompt: Sequence[int], options: Mapping[str, Any]) -> Wanted:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        do_sample=False,
        num_beams=1,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return Wanted(out.sequences[0, -TOKENS:].tolist(), torch.cat(out.logits).float().log_softmax(-1))


def try_generating(family: Family, path: Path, expected: Sequence[Wanted], ranks: int) -> Trial:
    """All prompts at once through an engine of ``ranks`` ranks.

    Raises:
        UnsupportedError: it is not served.
    """
    with ranks_of(family, ranks):
        try:
            served = serve(
                path,
                prompts(lengths=LENGTHS),
                TOKENS,
                ranks,
                logprobs=_TOP,
                **_SETTINGS,
                **options_of(family, ranks),
            )
        except UnsupportedError as error:
            return Trial(problem=str(error))
    compared = [_compare(got, want) for got, want in zip(served.outputs, expected, strict=True)]
    differing = [f"request {n} at token {at}" for n, (_, at) in enumerate(compared) if at is not None]
    way = _way(served.info.way, served.info.notes)
    return Trial(way, max(gap for gap, _ in compared), ", ".join(differing))


def _compare(got: CompletionOutput, want: Wanted) -> tuple[float, int | None]:
    """The largest relative error of log probabilities up to the first token that differs, and its place."""
    assert got.logprobs is not None and len(got.token_ids) == len(want.ids), got
    worst = 0.0
    for at, (step, scores) in enumerate(zip(got.logprobs, want.scores, strict=True)):
        gaps = [abs(found.logprob - float(scores[token])) for token, found in step.items()]
        worst = max(worst, max(gaps) / float(scores.abs().max()))
        if got.token_ids[at] != want.ids[at]:
            return worst, at
    return worst, None


def _way(way: str, notes: Sequence[str]) -> str:
    """With what it does not allow of a batch, where its note says so."""
    said = f"served the {way} way: "
    return next((f"{way}: {note.removeprefix(said)}" for note in notes if note.startswith(said)), way)


def try_encoding(family: Family, path: Path, ranks: int) -> Trial:
    """All texts at once through encoder ranks.

    Raises:
        UnsupportedError: it is not served.
    """
    found = encode(family, path, ranks)
    return Trial(found.way, found.error)


def measure_service(family: Family, ranks: Sequence[int]) -> Service:
    """Serve a family over each rank count, for all that it is for."""
    service, family = Service(), aligned(family)
    with TemporaryDirectory() as folder:
        path = save(family, Path(folder))
        expected = wanted(family, path) if family.can_generate else []
        for count in ranks:
            if family.can_generate:
                service.generated[str(count)] = _said(try_generating, family, path, expected, count)
            if family.kind == "encoder":
                service.encoded[str(count)] = _said(try_encoding, family, path, count)
    return service


def _said(attempt: Callable[..., Trial], *arguments: Any) -> Trial:
    """What came of it; a family may fail in any way, and the table says how."""
    try:
        return attempt(*arguments)
    except UnsupportedError as error:
        return Trial(problem=str(error).removeprefix("model: "))
    except Exception as error:
        return Trial(problem=f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:300]}")
