"""What a layer keeps between steps, and how many bytes that takes. Knows no block and no request.

There is one kind so far, full attention; a kind is added here together with the code that serves it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["FullAttention", "bytes_per_token"]


@dataclass(frozen=True, kw_only=True)
class FullAttention:
    """A layer that keeps the keys and the values of every position, on one rank.

    Key and value widths may differ (multi-head latent attention), and a rank may hold no head at all
    where there are fewer KV heads than ranks.
    """

    num_kv_heads: int  # this rank's
    key_dim: int  # per head
    value_dim: int  # per head
    itemsize: int  # bytes per stored number

    def __post_init__(self) -> None:
        assert self.num_kv_heads >= 0 and self.key_dim > 0 and self.value_dim > 0 and self.itemsize > 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes one position takes in this layer."""
        return self.num_kv_heads * (self.key_dim + self.value_dim) * self.itemsize


def bytes_per_token(layers: Iterable[FullAttention]) -> int:
    """Bytes one position takes in all ``layers`` of a rank."""
    return sum(layer.bytes_per_token for layer in layers)
