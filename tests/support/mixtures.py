"""Small models whose blocks add results of several row-split weights, for the tests of late sums."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH, NEURONS, EXPERTS = 32, 24, 4


class Expert(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, NEURONS, bias=bias)
        self.w2 = nn.Linear(NEURONS, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.gelu(self.w1(x)))


class Mixture(nn.Module):
    """A list of experts beside one that all tokens share; gives the router's scores too."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(Expert(config.bias) for _ in range(EXPERTS))
        self.shared = Expert(config.bias) if config.shared else None
        self.term = nn.Parameter(torch.zeros(WIDTH)) if config.term else None
        self.norm = nn.LayerNorm(WIDTH) if config.norm else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = functional.softmax(self.router(x), -1)
        chosen = scores.topk(2, -1).indices
        flat, out = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
        for number, expert in enumerate(self.experts):
            rows = (chosen.flatten(0, 1) == number).any(-1).nonzero().flatten()
            if len(rows):
                weights = scores.flatten(0, 1)[rows, number, None]
                out = out.index_add(0, rows, expert(flat[rows]) * weights)
        out = out.view_as(x)
        if self.term is not None:
            out = out + self.term
        if self.shared is not None:
            out = out + self.shared(x)
        return (out if self.norm is None else self.norm(out)), scores


class Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.first = Expert(config.bias)
        self.mixture = Mixture(config)
        self.before = nn.LayerNorm(WIDTH)
        self.between = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(self.before(x))
        return x + self.mixture(self.between(x))[0]


class Model(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, WIDTH)
        self.layers = nn.ModuleList(Layer(config) for _ in range(2))
        self.head = nn.Linear(WIDTH, config.vocab_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def config_of(**changes: Any) -> Any:
    """bias of the experts; a shared expert; a term that the mixture adds; a norm around it all."""
    shape = {"bias": False, "shared": False, "term": False, "norm": False, "vocab_size": 101}
    return SimpleNamespace(**{**shape, **changes})
