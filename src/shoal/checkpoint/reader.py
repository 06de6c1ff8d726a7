"""Reading parts of tensors out of a model folder. Knows files and names, no model and no plan.

Only the ranges asked for are touched. Files are mapped, and mapped pages count as this process's
memory until they are let go, so large tensors are read in pieces, and a file is closed and opened anew
after every few megabytes: reading adds nothing to a peak.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from shoal.checkpoint.files import find_weights
from shoal.checkpoint.pickles import is_old_pickle, load_pickle, rewritten
from shoal.errors import CheckpointError, ModelNotFoundError

__all__ = ["CheckpointReader", "Ranges", "Slice", "sliced_shape"]

Ranges = Mapping[int, Sequence[tuple[int, int]]]
"""By dimension: the (start, stop) ranges kept of it, in order; other dimensions are whole."""

_MAPPED_BYTES = 32 * 2**20

# safetensors' names of dtypes (its format description).
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip


class Slice(Protocol):
    """The part of a tensor one rank keeps: ranges along one dimension."""

    @property
    def dim(self) -> int: ...

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]: ...


def sliced_shape(shape: Sequence[int], ranges: Ranges) -> tuple[int, ...]:
    """The shape left of ``shape`` when only ``ranges`` are kept."""
    return tuple(
        sum(stop - start for start, stop in ranges[dim]) if dim in ranges else size
        for dim, size in enumerate(shape)
    )


class CheckpointReader:
    """The tensors of one model folder: ``model.safetensors`` or its shards, else ``pytorch_model.bin``.

    Raises:
        ModelNotFoundError: the folder has no weights.
        CheckpointError: a file is damaged, or a shard is missing; the message names it.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.bytes_read = 0  # of tensor data asked for
        found = find_weights(self.folder)
        if found is None:
            raise ModelNotFoundError(f"model: no weights (model.safetensors) in {self.folder}", field="model")
        self._files: dict[str, _File] = {}  # by tensor name
        if found.name.endswith(".index.json"):
            self._open_shards(found)
        else:
            file = _open(found)
            self._files = dict.fromkeys(file.names(), file)

    def _open_shards(self, index: Path) -> None:
        files: dict[str, _File] = {}
        for name, shard in _weight_map(index).items():
            if Path(shard).is_absolute() or ".." in Path(shard).parts:
                raise CheckpointError(f"{index}: the shard {shard!r} is outside its folder")
            path = index.parent / shard
            if shard not in files:
                if not path.is_file():
                    raise CheckpointError(f"{path}: this shard is missing, though {index.name} lists it")
                files[shard] = _open(path)
            if name not in files[shard].known:
                raise CheckpointError(f"{path}: no tensor {name!r} in it, though {index.name} says so")
            self._files[name] = files[shard]

    @property
    def total_bytes(self) -> int:
        """Bytes of the checkpoint's files."""
        return sum(file.path.stat().st_size for file in set(self._files.values()))

    def names(self) -> tuple[str, ...]:
        """Every tensor's name."""
        return tuple(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's whole shape."""
        return self._file(name).shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype a tensor is stored in."""
        return self._file(name).dtype(name)

    def read(self, name: str, part: Slice | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor, or ranges of it joined, in memory of its own.

        Args:
            name: the tensor's.
            part: what to keep; None: all.
            dtype: what to convert to; None: as stored.

        Raises:
            CheckpointError: no such tensor, a range outside it, or a damaged file.
        """
        shape = self.shape(name)
        ranges: Ranges = {} if part is None else {part.dim % max(len(shape), 1): part.ranges}
        _check_ranges(name, shape, ranges)
        out = torch.empty(sliced_shape(shape, ranges), dtype=dtype or self.dtype(name))
        self.read_into(name, ranges, out)
        return out

    def read_into(self, name: str, ranges: Ranges, out: torch.Tensor) -> None:
        """Copy ranges of a tensor into ``out``, which has :func:`sliced_shape`; converts dtype, moves device.

        Raises:
            CheckpointError: no such tensor, a range outside it, or a damaged file.
        """
        file, shape = self._file(name), self.shape(name)
        whole = {dim: ((0, size),) for dim, size in enumerate(shape)}
        _check_ranges(name, shape, ranges)
        kept = [_placed(ranges.get(dim, whole[dim])) for dim in range(len(shape))]
        if kept:
            row_bytes = self.dtype(name).itemsize * math.prod(sliced_shape(shape, ranges)[1:])
            kept[0] = list(_in_pieces(kept[0], max(1, _MAPPED_BYTES // max(row_bytes, 1))))
        for box in itertools.product(*kept):
            values = file.part(name, tuple(slice(start, stop) for start, stop, _ in box))
            out[tuple(slice(at, at + stop - start) for start, stop, at in box)].copy_(values)
            self.bytes_read += values.numel() * values.element_size()

    def are_one(self, first: str, second: str) -> bool:
        """Whether two names stand for the same bytes of a file: tied tensors in one pickle."""
        file = self._file(first)
        place = file.place(first)
        return place is not None and file is self._file(second) and place == file.place(second)

    def _file(self, name: str) -> _File:
        if name not in self._files:
            raise CheckpointError(f"{self.folder}: no tensor {name!r} in this checkpoint")
        return self._files[name]

    def close(self) -> None:
        """Let every file go."""
        for file in set(self._files.values()):
            file.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _weight_map(index: Path) -> dict[str, str]:
    """Which shard each tensor is in."""
    try:
        shards = json.loads(index.read_text())["weight_map"]
        return {str(name): str(shard) for name, shard in shards.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of shards ({error!r})") from error


def _check_ranges(name: str, shape: tuple[int, ...], ranges: Ranges) -> None:
    for dim, kept in ranges.items():
        if not 0 <= dim < len(shape) or any(not 0 <= a <= b <= shape[dim] for a, b in kept):
            raise CheckpointError(f"{name}: ranges {list(kept)} of dimension {dim} lie outside shape {shape}")


def _placed(kept: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Ranges with the offset each gets when they are put end to end: (start, stop, offset)."""
    offsets = itertools.accumulate((stop - start for start, stop in kept), initial=0)
    return [(start, stop, offset) for (start, stop), offset in zip(kept, offsets, strict=False)]


def _in_pieces(kept: Sequence[tuple[int, int, int]], most: int) -> Iterator[tuple[int, int, int]]:
    """The same placed ranges, none longer than ``most``."""
    for start, stop, at in kept:
        for begin in range(start, stop, most):
            yield begin, min(begin + most, stop), at + begin - start


def _open(path: Path) -> _File:
    if _is_pointer(path):
        raise CheckpointError(f"{path}: a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
    if path.suffix != ".bin":
        return _SafetensorsFile(path)
    return _SafetensorsFile(rewritten(path)) if is_old_pickle(path) else _TorchFile(path)


def _is_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(40).startswith(b"version https://git-lfs")


class _File(Protocol):
    """One file of tensors."""

    path: Path
    known: frozenset[str]

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def part(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """A view into the file, valid until the next call."""
        ...

    def place(self, name: str) -> tuple[int, ...] | None:
        """What two tensors have in common only if they are the same bytes; None: tensors never share any."""
        ...

    def close(self) -> None: ...


class _SafetensorsFile:
    """A safetensors file, mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes_mapped = 0
        self._handle: Any = None
        self._names = list(self._open().keys())
        self.known = frozenset(self._names)

    def _open(self) -> Any:
        if self._handle is None:
            try:
                self._handle = safe_open(self.path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.path}: damaged or incomplete ({error})") from error
        return self._handle

    def names(self) -> list[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open().get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        stored = self._open().get_slice(name).get_dtype()
        if stored not in _DTYPES:
            raise CheckpointError(f"{self.path}: {name} is stored as {stored}, which shoal does not read")
        return _DTYPES[stored]

    def part(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        if self._bytes_mapped > _MAPPED_BYTES:
            self.close()
        try:
            values: torch.Tensor = self._open().get_slice(name)[index or ...]
        except SafetensorError as error:
            raise CheckpointError(f"{self.path}: {name} cannot be read ({error})") from error
        self._bytes_mapped += values.numel() * values.element_size()
        return values

    def place(self, name: str) -> tuple[int, ...] | None:
        return None

    def close(self) -> None:
        self._handle, self._bytes_mapped = None, 0


class _TorchFile:
    """A pickle of torch's, mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes_mapped = 0
        self._tensors: dict[str, torch.Tensor] | None = None
        self.known = frozenset(self._load())

    def _load(self) -> dict[str, torch.Tensor]:
        if self._tensors is None:
            self._tensors = load_pickle(self.path, mapped=True)
        return self._tensors

    def names(self) -> list[str]:
        return list(self._load())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._load()[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._load()[name].dtype

    def part(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        if self._bytes_mapped > _MAPPED_BYTES:
            self.close()
        values = self._load()[name][index]
        self._bytes_mapped += values.numel() * values.element_size()
        return values

    def place(self, name: str) -> tuple[int, ...] | None:
        tensor = self._load()[name]
        return (tensor.data_ptr(), *tensor.shape, *tensor.stride(), tensor.element_size())

    def close(self) -> None:
        self._tensors, self._bytes_mapped = None, 0
