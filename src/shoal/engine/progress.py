"""A progress bar where a caller wants one. Knows no request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["UseTqdm", "progress"]

UseTqdm = bool | Callable[..., Any]
"""vLLM's ``use_tqdm``: whether to show a bar, or what makes one (tqdm, or its like)."""


@contextmanager
def progress(
    use_tqdm: UseTqdm, total: int, what: str, tell: Callable[[int], None] | None = None
) -> Iterator[Callable[[int], None]]:
    """What is to be called with the number done so far; it draws the bar, and calls ``tell``."""
    tell = tell or (lambda done: None)
    if not use_tqdm:
        yield tell
        return
    with _maker(use_tqdm)(total=total, desc=what, dynamic_ncols=True) as bar:

        def both(done: int) -> None:
            bar.update(done - bar.n)
            tell(done)

        yield both


def _maker(use_tqdm: UseTqdm) -> Callable[..., Any]:
    if callable(use_tqdm):
        return use_tqdm
    from tqdm.auto import tqdm

    return tqdm  # type: ignore[no-any-return]
