"""The integers of a config, wherever they are: in itself, in configs inside it, in lists and mappings.

Knows no model. A setting is named by its path; values are changed in a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Path", "children", "integers", "vocabulary_size", "with_values"]

Path = tuple[str | int, ...]
"""Attributes, keys and positions that lead from a config to one of its values."""

_MOST_LISTED = 16  # longer lists have an entry per layer or per token, which are no widths

_VOCABULARIES = ("vocab_size", "src_vocab_size", "tgt_vocab_size", "decoder_vocab_size")


def integers(config: Any) -> Iterator[tuple[Path, int]]:
    """(path, value) of every integer, outer ones first; no truth values, and nothing private."""
    yield from _integers(config, ())


def _integers(holder: Any, path: Path) -> Iterator[tuple[Path, int]]:
    inner: list[tuple[Path, Any]] = []
    for key, value in _entries(holder):
        is_short_list = isinstance(value, (list, tuple)) and len(value) <= _MOST_LISTED
        if type(value) is int:
            yield (*path, key), value
        elif is_short_list or isinstance(value, Mapping) or _is_config(value):
            inner.append(((*path, key), value))
    for further, value in inner:
        yield from _integers(value, further)


def children(config: Any) -> Iterator[tuple[Path, Any]]:
    """(path, config) of a config and the configs inside it, outer ones first."""
    yield (), config
    for key, value in _entries(config):
        if _is_config(value):
            for path, inner in children(value):
                yield (key, *path), inner


def with_values(config: Any, values: Mapping[Path, int]) -> Any:
    """A copy of the config with other integers. Nothing is validated: the model's constructor will."""
    own = copy.deepcopy(config)
    for path, value in values.items():
        _put(own, path, value)
    return own


def vocabulary_size(config: Any) -> int | None:
    """The smallest vocabulary that token ids of the model come from; None if the config names none."""
    for _, inner in children(config):
        sizes = [vars(inner).get(name) for name in _VOCABULARIES]
        usable = [size for size in sizes if type(size) is int and size > 0]
        if usable:
            return min(usable)
    return None


def _entries(holder: Any) -> list[tuple[str | int, Any]]:
    if isinstance(holder, (list, tuple)):
        return list(enumerate(holder))
    pairs = holder.items() if isinstance(holder, Mapping) else vars(holder).items()
    return [(key, value) for key, value in pairs if isinstance(key, (str, int)) and not _is_private(key)]


def _is_private(key: str | int) -> bool:
    return isinstance(key, str) and key.startswith("_")


def _is_config(value: Any) -> bool:
    """Whether a value is a config of its own: it has attributes and says so as transformers' do."""
    return hasattr(value, "to_dict") and hasattr(value, "__dict__") and not isinstance(value, type)


def _put(holder: Any, path: Path, value: int) -> Any:
    """Set one value in place, and return the holder, which is another object where it is a tuple."""
    key, *rest = path
    if isinstance(holder, tuple):
        entries = list(holder)
        entries[int(key)] = _put(entries[int(key)], tuple(rest), value) if rest else value
        return tuple(entries)
    owner: Any = holder if isinstance(holder, (list, dict)) else vars(holder)
    owner[key] = _put(owner[key], tuple(rest), value) if rest else value
    return holder
