"""Which way a decoder is served, decided by trying: the deepest way whose numbers agree with the model's
own plain attention is taken, and why the others were not is said. Knows no family names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from transformers import PreTrainedModel

from shoal.attention.base import PagedKernel
from shoal.attention.pages import allocate
from shoal.errors import UnsupportedError
from shoal.model.base import Ragged, Row, ServedModel
from shoal.model.build import model_length
from shoal.model.causal import Caller, PaddedCausal, PagedCausal

__all__ = ["Chosen", "Fuse", "FusedModel", "Pack", "PackedModel", "ragged", "serve_causal", "tolerance"]

_BLOCK_SIZE = 4  # of the self-check's own pages: small, so that a dozen tokens cross blocks
_LENGTHS = (11, 6)  # of its prompts, where the model takes so many positions


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


def tolerance(dtype: torch.dtype) -> float:
    """Largest relative error two right computations of the same logits may show."""
    return {torch.float64: 1e-9, torch.float32: 2e-4}.get(dtype, 5e-2)


def ragged(
    sequences: Sequence[tuple[Sequence[int], int, torch.Tensor, bool]], block_size: int, device: torch.device
) -> Ragged:
    """A batch from (token ids, start, block ids, logits wanted), single-token sequences put first.

    The order of the wanted logits is that of the reordered rows.
    """
    ordered = sorted(sequences, key=lambda s: len(s[0]) > 1)
    ids: list[int] = []
    positions: list[int] = []
    rows: list[Row] = []
    wanted: list[int] = []
    slots = []
    for tokens, start, blocks, want in ordered:
        rows.append(Row(len(ids), len(tokens), start, blocks))
        at = torch.arange(start, start + len(tokens), device=blocks.device)
        slots.append(blocks[at // block_size] * block_size + at % block_size)
        ids.extend(tokens)
        positions.extend(range(start, start + len(tokens)))
        if want:
            wanted.append(len(ids) - 1)
    return Ragged(
        ids=_tensor(ids, device),
        positions=_tensor(positions, device),
        slots=torch.cat(slots).to(device),
        rows=rows,
        wanted=_tensor(wanted, device),
        block_size=block_size,
    )


def _tensor(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def serve_causal(
    module: PreTrainedModel,
    kernel: PagedKernel,
    device: torch.device,
    fuse: Fuse | None = None,
    pack: Pack | None = None,
) -> Chosen:
    """Find the way ``module`` (weights loaded, on ``device``) is served.

    Args:
        fuse: makes a model on the paged way deeper; None leaves it.
        pack: packs what is then left of the model's modules, whatever the way; None leaves them.

    Raises:
        UnsupportedError: no way gives the model's own logits.
    """
    module.config._attn_implementation = "eager"
    vocabulary: int = module.config.get_text_config().vocab_size
    longest = model_length(module.config) or max(_LENGTHS)
    lengths = [min(length, longest) for length in _LENGTHS]
    prompts = [[(7 * i + 3 * n) % vocabulary for i in range(n)] for n in lengths]
    expected = _reference(module, prompts, device)
    if not all(bool(torch.isfinite(logits).all()) for logits in expected):
        raise UnsupportedError(
            f"model: {type(module).__name__}'s logits are not finite in {module.dtype}: damaged weights, "
            "or a dtype too narrow for them (try --dtype float32)",
            field="model",
        )
    notes: list[str] = []
    for way in (PagedCausal, PaddedCausal):
        module.config._attn_implementation = "eager"  # PagedCausal sets its own
        model = way.of(module, kernel)
        problem = _check(model, prompts, expected, module.dtype, device)
        if problem is None:
            packed_bytes = 0
            if fuse is not None and isinstance(model, PagedCausal):
                deeper, said = _fused(fuse(module, model), prompts, expected, module.dtype, device)
                notes += said
                if deeper is not None:
                    model, packed_bytes = deeper, deeper.packed_bytes
            if pack is not None:
                num_bytes, said = _packed(pack, module, model, prompts, expected, device)
                notes += said
                packed_bytes += num_bytes
            return Chosen(model, (*notes, f"served the {model.way} way"), packed_bytes)
        notes.append(f"not {model.way}: {problem}")
    raise UnsupportedError(
        f"model: {type(module).__name__} cannot be served: {'; '.join(notes)}", field="model"
    )


def _fused(
    model: FusedModel,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[FusedModel | None, tuple[str, ...]]:
    """The fused model if its logits are right; else it is put back as it was, and why is said."""
    if not model.layers_fused:
        model.restore()
        return None, model.notes
    if model.is_rounded:
        gap = _served_difference(model, prompts, expected, dtype, device)
        if gap == float("inf"):
            model.restore()
            return None, ("not fused: with rounded weights its logits are not finite",)
        return model, (*model.notes, f"logits differ by {gap:.1e} from those of unrounded weights")
    problem = _check(model, prompts, expected, dtype, device)
    if problem is None:
        return model, model.notes
    model.restore()
    return None, (f"not fused: {problem}",)


def _packed(
    pack: Pack,
    module: PreTrainedModel,
    model: ServedModel,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[torch.Tensor],
    device: torch.device,
) -> tuple[int, tuple[str, ...]]:
    """Bytes of the modules packed, and what is said of them; they are put back if the logits are others."""

    before: list[torch.Tensor] = []  # where fused layers' weights are rounded, not what is expected

    def run() -> None:
        for prompt in prompts:
            every = torch.arange(len(prompt), device=device)
            before.append(model.plain(torch.tensor(prompt, device=device), every))

    packed = pack(module, run)
    if not packed.num_linears:
        packed.restore()
        return 0, packed.notes
    problem = _check(model, prompts, before, module.dtype, device)
    if problem is not None:
        packed.restore()
        return 0, (f"no linear packed: {problem}",)
    if not packed.is_rounded:
        return packed.num_bytes, packed.notes
    packed.round()
    gap = _served_difference(model, prompts, expected, module.dtype, device)
    if gap == float("inf"):
        packed.restore()
        return 0, ("no linear packed: with rounded weights its logits are not finite",)
    return packed.num_bytes, (
        *packed.notes,
        f"with them, logits differ by {gap:.1e} from those of unrounded weights",
    )


def _reference(
    module: PreTrainedModel, prompts: Sequence[Sequence[int]], device: torch.device
) -> list[torch.Tensor]:
    """Every position's logits [T, V] of each prompt, by the model's own attention, without a cache."""
    caller = Caller(module)
    out = []
    for prompt in prompts:
        ids = torch.tensor(prompt, device=device)
        every = torch.arange(len(prompt), device=device)
        out.append(caller(ids[None], every[None], every, use_cache=False)[0])
    return out


def _check(
    model: ServedModel,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Why ``model`` must not be used, or None: a prompt whole, one in chunks, then decoding side by side."""
    try:
        every = torch.arange(len(prompts[0]), device=device)
        plain = model.plain(torch.tensor(prompts[0], device=device), every)
        if not model.kv_shapes:
            return "its attention does not pass through the interface"
        error = _difference(plain, expected[0])
        if error > tolerance(dtype):
            return f"logits without a cache differ by {error:.1e}"
        error = _served_difference(model, prompts, expected, dtype, device)
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as e:
        # Whatever a model's own code makes of a batch it was not written for: this way is not for it.
        return f"{type(e).__name__}: {str(e)[:200]}"
    return None if error <= tolerance(dtype) else f"logits over pages differ by {error:.1e}"


