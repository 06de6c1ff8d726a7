"""How an encoder-decoder's rows are put together, decided by trying: the freest manner whose logits agree
with those of the model called plainly is taken, and what it does not allow is said. Knows no family names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from shoal.attention.hook import use_attention
from shoal.attention.pages import allocate
from shoal.errors import UnsupportedError
from shoal.model.base import Ragged, Source
from shoal.model.build import model_length
from shoal.model.choose import Chosen
from shoal.model.replaced import Judge, Pack, pack_if_right
from shoal.model.selfcheck import difference, ragged, tolerance
from shoal.model.seq2seq import EncoderDecoder, Manner
from shoal.model.trial import Trials
from shoal.plan.skeleton import embedding_size

__all__ = ["serve_seq2seq"]

_BLOCK_SIZE = 4  # of the self-check's own pages
_LENGTHS = ((11, 7), (6, 4))  # (encoder, decoder) tokens of its requests
_IDS = 1000  # of the vocabulary: low ones are there however it is cut
_LENGTH_WORDS = ("block", "chunk", "window", "radius")  # in names of settings on which code depends
_TIMES = 16  # so many of them: past the lengths up to which the model's code goes another way
_LONGEST = 1500  # tokens of an input: what a check at load may cost


@dataclass(frozen=True, slots=True)
class _Sample:
    """One request of the check, and what ``generate`` computes for it."""

    encoder_ids: list[int]
    ids: list[int]
    expected: torch.Tensor  # [T, V]
    gap: float  # of one pass over all tokens to that


def serve_seq2seq(
    module: PreTrainedModel, device: torch.device, pack: Pack | None = None, trials: Trials | None = None
) -> Chosen:
    """Find how ``module`` (weights loaded, on ``device``) is served; all ranks call together.

    Args:
        pack: packs the weights of the model's modules; None leaves them.
        trials: of the group whose part ``module`` is; None: it is whole.

    Raises:
        UnsupportedError: no manner gives the model's own logits.
    """
    trials = trials or Trials()
    use_attention(module, "eager")
    samples = _samples(module, device, trials)
    gap = max(sample.gap for sample in samples)
    oddity = trials.agree(gap <= tolerance(module.dtype), f"several at once differ by {gap:.1e}")
    odd = () if oddity is None else (f"only token by token it computes what generate does: {oddity}",)
    problem = ""
    for manner in _manners(oddity is None, _mixes(module, device, trials)):
        model = EncoderDecoder(module, manner)
        judge = _judge(model, samples, module.dtype, device, trials)
        found = judge.of_whole()
        if found is None:
            said = f"served the {model.way} way" + (f": {manner}" if str(manner) else "")
            num_bytes, notes = _packed(pack, module, model, samples, judge) if pack else (0, ())
            return Chosen(model, (*odd, *notes, said), num_bytes)
        problem = problem or found
    raise UnsupportedError(
        f"model: {type(module).__name__} cannot be served as an encoder-decoder: {problem}", field="model"
    )


def _manners(takes_several: bool, mixes_long_inputs: bool) -> Iterator[Manner]:
    """From the freest on."""
    for takes_chunks in (True, False)[not takes_several :]:
        for mixes_lengths in (True, False):
            for mixes_inputs in (True, False)[not mixes_long_inputs :]:
                yield Manner(mixes_lengths, takes_chunks, mixes_inputs)


def _judge(
    model: EncoderDecoder,
    samples: Sequence[_Sample],
    dtype: torch.dtype,
    device: torch.device,
    trials: Trials,
) -> Judge:
    """What decides on a model's logits."""

    def problem() -> str | None:
        ids = torch.tensor(samples[0].ids, device=device)
        model.plain(ids, torch.arange(len(ids), device=device))
        error = gap()
        return None if error <= tolerance(dtype) else f"logits over pages differ by {error:.1e}"

    def gap() -> float:
        return _served_difference(model, samples, dtype, device)

    return Judge(trials, problem, gap)


def _packed(
    pack: Pack, module: PreTrainedModel, model: EncoderDecoder, samples: Sequence[_Sample], judge: Judge
) -> tuple[int, tuple[str, ...]]:
    """Bytes of the modules packed, and what is said of them; they are put back if the logits are others."""

    def run() -> None:
        for sample in samples:
            encoder_ids, ids = (
                torch.tensor(own, device=sample.expected.device) for own in (sample.encoder_ids, sample.ids)
            )
            model.whole(encoder_ids, ids)

    return pack_if_right(pack(module, run), judge)


