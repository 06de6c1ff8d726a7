"""A call's arguments as bytes, and back: tensors by value, or by number where the others have their own.

Anything that can be pickled can be an argument, classes of the program's own file included (cloudpickle).
Knows no process; devices are translated, so that what is on rank 0's device comes out on the receiver's.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import weakref
from collections.abc import Mapping
from typing import Any

import cloudpickle
import torch
from torch import nn

from shoal.parallel.parts import Handle, Journal, Part

__all__ = ["Known", "Pickler", "Unpickler", "pack", "tensor_view", "unpack"]

_REMEMBERED = 1 << 16  # bytes from which a tensor is not sent twice


class Known:
    """Plain tensors that the other ranks have, recognised by identity as long as they are unchanged.

    Results of earlier calls, which generation passes back (an encoder's output), and large arguments. Not
    those whose changes cannot be seen: made in inference mode, or sharing their memory with numpy.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._entries: dict[int, tuple[weakref.ref[torch.Tensor], int, Handle]] = {}
        self._unheard: list[int] = []

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The number the others know it by; None if they do not, or it has changed."""
        entry = self._entries.get(id(tensor))
        if entry is None or entry[0]() is not tensor:
            return None
        if not _is_traceable(tensor) or entry[1] != tensor._version:
            del self._entries[id(tensor)]
            return None
        return entry[2].number

    def add(self, tensor: torch.Tensor) -> int | None:
        """A number for a tensor from now on; None if it cannot be recognised again."""
        if not _is_traceable(tensor):
            return None
        key, entries = id(tensor), self._entries
        handle = self._journal.new_handle()

        def forget(gone: weakref.ref[torch.Tensor]) -> None:
            if key in entries and entries[key][0] is gone:
                del entries[key]

        entries[key] = (weakref.ref(tensor, forget), tensor._version, handle)
        self._unheard.append(key)
        return handle.number

    def settle(self, is_heard: bool) -> None:
        """Whether the others got what was added since the last time; if not, it is forgotten."""
        if not is_heard:
            for key in self._unheard:
                self._entries.pop(key, None)
        self._unheard = []


def _is_traceable(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return is_plain and not tensor.is_inference() and tensor.untyped_storage().resizable()


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes tensors as references, or by value."""

    def __init__(
        self, file: io.BytesIO, device: torch.device, known: Known | None, modules: Mapping[int, str]
    ):
        super().__init__(file, protocol=5)
        self._device = device
        self._known = known
        self._modules = modules
        self._sent: dict[int, tuple[torch.Tensor, int]] = {}  # by id; kept alive until all is packed

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Part):
            return ("own", value.handle.number)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.device):
            return ("device", str(value), _is_same(value, self._device))
        if isinstance(value, nn.Module) and id(value) in self._modules:
            return ("module", self._modules[id(value)])
        return None

    def _tensor(self, tensor: torch.Tensor) -> Any:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return None  # pickled by its own code
        number = None if self._known is None else self._known.number_of(tensor)
        if number is not None:
            return ("own", number)
        if id(tensor) in self._sent:
            return ("again", self._sent[id(tensor)][1])
        index = len(self._sent)
        self._sent[id(tensor)] = (tensor, index)
        if self._known is not None and tensor.nbytes >= _REMEMBERED:
            number = self._known.add(tensor)
        flat = tensor.detach().cpu().contiguous()
        # Not by numpy: sharing its memory even once, the tensor would count as one that changes unseen.
        values = ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.numel() else b""
        is_here = _is_same(tensor.device, self._device)
        return ("value", values, tensor.dtype, tuple(tensor.shape), is_here, index, number)


def _is_same(device: torch.device, other: torch.device) -> bool:
    return device.type == other.type and (device.index or 0) == (other.index or 0)


def tensor_view(tensor: torch.Tensor) -> memoryview:
    """A tensor's values, row by row; its own memory where that is possible (on the CPU, contiguous)."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    values: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(values)


def pack(
    message: Any,
    device: torch.device,
    known: Known | None = None,
    modules: Mapping[int, str] | None = None,
) -> bytes:
    """A message as bytes for the other ranks.

    Args:
        device: rank 0's, whose tensors come out on the receiver's.
        known: plain tensors the others have; large ones are added (and to be settled).
        modules: the model's modules by id, which travel by name.

    Raises:
        Exception: something in it cannot be pickled; the message is whatever its own code says.
    """
    file = io.BytesIO()
    Pickler(file, device, known, modules or {}).dump(message)
    return file.getvalue()


class Unpickler(pickle.Unpickler):
    """Reads what :class:`Pickler` wrote."""

    def __init__(
        self,
        file: io.BytesIO,
        device: torch.device,
        store: dict[int, torch.Tensor],
        modules: Mapping[str, nn.Module],
    ) -> None:
        super().__init__(file)
        self._device = device
        self._store = store
        self._modules = modules
        self._values: dict[int, torch.Tensor] = {}

    def persistent_load(self, name: Any) -> Any:
        match name:
            case ("own", number):
                return self._store[number]
            case ("again", index):
                return self._values[index]
            case ("device", text, is_ranks):
                return self._device if is_ranks else torch.device(text)
            case ("module", path):
                return self._modules[path]
            case ("value", data, dtype, shape, is_here, index, number):
                flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
                tensor = flat.reshape(shape).to(self._device if is_here else "cpu")
                self._values[index] = tensor
                if number is not None:
                    self._store[number] = tensor
                return tensor
        raise pickle.UnpicklingError(f"not a reference of ours: {name!r}")


def unpack(
    data: bytes | bytearray,
    device: torch.device,
    store: dict[int, torch.Tensor] | None = None,
    modules: Mapping[str, nn.Module] | None = None,
) -> Any:
    """The message in ``data``.

    Args:
        device: this rank's.
        store: this rank's tensors by number; those that are to be remembered are added.
        modules: the model's modules by name.
    """
    return Unpickler(io.BytesIO(data), device, {} if store is None else store, modules or {}).load()
