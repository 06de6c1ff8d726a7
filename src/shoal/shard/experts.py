"""A stack of experts of which a rank holds some, whole. Knows no plan and no model.

For modules that are handed every token's experts, ``(hidden_states [tokens, width], expert ids [tokens,
choices], weights [tokens, choices])``, and give the weighted sum, as transformers' experts do
(``use_experts_implementation`` in transformers/integrations/moe.py). A rank calls the module's own code
for the pairs of token and expert that are its own, as if each token had chosen one expert; so every
implementation serves, none needs to know of foreign experts, and these cost a row of zeros.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from shoal.errors import PlanError
from shoal.plan.types import Range
from shoal.shard.link import Link
from shoal.shard.mixing import Mixed, take_over

__all__ = ["DealtExperts", "deal_experts"]

_COUNT = "num_experts"  # transformers' code for stacks of experts reads the number of experts here


class DealtExperts(Mixed):
    """Experts some of which are elsewhere: what this rank's give, summed over ranks unless that is done
    later."""

    argument_names: tuple[str, ...]  # of the module's own forward
    local_ids: torch.Tensor  # [experts of all ranks]: the rank's own number, -1 for foreign ones
    sums_later: bool

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        states, ids, weights = self._arguments(args, kwargs)
        if self.local_ids.device != ids.device:
            self.local_ids = self.local_ids.to(ids.device)
        local = self.local_ids[ids.reshape(-1)]
        pairs = (local >= 0).nonzero().flatten()
        shares = states.new_zeros(ids.numel(), states.shape[-1])
        if len(pairs):
            own_states = states[pairs // ids.shape[-1]]
            own_weights = weights.reshape(-1)[pairs]
            shares[pairs] = super().forward(own_states, local[pairs, None], own_weights[:, None])
        result = shares.view(*ids.shape, states.shape[-1]).sum(1)
        return result if self.sums_later else self.comm.all_reduce(result)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        given = (*args, *(kwargs.get(name) for name in self.argument_names[len(args) :]))
        if len(given) == 3 and all(isinstance(value, torch.Tensor) for value in given):
            states, ids, weights = cast(tuple[torch.Tensor, ...], given)
            are_tables = ids.dim() == 2 and ids.shape == weights.shape and states.dim() == 2
            if are_tables and len(states) == len(ids) and not ids.is_floating_point():
                return states, ids, weights
        raise PlanError(
            f"{type(self).__name__} was not called with hidden states [tokens, width], expert ids and "
            "weights [tokens, choices]: its experts cannot be dealt whole; split them by neuron"
        )


def deal_experts(
    module: nn.Module, count: int, ranges: Sequence[Range], link: Link, sums_later: bool
) -> None:
    """Make a module whose stacks hold the rank's experts compute those only.

    Args:
        module: its parameters are cut already; is changed in place.
        count: experts of all ranks.
        ranges: this rank's, in the order of its stacks.
        link: the rank's end of the group.
        sums_later: leave the result partial; somebody else sums it.

    Raises:
        PlanError: the module is none that is handed every token's experts, or does not count them in
            ``num_experts``.
    """
    own = [expert for start, stop in ranges for expert in range(start, stop)]
    names = _argument_names(type(module))
    if len(names) != 3 or getattr(module, _COUNT, None) not in (count, len(own)):
        raise PlanError(
            f"{type(module).__name__}: experts can be dealt whole only where one module holds all as stacks, "
            "counts them in num_experts and takes hidden states, expert ids and weights; split them by neuron"
        )
    local_ids = torch.full((count,), -1, dtype=torch.long, device="cpu")
    local_ids[own] = torch.arange(len(own))
    attributes = {"argument_names": names, "local_ids": local_ids, "sums_later": sums_later}
    take_over(module, DealtExperts, link, **attributes)
    setattr(module, _COUNT, len(own))


def _argument_names(module_class: type[nn.Module]) -> tuple[str, ...]:
    """Names of the forward's arguments; empty if it takes any number of them."""
    parameters = list(inspect.signature(module_class.forward).parameters.values())[1:]
    if any(entry.kind in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD) for entry in parameters):
        return ()
    return tuple(entry.name for entry in parameters)