def _samples(module: PreTrainedModel, device: torch.device, trials: Trials) -> list[_Sample]:
    """What the model called plainly gives.

    Raises:
        UnsupportedError: it cannot be called so, or its logits are no numbers.
    """
    plain = EncoderDecoder(module, Manner())
    samples: list[_Sample] = []
    problem = trials.problem(lambda: samples.extend(_sample(plain, *own, device) for own in _LENGTHS))
    if problem is not None:
        raise UnsupportedError(
            f"model: {type(module).__name__} makes no logits of an encoder's and a decoder's tokens alone: "
            f"{problem}",
            field="model",
        )
    is_finite = all(bool(torch.isfinite(sample.expected).all()) for sample in samples)
    if trials.agree(is_finite, "not a number") is not None:
        raise UnsupportedError(
            f"model: {type(module).__name__}'s logits are not finite in {module.dtype}: damaged weights, "
            "or a dtype too narrow for them (try --dtype float32)",
            field="model",
        )
    return samples


def _sample(model: EncoderDecoder, encoder: int, decoder: int, device: torch.device) -> _Sample:
    encoder_ids, ids = _plain_ids(model.config, encoder, 7), _plain_ids(model.config, decoder, 5)
    given = torch.tensor(encoder_ids, device=device), torch.tensor(ids, device=device)
    expected = model.stepwise(*given)
    return _Sample(encoder_ids, ids, expected, difference(model.whole(*given), expected))


def _plain_ids(config: Any, count: int, stride: int) -> list[int]:
    """Tokens that mean nothing to the model's code, as padding does."""
    special = {value for name, value in vars(config).items() if name.endswith("_token_id")}
    plain = [i for i in range(min(embedding_size(config), _IDS)) if i not in special]
    return [plain[stride * (i + count) % len(plain)] for i in range(count)]


def _long_inputs(config: Any, device: torch.device) -> list[torch.Tensor]:
    """Two inputs of several times the length of a block or window, where the model has such; else none."""
    sizes = [
        size
        for name, value in vars(config).items()
        if any(word in name for word in _LENGTH_WORDS)
        for size in (value if isinstance(value, (list, tuple)) else [value])
        if type(size) is int and size > 1
    ]
    if not sizes:
        return []
    length = min(_TIMES * max(sizes), _LONGEST, model_length(config) or _LONGEST)
    return [torch.tensor(_plain_ids(config, n, 7), device=device) for n in (length, length * 3 // 4)]


def _mixes(module: PreTrainedModel, device: torch.device, trials: Trials) -> bool:
    """Whether long inputs come out of the encoder side by side as they do alone."""
    model, inputs = EncoderDecoder(module, Manner()), _long_inputs(module.config, device)

    def problem() -> str | None:
        together = model.encode(inputs) if inputs else ()
        for ids, states in zip(inputs, together, strict=True):
            error = difference(states[: len(ids)], model.encode([ids])[0])
            if error > tolerance(module.dtype):
                return f"long inputs side by side differ by {error:.1e}"
        return None

    return trials.problem(problem) is None


def _served_difference(
    model: EncoderDecoder, samples: Sequence[_Sample], dtype: torch.dtype, device: torch.device
) -> float:
    """Largest relative error of logits over pages: inputs encoded alone and together, decoders in chunks, at
    one length and at two, and side by side with a row whose input is only now encoded.
    """
    blocks = [-(-len(own) // _BLOCK_SIZE) for s in samples for own in (s.encoder_ids, s.ids)]
    model.use_pages(allocate(model.kv_shapes, sum(blocks), _BLOCK_SIZE, dtype, device))
    # Scattered block ids, so that a batch that ignores the table is found out.
    every = torch.split(torch.arange(sum(blocks), device=device).flip(0), blocks)
    tables = list(zip(every[::2], every[1::2], strict=True))  # (cross, own)
    long, short = 0, 1
    steps: list[list[tuple[int, int, int]]] = [  # (sample, from, to)
        [(long, 0, 1), (short, 0, 1)],
        [(short, 1, 2), (long, 1, 2)],
        [(long, 2, 5), (short, 0, 2)],  # the short one begins anew
        [(short, 2, 3), (long, 5, 6)],
        [(short, 0, 1), (long, 6, 7)],
    ]
    worst = 0.0
    for step in steps:
        step = sorted(step, key=lambda part: part[2] - part[1] > 1)
        batch = _batch(samples, tables, step, device)
        want = torch.stack([samples[n].expected[end - 1] for n, _, end in step])
        worst = max(worst, difference(model.logits(batch), want))
    return worst


def _batch(
    samples: Sequence[_Sample],
    tables: Sequence[tuple[torch.Tensor, torch.Tensor]],
    step: Sequence[tuple[int, int, int]],
    device: torch.device,
) -> Ragged:
    batch = ragged(
        [(samples[n].ids[start:end], start, tables[n][1], True) for n, start, end in step],
        _BLOCK_SIZE,
        device,
    )
    sources = []
    for n, start, _ in step:
        encoder_ids = samples[n].encoder_ids
        ids = torch.tensor(encoder_ids, device=device) if start == 0 else None
        sources.append(Source(len(encoder_ids), tables[n][0], ids))
    return replace(batch, sources=sources)
