"""Which way an encoder is served, decided by trying: the deepest way whose vectors and scores agree on every
rank with those of the model called plainly, one text after the other, is taken; why not the others is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from shoal.attention.base import PagedKernel
from shoal.attention.hook import use_attention
from shoal.errors import UnsupportedError
from shoal.model.build import model_length, windows
from shoal.model.encoder import AloneEncoder, EncoderModel, PackedEncoder, PaddedEncoder, Texts
from shoal.model.pooling import end_token, tasks_of
from shoal.model.replaced import Fused, Judge, Pack, fuse_if_right, pack_if_right
from shoal.model.selfcheck import difference, tolerance
from shoal.model.trial import Trials

__all__ = ["ChosenEncoder", "FuseEncoder", "FusedEncoder", "serve_encoder"]

_LENGTHS = (11, 6, 3, 9)  # of the check's texts, where the model takes so many positions
_LEAST_VOCABULARY = 256  # of a model whose config has no number: its tokens are characters
_LONGEST = 600  # of a text that is longer than a sliding window


class FusedEncoder(Fused, Protocol):
    """Layers of an encoder on the packed way that compute in our kernels."""

    @property
    def computes_alone(self) -> bool:
        """Whether all layers do, with no module of the model's own in between."""
        ...


FuseEncoder = Callable[[PreTrainedModel, PackedEncoder], FusedEncoder]


class ChosenEncoder(NamedTuple):
    """How an encoder is served, and what was said about it."""

    model: EncoderModel
    notes: tuple[str, ...]
    packed_bytes: int = 0  # of weights that modules no longer hold
    computes_alone: bool = False  # all that is large runs in our kernels


@torch.inference_mode()
def serve_encoder(
    module: PreTrainedModel,
    kernel: PagedKernel,
    device: torch.device,
    fuse: FuseEncoder | None = None,
    pack: Pack | None = None,
    way: str = "auto",
    trials: Trials | None = None,
) -> ChosenEncoder:
    """Find the way ``module`` (weights loaded, on ``device``) is served; all ranks call together.

    A model that makes no vector of each token is served for what its head answers.

    Args:
        fuse: makes a model on the packed way deeper; None leaves it.
        pack: packs what is then left of the model's modules, whatever the way; None leaves them.
        way: the only one to try; ``auto`` tries all, the fast ones first.
        trials: of the group whose part ``module`` is; None: it is whole.

    Raises:
        UnsupportedError: the model's own numbers are not finite, it cannot be called with token ids alone, or
            ``way`` is not for it.
    """
    trials = trials or Trials()
    use_attention(module, "eager")
    check = _Check(module, device, trials)
    notes = list(check.notes)
    packed_bytes, computes_alone = 0, False
    model = _deepest(module, kernel, check, notes, way)
    model.makes_vectors = check.makes_vectors
    if fuse is not None and isinstance(model, PackedEncoder):
        model.unhook()
        fused = fuse(module, model)
        model.hook()
        is_fused, said = fuse_if_right(fused, check.judge(model))
        notes += said
        if is_fused:
            packed_bytes, computes_alone = fused.num_bytes, fused.computes_alone
    if pack is not None:
        before: list[torch.Tensor] = []  # where fused layers' weights are rounded, not what is expected
        packed = pack(module, lambda: before.extend(check.results(model)))
        num_bytes, said = pack_if_right(packed, check.judge(model, before))
        notes += said
        packed_bytes += num_bytes
    return ChosenEncoder(model, (*notes, f"served the {model.way} way"), packed_bytes, computes_alone)


def _deepest(
    module: PreTrainedModel, kernel: PagedKernel, check: _Check, notes: list[str], only: str
) -> EncoderModel:
    """The first way that is right on every rank, hooked in.

    Raises:
        UnsupportedError: the only one that may be tried is not.
    """
    for is_causal in (False, True):
        if only not in ("auto", PackedEncoder.way):
            break
        packed = PackedEncoder(module, kernel, is_causal)
        problem = check.trials.problem(lambda packed=packed: _packing_problem(packed, check))  # type: ignore[misc]
        if problem is None:
            return packed
        packed.unhook()
        notes.append(f"not packed, attention {'ahead hidden' if is_causal else 'both ways'}: {problem}")
    for attention in ("sdpa", "eager"):
        if only not in ("auto", PaddedEncoder.way):
            break
        if attention == "sdpa" and not getattr(module, "_supports_sdpa", False):
            continue
        use_attention(module, attention)
        # All texts together: chunks of columns may be so long that only much padding adds one.
        problem = check.judge(PaddedEncoder(module, most_padding=math.inf)).of_whole()
        if problem is None:
            return PaddedEncoder(module)
        notes.append(f"not padded, {attention} attention: {problem}")
    if only not in ("auto", AloneEncoder.way):
        raise UnsupportedError(
            f"way: {type(module).__name__} cannot be served so: {'; '.join(notes)}", field="way"
        )
    return AloneEncoder(module)


