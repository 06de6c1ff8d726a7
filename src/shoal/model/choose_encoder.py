"""Which way an encoder is served, decided by trying: the deepest way whose vectors and scores agree with
those of the model called plainly, one text after the other, is taken; why the others were not is said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from transformers import PreTrainedModel

from shoal.attention.base import PagedKernel
from shoal.errors import UnsupportedError
from shoal.model.build import model_length
from shoal.model.choose import Pack, difference, tolerance
from shoal.model.encoder import AloneEncoder, EncoderModel, PackedEncoder, PaddedEncoder, Texts
from shoal.model.pooling import tasks_of

__all__ = ["ChosenEncoder", "FuseEncoder", "FusedEncoder", "serve_encoder"]

_LENGTHS = (11, 6, 3, 9)  # of the check's texts, where the model takes so many positions
_LEAST_VOCABULARY = 256  # of a model whose config has no number: its tokens are characters
_LONGEST = 600  # of a text that is longer than a sliding window

# Whatever a model's own code makes of a batch it was not written for: this way is not for it.
_NOT_FOR_IT = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)


class FusedEncoder(Protocol):
    """Layers of an encoder on the packed way that compute in our kernels, and can be put back."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was fused and what not."""
        ...

    @property
    def num_fused(self) -> int:
        """How many layers."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that are held packed."""
        ...

    @property
    def computes_alone(self) -> bool:
        """Whether all layers do, with no module of the model's own in between."""
        ...

    @property
    def is_rounded(self) -> bool:
        """Whether its weights are other ones on purpose: what differs is reported, not held to."""
        ...

    def restore(self) -> None:
        """Put the model's own code back."""
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
) -> ChosenEncoder:
    """Find the way ``module`` (weights loaded, on ``device``) is served.

    Args:
        fuse: makes a model on the packed way deeper; None leaves it.
        pack: packs what is then left of the model's modules, whatever the way; None leaves them.

    Raises:
        UnsupportedError: the model's own numbers are not finite, or it cannot be called with token ids alone.
    """
    module.config._attn_implementation = "eager"
    check = _Check(module, device)
    notes: list[str] = []
    packed_bytes, computes_alone = 0, False
    model = _deepest(module, kernel, check, notes)
    if fuse is not None and isinstance(model, PackedEncoder):
        fused = _fuse(fuse, module, model, check, notes)
        if fused is not None:
            packed_bytes, computes_alone = fused.num_bytes, fused.computes_alone
    if pack is not None:
        packed_bytes += _pack(pack, module, model, check, notes)
    return ChosenEncoder(model, (*notes, f"served the {model.way} way"), packed_bytes, computes_alone)


def _deepest(module: PreTrainedModel, kernel: PagedKernel, check: _Check, notes: list[str]) -> EncoderModel:
    """The first way that is right, hooked in."""
    for is_causal in (False, True):
        packed = PackedEncoder(module, kernel, is_causal)
        try:
            packed.measure(check.longest)
            packed.hook()
        except _NOT_FOR_IT as error:
            problem: str | None = f"{type(error).__name__}: {str(error)[:200]}"
        else:
            problem = check.problem(packed)
        if problem is None:
            return packed
        packed.unhook()
        notes.append(f"not packed, attention {'ahead hidden' if is_causal else 'both ways'}: {problem}")
    for attention in ("sdpa", "eager"):
        if attention == "sdpa" and not getattr(module, "_supports_sdpa", False):
            continue
        module.config._attn_implementation = attention
        padded = PaddedEncoder(module)
        problem = check.problem(padded)
        if problem is None:
            return padded
        notes.append(f"not padded, {attention} attention: {problem}")
    return AloneEncoder(module)


def _fuse(
    fuse: FuseEncoder, module: PreTrainedModel, model: PackedEncoder, check: _Check, notes: list[str]
) -> FusedEncoder | None:
    """What was fused; layers are put back where the model's numbers become others."""
    model.unhook()
    fused = fuse(module, model)
    model.hook()
    notes += fused.notes
    if not fused.num_fused:
        fused.restore()
        return None
    if fused.is_rounded:
        gap = check.gap(model)
        if gap < float("inf"):
            notes.append(f"vectors differ by {gap:.1e} from those of unrounded weights")
            return fused
        problem: str | None = "with rounded weights its vectors are not finite"
    else:
        problem = check.problem(model)
    if problem is None:
        return fused
    fused.restore()
    notes.append(f"not fused: {problem}")
    return None


