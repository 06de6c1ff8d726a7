"""Noise is a function of (seed, branch, position, token id) alone, and it is good noise."""

from __future__ import annotations

import numpy as np
import pytest
import sampling_reference as reference
import torch

from shoal.sampling import noise

GOLDEN_KEYS = [(595752380, 956087953), (-337861422, 20463687)]


def keys(rows: list[tuple[int, int, int]]) -> torch.Tensor:
    return torch.tensor([noise.row_key(*row) for row in rows], dtype=torch.int32)


def uniforms(rows: list[tuple[int, int, int]], vocab: int) -> np.ndarray:
    """The uniforms behind the noise, float64 [rows, vocab]."""
    noisy = noise.exponential(keys(rows), torch.arange(vocab, dtype=torch.int32))
    return -np.expm1(-noisy.double().numpy())


def chi_square_z(observed: np.ndarray, expected: float) -> float:
    """The chi-square statistic as standard deviations from its mean (normal for many cells)."""
    degrees = observed.size - 1
    return float((((observed - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


SEEDS = [(seed, 0, 100) for seed in range(64)]
BRANCHES = [(7, branch, 100) for branch in range(64)]
POSITIONS = [(7, 0, position) for position in range(64)]
FAR = [(2**63 + 12345, 3, position * 1000) for position in range(64)]
FAMILIES = pytest.mark.parametrize(
    "rows", [SEEDS, BRANCHES, POSITIONS, FAR], ids=["seed", "branch", "pos", "far"]
)


def test_noise_equals_the_definition_in_plain_python() -> None:
    rows = [(0, 0, 0), (1, 0, 5), (-1, 2, 7), (2**64 - 1, 2, 7), (2**63, 1, 2**20)]
    ids = [0, 1, 2, 49151, 151935, 2**31 - 1]
    ours = noise.exponential(keys(rows), torch.tensor(ids, dtype=torch.int32)).double().numpy()
    exact = [[-np.log1p(-reference.uniform(*row, token)) for token in ids] for row in rows]
    np.testing.assert_allclose(ours, exact, rtol=1e-6)
    assert (ours[2] == ours[3]).all(), "a negative seed is its two's complement"


def test_keys_never_change_between_versions() -> None:
    """Replays and seeded requests rely on these exact bits."""
    assert noise.row_key(0, 0, 0) == GOLDEN_KEYS[0]
    assert noise.row_key(1234, 1, 77) == GOLDEN_KEYS[1]


def test_noise_of_a_token_does_not_depend_on_the_other_tokens_rows_or_their_order() -> None:
    every = torch.arange(5000, dtype=torch.int32)
    full = noise.exponential(keys(SEEDS), every)
    some = torch.randperm(5000, generator=torch.Generator().manual_seed(0))[:333]
    assert torch.equal(noise.exponential(keys(SEEDS), some.to(torch.int32)), full[:, some])
    per_row = torch.stack([some.roll(row) for row in range(64)])
    assert torch.equal(noise.exponential(keys(SEEDS), per_row.to(torch.int32)), full.gather(1, per_row))
    assert torch.equal(noise.exponential(keys(SEEDS[::-1]), every), full.flip(0))
    assert torch.equal(noise.exponential(keys(SEEDS[5:6]), every), full[5:6])


def test_noise_does_not_depend_on_the_thread_count() -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(noise.exponential(keys(SEEDS[:8]), torch.arange(50000, dtype=torch.int32)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@FAMILIES
def test_uniforms_fill_the_unit_interval_evenly(rows: list[tuple[int, int, int]]) -> None:
    values = uniforms(rows, 16384)
    for cells in (64, 1000):
        counts = np.histogram(values, bins=cells, range=(0, 1))[0]
        assert abs(chi_square_z(counts, values.size / cells)) < 5
    low = np.histogram(values * 2**10, bins=64, range=(0, 1))[0]  # the small end is what decides races
    assert abs(chi_square_z(low, values.size / 2**10 / 64)) < 5


@FAMILIES
def test_adjacent_rows_are_independent(rows: list[tuple[int, int, int]]) -> None:
    values = uniforms(rows, 16384)
    cells = np.floor(values * 16).astype(int)
    for lag in (1, 2, 32):
        joint = np.bincount((cells[:-lag] * 16 + cells[lag:]).ravel(), minlength=256)
        assert abs(chi_square_z(joint, joint.sum() / 256)) < 5
    correlation = np.corrcoef(values) - np.eye(len(rows))
    assert np.abs(correlation).max() < 5.5 / np.sqrt(values.shape[1])


@FAMILIES
def test_adjacent_tokens_are_independent(rows: list[tuple[int, int, int]]) -> None:
    cells = np.floor(uniforms(rows, 16384) * 16).astype(int)
    for lag in (1, 2, 64, 256):
        joint = np.bincount((cells[:, :-lag] * 16 + cells[:, lag:]).ravel(), minlength=256)
        assert abs(chi_square_z(joint, joint.sum() / 256)) < 5


def test_rows_do_not_repeat_each_other_shifted() -> None:
    """Keys enter by addition: no row may be another row moved along the vocabulary."""
    values = uniforms(SEEDS, 4096) - 0.5
    spectrum = np.fft.rfft(values, axis=1)
    for row in range(1, 64):
        cross = np.fft.irfft(spectrum[0] * spectrum[row].conj(), n=4096)
        assert np.abs(cross).max() < 6.5 * np.sqrt(4096) / 12


def test_every_bit_of_seed_branch_and_position_reaches_every_bit_of_the_key() -> None:
    def key_bits(row: tuple[int, int, int]) -> np.ndarray:
        first, second = noise.row_key(*row)
        return np.unpackbits(np.array([first, second], dtype=np.int32).view(np.uint8))

    flips = []
    for base in [(11 * i, i % 5, 37 * i) for i in range(40)]:
        for word, bits in ((0, 64), (1, 16), (2, 24)):
            for bit in range(bits):
                changed = list(base)
                changed[word] ^= 1 << bit
                flips.append(key_bits(base) ^ key_bits((changed[0], changed[1], changed[2])))
    share = np.mean(flips, axis=0)
    assert np.abs(share - 0.5).max() < 5 * 0.5 / np.sqrt(len(flips))


def test_noise_is_positive_finite_and_exponential() -> None:
    noisy = noise.exponential(keys(SEEDS), torch.arange(50000, dtype=torch.int32)).double()
    assert noisy.min() > 0 and noisy.max() < 16.7
    assert abs(noisy.mean() - 1) < 5 / noisy.numel() ** 0.5
    assert abs(noisy.var() - 1) < 5 * 8**0.5 / noisy.numel() ** 0.5


def test_a_uniform_that_rounds_to_one_gives_finite_noise() -> None:
    """Seed 613 gives token 18412 the uniform 1 - 14 / 2**31, found by search; float32 makes it 1."""
    assert reference.uniform(613, 0, 0, 18412) > 1 - 2.0**-27
    assert noise.exponential(keys([(613, 0, 0)]), torch.tensor([18412], dtype=torch.int32)).isfinite().all()
