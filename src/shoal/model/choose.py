"""Which way a decoder is served, decided by trying: the deepest way whose numbers agree with the model's
own plain attention is taken, and why the others were not is said. Knows no family names.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from transformers import PreTrainedModel

from shoal.attention.base import PagedKernel
from shoal.errors import UnsupportedError
from shoal.model.base import Careful, ServedModel
from shoal.model.causal import PaddedCausal, PagedCausal
from shoal.model.compiled import CompiledModel
from shoal.model.recompute import RecomputeCausal
from shoal.model.selfcheck import SelfCheck, difference, make_check, ragged, tolerance
from shoal.model.state import StateCausal

__all__ = [
    "Chosen",
    "Fuse",
    "FusedModel",
    "Pack",
    "PackedModel",
    "difference",
    "pack_if_right",
    "ragged",
    "serve_causal",
    "tolerance",
]


class FusedModel(ServedModel, Protocol):
    """A served model that can be put back."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was fused and what not."""
        ...

    @property
    def layers_fused(self) -> int:
        """How many layers."""
        ...

    @property
    def packed_bytes(self) -> int:
        """Bytes of weights that are held packed."""
        ...

    @property
    def is_rounded(self) -> bool:
        """Whether its weights are other ones on purpose: then its logits are reported, not held to."""
        ...

    def restore(self) -> None:
        """Put the model's own code back."""
        ...


class PackedModel(Protocol):
    """Modules outside fused layers that compute with packed weights, and can be put back."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was packed and what not."""
        ...

    @property
    def num_linears(self) -> int:
        """How many linears, on every rank."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that are held packed."""
        ...

    @property
    def is_rounded(self) -> bool:
        """Whether :meth:`round` makes the weights other ones."""
        ...

    def round(self) -> None:
        """Hold the weights, whole until now, in as few bits as is wanted."""
        ...

    def restore(self) -> None:
        """Put the model's own code back."""
        ...


Fuse = Callable[[PreTrainedModel, PagedCausal], FusedModel]
Pack = Callable[[PreTrainedModel, Callable[[], object]], PackedModel]
"""Given a model, and what runs it; which is done once, before anything is replaced, or not at all."""


class Chosen(NamedTuple):
    """How a model is served, and what was said about it."""

    model: ServedModel
    notes: tuple[str, ...]
    packed_bytes: int = 0  # of weights that modules no longer hold


def serve_causal(
    module: PreTrainedModel,
    kernel: PagedKernel,
    device: torch.device,
    fuse: Fuse | None = None,
    pack: Pack | None = None,
    compiles: bool = False,
    way: str = "auto",
) -> Chosen:
    """Find the way ``module`` (weights loaded, on ``device``) is served.

    Args:
        fuse: makes a model on the paged way deeper; None leaves it.
        pack: packs what is then left of the model's modules, whatever the way; None leaves them.
        compiles: what is on the paged way, neither fused nor packed, goes through ``torch.compile``.
        way: the only one to try; ``auto`` tries all, the fast ones first.

    Raises:
        UnsupportedError: no way gives the model's own logits.
    """
    module.config._attn_implementation = "eager"
    check = make_check(module, device)
    if not check.is_finite:
        raise UnsupportedError(
            f"model: {type(module).__name__}'s logits are not finite in {module.dtype}: damaged weights, "
            "or a dtype too narrow for them (try --dtype float32)",
            field="model",
        )
    model, notes = _first_right(module, kernel, check, way)
    packed_bytes = 0
    if fuse is not None and isinstance(model, PagedCausal):
        deeper, said = _fused(fuse(module, model), check)
        notes += said
        if deeper is not None:
            model, packed_bytes = deeper, deeper.packed_bytes
    if pack is not None:
        num_bytes, said = _packed(pack, module, model, check)
        notes += said
        packed_bytes += num_bytes
    if compiles:
        notes.append(_compiled(module, model, packed_bytes, check))
    return Chosen(model, (*notes, f"served the {model.way} way"), packed_bytes)


