"""How rows are cut into blocks, and a product into the parts of a team."""

from __future__ import annotations

import numpy
import pytest

from shoal.cpu_kernels.product import even_block, share


@pytest.mark.parametrize("most", [6, 192])
def test_blocks_are_as_few_as_can_be_and_none_is_too_large(most: int) -> None:
    for total in range(1, 1000):
        size = even_block(total, most)
        assert 1 <= size <= most
        assert -(-total // size) == -(-total // most)


def test_a_little_more_than_one_block_becomes_two_of_one_size() -> None:
    assert even_block(8, 6) == 4
    assert even_block(200, 192) == 100


def test_of_nothing_a_block_is_one() -> None:
    assert even_block(0, 6) == 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 16])
def test_the_parts_of_a_team_cover_everything_once(count: int) -> None:
    for rows in (1, 12, 48, 200):
        for units in (1, 5, 36, 300):
            covered = numpy.zeros((rows, units), numpy.int64)
            for index in range(count):
                first_row, last_row, first, last = share(index, count, rows, units)
                covered[first_row:last_row, first:last] += 1
            assert (covered == 1).all()


def test_rows_are_shared_only_where_columns_are_too_few() -> None:
    assert share(0, 2, 200, 36) == (0, 200, 0, 18)
    assert share(15, 16, 8, 36) == (0, 8, 33, 36)
    assert share(15, 16, 200, 36) == (150, 200, 27, 36)
