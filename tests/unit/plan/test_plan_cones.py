"""Which features reach which, on functions whose answer is known."""

from __future__ import annotations

import torch

from shoal.plan.cones import Consumer, measure
from shoal.plan.drive import Batch, Pass
from shoal.plan.probe import Call, Recording


def consumer_of(width: int, combine: object, *producers: int) -> Consumer | None:
    """Measure ``combine(*leaves)`` as the input of one linear."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(1, 4, size, generator=generator).requires_grad_(True) for size in producers]
    calls = [Call(f"p{number}.weight", "linear", (), leaf, 0, 0) for number, leaf in enumerate(leaves)]
    x = combine(*(leaf.clone() for leaf in leaves))  # type: ignore[operator]
    assert x.shape[-1] == width
    out = torch.randn(1, 4, 3, generator=generator).requires_grad_(True)
    calls.append(Call("c.weight", "linear", (x,), out, 0, 0))
    empty = torch.zeros(1, 1, dtype=torch.long)
    recording = Recording(Batch(empty, empty, empty, empty), calls, [Pass((out.sum(-1),))])
    flow = measure(recording)
    return flow.consumers[0] if flow.consumers else None


def blocks(consumer: Consumer, producer: str) -> list[tuple[int, int]]:
    cone = consumer.cones[producer]
    return list(zip(cone.block_size.tolist(), cone.block.tolist(), strict=True))


def test_neurons_reach_one_feature_each() -> None:
    consumer = consumer_of(6, lambda gate, up: gate.sigmoid() * up, 6, 6)
    assert consumer is not None
    assert blocks(consumer, "p0.weight") == [(1, feature) for feature in range(6)]
    assert blocks(consumer, "p1.weight") == [(1, feature) for feature in range(6)]


def test_a_fused_interleaved_projection_is_told_apart() -> None:
    """Features in the order (neuron, gate or up): each pair belongs to its neuron."""

    def combine(fused: torch.Tensor) -> torch.Tensor:
        gate, up = fused.unflatten(-1, (6, 2)).unbind(-1)
        return gate.sigmoid() * up

    consumer = consumer_of(6, combine, 12)
    assert consumer is not None
    assert blocks(consumer, "p0.weight") == [(1, feature // 2) for feature in range(12)]
    assert consumer.cones["p0.weight"].rows(2, 4).tolist() == [4, 5, 6, 7]


def attention(heads: int, groups: int, size: int) -> object:
    def combine(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = q.unflatten(-1, (heads, size)).transpose(1, 2)
        k = k.unflatten(-1, (heads // groups, size)).transpose(1, 2).repeat_interleave(groups, 1)
        v = v.unflatten(-1, (heads // groups, size)).transpose(1, 2).repeat_interleave(groups, 1)
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)

    return combine


def test_heads_and_kv_groups_are_blocks_of_their_sizes() -> None:
    """9 query heads over 3 KV heads of 8: what a value feature reaches is sparse."""
    consumer = consumer_of(72, attention(9, 3, 8), 72, 24, 24)
    assert consumer is not None
    assert blocks(consumer, "p0.weight") == [(8, feature // 8) for feature in range(72)]
    assert blocks(consumer, "p1.weight") == [(24, feature // 8) for feature in range(24)]
    assert blocks(consumer, "p2.weight") == [(24, feature // 8) for feature in range(24)]


def test_what_a_norm_mixes_is_no_consumer() -> None:
    assert consumer_of(8, lambda x: torch.nn.functional.layer_norm(x, (8,)), 8) is None


def test_a_nan_gradient_counts_as_reaching() -> None:
    """sqrt at zero, times zero: NaN everywhere, so nothing may be called independent."""

    def combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        poison = (b[..., :1] * 0).sqrt() * 0
        return a + poison

    consumer = consumer_of(4, combine, 4, 4)
    assert (
        consumer is None
        or "p1.weight" not in consumer.cones
        or not bool((consumer.cones["p1.weight"].block_size[:1] < 4).any())
    )


def test_features_that_reach_nothing_belong_to_every_rank() -> None:
    consumer = consumer_of(4, lambda a: a[..., :4] * 2, 6)
    assert consumer is not None
    assert consumer.cones["p0.weight"].reaches.tolist() == [True] * 4 + [False] * 2
    assert consumer.cones["p0.weight"].rows(0, 2).tolist() == [0, 1, 4, 5]
