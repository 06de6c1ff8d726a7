"""What a workload takes at least is arithmetic on shapes; shares are over what the machine was seen to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import MixtralConfig

from shoal.bench.cost import Ceiling, Cost, Traffic, cost_of
from shoal.bench.roof import Roof
from support import families

COST = Cost(
    body_parameters=100, head_parameters=10, unread_parameters=0, pair_flops=4, window=None
)  # small, so that sums can be done by hand


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_flops_of_a_prompt_are_those_that_torch_counts(family: str, families_path: Path) -> None:
    """Torch counts every pair of tokens, where only half of them are needed."""
    cost = cost_of(families.save(family, families_path))
    assert cost is not None
    length = 12
    model = families.build(family)
    model.set_attn_implementation("eager")  # torch does not count what the fused one does on a CPU
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(length)[None], logits_to_keep=1)
    masked = cost.pair_flops * length * (length - 1) // 2
    rotary = 2 * 16 * length  # at most: the angles of a tiny head, which are a product too
    assert cost.flops(length, 1) + masked == pytest.approx(counter.get_total_flops(), abs=rotary)


def test_a_model_of_experts_tells_no_cost(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    MixtralConfig(vocab_size=32, num_key_value_heads=1, **sizes).save_pretrained(tmp_path)
    assert cost_of(tmp_path) is None


def test_an_answer_costs_its_prompt_its_tokens_and_what_they_look_at() -> None:
    assert COST.flops(3, 1) == 2 * 100 * 3 + 2 * 10 + 4 * 6
    assert COST.flops(3, 3) == 2 * 100 * 5 + 2 * 10 * 3 + 4 * 15


def test_a_window_bounds_what_a_token_looks_at() -> None:
    windowed = Cost(100, 10, 0, 4, window=2)
    assert windowed.flops(5, 1) == 2 * 100 * 5 + 2 * 10 + 4 * (1 + 2 + 2 + 2 + 2)


def test_shares_are_of_what_the_machine_does_in_the_time() -> None:
    ceiling = Ceiling(COST, {2: Roof(threads=2, bytes_per_s=1000.0, flops=10_000.0)})
    traffic = Traffic(weight_bytes=440, kv_bytes_per_token=2, embedding_item_bytes=4)
    whole = ceiling.share(2, traffic, [(3, 3)], 1.0, None)
    assert whole.compute == pytest.approx(COST.flops(3, 3) / 10_000)
    assert whole.decode_bandwidth is None
    apart = ceiling.share(2, traffic, [(3, 3)], 2.0, 0.5)
    assert apart.first_token_compute == pytest.approx(COST.flops(3, 1) / 10_000 / 0.5)
    assert apart.decode_bandwidth == pytest.approx((440 + 2 * 4.5) / 1000 / 0.75)


def test_an_embedding_that_is_no_head_is_not_read() -> None:
    cost = Cost(100, 10, unread_parameters=10, pair_flops=4, window=None)
    assert Traffic(480, 2, 4).step_bytes(cost, 5) == 480 - 40 + 10
