"""Memory in huge pages: tensors of their own, and no more than there is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shoal.device.huge import LINE_BYTES, HugeRegion, room


def test_tensors_lie_one_after_the_other_on_lines_of_their_own() -> None:
    sizes = [((3, 5), torch.float32), ((0, 4), torch.float32), ((7,), torch.bfloat16), ((2, 2), torch.uint8)]
    region = HugeRegion(sum(room(torch.empty(shape, dtype=dtype).nbytes) for shape, dtype in sizes))
    tensors = [region.take(shape, dtype) for shape, dtype in sizes]
    for number, (tensor, (shape, dtype)) in enumerate(zip(tensors, sizes, strict=True)):
        assert tensor.shape == shape and tensor.dtype == dtype and not tensor.any()
        assert not tensor.numel() or tensor.data_ptr() % LINE_BYTES == 0
        tensor.fill_(number + 1)
    assert all(bool((tensor == number + 1).all()) for number, tensor in enumerate(tensors))


def test_a_full_region_gives_no_more() -> None:
    region = HugeRegion(LINE_BYTES)
    region.take((16,), torch.float32)
    with pytest.raises(ValueError):
        region.take((1,), torch.float32)


_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not _SETTING.exists() or "[never]" in _SETTING.read_text(), reason="the system gives no huge pages"
)
def test_what_is_written_lies_in_huge_pages() -> None:
    tensor = HugeRegion(1 << 26).take((1 << 24,), torch.float32)
    tensor.fill_(1.0)
    start, found = tensor.data_ptr(), 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            low, high = (int(part, 16) for part in name.split("-"))
            inside = low <= start < high
        elif inside and name == "AnonHugePages:":
            found = 1024 * int(rest.split()[0])
    assert found > 0
