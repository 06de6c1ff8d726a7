from __future__ import annotations

import pytest

from shoal.cache.spec import WindowSpec


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 12, 16, 17])
def test_the_arithmetic_is_that_of_positions_one_by_one(window: int, block_size: int) -> None:
    spec = WindowSpec(window=window, block_size=block_size, num_blocks=1)
    for position in range(60):
        seen = range(max(0, position - window + 1), position + 1)
        assert spec.first_block(position) == seen[0] // block_size
        if position % block_size == 0 and position >= window:
            assert spec.num_behind == position // block_size - seen[0] // block_size
    for num_tokens in range(1, 20):
        held = [
            (start + num_tokens - 1) // block_size - spec.first_block(start) + 1
            for start in range(window, 200)
        ]
        assert max(held) == spec.most_blocks(num_tokens)
    assert spec.most_blocks(2) <= -(-window // block_size) + 1


def test_what_is_wanted_holds_every_sequences_window_and_two_steps() -> None:
    spec = WindowSpec(window=16, block_size=4, num_blocks=23)
    assert spec.wanted(3, 8) == 3 * 5 + 4
    assert spec.holds(3, 16) and not spec.holds(4, 16)