def _pack(pack: Pack, module: PreTrainedModel, model: EncoderModel, check: _Check, notes: list[str]) -> int:
    """Bytes of the modules packed; they are put back where the model's numbers become others."""
    before: list[torch.Tensor] = []  # where fused layers' weights are rounded, not what is expected
    packed = pack(module, lambda: before.extend(check.results(model)))
    notes += packed.notes
    if not packed.num_linears:
        packed.restore()
        return 0
    problem = check.problem(model, before)
    if problem is None and packed.is_rounded:
        packed.round()
        gap = check.gap(model)
        notes.append(f"with them, vectors differ by {gap:.1e} from those of unrounded weights")
        problem = None if gap < float("inf") else "with rounded weights its vectors are not finite"
    if problem is None:
        return packed.num_bytes
    packed.restore()
    notes.append(f"no linear packed: {problem}")
    return 0


class _Check:
    """Texts, and what the model called plainly makes of them."""

    def __init__(self, module: PreTrainedModel, device: torch.device) -> None:
        self._tasks = tasks_of(type(module))
        self._tolerance = tolerance(module.dtype)
        config = module.config.get_text_config()
        vocabulary: int = getattr(config, "vocab_size", _LEAST_VOCABULARY)
        most = model_length(module.config) or _LONGEST
        lengths = [min(length, most) for length in (_longest(config), *_LENGTHS)]
        # Padding's own token would be taken for padding; those below are mostly special ones.
        first = min(5, vocabulary - 1)
        ids = [first + (7 * i + 3 * n) % (vocabulary - first) for n in lengths for i in range(n)]
        pad = getattr(config, "pad_token_id", None)
        ids = [token if token != pad else max(0, token - 1) for token in ids]
        self.texts = Texts(torch.tensor(ids, device=device), lengths)
        self.longest = self.texts.ids[: lengths[0]]
        self._wanted = torch.tensor([2, len(ids) - 3], device=device)
        try:
            self._expected = self.results(AloneEncoder(module))
        except _NOT_FOR_IT as error:
            raise UnsupportedError(
                f"model: {type(module).__name__} makes no vector of each token from token ids alone: "
                f"{type(error).__name__}: {str(error)[:200]}",
                field="model",
            ) from error
        if not all(bool(torch.isfinite(found).all()) for found in self._expected):
            raise UnsupportedError(
                f"model: what {type(module).__name__} makes is not finite in {module.dtype}: damaged weights "
                "or too narrow a dtype (try --dtype float32)",
                field="model",
            )

    def results(self, model: EncoderModel) -> list[torch.Tensor]:
        """All that the model can answer of the texts."""
        found = [model.hidden(self.texts)]
        if "classify" in self._tasks:
            found.append(model.class_logits(self.texts))
        if "token_classify" in self._tasks:
            found.append(model.token_logits(self.texts))
        if "fill_mask" in self._tasks:
            found.append(model.word_logits(self.texts, self._wanted))
        return found

    def gap(self, model: EncoderModel, expected: list[torch.Tensor] | None = None) -> float:
        """Largest relative error of any result."""
        found = self.results(model)
        return max(map(difference, found, expected or self._expected))

    def problem(self, model: EncoderModel, expected: list[torch.Tensor] | None = None) -> str | None:
        """Why the model must not be used so, or None."""
        try:
            gap = self.gap(model, expected)
        except _NOT_FOR_IT as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
        return None if gap <= self._tolerance else f"vectors or scores differ by {gap:.1e}"


def _longest(config: object) -> int:
    """Tokens of the longest text: more than a window, where the config has one."""
    windows = [getattr(config, name, None) for name in ("sliding_window", "local_attention")]
    return max((min(w + 9, _LONGEST) for w in windows if isinstance(w, int) and w > 0), default=14)