def _served_difference(
    model: ServedModel,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    """Largest relative error of logits over pages, through prefill, chunks and mixed decode steps."""
    blocks_each = -(-max(_LENGTHS) // _BLOCK_SIZE)
    model.use_pages(allocate(model.kv_shapes, 2 * blocks_each, _BLOCK_SIZE, dtype, device))
    # Interleaved block ids, so that a kernel that ignores the table is found out.
    tables = [torch.arange(k, 2 * blocks_each, 2, device=device) for k in range(2)]
    long, short = prompts
    half, ends, begins = len(long) // 2, len(long) - 2, len(short) - 2
    steps: list[list[tuple[int, int, int]]] = [  # (prompt, from, to)
        [(0, 0, half)],
        [(0, half, ends), (1, 0, begins)],
        [(1, begins, begins + 1), (0, ends, ends + 1)],
        [(0, ends + 1, ends + 2), (1, begins + 1, begins + 2)],
    ]
    worst = 0.0
    for step in steps:
        step = sorted(step, key=lambda s: s[2] - s[1] > 1)
        batch = ragged([((long, short)[p][a:b], a, tables[p], True) for p, a, b in step], _BLOCK_SIZE, device)
        logits = model.logits(batch)
        want = torch.stack([expected[p][b - 1] for p, _, b in step])
        worst = max(worst, _difference(logits, want))
    return worst


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference over the largest magnitude wanted; infinite where not a number."""
    gap = (got - want).abs().max() / want.abs().max().clamp_min(1e-30)
    return float(gap) if torch.isfinite(gap) else float("inf")
