"""Paged kernels by name: made, and compared with the reference before they serve. Knows no model.

Which of them is taken is :mod:`shoal.attention.resolve`'s matter. Kernels that are compiled are imported only
when they are made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.attention.base import (
    AttentionBatch,
    DecodeGroup,
    KVShape,
    LayerPages,
    PagedKernel,
    Prefill,
    Variant,
    WritesPages,
)
from shoal.attention.pages import allocate
from shoal.attention.resolve import CPU_PAGED
from shoal.attention.sdpa import paged_eager, paged_sdpa

__all__ = ["KernelMaker", "self_check"]

_REFERENCES: dict[str, PagedKernel] = {"sdpa": paged_sdpa, "eager": paged_eager}
_HEADS, _GROUP, _SHAPE = 2, 3, KVShape(2, 40, 72)  # widths of no whole number of any processor's vectors
_BLOCK_SIZE = 4
# (positions, new tokens): decodes of one key block and of two, prompts whole and in chunks
_SEQUENCES = ((1, 1), (9, 1), (150, 1), (7, 7), (140, 5))
_VARIANTS = (
    (Variant(0.2), False),
    (Variant(0.1, window=6, softcap=3.0), True),
    (Variant(0.2, is_causal=False), False),
    (Variant(0.1, window=20, is_causal=False), False),
)
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of results up to some 3


class KernelMaker:
    """Makes each kernel once.

    Args:
        dtype: of the model and its pages.
        num_threads: that a kernel of ours computes with.
        cores: one for each of them; None: wherever the system puts them.
    """

    def __init__(self, dtype: torch.dtype, num_threads: int, cores: Sequence[int] | None = None) -> None:
        self._dtype = dtype
        self._num_threads = num_threads
        self._cores = cores
        self._made = dict(_REFERENCES)

    def make(self, name: str) -> PagedKernel:
        """The kernel.

        Raises:
            LookupError: it has no form for paged KV in this build.
        """
        if name == CPU_PAGED and name not in self._made:
            from shoal.attention.cpu import CpuPaged
            from shoal.jit.team import Team

            self._made[name] = CpuPaged(Team(self._num_threads, self._cores))
        if name not in self._made:
            raise LookupError(name)
        return self._made[name]

    def problem(self, name: str) -> str | None:
        """Why the kernel cannot serve; None if it can. The references are right by definition."""
        try:
            kernel = self.make(name)
            return None if name in _REFERENCES else self_check(kernel, self._dtype)
        except LookupError:
            return "it has no form for paged KV in this build"
        except Exception as error:  # whatever a compiler makes of this machine: the next kernel is tried
            return f"{type(error).__name__}: {str(error)[:200]}"


@torch.inference_mode()
def self_check(kernel: PagedKernel, dtype: torch.dtype) -> str | None:
    """Compare a kernel on the CPU with the reference on random numbers.

    Args:
        dtype: of queries and pages. The reference computes on the same numbers in float32.

    Returns:
        what is wrong, or None.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    batch = _batch()
    tokens = len(batch.slots)
    pages = allocate(
        [_SHAPE], int(batch.slots.max()) // _BLOCK_SIZE + 1, _BLOCK_SIZE, dtype, torch.device("cpu")
    )[0]
    pages.keys.copy_(random(*pages.keys.shape))
    pages.values.copy_(random(*pages.values.shape))
    keys, values = random(tokens, _HEADS, _SHAPE.key_width), random(tokens, _HEADS, _SHAPE.value_width)
    if isinstance(kernel, WritesPages):
        kernel.write(pages, keys, values, batch.slots)
        flat = pages.keys.flatten(0, 1)[batch.slots], pages.values.flatten(0, 1)[batch.slots]
        if not (torch.equal(flat[0], keys) and torch.equal(flat[1], values)):
            return "it does not write the pages as the reference does"
    query, sinks = random(tokens, _HEADS * _GROUP, _SHAPE.key_width), random(_HEADS * _GROUP)
    exact = LayerPages(pages.keys.float(), pages.values.float())
    for variant, with_sinks in _VARIANTS:
        got = kernel(query, pages, batch, variant, sinks if with_sinks else None)
        want = paged_eager(query.float(), exact, batch, variant, sinks.float() if with_sinks else None)
        error = float((got.float() - want).abs().max())
        if not error <= _TOLERANCES.get(dtype, 1e-2):
            return f"it differs from the reference by {error:.1e} ({variant})"
    return None


def _batch() -> AttentionBatch:
    """:data:`_SEQUENCES` over blocks in reverse order; their new tokens' slots."""
    counts = [-(-length // _BLOCK_SIZE) for length, _ in _SEQUENCES]
    free = list(range(sum(counts)))
    tables = [torch.tensor([free.pop() for _ in range(count)]) for count in counts]
    slots: list[int] = []
    for table, (length, new) in zip(tables, _SEQUENCES, strict=True):
        at = torch.arange(length - new, length)
        slots += (table[at // _BLOCK_SIZE] * _BLOCK_SIZE + at % _BLOCK_SIZE).tolist()
    singles = sum(new == 1 for _, new in _SEQUENCES)
    block_table = torch.zeros(singles, max(counts[:singles]), dtype=torch.int64)
    for row, table in zip(block_table, tables[:singles], strict=True):
        row[: len(table)] = table
    lengths = torch.tensor([length for length, _ in _SEQUENCES[:singles]])
    prefills, start = [], singles
    for table, (length, new) in zip(tables[singles:], _SEQUENCES[singles:], strict=True):
        prefills.append(Prefill(start, start + new, table, length))
        start += new
    return AttentionBatch(torch.tensor(slots), DecodeGroup(block_table, lengths), prefills)