def _first_right(
    module: PreTrainedModel, kernel: PagedKernel, check: SelfCheck, only: str
) -> tuple[ServedModel, list[str]]:
    """The module on the first way that proves, and what was said.

    Raises:
        UnsupportedError: none does.
    """
    notes: list[str] = []
    ways: tuple[type[PagedCausal | PaddedCausal | StateCausal | RecomputeCausal], ...] = (
        PagedCausal,
        PaddedCausal,
        StateCausal,
        RecomputeCausal,
    )
    if check.oddity is not None:  # what the others keep is for the pass that generate does not make
        notes.append(f"neither {', '.join(way.way for way in ways[:-1])}: {check.oddity}")
        ways = ways[-1:]
    for way in (way for way in ways if only in ("auto", way.way)):
        module.config._attn_implementation = "eager"  # PagedCausal sets its own
        model = way.of(module, kernel)
        first_problem = problem = check.problem(model)
        while problem is not None and isinstance(model, Careful) and model.be_more_careful():
            problem = check.problem(model)
        if problem is None:
            return model, [*notes, *(model.notes if isinstance(model, Careful) else ())]
        notes.append(f"not {way.way}: {first_problem}")
    raise UnsupportedError(
        f"model: {type(module).__name__} cannot be served: {'; '.join(notes)}", field="model"
    )


def _fused(
    model: FusedModel,
    check: SelfCheck,
) -> tuple[FusedModel | None, tuple[str, ...]]:
    """The fused model if its logits are right; else it is put back as it was, and why is said."""
    if not model.layers_fused:
        model.restore()
        return None, model.notes
    if model.is_rounded:
        gap = check.served_difference(model)
        if gap == float("inf"):
            model.restore()
            return None, ("not fused: with rounded weights its logits are not finite",)
        return model, (*model.notes, f"logits differ by {gap:.1e} from those of unrounded weights")
    problem = check.problem(model)
    if problem is None:
        return model, model.notes
    model.restore()
    return None, (f"not fused: {problem}",)


def _packed(
    pack: Pack,
    module: PreTrainedModel,
    model: ServedModel,
    check: SelfCheck,
) -> tuple[int, tuple[str, ...]]:
    """Bytes of the modules packed, and what is said of them; they are put back if the logits are others."""

    before: list[torch.Tensor] = []  # where fused layers' weights are rounded, not what is expected

    def run() -> None:
        for prompt in check.prompts:
            every = torch.arange(len(prompt), device=check.device)
            before.append(model.plain(torch.tensor(prompt, device=check.device), every))

    return pack_if_right(
        pack(module, run),
        lambda: replace(check, expected=before).problem(model),
        lambda: check.served_difference(model),
    )


def pack_if_right(
    packed: PackedModel, problem: Callable[[], str | None], gap: Callable[[], float]
) -> tuple[int, tuple[str, ...]]:
    """Bytes of the modules packed, rounded if they are to be, and what is said of them; they are put back if
    the logits are others.

    Args:
        problem: tries the model with whole weights; why it must not be used, or None.
        gap: tries it with rounded ones; the largest relative difference to unrounded ones.
    """
    if not packed.num_linears:
        packed.restore()
        return 0, packed.notes
    found = problem()
    if found is not None:
        packed.restore()
        return 0, (f"no linear packed: {found}",)
    if not packed.is_rounded:
        return packed.num_bytes, packed.notes
    packed.round()
    error = gap()
    if error == float("inf"):
        packed.restore()
        return 0, ("no linear packed: with rounded weights its logits are not finite",)
    said = f"with them, logits differ by {error:.1e} from those of unrounded weights"
    return packed.num_bytes, (*packed.notes, said)


def _compiled(
    module: PreTrainedModel,
    model: ServedModel,
    packed_bytes: int,
    check: SelfCheck,
) -> str:
    """Compile what can be; it is put back if that fails, or if the logits are others."""
    if packed_bytes:
        return "not compiled: our CPU kernels compute in the modules' place; --cpu-kernels off leaves them"
    if not isinstance(model, PagedCausal):
        return f"not compiled: only what is served the paged way is, this goes the {model.way} way"
    started = time.perf_counter()
    compiled = CompiledModel(module, model)
    problem = check.problem(model)
    if problem is None:
        return f"compiled in {time.perf_counter() - started:.0f} s"
    compiled.restore()
    return f"not compiled: {problem}"
