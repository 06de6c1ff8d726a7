"""What serving a workload takes at least, by arithmetic on a model's shapes, and the share of the machine's
limits that a measured time comes to. Knows no engine and measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from shoal.bench.roof import Roof

__all__ = ["Ceiling", "Cost", "Share", "Traffic", "cost_of"]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a model computes."""

    body_parameters: int  # that every token is multiplied by
    head_parameters: int  # that tokens are multiplied by whose logits are wanted
    unread_parameters: int  # of embeddings that are no head: a few rows of them are read
    pair_flops: int  # of one token that looks at one other, in all layers
    window: int | None  # positions back that any layer sees at least; None: all

    def flops(self, prompt_tokens: int, output_tokens: int) -> int:
        """Operations for one answer; the last token of it is not fed back."""
        fed = prompt_tokens + output_tokens - 1
        seen = fed if self.window is None else min(fed, self.window)
        pairs = seen * (seen + 1) // 2 + (fed - seen) * seen
        return (
            2 * self.body_parameters * fed
            + 2 * self.head_parameters * output_tokens
            + self.pair_flops * pairs
        )


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes an engine holds, over all ranks."""

    weight_bytes: int
    kv_bytes_per_token: int
    embedding_item_bytes: int

    def step_bytes(self, cost: Cost, context: float) -> float:
        """Bytes that one decode step of one request reads with so many positions in view."""
        weights = self.weight_bytes - cost.unread_parameters * self.embedding_item_bytes
        return weights + self.kv_bytes_per_token * context


@dataclass(frozen=True, slots=True)
class Share:
    """Of the machine's limits, 0 to 1."""

    compute: float  # operations over what the machine does in the time
    first_token_compute: float | None = None  # the same of the time to the first token
    decode_bandwidth: float | None = None  # bytes that must be read a step, over what can be in the time

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The machine's limits for one model."""

    cost: Cost
    roofs: Mapping[int, Roof]  # by threads in all

    def share(
        self,
        threads: int,
        traffic: Traffic,
        requests: Sequence[tuple[int, int]],
        seconds: float,
        first_token_s: float | None,
    ) -> Share:
        """What a measured time comes to.

        Args:
            threads: in all.
            traffic: of the engine.
            requests: prompt and output tokens of each.
            seconds: for all of them.
            first_token_s: where they were told apart: for the first token of all.
        """
        roof = self.roofs[threads]
        compute = self._flops(requests) / (roof.flops * seconds)
        if first_token_s is None or len(requests) != 1:
            return Share(compute)
        ((prompt, output),) = requests
        first = self._flops([(prompt, 1)]) / (roof.flops * first_token_s)
        if output < 2 or seconds <= first_token_s:
            return Share(compute, first)
        step_s = (seconds - first_token_s) / (output - 1)
        num_bytes = traffic.step_bytes(self.cost, fmean((prompt + 1, prompt + output - 1)))
        return Share(compute, first, num_bytes / (roof.bytes_per_s * step_s))

    def _flops(self, requests: Sequence[tuple[int, int]]) -> int:
        return sum(self.cost.flops(prompt, output) for prompt, output in requests)


def cost_of(path: Path, trust_remote_code: bool = False) -> Cost | None:
    """The cost of a model's folder; None where shapes do not tell it (experts, convolutions, no heads).

    Raises:
        ModelNotFoundError: its config cannot be read.
        UnsupportedError: it is no decoder.
    """
    import torch
    from torch import nn

    from shoal.model.build import build_empty, causal_class, load_config

    config = load_config(path, trust_remote_code)
    text = config.get_text_config()
    module = build_empty(causal_class(config, path, trust_remote_code), config, torch.float32)
    head = module.get_output_embeddings()
    heads, layers = (getattr(text, name, None) for name in ("num_attention_heads", "num_hidden_layers"))
    parameters = list(module.parameters())
    if head is None or not heads or not layers or any(p.dim() > 2 for p in parameters):
        return None
    tables = {id(m.weight): m.weight.numel() for m in module.modules() if isinstance(m, nn.Embedding)}
    unread = sum(numel for key, numel in tables.items() if key != id(head.weight))
    matrices = {id(p): p.numel() for p in parameters if p.dim() == 2}
    body = sum(numel for key, numel in matrices.items() if key not in tables and key != id(head.weight))
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return Cost(
        body_parameters=body,
        head_parameters=head.weight.numel(),
        unread_parameters=unread,
        pair_flops=4 * layers * heads * width,
        window=getattr(text, "sliding_window", None),
    )
