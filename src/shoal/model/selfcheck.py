"""Whether a decoder served some way gives the model's own logits: a prompt whole, one in chunks, then
decoding side by side. Knows no way by name.

What is right is what ``generate`` computes. For a causal model one pass gives it for every position; a model
that prepares its inputs otherwise (a mask token behind the prompt, say) is asked for each position by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from shoal.attention.pages import allocate
from shoal.errors import UnsupportedError
from shoal.model.base import KeepsState, Ragged, Row, ServedModel
from shoal.model.build import model_length, vocabulary_size
from shoal.model.causal import Caller
from shoal.model.recompute import next_logits
from shoal.model.trial import Trials

__all__ = ["SelfCheck", "difference", "make_check", "ragged", "tolerance"]

_BLOCK_SIZE = 4  # of the self-check's own pages: small, so that a dozen tokens cross blocks
_LENGTHS = (11, 6)  # of its prompts, where the model takes so many positions


def tolerance(dtype: torch.dtype) -> float:
    """Largest relative error two right computations of the same logits may show."""
    return {torch.float64: 1e-9, torch.float32: 2e-4}.get(dtype, 5e-2)


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference over the largest magnitude wanted; infinite where not a number."""
    gap = (got - want).abs().max() / want.abs().max().clamp_min(1e-30)
    return float(gap) if torch.isfinite(gap) else float("inf")


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Prompts, and every position's logits that a right way of serving gives."""

    prompts: Sequence[Sequence[int]]  # two, the longer first
    expected: Sequence[torch.Tensor]  # [T, V] each
    dtype: torch.dtype
    device: torch.device
    oddity: str | None = None  # why one pass over a prompt is not what generate computes; None: it is

    @property
    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(logits).all()) for logits in self.expected)

    def problem(self, model: ServedModel) -> str | None:
        """Why ``model`` must not be used, or None.

        Raises:
            Exception: whatever the model's own code raises (:data:`shoal.model.trial.ODDITIES`).
        """
        every = torch.arange(len(self.prompts[0]), device=self.device)
        plain = model.plain(torch.tensor(self.prompts[0], device=self.device), every)
        if model.keeps_kv and not model.kv_shapes and not isinstance(model, KeepsState):
            return "its attention does not pass through the interface"
        error = difference(plain, self.expected[0])
        if error > tolerance(self.dtype):
            return f"logits without a cache differ by {error:.1e}"
        error = self.served_difference(model)
        return None if error <= tolerance(self.dtype) else f"logits step by step differ by {error:.1e}"

    def served_difference(self, model: ServedModel) -> float:
        """Largest relative error through prefill, chunks and mixed decode steps."""
        blocks_each = -(-max(_LENGTHS) // _BLOCK_SIZE)
        model.use_pages(allocate(model.kv_shapes, 2 * blocks_each, _BLOCK_SIZE, self.dtype, self.device))
        if isinstance(model, KeepsState):
            model.use_slots(len(self.prompts))
        # Interleaved block ids, so that a kernel that ignores the table is found out.
        tables = [torch.arange(k, 2 * blocks_each, 2, device=self.device) for k in range(2)]
        worst = 0.0
        for step in self._steps(model.keeps_kv):
            step = sorted(step, key=lambda s: s[2] - s[1] > 1)
            parts = [(self.prompts[p][a:b], a, tables[p], True) for p, a, b in step]
            batch = ragged(parts, _BLOCK_SIZE, self.device, [1 - p for p, _, _ in step])
            want = torch.stack([self.expected[p][b - 1] for p, _, b in step])
            worst = max(worst, difference(model.logits(batch), want))
        return worst

    def _steps(self, keeps_kv: bool) -> list[list[tuple[int, int, int]]]:
        """Shares (prompt, from, to), step by step."""
        long, short = (len(prompt) for prompt in self.prompts)
        half, ends, begins = long // 2, long - 2, short - 2
        if not keeps_kv:
            return [[(0, 0, half)], [(0, 0, half + 1), (1, 0, short - 1)], [(0, 0, short), (1, 0, short)]]
        return [
            [(0, 0, half)],
            [(0, half, ends), (1, 0, begins)],
            [(1, begins, begins + 1), (0, ends, ends + 1)],
            [(0, ends + 1, ends + 2), (1, begins + 1, begins + 2)],
            # Anew, from a single token; and side by side at one length.
            [(0, 0, 1), (1, 0, 1)],
            [(0, 0, begins), (1, 0, begins)],
            [(0, begins, begins + 1), (1, begins, begins + 1)],
        ]


def make_check(module: PreTrainedModel, device: torch.device, trials: Trials) -> SelfCheck:
    """What ``module`` (weights loaded, on ``device``) gives by its own attention, without a cache.

    Raises:
        UnsupportedError: it cannot even be asked for the next token, or what it gives are no numbers.
    """
    vocabulary = vocabulary_size(module.config)
    longest = model_length(module.config) or max(_LENGTHS)
    lengths = [min(length, longest) for length in _LENGTHS]
    prompts = [[(7 * i + 3 * n) % vocabulary for i in range(n)] for n in lengths]
    last: list[torch.Tensor] = []  # of each prompt, and of half the first
    asked = [*prompts, prompts[0][: max(1, lengths[0] // 2)]]
    problem = trials.problem(
        lambda: last.extend(next_logits(module, _tensor(ids, device)[None])[0] for ids in asked)
    )
    if problem is not None:
        raise UnsupportedError(
            f"model: {type(module).__name__} cannot be asked for the token after some: {problem}",
            field="model",
        )
    expected: list[torch.Tensor] = []

    def one_pass() -> str | None:
        expected.extend(_in_one_pass(module, prompts, device))
        rows = [expected[0][-1], expected[1][-1], expected[0][len(asked[-1]) - 1]]
        error = max(map(difference, rows, last))
        if error <= tolerance(module.dtype):
            return None
        return f"a pass over a whole prompt differs by {error:.1e} from those that generate makes"

    oddity = trials.problem(one_pass)
    if oddity is not None:
        expected = [_one_by_one(module, prompt, device) for prompt in prompts]
    check = SelfCheck(prompts, expected, module.dtype, device, oddity)
    if trials.agree(check.is_finite, "not a number") is not None:
        raise UnsupportedError(
            f"model: {type(module).__name__}'s logits are not finite in {module.dtype}: damaged weights, "
            "or a dtype too narrow for them (try --dtype float32)",
            field="model",
        )
    return check


def _in_one_pass(
    module: PreTrainedModel, prompts: Sequence[Sequence[int]], device: torch.device
) -> list[torch.Tensor]:
    caller = Caller(module)
    out = []
    for prompt in prompts:
        ids = torch.tensor(prompt, device=device)
        every = torch.arange(len(prompt), device=device)
        out.append(caller(ids[None], every[None], every, use_cache=False)[0])
    return out


def _one_by_one(module: PreTrainedModel, prompt: Sequence[int], device: torch.device) -> torch.Tensor:
    ids = torch.tensor([prompt], device=device)
    return torch.cat([next_logits(module, ids[:, :count]) for count in range(1, len(prompt) + 1)])


def ragged(
    sequences: Sequence[tuple[Sequence[int], int, torch.Tensor, bool]],
    block_size: int,
    device: torch.device,
    state_slots: Sequence[int] = (),
) -> Ragged:
    """A batch from (token ids, start, block ids, logits wanted), single-token sequences put first.

    Args:
        state_slots: of each sequence's state; none given: there are no states.

    Returns:
        the order of its wanted logits is that of the reordered rows.
    """
    kept = state_slots or [-1] * len(sequences)
    ordered = sorted(zip(sequences, kept, strict=True), key=lambda s: len(s[0][0]) > 1)
    ids: list[int] = []
    positions: list[int] = []
    rows: list[Row] = []
    wanted: list[int] = []
    slots = []
    for (tokens, start, blocks, want), state_slot in ordered:
        rows.append(Row(len(ids), len(tokens), start, blocks, state_slot))
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
