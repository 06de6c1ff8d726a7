"""After a call, what the model keeps is a part; what it gives is an ordinary tensor that the others know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, LlamaConfig, StaticCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from shoal.errors import UsageError
from shoal.parallel.packing import Known
from shoal.parallel.parts import Journal, Part
from shoal.parallel.results import CallTensors, caches_in, count_tensors, empty_caches, refuse_foreign

NAMES = frozenset({"mems"})


def filled(heads: int = 2) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(2):
        cache.update(torch.randn(1, heads, 3, 4), torch.randn(1, heads, 3, 4), layer)
    return cache


class Rank0:
    def __init__(self) -> None:
        self.journal = Journal()
        self.known = Known(self.journal)

    def call(self, kwargs: dict[str, Any], function: Any) -> tuple[Any, list[tuple[int, int]], list[int]]:
        """Run a function as a call; its output, what is kept, and the numbers that only it held."""
        tensors = CallTensors(self.journal, self.known)
        args, kwargs = tensors.open(((), kwargs))
        exclusive = tensors.exclusive()
        output = function(**kwargs)
        expected = len(count_tensors(args, kwargs, output, NAMES))
        output, bound, count = tensors.keep(args, kwargs, output, NAMES)
        assert count == expected
        return output, bound, exclusive


def test_a_cache_becomes_parts_and_results_stay_ordinary() -> None:
    rank = Rank0()
    cache = DynamicCache()

    def forward(cache: DynamicCache) -> Any:
        for layer in range(2):
            keys, _ = cache.update(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), layer)
            assert type(keys) is torch.Tensor
        return BaseModelOutputWithPast(last_hidden_state=torch.ones(2))

    output, bound, _ = rank.call({"cache": cache}, forward)
    assert {type(layer.keys) for layer in cache.layers} == {Part}
    assert type(output.last_hidden_state) is torch.Tensor
    assert rank.known.number_of(output.last_hidden_state) is not None
    assert len(bound) == 5
    old = cache.layers[0].keys.handle.number
    _, bound, exclusive = rank.call({"cache": cache}, forward)
    assert old in exclusive and len(bound) == 5
    assert cache.layers[0].keys.shape[-2] == 6


def test_a_part_that_somebody_else_holds_is_not_the_calls_own() -> None:
    rank, cache = Rank0(), DynamicCache()
    rank.call({"cache": cache}, lambda cache: cache.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), 0))
    held = cache.layers[0].keys
    _, _, exclusive = rank.call({"cache": cache}, lambda cache: None)
    assert held.handle.number not in exclusive and cache.layers[0].values.handle.number in exclusive
    assert cache.layers[0].keys.handle is held.handle, "what was left alone keeps its number"


def test_state_in_a_plain_output_field_becomes_parts() -> None:
    output, _, _ = Rank0().call({}, lambda: {"mems": [torch.ones(2)], "hidden": (torch.ones(2),)})
    assert type(output["mems"][0]) is Part and type(output["hidden"][0]) is torch.Tensor


def test_after_a_failure_parts_are_parts_again() -> None:
    rank, cache = Rank0(), DynamicCache()
    rank.call({"cache": cache}, lambda cache: cache.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), 0))
    number = cache.layers[0].keys.handle.number
    tensors = CallTensors(rank.journal, rank.known)
    args, kwargs = tensors.open(((), {"cache": cache}))
    tensors.restore(args, kwargs)
    assert cache.layers[0].keys.handle.number == number


def test_another_models_parts_are_refused() -> None:
    cache = DynamicCache()
    Rank0().call(
        {"cache": cache}, lambda cache: cache.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), 0)
    )
    other = Rank0()
    with pytest.raises(UsageError, match="another parallel model"):
        CallTensors(other.journal, other.known).check({"cache": cache})


def test_a_whole_models_cache_is_refused_and_an_empty_one_is_not() -> None:
    for foreign in (filled(), EncoderDecoderCache(DynamicCache(), filled())):
        with pytest.raises(UsageError, match="before the model was parallelized"):
            refuse_foreign({"cache": foreign}, lambda tensor: isinstance(tensor, Part))
    refuse_foreign({"cache": DynamicCache()}, lambda tensor: False)


def test_a_static_cache_allocated_for_the_whole_model_is_allocated_anew() -> None:
    config = LlamaConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=4)
    cache = StaticCache(config=config, max_cache_len=8)
    cache.early_initialization(1, 4, 2, torch.float32, torch.device("cpu"))
    empty_caches({"cache": cache})
    cache.update(torch.ones(1, 3, 2, 2), torch.ones(1, 3, 2, 2), 0)
    assert cache.layers[0].keys.shape == (1, 3, 8, 2)


def test_caches_are_found_in_containers_and_in_each_other() -> None:
    inner, outer = DynamicCache(), DynamicCache()
    both = EncoderDecoderCache(inner, outer)
    assert caches_in(({"a": [both]}, 1)) == [both, inner, outer]
