"""A model's attention lands in our kernel, its new keys and values in the pages before that."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.attention.base import AttentionBatch, DecodeGroup, KVShape, LayerPages, PagedKernel, Variant
from shoal.attention.cpu import CpuPaged
from shoal.attention.hook import AttentionContext, attach, lent
from shoal.attention.pages import allocate
from shoal.attention.sdpa import paged_sdpa
from shoal.jit.team import Team
from support import families

VARIANT = Variant(0.25)


def heads(count: int, tokens: int) -> torch.Tensor:
    return torch.randn(tokens, count, 16)


def serve(kernel: PagedKernel, module: nn.Module) -> tuple[AttentionContext, LayerPages]:
    """A context that has measured ``module`` and holds pages of three blocks of two positions."""
    context = AttentionContext(kernel)
    context.attend(module, heads(4, 3), heads(2, 3), heads(2, 3), VARIANT, None)
    pages = allocate(context.shapes, 3, 2, torch.float32, torch.device("cpu"))
    context.pages = pages
    context.batch = AttentionBatch(torch.tensor([5]), DecodeGroup(torch.tensor([[2]]), torch.tensor([2])), [])
    return context, pages[0]


@pytest.mark.parametrize("ours", [False, True])
def test_new_keys_and_values_are_in_the_pages_when_the_kernel_computes(ours: bool) -> None:
    module, team = nn.Identity(), Team(1)
    context, pages = serve(CpuPaged(team) if ours else paged_sdpa, module)
    assert context.shapes == [KVShape(2, 16, 16)]
    query, key, value = heads(4, 1), heads(2, 1), heads(2, 1)
    pages.keys[2, 0], pages.values[2, 0] = torch.randn(2, 16), torch.randn(2, 16)
    got = context.attend(module, query, key, value, VARIANT, None)
    assert torch.equal(pages.keys[2, 1], key[0])
    assert torch.equal(pages.values[2, 1], value[0])
    for head in range(4):
        scores = pages.keys[2, :, head // 2] @ query[0, head] * 0.25
        torch.testing.assert_close(got[0, head], scores.softmax(0) @ pages.values[2, :, head // 2])
    team.close()


def test_a_kernel_that_writes_pages_itself_is_left_to_do_so() -> None:
    class Counting(CpuPaged):
        written = 0

        def write(
            self, pages: LayerPages, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
        ) -> None:
            self.written += len(slots)
            super().write(pages, keys, values, slots)

    team, module = Team(1), nn.Identity()
    kernel = Counting(team)
    context, _ = serve(kernel, module)
    assert kernel.written == 0, "nothing is written while a model is measured"
    context.attend(module, heads(4, 1), heads(2, 1), heads(2, 1), VARIANT, None)
    assert kernel.written == 1
    team.close()


def test_a_module_that_a_pass_calls_twice_is_two_layers() -> None:
    once, twice = nn.Identity(), nn.Identity()
    context = AttentionContext(paged_sdpa)

    def run(tokens: int) -> list[torch.Tensor]:
        """The keys of its calls in order."""
        found = [heads(2, tokens) for _ in range(3)]
        for module, keys in zip((twice, once, twice), found, strict=True):
            context.attend(module, heads(4, tokens), keys, keys, VARIANT, None)
        return found

    for _ in range(2):  # measuring again changes nothing
        context.batch = None
        run(3)
    assert (context.layers_of(twice), context.layers_of(once)) == ([0, 2], [1])
    context.pages = allocate(context.shapes, 3, 2, torch.float32, torch.device("cpu"))
    for slot in (4, 5):
        length = slot - 3
        groups = DecodeGroup(torch.tensor([[2]]), torch.tensor([length]))
        context.batch = AttentionBatch(torch.tensor([slot]), groups, [])
        for pages, keys in zip(context.pages, run(1), strict=True):
            assert torch.equal(pages.keys[2, length - 1], keys[0])


class Elsewhere:
    """Takes attention, and remembers of whom."""

    def __init__(self) -> None:
        self.asked: list[nn.Module] = []

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        variant: Variant,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        self.asked.append(module)
        return query


def test_a_part_of_a_model_is_lent_to_another_context_and_comes_back() -> None:
    model = families.build("llama")
    context = AttentionContext(paged_sdpa)
    attach(model, context)
    first, second = (layer.self_attn for layer in model.model.layers)
    elsewhere = Elsewhere()
    with torch.inference_mode(), pytest.raises(KeyError), lent(model.model.layers[0], elsewhere):
        model(input_ids=torch.arange(3)[None], use_cache=False)
        raise KeyError  # it comes back whatever happens
    assert elsewhere.asked == [first]
    assert context.modules == [second] and context.layers_of(second) == [0]
    context.batch = None
    with torch.inference_mode():
        model(input_ids=torch.arange(3)[None], use_cache=False)
    assert elsewhere.asked == [first]
    assert context.modules == [second, first], "in the order of their first calls"
