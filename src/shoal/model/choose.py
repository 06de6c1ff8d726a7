"""Which way a decoder is served, decided by trying: the deepest way whose numbers agree with the model's
own plain attention on every rank is taken, and why the others were not is said. Knows no family names.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from transformers import PreTrainedModel

from shoal.attention.base import PagedKernel
from shoal.attention.hook import use_attention
from shoal.errors import UnsupportedError
from shoal.model.base import Careful, ServedModel
from shoal.model.causal import PaddedCausal, PagedCausal
from shoal.model.compiled import CompiledModel
from shoal.model.recompute import RecomputeCausal
from shoal.model.replaced import Fused, Judge, Pack, fuse_if_right, pack_if_right
from shoal.model.selfcheck import SelfCheck, make_check
from shoal.model.state import StateCausal
from shoal.model.trial import Trials

__all__ = ["Chosen", "Fuse", "FusedModel", "serve_causal"]


class FusedModel(ServedModel, Fused, Protocol):
    """A served model that can be put back."""


Fuse = Callable[[PreTrainedModel, PagedCausal], FusedModel]


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
    trials: Trials | None = None,
) -> Chosen:
    """Find the way ``module`` (weights loaded, on ``device``) is served; all ranks call together.

    Args:
        fuse: makes a model on the paged way deeper; None leaves it.
        pack: packs what is then left of the model's modules, whatever the way; None leaves them.
        compiles: what is on the paged way, neither fused nor packed, goes through ``torch.compile``.
        way: the only one to try; ``auto`` tries all, the fast ones first.
        trials: of the group whose part ``module`` is; None: it is whole.

    Raises:
        UnsupportedError: no way gives the model's own logits.
    """
    trials = trials or Trials()
    use_attention(module, "eager")
    check = make_check(module, device, trials)
    model, notes = _first_right(module, kernel, check, trials, way)
    packed_bytes = 0
    if fuse is not None and isinstance(model, PagedCausal):
        fused = fuse(module, model)
        judge = Judge(trials, lambda: check.problem(fused), lambda: check.served_difference(fused))
        is_fused, said = fuse_if_right(fused, judge)
        notes += said
        if is_fused:
            model, packed_bytes = fused, fused.num_bytes
    if pack is not None:
        num_bytes, said = _packed(pack, module, model, check, trials)
        notes += said
        packed_bytes += num_bytes
    if compiles:
        notes.append(_compiled(module, model, packed_bytes, check, trials))
    return Chosen(model, (*notes, f"served the {model.way} way"), packed_bytes)


def _first_right(
    module: PreTrainedModel, kernel: PagedKernel, check: SelfCheck, trials: Trials, only: str
) -> tuple[ServedModel, list[str]]:
    """The module on the first way that proves on every rank, and what was said.

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
        use_attention(module, "eager")  # PagedCausal sets its own
        model = way.of(module, kernel)
        problem = _problem(model, check, trials)
        if problem is None:
            return model, [*notes, *(model.notes if isinstance(model, Careful) else ())]
        notes.append(f"not {way.way}: {problem}")
    raise UnsupportedError(
        f"model: {type(module).__name__} cannot be served: {'; '.join(notes)}", field="model"
    )


def _problem(model: ServedModel, check: SelfCheck, trials: Trials) -> str | None:
    """Why a model is not right on every rank, however careful it is; or None."""
    first = problem = trials.problem(lambda: check.problem(model))
    while problem is not None and isinstance(model, Careful):
        if trials.agree(model.be_more_careful(), "no slower way") is not None:
            return first
        problem = trials.problem(lambda: check.problem(model))
    return problem


def _packed(
    pack: Pack, module: PreTrainedModel, model: ServedModel, check: SelfCheck, trials: Trials
) -> tuple[int, tuple[str, ...]]:
    """Bytes of the modules packed, and what is said of them; they are put back if the logits are others."""
    before: list[torch.Tensor] = []  # where fused layers' weights are rounded, not what is expected

    def run() -> None:
        for prompt in check.prompts:
            every = torch.arange(len(prompt), device=check.device)
            before.append(model.plain(torch.tensor(prompt, device=check.device), every))

    packed = pack(module, run)
    judge = Judge(
        trials,
        lambda: replace(check, expected=before).problem(model),
        lambda: check.served_difference(model),
    )
    return pack_if_right(packed, judge)


def _compiled(
    module: PreTrainedModel, model: ServedModel, packed_bytes: int, check: SelfCheck, trials: Trials
) -> str:
    """Compile what can be; it is put back if that fails, or if the logits are others."""
    if packed_bytes:
        return "not compiled: our CPU kernels compute in the modules' place; --cpu-kernels off leaves them"
    if not isinstance(model, PagedCausal):
        return f"not compiled: only what is served the paged way is, this goes the {model.way} way"
    started = time.perf_counter()
    compiled = CompiledModel(module, model)
    problem = trials.problem(lambda: check.problem(model))
    if problem is None:
        return f"compiled in {time.perf_counter() - started:.0f} s"
    compiled.restore()
    return f"not compiled: {problem}"
