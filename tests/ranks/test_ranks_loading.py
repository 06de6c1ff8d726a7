"""Two ranks load the demo model with half the memory and half the reading that one takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.messages import RankReport
from shoal.worker.executor import ProcessExecutor
from support.loads import make_load

pytestmark = [pytest.mark.demo, pytest.mark.slow]

_BESIDE = 80 * 2**20  # bytes of what is read at a time, and of code and tables first used while loading


def reports(folder: Path, plans: Path, ranks: int) -> list[RankReport]:
    """What each of ``ranks`` processes says after loading."""
    executor = ProcessExecutor(make_load(folder, ranks, plans, dtype="float32"))
    try:
        return list(executor.load(lambda done, total: None))
    finally:
        executor.shutdown()


@pytest.fixture(scope="module")
def loaded(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[RankReport]]:
    plans = tmp_path_factory.mktemp("plans")
    return {ranks: reports(demo_path, plans, ranks) for ranks in (1, 2)}


def test_each_ranks_load_peak_is_under_65_percent_of_one_ranks(loaded: dict[int, list[RankReport]]) -> None:
    alone = loaded[1][0].peak_growth_bytes
    shares = [report.peak_growth_bytes / alone for report in loaded[2]]
    print("load peaks:", f"{alone / 1e6:.0f} MB alone,", [f"{share:.1%}" for share in shares])
    assert max(shares) < 0.65


def test_each_rank_reads_under_70_percent_of_the_file(
    loaded: dict[int, list[RankReport]], demo_path: Path
) -> None:
    size = (demo_path / "model.safetensors").stat().st_size
    shares = [report.bytes_read / size for report in loaded[2]]
    print("read of", f"{size / 1e6:.0f} MB:", [f"{share:.1%}" for share in shares])
    assert max(shares) < 0.70
    assert loaded[1][0].bytes_read <= size


def test_loading_holds_little_more_than_the_weights(loaded: dict[int, list[RankReport]]) -> None:
    """Tensors are read into their final memory: nothing is held twice."""
    for report in (*loaded[1], *loaded[2]):
        assert report.peak_growth_bytes < report.weight_bytes + _BESIDE
