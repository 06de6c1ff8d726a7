"""Recognises how queries, keys and values come from a layer's linears: which features, normed how, rotated
how. Knows nothing of the rest of the layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from shoal.fuse.common import UnrecognisedError, is_linear
from shoal.fuse.match import NormLook, find_columns, find_norm, is_close
from shoal.fuse.recipe import Attend, HeadNorm, Piece, Rotary
from shoal.fuse.record import AttentionCall, LayerCall, LayerRun, Noted, rows_of

__all__ = ["AttentionLook", "look_at_attention"]


@dataclass(frozen=True, slots=True)
class AttentionLook:
    """The step, and what it stands for."""

    attend: Attend
    pieces: tuple[Piece, ...]  # of queries, keys, values
    source: Noted  # one of the linears; all are given the same
    modules: frozenset[str]


class _Features(NamedTuple):
    """How one of query, key, value is made."""

    pieces: tuple[Piece, ...]
    norm: HeadNorm | None


def look_at_attention(
    run: LayerRun, rotated: AttentionCall, call: LayerCall, layer: nn.Module, source: str, out: str
) -> AttentionLook:
    """Explain the call of attention in a run.

    Args:
        run: with no rotation.
        rotated: the call in a run as the model makes it.
        call: of the latter.
        source, out: names of the values that the step reads and makes.

    Raises:
        UnrecognisedError: something is not explained.
    """
    plain = run.attention[0]
    before = run.noted[: plain.num_before]
    linears = [noted for noted in before if is_linear(noted.module)]
    found = {
        name: _features(before, linears, rows_of(getattr(plain, name), len(run.x)), name)
        for name in ("query", "key", "value")
    }
    if found["value"].norm is not None:
        raise UnrecognisedError("its values are normed")
    pieces = tuple(piece for features in found.values() for piece in features.pieces)
    by_name = {noted.name: noted for noted in linears}
    sources = [by_name[piece.module] for piece in pieces]
    if not all(is_close(noted.source, sources[0].source) for noted in sources[1:]):
        raise UnrecognisedError("queries, keys and values are made of different values")
    norms = [features.norm for features in found.values() if features.norm is not None]
    attend = Attend(
        out, source, plain.query.shape[1], plain.key.shape[1], plain.key.shape[2], plain.value.shape[2],
        rotated.variant, _rotary(plain, rotated, call), found["query"].norm, found["key"].norm,
        rotated.module, _sinks(layer, rotated.sinks),
    )  # fmt: skip
    modules = {piece.module for piece in pieces} | {norm.module for norm in norms}
    return AttentionLook(attend, pieces, sources[0], frozenset(modules))


def _features(
    before: Sequence[Noted], linears: Sequence[Noted], target: torch.Tensor, what: str
) -> _Features:
    """Of which linears' features ``target`` [T, N] consists, by way of a norm or not."""
    tokens = len(target)
    pieces = _pieces(target, linears, tokens)
    if pieces is not None:
        return _Features(pieces, None)
    for noted, look in _norms(before):
        if noted.out.numel() == target.numel() and is_close(rows_of(noted.out, tokens), target):
            pieces = _pieces(rows_of(noted.source, tokens), linears, tokens)
            if pieces is not None:
                return _Features(pieces, HeadNorm(
                    noted.name, look.width, look.is_centred, look.adds_one, look.has_weight, look.has_bias,
                    look.eps,
                ))  # fmt: skip
    raise UnrecognisedError(f"where its {what} comes from is not seen")


def _norms(before: Sequence[Noted]) -> Iterator[tuple[Noted, NormLook]]:
    for noted in before:
        if noted.is_leaf and not is_linear(noted.module):
            look = find_norm(noted.module, noted.source, noted.out)
            if look is not None:
                yield noted, look


def _pieces(target: torch.Tensor, linears: Sequence[Noted], tokens: int) -> tuple[Piece, ...] | None:
    """Runs of features of the same linear."""
    outs = [rows_of(noted.out, tokens) for noted in linears]
    found = find_columns(target, outs)
    if found is None:
        return None
    origin, rows, factors = found
    edges = [0, *((origin[1:] != origin[:-1]).nonzero().flatten() + 1).tolist(), len(origin)]
    return tuple(
        Piece(linears[int(origin[start])].name, rows[start:stop].clone(), factors[start:stop].clone())
        for start, stop in pairwise(edges)
    )


def _sinks(layer: nn.Module, sinks: torch.Tensor | None) -> str:
    if sinks is None:
        return ""
    for name, parameter in layer.named_parameters():
        if parameter.shape == sinks.shape and torch.equal(parameter, sinks):
            return name
    raise UnrecognisedError("its attention sinks are no parameter")


def _rotary(plain: AttentionCall, rotated: AttentionCall, call: LayerCall) -> Rotary | None:
    """How queries and keys differ from those at position 0."""
    if is_close(rotated.query, plain.query) and is_close(rotated.key, plain.key):
        return None
    if not call.tables:
        raise UnrecognisedError("it makes its rotary tables itself")
    first, second = (table[0].float() for table in call.kwargs[call.tables])
    cos, sin = (second, first) if call.is_sine_first else (first, second)
    for rotary in _possible(cos, plain.query.shape[2], call.is_sine_first):
        pairs = [(plain.query, rotated.query), (plain.key, rotated.key)]
        if all(is_close(_turned(before, cos, sin, rotary), after) for before, after in pairs):
            return rotary
    raise UnrecognisedError("its rotation of queries and keys is of no known kind")


def _possible(cos: torch.Tensor, width: int, is_sine_first: bool) -> Iterator[Rotary]:
    """Rotations that a table of that width may mean: an angle a pair, or each angle twice."""
    size = cos.shape[-1]
    half = size // 2
    if size <= width and size % 2 == 0:
        if torch.equal(cos[:, :half], cos[:, half:]):
            yield Rotary(size, False, 1, is_sine_first)
            yield Rotary(size, True, 1, is_sine_first)
        if torch.equal(cos[:, 0::2], cos[:, 1::2]):
            yield Rotary(size, True, 2, is_sine_first)
    if 2 * size <= width:
        yield Rotary(2 * size, False, 1, is_sine_first)
        yield Rotary(2 * size, True, 1, is_sine_first)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """[T, heads, width] rotated."""
    pairs = rotary.width // 2
    angle = torch.arange(pairs) * rotary.table_step
    c, s = cos[:, None, angle], sin[:, None, angle]
    first = torch.arange(pairs) * 2 if rotary.is_interleaved else torch.arange(pairs)
    second = first + 1 if rotary.is_interleaved else first + pairs
    a, b = x[..., first], x[..., second]
    out = x.clone()
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return out