def _packing_problem(packed: PackedEncoder, check: _Check) -> str | None:
    """Why the packed way must not be used, or None; it is hooked in then."""
    packed.measure(check.longest)
    packed.hook()
    return check.problem(packed)


class _Check:
    """Texts, and what the model called plainly makes of them."""

    def __init__(self, module: PreTrainedModel, device: torch.device, trials: Trials) -> None:
        self.trials = trials
        self.makes_vectors = True
        self.notes: tuple[str, ...] = ()
        self._tasks = tasks_of(type(module))
        self._tolerance = tolerance(module.dtype)
        config = module.config.get_text_config()
        vocabulary: int = getattr(config, "vocab_size", _LEAST_VOCABULARY)
        most = model_length(module.config) or _LONGEST
        lengths = [min(length, most) for length in (_longest(config), *_LENGTHS)]
        ids = _ids(vocabulary, lengths, getattr(config, "pad_token_id", None), end_token(module.config))
        self.texts = Texts(torch.tensor(ids, device=device), lengths)
        self.longest = self.texts.ids[: lengths[0]]
        self._wanted = torch.tensor([2, len(ids) - 3], device=device)
        self._expected: list[torch.Tensor] = []
        self._expect(AloneEncoder(module))
        is_finite = all(bool(torch.isfinite(found).all()) for found in self._expected)
        if trials.agree(is_finite, "not a number") is not None:
            raise UnsupportedError(
                f"model: what {type(module).__name__} makes is not finite in {module.dtype}: damaged weights "
                "or too narrow a dtype (try --dtype float32)",
                field="model",
            )

    def _expect(self, alone: AloneEncoder) -> None:
        """Note what the model makes of the texts, with vectors if it has any.

        Raises:
            UnsupportedError: it makes nothing of them.
        """
        problem = self.trials.problem(lambda: self._expected.extend(self.results(alone)))
        if problem is None:
            return
        self.makes_vectors = False
        self._expected.clear()
        said = f"no vector of each token from token ids alone: {problem}"
        if not self._tasks or self.trials.problem(lambda: self._expected.extend(self.results(alone))):
            raise UnsupportedError(f"model: {type(alone.module).__name__} makes {said}", field="model")
        self.notes = (f"it makes {said}",)

    def results(self, model: EncoderModel) -> list[torch.Tensor]:
        """All that the model can answer of the texts."""
        found = [model.hidden(self.texts)] if self.makes_vectors else []
        if "classify" in self._tasks:
            found.append(model.class_logits(self.texts))
        if "token_classify" in self._tasks:
            found.append(model.token_logits(self.texts))
        if "fill_mask" in self._tasks:
            found.append(model.word_logits(self.texts, self._wanted))
        return found

    def judge(self, model: EncoderModel, expected: list[torch.Tensor] | None = None) -> Judge:
        """What decides on a model's results; ``expected`` are those of whole weights, where others are."""
        return Judge(
            self.trials, lambda: self.problem(model, expected), lambda: self._gap(model), results="vectors"
        )

    def problem(self, model: EncoderModel, expected: list[torch.Tensor] | None = None) -> str | None:
        """Why the model must not be used so, or None."""
        gap = self._gap(model, expected)
        return None if gap <= self._tolerance else f"vectors or scores differ by {gap:.1e}"

    def _gap(self, model: EncoderModel, expected: list[torch.Tensor] | None = None) -> float:
        """Largest relative error of any result."""
        return max(map(difference, self.results(model), expected or self._expected))


def _ids(vocabulary: int, lengths: Sequence[int], pad: int | None, end: int | None) -> list[int]:
    """Of one text after the other, none of them padding. Where an end token is looked for, every text has it
    last; the first one, like a pair of texts, has another."""
    first = min(5, vocabulary - 1)  # those below are mostly special ones
    texts = [[first + (7 * i + 3 * n) % (vocabulary - first) for i in range(n)] for n in lengths]
    texts = [[token if token not in (pad, end) else max(0, token - 1) for token in text] for text in texts]
    if end is not None:
        texts[0][len(texts[0]) // 2] = end
        texts = [[*text[:-1], end] for text in texts]
    return [token for text in texts for token in text]


def _longest(config: PreTrainedConfig) -> int:
    """Tokens of the longest text: more than a window, where the config has one."""
    return max((min(window + 9, _LONGEST) for window in windows(config)), default=14)
